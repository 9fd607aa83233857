"""bitsandbytes checkpoints with four bits, NF4 (QLoRA, https://arxiv.org/abs/2305.14314, appendix E) or FP4.

A packed layer has these tensors (bitsandbytes, `QuantState.as_dict` in bitsandbytes/functional.py); n = out * in:

    weight            uint8 [n / 2, 1]  the weights one row after another, the first of two in the high half
    weight.quant_map  float32 [16]      what each code stands for
    weight.absmax     float32 [n / blocksize]
    weight.quant_state.bitsandbytes__nf4 (or __fp4)  uint8: JSON with quant_type, blocksize, shape, dtype and, if nested, also
                                        nested_blocksize, nested_dtype and nested_offset

    weight[j] = quant_map[code[j]] * absmax[j / blocksize]

Nested ("double") quantization has absmax as uint8, and

    weight.nested_quant_map float32 [256], weight.nested_absmax float32 [n / blocksize / nested_blocksize]

    absmax[b] = nested_quant_map[code[b]] * nested_absmax[b / nested_blocksize] + nested_offset
"""

import json
import math
from typing import Any

import numpy as np

from build_engines.checkpoint.packing import unpack_nibbles
from build_engines.checkpoint.quantized import QuantizedCheckpoint
from build_engines.checkpoint.types import FloatWeights, LinearWeights, linear_shape

# Quantiles of a normal distribution, scaled to -1..1.
_NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
# A sign, two bits of exponent and one of mantissa in an order of bitsandbytes' own, in twelfths.
_FP4_TWELFTHS = (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)
_CODE_BOOKS = {
    "nf4": np.array(_NF4, np.float32),
    "fp4": np.array([*_FP4_TWELFTHS, *(-value for value in _FP4_TWELFTHS)], np.float32) / np.float32(12),
}
# The code book is fixed; a file's own copy may have been rounded.
_CODE_BOOK_TOLERANCE = 1e-4
_LARGEST_BLOCK = 4096


class BitsandbytesCheckpoint(QuantizedCheckpoint):
    """Four-bit bitsandbytes, dequantized.

    Unlike other scales an absmax may be 0: that of a block of zeros.

    Raises BuildError when opened on eight bits, where a tensor of the right shape and type is missing, or where a layer's state
    does not fit it; and when a layer is read whose absmax are not numbers, or whose code book is another one.
    """

    format = "bitsandbytes"

    def _open_settings(self) -> None:
        if self._settings.get("load_in_8bit"):
            raise self._bad_setting("load_in_8bit", True, "load_in_4bit; LLM.int8() is not read")
        self._setting("load_in_4bit", (True,))
        self._setting("bnb_4bit_quant_storage", ("uint8",), "uint8")
        self._type = self._setting("bnb_4bit_quant_type", tuple(_CODE_BOOKS), "fp4")
        self.packed = (f"weight.quant_state.bitsandbytes__{self._type}", "weight.absmax", "weight.quant_map")
        self._quantization = f"bitsandbytes_{self._type}"
        self._dequantize_because(f"unevenly spaced values ({self._type})")

    def _packed_tensors(self, name: str) -> dict[str, tuple[int, ...]]:
        weight = f"{name}.weight"
        state_name = f"{name}.{self.packed[0]}"
        state_shape = self._files.shape(state_name)
        if state_shape is None:
            return {state_name: ()}
        state = self._state(name)
        num_weights = math.prod(linear_shape(self.config, name))
        num_blocks = -(-num_weights // state["blocksize"])
        is_nested = "nested_blocksize" in state
        self._require_type(weight, "U8")
        self._require_type(f"{weight}.absmax", "U8" if is_nested else "F32")
        tensors: dict[str, tuple[int, ...]] = {
            weight: (-(-num_weights // 2), 1),
            state_name: state_shape,
            f"{weight}.quant_map": (16,),
            f"{weight}.absmax": (num_blocks,),
        }
        if is_nested:
            tensors[f"{weight}.nested_quant_map"] = (256,)
            tensors[f"{weight}.nested_absmax"] = (-(-num_blocks // state["nested_blocksize"]),)
        return tensors

    def _packed_linear(self, name: str) -> LinearWeights:
        weight, shape = f"{name}.weight", linear_shape(self.config, name)
        book = _CODE_BOOKS[self._type]
        if not np.allclose(self._files.float32(f"{weight}.quant_map"), book, rtol=0, atol=_CODE_BOOK_TOLERANCE):
            raise self._bad_tensor(f"{weight}.quant_map", f"is not the code book of {self._type}")
        absmax = self._absmax(name)
        packed = self._files.raw(weight).reshape(-1)
        # High halves first.
        codes = unpack_nibbles(packed).reshape(-1, 2)[:, ::-1].reshape(-1)[: math.prod(shape)]
        blocks = np.zeros((len(absmax), self._state(name)["blocksize"]), np.float32)
        blocks.reshape(-1)[: len(codes)] = book[codes]
        blocks *= absmax[:, None]
        return FloatWeights(blocks.reshape(-1)[: len(codes)].reshape(shape), self._bias(name))

    def _absmax(self, name: str) -> np.ndarray:
        """float32 [blocks]."""
        weight, state = f"{name}.weight", self._state(name)
        if "nested_blocksize" not in state:
            return self._finite(f"{weight}.absmax", lowest=0.0)
        codes = self._files.raw(f"{weight}.absmax")
        outer = np.repeat(self._finite(f"{weight}.nested_absmax", lowest=0.0), state["nested_blocksize"])[: len(codes)]
        return self._finite(f"{weight}.nested_quant_map")[codes] * outer + np.float32(state["nested_offset"])

    def _finite(self, tensor: str, lowest: float = -np.inf) -> np.ndarray:
        values = self._files.float32(tensor)
        if not (np.isfinite(values).all() and (values >= lowest).all()):
            what = "holds values that are not finite" + (f" and at least {lowest:g}" if np.isfinite(lowest) else "")
            raise self._bad_tensor(tensor, what)
        return values

    def _state(self, name: str) -> dict[str, Any]:
        """The JSON of a layer's quant_state. Raises BuildError if it lacks a field that it needs, or has one that cannot be."""
        tensor = f"{name}.{self.packed[0]}"
        self._require_type(tensor, "U8")
        try:
            state = json.loads(self._files.raw(tensor).tobytes())
        except ValueError as error:
            raise self._bad_tensor(tensor, f"does not hold JSON ({error})") from error
        if not isinstance(state, dict):
            raise self._bad_tensor(tensor, "does not hold a JSON object")
        wanted: dict[str, Any] = {"quant_type": self._type, "shape": list(linear_shape(self.config, name))}
        for key, value in wanted.items():
            if state.get(key) != value:
                raise self._bad_tensor(tensor, f"has {key} {state.get(key)!r}, where it should be {value!r}")
        is_nested = f"{name}.weight.nested_absmax" in self._files or "nested_blocksize" in state
        for key in ("blocksize", "nested_blocksize") if is_nested else ("blocksize",):
            if type(state.get(key)) is not int or not 1 <= state[key] <= _LARGEST_BLOCK:
                raise self._bad_tensor(tensor, f"has {key} {state.get(key)!r}; allowed are 1 to {_LARGEST_BLOCK}")
        offset = state.get("nested_offset")
        if is_nested and not (isinstance(offset, float) and math.isfinite(offset)):
            raise self._bad_tensor(tensor, f"has nested_offset {offset!r}; it must be a finite number")
        return state
