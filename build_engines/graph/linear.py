"""One class for each way to multiply by a weight, each knowing its tensors and its nodes; the decoder is handed them.

A linear maps x [T, in] to [T, out]. Quantized ones are explicit: DequantizeLinear on the weight (and, where inputs are rounded
too, QuantizeLinear and DequantizeLinear on x), then MatMul, which TensorRT and ONNX Runtime each fuse into a kernel that reads
the packed weight. The one exception is named at its class.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import ml_dtypes
import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from build_engines.checkpoint.types import (
    FP4_BLOCK,
    FloatWeights,
    Fp4Weights,
    Fp8Weights,
    Int4Weights,
    Int8Weights,
    LinearWeights,
    QuantizedWeights,
)
from build_engines.graph.numerics import Numerics
from build_engines.graph.ops import GraphBuilder

# ONNX Runtime's product with packed 8-bit weights wants blocks; a row's one scale is repeated for each.
ROW_BLOCKS = (128, 64, 32, 16)


class Linear(Protocol):
    def tensors(self) -> dict[str, ir.TensorProtocol]:
        """The weights to store, by the name that the graph refers to."""
        ...

    def __call__(self, b: GraphBuilder, x: ir.Value) -> ir.Value: ...


@dataclass(frozen=True)
class FloatLinear:
    """Weight [out, in] in a float type; where it is stored in fewer bits than are computed in, it is widened at load."""

    name: str
    weights: FloatWeights
    numerics: Numerics

    def tensors(self) -> dict[str, ir.TensorProtocol]:
        return _named(self.name, self.numerics, weight=self.numerics.stored(self.weights.weight), bias=self.weights.bias)

    def __call__(self, b: GraphBuilder, x: ir.Value) -> ir.Value:
        weight = b.weight(f"{self.name}.weight")
        if self.numerics.floats != self.numerics.compute:
            weight = b.op("Cast", weight, to=self.numerics.compute_type)
        bias = [] if self.weights.bias is None else [b.weight(f"{self.name}.bias")]
        return b.op("Gemm", x, weight, *bias, transB=1)


@dataclass(frozen=True)
class BlockQuantizedLinear:
    """int4 or int8 weight with one scale for each block of inputs; stored [in, out], scales [in/block, out]."""

    name: str
    weights: Int4Weights | Int8Weights
    numerics: Numerics

    def tensors(self) -> dict[str, ir.TensorProtocol]:
        w = self.weights
        dtype = ml_dtypes.int4 if isinstance(w, Int4Weights) else np.int8
        values = np.ascontiguousarray(w.values.T).astype(dtype)
        scales = np.ascontiguousarray(w.scales.T, dtype=np.float32)
        return _named(
            self.name, self.numerics, weight=values, weight_scale=scales, pre_quant_scale=w.pre_quant_scale, bias=w.bias
        )

    def __call__(self, b: GraphBuilder, x: ir.Value) -> ir.Value:
        x = _pre_scaled(b, self.name, self.weights, x)
        scales = b.weight(f"{self.name}.weight_scale")
        weight = b.op("DequantizeLinear", b.weight(f"{self.name}.weight"), scales, axis=0, block_size=self.weights.block_size)
        return _biased(b, self.name, self.weights, b.op("MatMul", x, weight))


@dataclass(frozen=True)
class ScaledLinear:
    """int8 or FP8 weight with one scale for each output, stored [in, out]; its input rounded to the same type where it has an
    `input_scale` (W8A8), else not (weight-only)."""

    name: str
    weights: Int8Weights | Fp8Weights
    numerics: Numerics

    def tensors(self) -> dict[str, ir.TensorProtocol]:
        w = self.weights
        return _named(
            self.name,
            self.numerics,
            weight=np.ascontiguousarray(w.values.T),
            weight_scale=w.scales.reshape(-1),
            input_scale=None if w.input_scale is None else np.array(w.input_scale, np.float32),
            pre_quant_scale=w.pre_quant_scale,
            bias=w.bias,
        )

    def __call__(self, b: GraphBuilder, x: ir.Value) -> ir.Value:
        x = _pre_scaled(b, self.name, self.weights, x)
        zero_type = np.int8 if isinstance(self.weights, Int8Weights) else ml_dtypes.float8_e4m3fn
        if self.weights.input_scale is not None:
            x = quantized_and_back(b, x, b.weight(f"{self.name}.input_scale"), zero_type)
        return _biased(b, self.name, self.weights, b.op("MatMul", x, self._weight(b)))

    def _weight(self, b: GraphBuilder) -> ir.Value:
        values, scales = b.weight(f"{self.name}.weight"), b.weight(f"{self.name}.weight_scale")
        if isinstance(self.weights, Fp8Weights) and not self.numerics.is_tensorrt:
            # ONNX Runtime has no product with FP8 weights, and would dequantize them anew in every step. This it folds at load.
            return b.op("Mul", b.op("Cast", values, to=self.numerics.compute_type), scales)
        return b.op("DequantizeLinear", values, scales, axis=1)


@dataclass(frozen=True)
class Fp4Linear:
    """NVFP4 weight stored [out, in] with scales [out, in/16]; for TensorRT. ONNX Runtime has no FP4: see `make_linear`.

    Inputs that are rounded too go through TensorRT's own operator, which finds each block's scale as it runs.
    """

    name: str
    weights: Fp4Weights
    numerics: Numerics

    def tensors(self) -> dict[str, ir.TensorProtocol]:
        w = self.weights
        matrix_scale = float(w.global_scale[0])
        return _named(
            self.name,
            self.numerics,
            weight=w.values,
            weight_scale=w.block_scales,
            weight_scale_2=np.array(matrix_scale, np.float32),
            input_scale=None if w.input_scale is None else np.array(w.input_scale, np.float32),
            pre_quant_scale=w.pre_quant_scale,
            bias=w.bias,
        )

    def __call__(self, b: GraphBuilder, x: ir.Value) -> ir.Value:
        x = _pre_scaled(b, self.name, self.weights, x)
        if self.weights.input_scale is not None:
            scale = b.weight(f"{self.name}.input_scale")
            values, block_scales = b.ops(
                "TRT_FP4DynamicQuantize",
                x,
                scale,
                num_outputs=2,
                domain="trt",
                axis=-1,
                block_size=FP4_BLOCK,
                scale_type=int(ir.DataType.FLOAT8E4M3FN),
            )
            scales = b.op("DequantizeLinear", block_scales, scale)
            x = b.op("DequantizeLinear", values, scales, axis=-1, block_size=FP4_BLOCK)
        scales = b.op("DequantizeLinear", b.weight(f"{self.name}.weight_scale"), b.weight(f"{self.name}.weight_scale_2"))
        weight = b.op("DequantizeLinear", b.weight(f"{self.name}.weight"), scales, axis=1, block_size=FP4_BLOCK)
        y = b.op("MatMul", x, b.op("Transpose", weight, perm=[1, 0]))
        return _biased(b, self.name, self.weights, y)


@dataclass(frozen=True)
class IntegerRowLinear:
    """int8 weight with one float32 scale for each output, multiplied in integers; stored [in, out]. For ONNX Runtime.

    Each row of x is rounded to eight bits by its own largest value, so a row's result never depends on the rows beside it.
    The sum over the inputs is exact. ONNX Runtime's integer product is faster than its block-wise one, most of all in a
    batch. Values must fit seven bits: processors without VNNI add two products of an unsigned and a signed byte in 16 bits.
    """

    name: str
    weights: Int8Weights

    def tensors(self) -> dict[str, ir.TensorProtocol]:
        values = np.ascontiguousarray(self.weights.values.T)
        scales = self.weights.scales.reshape(-1)
        return _named(self.name, Numerics(), weight=values, weight_scale=scales, bias=self.weights.bias)

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
        return _biased(b, self.name, self.weights, b.op("Mul", y, scale))


@dataclass(frozen=True)
class SideBySide:
    """Several linears of one input whose outputs stand beside each other, when their weights cannot be one matrix."""

    linears: tuple[Linear, ...]

    def tensors(self) -> dict[str, ir.TensorProtocol]:
        return {name: tensor for linear in self.linears for name, tensor in linear.tensors().items()}

    def __call__(self, b: GraphBuilder, x: ir.Value) -> ir.Value:
        return b.op("Concat", *(linear(b, x) for linear in self.linears), axis=-1)


def make_linear(name: str, weights: LinearWeights, numerics: Numerics) -> Linear:
    """The linear class of these weights for one runtime: the one place that decides it."""
    if isinstance(weights, FloatWeights):
        return FloatLinear(name, weights, numerics)
    if isinstance(weights, Int4Weights):
        return BlockQuantizedLinear(name, weights, numerics)
    if isinstance(weights, Fp4Weights):
        return (
            Fp4Linear(name, weights, numerics)
            if numerics.is_tensorrt
            else BlockQuantizedLinear(name, _fp4_as_int8(weights), numerics)
        )
    if isinstance(weights, Int8Weights) and weights.block_size < weights.values.shape[1]:
        return BlockQuantizedLinear(name, weights, numerics)
    if isinstance(weights, Int8Weights) and weights.input_scale is None and not numerics.is_tensorrt:
        return BlockQuantizedLinear(name, _in_blocks(weights), numerics)
    return ScaledLinear(name, weights, numerics)


def make_fused_linear(prefix: str, parts: Sequence[tuple[str, LinearWeights]], numerics: Numerics) -> Linear:
    """One matrix out of several that share their input (q|k|v, gate|up): fewer, larger products.

    Output channels are independent in every precision here, so stacking them changes no number. Where the parts
    differ in precision, block or input scale they stay apart.
    """
    name = f"{prefix}.{'_'.join(name.removesuffix('_proj') for name, _ in parts)}_proj"
    stacked = stack([weights for _, weights in parts])
    if stacked is not None:
        return make_linear(name, stacked, numerics)
    return SideBySide(tuple(make_linear(f"{prefix}.{name}", weights, numerics) for name, weights in parts))


def stack(parts: Sequence[LinearWeights]) -> LinearWeights | None:
    """The weights above each other as one layer's; None where they cannot be one."""
    first, bias = parts[0], _stack_bias(parts)
    if any(type(part) is not type(first) for part in parts):
        return None
    if isinstance(first, FloatWeights):
        return FloatWeights(_stacked(parts, "weight"), bias)
    if not all(_same_input(first, other) for other in parts[1:]):  # type: ignore[arg-type]
        return None
    fields = ("values", "block_scales", "global_scale") if isinstance(first, Fp4Weights) else ("values", "scales")
    if isinstance(first, Fp4Weights) and len(np.unique(_stacked(parts, "global_scale"))) > 1:
        return None  # the graph has one global scale a matrix
    changes: dict[str, Any] = {field: _stacked(parts, field) for field in fields}
    return replace(first, bias=bias, **changes)


