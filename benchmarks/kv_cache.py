"""KV caches side by side, and what a shared prefix saves: `python benchmarks/kv_cache.py ENGINE`.

Scheduler and executor in one process, without server and client. First the caches: milliseconds of a decode step (scheduling
included), the memory that the sequences hold, and how many sequences of that length a pool of --megabytes takes. Then the
prefix cache: the time to the first token of a prompt that is new, and of one that shares all but its last tokens with it, in
turn.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import machine
import numpy as np
import typer
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from llm_runtime.engine import Engine, EngineConfig
from llm_runtime.executors.base import Row
from llm_runtime.executors.ort import OrtExecutor, OrtOptions
from llm_runtime.manifest import EngineManifest, read_manifest
from llm_runtime.types import GenerationRequest, SamplingParams

BATCHES = (1, 8)
CONTEXTS = (128, 1024, 3072)
LONGEST = 3200  # max_context: what a region of the static cache holds
STEPS = 40


def main(
    engine: Annotated[Path, typer.Argument(help="Engine folder.")],
    threads: int = 2,
    megabytes: Annotated[int, typer.Option(help="Of the pool.")] = 1024,
    shared: Annotated[int, typer.Option(help="Tokens of the shared prefix.")] = 1000,
    repeats: int = 5,
) -> None:
    """Time decode steps with each cache, and first tokens with a cold and a warm prefix."""
    manifest = read_manifest(engine)
    tokenizer = Tokenizer.from_file(str(engine / "tokenizer.json"))
    console = Console()
    console.print(f"{manifest.name}: {machine.describe(threads)}; pool {megabytes} MiB, max_context {LONGEST}")
    executors = [
        open_pages(engine, manifest.with_kv_cache(pages), megabytes, threads) for pages in ("fp32", "fp32", "int8", "fp8")
    ]
    caches = list(zip(("paged", "static", "paged", "paged"), executors, strict=True))
    table = Table("cache", "pages", "batch", "context", "prefill, tokens/s", "ms a step", "MiB held", "sequences that fit")
    for context in CONTEXTS:
        for batch in BATCHES:
            runs = [make_engine(each[0], tokenizer, static=name == "static", prefix_caching=False) for name, each in caches]
            timed = time_steps(runs, manifest.model.vocab_size, batch, context)
            for (name, (_, pages)), run, (prefill, step) in zip(caches, runs, timed, strict=True):
                held = run.stats.pages_used
                table.add_row(
                    name,
                    pages.precision.kv_cache,
                    str(batch),
                    f"{context:,}",
                    f"{batch * context / prefill:,.0f}",
                    f"{step * 1e3:.2f}",
                    f"{held * pages.page_bytes / 2**20:.0f}",
                    str(run.blocks.num_pages // (held // batch)),
                )
                run.fail_all("measured")
    console.print(table)
    executor = executors[0][0]
    cold, warm = first_tokens(executor, tokenizer, manifest, shared, repeats)
    console.print(
        f"first token of a prompt of {shared} shared and 24 other tokens, median of {repeats}: cold {cold * 1e3:.0f} ms, "
        f"warm {warm * 1e3:.0f} ms, {warm / cold:.1%}"
    )


def make_engine(executor: OrtExecutor, tokenizer: Tokenizer, *, static: bool, prefix_caching: bool) -> Engine:
    config = EngineConfig(
        max_sequences=8,
        max_step_tokens=512,
        prefill_chunk_tokens=512,
        max_context=LONGEST,
        end_ids=(),
        prefix_caching=prefix_caching,
        static_cache=static,
    )
    return Engine(executor, tokenizer, config)


def open_pages(folder: Path, manifest: EngineManifest, megabytes: int, threads: int) -> tuple[OrtExecutor, EngineManifest]:
    num_pages = megabytes * 2**20 // manifest.page_bytes
    return OrtExecutor(folder, manifest, num_pages, OrtOptions(num_threads=threads)), manifest


def time_steps(engines: list[Engine], vocab_size: int, batch: int, context: int) -> list[tuple[float, float]]:
    """Of each engine: seconds to prefill all prompts, and the median of a step in which all decode, steps of all in turn. The
    sequences still run when it returns."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(3, vocab_size, (batch, context)).tolist()
    prefills, steps = [], []
    for engine in engines:
        engine.executor.execute([Row(prompts[0][:64], 0, range(64), 1)])  # the first call of a session makes its buffers
        for index, prompt in enumerate(prompts):
            engine.add(GenerationRequest(str(index), tuple(prompt), SamplingParams(max_tokens=LONGEST, ignore_eos=True)))
        started = time.perf_counter()
        while len(engine.step(time.monotonic())) < batch:  # until the last prompt's first token
            pass
        prefills.append(time.perf_counter() - started)
    for _ in range(STEPS):
        for engine in engines:
            started = time.perf_counter()
            engine.step(time.monotonic())
            steps.append(time.perf_counter() - started)
    return list(zip(prefills, np.median(np.reshape(steps, (STEPS, -1)), axis=0).tolist(), strict=True))


def first_tokens(
    executor: OrtExecutor, tokenizer: Tokenizer, manifest: EngineManifest, shared: int, repeats: int
) -> tuple[float, float]:
    """Seconds to the first token of (a prompt that is new, one that shares `shared` tokens with it), medians."""
    rng = np.random.default_rng(1)
    engine = make_engine(executor, tokenizer, static=False, prefix_caching=True)
    times: dict[str, list[float]] = {"cold": [], "warm": []}
    for number in range(repeats):
        prefix = rng.integers(3, manifest.model.vocab_size, shared).tolist()
        for kind in times:
            prompt = (*prefix, *rng.integers(3, manifest.model.vocab_size, 24).tolist())
            engine.add(GenerationRequest(f"{kind}{number}", prompt, SamplingParams(max_tokens=1, ignore_eos=True)))
            started = time.perf_counter()
            while engine.has_work:
                engine.step(time.monotonic())
            times[kind].append(time.perf_counter() - started)
    return float(np.median(times["cold"])), float(np.median(times["warm"]))


if __name__ == "__main__":
    typer.run(main)
