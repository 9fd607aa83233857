"""What is bound to a TensorRT engine and the calls of a step, in plain numpy; tests/test_trt_executor.py runs them."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest

from build_engines.graph import io as graph_io
from llm_runtime.batch import make_batch
from llm_runtime.errors import EngineError
from llm_runtime.executors.base import Row
from llm_runtime.executors.trt_bindings import (
    ALIGNMENT,
    DECODE,
    PREFILL,
    STEP_INPUTS,
    Call,
    InputLayout,
    io_table,
    largest_sizes,
    make_calls,
    round_up,
)
from llm_runtime.manifest import Plan
from tests.manifests import make_manifest, make_plan, with_plan

PAGE_SIZE = 16
SCRATCH = 500
PLAN = make_plan(max_batch=6, max_step_tokens=40, max_prefill_rows=3, max_row_pages=20)


def make_row(past: int, length: int, num_logits: int, first_page: int) -> Row:
    """A row with pages of its own: from `first_page` downwards, so that order matters."""
    count = -(-(past + length) // PAGE_SIZE)
    return Row(
        list(range(1000 + past, 1000 + past + length)), past, list(range(first_page + count, first_page, -1)), num_logits
    )


def random_rows(seed: int) -> list[Row]:
    rng = random.Random(seed)
    rows = []
    for index in range(rng.randint(1, 20)):
        length = rng.choice([1, 1, 1, 2, 7, 30, 41, 100])
        num_logits = rng.choice([0, 1, 1, min(length, 5), length])
        rows.append(make_row(rng.randint(0, 200), length, num_logits, 20 * index))
    return rows


def calls_of(rows: list[Row], plan: Plan = PLAN) -> list[Call]:
    return list(make_calls(rows, plan, PAGE_SIZE, SCRATCH))


def test_the_table_is_the_graphs():
    manifest = with_plan(make_manifest(), PLAN, kv_cache="fp8")
    table = io_table(manifest)
    ours = {spec.name: (spec.dtype.upper(), spec.axes) for spec in table if spec.is_input and "_pages." not in spec.name}
    graph = graph_io.COMMON_INPUTS + graph_io.STANDARD_INPUTS
    assert ours == {name: (dtype.name, axes) for name, dtype, axes in graph}
    pages = [spec for spec in table if "_pages." in spec.name]
    assert [spec.name for spec in pages] == ["key_pages.0", "value_pages.0", "key_pages.1", "value_pages.1"]
    assert {(spec.dtype, spec.axes) for spec in pages} == {("fp8", ("N", 16, 2, 32))}
    assert [(spec.name, spec.dtype, spec.axes) for spec in table if not spec.is_input] == [
        ("logits", "fp32", ("L", 512)),
        ("new_keys_values", "fp8", (2, 2, "T", 2, 32)),
    ]


@pytest.mark.parametrize("seed", range(30))
def test_every_call_fits_its_profile(seed):
    for call in calls_of(random_rows(seed)):
        largest = largest_sizes(PLAN, call.profile)
        assert all(1 <= size <= largest[axis] for axis, size in call.sizes.items())
        for name, dtype, axes in STEP_INPUTS:
            assert call.inputs[name].dtype == dtype
            assert call.inputs[name].shape == tuple(call.sizes[axis] for axis in axes)


@pytest.mark.parametrize("seed", range(30))
def test_every_token_is_written_once_where_its_row_says_and_padding_only_to_the_scratch_page(seed):
    rows = random_rows(seed)
    batch = make_batch(rows, PAGE_SIZE, rectangular=True)
    wanted = sorted(zip(batch.slots.tolist(), batch.inputs["input_ids"].tolist(), strict=True))
    written = [
        (slot, token)
        for call in calls_of(rows)
        for slot, token in zip(call.inputs["slots"].tolist(), call.inputs["input_ids"].tolist(), strict=True)
    ]
    assert sorted(pair for pair in written if pair[0] // PAGE_SIZE != SCRATCH) == wanted


@pytest.mark.parametrize("seed", range(30))
def test_every_logit_comes_from_its_token_and_goes_to_its_place(seed):
    rows = random_rows(seed)
    wanted = [token for row in rows for token in row.token_ids[len(row.token_ids) - row.num_logits :]]
    got = [-1] * len(wanted)
    for call in calls_of(rows):
        tokens = call.inputs["input_ids"][call.inputs["logit_positions"]].tolist()
        for source, target, count in call.results:
            assert got[target : target + count] == [-1] * count
            got[target : target + count] = tokens[source : source + count]
    assert got == wanted


@pytest.mark.parametrize("seed", range(30))
def test_a_row_reads_the_pages_of_all_its_past_and_else_the_scratch_page(seed):
    rows = random_rows(seed)
    by_first_page = {row.page_ids[0]: row for row in rows}
    for call in calls_of(rows):
        for past, table in zip(call.inputs["past_lengths"].tolist(), call.inputs["page_table"].tolist(), strict=True):
            needed = -(-past // PAGE_SIZE)
            if needed:
                row = by_first_page[table[0]]
                assert table[:needed] == list(row.page_ids[:needed])
                assert set(table[len(row.page_ids) :]) <= {SCRATCH}


@pytest.mark.parametrize("seed", range(30))
def test_parts_of_one_row_run_one_after_another(seed):
    rows = random_rows(seed)
    for row in rows:
        pieces = [
            (past, call_index)
            for call_index, call in enumerate(calls_of(rows))
            for past, table in zip(call.inputs["past_lengths"].tolist(), call.inputs["page_table"].tolist(), strict=True)
            if table[0] == row.page_ids[0]
        ]
        assert [index for _, index in pieces] == sorted({index for _, index in pieces})
        assert [past for past, _ in pieces] == sorted({past for past, _ in pieces})


def test_decode_rows_share_a_call_in_few_sizes():
    sizes = set()
    for count in range(1, 14):
        for past in range(1, 300, 7):
            rows = [make_row(past, 1, 1, 20 * index) for index in range(count)]
            for call in calls_of(rows):
                assert call.profile == DECODE
                assert call.sizes["T"] == call.sizes["B"] == call.sizes["L"]
                sizes.add((call.sizes["B"], call.sizes["P"]))
    assert sizes == {(b, p) for b in (1, 2, 4, 6) for p in (1, 2, 4, 8, 16, 20)}


def test_a_decode_call_is_filled_up_with_rows_in_the_scratch_page():
    (call,) = calls_of([make_row(40, 1, 1, 0), make_row(3, 1, 0, 20), make_row(16, 1, 1, 40)])
    assert call.inputs["input_ids"].tolist() == [1040, 1003, 1016, 0]
    assert call.inputs["past_lengths"].tolist() == [40, 3, 16, 0]
    assert call.inputs["page_table"].tolist() == [
        [3, 2, 1, SCRATCH], [21, SCRATCH, SCRATCH, SCRATCH], [42, 41, SCRATCH, SCRATCH], [SCRATCH] * 4,
    ]  # fmt: skip
    assert call.inputs["slots"].tolist() == [1 * 16 + 8, 21 * 16 + 3, 41 * 16, SCRATCH * 16]
    assert call.inputs["logit_positions"].tolist() == [0, 1, 2, 3]
    assert call.inputs["row_tokens"].tolist() == [[0], [1], [2], [3]]
    assert call.results == ((0, 0, 1), (2, 1, 1))


def test_decode_runs_first_and_results_keep_the_order_of_rows():
    rows = [make_row(0, 9, 1, 0), make_row(5, 1, 1, 20), make_row(0, 10, 1, 40), make_row(6, 1, 1, 60)]
    decode, prefill = calls_of(rows)
    assert (decode.profile, prefill.profile) == (DECODE, PREFILL)
    assert decode.results == ((0, 1, 1), (1, 3, 1))
    assert prefill.results == ((0, 0, 1), (1, 2, 1))


def test_prompts_of_like_length_share_a_call():
    rows = [make_row(0, length, 1, 20 * length) for length in (9, 10, 12, 30, 2, 3)]
    assert [list(map(len, _rows_of(call))) for call in calls_of(rows)] == [[9, 10, 12], [30, 2], [3]]


def _rows_of(call: Call) -> list[list[int]]:
    starts = [*np.flatnonzero(np.diff(call.inputs["token_slots"] // call.sizes["M"], prepend=-1)).tolist(), call.sizes["T"]]
    return [call.inputs["input_ids"][a:b].tolist() for a, b in pairwise(starts)]


def test_a_chunk_without_a_logit_asks_for_one_and_drops_it():
    (call,) = calls_of([make_row(0, 20, 0, 0)])
    assert call.inputs["logit_positions"].tolist() == [0]
    assert call.results == ()


def test_a_row_of_more_pages_than_the_plan_takes_is_refused():
    with pytest.raises(EngineError, match="needs 21 rows or pages a row, and the plan takes up to 20"):
        calls_of([make_row(21 * PAGE_SIZE, 1, 1, 0)])


@pytest.mark.parametrize(("count", "rounded"), [(1, 1), (2, 2), (3, 4), (5, 8), (8, 8), (9, 12), (12, 12)])
def test_sizes_are_rounded_to_powers_of_two_and_the_limit(count, rounded):
    assert round_up(count, 12) == rounded


@pytest.mark.parametrize("seed", range(10))
def test_packed_bytes_are_the_inputs(seed):
    layout = InputLayout(PLAN)
    assert all(offset % ALIGNMENT == 0 for offset in layout.offsets.values())
    buffer = np.full(layout.num_bytes, 0xFF, np.uint8)
    for call in calls_of(random_rows(seed)):
        end = layout.pack(call, buffer)
        for name, dtype, _ in STEP_INPUTS:
            start, array = layout.offsets[name], call.inputs[name]
            assert start + array.nbytes <= end <= layout.num_bytes
            np.testing.assert_array_equal(buffer[start : start + array.nbytes].view(dtype).reshape(array.shape), array)


def test_the_largest_calls_fill_the_layout_without_overlap():
    layout = InputLayout(PLAN)
    rows = [make_row(19 * PAGE_SIZE + 3, 1, 1, 20 * index) for index in range(6)]
    (decode,) = calls_of(rows)
    assert layout.pack(decode, np.zeros(layout.num_bytes, np.uint8)) <= layout.num_bytes
    assert decode.sizes == {"T": 6, "B": 6, "M": 1, "P": 20, "L": 6}
    (prefill,) = calls_of([make_row(0, 40, 1, 0)])
    assert prefill.sizes == {"T": 40, "B": 1, "M": 40, "P": 1, "L": 1}
    starts = [*layout.offsets.values(), layout.num_bytes]
    for (start, end), (_, dtype, axes) in zip(pairwise(starts), STEP_INPUTS, strict=True):
        most = max(int(np.prod([largest_sizes(PLAN, profile)[axis] for axis in axes])) for profile in (PREFILL, DECODE))
        assert start + most * np.dtype(dtype).itemsize <= end
