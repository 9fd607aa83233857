"""What runs next, step by step, without an executor: the test plays the device that gives every finished row a token."""

from __future__ import annotations

import random
from collections import Counter
from typing import ClassVar

import pytest

from llm_runtime.block_manager import BlockManager
from llm_runtime.page_pool import PageGroup
from llm_runtime.scheduler import Scheduler, StepPlan
from llm_runtime.sequence import Sequence, State
from llm_runtime.types import FinishReason, GenerationRequest, SamplingParams

PAGE = 4


def make_scheduler(num_pages: int = 64, max_sequences: int = 4, max_step_tokens: int = 32, chunk: int = 8) -> Scheduler:
    return Scheduler(BlockManager([PageGroup(num_pages)], PAGE), max_sequences, max_step_tokens, chunk)


def add(
    scheduler: Scheduler, arrival: int, num_prompt: int, *, token: int | None = None, cls=Sequence, **deadlines
) -> Sequence:
    prompt = (arrival if token is None else token,) * num_prompt
    sequence = cls(GenerationRequest(str(arrival), prompt, SamplingParams(), **deadlines), arrival)
    scheduler.add(sequence)
    return sequence


def apply(scheduler: Scheduler, plan: StepPlan) -> None:
    for row in plan.rows:
        is_last = row.is_last_chunk
        scheduler.apply(row)
        if is_last:
            row.sequence.token_ids.append(7)


def step(scheduler: Scheduler) -> dict[int, int]:
    """Run one step: tokens by the sequence's arrival, in the order of the rows."""
    plan = scheduler.schedule()
    rows = {row.sequence.arrival: row.num_tokens for row in plan.rows}
    apply(scheduler, plan)
    scheduler.blocks.check_invariants()
    return rows


def test_decode_rows_come_first_then_chunks_first_come_first_served():
    scheduler = make_scheduler()
    add(scheduler, 0, 3)
    add(scheduler, 1, 40)
    add(scheduler, 2, 2)
    assert step(scheduler) == {0: 3, 1: 29}, "the whole budget while nothing decodes"
    assert step(scheduler) == {0: 1, 1: 8}, "one chunk while something does"
    assert step(scheduler) == {0: 1, 1: 3, 2: 2}, "what is left of the chunk goes to the next"
    assert step(scheduler) == {0: 1, 1: 1, 2: 1}


def test_no_more_run_than_may_and_the_rest_wait_in_order():
    scheduler = make_scheduler(max_sequences=2)
    sequences = [add(scheduler, arrival, 2) for arrival in range(4)]
    assert list(step(scheduler)) == [0, 1]
    assert scheduler.num_waiting == 2
    scheduler.finish(sequences[0], FinishReason.STOP)
    assert list(step(scheduler)) == [1, 2]
    scheduler.finish(sequences[3], FinishReason.CANCELLED)
    assert scheduler.num_waiting == 0


def test_a_step_of_few_tokens_starves_no_running_sequence():
    scheduler = make_scheduler(max_sequences=8, max_step_tokens=3)
    for arrival in range(8):
        add(scheduler, arrival, 5)
    for _ in range(20):
        rows = step(scheduler)
        assert sum(rows.values()) <= 3
        assert {sequence.arrival for sequence in scheduler.running} == set(rows)


@pytest.mark.parametrize("chunk", [1, 3, 8])
def test_the_budget_holds_and_a_decoding_sequence_never_misses_a_step(chunk):
    rng = random.Random(chunk)
    scheduler = make_scheduler(num_pages=400, max_sequences=6, max_step_tokens=16, chunk=chunk)
    for arrival in range(6):
        add(scheduler, arrival, rng.randint(1, 40))
    for _ in range(80):
        decoding = {sequence.arrival for sequence in scheduler.running if sequence.num_uncomputed == 1}
        rows = step(scheduler)
        assert decoding == {arrival for arrival in decoding if rows[arrival] == 1}
        assert sum(rows.values()) <= 16
        if decoding:
            assert sum(rows.values()) <= len(decoding) + chunk


