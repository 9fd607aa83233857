"""Choices against straightforward references, and draws against the distribution that they are of."""

from __future__ import annotations

import random

import numpy as np
import pytest

from llm_runtime import sampler
from llm_runtime.sampler import Choice, SamplerState, choose, sample
from llm_runtime.types import SamplingParams

VOCAB = 50
END = 0


def make_logits(seed: int, vocab: int = VOCAB) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 3, vocab).astype(np.float32)


def make_state(prompt: list[int], output: list[int], **params) -> SamplerState:
    state = SamplerState(SamplingParams(**params), prompt, (END,))
    for token in output:
        state.append(token)
    return state


def choose_one(logits: np.ndarray, prompt: list[int], output: list[int], **params) -> Choice:
    (choice,) = choose(logits[None], [make_state(prompt, output, **params)], [prompt + output])
    return choice


def probabilities(logits: np.ndarray, **params) -> np.ndarray:
    """The plainest way to the distribution that is drawn from: sort everything, in float64."""
    p = SamplingParams(**params)
    scaled = logits.astype(np.float64) / p.temperature
    order = np.argsort(-scaled, kind="stable")
    kept = np.zeros(len(scaled), bool)
    kept[order[: p.top_k or None]] = True
    scaled[~kept] = -np.inf
    probs = np.exp(scaled - scaled.max())
    probs /= probs.sum()
    if p.top_p < 1:
        mass = np.cumsum(probs[order])
        count = int(np.searchsorted(mass, p.top_p)) + 1
        probs[order[count:]] = 0
    probs[probs < p.min_p * probs.max()] = 0
    return probs / probs.sum()


def chi_square_limit(degrees: int, z: float = 3.72) -> float:
    """Exceeded by chance once in 10,000 (Wilson and Hilferty's approximation)."""
    return degrees * (1 - 2 / (9 * degrees) + z * (2 / (9 * degrees)) ** 0.5) ** 3


