"""Load on a served model, and what came of it.

Closed loop: so many requests at a time, the next one sent when one ended; it shows what a number of users gets. Open loop: each
request is sent at its time whatever the server does; it shows what a rate of requests gets, and the queue that builds up.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from client.errors import CancelledError, ClientError, OverloadedError, RefusedError, UnreachableError
from client.metrics import MetricsReader, Snapshot, Window
from client.slo import METRICS, Slo, statistic
from client.stream import run
from client.timing import Timing
from client.transport import Transport
from client.wire import COUNTS, GenerateRequest
from client.workload import Planned, Workload

SAMPLE_SECONDS = 0.5
STATISTICS = ("mean", "p50", "p90", "p99")
ERROR_NAMES: tuple[tuple[type[ClientError], str], ...] = (
    (OverloadedError, "overloaded"),
    (RefusedError, "refused"),
    (CancelledError, "cancelled"),
    (UnreachableError, "unreachable"),
    (ClientError, "server error"),
)


@dataclass
class Record:
    """One request that was sent; times in seconds of `time.perf_counter`. `lag`: how much later than planned it was sent."""

    planned: Planned
    sent_at: float
    lag: float = 0.0
    timing: Timing | None = None  # of a request that ended well
    finish_reason: str = ""
    num_input_tokens: int = 0
    num_cached_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    error: ClientError | None = None

    @property
    def error_name(self) -> str:
        return next((name for kind, name in ERROR_NAMES if isinstance(self.error, kind)), "")

    @property
    def latencies(self) -> dict[str, float | None]:
        """TTFT, mean ITL and end-to-end time of this request."""
        if self.timing is None:
            return dict.fromkeys(METRICS)
        return {"ttft": self.timing.ttft, "itl": self.timing.mean_itl, "e2e": self.timing.end_to_end}


@dataclass
class Measurement:
    """What a load brought. `seconds`: from the first request's sending to the last one's end; `samples`: the server's metrics
    meanwhile, the first one before and the last one after the load; `cpu_share`: of one core, taken by the client itself."""

    records: list[Record]
    seconds: float
    cpu_share: float = 0.0
    samples: list[Snapshot] = field(default_factory=list)

    @property
    def done(self) -> list[Record]:
        """Those that ended well."""
        return [record for record in self.records if record.timing is not None]

    @property
    def latencies(self) -> dict[str, list[float]]:
        """Seconds by metric; ITL has a value for each token after the first, of all requests."""
        timings = [record.timing for record in self.done if record.timing is not None]
        return {
            "ttft": self.ttfts,
            "itl": [itl for timing in timings for itl in timing.itls],
            "e2e": [timing.end_to_end for timing in timings if timing.end_to_end is not None],
        }

    @property
    def ttfts(self) -> list[float]:
        return [record.timing.ttft for record in self.done if record.timing is not None and record.timing.ttft is not None]

    @property
    def num_output_tokens(self) -> int:
        return sum(record.timing.num_tokens for record in self.done if record.timing is not None)

    @property
    def output_tokens_per_second(self) -> float:
        return self.num_output_tokens / self.seconds if self.seconds else 0.0

    @property
    def requests_per_second(self) -> float:
        """Those that ended well."""
        return len(self.done) / self.seconds if self.seconds else 0.0

    def goodput(self, slo: Slo) -> float:
        """Requests a second that were within the SLO, each by its own latencies."""
        good = sum(slo.is_good(record.latencies) for record in self.done)
        return good / self.seconds if self.seconds else 0.0

    @property
    def rejections(self) -> Counter[str]:
        """Requests that brought nothing, by kind."""
        return Counter(record.error_name for record in self.records if record.error is not None)

    def group(self, name: str) -> Measurement:
        """Of one class of traffic alone."""
        return Measurement([record for record in self.records if record.planned.group == name], self.seconds)

    def summary(self, slo: Slo | None = None) -> dict[str, Any]:
        """For JSON: milliseconds, None where undefined."""
        latencies = self.latencies
        values: dict[str, Any] = {
            "requests": len(self.records),
            "completed": len(self.done),
            "failed": dict(self.rejections),
            "finish_reasons": dict(Counter(record.finish_reason for record in self.done)),
            "seconds": self.seconds,
            "requests_per_second": self.requests_per_second,
            "output_tokens_per_second": self.output_tokens_per_second,
            "input_tokens": sum(record.num_input_tokens for record in self.done),
            "cached_tokens": sum(record.num_cached_tokens for record in self.done),
            "draft_tokens": sum(record.num_draft_tokens for record in self.done),
            "accepted_tokens": sum(record.num_accepted_tokens for record in self.done),
            "output_tokens": self.num_output_tokens,
            "latency_ms": {metric: _statistics(latencies[metric]) for metric in METRICS},
            "send_lag_ms": _statistics([record.lag for record in self.records]),
            "client_cpu_share": self.cpu_share,
        }
        if slo is not None:
            values |= {"slo": str(slo), "slo_met": slo.is_met_by(latencies), "goodput_per_second": self.goodput(slo)}
        if len(self.samples) > 1:
            values["server"] = _server_view(self.samples)
        return values


def _statistics(values: Sequence[float]) -> dict[str, float | None]:
    found = {name: statistic(values, name) for name in STATISTICS}
    return {name: None if value is None else value * 1e3 for name, value in found.items()}


def _server_view(samples: Sequence[Snapshot]) -> dict[str, float | None]:
    """What the server's own metrics say of the same time."""
    whole = Window(samples[0], samples[-1])
    pending = [sample.gauge("nv_inference_pending_request_count") for sample in samples]
    return {
        "queue_depth_mean": sum(pending) / len(pending),
        "queue_depth_max": max(pending),
        "running_max": max(sample.gauge("llm_running_sequences") for sample in samples),
        "queue_batch_size_mean": whole.mean("llm_queue_batch_size"),
        "prefill_batch_size_mean": whole.mean("llm_prefill_batch_size"),
        "decode_batch_size_mean": whole.mean("llm_decode_batch_size"),
        "busy_share": whole.rate("llm_step_seconds_sum"),
        "preemptions": whole.delta("llm_preemptions"),
    }


