"""Speculation changes how many steps it takes, and no token."""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict

import numpy as np
import pytest

from llm_runtime.engine import Engine, EngineConfig
from llm_runtime.errors import EngineError
from llm_runtime.page_pool import PageGroup
from llm_runtime.sampler import SamplerState
from llm_runtime.sequence import Sequence
from llm_runtime.speculation import NgramIndex, Speculator, StepCost
from llm_runtime.types import FinishReason, GenerationRequest, SamplingParams
from tests.fake_executor import VOCAB, FakeExecutor, copying, expected_output
from tests.test_engine import END, Collected, assert_idle, make_engine, make_request, prompts, run, word_tokenizer

UNGUIDED = defaultdict(lambda: SamplerState(SamplingParams(), (), ()))


class Guesser:
    """In the speculator's place: drafts that are right up to a random place. `rule` gives the right token after a context."""

    def __init__(self, seed: int, rule=copying, longest: int = 6) -> None:
        self.rng = random.Random(seed)
        self.rule, self.longest = rule, longest
        self.cost = StepCost()

    def fill(self, plan, states) -> None:
        pass

    def propose(self, sequences, samplers) -> None:
        for sequence in sequences:
            count = self.rng.randint(0, self.longest)
            draft = expected_output(sequence.token_ids, count, self.rule)
            wrong_from = self.rng.randint(0, count)
            sequence.draft_ids = draft[:wrong_from] + [self.rng.randrange(VOCAB) for _ in draft[wrong_from:]]

    def learn(self, sequence, num_drafted: int, num_accepted: int) -> None:
        assert 0 <= num_accepted <= num_drafted <= self.longest

    def forget(self, request_id: str) -> None:
        pass


def guessing(seed: int, rule=copying, **options) -> Engine:
    engine = make_engine(FakeExecutor(options.pop("num_pages", 200), rule=rule), max_draft_tokens=6, **options)
    engine._speculator = Guesser(seed, rule)
    return engine


def fixed_cost(engine: Engine) -> Engine:
    """Durations of a fake executor are not learned from: in it a token costs as much as a step."""
    engine._speculator.cost.observe = lambda num_tokens, seconds: None
    return engine


def test_the_index_finds_what_followed_the_longest_run_last():
    index = NgramIndex()
    assert index.draft([1, 2, 3], 4) == []
    assert index.draft([1, 2, 3, 9, 1, 2], 2) == [3, 9]
    assert index.draft([1, 2, 3, 9, 1, 2, 7, 1, 2], 2) == [7, 1], "the last time counts"
    assert index.draft([1, 2, 3, 9, 1, 2, 7, 1, 2, 3], 2) == [9, 1], "the longer run counts"


def test_a_draft_longer_than_the_repeated_part_repeats_it():
    assert NgramIndex().draft([5, 6, 7, 5, 6, 7, 5, 6], 7) == [7, 5, 6, 7, 5, 6, 7]


def test_the_index_grows_with_its_sequence_as_if_it_were_new():
    rng = random.Random(1)
    tokens = [rng.randrange(4) for _ in range(3)]
    index = NgramIndex()
    for _ in range(200):
        assert index.draft(tokens, 5) == NgramIndex().draft(tokens, 5)
        tokens += [rng.randrange(4) for _ in range(rng.randint(1, 3))]


def test_the_cost_of_a_token_is_read_off_the_steps():
    cost = StepCost()
    assert cost.share_of_tokens(1) == pytest.approx(0.1), "what is taken for granted before any step"
    for _ in range(5):
        cost.observe(4, 0.02)
    assert cost.share_of_tokens(1) == pytest.approx(0.1), "one size tells nothing of another"
    for size in (1, 8, 2, 16):
        cost.observe(size, 0.012 + 0.002 * size)
    assert cost.share_of_tokens(8) == pytest.approx(0.016 / 0.028, rel=0.05)


def decoding(name: str, tokens: list[int], **sampling) -> Sequence:
    return Sequence(GenerationRequest(name, tuple(tokens), SamplingParams(**sampling)), 0)


