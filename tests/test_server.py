"""The model on a real Triton, over gRPC and HTTP: streams and their ends, text, bad input, determinism, the prefix cache."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from tokenizers import Tokenizer

from tests.engines import load_executor, run_in_chunks
from tests.servers import (
    ROOT,
    Client,
    Reply,
    assert_idle,
    make_repository,
    metrics,
    post,
    request_inputs,
    running,
    settled_metrics,
)

PROMPT = "The quick brown fox"
NUM_SEQUENCES = 8
CONTEXT = 512


@pytest.fixture(scope="module")
def engine(shelf):
    return shelf.engine("llama")


@pytest.fixture(scope="module")
def server(engine, tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    repository = make_repository(
        folder / "repository",
        max_sequences=str(NUM_SEQUENCES),
        max_context=str(CONTEXT),
        kv_cache_memory_mb="4",
        num_threads="1",
        matmul_accuracy="fp32",
        default_max_tokens="16",
    )
    with running(repository, engine, folder / "triton.log") as server:
        yield server


@pytest.fixture(scope="module")
def tokenizer(engine):
    return Tokenizer.from_file(str(engine / "tokenizer.json"))


def events(body: str) -> list[dict]:
    return [json.loads(line.removeprefix("data: ")) for line in body.splitlines() if line]


def greedy_by_hand(engine, prompt_ids: list[int], count: int) -> list[int]:
    """What the engine's executor gives without scheduler, batches or server: one row, the whole context each time."""
    executor = load_executor(engine, num_threads=1)
    ids = list(prompt_ids)
    for _ in range(count):
        ids.append(int(run_in_chunks(executor, ids, [len(ids)], list(range(60)))[-1].argmax()))
    return ids[len(prompt_ids) :]


def test_greedy_tokens_equal_the_executors_own(client, engine, tokenizer):
    reply = client.generate(PROMPT, max_tokens=12, ignore_eos=True)
    assert reply.token_ids == greedy_by_hand(engine, tokenizer.encode(PROMPT).ids, 12)


@pytest.mark.parametrize("max_tokens", [1, 2, 10])
def test_exactly_one_final_flag_on_the_last_response_with_tensors(client, max_tokens):
    request = client.send(request_inputs(PROMPT, max_tokens=max_tokens, ignore_eos=True))
    reply = client.receive(request)
    assert [response.final for response in reply.responses] == [False] * (len(reply.responses) - 1) + [True]
    assert "text_output" in reply.last.outputs
    assert reply.last.finish_reason == "length"
    assert len(reply.token_ids) == max_tokens
    time.sleep(0.2)
    assert client.nothing_more(request)


def test_every_text_has_shape_1_and_counts_are_of_the_response_alone(client):
    reply = client.generate(PROMPT, max_tokens=6, ignore_eos=True, return_num_input_tokens=True)
    assert {response.outputs["text_output"].shape for response in reply.responses} == {(1,)}
    counts = [int(response.outputs["num_output_tokens"][0]) for response in reply.responses]
    assert counts == [len(response.outputs["output_ids"].reshape(-1)) for response in reply.responses]
    assert sum(counts) == 6
    assert len({int(response.outputs["num_input_tokens"][0]) for response in reply.responses}) == 1


def test_not_streamed_is_exactly_one_response_with_the_whole_text(client):
    streamed = client.generate(PROMPT, max_tokens=10, ignore_eos=True)
    whole = client.generate(PROMPT, max_tokens=10, ignore_eos=True, stream=False)
    assert len(whole.responses) == 1
    assert (whole.text, whole.token_ids) == (streamed.text, streamed.token_ids)


def test_http_generate_and_generate_stream_say_the_same(server, client):
    expected = client.generate(PROMPT, max_tokens=8, ignore_eos=True)
    body = {"text_input": PROMPT, "max_tokens": 8, "ignore_eos": True}
    status, text = post(server, "llm/generate", body)
    assert (status, json.loads(text)["text_output"]) == (200, expected.text)
    assert json.loads(text)["finish_reason"] == "length"
    status, text = post(server, "llm/generate_stream", body | {"stream": True})
    assert (status, "".join(event["text_output"] for event in events(text))) == (200, expected.text)
    status, text = post(server, "llm/generate_stream", body)
    assert [event["text_output"] for event in events(text)] == [expected.text]


