"""`python -m client diagnose`: readings of a served model, and what they say about its batching."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from client.diagnose import diagnose
from client.errors import ClientError
from client.findings import Finding, lines
from client.knobs import shown
from client.metrics import MetricsReader, Snapshot
from client.readings import Readings, take_readings
from client.repository import read_config

SAMPLE_SECONDS = 0.5  # the server renews its values several times a second


def diagnose_command(
    seconds: Annotated[float, typer.Option(help="How long to watch the present traffic.", min=1.0)] = 20.0,
    metrics_url: Annotated[str, typer.Option(help="host:port of Triton's metrics.")] = "127.0.0.1:8002",
    url: Annotated[str, typer.Option(help="host:port of gRPC, or http://host:port, for the configuration.")] = "127.0.0.1:8001",
    model: Annotated[str, typer.Option(help="Name of the model.")] = "llm",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, for scripts.")] = False,
) -> None:
    """Watch a served model and say which way its batching is off, and which knob to move."""
    try:
        readings = asyncio.run(watch(seconds, metrics_url, url, model))
    except KeyboardInterrupt:
        typer.secho("interrupted", fg="red", err=True)
        raise typer.Exit(130) from None
    except ClientError as error:
        typer.secho(f"error: {error}", fg="red", err=True)
        raise typer.Exit(error.exit_code) from None
    findings = diagnose(readings)
    if as_json:
        typer.echo(json.dumps(as_plain(readings, findings), ensure_ascii=False, indent=1))
        return
    console = Console(highlight=False)
    console.print(table(readings))
    for number, finding in enumerate(findings, 1):
        first, *others = lines(finding)
        console.print(f"{number}. {first}", markup=False, soft_wrap=True)
        for line in others:
            console.print(f"   {line}", markup=False, soft_wrap=True)


async def watch(seconds: float, metrics_url: str, url: str, model: str) -> Readings:
    """Sample the metrics for so long. Raises ClientError."""
    config = await read_config(url, model)
    reader = MetricsReader(metrics_url, model)
    columns = (
        TextColumn("watching {task.fields[name]}"),
        BarColumn(),
        TextColumn("{task.completed:.0f} of {task.total:.0f} s"),
    )
    try:
        snapshots: list[Snapshot] = [await reader.check()]
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task("", total=seconds, name=reader.url)
            while (passed := snapshots[-1].time - snapshots[0].time) < seconds:
                progress.update(task, completed=passed)
                await asyncio.sleep(min(SAMPLE_SECONDS, seconds - passed))
                snapshots.append(await reader.read())
    finally:
        await reader.close()
    return take_readings(snapshots, config)


def as_plain(readings: Readings, findings: list[Finding]) -> dict[str, Any]:
    """What `--json` prints."""
    return {"readings": asdict(readings), "findings": [asdict(finding) for finding in findings]}


def table(readings: Readings) -> Table:
    """The raw readings."""
    result = Table("reading", "value", title=f"{readings.seconds:.0f} s of traffic", title_justify="left")
    for name, value in _rows(readings):
        result.add_row(name, value)
    return result


def _rows(r: Readings) -> Iterator[tuple[str, str]]:
    yield "requests", f"{r.requests:.0f} ({r.requests / r.seconds:.2f}/s)"
    yield "tokens in / out", f"{r.prompt_tokens / r.seconds:.0f} / {r.generated_tokens / r.seconds:.0f} a second"
    yield "ended", ", ".join(f"{count:.0f} {reason}" for reason, count in r.finished.items()) or "none"
    yield "failed in Triton", ", ".join(f"{count:.0f} {reason}" for reason, count in r.failures.items()) or "none"
    yield "sequences running", f"{r.running:.1f} of {r.max_sequences:.0f} (at most {r.running_max:.0f})"
    yield "waiting in Triton's queue", f"{r.pending:.1f} (at most {r.pending_max:.0f})"
    yield "waiting inside the model", f"{r.waiting:.1f}"
    yield "time in steps", f"{r.busy_share:.0%}, {_number(r.step_mean_ms)} ms each"
    yield "wait in Triton's queue", f"{_number(r.queue_ms)} ms"
    yield "wait inside the model", f"{_number(r.inside_wait_ms)} ms"
    yield "TTFT after the queue, p50 / p99", f"{_number(r.ttft_p50_ms)} / {_number(r.ttft_p99_ms)} ms"
    yield "ITL p50 / p99", f"{_number(r.itl_p50_ms)} / {_number(r.itl_p99_ms)} ms"
    yield "requests handed over at once", _number(r.queue_batch_size)
    yield "prompts in a prefill step", f"{_number(r.prefill_batch_size)} ({r.prefill_tokens_per_step:.0f} tokens)"
    yield "sequences in a decode step", _number(r.decode_batch_size)
    yield "KV pages in use / cached", f"{r.kv_used_share:.0%} / {r.kv_cached_share:.0%} of {r.kv_pages:.0f}"
    yield "sequences paused for pages", f"{r.preemptions:.0f}"
    yield "prompt tokens from the prefix cache", f"{r.hit_share:.0%} ({r.evicted_pages:.0f} pages given up)"
    yield "knobs", ", ".join(f"{name} {shown(value)}" for name, value in r.knobs.items())


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
