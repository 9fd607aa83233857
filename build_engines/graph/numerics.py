"""Which types a graph stores and computes in: what differs between the runtimes that a graph is made for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir

from llm_runtime.manifest import CacheName, FloatName, Runtime

IR_TYPES = {
    "fp32": ir.DataType.FLOAT,
    "fp16": ir.DataType.FLOAT16,
    "bf16": ir.DataType.BFLOAT16,
    "fp8": ir.DataType.FLOAT8E4M3FN,
}
NUMPY_TYPES: dict[str, Any] = {"fp32": np.float32, "fp16": np.float16, "bf16": ml_dtypes.bfloat16}


@dataclass(frozen=True)
class Numerics:
    """`floats` is how weights that are not quantized are stored, `compute` what everything is calculated in (norms, rotations
    and logits are float32 always), `cache` the type of the KV pages."""

    runtime: Runtime = "onnxruntime"
    floats: FloatName = "fp32"
    compute: FloatName = "fp32"
    cache: CacheName = "fp32"

    @property
    def is_tensorrt(self) -> bool:
        return self.runtime != "onnxruntime"

    @property
    def compute_type(self) -> ir.DataType:
        return IR_TYPES[self.compute]

    @property
    def cache_type(self) -> ir.DataType:
        return IR_TYPES[self.cache]

    def stored(self, array: np.ndarray) -> np.ndarray:
        """A weight matrix or table as it is stored."""
        return array.astype(NUMPY_TYPES[self.floats], copy=False)

    def computed(self, array: np.ndarray | float) -> np.ndarray:
        """A vector or scale in the type that is calculated in."""
        return np.asarray(array).astype(NUMPY_TYPES[self.compute], copy=False)
