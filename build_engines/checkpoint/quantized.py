"""What folders that others quantized have in common: settings in config.json, and packed tensors for most layers."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from build_engines.checkpoint.hf import HfCheckpoint, quantization_config
from build_engines.checkpoint.types import FloatWeights, Int4Weights, LinearWeights, linear_names, linear_shape
from build_engines.errors import BuildError

# Groups that every runtime has a kernel for.
_EXACT_GROUPS = (64, 128)
_SYMMETRIC_ZERO = 8


class QuantizedCheckpoint(HfCheckpoint, ABC):
    """A folder whose config.json has a `quantization_config`; layers left alone there are `FloatWeights`.

    Where an engine has no such weights, `linear` gives them dequantized, and `is_dequantized` and `warnings` say so. A layer's
    values are read, and checked, when it is asked for; everything else when the folder is opened. Raises BuildError at both.
    """

    # Ends of the names of tensors that only a packed layer has.
    packed: Sequence[str]

    def _open_quantization(self) -> None:
        self._settings = quantization_config(self.folder) or {}
        self._open_settings()

    def linear(self, name: str) -> LinearWeights:
        return self._packed_linear(name) if self._is_packed(name) else super().linear(name)

    @abstractmethod
    def _open_settings(self) -> None:
        """Reads, or refuses, `_settings`, and sets `_quantization`."""

    @abstractmethod
    def _packed_linear(self, name: str) -> LinearWeights: ...

    @abstractmethod
    def _packed_tensors(self, name: str) -> dict[str, tuple[int, ...]]:
        """Tensors, but for a bias, that hold this packed layer, with their shapes. May raise BuildError."""

    def _linear_tensors(self, name: str) -> dict[str, tuple[int, ...]]:
        return self._packed_tensors(name) if self._is_packed(name) else super()._linear_tensors(name)

    def _check(self) -> None:
        super()._check()
        if not self._packed_names():
            raise BuildError(f"{self.folder}: config.json says {self.format}, but no layer has tensors of it")

    def _is_packed(self, name: str) -> bool:
        return any(f"{name}.{end}" in self._files for end in self.packed)

    def _packed_names(self) -> list[str]:
        return [name for name in [*linear_names(self.config), "lm_head"] if self._is_packed(name)]

    def _setting(self, key: str, allowed: Sequence[Any], default: Any = None) -> Any:
        value = self._settings.get(key)
        value = default if value is None else value
        # True equals 1, but "bits": true does not mean one bit.
        if not any(value == one and type(value) is type(one) for one in allowed):
            raise self._bad_setting(key, value, ", ".join(map(repr, allowed)))
        return value

    def _bad_setting(self, key: str, value: Any, allowed: str) -> BuildError:
        where = f"{self.folder / 'config.json'}: quantization_config.{key} {value!r}"
        return BuildError(f"{where} is not supported for {self.format}; supported: {allowed}")

    def _dequantize_because(self, reason: str) -> None:
        self.is_dequantized = True
        self.warnings = (
            f"{self.format} weights with {reason} are dequantized, since no engine has such; a quantized engine rounds them"
            " a second time",
        )

    def _bad_tensor(self, tensor: str, what: str) -> BuildError:
        return BuildError(f"{self.folder}: tensor {tensor} {what}")

    def _require_type(self, tensor: str, *allowed: str) -> None:
        """Raises BuildError if there is such a tensor and it has another type, in safetensors' words ("I32")."""
        if tensor in self._files and self._files.dtype(tensor) not in allowed:
            raise self._bad_tensor(tensor, f"has type {self._files.dtype(tensor)}; {self.format} has {' or '.join(allowed)}")

    def _scales(self, tensor: str) -> np.ndarray:
        """A tensor of scales in float32. Raises BuildError unless all are finite and greater than 0."""
        scales = self._files.float32(tensor)
        if not (np.isfinite(scales).all() and (scales > 0).all()):
            raise self._bad_tensor(tensor, "holds values that are not finite and greater than 0, as scales must be")
        return scales


class GroupedCheckpoint(QuantizedCheckpoint):
    """Numbers from 0 to 15 with a zero point and a scale for each group of inputs, as GPTQ and AWQ both have them.

    `Int4Weights`, value for value, if every zero point is 8 and groups are of 64 or 128 neighbouring inputs; else dequantized.
    """

    def _open_groups(self, is_symmetric: bool) -> None:
        self._setting("bits", (4,))
        self._is_symmetric = is_symmetric
        size = self._settings.get("group_size")
        if type(size) is not int or (size < 1 and size != -1):
            raise self._bad_setting("group_size", size, "-1 (one group a row) and whole numbers from 1")
        self._group = size

    def _check(self) -> None:
        super()._check()
        reasons = self._inexact()
        if reasons:
            self._dequantize_because(" and ".join(reasons))
        else:
            self.precision = "int4"

    def _inexact(self) -> list[str]:
        """Why layers cannot be `Int4Weights`; empty: they can."""
        reasons = [] if self._is_symmetric else ["zero points"]
        if self._group not in _EXACT_GROUPS:
            reasons.append("one scale a row" if self._group == -1 else f"groups of {self._group}")
        elif any(linear_shape(self.config, name)[1] % self._group for name in self._packed_names()):
            reasons.append(f"groups of {self._group} that do not divide a row")
        return reasons

    def _grouped_linear(self, name: str, codes: np.ndarray, zeros: np.ndarray, groups: np.ndarray) -> LinearWeights:
        """The layer with uint8 `codes` [out, in], uint8 `zeros` [groups, out], and `groups` [in], the group of each input."""
        scales = self._scales(f"{name}.scales")
        if self._is_symmetric and (zeros != _SYMMETRIC_ZERO).any():
            what = f"holds zero points other than {_SYMMETRIC_ZERO}, though config.json says that weights are symmetric"
            raise self._bad_tensor(f"{name}.qzeros", what)
        bias = self._bias(name)
        if not self.is_dequantized:
            values = codes.view(np.int8)
            values -= _SYMMETRIC_ZERO
            return Int4Weights(values, np.ascontiguousarray(scales.T), self._group, bias=bias)
        # A four-bit number times a float of 16 bits fits into a float32: nothing is rounded.
        weight = codes.astype(np.float32)
        weight -= zeros.T[:, groups]
        weight *= scales.T[:, groups]
        return FloatWeights(weight, bias)

    def _groups_of(self, num_in: int) -> np.ndarray:
        """int [in]: the group of each input where they are neighbours."""
        return np.arange(num_in) // self._width(num_in)

    def _width(self, num_in: int) -> int:
        return num_in if self._group == -1 else self._group

    def _num_groups(self, num_in: int) -> int:
        return -(-num_in // self._width(num_in))
