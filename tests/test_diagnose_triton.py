"""`diagnose` on a real server under two kinds of traffic: the verdict must name the knob that is set wrong."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from typer.testing import CliRunner

from client.cli import app
from tests.servers import Client, assert_idle, edit_config, make_repository, reload_model, request_inputs, running

WATCH = "4"


@pytest.fixture(scope="module")
def server(shelf, tmp_path_factory):
    folder = tmp_path_factory.mktemp("diagnose")
    repository = make_repository(folder / "repository", max_sequences="4", num_threads="1", kv_cache_memory_mb="8")
    with running(repository, shelf.engine("llama", max_context=4096), folder / "triton.log") as server:
        yield server


def load(server, config: str = "", **parameters: str) -> None:
    """The model anew with another configuration in its folder, as an operator would."""
    edit_config(server.repository, config, **parameters)
    reload_model(server)


@contextmanager
def traffic(server, streams: int, max_tokens: int, pause: float = 0.0) -> Iterator[None]:
    """A closed loop of so many streams, each pausing after a request."""
    stopping = threading.Event()

    def one_stream(index: int) -> None:
        client = Client(server.grpc_address)
        number = 0
        while not stopping.is_set():
            client.receive(client.send(request_inputs(f"{index} {number} fox", max_tokens=max_tokens, ignore_eos=True)))
            number += 1
            time.sleep(pause)
        client.close()

    threads = [threading.Thread(target=one_stream, args=(index,)) for index in range(streams)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stopping.set()
        for thread in threads:
            thread.join()
        assert_idle(server)


def run(server, *arguments: str, seconds: str = WATCH) -> str:
    urls = ["--metrics-url", server.metrics_url, "--url", server.grpc_address]
    result = CliRunner().invoke(app, ["diagnose", "--seconds", seconds, *urls, *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_without_traffic_it_says_so(server):
    output = run(server, seconds="1")
    assert "No request came or ran" in output
    assert "-> " not in output


def test_a_long_queue_delay_under_light_traffic_is_the_verdict(server):
    load(server, "dynamic_batching { max_queue_delay_microseconds: 400000 preferred_batch_size: [ 8 ] }", max_sequences="4")
    with traffic(server, 2, max_tokens=4):
        report = json.loads(run(server, "--json"))
    first = report["findings"][0]
    assert first["rule"] == "queue_delay"
    assert [(move["knob"], move["direction"], move["present"]) for move in first["moves"]] == [
        ("max_queue_delay_microseconds", "lower", 400_000),
        ("preferred_batch_size", "lower", [8]),
    ]
    assert report["readings"]["queue_ms"] > 100
    assert report["readings"]["running"] < 2


def test_one_sequence_for_many_streams_is_the_verdict(server):
    load(server, "dynamic_batching { max_queue_delay_microseconds: 0 preferred_batch_size: [ 1 ] }", max_sequences="1")
    with traffic(server, 6, max_tokens=200):
        output = run(server, "--url", server.http_url)
        report = json.loads(run(server, "--json"))
    first = report["findings"][0]
    assert first["rule"] == "saturated"
    assert first["moves"] == [{"knob": "max_sequences", "direction": "raise", "present": 1, "to": 2}]
    assert report["readings"]["pending"] + report["readings"]["waiting"] >= 3
    assert "sequences running" in output
    assert output.index("The engine is full") < output.index("raise max_sequences, now 1")


def test_a_server_that_is_not_there_and_a_wrong_port_are_one_line_each(server):
    def error(*arguments: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["diagnose", "--seconds", "1", *arguments])
        return result.exit_code, result.stderr.strip()

    code, line = error("--url", "127.0.0.1:9")
    assert (code, "\n" in line) == (3, False)
    assert "127.0.0.1:9" in line
    code, line = error("--url", server.grpc_address, "--metrics-url", server.http_url)
    assert (code, "metrics port" in line, "\n" in line) == (1, True, False)
    code, line = error("--url", server.metrics_url.removesuffix("/metrics"))
    assert (code, "Triton's HTTP port?" in line, "\n" in line) == (1, True, False)
    code, line = error("--url", server.http_url, "--model", "nobody")
    assert (code, "nobody" in line, "\n" in line) == (4, True, False)