REPEATING = [3, 4, 5, 6] * 6


def lengths_of_drafts(speculator: Speculator, batch: int = 1, seconds: float | None = None) -> list[int]:
    sequences = [decoding(f"{batch}-{index}", REPEATING) for index in range(batch)]
    speculator.propose(sequences, UNGUIDED)
    return [len(sequence.draft_ids) for sequence in sequences]


def test_drafts_get_shorter_and_end_where_they_are_wrong_and_come_back_in_time():
    speculator = Speculator(max_draft=8)
    sequence = decoding("a", REPEATING)
    lengths = []
    for _ in range(200):
        speculator.propose([sequence], UNGUIDED)
        lengths.append(len(sequence.draft_ids))
        if sequence.draft_ids:
            speculator.learn(sequence, len(sequence.draft_ids), 0)
    assert lengths[0] > lengths[2] > 0
    assert 0.02 < np.mean([length > 0 for length in lengths[20:]]) < 0.2, "tried again now and then"
    for _ in range(60):
        speculator.propose([sequence], UNGUIDED)
        if sequence.draft_ids:
            speculator.learn(sequence, len(sequence.draft_ids), len(sequence.draft_ids))
    assert len(sequence.draft_ids) == 8


def test_drafts_get_shorter_as_batches_make_tokens_dear():
    speculator = Speculator(max_draft=8)
    for size in (1, 2, 4, 8, 16, 32) * 4:
        speculator.cost.observe(size, 0.012 + 0.0012 * size)
    alone, few, many = (lengths_of_drafts(speculator, batch)[0] for batch in (1, 4, 32))
    assert alone > few > many == 0


def test_what_was_learned_is_where_new_sequences_start():
    speculator = Speculator(max_draft=8)
    for index in range(100):
        sequence = decoding(str(index), REPEATING)
        speculator.propose([sequence], UNGUIDED)
        if sequence.draft_ids:
            speculator.learn(sequence, len(sequence.draft_ids), 0)
        speculator.forget(str(index))
    assert lengths_of_drafts(speculator)[0] <= 1


def test_a_request_may_decline():
    speculator = Speculator(max_draft=8)
    willing, unwilling = decoding("a", REPEATING), decoding("b", REPEATING, speculation=False)
    speculator.propose([willing, unwilling], UNGUIDED)
    assert willing.draft_ids
    assert not unwilling.draft_ids


def test_a_text_that_repeats_takes_a_fraction_of_the_steps():
    executor = FakeExecutor(num_pages=200, rule=copying)
    engine = fixed_cost(make_engine(executor, max_draft_tokens=8))
    prompt = prompts(1, 20, 20)[0]
    engine.add(make_request("a", prompt, max_tokens=60))
    result = run(engine)["a"]
    assert result.token_ids == expected_output(prompt, 60, copying)
    assert len(executor.calls) < 30
    assert (result.last.num_draft_tokens, result.last.num_accepted_tokens) == (
        engine.stats.draft_tokens,
        engine.stats.accepted_tokens,
    )
    assert len(executor.calls) + result.last.num_accepted_tokens == 60
    assert engine.stats.itl.count == engine.stats.generated_tokens - engine.stats.ttft.count


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"max_step_tokens": 5, "prefill_chunk_tokens": 2},
        {"max_sequences": 12, "max_step_tokens": 16, "prefill_chunk_tokens": 7},
        {"num_pages": 26},
        {"prefix_caching": False},
    ],
    ids=str,
)
def test_guesses_right_and_wrong_change_no_token(seed, overrides):
    engine = guessing(seed, **overrides)
    wanted = prompts(12, seed=seed)
    for index, prompt in enumerate(wanted):
        engine.add(make_request(str(index), prompt, max_tokens=1 + 2 * index))
    results = run(engine)
    for index, prompt in enumerate(wanted):
        assert results[str(index)].token_ids == expected_output(prompt, 1 + 2 * index, copying)
        assert results[str(index)].reason is FinishReason.LENGTH
    assert engine.stats.accepted_tokens > 0
    assert engine.stats.draft_tokens > engine.stats.accepted_tokens
    assert all(sum(len(row.token_ids) for row in call) <= engine.config.max_step_tokens for call in engine.executor.calls)


