"""Triton's queue in front of the model: while every slot is taken, its sizes, priorities and timeouts act as documented."""

from __future__ import annotations

import time
import urllib.request

import pytest

from tests.servers import Client, assert_idle, make_repository, request_inputs, running

SLOTS = 2
QUEUE = 4
AHEAD = 1  # Triton forms the next batch (here of one request) while the instance is busy; it is in neither count
CONTEXT = 30_000
LONG = {"max_tokens": CONTEXT, "ignore_eos": True}  # longer than any test; cancelled at its end
PROMPT = "The quick brown fox"


@pytest.fixture(scope="module")
def server(shelf, tmp_path_factory):
    folder = tmp_path_factory.mktemp("queue")
    config = f"max_batch_size: 1 dynamic_batching {{ default_queue_policy {{ max_queue_size: {QUEUE} }} }}"
    repository = make_repository(
        folder / "repository", config, max_sequences=str(SLOTS), num_threads="1", kv_cache_memory_mb="80"
    )
    with running(repository, shelf.engine("llama", max_context=CONTEXT), folder / "triton.log") as server:
        yield server


@pytest.fixture
def slots(server):
    """A client whose requests occupy every slot until it is closed."""
    client = Client(server.grpc_address)
    requests = [client.send(request_inputs(f"{PROMPT} {i}", **LONG)) for i in range(SLOTS)]
    for request in requests:
        client.next(request)
    yield client
    client.close(cancel=True)
    assert_idle(server)


def pending(server) -> int:
    return count(server, 'nv_inference_pending_request_count{model="llm"')


def count(server, metric: str) -> int:
    with urllib.request.urlopen(server.metrics_url, timeout=10) as response:
        lines = response.read().decode().splitlines()
    return sum(int(float(line.rpartition(" ")[2])) for line in lines if line.startswith(metric))


def wait_until(condition, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come about"
        time.sleep(0.01)


def test_what_is_over_slots_and_queue_is_refused_in_tritons_words_and_the_rest_finish(server, slots):
    # Each on a stream of its own: an error on a stream does not say which request it is about.
    others = [Client(server.grpc_address) for _ in range(QUEUE + AHEAD + 5)]
    requests = [other.send(request_inputs(PROMPT, max_tokens=1, ignore_eos=True)) for other in others]
    wait_until(lambda: sum(not other.nothing_more(request) for other, request in zip(others, requests, strict=True)) >= 5)
    slots.close(cancel=True)
    replies = [other.receive(request) for other, request in zip(others, requests, strict=True)]
    refused = [reply.error for reply in replies if reply.error]
    assert 5 <= len(refused) <= 5 + AHEAD
    assert all("Exceeds maximum queue size" in message for message in refused)
    assert all(reply.error or reply.last.finish_reason == "length" for reply in replies)
    for other in others:
        other.close()


def test_priority_goes_first_and_within_a_level_first_come_first_served(server, slots):
    client = Client(server.grpc_address)
    inputs = request_inputs(PROMPT, max_tokens=2, ignore_eos=True)
    # What Triton took ahead has left the queue, and with it the order of priorities.
    ahead = client.send(inputs, priority=3)
    time.sleep(1.0)
    requests = [client.send(inputs, priority=2, request_id=f"second{i}") for i in range(3)]
    requests += [client.send(inputs, priority=1, request_id="first"), client.send(inputs, priority=3, request_id="third")]
    wait_until(lambda: pending(server) >= len(requests))
    slots.close(cancel=True)
    order = sorted(requests, key=lambda request: (client.receive(request), client.ended_at(request))[1])
    client.receive(ahead)
    assert order == ["first", "second0", "second1", "second2", "third"]
    client.close()


def test_a_request_past_its_timeout_is_refused_while_the_slots_are_still_taken(server, slots):
    others = [Client(server.grpc_address) for _ in range(1 + AHEAD)]
    inputs = request_inputs(PROMPT, max_tokens=1, ignore_eos=True)
    others[0].send(inputs)
    time.sleep(1.0)  # Triton takes it ahead
    started = time.monotonic()
    reply = others[1].receive(others[1].send(inputs, timeout=300_000))
    assert time.monotonic() - started >= 0.3
    assert "timeout" in reply.error.lower() or "expired" in reply.error.lower()
    for other in others:
        other.close(cancel=True)
