"""What can go wrong with a request, each with the exit code that the command line gives it."""

from __future__ import annotations


class ClientError(Exception):
    """One line that says what happened."""

    exit_code = 1


class UnreachableError(ClientError):
    """Nothing answers at the address."""

    exit_code = 3


class ServerError(ClientError):
    """The server failed, or answered with what is not its protocol."""


class RefusedError(ClientError):
    """What was asked for cannot be served: a bad value, an unknown model or one that is not ready."""

    exit_code = 4


class OverloadedError(ClientError):
    """The server's queue is full, or the request waited past its timeout; trying again later may succeed."""

    exit_code = 5


class CancelledError(ClientError):
    """The request was cancelled."""

    exit_code = 6


# Words of Triton's and of the model's. A message may be all there is: an error inside a stream has no status, and over HTTP
# Triton gives every error that a model sends status 400, whatever its code.
_OVERLOADED = ("exceeds maximum queue size", "timeout expired", "passed while it waited")
_CANCELLED = ("cancelled",)
_FAILED = (
    "stub process",
    "traceback (most recent call last)",
    "the engine failed",
    "the request could not be read",
    "the server is shutting down",
)


def from_message(message: str, otherwise: type[ClientError] = RefusedError) -> ClientError:
    """The error that a server's message stands for; `otherwise` where its words do not tell."""
    line = one_line(message)
    lowered = line.lower()
    if any(words in lowered for words in _OVERLOADED):
        return OverloadedError(line)
    if any(words in lowered for words in _CANCELLED):
        return CancelledError(line)
    if any(words in lowered for words in _FAILED):
        return ServerError(line)
    return otherwise(line)


def one_line(message: str) -> str:
    """Without line breaks, and without the request's id that Triton puts first: ours has none that would help."""
    line = " ".join(message.split())
    return line.split("] ", 1)[1] if line.startswith("[request id: ") and "] " in line else line