SAMPLING = [
    {"temperature": 3.0, "seed": 11},
    {"temperature": 3.0, "seed": 12, "top_k": 20, "top_p": 0.9},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "wants_logprobs": True, "num_top_logprobs": 2},
    {"min_tokens": 9, "end_ids": (7, 8, 9, 10, 11, 12)},
    {"bad_token_sequences": ((5,), (6, 7))},
    {"stop_strings": ("8,", "12,3")},
    {"temperature": 2.0, "seed": 5, "presence_penalty": 1.5, "min_tokens": 4, "end_ids": (20, 21, 22)},
]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("sampling", SAMPLING, ids=str)
def test_choices_text_and_log_probabilities_are_the_same(sampling, seed):
    plain, guessed = make_engine(FakeExecutor(200, rule=copying)), guessing(seed)
    for index, prompt in enumerate(prompts(6, seed=40 + seed)):
        for engine in (plain, guessed):
            engine.add(make_request(str(index), prompt, max_tokens=25, **sampling))
    wanted, logprobs = {}, {}
    for engine in (plain, guessed):
        found: dict[str, Collected] = {}
        logprobs[engine] = {}
        while engine.has_work:
            for output in engine.step(0.0):
                found.setdefault(output.request_id, Collected()).add(output)
                logprobs[engine].setdefault(output.request_id, []).extend(output.logprobs)
        wanted[engine] = {name: (result.token_ids, result.text, result.reason) for name, result in found.items()}
    assert wanted[guessed] == wanted[plain]
    assert logprobs[guessed] == logprobs[plain]
    assert guessed.stats.draft_tokens > 0


def test_sampled_tokens_have_the_models_distribution():
    """Pearson's chi-square over the second and third tokens, whatever was guessed. A right sampler fails once in 10,000 runs;
    one that leans to the guess by 5 % fails always."""
    engine = guessing(seed=1, rule=lambda context: 2 + sum(context) % 20, max_sequences=8)
    engine._speculator.propose = _always_guess_5
    count = 3000
    for index in range(count):
        engine.add(make_request(str(index), [4, 4], max_tokens=3, temperature=4.0, seed=index))
    results = run(engine, max_steps=10_000)
    logits = np.zeros(VOCAB)
    for position in (1, 2):
        observed: Counter[int] = Counter()
        expected = np.zeros(VOCAB)
        for index in range(count):
            tokens = results[str(index)].token_ids
            if len(tokens) > position:  # an end token before it ends the sequence
                observed[tokens[position]] += 1
                logits[:] = 0.0
                logits[2 + (8 + sum(tokens[:position])) % 20] = 10.0
                weights = np.exp(logits / 4.0)
                expected += weights / weights.sum()
        chi_square = sum((observed[token] - expected[token]) ** 2 / expected[token] for token in range(VOCAB))
        assert chi_square < _critical(VOCAB - 1)
        assert observed[5] == pytest.approx(expected[5], abs=5 * math.sqrt(expected[5]))


def _always_guess_5(sequences, samplers) -> None:
    for sequence in sequences:
        sequence.draft_ids = [5, 5]


def _critical(freedom: int, z: float = 3.719) -> float:
    """Of chi-square, exceeded with a probability of 1e-4 (Wilson and Hilferty, 1931)."""
    return freedom * (1 - 2 / (9 * freedom) + z * math.sqrt(2 / (9 * freedom))) ** 3


def test_an_end_token_among_the_guesses_ends_the_sequence_there():
    def ends(context) -> int:
        return END if len(context) == 9 else copying(context)

    engine = guessing(3, rule=ends)
    engine.add(make_request("a", [2, 3, 4], max_tokens=40))
    result = run(engine)["a"]
    assert result.token_ids == expected_output([2, 3, 4], 7, ends)
    assert result.reason is FinishReason.STOP
    assert engine.stats.accepted_tokens == result.last.num_accepted_tokens