def test_log_probabilities_add_up_and_equal_the_executors(client, engine, tokenizer):
    reply = client.generate(PROMPT, max_tokens=5, ignore_eos=True, return_log_probs=True)
    values = np.concatenate([response.outputs["output_log_probs"].reshape(-1) for response in reply.responses])
    assert reply.last.outputs["cum_log_probs"][0] == pytest.approx(values.sum(), abs=1e-4)
    ids = tokenizer.encode(PROMPT).ids
    whole = run_in_chunks(load_executor(engine, num_threads=1), ids + reply.token_ids, [len(ids) + 5], list(range(10)))
    expected = [whole[len(ids) - 1 + i, token] for i, token in enumerate(reply.token_ids)]
    np.testing.assert_allclose(values, expected, atol=1e-3)


def test_vllms_logprobs_are_json_with_alternatives(client):
    fields = {"sampling_parameters": json.dumps({"logprobs": 2, "max_tokens": 2, "ignore_eos": True})}
    reply = client.generate(PROMPT, return_logprobs=True, return_cumulative_logprob=True, stream=False, **fields)
    entries = json.loads(reply.last.outputs["logprobs"].item())
    assert [len(entry) for entry in entries] == [2, 2]
    chosen = sum(max(entry.values()) for entry in entries)
    assert reply.last.outputs["cumulative_logprob"][0] == pytest.approx(chosen, abs=1e-4)


@pytest.mark.parametrize("fields", [{"stream": True}, {"stream": False}, {"stream": False, "num_return_sequences": 2}], ids=str)
def test_log_probabilities_of_the_prompt_equal_the_executors(client, engine, tokenizer, fields):
    prompt = f"{PROMPT} jumps over the lazy dog. " * 12
    ids = tokenizer.encode(prompt).ids
    assert len(ids) > 128  # so that it takes several steps
    asked = {"sampling_parameters": json.dumps({"prompt_logprobs": 2})}
    client.generate(prompt, max_tokens=1)  # and is in the prefix cache
    reply = client.generate(prompt, max_tokens=4, ignore_eos=True, **asked, **fields)
    found = [response.outputs["prompt_logprobs"] for response in reply.responses if "prompt_logprobs" in response.outputs]
    assert len(found) == 1
    first, *entries = json.loads(found[0].item())
    assert first is None
    whole = run_in_chunks(load_executor(engine, num_threads=1), ids, [len(ids)], list(range(64)))
    expected = [whole[i, token] for i, token in enumerate(ids[1:])]
    got = [entry[str(token)] for entry, token in zip(entries, ids[1:], strict=True)]
    np.testing.assert_allclose(got, expected, atol=1e-3)
    np.testing.assert_allclose([max(entry.values()) for entry in entries], whole[:-1].max(axis=1), atol=1e-3)
    assert all(2 <= len(entry) <= 3 for entry in entries)


@pytest.mark.parametrize("stream", [True, False])
def test_a_prompt_of_one_token_has_no_log_probabilities_to_give_and_says_so(client, stream):
    asked = {"sampling_parameters": json.dumps({"prompt_logprobs": 2}), "stream": stream}
    reply = client.generate([5], max_tokens=4, ignore_eos=True, **asked)
    assert [r.outputs["prompt_logprobs"].item() for r in reply.responses if "prompt_logprobs" in r.outputs] == [b"[null]"]


def test_the_prompts_of_vllms_clients_have_log_probabilities_too(server):
    body = {"text_input": PROMPT, "parameters": {}, "sampling_parameters": json.dumps({"prompt_logprobs": 0, "max_tokens": 1})}
    answers = [json.loads(post(server, f"{model}/generate", body)[1]) for model in ("llm", "llm_vllm")]
    ours, theirs = (json.loads(answer["prompt_logprobs"]) for answer in answers)
    assert all(len(entry) == 1 for entry in ours[1:])
    for a, b in zip(ours[1:], theirs[1:], strict=True):
        assert b == pytest.approx(a, abs=1e-4)


def test_many_streams_each_end_within_their_watchdog(server):
    clients = [Client(server.grpc_address) for _ in range(8)]
    expected = clients[0].generate(PROMPT, max_tokens=8, ignore_eos=True).token_ids
    for _ in range(6):
        sent = [
            (client, client.send(request_inputs(PROMPT, max_tokens=8, ignore_eos=True))) for client in clients for _ in range(8)
        ]
        for client, request in sent:
            assert client.receive(request).token_ids == expected
    for client in clients:
        client.close()
    assert_idle(server)


