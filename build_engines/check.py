"""Whether an engine folder can be loaded where this runs: what `docker compose up` asks before it builds anew."""

from __future__ import annotations

import importlib.util
from pathlib import Path

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
