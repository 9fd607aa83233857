"""One class for each weight precision, each knowing its tensors and its nodes; the decoder is handed them.

A linear maps x [T, in] to [T, out]. Quantized ones are explicit: DequantizeLinear with `block_size` on the
weight, then MatMul, which TensorRT and ONNX Runtime each fuse into a kernel that reads the packed weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import ml_dtypes
import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from build_engines.checkpoint.types import FloatWeights, Int4Weights, Int8Weights, LinearWeights
from build_engines.graph.ops import GraphBuilder


class Linear(Protocol):
    def tensors(self) -> dict[str, ir.TensorProtocol]:
        """The weights to store, by the name that the graph refers to."""
        ...

    def __call__(self, b: GraphBuilder, x: ir.Value) -> ir.Value: ...


@dataclass(frozen=True)
class FloatLinear:
    """float32 weight [out, in]."""

    name: str
    weights: FloatWeights

    def tensors(self) -> dict[str, ir.TensorProtocol]:
        return _named(self.name, weight=self.weights.weight, bias=self.weights.bias)

    def __call__(self, b: GraphBuilder, x: ir.Value) -> ir.Value:
        bias = None if self.weights.bias is None else b.weight(f"{self.name}.bias")
        inputs = [x, b.weight(f"{self.name}.weight")] + ([bias] if bias is not None else [])
        return b.op("Gemm", *inputs, transB=1)


@dataclass(frozen=True)
class BlockQuantizedLinear:
    """int4 or int8 weight with one float32 scale for each block of inputs; stored [in, out], scales [in/block, out]."""

    name: str
    weights: Int4Weights | Int8Weights

    def tensors(self) -> dict[str, ir.TensorProtocol]:
        dtype = ml_dtypes.int4 if isinstance(self.weights, Int4Weights) else np.int8
        values = np.ascontiguousarray(self.weights.values.T).astype(dtype)
        scales = np.ascontiguousarray(self.weights.scales.T, dtype=np.float32)
        w = self.weights
        return _named(self.name, weight=values, weight_scale=scales, pre_quant_scale=w.pre_quant_scale, bias=w.bias)

    def __call__(self, b: GraphBuilder, x: ir.Value) -> ir.Value:
        if self.weights.pre_quant_scale is not None:
            x = b.op("Mul", x, b.weight(f"{self.name}.pre_quant_scale"))
        scales = b.weight(f"{self.name}.weight_scale")
        weight = b.op("DequantizeLinear", b.weight(f"{self.name}.weight"), scales, axis=0, block_size=self.weights.block_size)
        y = b.op("MatMul", x, weight)
        return y if self.weights.bias is None else b.op("Add", y, b.weight(f"{self.name}.bias"))


@dataclass(frozen=True)
class RowQuantizedLinear:
    """int8 weight with one float32 scale for each output, multiplied in integers; stored [in, out].

    Each row of x is rounded to eight bits by its own largest value, so a row's result never depends on the rows beside it.
    The sum over the inputs is exact. ONNX Runtime's integer product is faster than its block-wise one, most of all in a
    batch.
    """

    name: str
    weights: Int8Weights

    def tensors(self) -> dict[str, ir.TensorProtocol]:
        values = np.ascontiguousarray(self.weights.values.T)
        return _named(self.name, weight=values, weight_scale=self.weights.scales.reshape(-1), bias=self.weights.bias)

    def __call__(self, b: GraphBuilder, x: ir.Value) -> ir.Value:
        largest = b.op("ReduceMax", b.op("Abs", x), b.const([-1]), keepdims=1)
        scale = b.op("Div", b.op("Max", largest, b.const(np.finfo(np.float32).tiny, np.float32)), b.const(127, np.float32))
        rounded = b.op("Add", b.op("Round", b.op("Div", x, scale)), b.const(128, np.float32))
        y = b.op(
            "MatMulIntegerToFloat",
            b.op("Cast", rounded, to=ir.DataType.UINT8),
            b.weight(f"{self.name}.weight"),
            b.const(1, np.float32),
            b.weight(f"{self.name}.weight_scale"),
            b.const(128, np.uint8),
            domain="com.microsoft",
        )
        y = b.op("Mul", y, scale)
        return y if self.weights.bias is None else b.op("Add", y, b.weight(f"{self.name}.bias"))


@dataclass(frozen=True)
class SideBySide:
    """Several linears of one input whose outputs stand beside each other, when their weights cannot be one matrix."""

    linears: tuple[Linear, ...]

    def tensors(self) -> dict[str, ir.TensorProtocol]:
        return {name: tensor for linear in self.linears for name, tensor in linear.tensors().items()}

    def __call__(self, b: GraphBuilder, x: ir.Value) -> ir.Value:
        return b.op("Concat", *(linear(b, x) for linear in self.linears), axis=-1)


def make_linear(name: str, weights: LinearWeights) -> Linear:
    """The linear class of these weights: the one place that decides it."""
    if isinstance(weights, FloatWeights):
        return FloatLinear(name, weights)
    if isinstance(weights, Int8Weights) and weights.block_size == weights.values.shape[1]:
        return RowQuantizedLinear(name, weights)
    return BlockQuantizedLinear(name, weights)


def make_fused_linear(prefix: str, parts: Sequence[tuple[str, LinearWeights]]) -> Linear:
    """One matrix out of several that share their input (q|k|v, gate|up): fewer, larger products.

    Output channels are independent in every precision here, so stacking them changes no number. Where the parts
    differ in precision, block or input scale they stay apart.
    """
    weights = [part for _, part in parts]
    name = f"{prefix}.{'_'.join(name.removesuffix('_proj') for name, _ in parts)}_proj"
    bias = _stack_bias(weights)
    floats = [w for w in weights if isinstance(w, FloatWeights)]
    if len(floats) == len(weights):
        return FloatLinear(name, FloatWeights(np.concatenate([w.weight for w in floats]), bias))
    for kind in (Int4Weights, Int8Weights):
        blocks = [w for w in weights if isinstance(w, kind)]
        if len(blocks) == len(weights) and all(_same_input(blocks[0], other) for other in blocks[1:]):
            values = np.concatenate([w.values for w in blocks])
            scales = np.concatenate([w.scales for w in blocks])
            return make_linear(name, kind(values, scales, blocks[0].block_size, blocks[0].pre_quant_scale, bias))
    return SideBySide(tuple(make_linear(f"{prefix}.{name}", part) for name, part in parts))


def _same_input(a: Int4Weights | Int8Weights, b: Int4Weights | Int8Weights) -> bool:
    """Whether both see their input cut into the same blocks after the same scaling."""
    if a.pre_quant_scale is None or b.pre_quant_scale is None:
        return a.block_size == b.block_size and a.pre_quant_scale is b.pre_quant_scale
    return a.block_size == b.block_size and np.array_equal(a.pre_quant_scale, b.pre_quant_scale)


def _stack_bias(weights: Sequence[LinearWeights]) -> NDArray[np.float32] | None:
    biases = [w.bias for w in weights]
    if all(bias is None for bias in biases):
        return None
    widths = [len(w.weight if isinstance(w, FloatWeights) else w.values) for w in weights]
    return np.concatenate([np.zeros(n, np.float32) if b is None else b for n, b in zip(widths, biases, strict=True)])


def _named(prefix: str, **arrays: NDArray | None) -> dict[str, ir.TensorProtocol]:
    return {f"{prefix}.{key}": ir.tensor(array, name=f"{prefix}.{key}") for key, array in arrays.items() if array is not None}
