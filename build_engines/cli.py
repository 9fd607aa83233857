"""`python -m build_engines`: build an engine, or read one's card."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from build_engines.build import DEMO, BuildOptions, build
from build_engines.card import engine_card
from build_engines.checkpoint.gguf import DEMO_TERMS
from build_engines.errors import BuildError
from llm_runtime.errors import EngineError
from llm_runtime.manifest import check_files, read_manifest

app = typer.Typer(
    help="Build quantized engines for the Triton model repository, and look at them.",
    no_args_is_help=True,
    add_completion=False,
)
console = Console(stderr=True)


class PrecisionName(str, Enum):
    fp32 = "fp32"
    int4 = "int4"


class TargetName(str, Enum):
    onnxruntime = "onnxruntime"


class AlgorithmName(str, Enum):
    awq = "awq"
    rtn = "rtn"


class HeadName(str, Enum):
    auto = "auto"
    fp32 = "fp32"
    int8 = "int8"
    int4 = "int4"


@app.command("build")
def build_command(
    model: Annotated[str, typer.Option(help="Hugging Face hub id, local folder, GGUF file, or 'demo' (Gemma 3 270M).")],
    output: Annotated[Path, typer.Option(help="Engine folder to make; one that is already an engine is replaced.")],
    precision: Annotated[PrecisionName, typer.Option(help="Of the decoder's linear layers.")] = PrecisionName.int4,
    block_size: Annotated[int, typer.Option(help="INT4 weights that share one scale: 64 or 128.")] = 128,
    algorithm: Annotated[AlgorithmName, typer.Option(help="How INT4 weights are found.")] = AlgorithmName.awq,
    lm_head: Annotated[
        HeadName, typer.Option(help="Precision of the output head; auto: int8 with int4 layers, else fp32.")
    ] = HeadName.auto,
    target: Annotated[TargetName, typer.Option(help="What will run the engine.")] = TargetName.onnxruntime,
    max_context: Annotated[int, typer.Option(help="Longest sequence in tokens; 0: the model's own.", min=0)] = 0,
    page_size: Annotated[int, typer.Option(help="Tokens of one KV-cache page.", min=1, max=256)] = 16,
    calibration: Annotated[
        Path | None, typer.Option(help="Text file that AWQ looks at; default: a small built-in one.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Revision of a hub model.")] = None,
) -> None:
    """Turn a checkpoint into an engine folder."""
    head = lm_head.value if lm_head is not HeadName.auto else ("int8" if precision is PrecisionName.int4 else "fp32")
    options = BuildOptions(
        model=model,
        revision=revision,
        precision=precision.value,
        block_size=block_size,
        algorithm=algorithm.value,
        lm_head=head,
        page_size=page_size,
        max_context=max_context or None,
        calibration=calibration,
    )
    if model == DEMO:
        console.print(DEMO_TERMS, soft_wrap=True)
    columns = (TextColumn("{task.description:<28}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=console) as progress:
            tasks: dict[str, int] = {}

            def report(step: str, fraction: float) -> None:
                if step not in tasks:
                    tasks[step] = progress.add_task(step, total=1.0)
                progress.update(tasks[step], completed=fraction)  # type: ignore[arg-type]

            build(options, output, report)
    except BuildError as error:
        _fail(str(error))
    console.print(f"Built {output}")
    console.print(engine_card(output))


@app.command()
def inspect(
    folder: Annotated[Path, typer.Argument(help="Engine folder.")],
    verify: Annotated[bool, typer.Option(help="Compare every file with its checksum.")] = True,
) -> None:
    """Show what an engine is: a readable card."""
    try:
        if verify:
            check_files(folder, read_manifest(folder))
        Console().print(engine_card(folder))
    except EngineError as error:
        _fail(str(error))


def _fail(message: str) -> None:
    console.print(f"error: {message}", style="bold red", markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(1)
