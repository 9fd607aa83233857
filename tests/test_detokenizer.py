"""Streamed text against decoding everything at once, with the kinds of tokenizers that models come with."""

from __future__ import annotations

import random

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from llm_runtime.detokenizer import MAX_HELD_TOKENS, Detokenizer, StopMatcher

REPLACEMENT = "\ufffd"
PIECES = ["你", "好", "👩‍👩‍👧‍👦", "é", " ", "  ", "the", " the", " world", "\n", "Ω", "x", ".", " e"]


def byte_level() -> Tokenizer:
    """As GPT-2, Llama 3 and Qwen: every token is a run of bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=290,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["Hello world, the quick brown fox. the world."] * 5, trainer)
    return tokenizer


def sentencepiece(strips_first_space: bool) -> Tokenizer:
    """As Llama 2 (the decoder drops a text's first space) or Gemma (it does not). What has no piece of its own is bytes."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("o", "r"), ("▁", "w"), ("l", "d"), ("▁", "▁")]
    for piece in ["▁", *"abcdefghijklmnopqrstuvwxyz.", *(left + right for left, right in merges)]:
        vocab[piece] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    replace = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace] if strips_first_space else [replace])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strips_first_space else steps)
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


TOKENIZERS = {"byte_level": byte_level(), "llama": sentencepiece(True), "gemma": sentencepiece(False)}


@pytest.fixture(params=TOKENIZERS)
def tokenizer(request):
    return TOKENIZERS[request.param]


def stream(tokenizer: Tokenizer, prompt: list[int], output: list[int]) -> tuple[list[str], str]:
    detokenizer = Detokenizer(tokenizer, prompt)
    return [detokenizer.push(token_id) for token_id in output], detokenizer.finish()


def test_streamed_text_is_the_decoded_text_as_it_continues_the_prompt(tokenizer):
    for seed in range(400):
        rng = random.Random(seed)
        ids = tokenizer.encode("".join(rng.choice(PIECES) for _ in range(rng.randint(2, 30)))).ids
        cut = rng.randint(0, len(ids))
        while tokenizer.decode(ids[:cut]).endswith(REPLACEMENT):
            cut += 1
        pieces, rest = stream(tokenizer, ids[:cut], ids[cut:])
        assert "".join(pieces) + rest == tokenizer.decode(ids)[len(tokenizer.decode(ids[:cut])) :], f"seed {seed}"
        assert REPLACEMENT not in "".join(pieces), f"seed {seed}"


def test_a_character_is_shown_once_it_is_complete_and_broken_only_at_the_very_end(tokenizer):
    ids = tokenizer.encode("x你好👩‍👩‍👧‍👦é").ids
    whole = tokenizer.decode(ids)
    for end in range(1, len(ids)):
        pieces, rest = stream(tokenizer, [], ids[:end])
        shown = "".join(pieces)
        assert whole.startswith(shown)
        assert rest.strip(REPLACEMENT) == ""


def test_words_keep_their_spaces_after_special_tokens(tokenizer):
    special = tokenizer.token_to_id("<s>")
    prompt, output = tokenizer.encode("the").ids, tokenizer.encode("the the").ids[-1:]
    pieces, rest = stream(tokenizer, [*prompt, special], [special, *output, special, *output])
    assert "".join(pieces) + rest == " the the"


def test_broken_bytes_are_not_held_for_ever(tokenizer):
    name = "<0xFF>" if tokenizer.token_to_id("<0xFF>") is not None else "ÿ"
    broken, good = tokenizer.token_to_id(name), tokenizer.encode("x你").ids
    assert broken is not None
    prompt, output = tokenizer.encode("x").ids, [broken] * 100 + good
    pieces, rest = stream(tokenizer, prompt, output)
    assert "".join(pieces[: MAX_HELD_TOKENS + 1]) != ""
    assert "x" + "".join(pieces) + rest == tokenizer.decode(prompt + output)


def match(stops: list[str], pieces: list[str]) -> tuple[str, bool, list[str]]:
    """(text shown, whether it stopped, what was shown piece by piece)"""
    matcher = StopMatcher(stops)
    shown = []
    for piece in pieces:
        shown.append(matcher.push(piece))
        if matcher.stopped:
            return "".join(shown), True, shown
    shown.append(matcher.finish())
    return "".join(shown), False, shown


def first_match(stops: list[str], text: str) -> tuple[str, bool]:
    """Character by character: stop at the first end of any stop string; the longest of those that end there."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))], True
    return text, False


def split(text: str, rng: random.Random) -> list[str]:
    cuts = sorted(rng.randint(0, len(text)) for _ in range(rng.randint(0, 12)))
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@pytest.mark.parametrize("seed", range(30))
def test_the_earliest_match_wins_wherever_the_borders_fall(seed):
    rng = random.Random(seed)
    for _ in range(100):
        alphabet = rng.choice(["ab", "abc", "a\n 。"])
        stops = ["".join(rng.choice(alphabet) for _ in range(rng.randint(1, 5))) for _ in range(rng.randint(1, 4))]
        text = "".join(rng.choice(alphabet) for _ in range(rng.randint(0, 20)))
        pieces = split(text, rng)
        shown, stopped, _ = match(stops, pieces)
        assert (shown, stopped) == first_match(stops, text), (stops, pieces)


@pytest.mark.parametrize("stops", [["\n\n", " the", "the", "。"]])
@pytest.mark.parametrize(
    ("pieces", "text"),
    [
        (["a", " t", "h", "e b"], "a"),
        (["ba", "the"], "ba"),
        (["x\n", "y\n", "\nz"], "x\ny"),
        (["你", "好。再"], "你好"),
        (["the"], ""),
    ],
)
def test_stop_strings_of_every_kind(stops, pieces, text):
    assert match(stops, pieces)[:2] == (text, True)


def test_only_what_may_become_a_stop_string_is_held_back():
    assert match(["STOP"], ["xS", "Ty", "ST", "O", "x"])[2] == ["x", "STy", "", "", "STOx", ""]
    assert match(["STOP"], ["ab", "ST"])[2] == ["ab", "", "ST"]
    assert match([], ["ab", "ST"])[2] == ["ab", "ST", ""]
