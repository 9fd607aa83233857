"""AWQ checkpoints as AutoAWQ writes them, in its version "gemm".

A packed layer has these tensors (AutoAWQ, awq/modules/linear/gemm.py):

    qweight  int32 [in, out / 8]         eight outputs in a word, from the lowest bits: 0, 2, 4, 6, 1, 3, 5, 7
    qzeros   int32 [in / group, out / 8] the same way
    scales   float16 [in / group, out]
    bias     float16 [out]               where the layer has one

    weight[o, i] = (q[i, o] - zero[i / group, o]) * scale[i / group, o]

AWQ's own scales for activations are in the weights and norms already.
"""

import numpy as np

from build_engines.checkpoint.packing import unpack_words
from build_engines.checkpoint.quantized import GroupedCheckpoint
from build_engines.checkpoint.types import LinearWeights, linear_shape
from build_engines.errors import BuildError

# Of the eight outputs in a word, from its lowest bits.
_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_PER_WORD = len(_ORDER)


class AwqCheckpoint(GroupedCheckpoint):
    """Four-bit AWQ: dequantized, but `Int4Weights` if `zero_point` is false (GPTQModel's symmetric AWQ) in groups of 64 or 128.

    Raises BuildError when opened on other bits or versions, or where a tensor of the right shape and type is missing; and when
    a layer is read whose scales are not positive numbers, or whose zero points are not 8 though `zero_point` is false.
    """

    format = "awq"
    packed = ("qweight", "qzeros", "scales")

    def _open_settings(self) -> None:
        self._open_groups(not self._setting("zero_point", (True, False), True))
        # AutoAWQ says version; GPTQModel says checkpoint_format and format as well.
        keys = [key for key in ("version", "checkpoint_format", "format") if self._settings.get(key) is not None]
        key, version = (keys[0], self._settings[keys[0]]) if keys else ("version", "gemm")
        if str(version).lower() != "gemm":
            raise self._bad_setting(key, version, "'gemm'")
        self._quantization = "awq"

    def _packed_tensors(self, name: str) -> dict[str, tuple[int, ...]]:
        num_out, num_in = linear_shape(self.config, name)
        width = self._width(num_in)
        if num_out % _PER_WORD or num_in % width:
            shape = f"{name} is [{num_out}, {num_in}]"
            raise BuildError(f"{self.folder}: {shape}; awq packs outputs in eights, and inputs in whole groups of {width}")
        for end in ("qweight", "qzeros"):
            self._require_type(f"{name}.{end}", "I32")
        return {
            f"{name}.qweight": (num_in, num_out // _PER_WORD),
            f"{name}.qzeros": (num_in // width, num_out // _PER_WORD),
            f"{name}.scales": (num_in // width, num_out),
        }

    def _packed_linear(self, name: str) -> LinearWeights:
        codes = np.ascontiguousarray(self._codes(f"{name}.qweight").T)
        return self._grouped_linear(name, codes, self._codes(f"{name}.qzeros"), self._groups_of(codes.shape[1]))

    def _codes(self, tensor: str) -> np.ndarray:
        """uint8 [rows, out] of int32 [rows, out / 8]."""
        words = self._files.raw(tensor)
        nibbles = unpack_words(words).reshape(-1, _PER_WORD)
        codes = np.empty_like(nibbles)
        codes[:, _ORDER] = nibbles
        return codes.reshape(len(words), -1)
