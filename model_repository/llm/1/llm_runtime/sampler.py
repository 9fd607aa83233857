"""From logits to tokens: penalties, bans, temperature, top-k, top-p, min-p, and log-probabilities.

The order is that of vLLM and Hugging Face: penalties and bans, temperature, top-k, top-p, min-p. A row that asks for none
of them costs one argmax. Vocabularies reach 262,144 entries, so nothing here sorts one whole.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llm_runtime.types import SamplingParams, TokenLogprob

Floats = NDArray[np.float32]
FIRST_CANDIDATES = 256  # top-p looks at this many likeliest tokens first, and at more only where they do not suffice


@dataclass(frozen=True, slots=True)
class Choice:
    """A row's next token, or why there is none."""

    token_id: int = -1
    logprob: TokenLogprob | None = None
    error: str | None = None


class SamplerState:
    """What a sequence's next choice depends on besides its logits: counts of its tokens, and its seed."""

    def __init__(self, params: SamplingParams, prompt_ids: Sequence[int], default_end_ids: Sequence[int]) -> None:
        self.params = params
        self.end_ids = tuple(default_end_ids if params.end_ids is None else params.end_ids)
        self.output_ids: list[int] = []
        # Without a seed every request gets one of its own; drawing is then the same code for both.
        self._seed = secrets.randbits(64) if params.seed is None else params.seed
        self._prompt_ids = np.unique(np.asarray(prompt_ids, np.int64)) if params.repetition_penalty != 1.0 else None
        self._counts: dict[int, int] = {}

    @property
    def is_plain_greedy(self) -> bool:
        p = self.params
        return p.temperature == 0 and not (p.wants_logprobs or self.changes_logits)

    @property
    def changes_logits(self) -> bool:
        p = self.params
        penalties = p.repetition_penalty != 1.0 or p.presence_penalty != 0.0 or p.frequency_penalty != 0.0
        return penalties or bool(p.bad_token_sequences) or len(self.output_ids) < p.min_tokens

    def append(self, token_id: int) -> None:
        self.output_ids.append(token_id)
        self._counts[token_id] = self._counts.get(token_id, 0) + 1

    def adjust(self, logits: Floats, token_ids: Sequence[int]) -> None:
        """Apply penalties and bans to one row in place. `token_ids` are the sequence's, prompt and output."""
        p = self.params
        counted = np.fromiter(self._counts.keys(), np.int64, len(self._counts))
        if self._prompt_ids is not None:
            seen = np.union1d(self._prompt_ids, counted)
            values = logits[seen]
            logits[seen] = np.where(values > 0, values / p.repetition_penalty, values * p.repetition_penalty)
        if len(counted) and (p.presence_penalty or p.frequency_penalty):
            counts = np.fromiter(self._counts.values(), np.float32, len(self._counts))
            logits[counted] -= np.float32(p.presence_penalty) + np.float32(p.frequency_penalty) * counts
        for banned in p.bad_token_sequences:
            head = banned[:-1]
            if len(head) <= len(token_ids) and tuple(token_ids[len(token_ids) - len(head) :]) == head:
                _ban(logits, banned[-1:])
        if len(self.output_ids) < p.min_tokens:
            _ban(logits, self.end_ids)

    def uniform(self) -> float:
        """The draw for the next output token: a function of the seed and the token's number alone, so that neither batching
        nor a preemption changes it (Philox, Salmon et al., SC 2011)."""
        return np.random.Generator(np.random.Philox(key=self._seed, counter=len(self.output_ids))).random()


def _ban(logits: Floats, token_ids: Sequence[int]) -> None:
    """Ids that the model does not have (an end_id is any number that a client sends) are banned already."""
    logits[[token_id for token_id in token_ids if token_id < len(logits)]] = -np.inf


