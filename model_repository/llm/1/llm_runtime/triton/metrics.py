"""The runtime's numbers on Triton's metrics port.

Every update is a message to the server (about 16 microseconds), so a thread of its own sends, a few times a second, what has
changed. For the same reason a histogram is kept here and shown as the counters that Prometheus makes of one (`_bucket`, `_sum`,
`_count`): the Python backend's own takes a message for every value, which for ITL is one for every token.

All instances of a model add to the same series, gauges too: each adds what its own value has changed by.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import triton_python_backend_utils as pb_utils

from llm_runtime.metrics import COUNTERS, GAUGES, HISTOGRAMS, Series, Stats, counter_values, gauge_values

PERIOD_SECONDS = 0.2


class EngineMetrics:
    """Metrics of one model instance, labelled like Triton's own; `stats` is theirs as it goes on."""

    def __init__(self, model_name: str, version: str, stats: Stats) -> None:
        self._labels = {"model": model_name, "version": version}
        self._stats = stats
        self._sent: dict[Series, float] = {}
        self._metrics: dict[Series, Any] = {}
        self._families = {
            name: pb_utils.MetricFamily(name=name, description=text, kind=kind) for name, text, kind in _families()
        }
        self._is_counting = False
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)

    def start(self) -> None:
        """Show gauges from now on, and counters as 0: a series that appears with its first count has no rate for it."""
        for name, label in gauge_values(self._stats) | counter_values(self._stats):
            self._metric(name, label)
        self._send(gauge_values(self._stats))
        self._thread.start()

    def count_from_now(self) -> None:
        """Show what is counted from now on; what was before, while the model warmed up, is left out."""
        if not self._is_counting:
            self._sent |= counter_values(self._stats)
            self._is_counting = True

    def stop(self) -> None:
        """Send what is left, and take this instance's share out of the gauges."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()
        self._send(self._counters() | dict.fromkeys(gauge_values(self._stats), 0.0))

    def _run(self) -> None:
        while not self._stopping.wait(PERIOD_SECONDS):
            self._send(gauge_values(self._stats) | self._counters())

    def _counters(self) -> dict[Series, float]:
        return counter_values(self._stats) if self._is_counting else {}

    def _send(self, values: dict[Series, float]) -> None:
        for series, value in values.items():
            change = value - self._sent.get(series, 0.0)
            if change:
                self._metric(*series).increment(change)
                self._sent[series] = value

    def _metric(self, name: str, label: str) -> Any:
        series = (name, label)
        if series not in self._metrics:
            extra = dict([label.split("=", 1)]) if label else {}
            self._metrics[series] = self._families[name].Metric(labels=self._labels | extra)
        return self._metrics[series]


def _families() -> Iterator[tuple[str, str, Any]]:
    """(name, description, kind)"""
    gauge, counter = pb_utils.MetricFamily.GAUGE, pb_utils.MetricFamily.COUNTER
    for name, text in GAUGES.items():
        yield name, text, gauge
    for name, text in COUNTERS.items():
        yield name, text, counter
    for name, text in HISTOGRAMS.items():
        yield f"{name}_bucket", f"{text} (histogram: up to le)", counter
        yield f"{name}_sum", f"{text} (histogram: sum)", counter
        yield f"{name}_count", f"{text} (histogram: number)", counter
