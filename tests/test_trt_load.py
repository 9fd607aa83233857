"""What is refused before a TensorRT engine runs: module, version, GPU, file, tensors, profiles, memory. All without a GPU."""

from __future__ import annotations

import ast
import inspect
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llm_runtime.config import GpuMemory, Parameters, size_pool
from llm_runtime.errors import ConfigError, EngineError
from llm_runtime.executors import open_executor
from llm_runtime.executors.ort import OrtExecutor
from llm_runtime.executors.trt_bindings import beside_pool_bytes, check_engine
from llm_runtime.manifest import EngineManifest, check_files, read_manifest, sha256_file, write_manifest
from llm_runtime.page_pool import PageGroup
from tests.manifests import make_manifest, make_plan, with_plan

torch = pytest.importorskip("torch")
from build_engines import compile as compiler  # noqa: E402
from build_engines.checkpoint.hf import HfCheckpoint  # noqa: E402
from llm_runtime.executors import trt_engine  # noqa: E402
from llm_runtime.executors.trt_engine import TrtOptions, TrtRunner, check_capability, load_module  # noqa: E402
from tests.ort_runner import write_graph_for_tensorrt  # noqa: E402

PLAN = make_plan()
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="is of machines without a GPU")


def refused(action: Any, error: type[Exception] = EngineError) -> str:
    """The message of the error that `action` raises, which must be one line."""
    with pytest.raises(error) as caught:
        action()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An engine whose plan is no plan."""
    (tmp_path / "engine.plan").write_bytes(b"no plan at all")
    files = {"engine.plan": sha256_file(tmp_path / "engine.plan")}
    write_manifest(tmp_path, with_plan(make_manifest(), PLAN).model_copy(update={"files": files}))
    return tmp_path


class TestModule:
    @pytest.mark.parametrize(
        ("runtime", "remedy"),
        [
            ("tensorrt", "pip install 'tensorrt==1.7.*', or serve in an NVIDIA container with TensorRT 1.7"),
            ("tensorrt-rtx", "pip install 'tensorrt-rtx==1.7.*'"),
        ],
    )
    def test_a_missing_one_is_named_with_what_to_install(self, monkeypatch, runtime, remedy):
        monkeypatch.setitem(trt_engine.MODULES, runtime, "no_such_module")
        message = refused(lambda: load_module(runtime, PLAN))
        assert message == (
            f"the engine runs with {runtime}, which cannot be imported: No module named 'no_such_module'; {remedy}"
        )

    def test_one_of_another_version_than_the_plans_is_refused(self):
        version = pytest.importorskip("tensorrt_rtx").__version__
        message = refused(lambda: load_module("tensorrt-rtx", make_plan(version="1.2.0.54")))
        assert message.startswith(f"engine.plan was made by tensorrt-rtx 1.2.0.54, and {version} is installed: pip install")

    def test_a_later_patch_of_the_same_version_will_do(self):
        module = pytest.importorskip("tensorrt_rtx")
        major, minor, *_ = module.__version__.split(".")
        assert load_module("tensorrt-rtx", make_plan(version=f"{major}.{minor}.0.1")) is module

    def test_without_torch_it_is_torch_that_is_asked_for(self, monkeypatch, folder):
        monkeypatch.setitem(sys.modules, "llm_runtime.executors.trt", None)
        message = refused(lambda: open_executor(folder, read_manifest(folder), Parameters(engine_dir="x")))
        assert message.startswith("an engine for tensorrt-rtx needs torch with CUDA")


class TestDevice:
    @no_gpu
    def test_no_gpu(self, folder):
        pytest.importorskip("tensorrt_rtx")
        message = refused(lambda: open_executor(folder, read_manifest(folder), Parameters(engine_dir="x")))
        assert message.startswith("a TensorRT engine needs a GPU, and ")
        assert message.endswith("build one with --target onnxruntime to serve on a CPU")

    def test_another_gpu_than_the_plan_is_for(self):
        check_capability(PLAN, "8.9", "NVIDIA L4")
        message = refused(lambda: check_capability(PLAN, "8.6", "NVIDIA A10"))
        assert message == (
            "engine.plan runs on compute capability 8.9, 12.0, and the GPU (NVIDIA A10) has 8.6; build the engine for it"
        )


class TestFile:
    def test_a_damaged_plan(self, folder):
        check_files(folder, read_manifest(folder))
        (folder / "engine.plan").write_bytes(b"no plan at alI")
        assert "engine.plan is damaged" in refused(lambda: check_files(folder, read_manifest(folder)))

    @no_gpu
    def test_what_tensorrt_says_of_a_plan_that_it_cannot_load(self, folder, monkeypatch):
        """Its own reason, through its own logger: without a driver it can load none."""
        pytest.importorskip("tensorrt_rtx")
        monkeypatch.setattr(trt_engine, "gpu_at_hand", lambda: ("8.9", "NVIDIA L4"))
        message = refused(lambda: TrtRunner(folder, read_manifest(folder), TrtOptions()))
        assert message.startswith(f"{folder / 'engine.plan'} could not be loaded by tensorrt-rtx 1.")
        assert "no reason given" not in message


class ParsedEngine:
    """What TensorRT's own parser and profiles say of a graph, asked as the engine that it compiles from them is."""

    def __init__(self, network: Any, profiles: list[Any]) -> None:
        self._inputs = {network.get_input(i).name: network.get_input(i) for i in range(network.num_inputs)}
        self._outputs = {network.get_output(i).name: network.get_output(i) for i in range(network.num_outputs)}
        self._profiles = profiles
        self.num_io_tensors = len(self._inputs) + len(self._outputs)
        self.num_optimization_profiles = len(profiles)

    def get_tensor_name(self, index: int) -> str:
        return [*self._inputs, *self._outputs][index]

    def get_tensor_mode(self, name: str) -> Any:
        return SimpleNamespace(name="INPUT" if name in self._inputs else "OUTPUT")

    def get_tensor_dtype(self, name: str) -> Any:
        return (self._inputs | self._outputs)[name].dtype

    def get_tensor_shape(self, name: str) -> Any:
        return (self._inputs | self._outputs)[name].shape

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> Any:
        return self._profiles[profile_index].get_shape(name)


