"""The runtime's numbers on Triton's metrics port.

Every update is a message to the server, so this runs on the sender's timer, and only values that changed are sent.
"""

from __future__ import annotations

from typing import Any

import triton_python_backend_utils as pb_utils

from llm_runtime.metrics import COUNTERS, GAUGES, Stats, counter_values, gauge_values


class EngineMetrics:
    """Metrics of one model instance, labelled like Triton's own."""

    def __init__(self, model_name: str, version: str) -> None:
        self._labels = {"model": model_name, "version": version}
        self._sent: dict[tuple[str, str], float] = {}
        self._metrics: dict[tuple[str, str], Any] = {}
        family = pb_utils.MetricFamily
        self._families = {name: family(name=name, description=text, kind=family.GAUGE) for name, text in GAUGES.items()}
        self._families |= {name: family(name=name, description=text, kind=family.COUNTER) for name, text in COUNTERS.items()}

    def update(self, stats: Stats) -> None:
        for key, value in gauge_values(stats).items():
            if self._sent.get(key) != value:
                self._metric(*key).set(value)
                self._sent[key] = value
        for key, value in counter_values(stats).items():
            if (increase := value - self._sent.get(key, 0)) > 0 or key not in self._sent:
                self._metric(*key).increment(increase)
                self._sent[key] = value

    def _metric(self, name: str, label: str) -> Any:
        """`label` is "" or "name=value"."""
        key = (name, label)
        if key not in self._metrics:
            extra = dict([label.split("=", 1)]) if label else {}
            self._metrics[key] = self._families[name].Metric(labels=self._labels | extra)
        return self._metrics[key]
