"""Thousands of short requests that ask for one output, on several streams: what long service brings, in seconds."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import tritonclient.grpc as grpcclient

from tests.servers import Client, assert_idle, make_repository, metrics, reconfigure, wait_until
from triton_server import TritonServer

NUM_STREAMS, ROUNDS, EACH = 4, 20, 20
NUM_WAITING = 100


def ask(client: Client, prompt: str, *outputs: str, **fields: object) -> str:
    wanted = [grpcclient.InferRequestedOutput(name) for name in outputs]
    return client.send({"text_input": prompt, "stream": True} | fields, outputs=wanted)


@pytest.mark.parametrize("model", ["llm", "llm_vllm"])
def test_a_response_has_the_outputs_that_were_asked_for(server, model):
    client = Client(server.grpc_address, model)
    reply = client.receive(ask(client, "The quick brown", "text_output", "finish_reason"))
    assert all(set(response.outputs) <= {"text_output", "finish_reason"} for response in reply.responses)
    assert reply.text
    assert reply.last.finish_reason == "length"
    silent = client.receive(ask(client, "The quick brown", "logprobs"))
    assert all(not response.outputs for response in silent.responses)
    assert silent.responses[-1].final
    client.close()


@pytest.mark.parametrize("model", ["llm", "llm_vllm"])
def test_thousands_of_requests_that_ask_for_one_output_are_all_answered(server, model):
    parameters = '{"max_tokens": 8, "temperature": 0.1}'

    def use(number: int) -> int:
        client = Client(server.grpc_address, model)
        answered = 0
        for turn in range(ROUNDS):
            prompts = [f"The quick brown {number} {turn} {index}" for index in range(EACH)]
            requests = [ask(client, prompt, "text_output", sampling_parameters=parameters) for prompt in prompts]
            answered += sum(client.receive(request).last.error is None for request in requests)
        client.close()
        return answered

    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        assert sum(pool.map(use, range(NUM_STREAMS))) == NUM_STREAMS * ROUNDS * EACH
    assert_idle(server)


def test_streams_of_llm_vllm_go_on_while_many_others_wait(server):
    reconfigure(server, max_sequences="2", num_threads="1", kv_cache_memory_mb="8")
    client = Client(server.grpc_address, "llm_vllm")
    parameters = '{"max_tokens": 50, "ignore_eos": true}'
    requests = [ask(client, "The quick brown", "text_output", sampling_parameters=parameters) for _ in range(NUM_WAITING)]
    first, last = requests[0], requests[-1]
    assert client.receive(first).last.error is None
    assert client.nothing_more(last)
    assert all(client.receive(request).last.error is None for request in requests[1:])
    client.close()


def test_a_reload_after_many_requests_through_llm_vllm_leaves_one_instance(server):
    client = Client(server.grpc_address, "llm_vllm")
    for _ in range(20):
        requests = [ask(client, "The quick brown", "text_output", sampling_parameters='{"max_tokens": 2}') for _ in range(20)]
        assert all(client.receive(request).last.error is None for request in requests)
    client.close()
    reconfigure(server, max_sequences="3", num_threads="1", kv_cache_memory_mb="8")
    wait_until(lambda: metrics(server)["llm_max_sequences"] == 3)


def test_llm_vllm_says_where_it_looked_for_the_server(shelf, tmp_path):
    repository = make_repository(tmp_path / "repository", kv_cache_memory_mb="8")
    environment = {"LLM_ENGINE_DIR": str(shelf.engine("llama")), "LLM_GRPC_ADDRESS": "127.0.0.1:1"}
    with TritonServer.on_free_ports(repository, tmp_path / "triton.log", environment=environment, exit_seconds=3) as server:
        client = Client(server.grpc_address, "llm_vllm")
        reply = client.receive(ask(client, "The quick brown", "text_output"))
        assert reply.error.startswith("llm cannot be reached at 127.0.0.1:1: ")
        assert reply.error.endswith("LLM_GRPC_ADDRESS has to name this server's gRPC endpoint")
        client.close()
