"""Recorded traffic: our own JSON lines, the Azure LLM inference traces, and Mooncake's.

Ours: {"at": seconds, "prompt_tokens": n, "output_tokens": n} and, where wanted, "prompt" (in place of prompt_tokens), "group",
"priority", "timeout_ms", "deadline_ms", "cache_salt".
Azure (github.com/Azure/AzurePublicDataset): CSV with the columns TIMESTAMP, ContextTokens, GeneratedTokens.
Mooncake (github.com/kvcache-ai/Mooncake): JSON lines with timestamp (milliseconds), input_length, output_length and hash_ids,
one for each 512 tokens: equal ids are equal text, so that prefix caching acts as it did.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from client.errors import RefusedError
from client.wire import GenerateRequest
from client.workload import FIXED_LENGTH, Planned, Workload, first_problem, words

MOONCAKE_BLOCK = 512
SEED = 0


class TraceLine(BaseModel):
    """One request of our own format."""

    model_config = ConfigDict(extra="forbid")

    at: float = Field(ge=0)
    prompt: str | None = None
    prompt_tokens: int | None = Field(None, ge=1)
    output_tokens: int = Field(ge=1)
    group: str = "default"
    priority: int = Field(0, ge=0)
    timeout_ms: int = Field(0, ge=0)
    deadline_ms: int = Field(0, ge=0)
    cache_salt: str = ""


class MooncakeLine(BaseModel):
    """One request of a Mooncake trace."""

    timestamp: float = Field(ge=0)
    input_length: int = Field(ge=1)
    output_length: int = Field(ge=1)
    hash_ids: list[int]


class AzureLine(BaseModel):
    """One request of an Azure trace."""

    TIMESTAMP: datetime
    ContextTokens: int = Field(ge=1)
    GeneratedTokens: int = Field(ge=0)


def is_trace(text: str) -> bool:
    """Whether the text is a trace rather than a workload file."""
    first = text.lstrip().split("\n", 1)[0]
    if first.startswith("TIMESTAMP,"):
        return True
    try:
        line = json.loads(first)
    except ValueError:
        return False
    return isinstance(line, dict) and bool({"at", "timestamp"} & set(line))


def read_trace(text: str, source: str) -> Workload:
    """The requests of a trace, the earliest at 0. Raises RefusedError that names the line and the field."""
    if text.lstrip().startswith("TIMESTAMP,"):
        name, planned = "Azure trace", list(_azure(text, source))
    elif "input_length" in text.lstrip().split("\n", 1)[0]:
        name, planned = "Mooncake trace", list(_mooncake(text, source))
    else:
        name, planned = "trace", list(_ours(text, source))
    if not planned:
        raise RefusedError(f"{source}: has no request with an output; allowed: at least one")
    planned.sort(key=lambda each: each.at or 0.0)
    start = planned[0].at or 0.0
    shifted = tuple(Planned(each.request, (each.at or 0.0) - start, each.group) for each in planned)
    return Workload(shifted, SEED, f"{name} {source}, {len(shifted)} requests")


def _json_lines(text: str, source: str) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except ValueError as error:
                raise RefusedError(f"{source}: line {number}: not JSON: {error}") from None


def _checked(kind: Any, values: Any, source: str, number: int) -> Any:
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise RefusedError(f"{source}: line {number}: {first_problem(error.errors())}") from None


def _ours(text: str, source: str) -> Iterator[Planned]:
    rng = np.random.default_rng(SEED)
    for number, values in _json_lines(text, source):
        line = _checked(TraceLine, values, source, number)
        if (line.prompt is None) == (line.prompt_tokens is None):
            raise RefusedError(f"{source}: line {number}: prompt, prompt_tokens: allowed: one of them")
        prompt = line.prompt if line.prompt is not None else " ".join(words(rng, line.prompt_tokens))
        limits = {name: getattr(line, name) for name in ("priority", "timeout_ms", "deadline_ms", "cache_salt")}
        yield Planned(_request(prompt, line.output_tokens, **limits), line.at, line.group)


def _mooncake(text: str, source: str) -> Iterator[Planned]:
    for number, values in _json_lines(text, source):
        line = _checked(MooncakeLine, values, source, number)
        blocks = [words(np.random.default_rng(hash_id % 2**63), MOONCAKE_BLOCK) for hash_id in line.hash_ids]
        own = [word for block in blocks for word in block][: line.input_length]
        rest = words(np.random.default_rng([SEED, number]), line.input_length - len(own))
        yield Planned(_request(" ".join([*own, *rest]), line.output_length), line.timestamp / 1e3)


def _azure(text: str, source: str) -> Iterator[Planned]:
    rng = np.random.default_rng(SEED)
    for number, values in enumerate(csv.DictReader(io.StringIO(text.lstrip())), 2):
        line = _checked(AzureLine, values, source, number)
        if line.GeneratedTokens:  # some have none, and nothing could be measured of them
            yield Planned(_request(" ".join(words(rng, line.ContextTokens)), line.GeneratedTokens), line.TIMESTAMP.timestamp())


def _request(prompt: str, output_tokens: int, **limits: Any) -> GenerateRequest:
    return GenerateRequest(prompt, output_tokens, sampling=FIXED_LENGTH, **limits)
