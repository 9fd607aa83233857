"""sampler.choose for logits that are on a device: the same choices, and only tokens and log-probabilities come to the host.

Random numbers come from the host, and sums are in float64 there and here, so a request gets the same tokens from either. Two
copies are made: what rows ask for goes to the device in one, what was chosen comes back in one, and that is the one place
that waits for the device. (A row whose top-p reaches past its first candidates is drawn again, with a copy of its own.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from llm_runtime.sampler import BLOCK, NOTHING_LEFT, Choice, Edits, SamplerState, not_numbers
from llm_runtime.types import SamplingParams, TokenLogprob

CANDIDATES = 1024  # top-p looks at this many likeliest tokens first


def choose(logits: Tensor, states: Sequence[SamplerState], token_ids: Sequence[Sequence[int]]) -> list[Choice]:
    """One choice a row. logits: float32 [rows, vocab], not changed; token_ids: each row's prompt and output so far."""
    if not states:
        return []
    best, best_id = logits.max(dim=1)
    special = [row for row, state in enumerate(states) if not state.is_plain_greedy]
    result = [best_id.double(), best.double()]
    if special:
        chosen = _Special(logits, special, [states[row] for row in special], [token_ids[row] for row in special])
        result += [chosen.first_draw(), chosen.logprobs()]
    values = torch.cat([part.flatten() for part in result]).cpu().numpy()
    plain, rest = values[: 2 * len(states)].reshape(2, -1), values[2 * len(states) :]
    choices = [Choice(int(token)) for token in plain[0]]
    if special:
        for row, choice in zip(special, chosen.read(rest), strict=True):
            choices[row] = choice
    for row in np.flatnonzero(~(plain[1] < np.inf)):
        choices[row] = Choice(error=not_numbers(int((~(logits[row] < np.inf)).sum())))
    return choices


@dataclass(frozen=True)
class _Sampling:
    """Device columns [rows, 1] of what the rows drawn from ask for; `row` are their numbers [rows]."""

    row: Tensor
    scale: Tensor  # float32: 1 / temperature
    top_k: Tensor  # float64, the vocabulary's size where it is off
    top_p: Tensor
    min_p: Tensor  # float32
    uniform: Tensor

    def part(self, index: slice | Tensor) -> _Sampling:
        return _Sampling(*(column[index] for column in vars(self).values()))


