"""nvidia-modelopt's unified Hugging Face export with INT4 weights, read without loss.

Beside the usual files there is hf_quant_config.json. A quantized layer is three tensors:

    weight           uint8   [out / 2, in]     rows 2i in the low and 2i + 1 in the high nibbles, two's complement
    weight_scale     float   [out, in / block]
    pre_quant_scale  float   [in]              AWQ only, and only where it could not be folded into the norm before the layer

(modelopt 0.47, `pack_int4_in_uint8` in modelopt/torch/export/quant_utils.py; only the code documents it.) Layers that share an
input share one pre_quant_scale, which the exporter multiplies into that input's norm, so norms differ from the source model's.
"""

from pathlib import Path

import numpy as np

from build_engines.checkpoint.hf import HfCheckpoint, read_json
from build_engines.checkpoint.types import Int4Weights, LinearWeights, linear_names, linear_shape
from build_engines.errors import BuildError

_ALGORITHMS = ("W4A16_AWQ", "W4A16")


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


def is_modelopt_folder(folder: Path) -> bool:
    """Whether a folder is an export of nvidia-modelopt."""
    return (folder / "hf_quant_config.json").is_file()


class ModeloptCheckpoint(HfCheckpoint):
    """An export of nvidia-modelopt with INT4 weight-only layers; layers left alone there are `FloatWeights`.

    Raises BuildError when opened on another precision, or where a tensor of the right shape is missing.
    """

    format = "modelopt"

    def _open_quantization(self) -> None:
        path = self.folder / "hf_quant_config.json"
        quantization = read_json(path).get("quantization", {})
        algorithm = quantization.get("quant_algo")
        if algorithm not in _ALGORITHMS:
            raise BuildError(f"{path}: quant_algo {algorithm!r} is not supported; supported are {', '.join(_ALGORITHMS)}")
        if quantization.get("kv_cache_quant_algo"):
            raise BuildError(f"{path}: a quantized KV cache ({quantization['kv_cache_quant_algo']}) is not supported")
        if quantization.get("has_zero_point"):
            raise BuildError(f"{path}: zero points are not supported, only symmetric weights")
        self.block_size = int(quantization.get("group_size") or 0)
        if self.block_size <= 0:
            raise BuildError(f"{path}: group_size is missing")
        is_awq = any(f"{name}.pre_quant_scale" in self._files for name in linear_names(self.config))
        self._quantization = "int4_awq" if is_awq else "int4_rtn"

    def linear(self, name: str) -> LinearWeights:
        if not self._is_quantized(name):
            return super().linear(name)
        scale_name = f"{name}.pre_quant_scale"
        return Int4Weights(
            values=unpack_int4(self._files.raw(f"{name}.weight")),
            scales=self._files.float32(f"{name}.weight_scale"),
            block_size=self.block_size,
            pre_quant_scale=self._files.float32(scale_name) if scale_name in self._files else None,
            bias=self._bias(name),
        )

    def _is_quantized(self, name: str) -> bool:
        weight = self._linear_weight_name(name)
        return weight in self._files and self._files.dtype(weight) == "U8"

    def _linear_tensors(self, name: str) -> dict[str, tuple[int, ...]]:
        if not self._is_quantized(name):
            return super()._linear_tensors(name)
        num_out, num_in = linear_shape(self.config, name)
        if num_out % 2 or num_in % self.block_size:
            raise BuildError(
                f"{self.folder}: {name} is [{num_out}, {num_in}]; packed INT4 needs an even number of rows, and blocks of"
                f" {self.block_size} that divide {num_in}"
            )
        tensors: dict[str, tuple[int, ...]] = {
            f"{name}.weight": (num_out // 2, num_in),
            f"{name}.weight_scale": (num_out, num_in // self.block_size),
        }
        if f"{name}.pre_quant_scale" in self._files:
            tensors[f"{name}.pre_quant_scale"] = (num_in,)
        return tensors
