"""The client by itself: events cut anywhere, timing by hand, one and the same set of inputs, one line for each error."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc
from typer.testing import CliRunner

from client import cli, wire
from client.errors import (
    CancelledError,
    ClientError,
    OverloadedError,
    RefusedError,
    ServerError,
    UnreachableError,
    from_message,
)
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
        ("the engine failed: out of memory", ServerError),
        ("Failed to process the request, message: Stub process 'llm_0' is not healthy.", ServerError),
    ],
)
def test_messages_tell_their_kind(message, kind):
    assert type(from_message(message)) is kind


def test_a_message_becomes_one_line_without_the_request_id():
    assert str(from_message("[request id: <id_unknown>] Failed,\n  message: [1] \r\n bad\n")) == "Failed, message: [1] bad"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": 2**31}, "max_tokens"),
        ({"max_tokens": -(2**32) + 1}, "max_tokens"),
        ({"timeout_ms": -1}, "timeout_ms"),
        ({"prompt": "\udcff"}, "prompt"),
        ({"stop": ("a", "\ud800")}, "stop"),
        ({"cache_salt": "\udcff"}, "cache_salt"),
    ],
)
def test_what_no_tensor_can_hold_is_refused_before_it_is_sent(fields, named):
    with pytest.raises(RefusedError, match=named):
        GenerateRequest(**({"prompt": "a"} | fields))


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


def test_a_whole_answer_that_is_no_answer():
    with pytest.raises(ServerError, match="not a JSON object"):
        generate_over(lambda request: httpx.Response(200, content="<html>"), GenerateRequest("p", stream=False))
    error = {"error": "expected a single response, use generate stream"}
    with pytest.raises(RefusedError, match="generate stream"):
        generate_over(lambda request: httpx.Response(200, json=error), GenerateRequest("p", stream=False))


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        (httpx.ConnectTimeout(""), "http://test: ConnectTimeout"),
        (httpx.RemoteProtocolError("peer closed\nconnection"), "http://test: peer closed connection"),
        (httpx.InvalidURL("Invalid port"), "http://test: Invalid port"),
    ],
)
def test_a_connection_that_fails_is_one_line(failure, message):
    def handler(request: httpx.Request) -> httpx.Response:
        raise failure

    with pytest.raises(UnreachableError) as raised:
        generate_over(handler, GenerateRequest("p"))
    assert str(raised.value) == message


@pytest.mark.parametrize(
    ("status", "content", "kind", "message"),
    [
        (400, '{"error": "top_k: got -1"}', RefusedError, "top_k: got -1"),
        (400, 'data: {"error": "top_k: got -1"}\n\n', RefusedError, "top_k: got -1"),
        (404, '{"error": "unknown model"}', RefusedError, "unknown model"),
        (503, '{"error": "Exceeds maximum queue size"}', OverloadedError, "Exceeds"),
        (500, "<html>\n<body>", ServerError, "HTTP status 500: <html> <body>"),
        (500, '{"error": "device\\n lost"}', ServerError, "device lost"),
        (499, '{"error": "gone"}', CancelledError, "gone"),
        (504, "", OverloadedError, "HTTP status 504"),
        (200, "", ServerError, "ended after 0 tokens"),
        (200, 'data: {"text_output": "a", "num_output_tokens": 3}\n\n', ServerError, "ended after 3 tokens"),
        (200, 'data: {"text_output": "a', ServerError, "not a JSON object"),
        (200, "data: [1]\n\n", ServerError, "not a JSON object"),
        (200, b"data: \xff\n\n", ServerError, "not UTF-8"),
        (200, b"data: \xe4", ServerError, "not UTF-8"),
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


class FakeModel(service_pb2_grpc.GRPCInferenceServiceServicer):
    """A gRPC server whose one model answers each request with `answer`; it remembers the requests and who went away."""

    def __init__(self, answer: Callable[[Any], AsyncIterator[Any]]) -> None:
        self.requests: list[Any] = []
        self.gone = asyncio.Event()
        self.address = ""
        self._answer = answer

    async def ModelStreamInfer(self, request_iterator, context):  # noqa: N802
        try:
            async for request in request_iterator:
                self.requests.append(request)
                async for response in self._answer(context):
                    yield response
        except asyncio.CancelledError:
            self.gone.set()
            raise


def response(text: str, tokens: int, reason: str = "") -> Any:
    """What Triton sends for one response of `llm`."""
    message = service_pb2.ModelStreamInferResponse()
    outputs: dict[str, bytes] = {"text_output": _packed(text), "num_output_tokens": np.int32(tokens).tobytes()}
    if reason:
        outputs |= {"finish_reason": _packed(reason), "num_input_tokens": np.int32(7).tobytes()}
    for name, raw in outputs.items():
        message.infer_response.outputs.add(name=name, datatype="INT32" if name.startswith("num") else "BYTES", shape=[1])
        message.infer_response.raw_output_contents.append(raw)
    return message


def _packed(text: str) -> bytes:
    return np.uint32(len(text.encode())).tobytes() + text.encode()


@asynccontextmanager
async def serving(answer: Callable[[Any], AsyncIterator[Any]]) -> AsyncIterator[FakeModel]:
    server, model = grpc.aio.server(), FakeModel(answer)
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(model, server)
    model.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield model
    finally:
        await server.stop(0)


def with_model(answer: Callable[[Any], AsyncIterator[Any]], use: Callable[[FakeModel, GrpcTransport], Awaitable[Any]]) -> Any:
    """What `use` returns, given a model that answers so and a transport to it."""

    async def main() -> Any:
        async with serving(answer) as model:
            transport = GrpcTransport(model.address)
            try:
                return await use(model, transport)
            finally:
                await transport.close()

    return asyncio.run(main())


async def two_responses(context) -> AsyncIterator[Any]:
    yield response("é", 1)
    yield response("b", 2, "stop")


async def endless(context) -> AsyncIterator[Any]:
    while True:
        yield response("x", 1)
        await asyncio.sleep(0.01)


def test_grpc_stream():
    async def use(model, transport):
        generation = await run(transport, GenerateRequest("p", priority=1, timeout_ms=3))
        (sent,) = model.requests
        assert sent.parameters["priority"].uint64_param == 1
        assert sent.parameters["timeout"].int64_param == 3000
        return generation

    generation = with_model(two_responses, use)
    assert generation.chunks == [Chunk("é", 1), Chunk("b", 2, "stop", 7)]
    assert (generation.text, generation.finish_reason, generation.num_input_tokens) == ("éb", "stop", 7)


def test_hundreds_of_grpc_streams_at_a_time():
    everyone = asyncio.Barrier(300) if hasattr(asyncio, "Barrier") else None  # Python 3.10 has none

    async def together(context) -> AsyncIterator[Any]:
        yield response("a", 1)
        if everyone:
            await everyone.wait()
        yield response("b", 1, "stop")

    async def use(model, transport):
        return await asyncio.gather(*(run(transport, GenerateRequest(str(i))) for i in range(300)))

    assert {generation.text for generation in with_model(together, use)} == {"ab"}


@pytest.mark.parametrize(
    ("code", "details", "kind"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, "top_k: got -1", RefusedError),
        (grpc.StatusCode.UNAVAILABLE, "Exceeds maximum queue size", OverloadedError),
        (grpc.StatusCode.UNAVAILABLE, "going away", UnreachableError),
        (grpc.StatusCode.CANCELLED, "the request was cancelled", CancelledError),
        (grpc.StatusCode.INTERNAL, "device\nlost", ServerError),
        (grpc.StatusCode.UNIMPLEMENTED, "", RefusedError),
    ],
)
def test_grpc_statuses_tell_their_kind(code, details, kind):
    async def answer(context) -> AsyncIterator[Any]:
        yield response("a", 1)
        await context.abort(code, details)

    with pytest.raises(ClientError) as raised:
        with_model(answer, lambda model, transport: run(transport, GenerateRequest("p")))
    assert type(raised.value) is kind
    assert " ".join(details.split()) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_grpc_error_messages_and_answers_that_stop_short():
    async def message(context) -> AsyncIterator[Any]:
        yield service_pb2.ModelStreamInferResponse(error_message="[request id: <id_unknown>] Exceeds maximum queue size")

    async def short(context) -> AsyncIterator[Any]:
        yield response("a", 2)

    with pytest.raises(OverloadedError, match=r"^Exceeds"):
        with_model(message, lambda model, transport: run(transport, GenerateRequest("p")))
    with pytest.raises(ServerError, match="ended after 2 tokens"):
        with_model(short, lambda model, transport: run(transport, GenerateRequest("p")))


def test_a_grpc_request_given_up_is_cancelled_on_the_server():
    async def use(model, transport):
        first = asyncio.Event()
        task = asyncio.create_task(run(transport, GenerateRequest("p"), lambda chunk: first.set()))
        await first.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await model.gone.wait()

    with_model(endless, use)


def test_an_http_request_given_up_closes_its_connection():
    async def main() -> None:
        gone, first = asyncio.Event(), asyncio.Event()

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b'HTTP/1.1 200 OK\r\n\r\ndata: {"text_output": "a", "num_output_tokens": 1}\n\n')
            while await reader.read(1000):  # the rest of the request, then nothing until the client closes
                pass
            writer.close()
            await writer.wait_closed()
            gone.set()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        transport = HttpTransport(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        task = asyncio.create_task(run(transport, GenerateRequest("p"), lambda chunk: first.set()))
        await first.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await gone.wait()
        await transport.close()
        server.close()
        await server.wait_closed()

    asyncio.run(main())


class Scripted:
    """A transport of the command line's: it remembers the request and gives these chunks, then raises `error` if given."""

    def __init__(self, *chunks: Chunk, error: Exception | None = None) -> None:
        self.requests: list[GenerateRequest] = []
        self._chunks = chunks
        self._error = error

    async def generate(self, request):
        self.requests.append(request)
        for chunk in self._chunks:
            yield chunk
        if self._error:
            raise self._error

    async def close(self) -> None:
        pass


