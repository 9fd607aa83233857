"""The one narrow interface between the scheduler's world (sequences, pages) and a device.

An executor owns the KV pool and the weights. It is driven by one thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from llm_runtime.page_pool import PageGroup
from llm_runtime.sampler import Choice, SamplerState, choose


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence's share of a step: `token_ids` to run after `past_length` tokens already in pages.

    `page_ids` are the sequence's pages in order, enough for `past_length + len(token_ids)` tokens;
    token t of the sequence lives in page_ids[t // page_size] at slot t % page_size. Where layers with a window have pages of
    their own, those are in `window_page_ids`; None: they are the same. A page that is gone (-1) is out of the window.
    `num_logits` last tokens of the row have their logits returned (0 for a prompt chunk that is not the last).
    """

    token_ids: Sequence[int]
    past_length: int
    page_ids: Sequence[int]
    num_logits: int = 1
    window_page_ids: Sequence[int] | None = None


class Executor(Protocol):
    """Runs rows of any mix of prompt chunks and single decode tokens in one step."""

    page_groups: tuple[PageGroup, ...]  # one, or that of all other layers and that of those with a window
    page_size: int
    vocab_size: int
    description: str  # what runs the engine, for the log

    def execute(self, rows: Sequence[Row]) -> NDArray[np.float32]:
        """Run every row, write its keys and values into its pages.

        Returns logits [sum(row.num_logits), vocab_size], rows in order. The array may be reused by the next
        call. The result of a row never depends on the other rows (near-ties of summation order aside).
        Raises EngineError when the device fails; the pool's contents are then undefined.
        """
        ...

    def sample(self, rows: Sequence[Row], states: Sequence[SamplerState], token_ids: Sequence[Sequence[int]]) -> list[Choice]:
        """Run every row as `execute` does, and choose a token from each row of logits, in order.

        states, token_ids: for each row of logits, the state of its sampler and the tokens before the one to choose. Chooses
        what sampler.choose chooses from the logits, wherever it is done: a device need not hand them over.
        """
        ...

    def close(self) -> None:
        """Free the weights and the pool; no call may follow."""
        ...


class SamplesOnHost:
    """`sample` of an executor whose logits are on the host anyway."""

    def sample(
        self: Executor, rows: Sequence[Row], states: Sequence[SamplerState], token_ids: Sequence[Sequence[int]]
    ) -> list[Choice]:
        return choose(self.execute(rows), states, token_ids)
