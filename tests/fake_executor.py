"""An executor that can be computed by hand, and that reads its context only through the pages.

It stores token ids in its pages. The next token is a function of the whole context read back through the page table, so a
wrong page, a stale one, or a false prefix hit changes the output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from llm_runtime.errors import EngineError
from llm_runtime.executors.base import Row, SamplesOnHost
from llm_runtime.page_pool import PageGroup

VOCAB = 97
EMPTY = -1


def next_token(context: Sequence[int]) -> int:
    """The likeliest token after `context`: never 0 or 1, which tests use as end of sequence and as padding."""
    value = 7
    for token in context:
        value = (value * 31 + token + 1) % 1_000_003
    return 2 + value % (VOCAB - 2)


def expected_output(prompt: Sequence[int], count: int, rule: Callable[[Sequence[int]], int] = next_token) -> list[int]:
    """What greedy decoding gives, computed without engine, pages or batches."""
    context = list(prompt)
    for _ in range(count):
        context.append(rule(context))
    return context[len(prompt) :]


def copying(context: Sequence[int]) -> int:
    """A model that mostly goes on as it did six tokens before, as one that edits a text does."""
    return context[-6] if len(context) >= 6 and len(context) % 11 else next_token(context)


class FakeExecutor(SamplesOnHost):
    """See llm_runtime.executors.base.Executor. Where all layers have a window, the next token is a function of that
    alone. `calls` logs the rows of every call; call number `fail_at` raises; `rule` gives the likeliest token after a context;
    `strict`: a slot that was never written may not be read."""

    description = "token ids in pages"

    def __init__(
        self,
        num_pages: int | Sequence[PageGroup] = 32,
        page_size: int = 4,
        fail_at: int | None = None,
        rule: Callable[[Sequence[int]], int] = next_token,
        strict: bool = True,
    ) -> None:
        self.page_groups = (PageGroup(num_pages),) if isinstance(num_pages, int) else tuple(num_pages)
        self.page_size, self.vocab_size = page_size, VOCAB
        self.pools = [np.full((group.num_pages, page_size), EMPTY, np.int64) for group in self.page_groups]
        self.calls: list[list[Row]] = []
        self._fail_at = fail_at
        self._rule = rule
        self._strict = strict

    def execute(self, rows: Sequence[Row]) -> NDArray[np.float32]:
        self.calls.append(list(rows))
        if len(self.calls) - 1 == self._fail_at:
            raise EngineError("the fake device caught fire")
        logits = [self._run(row) for row in rows]
        return np.concatenate([part for part in logits if len(part)] or [np.zeros((0, VOCAB), np.float32)])

    def close(self) -> None:
        pass

    def _run(self, row: Row) -> NDArray[np.float32]:
        logits = np.zeros((row.num_logits, VOCAB), np.float32)
        for offset, token in enumerate(row.token_ids):
            position = row.past_length + offset
            for pool, page_ids in zip(self.pools, _pages(row), strict=True):
                page_id = page_ids[position // self.page_size]
                assert page_id >= 0, "a row writes where it has no page any more"
                pool[page_id, position % self.page_size] = token
            wanted = offset - (len(row.token_ids) - row.num_logits)
            if wanted >= 0:
                logits[wanted, self._rule(self._context(row, position + 1))] = 10.0
        return logits

    def _context(self, row: Row, length: int) -> list[int]:
        contexts = []
        for pool, page_ids, group in zip(self.pools, _pages(row), self.page_groups, strict=True):
            first = max(0, length - group.window) if group.window else 0
            read = list(page_ids[first // self.page_size : -(-length // self.page_size)])
            assert min(read) >= 0 or not self._strict, "a row reads where it has no page any more"
            tokens = pool[read].reshape(-1)[first % self.page_size :][: length - first].tolist()
            assert EMPTY not in tokens or not self._strict, "a row reads a slot that was never written"
            contexts.append(tokens)
        for tokens in contexts[1:]:
            assert tokens == contexts[0][-len(tokens) :] or not self._strict, "layers with a window see other tokens"
        return contexts[0]


def _pages(row: Row) -> list[Sequence[int]]:
    return [row.page_ids] if row.window_page_ids is None else [row.page_ids, row.window_page_ids]
