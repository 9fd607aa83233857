"""Reads models: Hugging Face folders and hub ids, GGUF files, and nvidia-modelopt's quantized exports."""

from build_engines.checkpoint.types import (
    FAMILIES,
    Checkpoint,
    DecoderConfig,
    FloatWeights,
    Fp4Weights,
    Fp8Weights,
    Int4Weights,
    Int8Weights,
    LinearWeights,
    Rope,
    Source,
    linear_names,
    linear_shape,
    tensor_shapes,
)
from build_engines.errors import BuildError

__all__ = [
    "FAMILIES",
    "BuildError",
    "Checkpoint",
    "DecoderConfig",
    "FloatWeights",
    "Fp4Weights",
    "Fp8Weights",
    "Int4Weights",
    "Int8Weights",
    "LinearWeights",
    "Rope",
    "Source",
    "linear_names",
    "linear_shape",
    "tensor_shapes",
]