@pytest.fixture(scope="module")
def parsed(shelf, tmp_path_factory) -> tuple[ParsedEngine, EngineManifest]:
    trt = pytest.importorskip("tensorrt_rtx")
    folder = tmp_path_factory.mktemp("parsed") / "engine"
    with pytest.MonkeyPatch.context() as patch:
        manifest = write_graph_for_tensorrt(HfCheckpoint(shelf.checkpoint("llama")), folder, "fp16", PLAN, patch)
    builder = trt.Builder(trt.Logger(trt.Logger.ERROR))
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, trt.Logger(trt.Logger.ERROR))
    assert parser.parse_from_file(str(folder / "graph.onnx"))
    profiles = [
        compiler._optimization_profile(builder, network, profile, PLAN.max_pages) for profile in (PLAN.prefill, PLAN.decode)
    ]
    engine = ParsedEngine(network, profiles)
    engine.kept_alive = (builder, parser, network)  # type: ignore[attr-defined]
    return engine, manifest


class TestTensors:
    def test_what_tensorrt_parses_is_what_the_manifest_says(self, parsed):
        engine, manifest = parsed
        assert engine.num_io_tensors == 7 + 2 * 2 + 2
        check_engine(engine, manifest)

    @pytest.mark.parametrize(
        ("part", "change", "message"),
        [
            ("precision", {"kv_cache": "fp8"}, "key_pages.0 is input HALF [-1, 8, 2, 32], but engine.json needs input FP8 "),
            ("model", {"vocab_size": 500}, "logits is output FLOAT [-1, 512], but engine.json needs output FLOAT [-1, 500]"),
            ("model", {"num_layers": 3}, "engine.plan: has no tensor key_pages.2; build the engine again"),
            ("model", {"num_layers": 1}, "engine.plan: has a tensor key_pages.1, which this runtime does not know"),
            ("limits", {"page_size": 16}, "engine.json needs input HALF [-1, 16, 2, 32]; build the engine again"),
            ("plan", {"max_pages": 999}, "prefill takes key_pages.0 from [1, 8, 2, 32] to [1000, 8, 2, 32], but engine.json"),
            ("plan", {"decode": make_plan(max_batch=9).decode}, "decode takes input_ids from [1] to [8], but engine.json"),
        ],
    )  # fmt: skip
    def test_the_first_that_differs_is_named(self, parsed, part, change, message):
        engine, manifest = parsed
        changed = manifest.model_copy(update={part: getattr(manifest, part).model_copy(update=change)})
        assert message in refused(lambda: check_engine(engine, changed))

    def test_an_engine_of_one_profile_is_refused(self, parsed):
        engine, manifest = parsed
        single = SimpleNamespace(**{name: getattr(engine, name) for name in dir(engine) if name.startswith(("get_", "num_"))})
        single.num_optimization_profiles = 1
        assert "has 1 optimization profiles, not prefill and decode" in refused(lambda: check_engine(single, manifest))