FILTERS = [
    {},
    {"temperature": 0.3},
    {"temperature": 3.0},
    {"top_k": 5},
    {"top_p": 0.7},
    {"min_p": 0.05},
    {"top_k": 12, "top_p": 0.8, "min_p": 0.02, "temperature": 1.7},
]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_draws_follow_the_distribution(filters):
    """8,000 draws; a right sampler fails one such test in 10,000."""
    logits, params = make_logits(11), {"temperature": 1.0} | filters
    count = 8_000
    seen = np.zeros(VOCAB)
    for seed in range(count // 100):
        state = SamplerState(SamplingParams(seed=seed, **params), [], ())
        for _ in range(100):
            token = sample(logits, state.params, state.uniform())
            state.append(token)
            seen[token] += 1
    probs = probabilities(logits, **params)
    assert seen[probs == 0].sum() == 0, "a filtered token was drawn"
    wanted = probs * count
    rare = wanted < 5  # chi-square needs five expected draws a cell
    seen = np.append(seen[~rare], seen[rare].sum())
    wanted = np.append(wanted[~rare], wanted[rare].sum())
    keep = wanted > 0
    statistic = (((seen - wanted) ** 2)[keep] / wanted[keep]).sum()
    assert statistic < chi_square_limit(int(keep.sum()) - 1)


@pytest.mark.parametrize("vocab", [7, 3000])
@pytest.mark.parametrize("filters", [*FILTERS, {"top_p": 0.999, "temperature": 50.0}, {"top_k": 10**6}], ids=str)
def test_filters_equal_sorting_everything(filters, vocab):
    """Over a fine grid of draws, each token comes as often as its probability says."""
    logits, params = make_logits(5, vocab), SamplingParams(**({"temperature": 1.0} | filters))
    grid = (np.arange(500) + 0.5) / 500
    drawn = np.bincount([sample(logits, params, float(u)) for u in grid], minlength=vocab) / len(grid)
    wanted = probabilities(logits, **({"temperature": 1.0} | filters))
    assert np.abs(drawn - wanted).max() <= 1.01 / len(grid)


@pytest.mark.parametrize("spread", [0.0, 0.01, 0.3, 3.0])
@pytest.mark.parametrize("top_p", [0.01, 0.5, 0.9, 0.9999])
def test_top_p_keeps_the_fewest_and_largest_that_suffice_in_flat_distributions_too(top_p, spread):
    for seed in range(5):
        rng = np.random.default_rng(seed)
        logits = rng.normal(0, 1, 20_000).astype(np.float32) * np.float32(spread)
        if seed % 2:
            logits = np.round(logits, 1)  # many of one size
        weights = np.exp(logits - logits.max())
        kept = weights[sampler._filtered(weights, SamplingParams(top_p=top_p)) > 0]
        mass = np.cumsum(np.sort(weights)[::-1], dtype=np.float64)
        wanted = int(np.searchsorted(mass, top_p * mass[-1])) + 1
        assert abs(len(kept) - wanted) <= 1, f"seed {seed}"  # sums of float32 weights differ in the last digits
        np.testing.assert_array_equal(np.sort(kept)[::-1], np.sort(weights)[::-1][: len(kept)])


def test_the_ends_of_the_unit_interval_and_extreme_temperatures_give_tokens():
    logits = np.array([-np.inf, 1, 2, -np.inf], np.float32)
    for temperature in (1e-320, 1e-30, 1.0, 1e30):
        for uniform in (0.0, np.nextafter(1.0, 0.0)):
            assert sample(logits, SamplingParams(temperature=temperature), uniform) in (1, 2)
    assert sample(logits, SamplingParams(temperature=1e-320), 0.5) == 2


@pytest.mark.parametrize("seed", range(20))
def test_penalties_equal_a_token_by_token_reference(seed):
    rng = random.Random(seed)
    prompt, output = ([rng.randrange(VOCAB) for _ in range(rng.randint(0, 30))] for _ in range(2))
    repetition, presence, frequency = rng.uniform(0.5, 2), rng.uniform(-2, 2), rng.uniform(-2, 2)
    bias = {rng.randrange(VOCAB): rng.uniform(-5, 5) for _ in range(rng.choice([0, 10]))}
    state = make_state(
        prompt,
        output,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        logit_bias=tuple(bias.items()),
    )
    logits = make_logits(seed)
    wanted = logits.astype(np.float64)
    for token in range(VOCAB):
        if token in prompt or token in output:
            wanted[token] *= repetition if wanted[token] <= 0 else 1 / repetition
        wanted[token] -= presence * (token in output) + frequency * output.count(token) - bias.get(token, 0.0)
    state.adjust(logits, prompt + output)
    np.testing.assert_allclose(logits, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seed", range(5))
def test_penalties_bans_and_filters_equal_transformers(seed):
    torch = pytest.importorskip("torch")
    logits_process = pytest.importorskip("transformers.generation.logits_process")
    rng = random.Random(seed)
    tokens = [rng.randrange(1, VOCAB) for _ in range(20)]
    bad = [[5], [*tokens[-2:], 7], [*tokens[-1:], 9], [1, 2, 11]]
    logits = make_logits(seed)
    ids, scores = torch.tensor([tokens]), torch.tensor(logits[None].copy())
    for process in (
        logits_process.RepetitionPenaltyLogitsProcessor(1.7),
        logits_process.NoBadWordsLogitsProcessor(bad),
        logits_process.TemperatureLogitsWarper(0.8),
        logits_process.TopKLogitsWarper(20),
        logits_process.TopPLogitsWarper(0.85),
        logits_process.MinPLogitsWarper(0.03),
    ):
        scores = process(ids, scores)
    wanted = torch.softmax(scores[0].double(), -1).numpy()
    state = make_state(tokens[:8], tokens[8:], repetition_penalty=1.7, bad_token_sequences=tuple(map(tuple, bad)))
    state.adjust(logits, tokens)
    params = SamplingParams(temperature=0.8, top_k=20, top_p=0.85, min_p=0.03)
    grid = (np.arange(1000) + 0.5) / 1000
    drawn = np.bincount([sample(logits, params, float(u)) for u in grid], minlength=VOCAB) / len(grid)
    assert np.abs(drawn - wanted).max() <= 1.01 / len(grid)


def test_a_bad_sequence_bans_its_last_token_only_after_the_others():
    logits = np.array([0, 1, 2, 3], np.float32)
    bad = ((1, 2, 3),)
    assert choose_one(logits, [1], [2], bad_token_sequences=bad).token_id == 2
    assert choose_one(logits, [2], [2], bad_token_sequences=bad).token_id == 3
    assert choose_one(logits, [2], [], bad_token_sequences=bad).token_id == 3
    assert choose_one(logits, [2], [], bad_token_sequences=((3,),)).token_id == 2


def test_end_ids_wait_for_min_tokens():
    logits = np.array([9, 1, 2], np.float32)
    assert choose_one(logits, [1], [2], min_tokens=2).token_id == 2
    assert choose_one(logits, [1], [2, 2], min_tokens=2).token_id == END
    assert choose_one(logits, [1], [], min_tokens=2, end_ids=(2, 2**31 - 1)).token_id == 0
    assert choose_one(logits, [1], [], min_tokens=2, end_ids=()).token_id == 0


def test_a_row_with_nothing_left_to_choose_fails_alone():
    logits = np.array([9, 1], np.float32)
    bad = ((0,), (1,))
    assert "no token to choose" in choose_one(logits, [1], [], bad_token_sequences=bad).error
    assert "no token to choose" in choose_one(logits, [1], [], bad_token_sequences=bad, temperature=1.0).error


def test_draws_depend_on_seed_and_token_number_alone():
    def draws(seed: int | None, count: int = 20) -> list[float]:
        state = SamplerState(SamplingParams(temperature=1.0, seed=seed), [1], ())
        values = []
        for index in range(count):
            values.append(state.uniform())
            assert state.uniform() == values[-1], "asking changes nothing"
            state.append(index)
        return values

    assert draws(7) == draws(7)
    assert draws(7) != draws(8)
    assert draws(2**64 - 1) != draws(2**63)
    assert draws(None) != draws(None)
    assert len(set(draws(7))) == 20


def test_rows_do_not_influence_each_other_and_logits_are_left_alone():
    logits = np.stack([make_logits(seed) for seed in range(len(FILTERS))])
    before = logits.copy()
    prompt = [1, 2, 3]

    def states() -> list[SamplerState]:
        extra = {"temperature": 1.0, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "seed": 3, "wants_logprobs": True}
        return [make_state(prompt, [4, 4], **(extra | filters)) for filters in FILTERS]

    together = choose(logits, states(), [[*prompt, 4, 4]] * len(FILTERS))
    alone = [choose(logits[i : i + 1], [state], [[*prompt, 4, 4]])[0] for i, state in enumerate(states())]
    assert together == alone
    np.testing.assert_array_equal(logits, before)


def test_logprobs_are_those_of_the_raw_logits():
    logits = make_logits(2)
    params = {"temperature": 0.5, "top_k": 2, "repetition_penalty": 5.0, "wants_logprobs": True, "num_top_logprobs": 4}
    choice = choose_one(logits, [1, 2, 3], [int(logits.argmax())], **params)
    wanted = np.log(np.exp(logits.astype(np.float64)) / np.exp(logits.astype(np.float64)).sum())
    assert choice.logprob.token_id == choice.token_id
    assert choice.logprob.logprob == pytest.approx(wanted[choice.token_id], abs=1e-5)
    best = np.argsort(-wanted)[:4]
    assert [token for token, _ in choice.logprob.top] == best.tolist()
    assert [value for _, value in choice.logprob.top] == pytest.approx(wanted[best].tolist(), abs=1e-5)
    assert choose_one(logits, [], [], wants_logprobs=True, num_top_logprobs=0).logprob.top == ()
    assert len(choose_one(logits, [], [], wants_logprobs=True, num_top_logprobs=1000).logprob.top) == VOCAB


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}, {"min_tokens": 5}, {"wants_logprobs": True}], ids=str)
def test_a_row_that_is_not_numbers_fails_alone(params, value):
    logits = np.stack([make_logits(seed) for seed in range(3)])
    logits[1, 17] = value
    choices = choose(logits, [make_state([1], [], **params) for _ in range(3)], [[1]] * 3)
    assert [choice.error is None for choice in choices] == [True, False, True]
    assert "1 logits" in choices[1].error


def test_equal_logits_give_the_lowest_id():
    assert choose_one(np.zeros(5, np.float32), [1], []).token_id == 0
    assert sample(np.zeros(5, np.float32), SamplingParams(temperature=1.0, top_k=1), 0.99) == 0
