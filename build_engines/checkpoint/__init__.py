"""Reads models: Hugging Face folders and hub ids, GGUF files, nvidia-modelopt's exports, and what others quantized."""

from pathlib import Path

from build_engines.checkpoint.awq import AwqCheckpoint
from build_engines.checkpoint.bitsandbytes import BitsandbytesCheckpoint
from build_engines.checkpoint.dequantize import dequantize_to
from build_engines.checkpoint.gptq import GptqCheckpoint
from build_engines.checkpoint.hf import HfCheckpoint, quantization_method
from build_engines.checkpoint.modelopt import ModeloptCheckpoint, is_modelopt_folder
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
    "dequantize_to",
    "linear_names",
    "linear_shape",
    "open_checkpoint",
    "tensor_shapes",
]

_CLASSES: dict[str, type[HfCheckpoint]] = {
    "awq": AwqCheckpoint,
    "bitsandbytes": BitsandbytesCheckpoint,
    "gptq": GptqCheckpoint,
}


def open_checkpoint(folder: Path, *, model: str | None = None, revision: str | None = None) -> HfCheckpoint:
    """The checkpoint in a folder, by its own files: hf_quant_config.json, and `quantization_config` in config.json.

    model, revision: what its `source` says; None: the folder. Raises BuildError for a folder that cannot be read.
    """
    if is_modelopt_folder(folder):
        return ModeloptCheckpoint(folder, model, revision)
    # An unknown method is refused by HfCheckpoint.
    return _CLASSES.get(quantization_method(folder) or "", HfCheckpoint)(folder, model, revision)
