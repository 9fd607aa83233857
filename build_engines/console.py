"""What the commands share: where they write, progress bars, errors of one line, and the names of targets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from build_engines.build import Report
from build_engines.errors import BuildError
from llm_runtime.errors import EngineError

console = Console(stderr=True)


class TargetName(str, Enum):
    onnxruntime = "onnxruntime"
    tensorrt = "tensorrt"
    tensorrt_rtx = "tensorrt-rtx"


@contextmanager
def progress_bars() -> Iterator[Report]:
    """A bar for each step that is reported."""
    columns = (TextColumn("{task.description:<28}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        tasks: dict[str, int] = {}

        def report(step: str, fraction: float) -> None:
            if step not in tasks:
                tasks[step] = progress.add_task(step, total=1.0)
            progress.update(tasks[step], completed=fraction)  # type: ignore[arg-type]

        yield report


@contextmanager
def one_line_errors() -> Iterator[None]:
    """What a user can put right is one line and exit status 1, not a traceback."""
    try:
        yield
    except (BuildError, EngineError) as error:
        console.print(f"error: {error}", style="bold red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None
