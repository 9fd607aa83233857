"""`evaluate` and `select`: measure engines, and build the smallest that is good enough."""

from __future__ import annotations

import json
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.console import Console
from rich.table import Table

from build_engines.build import DEMO, BuildOptions
from build_engines.card import engine_card, size_bytes
from build_engines.checkpoint.gguf import DEMO_TERMS
from build_engines.console import TargetName, console, one_line_errors, progress_bars
from build_engines.engine import installed_versions
from build_engines.errors import BuildError
from build_engines.evaluate import (
    NUM_WINDOWS,
    WINDOW,
    Conditions,
    Evaluated,
    HeldOut,
    MatmulAccuracy,
    PageChoice,
    evaluate,
    quality,
    write_quality,
)
from build_engines.select import Selection, parse_percent, select
from build_engines.targets import Wanted
from llm_runtime.manifest import Runtime

VERSIONS = ("numpy", "onnxruntime", "tokenizers", "tensorrt", "tensorrt-rtx")


class MatmulName(str, Enum):
    int8 = "int8"
    fp32 = "fp32"


class PageName(str, Enum):
    auto = "auto"
    int8 = "int8"
    fp8 = "fp8"


TextOption = Annotated[Path, typer.Option(help="Held-out UTF-8 text: not what the weights were calibrated on.")]
CalibrationOption = Annotated[
    Path | None, typer.Option(help="Text that the weights are calibrated on; default: the small built-in one.")
]
WindowsOption = Annotated[int, typer.Option("--windows", help=f"Windows of {WINDOW} tokens to read.", min=1)]
SkipOption = Annotated[int, typer.Option(help="Windows at the start of the text to leave out.", min=0)]
MatmulOption = Annotated[MatmulName, typer.Option(help="Activations beside INT4 weights on onnxruntime, as in config.pbtxt.")]
PagesOption = Annotated[PageName, typer.Option(help="What KV pages hold on onnxruntime, as in config.pbtxt.")]
ThreadsOption = Annotated[int, typer.Option(help="Threads of onnxruntime; 0: one a core.", min=0)]


def evaluate_command(
    folders: Annotated[list[Path], typer.Argument(help="Engine folders.", metavar="DIR...")],
    text: TextOption,
    reference: Annotated[
        str | None,
        typer.Option(help="Folder of an fp32 engine, or a model to build one from; default: what engine.json says it is of."),
    ] = None,
    windows: WindowsOption = NUM_WINDOWS,
    skip_windows: SkipOption = 0,
    calibration: CalibrationOption = None,
    matmul_accuracy: MatmulOption = MatmulName.int8,
    kv_cache_dtype: PagesOption = PageName.auto,
    threads: ThreadsOption = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="File for the figures and their conditions.")] = None,
) -> None:
    """Measure perplexity, top-1 agreement and KL divergence, and write them into each engine.json."""
    with one_line_errors():
        if json_file is not None and not json_file.parent.is_dir():
            raise BuildError(f"--json {json_file}: there is no folder {json_file.parent}")
        accuracy = cast(MatmulAccuracy, matmul_accuracy.value)
        pages = cast(PageChoice, kv_cache_dtype.value)
        conditions = Conditions(HeldOut(text, calibration), windows, skip_windows, accuracy, threads, pages)
        with progress_bars() as report:
            results = evaluate(folders, conditions, reference, report, _say)
        Console().print(_engines_table(results, conditions))
        if json_file is not None:
            _write_json(json_file, _as_json(results, conditions))
        for result in results:
            write_quality(result.subject.folder, quality(result.scores, result.subject.manifest, conditions))


