"""Writes checkpoints as GPTQ, AWQ and bitsandbytes do, from their public formats and with none of the code that reads them.

Each packer takes a tiny model's tensors, rounds its linear layers to nearest, and says what the packed layers stand for.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
# Table in appendix E of QLoRA, https://arxiv.org/abs/2305.14314
NF4 = np.array(
    [
        [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453],
        [-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0],
        [0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224],
        [0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0],
    ],
    np.float32,
).reshape(-1)
# Sign, two bits of exponent and one of mantissa; 1/192 is the subnormal number.
FP4 = np.array([0, 1 / 192, 2 / 3, 1, 1 / 3, 1 / 2, 1 / 6, 1 / 4] * 2, np.float32) * np.repeat([1, -1], 8).astype(np.float32)


@dataclass
class Packed:
    """A folder, and for each packed layer its weight in float32 and, where there are groups, codes [out, in] and scales."""

    folder: Path
    weights: dict[str, np.ndarray] = field(default_factory=dict)
    codes: dict[str, np.ndarray] = field(default_factory=dict)
    scales: dict[str, np.ndarray] = field(default_factory=dict)

    def tensors(self) -> dict[str, np.ndarray]:
        return dict(load_file(self.folder / "model.safetensors"))

    def save(self, tensors: dict[str, np.ndarray]) -> None:
        save_file({k: np.ascontiguousarray(v) for k, v in tensors.items()}, self.folder / "model.safetensors", {"format": "pt"})

    def edit(self, name: str, value: np.ndarray | None) -> None:
        """Replaces a tensor, or removes it."""
        tensors = self.tensors()
        tensors.pop(name)
        self.save(tensors if value is None else tensors | {name: value})

    def settings(self, **changes: Any) -> None:
        """Changes fields of quantization_config; None removes one."""
        config = json.loads((self.folder / "config.json").read_text())
        merged = config["quantization_config"] | changes
        config["quantization_config"] = {key: value for key, value in merged.items() if value is not None}
        (self.folder / "config.json").write_text(json.dumps(config))


def _copy(source: Path, folder: Path, settings: dict[str, Any]) -> tuple[Packed, dict[str, np.ndarray], list[str]]:
    """The copy, its tensors, and names of the layers to pack."""
    packed = Packed(shutil.copytree(source, folder))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    tensors = packed.tensors()
    names = [name.removesuffix(".weight") for name in tensors if name.endswith(tuple(f"{n}.weight" for n in LINEARS))]
    return packed, tensors, names


def _words(values: np.ndarray) -> np.ndarray:
    """int32 [..., n] of numbers 0..15 [..., 8n]: the k-th of eight counts 16 ** k."""
    eights = values.reshape(*values.shape[:-1], -1, 8).astype(np.uint64)
    return (eights * 16 ** np.arange(8, dtype=np.uint64)).sum(-1).astype(np.uint32).view(np.int32)


def _round(weight: np.ndarray, groups: np.ndarray, symmetric: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes 0..15 [out, in], zero points [groups, out] and float16 scales [groups, out]."""
    num_groups = groups.max() + 1
    zeros, scales = np.empty((num_groups, len(weight)), int), np.empty((num_groups, len(weight)), np.float16)
    for group in range(num_groups):
        part = weight[:, groups == group]
        low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
        scales[group] = np.abs(part).max(1) / 7.5 if symmetric else (high - low) / 15
        # Never 0: the older of GPTQ's layouts cannot hold it.
        zeros[group] = 8 if symmetric else np.clip(np.round(-low / scales[group].astype(np.float32)), 1, 15)
    codes = np.round(weight / scales.astype(np.float32).T[:, groups]) + zeros.T[:, groups]
    return np.clip(codes, 0, 15).astype(int), zeros, scales


def pack_gptq(
    source: Path,
    folder: Path,
    group_size: int = 64,
    symmetric: bool = True,
    layout: str = "gptq",
    shuffled: bool = False,
    **settings: Any,
) -> Packed:
    """shuffled: the inputs of a group are not neighbours, as with desc_act."""
    settings = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": group_size,
        "sym": symmetric,
        "desc_act": shuffled,
        "checkpoint_format": layout,
    } | settings
    packed, tensors, names = _copy(source, folder, settings)
    for seed, name in enumerate(names):
        weight = tensors.pop(f"{name}.weight").astype(np.float32)
        num_in = weight.shape[1]
        groups = np.arange(num_in) // (num_in if group_size == -1 else group_size)
        if shuffled:
            groups = np.random.default_rng(seed).permutation(groups)
        codes, zeros, scales = _round(weight, groups, symmetric)
        tensors[f"{name}.qweight"] = _words(codes).T
        tensors[f"{name}.qzeros"] = _words(zeros - (layout == "gptq"))
        tensors[f"{name}.scales"] = scales
        tensors[f"{name}.g_idx"] = groups.astype(np.int32)
        _remember(packed, name, codes, zeros, scales, groups)
    packed.save(tensors)
    return packed