def choose(logits: Floats, states: Sequence[SamplerState], token_ids: Sequence[Sequence[int]]) -> list[Choice]:
    """One choice a row. logits: float32 [rows, vocab], not changed; token_ids: each row's prompt and output so far."""
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
            return Choice(error="bad_words and min_tokens leave no token to choose")
    token_id = int(adjusted.argmax()) if state.params.temperature == 0 else sample(adjusted, state.params, state.uniform())
    return Choice(token_id, _logprob(row, token_id, state.params.num_top_logprobs) if state.params.wants_logprobs else None)


def _broken(row: Floats) -> Choice:
    return Choice(error=f"the model gave {int((~(row < np.inf)).sum())} logits that are NaN or infinite")


def sample(logits: Floats, params: SamplingParams, uniform: float) -> int:
    """Draw from softmax(logits / temperature) after top-k, top-p and min-p. logits: float32 [vocab]; uniform: in [0, 1)."""
    scaled = logits.astype(np.float64)
    scaled -= scaled.max()
    with np.errstate(over="ignore"):  # a tiny temperature leaves the likeliest alone, at 0; the others go to -inf
        scaled /= params.temperature
    candidates = _candidates(scaled, params)
    weights = np.exp(scaled if candidates is None else scaled[candidates])
    cumulative = np.cumsum(weights)
    # The last index with weight, where rounding put the target at the very end.
    index = min(int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right")), int(np.flatnonzero(weights)[-1]))
    return index if candidates is None else int(candidates[index])


def _candidates(scaled: NDArray[np.float64], params: SamplingParams) -> NDArray[np.int64] | None:
    """Token ids that the filters leave, likeliest first; None: all. `scaled` has its maximum at 0."""
    if params.top_k == 0 and params.top_p >= 1.0 and params.min_p == 0.0:
        return None
    if params.top_k:
        kept = _largest(scaled, min(params.top_k, len(scaled)))
        total = np.exp(scaled[kept]).sum()
    elif params.top_p < 1.0:
        total = np.exp(scaled).sum()
        kept = _nucleus(scaled, params.top_p, total)
    else:
        kept = np.flatnonzero(scaled >= np.log(params.min_p))
        return kept[np.argsort(-scaled[kept], kind="stable")]
    if params.top_p < 1.0:
        before = np.cumsum(np.exp(scaled[kept])) - np.exp(scaled[kept])  # the mass of likelier ones
        kept = kept[before < params.top_p * total]
    if params.min_p > 0.0:
        kept = kept[scaled[kept] >= np.log(params.min_p)]
    return kept


def _nucleus(scaled: NDArray[np.float64], top_p: float, total: float) -> NDArray[np.int64]:
    """At least the likeliest tokens that together have `top_p` of `total`: as many as it takes, four times more at each try."""
    count = FIRST_CANDIDATES
    while True:
        kept = _largest(scaled, min(count, len(scaled)))
        if len(kept) == len(scaled) or np.exp(scaled[kept]).sum() >= top_p * total:
            return kept
        count *= 4


def _largest(values: NDArray, count: int) -> NDArray[np.int64]:
    """Indexes of the `count` largest values, largest first; of equal ones the lower index first."""
    if count < len(values):
        threshold = np.partition(values, len(values) - count)[len(values) - count]
        above = np.flatnonzero(values > threshold)
        equal = np.flatnonzero(values == threshold)[: count - len(above)]
        indexes = np.concatenate([above, equal])
    else:
        indexes = np.arange(len(values))
    return indexes[np.lexsort((indexes, -values[indexes]))]


def _logprob(row: Floats, token_id: int, num_top: int) -> TokenLogprob:
    """Of the model's own distribution: before penalties, temperature and filters."""
    shift = row.max()
    log_total = float(shift) + float(np.log(np.exp(row - shift, dtype=np.float64).sum()))
    top = tuple((int(index), float(row[index]) - log_total) for index in _largest(row, num_top)) if num_top else ()
    return TokenLogprob(token_id, float(row[token_id]) - log_total, top)
