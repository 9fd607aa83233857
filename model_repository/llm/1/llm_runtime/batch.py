"""From ragged rows to the arrays that a graph takes, and where the new keys and values go: plain numpy, no device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llm_runtime.executors.base import Row


@dataclass(frozen=True, slots=True)
class Batch:
    """The inputs of one graph call by name, and the slot of the pool that each of its T tokens is written to, also in the pool
    of layers with a window.

    Slots are counted through the pool: slot s of page p is p * page_size + s.
    """

    inputs: dict[str, NDArray]
    slots: NDArray[np.int64]  # [T]
    window_slots: NDArray[np.int64]  # [T]
    num_logits: int

    @property
    def num_tokens(self) -> int:
        return len(self.slots)


def make_batch(
    rows: Sequence[Row],
    page_size: int,
    *,
    rectangular: bool,
    window_table: bool = False,
    table_width: int | None = None,
    unused_page: int = 0,
) -> Batch:
    """Inputs as docs/architecture.md lists them; `rectangular` for the graph of standard operators.

    window_table: layers with a window have a page table of their own.
    table_width: columns of the page table, enough for every row's past tokens; None: as many as the longest row has pages.
    unused_page: what stands in the table where a row has no page. It may be read, but is not attended to.
    """
    lengths = np.array([len(row.token_ids) for row in rows], np.int64)
    past = np.array([row.past_length for row in rows], np.int64)
    starts = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(lengths, out=starts[1:])
    row_of_token = np.repeat(np.arange(len(rows)), lengths)
    offsets = np.arange(starts[-1]) - starts[row_of_token]
    positions = past[row_of_token] + offsets
    inputs: dict[str, NDArray] = {
        "input_ids": np.concatenate([np.asarray(row.token_ids, np.int64) for row in rows]),
        "position_ids": positions,
        "past_lengths": past.astype(np.int32),
        "logit_positions": _last_positions([row.num_logits for row in rows], starts),
    }
    if rectangular:
        width = int(lengths.max())
        row_tokens = np.zeros((len(rows), width), np.int64)
        row_tokens[row_of_token, offsets] = np.arange(starts[-1])
        inputs |= {"row_tokens": row_tokens, "token_slots": row_of_token * width + offsets}
    else:
        inputs["row_starts"] = starts.astype(np.int32)
    page_ids = [np.asarray(row.page_ids, np.int64) for row in rows]
    width = table_width or max(map(len, page_ids))
    inputs["page_table"] = _page_table(page_ids, width, unused_page)
    slots = window_slots = _slots(page_ids, row_of_token, positions, page_size)
    if window_table:
        inputs["window_page_table"] = inputs["page_table"]
        if rows[0].window_page_ids is not None:
            page_ids = [np.asarray(row.window_page_ids, np.int64) for row in rows]
            inputs["window_page_table"] = _page_table(page_ids, width, unused_page)
            window_slots = _slots(page_ids, row_of_token, positions, page_size)
    return Batch(inputs, slots, window_slots, len(inputs["logit_positions"]))


def _page_table(page_ids: Sequence[NDArray[np.int64]], width: int, unused_page: int) -> NDArray[np.int32]:
    table = np.full((len(page_ids), width), unused_page, np.int32)
    for row, ids in zip(table, page_ids, strict=True):
        row[: len(ids)] = ids[:width]
    table[table < 0] = unused_page
    return table


def _slots(
    page_ids: Sequence[NDArray[np.int64]], row_of_token: NDArray[np.int64], positions: NDArray[np.int64], page_size: int
) -> NDArray[np.int64]:
    first_page = np.cumsum([0] + [len(ids) for ids in page_ids[:-1]])
    pages = np.concatenate(page_ids)[first_page[row_of_token] + positions // page_size]
    return pages * page_size + positions % page_size


def _last_positions(num_logits: Sequence[int], starts: NDArray[np.int64]) -> NDArray[np.int64]:
    ends = starts[1:]
    return np.concatenate([np.arange(end - n, end) for n, end in zip(num_logits, ends, strict=True)]).astype(np.int64)
