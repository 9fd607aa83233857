"""nvidia-modelopt's unified Hugging Face export, read without loss: INT4, INT8, FP8, NVFP4, or a mixture by layer.

Beside the usual files there is hf_quant_config.json. A layer is quantized as the type of its `weight` says:

    INT4    weight uint8 [out / 2, in]    rows 2i in the low and 2i + 1 in the high nibbles, two's complement
            weight_scale float [out, in / block]
    INT8    weight int8 [out, in], weight_scale float [out]
    FP8     weight float8_e4m3fn [out, in], weight_scale float [] or [out]
    NVFP4   weight uint8 [out, in / 2]    inputs 2i in the low and 2i + 1 in the high nibbles, E2M1
            weight_scale float8_e4m3fn [out, in / 16], weight_scale_2 float []

    input_scale      float []    where the layer's input is rounded too
    pre_quant_scale  float [in]  AWQ and SmoothQuant only, where it could not be folded into the norm before the layer
    k_scale, v_scale float []    of k_proj and v_proj, with an FP8 KV cache

(modelopt 0.47, modelopt/torch/export/quant_utils.py; only the code documents it.) Layers that share an input share one
pre_quant_scale, which the exporter multiplies into that input's norm, so norms differ from the source model's.
"""

from pathlib import Path

import ml_dtypes
import numpy as np

from build_engines.checkpoint.hf import HfCheckpoint, read_json
from build_engines.checkpoint.packing import unpack_nibbles
from build_engines.checkpoint.types import (
    FP4_BLOCK,
    Fp4Weights,
    Fp8Weights,
    Int4Weights,
    Int8Weights,
    LinearWeights,
    linear_names,
    linear_shape,
)
from build_engines.errors import BuildError

# quant_algo -> what it is called here; the layers' own tensors say how each is stored.
_ALGORITHMS = {
    "W4A16_AWQ": "int4",
    "W4A16": "int4",
    "W8A16": "int8",
    "W8A8_SQ_PER_CHANNEL": "int8_sq",
    "FP8": "fp8",
    "NVFP4": "nvfp4",
    "NVFP4_AWQ": "nvfp4_awq",
    "W4A16_NVFP4": "nvfp4_weight_only",
    "MIXED_PRECISION": "mixed",
}
# Of `weight` in safetensors' words, and whether there is a weight_scale_2.
_KINDS = {("U8", False): "int4", ("U8", True): "nvfp4", ("I8", False): "int8", ("F8_E4M3", False): "fp8"}


def unpack_int4(packed: np.ndarray) -> np.ndarray:
    """The int8 [out, in] values, each in -8..7, of uint8 [out / 2, in].

    Raises ValueError unless the input is two-dimensional uint8.
    """
    if packed.ndim != 2 or packed.dtype != np.uint8:
        raise ValueError(f"packed INT4 is a matrix of uint8, not {packed.dtype} of shape {list(packed.shape)}")
    values = np.empty((packed.shape[0] * 2, packed.shape[1]), np.int8)
    # Shifting a nibble up to the sign bit and down again extends its sign.
    values[0::2] = (packed << 4).view(np.int8) >> 4
    values[1::2] = packed.view(np.int8) >> 4
    return values


def pack_int4(values: np.ndarray) -> np.ndarray:
    """The inverse of `unpack_int4`: int8 [out, in] in -8..7 to uint8 [out / 2, in].

    Raises ValueError for an odd number of rows, another type, or a value outside -8..7.
    """
    if values.ndim != 2 or values.dtype != np.int8:
        raise ValueError(f"INT4 values are a matrix of int8, not {values.dtype} of shape {list(values.shape)}")
    if values.shape[0] % 2:
        raise ValueError(f"two rows share a byte, so {values.shape[0]} rows cannot be packed; the number must be even")
    if values.size and (values.min() < -8 or values.max() > 7):
        raise ValueError(f"INT4 values lie in -8..7, not {values.min()}..{values.max()}")
    nibbles = values.view(np.uint8) & 0x0F
    return nibbles[0::2] | (nibbles[1::2] << 4)


def unpack_fp4(packed: np.ndarray) -> np.ndarray:
    """The float4_e2m1fn [out, in] values of uint8 [out, in / 2], whose low nibbles come first."""
    return unpack_nibbles(packed).view(ml_dtypes.float4_e2m1fn)


def is_modelopt_folder(folder: Path) -> bool:
    """Whether a folder is an export of nvidia-modelopt."""
    return (folder / "hf_quant_config.json").is_file()