class _Special:
    """Rows that ask for more than the likeliest token: [S] of them, in one upload, and one result a row."""

    def __init__(
        self, logits: Tensor, rows: Sequence[int], states: Sequence[SamplerState], token_ids: Sequence[Sequence[int]]
    ) -> None:
        self._states = states
        self._vocab = logits.shape[1]
        drawn = [i for i, state in enumerate(states) if state.params.temperature > 0]
        # Rows to be cut stand first, so that each kind is a slice.
        self._drawn = sorted(drawn, key=lambda i: not _cuts(states[i].params, self._vocab))
        self._num_cut = sum(_cuts(states[i].params, self._vocab) for i in drawn)
        sampling = [_sampling_row(states[i], self._vocab) for i in self._drawn]
        self._top_k = max((int(row[1]) for row in sampling if row[1] < self._vocab), default=0)
        self._asking = [i for i, state in enumerate(states) if state.params.wants_logprobs]
        self._num_top = max((states[i].params.num_top_logprobs for i in self._asking), default=0)
        self._num_top = min(self._num_top, self._vocab)
        known = [(i, state.known_id) for i, state in enumerate(states) if state.known_id is not None]
        edits = [state.edits(tokens, self._vocab) for state, tokens in zip(states, token_ids, strict=True)]
        up = _Upload(
            rows=np.array(rows),
            drawn=np.array(self._drawn),
            asking=np.array(self._asking),
            known=np.array(known).reshape(-1, 2),
            sampling=np.array(sampling).reshape(-1, 5),
            repeated=_pairs([e.repeated for e in edits], [np.full(len(e.repeated), e.repetition_penalty) for e in edits]),
            counted=_pairs([e.counted for e in edits], [e.losses for e in edits]),
            banned=_pairs([e.banned for e in edits], [np.zeros(len(e.banned)) for e in edits]),
        ).to(logits.device)
        self._raw = logits if len(rows) == len(logits) else logits[up["rows"].long()]
        self._adjusted = _guided(_edited(self._raw, up["repeated"], up["counted"], up["banned"]), edits)
        self._asking_rows = up["asking"].long()
        self._known = up["known"].long()
        scale, top_k, top_p, min_p, uniform = up["sampling"].split(1, dim=1)
        self._sampling = _Sampling(up["drawn"].long(), scale.float(), top_k, top_p, min_p.float(), uniform)

    def first_draw(self) -> Tensor:
        """float64 [3, S]: token, largest logit after bans, and whether the token is not final, being cut too early."""
        best, best_id = self._adjusted.max(dim=1)
        token, unfinished = best_id, torch.zeros_like(best_id)
        if self._num_cut:
            cut = self._sampling.part(slice(self._num_cut))
            tokens, is_short = self._draw_cut(cut, CANDIDATES)
            token = token.index_copy(0, cut.row, tokens)
            unfinished = unfinished.index_copy(0, cut.row, is_short.long())
        if self._num_cut < len(self._drawn):
            whole = self._sampling.part(slice(self._num_cut, None))
            token = token.index_copy(0, whole.row, self._draw_whole(whole))
        token = token.index_copy(0, self._known[:, 0], self._known[:, 1])
        self._token = token
        return torch.stack([token.double(), best.double(), unfinished.double()])

    def logprobs(self) -> Tensor:
        """float64 [asking rows, 1 + 2 * num_top]: the token's, those of the likeliest, and their ids."""
        if not self._asking:
            return torch.zeros(0, dtype=torch.float64, device=self._raw.device)
        rows = self._raw[self._asking_rows]
        total = _log_total(rows)
        own = rows.gather(1, self._token[self._asking_rows, None]).double() - total
        top, ids = _largest(rows, self._num_top)
        return torch.cat([own, top.double() - total, ids.double()], dim=1)

    def read(self, values: NDArray[np.float64]) -> list[Choice]:
        """The choices, from what `first_draw` and `logprobs` gave."""
        (tokens, best, unfinished), rest = values[: 3 * len(self._states)].reshape(3, -1), values[3 * len(self._states) :]
        logprobs = dict(zip(self._asking, rest.reshape(-1, 1 + 2 * self._num_top), strict=True))
        self._finish(np.flatnonzero(unfinished), tokens, logprobs)
        choices = []
        for i, state in enumerate(self._states):
            if np.isneginf(best[i]) and state.changes_logits:
                choices.append(Choice(error=NOTHING_LEFT))
            else:
                choices.append(Choice(int(tokens[i]), _read_logprob(int(tokens[i]), state.params, logprobs.get(i))))
        return choices

    def _finish(self, rows: NDArray[np.int64], tokens: NDArray[np.float64], logprobs: dict[int, NDArray[np.float64]]) -> None:
        """Draw rows again whose top-p reaches past the first candidates: flat distributions."""
        if not len(rows):
            return
        positions = [self._drawn.index(row) for row in rows]
        sampling = self._sampling.part(torch.tensor(positions, device=self._raw.device))
        again, _ = self._draw_cut(sampling, self._vocab)
        raw = self._raw[sampling.row]
        own = raw.gather(1, again[:, None]).double() - _log_total(raw)
        for row, token, logprob in zip(rows, again.tolist(), own[:, 0].tolist(), strict=True):
            tokens[row] = token
            if row in logprobs:
                logprobs[row][0] = logprob

    def _scaled(self, sampling: _Sampling) -> Tensor:
        rows = self._adjusted[sampling.row]
        return (rows - rows.amax(dim=1, keepdim=True)) * sampling.scale

    def _draw_whole(self, sampling: _Sampling) -> Tensor:
        """From all tokens but those that min-p drops. First the block, then the token in it."""
        weights = self._scaled(sampling).exp()
        weights = weights * (weights >= sampling.min_p)
        blocks = torch.nn.functional.pad(weights, (0, -weights.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
        sums = blocks.sum(dim=2, dtype=torch.float64)
        block, rest = _locate(sums, sampling.uniform * sums.sum(dim=1, keepdim=True))
        inside = blocks.gather(1, block[:, :, None].expand(-1, 1, BLOCK))[:, 0]
        index, _ = _locate(inside.double(), rest)
        return (block * BLOCK + index)[:, 0]

    def _draw_cut(self, sampling: _Sampling, num_candidates: int) -> tuple[Tensor, Tensor]:
        """(tokens; whether top-p would have kept more than the candidates). Candidates suffice for every top-k."""
        count = min(self._vocab, max(num_candidates, self._top_k))
        scaled = self._scaled(sampling)
        values, ids = _largest(scaled, count)
        rank = torch.arange(count, device=ids.device)
        weights = values.exp() * (rank < sampling.top_k)
        has_top_k = sampling.top_k < self._vocab
        total = torch.where(
            has_top_k,
            weights.sum(dim=1, keepdim=True, dtype=torch.float64),
            scaled.exp().sum(dim=1, keepdim=True, dtype=torch.float64),
        )
        mass = weights.cumsum(dim=1, dtype=torch.float64)
        target = sampling.top_p * total
        # The token with which the target is reached is the last to be kept.
        mass_before = torch.nn.functional.pad(mass[:, :-1], (1, 0))
        is_kept = (mass_before < target) | (rank == 0) | (sampling.top_p >= 1)
        is_short = (mass[:, -1:] < target) & ~has_top_k & (count < self._vocab)
        weights = weights * (is_kept & (weights >= sampling.min_p))
        in_order, order = ids.sort(dim=1)
        kept = weights.gather(1, order).double()
        index, _ = _locate(kept, sampling.uniform * kept.sum(dim=1, keepdim=True))
        return in_order.gather(1, index)[:, 0], is_short[:, 0]


class _Upload:
    """Arrays of numbers that float64 holds exactly, copied to a device at once."""

    def __init__(self, **arrays: NDArray) -> None:
        self._arrays = arrays

    def to(self, device: torch.device) -> dict[str, Tensor]:
        flat = torch.from_numpy(np.concatenate([np.ravel(array).astype(np.float64) for array in self._arrays.values()]))
        if device.type == "cuda":
            flat = flat.pin_memory()
        parts = flat.to(device, non_blocking=True).split([array.size for array in self._arrays.values()])
        return {name: part.view(array.shape) for (name, array), part in zip(self._arrays.items(), parts, strict=True)}


def _cuts(params: SamplingParams, vocab: int) -> bool:
    return params.temperature > 0 and (0 < params.top_k < vocab or params.top_p < 1)


def _sampling_row(state: SamplerState, vocab: int) -> tuple[float, ...]:
    p = state.params
    top_k = p.top_k if 0 < p.top_k < vocab else vocab
    return min(1 / p.temperature, 1e30), top_k, p.top_p, p.min_p, state.uniform()


def _pairs(token_ids: Sequence[NDArray], values: Sequence[NDArray]) -> NDArray:
    """[3, n]: row, token and value of every change."""
    rows = np.repeat(np.arange(len(token_ids)), [len(ids) for ids in token_ids])
    return np.stack([rows, np.concatenate(token_ids), np.concatenate(values)])


def _edited(raw: Tensor, repeated: Tensor, counted: Tensor, banned: Tensor) -> Tensor:
    """`raw` itself where there is nothing to change."""
    if not (repeated.numel() or counted.numel() or banned.numel()):
        return raw
    logits = raw.clone()
    row, token, penalty = repeated[0].long(), repeated[1].long(), repeated[2].float()
    values = logits[row, token]
    logits[row, token] = torch.where(values > 0, values / penalty, values * penalty)
    row, token = counted[0].long(), counted[1].long()
    logits[row, token] = logits[row, token] - counted[2].float()
    logits[banned[0].long(), banned[1].long()] = -torch.inf
    return logits


def _guided(logits: Tensor, edits: Sequence[Edits]) -> Tensor:
    """With -inf at what a row's guide does not allow; `logits` itself where no row has one."""
    masks = {row: edit.allowed for row, edit in enumerate(edits) if edit.allowed is not None}
    if not masks:
        return logits
    words = torch.from_numpy(np.stack(list(masks.values()))).to(logits.device)
    bits = (words[:, :, None] >> torch.arange(32, device=logits.device, dtype=torch.int32)) & 1
    allowed = torch.ones(logits.shape, dtype=torch.bool, device=logits.device)
    allowed[list(masks)] = bits.flatten(1)[:, : logits.shape[1]].bool()
    return logits.masked_fill(~allowed, -torch.inf)


def _largest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(values, indexes) [rows, count] of the largest, largest first; of equal ones the lower index first.

    A key of the value's bits, ordered as integers, and the index has no equals, so that every device finds the same.
    """
    bits = (values + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    last = values.shape[1] - 1
    keys = (ordered << 32) | torch.arange(last, -1, -1, device=values.device)
    ids = last - (keys.topk(count, dim=1).values & 0xFFFFFFFF)
    return values.gather(1, ids), ids


def _locate(weights: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """sampler._locate of rows: (index [rows, 1], what is left for it [rows, 1])."""
    running = weights.cumsum(dim=1)
    index = (running <= target).sum(dim=1, keepdim=True)
    last = ((weights > 0) * torch.arange(weights.shape[1], device=weights.device)).amax(dim=1, keepdim=True)
    index = torch.minimum(index, last)
    before = torch.where(index > 0, running.gather(1, (index - 1).clamp(min=0)), 0.0)
    return index, target - before


def _log_total(rows: Tensor) -> Tensor:
    """float64 [rows, 1]"""
    shift = rows.amax(dim=1, keepdim=True)
    return shift.double() + (rows - shift).exp().sum(dim=1, keepdim=True, dtype=torch.float64).log()


def _read_logprob(token: int, params: SamplingParams, values: NDArray[np.float64] | None) -> TokenLogprob | None:
    if values is None:
        return None
    logprobs, ids = values[1:].reshape(2, -1)
    count = min(params.num_top_logprobs, len(ids))
    top = tuple((int(index), float(value)) for index, value in zip(ids[:count], logprobs[:count], strict=True))
    return TokenLogprob(token, float(values[0]), top)
