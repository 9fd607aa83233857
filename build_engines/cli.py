"""`python -m build_engines`: build engines, look at them, check them, measure them."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, cast

import typer
from rich.console import Console

from build_engines.build import DEMO, BuildOptions, build
from build_engines.card import engine_card
from build_engines.check import check_engine, check_matches
from build_engines.checkpoint.gguf import DEMO_TERMS
from build_engines.compile import CompileOptions
from build_engines.console import TargetName, console, one_line_errors, progress_bars
from build_engines.errors import BuildError
from build_engines.quality_cli import evaluate_command, select_command
from build_engines.targets import PRECISIONS, Wanted
from llm_runtime.errors import EngineError
from llm_runtime.manifest import Runtime, check_files, read_manifest

app = typer.Typer(
    help="Build quantized engines for the Triton model repository, and look at them.",
    no_args_is_help=True,
    add_completion=False,
)
app.command("evaluate")(evaluate_command)
app.command("select")(select_command)

PrecisionName = Enum("PrecisionName", {name: name for name in PRECISIONS}, type=str)  # type: ignore[misc]


class AlgorithmName(str, Enum):
    awq = "awq"
    rtn = "rtn"


class ComputeName(str, Enum):
    auto = "auto"
    fp32 = "fp32"
    fp16 = "fp16"
    bf16 = "bf16"


class ActivationsName(str, Enum):
    auto = "auto"
    none = "none"
    fp8 = "fp8"
    int8 = "int8"
    fp4 = "fp4"


class CacheName(str, Enum):
    auto = "auto"
    fp32 = "fp32"
    fp16 = "fp16"
    bf16 = "bf16"
    fp8 = "fp8"


class HeadName(str, Enum):
    auto = "auto"
    fp32 = "fp32"
    fp16 = "fp16"
    bf16 = "bf16"
    int8 = "int8"
    int4 = "int4"


WEIGHTS, TENSORRT = "Weights", "TensorRT"


@app.command("build")
def build_command(
    model: Annotated[str, typer.Option(help="Hugging Face hub id, local folder, GGUF file, or 'demo' (Gemma 3 270M).")],
    output: Annotated[Path, typer.Option(help="Engine folder to make; one that is already an engine is replaced.")],
    target: Annotated[TargetName, typer.Option(help="What will run the engine.")] = TargetName.onnxruntime,
    precision: Annotated[
        PrecisionName | None,  # type: ignore[valid-type]
        typer.Option(
            help="Of the decoder's linear layers; int4: the weights only; mixed: each layer its own, see --effective-bits."
            " Default: the checkpoint's own if it is quantized, else int4.",
            rich_help_panel=WEIGHTS,
        ),
    ] = None,
    block_size: Annotated[
        int | None,
        typer.Option(help="INT4 weights that share one scale: 64 (default of mixed) or 128.", rich_help_panel=WEIGHTS),
    ] = None,
    algorithm: Annotated[
        AlgorithmName,
        typer.Option(help="How INT4 weights are found; rtn: rounded to nearest, also FP8.", rich_help_panel=WEIGHTS),
    ] = AlgorithmName.awq,
    effective_bits: Annotated[
        float | None,
        typer.Option(help="Of mixed: bits a weight on average; each layer gets INT4 or 8 bits.", rich_help_panel=WEIGHTS),
    ] = None,
    activations: Annotated[
        ActivationsName,
        typer.Option(
            help="What inputs of quantized layers are rounded to; auto: fp8 with fp8 weights, else none; int8 with int8 weights"
            " is SmoothQuant.",
            rich_help_panel=WEIGHTS,
        ),
    ] = ActivationsName.auto,
    lm_head: Annotated[
        HeadName,
        typer.Option(
            help="Precision of the output head; auto: int8 on onnxruntime with 4-bit layers, else not quantized.",
            rich_help_panel=WEIGHTS,
        ),
    ] = HeadName.auto,
    calibration: Annotated[
        Path | None,
        typer.Option(help="Text file on which activations are seen; default: a small built-in one.", rich_help_panel=WEIGHTS),
    ] = None,
    save_checkpoint: Annotated[
        Path | None,
        typer.Option(
            help="New folder that keeps the quantized checkpoint, to build for other targets.", rich_help_panel=WEIGHTS
        ),
    ] = None,
    max_context: Annotated[
        int, typer.Option(help="Longest sequence in tokens; 0: the model's own, on TensorRT at most 8192.", min=0)
    ] = 0,
    page_size: Annotated[int, typer.Option(help="Tokens of one KV-cache page.", min=1, max=256)] = 16,
    revision: Annotated[str | None, typer.Option(help="Revision of a hub model.")] = None,
    if_needed: Annotated[
        bool,
        typer.Option(
            "--if-needed",
            help="Keep an engine that is in --output already, if it is of this model, target and precision and loads here.",
        ),
    ] = False,
    compute: Annotated[
        ComputeName,
        typer.Option(help="Type to calculate in; auto: fp16 (bf16 for Gemma 3).", rich_help_panel=TENSORRT),
    ] = ComputeName.auto,
    kv_cache: Annotated[
        CacheName, typer.Option(help="Type of cached keys and values; auto: that of --compute.", rich_help_panel=TENSORRT)
    ] = CacheName.auto,
    compute_capability: Annotated[
        list[str] | None,
        typer.Option(
            help="GPU to build for, e.g. 8.9, with tensorrt-rtx on any machine; may be given several times. Default: the GPU at"
            " hand.",
            rich_help_panel=TENSORRT,
        ),
    ] = None,
    max_batch: Annotated[
        int, typer.Option(help="Most sequences of a decode step.", min=1, max=1024, rich_help_panel=TENSORRT)
    ] = CompileOptions.max_batch,
    max_step_tokens: Annotated[
        int, typer.Option(help="Most prompt tokens of a prefill step.", min=1, max=65536, rich_help_panel=TENSORRT)
    ] = CompileOptions.max_step_tokens,
    max_prefill_rows: Annotated[
        int, typer.Option(help="Most prompts of a prefill step.", min=1, max=256, rich_help_panel=TENSORRT)
    ] = CompileOptions.max_prefill_rows,
    optimization_level: Annotated[
        int | None,
        typer.Option(help="How long TensorRT searches, 0 to 5.", min=0, max=5, rich_help_panel=TENSORRT),
    ] = None,
    workspace_mb: Annotated[
        int | None, typer.Option(help="Most MiB that one kernel may use beside its tensors.", min=1, rich_help_panel=TENSORRT)
    ] = None,
    timing_cache: Annotated[
        Path | None,
        typer.Option(help="File of kernel timings (tensorrt only): read if it exists, then written.", rich_help_panel=TENSORRT),
    ] = None,
    builder_log: Annotated[
        Path | None, typer.Option(help="File for every message of the compiler.", rich_help_panel=TENSORRT)
    ] = None,
) -> None:
    """Turn a checkpoint into an engine folder."""
    wanted = Wanted(
        target=cast(Runtime, target.value),
        precision=precision.value if precision else None,
        compute=compute.value,
        activations=activations.value,
        kv_cache=kv_cache.value,
        lm_head=lm_head.value,
        capabilities=tuple(compute_capability or ()),
    )
    options = BuildOptions(
        model=model,
        wanted=wanted,
        block_size=block_size,
        algorithm=algorithm.value,
        effective_bits=effective_bits,
        page_size=page_size,
        max_context=max_context or None,
        calibration=calibration,
        revision=revision,
        save_checkpoint=save_checkpoint,
        compiler=CompileOptions(
            max_batch=max_batch,
            max_step_tokens=max_step_tokens,
            max_prefill_rows=max_prefill_rows,
            optimization_level=optimization_level,
            workspace_mb=workspace_mb,
            timing_cache=timing_cache,
            log=builder_log,
        ),
    )
    if if_needed and _is_there(output, options):
        return
    if model == DEMO:
        console.print(DEMO_TERMS, soft_wrap=True)
    with one_line_errors(), progress_bars() as report:
        build(options, output, report, lambda line: console.print(line, soft_wrap=True, markup=False))
    console.print(f"Built {output}")
    console.print(engine_card(output))


def _is_there(folder: Path, options: BuildOptions) -> bool:
    """Says why not."""
    if not folder.exists():
        return False
    try:
        check_matches(folder, options)
        check_engine(folder)
    except (BuildError, EngineError) as error:
        console.print(f"Building anew: {error}", markup=False, soft_wrap=True)
        return False
    console.print(f"{folder} is there already", soft_wrap=True)
    return True


@app.command()
def inspect(
    folder: Annotated[Path, typer.Argument(help="Engine folder.")],
    verify: Annotated[bool, typer.Option(help="Compare every file with its checksum.")] = True,
) -> None:
    """Show what an engine is: a readable card."""
    with one_line_errors():
        if verify:
            check_files(folder, read_manifest(folder))
        Console().print(engine_card(folder))


@app.command()
def check(folder: Annotated[Path, typer.Argument(help="Engine folder.")]) -> None:
    """Exit with 0 if an engine is whole and this machine can load it, else with 1 and the reason."""
    with one_line_errors():
        check_engine(folder)
    console.print(f"{folder} can be loaded here", soft_wrap=True)
