"""A smaller engine that guesses for a larger one.

It has the same vocabulary, and a pool of its own with the pages of the larger one's numbers, so one page table serves both:
what the larger one prefills, it prefills too, and pages that are shared or cached are so in both. A page that it had no time
for (guesses were off when it was filled, and perhaps it has left the window since) holds something else there; guesses after it
are worse, and cost a check, but change no token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from llm_runtime.executors.base import Executor
from llm_runtime.sampler import SamplerState
from llm_runtime.scheduler import ScheduledRow, StepPlan
from llm_runtime.sequence import Sequence, make_row
from llm_runtime.speculation import Speculator

MEMORY = 0.9  # of durations: the weight of what was before the newest


class DraftSpeculator(Speculator):
    """Guesses by drawing from the smaller engine with the random numbers that the larger one will use, as many as pay: each
    costs one of its steps."""

    def __init__(self, max_draft: int, executor: Executor, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(max_draft)
        self.executor = executor
        self._clock = clock
        self._computed: dict[str, int] = {}  # tokens of a live sequence that have keys and values here
        self._step_seconds: float | None = None  # of a step in which all have one token

    def propose(self, sequences: list[Sequence], samplers: Mapping[str, SamplerState]) -> None:
        """Ask for room for so many guesses, by as many tokens that stand for nothing: they are drawn once there are pages for
        them."""
        for sequence, count in self.counts(sequences):
            sequence.draft_ids = [0] * count

    def fill(self, plan: StepPlan, states: Mapping[str, SamplerState]) -> None:
        """Prefill what the plan prefills, and put guesses in the place of those that stand for nothing. `states` by request."""
        self._prefill(plan)
        guesses: dict[int, list[int]] = {index: [] for index, row in enumerate(plan.decode) if row.draft_ids}
        latest = dict(states)
        round_number = 0
        while open_rows := [index for index in guesses if len(plan.decode[index].draft_ids) > round_number]:
            self._draw(plan.decode, guesses, open_rows, latest)
            round_number += 1
        for index, drawn in guesses.items():
            plan.decode[index] = replace(plan.decode[index], draft_ids=tuple(drawn))

    def learn(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        super().learn(sequence, num_drafted, num_accepted)
        # The last guess was never run here, and what follows a wrong one is run anew.
        self._computed[sequence.request.request_id] = len(sequence.token_ids) + min(num_accepted, num_drafted - 1)

    def forget(self, request_id: str) -> None:
        super().forget(request_id)
        self._computed.pop(request_id, None)

    def cost_of_guess(self) -> float:
        """A step here, as a part of a step of the larger engine."""
        whole = self.cost.mean_seconds
        return self._step_seconds / whole if self._step_seconds is not None and whole else 0.0

    def _prefill(self, plan: StepPlan) -> None:
        rows = []
        for row in plan.prefill:
            start = row.sequence.num_computed
            rows.append(make_row(row.sequence, row.sequence.token_ids[start : start + row.num_tokens], start, 0))
        if rows:
            self.executor.execute(rows)
        for row in plan.prefill:
            self._computed[row.sequence.request.request_id] = row.sequence.num_computed + row.num_tokens

    def _draw(
        self,
        decode: list[ScheduledRow],
        guesses: dict[int, list[int]],
        open_rows: list[int],
        states: dict[str, SamplerState],
    ) -> None:
        """One more guess for each of these rows. `states` are by request, after all guesses but the newest, and go ahead."""
        rows, next_states, contexts = [], [], []
        for index in open_rows:
            sequence, drawn = decode[index].sequence, guesses[index]
            name = sequence.request.request_id
            length = len(sequence.token_ids)
            if drawn:
                states[name] = states[name].ahead(drawn[-1:])[-1]
                rows.append(make_row(sequence, drawn[-1:], length + len(drawn) - 1, 1))
            else:
                # After a preemption fewer tokens are computed than were here.
                start = min(self._computed.get(name, 0), length - 1, sequence.num_computed)
                if start < sequence.num_computed:  # what has no page any more stays as it is
                    start = max(start, sequence.num_pages_gone * self.executor.page_size)
                rows.append(make_row(sequence, sequence.token_ids[start:], start, 1))
            next_states.append(states[name])
            contexts.append([*sequence.token_ids, *drawn])
        started = self._clock()
        choices = self.executor.sample(rows, next_states, contexts)
        if all(len(row.token_ids) == 1 for row in rows):
            seconds = self._clock() - started
            before = seconds if self._step_seconds is None else self._step_seconds
            self._step_seconds = MEMORY * before + (1 - MEMORY) * seconds
        for index, choice in zip(open_rows, choices, strict=True):
            guesses[index].append(max(choice.token_id, 0))  # a broken row guesses anything
