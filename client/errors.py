"""What can go wrong with a request, each with the exit code that the command line gives it."""

from __future__ import annotations


class ClientError(Exception):
    """One line that says what happened."""

    exit_code = 1


class UnreachableError(ClientError):
    """Nothing answers at the address."""

    exit_code = 3


class RefusedError(ClientError):
    """The server refuses what was asked for: a bad value, an unknown model."""

    exit_code = 4


class OverloadedError(ClientError):
    """The server's queue is full, or the request waited past its timeout; trying again later may succeed."""

    exit_code = 5


class CancelledError(ClientError):
    """The request was cancelled."""

    exit_code = 6


# Triton's own words; a stream of gRPC responses carries no status beside the message.
_OVERLOADED = ("exceeds maximum queue size", "timeout expired", "timeout passed while it waited")
_CANCELLED = ("cancelled",)


def from_message(message: str) -> ClientError:
    """The error that a server's message stands for."""
    lowered = message.lower()
    if any(words in lowered for words in _OVERLOADED):
        return OverloadedError(message)
    if any(words in lowered for words in _CANCELLED):
        return CancelledError(message)
    return RefusedError(message)
