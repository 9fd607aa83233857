"""From logits to tokens: penalties, bans, temperature, top-k, top-p, min-p, and log-probabilities.

The order is that of vLLM and Hugging Face: penalties and bans, temperature, top-k, top-p, min-p. A row that asks for none
of them costs one argmax. Vocabularies reach 262,144 entries, so nothing here sorts one whole.
"""

from __future__ import annotations

import copy
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llm_runtime.types import SamplingParams, TokenLogprob

Floats = NDArray[np.float32]
FIRST_CANDIDATES = 256  # top-p looks at this many likeliest tokens first, and at more only where they do not suffice
BLOCK = 512  # weights summed at once when drawing
NONE = np.zeros(0, np.int64)
NOTHING_LEFT = "bad_words, min_tokens and the guide leave no token to choose"


@dataclass(frozen=True, slots=True)
class Choice:
    """A row's next token, or why there is none."""

    token_id: int = -1
    logprob: TokenLogprob | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Edits:
    """Changes of one row of logits, by token id, to be made in this order."""

    repeated: NDArray[np.int64]  # divided by the penalty, or multiplied where negative
    repetition_penalty: float
    counted: NDArray[np.int64]
    losses: NDArray[np.float32]  # of each counted token, subtracted
    banned: NDArray[np.int64]  # set to -inf
    allowed: NDArray[np.int32] | None  # a bit for each token, the lowest of an integer first; all others are set to -inf


