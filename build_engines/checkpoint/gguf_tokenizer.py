"""The tokenizer inside a GGUF file, as tokenizer.json.

Two kinds: "llama", SentencePiece's BPE with scores in place of merges, and "gpt2", byte-level BPE with merges and a named way
to cut text into words. Results equal transformers' own conversion, in a fraction of its time.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from build_engines.errors import BuildError

_CONTROL, _USER_DEFINED = 3, 4

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# How a byte-level vocabulary's texts were cut before its merges were learnt, by llama.cpp's name (`tokenizer.ggml.pre`). None:
# GPT-2's own pattern, which `tokenizers` has built in.
_SPLITS: dict[str, str | None] = {
    "default": None,
    "gpt-2": None,
    "llama-bpe": _LLAMA3_SPLIT,
    "llama3": _LLAMA3_SPLIT,
    "llama-v3": _LLAMA3_SPLIT,
    "smaug-bpe": _LLAMA3_SPLIT,
    "qwen2": _QWEN2_SPLIT,
    "deepseek-r1-qwen": _QWEN2_SPLIT,
    "tekken": _TEKKEN_SPLIT,
}
_LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3")


def write_tokenizer(metadata: dict[str, Any], source: str, folder: Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json and, if the file has one, chat_template.jinja.

    `source` names the file in errors. Raises BuildError for a vocabulary that is missing or of an unsupported kind.
    """
    kind = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise BuildError(f"{source}: it holds no tokenizer (tokenizer.ggml.tokens is missing)")
    if kind == "llama":
        tokenizer = _sentencepiece(metadata, tokens)
    elif kind == "gpt2":
        tokenizer = _byte_level(metadata, tokens, source)
    else:
        raise BuildError(f"{source}: tokenizer kind {kind!r} is not supported; supported are llama and gpt2")

    special = {
        name: tokens[metadata[key]]
        for name, key in (
            ("bos_token", "tokenizer.ggml.bos_token_id"),
            ("eos_token", "tokenizer.ggml.eos_token_id"),
            ("unk_token", "tokenizer.ggml.unknown_token_id"),
            ("pad_token", "tokenizer.ggml.padding_token_id"),
        )
        if metadata.get(key) is not None
    }
    is_bos_added = metadata.get("tokenizer.ggml.add_bos_token", kind == "llama" or _pre(metadata) in _LLAMA3_NAMES)
    _add_special_tokens(tokenizer, metadata, tokens, list(special.values()))
    if is_bos_added and "bos_token" in special:
        _prepend_bos(tokenizer, special["bos_token"], metadata["tokenizer.ggml.bos_token_id"])
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = special | {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": bool(is_bos_added),
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if template := metadata.get("tokenizer.chat_template"):
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def _sentencepiece(metadata: dict[str, Any], tokens: list[str]):
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    is_gemma = str(metadata.get("general.architecture")).startswith("gemma")
    if is_gemma:
        # Files spell Gemma's tokens of several spaces with real spaces; text reaches the model with each space as U+2581.
        tokens = ["\u2581" * len(token) if " " in token and not token.strip() else token for token in tokens]
    vocab = {token: index for index, token in enumerate(tokens)}
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            # Gemma's order of merges is that of its tokens, not that of its scores.
            merges=_merges(vocab, None if is_gemma else metadata["tokenizer.ggml.scores"].tolist()),
            fuse_unk=True,
            byte_fallback=True,
            unk_token=None if unknown is None else tokens[unknown],
        )
    )
    decoding = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    if is_gemma:
        tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    else:
        has_prefix_space = metadata.get("tokenizer.ggml.add_space_prefix", True)
        scheme = "first" if has_prefix_space else "never"
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="\u2581", prepend_scheme=scheme, split=False)
        decoding += [decoders.Strip(" ", 1, 0)] if has_prefix_space else []
    tokenizer.decoder = decoders.Sequence(decoding)
    return tokenizer


def _merges(vocab: dict[str, int], scores: Sequence[float] | None) -> list[tuple[str, str]]:
    """All pairs of tokens that make a token, best first: by its score (or, without, its position), then longest left part."""
    found = []
    for token, index in vocab.items():
        rank = index if scores is None else -scores[index]
        for cut in range(len(token) - 1, 0, -1):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                found.append((rank, -cut, cut - len(token), left, right))
    if scores is not None:
        found.sort(key=lambda merge: merge[:3])
    return [merge[3:] for merge in found]


def _byte_level(metadata: dict[str, Any], tokens: list[str], source: str):
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pre = _pre(metadata)
    if pre not in _SPLITS:
        raise BuildError(f"{source}: the way {pre!r} to cut text is not supported; supported are {', '.join(_SPLITS)}")
    if "tokenizer.ggml.merges" not in metadata:
        raise BuildError(f"{source}: tokenizer.ggml.merges is missing")
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre in _LLAMA3_NAMES))
    split = _SPLITS[pre]
    if split is None:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        words = pre_tokenizers.Split(Regex(split), behavior="isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
    if split is _QWEN2_SPLIT:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pre(metadata: dict[str, Any]) -> str:
    return metadata.get("tokenizer.ggml.pre", "default")


def _add_special_tokens(tokenizer, metadata: dict[str, Any], tokens: list[str], named: list[str]) -> None:
    """Control tokens become special ones; those a user defined stay whole too, but are text."""
    from tokenizers import AddedToken

    kinds = metadata.get("tokenizer.ggml.token_type", [])
    kinds = kinds if isinstance(kinds, list) else kinds.tolist()
    control = named + [token for token, kind in zip(tokens, kinds, strict=False) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in dict.fromkeys(control)])
    plain = [token for token, kind in zip(tokens, kinds, strict=False) if kind == _USER_DEFINED]
    # One spelt otherwise in the vocabulary (Gemma's spaces) would get a new id; the merges make it anyway.
    plain = [token for token in plain if tokenizer.token_to_id(token) is not None]
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in plain])


def _prepend_bos(tokenizer, bos: str, bos_id: int) -> None:
    from tokenizers import processors

    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, bos_id)]
    )
