"""Iteration-level batching (Orca, OSDI 2022): at every step, which sequences run and how many tokens of each.

Decode tokens go first, one a running sequence; then prompt chunks, first come first served, under a token budget that is
smaller while others decode, so that a long prompt holds up running streams by at most one chunk. A sequence gets pages for
its whole prompt when it starts (of layers with a window, for a chunk at a time), and one more page each time its output fills
one. When none is left the newest running sequence gives up its pages and waits, ahead of all later arrivals, to be computed
again.

No clock, thread or device: `now` is an argument, and `schedule` only decides.
"""

from __future__ import annotations

import bisect
import heapq
import sys
from collections import deque
from dataclasses import dataclass, field

from llm_runtime.block_manager import BlockManager
from llm_runtime.sequence import Sequence, State
from llm_runtime.types import MAX_PROMPT_LOGITS, FinishReason


@dataclass(frozen=True, slots=True)
class ScheduledRow:
    """Run the next `num_tokens` uncomputed tokens of `sequence`, and after the newest these guesses."""

    sequence: Sequence
    num_tokens: int
    draft_ids: tuple[int, ...] = ()

    @property
    def is_last_chunk(self) -> bool:
        """Whether the row reaches the sequence's newest token, so that the next one can be chosen."""
        return self.num_tokens == self.sequence.num_uncomputed


@dataclass(slots=True)
class StepPlan:
    decode: list[ScheduledRow] = field(default_factory=list)
    prefill: list[ScheduledRow] = field(default_factory=list)
    prompt_logits_left: int = MAX_PROMPT_LOGITS
    started: list[Sequence] = field(default_factory=list)  # for the first time, so not those that were preempted

    @property
    def rows(self) -> list[ScheduledRow]:
        return self.decode + self.prefill

    @property
    def num_decode_tokens(self) -> int:
        return sum(1 + len(row.draft_ids) for row in self.decode)