class SamplerState:
    """What a sequence's next choice depends on besides its logits: counts of its tokens, and its seed."""

    def __init__(self, params: SamplingParams, prompt_ids: Sequence[int], default_end_ids: Sequence[int]) -> None:
        self.params = params
        self.end_ids = tuple(default_end_ids if params.end_ids is None else params.end_ids)
        self.num_output = 0
        self.guide = params.guide.start() if params.guide else None
        # Without a seed every request gets one of its own; drawing is then the same code for both.
        self._seed = secrets.randbits(64) if params.seed is None else params.seed
        self._prompt_ids = np.unique(np.asarray(prompt_ids, np.int64)) if params.repetition_penalty != 1.0 else None
        self._counts: dict[int, int] = {}
        self.known_id: int | None = None  # the token is not to be chosen: it is this one

    @classmethod
    def of_known(cls, token_id: int, num_top_logprobs: int) -> SamplerState:
        """For a token of a prompt, of which only the log-probability is wanted."""
        state = cls(SamplingParams(wants_logprobs=True, num_top_logprobs=num_top_logprobs, seed=0), (), ())
        state.known_id = token_id
        return state

    @property
    def is_plain_greedy(self) -> bool:
        p = self.params
        return p.temperature == 0 and not (p.wants_logprobs or self.changes_logits)

    @property
    def changes_logits(self) -> bool:
        p = self.params
        penalties = p.repetition_penalty != 1.0 or p.presence_penalty != 0.0 or p.frequency_penalty != 0.0
        edits = penalties or bool(p.logit_bias or p.bad_token_sequences) or self.guide is not None
        return edits or self.num_output < p.min_tokens

    def append(self, token_id: int) -> None:
        self.num_output += 1
        if self.guide:
            self.guide.accept(token_id)
        self._counts[token_id] = self._counts.get(token_id, 0) + 1

    def ahead(self, draft_ids: Sequence[int]) -> list[SamplerState]:
        """The states at the next token and at each one after, if these were the tokens: one more than there are drafts."""
        states = [self]
        for token_id in draft_ids:
            state = states[-1]
            if not state.is_plain_greedy:  # or nothing of the state counts
                state = copy.copy(state)
                state._counts = dict(state._counts)
                state.guide = state.guide.fork() if state.guide else None
                state.append(token_id)
            states.append(state)
        return states

    def edits(self, token_ids: Sequence[int], vocab_size: int) -> Edits:
        """What penalties and bans change in the next row of logits. `token_ids` are the sequence's, prompt and output."""
        p = self.params
        counted = np.fromiter(self._counts.keys(), np.int64, len(self._counts))
        banned: list[int] = []
        for *head, last in p.bad_token_sequences:
            if len(head) <= len(token_ids) and list(token_ids[len(token_ids) - len(head) :]) == head:
                banned.append(last)
        if self.num_output < p.min_tokens:
            banned += self.end_ids
        lost_ids, losses = self._losses()
        return Edits(
            repeated=NONE if self._prompt_ids is None else np.union1d(self._prompt_ids, counted),
            repetition_penalty=p.repetition_penalty,
            counted=lost_ids,
            losses=losses,
            # Ids that the model does not have (an end_id is any number that a client sends) are banned already.
            banned=np.array([token_id for token_id in banned if token_id < vocab_size], np.int64),
            allowed=self.guide.allowed() if self.guide else None,
        )

    def _losses(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """What presence and frequency penalties and biases subtract, each token once."""
        p = self.params
        losses: dict[int, np.float32] = {}
        if p.presence_penalty or p.frequency_penalty:
            presence, frequency = np.float32(p.presence_penalty), np.float32(p.frequency_penalty)
            losses = {token_id: presence + frequency * np.float32(count) for token_id, count in self._counts.items()}
        for token_id, bias in p.logit_bias:
            losses[token_id] = losses.get(token_id, np.float32(0)) - np.float32(bias)
        return np.fromiter(losses.keys(), np.int64, len(losses)), np.fromiter(losses.values(), np.float32, len(losses))

    def adjust(self, logits: Floats, token_ids: Sequence[int]) -> None:
        """Apply penalties and bans to one row in place. `token_ids` are the sequence's, prompt and output."""
        edits = self.edits(token_ids, len(logits))
        values, penalty = logits[edits.repeated], edits.repetition_penalty
        logits[edits.repeated] = np.where(values > 0, values / penalty, values * penalty)
        logits[edits.counted] -= edits.losses
        logits[edits.banned] = -np.inf
        if edits.allowed is not None:
            logits[np.unpackbits(edits.allowed.view(np.uint8), count=len(logits), bitorder="little") == 0] = -np.inf

    def uniform(self) -> float:
        """The draw for the next output token: a function of the seed and the token's number alone, so that neither batching
        nor a preemption changes it (Philox, Salmon et al., SC 2011)."""
        return np.random.Generator(np.random.Philox(key=self._seed, counter=self.num_output)).random()


def choose(logits: Floats, states: Sequence[SamplerState], token_ids: Sequence[Sequence[int]]) -> list[Choice]:
    """One choice a row. logits: float32 [rows, vocab], not changed; token_ids: the tokens before each."""
    greedy = logits.argmax(axis=1)
    return [
        _plain(row, int(best)) if state.is_plain_greedy else _choose_row(row, state, tokens)
        for row, best, state, tokens in zip(logits, greedy, states, token_ids, strict=True)
    ]


def _plain(row: Floats, best: int) -> Choice:
    # argmax stops at a NaN, so looking at its result suffices.
    return Choice(best) if row[best] < np.inf else _broken(row)


def _choose_row(row: Floats, state: SamplerState, token_ids: Sequence[int]) -> Choice:
    if not row.max() < np.inf:
        return _broken(row)
    adjusted = row
    if state.changes_logits:
        adjusted = row.copy()
        state.adjust(adjusted, token_ids)
        if np.isneginf(adjusted.max()):
            return Choice(error=NOTHING_LEFT)
    if state.known_id is not None:
        token_id = state.known_id
    elif state.params.temperature == 0:
        token_id = int(adjusted.argmax())
    else:
        token_id = sample(adjusted, state.params, state.uniform())
    return Choice(token_id, _logprob(row, token_id, state.params.num_top_logprobs) if state.params.wants_logprobs else None)


def _broken(row: Floats) -> Choice:
    return Choice(error=not_numbers(int((~(row < np.inf)).sum())))


def not_numbers(count: int) -> str:
    """What is said of a row with so many logits that are none."""
    return f"the model gave {count} logits that are NaN or infinite"


def sample(logits: Floats, params: SamplingParams, uniform: float) -> int:
    """Draw from softmax(logits / temperature) after top-k, top-p and min-p. logits: float32 [vocab]; uniform: in [0, 1).

    The unit interval is divided in the order of token ids, not of likelihood: where batching changes logits by a rounding,
    the borders move by as much and no two tokens change places.
    """
    scaled = logits - logits.max()
    with np.errstate(over="ignore"):  # a tiny temperature leaves the likeliest alone, at 0; the others go to -inf
        scaled *= np.float32(min(1 / params.temperature, 1e30))
    if 0 < params.top_k < len(scaled):
        kept = np.sort(_largest(scaled, params.top_k))
        return int(kept[_draw(_filtered(np.exp(scaled[kept]), params), uniform)])
    return _draw(_filtered(np.exp(scaled, out=scaled), params), uniform)


def _filtered(weights: Floats, params: SamplingParams) -> Floats:
    """`weights` (largest 1) with 0 for what top-p or min-p drops."""
    kept = weights
    if params.top_p < 1.0:
        threshold, num_equal = _nucleus(weights, params.top_p * float(weights.sum(dtype=np.float64)))
        kept = weights * (weights >= threshold)
        kept[np.flatnonzero(weights == threshold)[num_equal:]] = 0
    if params.min_p > 0.0:
        kept = kept * (weights >= np.float32(params.min_p))
    return kept


def _nucleus(weights: Floats, target: float) -> tuple[np.float32, int]:
    """The fewest and largest weights with a sum of `target`: (the smallest of them, how many of that size are among them).

    Mostly few suffice. For a flat distribution the cut is searched as quickselect does, by mass in place of rank.
    """
    candidates = weights[_largest(weights, FIRST_CANDIDATES)]
    above = 0.0  # mass of weights larger than all candidates
    if float(candidates.sum(dtype=np.float64)) < target:
        candidates = weights
        while len(candidates) > 4 * FIRST_CANDIDATES:
            pivot = np.sort(candidates[:: len(candidates) // 64])[32]
            is_high = candidates > pivot
            high = candidates[is_high]
            mass = float(high.sum(dtype=np.float64))
            if above + mass >= target:
                candidates = high
            elif len(high):
                above += mass
                candidates = candidates[~is_high]
            else:
                break  # the pivot is the largest, so most are of one size: sorting them is cheap
        candidates = np.sort(candidates)[::-1]
    mass_with = above + np.cumsum(candidates, dtype=np.float64)
    last = min(int(np.searchsorted(mass_with, target)), len(candidates) - 1)
    first_equal = int(np.searchsorted(-candidates, -candidates[last]))
    return candidates[last], last + 1 - first_equal


def _draw(weights: Floats, uniform: float) -> int:
    """The index at `uniform` of the whole mass. First the block, then the index in it: a running sum of all takes longer."""
    blocks = np.add.reduceat(weights, np.arange(0, len(weights), BLOCK), dtype=np.float64)
    block, rest = _locate(blocks, uniform * float(blocks.sum()))
    index, _ = _locate(weights[block * BLOCK : (block + 1) * BLOCK].astype(np.float64), rest)
    return block * BLOCK + index


def _locate(weights: NDArray[np.float64], target: float) -> tuple[int, float]:
    """(the first index whose running sum is over `target`, or by rounding the last with any weight; what is left for it)"""
    running = np.cumsum(weights)
    index = min(int(np.searchsorted(running, target, side="right")), int(np.flatnonzero(weights)[-1]))
    return index, target - (float(running[index - 1]) if index else 0.0)


def _largest(values: Floats, count: int) -> NDArray[np.int64]:
    """Indexes of the `count` largest values, largest first; of equal ones the lower index first."""
    indexes = _at_least_largest(values, count)
    if count < len(indexes):
        found = values[indexes]
        threshold = np.partition(found, len(found) - count)[len(found) - count]
        above = indexes[found > threshold]
        indexes = np.concatenate([above, indexes[found == threshold][: count - len(above)]])
    return indexes[np.lexsort((indexes, -values[indexes]))]


def _at_least_largest(values: Floats, count: int) -> NDArray[np.int64]:
    """Indexes, in order, of the `count` largest values and of not many others.

    Of `count` blocks each has a value at least as large as the smallest of their maxima; finding maxima is far cheaper than
    partitioning a whole vocabulary.
    """
    width = len(values) // (4 * count)
    if width < 8:
        return np.arange(len(values))
    maxima = values[: len(values) // width * width].reshape(-1, width).max(axis=1)
    return np.flatnonzero(values >= np.partition(maxima, len(maxima) - count)[len(maxima) - count])


def _logprob(row: Floats, token_id: int, num_top: int) -> TokenLogprob:
    """Of the model's own distribution: before penalties, temperature and filters."""
    shift = row.max()
    log_total = float(shift) + float(np.log(np.exp(row - shift).sum(dtype=np.float64)))
    top = tuple((int(index), float(row[index]) - log_total) for index in _largest(row, num_top)) if num_top else ()
    return TokenLogprob(token_id, float(row[token_id]) - log_total, top)
