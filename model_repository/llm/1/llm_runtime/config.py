"""The parameters of config.pbtxt: what an operator chooses. This module is their only reader.

Each field's name is the parameter's key and its description the comment beside it. An unknown key fails the load and
names the nearest known one.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from llm_runtime.errors import ConfigError
from llm_runtime.manifest import EngineManifest
from llm_runtime.page_pool import PageGroup

TRITON_KEYS = {"FORCE_CPU_ONLY_INPUT_TENSORS", "EXECUTION_ENV_PATH"}  # Triton's own, not ours


class PinnedPrefix(BaseModel):
    """A text that prompts start with, and the salt of the requests that may find it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    text: str = Field(min_length=1)
    cache_salt: str = ""


def _read_prefixes(value: Any) -> Any:
    """JSON text; a string in the list stands for a prefix without a salt."""
    values = json.loads(value or "[]") if isinstance(value, str) else value
    if not isinstance(values, list | tuple):
        raise ValueError("a list is needed")
    return [{"text": each} if isinstance(each, str) else each for each in values]


class Parameters(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    engine_dir: str = Field(min_length=1, description="folder made by build_engines; ${NAME} is taken from the environment")
    max_sequences: int = Field(32, ge=1, le=4096, description="sequences that generate at the same time")
    max_step_tokens: int = Field(512, ge=1, description="tokens of one step, prompt chunks and decode tokens together")
    prefill_chunk_tokens: int = Field(128, ge=1, description="prompt tokens of one step while other sequences decode")
    max_context: int = Field(0, ge=0, description="prompt and output of one sequence; 0: what engine and KV cache allow")
    kv_cache_memory_mb: int = Field(1024, ge=1, description="MiB of the KV page pool")
    kv_cache_gpu_fraction: float = Field(
        0.0, ge=0, lt=1, description="part of the GPU memory left beside the engine for the KV page pool; 0: kv_cache_memory_mb"
    )
    kv_cache: Literal["paged", "static"] = Field(
        "paged",
        description="paged: pages as a sequence grows; static: a region of max_context tokens for each of max_sequences",
    )
    kv_cache_dtype: Literal["auto", "int8", "fp8"] = Field(
        "auto", description="what KV pages hold; auto: as the engine was built; int8, fp8: a quarter of fp32's memory, rounded"
    )
    prefix_caching: bool = Field(True, description="keep pages of finished prompts for later ones that start the same")
    pinned_prefixes: Annotated[tuple[PinnedPrefix, ...], BeforeValidator(_read_prefixes)] = Field(
        (), description='JSON list of texts, or of {"text": ..., "cache_salt": ...}, computed at load and kept'
    )
    speculation: Literal["off", "ngram", "draft"] = Field(
        "off", description="guess tokens ahead: ngram from the sequence's own text, draft by the engine in draft_engine_dir"
    )
    draft_engine_dir: str = Field("", description="folder of a smaller engine with the same tokenizer")
    max_draft_tokens: int = Field(8, ge=1, le=64, description="tokens guessed ahead for a sequence in a step, at most")
    default_max_tokens: int = Field(128, ge=1, description="max_tokens of a request that names none")
    max_deadline_ms: int = Field(600_000, ge=0, description="longest deadline_ms, and that of a request without one; 0: none")
    num_threads: int = Field(0, ge=0, description="threads of the ONNX Runtime executor; 0: one a core")
    matmul_accuracy: Literal["int8", "fp32"] = Field("int8", description="activations beside INT4 weights: int8 (fast) or fp32")
    attention: Literal["auto", "fused", "standard"] = Field("auto", description="auto: the fused kernel if it compiles")
    cuda_graphs: bool = Field(True, description="replay decode steps on a GPU as CUDA graphs")


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


def with_chosen_cache(parameters: Parameters, manifest: EngineManifest) -> EngineManifest:
    """The engine with the pages that `kv_cache_dtype` asks for. Raises ConfigError where it cannot have them."""
    wanted = parameters.kv_cache_dtype
    if wanted == "auto" or manifest.precision.kv_cache == wanted:
        return manifest
    if manifest.runtime != "onnxruntime":
        raise ConfigError(
            f"config.pbtxt: kv_cache_dtype {wanted}: {manifest.name} keeps {manifest.precision.kv_cache}, which is in its "
            "plan; set auto, or build with --kv-cache fp8"
        )
    if parameters.attention == "standard":
        raise ConfigError(f"config.pbtxt: kv_cache_dtype {wanted} needs the fused kernel; set attention auto or fused")
    return manifest.with_kv_cache(wanted)


def resolve_engine_dir(engine_dir: str, model_folder: Path) -> Path:
    """A relative one starts at the model's folder, so that a repository can be moved as a whole."""
    return (model_folder / engine_dir).resolve()


@dataclass(frozen=True)
class GpuMemory:
    """Bytes that are free once an engine is loaded, and how many of them must stay free beside the KV page pool."""

    free: int
    beside_pool: int


def size_pool(
    parameters: Parameters, manifest: EngineManifest, gpu: GpuMemory | None = None, draft: EngineManifest | None = None
) -> tuple[PageGroup, ...]:
    """Groups of the KV pool's pages; `gpu` where the engine runs on one, `draft` where another has as many pages beside it.
    Raises ConfigError with the sizes and the knob to change."""
    engines = [manifest, draft] if draft else [manifest]
    size = sum(engine.page_bytes for engine in engines)
    knob, value, num_pages = _chosen_pages(parameters, manifest, size, gpu)
    if gpu is not None:
        _check_gpu(knob, value, num_pages, manifest, gpu)
    if num_pages < 2:
        needed = f"set it to {_mib(2 * size)} or more" if knob == "kv_cache_memory_mb" else "set it higher"
        raise ConfigError(
            f"config.pbtxt: {knob} {value} holds {num_pages} pages of {size} bytes; at least 2 are needed: {needed}"
        )
    groups = _page_groups(parameters, engines, num_pages, is_on_gpu=gpu is not None)
    longest_context(parameters, manifest, groups)
    return groups


def longest_context(
    parameters: Parameters, manifest: EngineManifest, groups: Sequence[PageGroup], pinned: Sequence[int] | None = None
) -> int:
    """Tokens of the longest sequence beside so many pinned pages of each group. Raises ConfigError with the sizes and the knob
    to change."""
    page_size, limit = manifest.limits.page_size, manifest.limits.max_context
    sharers = parameters.max_sequences if parameters.kv_cache == "static" else 1  # of the pool, each with a part of its own
    pinned = pinned or [0] * len(groups)
    left = [replace(group, num_pages=(group.num_pages - n) // sharers) for group, n in zip(groups, pinned, strict=True)]
    contexts = [group.max_context(page_size) for group in left]
    capacity = min([limit, *(context for context in contexts if context is not None)])
    if parameters.max_context > limit:
        raise ConfigError(
            f"config.pbtxt: max_context {parameters.max_context} is over the engine's {limit}; set it to {limit} or less"
        )
    if parameters.max_context > capacity:
        num_needed = max(pinned) + sharers * -(-parameters.max_context // page_size)
        needed = f"kv_cache_memory_mb to {_mib(num_needed * manifest.page_bytes)} or more"
        if parameters.kv_cache_gpu_fraction:
            needed = f"kv_cache_gpu_fraction higher than {parameters.kv_cache_gpu_fraction:g}"
        raise ConfigError(
            f"config.pbtxt: one sequence of max_context {parameters.max_context} tokens does not fit the KV cache of "
            f"{capacity} tokens{' a sequence' if sharers > 1 else ''}; set {needed}, or max_context to {capacity} or less"
        )
    if not capacity:
        raise ConfigError(
            f"config.pbtxt: kv_cache static has {groups[0].num_pages} pages for max_sequences {sharers}; at least one each is "
            f"needed: set kv_cache_memory_mb to {_mib(sharers * manifest.page_bytes)} or more, or max_sequences lower"
        )
    return min(parameters.max_context or limit, capacity)


def _page_groups(
    parameters: Parameters, engines: Sequence[EngineManifest], num_pages: int, *, is_on_gpu: bool
) -> tuple[PageGroup, ...]:
    """How the memory of so many pages of all layers is shared out.

    Pages of layers with a window are used again as it moves on, so there need be no more of them than the running sequences
    have at once. Not less than a quarter of the memory, though: what a prefix has there must stay for it to be a hit.
    """
    windows = [_windows_by_table(engine) for engine in engines]
    if parameters.kv_cache == "static" or any([bool(w) for w in each] != [bool(w) for w in windows[0]] for each in windows):
        return (PageGroup(num_pages),)
    first, *others = (max(of_table) for of_table in zip(*windows, strict=True))
    if not others or is_on_gpu:
        return (PageGroup(num_pages, first),)
    page_size = engines[0].limits.page_size
    sizes = [sum(len(engine.layer_groups[i]) * engine.layer_page_bytes for engine in engines) for i in range(2)]
    window = PageGroup(num_pages, others[0])
    guesses = parameters.max_draft_tokens if parameters.speculation != "off" else 0
    at_once = (parameters.max_sequences + len(parameters.pinned_prefixes)) * (window.pages_at_once(1 + guesses, page_size) + 1)
    needed = at_once + -(-parameters.max_step_tokens // page_size)
    memory = num_pages * sum(sizes)
    num_window = min(num_pages, max(needed, memory // 4 // sizes[1]))
    return PageGroup((memory - num_window * sizes[1]) // sizes[0]), replace(window, num_pages=num_window)


def _windows_by_table(manifest: EngineManifest) -> list[int]:
    """For each page table that the engine reads, the longest window of its layers; 0 where one attends to all."""
    windows = manifest.model.layer_windows
    return [max(windows[i] for i in layers) if all(windows[i] for i in layers) else 0 for layers in manifest.layer_groups]


def check_draft(target: EngineManifest, draft: EngineManifest) -> None:
    """Raises ConfigError where the one cannot guess for the other."""
    for name, own, wanted in (
        ("a vocabulary of", draft.model.vocab_size, target.model.vocab_size),
        ("pages of", draft.limits.page_size, target.limits.page_size),
        ("the runtime", draft.runtime, "onnxruntime"),
        ("to guess for the runtime", target.runtime, "onnxruntime"),
    ):
        if own != wanted:
            raise ConfigError(f"config.pbtxt: draft_engine_dir: {draft.name} has {name} {own}; {wanted} is needed")
    if draft.limits.max_context < target.limits.max_context:
        raise ConfigError(
            f"config.pbtxt: draft_engine_dir: {draft.name} has a context of {draft.limits.max_context}; "
            f"{target.limits.max_context} or more is needed"
        )


def check_prefixes(parameters: Parameters, lengths: Sequence[int], page_size: int, groups: Sequence[PageGroup]) -> list[int]:
    """Pages of each group that the pinned prefixes, of so many tokens each, take for good. Raises ConfigError where they leave
    too few."""
    if lengths and not (parameters.prefix_caching and parameters.kv_cache == "paged"):
        raise ConfigError("config.pbtxt: pinned_prefixes need prefix_caching true and kv_cache paged")
    for index, length in enumerate(lengths):
        if length < page_size:
            raise ConfigError(
                f"config.pbtxt: pinned_prefixes[{index}] has {length} tokens; only whole pages, of {page_size} tokens, are kept"
            )
    num_pages = [length // page_size for length in lengths]
    taken = [sum(n - group.first_page(n * page_size, page_size) for n in num_pages) for group in groups]
    for pinned, group in zip(taken, groups, strict=True):
        if 2 * pinned > group.num_pages:
            raise ConfigError(
                f"config.pbtxt: pinned_prefixes take {pinned} of the KV cache's {group.num_pages} pages; allowed: half of "
                "them; set kv_cache_memory_mb higher, or pin less"
            )
    return taken


def size_cache(parameters: Parameters, manifest: EngineManifest) -> tuple[tuple[PageGroup, ...], int]:
    """Of an engine on a CPU: (its groups of pages, longest context in tokens). Raises ConfigError."""
    groups = size_pool(parameters, manifest)
    return groups, longest_context(parameters, manifest, groups)


def _chosen_pages(parameters: Parameters, manifest: EngineManifest, size: int, gpu: GpuMemory | None) -> tuple[str, str, int]:
    """(the knob that decides, its value, the pages of `size` bytes it holds beside the one that a GPU pads with)"""
    fraction = parameters.kv_cache_gpu_fraction
    if fraction and gpu is None:
        raise ConfigError(
            f"config.pbtxt: kv_cache_gpu_fraction {fraction:g} is of a GPU, and {manifest.runtime} runs on a CPU; set it to 0"
        )
    if fraction and gpu is not None and manifest.plan is not None:
        num_pages = min(int(gpu.free * fraction) // size, manifest.plan.max_pages) - 1
        return "kv_cache_gpu_fraction", f"{fraction:g}", num_pages
    megabytes = parameters.kv_cache_memory_mb
    return "kv_cache_memory_mb", str(megabytes), megabytes * 2**20 // size - (gpu is not None)


def _check_gpu(knob: str, value: str, num_pages: int, manifest: EngineManifest, gpu: GpuMemory) -> None:
    """What the plan can address and the GPU can hold, with a page more for padding."""
    plan, size = manifest.plan, manifest.page_bytes
    assert plan is not None
    most = min(gpu.free - gpu.beside_pool, plan.max_pages * size)
    pool = (num_pages + 1) * size
    if pool <= most:
        return
    if pool > plan.max_pages * size:
        reason = f"{num_pages + 1} pages, and the plan takes up to {plan.max_pages}"
    else:
        reason = (
            f"{_mib(pool)} MiB of the {gpu.free >> 20} MiB that are free on the GPU beside the engine, and"
            f" {_mib(gpu.beside_pool)} MiB are needed for logits and CUDA graphs"
        )
    if most < 3 * size:
        remedy = "serve on a GPU with more memory, or a smaller engine"
    elif knob == "kv_cache_memory_mb":
        remedy = f"set it to {most >> 20} or less"
    else:
        remedy = f"set it to {math.floor(100 * most / gpu.free) / 100:g} or less"
    raise ConfigError(f"config.pbtxt: {knob} {value} takes {reason}; {remedy}")


def _mib(size: int) -> int:
    return -(-size // 2**20)
