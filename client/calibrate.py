"""Measures settings on a live server for the search: load the model with a setting, send the workload, compare with the SLO."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from client.bench import Bench, Measurement, warm_up
from client.calibrate_record import Outcome, Result
from client.calibrate_search import Search
from client.calibrate_server import LiveServer
from client.diagnose import diagnose
from client.errors import RefusedError
from client.knobs import Setting, read_setting, with_setting
from client.metrics import MetricsReader
from client.readings import take_readings
from client.slo import Slo
from client.transport import Transport
from client.workload import Workload

LOOK_SECONDS = 1.0
MIN_RECORDS = 30  # before a measurement is judged
HOPELESS = 2.0  # times a limit
NOTHING = 1e6  # times a limit, where nothing of what is limited was measured


@dataclass
class Calibration:
    """One search on one server. `result` is complete up to the last measurement, also after an interruption."""

    server: LiveServer
    transport: Transport
    reader: MetricsReader
    workload: Workload
    slo: Slo

    def __post_init__(self) -> None:
        self.search: Search | None = None
        if not self.workload.is_open:
            raise RefusedError("workload: has no arrival times; allowed: a workload file with a rate, or a trace")

    @property
    def result(self) -> Result | None:
        return self.search.result if self.search else None

    async def run(self, knobs: Sequence[str], budget_seconds: float, say: Callable[[str], None], keep: bool) -> Result:
        """Find the setting, and leave the server as it was; with `keep`, and a better one found, with that. It is put back
        whatever happens. Raises ClientError."""
        await self.server.open()
        baseline = read_setting(self.server.original, knobs)
        self.search = Search(self._evaluate, baseline, knobs, budget_seconds, time.monotonic, say)
        try:
            result = await self.search.run()
            if keep and result.verdict == "improved":
                await self.server.apply(result.chosen)
                self.server.keep()
            return result
        finally:
            await self.server.restore()

    async def _evaluate(self, setting: Setting, rate: float) -> Outcome:
        await self.server.apply(setting)
        await warm_up(self.transport)
        # The prefix cache of a setting that is measured again holds the prompts of the last time.
        workload = self.workload.apart(uuid.uuid4().hex).sustained(rate)
        measurement = await self._measure(Bench(self.transport, workload, reader=self.reader))
        config = with_setting(self.server.original, setting)
        findings = diagnose(take_readings(measurement.samples, config))
        hints = tuple((move.knob, move.direction) for finding in findings for move in finding.moves)
        return Outcome(slo_ratio(measurement, self.slo), hints, measurement.summary(self.slo))

    async def _measure(self, bench: Bench) -> Measurement:
        """The whole workload, or as much of it as shows that the SLO is far from held."""
        running = asyncio.create_task(bench.run())
        try:
            while not running.done():
                await asyncio.wait([running], timeout=LOOK_SECONDS)
                if not running.done() and is_hopeless(bench.measurement(), self.slo):
                    # What runs is read to its end: a stream that is cancelled as it ends can keep the old instance for good.
                    bench.stop()
            return running.result()
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


def is_hopeless(measurement: Measurement, slo: Slo) -> bool:
    """Whether what ended so far is so far off that the rest need not be waited for."""
    worst = max((ratio for ratio in _ratios(measurement, slo) if ratio is not None), default=0.0)
    return len(measurement.records) >= MIN_RECORDS and worst > HOPELESS


def slo_ratio(measurement: Measurement, slo: Slo) -> float:
    """The worst of measured / allowed over the limits. A request that brought nothing was not within any limit, so one is
    enough to be over 1."""
    worst = max(NOTHING if ratio is None else ratio for ratio in _ratios(measurement, slo))
    failed = 1 - len(measurement.done) / len(measurement.records)
    return max(worst, 1 + 10 * failed) if failed else worst


def _ratios(measurement: Measurement, slo: Slo) -> list[float | None]:
    """Measured / allowed of each limit; None where nothing was measured."""
    values = [limit.value(measurement.latencies[limit.metric]) for limit in slo.limits]
    return [None if value is None else value / limit.seconds for value, limit in zip(values, slo.limits, strict=True)]