def test_every_name_of_tensorrts_interface_that_is_used_exists():
    """What the executor calls on a GPU, looked up in the module that can be imported without one."""
    trt = pytest.importorskip("tensorrt_rtx")
    kinds = {
        "trt": trt,
        "self._trt": trt,
        "self._runtime": trt.Runtime,
        "self._engine": trt.ICudaEngine,
        "engine": trt.ICudaEngine,
        "made": trt.IExecutionContext,
        "self.trt": trt.IExecutionContext,
        "config": trt.IRuntimeConfig,
        "self._trt.ExecutionContextAllocationStrategy": trt.ExecutionContextAllocationStrategy,
        "self._trt.CudaGraphStrategy": trt.CudaGraphStrategy,
    }
    used = [
        (ast.unparse(node.value), node.attr)
        for node in ast.walk(ast.parse(inspect.getsource(trt_engine)))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in kinds
    ]
    assert {receiver for receiver, _ in used} == set(kinds)
    assert [(receiver, name) for receiver, name in used if not hasattr(kinds[receiver], name)] == []
    for name in ("serialize", "deserialize"):
        assert hasattr(trt.IRuntimeCache, name)


class TestMemory:
    """Pages of 2 KiB a layer and part: 8 KiB each in fp32."""

    MANIFEST = with_plan(make_manifest(num_layers=2, num_kv_heads=2, head_dim=32, page_size=8), make_plan(max_pages=100_000))
    GPU = GpuMemory(free=1000 << 20, beside_pool=300 << 20)

    def size(self, gpu: GpuMemory = GPU, **parameters: Any) -> int:
        (group,) = size_pool(Parameters(engine_dir="x", **parameters), self.MANIFEST, gpu)
        return group.num_pages

    def test_the_scratch_page_is_one_of_those_paid_for(self):
        assert self.MANIFEST.page_bytes == 8 << 10
        assert self.size(kv_cache_memory_mb=100) == 100 * 128 - 1
        assert self.size(kv_cache_gpu_fraction=0.5) == 500 * 128 - 1
        assert self.size(kv_cache_gpu_fraction=0.5, kv_cache_memory_mb=1) == 500 * 128 - 1

    def test_a_fraction_that_leaves_too_little_names_the_sizes_and_one_that_would_do(self):
        message = refused(lambda: self.size(kv_cache_gpu_fraction=0.99), ConfigError)
        assert message == (
            "config.pbtxt: kv_cache_gpu_fraction 0.99 takes 782 MiB of the 1000 MiB that are free on the GPU beside the engine,"
            " and 300 MiB are needed for logits and CUDA graphs; set it to 0.7 or less"
        )
        assert self.size(kv_cache_gpu_fraction=0.7) == 700 * 128 - 1

    def test_megabytes_that_are_not_there_name_the_sizes_and_how_many_are(self):
        message = refused(lambda: self.size(kv_cache_memory_mb=750), ConfigError)
        assert message == (
            "config.pbtxt: kv_cache_memory_mb 750 takes 750 MiB of the 1000 MiB that are free on the GPU beside the engine,"
            " and 300 MiB are needed for logits and CUDA graphs; set it to 700 or less"
        )
        assert self.size(kv_cache_memory_mb=700) == 700 * 128 - 1

    def test_more_pages_than_the_plan_can_address(self):
        gpu = GpuMemory(free=10_000 << 20, beside_pool=0)
        message = refused(lambda: self.size(gpu, kv_cache_memory_mb=800), ConfigError)
        assert message.endswith("takes 102400 pages, and the plan takes up to 100000; set it to 781 or less")
        assert self.size(gpu, kv_cache_gpu_fraction=0.9) == 100_000 - 1

    def test_a_pool_smaller_than_one_sequence(self):
        message = refused(lambda: self.size(kv_cache_gpu_fraction=0.0004, max_context=512), ConfigError)
        assert message == (
            "config.pbtxt: one sequence of max_context 512 tokens does not fit the KV cache of 400 tokens; set"
            " kv_cache_gpu_fraction higher than 0.0004, or max_context to 400 or less"
        )

    def test_a_gpu_with_no_room_at_all(self):
        message = refused(lambda: self.size(GpuMemory(100 << 20, 300 << 20), kv_cache_memory_mb=50), ConfigError)
        assert message.endswith("; serve on a GPU with more memory, or a smaller engine")
        assert "at least 2 are needed: set it higher" in refused(lambda: self.size(kv_cache_gpu_fraction=1e-6), ConfigError)

    def test_a_fraction_is_of_a_gpu(self):
        parameters = Parameters(engine_dir="x", kv_cache_gpu_fraction=0.5)
        message = refused(lambda: size_pool(parameters, make_manifest()), ConfigError)
        assert message == "config.pbtxt: kv_cache_gpu_fraction 0.5 is of a GPU, and onnxruntime runs on a CPU; set it to 0"

    def test_what_stays_free_grows_with_what_is_sampled_and_run_at_once(self):
        def beside(**changes: int) -> int:
            return beside_pool_bytes(with_plan(make_manifest(), make_plan(**changes)))

        assert beside(max_batch=16) - beside(max_batch=8) >= 8 * 512 * 4
        assert beside(max_step_tokens=128) - beside(max_step_tokens=64) >= 64 * 2 * 2 * 2 * 32 * 4


class TestChoice:
    def test_an_engine_for_onnx_runtime_gets_its_executor_with_as_many_pages_as_are_left_to_it(self, shelf):
        folder = shelf.engine("llama")
        parameters = Parameters(engine_dir="x", kv_cache_memory_mb=1, attention="standard", num_threads=1)
        executor = open_executor(folder, read_manifest(folder), parameters)
        assert isinstance(executor, OrtExecutor)
        assert executor.page_groups == size_pool(parameters, read_manifest(folder))
        assert "standard attention" in executor.description
        assert open_executor(folder, read_manifest(folder), parameters, (PageGroup(9),)).page_groups == (PageGroup(9),)

    @no_gpu
    def test_steps_larger_than_the_plans_are_announced(self, folder, caplog):
        pytest.importorskip("tensorrt_rtx")
        parameters = Parameters(engine_dir="x", max_sequences=9, max_step_tokens=64)
        refused(lambda: open_executor(folder, read_manifest(folder), parameters))
        assert [record.getMessage() for record in caplog.records] == [
            "max_sequences 9 is over the plan's 8: such steps run in parts; build with --max-batch"
        ]
