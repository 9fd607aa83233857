"""The decoder: reads like the model. Family differences are facts in DecoderConfig, not code paths elsewhere."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from build_engines.checkpoint.types import Checkpoint, Int8Weights, LinearFacts, LinearWeights, linear_facts, tensor_shapes
from build_engines.graph.attention import Attention, Cache, FusedAttention, StandardAttention
from build_engines.graph.io import FLOAT, GraphInputs, declare_inputs
from build_engines.graph.layers import Rotary, gated_mlp, head_norm, make_rotary, rms_norm
from build_engines.graph.linear import Linear, make_fused_linear, make_linear
from build_engines.graph.numerics import NUMPY_TYPES, Numerics
from build_engines.graph.ops import GraphBuilder
from llm_runtime.manifest import QUANTIZED_GRAPHS, GraphName, layers_by_table, quantized_head_bytes

EMBEDDING = "model.embed_tokens"


@dataclass(frozen=True)
class Layer:
    """The linears of one decoder layer; its norms are tensors by name."""

    prefix: str
    qkv: Linear
    output: Linear
    gate_up: Linear
    down: Linear


class Decoder:
    """Holds the linears and small tensors of one checkpoint; `build` writes the graph for one kind of attention."""

    def __init__(self, checkpoint: Checkpoint, head: Linear, embedding: Int8Weights | np.ndarray, numerics: Numerics) -> None:
        """`head` may be a `FloatLinear` named `EMBEDDING`: a tied table, stored once."""
        self.config = checkpoint.config
        self.numerics = numerics
        self.linear_facts: list[LinearFacts] = []  # of each linear but the head, as the checkpoint has it
        self.layers = [self._load_layer(checkpoint, index) for index in range(self.config.num_layers)]
        self.head = head
        self._cache_scales = [checkpoint.cache_scales(index) for index in range(self.config.num_layers)]
        self._embedding_block = embedding.block_size if isinstance(embedding, Int8Weights) else 0
        self._tensors = _embedding_tensors(embedding, numerics) | _norm_tensors(checkpoint)

    def _load_layer(self, checkpoint: Checkpoint, index: int) -> Layer:
        prefix, numerics = f"model.layers.{index}", self.numerics
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"

        def load(name: str) -> LinearWeights:
            weights = checkpoint.linear(name)
            self.linear_facts.append(linear_facts(weights))
            return weights

        def parts(parent: str, *names: str) -> list[tuple[str, LinearWeights]]:
            return [(name, load(f"{parent}.{name}")) for name in names]

        return Layer(
            prefix=prefix,
            qkv=make_fused_linear(attention, parts(attention, "q_proj", "k_proj", "v_proj"), numerics),
            output=make_linear(f"{attention}.o_proj", load(f"{attention}.o_proj"), numerics),
            gate_up=make_fused_linear(mlp, parts(mlp, "gate_proj", "up_proj"), numerics),
            down=make_linear(f"{mlp}.down_proj", load(f"{mlp}.down_proj"), numerics),
        )

    def tensors(self) -> dict[str, ir.TensorProtocol]:
        """Every weight by its name in the graph."""
        linears = [self.head] + [part for layer in self.layers for part in (layer.qkv, layer.output, layer.gate_up, layer.down)]
        return self._tensors | {name: tensor for linear in linears for name, tensor in linear.tensors().items()}

    def build(self, weights: dict[str, ir.TensorProtocol], *, kind: GraphName, page_size: int, name: str) -> ir.Model:
        """The graph over `weights` (what `tensors` gave, possibly moved to a file)."""
        config = self.config
        b = GraphBuilder(weights, self.numerics.compute_type)
        quantized = QUANTIZED_GRAPHS.get(kind)  # its pages hold bytes: the scales and the values of each head
        page_type = ir.DataType.UINT8 if quantized else self.numerics.cache_type
        head = (config.num_kv_heads, quantized_head_bytes(config.head_dim) if quantized else config.head_dim)
        fused = kind != "standard"
        page_shape = ("N", page_size, *head)
        groups = layers_by_table(config.layer_windows)
        inputs = declare_inputs(
            b,
            fused=fused,
            windows=config.layer_windows,
            window_table=len(groups) > 1,
            page_shape=page_shape,
            page_type=page_type,
        )
        attention: Attention
        if fused:
            attention = FusedAttention(config, inputs, quantized or "fp32")
        else:
            attention = StandardAttention(config, inputs, page_size, Cache(self.numerics, self._cache_scales))
        rotaries = self._rotaries(b, inputs)
        hidden = self._embed(b, inputs["input_ids"])
        kept: list[tuple[ir.Value, ir.Value]] = []
        for index, layer in enumerate(self.layers):
            hidden, key, value = self._layer(b, index, layer, hidden, rotaries[index], attention)
            kept.append((key, value))
        new = [part for layers in groups for index in layers for part in kept[index]]
        last = b.op("Gather", hidden, inputs["logit_positions"])
        logits = b.to_float32(self.head(b, rms_norm(b, last, "model.norm.weight", config.rms_norm_eps)))
        new_shape = [config.num_layers, 2, -1, *head]
        new_keys_values = b.op("Reshape", b.op("Concat", *new, axis=0), b.const(new_shape))
        return b.finish(
            [
                ("logits", logits, FLOAT, ("L", config.vocab_size)),
                ("new_keys_values", new_keys_values, page_type, (config.num_layers, 2, "T", *head)),
            ],
            name,
        )

    def _rotaries(self, b: GraphBuilder, inputs: GraphInputs) -> list[Rotary]:
        made: dict[tuple[bytes, float], Rotary] = {}
        rotaries = []
        for rope in self.config.layer_ropes:
            key = (rope.inverse_frequencies.tobytes(), rope.attention_factor)
            if key not in made:
                made[key] = make_rotary(b, inputs["position_ids"], rope.inverse_frequencies, rope.attention_factor)
            rotaries.append(made[key])
        return rotaries

    def _embed(self, b: GraphBuilder, input_ids: ir.Value) -> ir.Value:
        rows = b.op("Gather", b.weight(f"{EMBEDDING}.weight"), input_ids)
        if self._embedding_block:
            scales = b.op("Gather", b.weight(f"{EMBEDDING}.weight_scale"), input_ids)
            rows = b.op("DequantizeLinear", rows, scales, axis=1, block_size=self._embedding_block)
        elif self.numerics.floats != self.numerics.compute:
            rows = b.op("Cast", rows, to=self.numerics.compute_type)
        if self.config.embed_scale == 1.0:
            return rows
        return b.op("Mul", rows, b.const(self.config.embed_scale, NUMPY_TYPES[self.numerics.compute]))

    def _layer(
        self,
        b: GraphBuilder,
        index: int,
        layer: Layer,
        hidden: ir.Value,
        rotary: Rotary,
        attention: Attention,
    ) -> tuple[ir.Value, ir.Value, ir.Value]:
        """(hidden after the layer [T, hidden]; rotated key and value [T, ...] as they are kept in pages)"""
        config, eps = self.config, self.config.rms_norm_eps
        qkv = layer.qkv(b, rms_norm(b, hidden, f"{layer.prefix}.input_layernorm.weight", eps))
        query, key, value = b.ops(
            "Split", qkv, b.const([config.query_size, config.kv_size, config.kv_size]), num_outputs=3, axis=-1
        )
        if config.qk_norm:
            query = head_norm(b, query, f"{layer.prefix}.self_attn.q_norm.weight", config.num_heads, config)
            key = head_norm(b, key, f"{layer.prefix}.self_attn.k_norm.weight", config.num_kv_heads, config)
        query, key = rotary(b, query, config.num_heads), rotary(b, key, config.num_kv_heads)
        attended, key, value = attention(b, index, query, key, value)
        attended = layer.output(b, attended)
        if config.post_norms:
            attended = rms_norm(b, attended, f"{layer.prefix}.post_attention_layernorm.weight", eps)
        hidden = b.op("Add", hidden, attended)
        mlp_norm = "pre_feedforward_layernorm" if config.post_norms else "post_attention_layernorm"
        normed = rms_norm(b, hidden, f"{layer.prefix}.{mlp_norm}.weight", eps)
        mlp = gated_mlp(b, normed, layer.gate_up, layer.down, config)
        if config.post_norms:
            mlp = rms_norm(b, mlp, f"{layer.prefix}.post_feedforward_layernorm.weight", eps)
        return b.op("Add", hidden, mlp), key, value


def _norm_tensors(checkpoint: Checkpoint) -> dict[str, ir.TensorProtocol]:
    """Norm weights as multipliers: Gemma stores them less one."""
    offset = np.float32(checkpoint.config.norm_weight_offset)
    names = [name for name in tensor_shapes(checkpoint.config) if not name.startswith(EMBEDDING)]
    return {name: ir.tensor(checkpoint.tensor(name) + offset, name=name) for name in names}


def _embedding_tensors(embedding: Int8Weights | np.ndarray, numerics: Numerics) -> dict[str, ir.TensorProtocol]:
    if isinstance(embedding, np.ndarray):
        arrays = {f"{EMBEDDING}.weight": numerics.stored(embedding)}
    else:
        arrays = {f"{EMBEDDING}.weight": embedding.values, f"{EMBEDDING}.weight_scale": numerics.computed(embedding.scales)}
    return {name: ir.tensor(array, name=name) for name, array in arrays.items()}