async def warm_up(transport: Transport, count: int = 1) -> None:
    """Short requests, one at a time, so that no measured one pays for what only the first does. Raises ClientError."""
    for _ in range(count):
        await run(transport, GenerateRequest("warm up", 2, sampling={"ignore_eos": True}))


class Bench:
    """One run of a workload. What it has at any time is in `records` and `measurement`, also after an interruption."""

    def __init__(
        self, transport: Transport, workload: Workload, concurrency: int | None = None, reader: MetricsReader | None = None
    ) -> None:
        """`concurrency` requests at a time, or None: each at its own time. Raises RefusedError when the workload has no times
        and there is no concurrency."""
        if concurrency is None and not workload.is_open:
            raise RefusedError("concurrency: missing; allowed: 1 or more, or a workload with a rate or with arrival times")
        self.records: list[Record] = []
        self.num_running = 0
        self._transport = transport
        self._workload = workload
        self._concurrency = concurrency
        self._reader = reader
        self._samples: list[Snapshot] = []
        self._started_at = self._started_cpu = 0.0
        self._ended_at: float | None = None
        self._deadline = math.inf  # nothing is sent from then on
        self._ended_cpu = 0.0

    async def run(self, max_seconds: float | None = None) -> Measurement:
        """Send everything and wait for its end; after `max_seconds` nothing more is sent. Raises ClientError where the metrics
        cannot be read; what goes wrong with a request is in its record."""
        sampler = None
        if self._reader:
            self._samples.append(await self._reader.read())
            sampler = asyncio.create_task(self._sample())
        self._started_at, self._started_cpu = time.perf_counter(), time.process_time()
        if max_seconds is not None:
            self._deadline = self._started_at + max_seconds
        try:
            await (self._run_closed(self._concurrency) if self._concurrency else self._run_open())
        finally:
            self._ended_at, self._ended_cpu = time.perf_counter(), time.process_time()
            if sampler:
                sampler.cancel()
        if self._reader:
            await asyncio.sleep(SAMPLE_SECONDS)  # the server renews its values several times a second
            self._samples.append(await self._reader.read())
        return self.measurement()

    def stop(self) -> None:
        """Send nothing more; `run` returns when what was sent has ended."""
        self._deadline = time.perf_counter()

    def measurement(self) -> Measurement:
        """Of what has ended so far."""
        ended_at = self._ended_at if self._ended_at is not None else time.perf_counter()
        seconds = ended_at - self._started_at
        cpu = (self._ended_cpu or time.process_time()) - self._started_cpu
        return Measurement(list(self.records), seconds, cpu / seconds if seconds else 0.0, list(self._samples))

    async def _run_closed(self, concurrency: int) -> None:
        waiting: Iterator[Planned] = iter(self._workload.planned)

        async def one_at_a_time() -> None:
            for planned in waiting:
                if time.perf_counter() >= self._deadline:
                    return
                await self._send(planned, lag=0.0)

        async with _task_group() as tasks:
            for _ in range(min(concurrency, len(self._workload.planned))):
                tasks.append(asyncio.create_task(one_at_a_time()))

    async def _run_open(self) -> None:
        async with _task_group() as tasks:
            for planned in self._workload.planned:
                due = self._started_at + (planned.at or 0.0)
                await asyncio.sleep(max(0.0, min(due, self._deadline) - time.perf_counter()))
                if due >= self._deadline:
                    break
                tasks.append(asyncio.create_task(self._send(planned, lag=time.perf_counter() - due)))

    async def _send(self, planned: Planned, lag: float) -> None:
        record = Record(planned, time.perf_counter(), lag)
        self.num_running += 1
        try:
            generation = await run(self._transport, planned.request)
        except ClientError as error:
            record.error = error
        else:
            record.timing, record.finish_reason = generation.timing, generation.finish_reason
            for name in COUNTS:
                setattr(record, name, getattr(generation, name) or 0)
        finally:
            self.num_running -= 1
        self.records.append(record)

    async def _sample(self) -> None:
        assert self._reader is not None
        while True:
            await asyncio.sleep(SAMPLE_SECONDS)
            try:
                self._samples.append(await self._reader.read())
            except ClientError:  # a busy server may miss one; if it has gone, the requests and the last reading say so
                continue


@asynccontextmanager
async def _task_group() -> AsyncIterator[list[asyncio.Task[None]]]:
    """Waits for the tasks put into its list; cancels them when it is left by an exception. (asyncio has one from 3.11 on.)"""
    tasks: list[asyncio.Task[None]] = []
    try:
        yield tasks
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
