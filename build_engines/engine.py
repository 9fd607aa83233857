"""From an open checkpoint to an engine directory: weights in one file and graphs over it for ONNX Runtime, or a plan for
TensorRT; tokenizer, engine.json."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import cast

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.external_data import convert_tensors_to_external

from build_engines.checkpoint.types import Checkpoint, FloatWeights, Int4Weights, Int8Weights, LinearFacts, linear_facts
from build_engines.compile import CompileOptions, compile_plan
from build_engines.graph.decoder import EMBEDDING, Decoder
from build_engines.graph.linear import FloatLinear, IntegerRowLinear, Linear, make_linear
from build_engines.graph.numerics import Numerics
from llm_runtime.manifest import (
    EngineManifest,
    GraphName,
    Limits,
    ModelFacts,
    Plan,
    Precision,
    Source,
    layers_by_table,
    sha256_file,
    write_manifest,
)

PACKAGES = ("nvidia-modelopt", "onnx", "onnx-ir", "torch", "transformers")
# Of an int8 head on ONNX Runtime, whose rows have one scale each: one bit less than there is room for, since processors without
# VNNI add two products of an unsigned and a signed byte in 16 bits, which more would overflow.
ROW_BITS = 7
HEAD_BLOCKS = (128, 64, 32)  # of the head and the embedding: the largest that divides hidden_size

Progress = Callable[[float], None]


@dataclass(frozen=True)
class EngineOptions:
    """What was chosen. `name` is of the model. `lm_head` is the precision of the head: "int8", "int4", or the `floats` of the
    numerics; on ONNX Runtime the embedding table is int8 beside a quantized head."""

    name: str
    lm_head: str = "int8"
    page_size: int = 16
    max_context: int | None = None  # None: the model's own
    numerics: Numerics = field(default_factory=Numerics)
    compiler: CompileOptions = field(default_factory=CompileOptions)


def round_to_nearest(weight: NDArray[np.float32], bits: int, block_size: int) -> Int4Weights | Int8Weights:
    """Symmetric rounding with one scale for each block along the input: weight [out, in]."""
    top = 2 ** (bits - 1) - 1
    blocks = weight.reshape(weight.shape[0], -1, block_size)
    scales = np.maximum(np.abs(blocks).max(axis=2) / top, np.finfo(np.float32).tiny).astype(np.float32)
    values = np.clip(np.rint(blocks / scales[:, :, None]), -top - 1, top).astype(np.int8).reshape(weight.shape)
    kind = Int4Weights if bits == 4 else Int8Weights
    return kind(values=values, scales=scales, block_size=block_size)


def write_engine(checkpoint: Checkpoint, folder: Path, options: EngineOptions, progress: Progress) -> EngineManifest:
    """Write the engine of `checkpoint` into `folder` (made, or emptied first). `progress` gets the fraction done.

    Raises BuildError where TensorRT cannot compile it.
    """
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    progress(0.0)
    numerics = options.numerics
    limits = Limits(max_context=options.max_context or checkpoint.config.max_context, page_size=options.page_size)
    model = ModelFacts(**{name: getattr(checkpoint.config, name) for name in ModelFacts.model_fields})
    head, lm_head, embedding = _head_and_embedding(checkpoint, options)
    decoder = Decoder(checkpoint, head, embedding, numerics)
    precision = _precision(decoder.linear_facts, checkpoint.source.quantization, numerics, lm_head, embedding)
    progress(0.2)
    graphs: dict[GraphName, str] = {}
    plan: Plan | None = None
    if numerics.is_tensorrt:
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".graph-") as scratch:
            _write_graphs(decoder, Path(scratch), options, {"standard": "graph.onnx"})
            plan = compile_plan(
                Path(scratch) / "graph.onnx",
                folder,
                numerics.runtime,
                model,
                limits,
                options.compiler,
                lambda fraction: progress(0.3 + 0.6 * fraction),
            )
    else:
        graphs = {
            "standard": "graph.onnx",
            "fused": "graph.fused.onnx",
            "fused_int8": "graph.fused.int8.onnx",
            "fused_fp8": "graph.fused.fp8.onnx",
        }
        _write_graphs(decoder, folder, options, graphs)
    for path in checkpoint.tokenizer_files:
        shutil.copy2(path, folder / path.name)
    progress(0.9)
    manifest = EngineManifest(
        schema_version=2,
        name=f"{options.name}-{precision.weights}" + (f"-b{precision.block_size}" if precision.block_size else ""),
        runtime=numerics.runtime,
        model=model,
        precision=precision,
        limits=limits,
        graphs=graphs,
        window_table=len(layers_by_table(model.layer_windows)) > 1,
        plan=plan,
        files={path.name: sha256_file(path) for path in sorted(folder.iterdir())},
        source=Source(**vars(checkpoint.source)),
        # Which of them a checkpoint needs depends on its format.
        builder=installed_versions(PACKAGES) | ({numerics.runtime: plan.tensorrt_version} if plan else {}),
    )
    write_manifest(folder, manifest)
    progress(1.0)
    return manifest


def _write_graphs(decoder: Decoder, folder: Path, options: EngineOptions, graphs: dict[GraphName, str]) -> None:
    """All weights in one file, and graphs that refer to it."""
    external = convert_tensors_to_external(list(decoder.tensors().values()), folder, "weights.bin")
    weights = {str(tensor.name): cast(ir.TensorProtocol, tensor) for tensor in external}
    for kind, file_name in graphs.items():
        model = decoder.build(weights, kind=kind, page_size=options.page_size, name=options.name)
        ir.save(model, folder / file_name)


def _head_and_embedding(
    checkpoint: Checkpoint, options: EngineOptions
) -> tuple[Linear, str, Int8Weights | NDArray[np.float32]]:
    """The head in the precision asked for, its precision (one that the checkpoint has quantized stays as it is), and the
    embedding table."""
    numerics, config, lm_head = options.numerics, checkpoint.config, options.lm_head
    weights = checkpoint.linear("lm_head")
    table = checkpoint.tensor(f"{EMBEDDING}.weight")
    block = next((b for b in HEAD_BLOCKS if config.hidden_size % b == 0), config.hidden_size)
    is_float = lm_head == numerics.floats
    embedding = table if is_float or numerics.is_tensorrt else cast(Int8Weights, round_to_nearest(table, 8, block))
    if not isinstance(weights, FloatWeights):
        return make_linear("lm_head", weights, numerics), linear_facts(weights).kind, embedding
    if is_float:
        return FloatLinear(EMBEDDING if config.tie_embeddings else "lm_head", weights, numerics), lm_head, embedding
    if lm_head == "int4":
        return make_linear("lm_head", round_to_nearest(weights.weight, 4, block), numerics), lm_head, embedding
    if numerics.is_tensorrt:
        return make_linear("lm_head", round_to_nearest(weights.weight, 8, config.hidden_size), numerics), lm_head, embedding
    rows = cast(Int8Weights, round_to_nearest(weights.weight, ROW_BITS, config.hidden_size))
    return IntegerRowLinear("lm_head", rows), lm_head, embedding


def _precision(
    facts: Sequence[LinearFacts],
    algorithm: str | None,
    numerics: Numerics,
    lm_head: str,
    embedding: Int8Weights | NDArray[np.float32],
) -> Precision:
    kinds = {fact.kind for fact in facts}
    kind = kinds.pop() if len(kinds) == 1 else "mixed"
    blocks = {fact.block_size for fact in facts} - {None}
    # ONNX Runtime has no FP4, so that inputs of such layers stay as they are.
    activations = {fact.kind for fact in facts if fact.rounds_input and (fact.kind != "fp4" or numerics.is_tensorrt)}
    bits = sum(fact.bits * fact.num_weights for fact in facts) / sum(fact.num_weights for fact in facts)
    return Precision(
        weights=numerics.floats if kind == "float" else kind,  # type: ignore[arg-type]
        algorithm=algorithm,
        block_size=blocks.pop() if len(blocks) == 1 else None,
        effective_bits=round(bits, 3) if kind == "mixed" else None,
        activations=activations.pop() if activations else None,  # type: ignore[arg-type]
        compute=numerics.compute,
        kv_cache=numerics.cache,
        lm_head=lm_head,  # type: ignore[arg-type]
        embedding="int8" if isinstance(embedding, Int8Weights) else numerics.floats,
    )


def installed_versions(packages: Sequence[str]) -> dict[str, str]:
    """Of those packages that are installed."""
    versions = {}
    for package in packages:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions
