"""TensorRT's compiler: the standard graph in, a plan out. `tensorrt` and `tensorrt-rtx` share one Python API and this module.

`tensorrt` builds on the GPU that will run the plan; `tensorrt-rtx` builds ahead of time, on any machine, for the compute
capabilities it is told (https://docs.nvidia.com/deeplearning/tensorrt-rtx/).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from build_engines.errors import BuildError
from build_engines.graph.io import input_axes
from build_engines.targets import RTX_CAPABILITIES
from llm_runtime.manifest import Limits, ModelFacts, Plan, Profile, Runtime

MODULES: dict[Runtime, str] = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}
PLAN_NAME = "engine.plan"
# A plan addresses a layer's pages with 32 bits.
_MAX_ELEMENTS = 2**31 - 1
# Pages that a row of the typical step has, as a part of the most it can have: what kernels are chosen for.
_TYPICAL_PART = 4


@dataclass(frozen=True)
class CompileOptions:
    """capabilities: compute capabilities ("8.9"); of the GPU at hand where empty. max_batch: rows of a decode step.
    max_step_tokens: tokens of a prefill step, of at most `max_prefill_rows` rows. workspace_mb: most memory that one kernel may
    use while it runs. timing_cache: read if it is there, and written. log: where every message of the compiler goes."""

    capabilities: tuple[str, ...] = ()
    max_batch: int = 32
    max_step_tokens: int = 512
    max_prefill_rows: int = 4
    optimization_level: int | None = None
    workspace_mb: int | None = None
    timing_cache: Path | None = None
    log: Path | None = None


def load_compiler(runtime: Runtime) -> Any:
    """The compiler's module. Raises BuildError that says what to install."""
    try:
        return importlib.import_module(MODULES[runtime])
    except ImportError as error:
        where = ", or build inside the NVIDIA container that has it" if runtime == "tensorrt" else ""
        raise BuildError(f"--target {runtime}: {error}; pip install {runtime}{where}") from error


def resolve_capabilities(runtime: Runtime, wanted: Sequence[str]) -> tuple[tuple[str, ...], str | None]:
    """The compute capabilities to build for, and the name of the GPU at hand where it is the one to build on.

    Raises BuildError where there is no GPU and one is needed, or it is not the one that was asked for.
    """
    if runtime == "tensorrt-rtx" and wanted:
        for capability in wanted:
            if capability not in RTX_CAPABILITIES:
                raise BuildError(
                    f"--compute-capability {capability}: tensorrt-rtx builds ahead of time for {', '.join(RTX_CAPABILITIES)};"
                    " use --target tensorrt on the GPU itself"
                )
        return tuple(wanted), None
    here = gpu_at_hand()
    if here is None:
        hint = (
            "name what to build for with --compute-capability, e.g. 8.9"
            if runtime == "tensorrt-rtx"
            else "build where the engine will run, or with --target tensorrt-rtx --compute-capability"
        )
        raise BuildError(f"--target {runtime}: this machine shows no NVIDIA GPU to build on; {hint}")
    capability, name = here
    if wanted and tuple(wanted) != (capability,):
        raise BuildError(
            f"--compute-capability {', '.join(wanted)}: tensorrt builds for the GPU at hand only, a {name} with {capability}"
        )
    return (capability,), name


def plan_profiles(limits: Limits, options: CompileOptions) -> tuple[Profile, Profile]:
    """The largest prefill and decode steps."""
    pages = -(-limits.max_context // limits.page_size)
    tokens, rows = options.max_step_tokens, options.max_prefill_rows
    prefill = Profile(max_rows=rows, max_tokens=tokens, max_row_tokens=tokens, max_row_pages=pages, max_logits=rows)
    batch = options.max_batch
    decode = Profile(max_rows=batch, max_tokens=batch, max_row_tokens=1, max_row_pages=pages, max_logits=batch)
    return prefill, decode


def compile_plan(
    graph: Path,
    folder: Path,
    runtime: Runtime,
    model: ModelFacts,
    limits: Limits,
    options: CompileOptions,
    progress: Callable[[float], None] = lambda fraction: None,
) -> Plan:
    """Compiles the standard graph in `graph` into `folder`/engine.plan and says what came out.

    Raises BuildError with the compiler's own reason, and where to read more, if it refuses.
    """
    if runtime == "tensorrt-rtx" and options.timing_cache is not None:
        raise BuildError("--timing-cache: tensorrt-rtx times no kernels; leave it out")
    capabilities, device = resolve_capabilities(runtime, options.capabilities)
    trt = load_compiler(runtime)
    prefill, decode = plan_profiles(limits, options)
    max_pages = _MAX_ELEMENTS // (limits.page_size * model.num_kv_heads * model.head_dim)
    with _logger(trt, options.log) as logger:
        builder = trt.Builder(logger)
        network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
        parser = trt.OnnxParser(network, logger)
        if not parser.parse_from_file(str(graph)):
            reasons = [parser.get_error(i).desc() for i in range(parser.num_errors)]
            raise BuildError(f"{runtime} cannot read the graph: {_one_line(reasons)}")
        _let_attention_decompose(trt, network)
        config = builder.create_builder_config()
        _configure(trt, config, runtime, capabilities if device is None else (), options, progress)
        for profile in (prefill, decode):
            config.add_optimization_profile(_optimization_profile(builder, network, profile, max_pages))
        plan = builder.build_serialized_network(network, config)
        if plan is None:
            where = f"; the whole log is in {options.log}" if options.log else "; --builder-log FILE keeps the whole log"
            raise BuildError(f"{runtime} cannot compile the graph: {_one_line(logger.errors)}{where}")
        (folder / PLAN_NAME).write_bytes(memoryview(plan))
        if options.timing_cache is not None:
            options.timing_cache.write_bytes(memoryview(config.get_timing_cache().serialize()))
    progress(1.0)
    return Plan(
        file=PLAN_NAME,
        tensorrt_version=trt.__version__,
        compute_capabilities=capabilities,
        device=device,
        prefill=prefill,
        decode=decode,
        max_pages=max_pages,
    )


def _configure(
    trt: Any,
    config: Any,
    runtime: Runtime,
    capabilities: Sequence[str],
    options: CompileOptions,
    progress: Callable[[float], None],
) -> None:
    """`capabilities` to build for; empty: that of the GPU at hand."""
    if runtime == "tensorrt-rtx":
        names = [f"SM{capability.replace('.', '')}" for capability in capabilities] or ["CURRENT"]
        config.num_compute_capabilities = len(names)
        for index, name in enumerate(names):
            config.set_compute_capability(getattr(trt.ComputeCapability, name), index)
    if options.optimization_level is not None:
        config.builder_optimization_level = options.optimization_level
    if options.workspace_mb is not None:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, options.workspace_mb << 20)
    if options.timing_cache is not None:
        known = options.timing_cache.read_bytes() if options.timing_cache.is_file() else b""
        if not config.set_timing_cache(config.create_timing_cache(known), ignore_mismatch=False):
            raise BuildError(f"--timing-cache {options.timing_cache}: not of this TensorRT and GPU; name another file")
    config.progress_monitor = _monitor(trt, progress)


