"""From whatever a user names as a model to an engine folder, every step reported."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from build_engines import calibration, quantize
from build_engines.checkpoint import dequantize_to, gguf, hf, open_checkpoint
from build_engines.checkpoint.hf import HfCheckpoint
from build_engines.checkpoint.modelopt import ModeloptCheckpoint
from build_engines.checkpoint.types import linear_facts, linear_names
from build_engines.compile import CompileOptions, load_compiler, resolve_capabilities
from build_engines.engine import EngineOptions, write_engine
from build_engines.errors import BuildError
from build_engines.quantize import Recipe
from build_engines.targets import FLOATS, Resolved, Wanted, check_target, resolve
from llm_runtime.manifest import MANIFEST_NAME

Report = Callable[[str, float], None]
Say = Callable[[str], None]
DEMO = "demo"
DEFAULT_PRECISION, DEFAULT_BLOCK_SIZE = "int4", 128
# Of a mixture: where some layers take 8 bits anyway, finer scales of the rest pay more than wider layers (docs/quality.md).
MIXED_BLOCK_SIZE = 64
# A step over a longer context needs memory for all of it, for every row (docs/engines.md).
TENSORRT_CONTEXT = 8192


@dataclass(frozen=True)
class BuildOptions:
    """What the user asked for; see `python -m build_engines build --help`.

    `wanted.precision` None: the checkpoint's own where it is quantized, else INT4. block_size None: likewise, else 128, or
    64 of a mixture. What `compiler` says of compute capabilities does not count; `wanted` says it.
    """

    model: str
    wanted: Wanted = field(default_factory=Wanted)
    block_size: int | None = None
    algorithm: str = "awq"
    effective_bits: float | None = None
    page_size: int = 16
    max_context: int | None = None
    calibration: Path | None = None
    revision: str | None = None
    save_checkpoint: Path | None = None
    compiler: CompileOptions = field(default_factory=CompileOptions)


def build(options: BuildOptions, output: Path, report: Report, say: Say = lambda line: None) -> None:
    """Write the engine into `output`. `report` is called with a step's name and the fraction of it that is done, `say` with
    what the user should know.

    Everything that can be refused is refused before the work starts. Raises BuildError.
    """
    check_output(output)
    if options.save_checkpoint is not None and options.save_checkpoint.exists():
        raise BuildError(f"--save-checkpoint {options.save_checkpoint}: exists already")
    wanted = known_target(options.wanted)
    text = calibration.read_text(options.calibration) if options.calibration else None
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}-") as scratch:
        checkpoint = open_model(options, Path(scratch), report, say)
        check_context(options, checkpoint)
        if is_quantized(checkpoint):
            wanted = _as_it_is(options, wanted, checkpoint)
            resolved = resolve(wanted, checkpoint.config.family)
        else:
            wanted = replace(wanted, precision=wanted.precision or DEFAULT_PRECISION)
            resolved = resolve(wanted, checkpoint.config.family)
            recipe = recipe_for(options, wanted, resolved)
            if recipe is not None:
                checkpoint = quantize_checkpoint(options, checkpoint, recipe, Path(scratch), text, report)
        write(options, checkpoint, resolved, Path(scratch) / "engine", report)
        place(Path(scratch) / "engine", output)


def write(options: BuildOptions, checkpoint: HfCheckpoint, resolved: Resolved, folder: Path, report: Report) -> None:
    """The engine of an open checkpoint, quantized or not, into `folder`. Raises BuildError where TensorRT cannot compile it."""
    engine_options = EngineOptions(
        name=_short_name(options.model),
        lm_head=resolved.lm_head,
        page_size=options.page_size,
        max_context=options.max_context or _default_context(checkpoint, resolved),
        numerics=resolved.numerics,
        compiler=replace(options.compiler, capabilities=options.wanted.capabilities),
    )
    step = "Compiling the engine" if resolved.numerics.is_tensorrt else "Writing the engine"
    write_engine(checkpoint, folder, engine_options, lambda fraction: report(step, fraction))


def place(folder: Path, output: Path) -> None:
    """Moves a finished engine to where it was wanted, in place of the one there, if any."""
    shutil.rmtree(output, ignore_errors=True)
    folder.rename(output)


def known_target(wanted: Wanted) -> Wanted:
    """`wanted` with the compute capabilities that it is for, after all refusals that need no model."""
    check_target(wanted)
    if wanted.target == "onnxruntime":
        return wanted
    load_compiler(wanted.target)
    capabilities, _ = resolve_capabilities(wanted.target, wanted.capabilities)
    wanted = replace(wanted, capabilities=capabilities)
    check_target(wanted)
    return wanted


def check_output(output: Path) -> None:
    """Raises BuildError where `output` holds something else than an engine."""
    if output.exists() and not (output / MANIFEST_NAME).is_file() and (not output.is_dir() or any(output.iterdir())):
        raise BuildError(f"{output} exists and is not an engine folder; choose another --output")


def is_quantized(checkpoint: HfCheckpoint) -> bool:
    """Whether an engine takes its weights, or the scales of its cache, as they are."""
    return checkpoint.precision is not None or checkpoint.kv_cache is not None


def open_model(options: BuildOptions, scratch: Path, report: Report, say: Say) -> HfCheckpoint:
    """The checkpoint of a hub id, a folder, a GGUF file, or the demo; what cannot be used is refused on its small files."""
    path = Path(options.model).expanduser()
    revision = None
    if options.model == DEMO or path.suffix == ".gguf":
        file = gguf.demo_model(scratch) if options.model == DEMO else path
        if not file.is_file():
            raise BuildError(f"{file}: no such file")
        folder = scratch / "checkpoint"
        gguf.convert(file, folder, lambda fraction: report("Reading GGUF", fraction))
    elif path.is_dir():
        folder = path
    elif path.exists() or options.model.startswith((".", "/", "~")):
        raise BuildError(f"{path}: not a folder, nor a file that ends in .gguf")
    else:
        report("Downloading", 0.0)
        folder, revision = hf.fetch_from_hub(options.model, options.revision)
        report("Downloading", 1.0)
    checkpoint = open_checkpoint(folder, model=options.model, revision=revision)
    for warning in checkpoint.warnings:
        say(f"warning: {warning}")
    if folder == scratch / "checkpoint":
        checkpoint.source = replace(checkpoint.source, format="gguf")
    return checkpoint


def check_context(options: BuildOptions, checkpoint: HfCheckpoint) -> None:
    """Raises BuildError where the model was made for less."""
    longest = checkpoint.config.max_context
    if options.max_context and options.max_context > longest:
        raise BuildError(f"--max-context {options.max_context}: the model was made for up to {longest} tokens")


def _default_context(checkpoint: HfCheckpoint, resolved: Resolved) -> int:
    longest = checkpoint.config.max_context
    return min(longest, TENSORRT_CONTEXT) if resolved.numerics.is_tensorrt else longest


def _as_it_is(options: BuildOptions, wanted: Wanted, checkpoint: HfCheckpoint) -> Wanted:
    """What is wanted of a checkpoint that is quantized already; refused where it is something else, since nothing is quantized
    twice."""
    facts = {linear_facts(checkpoint.linear(name)) for name in linear_names(checkpoint.config)[:7]}
    kinds, blocks = {fact.kind for fact in facts}, {fact.block_size for fact in facts if fact.block_size}
    own = checkpoint.precision
    precision = "mixed" if own == "mixed" or len(kinds) > 1 else kinds.pop()
    where = f"{options.model}: a checkpoint quantized already ({own})"
    if precision == "float":  # an FP8 cache only
        precision = wanted.precision if wanted.precision in FLOATS else "fp32"
    if wanted.precision not in (None, precision):
        raise BuildError(f"--precision {wanted.precision}: {where} stays as it is; use --precision {precision}")
    if options.block_size and blocks and blocks != {options.block_size}:
        raise BuildError(f"--block-size {options.block_size}: {where} has blocks of {', '.join(map(str, sorted(blocks)))}")
    rounded = {fact.kind for fact in facts if fact.rounds_input}
    if wanted.activations == "none" and rounded:
        raise BuildError(f"--activations none: {where} has {rounded.pop()} activations")
    if wanted.activations not in ("auto", "none") and wanted.activations not in rounded:
        raise BuildError(f"--activations {wanted.activations}: {where} has none")
    if wanted.kv_cache == "fp8" and checkpoint.kv_cache is None:
        raise BuildError(f"--kv-cache fp8: {where} has no scales for one; quantize the original")
    wanted = replace(wanted, precision=precision)
    check_target(wanted)
    return wanted


def recipe_for(options: BuildOptions, wanted: Wanted, resolved: Resolved) -> Recipe | None:
    """How to quantize; None: not at all."""
    cache_fp8 = resolved.numerics.cache == "fp8"
    precision = str(wanted.precision)
    if precision in FLOATS and not cache_fp8:
        return None
    if precision != "mixed" and options.effective_bits is not None:
        raise BuildError(f"--effective-bits {options.effective_bits}: only with --precision mixed")
    return Recipe(
        precision="none" if precision in FLOATS else precision,
        block_size=options.block_size or (MIXED_BLOCK_SIZE if precision == "mixed" else DEFAULT_BLOCK_SIZE),
        algorithm=options.algorithm,
        activations=resolved.activations is not None,
        effective_bits=options.effective_bits,
        wide=resolved.wide,
        cache_fp8=cache_fp8,
    )


def quantize_checkpoint(
    options: BuildOptions, checkpoint: HfCheckpoint, recipe: Recipe, scratch: Path, text: str | None, report: Report
) -> HfCheckpoint:
    """The checkpoint quantized, in the options' `save_checkpoint` or else in `scratch`; its source is still the original's."""
    step = f"Quantizing ({recipe})"
    folder = options.save_checkpoint or scratch / "quantized"
    original = checkpoint.folder
    if checkpoint.is_dequantized:
        original = scratch / "dequantized"
        if not (original / "config.json").is_file():
            dequantize_to(checkpoint, original, lambda fraction: report("Dequantizing", fraction))
    quantize.quantize(original, folder, recipe, text, lambda fraction: report(step, fraction))
    quantized = ModeloptCheckpoint(folder)
    quantized.source = replace(checkpoint.source, quantization=quantized.source.quantization)
    return quantized


def _short_name(model: str) -> str:
    return Path(model).stem.lower() if model.endswith(".gguf") else Path(model).name.lower()
