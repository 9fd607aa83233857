"""Several outputs of one prompt: each is what a request of its own would give, and the prompt is computed once."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from llm_runtime.types import FinishReason
from tests.fake_executor import VOCAB, FakeExecutor, expected_output
from tests.servers import Client, assert_idle, counted, post, request_inputs, settled_metrics
from tests.test_engine import make_engine, make_request, prompts, run

PROMPT = "one two three four five six seven eight nine ten eleven twelve"


def add_group(engine, name: str, prompt: list[int], count: int, **fields) -> None:
    for index in range(count):
        after = {"after": f"{name}0"} if index else {}
        engine.add(make_request(f"{name}{index}", prompt, **fields, **after))


def test_the_prompt_is_computed_once():
    executor = FakeExecutor(num_pages=100)
    engine = make_engine(executor, max_sequences=8, prefill_chunk_tokens=7)
    prompt = prompts(1, 42, 42)[0]
    add_group(engine, "a", prompt, 4, max_tokens=5)
    results = run(engine)
    assert all(results[f"a{index}"].token_ids == expected_output(prompt, 5) for index in range(4))
    computed = sum(len(row.token_ids) for call in executor.calls for row in call)
    own_tail = 42 - 40  # pages of four tokens
    assert computed == 42 + 3 * own_tail + 4 * 4
    assert [results[f"a{index}"].last.num_cached_tokens for index in range(4)] == [0, 40, 40, 40]


def test_without_a_prefix_cache_nothing_is_shared_and_nobody_waits():
    executor = FakeExecutor(num_pages=100)
    engine = make_engine(executor, max_sequences=8, prefix_caching=False)
    prompt = prompts(1, 9, 9)[0]
    add_group(engine, "a", prompt, 3, max_tokens=4)
    results = run(engine)
    assert all(results[f"a{index}"].token_ids == expected_output(prompt, 4) for index in range(3))
    assert len(executor.calls[0]) == 3


@pytest.mark.parametrize("how", ["cancelled", "deadline", "failed"])
def test_the_others_go_on_when_the_first_ends_early(how):
    executor = FakeExecutor(num_pages=100, fail_at=1 if how == "failed" else None)
    engine = make_engine(executor, max_sequences=8, max_step_tokens=6, prefill_chunk_tokens=6)
    prompt = prompts(1, 30, 30)[0]
    engine.add(make_request("a0", prompt, max_tokens=5, **({"deadline": 1.0} if how == "deadline" else {})))
    for index in (1, 2):
        engine.add(make_request(f"a{index}", prompt, max_tokens=5, after="a0"))
    outputs = engine.step(0.0)
    assert (engine.stats.running, engine.stats.waiting) == (1, 2)
    if how == "cancelled":
        engine.cancel("a0")
    if how == "failed":
        with pytest.raises(Exception, match="caught fire"):
            engine.step(0.5)
        outputs += engine.fail_all("lost")
        assert {output.finish_reason for output in outputs} == {FinishReason.ERROR}
        assert len(outputs) == 3
        return
    results = run(engine, now=2.0)
    assert results["a0"].reason is (FinishReason.CANCELLED if how == "cancelled" else FinishReason.TIMEOUT)
    assert [results[f"a{index}"].token_ids for index in (1, 2)] == [expected_output(prompt, 5)] * 2


def test_others_of_a_prompt_that_has_started_are_not_refused_for_their_wait():
    engine = make_engine(FakeExecutor(num_pages=100), max_sequences=1)
    add_group(engine, "a", [5, 6, 7], 2, max_tokens=4, deadline=3.0)
    found: dict[str, list] = {}
    for now in range(6):
        for output in engine.step(float(now)):
            found.setdefault(output.request_id, []).append(output)
    assert found["a0"][-1].finish_reason is FinishReason.TIMEOUT
    assert found["a1"][-1].finish_reason is FinishReason.TIMEOUT
    assert not found["a1"][-1].queue_timed_out, "its deadline ended it with what it had"


@pytest.mark.parametrize("seed", range(10))
def test_random_groups_in_a_small_pool_keep_the_laws(seed):
    rng = random.Random(seed)
    engine = make_engine(
        FakeExecutor(num_pages=rng.randint(12, 20), page_size=4), max_sequences=rng.randint(1, 6), max_context=40
    )
    wanted: dict[str, list[int]] = {}
    results: dict[str, list[int]] = {}
    cancelled: set[str] = set()
    for now in range(150):
        if now < 60 and rng.random() < 0.3:
            prompt = [rng.randrange(2, VOCAB) for _ in range(rng.randint(1, 20))]
            count, max_tokens = rng.randint(1, 5), rng.randint(1, 15)
            add_group(engine, f"{now}-", prompt, count, max_tokens=max_tokens)
            wanted |= {f"{now}-{index}": expected_output(prompt, max_tokens) for index in range(count)}
        if wanted and rng.random() < 0.1:
            name = rng.choice(list(wanted))
            engine.cancel(name)
            cancelled.add(name)
        for output in engine.step(float(now)):
            results.setdefault(output.request_id, []).extend(output.token_ids)
        engine.blocks.check_invariants()
    for name, result in run(engine, now=150.0).items():
        results.setdefault(name, []).extend(result.token_ids)
    for name, tokens in wanted.items():
        found = results.get(name, [])
        assert found == tokens or (name in cancelled and found == tokens[: len(found)])


SAMPLING = {"max_tokens": 7, "temperature": 1.0, "ignore_eos": True}


def alone(client: Client, seed: int):
    return client.generate(PROMPT, seed=seed, **SAMPLING)


def test_streamed_each_response_says_whose_it_is(client):
    request = client.send(request_inputs(PROMPT, seed=5, num_return_sequences=3, **SAMPLING))
    reply = client.receive(request)
    found: dict[int, list[int]] = {}
    for response in reply.responses:
        index = int(response.outputs["sequence_index"].item())
        found.setdefault(index, []).extend(response.outputs["output_ids"].reshape(-1).tolist())
    assert found == {index: alone(client, 5 + index).token_ids for index in range(3)}
    assert sum(response.finish_reason != "" for response in reply.responses) == 3
    assert [response.final for response in reply.responses].count(True) == 1
    assert reply.responses[-1].finish_reason == "length"


def test_not_streamed_is_one_response_with_all_in_order(client):
    fields = {"num_return_sequences": 3, "return_log_probs": True, "return_logprobs": True, "stream": False}
    reply = client.receive(client.send(request_inputs(PROMPT, seed=5, **SAMPLING, **fields)))
    assert len(reply.responses) == 1
    outputs = reply.last.outputs
    singles = [client.generate(PROMPT, seed=5 + index, return_log_probs=True, **SAMPLING) for index in range(3)]
    assert [text.decode() for text in outputs["text_output"]] == [single.text for single in singles]
    assert outputs["output_ids"].reshape(-1).tolist() == [token for single in singles for token in single.token_ids]
    assert outputs["num_output_tokens"].tolist() == [7, 7, 7]
    assert [reason.decode() for reason in outputs["finish_reason"]] == ["length"] * 3
    assert outputs["sequence_index"].tolist() == [[0], [1], [2]]
    assert outputs["cum_log_probs"] == pytest.approx(
        [single.last.outputs["cum_log_probs"].item() for single in singles], abs=1e-3
    )
    assert outputs["output_log_probs"].shape == (1, 21)
    assert [len(json.loads(text)) for text in outputs["logprobs"]] == [7, 7, 7]


def test_over_http_the_texts_are_a_list(server):
    parameters = {"n": 2, "seed": 3, "max_tokens": 4, "temperature": 1, "ignore_eos": True}
    body = {"text_input": PROMPT, "sampling_parameters": json.dumps(parameters)}
    status, text = post(server, "llm/generate", body)
    answer = json.loads(text)
    assert status == 200
    assert [len(answer[name]) for name in ("text_output", "finish_reason", "num_output_tokens")] == [2, 2, 2]
    assert answer["text_output"][0] != answer["text_output"][1]


def test_rows_of_a_batch_may_ask_for_several(client):
    inputs = {
        "text_input": np.array([[PROMPT.encode()], [b"another one"]], np.object_),
        "max_tokens": np.full((2, 1), 3, np.int32),
        "num_return_sequences": np.full((2, 1), 2, np.int32),
        "ignore_eos": np.full((2, 1), True),
    }
    reply = client.receive(client.send(inputs))
    assert sorted(int(response.outputs["batch_index"][0][0]) for response in reply.responses) == [0, 1]
    assert all(response.outputs["sequence_index"].tolist() == [[0], [1]] for response in reply.responses)


def test_through_llm_vllm_all_come_before_the_last_flag(server, client):
    unbatched = Client(server.grpc_address, "llm_vllm")
    parameters = json.dumps({"n": 3, "seed": 5} | SAMPLING)
    for stream in (True, False):
        reply = unbatched.receive(unbatched.send({"text_input": PROMPT, "stream": stream, "sampling_parameters": parameters}))
        texts = [text.decode() for response in reply.responses for text in response.outputs["text_output"]]
        assert len("".join(texts)) == sum(len(alone(client, 5 + index).text) for index in range(3))
        assert len(reply.responses) == 1 or stream
    unbatched.close()


def test_a_timeout_of_the_queue_counts_until_the_first_starts(server, client):
    """More sequences than may run: the last ones wait longer than the timeout."""
    inputs = request_inputs(PROMPT, num_return_sequences=64, stream=False, max_tokens=100, ignore_eos=True)
    reply = client.receive(client.send(inputs, timeout=200_000))
    assert reply.error == ""
    assert reply.last.outputs["num_output_tokens"].tolist() == [100] * 64


def test_each_counts_as_a_request_and_leaving_cancels_all(server, client):
    settled_metrics(server)
    before = counted(server, 'llm_finished_requests{model="llm",reason="length"')
    client.generate(PROMPT, num_return_sequences=4, **SAMPLING)
    settled_metrics(server)
    assert counted(server, 'llm_finished_requests{model="llm",reason="length"') - before == 4
    leaving = Client(server.grpc_address)
    request = leaving.send(request_inputs(PROMPT, max_tokens=900, ignore_eos=True, num_return_sequences=4, stream=False))
    assert leaving.nothing_more(request)
    leaving.close(cancel=True)
    assert_idle(server)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"n": 65}, "num_return_sequences: got 65; allowed: an integer from 0 to 64"),
        ({"n": 2, "best_of": 3}, "best_of: got 3; allowed: up to n, 2"),
    ],
)
def test_what_is_not_offered_is_refused(client, parameters, message):
    assert client.generate(PROMPT, sampling_parameters=json.dumps(parameters)).error.startswith(message)
