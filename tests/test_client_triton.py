"""The client on a real Triton, before a model of a few lines that says what it is told to: every answer is known."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from client.errors import ClientError, OverloadedError, RefusedError, ServerError
from client.stream import run
from client.transport import GrpcTransport, HttpTransport, Transport
from client.wire import Chunk, GenerateRequest
from tests.servers import TritonServer, repository_api

DEADLINE_SECONDS = 60.0
CONFIG = """
backend: "python"
max_batch_size: 1
dynamic_batching { default_queue_policy { max_queue_size: %d } }
model_transaction_policy { decoupled: true }
input [
  { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] },
  { name: "max_tokens" data_type: TYPE_INT32 dims: [ 1 ] },
  { name: "stream" data_type: TYPE_BOOL dims: [ 1 ] },
  { name: "stop_words" data_type: TYPE_STRING dims: [ -1 ] allow_ragged_batch: true },
  { name: "cache_salt" data_type: TYPE_STRING dims: [ 1 ] },
  { name: "sampling_parameters" data_type: TYPE_STRING dims: [ 1 ] }
]
output [
  { name: "text_output" data_type: TYPE_STRING dims: [ 1 ] },
  { name: "finish_reason" data_type: TYPE_STRING dims: [ 1 ] },
  { name: "num_input_tokens" data_type: TYPE_INT32 dims: [ 1 ] },
  { name: "num_output_tokens" data_type: TYPE_INT32 dims: [ 1 ] },
  { name: "num_cached_tokens" data_type: TYPE_INT32 dims: [ 1 ] }
]
"""
# The prompt is a JSON list of steps.
MODEL = """
import json
import threading
import time
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils


def tensor(name, value):
    kind = np.object_ if isinstance(value, str) else np.int32
    return pb_utils.Tensor(name, np.array([value.encode() if kind is np.object_ else value], kind))


def response(text, count, reason=""):
    outputs = [tensor("text_output", text), tensor("num_output_tokens", count)]
    if reason:
        outputs += [tensor("finish_reason", reason), tensor("num_input_tokens", 7), tensor("num_cached_tokens", 4)]
    return pb_utils.InferenceResponse(outputs)


