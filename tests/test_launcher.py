"""The launcher on a real Triton with models of a few lines: it starts, says why it cannot, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from tests.servers import ROOT, TritonServer
from triton_server import SHARED_MEMORY, ServerError, failure_reasons, find_installation, free_ports

CONFIG = """
backend: "python"
max_batch_size: 0
model_transaction_policy { decoupled: true }
input [ { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "text_output" data_type: TYPE_STRING dims: [ 1 ] } ]
"""
ECHO = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        %s

    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            text = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy()
            for _ in range(2):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("text_output", text)]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


def make_repository(folder: Path, initialize: str = "pass") -> Path:
    (folder / "echo" / "1").mkdir(parents=True)
    (folder / "echo" / "config.pbtxt").write_text(CONFIG)
    (folder / "echo" / "1" / "model.py").write_text(ECHO % initialize)
    return folder


def processes_of_session(session: int) -> list[str]:
    """Those that run; a server's process leads a session of its own, so its id is the session's."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = stat.read_text().partition(" (")[2].rpartition(") ")
        except OSError:  # it ended meanwhile
            continue
        state, _parent, _group, its_session, *_ = rest.split()
        if int(its_session) == session and state != "Z":
            found.append(name)
    return found


def regions(prefix: str) -> list[Path]:
    return list(SHARED_MEMORY.glob(f"{prefix}*"))


def stream(url: str, text: str) -> list[str]:
    request = urllib.request.Request(f"{url}/v2/models/echo/generate_stream", json.dumps({"text_input": text}).encode())
    with urllib.request.urlopen(request, timeout=30) as response:
        lines = response.read().decode().splitlines()
    return [json.loads(line.removeprefix("data: "))["text_output"] for line in lines if line]


def test_it_answers_and_leaves_neither_process_nor_shared_memory(tmp_path):
    server = TritonServer.on_free_ports(make_repository(tmp_path / "repository"), tmp_path / "triton.log")
    with server:
        session = server.pid
        assert stream(server.http_url, "grüezi") == ["grüezi", "grüezi"]
        assert len(processes_of_session(session)) >= 2  # the server and the model's stub
        assert regions(server.shared_memory_prefix)
    assert processes_of_session(session) == []
    assert regions(server.shared_memory_prefix) == []
    assert not server.is_ready()


def test_a_server_that_was_killed_leaves_nothing_either(tmp_path):
    server = TritonServer.on_free_ports(make_repository(tmp_path / "repository"), tmp_path / "triton.log")
    with server:
        session = server.pid
        os.kill(session, signal.SIGKILL)
    assert processes_of_session(session) == []
    assert regions(server.shared_memory_prefix) == []


def test_a_model_that_fails_to_load_gives_its_reason_in_one_short_message(tmp_path):
    repository = make_repository(tmp_path / "repository", 'raise ValueError("engine is for another planet")')
    server = TritonServer.on_free_ports(repository, tmp_path / "triton.log")
    with pytest.raises(ServerError) as caught:
        server.__enter__()
    message = str(caught.value)
    assert message.count("engine is for another planet") == 1
    assert str(tmp_path / "triton.log") in message
    assert len(message.splitlines()) <= 3
    assert "+---" not in message
    assert "Traceback" not in message
    assert regions(server.shared_memory_prefix) == []


