"""Triton's queue in front of the model: every knob of its dynamic batcher, before and after a change of that knob.

Each test writes config.pbtxt, loads the model again, and looks at what the queue then does. `Slots` occupies every sequence, so
that what is sent meanwhile has to wait.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.servers import (
    Client,
    Reply,
    assert_idle,
    counted,
    make_repository,
    metrics,
    reconfigure,
    request_inputs,
    running,
    settled_metrics,
    wait_until,
)

SLOTS = 2
CONTEXT = 30_000
LONG = {"max_tokens": CONTEXT, "ignore_eos": True}  # longer than any test; cancelled at its end
SHORT = {
    "max_tokens": 100,
    "ignore_eos": True,
}  # long enough that the order of two in turn is seen by clients on a busy machine
PROMPT = "The quick brown fox"
ENGINE = {"num_threads": "1", "kv_cache_memory_mb": "80"}
MINUTE = 60_000_000  # microseconds


@pytest.fixture(scope="module")
def server(shelf, tmp_path_factory):
    folder = tmp_path_factory.mktemp("queue")
    repository = make_repository(folder / "repository", **ENGINE)
    with running(repository, shelf.engine("llama", max_context=CONTEXT), folder / "triton.log") as server:
        yield server


def set_queue(server, batching: str = "", *, max_batch_size: int = 1, max_sequences: int = SLOTS, **parameters: str) -> None:
    config = f"max_batch_size: {max_batch_size} dynamic_batching {{ {batching} }}"
    reconfigure(server, config, max_sequences=str(max_sequences), **ENGINE, **parameters)


def policy(**fields: object) -> str:
    return f"default_queue_policy {{ {_text(fields)} }}"


def level_policy(level: int, **fields: object) -> str:
    return f"priority_queue_policy {{ key: {level} value {{ {_text(fields)} }} }}"


def _text(fields: dict) -> str:
    return " ".join(f"{name}: {str(value).lower() if isinstance(value, bool) else value}" for name, value in fields.items())


def pending(server) -> int:
    return counted(server, 'nv_inference_pending_request_count{model="llm"')


def rejected(server) -> int:
    return counted(server, 'nv_inference_request_failure{model="llm",reason="REJECTED"')


class Queued:
    """Requests that were sent while every slot was taken. Each has a stream of its own: an error does not say whose it is."""

    def __init__(self, server) -> None:
        self.server = server
        self._sent: dict[str, tuple[Client, str]] = {}
        self._replies: dict[str, Reply] = {}

    def send(self, name: str, **options: int) -> None:
        """Returns when the request is in the queue or has been refused: arrivals have an order."""
        client, before = Client(self.server.grpc_address), pending(self.server)
        request = client.send(request_inputs(PROMPT, **SHORT), **options)
        self._sent[name] = client, request
        wait_until(lambda: pending(self.server) > before or self.has_ended(name))

    def has_ended(self, name: str) -> bool:
        client, request = self._sent[name]
        return not client.nothing_more(request)

    def replies(self) -> dict[str, Reply]:
        if not self._replies:
            self._replies = {name: client.receive(request) for name, (client, request) in self._sent.items()}
        return self._replies

    def served(self) -> list[str]:
        """Names of those that were served, the first to end first."""
        replies = self.replies()
        names = [name for name, reply in replies.items() if not reply.error]
        assert all(replies[name].last.finish_reason == "length" for name in names)
        return sorted(names, key=lambda name: self._sent[name][0].ended_at(self._sent[name][1]))

    def refused(self) -> dict[str, str]:
        return {name: reply.error for name, reply in self.replies().items() if reply.error}

    def close(self) -> None:
        for client, _ in self._sent.values():
            client.close(cancel=True)


class Slots:
    """Occupies every slot until `free`."""

    def __init__(self, server, num_slots: int) -> None:
        self._client = Client(server.grpc_address)
        requests = [self._client.send(request_inputs(f"{PROMPT} {i}", **LONG)) for i in range(num_slots)]
        for request in requests:
            self._client.next(request)
        self._is_open = True

    def free(self) -> None:
        if self._is_open:
            self._client.close(cancel=True)
            self._is_open = False


@contextmanager
def full(server, num_slots: int = SLOTS) -> Iterator[tuple[Slots, Queued]]:
    slots, queued = Slots(server, num_slots), Queued(server)
    try:
        yield slots, queued
    finally:
        slots.free()
        queued.close()
        assert_idle(server)


# ---------------------------------------------------------------------------------------------------- sizes of batches


def handed_over(server, send) -> list[float]:
    """[requests, batches] that Triton handed over while `send(client)` sent and received them."""
    before = settled_metrics(server)
    client = Client(server.grpc_address)
    send(client)
    client.close()
    after = settled_metrics(server)
    return [after[f"llm_queue_batch_size_{part}"] - before[f"llm_queue_batch_size_{part}"] for part in ("sum", "count")]


def four_at_once(client: Client) -> None:
    for request in [client.send(request_inputs(PROMPT, **SHORT)) for _ in range(4)]:
        client.receive(request)


def test_preferred_batch_size_ends_the_wait_for_a_batch(server):
    waits = "max_queue_delay_microseconds: 3000000"
    seconds = {}
    for preferred in ("", "preferred_batch_size: [ 4 ]"):
        set_queue(server, f"{waits} {preferred}", max_batch_size=8, max_sequences=8)
        started = time.monotonic()
        client = Client(server.grpc_address)
        four_at_once(client)
        seconds[preferred] = time.monotonic() - started
        client.close()
    assert seconds[""] >= 3.0 > seconds["preferred_batch_size: [ 4 ]"]


def test_max_queue_delay_gathers_what_comes_one_by_one(server):
    def one_by_one(client: Client) -> None:
        requests = []
        for _ in range(3):
            requests.append(client.send(request_inputs(PROMPT, **SHORT)))
            time.sleep(0.2)
        for request in requests:
            client.receive(request)

    set_queue(server, "max_queue_delay_microseconds: 0", max_batch_size=8, max_sequences=8)
    assert handed_over(server, one_by_one) == [3, 3]
    set_queue(server, "max_queue_delay_microseconds: 2000000", max_batch_size=8, max_sequences=8)
    assert handed_over(server, one_by_one) == [3, 1]


def test_max_batch_size_bounds_what_is_handed_over(server):
    waits = "max_queue_delay_microseconds: 1000000"
    set_queue(server, waits, max_batch_size=4, max_sequences=8)
    assert handed_over(server, four_at_once) == [4, 1]
    set_queue(server, waits, max_batch_size=2, max_sequences=8)
    assert handed_over(server, four_at_once) == [4, 2]


# ----------------------------------------------------------------------------------------------------------- priorities


def test_priority_levels_let_the_urgent_go_first(server):
    for levels, order in [
        ("priority_levels: 3 default_priority_level: 2", ["first", "second 0", "second 1", "third"]),
        ("priority_levels: 0 default_priority_level: 0", ["third", "second 0", "second 1", "first"]),
    ]:
        set_queue(server, levels, max_sequences=1)
        with full(server, 1) as (slots, queued):
            for name, priority in [("third", 3), ("second 0", 2), ("second 1", 2), ("first", 1)]:
                queued.send(name, priority=priority)
            slots.free()
            assert queued.served() == order


def test_default_priority_level_is_that_of_requests_without_one(server):
    for default, order in [(3, ["two", "plain"]), (1, ["plain", "two"])]:
        set_queue(server, f"priority_levels: 3 default_priority_level: {default}", max_sequences=1)
        with full(server, 1) as (slots, queued):
            queued.send("two" if default == 1 else "plain", priority=2 if default == 1 else 0)
            queued.send("plain" if default == 1 else "two", priority=0 if default == 1 else 2)
            slots.free()
            assert queued.served() == order


# ------------------------------------------------------------------------------------------------------------- capacity


def test_max_queue_size_refuses_exactly_what_is_over_it(server):
    for size in (4, 2):
        set_queue(server, policy(max_queue_size=size))
        with full(server) as (slots, queued):
            for i in range(size + 5):
                queued.send(f"{i}")
            assert pending(server) == size
            slots.free()
            assert list(queued.refused()) == [f"{i}" for i in range(size, size + 5)]
            assert all("Exceeds maximum queue size" in message for message in queued.refused().values())
            assert len(queued.served()) == size


def test_priority_queue_policy_gives_a_level_its_own_size(server):
    for own, refused in [("", []), (level_policy(3, max_queue_size=1), ["low 1", "low 2"])]:
        set_queue(server, f"{policy(max_queue_size=4)} {own}")
        with full(server) as (slots, queued):
            for i in range(3):
                queued.send(f"low {i}", priority=3)
                queued.send(f"middle {i}", priority=2)
            slots.free()
            assert list(queued.refused()) == refused


# ------------------------------------------------------------------------------------------------------------- timeouts


def test_default_timeout_refuses_what_waited_that_long_while_the_slots_are_still_taken(server):
    set_queue(server, policy(default_timeout_microseconds=700_000))
    before = rejected(server)
    with full(server) as (_, queued):
        started = time.monotonic()
        queued.send("waits")
        wait_until(lambda: queued.has_ended("waits"))
        assert time.monotonic() - started >= 0.7
        assert "timeout expired" in queued.refused()["waits"]
        wait_until(lambda: rejected(server) == before + 1)
    set_queue(server, policy(default_timeout_microseconds=0))
    with full(server) as (slots, queued):
        queued.send("waits")
        time.sleep(1.5)
        assert pending(server) == 1
        slots.free()
        assert queued.served() == ["waits"]


def test_allow_timeout_override_lets_a_request_bring_a_shorter_timeout(server):
    for allowed in (True, False):
        set_queue(server, policy(default_timeout_microseconds=MINUTE, allow_timeout_override=allowed))
        with full(server) as (slots, queued):
            queued.send("impatient", timeout=500_000)
            queued.send("patient")
            time.sleep(1.2)
            assert queued.has_ended("impatient") == allowed
            slots.free()
            assert list(queued.refused()) == (["impatient"] if allowed else [])


def test_a_timeout_over_the_default_or_without_one_does_not_count(server):
    set_queue(server, policy(default_timeout_microseconds=700_000, allow_timeout_override=True))
    with full(server) as (_, queued):
        queued.send("asks for longer", timeout=MINUTE)
        wait_until(lambda: queued.has_ended("asks for longer"), seconds=10)
        assert "timeout expired" in queued.refused()["asks for longer"]
    set_queue(server, policy(default_timeout_microseconds=0, allow_timeout_override=True))
    with full(server) as (slots, queued):
        queued.send("asks for any", timeout=300_000)
        time.sleep(1.0)
        slots.free()
        assert queued.served() == ["asks for any"]


def test_timeout_action_refuses_or_puts_behind_the_others(server):
    for action, served in [("REJECT", ["patient"]), ("DELAY", ["patient", "impatient"])]:
        timeouts = policy(timeout_action=action, default_timeout_microseconds=MINUTE, allow_timeout_override=True)
        set_queue(server, timeouts, max_sequences=1)
        with full(server, 1) as (slots, queued):
            queued.send("impatient", timeout=300_000)
            queued.send("patient")
            time.sleep(1.0)
            slots.free()
            assert queued.served() == served


def test_priority_queue_policy_gives_a_level_its_own_timeout(server):
    own = level_policy(3, default_timeout_microseconds=400_000)
    set_queue(server, f"{policy(default_timeout_microseconds=MINUTE)} {own}")
    with full(server) as (slots, queued):
        queued.send("low", priority=3)
        queued.send("middle", priority=2)
        wait_until(lambda: queued.has_ended("low"))
        assert not queued.has_ended("middle")
        slots.free()
        assert queued.served() == ["middle"]


# --------------------------------------------------------------------------------------- what was handed over but must wait


@pytest.mark.parametrize(("action", "num_refused"), [("REJECT", 3), ("DELAY", 0)])
def test_what_waits_inside_keeps_its_timeout_and_its_order(server, action, num_refused):
    """One slot, and a batch of four: three of them wait inside the model."""
    waits = "max_queue_delay_microseconds: 5000000 preferred_batch_size: [ 4 ]"
    timeouts = policy(timeout_action=action, default_timeout_microseconds=MINUTE, allow_timeout_override=True)
    set_queue(server, f"{waits} {timeouts}", max_batch_size=4, max_sequences=1)
    before = settled_metrics(server)
    running_one = Client(server.grpc_address)
    request = running_one.send(request_inputs(PROMPT, **LONG))
    wait_until(lambda: pending(server) == 1)  # so that it is the first of its batch
    waiting = Client(server.grpc_address)
    sent = [waiting.send(request_inputs(PROMPT, **SHORT), timeout=3_000_000) for _ in range(3)]
    running_one.next(request)
    wait_until(lambda: metrics(server)["llm_waiting_sequences"] == 3)
    assert pending(server) == 0
    time.sleep(3.5)
    # An error does not say whose it is, so all of them are found at the request that was sent last.
    refusals = [waiting.next(sent[-1]).error for _ in range(num_refused)]
    assert all(error is not None and "passed while it waited" in error.message() for error in refusals)
    assert all(map(waiting.nothing_more, sent))
    running_one.close(cancel=True)
    if not num_refused:
        for each in sent:
            assert waiting.receive(each).last.finish_reason == "length"
        assert sorted(sent, key=waiting.ended_at) == sent
    name = "llm_finished_requests:queue_timeout"
    assert settled_metrics(server)[name] - before[name] == num_refused
    waiting.close()
    assert_idle(server)


def test_mixed_requests_that_arrive_together_prefill_together(server):
    """Each brings another set of inputs, so Triton hands each over by itself. A long prompt is in front of them, in small
    steps, so that all have arrived before the first of them can start."""
    kinds = [{"temperature": 1.0}, {"top_k": 3}, {"seed": 1}, {"min_p": 0.1}, {"stop_words": ["x"]}, {"top_p": 0.5}, {}]
    set_queue(server, max_batch_size=8, max_sequences=8, max_step_tokens="64")
    before = settled_metrics(server)
    first = Client(server.grpc_address)
    long_one = first.send(request_inputs(f"{PROMPT} " * 5000, **SHORT))
    wait_until(lambda: metrics(server)["llm_running_sequences"] == 1)
    others = [first.send(request_inputs(PROMPT, **SHORT, **kind)) for kind in kinds]
    wait_until(lambda: metrics(server)["llm_waiting_sequences"] == len(kinds))
    for request in [*others, long_one]:
        assert first.receive(request).last.finish_reason == "length"
    after = settled_metrics(server)
    change = {name: value - before.get(name, 0) for name, value in after.items()}
    assert change["llm_queue_batch_size_count"] == 1 + len(kinds)
    # The long prompt has a row in each of its steps; the seven have theirs in its last one, in one of their own, or in both.
    num_rows, num_steps = (change[f"llm_prefill_batch_size_{part}"] for part in ("sum", "count"))
    assert num_rows - num_steps >= len(kinds) - 1, "the seven prompts took more than one step beyond the long one's"
    first.close()
    assert_idle(server)


def test_a_deadline_ends_a_generation_with_what_it_has(server):
    set_queue(server)
    client = Client(server.grpc_address)
    reply = client.generate(PROMPT, deadline_ms=1000, **LONG)
    assert reply.last.finish_reason == "timeout"
    assert 0 < len(reply.token_ids) < CONTEXT - 10
    client.close()
    assert_idle(server)
