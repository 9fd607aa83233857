"""`python -m client bench`: load on a served model, and a report."""

from __future__ import annotations

import asyncio
import json
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table

from client.bench import STATISTICS, Bench, Measurement, warm_up
from client.errors import ClientError
from client.metrics import MetricsReader
from client.slo import METRICS, parse_slo, statistic
from client.transport import open_transport
from client.workload import Workload, make_workload, read_workload

REFRESH_SECONDS = 0.5


def bench_command(
    workload: Annotated[
        Path | None, typer.Option(help="Workload file (JSON) or trace; see docs/bench.md.", exists=True)
    ] = None,
    requests: Annotated[int, typer.Option(help="Requests to send.", min=1)] = 100,
    concurrency: Annotated[int, typer.Option(help="Closed loop: requests at a time; 0: an open loop.", min=0)] = 0,
    rate: Annotated[float, typer.Option(help="Open loop: requests a second; 0: a closed loop.", min=0)] = 0,
    arrivals: Annotated[str, typer.Option(help="Of an open loop: poisson or constant.")] = "poisson",
    prompt_tokens: Annotated[str, typer.Option(help="N, uniform:LOW,HIGH, normal:MEAN,DEV or lognormal:MEDIAN,SIGMA.")] = "128",
    output_tokens: Annotated[str, typer.Option(help="The same, of the output.")] = "64",
    prefix_tokens: Annotated[int, typer.Option(help="Tokens that the prompts of a group start with.", min=0)] = 0,
    prefix_count: Annotated[int, typer.Option(help="Groups of prompts, each with a prefix of its own.", min=1)] = 1,
    priority: Annotated[int, typer.Option(help="1 is first; 0: the model's default.", min=0)] = 0,
    timeout_ms: Annotated[int, typer.Option(help="Longest wait in the server's queue; 0: the model's default.", min=0)] = 0,
    seed: Annotated[int, typer.Option(help="The same seed gives the same requests at the same times.", min=0)] = 0,
    duration: Annotated[float, typer.Option(help="Send nothing more after so many seconds; 0: send all.", min=0)] = 0,
    speedup: Annotated[float, typer.Option(help="Replay a workload so many times as fast.", min=1e-3)] = 1.0,
    warmup: Annotated[int, typer.Option(help="Requests before, one at a time, that do not count.", min=0)] = 1,
    warm_cache: Annotated[
        bool, typer.Option("--warm-cache", help="Let the prefix cache serve what earlier runs left there.")
    ] = False,
    slo: Annotated[str, typer.Option(help="Limits for goodput, as ttft_p99=500ms,itl_p99=80ms.")] = "",
    protocol: Annotated[str, typer.Option(help="grpc or http.")] = "grpc",
    url: Annotated[str, typer.Option(help="host:port for grpc (8001), http://host:port for http (8000).")] = "",
    metrics_url: Annotated[str, typer.Option(help="host:port of Triton's metrics; '' leaves the server's view out.")] = "",
    model: Annotated[str, typer.Option(help="Name of the model.")] = "llm",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the result to this file.", dir_okay=False)] = None,
    html_file: Annotated[
        Path | None, typer.Option("--html", help="Write a page with plots to this file.", dir_okay=False)
    ] = None,
) -> None:
    """Load a served model and report TTFT, ITL, end-to-end latency, throughput and goodput.

    Give --concurrency (closed loop), --rate (open loop), or a --workload with times of its own. A --workload brings its own
    requests: what --requests, --rate, --arrivals, --seed and the options of prompts and outputs say does not count beside it.
    """
    traffic = {
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "prefix_tokens": prefix_tokens,
        "prefix_count": prefix_count,
        "priority": priority,
        "timeout_ms": timeout_ms,
    }
    spec = {"requests": requests, "seed": seed, "rate": rate or None, "arrivals": arrivals, "classes": [traffic]}
    console = Console(stderr=True, highlight=False)
    try:
        limits = parse_slo(slo) if slo else None
        plan = read_workload(workload) if workload else make_workload(spec)
        if speedup != 1.0:
            plan = plan.scaled(speedup)
        if not warm_cache:
            plan = plan.apart(uuid.uuid4().hex)
        measurement = _run(plan, concurrency or None, duration or None, warmup, protocol, url, metrics_url, model, console)
    except ClientError as error:
        typer.secho(f"error: {error}", fg="red", err=True)
        raise typer.Exit(error.exit_code) from None
    conditions = {
        "command": " ".join(sys.argv[1:]),
        "workload": plan.description,
        "load": f"{concurrency} at a time" if concurrency else "each at its own time",
        "protocol": protocol,
        "model": model,
    }
    summary = measurement.summary(limits)
    lines = result_lines(summary)
    if json_file:
        groups = sorted({record.planned.group for record in measurement.records})
        by_class = {name: measurement.group(name).summary(limits) for name in groups}
        report = {"conditions": conditions, "result": summary, "classes": by_class}
        json_file.write_text(json.dumps(report, ensure_ascii=False, indent=1) + "\n")
    if html_file:
        from client.report import html_report  # matplotlib takes a second to import

        page = html_report(measurement, limits, conditions, lines)
        html_file.write_text(page, encoding="utf-8")
    out = Console(highlight=False)
    out.print(plan.description, style="bold", soft_wrap=True)
    out.print(result_table(summary))
    for line in lines:
        out.print(line, markup=False, soft_wrap=True)
    for record in [record for record in measurement.records if record.error][:5]:
        console.print(f"{record.error_name}: {record.error}", markup=False, soft_wrap=True)


