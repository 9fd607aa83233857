"""Reads a model's numbers on Triton's metrics port: values of a moment, and what happened between two moments."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families

from client.errors import RefusedError, ServerError, UnreachableError, one_line
from client.transport import is_local

Labels = frozenset[tuple[str, str]]
TIMEOUT_SECONDS = 10.0


@dataclass(frozen=True)
class Snapshot:
    """All series of one model. `time` is in seconds of `time.perf_counter`, like all timing of the client.

    A series that is absent reads as 0: Triton shows many only once they have happened.
    """

    time: float
    series: Mapping[str, Mapping[Labels, float]]  # by name, without `_total`

    def gauge(self, name: str, **labels: str) -> float:
        """The sum of the series that have all of these labels."""
        wanted = set(labels.items())
        return sum(value for key, value in self.series.get(name, {}).items() if wanted <= key)

    def counter(self, name: str, **labels: str) -> float:
        """See gauge."""
        return self.gauge(name, **labels)

    def has(self, name: str) -> bool:
        """Whether the server shows a metric of this name for the model."""
        return name in self.series

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """Sums of the series by the value of one label; series without it are left out."""
        sums: dict[str, float] = {}
        for key, value in self.series.get(name, {}).items():
            if (text := dict(key).get(label)) is not None:
                sums[text] = sums.get(text, 0.0) + value
        return sums


@dataclass(frozen=True)
class Window:
    """What happened between two snapshots. A counter that fell was reset by a reload and counts from 0, as PromQL's does."""

    before: Snapshot
    after: Snapshot

    @property
    def seconds(self) -> float:
        return self.after.time - self.before.time

    def delta(self, name: str, **labels: str) -> float:
        """Increase of a counter, summed over the series that have these labels."""
        wanted = set(labels.items())
        earlier = self.before.series.get(name, {})
        return sum(
            _increase(earlier.get(key, 0.0), value) for key, value in self.after.series.get(name, {}).items() if wanted <= key
        )

    def rate(self, name: str, **labels: str) -> float:
        """Increase of a counter a second."""
        return self.delta(name, **labels) / self.seconds if self.seconds > 0 else 0.0

    def deltas(self, name: str, label: str) -> dict[str, float]:
        """Increases of a counter by the value of one label, those that did increase."""
        values = {value: self.delta(name, **{label: value}) for value in self.after.by_label(name, label)}
        return {value: increase for value, increase in values.items() if increase > 0}

    def count(self, histogram: str) -> float:
        """Values observed."""
        return self.delta(f"{histogram}_count")

    def mean(self, histogram: str) -> float | None:
        """Mean of the values observed; None when there were none."""
        count = self.count(histogram)
        return self.delta(f"{histogram}_sum") / count if count > 0 else None

    def quantile(self, histogram: str, q: float) -> float | None:
        """As PromQL's histogram_quantile: linear within a bucket, whose first one starts at 0; the highest finite bound for
        what lies above it. None when nothing was observed."""
        counts = sorted((float(bound), count) for bound, count in self._buckets(histogram).items())
        if not counts or counts[-1][1] <= 0:
            return None
        rank = q * counts[-1][1]
        lower_bound, lower_count = 0.0, 0.0
        for bound, count in counts:
            if count >= rank and count > lower_count:
                if math.isinf(bound):
                    break
                return lower_bound + (bound - lower_bound) * (rank - lower_count) / (count - lower_count)
            lower_bound, lower_count = bound, max(lower_count, count)
        return lower_bound

    def _buckets(self, histogram: str) -> dict[str, float]:
        name = f"{histogram}_bucket"
        return {bound: self.delta(name, le=bound) for bound in self.after.by_label(name, "le")}


def _increase(before: float, after: float) -> float:
    return after - before if after >= before else after


class MetricsReader:
    """Reads one model's metrics. `url` is host:port or http://host:port, with or without /metrics."""

    def __init__(self, url: str, model: str = "llm") -> None:
        base = (url if "://" in url else f"http://{url}").rstrip("/")
        self.url = base if base.endswith("/metrics") else f"{base}/metrics"
        self.model = model
        self._client = httpx.AsyncClient(timeout=TIMEOUT_SECONDS, trust_env=not is_local(self.url))

    async def read(self) -> Snapshot:
        """The present values. Raises UnreachableError, ServerError for what is no metrics page."""
        try:
            response = await self._client.get(self.url)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise UnreachableError(f"{self.url}: {one_line(str(error)) or type(error).__name__}") from error
        now = time.perf_counter()
        if response.status_code != 200:
            raise ServerError(f"{self.url}: HTTP status {response.status_code}; is it Triton's metrics port (8002)?")
        return Snapshot(now, parse(response.text, self.model, self.url))

    async def check(self) -> Snapshot:
        """`read`, and RefusedError where the server shows nothing of the model's runtime."""
        snapshot = await self.read()
        if not snapshot.has("llm_max_sequences"):
            what = "only Triton's own metrics" if snapshot.series else "nothing"
            raise RefusedError(
                f"{self.url} shows {what} of model {self.model!r}; allowed: a loaded model of this repository (llm_... metrics)"
            )
        return snapshot

    async def close(self) -> None:
        await self._client.aclose()


def parse(text: str, model: str, source: str = "metrics") -> dict[str, dict[Labels, float]]:
    """The series of one model by name (counters without `_total`) and by the labels other than model and version: versions
    are added up. Raises ServerError."""
    series: dict[str, dict[Labels, float]] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.labels.get("model") != model:
                    continue
                name = sample.name.removesuffix("_total")
                labels = frozenset((key, value) for key, value in sample.labels.items() if key not in ("model", "version"))
                values = series.setdefault(name, {})
                values[labels] = values.get(labels, 0.0) + sample.value
    except ValueError as error:
        raise ServerError(f"{source}: not a page of Prometheus metrics: {one_line(str(error))}") from error
    return series
