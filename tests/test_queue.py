"""Triton's queue in front of the model: while every slot is taken, its sizes, priorities and timeouts act as documented."""

from __future__ import annotations

import time
import urllib.request

import pytest

from tests.servers import Client, Response, assert_idle, make_repository, request_inputs, running

SLOTS = 2
QUEUE = 4
AHEAD = 1  # Triton forms the next batch (here of one request) while the instance is busy; it is in neither count
LONG = {"max_tokens": 900, "ignore_eos": True}
SHORT = {"max_tokens": 1, "ignore_eos": True}
PROMPT = "The quick brown fox"


@pytest.fixture(scope="module")
def server(shelf, tmp_path_factory):
    folder = tmp_path_factory.mktemp("queue")
    config = f"dynamic_batching {{ default_queue_policy {{ max_queue_size: {QUEUE} }} }}"
    repository = make_repository(
        folder / "repository", config, max_sequences=str(SLOTS), num_threads="1", kv_cache_memory_mb="8"
    )
    path = repository / "llm" / "config.pbtxt"
    path.write_text(path.read_text().replace("max_batch_size: 8", "max_batch_size: 1"))
    with running(repository, shelf.engine("llama"), folder / "triton.log") as server:
        yield server


@pytest.fixture
def client(server):
    client = Client(server.grpc_address)
    yield client
    client.close(cancel=True)
    assert_idle(server)


def pending(server) -> int:
    with urllib.request.urlopen(server.metrics_url, timeout=10) as response:
        lines = response.read().decode().splitlines()
    return sum(
        int(float(line.rpartition(" ")[2]))
        for line in lines
        if line.startswith('nv_inference_pending_request_count{model="llm"')
    )


def wait_until(condition, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come about"
        time.sleep(0.01)


def fill_slots(client: Client) -> list[str]:
    """Occupy every slot; returns the ids, whose first response has been read."""
    requests = [client.send(request_inputs(f"{PROMPT} {i}", **LONG)) for i in range(SLOTS)]
    for request in requests:
        client.next(request)
    return requests


def finish(client: Client, requests: list[str]) -> list[Response]:
    return [client.receive(request).last for request in requests]


def test_what_is_over_slots_and_queue_is_refused_in_tritons_words_and_the_rest_finish(server, client):
    slots = fill_slots(client)
    # Each on a stream of its own: an error on a stream does not say which request it is about.
    others = [Client(server.grpc_address) for _ in range(QUEUE + AHEAD + 5)]
    requests = [other.send(request_inputs(PROMPT, **SHORT)) for other in others[: QUEUE + AHEAD]]
    wait_until(lambda: pending(server) == QUEUE)
    requests += [other.send(request_inputs(PROMPT, **SHORT)) for other in others[QUEUE + AHEAD :]]
    replies = [other.receive(request) for other, request in zip(others, requests, strict=True)]
    refused = [reply.error for reply in replies if reply.error]
    assert len(refused) == 5
    assert all("Exceeds maximum queue size" in message for message in refused)
    assert [reply.last.finish_reason for reply in replies if not reply.error] == ["length"] * (QUEUE + AHEAD)
    assert {response.finish_reason for response in finish(client, slots)} == {"length"}
    for other in others:
        other.close()


def test_priority_goes_first_and_within_a_level_first_come_first_served(server, client):
    slots = fill_slots(client)
    order: list[str] = []
    inputs = request_inputs(PROMPT, max_tokens=2, ignore_eos=True)
    requests = [client.send(inputs, priority=2, request_id=f"second{i}") for i in range(3)]
    requests += [client.send(inputs, priority=1, request_id="first"), client.send(inputs, priority=3, request_id="third")]
    wait_until(lambda: pending(server) == len(requests))
    remaining = set(requests)
    while remaining:
        for request in list(remaining):
            if not client.nothing_more(request):
                order.append(request)
                remaining.remove(request)
        time.sleep(0.0005)
    assert order[0] == "first"
    assert order[-1] == "third"
    assert [name for name in order if name.startswith("second")] == ["second0", "second1", "second2"]
    finish(client, slots)


def test_a_request_past_its_timeout_is_refused_while_the_slots_are_still_taken(server, client):
    slots = fill_slots(client)
    other = Client(server.grpc_address)
    started = time.monotonic()
    reply = other.receive(other.send(request_inputs(PROMPT, **SHORT), timeout=300_000))
    waited = time.monotonic() - started
    assert "timeout" in reply.error.lower() or "expired" in reply.error.lower()
    assert waited >= 0.3
    assert all(client.nothing_more(request) or client.next(request).finish_reason == "" for request in slots)
    other.close()
    finish(client, slots)