def test_right_guesses_after_the_end_are_not_counted_as_right():
    engine = guessing(0)
    engine._speculator.propose = lambda sequences, samplers: [
        setattr(each, "draft_ids", expected_output(each.token_ids, 6, copying)) for each in sequences
    ]
    stop = f"{expected_output([2, 3, 4], 4, copying)[-1]},"
    engine.add(make_request("a", [2, 3, 4], max_tokens=40, stop_strings=(stop,)))
    result = run(engine)["a"]
    assert result.reason is FinishReason.STOP
    assert len(result.token_ids) == 4
    assert (result.last.num_draft_tokens, result.last.num_accepted_tokens) == (6, 3)


def test_no_guess_takes_a_page_or_a_token_from_another():
    engine = guessing(4, num_pages=12, max_sequences=4, max_step_tokens=8, prefill_chunk_tokens=4)
    for index, prompt in enumerate(prompts(8, 5, 8, seed=9)):
        engine.add(make_request(str(index), prompt, max_tokens=8))
    run(engine)
    without = make_engine(FakeExecutor(12, rule=copying), max_sequences=4, max_step_tokens=8, prefill_chunk_tokens=4)
    for index, prompt in enumerate(prompts(8, 5, 8, seed=9)):
        without.add(make_request(str(index), prompt, max_tokens=8))
    run(without)
    assert engine.stats.step.count <= without.stats.step.count


def test_pages_of_wrong_guesses_go_before_anyone_is_preempted():
    engine = guessing(4, num_pages=8, max_sequences=2, max_context=30)
    engine._speculator.propose = lambda sequences, samplers: [setattr(each, "draft_ids", [1] * 6) for each in sequences]
    engine._speculator.longest = 6
    for name, tokens in (("a", 9), ("b", 9)):
        engine.add(make_request(name, [3, 4, 5, 6, 7], max_tokens=tokens))
    results = run(engine)
    assert engine.stats.preemptions == 0
    assert [len(results[name].token_ids) for name in "ab"] == [9, 9]


def test_a_step_without_a_match_does_not_forget_what_was_learned():
    speculator = Speculator(max_draft=8)
    sequence = decoding("a", REPEATING)
    for _ in range(20):
        speculator.propose([sequence], UNGUIDED)
        speculator.learn(sequence, len(sequence.draft_ids), len(sequence.draft_ids))
    good = speculator._states["a"].acceptance
    sequence.token_ids += [91, 92, 93]
    speculator.propose([sequence], UNGUIDED)
    assert not sequence.draft_ids
    assert speculator._states["a"].acceptance == good


def drafting(rule=copying, *, num_pages: int | list[PageGroup] = 200, target=copying, strict: bool = True, **options) -> Engine:
    """An engine that a second one, of this rule, guesses for."""
    draft = FakeExecutor(num_pages, rule=rule, strict=strict)
    values = {"max_sequences": 4, "max_step_tokens": 64, "prefill_chunk_tokens": 64, "max_context": 100} | options
    config = EngineConfig(end_ids=(END,), max_draft_tokens=5, **values)
    engine = Engine(FakeExecutor(num_pages, rule=target), word_tokenizer(), config, draft=draft)
    engine._speculator.cost_of_guess = lambda: 0.0
    return fixed_cost(engine)


def mostly(context) -> int:
    """Right but for every fifth length."""
    return copying(context) if len(context) % 5 else 7


