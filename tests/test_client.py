"""The client by itself: events cut anywhere, timing by hand, one and the same set of inputs, one line for each error."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from client import wire
from client.errors import CancelledError, OverloadedError, RefusedError, UnreachableError, from_message
from client.sse import EventParser
from client.stream import run
from client.timing import Timing
from client.transport import GrpcTransport, HttpTransport
from client.wire import Chunk, GenerateRequest

BODY = 'data: {"text_output": "你好👩‍👩‍👧‍👦"}\n\n: comment\n\ndata:{"text_output": "é"}\r\n\r\ndata: {"last": 1}'.encode()
EVENTS = ['{"text_output": "你好👩‍👩‍👧‍👦"}', '{"text_output": "é"}', '{"last": 1}']


@pytest.mark.parametrize("cut", range(len(BODY) + 1))
def test_events_cut_at_any_byte(cut):
    parser = EventParser()
    assert parser.push(BODY[:cut]) + parser.push(BODY[cut:]) + parser.finish() == EVENTS


def test_events_byte_by_byte():
    parser = EventParser()
    events = [event for index in range(len(BODY)) for event in parser.push(BODY[index : index + 1])]
    assert events + parser.finish() == EVENTS


def test_timing_is_derived_from_arrivals():
    timing = Timing(sent_at=10.0)
    for now, tokens in [(10.5, 1), (10.6, 0), (11.0, 1), (13.0, 4)]:
        timing.arrived(now, tokens)
    timing.ended_at = 13.0
    assert timing.ttft == 0.5
    assert timing.itls == [0.5, 0.5, 0.5, 0.5, 0.5]
    assert timing.num_tokens == 6
    assert timing.end_to_end == 3.0
    assert timing.tokens_per_second == 2.0


def test_undefined_timings_are_none():
    timing = Timing(sent_at=1.0)
    assert (timing.ttft, timing.mean_itl, timing.end_to_end, timing.tokens_per_second) == (None, None, None, None)
    whole = Timing(sent_at=1.0, arrivals=[(2.0, 9)], ended_at=2.0, streamed=False)
    assert (whole.ttft, whole.tokens_per_second) == (None, 9.0)


def test_every_request_has_the_same_set_of_inputs():
    plain = wire.to_grpc(GenerateRequest("a"))
    full = wire.to_grpc(
        GenerateRequest("a", 5, False, ("x", "y"), "salt", {"temperature": 0.5, "seed": 2**64 - 1}, priority=1, deadline_ms=9)
    )
    assert [tensor.name() for tensor in plain] == [tensor.name() for tensor in full]
    assert {tuple(tensor.shape()) for tensor in plain} == {(1, 1)}
    assert json.loads(wire.sampling_json(GenerateRequest("a", sampling={"seed": 1}, deadline_ms=9))) == {
        "seed": 1,
        "deadline_ms": 9,
    }


def test_http_bodies_carry_queue_parameters_only_when_given():
    assert not {"priority", "timeout"} & set(wire.to_http(GenerateRequest("a")))
    body = wire.to_http(GenerateRequest("a", priority=2, timeout_ms=3))
    assert (body["priority"], body["timeout"]) == (2, 3000)


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("Exceeds maximum queue size", OverloadedError),
        ("Request timeout expired", OverloadedError),
        ("the request's timeout passed while it waited to start", OverloadedError),
        ("the request was cancelled", CancelledError),
        ("top_k: got -1; allowed: ...", RefusedError),
    ],
)
def test_messages_tell_their_kind(message, kind):
    assert type(from_message(message)) is kind


def generate_over(handler, request: GenerateRequest) -> list[Chunk]:
    async def collect() -> list[Chunk]:
        transport = HttpTransport("http://test", client=httpx.AsyncClient(transport=httpx.MockTransport(handler)))
        try:
            return (await run(transport, request)).chunks
        finally:
            await transport.close()

    return asyncio.run(collect())


def test_http_stream_and_whole():
    events = [
        {"text_output": "a", "num_output_tokens": 1},
        {"text_output": "b", "num_output_tokens": 2, "finish_reason": "stop"},
    ]

    def handler(request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/generate_stream"):
            return httpx.Response(200, content="".join(f"data: {json.dumps(event)}\n\n" for event in events))
        return httpx.Response(200, json=events[1] | {"num_input_tokens": 7, "num_cached_tokens": 4})

    assert generate_over(handler, GenerateRequest("p")) == [Chunk("a", 1), Chunk("b", 2, "stop")]
    assert generate_over(handler, GenerateRequest("p", stream=False)) == [Chunk("b", 2, "stop", 7, 4)]


@pytest.mark.parametrize(
    ("status", "content", "kind", "message"),
    [
        (400, '{"error": "top_k: got -1"}', RefusedError, "top_k: got -1"),
        (400, 'data: {"error": "top_k: got -1"}\n\n', RefusedError, "top_k: got -1"),
        (404, '{"error": "unknown model"}', RefusedError, "unknown model"),
        (503, '{"error": "Exceeds maximum queue size"}', OverloadedError, "Exceeds"),
        (500, "<html>", RefusedError, "HTTP status 500: <html>"),
        (200, 'data: {"error": "the request was cancelled"}\n\n', CancelledError, "cancelled"),
    ],
)
def test_http_errors_are_one_line_each(status, content, kind, message):
    with pytest.raises(kind, match=message) as raised:
        generate_over(lambda request: httpx.Response(status, content=content), GenerateRequest("p"))
    assert "\n" not in str(raised.value)


def test_nothing_at_the_address():
    async def grpc() -> None:
        transport = GrpcTransport("127.0.0.1:1")
        try:
            await run(transport, GenerateRequest("p"))
        finally:
            await transport.close()

    async def http() -> None:
        transport = HttpTransport("http://127.0.0.1:1")
        try:
            await run(transport, GenerateRequest("p"))
        finally:
            await transport.close()

    for protocol in (grpc, http):
        with pytest.raises(UnreachableError, match=r"127\.0\.0\.1:1: ") as raised:
            asyncio.run(protocol())
        assert "\n" not in str(raised.value)


def test_a_request_given_up_closes_its_stream():
    closed = []

    class Endless:
        async def generate(self, request):
            try:
                while True:
                    yield Chunk("x", 1)
                    await asyncio.sleep(0)
            finally:
                closed.append(True)

    async def give_up() -> None:
        task = asyncio.create_task(run(Endless(), GenerateRequest("p")))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(give_up())
    assert closed == [True]
