"""Serve an engine with Triton in the foreground: `python scripts/serve.py --engine DIR`. Ctrl-C stops it."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from triton_server import CACHE, ROOT, ServerError, TritonServer

console = Console(highlight=False)
MODEL = "llm"
WATCH_SECONDS = 2.0
RESTART_SECONDS = 60.0


def serve(
    engine: Annotated[
        Path, typer.Option(help="Engine folder made by `python -m build_engines build`.", exists=True, file_okay=False)
    ],
    model_repository: Annotated[Path, typer.Option(help="Model repository to serve.")] = ROOT / "model_repository",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    http_port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    grpc_port: Annotated[int, typer.Option(min=1, max=65535)] = 8001,
    metrics_port: Annotated[int, typer.Option(min=1, max=65535)] = 8002,
    model_config_name: Annotated[str, typer.Option(help="Serve with configs/NAME.pbtxt in place of config.pbtxt.")] = "",
    log: Annotated[
        Path | None,
        typer.Option(help="File for Triton's own log.", show_default=".cache/logs/triton-HTTP_PORT.log", dir_okay=False),
    ] = None,
    exit_seconds: Annotated[int, typer.Option(help="How long running streams may go on after Ctrl-C.", min=0)] = 10,
) -> None:
    """Run Triton until Ctrl-C or SIGTERM; exits 1 with the reason when it cannot load."""
    for number in (signal.SIGTERM, signal.SIGHUP):  # the server has a session of its own: nobody else would end it
        signal.signal(number, lambda *_: sys.exit(0))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells start what ends in `&` with it ignored
    server = TritonServer(
        model_repository.resolve(),
        http_port,
        grpc_port,
        metrics_port,
        host=host,
        log=log or CACHE / "logs" / f"triton-{http_port}.log",  # no two servers share a port, and so no log
        environment={"LLM_ENGINE_DIR": str(engine.resolve())},
        options=(f"--model-config-name={model_config_name}",) if model_config_name else (),
        exit_seconds=exit_seconds,
    )
    try:
        _check_profile(model_repository, model_config_name)
        _run(server, engine)
    except ServerError as error:
        console.print(f"error: {error}", style="bold red", markup=False, soft_wrap=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        console.print("\nStopping (running streams may finish) ...")
    finally:
        server.stop()
    console.print("Stopped.")


def _check_profile(repository: Path, name: str) -> None:
    """Triton itself falls back to config.pbtxt in silence."""
    known = sorted({path.stem for path in repository.glob("*/configs/*.pbtxt")})
    if name and name not in known:
        raise ServerError(f"no configs/{name}.pbtxt in {repository}; there is {', '.join(known) or 'none at all'}")


def _run(server: TritonServer, engine: Path) -> None:
    started = time.monotonic()
    server.start()
    console.print(f"Loading {engine} (log: {server.log}) ...", markup=False, soft_wrap=True)
    with console.status("Loading ..."):
        server.wait_until_ready()
    console.print(f"Ready after {time.monotonic() - started:.1f} s:")
    console.print(f"  HTTP     {server.http_url}\n  gRPC     {server.grpc_address}\n  metrics  {server.metrics_url}\n")
    console.print("Try, in another terminal:", style="bold")
    body = '{"text_input": "The capital of France is", "max_tokens": 32, "stream": true}'
    console.print(f"  curl -N {server.http_url}/v2/models/llm/generate_stream -d '{body}'", soft_wrap=True)
    python = os.path.relpath(sys.executable) if Path(sys.executable).is_relative_to(Path.cwd()) else sys.executable
    console.print(f'  {python} -m client generate "The capital of France is" --url {server.grpc_address}\n', soft_wrap=True)
    console.print("Ctrl-C stops the server.")
    _watch(server)


def _watch(server: TritonServer) -> None:
    """Until the server ends by itself (ServerError). Where a model process is gone or the server crashed, start it again,
    unless that was only a minute ago."""
    started = float("-inf")
    while True:
        status = server.wait(WATCH_SECONDS)
        if status is None and not server.has_lost_process(MODEL):
            continue
        what = f"The process of model {MODEL} is gone" if status is None else f"The server ended with status {status}"
        ended_itself = status is not None and status >= 0
        if ended_itself or time.monotonic() - started < RESTART_SECONDS:
            raise ServerError(f"{what}; its log is {server.log}")
        console.print(f"{what}; starting the server again ...", style="bold yellow")
        console.print(f"(what it said last is in {server.log}.previous)", markup=False, soft_wrap=True)
        server.stop(wait=False)
        server.start()
        server.wait_until_ready()
        started = time.monotonic()
        console.print("Ready again.")


if __name__ == "__main__":
    typer.run(serve)
