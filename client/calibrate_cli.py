"""`python -m client calibrate`: the settings for an SLO, found on a live server."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from client.calibrate import Calibration
from client.calibrate_moves import TUNED
from client.calibrate_record import Result
from client.calibrate_server import LiveServer
from client.errors import ClientError, RefusedError
from client.knobs import with_setting
from client.metrics import MetricsReader
from client.pbtxt import message_text, read_pbtxt, set_knobs
from client.repository import ModelRepository
from client.slo import Slo, parse_slo
from client.transport import GrpcTransport
from client.workload import Workload, read_workload


def calibrate_command(
    slo: Annotated[str, typer.Option(help="Limits to keep, as ttft_p99=500ms,itl_p99=80ms.")],
    workload: Annotated[Path, typer.Option(help="Workload file with a rate, or a trace; see docs/bench.md.", exists=True)],
    output: Annotated[Path, typer.Option(help="Where the config.pbtxt goes.", dir_okay=False)] = Path("calibrated.pbtxt"),
    config_file: Annotated[
        Path | None, typer.Option(help="The config.pbtxt that is served: its comments are kept.", exists=True, dir_okay=False)
    ] = None,
    report: Annotated[Path, typer.Option(help="Report, .html or .json; both are written.", dir_okay=False)] = Path(
        "calibration"
    ),
    budget: Annotated[str, typer.Option(help="How long it may take: 90s, 10m, 1h.")] = "10m",
    knobs: Annotated[str, typer.Option(help="Knobs to try, with commas between.")] = ",".join(TUNED),
    apply: Annotated[bool, typer.Option("--apply", help="Leave a better setting that was found on the server.")] = False,
    unload_first: Annotated[bool, typer.Option("--unload-first", help="Where two engines do not fit into memory.")] = False,
    url: Annotated[str, typer.Option(help="host:port of gRPC.")] = "127.0.0.1:8001",
    metrics_url: Annotated[str, typer.Option(help="host:port of Triton's metrics.")] = "127.0.0.1:8002",
    model: Annotated[str, typer.Option(help="Name of the model.")] = "llm",
) -> None:
    """Try settings on a live server under a workload, and write the config.pbtxt that serves most requests within the SLO.

    The server must let models be loaded by request (--model-control-mode=explicit). Its configuration is put back at the end,
    at Ctrl-C and after an error.
    """
    console = Console(stderr=True, highlight=False)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # puts the configuration back like Ctrl-C
    try:
        limits, plan, seconds = parse_slo(slo), read_workload(workload), parse_duration(budget)
        text = read_pbtxt(config_file) if config_file else None
        calibration = _run(limits, plan, seconds, knobs.split(","), apply, unload_first, url, metrics_url, model, console)
        result = calibration.result
        if result is None or not result.trials:
            raise typer.Exit(130)
        found = with_setting(calibration.server.original, result.chosen)
        output.write_text(set_knobs(text, result.chosen) if text else message_text(found))
    except ClientError as error:
        typer.secho(f"error: {error}", fg="red", err=True)
        raise typer.Exit(error.exit_code) from None
    conditions = {"command": " ".join(sys.argv[1:]), "workload": plan.description, "slo": slo, "model": model}
    _write_report(report, result, limits, plan, conditions)
    typer.echo(f"configuration: {output}; report: {report.with_suffix('.html')}, {report.with_suffix('.json')}")


def parse_duration(text: str) -> float:
    """Seconds. Raises RefusedError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(s|m|h)", text)
    if match is None or float(match[1]) <= 0:
        raise RefusedError(f"budget: got {text!r}; allowed: a number with s, m or h, as 10m")
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2]]


def _write_report(report: Path, result: Result, slo: Slo, plan: Workload, conditions: dict[str, str]) -> None:
    from client.calibrate_report import as_html, as_json, verdict_line  # matplotlib takes a second to import

    report.with_suffix(".html").write_text(as_html(result, slo, plan, conditions), encoding="utf-8")
    values = json.dumps(as_json(result, slo, plan, conditions), ensure_ascii=False, indent=1)
    report.with_suffix(".json").write_text(f"{values}\n", encoding="utf-8")
    typer.echo(verdict_line(result, plan))


def _run(
    slo: Slo,
    plan: Workload,
    seconds: float,
    knobs: list[str],
    apply: bool,
    unload_first: bool,
    url: str,
    metrics_url: str,
    model: str,
    console: Console,
) -> Calibration:
    calibration: Calibration | None = None

    def say(line: str) -> None:
        console.print(line, markup=False, soft_wrap=True)

    async def main() -> None:
        nonlocal calibration
        repository, reader, transport = (
            ModelRepository(url, model),
            MetricsReader(metrics_url, model),
            GrpcTransport(url, model),
        )
        try:
            await reader.check()
            calibration = Calibration(LiveServer(repository, reader, unload_first, say), transport, reader, plan, slo)
            await calibration.run(knobs, seconds, say, apply)
        finally:
            await transport.close()
            await reader.close()
            await repository.close()

    try:
        asyncio.run(main())
    except KeyboardInterrupt:
        say("interrupted: the old configuration is back; this is what was found so far")
    if calibration is None:
        raise typer.Exit(130)
    return calibration
