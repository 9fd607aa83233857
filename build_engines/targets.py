"""What each target can run: the one table that decides it, and that refusals quote.

A graphics processor is known by its compute capability ("8.9"); NVIDIA's table of them is at
https://developer.nvidia.com/cuda-gpus. Which capability brought which type is TensorRT's support matrix, and for tensorrt-rtx
what its compiler accepts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast, get_args

from build_engines.errors import BuildError
from build_engines.graph.numerics import Numerics
from llm_runtime.manifest import CacheName, FloatName, Runtime

Activations = Literal["fp8", "int8", "fp4"]
FLOATS: tuple[str, ...] = get_args(FloatName)
PRECISIONS = ("fp32", "fp16", "bf16", "fp8", "int8", "int4", "fp4", "mixed")
# Since which compute capability a type can be used.
SINCE = {"fp32": (7, 5), "fp16": (7, 5), "int8": (7, 5), "bf16": (8, 0), "int4": (8, 0), "fp8": (8, 9), "fp4": (10, 0)}
SINCE_ON_RTX = SINCE | {"fp32": (8, 0)}  # it has no float32 products for Turing
GENERATIONS = {
    "7.5": "Turing",
    "8.0": "Ampere (A100)",
    "8.6": "Ampere",
    "8.9": "Ada",
    "9.0": "Hopper",
    "10.0": "Blackwell (B200)",
    "12.0": "Blackwell (RTX)",
    "12.1": "Blackwell (GB10)",
}
# tensorrt-rtx 1.7 builds ahead of time for these; for a GPU at hand it decides itself whether it can.
RTX_CAPABILITIES = ("7.5", "8.0", "8.6", "8.9", "12.0", "12.1")
HEADS = {
    "onnxruntime": ("fp32", "fp16", "bf16", "int8", "int4"),
    "tensorrt": ("fp32", "fp16", "bf16", "int8", "int4"),
    "tensorrt-rtx": ("fp32", "fp16", "bf16", "int8", "int4"),
}
# Activations of Gemma 3 leave the range of fp16 (65,504).
NEEDS_BF16 = ("gemma3",)


@dataclass(frozen=True)
class Wanted:
    """What the user asked for; "auto" where the target and the model are to decide."""

    target: Runtime = "onnxruntime"
    precision: str | None = None  # None: for the checkpoint to decide
    compute: str = "auto"
    activations: str = "auto"
    kv_cache: str = "auto"
    lm_head: str = "auto"
    capabilities: tuple[str, ...] = ()


@dataclass(frozen=True)
class Resolved:
    """What will be built."""

    numerics: Numerics
    activations: Activations | None
    lm_head: str
    wide: Literal["int8", "fp8"]  # what a mixture uses where INT4 hurts


def check_target(wanted: Wanted) -> None:
    """Raises BuildError, before a model is opened, for what the target cannot run whatever the model is."""
    if wanted.target == "onnxruntime":
        _refuse_on_cpu(wanted)
        return
    for capability in wanted.capabilities:
        if capability not in GENERATIONS:
            raise BuildError(f"--compute-capability {capability} is unknown; known are {', '.join(GENERATIONS)}")
        for option, kind in _types(wanted):
            if not can_run(kind, wanted.target, capability):
                runs = ", ".join(name for name in SINCE if can_run(name, wanted.target, capability))
                raise BuildError(
                    f"{option} {kind}: not with {wanted.target} on compute capability {capability} ({GENERATIONS[capability]}),"
                    f" which can run {runs}"
                )
    _check_activations(wanted)


def resolve(wanted: Wanted, family: str) -> Resolved:
    """Decides what was left to the target and the model; `wanted.precision` is known by now.

    Raises BuildError where the model needs what the target has not.
    """
    compute = _compute(wanted, family)
    floats = wanted.precision if wanted.target == "onnxruntime" and wanted.precision in FLOATS else compute
    cache = compute if wanted.kv_cache == "auto" else wanted.kv_cache
    numerics = Numerics(wanted.target, cast(FloatName, floats), cast(FloatName, compute), cast(CacheName, cache))
    activations = _activations(wanted)
    fp8_everywhere = wanted.target != "onnxruntime" and all(can_run("fp8", wanted.target, c) for c in wanted.capabilities)
    return Resolved(numerics, activations, _head(wanted, numerics), "fp8" if fp8_everywhere else "int8")


def can_run(kind: str, target: Runtime, capability: str) -> bool:
    """Whether a GPU of this compute capability can run a type, or a precision."""
    major, minor = map(int, capability.split("."))
    since = SINCE_ON_RTX if target == "tensorrt-rtx" else SINCE
    return (major, minor) >= since["int4" if kind == "mixed" else kind]


def runnable_precisions(target: Runtime, capabilities: Sequence[str]) -> list[str]:
    """The precisions that `target` runs on all these GPUs, the most bits a weight first."""
    return [p for p in PRECISIONS if target == "onnxruntime" or all(can_run(p, target, c) for c in capabilities)]


def _refuse_on_cpu(wanted: Wanted) -> None:
    if wanted.compute not in ("auto", "fp32"):
        raise BuildError(f"--compute {wanted.compute}: --target onnxruntime computes in fp32; weights may be stored in less")
    if wanted.kv_cache not in ("auto", "fp32"):
        raise BuildError(f"--kv-cache {wanted.kv_cache}: --target onnxruntime keeps fp32; fp8 needs --target tensorrt(-rtx)")
    if wanted.capabilities:
        raise BuildError("--compute-capability is of GPUs; --target onnxruntime runs on a CPU")
    _check_activations(wanted)


def _check_activations(wanted: Wanted) -> None:
    if wanted.activations == "auto" or wanted.precision is None:
        return
    allowed = ["none", wanted.precision] if wanted.precision in ("int8", "fp4") else ["none"]
    if wanted.precision == "fp8":  # E4M3 weights come with E4M3 activations
        allowed = ["fp8"]
    if wanted.precision == "fp4" and wanted.target == "onnxruntime":  # which has no FP4
        allowed = ["none"]
    if wanted.activations not in allowed:
        raise BuildError(
            f"--activations {wanted.activations}: with --precision {wanted.precision} and --target {wanted.target}, allowed:"
            f" {', '.join(allowed)}"
        )


def _types(wanted: Wanted) -> list[tuple[str, str]]:
    """Every type that the user's choices put into the plan, with the option it came from."""
    types = [("--precision", wanted.precision)] if wanted.precision else []
    for option, value in (
        ("--compute", wanted.compute),
        ("--activations", wanted.activations),
        ("--kv-cache", wanted.kv_cache),
        ("--lm-head", wanted.lm_head),
    ):
        types += [(option, value)] if value not in ("auto", "none") else []
    return types


