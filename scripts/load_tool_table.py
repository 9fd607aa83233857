"""The load tools and clients that scripts/check_load_tools.py runs: what to install, the command, and where each one's own
figures are. docs/load-tools.md has the same commands.

A command is a shell's words, with these variables: $HTTP, $GRPC, $METRICS (host:port of the server; $OTHER_... three that are
free), $ENGINE (an engine folder, which has the tokenizer), $OUTPUT (a folder for what the tool writes), $PYTHON (that of the
server).
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

# Of what a tool left in its output folder, and of what it printed, one line for a reader. Raises LookupError, OSError or
# ValueError where its figures are not there, or say that requests failed.
Report = Callable[[Path, str], str]

# Where the binary is on PyPI: perf-analyzer 0.1.0 itself is an empty placeholder, and tritonclient 2.61 and later lack it. That
# of 2.60 needs glibc 2.38 (Ubuntu 24.04); that of 2.51 glibc 2.34 and two libraries, which nvidia-pytriton has.
PERF_ANALYZER_NEW, PERF_ANALYZER_OLD = "tritonclient==2.60.0", "tritonclient==2.51.0"


@dataclass(frozen=True)
class Tool:
    """One row. `served` is how many requests the server must have answered more than before, at least."""

    name: str
    requirement: str  # of pip; "" for what every machine has
    command: str
    report: Report
    served: int
    timeout_seconds: float = 120.0
    needs_perf_analyzer: bool = False
    environment: dict[str, str] = field(default_factory=dict)
    fails_because: str = ""  # a known limit of the tool or of Triton; a row that is expected to fail with these words

    @property
    def package(self) -> str:
        """The name under which it is installed."""
        return re.split(r"[\[=<>]", self.requirement)[0]


def last_line(_: Path, printed: str) -> str:
    return printed.strip().splitlines()[-1]


def _curl(_: Path, printed: str) -> str:
    events = [json.loads(line.removeprefix("data: ")) for line in printed.splitlines() if line]
    if events[-1]["finish_reason"] != "length":
        raise ValueError(f"the last event is {events[-1]}")
    return f"{len(events)} events, {sum(event['num_output_tokens'] for event in events)} tokens"


def _locust(output: Path, _: str) -> str:
    with (output / "locust_stats.csv").open() as file:
        rows = {row["Type"]: row for row in csv.DictReader(file)}
    post = rows["POST"]
    if int(post["Failure Count"]) or not int(post["Request Count"]):
        raise ValueError(f"{post['Failure Count']} failures in {post['Request Count']} requests")
    return f"{post['Request Count']} requests; p99 in ms: TTFT {rows['TTFT']['99%']}, ITL {rows['ITL']['99%']}"


def _perf_analyzer(output: Path, printed: str) -> str:
    requests = json.loads((output / "profile.json").read_text())["experiments"][0]["requests"]
    if any(not request["response_timestamps"] for request in requests):
        raise ValueError("a request without a response")
    throughput = re.search(r"Throughput: (\S+) infer/sec", printed)
    if throughput is None:
        raise ValueError("no throughput among what it printed")
    return f"{len(requests)} requests, {float(throughput[1]):.0f} a second"


def _genai_perf(output: Path, _: str) -> str:
    (path,) = output.rglob("profile_export_genai_perf.json")
    figures = json.loads(path.read_text())
    ttft, count = figures["time_to_first_token"], figures["request_count"]["avg"]
    return f"{count:.0f} requests; TTFT {ttft['avg']:.1f} ms, p99 {ttft['p99']:.1f} ms"


def _aiperf(output: Path, _: str) -> str:
    (path,) = output.rglob("profile_export_aiperf.json")
    figures = json.loads(path.read_text())
    if rate := figures["request_error_rate"]["avg"]:
        raise ValueError(f"{rate:g} % of the requests failed")
    ttft, count = figures["time_to_first_token"], figures["request_count"]["avg"]
    return f"{count:.0f} requests; TTFT {ttft['avg']:.1f} ms, p99 {ttft['p99']:.1f} ms"


def _model_analyzer(output: Path, _: str) -> str:
    with (output / "export" / "results" / "metrics-model-inference.csv").open() as file:
        rows = list(csv.DictReader(file))
    throughputs = ", ".join(f"{row['Model Config Path']} {row['Throughput (infer/sec)']}/s" for row in rows)
    return f"{len(rows)} measured: {throughputs}"


_STREAM_BODY = """'{"text_input": "The quick brown fox", "max_tokens": 16, "ignore_eos": true, "stream": true}'"""
_GENAI_PERF = (
    "genai-perf profile -m $MODEL --backend $BACKEND -u $GRPC --streaming --tokenizer $ENGINE --concurrency 4"
    " --request-count 20 --num-prompts 10 --synthetic-input-tokens-mean 40 --output-tokens-mean 16 --random-seed 1"
    " --artifact-dir $OUTPUT"
)
_MODEL_ANALYZER = (
    "model-analyzer profile -f scripts/load_tools/model_analyzer.yml --model-repository model_repository"
    " --triton-http-endpoint $HTTP --triton-grpc-endpoint $GRPC --triton-metrics-url http://$METRICS/metrics"
    " --output-model-repository-path $OUTPUT/models --override-output-model-repository --export-path $OUTPUT/export"
    " --checkpoint-directory $OUTPUT/checkpoints"
)

TOOLS = (
    Tool("curl", "", f"curl -sSfN http://$HTTP/v2/models/llm/generate_stream -d {_STREAM_BODY}", _curl, served=1),
    Tool(
        "tritonclient",
        "tritonclient[grpc,http]==2.73.0",
        "python scripts/load_tools/tritonclient_streams.py $GRPC $HTTP",
        last_line,
        served=40,
    ),
    Tool(
        "TensorRT-LLM's gRPC client",
        "tritonclient[grpc]==2.73.0",
        "python scripts/load_tools/tensorrt_llm_client.py $GRPC",
        last_line,
        served=5,
    ),
    Tool(
        "vLLM backend's client",
        "tritonclient[grpc]==2.73.0",
        "python scripts/load_tools/vllm_client.py $GRPC",
        last_line,
        served=40,
    ),
    Tool(
        "litellm",
        "litellm==1.110.2",
        "python scripts/load_tools/litellm_client.py http://$HTTP",
        last_line,
        served=20,
        environment={"LITELLM_LOCAL_MODEL_COST_MAP": "True"},  # or it asks the internet for prices
    ),
    Tool(
        "LlamaIndex NvidiaTriton",
        "llama-index-llms-nvidia-triton==0.6.0",
        "python scripts/load_tools/llama_index_client.py $GRPC",
        last_line,
        served=20,
    ),
    Tool(
        "locust",
        "locust==2.47.0",
        "locust -f scripts/load_tools/locustfile.py --host http://$HTTP --headless --only-summary --users 4 --spawn-rate 4"
        " --run-time 5s --csv $OUTPUT/locust",
        _locust,
        served=5,
    ),
    Tool(
        "perf_analyzer",
        "",
        "perf_analyzer -m llm -u $GRPC -i grpc --streaming --async --input-data scripts/load_tools/perf_analyzer_inputs.json"
        " --concurrency-range 4 --request-count 40 --profile-export-file $OUTPUT/profile.json",
        _perf_analyzer,
        served=40,
        needs_perf_analyzer=True,
    ),
    Tool(
        "perf_analyzer over HTTP",
        "",
        "perf_analyzer -m llm -u $HTTP -i http --input-data scripts/load_tools/perf_analyzer_inputs.json"
        " --concurrency-range 4 --request-count 40",
        last_line,
        served=40,
        needs_perf_analyzer=True,
        fails_because="Decoupled models must be run with",
    ),
    Tool(
        "genai-perf",
        "genai-perf==0.0.16",
        _GENAI_PERF.replace("$MODEL", "llm").replace("$BACKEND", "tensorrtllm"),
        _genai_perf,
        served=20,
        needs_perf_analyzer=True,
    ),
    Tool(
        "genai-perf, as vLLM",
        "genai-perf==0.0.16",
        _GENAI_PERF.replace("$MODEL", "llm_vllm").replace("$BACKEND", "vllm"),
        _genai_perf,
        served=20,
        needs_perf_analyzer=True,
    ),
    Tool(
        "aiperf",
        "aiperf==0.13.0",
        "aiperf profile -m llm --endpoint-type template --url http://$HTTP --custom-endpoint /v2/models/llm/generate_stream"
        " --streaming --extra-inputs payload_template:scripts/load_tools/aiperf_request.jinja response_field:text_output"
        " ignore_eos:true --tokenizer $ENGINE --concurrency 4 --request-count 20 --synthetic-input-tokens-mean 40"
        " --output-tokens-mean 16 --random-seed 1 --no-server-metrics --no-gpu-telemetry --ui none --artifact-dir $OUTPUT",
        _aiperf,
        served=20,
    ),
    Tool(
        "model-analyzer, on a running server",
        "triton-model-analyzer==1.58.0",
        f"{_MODEL_ANALYZER} --triton-launch-mode remote --run-config-search-mode brute",
        _model_analyzer,
        served=50,
        needs_perf_analyzer=True,
        timeout_seconds=300.0,
    ),
    Tool(
        "model-analyzer, on servers of its own",
        "triton-model-analyzer==1.58.0",
        re.sub(r"\$(HTTP|GRPC|METRICS)", r"$OTHER_\1", _MODEL_ANALYZER)
        + " --triton-launch-mode local --triton-server-path scripts/load_tools/tritonserver --run-config-search-mode brute",
        _model_analyzer,
        served=0,  # it starts servers of its own
        needs_perf_analyzer=True,
        environment={"LLM_ENGINE_DIR": "$ENGINE", "PYTHON": "$PYTHON"},
        timeout_seconds=480.0,
    ),
)
