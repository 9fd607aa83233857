"""Writes any checkpoint as an ordinary one in full precision, which the quantizer, or transformers, then reads."""

import json
import shutil
from collections.abc import Callable
from itertools import groupby
from pathlib import Path

import numpy as np

from build_engines.checkpoint.hf import read_json
from build_engines.checkpoint.types import Checkpoint, FloatWeights, LinearWeights, linear_names, linear_shape, tensor_shapes
from build_engines.errors import BuildError


def dequantize_to(checkpoint: Checkpoint, folder: Path, progress: Callable[[float], None] = lambda fraction: None) -> None:
    """Writes `checkpoint` into `folder` as a Hugging Face model: config.json, safetensors and the tokenizer's files.

    Weights become float32, in which a four-bit number times a float16 scale is exact, as it is not in float16 or bfloat16; the
    quantizer works in float32 anyway. Takes 4 bytes a weight on disk, and memory for one decoder layer, or the embedding table.
    Rounding of inputs and of the KV cache, if the checkpoint has any, is left out. `progress` gets the fraction done.

    config.json is written last, so that a folder with one is whole. Raises BuildError for a layer that cannot be read, and for
    a bias that transformers' model of this kind has not.
    """
    folder.mkdir(parents=True, exist_ok=True)
    has = _model_names(checkpoint.folder)
    linears = [*linear_names(checkpoint.config), *([] if checkpoint.config.tie_embeddings else ["lm_head"])]
    names = sorted([*linears, *tensor_shapes(checkpoint.config)], key=_part)
    parts = [list(part) for _, part in groupby(names, key=_part)]
    weight_map: dict[str, str] = {}
    total_size = 0
    for index, part in enumerate(parts):
        tensors: dict[str, np.ndarray] = {}
        for name in part:
            tensors |= _linear_tensors(checkpoint, name, has) if name in linears else {name: checkpoint.tensor(name)}
        file = f"model-{index + 1:05d}-of-{len(parts):05d}.safetensors"
        _save(tensors, folder / file)
        weight_map |= dict.fromkeys(tensors, file)
        total_size += sum(tensor.nbytes for tensor in tensors.values())
        progress((index + 1) / len(parts))
    for path in checkpoint.tokenizer_files:
        shutil.copyfile(path, folder / path.name)
    _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total_size}, "weight_map": weight_map})
    config = read_json(checkpoint.folder / "config.json")
    for key in ("quantization_config", "compression_config", "torch_dtype"):
        config.pop(key, None)
    _write_json(folder / "config.json", config | {"dtype": "float32"})


def _part(name: str) -> tuple[int, str]:
    """What is written into one file: a decoder layer, or a tensor outside of them."""
    words = name.split(".")
    return (int(words[2]), "") if name.startswith("model.layers.") else (-1, name)


def _linear_tensors(checkpoint: Checkpoint, name: str, has: set[str]) -> dict[str, np.ndarray]:
    weights = checkpoint.linear(name)
    tensors = {f"{name}.weight": _full(weights)}
    bias = f"{name}.bias"
    # Old exporters wrote biases of zeros for layers that have none.
    if bias in has:
        num_out = linear_shape(checkpoint.config, name)[0]
        tensors[bias] = np.zeros(num_out, np.float32) if weights.bias is None else weights.bias
    elif weights.bias is not None and weights.bias.any():
        raise BuildError(f"{checkpoint.folder}: tensor {bias} is not 0, but this {checkpoint.config.family} model has none")
    return tensors


def _full(weights: LinearWeights) -> np.ndarray:
    """float32 [out, in]: what the layer's input, unscaled, is multiplied by."""
    scale = None if isinstance(weights, FloatWeights) else weights.pre_quant_scale
    return weights.dequantize() if scale is None else weights.dequantize() * scale


def _model_names(folder: Path) -> set[str]:
    """Names of all tensors that transformers' model of this config has."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder, local_files_only=True))
    return set(model.state_dict())


def _save(tensors: dict[str, np.ndarray], path: Path) -> None:
    from safetensors.numpy import save_file

    save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, path, metadata={"format": "pt"})


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
