"""GPTQ checkpoints as AutoGPTQ, GPTQModel and transformers write them.

A packed layer has these tensors (AutoGPTQ, auto_gptq/nn_modules/qlinear/; GPTQModel, gptqmodel/nn_modules/qlinear/__init__.py):

    qweight  int32 [in / 8, out]         eight inputs in a word, the first in its lowest bits
    qzeros   int32 [groups, out / 8]     eight outputs in a word; checkpoint_format gptq stores the zero point less 1,
                                         gptq_v2 as it is
    scales   float16 [groups, out]
    g_idx    int32 [in]                  the group of each input
    bias     float16 [out]               where the layer has one

    weight[o, i] = (q[o, i] - zero[g_idx[i], o]) * scale[g_idx[i], o]
"""

import numpy as np

from build_engines.checkpoint.packing import unpack_words
from build_engines.checkpoint.quantized import GroupedCheckpoint
from build_engines.checkpoint.types import LinearWeights, linear_shape
from build_engines.errors import BuildError

_PER_WORD = 8


class GptqCheckpoint(GroupedCheckpoint):
    """Four-bit GPTQ: `Int4Weights` if symmetric in groups of 64 or 128 neighbouring inputs; else dequantized.

    Raises BuildError when opened on other bits or layouts, or where a tensor of the right shape and type is missing or `g_idx`
    names a group that is not there; and when a layer is read whose scales are not positive numbers, or whose zero points are
    not 8 though config.json says `sym`, or cannot be told.
    """

    format = "gptq"
    packed = ("qweight", "qzeros", "scales", "g_idx")

    def _open_settings(self) -> None:
        self._open_groups(self._setting("sym", (True, False), True))
        self._setting("pack_dtype", ("int32",), "int32")
        self._setting("is_marlin_format", (False,), False)
        layout = self._setting("checkpoint_format", ("gptq", "gptq_v2"), self._settings.get("format") or "gptq")
        self._stored_less = 1 if layout == "gptq" else 0
        # GPTQModel's settings by layer; those that begin with "-:" leave layers in full precision.
        for pattern in self._settings.get("dynamic") or ():
            if not str(pattern).startswith("-:"):
                raise self._bad_setting("dynamic", pattern, "one setting for all layers, and exclusions that begin with '-:'")
        self._quantization = "gptq"

    def _packed_tensors(self, name: str) -> dict[str, tuple[int, ...]]:
        num_out, num_in = linear_shape(self.config, name)
        if num_out % _PER_WORD or num_in % _PER_WORD:
            raise BuildError(f"{self.folder}: {name} is [{num_out}, {num_in}]; gptq packs inputs and outputs in eights")
        for end in ("qweight", "qzeros", "g_idx"):
            self._require_type(f"{name}.{end}", "I32")
        num_groups = self._num_groups(num_in)
        return {
            f"{name}.qweight": (num_in // _PER_WORD, num_out),
            f"{name}.qzeros": (num_groups, num_out // _PER_WORD),
            f"{name}.scales": (num_groups, num_out),
            f"{name}.g_idx": (num_in,),
        }

    def _inexact(self) -> list[str]:
        # g_idx is small, and what decides: desc_act may be set where it reordered nothing. A list, so that all are checked.
        in_order = [np.array_equal(groups, self._groups_of(len(groups))) for groups in map(self._groups, self._packed_names())]
        return super()._inexact() + ([] if all(in_order) else ["groups of inputs that are not neighbours (desc_act)"])

    def _packed_linear(self, name: str) -> LinearWeights:
        codes = unpack_words(self._files.raw(f"{name}.qweight").T)
        return self._grouped_linear(name, codes, self._zero_points(name), self._groups(name))

    def _zero_points(self, name: str) -> np.ndarray:
        """uint8 [groups, out]."""
        stored = unpack_words(self._files.raw(f"{name}.qzeros"))
        if self._stored_less and (stored == 15).any():
            # 0 - 1 borrows from, or overwrites, the numbers above it in the word, as the writer happened to do it.
            what = "holds a zero point of 0, which garbles those beside it in checkpoint_format gptq; gptq_v2 can hold it"
            raise self._bad_tensor(f"{name}.qzeros", what)
        return stored + np.uint8(self._stored_less)

    def _groups(self, name: str) -> np.ndarray:
        """int32 [in]: the group of each input."""
        groups = self._files.raw(f"{name}.g_idx")
        last = self._num_groups(len(groups)) - 1
        outside = groups[(groups < 0) | (groups > last)]
        if outside.size:
            raise self._bad_tensor(f"{name}.g_idx", f"names group {outside[0]}; the layer has groups 0..{last}")
        return groups