def test_a_draft_that_knows_the_answer_takes_a_fraction_of_the_steps():
    engine = drafting()
    prompt = prompts(1, 20, 20)[0]
    engine.add(make_request("a", prompt, max_tokens=60))
    result = run(engine)["a"]
    assert result.token_ids == expected_output(prompt, 60, copying)
    assert result.last.num_accepted_tokens == result.last.num_draft_tokens > 40
    assert len(engine.executor.calls) + result.last.num_accepted_tokens == 60
    draft = engine._speculator.executor
    computed = sum(len(row.token_ids) for call in draft.calls for row in call)
    assert computed <= 20 + 60, "each token is run once there, too"


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"max_step_tokens": 5, "prefill_chunk_tokens": 2},
        {"max_sequences": 12, "max_step_tokens": 16, "prefill_chunk_tokens": 7},
        {"num_pages": 26},
        {"prefix_caching": False},
        {"static_cache": True, "max_context": 60},
        {"num_pages": [PageGroup(200), PageGroup(100, window=9)]},
        {"num_pages": [PageGroup(26), PageGroup(16, window=9)]},
    ],
    ids=str,
)
@pytest.mark.parametrize("rule", [copying, mostly, lambda context: 5], ids=["right", "mostly", "wrong"])
def test_a_draft_changes_no_token(rule, overrides):
    strict = not overrides.get("num_pages")
    engine = drafting(rule, strict=strict, **overrides)
    wanted = prompts(12, seed=3)
    for index, prompt in enumerate(wanted):
        fields = {"temperature": 3.0, "seed": index} if index % 4 == 3 else {"speculation": index % 5 != 4}
        engine.add(make_request(str(index), prompt, max_tokens=1 + 2 * index, **fields))
    results = run(engine)
    plain = make_engine(FakeExecutor(200, rule=copying), max_sequences=12)
    for index, prompt in enumerate(wanted):
        fields = {"temperature": 3.0, "seed": index} if index % 4 == 3 else {}
        plain.add(make_request(str(index), prompt, max_tokens=1 + 2 * index, **fields))
    expected = run(plain)
    assert {name: result.token_ids for name, result in results.items()} == {
        name: result.token_ids for name, result in expected.items()
    }
    assert engine.stats.draft_tokens > 0


def test_a_draft_that_takes_as_long_as_the_model_is_left_alone():
    engine = drafting()
    engine._speculator.cost_of_guess = lambda: 1.0
    engine.add(make_request("a", [5, 6, 7], max_tokens=20))
    assert run(engine)["a"].token_ids == expected_output([5, 6, 7], 20, copying)
    assert engine.stats.draft_tokens == 0


def test_a_draft_that_fails_ends_what_runs_with_its_message():
    engine = drafting()
    engine._speculator.executor._fail_at = 2
    engine.add(make_request("a", [5, 6, 7], max_tokens=20))
    with pytest.raises(EngineError, match="caught fire"):
        run(engine)
    (output,) = [output for output in engine.fail_all("lost") if output.finish_reason]
    assert output.error == "lost"
    assert_idle(engine)


@pytest.mark.parametrize("seed", range(10))
def test_random_schedules_with_a_draft_keep_the_laws(seed):
    rng = random.Random(seed)
    engine = drafting(
        mostly,
        num_pages=rng.randint(12, 20),
        strict=False,
        max_sequences=rng.randint(1, 6),
        max_step_tokens=rng.randint(6, 40),
        prefill_chunk_tokens=rng.randint(1, 40),
        max_context=40,
    )
    wanted: dict[str, list[int]] = {}
    results: dict[str, list[int]] = {}
    cancelled: set[str] = set()
    shared = [rng.randrange(2, VOCAB) for _ in range(12)]
    for now in range(120):
        if now < 60 and rng.random() < 0.5:
            prompt = shared[: rng.randint(0, 12)] + [rng.randrange(2, VOCAB) for _ in range(rng.randint(1, 8))]
            wanted[str(now)] = expected_output(prompt, max_tokens := rng.randint(1, 20), copying)
            engine.add(make_request(str(now), prompt, max_tokens=max_tokens))
        if wanted and rng.random() < 0.1:
            engine.cancel(name := rng.choice(list(wanted)))
            cancelled.add(name)
        for output in engine.step(float(now)):
            results.setdefault(output.request_id, []).extend(output.token_ids)
        engine.blocks.check_invariants()
    for name, result in run(engine, now=120.0).items():
        results.setdefault(name, []).extend(result.token_ids)
    for name, tokens in wanted.items():
        found = results.get(name, [])
        assert found == tokens or (name in cancelled and found == tokens[: len(found)])