class Scheduler:
    """Holds the queues. `running` is in order of arrival; each call costs in proportion to it, not to those that wait."""

    def __init__(
        self,
        blocks: BlockManager,
        max_sequences: int,
        max_step_tokens: int,
        prefill_chunk_tokens: int,
        max_context: int | None = None,
    ) -> None:
        """`max_context`: tokens that a sequence can have; None: as many as the pool has room for."""
        self.blocks = blocks
        self._max_context = min(limit for limit in (max_context, blocks.max_context(), sys.maxsize) if limit is not None)
        self._max_sequences = max_sequences
        self._max_step_tokens = max_step_tokens
        self._prefill_chunk_tokens = prefill_chunk_tokens
        self.running: list[Sequence] = []
        self._waiting: deque[Sequence] = deque()  # may hold finished ones, skipped when met
        self._deadlines: list[tuple[float, int, Sequence]] = []  # heap; may hold finished ones, see _add_deadline
        self._num_deadlines = 0  # ever pushed: breaks ties in the heap, where sequences cannot be compared
        self.num_waiting = 0
        self.num_preemptions = 0

    def add(self, sequence: Sequence) -> None:
        self._waiting.append(sequence)
        self.num_waiting += 1
        for limit in (sequence.request.queue_deadline, sequence.request.deadline):
            if limit is not None:
                self._add_deadline(limit, sequence)

    def expire(self, now: float) -> list[Sequence]:
        """End what is past its time: those that wait past either deadline, and those that run past the second."""
        expired = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, sequence = heapq.heappop(self._deadlines)
            if sequence.state is not State.FINISHED and self._is_due(sequence, now):
                self.finish(sequence, FinishReason.TIMEOUT)
                expired.append(sequence)
        return expired

    def schedule(self) -> StepPlan:
        """Reserves pages; changes nothing else but what a preemption undoes.

        A sequence starts only when all that run have a token in the same step and one is left for it, so there are never more
        running sequences than tokens in a step.
        """
        plan = StepPlan()
        self._plan_decode(plan)
        chunk = self._prefill_chunk_tokens if plan.decode else self._max_step_tokens
        budget = min(chunk, self._max_step_tokens - plan.num_decode_tokens)
        for sequence in self.running:
            if sequence.num_uncomputed > 1 and budget > 0 and _has_logits(plan, sequence):
                budget -= self._plan_prefill(plan, sequence, budget)
        while budget > 0 and (started := self._start_next(plan)) is not None:
            budget -= self._plan_prefill(plan, started, budget)
        return plan

    def apply(self, row: ScheduledRow) -> None:
        """The row came back: its tokens are computed, and pages that became full are known from now on."""
        self.advance(row.sequence, row.num_tokens)

    def advance(self, sequence: Sequence, num_tokens: int) -> None:
        """So many more of its tokens are computed: full pages are known from now on, and what fell out of a window is free."""
        sequence.num_computed += num_tokens
        page_size = self.blocks.page_size
        while (len(sequence.entries) + 1) * page_size <= sequence.num_computed:
            index = len(sequence.entries)
            parent = sequence.entries[-1] if index else self.blocks.root(sequence.request.cache_salt)
            page_tokens = sequence.token_ids[index * page_size : (index + 1) * page_size]
            page_ids = [pages[index] for pages in sequence.page_ids]
            sequence.entries.append(self.blocks.register(page_ids, parent, page_tokens))
        self.blocks.slide(sequence.page_ids, sequence.num_computed)

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """Take a waiting or running sequence out; its pages are free, or cached, at once."""
        if sequence.state is State.RUNNING:
            self.running.remove(sequence)
            self._release(sequence)
        else:
            self.num_waiting -= 1
        sequence.state = State.FINISHED
        sequence.finish_reason = reason

    def _plan_decode(self, plan: StepPlan) -> None:
        # Guesses never take the place of a running sequence's token or of a prompt's chunk.
        spare = self._max_step_tokens - len(self.running)
        if self.num_waiting or any(sequence.num_uncomputed > 1 for sequence in self.running):
            spare -= self._prefill_chunk_tokens
        growing: list[Sequence] = []
        for sequence in list(self.running):
            if sequence.state is State.RUNNING and self._grow(sequence) and sequence.num_uncomputed == 1:
                growing.append(sequence)
        for sequence in growing:  # afterwards, so that no page goes to a guess that a token needs
            draft = self._draft(sequence, spare)
            spare -= len(draft)
            plan.decode.append(ScheduledRow(sequence, 1, draft))

    def _draft(self, sequence: Sequence, spare: int) -> tuple[int, ...]:
        """As much of the sequence's draft as can be used: there is always one token more than are accepted."""
        draft, sequence.draft_ids = sequence.draft_ids, []
        if not draft:
            return ()
        length = len(sequence.token_ids)
        left = sequence.request.sampling.max_tokens - sequence.num_output - 1
        count = max(0, min(len(draft), spare, left, self._max_context - length - 1))
        if self.num_waiting:  # they need the pages more
            count = min(count, min(map(len, sequence.page_ids)) * self.blocks.page_size - length)
        else:
            count = self.blocks.grow_as_far(sequence.page_ids, length + count) - length
        return tuple(draft[:count])

    def _grow(self, sequence: Sequence) -> bool:
        """Pages for the sequence's next token; preempts the newest, at last itself (then False)."""
        num_tokens = sequence.num_computed + 1
        if self.blocks.grow(sequence.page_ids, num_tokens):
            return True
        self._take_back_pages_of_guesses()
        while not self.blocks.grow(sequence.page_ids, num_tokens):
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _take_back_pages_of_guesses(self) -> None:
        """What sequences hold beyond their own tokens, for guesses that were wrong."""
        for sequence in self.running:
            self.blocks.shrink(sequence.page_ids, len(sequence.token_ids))

    def _plan_prefill(self, plan: StepPlan, sequence: Sequence, budget: int) -> int:
        num_tokens = min(sequence.num_uncomputed, budget)
        if sequence.wants_prompt_logprobs:
            num_tokens = min(num_tokens, plan.prompt_logits_left)
        computed = sequence.num_computed
        num_tokens = self.blocks.grow_as_far(sequence.page_ids, computed + num_tokens) - computed
        if sequence.wants_prompt_logprobs:
            plan.prompt_logits_left -= num_tokens
        plan.prefill.append(ScheduledRow(sequence, num_tokens))
        return num_tokens

    def _start_next(self, plan: StepPlan) -> Sequence | None:
        """Move the first waiting sequence to running if there is room for all its tokens, with what the cache has of them."""
        while self._waiting and self._waiting[0].state is State.FINISHED:
            self._waiting.popleft()
        if not self._waiting or len(self.running) >= self._max_sequences:
            return None
        sequence = self._waiting[0]
        if sequence.waits_for_leader or not _has_logits(plan, sequence):  # for a step or two
            return None
        sequence.leader = None
        # What the cache holds has no logits any more.
        wants_logits = sequence.wants_prompt_logprobs
        entries = [] if wants_logits else self.blocks.match(sequence.token_ids, sequence.request.cache_salt)
        page_ids = self.blocks.start(entries, len(sequence.token_ids))
        if page_ids is None:
            return None
        self._waiting.popleft()
        self.num_waiting -= 1
        sequence.state = State.RUNNING
        sequence.entries = entries
        sequence.page_ids = page_ids
        sequence.num_computed = len(entries) * self.blocks.page_size
        if sequence.num_cached is None:
            sequence.num_cached = sequence.num_computed
            plan.started.append(sequence)
        bisect.insort(self.running, sequence, key=lambda other: other.arrival)
        return sequence

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._release(sequence)
        sequence.state = State.WAITING
        self._waiting.appendleft(sequence)
        self.num_waiting += 1
        self.num_preemptions += 1

    def _release(self, sequence: Sequence) -> None:
        self.blocks.release(sequence.page_ids)
        sequence.page_ids, sequence.entries, sequence.num_computed, sequence.draft_ids = [], [], 0, []

    def _add_deadline(self, limit: float, sequence: Sequence) -> None:
        """Ended sequences leave the heap when they are due, or here, once they are most of it: a far deadline must not keep
        the tokens of all that came and went before it."""
        self._num_deadlines += 1
        heapq.heappush(self._deadlines, (limit, self._num_deadlines, sequence))
        if len(self._deadlines) > 64 + 4 * (self.num_waiting + len(self.running)):
            self._deadlines = [entry for entry in self._deadlines if entry[2].state is not State.FINISHED]
            heapq.heapify(self._deadlines)

    @staticmethod
    def _is_due(sequence: Sequence, now: float) -> bool:
        request = sequence.request
        if request.deadline is not None and request.deadline <= now:
            return True
        return not sequence.has_started and request.queue_deadline is not None and request.queue_deadline <= now


def _has_logits(plan: StepPlan, sequence: Sequence) -> bool:
    return plan.prompt_logits_left > 0 or not sequence.wants_prompt_logprobs