def invoke(monkeypatch, transport: Scripted, *arguments: str, stdin: str | None = None) -> Any:
    monkeypatch.setattr(cli, "open_transport", lambda protocol, url, model: transport)
    return CliRunner().invoke(cli.app, ["generate", *arguments], input=stdin)


DONE = (Chunk("Hello", 1), Chunk(" you", 2, "stop", 7, 4, 0, 0))


def test_command_line_shows_text_then_one_line(monkeypatch):
    result = invoke(monkeypatch, Scripted(*DONE), "p")
    assert result.exit_code == 0
    text, empty, line = result.stdout.splitlines()
    assert (text, empty) == ("Hello you", "")
    assert line.startswith("7 tokens in (4 cached), 3 out | TTFT ")
    assert line.endswith("tokens/s | finished: stop")


def test_command_line_says_what_speculation_saved(monkeypatch):
    guessed = (Chunk("Hello", 1), Chunk(" you", 2, "stop", 7, 4, 5, 2))
    assert "3 out | 2 of 5 guesses right | TTFT" in invoke(monkeypatch, Scripted(*guessed), "p").stdout


def test_command_line_prints_one_json_object(monkeypatch):
    result = invoke(monkeypatch, Scripted(*DONE), "p", "--json")
    values = json.loads(result.stdout)
    assert (values["text"], values["num_output_tokens"], values["num_cached_tokens"]) == ("Hello you", 3, 4)
    assert None not in values.values()
    undefined = json.loads(invoke(monkeypatch, Scripted(*DONE), "p", "--json", "--no-stream").stdout)
    assert undefined["ttft_ms"] is None


