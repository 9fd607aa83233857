"""engine.json: what the builder fixed. This module is its only reader and its only writer.

A wrong or missing field is an EngineError that names it; nothing is guessed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from llm_runtime.errors import EngineError

MANIFEST_NAME = "engine.json"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelFacts(_Strict):
    """Dimensions of the decoder."""

    family: str
    vocab_size: int = Field(gt=0)
    hidden_size: int = Field(gt=0)
    intermediate_size: int = Field(gt=0)
    num_layers: int = Field(gt=0)
    num_heads: int = Field(gt=0)
    num_kv_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0)
    layer_windows: tuple[int, ...]  # per layer; 0: full attention
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]


Runtime = Literal["onnxruntime", "tensorrt", "tensorrt-rtx"]
FloatName = Literal["fp32", "fp16", "bf16"]
CacheName = Literal["fp32", "fp16", "bf16", "fp8", "int8"]
BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1, "int8": 1}
GraphName = Literal["standard", "fused", "fused_int8", "fused_fp8"]  # how attention runs and, quantized, what pages hold
QUANTIZED_GRAPHS: dict[GraphName, CacheName] = {"fused_int8": "int8", "fused_fp8": "fp8"}
SCALE_BLOCK = 32  # values of a head that share a scale of two bytes, in those graphs' pages


class Precision(_Strict):
    """How numbers are stored; `weights` is of the decoder's linear layers."""

    weights: Literal["fp32", "fp16", "bf16", "fp8", "int8", "int4", "fp4", "mixed"]
    algorithm: str | None = None  # how the weights were quantized: "int4_awq", ...; None where they were not
    block_size: int | None = None  # weights along a layer's input that share a scale; None: a whole row or matrix
    effective_bits: float | None = None  # of mixed weights: bits a weight, on average
    activations: Literal["fp8", "int8", "fp4"] | None = None  # what inputs of quantized layers are rounded to; None: nothing
    compute: FloatName = "fp32"  # all other arithmetic, and what weights become when they are used
    kv_cache: CacheName = "fp32"
    lm_head: Literal["fp32", "fp16", "bf16", "fp8", "int8", "int4", "fp4"]
    embedding: Literal["fp32", "fp16", "bf16", "int8"]


class Limits(_Strict):
    """What the engine was built for; config.pbtxt may ask for less, never for more."""

    max_context: int = Field(gt=0)  # tokens, prompt and output together
    page_size: int = Field(gt=0)  # tokens


class Source(_Strict):
    model: str
    revision: str | None = None
    format: str
    quantization: str | None = None


class Quality(_Strict):
    """Measured on held-out text (docs/quality.md); absent until it was. The last three compare with the unquantized model,
    where there was one to run."""

    text: str  # name of the file
    sha256: str  # of the file
    num_tokens: int = Field(gt=0)  # predicted
    window: int = Field(gt=0)  # tokens of the text that are read from an empty cache
    skip_windows: int = Field(default=0, ge=0)  # of the text, before the first one that was read
    runtime: Runtime  # what ran the weights: where the engine itself could not run, another one that was made of them
    matmul_accuracy: Literal["int8", "fp32"] | None = None  # of onnxruntime: as in config.pbtxt
    kv_cache: CacheName | None = None  # what pages held; None: not said by the builder of the time
    perplexity: float
    reference_perplexity: float | None = None
    top1_agreement: float | None = Field(default=None, ge=0, le=1)  # part of the tokens that both think likeliest
    kl_divergence: float | None = Field(default=None, ge=0)  # KL(reference || engine), nats a token


class Profile(_Strict):
    """The largest call that a plan takes; names of the axes as in docs/architecture.md."""

    max_rows: int = Field(gt=0)  # B
    max_tokens: int = Field(gt=0)  # T, of all rows
    max_row_tokens: int = Field(gt=0)  # M, of the longest row
    max_row_pages: int = Field(gt=0)  # P
    max_logits: int = Field(gt=0)  # L


class Plan(_Strict):
    """What TensorRT compiled, and what may run it. Optimization profile 0 is `prefill`, 1 is `decode`."""

    file: str
    tensorrt_version: str
    compute_capabilities: tuple[str, ...] = Field(min_length=1)  # "8.9"
    device: str | None = None  # the GPU it was built on; None: ahead of time
    prefill: Profile
    decode: Profile
    max_pages: int = Field(gt=0)  # N

    def fits(self, installed: str) -> bool:
        """Whether this version of TensorRT may load the plan: the same major and minor one; it refuses the rest itself."""
        return installed.split(".")[:2] == self.tensorrt_version.split(".")[:2]


