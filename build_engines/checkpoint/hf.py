"""Hugging Face folders: config.json, safetensors, tokenizer.json; and hub ids, which are downloaded into one."""

import json
import math
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from build_engines.checkpoint.types import (
    DecoderConfig,
    FloatWeights,
    LinearWeights,
    Rope,
    Source,
    linear_names,
    linear_shape,
    tensor_shapes,
)
from build_engines.errors import BuildError

_FAMILY_OF_MODEL_TYPE = {
    "llama": "llama",
    "mistral": "mistral",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3_text": "gemma3",
}
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
# Those that recompute their frequencies from the length seen so far, or rotate only part of a head, need another graph.
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "*.tiktoken", "merges.txt", "vocab.txt"]
# Exported by old versions of transformers, derived from the config, read by nobody.
_IGNORED_SUFFIXES = (".rotary_emb.inv_freq", ".masked_bias")
# Said where another quantization is refused.
_READABLE = "nvidia-modelopt's exports, gptq (4 bits), awq (4 bits, version gemm) and bitsandbytes (nf4, fp4)"


def read_config(folder: Path) -> DecoderConfig:
    """The `DecoderConfig` of a folder's config.json and generation_config.json.

    Raises BuildError where the family, or a variant of it (softcapping, bidirectional attention, a partial or dynamic rope, an
    activation), is not one that the graph can express, naming it.
    """
    raw = read_json(folder / "config.json")
    model_type = raw.get("model_type")
    if model_type not in _FAMILY_OF_MODEL_TYPE:
        known = ", ".join(_FAMILY_OF_MODEL_TYPE)
        hint = "; only the text model of Gemma 3 is supported" if model_type == "gemma3" else ""
        raise BuildError(f"{folder}: model_type {model_type!r} is not supported; supported are {known}{hint}")
    family = _FAMILY_OF_MODEL_TYPE[model_type]

    from transformers import AutoConfig

    try:
        config: Any = AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # transformers raises many kinds here; every one means a config that cannot be used
        raise BuildError(f"{folder / 'config.json'}: {one_line(error)}") from error

    activation = getattr(config, "hidden_activation", None) or config.hidden_act
    _refuse_variants(folder, config, activation)
    is_gemma = family == "gemma3"
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    scalar = config.query_pre_attn_scalar if is_gemma else head_dim
    layer_types = _layer_types(config)
    ropes = {kind: _rope(folder, config, kind, head_dim) for kind in sorted(set(layer_types))}
    window = getattr(config, "sliding_window", None) or 0
    bos, eos = _special_ids(folder, config)
    return DecoderConfig(
        family=family,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads or config.num_attention_heads,
        head_dim=head_dim,
        rms_norm_eps=float(config.rms_norm_eps),
        max_context=config.max_position_embeddings,
        layer_windows=tuple(window if kind == "sliding_attention" else 0 for kind in layer_types),
        layer_ropes=tuple(ropes[kind] for kind in layer_types),
        attention_scale=float(scalar) ** -0.5,
        activation=_ACTIVATIONS[activation],
        tie_embeddings=bool(config.tie_word_embeddings),
        qkv_bias=family == "qwen2" or bool(getattr(config, "attention_bias", False)),
        qk_norm=family in ("qwen3", "gemma3"),
        post_norms=is_gemma,
        norm_weight_offset=1.0 if is_gemma else 0.0,
        embed_scale=math.sqrt(config.hidden_size) if is_gemma else 1.0,
        bos_token_id=bos,
        eos_token_ids=eos,
    )


