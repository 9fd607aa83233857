"""A calibration as JSON and as one HTML page: the curve of throughput against latency, every trial, the decision."""

from __future__ import annotations

import html
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from client.calibrate_moves import key
from client.calibrate_record import Result
from client.knobs import Setting, shown
from client.report import STYLE, figure_of, svg, table
from client.slo import Slo
from client.workload import Workload


def verdict_line(result: Result, workload: Workload) -> str:
    """What was found, in a line."""
    rate = workload.rate or 0.0

    def capacity(value: float | None) -> str:
        return "none that was tried" if value is None else f"{value * rate:.3g} requests/s"

    if result.verdict == "none":
        return f"No setting met the SLO at any rate that was tried; nearest: {changes(result)}."
    if result.verdict == "baseline":
        # After an interruption nothing was concluded; what was measured stands.
        own = result.baseline_capacity or result.capacity(result.baseline)
        return f"No setting was better than the present one, which meets the SLO up to {capacity(own)}."
    return (
        f"{changes(result)}: meets the SLO up to {capacity(result.chosen_capacity)}; "
        f"the present setting, up to {capacity(result.baseline_capacity)}."
    )


def changes(result: Result) -> str:
    """The knobs that the chosen setting moves."""
    moved = [
        f"{knob} {shown(result.baseline[knob])} -> {shown(value)}"
        for knob, value in result.chosen.items()
        if value != result.baseline[knob]
    ]
    return ", ".join(moved) or "the present setting"


def as_json(result: Result, slo: Slo, workload: Workload, conditions: Mapping[str, str]) -> dict[str, Any]:
    """Everything that was measured; rates in requests a second."""
    rate = workload.rate or 0.0
    trials = [asdict(trial) | {"requests_per_second": trial.rate * rate} for trial in result.trials]
    return {
        "conditions": dict(conditions),
        "slo": str(slo),
        "verdict": result.verdict,
        "says": verdict_line(result, workload),
        "baseline": dict(result.baseline),
        "chosen": dict(result.chosen),
        "decisions": result.decisions,
        "skipped": result.skipped,
        "trials": trials,
    }


def as_html(result: Result, slo: Slo, workload: Workload, conditions: Mapping[str, str]) -> str:
    """The same for people."""
    rows = []
    for trial in result.trials:
        shown_setting = ", ".join(f"{knob} {shown(value)}" for knob, value in trial.setting.items())
        outcome = trial.outcome
        rate = f"{trial.rate * (workload.rate or 0.0):.2f}"
        if outcome is None:
            rows.append([trial.purpose, shown_setting, rate, "refused", "", trial.refused])
            continue
        details: Any = outcome.details
        met = "met" if outcome.is_met else "missed"
        rows.append(
            [trial.purpose, shown_setting, rate, met, f"{outcome.ratio:.2f}", f"{details['output_tokens_per_second']:.0f}"]
        )
    heads = ["trial", "setting", "requests/s", f"SLO {slo}", "worst of measured / allowed", "output tokens/s"]
    parts = [
        "<h1>Calibration</h1>",
        f"<p><b>{html.escape(verdict_line(result, workload))}</b></p>",
        table([], [[name, value] for name, value in conditions.items()]),
        svg(_curve(result, slo, workload), "Throughput against latency: up and to the left of the limit is better"),
        "<h2>Decisions</h2><ul>",
        *(f"<li>{html.escape(line)}</li>" for line in [*result.decisions, *result.skipped]),
        "</ul><h2>Trials</h2>",
        table(heads, rows),
    ]
    return f"<!doctype html><meta charset='utf-8'><title>Calibration</title><style>{STYLE}</style>{''.join(parts)}\n"


def _curve(result: Result, slo: Slo, workload: Workload) -> Any:
    """For the first limit: its latency at each rate, and the output tokens/s there."""
    limit = slo.limits[0]
    figure, (axis,) = figure_of()
    settings: list[tuple[Setting, str]] = [(result.baseline, "present setting")]
    if key(result.chosen) != key(result.baseline):
        settings.append((result.chosen, changes(result)))
    for setting, label in settings:
        trials = sorted((trial for trial in result.of(setting) if trial.outcome), key=lambda trial: trial.rate)
        details: list[Any] = [trial.outcome.details for trial in trials if trial.outcome]
        latencies = [each["latency_ms"][limit.metric].get(limit.statistic) for each in details]
        axis.plot(latencies, [each["output_tokens_per_second"] for each in details], marker="o", label=label)
    axis.axvline(limit.seconds * 1e3, color="tab:red", linestyle="--", label="limit")
    axis.set(xlabel=f"{limit.metric.upper()} {limit.statistic}, ms", ylabel="output tokens/s", ylim=(0, None), xscale="log")
    axis.legend()
    axis.grid(alpha=0.3)
    return figure
