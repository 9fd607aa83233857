"""What a checkpoint is to the rest of the builder: plain data, and one interface to read weights by name.

Names are those of Hugging Face modules (`model.layers.0.self_attn.q_proj`, `model.norm`, `lm_head`), whatever file the weights
came from, so that the graph, the quantizer and the tests speak of a layer with the same word.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3")


@dataclass(frozen=True, eq=False)
class Rope:
    """Rotary embedding of one kind of layer, scaling (linear, llama3, yarn) already applied.

    The angle of pair i at position p is `p * inverse_frequencies[i]`; cos and sin are both multiplied by `attention_factor`.
    Pairs are (i, i + head_dim/2), the "rotate half" convention of Hugging Face checkpoints.
    """

    inverse_frequencies: np.ndarray  # float32 [head_dim / 2]
    attention_factor: float = 1.0


@dataclass(frozen=True, eq=False)
class DecoderConfig:
    """Everything about a decoder that is not a weight.

    A layer is `x += post(attention(norm(x)))` and `x += post(mlp(norm(x)))`; `post` is a norm if `post_norms`, else nothing.
    """

    family: str  # one of FAMILIES
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_context: int  # positions the model was made for
    layer_windows: tuple[int, ...]  # per layer; 0: full attention; w: positions p with q - w < p <= q
    layer_ropes: tuple[Rope, ...]  # per layer; layers of one kind share one object
    attention_scale: float  # multiplies query @ key
    activation: str  # "silu" or "gelu_tanh"
    tie_embeddings: bool
    qkv_bias: bool  # q, k and v have biases; `LinearWeights.bias` tells for each linear
    qk_norm: bool  # RMS norm over head_dim of each query and key head, before the rotation
    post_norms: bool  # norms after attention and after the MLP, before the residual sum
    norm_weight_offset: float  # a norm multiplies by (offset + weight): 1.0 for Gemma, else 0.0
    embed_scale: float  # multiplies the embedding of every token
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    @property
    def query_size(self) -> int:
        """Width of all query heads together, the input of `o_proj`."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key (or value) heads together."""
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True, eq=False)
class FloatWeights:
    """A linear layer in full precision: `y = x @ weight.T + bias`."""

    weight: np.ndarray  # float32 [out, in]
    bias: np.ndarray | None = None  # float32 [out]

    def dequantize(self) -> np.ndarray:
        return self.weight


@dataclass(frozen=True, eq=False)
class Int4Weights:
    """A linear layer with symmetric INT4 weights in blocks along its input.

    `y = (x * pre_quant_scale) @ (values * scales repeated block_size times along in).T + bias`
    """

    values: np.ndarray  # int8 [out, in], each in -8..7
    scales: np.ndarray  # float32 [out, in / block_size]
    block_size: int
    pre_quant_scale: np.ndarray | None = None  # float32 [in]: what AWQ divided out of the weights' columns
    bias: np.ndarray | None = None  # float32 [out]

    def dequantize(self) -> np.ndarray:
        return _expand(self.values, self.scales, self.block_size)


@dataclass(frozen=True, eq=False)
class Int8Weights:
    """A linear layer, or an embedding table, with symmetric INT8 weights in blocks along its input; else as Int4Weights.

    `input_scale`: the layer's input is rounded to INT8 in steps of it (W8A8); None: weight-only.
    """

    values: np.ndarray  # int8 [out, in], each in -128..127
    scales: np.ndarray  # float32 [out, in / block_size]
    block_size: int  # `in` for one scale a row
    pre_quant_scale: np.ndarray | None = None  # float32 [in]
    bias: np.ndarray | None = None  # float32 [out]
    input_scale: float | None = None

    def dequantize(self) -> np.ndarray:
        return _expand(self.values, self.scales, self.block_size)


@dataclass(frozen=True, eq=False)
class Fp8Weights:
    """A linear layer with FP8 E4M3 weights (arXiv 2209.05433): `y = (x * pre_quant_scale) @ (values * scales).T + bias`.

    `input_scale`: the layer's input is rounded to E4M3 in units of it; None: weight-only.
    """

    values: np.ndarray  # float8_e4m3fn [out, in]
    scales: np.ndarray  # float32 [out]
    input_scale: float | None = None
    pre_quant_scale: np.ndarray | None = None  # float32 [in]
    bias: np.ndarray | None = None  # float32 [out]

    def dequantize(self) -> np.ndarray:
        return self.values.astype(np.float32) * self.scales[:, None]


FP4_BLOCK = 16


@dataclass(frozen=True, eq=False)
class Fp4Weights:
    """A linear layer in NVFP4: E2M1 weights in blocks of 16 along the input, each with an E4M3 scale, all times one float32.

    `input_scale`: the global scale with which the layer's input is rounded to NVFP4 too; None: weight-only.
    """

    values: np.ndarray  # float4_e2m1fn [out, in]
    block_scales: np.ndarray  # float8_e4m3fn [out, in / 16]
    global_scale: np.ndarray  # float32 [out]: equal but where layers were stacked
    input_scale: float | None = None
    pre_quant_scale: np.ndarray | None = None  # float32 [in]
    bias: np.ndarray | None = None  # float32 [out]

    @property
    def scales(self) -> np.ndarray:
        """float32 [out, in / 16]: of block and matrix together."""
        return self.block_scales.astype(np.float32) * self.global_scale[:, None]

    def dequantize(self) -> np.ndarray:
        return _expand(self.values, self.scales, FP4_BLOCK)