def test_the_running_batch_reaches_the_limit(server, client):
    before = settled_metrics(server)
    requests = [client.send(request_inputs(f"{PROMPT} {i}", max_tokens=200, ignore_eos=True)) for i in range(16)]
    for request in requests:
        client.receive(request)
    after = settled_metrics(server)

    def steps(label: str) -> float:
        return after[f"llm_decode_batch_size_{label}"] - before[f"llm_decode_batch_size_{label}"]

    assert steps("bucket:6") < steps(f"bucket:{NUM_SEQUENCES}") == steps("count"), "some steps with 7 or 8, none with more"


def test_batched_equals_alone_for_mixed_requests(client):
    kinds = [
        {"max_tokens": 9},
        {"max_tokens": 20, "temperature": 1.0, "seed": 7},
        {"max_tokens": 15, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
        {"max_tokens": 12, "top_k": 5, "seed": 3},
        {"max_tokens": 12, "top_p": 0.7, "seed": 4},
        {"max_tokens": 30, "stop_words": ["e"]},
    ]
    prompts = [f"{'once upon a time ' * (1 + index)}{index}" for index in range(len(kinds))]
    alone = [client.generate(prompt, **kind) for prompt, kind in zip(prompts, kinds, strict=True)]
    sent = [client.send(request_inputs(prompt, **kind)) for prompt, kind in zip(prompts, kinds, strict=True)]
    for request, expected in zip(sent, alone, strict=True):
        reply = client.receive(request)
        assert (reply.token_ids, reply.text, reply.last.finish_reason) == (
            expected.token_ids,
            expected.text,
            expected.last.finish_reason,
        )


def test_a_seed_decides_and_no_seed_varies(client):
    seeded = [client.send(request_inputs(PROMPT, max_tokens=20, temperature=1.0, seed=7)) for _ in range(8)]
    texts = {client.receive(request).text for request in seeded}
    assert len(texts) == 1
    assert client.generate(PROMPT, max_tokens=20, temperature=1.0, random_seed=7).text in texts
    free = [client.send(request_inputs(PROMPT, max_tokens=20, temperature=1.0)) for _ in range(8)]
    assert len({client.receive(request).text for request in free}) > 1


def test_cached_tokens_are_reported_and_salts_kept_apart(client, server):
    prompt = [int(t) for t in np.random.default_rng(0).integers(3, 500, 33)]
    before = settled_metrics(server)["llm_prefix_hit_tokens"]
    counts, texts = [], set()
    for salt in ["A", "B", "A", "", ""]:
        reply = client.generate(prompt, max_tokens=4, cache_salt=salt, ignore_eos=True)
        counts.append(int(reply.last.outputs["num_cached_tokens"][0]))
        texts.add(reply.text)
    assert counts == [0, 0, 32, 0, 32]
    assert len(texts) == 1
    assert settled_metrics(server)["llm_prefix_hit_tokens"] - before == 64


def test_joined_stream_equals_the_decoded_ids_and_shows_no_broken_character(client, tokenizer):
    for seed in range(6):
        reply = client.generate("你好👩‍👩‍👧‍👦é", max_tokens=40, temperature=1.5, seed=seed, ignore_eos=True)
        prompt = tokenizer.encode("你好👩‍👩‍👧‍👦é").ids
        expected = tokenizer.decode(prompt + reply.token_ids)[len(tokenizer.decode(prompt)) :]
        assert reply.text == expected
        assert not any(r.text.endswith("\ufffd") for r in reply.responses[:-1])


def test_stop_words_end_before_the_earliest_match(client):
    whole = client.generate(PROMPT, max_tokens=40, ignore_eos=True).text
    for length in (1, 2, 5):
        stop = whole[8 : 8 + length]
        reply = client.generate(PROMPT, max_tokens=40, ignore_eos=True, stop_words=[stop, "", "never there"])
        assert (reply.text, reply.last.finish_reason) == (whole[: whole.index(stop)], "stop")
        assert all(response.text for response in reply.responses[:-1])  # nothing is sent while text is held back


def test_an_empty_stop_list_is_none_and_json_stop_works(client, server):
    whole = client.generate(PROMPT, max_tokens=6, ignore_eos=True)
    assert client.generate(PROMPT, max_tokens=6, ignore_eos=True, stop_words=np.zeros((1, 0), np.object_)).text == whole.text
    status, body = post(
        server, "llm/generate", {"text_input": PROMPT, "stop_words": ["", "zzz"], "max_tokens": 6, "ignore_eos": True}
    )
    assert (status, json.loads(body)["text_output"]) == (200, whole.text)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"top_k": -1}, "top_k: got -1"),
        ({"temperature": -1.0}, "temperature: got -1"),
        ({"temperature": float("nan")}, "temperature: got nan"),
        ({"top_p": 1.5}, "top_p: got 1.5"),
        ({"max_tokens": 0}, "max_tokens: got 0"),
        ({"beam_width": 4}, "beam_width: got 4"),
        ({"sampling_parameters": "{"}, "sampling_parameters: not JSON"),
        ({"sampling_parameters": '{"max_tokens": 2147483648}'}, "max_tokens: got 2147483648"),
        ({"text_input": b"\xff\xfe"}, "text_input: got bytes"),
        ({"text_input": ""}, "text_input: got ''"),
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens: got 9"),
    ],
    ids=str,
)
def test_bad_input_is_refused_by_name_and_its_neighbours_finish(client, fields, message):
    good = client.send(request_inputs(PROMPT, max_tokens=10, ignore_eos=True))
    other = Client(client.address)
    reply = other.generate(PROMPT, **fields)
    assert reply.error.startswith(message)
    assert len(reply.responses) == 1
    assert len(other.generate(PROMPT, max_tokens=3, ignore_eos=True).token_ids) == 3
    other.close()
    assert len(client.receive(good).token_ids) == 10