def pack_awq(source: Path, folder: Path, group_size: int = 64, symmetric: bool = False, **settings: Any) -> Packed:
    settings = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group_size,
        "zero_point": not symmetric,
        "version": "gemm",
    } | settings
    packed, tensors, names = _copy(source, folder, settings)
    for name in names:
        weight = tensors.pop(f"{name}.weight").astype(np.float32)
        num_in = weight.shape[1]
        groups = np.arange(num_in) // (num_in if group_size == -1 else group_size)
        codes, zeros, scales = _round(weight, groups, symmetric)
        for end, numbers in (("qweight", codes.T), ("qzeros", zeros)):
            eights = numbers.reshape(len(numbers), -1, 8)
            tensors[f"{name}.{end}"] = _words(eights[..., AWQ_ORDER].reshape(numbers.shape))
        tensors[f"{name}.scales"] = scales
        _remember(packed, name, codes, zeros, scales, groups)
    packed.save(tensors)
    return packed


def _remember(packed: Packed, name: str, codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray, groups: np.ndarray) -> None:
    packed.codes[name], packed.scales[name] = codes, scales
    packed.weights[name] = ((codes - zeros.T[:, groups]) * scales.astype(np.float32).T[:, groups]).astype(np.float32)


def pack_bitsandbytes(
    source: Path, folder: Path, kind: str = "nf4", nested: bool = True, block: int = 64, **settings: Any
) -> Packed:
    settings = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_quant_type": kind,
        "bnb_4bit_use_double_quant": nested,
        "bnb_4bit_quant_storage": "uint8",
    } | settings
    packed, tensors, names = _copy(source, folder, settings)
    book = {"nf4": NF4, "fp4": FP4}[kind]
    for name in names:
        weight = tensors[f"{name}.weight"].astype(np.float32)
        blocks = weight.reshape(-1, block)
        absmax = np.abs(blocks).max(1)
        state: dict[str, Any] = {"quant_type": kind, "blocksize": block, "dtype": "float16", "shape": weight.shape}
        ours = {"absmax": absmax, "quant_map": book}
        if nested:
            ours, absmax, more = _nest(absmax, book)
            state |= more
        codes = np.abs((blocks / absmax[:, None])[..., None] - book).argmin(-1)
        packed.weights[name] = (book[codes] * absmax[:, None]).reshape(weight.shape)
        high, low = codes.reshape(-1, 2).T
        tensors[f"{name}.weight"] = (high * 16 + low).astype(np.uint8)[:, None]
        tensors |= {f"{name}.weight.{end}": value for end, value in ours.items()}
        encoded = np.frombuffer(json.dumps(state).encode(), np.uint8)
        tensors[f"{name}.weight.quant_state.bitsandbytes__{kind}"] = encoded
    packed.save(tensors)
    return packed


def _nest(absmax: np.ndarray, book: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray, dict[str, Any]]:
    """Tensors, the absmax that they stand for, and more fields of the state. The format leaves the map to the file."""
    size = 16
    offset = float(absmax.mean(dtype=np.float32))
    centred = absmax - np.float32(offset)
    padded = np.pad(centred, (0, -len(centred) % size)).reshape(-1, size)
    outer = np.abs(padded).max(1)
    nested_map = (np.linspace(-1, 1, 256) ** 3).astype(np.float32)
    codes = np.abs((padded / outer[:, None])[..., None] - nested_map).argmin(-1).reshape(-1)[: len(absmax)].astype(np.uint8)
    stands_for = nested_map[codes] * np.repeat(outer, size)[: len(absmax)] + np.float32(offset)
    tensors = {"absmax": codes, "quant_map": book, "nested_quant_map": nested_map, "nested_absmax": outer}
    return tensors, stands_for, {"nested_blocksize": size, "nested_dtype": "float32", "nested_offset": offset}