class HfCheckpoint:
    """A folder in Hugging Face's layout; see `types.Checkpoint` for the contract.

    precision: of weights that an engine takes as they are ("int4", ...); None: they are to be quantized, or left. kv_cache:
    "FP8" where there are scales for it.

    Raises BuildError when opened on a folder where a file, or a tensor of the right shape, is missing.
    """

    format = "hf"
    warnings: tuple[str, ...] = ()
    is_dequantized = False
    precision: str | None = None
    kv_cache: str | None = None

    def __init__(self, folder: Path, model: str | None = None, revision: str | None = None) -> None:
        self.folder = folder
        self.config = read_config(folder)
        self._files = _TensorFiles(folder)
        self._quantization: str | None = None
        self._open_quantization()
        self._check()
        ensure_fast_tokenizer(folder)
        self.tokenizer_files = tuple(folder / name for name in TOKENIZER_FILES if (folder / name).is_file())
        self.source = Source(model or str(folder), revision, self.format, self._quantization)

    def _open_quantization(self) -> None:
        """Reads, or refuses, what the folder says of quantized weights, and sets `_quantization` to its name."""
        if quantization_config(self.folder):
            method = quantization_method(self.folder) or "an unknown method"
            raise BuildError(f"{self.folder}: weights quantized with {method} are not supported; supported are {_READABLE}")

    def linear(self, name: str) -> LinearWeights:
        weight = self._linear_weight_name(name)
        return FloatWeights(self._files.float32(weight), self._bias(name))

    def cache_scales(self, layer: int) -> tuple[float, float] | None:
        return None

    def tensor(self, name: str) -> np.ndarray:
        if name not in tensor_shapes(self.config):
            raise KeyError(name)
        return self._files.float32(name)

    def _bias(self, name: str) -> np.ndarray | None:
        return self._files.float32(f"{name}.bias") if f"{name}.bias" in self._files else None

    def _linear_weight_name(self, name: str) -> str:
        if name != "lm_head" and name not in linear_names(self.config):
            raise KeyError(name)
        return "model.embed_tokens.weight" if name == "lm_head" and self.config.tie_embeddings else f"{name}.weight"

    def _check(self) -> None:
        """Compares names and shapes of all tensors with what the architecture has."""
        expected: dict[str, tuple[int, ...]] = tensor_shapes(self.config)
        biased = ("q_proj", "k_proj", "v_proj") if self.config.qkv_bias else ()
        for name in [*linear_names(self.config), *([] if self.config.tie_embeddings else ["lm_head"])]:
            expected |= self._linear_tensors(name)
            has_bias = name.endswith(biased) if biased else False
            if has_bias or f"{name}.bias" in self._files:
                expected[f"{name}.bias"] = (linear_shape(self.config, name)[0],)
        for tensor, shape in expected.items():
            found = self._files.shape(tensor)
            if found is None:
                raise BuildError(f"{self.folder}: tensor {tensor} is missing; a {self.config.family} model has it")
            if found != shape:
                raise BuildError(f"{self.folder}: tensor {tensor} has shape {list(found)}; config.json implies {list(shape)}")
        unknown = [name for name in self._files if name not in expected and not name.endswith(_IGNORED_SUFFIXES)]
        if self.config.tie_embeddings:
            unknown = [name for name in unknown if name != "lm_head.weight"]
        if unknown:
            raise BuildError(f"{self.folder}: tensor {unknown[0]} does not belong to a {self.config.family} model")

    def _linear_tensors(self, name: str) -> dict[str, tuple[int, ...]]:
        """Tensors, but for a bias, that hold this layer, with their shapes."""
        return {f"{name}.weight": linear_shape(self.config, name)}


class _TensorFiles:
    """The safetensors of a folder, one file or shards, memory-mapped; iterates over tensor names."""

    def __init__(self, folder: Path) -> None:
        from safetensors import SafetensorError, safe_open

        index = folder / "model.safetensors.index.json"
        names = sorted(set(read_json(index)["weight_map"].values())) if index.is_file() else [_only_file(folder)]
        self._file_of: dict[str, Any] = {}
        self._stack = ExitStack()
        for name in names:
            if not (folder / name).is_file():
                hint = "; save the model with safetensors" if list(folder.glob("*.bin")) else ""
                raise BuildError(f"{folder}: {name} is missing{hint}")
            try:
                # Through torch, since numpy has no bfloat16.
                file = self._stack.enter_context(safe_open(folder / name, framework="pt"))
            except SafetensorError as error:
                raise BuildError(f"{folder / name}: not a readable safetensors file ({one_line(error)})") from error
            self._file_of |= dict.fromkeys(file.keys(), file)

    def __contains__(self, name: object) -> bool:
        return name in self._file_of

    def __iter__(self):
        return iter(self._file_of)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Shape of a tensor, or None if there is none of this name."""
        return tuple(self._file_of[name].get_slice(name).get_shape()) if name in self._file_of else None

    def dtype(self, name: str) -> str:
        """Type of a tensor as safetensors writes it ("F32", "U8")."""
        return self._file_of[name].get_slice(name).get_dtype()

    def float32(self, name: str) -> np.ndarray:
        """A tensor as float32; a view of the file where it is float32 there."""
        return self._file_of[name].get_tensor(name).float().numpy()

    def raw(self, name: str) -> np.ndarray:
        """A tensor in the type it has in the file: one of numpy's, or float8_e4m3fn."""
        import torch

        tensor = self._file_of[name].get_tensor(name)
        if tensor.dtype == torch.float8_e4m3fn:
            return tensor.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn)
        return tensor.numpy()


def _only_file(folder: Path) -> str:
    """model.safetensors, or the one that is there by another name: AutoGPTQ named it by the bits and the group."""
    found = [path.name for path in folder.glob("*.safetensors")]
    return found[0] if len(found) == 1 else "model.safetensors"


def quantization_config(folder: Path) -> dict[str, Any] | None:
    """What config.json says of quantized weights; None: they are not. Raises BuildError if that is not an object."""
    raw = read_json(folder / "config.json")
    # compressed-tensors' first versions had a name of their own.
    settings = raw.get("quantization_config") or raw.get("compression_config")
    if settings and not isinstance(settings, dict):
        raise BuildError(f"{folder / 'config.json'}: quantization_config is not an object")
    return settings or None