def play(sender, steps):
    for step, value in steps:
        if step == "say":
            sender.send(response(*value))
        elif step == "end":
            sender.send(response(*value), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        elif step == "fail":
            error = pb_utils.TritonError(value[1], getattr(pb_utils.TritonError, value[0]))
            final = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
            sender.send(pb_utils.InferenceResponse(error=error), flags=final)
        elif step == "talk_until_cancelled":
            while not sender.is_cancelled():
                sender.send(response("x", 1))
                time.sleep(0.01)
            Path(value).touch()
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            text = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy().item()
            steps = json.loads(text.decode())
            if steps[0][0] == "hold_the_queue":
                while not Path(steps[0][1]).exists():
                    time.sleep(0.01)
            threading.Thread(target=play, args=(request.get_response_sender(), steps)).start()
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[TritonServer]:
    folder = tmp_path_factory.mktemp("scripted")
    for name, max_queue_size in [("llm", 0), ("llm_short_queue", 1)]:  # 0: no limit
        version = folder / "repository" / name / "1"
        version.mkdir(parents=True)
        (version.parent / "config.pbtxt").write_text(CONFIG % max_queue_size)
        (version / "model.py").write_text(MODEL)
    with TritonServer.on_free_ports(folder / "repository", folder / "triton.log", exit_seconds=3) as server:
        yield server


Use = Callable[[Transport], Awaitable[Any]]
With = Callable[..., Any]


@pytest.fixture(params=["grpc", "http"])
def with_transport(request, server) -> With:
    """Runs a coroutine function on a transport of either protocol."""

    def with_transport(use: Use, model: str = "llm") -> Any:
        async def main() -> Any:
            transport: Transport = (
                GrpcTransport(server.grpc_address, model) if request.param == "grpc" else HttpTransport(server.http_url, model)
            )
            try:
                return await asyncio.wait_for(use(transport), DEADLINE_SECONDS)
            finally:
                await transport.close()

        return asyncio.run(main())

    return with_transport


def script(*steps: tuple[str, Any], **fields: Any) -> GenerateRequest:
    return GenerateRequest(json.dumps(steps), **fields)


ANSWER = script(("say", ["你", 1]), ("say", ["", 0]), ("say", ["好", 3]), ("end", [" \n👩‍👩‍👧‍👦", 1, "stop"]))


def test_chunks_counts_and_text_are_what_the_model_said(with_transport):
    generation = with_transport(lambda transport: run(transport, ANSWER))
    assert generation.chunks == [Chunk("你", 1), Chunk("", 0), Chunk("好", 3), Chunk(" \n👩‍👩‍👧‍👦", 1, "stop", 7, 4)]
    assert generation.text == "你好 \n👩‍👩‍👧‍👦"
    assert (generation.finish_reason, generation.num_input_tokens, generation.num_cached_tokens) == ("stop", 7, 4)
    timing = generation.timing
    assert [tokens for _, tokens in timing.arrivals] == [1, 3, 1]
    assert (timing.num_tokens, len(timing.itls)) == (5, 4)
    assert timing.sent_at <= timing.arrivals[0][0] <= timing.arrivals[-1][0] <= timing.ended_at


def test_a_whole_answer_has_no_token_times(with_transport):
    generation = with_transport(lambda transport: run(transport, script(("end", ["all", 3, "length"]), stream=False)))
    assert generation.chunks == [Chunk("all", 3, "length", 7, 4)]
    assert (generation.timing.ttft, generation.timing.mean_itl) == (None, None)


def test_many_streams_share_one_transport(with_transport):
    async def use(transport):
        requests = [script(("say", [f"{index}", 1]), ("end", ["!", 1, "stop"])) for index in range(64)]
        return await asyncio.gather(*(run(transport, request) for request in requests))

    assert [generation.text for generation in with_transport(use)] == [f"{index}!" for index in range(64)]


@pytest.mark.parametrize(
    ("code", "message", "kind"),
    [
        ("INVALID_ARG", "top_k: got -1", RefusedError),
        ("UNAVAILABLE", "the request's timeout passed while it waited", OverloadedError),
        ("INTERNAL", "the engine failed: the device\nis lost", ServerError),
    ],
)
def test_a_models_error_in_place_of_an_answer_tells_its_kind(with_transport, code, message, kind):
    with pytest.raises(ClientError) as raised:
        with_transport(lambda transport: run(transport, script(("fail", [code, message]))))
    assert str(raised.value) == " ".join(message.split())
    assert type(raised.value) is kind


def test_an_error_after_a_chunk_keeps_the_chunk_and_is_raised(with_transport):
    shown: list[str] = []
    request = script(("say", ["a", 1]), ("fail", ["INVALID_ARG", "stop_words: got 99 words"]))
    with pytest.raises(RefusedError, match=r"^stop_words: got 99 words$"):
        with_transport(lambda transport: run(transport, request, lambda chunk: shown.append(chunk.text)))
    assert shown == ["a"]


def test_an_answer_without_a_last_response_is_an_error(with_transport, tmp_path):
    with pytest.raises(ServerError, match="ended after 2 tokens"):
        with_transport(lambda transport: run(transport, script(("say", ["a", 2]), ("end", ["", 0, ""]))))


def test_leaving_cancels_the_request_in_the_model(with_transport, tmp_path):
    noticed = tmp_path / "noticed"

    async def use(transport):
        first = asyncio.Event()
        request = script(("talk_until_cancelled", str(noticed)))
        task = asyncio.create_task(run(transport, request, lambda chunk: first.set()))
        await first.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with_transport(use)
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not noticed.exists():
        assert time.monotonic() < deadline, "the model was not told"
        time.sleep(0.01)


def test_a_full_queue_refuses_and_what_it_took_is_served(with_transport, tmp_path):
    gate = tmp_path / "gate"

    async def use(transport):
        request = script(("hold_the_queue", str(gate)), ("end", ["served", 1, "stop"]))
        tasks = [asyncio.create_task(run(transport, request)) for _ in range(8)]
        refused, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        gate.touch()
        return [type(task.exception()) for task in refused], await asyncio.gather(*tasks, return_exceptions=True)

    try:
        first, results = with_transport(use, "llm_short_queue")
    finally:
        gate.touch()  # nobody else would let the server go
    assert set(first) == {OverloadedError}
    assert {getattr(result, "text", "") for result in results if not isinstance(result, OverloadedError)} == {"served"}
    refused = [str(result) for result in results if isinstance(result, OverloadedError)]
    assert all("queue size" in message and "\n" not in message for message in refused)


def test_an_unknown_model_is_refused_by_name(with_transport):
    with pytest.raises(RefusedError, match="nobody") as raised:
        with_transport(lambda transport: run(transport, ANSWER), "nobody")
    assert "\n" not in str(raised.value)


def test_a_model_that_is_not_loaded_is_refused(server, with_transport):
    repository_api(server, "models/llm/unload")
    try:
        with pytest.raises(RefusedError, match="llm") as raised:
            with_transport(lambda transport: run(transport, ANSWER))
        assert "\n" not in str(raised.value)
    finally:
        repository_api(server, "models/llm/load")
    assert with_transport(lambda transport: run(transport, ANSWER)).finish_reason == "stop"
