"""Guided decoding: output that is bound to a JSON schema, a regular expression, a choice or a grammar.

llguidance (https://github.com/guidance-ai/llguidance) says which tokens may come next. That takes 10 to 200 microseconds, on a
thread beside the model's step: what may come next depends on the tokens so far, not on the logits.
"""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import llguidance
import llguidance.numpy
import numpy as np
from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark
from numpy.typing import NDArray

from llm_runtime.errors import RequestError
from llm_runtime.fields import shown

NUM_COMPILED = 64  # guides kept compiled: clients send the same few again and again
# Masks are short work; a second thread is for a guide that takes long.
_pool = ThreadPoolExecutor(2, thread_name_prefix="guide")


class Guides:
    """Compiles guides for one tokenizer. Reading the tokenizer takes a second or two for a large vocabulary, so it is begun at
    once, on a thread, and waited for by the first request that needs it."""

    def __init__(self, tokenizer_file: Path, vocab_size: int, end_ids: Sequence[int]) -> None:
        self._tokenizer: Future[llguidance.LLTokenizer] = Future()
        self._arguments = (str(tokenizer_file), vocab_size, list(end_ids))
        threading.Thread(target=self._read, name="guide-tokenizer", daemon=True).start()
        self.compile = functools.lru_cache(NUM_COMPILED)(self._compile)

    def _read(self) -> None:
        file, vocab_size, end_ids = self._arguments
        try:
            self._tokenizer.set_result(llguidance.LLTokenizer(file, n_vocab=vocab_size, eos_token=end_ids))
        except Exception as error:  # llguidance raises ValueError and others; whoever asks for a guide is told
            self._tokenizer.set_exception(RequestError(f"guided decoding is not to be had with this tokenizer: {error}"))

    def _compile(self, kind: str, text: str) -> Guide:
        """Raises RequestError with the library's first line on what is wrong."""
        tokenizer = self._tokenizer.result()
        try:
            matcher = LLMatcher(tokenizer, _grammar(kind, text))
        except Exception as error:  # llguidance raises ValueError and others
            raise _refused(kind, text, str(error)) from None
        if matcher.is_error():
            raise _refused(kind, text, matcher.get_error())
        return Guide(matcher, tokenizer.vocab_size)


class Guide:
    """A compiled guide, for any number of sequences."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size

    def start(self) -> GuideState:
        return GuideState(self._matcher.deep_copy(), self._vocab_size)


class GuideState:
    """How far one sequence has got."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._mask = llguidance.numpy.allocate_token_bitmask(1, vocab_size)
        self._job: Future[None] | None = None

    def fork(self) -> GuideState:
        """Another at the same place, to go ahead with guesses."""
        return GuideState(self._matcher.deep_copy(), self._vocab_size)

    def forced(self) -> list[int]:
        """Tokens that spell all that may come next, where there is no choice: of a schema, the names of its properties."""
        return self._matcher.compute_ff_tokens()

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        """How many of these, from the first, may come next."""
        return self._matcher.validate_tokens(list(token_ids))

    def prepare(self) -> None:
        """Begin to work out what may come next."""
        if self._job is None:
            self._job = _pool.submit(llguidance.numpy.fill_next_token_bitmask, self._matcher, self._mask, 0)

    def allowed(self) -> NDArray[np.int32]:
        """A bit for each token, 32 in an integer, the lowest first; waits for what was begun. After the end, which only
        guesses reach, and after a wrong guess it has the end-of-sequence tokens."""
        self.prepare()
        assert self._job is not None
        self._job.result()
        return self._mask[0]

    def accept(self, token_id: int) -> None:
        self._job = None
        self._matcher.consume_token(token_id)

    @property
    def is_complete(self) -> bool:
        """Whether nothing may follow."""
        return self._matcher.is_stopped()

    @property
    def error(self) -> str:
        """Why it cannot go on, or "": a guide can ask for more work than is allowed."""
        return _first_line(self._matcher.get_error()) if self._matcher.is_error() else ""


def _grammar(kind: str, text: str) -> str:
    """See fields.GUIDE_KINDS."""
    if kind == "json":
        return LLMatcher.grammar_from_json_schema("{}")
    if kind == "json_schema":
        return LLMatcher.grammar_from_json_schema(text)
    if kind == "regex":
        return LLMatcher.grammar_from_regex(text)
    if kind == "choice":
        choices = json.loads(text)
        if not isinstance(choices, list) or not choices or not all(isinstance(each, str) and each for each in choices):
            raise ValueError("a JSON list of strings is needed")
        return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(each) for each in choices))
    return LLMatcher.grammar_from_lark(any_to_lark(text))


def _refused(kind: str, text: str, why: str) -> RequestError:
    return RequestError(f"guided_decoding_guide: got {shown(text)}; allowed: what {kind} takes: {_first_line(why)}")


def _first_line(text: str) -> str:
    return " ".join(text.split("\n", 1)[0].split())
