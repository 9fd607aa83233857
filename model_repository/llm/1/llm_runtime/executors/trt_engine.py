"""A TensorRT engine, loaded, checked and run. `tensorrt` and `tensorrt-rtx` share one Python API and this module.

Every decode shape has an execution context and a CUDA graph of its own, since a graph depends on the state of the context that
it was captured from; all contexts share one block of memory for activations, since one runs at a time. `tensorrt-rtx`, which
replaces its kernels while it runs, captures graphs itself; for `tensorrt` they are captured here. Either does so when a shape
comes up for the second time.

Sources: "Using CUDA Graphs with TensorRT Execution Context" in https://docs.nvidia.com/deeplearning/tensorrt/; "Working with
RTX CUDA Graphs" and "Working with Runtime Cache" in https://docs.nvidia.com/deeplearning/tensorrt-rtx/.
"""

from __future__ import annotations

import importlib
import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from llm_runtime.errors import EngineError
from llm_runtime.executors.trt_bindings import DECODE, TensorSpec, check_engine, io_table
from llm_runtime.manifest import EngineManifest, Plan, Runtime

log = logging.getLogger(__name__)
MODULES: dict[Runtime, str] = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}
# Beside the plan: kernels that tensorrt-rtx compiled for the GPU at hand.
RUNTIME_CACHE_NAME = "runtime.cache"


@dataclass(frozen=True)
class TrtOptions:
    cuda_graphs: bool = True
    max_graphs: int = 64  # the least recently used one goes when another is wanted


def load_module(runtime: Runtime, plan: Plan) -> Any:
    """The runtime's module. Raises EngineError where it is missing, or of another version than the one that made the plan."""
    wanted = ".".join(plan.tensorrt_version.split(".")[:2])
    install = f"pip install '{runtime}=={wanted}.*'"
    if runtime == "tensorrt":
        install += f", or serve in an NVIDIA container with TensorRT {wanted}"
    try:
        module = importlib.import_module(MODULES[runtime])
    except (ImportError, OSError) as error:  # OSError: a shared library of it is missing
        raise EngineError(f"the engine runs with {runtime}, which cannot be imported: {_one_line(error)}; {install}") from error
    if not plan.fits(module.__version__):
        raise EngineError(
            f"{plan.file} was made by {runtime} {plan.tensorrt_version}, and {module.__version__} is installed: {install}, or"
            " build the engine again"
        )
    return module


def gpu_at_hand() -> tuple[str, str]:
    """(compute capability, name) of the first GPU that is visible. Raises EngineError where there is none."""
    if not torch.cuda.is_available():
        reason = "no NVIDIA GPU is visible" if torch.version.cuda else f"torch {torch.__version__} is built without CUDA"
        raise EngineError(f"a TensorRT engine needs a GPU, and {reason}; build one with --target onnxruntime to serve on a CPU")
    major, minor = torch.cuda.get_device_capability()
    return f"{major}.{minor}", torch.cuda.get_device_name()


def check_capability(plan: Plan, capability: str, name: str) -> None:
    """Raises EngineError where the plan was not made for this GPU."""
    if capability not in plan.compute_capabilities:
        raise EngineError(
            f"{plan.file} runs on compute capability {', '.join(plan.compute_capabilities)}, and the GPU ({name}) has"
            f" {capability}; build the engine for it"
        )