def test_command_line_options_reach_the_request(monkeypatch):
    transport = Scripted(*DONE)
    options = "--max-tokens 5 --temperature 0.5 --top-k 3 --top-p 0.9 --seed 7 --stop a --stop b --cache-salt s --priority 1"
    assert invoke(monkeypatch, transport, "-", *options.split(), "--timeout-ms", "9", "--no-stream", stdin="in").exit_code == 0
    sampling = {"temperature": 0.5, "top_k": 3, "top_p": 0.9, "seed": 7}
    assert transport.requests == [GenerateRequest("in", 5, False, ("a", "b"), "s", sampling, 1, 9)]


@pytest.mark.parametrize(
    ("error", "code", "start"),
    [
        (ServerError("m"), 1, "error: m"),
        (UnreachableError("m"), 3, "error: m"),
        (RefusedError("m"), 4, "error: m"),
        (OverloadedError("m"), 5, "error: m"),
        (CancelledError("m"), 6, "cancelled: m"),
        (KeyboardInterrupt(), 130, "interrupted: "),
    ],
)
def test_command_line_gives_one_line_and_an_exit_code_for_each_error(monkeypatch, error, code, start):
    result = invoke(monkeypatch, Scripted(error=error), "p")
    assert result.exit_code == code
    assert result.stderr.startswith(start)
    assert result.stderr.count("\n") == 1
    assert invoke(monkeypatch, Scripted(), "p", "--max-tokens", str(2**31)).exit_code == 4
    assert str(code) in CliRunner().invoke(cli.app, ["generate", "--help"]).stdout


def test_ctrl_c_cancels_the_request_on_the_server():
    async def use(model, transport):
        command = [sys.executable, "-m", "client", "generate", "p", "--url", model.address]
        pipes: dict[str, Any] = {"stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.PIPE}
        process = await asyncio.create_subprocess_exec(*command, cwd=Path(__file__).parents[1], **pipes)
        assert await process.stdout.readexactly(1) == b"x"
        process.send_signal(signal.SIGINT)
        _, errors = await process.communicate()
        await model.gone.wait()
        return process.returncode, errors.decode()

    code, errors = with_model(endless, use)
    assert code == 130
    assert errors == "interrupted: the request was cancelled\n"