def _run(
    plan: Workload,
    concurrency: int | None,
    duration: float | None,
    warmup: int,
    protocol: str,
    url: str,
    metrics_url: str,
    model: str,
    console: Console,
) -> Measurement:
    bench: Bench | None = None

    async def main() -> Measurement:
        nonlocal bench
        transport = open_transport(protocol, url, model)
        reader = MetricsReader(metrics_url, model) if metrics_url else None
        try:
            await warm_up(transport, warmup)
            bench = Bench(transport, plan, concurrency, reader)
            with Live(console=console, refresh_per_second=2, transient=True) as live:
                shown = asyncio.create_task(_show(live, bench, len(plan.planned)))
                try:
                    return await bench.run(duration)
                finally:
                    shown.cancel()
        finally:
            await transport.close()
            if reader:
                await reader.close()

    try:
        return asyncio.run(main())
    except KeyboardInterrupt:
        if bench is None or not bench.records:
            raise typer.Exit(130) from None
        console.print("interrupted: this is what was measured so far", style="yellow")
        return bench.measurement()


async def _show(live: Live, bench: Bench, total: int) -> None:
    while True:
        now = bench.measurement()
        ttft = statistic(now.ttfts, "p50")
        live.update(
            f"{len(now.records)} of {total} ended ({len(now.records) - len(now.done)} failed), {bench.num_running} running, "
            f"{now.output_tokens_per_second:.0f} tokens/s, TTFT p50 {'-' if ttft is None else f'{ttft * 1e3:.0f} ms'}"
        )
        await asyncio.sleep(REFRESH_SECONDS)


def result_table(summary: Mapping[str, Any]) -> Table:
    """Latencies, as a person wants to see them first; of a measurement's summary."""
    latencies = summary["latency_ms"]
    table = Table("ms", *STATISTICS)
    for metric in METRICS:
        values = [latencies[metric][name] for name in STATISTICS]
        table.add_row(metric.upper(), *("-" if value is None else f"{value:.1f}" for value in values))
    return table


def result_lines(summary: Mapping[str, Any]) -> list[str]:
    """The rest of a summary, a line for each kind of number."""
    failed = ", ".join(f"{count} {name}" for name, count in summary["failed"].items()) or "none"
    lines = [
        f"{summary['completed']} of {summary['requests']} requests in {summary['seconds']:.1f} s; failed: {failed}",
        f"{summary['output_tokens_per_second']:.1f} output tokens/s, {summary['requests_per_second']:.2f} requests/s; "
        f"{summary['input_tokens']} tokens in ({summary['cached_tokens']} cached), {summary['output_tokens']} out",
    ]
    if drafted := summary["draft_tokens"]:
        accepted = summary["accepted_tokens"]
        lines.append(
            f"guessed ahead: {drafted} tokens, of which {accepted / drafted:.0%} were right and {accepted} saved a step"
        )
    if "slo" in summary:
        met = "met" if summary["slo_met"] else "not met"
        lines.append(f"SLO {summary['slo']}: {met}; goodput {summary['goodput_per_second']:.2f} requests/s")
    if (server := summary.get("server")) is not None:
        means = [f"{name} {server[f'{name}_batch_size_mean'] or 0:.1f}" for name in ("queue", "prefill", "decode")]
        lines.append(
            f"server: queue depth {server['queue_depth_mean']:.1f} mean, {server['queue_depth_max']:.0f} max; "
            f"mean batch: {', '.join(means)}; busy {server['busy_share']:.0%}"
        )
    lag = summary["send_lag_ms"]["p99"] or 0.0
    lines.append(f"client: {summary['client_cpu_share']:.0%} of a core, requests sent up to {lag:.1f} ms late (p99)")
    return lines