def test_missing_and_doubled_prompts_are_refused(client):
    assert client.receive(client.send({"stream": True, "max_tokens": 3})).error.startswith("text_input: missing")
    both = {"text_input": PROMPT, "input_ids": [3, 4], "stream": True}
    assert client.receive(client.send(both)).error.startswith("text_input, input_ids: both given")
    assert client.generate([]).error.startswith("input_ids: got []")
    assert client.generate([3, 512]).error.startswith("input_ids: got 512; allowed: 0 to 511")


@pytest.mark.parametrize("prompt", [" ", "\u0000", "\n\n"])
def test_odd_prompts_are_served(client, prompt):
    assert len(client.generate(prompt, max_tokens=3, ignore_eos=True).token_ids) == 3


@pytest.mark.parametrize(
    ("length", "served"), [(CONTEXT - 2, True), (CONTEXT - 1, True), (CONTEXT, False), (10 * CONTEXT, False)]
)
def test_prompts_up_to_the_limit(client, length, served):
    reply = client.generate([5] * length, max_tokens=4, ignore_eos=True)
    if served:
        assert len(reply.token_ids) == CONTEXT - length
        assert reply.last.finish_reason == "length"
    else:
        assert reply.error.startswith(f"input_ids: got {length} tokens; allowed: up to {CONTEXT - 1}")
    assert len(client.generate([5], max_tokens=2, ignore_eos=True).token_ids) == 2


def test_wrong_shapes_are_refused(client):
    for shape in ([1], [1, 2], [0, 1]):
        array = np.full(shape, b"x", np.object_)
        reply = client.receive(client.send({"text_input": array, "stream": True}))
        assert "text_input" in reply.error or "llm" in reply.error


def test_a_batch_of_rows_is_answered_row_by_row(client):
    rows = np.array([[b"one"], [b"two"], [b"three"]], np.object_)
    limits = np.array([[2], [3], [4]], np.int32)
    replies = client.receive(client.send({"text_input": rows, "max_tokens": limits, "ignore_eos": np.full((3, 1), True)}))
    # Shape [1, 1]: TensorRT-LLM's clients read [0][0].
    assert sorted(int(r.outputs["batch_index"][0][0]) for r in replies.responses) == [0, 1, 2]
    assert {r.outputs["sequence_index"][0][0] for r in replies.responses} == {0}
    counts = {int(r.outputs["batch_index"][0][0]): int(r.outputs["num_output_tokens"][0]) for r in replies.responses}
    assert counts == {0: 2, 1: 3, 2: 4}


def test_exclude_input_in_output(client):
    plain = client.generate(PROMPT, max_tokens=4, ignore_eos=True, stream=False)
    echoed = client.generate(PROMPT, max_tokens=4, ignore_eos=True, stream=False, exclude_input_in_output=False)
    assert echoed.text == PROMPT + plain.text
    assert client.generate(PROMPT, max_tokens=4, ignore_eos=True, exclude_input_in_output=False).text == plain.text