def _activations(wanted: Wanted) -> Activations | None:
    if wanted.precision == "fp8":
        return "fp8"
    return None if wanted.activations in ("auto", "none") else cast(Activations, wanted.activations)


def _compute(wanted: Wanted, family: str) -> str:
    if wanted.target == "onnxruntime":
        return "fp32"
    chosen = wanted.compute
    if chosen == "auto" and wanted.precision in FLOATS:
        chosen = wanted.precision
    if chosen == "auto":
        chosen = "bf16" if family in NEEDS_BF16 else "fp16"
        if not all(can_run(chosen, wanted.target, capability) for capability in wanted.capabilities):
            raise BuildError(
                f"{family} needs bf16, since its activations leave the range of fp16; compute capability"
                f" {wanted.capabilities[0]} has none: use --compute fp32"
            )
    if wanted.precision in FLOATS and chosen != wanted.precision:
        raise BuildError(f"--compute {chosen}: with --precision {wanted.precision} it is {wanted.precision}")
    if chosen == "fp16" and family in NEEDS_BF16:
        raise BuildError(f"{family} in fp16: its activations leave the range of fp16 (65,504); use bf16 or fp32")
    return chosen


def _head(wanted: Wanted, numerics: Numerics) -> str:
    if wanted.lm_head == "auto":
        on_cpu_and_small = wanted.target == "onnxruntime" and wanted.precision in ("int4", "fp4", "mixed")
        return "int8" if on_cpu_and_small else numerics.floats
    if wanted.lm_head not in HEADS[wanted.target]:
        raise BuildError(f"--lm-head {wanted.lm_head}: {wanted.target} runs {', '.join(HEADS[wanted.target])}")
    if wanted.lm_head in FLOATS and wanted.lm_head != numerics.floats:
        raise BuildError(
            f"--lm-head {wanted.lm_head}: this engine keeps weights that are not quantized in {numerics.floats}; use that, int8"
            " or int4"
        )
    return wanted.lm_head
