"""The executor alone, without scheduler or server: `python benchmarks/decode.py ENGINE`.

Milliseconds of a decode step by batch size and context, and of a prompt's prefill. "bandwidth" is the bytes that a step has
to read (weights once, and keys and values of each sequence's window) over its time, as a share of what the machine reads at
best.
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

from llm_runtime.executors.base import Row
from llm_runtime.executors.ort import OrtExecutor, OrtOptions
from llm_runtime.manifest import EngineManifest, read_manifest
from llm_runtime.page_pool import PageGroup

BATCHES = (1, 8, 32)
CONTEXTS = (128, 1024)
PREFILL = 512


def main(
    engine: Annotated[Path, typer.Argument(help="Engine folder.")],
    threads: int = 2,
    repeats: Annotated[int, typer.Option(help="Steps timed; the median is shown.")] = 30,
    attention: Annotated[str, typer.Option(help="auto, fused or standard.")] = "auto",
) -> None:
    """Time decode steps and a prefill."""
    manifest = read_manifest(engine)
    bandwidth = machine.read_bandwidth(threads)
    num_pages = max(BATCHES) * -(-(max(CONTEXTS) + 1) // manifest.limits.page_size)
    executor = OrtExecutor(engine, manifest, [PageGroup(num_pages)], OrtOptions(num_threads=threads, attention=attention))
    console = Console()
    console.print(f"{manifest.name}: {machine.describe(threads)}; {executor.attention} attention, median of {repeats} steps")
    table = Table("batch", "context", "ms", "tokens/s", "read MB", "bandwidth")
    for context in CONTEXTS:
        for batch in BATCHES:
            seconds = _time(executor, _decode_rows(executor, batch, context), repeats)
            size = _weight_bytes(engine, manifest) + batch * _cache_bytes(manifest, context)
            table.add_row(
                str(batch),
                str(context),
                f"{seconds * 1e3:.2f}",
                f"{batch / seconds:.0f}",
                f"{size / 1e6:.0f}",
                f"{size / seconds / bandwidth:.0%}",
            )
    console.print(table)
    ids = np.random.default_rng(0).integers(3, manifest.model.vocab_size, PREFILL).tolist()
    seconds = _time(executor, [Row(ids, 0, range(num_pages), 1)], 3)
    console.print(f"prefill of {PREFILL} tokens: {seconds * 1e3:.0f} ms, {PREFILL / seconds:.0f} tokens/s")


def _decode_rows(executor: OrtExecutor, batch: int, context: int) -> list[Row]:
    pages = -(-(context + 1) // executor.page_size)
    return [Row([5 + i], context, range(i * pages, (i + 1) * pages), 1) for i in range(batch)]


def _time(executor: OrtExecutor, rows: list[Row], repeats: int) -> float:
    executor.execute(rows)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        executor.execute(rows)
        times.append(time.perf_counter() - start)
    return float(np.median(times))


def _weight_bytes(engine: Path, manifest: EngineManifest) -> int:
    """All but the embedding table, of which a step reads a row a token; a float table that is the head too is read whole."""
    model = manifest.model
    size = (engine / "weights.bin").stat().st_size
    if manifest.precision.embedding == "int8":
        size -= model.vocab_size * model.hidden_size
    return size


def _cache_bytes(manifest: EngineManifest, context: int) -> int:
    """Keys and values that attention reads for one sequence."""
    model = manifest.model
    tokens = sum(min(context, window) if window else context for window in model.layer_windows)
    return 2 * 4 * tokens * model.num_kv_heads * model.head_dim


if __name__ == "__main__":
    typer.run(main)
