"""The one place that knows the tensors: names, types and shapes of `llm`'s requests and responses."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tritonclient.grpc import InferInput, InferResult

from client.errors import RefusedError

_INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class GenerateRequest:
    """One prompt to continue. `sampling` holds what differs from the model's defaults, by the model's names.

    `priority` 1 is first, 0 the model's default. `timeout_ms` bounds the wait in the server's queue, `deadline_ms` the whole
    generation; 0: none of ours. Raises RefusedError for what no tensor can hold; what the model allows is the server's to say.
    """

    prompt: str
    max_tokens: int = 128
    stream: bool = True
    stop: tuple[str, ...] = ()
    cache_salt: str = ""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    priority: int = 0
    timeout_ms: int = 0
    deadline_ms: int = 0

    def __post_init__(self) -> None:
        if abs(self.max_tokens) > _INT32_MAX:  # the array would wrap around without a word
            raise RefusedError(f"max_tokens: got {self.max_tokens}; allowed: at most {_INT32_MAX}")
        if min(self.priority, self.timeout_ms, self.deadline_ms) < 0:
            raise RefusedError("priority, timeout_ms, deadline_ms: allowed: 0 or more")
        texts = [("prompt", self.prompt), ("cache_salt", self.cache_salt), *(("stop", word) for word in self.stop)]
        for name, text in texts:
            try:
                text.encode()
            except UnicodeEncodeError:
                raise RefusedError(f"{name}: got {text[:20]!r}; allowed: UTF-8 text") from None

    @property
    def timeout_us(self) -> int:
        """As Triton counts it."""
        return self.timeout_ms * 1000


# Outputs of a last response that are counts of the whole request, as Chunk and those who keep them call them.
COUNTS = ("num_input_tokens", "num_cached_tokens", "num_draft_tokens", "num_accepted_tokens")


@dataclass(frozen=True)
class Chunk:
    """What one response brought. Counts of the prompt come with the last chunk, which has a `finish_reason`."""

    text: str
    num_tokens: int
    finish_reason: str = ""
    num_input_tokens: int | None = None
    num_cached_tokens: int | None = None
    num_draft_tokens: int | None = None
    num_accepted_tokens: int | None = None


def sampling_json(request: GenerateRequest) -> str:
    """What is optional, as the value of `sampling_parameters`."""
    deadline = {"deadline_ms": request.deadline_ms} if request.deadline_ms else {}
    return json.dumps(dict(request.sampling) | deadline)


def to_grpc(request: GenerateRequest) -> list[InferInput]:
    """Inputs with a batch dimension of 1. Always the same set, whatever the request holds: the server's batcher puts only
    requests with equal sets of inputs into one batch, so what is optional travels inside `sampling_parameters`."""
    return [
        _input("text_input", "BYTES", [[request.prompt.encode()]]),
        _input("max_tokens", "INT32", [[request.max_tokens]]),
        _input("stream", "BOOL", [[request.stream]]),
        _input("stop_words", "BYTES", [[word.encode() for word in request.stop or ("",)]]),
        _input("cache_salt", "BYTES", [[request.cache_salt.encode()]]),
        _input("sampling_parameters", "BYTES", [[sampling_json(request).encode()]]),
    ]


def _input(name: str, kind: str, rows: list[list[Any]]) -> InferInput:
    dtype = {"BYTES": np.object_, "INT32": np.int32, "BOOL": np.bool_}[kind]
    array = np.array(rows, dtype)
    tensor = InferInput(name, list(array.shape), kind)
    tensor.set_data_from_numpy(array)
    return tensor


def to_http(request: GenerateRequest) -> dict[str, Any]:
    """The JSON body of /generate and /generate_stream."""
    body: dict[str, Any] = {
        "text_input": request.prompt,
        "max_tokens": request.max_tokens,
        "stream": request.stream,
        "stop_words": list(request.stop or ("",)),
        "cache_salt": request.cache_salt,
        "sampling_parameters": sampling_json(request),
    }
    parameters = {"priority": request.priority, "timeout": request.timeout_us}
    return body | {name: value for name, value in parameters.items() if value}


def from_grpc(result: InferResult) -> Chunk:
    """The chunk in one response of a gRPC stream."""
    outputs = {output.name: result.as_numpy(output.name) for output in result.get_response().outputs}
    return _chunk({name: array.reshape(-1).tolist() for name, array in outputs.items()})


def from_http(body: Mapping[str, Any]) -> Chunk:
    """The chunk in one event, or in the body of /generate. Over HTTP a tensor of one element is a plain value."""
    return _chunk({name: value if isinstance(value, list) else [value] for name, value in body.items()})


def _chunk(outputs: Mapping[str, list[Any]]) -> Chunk:
    def first(name: str) -> Any:
        values = outputs.get(name)
        value = values[0] if values else None
        return value.decode() if isinstance(value, bytes) else value

    return Chunk(
        text=first("text_output") or "",
        num_tokens=first("num_output_tokens") or 0,
        finish_reason=first("finish_reason") or "",
        **{name: first(name) for name in COUNTS},
    )
