"""The load generator against a server of known latency (tests/known_latency, on a real Triton)."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys

import pytest

from client.bench import Bench, Measurement
from client.errors import RefusedError
from client.metrics import Snapshot
from client.report import html_report
from client.slo import parse_slo, statistic
from client.transport import open_transport
from client.wire import GenerateRequest
from client.workload import Planned, Workload, WorkloadSpec
from tests.servers import ROOT, TritonServer

TTFT, ITL = 0.2, 0.05  # seconds; config.pbtxt has them
SLACK = 0.15  # for a busy machine


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    shutil.copytree(ROOT / "tests" / "known_latency", folder / "repository" / "llm")
    with TritonServer.on_free_ports(folder / "repository", folder / "triton.log", exit_seconds=3) as server:
        yield server


def measure(server: TritonServer, workload: Workload, concurrency: int | None = None, protocol: str = "grpc") -> Measurement:
    return measure_at(server.grpc_address if protocol == "grpc" else server.http_url, workload, concurrency, protocol)


def measure_at(url: str, workload: Workload, concurrency: int | None, protocol: str = "grpc") -> Measurement:
    async def main() -> Measurement:
        transport = open_transport(protocol, url, "llm")
        try:
            return await Bench(transport, workload, concurrency).run()
        finally:
            await transport.close()

    return asyncio.run(main())


def workload(**fields) -> Workload:
    traffic = {"prompt_tokens": "5", "output_tokens": "4"} | fields.pop("traffic", {})
    return WorkloadSpec.model_validate({"requests": 12, "classes": [traffic]} | fields).build()


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_latencies_are_the_servers_own(server, protocol):
    measured = measure(server, workload(requests=8), concurrency=4, protocol=protocol)
    latencies = measured.latencies
    assert [len(latencies[name]) for name in ("ttft", "itl", "e2e")] == [8, 8 * 3, 8]
    assert all(TTFT <= value < TTFT + SLACK for value in latencies["ttft"])
    assert sum(latencies["itl"]) / len(latencies["itl"]) == pytest.approx(ITL, rel=0.3)
    assert all(TTFT + 3 * ITL <= value < TTFT + 3 * ITL + SLACK for value in latencies["e2e"])
    assert measured.num_output_tokens == 8 * 4
    seconds = 2 * (TTFT + 3 * ITL)  # two rounds of four
    assert measured.output_tokens_per_second == pytest.approx(32 / seconds, rel=0.3)


def test_a_closed_loop_keeps_to_its_concurrency(server):
    measured = measure(server, workload(requests=9, traffic={"output_tokens": "2"}), concurrency=3)
    assert len(measured.done) == 9
    spaced = sorted(record.sent_at for record in measured.records)
    ends = sorted(record.sent_at + record.timing.end_to_end for record in measured.records if record.timing)
    assert all(sent >= end - 1e-3 for sent, end in zip(spaced[3:], ends, strict=False)), "the next is sent when one ended"


def test_an_open_loop_sends_on_time_whatever_the_server_does(server):
    plan = workload(requests=30, rate=60, arrivals="constant")
    measured = measure(server, plan)
    records = sorted(measured.records, key=lambda record: record.sent_at)
    assert len(records) == 30
    assert records[-1].sent_at - records[0].sent_at == pytest.approx(29 / 60, abs=SLACK)  # all are out before the first is back
    assert all(0 <= record.lag < SLACK for record in records)
    assert all(TTFT <= value < TTFT + SLACK for value in measured.latencies["ttft"])


def test_nothing_is_lost_and_failures_have_their_kind(server):
    planned = tuple(Planned(GenerateRequest(prompt, 2), None) for prompt in ["refuse this", "a", "refuse that", "b", "c"])
    measured = measure(server, Workload(planned, 0, "mixed"), concurrency=2)
    assert len(measured.records) == 5
    assert measured.rejections == {"refused": 2}
    assert len(measured.done) == 3
    gone = measure_at("127.0.0.1:1", workload(requests=3), 3)
    assert gone.rejections == {"unreachable": 3}
    assert gone.summary()["latency_ms"]["ttft"]["p99"] is None


def test_goodput_counts_requests_within_the_slo(server):
    measured = measure(server, workload(requests=4), concurrency=4)
    assert measured.goodput(parse_slo("ttft_p99=600ms,itl_p99=300ms")) == pytest.approx(4 / measured.seconds)
    assert measured.goodput(parse_slo("ttft_p99=150ms")) == 0.0
    assert measured.summary(parse_slo("e2e_p50=100ms"))["slo_met"] is False


def test_the_page_holds_conditions_numbers_plots_and_failures(server):
    planned = tuple(
        Planned(GenerateRequest(prompt, 3), None, group) for prompt, group in [("a", "x"), ("b", "y"), ("refuse", "y")]
    )
    measured = measure(server, Workload(planned, 0, "mixed"), concurrency=3)
    measured.samples = [
        Snapshot(
            float(i), {"nv_inference_pending_request_count": {frozenset(): i}, "llm_running_sequences": {frozenset(): 2 * i}}
        )
        for i in range(4)
    ]
    page = html_report(measured, parse_slo("ttft_p99=900ms"), {"command": "bench <x>"}, ["a line"])
    assert page.count("<svg") == 4
    assert "bench &lt;x&gt;" in page
    assert "a line" in page
    assert "got what is refused" in page
    assert f"{statistic(measured.latencies['ttft'], 'p99') * 1e3:.1f}" in page
    assert "goodput" in page


def test_a_closed_loop_needs_a_concurrency():
    with pytest.raises(RefusedError, match="concurrency: missing"):
        measure_at("127.0.0.1:1", workload(), None)


def test_the_command_reports_and_writes_json(server, tmp_path):
    options = [
        "--url",
        server.grpc_address,
        "--requests",
        "6",
        "--concurrency",
        "3",
        "--output-tokens",
        "3",
        "--slo",
        "ttft_p99=5s",
    ]
    command = [sys.executable, "-m", "client", "bench", *options, "--json", str(tmp_path / "result.json")]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, cwd=ROOT).stdout
    assert "6 of 6 requests" in shown
    assert "SLO ttft_p99=5000ms: met" in shown
    report = json.loads((tmp_path / "result.json").read_text())
    assert report["result"]["output_tokens"] == 18
    assert report["result"]["latency_ms"]["ttft"]["p50"] >= TTFT * 1e3
    assert report["classes"]["default"]["requests"] == 6
    assert "seed 0" in report["conditions"]["workload"]
    for wrong, named in [
        ("--rate=0", "concurrency: missing"),
        ("--prompt-tokens=x", "prompt_tokens"),
        ("--arrivals=x", "arrivals"),
    ]:
        bad = [sys.executable, "-m", "client", "bench", "--url", server.grpc_address, wrong]
        done = subprocess.run(bad, capture_output=True, text=True, timeout=60, check=False, cwd=ROOT)
        assert done.returncode == 4
        assert named in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1
