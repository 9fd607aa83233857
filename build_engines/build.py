"""From whatever a user names as a model to an engine folder, every step reported."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from build_engines import calibration, quantize
from build_engines.checkpoint import gguf, hf
from build_engines.checkpoint.modelopt import ModeloptCheckpoint, is_modelopt_folder
from build_engines.checkpoint.types import Checkpoint
from build_engines.engine import EngineOptions, write_engine
from build_engines.errors import BuildError
from llm_runtime.manifest import MANIFEST_NAME

Report = Callable[[str, float], None]
DEMO = "demo"


@dataclass(frozen=True)
class BuildOptions:
    """What the user asked for; see `python -m build_engines build --help`."""

    model: str
    precision: str = "int4"
    block_size: int = 128
    algorithm: str = "awq"
    lm_head: str = "int8"
    page_size: int = 16
    max_context: int | None = None
    calibration: Path | None = None
    revision: str | None = None


def build(options: BuildOptions, output: Path, report: Report) -> None:
    """Write the engine into `output`. `report` is called with a step's name and the fraction of it that is done.

    Everything that can be refused is refused before the work starts. Raises BuildError.
    """
    _check_output(output)
    text = calibration.read_text(options.calibration) if options.calibration else None
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}-") as scratch:
        checkpoint = _open(options, Path(scratch), report)
        _check_context(options, checkpoint)
        if options.precision == "int4" and not isinstance(checkpoint, ModeloptCheckpoint):
            checkpoint = _quantize(options, checkpoint, Path(scratch), text, report)
        unfinished = Path(scratch) / "engine"
        name = f"{_short_name(options.model)}-{options.precision}" + (
            f"-b{options.block_size}" if options.precision == "int4" else ""
        )
        engine_options = EngineOptions(name, options.lm_head, options.page_size, options.max_context)
        write_engine(checkpoint, unfinished, engine_options, lambda fraction: report("Writing the engine", fraction))
        shutil.rmtree(output, ignore_errors=True)
        unfinished.rename(output)


def _check_output(output: Path) -> None:
    if output.exists() and not (output / MANIFEST_NAME).is_file() and (not output.is_dir() or any(output.iterdir())):
        raise BuildError(f"{output} exists and is not an engine folder; choose another --output")


def _open(options: BuildOptions, scratch: Path, report: Report) -> Checkpoint:
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
    opened = ModeloptCheckpoint if is_modelopt_folder(folder) else hf.HfCheckpoint
    checkpoint = opened(folder, model=options.model, revision=revision)
    if folder == scratch / "checkpoint":
        checkpoint.source = replace(checkpoint.source, format="gguf")
    return checkpoint


def _check_context(options: BuildOptions, checkpoint: Checkpoint) -> None:
    longest = checkpoint.config.max_context
    if options.max_context and options.max_context > longest:
        raise BuildError(f"--max-context {options.max_context}: the model was made for up to {longest} tokens")


def _quantize(options: BuildOptions, checkpoint: Checkpoint, scratch: Path, text: str | None, report: Report) -> Checkpoint:
    step = f"Quantizing ({options.algorithm.upper()})"
    folder = scratch / "quantized"
    quantize.quantize(
        checkpoint.folder, folder, options.algorithm, options.block_size, text, lambda fraction: report(step, fraction)
    )
    quantized = ModeloptCheckpoint(folder)
    quantized.source = replace(checkpoint.source, quantization=quantized.source.quantization)
    return quantized


def _short_name(model: str) -> str:
    return Path(model).stem.lower() if model.endswith(".gguf") else Path(model).name.lower()