def quantization_method(folder: Path) -> str | None:
    """Name of the method in config.json ("gptq", "awq", "bitsandbytes", ...); None: none is named."""
    settings = quantization_config(folder) or {}
    # transformers did not name the method while there was but one.
    is_old = "load_in_4bit" in settings or "load_in_8bit" in settings
    method = settings.get("quant_method") or ("bitsandbytes" if is_old else None)
    return None if method is None else str(method)


def fetch_from_hub(model: str, revision: str | None = None) -> tuple[Path, str]:
    """Downloads a hub model's config, safetensors and tokenizer into the hub cache; returns the folder and the commit.

    Raises BuildError if the id is unknown, closed to this user, or the hub cannot be reached.
    """
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(model, revision=revision, allow_patterns=_HUB_FILES))
    except Exception as error:  # many kinds: unknown, gated, offline, disk full
        raise BuildError(f"{model}: cannot be downloaded from the Hugging Face hub ({one_line(error)})") from error
    return folder, folder.name


def ensure_fast_tokenizer(folder: Path) -> None:
    """Writes tokenizer.json into a folder that has only a slow tokenizer (tokenizer.model, vocab.json and merges.txt).

    Raises BuildError if there is no tokenizer, or none that transformers can convert.
    """
    if (folder / "tokenizer.json").is_file():
        return
    slow = ("tokenizer.model", "vocab.json", "vocab.txt")
    if not any((folder / name).is_file() for name in slow):
        raise BuildError(f"{folder}: tokenizer.json is missing, and there is none of {', '.join(slow)} to make it from")

    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, use_fast=True, local_files_only=True)
        tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
    except Exception as error:  # whatever goes wrong, the user's way out is the same
        raise BuildError(f"{folder}: the tokenizer cannot be converted to tokenizer.json ({one_line(error)})") from error


def _refuse_variants(folder: Path, config: Any, activation: str) -> None:
    for key in ("final_logit_softcapping", "attn_logit_softcapping"):
        if getattr(config, key, None):
            raise BuildError(f"{folder}: {key} = {getattr(config, key)} is not supported")
    if getattr(config, "use_bidirectional_attention", None):
        raise BuildError(f"{folder}: use_bidirectional_attention is not supported; a decoder that generates is causal")
    if activation not in _ACTIVATIONS:
        raise BuildError(f"{folder}: activation {activation!r} is not supported; supported are {', '.join(_ACTIVATIONS)}")


def _layer_types(config: Any) -> list[str]:
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None:  # Mistral has one window for all layers
        kind = "sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"
        layer_types = [kind] * config.num_hidden_layers
    return list(layer_types)


def _rope(folder: Path, config: Any, kind: str, head_dim: int) -> Rope:
    """The rope of one kind of layer, by transformers' own functions, so that a scaling means what it means there."""
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = config.rope_parameters
    is_nested = kind in parameters
    own = parameters[kind] if is_nested else parameters
    rope_type = own.get("rope_type", "default")
    if rope_type not in _ROPE_TYPES:
        raise BuildError(f"{folder}: rope type {rope_type!r} is not supported; supported are {', '.join(_ROPE_TYPES)}")
    if own.get("partial_rotary_factor", 1.0) != 1.0:
        raise BuildError(f"{folder}: partial_rotary_factor = {own['partial_rotary_factor']} is not supported, only 1.0")
    factor = 1.0
    if rope_type == "default":
        exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
        frequencies = 1.0 / (own["rope_theta"] ** exponents)
    else:
        init: Callable[..., Any] = ROPE_INIT_FUNCTIONS[rope_type]
        frequencies, factor = init(config, torch.device("cpu"), **({"layer_type": kind} if is_nested else {}))
    return Rope(frequencies.float().numpy(), float(factor))


def _special_ids(folder: Path, config: Any) -> tuple[int | None, tuple[int, ...]]:
    """First token of a text, and every token that ends one: generation_config.json knows those of chats too."""
    path = folder / "generation_config.json"
    generation = read_json(path) if path.is_file() else {}
    bos = generation.get("bos_token_id", config.bos_token_id)
    ids: list[int] = []
    for eos in (config.eos_token_id, generation.get("eos_token_id")):
        ids += [] if eos is None else eos if isinstance(eos, list) else [eos]
    return bos[0] if isinstance(bos, list) else bos, tuple(dict.fromkeys(ids))


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises BuildError if there is no such file, or it holds something else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BuildError(f"{path.parent}: {path.name} is missing") from None
    except (OSError, ValueError) as error:
        raise BuildError(f"{path}: not readable as JSON ({one_line(error)})") from error
    if not isinstance(value, dict):
        raise BuildError(f"{path}: not a JSON object")
    return value


def one_line(error: Exception) -> str:
    """The first line of an error of another library, to be put into one of ours."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