class TrtRunner:
    """See trt.Runner. All calls are made with one stream current, which is not the default one."""

    def __init__(self, folder: Path, manifest: EngineManifest, options: TrtOptions) -> None:
        plan = manifest.plan
        assert plan is not None
        self._trt = load_module(manifest.runtime, plan)
        capability, name = gpu_at_hand()
        check_capability(plan, capability, name)
        self._logger = _make_logger(self._trt)
        self._runtime = self._trt.Runtime(self._logger)
        self._engine = self._runtime.deserialize_cuda_engine((folder / plan.file).read_bytes())
        if self._engine is None:
            raise EngineError(
                f"{folder / plan.file} could not be loaded by {manifest.runtime} {self._trt.__version__}: {self._reason()}"
            )
        check_engine(self._engine, manifest)
        self.description = f"{manifest.runtime} {self._trt.__version__} on {name}"
        self._options = options
        self._captures_itself = manifest.runtime == "tensorrt-rtx"
        self._uses_graphs = options.cuda_graphs
        self._specs = [spec for spec in io_table(manifest) if spec.is_input]
        self._activations = torch.empty(self._engine.device_memory_size_v2, dtype=torch.uint8, device="cuda")
        self._cache = _RuntimeCache(self._engine, folder / RUNTIME_CACHE_NAME) if self._captures_itself else None
        self._contexts: OrderedDict[tuple[int, ...], _Context] = OrderedDict()
        self._addresses: dict[str, int] = {}
        self._num_pages = 0

    def bind(self, addresses: Mapping[str, int], num_pages: int) -> None:
        self._addresses, self._num_pages = dict(addresses), num_pages

    def run(self, profile: int, sizes: Mapping[str, int]) -> None:
        has_graph = profile == DECODE and self._uses_graphs
        key = (profile, *sizes.values()) if has_graph else (profile,)
        if key not in self._contexts:
            self._make_room()
            self._contexts[key] = self._make_context(profile, has_graph)
        context = self._contexts[key]
        self._contexts.move_to_end(key)
        context.set_sizes(sizes)
        if has_graph and not self._captures_itself and context.graph is None and context.num_runs == 1:
            self._capture(context)
        if context.graph is not None:
            context.graph.replay()
        else:
            self._enqueue(context.trt)
        context.num_runs += 1

    def close(self) -> None:
        torch.cuda.synchronize()
        if self._cache is not None:
            self._cache.save()
        self._contexts.clear()
        del self._cache, self._engine, self._runtime, self._activations

    def _make_room(self) -> None:
        if len(self._contexts) < self._options.max_graphs + 2:  # those of the profiles, without a graph
            return
        torch.cuda.current_stream().synchronize()  # it may still be running
        oldest = next(key for key in self._contexts if len(key) > 1)
        del self._contexts[oldest]

    def _make_context(self, profile: int, has_graph: bool) -> _Context:
        strategy = self._trt.ExecutionContextAllocationStrategy.USER_MANAGED
        if self._cache is not None:
            config = self._cache.make_config()
            config.set_execution_context_allocation_strategy(strategy)
            if has_graph:
                config.cuda_graph_strategy = self._trt.CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
            made = self._engine.create_execution_context(config)
        else:
            made = self._engine.create_execution_context(strategy)
        if made is None:
            raise EngineError(f"no execution context for profile {profile}: {self._reason()}")
        made.set_device_memory(self._activations.data_ptr(), self._activations.numel())
        self._check(made.set_optimization_profile_async(profile, torch.cuda.current_stream().cuda_stream), "profile", profile)
        for name, address in self._addresses.items():
            self._check(made.set_tensor_address(name, address), "address of", name)
        return _Context(made, self._specs, self._num_pages)

    def _enqueue(self, made: Any) -> None:
        self._check(
            made.execute_async_v3(torch.cuda.current_stream().cuda_stream), "run of profile", made.active_optimization_profile
        )

    def _capture(self, context: _Context) -> None:
        """Into a CUDA graph; where that fails, the reason is logged and no graphs are used any more."""
        graph = torch.cuda.CUDAGraph()
        try:
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                self._enqueue(context.trt)
            finally:
                graph.capture_end()
        except (EngineError, RuntimeError) as error:
            log.warning("decode runs without CUDA graphs, slower: %s", _one_line(error))
            self._uses_graphs = False
        else:
            context.graph = graph

    def _check(self, is_done: bool, what: str, value: object) -> None:
        if not is_done:
            raise EngineError(f"TensorRT refused the {what} {value}: {self._reason()}")

    def _reason(self) -> str:
        return _one_line(self._logger.last_error or "no reason given")


class _Context:
    """An execution context, the shapes it is set to, and its graph once it has one."""

    def __init__(self, context: Any, specs: Sequence[TensorSpec], num_pages: int) -> None:
        self.trt = context
        self.graph: torch.cuda.CUDAGraph | None = None
        self.num_runs = 0
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._specs = specs
        self._num_pages = num_pages

    def set_sizes(self, sizes: Mapping[str, int]) -> None:
        for spec in self._specs:
            shape = spec.shape({"N": self._num_pages, **sizes})
            if shape == self._shapes.get(spec.name):
                continue
            if not self.trt.set_input_shape(spec.name, shape):
                raise EngineError(f"TensorRT refused the shape {list(shape)} of {spec.name}")
            self._shapes[spec.name] = shape


class _RuntimeCache:
    """What tensorrt-rtx compiled, kept in a file from load to load, and shared by all contexts."""

    def __init__(self, engine: Any, path: Path) -> None:
        self._engine = engine
        self._path = path
        self._cache = engine.create_runtime_config().create_runtime_cache()
        if path.is_file() and not self._cache.deserialize(path.read_bytes()):
            log.info("%s is of another GPU, driver or version: kernels are compiled again", path)

    def make_config(self) -> Any:
        config = self._engine.create_runtime_config()
        config.set_runtime_cache(self._cache)
        return config

    def save(self) -> None:
        """By rename, so that no load sees half of it. A folder that cannot be written is no reason to fail."""
        temporary = self._path.with_suffix(".tmp")
        try:
            temporary.write_bytes(memoryview(self._cache.serialize()))
            temporary.rename(self._path)
        except OSError as error:
            log.warning("%s cannot be written (%s): kernels are compiled again at the next load", self._path, error.strerror)


def _make_logger(trt: Any) -> Any:
    """Passes warnings and errors on, and keeps the last error for the message to the user."""

    class Logger(trt.ILogger):
        def __init__(self) -> None:
            super().__init__()
            self.last_error = ""

        def log(self, severity: Any, message: str) -> None:
            if severity in (self.INTERNAL_ERROR, self.ERROR):
                self.last_error = message
                log.error("%s", message)
            elif severity == self.WARNING:
                log.warning("%s", message)

    return Logger()


def _one_line(message: object) -> str:
    return " ".join(str(message).split())