class EngineManifest(_Strict):
    schema_version: Literal[2]
    name: str
    runtime: Runtime
    model: ModelFacts
    precision: Precision
    limits: Limits
    graphs: dict[GraphName, str] = {}  # of onnxruntime: file names
    window_table: bool = False  # layers with a window have a page table of their own, beside that of the others
    plan: Plan | None = None  # of tensorrt and tensorrt-rtx
    files: dict[str, str]  # every file of the engine: name -> sha256
    source: Source
    builder: dict[str, str]  # package -> version
    quality: Quality | None = None

    @model_validator(mode="after")
    def _has_what_its_runtime_loads(self) -> EngineManifest:
        if (self.plan is None) != (self.runtime == "onnxruntime"):
            raise ValueError(f"runtime {self.runtime!r} {'needs' if self.plan is None else 'has no'} plan")
        if self.runtime == "onnxruntime" and not self.graphs:
            raise ValueError("runtime 'onnxruntime' needs graphs")
        if self.window_table and len(layers_by_table(self.model.layer_windows)) == 1:
            raise ValueError("window_table needs layers with a window and layers without")
        return self

    @property
    def head_bytes(self) -> int:
        """Bytes of one head of one token in a page. TensorRT's fp8 has one scale for a layer, in the plan."""
        if self.runtime == "onnxruntime" and self.precision.kv_cache in QUANTIZED_GRAPHS.values():
            return quantized_head_bytes(self.model.head_dim)
        return self.model.head_dim * BYTES[self.precision.kv_cache]

    @property
    def layer_groups(self) -> tuple[tuple[int, ...], ...]:
        """Layers by the page table that they read, in the order in which the graph returns their new keys and values."""
        return layers_by_table(self.model.layer_windows) if self.window_table else (tuple(range(self.model.num_layers)),)

    @property
    def page_bytes(self) -> int:
        """Bytes of one KV page: keys and values of every layer."""
        return self.model.num_layers * self.layer_page_bytes

    @property
    def layer_page_bytes(self) -> int:
        """Bytes of one layer's part of a page."""
        return 2 * self.model.num_kv_heads * self.limits.page_size * self.head_bytes

    def with_kv_cache(self, name: CacheName) -> EngineManifest:
        """The same engine with other pages."""
        return self.model_copy(update={"precision": self.precision.model_copy(update={"kv_cache": name})})


def layers_by_table(windows: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Layers that read the same page table: all or, where some have no window (0) and some have one, the two apart."""
    without = tuple(i for i, window in enumerate(windows) if not window)
    with_window = tuple(i for i, window in enumerate(windows) if window)
    return tuple(layers for layers in (without, with_window) if layers)


def quantized_head_bytes(head_dim: int) -> int:
    """Of one head of one token, on a CPU: its blocks' scales and a byte for each value."""
    return 2 * -(-head_dim // SCALE_BLOCK) + head_dim


def sha256_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else _digest(file.read)


def _digest(read: Callable[[int], bytes]) -> str:
    """Python 3.10 has no hashlib.file_digest."""
    digest = hashlib.sha256()
    while block := read(1 << 20):
        digest.update(block)
    return digest.hexdigest()


def write_manifest(folder: Path, manifest: EngineManifest) -> None:
    """Written last and by rename, so that a folder with an engine.json is a finished engine."""
    temporary = folder / f".{MANIFEST_NAME}.tmp"
    temporary.write_text(manifest.model_dump_json(indent=2) + "\n")
    temporary.rename(folder / MANIFEST_NAME)


def read_manifest(folder: Path) -> EngineManifest:
    """Raises EngineError when the file is missing, or a field in it is wrong (the first one is named)."""
    path = folder / MANIFEST_NAME
    if not path.is_file():
        raise EngineError(
            f"{folder} is not an engine directory: it has no {MANIFEST_NAME}; build one with `python -m build_engines build`"
        )
    try:
        return EngineManifest.model_validate_json(path.read_text())
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "the file"
        more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
        raise EngineError(f"{path}: {field}: {first['msg']}{more}") from None


def check_files(folder: Path, manifest: EngineManifest, names: Iterable[str] | None = None) -> None:
    """Compare the files' checksums with the manifest's. Raises EngineError that names the first that differs."""
    for name in manifest.files if names is None else names:
        path = folder / name
        if not path.is_file():
            raise EngineError(f"{folder}: {name} is missing; build the engine again")
        if sha256_file(path) != manifest.files[name]:
            raise EngineError(f"{path} is damaged: its sha256 is not the one in {MANIFEST_NAME}; build the engine again")
