"""A measurement as one HTML page that needs nothing else: conditions, numbers, plots."""

from __future__ import annotations

import html
import io
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np

from client.bench import STATISTICS, Measurement
from client.metrics import Snapshot, Window
from client.slo import METRICS, Slo

matplotlib.use("svg")  # no display

from matplotlib.figure import Figure

MEANINGS = {
    "ttft": "time to the first token: from sending a request to the first response with a token",
    "itl": "inter-token latency: from a token to the next, one value for each token after the first",
    "e2e": "end to end: from sending a request to the end of its last response",
}
NUM_BINS = 60
STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em;color:#222}"
    "table{border-collapse:collapse}"
    "td,th{padding:.2em .8em;border-bottom:1px solid #ddd;text-align:right}td:first-child,th:first-child{text-align:left}"
    "svg{max-width:100%;height:auto}"
)


def html_report(measurement: Measurement, slo: Slo | None, conditions: Mapping[str, str], lines: Sequence[str]) -> str:
    """`lines`: what the command line says beside the table of latencies."""
    latencies = measurement.summary()["latency_ms"]
    rows = [[metric.upper(), *(_shown(latencies[metric][name]) for name in STATISTICS), MEANINGS[metric]] for metric in METRICS]
    parts = [
        "<h1>Load test</h1>",
        table([], [[name, value] for name, value in conditions.items()]),
        "<h2>Latency, ms</h2>",
        table(["", *STATISTICS, "what it is"], rows),
        *(f"<p>{html.escape(line)}</p>" for line in lines),
        _classes(measurement, slo),
        svg(_cdfs(measurement, slo), "Share of values up to each latency"),
        svg(_throughput(measurement), "Output tokens a second, as the client received them"),
    ]
    if len(measurement.samples) > 2:
        parts.append(svg(_queue(measurement.samples), "The server: requests waiting in its queue, and sequences that generate"))
        parts.append(svg(_batches(measurement.samples), "The server: mean batch of each half second"))
    failures = [[record.error_name, str(record.error)] for record in measurement.records if record.error]
    if failures:
        parts += ["<h2>Failures</h2>", table(["kind", "message"], failures[:100])]
    return f"<!doctype html><meta charset='utf-8'><title>Load test</title><style>{STYLE}</style>{''.join(parts)}\n"


def _classes(measurement: Measurement, slo: Slo | None) -> str:
    names = sorted({record.planned.group for record in measurement.records})
    if len(names) < 2:
        return ""
    rows = []
    for name in names:
        summary = measurement.group(name).summary(slo)
        p99s = [_shown(summary["latency_ms"][metric]["p99"]) for metric in METRICS]
        failed = ", ".join(f"{count} {kind}" for kind, count in summary["failed"].items()) or "none"
        rows.append([name, str(summary["requests"]), failed, *p99s, _shown(summary.get("goodput_per_second"))])
    heads = ["class", "requests", "failed", *(f"{metric.upper()} p99, ms" for metric in METRICS), "goodput, requests/s"]
    return "<h2>Classes</h2>" + table(heads, rows)


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """An HTML table of plain texts."""
    head = "".join(f"<th>{html.escape(text)}</th>" for text in heads)
    body = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def svg(figure: Figure, title: str) -> str:
    """A figure under its title, inside a page."""
    text = io.StringIO()
    figure.savefig(text, format="svg", bbox_inches="tight", metadata={"Date": None})
    return f"<h2>{html.escape(title)}</h2>{text.getvalue()[text.getvalue().index('<svg') :]}"


def figure_of(columns: int = 1) -> tuple[Figure, list[Any]]:
    """A wide figure with its axes side by side."""
    figure = Figure(figsize=(9, 3))
    return figure, [figure.add_subplot(1, columns, index + 1) for index in range(columns)]


def _cdfs(measurement: Measurement, slo: Slo | None) -> Figure:
    figure, axes = figure_of(len(METRICS))
    latencies = measurement.latencies
    for axis, metric in zip(axes, METRICS, strict=True):
        values = np.sort(latencies[metric]) * 1e3
        axis.step(values, np.arange(1, len(values) + 1) / max(1, len(values)), where="post")
        for limit in slo.limits if slo else ():
            if limit.metric == metric:
                axis.axvline(limit.seconds * 1e3, color="tab:red", linestyle="--", label=f"{limit.statistic} limit")
                axis.legend()
        axis.set(title=metric.upper(), xlabel="ms", ylim=(0, 1.02))
        axis.grid(alpha=0.3)
    return figure


def _throughput(measurement: Measurement) -> Figure:
    figure, (axis,) = figure_of()
    arrivals = [each for record in measurement.done if record.timing for each in record.timing.arrivals]
    start = min((record.sent_at for record in measurement.records), default=0.0)
    width = max(measurement.seconds, 1e-3) / NUM_BINS
    edges = np.arange(NUM_BINS + 1) * width
    tokens, _ = np.histogram([time - start for time, _ in arrivals], edges, weights=[count for _, count in arrivals])
    axis.step(edges[:-1], tokens / width, where="post")
    axis.set(xlabel="s", ylabel="tokens/s", ylim=(0, None))
    axis.grid(alpha=0.3)
    return figure


def _queue(samples: Sequence[Snapshot]) -> Figure:
    figure, (axis,) = figure_of()
    times = [sample.time - samples[0].time for sample in samples]
    for name, label in [
        ("nv_inference_pending_request_count", "waiting in the queue"),
        ("llm_waiting_sequences", "waiting inside"),
        ("llm_running_sequences", "running"),
        ("llm_max_sequences", "max_sequences"),
    ]:
        axis.step(times, [sample.gauge(name) for sample in samples], where="post", label=label)
    axis.set(xlabel="s", ylim=(0, None))
    axis.legend()
    axis.grid(alpha=0.3)
    return figure


def _batches(samples: Sequence[Snapshot]) -> Figure:
    figure, (axis,) = figure_of()
    windows = [Window(before, after) for before, after in itertools.pairwise(samples)]
    times = [window.after.time - samples[0].time for window in windows]
    for name in ("queue", "prefill", "decode"):
        means = [window.mean(f"llm_{name}_batch_size") for window in windows]
        axis.plot(times, [np.nan if mean is None else mean for mean in means], marker=".", label=name)
    axis.set(xlabel="s", ylim=(0, None))
    axis.legend()
    axis.grid(alpha=0.3)
    return figure
