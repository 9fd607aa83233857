"""Triton's model repository API: a model's live configuration, and loading the model anew with another one."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import httpx
import tritonclient.grpc.aio as triton_grpc
from google.protobuf import json_format
from tritonclient.grpc import model_config_pb2
from tritonclient.utils import InferenceServerException

from client.errors import ClientError, RefusedError, ServerError, UnreachableError, one_line
from client.knobs import ModelConfig
from client.transport import is_local

CONFIG_SECONDS = 10.0
LOAD_SECONDS = 1800.0  # a large engine takes minutes to load
POLL_SECONDS = 0.1


class ControlModeError(RefusedError):
    """The server loads models only when it starts, or by itself."""


class ModelRepository:
    """One model of the server at `address` (host:port of gRPC)."""

    def __init__(self, address: str, model: str = "llm") -> None:
        self.model = model
        self._address = address.removeprefix("grpc://").rstrip("/")
        direct = [("grpc.enable_http_proxy", 0)] if is_local(self._address) else []
        self._client = triton_grpc.InferenceServerClient(self._address, channel_args=direct)

    async def config(self) -> ModelConfig:
        """The configuration that is served now. Raises ClientError."""
        try:
            response = await self._client.get_model_config(self.model, client_timeout=CONFIG_SECONDS)
        except InferenceServerException as error:
            raise self._error(error) from error
        return response.config

    async def load(self, config: ModelConfig) -> None:
        """Serve the model with this configuration; returns when it is loaded, at once where it is the one served already.
        Streams of the one before go on to their end. Raises RefusedError or ServerError with the server's reason (the one
        before then serves on), ControlModeError, UnreachableError."""
        text = json_format.MessageToJson(config, preserving_proto_field_name=True, indent=0)
        try:
            await self._client.load_model(self.model, config=text, client_timeout=LOAD_SECONDS)
        except InferenceServerException as error:
            raise self._error(error) from error

    async def unload(self) -> None:
        """Stop serving the model; its streams go on to their end."""
        try:
            await self._client.unload_model(self.model, client_timeout=LOAD_SECONDS)
        except InferenceServerException as error:
            raise self._error(error) from error

    async def is_ready(self) -> bool:
        """Whether the model takes requests. Raises UnreachableError."""
        try:
            return await self._client.is_model_ready(self.model, client_timeout=CONFIG_SECONDS)
        except InferenceServerException as error:
            raise self._error(error) from error

    async def wait_until_ready(self, seconds: float = 60.0) -> None:
        """Raises ServerError when it takes longer."""
        deadline = time.monotonic() + seconds
        while not await self.is_ready():
            if time.monotonic() > deadline:
                raise ServerError(f"model {self.model!r} is not ready {seconds:.0f} s after it was loaded")
            await asyncio.sleep(POLL_SECONDS)

    async def close(self) -> None:
        await self._client.close()

    def _error(self, error: InferenceServerException) -> ClientError:
        message, status = one_line(error.message() or ""), str(error.status())
        if "explicit model load" in message:
            return ControlModeError(
                "the server does not let models be loaded by request: start Triton with --model-control-mode=explicit "
                f"(and --load-model={self.model})"
            )
        if status.endswith(("UNAVAILABLE", "DEADLINE_EXCEEDED")):
            return UnreachableError(f"{self._address}: {message}")
        return RefusedError(_reason(message)) if status.endswith(("INVALID_ARGUMENT", "NOT_FOUND")) else ServerError(message)


def _reason(message: str) -> str:
    """Without Triton's words around a model's own, and without the traceback behind them."""
    return message.split("Internal: ", 1)[-1].split(" At: /", 1)[0].strip(" ;")


async def read_config(url: str, model: str = "llm") -> ModelConfig:
    """The live configuration from an HTTP endpoint (http://host:port) or a gRPC one (host:port). Raises ClientError."""
    if not url.startswith(("http://", "https://")):
        repository = ModelRepository(url, model)
        try:
            return await repository.config()
        finally:
            await repository.close()
    address = f"{url.rstrip('/')}/v2/models/{model}/config"
    async with httpx.AsyncClient(timeout=CONFIG_SECONDS, trust_env=not is_local(url)) as client:
        try:
            response = await client.get(address)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise UnreachableError(f"{url}: {one_line(str(error)) or type(error).__name__}") from error
    return _parsed(response.status_code, response.text, address)


def _parsed(status: int, text: str, address: str) -> ModelConfig:
    try:
        body: Any = json.loads(text)
        if status != 200:
            raise RefusedError(one_line(str(body["error"])))
        return json_format.ParseDict(body, model_config_pb2.ModelConfig(), ignore_unknown_fields=True)
    except (ValueError, KeyError, TypeError, json_format.ParseError):
        raise ServerError(f"{address}: HTTP status {status}, not a model's configuration; is it Triton's HTTP port?") from None
