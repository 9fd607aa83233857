"""Tiny engines built once a test session, and the transformers model that each is compared with."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from build_engines import quantize
from build_engines.build import BuildOptions, build
from build_engines.checkpoint.modelopt import ModeloptCheckpoint
from build_engines.checkpoint.types import FloatWeights, Fp4Weights, Int8Weights, QuantizedWeights, linear_names, tensor_shapes
from build_engines.quantize import Recipe
from build_engines.targets import Wanted
from llm_runtime.executors.base import Row
from llm_runtime.executors.ort import OrtExecutor, OrtOptions
from llm_runtime.manifest import SCALE_BLOCK, CacheName, read_manifest
from llm_runtime.page_pool import PageGroup
from tests.tiny_models import make_tiny_model

PAGE_SIZE = 8
TARGET: Any = os.environ.get("LLM_TEST_TARGET", "onnxruntime")  # benchmarks/gpu_check.py runs the server's tests on a GPU
TEXT = "A small text about nothing, repeated until it is long enough to be cut into windows of tokens. " * 60
RECIPES = {
    "int4-64-rtn": Recipe("int4", 64, "rtn"),
    "int4-64": Recipe("int4", 64),
    "int4-128": Recipe("int4", 128),
    "int8": Recipe("int8"),
    "int8-smoothquant": Recipe("int8", activations=True),
    "fp8": Recipe("fp8"),
    "fp4": Recipe("fp4"),
    "fp4-activations": Recipe("fp4", activations=True),
    "mixed": Recipe("mixed", 64, effective_bits=6.0),
    "mixed-fp8": Recipe("mixed", 128, effective_bits=6.0, wide="fp8"),
    "fp8-cache": Recipe("none", cache_fp8=True),
    "fp8-fp8-cache": Recipe("fp8", cache_fp8=True),
}


class EngineShelf:
    """Makes each checkpoint and engine once, in one folder."""

    def __init__(self, root: Path) -> None:
        self._root = root

    @functools.cache  # noqa: B019 - one shelf lives as long as the session
    def checkpoint(self, family: str, max_context: int = 1024) -> Path:
        return make_tiny_model(family, self._root / f"{family}-{max_context}", max_position_embeddings=max_context)

    @functools.cache  # noqa: B019
    def quantized(self, family: str, recipe: Recipe) -> ModeloptCheckpoint:
        """An open checkpoint, read-only."""
        folder = self._root / f"{family}-quantized-{hash(recipe)}"
        quantize.quantize(self.checkpoint(family), folder, recipe, TEXT)
        return ModeloptCheckpoint(folder)

    @functools.cache  # noqa: B019
    def engine(
        self,
        family: str,
        precision: str = "fp32",
        block_size: int = 128,
        algorithm: str = "rtn",
        lm_head: str = "fp32",
        max_context: int = 1024,
        activations: str = "auto",
    ) -> Path:
        folder = self._root / f"{family}-{precision}-{block_size}-{algorithm}-{lm_head}-{max_context}-{activations}"
        options = BuildOptions(
            model=str(self.checkpoint(family, max_context)),
            wanted=Wanted(TARGET, precision, lm_head=lm_head, activations=activations),
            block_size=block_size,
            algorithm=algorithm,
            effective_bits=5.0 if precision == "mixed" else None,
            page_size=PAGE_SIZE,
        )
        build(options, folder, lambda step, fraction: None)
        return folder


def load_executor(
    folder: Path, *, attention: str = "auto", num_pages: int = 64, num_threads: int = 2, kv_cache: CacheName = "fp32"
) -> OrtExecutor:
    """With activations in float32, so that only the weights' precision differs from a reference."""
    options = OrtOptions(num_threads=num_threads, matmul_accuracy=1, attention=attention)
    return OrtExecutor(folder, read_manifest(folder).with_kv_cache(kv_cache), [PageGroup(num_pages)], options)


def reference_model(checkpoint: Path) -> Any:
    """The transformers model in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager").eval()


def dequantized_model(checkpoint: Path, quantized: Any) -> Any:
    """The transformers model with the weights that the layers of `quantized` (a Checkpoint) stand for, and its norms; inputs
    are scaled and rounded as its layers say (those of FP4 are not rounded)."""
    import torch

    model = reference_model(checkpoint)
    config = quantized.config
    with torch.no_grad():
        for name in linear_names(config):
            weights, module = quantized.linear(name), model.get_submodule(name)
            module.weight.copy_(torch.from_numpy(weights.dequantize()))
            if not isinstance(weights, FloatWeights):
                module.register_forward_pre_hook(lambda _, args, weights=weights: (_as_seen(weights, args[0]),))
        for name in tensor_shapes(config):  # AWQ's scales may have gone into the norms
            model.get_parameter(name).copy_(torch.from_numpy(np.array(quantized.tensor(name))))
    return model


def _as_seen(weights: QuantizedWeights, x: Any) -> Any:
    """What a quantized layer multiplies by its weights."""
    import torch

    if weights.pre_quant_scale is not None:
        x = x * torch.from_numpy(weights.pre_quant_scale)
    scale = getattr(weights, "input_scale", None)
    if scale is None or isinstance(weights, Fp4Weights):
        return x
    if isinstance(weights, Int8Weights):
        return (x / scale).round().clamp(-128, 127) * scale
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


def reference_logprobs(model: Any, ids: list[int], kv_cache: CacheName = "fp32") -> NDArray[np.float32]:
    """Natural log-probabilities [tokens, vocab] after each token, of keys and values rounded as pages of `kv_cache` round."""
    import torch
    from transformers import DynamicCache

    class Rounding(DynamicCache):
        def update(self, keys, values, *arguments, **named):  # type: ignore[no-untyped-def]
            return super().update(*(_rounded(x, kv_cache) for x in (keys, values)), *arguments, **named)

    cache = Rounding(config=model.config)
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([ids]), past_key_values=cache, use_cache=True).logits[0], -1).numpy()


def _rounded(x: Any, kv_cache: CacheName) -> Any:
    """[..., head_dim], each block of a head by a scale of its own."""
    import torch

    if kv_cache == "fp32":
        return x
    return torch.cat([_rounded_block(block, kv_cache) for block in x.split(SCALE_BLOCK, -1)], -1)


def _rounded_block(x: Any, kv_cache: CacheName) -> Any:
    import torch

    exact = x.abs().amax(-1, keepdim=True) / (127 if kv_cache == "int8" else 448)
    scale = ((exact.view(torch.int32) + 0xFFFF) & ~0xFFFF).view(torch.float32)  # bfloat16, rounded up
    scaled = x * (1 / scale)
    return scaled.round() * scale if kv_cache == "int8" else scaled.to(torch.float8_e4m3fn).float() * scale


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def run_in_chunks(executor: OrtExecutor, ids: list[int], chunks: list[int], pages: list[int]) -> NDArray[np.float64]:
    """Log-probabilities [tokens, vocab] of `ids` run as consecutive chunks of these lengths, each on the ones before it."""
    parts, past = [], 0
    for length in chunks:
        row = Row(ids[past : past + length], past, pages, length)
        parts.append(log_softmax(executor.execute([row])))
        past += length
    assert past == len(ids)
    return np.concatenate(parts)
