"""Speculative decoding: tokens guessed ahead, of which one step of the model confirms as many as are right.

A guess (draft) is checked by choosing at each of its positions exactly what would be chosen without it, with the same random
number, and kept while the two are equal. For drafts that are certain of themselves this is rejection sampling (Leviathan et
al., arXiv 2211.17192): a draft is accepted with the probability that the model gives it, and what is chosen in its place has
the model's distribution without it. It is more, too: a request gets the very tokens that it gets without speculation, seed by
seed.

Drafts come from the sequence itself (prompt lookup: what followed the last time that the same few tokens stood there), which
costs next to nothing and pays where output repeats its input: code edits, summaries, extraction, chat about a text. Where a
guide leaves no choice, they come from it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from llm_runtime.sampler import SamplerState
from llm_runtime.scheduler import StepPlan
from llm_runtime.sequence import Sequence
from llm_runtime.types import GuideState

MAX_NGRAM, MIN_NGRAM = 4, 2
FIRST_GUESS = 0.6  # the share of drafts accepted of a sequence of which nothing is known yet
MEMORY = 0.85  # of a sequence's acceptance: the weight of what was before the newest draft
RECOVERY = 0.003  # each step without a draft moves the acceptance back by this much, so that it is tried again in time
COST_MEMORY = 0.98
FIRST_COST = 0.1  # of one more token in a step, as a share of a step of one token


class NgramIndex:
    """Where each run of MIN_NGRAM to MAX_NGRAM tokens stood last in a sequence that only grows."""

    def __init__(self) -> None:
        self._ends: dict[tuple[int, ...], int] = {}  # run -> index of the token after it
        self._num_indexed = 0

    def draft(self, token_ids: list[int], count: int) -> list[int]:
        """What followed the last time that the newest tokens stood before, the longest run first; [] where they never did.

        Where that is less than `count` tokens ago, the text repeats itself, and so does the draft.
        """
        length = len(token_ids)
        # Only runs that a token follows: the newest would find itself.
        for end in range(max(self._num_indexed, MIN_NGRAM), length):
            for size in range(MIN_NGRAM, min(MAX_NGRAM, end) + 1):
                self._ends[tuple(token_ids[end - size : end])] = end
        self._num_indexed = max(self._num_indexed, length)
        for size in range(min(MAX_NGRAM, length), MIN_NGRAM - 1, -1):
            start = self._ends.get(tuple(token_ids[length - size :]))
            if start is not None:
                period = length - start
                return [token_ids[start + index % period] for index in range(count)]
        return []


@dataclass
class StepCost:
    """A line through the durations of recent decode steps by their number of tokens, older ones counting less and less."""

    _weight: float = 0.0
    _tokens: float = 0.0
    _seconds: float = 0.0
    _tokens_squared: float = 0.0
    _product: float = 0.0

    def observe(self, num_tokens: int, seconds: float) -> None:
        self._weight = COST_MEMORY * self._weight + 1
        self._tokens = COST_MEMORY * self._tokens + num_tokens
        self._seconds = COST_MEMORY * self._seconds + seconds
        self._tokens_squared = COST_MEMORY * self._tokens_squared + num_tokens**2
        self._product = COST_MEMORY * self._product + num_tokens * seconds

    @property
    def mean_seconds(self) -> float:
        """Of recent steps; 0 before the first."""
        return self._seconds / self._weight if self._weight else 0.0

    def share_of_tokens(self, num_tokens: int) -> float:
        """The part of a step of `num_tokens` that grows with their number: 0, tokens are free, to 1, they are all it costs."""
        spread = self._weight * self._tokens_squared - self._tokens**2
        if spread <= 1e-6 * self._weight**2:  # only ever one size was seen
            per_token, base = FIRST_COST, 1.0 - FIRST_COST
        else:
            per_token = max(0.0, (self._weight * self._product - self._tokens * self._seconds) / spread)
            base = max(0.0, (self._seconds - per_token * self._tokens) / self._weight)
        whole = base + per_token * num_tokens
        return per_token * num_tokens / whole if whole > 0 else 0.0


class _State:
    """What is known of one sequence."""

    def __init__(self, acceptance: float) -> None:
        self.index = NgramIndex()
        self.acceptance = acceptance


class Speculator:
    """Drafts for the sequences that decode, as many tokens as pay.

    In a batch of B tokens that takes time t, of which the tokens cause the share c, one more token makes the step longer by
    t * c / B, and brings one token with the probability that it and all before it are right. That is worth it where the
    probability is over c: with acceptance a, for the first log(c) / log(a) tokens. So drafts get shorter, and end, as fewer are
    accepted and as batches grow; tokens are the same all the way.
    """

    def __init__(self, max_draft: int) -> None:
        self._max_draft = max_draft
        self._states: dict[str, _State] = {}
        self._typical = FIRST_GUESS  # what new sequences are taken for
        self.cost = StepCost()

    def propose(self, sequences: list[Sequence], samplers: Mapping[str, SamplerState]) -> None:
        """Set `draft_ids` of sequences that decode in the next step and may be speculated on. `samplers` by request."""
        for sequence, count in self.counts(sequences):
            name = sequence.request.request_id
            state, guide = self._states[name], samplers[name].guide
            sequence.draft_ids = _draft(sequence, state.index, guide, count) if count > 0 else []
            if not sequence.draft_ids and count > 0:
                self._recover(state)

    def fill(self, plan: StepPlan, states: Mapping[str, SamplerState]) -> None:
        """Change guesses once the step is planned; these stay as they are."""

    def cost_of_guess(self) -> float:
        """What making a guess for each sequence takes, as a part of a step."""
        return 0.0

    def counts(self, sequences: list[Sequence]) -> Iterator[tuple[Sequence, int]]:
        """How many guesses pay, of each sequence that may be speculated on."""
        share = max(self.cost.share_of_tokens(len(sequences)) + self.cost_of_guess(), 1e-3)
        for sequence in sequences:
            if not sequence.request.sampling.speculation:
                continue
            state = self._states.setdefault(sequence.request.request_id, _State(self._typical))
            count = int(math.log(share) / math.log(state.acceptance)) if share < 1 else 0
            if count == 0:
                self._recover(state)
            yield sequence, min(self._max_draft, count)

    @staticmethod
    def _recover(state: _State) -> None:
        if state.acceptance < FIRST_GUESS:
            state.acceptance += RECOVERY

    def learn(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        """What came of a draft: every token up to the first wrong one was checked."""
        state = self._states[sequence.request.request_id]
        checked = min(num_drafted, num_accepted + 1)
        kept = MEMORY**checked
        # Kept from 0 and 1, whose logarithms say never and always.
        state.acceptance = min(0.98, max(0.02, kept * state.acceptance + (1 - kept) * num_accepted / checked))
        self._typical += 0.05 * (state.acceptance - self._typical)

    def forget(self, request_id: str) -> None:
        self._states.pop(request_id, None)


def _draft(sequence: Sequence, index: NgramIndex, guide: GuideState | None, count: int) -> list[int]:
    """What a guide leaves no choice about, or else what the text itself suggests and the guide allows."""
    forced = guide.forced()[:count] if guide else []
    draft = forced or index.draft(sequence.token_ids, count)
    return draft[: guide.num_allowed(draft)] if guide and not forced else draft
