"""Service-level objectives: limits on percentiles of latency, as in `ttft_p99=500ms,itl_p99=80ms`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from client.errors import RefusedError

METRICS = ("ttft", "itl", "e2e")
UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
ALLOWED = "allowed: METRIC_STATISTIC=TIME,... with metric ttft, itl or e2e, statistic mean or p1 to p100, unit us, ms or s"


@dataclass(frozen=True)
class Limit:
    """`metric` (ttft, itl, e2e) is to be at most `seconds` at `statistic` (mean, p99)."""

    metric: str
    statistic: str
    seconds: float

    def value(self, values: Sequence[float]) -> float | None:
        """The statistic of these latencies in seconds; None where there are none."""
        return statistic(values, self.statistic)


@dataclass(frozen=True)
class Slo:
    """All limits together."""

    limits: tuple[Limit, ...]

    def is_met_by(self, latencies: Mapping[str, Sequence[float]]) -> bool:
        """Whether every limit holds for these latencies in seconds by metric; what was never measured does not hold."""
        values = [(limit, limit.value(latencies[limit.metric])) for limit in self.limits]
        return all(value is not None and value <= limit.seconds for limit, value in values)

    def is_good(self, own: Mapping[str, float | None]) -> bool:
        """Whether one request's own TTFT, mean ITL and end-to-end time are within every limit; None is: it has no such time (a
        single token has no ITL)."""
        values = ((own[limit.metric], limit.seconds) for limit in self.limits)
        return all(value is None or value <= limit for value, limit in values)

    def __str__(self) -> str:
        return ",".join(f"{limit.metric}_{limit.statistic}={limit.seconds * 1e3:g}ms" for limit in self.limits)


def statistic(values: Sequence[float], name: str) -> float | None:
    """`mean`, or a percentile (`p99`, linear between the nearest values); None of nothing."""
    if not len(values):
        return None
    return float(np.mean(values) if name == "mean" else np.percentile(values, float(name[1:])))


def parse_slo(text: str) -> Slo:
    """Raises RefusedError that names the part that is wrong."""
    limits = []
    for part in text.split(","):
        match = re.fullmatch(r"(\w+?)_(mean|p(\d+(?:\.\d+)?))=(\d+(?:\.\d+)?)(us|ms|s)", part.strip())
        if match is None or match[1] not in METRICS or not 0 < float(match[3] or 50) <= 100 or float(match[4]) <= 0:
            raise RefusedError(f"slo: got {part.strip()!r}; {ALLOWED}")
        limits.append(Limit(match[1], match[2], float(match[4]) * UNITS[match[5]]))
    return Slo(tuple(limits))