def test_max_completion_tokens_wins_when_smaller(server):
    body = {"text_input": PROMPT, "max_tokens": 50, "ignore_eos": True, "max_completion_tokens": 3}
    assert json.loads(post(server, "llm/generate", body)[1])["num_output_tokens"] == 3


def test_http_errors_have_their_status(server):
    status, body = post(server, "llm/generate", {"text_input": PROMPT, "top_k": -1})
    assert (status, json.loads(body)["error"][:12]) == (400, "top_k: got -")
    status, body = post(server, "llm/generate_stream", {"text_input": PROMPT, "top_k": -1, "stream": True})
    assert (status, events(body)[0]["error"][:12]) == (400, "top_k: got -")
    assert post(server, "llm/generate", {"text_input": PROMPT, "temprature": 1})[0] == 400


def test_clients_that_leave_free_their_sequences(server):
    def leave() -> None:
        body = json.dumps({"text_input": PROMPT, "max_tokens": 400, "ignore_eos": True, "stream": True, "deadline_ms": 60000})
        request = urllib.request.Request(f"{server.http_url}/v2/models/llm/generate_stream", body.encode())
        with urllib.request.urlopen(request, timeout=30) as response:
            response.readline()

    before = metrics(server).get("llm_finished_requests:cancelled", 0)
    with ThreadPoolExecutor(20) as pool:
        for future in [pool.submit(leave) for _ in range(20)]:
            future.result()
    assert_idle(server)
    assert settled_metrics(server)["llm_finished_requests:cancelled"] > before


def test_a_cancelled_stream_sees_one_cancelled_error(server):
    client = Client(server.grpc_address)
    request = client.send(request_inputs(PROMPT, max_tokens=400, ignore_eos=True))
    client.next(request)
    client.close(cancel=True)
    seen = []
    while not client.nothing_more(request):
        seen.append(client.next(request))
    errors = [response.error for response in seen if response.error]
    assert [error.status() for error in errors] == ["StatusCode.CANCELLED"]
    assert_idle(server)


def test_cancels_around_the_last_token_leave_nothing(server):
    rng = random.Random(1)
    for _ in range(60):
        client = Client(server.grpc_address)
        client.send(request_inputs(PROMPT, max_tokens=4, ignore_eos=True))
        time.sleep(rng.random() * 0.02)
        client.close(cancel=True)
    assert_idle(server)
    client = Client(server.grpc_address)
    assert len(client.generate(PROMPT, max_tokens=3, ignore_eos=True).token_ids) == 3
    client.close()


def test_a_mixed_crowd_leaves_every_page_accounted_for(server):
    rng = random.Random(2)

    def one(seed: int) -> Reply | None:
        client = Client(server.grpc_address)
        fields = {"max_tokens": rng.randint(1, 60), "temperature": 1.0, "seed": seed}
        if seed % 3 == 0:
            fields["stop_words"] = ["e", "a"]
        request = client.send(request_inputs(PROMPT * (1 + seed % 4), **fields))
        if seed % 3 == 1:
            time.sleep(rng.random() * 0.1)
            client.close(cancel=True)
            return None
        reply = client.receive(request)
        client.close()
        return reply

    with ThreadPoolExecutor(16) as pool:
        replies = list(pool.map(one, range(90)))
    assert all(reply is None or reply.last.finish_reason in ("stop", "length") for reply in replies)
    values = assert_idle(server)
    assert values["llm_kv_pages:free"] + values["llm_kv_pages:cached"] > 0


def test_llm_vllm_takes_unbatched_requests(server, client):
    unbatched = Client(server.grpc_address, "llm_vllm")
    parameters = json.dumps({"temperature": "0", "max_tokens": "6", "ignore_eos": True})
    inputs = {"text_input": PROMPT, "stream": True, "sampling_parameters": parameters, "return_finish_reason": True}
    reply = unbatched.receive(unbatched.send(inputs))
    assert reply.text == client.generate(PROMPT, max_tokens=6, ignore_eos=True).text
    assert reply.last.finish_reason == "length"
    bad = unbatched.receive(unbatched.send({"text_input": PROMPT, "sampling_parameters": '{"top_k": -2}'}))
    assert bad.error.startswith("top_k: got -2")
    unbatched.close()


