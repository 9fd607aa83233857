"""How a request reaches the server: gRPC or HTTP, behind one interface. An instance serves any number of requests at a time."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any, Protocol

import grpc
import httpx
import tritonclient.grpc.aio as triton_grpc
from tritonclient.utils import InferenceServerException

from client import wire
from client.errors import ClientError, OverloadedError, RefusedError, UnreachableError, from_message
from client.sse import EventParser


class Transport(Protocol):
    def generate(self, request: wire.GenerateRequest) -> AsyncIterator[wire.Chunk]:
        """The chunks of one request, the last with a finish reason. Closing the iterator cancels the request.

        Raises ClientError.
        """
        ...

    async def close(self) -> None: ...


class GrpcTransport:
    """`address` is host:port. One HTTP/2 connection carries all streams."""

    def __init__(self, address: str, model: str = "llm") -> None:
        self._address = address
        self._model = model
        self._client = triton_grpc.InferenceServerClient(address)

    async def generate(self, request: wire.GenerateRequest) -> AsyncIterator[wire.Chunk]:
        responses = self._client.stream_infer(self._requests(request))
        try:
            async for result, error in responses:
                if error is not None:
                    raise from_message(_message(error))
                chunk = wire.from_grpc(result)
                yield chunk
                if chunk.finish_reason:
                    return
        except InferenceServerException as error:
            raise _grpc_error(self._address, error) from error
        except grpc.aio.AioRpcError as error:
            raise UnreachableError(f"{self._address}: {error.details()}") from error
        finally:
            responses.cancel()

    async def close(self) -> None:
        await self._client.close()

    async def _requests(self, request: wire.GenerateRequest) -> AsyncIterator[dict[str, Any]]:
        yield {
            "model_name": self._model,
            "inputs": wire.to_grpc(request),
            "priority": request.priority,
            "timeout": request.timeout_us or None,
        }


class HttpTransport:
    """`url` is http://host:port. `client` is for tests."""

    def __init__(self, url: str, model: str = "llm", client: httpx.AsyncClient | None = None) -> None:
        self._url = url.rstrip("/")
        self._model = model
        # No limit on the wait for a token: how long that may take is the server's to say.
        self._client = client or httpx.AsyncClient(
            timeout=httpx.Timeout(10.0, read=None), limits=httpx.Limits(max_connections=None)
        )

    async def generate(self, request: wire.GenerateRequest) -> AsyncIterator[wire.Chunk]:
        path = "generate_stream" if request.stream else "generate"
        url = f"{self._url}/v2/models/{self._model}/{path}"
        try:
            async with self._client.stream("POST", url, json=wire.to_http(request)) as response:
                if response.status_code != 200:
                    raise _http_error(response.status_code, await response.aread())
                async for event in _events(response, request.stream):
                    if "error" in event:
                        raise from_message(event["error"])
                    yield wire.from_http(event)
        except httpx.HTTPError as error:
            raise UnreachableError(f"{self._url}: {str(error) or type(error).__name__}") from error

    async def close(self) -> None:
        await self._client.aclose()


async def _events(response: httpx.Response, stream: bool) -> AsyncIterator[dict[str, Any]]:
    if not stream:
        yield json.loads(await response.aread())
        return
    parser = EventParser()
    async for data in response.aiter_bytes():
        for event in parser.push(data):
            yield json.loads(event)
    for event in parser.finish():
        yield json.loads(event)


def _http_error(status: int, body: bytes) -> ClientError:
    """Triton says why in {"error": ...}, in a stream behind `data: `."""
    text = body.decode(errors="replace").strip().removeprefix("data: ")
    try:
        message = json.loads(text)["error"]
    except (ValueError, KeyError, TypeError):
        message = f"HTTP status {status}: {text[:200]}"
    kind = {400: RefusedError, 404: RefusedError, 503: OverloadedError}.get(status)
    return kind(message) if kind else from_message(message)


def _grpc_error(address: str, error: InferenceServerException) -> ClientError:
    if error.status() == "StatusCode.UNAVAILABLE":
        return UnreachableError(f"{address}: {_message(error)}")
    return from_message(_message(error))


def _message(error: InferenceServerException) -> str:
    """Triton puts the request's id before its message; ours has none that would help."""
    text = error.message() or str(error)
    return text.split("] ", 1)[1] if text.startswith("[request id: ") and "] " in text else text
