"""Tiny models with random, seeded weights, one of each family, saved as Hugging Face folders with a real tokenizer.

Every width is a multiple of 128, so that INT4 blocks of 64 and 128 fit. Weights are larger than at a usual initialization, so
that logits differ enough between tokens for greedy decoding to have one answer. A folder takes well under a second.
"""

import json
import sys
from pathlib import Path
from typing import Any

TINY_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3")
VOCAB_SIZE = 512
BOS, EOS, PAD = 0, 1, 2

_TEXT = (
    "The quick brown fox jumps over the lazy dog. A tiny tokenizer is trained on a few lines of text, so that words split"
    " into pieces of one or more letters. Once upon a time there was a small model that could say"
    " nothing sensible, and said it well.",
    "def add(a, b):\n    return a + b\n\nfor i in range(10):\n    print(add(i, 2 * i))\n",
    "Grüße aus Köln, café, naïve, 你好世界, こんにちは, привет мир, 👩‍👩‍👧‍👦 and numbers 1234567890.",
)

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
    "initializer_range": 0.15,
}


def make_tokenizer(folder: Path) -> None:
    """Trains a byte-level BPE in-process and writes tokenizer.json and tokenizer_config.json; a text begins with <bos>."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        min_frequency=1,
        show_progress=False,
        special_tokens=["<bos>", "<eos>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(_TEXT, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def make_tiny_model(family: str, folder: Path, seed: int = 0, **overrides: Any) -> Path:
    """Writes a tiny model of `family` (one of TINY_FAMILIES) to `folder`, and returns the folder.

    overrides: fields of the family's config.json, for example `rope_scaling` or `sliding_window`.
    """
    import torch

    torch.manual_seed(seed)
    model = _model_class(family)(_config(family, overrides)).eval()
    _give_norms_and_biases_values(model)
    folder.mkdir(parents=True, exist_ok=True)
    from transformers.utils import logging

    logging.disable_progress_bar()
    model.save_pretrained(folder)
    make_tokenizer(folder)
    return folder


def _config(family: str, overrides: dict[str, Any]) -> Any:
    import transformers

    if family == "llama":
        return transformers.LlamaConfig(**_COMMON | {"tie_word_embeddings": False} | overrides)
    if family == "mistral":
        return transformers.MistralConfig(**_COMMON | {"sliding_window": 16, "tie_word_embeddings": False} | overrides)
    if family == "qwen2":
        fields = {key: value for key, value in _COMMON.items() if key != "head_dim"}
        return transformers.Qwen2Config(**fields | {"tie_word_embeddings": True} | overrides)
    if family == "qwen3":
        # A head that is not hidden_size / num_attention_heads.
        return transformers.Qwen3Config(**_COMMON | {"head_dim": 64, "tie_word_embeddings": True} | overrides)
    if family == "gemma3":
        own = {
            "num_hidden_layers": 3,
            "head_dim": 64,
            # Tied and scaled embeddings: at more, every token predicts itself.
            "initializer_range": 0.04,
            "query_pre_attn_scalar": 48,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        }
        return transformers.Gemma3TextConfig(**_COMMON | own | overrides)
    raise ValueError(f"unknown family {family!r}")


def _model_class(family: str) -> Any:
    import transformers

    names = {
        "llama": "LlamaForCausalLM",
        "mistral": "MistralForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
        "gemma3": "Gemma3ForCausalLM",
    }
    return getattr(transformers, names[family])


def _give_norms_and_biases_values(model: Any) -> None:
    """A fresh model's norms are all 1 (Gemma's: 0) and its biases 0, with which a missing one would go unnoticed."""
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)


if __name__ == "__main__":  # python -m tests.tiny_models FAMILY FOLDER
    make_tiny_model(sys.argv[1], Path(sys.argv[2]))