def test_a_client_of_llm_vllm_that_leaves_is_noticed(server):
    unbatched = Client(server.grpc_address, "llm_vllm")
    parameters = json.dumps({"max_tokens": 400, "ignore_eos": True})
    request = unbatched.send({"text_input": PROMPT, "stream": True, "sampling_parameters": parameters})
    unbatched.next(request)
    unbatched.close(cancel=True)
    assert_idle(server)


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_our_client_streams_over_both_protocols(server, client, protocol):
    url = server.grpc_address if protocol == "grpc" else server.http_url
    options = ["--protocol", protocol, "--url", url, "--max-tokens", "7", "--ignore-eos"]
    command = [sys.executable, "-m", "client", "generate", PROMPT, *options]
    expected = client.generate(PROMPT, max_tokens=7, ignore_eos=True).text
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, cwd=ROOT).stdout
    assert shown.startswith(f"{expected}\n\n")
    assert "7 out | TTFT" in shown
    report = json.loads(
        subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=60, check=True, cwd=ROOT).stdout
    )
    assert (report["text"], report["num_output_tokens"], report["finish_reason"]) == (expected, 7, "length")
    assert report["ttft_ms"] > 0
    refused = subprocess.run([*command, "--top-k", "-1"], capture_output=True, text=True, timeout=60, check=False, cwd=ROOT)
    assert (refused.returncode, refused.stderr[:19]) == (4, "error: top_k: got -")


def test_clients_of_llm_vllm_that_leave_while_all_slots_are_taken_are_noticed(server):
    parameters = json.dumps({"max_tokens": 450, "ignore_eos": True})
    leaving = [Client(server.grpc_address, "llm_vllm") for _ in range(NUM_SEQUENCES + 6)]
    inputs = {"text_input": PROMPT, "stream": True, "sampling_parameters": parameters}
    requests = [client.send(inputs) for client in leaving]
    leaving[0].next(requests[0])
    for client in leaving:
        client.close(cancel=True)
    assert_idle(server)


def test_llm_vllm_passes_request_parameters_on(server):
    body = {"text_input": PROMPT, "sampling_parameters": '{"ignore_eos": true}', "max_completion_tokens": 3}
    status, text = post(server, "llm_vllm/generate", body)
    assert (status, json.loads(text)["num_output_tokens"]) == (200, 3)


def test_errors_keep_their_status_through_llm_vllm(server):
    status, text = post(server, "llm_vllm/generate", {"text_input": PROMPT, "sampling_parameters": '{"top_k": -2}'})
    assert (status, json.loads(text)["error"][:13]) == (400, "top_k: got -2")
    late = {"text_input": PROMPT, "sampling_parameters": '{"max_tokens": 5}', "timeout": 1, "priority": 1, "sequence_id": 3}
    assert post(server, "llm_vllm/generate", late)[0] == 200  # these three do nothing over HTTP, and break nothing


def test_biases_by_token_and_by_word_force_and_ban(client, tokenizer):
    plain = client.generate(PROMPT, max_tokens=6, ignore_eos=True).token_ids
    wanted = next(token for token in range(10, 60) if token not in plain)
    forced = client.generate(
        PROMPT, max_tokens=4, ignore_eos=True, sampling_parameters=json.dumps({"logit_bias": {str(wanted): 100}})
    )
    assert forced.token_ids == [wanted] * 4
    banned = client.generate(
        PROMPT, max_tokens=6, ignore_eos=True, sampling_parameters=json.dumps({"logit_bias": {plain[0]: -100}})
    )
    assert plain[0] not in banned.token_ids
    word = tokenizer.decode([wanted])
    ids = {token for text in (word, f" {word}") for token in tokenizer.encode(text, add_special_tokens=False).ids}
    by_word = client.generate(
        PROMPT, max_tokens=4, ignore_eos=True, embedding_bias_words=[word], embedding_bias_weights=[100.0]
    )
    assert set(by_word.token_ids) <= ids
    for fields, message in [
        (
            {"embedding_bias_words": ["a", "b"], "embedding_bias_weights": [1.0]},
            "embedding_bias_weights: got 1; allowed: one for",
        ),
        ({"sampling_parameters": '{"logit_bias": {"99999999": 1}}'}, "logit_bias: got token id 99999999; allowed: 0 to"),
    ]:
        assert client.generate(PROMPT, **fields).error.startswith(message)
