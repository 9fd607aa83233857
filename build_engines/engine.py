"""From an open checkpoint to an engine directory: weights to one file, two graphs over it, tokenizer, engine.json."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.external_data import convert_tensors_to_external

from build_engines.checkpoint.types import Checkpoint, FloatWeights, Int4Weights, Int8Weights, LinearWeights
from build_engines.graph.decoder import EMBEDDING, Decoder
from llm_runtime.manifest import (
    EngineManifest,
    Limits,
    ModelFacts,
    Precision,
    Source,
    sha256_file,
    write_manifest,
)

PACKAGES = ("nvidia-modelopt", "onnx", "onnx-ir", "torch", "transformers")
# Of an int8 head, whose rows have one scale each: one bit less than there is room for, since processors without VNNI add
# two products of an unsigned and a signed byte in 16 bits, which more would overflow.
ROW_BITS = 7
HEAD_BLOCKS = (128, 64, 32)  # of the head and the embedding: the largest that divides hidden_size


@dataclass(frozen=True)
class EngineOptions:
    """What the user chose; `lm_head` is the precision of the head and, where int8, of the embedding table too."""

    name: str
    lm_head: str = "int8"  # fp32, int8 or int4
    page_size: int = 16
    max_context: int | None = None  # None: the model's own


def round_to_nearest(weight: NDArray[np.float32], bits: int, block_size: int) -> Int4Weights | Int8Weights:
    """Symmetric rounding with one scale for each block along the input: weight [out, in]."""
    top = 2 ** (bits - 1) - 1
    blocks = weight.reshape(weight.shape[0], -1, block_size)
    scales = np.maximum(np.abs(blocks).max(axis=2) / top, np.finfo(np.float32).tiny).astype(np.float32)
    values = np.clip(np.rint(blocks / scales[:, :, None]), -top - 1, top).astype(np.int8).reshape(weight.shape)
    kind = Int4Weights if bits == 4 else Int8Weights
    return kind(values=values, scales=scales, block_size=block_size)


def write_engine(
    checkpoint: Checkpoint, folder: Path, options: EngineOptions, progress: Callable[[float], None]
) -> EngineManifest:
    """Write the engine of `checkpoint` into `folder` (made, or emptied first). `progress` gets the fraction done."""
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    progress(0.0)
    head, embedding = _head_and_embedding(checkpoint, options.lm_head)
    decoder = Decoder(checkpoint, head, embedding)
    progress(0.3)
    weights = _externalize(decoder.tensors(), folder, "weights.bin")
    graphs: dict[Literal["standard", "fused"], str] = {"standard": "graph.onnx", "fused": "graph.fused.onnx"}
    for kind, file_name in graphs.items():
        model = decoder.build(weights, fused=kind == "fused", page_size=options.page_size, name=options.name)
        ir.save(model, folder / file_name)
    for path in checkpoint.tokenizer_files:
        shutil.copy2(path, folder / path.name)
    progress(0.8)
    manifest = EngineManifest(
        schema_version=2,
        name=options.name,
        runtime="onnxruntime",
        model=_model_facts(checkpoint),
        precision=_precision(checkpoint, options.lm_head, embedding),
        limits=Limits(max_context=options.max_context or checkpoint.config.max_context, page_size=options.page_size),
        graphs=graphs,
        files={path.name: sha256_file(path) for path in sorted(folder.iterdir())},
        source=Source(**vars(checkpoint.source)),
        builder={package: version(package) for package in PACKAGES},
    )
    write_manifest(folder, manifest)
    progress(1.0)
    return manifest


def _head_and_embedding(checkpoint: Checkpoint, lm_head: str) -> tuple[LinearWeights, Int8Weights | NDArray[np.float32]]:
    """The head in the precision asked for; the embedding table in int8 beside a quantized head, else in float32."""
    head = checkpoint.linear("lm_head")
    table = checkpoint.tensor(f"{EMBEDDING}.weight")
    if lm_head == "fp32":
        return head, table
    block = next((b for b in HEAD_BLOCKS if checkpoint.config.hidden_size % b == 0), checkpoint.config.hidden_size)
    embedding = round_to_nearest(table, 8, block)
    assert isinstance(embedding, Int8Weights)
    if not isinstance(head, FloatWeights):
        return head, embedding
    if lm_head == "int4":
        return round_to_nearest(head.weight, 4, block), embedding
    return round_to_nearest(head.weight, ROW_BITS, head.weight.shape[1]), embedding


def _externalize(tensors: dict[str, ir.TensorProtocol], folder: Path, file_name: str) -> dict[str, ir.TensorProtocol]:
    """Move all tensors into one file beside the graphs, which then refer to it."""
    external = convert_tensors_to_external(list(tensors.values()), folder, file_name)
    return {tensor.name: tensor for tensor in external}  # type: ignore[misc]


def _model_facts(checkpoint: Checkpoint) -> ModelFacts:
    return ModelFacts(**{name: getattr(checkpoint.config, name) for name in ModelFacts.model_fields})


def _precision(checkpoint: Checkpoint, lm_head: str, embedding: Int8Weights | NDArray[np.float32]) -> Precision:
    sample = checkpoint.linear("model.layers.0.self_attn.q_proj")
    quantization = checkpoint.source.quantization
    int4 = isinstance(sample, Int4Weights)
    return Precision(
        weights="int4" if int4 else "fp32",
        algorithm=quantization,
        block_size=sample.block_size if isinstance(sample, Int4Weights) else None,
        lm_head=lm_head,  # type: ignore[arg-type]
        embedding="int8" if isinstance(embedding, Int8Weights) else "fp32",
    )
