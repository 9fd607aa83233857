"""`client calibrate` on a real Triton: it measures, it writes what it found, and it puts the configuration back."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys

import pytest

from client.calibrate_record import SettingRefusedError
from client.calibrate_server import LiveServer
from client.knobs import read_setting
from client.pbtxt import read_message
from client.repository import ModelRepository
from tests.servers import ROOT, Client, live_config, make_repository, request_inputs, running

WORKLOAD = {"requests": 20, "rate": 20, "classes": [{"prompt_tokens": "20", "output_tokens": "60"}]}


@pytest.fixture(scope="module")
def server(shelf, tmp_path_factory):
    folder = tmp_path_factory.mktemp("calibrate")
    repository = make_repository(folder / "repository", num_threads="1", kv_cache_memory_mb="16", max_sequences="1")
    with running(repository, shelf.engine("llama"), folder / "triton.log") as server:
        yield server


def command(server, folder, *options: str, workload: dict = WORKLOAD) -> list[str]:
    path = folder / "workload.json"
    path.write_text(json.dumps(workload))
    files = ["--workload", str(path), "--output", str(folder / "found.pbtxt"), "--report", str(folder / "report")]
    addresses = ["--url", server.grpc_address, "--metrics-url", server.metrics_url]
    return [sys.executable, "-m", "client", "calibrate", *files, *addresses, *options]


def test_it_measures_writes_what_it_found_and_puts_the_configuration_back(server, tmp_path):
    before = live_config(server)
    served = server.repository / "llm" / "config.pbtxt"
    options = ["--slo", "ttft_p90=80ms", "--budget", "30s", "--knobs", "max_sequences", "--config-file", str(served)]
    done = subprocess.run(
        command(server, tmp_path, *options), capture_output=True, text=True, timeout=200, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    assert live_config(server) == before
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["says"] in done.stdout
    assert {trial["setting"]["max_sequences"] for trial in report["trials"]} >= {1}
    for trial in report["trials"]:
        details = trial["outcome"]["details"]
        assert details["cached_tokens"] == 0, "no trial finds the prompts of another in the prefix cache"
        planned = round(20 * max(1.0, trial["rate"]))
        assert details["requests"] == planned or trial["outcome"]["ratio"] > 2.0
    found = read_message((tmp_path / "found.pbtxt").read_text())
    assert read_setting(found, ["max_sequences"]) == report["chosen"]
    page = (tmp_path / "report.html").read_text()
    assert page.count("<tr>") > len(report["trials"])
    assert "<svg" in page


def test_an_interrupted_search_puts_the_configuration_back(server, tmp_path):
    before = live_config(server)
    options = ["--slo", "ttft_p90=1ms", "--budget", "10m", "--knobs", "max_sequences"]
    process = subprocess.Popen(
        command(server, tmp_path, *options), stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("trying"):
            break
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=100)
    assert "interrupted" in errors
    assert process.returncode == 0
    assert "configuration:" in output
    assert live_config(server) == before
    client = Client(server.grpc_address)
    assert client.generate("a", max_tokens=2, ignore_eos=True).last.finish_reason == "length"
    client.close()


def test_a_setting_that_the_server_refuses_leaves_the_old_one_serving(server):
    async def try_it() -> str:
        repository = ModelRepository(server.grpc_address)
        live = LiveServer(repository, None)
        try:
            await live.open()
            with pytest.raises(SettingRefusedError) as refused:
                await live.apply({"max_sequences": 0})
            await live.restore()
            return str(refused.value)
        finally:
            await repository.close()

    before = live_config(server)
    assert "max_sequences" in asyncio.run(try_it())
    assert live_config(server) == before
    client = Client(server.grpc_address)
    assert client.receive(client.send(request_inputs("a", max_tokens=2))).last.error is None
    client.close()


@pytest.mark.parametrize(
    ("options", "workload", "named"),
    [
        (["--slo", "ttft_p99=1s"], {"requests": 3}, "no arrival times"),
        (["--slo", "ttft=1s"], WORKLOAD, "slo: got"),
        (["--slo", "ttft_p99=1s", "--budget", "soon"], WORKLOAD, "budget: got 'soon'"),
        (["--slo", "ttft_p99=1s", "--knobs", "speed"], WORKLOAD, "unknown knob 'speed'"),
    ],
)
def test_what_is_wrong_is_named_before_anything_is_loaded(server, tmp_path, options, workload, named):
    wrong = command(server, tmp_path, *options, workload=workload)
    done = subprocess.run(wrong, capture_output=True, text=True, timeout=60, check=False, cwd=ROOT)
    assert done.returncode in (2, 4)
    assert named in done.stderr
    assert not (tmp_path / "found.pbtxt").exists()