def select_command(
    model: Annotated[str, typer.Option(help="Hugging Face hub id, local folder, GGUF file, or 'demo' (Gemma 3 270M).")],
    max_perplexity_increase: Annotated[str, typer.Option(help="Over the unquantized model's, in percent: 3% or 3.")],
    text: TextOption,
    output: Annotated[Path, typer.Option(help="Engine folder to make; one that is already an engine is replaced.")],
    target: Annotated[TargetName, typer.Option(help="What will run the engine.")] = TargetName.onnxruntime,
    compute_capability: Annotated[
        list[str] | None, typer.Option(help="GPU to build for, e.g. 8.9; may be given several times. Default: the GPU at hand.")
    ] = None,
    candidates: Annotated[
        str | None,
        typer.Option(
            help="Names with commas, tried from the fewest bits up. Default: all that the target runs: int4-128, int4-64, fp4,"
            " mixed-5, mixed-6, fp8, int8, and its float type."
        ),
    ] = None,
    windows: WindowsOption = NUM_WINDOWS,
    skip_windows: SkipOption = 0,
    calibration: CalibrationOption = None,
    max_context: Annotated[int, typer.Option(help="As in build.", min=0)] = 0,
    page_size: Annotated[int, typer.Option(help="As in build.", min=1, max=256)] = 16,
    revision: Annotated[str | None, typer.Option(help="Revision of a hub model.")] = None,
    matmul_accuracy: MatmulOption = MatmulName.int8,
    threads: ThreadsOption = 0,
) -> None:
    """Build from the heaviest quantization up and keep the first engine whose perplexity rises by no more than the bound."""
    wanted = Wanted(target=cast(Runtime, target.value), capabilities=tuple(compute_capability or ()))
    options = BuildOptions(
        model=model,
        wanted=wanted,
        page_size=page_size,
        max_context=max_context or None,
        calibration=calibration,
        revision=revision,
    )
    if model == DEMO:
        console.print(DEMO_TERMS, soft_wrap=True)
    with one_line_errors():
        bound = parse_percent(max_perplexity_increase)
        names = None if candidates is None else [name.strip() for name in candidates.split(",")]
        accuracy = cast(MatmulAccuracy, matmul_accuracy.value)
        conditions = Conditions(HeldOut(text, calibration), windows, skip_windows, accuracy, threads)
        with progress_bars() as report:
            selection = select(options, names, bound, conditions, output, report, _say)
        Console().print(_selection_table(selection))
        if selection.kept is None:
            raise BuildError(f"--max-perplexity-increase {max_perplexity_increase}: no candidate passed; nothing was kept")
        console.print(f"Built {output} from {selection.kept.candidate.name}", soft_wrap=True)
        console.print(engine_card(output))


def _say(message: str) -> None:
    console.print(message, markup=False, highlight=False, soft_wrap=True)


def _engines_table(results: list[Evaluated], conditions: Conditions) -> Table:
    columns = ("engine", "weights", "MiB", "perplexity", "increase", "top-1", "KL, nats")
    text = conditions.text.name
    compared = dict.fromkeys((r.reference, r.scores.reference_perplexity) for r in results if r.reference is not None)
    table = Table(
        title=f"{results[0].scores.num_tokens:,} tokens of {text}",
        caption="; ".join(f"compared with {name}, perplexity {perplexity:.3f}" for name, perplexity in compared),
        title_justify="left",
        caption_justify="left",
    )
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", no_wrap=index > 0, overflow="fold")
    for result in results:
        scores, manifest = result.scores, result.subject.manifest
        table.add_row(
            str(result.subject.folder),
            manifest.precision.weights + (f" b{manifest.precision.block_size}" if manifest.precision.block_size else ""),
            f"{size_bytes(result.subject.folder, manifest) / 2**20:,.0f}",
            f"{scores.perplexity:.3f}",
            _number(scores.reference_perplexity and scores.perplexity / scores.reference_perplexity - 1, "+.2%"),
            _number(scores.top1_agreement, ".2%"),
            _number(scores.kl_divergence, ".5f"),
        )
    return table


def _selection_table(selection: Selection) -> Table:
    reference = selection.reference_perplexity
    title = "Candidates" if reference is None else f"Unquantized: perplexity {reference:.3f}"
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(("candidate", "bits", "perplexity", "increase", "MiB", "verdict")):
        table.add_column(column, justify="right" if 0 < index < 5 else "left", no_wrap=index < 5, overflow="fold")
    for tried in selection.tries:
        table.add_row(
            tried.candidate.name,
            f"{tried.candidate.bits:g}",
            _number(tried.perplexity, ".3f"),
            _number(tried.increase, "+.2%"),
            _number(tried.bytes and tried.bytes / 2**20, ",.0f"),
            tried.verdict,
            style="bold green" if tried is selection.kept else None,
        )
    return table


def _number(value: float | None, form: str) -> str:
    return "" if value is None else f"{value:{form}}"


def _as_json(results: list[Evaluated], conditions: Conditions) -> dict[str, Any]:
    engines = [
        {
            "folder": str(result.subject.folder),
            "name": result.subject.manifest.name,
            "precision": result.subject.manifest.precision.model_dump(),
            "bytes": size_bytes(result.subject.folder, result.subject.manifest),
            "reference": result.reference,
            **asdict(result.scores),
        }
        for result in results
    ]
    return {
        "text": conditions.text.name,
        "sha256": conditions.text.sha256,
        "windows": conditions.num_windows,
        "window": WINDOW,
        "skip_windows": conditions.skip_windows,
        "matmul_accuracy": conditions.matmul_accuracy,
        "kv_cache_dtype": conditions.kv_cache_dtype,
        "threads": conditions.num_threads,
        "versions": installed_versions(VERSIONS),
        "engines": engines,
    }


def _write_json(path: Path, content: dict[str, Any]) -> None:
    try:
        path.write_text(json.dumps(content, indent=2) + "\n")
    except OSError as error:
        raise BuildError(f"--json {path}: {error.strerror}") from error