def _optimization_profile(builder: Any, network: Any, profile: Profile, max_pages: int) -> Any:
    largest: dict[int | str, int] = {
        "T": profile.max_tokens,
        "B": profile.max_rows,
        "M": profile.max_row_tokens,
        "P": profile.max_row_pages,
        "L": profile.max_logits,
        "N": max_pages,
    }
    is_decode = profile.max_row_tokens == 1
    # The step that kernels are chosen for: a quarter of a full batch, or one whole chunk of one prompt.
    rows = max(1, profile.max_rows // _TYPICAL_PART) if is_decode else 1
    typical: dict[int | str, int] = {
        "T": rows if is_decode else profile.max_tokens,
        "B": rows,
        "M": profile.max_row_tokens,
        "P": max(1, profile.max_row_pages // _TYPICAL_PART),
        "L": rows,
        "N": max_pages,
    }
    made = builder.create_optimization_profile()
    for i in range(network.num_inputs):
        tensor = network.get_input(i)
        axes = tuple(zip(input_axes(tensor.name), tensor.shape, strict=True))
        tables = (dict.fromkeys(largest, 1), typical, largest)
        made.set_shape(tensor.name, *(tuple(table.get(axis, size) for axis, size in axes) for table in tables))
    return made


def _let_attention_decompose(trt: Any, network: Any) -> None:
    """Where the compiler has no fused kernel for an attention (float32 for one), plain operators may do it."""
    kind = getattr(trt.LayerType, "ATTENTION_OUTPUT", None)
    if kind is None:
        return
    for i in range(network.num_layers):
        layer = network.get_layer(i)
        if layer.type == kind:
            layer.__class__ = trt.IAttentionOutputLayer
            layer.attention.decomposable = True


@contextmanager
def _logger(trt: Any, path: Path | None) -> Iterator[Any]:
    """Keeps errors for the message to the user, and everything in `path` if there is one."""

    class Logger(trt.ILogger):
        def __init__(self, file: IO[str] | None) -> None:
            super().__init__()
            self.errors: list[str] = []
            self._file = file

        def log(self, severity: Any, message: str) -> None:
            if severity in (self.INTERNAL_ERROR, self.ERROR):
                self.errors.append(message)
            if self._file is not None:
                self._file.write(f"[{str(severity).rpartition('.')[2]}] {message}\n")

    if path is None:
        yield Logger(None)
        return
    try:
        file = path.open("w", encoding="utf-8")
    except OSError as error:
        raise BuildError(f"--builder-log {path}: {error.strerror}") from error
    with file:
        yield Logger(file)


def _monitor(trt: Any, progress: Callable[[float], None]) -> Any:
    """Fractions of the compiler's tree of phases; each phase tells its number of steps, and may start phases within a step."""

    class Monitor(trt.IProgressMonitor):
        def __init__(self) -> None:
            super().__init__()
            self._phases: dict[str, tuple[str | None, int, int]] = {}  # name -> parent, steps, done

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            self._phases[phase_name] = (parent_phase, max(1, num_steps), 0)

        def step_complete(self, phase_name: str, step: int) -> bool:
            parent, steps, _ = self._phases[phase_name]
            self._phases[phase_name] = (parent, steps, step + 1)
            progress(min(1.0, self._fraction(phase_name)))
            return True

        def phase_finish(self, phase_name: str) -> None:
            self._phases.pop(phase_name, None)

        def _fraction(self, name: str) -> float:
            """Of the whole build, at the present step of this phase."""
            inner = 0.0
            current: str | None = name
            while current in self._phases:
                parent, steps, done = self._phases[current]
                inner = (done + inner) / steps
                current = parent
            return inner

    return Monitor()


def gpu_at_hand() -> tuple[str, str] | None:
    """(compute capability, name) of the first GPU that is visible."""
    import torch

    if not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability()
    return f"{major}.{minor}", torch.cuda.get_device_name()


def _one_line(messages: Sequence[str]) -> str:
    """The first message: later ones follow from it."""
    return " ".join(messages[0].split()) if messages else "no reason given"
