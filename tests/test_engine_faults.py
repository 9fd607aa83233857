"""What must not change a result (company, seeds, preemption), and what must not end the engine (odd input, a broken device)."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from llm_runtime.errors import EngineError, RequestError
from llm_runtime.executors.base import Row
from llm_runtime.types import FinishReason, GenerationRequest
from tests.fake_executor import FakeExecutor, expected_output
from tests.test_engine import assert_idle, make_engine, make_request, prompts, run

SAMPLED = {"temperature": 5.0, "ignore_eos": True}


def solo(request: GenerationRequest) -> list[int]:
    engine = make_engine(FakeExecutor(num_pages=200))
    engine.add(request)
    return run(engine)[request.request_id].token_ids


@pytest.mark.parametrize(
    "overrides",
    [{}, {"max_sequences": 16}, {"max_step_tokens": 4, "prefill_chunk_tokens": 1}, {"prefix_caching": False}],
    ids=str,
)
def test_a_seed_gives_the_same_tokens_alone_and_in_any_company(overrides):
    prompt = [5, 6, 7, 8, 9]
    wanted = solo(make_request("solo", prompt, 20, seed=7, **SAMPLED))
    engine = make_engine(FakeExecutor(num_pages=24), **({"max_context": 40} | overrides))
    for index, other in enumerate(prompts(8)):
        engine.add(make_request(f"seeded {index}", prompt, 20, seed=7, **SAMPLED))
        engine.add(make_request(f"other {index}", other[:15], 20, **SAMPLED))
    results = run(engine)
    assert [results[f"seeded {index}"].token_ids for index in range(8)] == [wanted] * 8
    assert wanted != solo(make_request("solo", prompt, 20, seed=8, **SAMPLED))


def test_without_a_seed_the_texts_differ():
    engine = make_engine()
    for index in range(4):
        engine.add(make_request(str(index), [5, 6], 20, **SAMPLED))
    results = run(engine)
    assert len({tuple(result.token_ids) for result in results.values()}) == 4


@pytest.mark.parametrize("seed", range(6))
def test_preemption_changes_no_sampled_or_penalized_token(seed):
    rng = random.Random(seed)
    requests = [
        make_request(
            str(index),
            prompt,
            rng.randint(10, 25),
            seed=index,
            repetition_penalty=1.5,
            frequency_penalty=rng.choice([0.0, 1.0]),
            top_k=rng.choice([0, 20]),
            top_p=rng.choice([1.0, 0.9]),
            min_tokens=rng.randint(0, 9),
            stop_strings=("1,", "22,3"),
            **SAMPLED,
        )
        for index, prompt in enumerate(prompts(6, low=4, high=14, seed=seed))
    ]
    engine = make_engine(FakeExecutor(num_pages=11), max_context=44, prefill_chunk_tokens=rng.randint(1, 9))
    for request in requests:
        engine.add(request)
    results = run(engine)
    assert engine.stats.preemptions > 0
    for request in requests:
        assert results[request.request_id].token_ids == solo(request)


def test_prompt_tokens_are_counted_once_however_often_a_sequence_is_preempted():
    engine = make_engine(FakeExecutor(num_pages=12), max_context=40)
    for index, prompt in enumerate(prompts(4, low=8, high=8)):
        engine.add(make_request(str(index), prompt, 30))
    run(engine)
    assert engine.stats.preemptions > 0
    assert engine.stats.prompt_tokens == 4 * 8
    assert engine.stats.generated_tokens == 4 * 30


def test_a_pool_smaller_than_the_context_ends_generation_with_length():
    engine = make_engine(FakeExecutor(num_pages=3, page_size=4), max_context=1000)
    for name in "ab":
        engine.add(make_request(name, [5, 6], max_tokens=100))
    results = run(engine)
    for name in "ab":
        assert results[name].token_ids == expected_output([5, 6], 10)
        assert results[name].reason is FinishReason.LENGTH


def test_text_held_for_a_stop_string_is_shown_when_generation_ends_without_it():
    prompt = [5, 7]
    tokens = expected_output(prompt, 4)
    assert len(set(tokens)) == 4
    text = "".join(f"{token}," for token in tokens)
    for end_ids, shown in [((), text), ((tokens[3],), text[: text.rindex(f"{tokens[3]},")])]:
        engine = make_engine()
        engine.add(make_request("a", prompt, 4, stop_strings=(text + "more",), end_ids=end_ids))
        outputs = [output for _ in range(4) for output in engine.step(0.0)]
        assert [output.text for output in outputs] == ["", "", "", shown]


def test_text_held_for_a_stop_string_is_shown_when_the_deadline_passes():
    engine = make_engine()
    tokens = expected_output([5, 7], 2)
    text = "".join(f"{token}," for token in tokens)
    engine.add(make_request("a", [5, 7], 9, stop_strings=(text + "more",), deadline=1.0))
    outputs = [output for now in (0.0, 0.5, 1.0) for output in engine.step(now)]
    assert [output.text for output in outputs] == ["", "", text]


def test_each_token_has_its_logprob():
    engine = make_engine()
    engine.add(make_request("a", [5], 4, wants_logprobs=True, num_top_logprobs=2))
    for _ in range(4):
        (output,) = engine.step(0.0)
        assert [entry.token_id for entry in output.logprobs] == output.token_ids
        assert output.logprobs[0].top[0] == (output.token_ids[0], output.logprobs[0].logprob)


def test_odd_but_legal_requests_run():
    engine = make_engine()
    engine.add(make_request("salt", [5], 2, cache_salt="\ud800"))
    engine.add(make_request("end id", [5], 2, end_ids=(2**31 - 1,), min_tokens=2))
    engine.add(make_request("bad words", [5], 2, bad_token_sequences=((10**6,), (5, 10**6))))
    engine.add(make_request("seed", [5], 2, seed=2**64 - 1, temperature=1e-320))
    engine.add(make_request("deadlines", [5], 2, queue_deadline=9.0, deadline=9.0))
    results = run(engine)
    assert {name: result.token_ids for name, result in results.items()} == dict.fromkeys(results, expected_output([5], 2))
    assert len(results) == 5


def test_an_id_that_is_live_is_refused_and_one_that_ended_may_come_again():
    engine = make_engine()
    engine.add(make_request("a", [5], 2))
    with pytest.raises(RequestError, match="request_id"):
        engine.add(make_request("a", [6], 2))
    assert run(engine)["a"].token_ids == expected_output([5], 2)
    engine.add(make_request("a", [6], 2))
    assert run(engine)["a"].token_ids == expected_output([6], 2)


def test_a_deadline_that_passes_before_anything_ran_is_a_queue_timeout():
    engine = make_engine(max_sequences=1)
    engine.add(make_request("runs", [5], 9))
    engine.add(make_request("waits", [6], 9, deadline=1.0))
    engine.step(0.0)
    (output,) = (output for output in engine.step(1.0) if output.request_id == "waits")
    assert (output.finish_reason, output.queue_timed_out, output.text) == (FinishReason.TIMEOUT, True, "")


class BrokenRows(FakeExecutor):
    """Gives NaN after the token 13."""

    def execute(self, rows: Sequence[Row]) -> np.ndarray:
        logits = super().execute(rows)
        chosen = [row.token_ids[-1] for row in rows if row.num_logits]
        logits[np.array(chosen) == 13, 3] = np.nan
        return logits


def test_logits_that_are_not_numbers_fail_their_request_alone():
    engine = make_engine(BrokenRows())
    for name, prompt in [("good", [5, 6]), ("bad", [5, 13]), ("sampled", [7, 13])]:
        engine.add(make_request(name, prompt, 1, temperature=float(name == "sampled")))
    results = run(engine)
    assert results["good"].token_ids == expected_output([5, 6], 1)
    for name in ("bad", "sampled"):
        assert (results[name].reason, results[name].token_ids) == (FinishReason.ERROR, [])
        assert "NaN" in results[name].last.error


class LosesItsPool(FakeExecutor):
    """Raises something that is no EngineError on call `fail_at`, and its pages hold garbage then."""

    def execute(self, rows: Sequence[Row]) -> np.ndarray:
        try:
            return super().execute(rows)
        except EngineError:
            self.pools[0][:] = 96
            raise MemoryError("no memory for 96 bytes") from None


def test_a_step_that_fails_loses_no_final_output_and_no_prefix_of_before_is_a_hit():
    engine = make_engine(LosesItsPool(fail_at=2), max_sequences=2)
    prompt = prompts(1, low=13, high=13)[0]
    for name in ("runs", "cancelled"):
        engine.add(make_request(name, prompt, 9))
    engine.add(make_request("late", prompt, 9, queue_deadline=5.0))
    engine.step(0.0)
    engine.step(0.0)
    engine.cancel("cancelled")
    with pytest.raises(EngineError, match="no memory for 96 bytes"):
        engine.step(5.0)
    outputs = engine.fail_all("gone")
    assert sorted((output.request_id, output.finish_reason.value) for output in outputs) == [
        ("cancelled", "cancelled"),
        ("late", "timeout"),
        ("runs", "error"),
    ]
    assert_idle(engine)
    assert engine.stats.pages_cached == 0
    engine.add(make_request("after", prompt, 4))
    assert run(engine)["after"].token_ids == expected_output(prompt, 4)
