"""How a request reaches the server: gRPC or HTTP, behind one interface. An instance serves any number of requests at a time."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, Protocol

import grpc
import httpx
import tritonclient.grpc.aio as triton_grpc
from tritonclient.utils import InferenceServerException

from client import wire
from client.errors import (
    CancelledError,
    ClientError,
    OverloadedError,
    RefusedError,
    ServerError,
    UnreachableError,
    from_message,
    one_line,
)
from client.sse import EventParser

# A proxy of the environment could not find a server on this machine, and every local server would seem to be down.
_LOCAL_HOSTS = {"127.0.0.1", "localhost", "[::1]"}
DEFAULT_URLS = {"grpc": "127.0.0.1:8001", "http": "http://127.0.0.1:8000"}


class Transport(Protocol):
    """Carries requests to one model of one server."""

    def generate(self, request: wire.GenerateRequest) -> AsyncGenerator[wire.Chunk, None]:
        """The chunks of one request, the last with a finish reason. Closing the generator cancels the request.

        Raises ClientError.
        """
        ...

    async def close(self) -> None:
        """Close the connections; requests that still run are cancelled."""
        ...


class GrpcTransport:
    """`address` is host:port. One HTTP/2 connection carries all streams."""

    def __init__(self, address: str, model: str = "llm") -> None:
        self._address = address.removeprefix("http://").removeprefix("grpc://").rstrip("/")
        self._model = model
        direct = [("grpc.enable_http_proxy", 0)] if is_local(self._address) else []
        size = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
        self._client = triton_grpc.InferenceServerClient(self._address, channel_args=size + direct)

    async def generate(self, request: wire.GenerateRequest) -> AsyncGenerator[wire.Chunk, None]:
        """One stream a request: see Transport."""
        message = {
            "model_name": self._model,
            # Made before the stream: an error in the iterator that feeds it would look like a cancelled task.
            "inputs": wire.to_grpc(request),
            "priority": request.priority,
            "timeout": request.timeout_us or None,
        }
        # The header asks for errors with a status, which end the stream; an old server ignores it and sends messages alone.
        responses = self._client.stream_infer(_once(message), headers={"triton_grpc_error": "true"})
        try:
            async for result, error in responses:
                if error is not None:
                    raise from_message(error.message())
                # Until the server closes the stream, also after the last chunk: a cancel that meets a request at its very end
                # makes Triton 2.51 keep the model for ever, so that it is never unloaded.
                yield wire.from_grpc(result)
        except grpc.aio.AioRpcError as error:
            raise _grpc_error(self._address, error.code(), error.details() or "") from error
        except InferenceServerException as error:
            raise from_message(error.message(), ServerError) from error
        finally:
            responses.cancel()

    async def close(self) -> None:
        """See Transport."""
        await self._client.close()


def is_local(address: str) -> bool:
    """Whether host:port or a URL names this machine."""
    host_port = address.split("://")[-1].split("/")[0]
    return host_port in _LOCAL_HOSTS or host_port.rpartition(":")[0] in _LOCAL_HOSTS


async def _once(message: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    yield message


class HttpTransport:
    """`url` is http://host:port. `client` is for tests."""

    def __init__(self, url: str, model: str = "llm", client: httpx.AsyncClient | None = None) -> None:
        self._url = (url if "://" in url else f"http://{url}").rstrip("/")
        self._model = model
        # No limit on the wait for a token: how long that may take is the server's to say.
        self._client = client or httpx.AsyncClient(
            timeout=httpx.Timeout(10.0, read=None),
            limits=httpx.Limits(max_connections=None),
            trust_env=not is_local(self._url),
        )

    async def generate(self, request: wire.GenerateRequest) -> AsyncGenerator[wire.Chunk, None]:
        """One POST a request: see Transport."""
        path = "generate_stream" if request.stream else "generate"
        url = f"{self._url}/v2/models/{self._model}/{path}"
        try:
            async with self._client.stream("POST", url, json=wire.to_http(request)) as response:
                if response.status_code != 200:
                    raise _http_error(response.status_code, await response.aread())
                async for event in _events(response, request.stream):
                    if "error" in event:
                        raise from_message(str(event["error"]))
                    yield wire.from_http(event)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise UnreachableError(f"{self._url}: {one_line(str(error)) or type(error).__name__}") from error

    async def close(self) -> None:
        """See Transport."""
        await self._client.aclose()


def open_transport(protocol: str, url: str, model: str) -> Transport:
    """`url` "" is this machine. Raises RefusedError for a protocol other than grpc and http."""
    if protocol not in DEFAULT_URLS:
        raise RefusedError(f"protocol: got {protocol!r}; allowed: {' or '.join(DEFAULT_URLS)}")
    address = url or DEFAULT_URLS[protocol]
    return GrpcTransport(address, model) if protocol == "grpc" else HttpTransport(address, model)


async def _events(response: httpx.Response, stream: bool) -> AsyncIterator[dict[str, Any]]:
    if not stream:
        yield _parsed(await response.aread())
        return
    parser = EventParser()
    try:
        async for data in response.aiter_bytes():
            for event in parser.push(data):
                yield _parsed(event)
        for event in parser.finish():
            yield _parsed(event)
    except UnicodeDecodeError as error:
        raise ServerError(f"the server sent what is not UTF-8 text: {error}") from error


def _parsed(data: str | bytes) -> dict[str, Any]:
    try:
        event = json.loads(data)
    except ValueError:
        event = None
    if not isinstance(event, dict):
        raise ServerError(f"the server sent what is not a JSON object: {data[:100]!r}")
    return event


def _http_error(status: int, body: bytes) -> ClientError:
    """Triton says why in {"error": ...}, in a stream behind `data: `."""
    text = body.decode(errors="replace").strip().removeprefix("data: ")
    try:
        message = one_line(str(json.loads(text)["error"]))
    except (ValueError, KeyError, TypeError):
        message = one_line(f"HTTP status {status}: {text[:200]}")
    if status in (408, 429, 503, 504):
        return OverloadedError(message)
    if status == 499:
        return CancelledError(message)
    return from_message(message, RefusedError if 400 <= status < 500 else ServerError)


_GRPC_ERRORS: dict[grpc.StatusCode, type[ClientError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: RefusedError,
    grpc.StatusCode.NOT_FOUND: RefusedError,
    grpc.StatusCode.UNIMPLEMENTED: RefusedError,
    grpc.StatusCode.PERMISSION_DENIED: RefusedError,
    grpc.StatusCode.UNAUTHENTICATED: RefusedError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: OverloadedError,
    grpc.StatusCode.DEADLINE_EXCEEDED: OverloadedError,
    grpc.StatusCode.CANCELLED: CancelledError,
}


def _grpc_error(address: str, code: grpc.StatusCode, details: str) -> ClientError:
    if code is not grpc.StatusCode.UNAVAILABLE:
        kind = _GRPC_ERRORS.get(code, ServerError)
        return kind(one_line(details) or f"gRPC status {code.name}")
    # Both a server that is not there and Triton's refusals have this status.
    error = from_message(details, UnreachableError)
    return UnreachableError(f"{address}: {error}") if isinstance(error, UnreachableError) else error
