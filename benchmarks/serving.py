"""The same work through Triton over gRPC, and on the engine in one process: `python benchmarks/serving.py ENGINE`.

Each line is a closed loop: so many streams at a time, each sending its next request when the last one ended. Both sides get
the same prompts (random tokens' text, none shared) and generate the same number of tokens, end of sequence ignored. "share" is
what is left of the tokens/s after Triton, the Python backend, gRPC and the client, which runs on the same cores.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import machine
import numpy as np
import typer
from google.protobuf import text_format
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer
from tritonclient.grpc import model_config_pb2

from client.bench import Bench
from client.timing import Timing
from client.transport import GrpcTransport
from client.wire import GenerateRequest
from client.workload import FIXED_LENGTH, Planned, Workload
from llm_runtime.config import Parameters, size_cache
from llm_runtime.engine import Engine, EngineConfig
from llm_runtime.executors.ort import OrtExecutor, OrtOptions
from llm_runtime.manifest import read_manifest
from llm_runtime.types import GenerationRequest, SamplingParams

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

from triton_server import TritonServer  # noqa: E402


@dataclass
class Result:
    """Timings of all requests, and the wall time of the whole run in seconds."""

    seconds: float
    timings: list[Timing] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        return sum(timing.num_tokens for timing in self.timings) / self.seconds


def main(
    engine: Annotated[Path, typer.Argument(help="Engine folder.")],
    streams: Annotated[list[int] | None, typer.Option(help="Concurrent streams; may be given several times.")] = None,
    prompt_tokens: int = 128,
    output_tokens: int = 64,
    rounds: Annotated[int, typer.Option(help="Requests of each stream.")] = 2,
    threads: int = 2,
) -> None:
    """Output tokens/s, TTFT and ITL, through Triton and in one process."""
    console = Console()
    console.print(f"{engine.name}: {machine.describe(threads)}; {prompt_tokens} tokens in, {output_tokens} out, greedy")
    table = Table("streams", "path", "tokens/s", "TTFT p50", "TTFT p99", "ITL p50", "ITL p99 (ms)", "share")
    with tempfile.TemporaryDirectory() as folder:
        server = TritonServer.on_free_ports(
            ROOT / "model_repository", Path(folder) / "log", environment={"LLM_ENGINE_DIR": str(engine.resolve())}
        )
        for count in streams or [1, 8, 32]:
            prompts = make_prompts(engine, count * rounds, prompt_tokens, seed=count)
            alone = in_process(engine, prompts, count, output_tokens, threads)
            with server:
                warm = make_prompts(engine, 1, prompt_tokens, seed=999)
                asyncio.run(through_triton(server.grpc_address, warm, 1, output_tokens))
                served = asyncio.run(through_triton(server.grpc_address, prompts, count, output_tokens))
            for name, result in [("in-process", alone), ("Triton", served)]:
                ratio = f"{result.tokens_per_second / alone.tokens_per_second:.0%}"
                table.add_row(str(count), name, f"{result.tokens_per_second:.1f}", *quantiles(result), ratio)
    console.print(table)


def make_prompts(engine: Path, count: int, length: int, seed: int) -> list[str]:
    """Texts of about `length` tokens each, all different from their first token on."""
    tokenizer = Tokenizer.from_file(str(engine / "tokenizer.json"))
    rng = np.random.default_rng(seed)
    size = tokenizer.get_vocab_size()
    return [tokenizer.decode(rng.integers(size // 50, size // 2, length).tolist()) for _ in range(count)]


async def through_triton(address: str, prompts: list[str], streams: int, output_tokens: int) -> Result:
    requests = (GenerateRequest(prompt, max_tokens=output_tokens, sampling=FIXED_LENGTH) for prompt in prompts)
    workload = Workload(tuple(Planned(request, at=None) for request in requests), seed=0, description="")
    transport = GrpcTransport(address)
    measurement = await Bench(transport, workload, streams).run()
    await transport.close()
    for record in measurement.records:
        if record.error is not None:
            raise record.error
    return Result(measurement.seconds, [record.timing for record in measurement.done if record.timing is not None])


def in_process(folder: Path, prompts: list[str], streams: int, output_tokens: int, threads: int) -> Result:
    """The engine's loop with the parameters of the shipped config.pbtxt."""
    parameters = shipped_parameters(folder)
    manifest = read_manifest(folder)
    page_groups, max_context = size_cache(parameters, manifest)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    executor = OrtExecutor(folder, manifest, page_groups, OrtOptions(num_threads=threads))
    limits = (parameters.max_sequences, parameters.max_step_tokens, parameters.prefill_chunk_tokens, max_context)
    engine = Engine(executor, tokenizer, EngineConfig(*limits, end_ids=manifest.model.eos_token_ids))
    sampling = SamplingParams(max_tokens=output_tokens, ignore_eos=True)
    waiting = [tuple(tokenizer.encode(prompt).ids) for prompt in prompts]
    timings: dict[str, Timing] = {}

    def send() -> None:
        if waiting:
            name = str(len(timings))
            timings[name] = Timing(time.perf_counter())
            engine.add(GenerationRequest(name, waiting.pop(), sampling))

    start = time.perf_counter()
    for _ in range(streams):
        send()
    while engine.has_work:
        for output in engine.step(time.monotonic()):
            timings[output.request_id].arrived(time.perf_counter(), len(output.token_ids))
            if output.finish_reason:
                send()
    result = Result(time.perf_counter() - start, list(timings.values()))
    executor.close()
    return result


def shipped_parameters(folder: Path) -> Parameters:
    text = (ROOT / "model_repository" / "llm" / "config.pbtxt").read_text()
    config = text_format.Parse(text, model_config_pb2.ModelConfig())
    values = {key: entry.string_value for key, entry in config.parameters.items()}
    return Parameters.model_validate(values | {"engine_dir": str(folder)})


def quantiles(result: Result) -> list[str]:
    ttfts = [timing.ttft for timing in result.timings if timing.ttft is not None]
    itls = [itl for timing in result.timings for itl in timing.itls]
    return [f"{np.quantile(values, q) * 1e3:.0f}" for values in (ttfts, itls) for q in (0.5, 0.99)]


if __name__ == "__main__":
    typer.run(main)