def test_a_busy_port_is_named_with_the_variable_that_changes_it(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        http, metrics = free_ports(2)
        server = TritonServer(tmp_path, http, port, metrics, log=tmp_path / "triton.log")
        with pytest.raises(ServerError, match=rf"port {port} .*another GRPC_PORT"):
            server.start()


def test_one_port_for_two_uses_is_named(tmp_path):
    http, metrics = free_ports(2)
    server = TritonServer(tmp_path, http, http, metrics, log=tmp_path / "triton.log")
    with pytest.raises(ServerError, match=rf"port {http} .*another GRPC_PORT"):
        server.start()


def test_a_host_that_is_not_ours_is_named(tmp_path):
    server = TritonServer(tmp_path, *free_ports(3), host="192.0.2.1", log=tmp_path / "triton.log")
    with pytest.raises(ServerError, match=r"192\.0\.2\.1 .*another HOST"):
        server.start()


def test_a_server_on_the_path_is_preferred_and_finds_this_environment(tmp_path, monkeypatch):
    program = tmp_path / "tritonserver"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    installation = find_installation()
    assert installation.program == program
    assert installation.backends is None
    assert installation.environment["PATH"].split(os.pathsep)[0] == str(Path(sys.prefix) / "bin")


def test_numpy_2_is_refused_beside_the_packaged_server(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.1.0")
    with pytest.raises(ServerError, match=r"numpy 2\.1\.0 .* 'numpy<2'"):
        find_installation()


def test_a_missing_libpython_is_named_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)  # neither a tritonserver nor ldconfig
    monkeypatch.setattr("sysconfig.get_config_var", lambda name: "/nowhere")
    monkeypatch.setattr("sys.base_prefix", "/nowhere")
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    with pytest.raises(ServerError, match=rf"libpython{version}\.so\.1\.0 is missing.*apt-get install libpython{version}"):
        find_installation()


def test_a_python_without_a_stub_is_told_which_ones_there_are(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    monkeypatch.setattr("triton_server._libpython_folder", lambda: Path("/nowhere"))
    monkeypatch.setattr("triton_server.PYTHON", "3.99")
    with pytest.raises(ServerError, match=r"no backend for Python 3\.99; it has .*3\.11"):
        find_installation()


def test_the_log_of_the_run_before_is_kept(tmp_path):
    log = tmp_path / "triton.log"
    log.write_text("the reason")
    with TritonServer.on_free_ports(make_repository(tmp_path / "repository"), log):
        pass
    assert (tmp_path / "triton.log.previous").read_text() == "the reason"
    assert "the reason" not in log.read_text()


def test_reasons_are_said_once_and_without_tables():
    log = """
I1201 05:00:00.000001 7 model_lifecycle.cc:472] "loading: llm:1"
E1201 05:00:00.000002 7 pb_stub.cc:721] "Failed to initialize Python stub: ValueError: no engine\\n\\nAt:\\n  /m.py(7)\\n"
E1201 05:00:00.000003 7 model_lifecycle.cc:642] "failed to load 'llm' version 1: Internal: ValueError: no engine\\n\\nAt:\\n"
+-------+---------+--------+
| Model | Version | Status |
+-------+---------+--------+
"""
    assert failure_reasons(log) == ["  Failed to initialize Python stub: ValueError: no engine"]


def test_a_mistake_in_a_configuration_is_named_with_its_line(tmp_path):
    repository = make_repository(tmp_path / "repository")
    config = repository / "echo" / "config.pbtxt"
    config.write_text(config.read_text() + "dynamic_matching { }\n")
    server = TritonServer.on_free_ports(repository, tmp_path / "triton.log")
    with pytest.raises(ServerError, match=r'7:\d+: .*no field named "dynamic_matching"'):
        server.__enter__()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_serve_says_where_it_serves_and_a_signal_ends_all_of_it(tmp_path, number):
    http, grpc, metrics = free_ports(3)
    repository = make_repository(tmp_path / "repository")
    command = [sys.executable, "scripts/serve.py", f"--engine={tmp_path}", f"--model-repository={repository}"]
    command += [f"--http-port={http}", f"--grpc-port={grpc}", f"--metrics-port={metrics}"]
    # As shells start what ends in `&`: with SIGINT ignored.
    command = ["sh", "-c", "trap '' INT; exec \"$@\"", "sh", *command]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as serve:
        assert serve.stdout is not None
        lines = []
        for line in serve.stdout:
            lines.append(line)
            if line.startswith("Ctrl-C"):
                break
        output = "".join(lines)
        assert f"http://127.0.0.1:{http}/v2/models/llm/generate_stream" in output, output
        assert f"triton-{http}.log" in output  # two servers have two logs
        assert f'client generate "The capital of France is" --url 127.0.0.1:{grpc}' in output
        assert stream(f"http://127.0.0.1:{http}", "hello") == ["hello", "hello"]
        children = Path(f"/proc/{serve.pid}/task/{serve.pid}/children").read_text().split()
        serve.send_signal(number)
        assert serve.wait(60) == 0
    assert [processes_of_session(int(child)) for child in children] == [[]]


def test_serve_ends_with_the_reason_when_a_model_does_not_load(tmp_path):
    http, grpc, metrics = free_ports(3)
    repository = make_repository(tmp_path / "repository", 'raise ValueError("engine is for another planet")')
    command = [sys.executable, "scripts/serve.py", f"--engine={tmp_path}", f"--model-repository={repository}"]
    command += [f"--http-port={http}", f"--grpc-port={grpc}", f"--metrics-port={metrics}"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert done.stdout.count("engine is for another planet") == 1
    assert "Ready" not in done.stdout


def test_serve_names_an_unknown_profile(tmp_path):
    repository = make_repository(tmp_path / "repository")
    command = [sys.executable, "scripts/serve.py", f"--engine={tmp_path}", f"--model-repository={repository}"]
    done = subprocess.run(
        [*command, "--model-config-name=fastest"], cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert "no configs/fastest.pbtxt" in done.stdout