def _expand(values: np.ndarray, scales: np.ndarray, block_size: int) -> np.ndarray:
    """float32 [out, in]: what quantized weights stand for, before any `pre_quant_scale`."""
    return values.astype(np.float32) * np.repeat(scales, block_size, axis=1)


def bits_per_weight(kind: str, block_size: int | None) -> float:
    """Of "int4", "int8", "fp8" or "fp4" weights, with their share of the scales as checkpoints have them: 16 bits for each
    block of INT4, 8 for each of FP4; those of a row or a matrix count nothing."""
    if kind == "int4":
        return 4 + 16 / (block_size or 1)
    return 4 + 8 / FP4_BLOCK if kind == "fp4" else 8.0


@dataclass(frozen=True)
class LinearFacts:
    """What an engine's card says of one linear layer."""

    kind: str  # "float", "int4", "int8", "fp8" or "fp4"
    num_weights: int
    block_size: int | None = None  # of INT4
    rounds_input: bool = False

    @property
    def bits(self) -> float:
        """A weight; 16 where it is not quantized."""
        return 16.0 if self.kind == "float" else bits_per_weight(self.kind, self.block_size)


QuantizedWeights = Int4Weights | Int8Weights | Fp8Weights | Fp4Weights
LinearWeights = FloatWeights | QuantizedWeights


def linear_facts(weights: LinearWeights) -> LinearFacts:
    if isinstance(weights, FloatWeights):
        return LinearFacts("float", weights.weight.size)
    kind = {Int4Weights: "int4", Int8Weights: "int8", Fp8Weights: "fp8", Fp4Weights: "fp4"}[type(weights)]
    block_size = weights.block_size if isinstance(weights, Int4Weights) else None
    return LinearFacts(kind, weights.values.size, block_size, getattr(weights, "input_scale", None) is not None)


@dataclass(frozen=True)
class Source:
    """Where a checkpoint came from, for the engine's card."""

    model: str  # hub id, or the file or folder as the user gave it
    revision: str | None  # commit of a hub model
    format: str  # "hf", "gguf", "modelopt", "gptq", "awq" or "bitsandbytes"
    quantization: str | None = None  # "int4_awq", "gptq", ... as the exporter wrote it; None: full precision


class Checkpoint(Protocol):
    """A model on disk. Opening one checks files, names and shapes; weights are read only when asked for.

    warnings: lines for the user on what is lost. is_dequantized: the file's weights are of a kind that no engine has, and
    `linear` gives dequantized ones; the quantizer reads them after `dequantize_to`.
    """

    warnings: tuple[str, ...] = ()
    is_dequantized: bool = False

    @property
    def config(self) -> DecoderConfig: ...

    @property
    def source(self) -> Source: ...

    @property
    def folder(self) -> Path:
        """The Hugging Face folder the weights are in."""
        ...

    @property
    def tokenizer_files(self) -> tuple[Path, ...]:
        """Files to copy beside an engine: tokenizer.json always, and those of tokenizer_config.json, special_tokens_map.json,
        chat_template.jinja and generation_config.json that exist."""
        ...

    def linear(self, name: str) -> LinearWeights:
        """The linear layer with this module name. `lm_head` is the embedding table where embeddings are tied.

        Raises KeyError for a name that the architecture does not have.
        """
        ...

    def cache_scales(self, layer: int) -> tuple[float, float] | None:
        """What keys and values of this layer are divided by before they are rounded to FP8; None: not calibrated."""
        ...

    def tensor(self, name: str) -> np.ndarray:
        """The float32 tensor of an embedding or a norm: module name + ".weight", shaped as in the file.

        May be a read-only view of the file. Raises KeyError for a name that the architecture does not have.
        """
        ...


def linear_names(config: DecoderConfig) -> list[str]:
    """Module names of all linear layers but `lm_head`, in the order of execution."""
    layer = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
    layer += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    return [f"model.layers.{i}.{name}" for i in range(config.num_layers) for name in layer]


def linear_shape(config: DecoderConfig, name: str) -> tuple[int, int]:
    """(out, in) features of the linear layer with this module name. Raises KeyError for one that is not of a decoder."""
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes = {
        "q_proj": (config.query_size, hidden),
        "k_proj": (config.kv_size, hidden),
        "v_proj": (config.kv_size, hidden),
        "o_proj": (hidden, config.query_size),
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "down_proj": (hidden, inner),
        "lm_head": (config.vocab_size, hidden),
    }
    return shapes[name.rsplit(".", 1)[-1]]


def tensor_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that is not of a linear layer: the embedding table and the norms."""
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    norms = ["input_layernorm", "post_attention_layernorm"]
    if config.post_norms:
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    for i in range(config.num_layers):
        layer = f"model.layers.{i}"
        shapes |= {f"{layer}.{norm}.weight": (hidden,) for norm in norms}
        if config.qk_norm:
            shapes |= {f"{layer}.self_attn.{norm}.weight": (config.head_dim,) for norm in ("q_norm", "k_norm")}
    shapes["model.norm.weight"] = (hidden,)
    return shapes