class ModeloptCheckpoint(HfCheckpoint):
    """An export of nvidia-modelopt; layers left alone there are `FloatWeights`.

    Raises BuildError when opened on another precision, where a tensor of the right shape is missing, or where a scale is not a
    positive number.
    """

    format = "modelopt"

    def _open_quantization(self) -> None:
        path = self.folder / "hf_quant_config.json"
        quantization = read_json(path).get("quantization", {})
        algorithm = quantization.get("quant_algo")
        self.kv_cache = quantization.get("kv_cache_quant_algo")
        if algorithm not in _ALGORITHMS and not (algorithm is None and self.kv_cache):
            raise BuildError(f"{path}: quant_algo {algorithm!r} is not supported; supported are {', '.join(_ALGORITHMS)}")
        if self.kv_cache not in (None, "FP8"):
            raise BuildError(f"{path}: kv_cache_quant_algo {self.kv_cache!r} is not supported; supported is FP8")
        if quantization.get("has_zero_point"):
            raise BuildError(f"{path}: zero points are not supported, only symmetric weights")
        # With an FP8 cache alone no layer is quantized.
        self.precision = _ALGORITHMS.get(algorithm)
        self._quantization = self.precision
        if self.precision == "int4":
            is_awq = any(f"{name}.pre_quant_scale" in self._files for name in linear_names(self.config))
            self._quantization = "int4_awq" if is_awq else "int4_rtn"

    def linear(self, name: str) -> LinearWeights:
        kind = self._kind(name)
        if kind is None:
            return super().linear(name)
        scales = self._scales(f"{name}.weight_scale")
        raw = self._files.raw(f"{name}.weight")
        common = {"pre_quant_scale": self._optional(f"{name}.pre_quant_scale"), "bias": self._bias(name)}
        input_scale = self._input_scale(name)
        num_out, num_in = linear_shape(self.config, name)
        if kind == "int4":
            return Int4Weights(unpack_int4(raw), scales, num_in // scales.shape[1], **common)
        if kind == "int8":
            return Int8Weights(raw, scales.reshape(-1, 1), num_in, input_scale=input_scale, **common)
        if kind == "fp8":
            rows = np.broadcast_to(scales.reshape(-1), num_out).astype(np.float32)
            return Fp8Weights(raw, rows, input_scale=input_scale, **common)
        matrix_scale = self._scales(f"{name}.weight_scale_2").reshape(-1)
        return Fp4Weights(
            unpack_fp4(raw),
            self._files.raw(f"{name}.weight_scale"),
            np.broadcast_to(matrix_scale, num_out).astype(np.float32),
            input_scale=input_scale,
            **common,
        )

    def cache_scales(self, layer: int) -> tuple[float, float] | None:
        if self.kv_cache is None:
            return None
        prefix = f"model.layers.{layer}.self_attn"
        return self._scale(f"{prefix}.k_proj.k_scale"), self._scale(f"{prefix}.v_proj.v_scale")

    def _scales(self, name: str) -> np.ndarray:
        scales = self._files.float32(name)
        if not (np.isfinite(scales).all() and (scales >= 0).all()):
            raise BuildError(f"{self.folder}: tensor {name} holds values that are not finite and positive, as scales must be")
        return scales

    def _scale(self, name: str) -> float:
        return float(self._scales(name).reshape(-1)[0])

    def _optional(self, name: str) -> np.ndarray | None:
        return self._files.float32(name) if name in self._files else None

    def _input_scale(self, name: str) -> float | None:
        return self._scale(f"{name}.input_scale") if f"{name}.input_scale" in self._files else None

    def _kind(self, name: str) -> str | None:
        weight = self._linear_weight_name(name)
        if weight not in self._files or f"{name}.weight_scale" not in self._files:
            return None
        dtype = self._files.dtype(weight)
        kind = _KINDS.get((dtype, f"{name}.weight_scale_2" in self._files))
        if kind is None:
            raise BuildError(f"{self.folder}: {name} has weights of type {dtype}, which no supported quantization has")
        return kind

    def _linear_tensors(self, name: str) -> dict[str, tuple[int, ...]]:
        tensors = self._weight_tensors(name)
        for cached, scale_name in (("k_proj", "k_scale"), ("v_proj", "v_scale")):
            if self.kv_cache and name.endswith(cached):
                tensors[f"{name}.{scale_name}"] = self._files.shape(f"{name}.{scale_name}") or ()
        return tensors

    def _weight_tensors(self, name: str) -> dict[str, tuple[int, ...]]:
        kind = self._kind(name)
        if kind is None:
            return super()._linear_tensors(name)
        num_out, num_in = linear_shape(self.config, name)
        tensors: dict[str, tuple[int, ...]] = {f"{name}.weight": (num_out, num_in)}
        scale = self._files.shape(f"{name}.weight_scale") or ()
        if kind == "int4":
            block = num_in // scale[1] if len(scale) == 2 and scale[1] else 0
            if num_out % 2 or not block or num_in % block:
                raise BuildError(
                    f"{self.folder}: {name} is [{num_out}, {num_in}] with scales {list(scale)}; packed INT4 needs an even"
                    " number of rows, and blocks that divide a row"
                )
            tensors = {f"{name}.weight": (num_out // 2, num_in), f"{name}.weight_scale": (num_out, num_in // block)}
        elif kind == "nvfp4":
            if num_in % FP4_BLOCK:
                raise BuildError(
                    f"{self.folder}: {name} has {num_in} inputs, which NVFP4's blocks of {FP4_BLOCK} do not divide"
                )
            tensors = {f"{name}.weight": (num_out, num_in // 2), f"{name}.weight_scale": (num_out, num_in // FP4_BLOCK)}
            tensors[f"{name}.weight_scale_2"] = ()
        else:
            tensors[f"{name}.weight_scale"] = () if kind == "fp8" and not scale else (num_out,)
        if f"{name}.pre_quant_scale" in self._files:
            tensors[f"{name}.pre_quant_scale"] = (num_in,)
        if f"{name}.input_scale" in self._files:
            tensors[f"{name}.input_scale"] = self._files.shape(f"{name}.input_scale") or ()
        return tensors
