"""The layers of a decoder as functions from values to values; shapes are ragged (T tokens of all rows)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from build_engines.checkpoint.types import DecoderConfig
from build_engines.graph.linear import Linear
from build_engines.graph.ops import GraphBuilder


def rms_norm(b: GraphBuilder, x: ir.Value, name: str, epsilon: float) -> ir.Value:
    """x [..., features] / rms(x) * weight, all in float32 (arXiv 1910.07467)."""
    return b.to_compute(b.op("RMSNormalization", b.to_float32(x), b.weight(name), axis=-1, epsilon=epsilon, stash_type=1))


@dataclass(frozen=True)
class Rotary:
    """cos and sin [1, T, head_dim/2] of the step's positions, for one set of frequencies (arXiv 2104.09864)."""

    cos: ir.Value
    sin: ir.Value

    def __call__(self, b: GraphBuilder, x: ir.Value, num_heads: int) -> ir.Value:
        """x [T, heads*dim] rotated by halves, as the checkpoints of these families store their heads."""
        batched = b.op("Unsqueeze", x, b.const([0]))
        rotated = b.op("RotaryEmbedding", batched, self.cos, self.sin, num_heads=num_heads, interleaved=0)
        return b.op("Squeeze", rotated, b.const([0]))


def make_rotary(b: GraphBuilder, position_ids: ir.Value, inverse_frequencies: np.ndarray, attention_factor: float) -> Rotary:
    """Computed from the positions rather than looked up: no table to store, and no context limit in it."""
    positions = b.op("Unsqueeze", b.op("Cast", position_ids, to=ir.DataType.FLOAT), b.const([0, 2]))
    angles = b.op("Mul", positions, b.const(inverse_frequencies, np.float32))
    cos, sin = b.op("Cos", angles), b.op("Sin", angles)
    if attention_factor != 1.0:
        factor = b.const(attention_factor, np.float32)
        cos, sin = b.op("Mul", cos, factor), b.op("Mul", sin, factor)
    return Rotary(b.to_compute(cos), b.to_compute(sin))


def gelu_tanh(b: GraphBuilder, x: ir.Value) -> ir.Value:
    return b.op("Gelu", x, approximate="tanh")


def silu(b: GraphBuilder, x: ir.Value) -> ir.Value:
    return b.op("Mul", x, b.op("Sigmoid", x))


ACTIVATIONS = {"silu": silu, "gelu_tanh": gelu_tanh}


def gated_mlp(b: GraphBuilder, x: ir.Value, gate_up: Linear, down: Linear, config: DecoderConfig) -> ir.Value:
    """down(act(gate(x)) * up(x)) (arXiv 2002.05202)."""
    sizes = b.const([config.intermediate_size] * 2)
    gate, up = b.ops("Split", gate_up(b, x), sizes, num_outputs=2, axis=-1)
    return down(b, b.op("Mul", ACTIVATIONS[config.activation](b, gate), up))


def head_norm(b: GraphBuilder, x: ir.Value, name: str, num_heads: int, config: DecoderConfig) -> ir.Value:
    """Norm over each head's features: x [T, heads*dim] -> the same shape."""
    heads = b.op("Reshape", x, b.const([-1, num_heads, config.head_dim]))
    normed = rms_norm(b, heads, name, config.rms_norm_eps)
    return b.op("Reshape", normed, b.const([-1, num_heads * config.head_dim]))
