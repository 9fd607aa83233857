"""The parameters of config.pbtxt: what an operator chooses. This module is their only reader.

Each field's name is the parameter's key and its description the comment beside it. An unknown key fails the load and
names the nearest known one.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from llm_runtime.errors import ConfigError
from llm_runtime.manifest import EngineManifest

TRITON_KEYS = {"FORCE_CPU_ONLY_INPUT_TENSORS", "EXECUTION_ENV_PATH"}  # Triton's own, not ours


class Parameters(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    engine_dir: str = Field(min_length=1, description="folder made by build_engines; ${NAME} is taken from the environment")
    max_sequences: int = Field(32, ge=1, le=4096, description="sequences that generate at the same time")
    max_step_tokens: int = Field(512, ge=1, description="tokens of one step, prompt chunks and decode tokens together")
    prefill_chunk_tokens: int = Field(128, ge=1, description="prompt tokens of one step while other sequences decode")
    max_context: int = Field(0, ge=0, description="prompt and output of one sequence; 0: what engine and KV cache allow")
    kv_cache_memory_mb: int = Field(1024, ge=1, description="MiB of the KV page pool")
    prefix_caching: bool = Field(True, description="keep pages of finished prompts for later ones that start the same")
    default_max_tokens: int = Field(128, ge=1, description="max_tokens of a request that names none")
    max_deadline_ms: int = Field(600_000, ge=0, description="longest deadline_ms, and that of a request without one; 0: none")
    num_threads: int = Field(0, ge=0, description="threads of the ONNX Runtime executor; 0: one a core")
    matmul_accuracy: Literal["int8", "fp32"] = Field("int8", description="activations beside INT4 weights: int8 (fast) or fp32")
    attention: Literal["auto", "fused", "standard"] = Field("auto", description="auto: the fused kernel if it compiles")


def read_parameters(parameters: Mapping[str, Mapping[str, str]]) -> Parameters:
    """From the `parameters` of a Triton model configuration: {key: {"string_value": text}}.

    Raises ConfigError that names the key, its value and what is allowed.
    """
    texts = {key: entry["string_value"] for key, entry in parameters.items() if key not in TRITON_KEYS}
    known = list(Parameters.model_fields)
    for key in texts:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)[0]
            raise ConfigError(f"config.pbtxt: unknown parameter {key!r}; did you mean {near!r}?")
    try:
        return Parameters.model_validate({key: _expand(key, text) for key, text in texts.items()})
    except ValidationError as error:
        first = error.errors()[0]
        key = str(first["loc"][0])
        meaning = Parameters.model_fields[key].description
        got = f"got {texts[key]!r}" if key in texts else "not given"
        raise ConfigError(f"config.pbtxt: parameter {key!r} ({meaning}): {first['msg']}, {got}") from None


def _expand(key: str, text: str) -> str:
    def value(match: re.Match[str]) -> str:
        name = match.group(1)
        if name not in os.environ:
            raise ConfigError(f"config.pbtxt: parameter {key!r} is {text!r}, but the environment has no {name}; set {name}")
        return os.environ[name]

    return re.sub(r"\$\{(\w+)\}", value, text)


def resolve_engine_dir(parameters: Parameters, model_folder: Path) -> Path:
    """A relative engine_dir starts at the model's folder, so that a repository can be moved as a whole."""
    return (model_folder / parameters.engine_dir).resolve()


def size_cache(parameters: Parameters, manifest: EngineManifest) -> tuple[int, int]:
    """(pages in the pool, longest context in tokens). Raises ConfigError with the sizes and the knob to change."""
    size, page_size = manifest.page_bytes, manifest.limits.page_size
    num_pages = parameters.kv_cache_memory_mb * 2**20 // size
    capacity = num_pages * page_size
    if num_pages < 2:
        needed = -(-2 * size // 2**20)
        raise ConfigError(
            f"config.pbtxt: kv_cache_memory_mb {parameters.kv_cache_memory_mb} holds {num_pages} pages of {size} bytes; "
            f"at least 2 are needed: set it to {needed} or more"
        )
    limit = manifest.limits.max_context
    if parameters.max_context > limit:
        raise ConfigError(
            f"config.pbtxt: max_context {parameters.max_context} is over the engine's {limit}; set it to {limit} or less"
        )
    if parameters.max_context > capacity:
        needed = -(-parameters.max_context * size // page_size // 2**20)
        raise ConfigError(
            f"config.pbtxt: one sequence of max_context {parameters.max_context} tokens does not fit the KV cache of "
            f"{capacity} tokens; set kv_cache_memory_mb to {needed} or more, or max_context to {capacity} or less"
        )
    return num_pages, min(parameters.max_context or limit, capacity)
