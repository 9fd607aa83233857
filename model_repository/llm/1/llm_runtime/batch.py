"""From ragged rows to the arrays that a graph takes, and where the new keys and values go: plain numpy, no device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llm_runtime.executors.base import Row


@dataclass(frozen=True, slots=True)
class Batch:
    """The inputs of one graph call by name, and for each of its T tokens the page and slot it is written to."""

    inputs: dict[str, NDArray]
    pages: NDArray[np.int64]  # [T]
    slots: NDArray[np.int64]  # [T]
    num_logits: int

    @property
    def num_tokens(self) -> int:
        return len(self.pages)


def make_batch(rows: Sequence[Row], page_size: int, *, rectangular: bool) -> Batch:
    """Inputs as docs/architecture.md lists them; `rectangular` for the graph of standard operators."""
    lengths = np.array([len(row.token_ids) for row in rows], np.int64)
    past = np.array([row.past_length for row in rows], np.int64)
    starts = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(lengths, out=starts[1:])
    row_of_token = np.repeat(np.arange(len(rows)), lengths)
    offsets = np.arange(starts[-1]) - starts[row_of_token]
    positions = past[row_of_token] + offsets
    table = _page_table([row.page_ids for row in rows])
    inputs: dict[str, NDArray] = {
        "input_ids": np.concatenate([np.asarray(row.token_ids, np.int64) for row in rows]),
        "position_ids": positions,
        "past_lengths": past.astype(np.int32),
        "page_table": table,
        "logit_positions": _last_positions([row.num_logits for row in rows], starts),
    }
    if rectangular:
        width = int(lengths.max())
        row_tokens = np.zeros((len(rows), width), np.int64)
        row_tokens[row_of_token, offsets] = np.arange(starts[-1])
        inputs |= {"row_tokens": row_tokens, "token_slots": row_of_token * width + offsets}
    else:
        inputs["row_starts"] = starts.astype(np.int32)
    pages = table[row_of_token, positions // page_size].astype(np.int64)
    return Batch(inputs, pages, positions % page_size, len(inputs["logit_positions"]))


def _page_table(page_ids: Sequence[Sequence[int]]) -> NDArray[np.int32]:
    """Padding is page 0: a valid page, which the lengths keep from being attended to."""
    width = max(len(ids) for ids in page_ids)
    table = np.zeros((len(page_ids), width), np.int32)
    for row, ids in enumerate(page_ids):
        table[row, : len(ids)] = ids
    return table


def _last_positions(num_logits: Sequence[int], starts: NDArray[np.int64]) -> NDArray[np.int64]:
    ends = starts[1:]
    return np.concatenate([np.arange(end - n, end) for n, end in zip(num_logits, ends, strict=True)]).astype(np.int64)
