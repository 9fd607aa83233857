"""Serve an engine with Triton in the foreground: `python scripts/serve.py --engine DIR`. Ctrl-C stops it."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from triton_server import ROOT, ServerError, TritonServer

console = Console(highlight=False)


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
    exit_seconds: Annotated[int, typer.Option(help="How long running streams may go on after Ctrl-C.", min=0)] = 10,
) -> None:
    """Run Triton until Ctrl-C or SIGTERM; exits 1 with the reason when it cannot load."""
    server = TritonServer(
        model_repository.resolve(),
        http_port,
        grpc_port,
        metrics_port,
        host=host,
        environment={"LLM_ENGINE_DIR": str(engine.resolve())},
        options=(f"--model-config-name={model_config_name}",) if model_config_name else (),
        exit_seconds=exit_seconds,
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        _run(server, engine)
    except ServerError as error:
        console.print(f"error: {error}", style="bold red", markup=False, soft_wrap=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        console.print("\nStopping (running streams may finish) ...")
    finally:
        server.stop()
    console.print("Stopped.")


def _run(server: TritonServer, engine: Path) -> None:
    started = time.monotonic()
    with console.status(f"Loading {engine} ..."):
        server.start()
        server.wait_until_ready()
    console.print(f"Ready after {time.monotonic() - started:.1f} s; log: {server.log}")
    console.print(f"  HTTP     {server.http_url}\n  gRPC     {server.grpc_address}\n  metrics  {server.metrics_url}\n")
    console.print("Try, in another terminal:", style="bold")
    body = '{"text_input": "The capital of France is", "max_tokens": 32, "stream": true}'
    console.print(f"  curl -N {server.http_url}/v2/models/llm/generate_stream -d '{body}'", soft_wrap=True)
    console.print(
        f'  .venv/bin/python -m client generate "The capital of France is" --url {server.grpc_address}\n', soft_wrap=True
    )
    console.print("Ctrl-C stops the server.")
    status = server.wait()
    raise ServerError(f"the server ended by itself with status {status}; its log is {server.log}")


if __name__ == "__main__":
    typer.run(serve)