def quantized_and_back(b: GraphBuilder, x: ir.Value, scale: ir.Value, zero_type: type[np.generic]) -> ir.Value:
    """x rounded to whole multiples of `scale` that `zero_type` can hold."""
    zero = b.const(0, zero_type)
    return b.op("DequantizeLinear", b.op("QuantizeLinear", x, scale, zero), scale, zero)


def _fp4_as_int8(weights: Fp4Weights) -> Int8Weights:
    """Twice an E2M1 number is a whole one of at most 12, so that eight bits with half the scale say exactly the same."""
    values = (weights.values.astype(np.float32) * 2).astype(np.int8)
    return Int8Weights(values, weights.scales / 2, FP4_BLOCK, weights.pre_quant_scale, weights.bias)


def _in_blocks(weights: Int8Weights) -> Int8Weights:
    num_in = weights.values.shape[1]
    block = next((block for block in ROW_BLOCKS if num_in % block == 0), num_in)
    return replace(weights, scales=np.repeat(weights.scales, num_in // block, axis=1), block_size=block)


def _pre_scaled(b: GraphBuilder, name: str, weights: QuantizedWeights, x: ir.Value) -> ir.Value:
    return x if weights.pre_quant_scale is None else b.op("Mul", x, b.weight(f"{name}.pre_quant_scale"))


def _biased(b: GraphBuilder, name: str, weights: QuantizedWeights, y: ir.Value) -> ir.Value:
    return y if weights.bias is None else b.op("Add", y, b.weight(f"{name}.bias"))


def _same_input(a: QuantizedWeights, b: QuantizedWeights) -> bool:
    """Whether both see their input cut into the same blocks after the same scaling and rounding."""
    if getattr(a, "block_size", None) != getattr(b, "block_size", None):
        return False
    if getattr(a, "input_scale", None) != getattr(b, "input_scale", None):
        return False
    if a.pre_quant_scale is None or b.pre_quant_scale is None:
        return a.pre_quant_scale is b.pre_quant_scale
    return np.array_equal(a.pre_quant_scale, b.pre_quant_scale)


def _stacked(parts: Sequence[LinearWeights], field: str) -> NDArray:
    return np.concatenate([getattr(part, field) for part in parts])


def _stack_bias(parts: Sequence[LinearWeights]) -> NDArray[np.float32] | None:
    if all(part.bias is None for part in parts):
        return None
    widths = [len(part.weight if isinstance(part, FloatWeights) else part.values) for part in parts]
    return np.concatenate(
        [np.zeros(n, np.float32) if part.bias is None else part.bias for n, part in zip(widths, parts, strict=True)]
    )


def _named(prefix: str, numerics: Numerics, **arrays: NDArray | None) -> dict[str, ir.TensorProtocol]:
    """Tensors by name; all that is float32 still, scales and biases, in the type that is computed in."""
    tensors = {}
    for key, array in arrays.items():
        if array is not None:
            array = numerics.computed(array) if array.dtype == np.float32 and key != "weight" else array
            tensors[f"{prefix}.{key}"] = ir.tensor(array, name=f"{prefix}.{key}")
    return tensors
