"""Speculation behind Triton: on for the model, and declined request by request."""

from __future__ import annotations

import json

import pytest

from tests.servers import Client, assert_idle, counted, make_repository, post, request_inputs, running, settled_metrics

WORDS = "one two three four five six seven eight nine ten"


@pytest.fixture(scope="module")
def server(shelf, tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    repository = make_repository(folder / "repository", kv_cache_memory_mb="8", num_threads="1", speculation="ngram")
    with running(repository, shelf.engine("llama"), folder / "triton.log") as server:
        yield server


def test_twenty_requests_get_the_same_tokens_with_and_without(server):
    client = Client(server.grpc_address)
    prompts = [f"{WORDS} {number} {WORDS} {number}" for number in range(20)]
    options = [
        # A penalty under 1 is a reward: the tiny model, which says nothing twice, repeats itself.
        {
            "max_tokens": 1 + 2 * number,
            "repetition_penalty": 0.3,
            "ignore_eos": number % 2 == 0,
            "stop_words": ["e"] if number % 5 == 0 else [],
        }
        for number in range(20)
    ]
    plain = [client.generate(prompt, speculation=False, **each) for prompt, each in zip(prompts, options, strict=True)]
    assert counted(server, "llm_draft_tokens") == 0
    # First in turn: until steps of several sizes were measured, guesses are taken to pay whatever the machine's speed.
    guessed = [client.generate(prompt, **each) for prompt, each in zip(prompts, options, strict=True)]
    pending = [client.send(request_inputs(prompt, **each)) for prompt, each in zip(prompts, options, strict=True)]
    guessed += [client.receive(request) for request in pending]
    for one, other, each in zip(plain * 2, guessed, options * 2, strict=True):
        assert (other.token_ids, other.text, other.last.finish_reason) == (one.token_ids, one.text, one.last.finish_reason)
        assert len(other.token_ids) <= each["max_tokens"]
    assert_idle(server)
    values = settled_metrics(server)
    totals = {
        name: sum(int(reply.last.outputs[name].item()) for reply in guessed)
        for name in ("num_draft_tokens", "num_accepted_tokens")
    }
    assert values["llm_draft_tokens"] == totals["num_draft_tokens"] > 0
    assert values["llm_accepted_tokens"] == totals["num_accepted_tokens"]
    assert values["llm_itl_seconds_count"] == values["llm_generated_tokens"] - values["llm_ttft_seconds_count"]
    client.close()


def test_the_switch_is_a_field_like_others(server):
    body = {"text_input": WORDS, "sampling_parameters": json.dumps({"speculation": "false", "max_tokens": 5})}
    status, text = post(server, "llm/generate", body)
    assert (status, json.loads(text)["num_draft_tokens"]) == (200, 0)
    status, text = post(server, "llm/generate", body | {"sampling_parameters": '{"speculation": "maybe"}'})
    assert (status, json.loads(text)["error"]) == (400, "speculation: got 'maybe'; allowed: true or false")
