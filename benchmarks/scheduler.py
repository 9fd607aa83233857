"""What deciding costs, without a model: `python benchmarks/scheduler.py`.

The scheduler and the page manager at many sequences, with a device that costs nothing: every step is decided, its rows are
applied, and each finished sequence is followed by one of those that wait. Timed are the scheduler's own calls, in microseconds
a step; "per sequence" should not grow with their number, and those that wait should cost nothing.
"""

from __future__ import annotations

import random
import time
from collections import deque
from typing import Annotated

import machine
import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from llm_runtime.block_manager import BlockManager
from llm_runtime.page_pool import PageGroup
from llm_runtime.scheduler import Scheduler
from llm_runtime.sequence import Sequence
from llm_runtime.types import FinishReason, GenerationRequest, SamplingParams

RUNNING = (16, 64, 256)
WAITING = (0, 10_000)
PAGE_SIZE = 16
PROMPT, OUTPUT = (32, 256), (64, 256)  # tokens of a sequence: from, to


def main(
    steps: Annotated[int, typer.Option(help="Steps timed, after as many that are not.")] = 400,
    waiting: Annotated[int, typer.Option(help="The larger number of sequences that wait.")] = WAITING[1],
) -> None:
    """Time the steps of a full engine, with none waiting and with many."""
    console = Console()
    console.print(f"{machine.describe(1)}; prompts of {PROMPT}, outputs of {OUTPUT} tokens, pages of {PAGE_SIZE}")
    table = Table("running", "waiting", "median us", "p99 us", "per sequence, us")
    for num_waiting in (0, waiting):
        for num_running in RUNNING:
            times = time_steps(num_running, num_waiting, steps) * 1e6
            median, p99 = np.median(times), np.quantile(times, 0.99)
            table.add_row(str(num_running), str(num_waiting), f"{median:.0f}", f"{p99:.0f}", f"{median / num_running:.2f}")
    console.print(table)


def time_steps(num_running: int, num_waiting: int, steps: int) -> np.ndarray:
    """Seconds of each step."""
    rng = random.Random(1)
    blocks = BlockManager([PageGroup(num_running * (PROMPT[1] + OUTPUT[1]) // PAGE_SIZE)], PAGE_SIZE)
    scheduler = Scheduler(blocks, num_running, max_step_tokens=num_running + 512, prefill_chunk_tokens=512)
    arrivals = 0

    def arrive() -> None:
        nonlocal arrivals
        prompt = tuple(rng.randrange(50_000) for _ in range(rng.randint(*PROMPT)))
        request = GenerationRequest(str(arrivals), prompt, SamplingParams(max_tokens=rng.randint(*OUTPUT)), deadline=1e9)
        scheduler.add(Sequence(request, arrivals))
        arrivals += 1

    for _ in range(num_running + num_waiting):
        arrive()
    while len(scheduler.running) < num_running:
        _step(scheduler)
    times: deque[float] = deque(maxlen=steps)
    for _ in range(2 * steps):
        while len(scheduler.running) + scheduler.num_waiting < num_running + num_waiting:
            arrive()
        times.append(_step(scheduler))
    return np.array(times)


def _step(scheduler: Scheduler) -> float:
    started = time.perf_counter()
    scheduler.expire(0.0)
    plan = scheduler.schedule()
    seconds = time.perf_counter() - started
    for row in plan.rows:
        is_last = row.is_last_chunk
        started = time.perf_counter()
        scheduler.apply(row)
        seconds += time.perf_counter() - started
        sequence = row.sequence
        if not is_last:
            continue
        sequence.token_ids.append(7)  # what the device chose
        if sequence.num_output >= sequence.request.sampling.max_tokens:
            started = time.perf_counter()
            scheduler.finish(sequence, FinishReason.LENGTH)
            seconds += time.perf_counter() - started
    return seconds


if __name__ == "__main__":
    typer.run(main)
