"""ONNX Runtime in TensorRT's place: runs the very graph that TensorRT compiles, from the same addresses and sizes.

So all of the TensorRT executor but TensorRT itself is tested without a GPU: calls, padding, layout, pool and scatter.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import torch

import build_engines.engine
from build_engines.checkpoint.types import Checkpoint
from build_engines.engine import EngineOptions, write_engine
from build_engines.graph.numerics import Numerics
from llm_runtime.executors.trt import TrtExecutor
from llm_runtime.executors.trt_bindings import TensorSpec, io_table, largest_sizes
from llm_runtime.manifest import EngineManifest, FloatName, Plan, read_manifest
from llm_runtime.page_pool import PageGroup
from tests.engines import PAGE_SIZE
from tests.manifests import with_plan

NUMPY_TYPES = {"fp32": np.float32, "fp16": np.float16, "int32": np.int32, "int64": np.int64}


class OrtRunner:
    """See llm_runtime.executors.trt.Runner. `calls` has profile and sizes of every call."""

    description = "ONNX Runtime, as TensorRT would be called"

    def __init__(self, graph: Path, manifest: EngineManifest) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = 2
        self._session = ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
        self._binding = self._session.io_binding()
        self._manifest = manifest
        self.calls: list[tuple[int, dict[str, int]]] = []

    def bind(self, addresses: Mapping[str, int], num_pages: int) -> None:
        self._addresses, self._num_pages = addresses, num_pages

    def run(self, profile: int, sizes: Mapping[str, int]) -> None:
        plan = self._manifest.plan
        assert plan is not None
        largest = largest_sizes(plan, profile)
        assert all(1 <= size <= largest[axis] for axis, size in sizes.items()), "TensorRT would refuse this shape"
        self.calls.append((profile, dict(sizes)))
        for spec in io_table(self._manifest):
            self._bind(spec, spec.shape({"N": self._num_pages, **sizes}))
        self._session.run_with_iobinding(self._binding)

    def close(self) -> None:
        del self._binding, self._session

    def _bind(self, spec: TensorSpec, shape: tuple[int, ...]) -> None:
        bind = self._binding.bind_input if spec.is_input else self._binding.bind_output
        bind(spec.name, "cpu", 0, NUMPY_TYPES[spec.dtype], shape, self._addresses[spec.name])


def make_executor(engine: Path, plan: Plan, num_pages: int = 64) -> tuple[TrtExecutor, OrtRunner]:
    """The TensorRT executor over the standard graph of an engine that was built for ONNX Runtime."""
    manifest = with_plan(read_manifest(engine), plan)
    runner = OrtRunner(engine / "graph.onnx", manifest)
    return TrtExecutor(manifest, [PageGroup(num_pages)], runner, torch.device("cpu")), runner


def write_graph_for_tensorrt(
    checkpoint: Checkpoint, folder: Path, compute: FloatName, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> EngineManifest:
    """An engine folder with the graph that TensorRT would compile, in place of what it would make of it."""

    def keep_graph(graph: Path, target: Path, *rest: Any) -> Plan:
        for path in graph.parent.iterdir():
            shutil.copy2(path, target / path.name)
        return plan

    monkeypatch.setattr(build_engines.engine, "compile_plan", keep_graph)
    numerics = Numerics("tensorrt-rtx", compute, compute, compute)
    options = EngineOptions("tiny", lm_head=compute, page_size=PAGE_SIZE, numerics=numerics)
    return write_engine(checkpoint, folder, options, lambda fraction: None)
