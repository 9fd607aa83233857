"""Whether an engine folder can be loaded where this runs, and is the engine that a build would make."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from build_engines.build import BuildOptions
from build_engines.compile import gpu_at_hand, load_compiler
from build_engines.errors import BuildError
from llm_runtime.manifest import check_files, read_manifest


def check_engine(folder: Path) -> None:
    """Raises EngineError or BuildError with the first reason why not: damaged files, another version, another GPU."""
    manifest = read_manifest(folder)
    check_files(folder, manifest)
    plan = manifest.plan
    if plan is None:
        if importlib.util.find_spec("onnxruntime") is None:
            raise BuildError(f"{folder}: made for onnxruntime, which is not installed")
        return
    installed = load_compiler(manifest.runtime).__version__
    if not plan.fits(installed):
        raise BuildError(f"{folder}: made by {manifest.runtime} {plan.tensorrt_version}; installed is {installed}")
    here = gpu_at_hand()
    wanted = ", ".join(plan.compute_capabilities)
    if here is None:
        raise BuildError(f"{folder}: made for a GPU of compute capability {wanted}; this machine shows none")
    if here[0] not in plan.compute_capabilities:
        raise BuildError(f"{folder}: made for compute capability {wanted}; the GPU here, a {here[1]}, has {here[0]}")


def check_matches(folder: Path, options: BuildOptions) -> None:
    """Raises BuildError where the engine in `folder` is of another model, target, precision or block size than these options
    name; what they leave open does not count. Raises EngineError where it is no engine."""
    manifest = read_manifest(folder)
    precision, wanted = manifest.precision, options.wanted
    for option, asked, found in (
        ("--model", options.model, manifest.source.model),
        ("--target", wanted.target, manifest.runtime),
        ("--precision", wanted.precision, precision.weights),
        # A mixture spends nearly all of its bits.
        ("--effective-bits", options.effective_bits, _near(precision.effective_bits, options.effective_bits)),
        ("--compute", _named(wanted.compute), precision.compute),
        ("--activations", _named(wanted.activations), precision.activations or "none"),
        ("--kv-cache", _named(wanted.kv_cache), precision.kv_cache),
        ("--lm-head", _named(wanted.lm_head), precision.lm_head),
        ("--block-size", options.block_size if precision.block_size else None, precision.block_size),
        ("--revision", options.revision, manifest.source.revision),
        ("--page-size", options.page_size, manifest.limits.page_size),
        ("--max-context", options.max_context, manifest.limits.max_context),
    ):
        if asked is not None and asked != found:
            raise BuildError(f"{folder}: {option} {asked} is asked for, and the engine there has {found}")


def _named(value: str) -> str | None:
    """None where it was left to the target and the model."""
    return None if value == "auto" else value


def _near(found: float | None, asked: float | None) -> float | None:
    """`asked` where `found` is as good as that."""
    return asked if found is not None and asked is not None and abs(found - asked) < 0.1 else found
