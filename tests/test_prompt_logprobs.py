"""Log-probabilities of a prompt's tokens: the same however the prompt is computed, and those of the model."""

from __future__ import annotations

import math

import numpy as np
import pytest

from llm_runtime.types import MAX_PROMPT_LOGITS, FinishReason, TokenLogprob
from tests.fake_executor import VOCAB, FakeExecutor, expected_output, next_token
from tests.test_engine import Collected, make_engine, make_request, prompts, run

LOG_TOTAL = math.log(math.exp(10) + VOCAB - 1)  # of the fake executor's logits: 10 for one token, 0 for the others


def expected(prompt: list[int]) -> list[float]:
    return [10 * (next_token(prompt[:i]) == prompt[i]) - LOG_TOTAL for i in range(1, len(prompt))]


def of_prompt(result: Collected) -> list[TokenLogprob]:
    """Given once, with the first token."""
    outputs = result.outputs
    assert [output.prompt_logprobs is not None for output in outputs] == [True] + [False] * (len(outputs) - 1)
    assert outputs[0].token_ids
    return outputs[0].prompt_logprobs or []


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"prefix_caching": False},
        {"static_cache": True, "max_context": 200},
        {"max_step_tokens": 5, "prefill_chunk_tokens": 2},
        {"max_sequences": 12, "max_step_tokens": 512, "prefill_chunk_tokens": 512},
        {"max_draft_tokens": 4},
    ],
    ids=str,
)
@pytest.mark.parametrize("num_pages", [42, 600])
def test_they_are_the_models_however_the_prompt_is_computed(overrides, num_pages):
    """Among others that ask for none; with few pages sequences are preempted, in the middle of a prompt too."""
    engine = make_engine(FakeExecutor(num_pages=num_pages), **({"max_context": 200} | overrides))
    given = prompts(16, low=1, high=150)
    # What the model itself goes on with, so that some tokens are likely ones.
    given += [prompt[:20] + expected_output(prompt[:20], 70) for prompt in given[:4]]
    for index, prompt in enumerate(given):
        asked = {"num_prompt_logprobs": index % 3} if index % 4 else {}
        engine.add(make_request(str(index), prompt, 12, ignore_eos=True, **asked))
    results = run(engine)
    assert (engine.stats.preemptions > 0) == (num_pages == 42 and "static_cache" not in overrides)
    for index, prompt in enumerate(given):
        result = results[str(index)]
        assert result.token_ids == expected_output(prompt, 12)
        if index % 4 == 0:
            assert all(output.prompt_logprobs is None for output in result.outputs)
            continue
        entries = of_prompt(result)
        assert [entry.token_id for entry in entries] == prompt[1:]
        assert [entry.logprob for entry in entries] == pytest.approx(expected(prompt), abs=1e-5)
        assert all(len(entry.top) == index % 3 for entry in entries)
        if index % 3:
            assert [entry.top[0][0] for entry in entries] == [next_token(prompt[:i]) for i in range(1, len(prompt))]


def test_a_cached_prompt_is_computed_anew_and_serves_others_afterwards():
    engine = make_engine(FakeExecutor(num_pages=100))
    prompt = prompts(1, low=40, high=40)[0]
    cached = {}
    for name, asked in [("a", {}), ("b", {"num_prompt_logprobs": 0}), ("c", {})]:
        engine.add(make_request(name, prompt, 2, **asked))
        result = run(engine)[name]
        cached[name] = result.last.num_cached_tokens
        if asked:
            assert [entry.logprob for entry in of_prompt(result)] == pytest.approx(expected(prompt), abs=1e-5)
    assert cached == {"a": 0, "b": 0, "c": 36}


def test_logits_of_a_step_are_bounded_and_those_in_order_wait():
    executor = FakeExecutor(num_pages=400)
    engine = make_engine(executor, max_sequences=8, max_step_tokens=512, prefill_chunk_tokens=512, max_context=200)
    for name in "abcd":
        engine.add(make_request(name, prompts(1, low=100, high=100)[0], 1, num_prompt_logprobs=0))
    assert list(run(engine)) == list("abcd")
    assert max(sum(row.num_logits for row in rows) for rows in executor.calls) <= MAX_PROMPT_LOGITS
    assert len(executor.calls) == math.ceil(400 / MAX_PROMPT_LOGITS)


def test_a_prompt_whose_logits_are_no_numbers_ends_with_an_error_and_others_go_on():
    class Broken(FakeExecutor):
        def execute(self, rows):
            logits = super().execute(rows)
            logits[logits[:, next_token([5, 6])] == 10] = np.nan
            return logits

    engine = make_engine(Broken())
    engine.add(make_request("bad", [5, 6, 7, 8], 3, num_prompt_logprobs=0))
    engine.add(make_request("good", [9, 10], 1, num_prompt_logprobs=0))
    results = run(engine)
    assert results["bad"].reason is FinishReason.ERROR
    assert "NaN" in (results["bad"].last.error or "")
    assert of_prompt(results["good"])[0].logprob == pytest.approx(expected([9, 10])[0], abs=1e-5)