def test_the_newest_gives_way_and_comes_back_ahead_of_later_arrivals():
    scheduler = make_scheduler(num_pages=6, max_sequences=3)
    oldest, middle, newest = (add(scheduler, arrival, 7) for arrival in range(3))
    step(scheduler)
    late = add(scheduler, 3, 1)
    step(scheduler)  # every page is full now
    assert list(step(scheduler)) == [0, 1]
    assert (newest.state, newest.page_ids, newest.num_computed) == (State.WAITING, [], 0)
    assert scheduler.num_preemptions == 1
    while middle.state is State.RUNNING:
        step(scheduler)
    assert [sequence.state for sequence in (middle, newest, late)] == [State.WAITING] * 3
    scheduler.finish(oldest, FinishReason.STOP)
    assert list(step(scheduler)) == [1], "the late one would fit beside it, but it is not its turn"
    scheduler.finish(middle, FinishReason.STOP)
    assert list(step(scheduler)) == [2, 3]


def test_a_sequence_alone_reaches_the_end_of_the_pool():
    scheduler = make_scheduler(num_pages=3)
    sequence = add(scheduler, 0, 5)
    while len(sequence.token_ids) < 3 * PAGE:
        assert step(scheduler)
    assert scheduler.num_preemptions == 0


def test_a_preempted_sequence_finds_its_own_pages_and_is_not_counted_as_started_again():
    scheduler = make_scheduler(num_pages=6, max_sequences=2)
    older, newer = (add(scheduler, arrival, 9) for arrival in range(2))
    assert scheduler.num_waiting == 2
    plan = scheduler.schedule()
    assert plan.started == [older, newer]
    apply(scheduler, plan)
    while newer.state is State.RUNNING:
        step(scheduler)
    num_tokens = len(newer.token_ids)
    scheduler.finish(older, FinishReason.STOP)
    plan = scheduler.schedule()
    assert plan.started == []
    assert 0 < plan.rows[0].num_tokens < num_tokens, "some of its pages were still there"
    assert newer.num_cached == 0, "which is about the first start"


def test_deadlines_end_what_waits_and_what_runs():
    scheduler = make_scheduler(max_sequences=1)
    runs = add(scheduler, 0, 2, queue_deadline=1.0, deadline=5.0)
    waits = add(scheduler, 1, 2, queue_deadline=2.0)
    both = add(scheduler, 2, 2, queue_deadline=3.0, deadline=3.0)
    whole = add(scheduler, 3, 2, deadline=4.0)
    stays = add(scheduler, 4, 2)
    step(scheduler)
    assert scheduler.expire(1.999) == []
    assert scheduler.expire(2.0) == [waits]
    assert scheduler.expire(3.5) == [both]
    assert scheduler.expire(100.0) == [whole, runs]
    assert (runs.finish_reason, runs.state) == (FinishReason.TIMEOUT, State.FINISHED)
    assert list(step(scheduler)) == [4]
    assert scheduler.num_waiting == 0
    assert stays.state is State.RUNNING


def test_the_queue_deadline_of_one_that_was_preempted_no_longer_counts():
    scheduler = make_scheduler(num_pages=4, max_sequences=2)
    add(scheduler, 0, 7)
    newer = add(scheduler, 1, 7, queue_deadline=1.0)
    while newer.state is State.RUNNING or not newer.has_started:
        step(scheduler)
    assert scheduler.expire(2.0) == []


def test_ended_sequences_do_not_pile_up_behind_far_deadlines():
    scheduler = make_scheduler()
    for arrival in range(2000):
        sequence = add(scheduler, arrival, 3, queue_deadline=1e9, deadline=1e9)
        step(scheduler)
        scheduler.finish(sequence, FinishReason.STOP)
    assert len(scheduler._deadlines) < 200


class CountedSequence(Sequence):
    """Counts how often anything asks for its state or its tokens."""

    touched: ClassVar[Counter[str]] = Counter()

    def __getattribute__(self, name: str):
        if name in ("state", "token_ids", "request"):
            CountedSequence.touched[name] += 1
        return super().__getattribute__(name)


def test_a_step_looks_at_few_of_ten_thousand_that_wait():
    scheduler = make_scheduler(max_sequences=4)
    sequences = [
        add(scheduler, arrival, 3, cls=CountedSequence, queue_deadline=1000.0 + arrival % 7, deadline=9e9)
        for arrival in range(10_000)
    ]
    step(scheduler)
    CountedSequence.touched.clear()
    assert scheduler.expire(500.0) == []
    step(scheduler)
    assert CountedSequence.touched.total() < 100
    for sequence in sequences[1000:9000]:
        scheduler.finish(sequence, FinishReason.CANCELLED)
    assert scheduler.num_waiting == 1996
    assert len(scheduler.expire(2000.0)) == 1996
    assert scheduler.num_waiting == 0
    assert list(step(scheduler)) == [0, 1, 2, 3]
