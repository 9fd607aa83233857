"""What happens when things go wrong: a process killed, a model unloaded under load, an engine that cannot be loaded."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.servers import (
    ROOT,
    Client,
    ServerError,
    TritonServer,
    assert_idle,
    edit_config,
    free_ports,
    make_repository,
    repository_api,
    request_inputs,
    running,
)

PROMPT = "The quick brown fox"


@pytest.fixture(scope="module")
def server(shelf, tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults")
    repository = make_repository(folder / "repository", max_sequences="4", num_threads="1", kv_cache_memory_mb="8")
    with running(repository, shelf.engine("llama"), folder / "triton.log") as server:
        yield server


def state(server: TritonServer, model: str) -> str:
    return next(entry.get("state", "") for entry in json.loads(repository_api(server, "index")) if entry["name"] == model)


def wait_for_state(server: TritonServer, model: str, wanted: tuple[str, ...]) -> None:
    deadline = time.monotonic() + 60
    while state(server, model) not in wanted:
        assert time.monotonic() < deadline, f"{model} is {state(server, model)}"
        time.sleep(0.05)


def stub_pid(model: str, repository: Path) -> int:
    """The process that runs a model's Python."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().decode(errors="replace")
        except OSError:  # it has just ended
            continue
        if f"{repository}/{model}/1/model.py" in command:
            return int(process.name)
    raise AssertionError(f"no process of {model}")


def generate(server: TritonServer, **fields) -> list[int]:
    client = Client(server.grpc_address)
    reply = client.generate(PROMPT, ignore_eos=True, **fields)
    client.close()
    assert not reply.error, reply.error
    return reply.token_ids


def test_unload_during_a_stream_lets_it_end_and_a_load_serves_again(server):
    expected = generate(server, max_tokens=5)
    client = Client(server.grpc_address)
    request = client.send(request_inputs(PROMPT, max_tokens=300, ignore_eos=True))
    client.next(request)
    repository_api(server, "models/llm/unload")
    assert client.receive(request).last.finish_reason == "length"
    client.close()
    wait_for_state(server, "llm", ("UNAVAILABLE", ""))
    repository_api(server, "models/llm/load")
    assert generate(server, max_tokens=5) == expected
    assert_idle(server)


def wait_until_served(server: TritonServer) -> None:
    deadline = time.monotonic() + 60
    while True:
        assert time.monotonic() < deadline, "the server is not ready"
        if server.is_ready():
            client = Client(server.grpc_address)
            reply = client.generate(PROMPT, max_tokens=1)
            client.close()
            if not reply.error:
                return
        time.sleep(0.1)


def test_a_killed_process_fails_what_runs_and_the_next_request_is_served(shelf, tmp_path):
    ports = free_ports(3)
    options = [f"--{name}-port={port}" for name, port in zip(("http", "grpc", "metrics"), ports, strict=True)]
    repository = make_repository(tmp_path / "repository", kv_cache_memory_mb="8", num_threads="1")
    options += [f"--engine={shelf.engine('llama')}", f"--model-repository={repository}", f"--log={tmp_path / 'log'}"]
    serve = subprocess.Popen([sys.executable, "scripts/serve.py", *options], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        server = TritonServer(repository, *ports, log=tmp_path / "log")
        wait_until_served(server)
        expected = generate(server, max_tokens=5)
        client = Client(server.grpc_address)
        request = client.send(request_inputs(PROMPT, max_tokens=900, ignore_eos=True))
        client.next(request)
        os.kill(stub_pid("llm", repository), signal.SIGKILL)
        assert client.receive(request).last.error is not None
        client.close()
        wait_until_served(server)
        assert generate(server, max_tokens=5) == expected
    finally:
        serve.terminate()
        shown = serve.communicate(timeout=60)[0]
    assert serve.returncode == 0
    # Triton itself may crash over the dead process before that is noticed; either way it must be started again.
    assert "starting the server again" in shown


def test_a_failing_step_ends_what_runs_with_its_message_and_the_next_request_is_served(shelf, tmp_path):
    repository = make_repository(tmp_path / "repository", kv_cache_memory_mb="8", num_threads="1")
    executor = repository / "llm" / "1" / "llm_runtime" / "executors" / "ort.py"
    head = "    def execute(self, rows: Sequence[Row]) -> NDArray[np.float32]:\n"
    trap = "        if any(13 in list(row.token_ids) for row in rows):\n            raise EngineError('unlucky token')\n"
    source = executor.read_text()
    assert head in source
    executor.write_text(source.replace(head, head + trap))
    with running(repository, shelf.engine("llama"), tmp_path / "log") as server:
        expected = generate(server, max_tokens=5)
        client, other = Client(server.grpc_address), Client(server.grpc_address)
        request = client.send(request_inputs(PROMPT, max_tokens=400, ignore_eos=True))
        client.next(request)
        assert other.generate([13], max_tokens=3).error.endswith("the engine failed: unlucky token")
        assert client.receive(request).error.endswith("the engine failed: unlucky token")
        other.close()
        client.close()
        assert generate(server, max_tokens=5) == expected
        assert_idle(server)


def load_failure(tmp_path: Path, engine: Path, **parameters: str) -> str:
    repository = make_repository(tmp_path / "repository", **parameters)
    with pytest.raises(ServerError) as error, running(repository, engine, tmp_path / "log"):
        pass
    return str(error.value)


def test_a_bad_parameter_fails_the_load_with_its_name(shelf, tmp_path):
    message = load_failure(tmp_path, shelf.engine("llama"), max_sequence="3")
    assert "unknown parameter 'max_sequence'; did you mean 'max_sequences'?" in message
    assert len(message.splitlines()) <= 5


def test_a_damaged_engine_fails_the_load_with_the_file(shelf, tmp_path):
    engine = tmp_path / "engine"
    shutil.copytree(shelf.engine("llama"), engine)
    with (engine / "weights.bin").open("r+b") as file:
        file.write(b"\xff\xff\xff\xff")
    assert "weights.bin is damaged" in load_failure(tmp_path, engine)


def test_a_pool_too_small_for_the_context_fails_the_load_with_the_knobs(shelf, tmp_path):
    engine = shelf.engine("llama", max_context=30_000)
    message = load_failure(tmp_path, engine, kv_cache_memory_mb="1", max_context="30000")
    assert "does not fit the KV cache" in message
    assert "kv_cache_memory_mb" in message


def test_a_reload_takes_up_an_edited_config(shelf, tmp_path):
    repository = make_repository(tmp_path / "repository", default_max_tokens="3", kv_cache_memory_mb="8", num_threads="1")
    with running(repository, shelf.engine("llama"), tmp_path / "log") as server:
        assert len(generate(server)) == 3
        edit_config(repository, default_max_tokens="6")
        repository_api(server, "models/llm/load")
        assert len(generate(server)) == 6
