"""The sampler on a device against the one on the host: the same tokens, the same log-probabilities, the same refusals."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from llm_runtime import sampler
from llm_runtime.sampler import Choice, SamplerState
from llm_runtime.types import SamplingParams

torch = pytest.importorskip("torch")
from llm_runtime import torch_sampler  # noqa: E402

VOCABS = (7, 500, 513, 3000, 20_000)
Case = tuple[np.ndarray, list[SamplerState], list[list[int]]]


class FixedGuide:
    """Allows the same tokens always; sometimes a single one."""

    is_complete, error = False, ""

    def __init__(self, rng: random.Random, vocab: int) -> None:
        count = rng.choice([1, max(1, vocab // 2)])
        bits = np.zeros(-(-vocab // 32) * 32, np.uint8)
        bits[rng.sample(range(vocab), count)] = 1
        self._words = np.packbits(bits, bitorder="little").view(np.int32)

    def start(self) -> FixedGuide:
        return self

    def prepare(self) -> None:
        pass

    def allowed(self) -> np.ndarray:
        return self._words

    def accept(self, token_id: int) -> None:
        pass


def random_params(rng: random.Random, vocab: int) -> SamplingParams:
    def maybe(value: object, neutral: object, chance: float = 0.5) -> object:
        return value if rng.random() < chance else neutral

    bad = tuple(tuple(rng.randrange(vocab) for _ in range(rng.randint(1, 2))) for _ in range(rng.randint(0, 3)))
    return SamplingParams(
        temperature=maybe(rng.choice([0.05, 0.7, 1.0, 1.3, 5.0]), 0.0, 0.8),  # type: ignore[arg-type]
        top_k=maybe(rng.choice([1, 2, 40, 1500, 10**6]), 0),  # type: ignore[arg-type]
        top_p=maybe(rng.choice([0.01, 0.5, 0.9, 0.999]), 1.0),  # type: ignore[arg-type]
        min_p=maybe(rng.choice([0.001, 0.05, 0.5]), 0.0, 0.3),  # type: ignore[arg-type]
        repetition_penalty=maybe(rng.uniform(0.5, 2.0), 1.0),  # type: ignore[arg-type]
        presence_penalty=maybe(rng.uniform(-2, 2), 0.0, 0.3),  # type: ignore[arg-type]
        frequency_penalty=maybe(rng.uniform(-2, 2), 0.0, 0.3),  # type: ignore[arg-type]
        logit_bias=tuple((rng.randrange(vocab), rng.uniform(-9, 9)) for _ in range(rng.choice([0, 0, 3]))),
        guide=FixedGuide(rng, vocab) if rng.random() < 0.2 else None,
        min_tokens=maybe(8, 0, 0.3),  # type: ignore[arg-type]
        end_ids=(0, vocab - 1, 2**31 - 1),
        bad_token_sequences=maybe(bad, (), 0.3),  # type: ignore[arg-type]
        seed=rng.getrandbits(64),
        wants_logprobs=rng.random() < 0.5,
        num_top_logprobs=rng.choice([0, 1, 5, 20]),
    )


def random_case(seed: int) -> Case:
    """Rows of one batch; their logits are peaked or flat, and rounded ones, as of 16 bits, have many equals."""
    rng, noise = random.Random(seed), np.random.default_rng(seed)
    vocab, num_rows = rng.choice(VOCABS), rng.randint(1, 6)
    logits = noise.normal(0, rng.choice([0.5, 3.0, 10.0]), (num_rows, vocab)).astype(np.float32)
    if rng.random() < 0.5:
        logits = np.round(logits * 8) / np.float32(8)
    states, token_ids = [], []
    for _ in range(num_rows):
        prompt, output = ([rng.randrange(vocab) for _ in range(rng.randint(1, 30))] for _ in range(2))
        state = SamplerState(random_params(rng, vocab), prompt, (0,))
        for token in output:
            state.append(token)
        states.append(state)
        token_ids.append(prompt + output)
    if rng.random() < 0.3:  # log-probabilities of a prompt's tokens, beside the others
        for row in range(rng.randint(1, num_rows)):
            states[row] = SamplerState.of_known(rng.randrange(vocab), rng.choice([0, 3]))
    return logits, states, token_ids


def choose_on_device(
    logits: np.ndarray, states: Sequence[SamplerState], token_ids: Sequence[Sequence[int]], device: str = "cpu"
) -> list[Choice]:
    before = torch.from_numpy(logits.copy()).to(device)
    given = before.clone()
    choices = torch_sampler.choose(given, states, token_ids)
    assert torch.equal(given.nan_to_num(), before.nan_to_num()), "logits are left alone"
    return choices


def assert_same(wanted: list[Choice], got: list[Choice], seed: int = 0) -> None:
    assert [choice.error for choice in got] == [choice.error for choice in wanted], f"seed {seed}"
    assert [choice.token_id for choice in got] == [choice.token_id for choice in wanted], f"seed {seed}"
    for a, b in zip(wanted, got, strict=True):
        assert (a.logprob is None) == (b.logprob is None)
        if a.logprob is None or b.logprob is None:
            continue
        assert b.logprob.token_id == a.logprob.token_id
        assert b.logprob.logprob == pytest.approx(a.logprob.logprob, abs=1e-5)
        assert [index for index, _ in b.logprob.top] == [index for index, _ in a.logprob.top]
        assert [value for _, value in b.logprob.top] == pytest.approx([value for _, value in a.logprob.top], abs=1e-5)


@pytest.mark.parametrize("block", range(10))
def test_random_batches_choose_the_same(block):
    for seed in range(40 * block, 40 * (block + 1)):
        logits, states, token_ids = random_case(seed)
        got = choose_on_device(logits, states, token_ids)
        assert_same(sampler.choose(logits, states, token_ids), got, seed)


@pytest.mark.parametrize("params", [{}, {"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.02}, {"top_k": 3000, "top_p": 0.5}], ids=str)
def test_a_sequence_of_draws_is_the_same(params):
    """What a request gets token after token, each a new draw of its seed."""
    rng = np.random.default_rng(3)
    states = [SamplerState(SamplingParams(temperature=1.0, seed=11, **params), [1], ()) for _ in range(2)]
    for _ in range(100):
        logits = rng.normal(0, 3, (1, 5000)).astype(np.float32)
        (wanted,), (got,) = sampler.choose(logits, states[:1], [[1]]), choose_on_device(logits, states[1:], [[1]])
        assert got == wanted
        for state in states:
            state.append(wanted.token_id)


def test_a_flat_distribution_reaches_past_the_first_candidates():
    logits = np.random.default_rng(0).normal(0, 0.3, (3, 20_000)).astype(np.float32)
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=5, wants_logprobs=True, num_top_logprobs=3)
    states = [SamplerState(params, [1], ()) for _ in range(3)]
    for number in range(20):
        for state in states:
            state.append(number)
        wanted = sampler.choose(logits, states, [[1]] * 3)
        assert_same(wanted, choose_on_device(logits, states, [[1]] * 3))
        order = np.argsort(-logits, axis=1, kind="stable")
        ranks = [int(np.flatnonzero(order[i] == choice.token_id)[0]) for i, choice in enumerate(wanted)]
        if max(ranks) > torch_sampler.CANDIDATES:
            return
    pytest.fail("no draw was of a token past the first candidates")


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize(
    "params", [{}, {"temperature": 1.0, "top_p": 0.5}, {"min_tokens": 5}, {"wants_logprobs": True}], ids=str
)
def test_a_row_that_is_not_numbers_fails_alone(params, value):
    logits = np.random.default_rng(1).normal(0, 3, (3, 50)).astype(np.float32)
    logits[1, 17] = value
    states = [SamplerState(SamplingParams(seed=1, **params), [1], (0,)) for _ in range(3)]
    wanted = sampler.choose(logits, states, [[1]] * 3)
    assert "1 logits" in (wanted[1].error or "")
    assert_same(wanted, choose_on_device(logits, states, [[1]] * 3))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_with_nothing_left_to_choose_fails_alone(temperature):
    logits = np.array([[9, 1], [9, 1]], np.float32)
    bad = SamplingParams(temperature=temperature, bad_token_sequences=((0,), (1,)), seed=1)
    states = [SamplerState(bad, [1], ()), SamplerState(SamplingParams(), [1], ())]
    choices = choose_on_device(logits, states, [[1], [1]])
    assert choices[0].error == sampler.NOTHING_LEFT
    assert choices[1] == Choice(0)


def test_extreme_temperatures_and_bans_give_tokens():
    logits = np.array([[-np.inf, 1, 2, -np.inf]], np.float32)
    for temperature in (1e-320, 1e-30, 1.0, 100.0):
        for params in ({}, {"top_k": 3}, {"top_p": 0.99}):
            state = SamplerState(SamplingParams(temperature=temperature, seed=4, **params), [1], ())
            assert_same(sampler.choose(logits, [state], [[1]]), choose_on_device(logits, [state], [[1]]))


def test_equal_logits_give_the_lowest_ids():
    logits = np.array([[0.0, -0.0, 0.0, 1.0, 1.0]], np.float32)
    params = SamplingParams(wants_logprobs=True, num_top_logprobs=4)
    (choice,) = choose_on_device(logits, [SamplerState(params, [1], ())], [[1]])
    assert choice.token_id == 3
    assert choice.logprob is not None
    assert [index for index, _ in choice.logprob.top] == [3, 4, 0, 1]


def test_no_rows_give_no_choices():
    assert torch_sampler.choose(torch.zeros(0, 5), [], []) == []
