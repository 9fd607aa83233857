"""Time of one decode step and of one prompt chunk of one attention layer, this project's kernel beside standard operators.

    python benchmarks/attention.py [--threads 2] [--quick]

A decode step reads every key and value once and does little with them, so its time is set beside the time that the
machine needs to read as many bytes (the maximum of a large array, with as many threads). A prompt chunk is bound by
arithmetic and is set beside ONNX Runtime's own float32 matrix product. Every figure is the fastest of several runs.
The two versions take turns, and the machine's limits are measured again before each row, since other programs may hold
it back for a while. Each run uses the next of many layers' pages, so nothing is found in a cache that a real step would
not find there.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "model_repository" / "llm" / "1")]

from llm_runtime.native.build import library_path  # noqa: E402

PAGE_SIZE = 16
SHAPES = ((4, 1, 256), (16, 4, 64))  # query heads, key heads, head dimension
BYTES_IN_ROTATION = 400 << 20  # pages of all layers together, far more than a core's own caches
GEMM_SIZE = 1024
OPSET = 23

Feeds = dict[str, NDArray[np.generic]]


def fused_graph(heads: int, kv_heads: int, dim: int) -> bytes:
    inputs = _inputs(heads, kv_heads, dim)
    attributes: dict[str, int | float] = {
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "scale": dim**-0.5,
        "window": 0,
    }
    node = ir.node("PagedAttention", inputs, attributes, domain="llm_runtime")
    return _model(inputs, [node], node.outputs[0])


def standard_graph(heads: int, kv_heads: int, dim: int, tokens: int) -> bytes:
    """Rows of equal length: Gather pages, Concat with the new tokens, `Attention` with a mask."""
    inputs = _inputs(heads, kv_heads, dim)
    mask = _value("mask", ir.DataType.BOOL, ["rows", 1, tokens, "keys"])
    nodes: list[ir.Node] = []

    def op(name: str, *args: ir.Value, **attributes: int | float | Sequence[int]) -> ir.Value:
        nodes.append(ir.node(name, args, attributes))
        return nodes[-1].outputs[0]

    def constant(*values: int) -> ir.Value:
        return op("Constant", value_ints=values)

    def rectangle(new: ir.Value, width: int) -> ir.Value:
        return op("Reshape", new, constant(-1, tokens, width))

    def whole(pages: ir.Value, new: ir.Value) -> ir.Value:
        rows = op("Shape", table, start=0, end=1)
        shape = op("Concat", rows, constant(-1, kv_heads * dim), axis=0)
        gathered = op("Reshape", op("Gather", pages, table), shape)
        return op("Concat", gathered, rectangle(new, kv_heads * dim), axis=1)

    query, key, value, key_pages, value_pages, _, _, table = inputs
    output = op(
        "Attention",
        rectangle(query, heads * dim),
        whole(key_pages, key),
        whole(value_pages, value),
        mask,
        q_num_heads=heads,
        kv_num_heads=kv_heads,
        scale=dim**-0.5,
    )
    return _model([*inputs, mask], nodes, output)


def gemm_graph() -> bytes:
    inputs = [_value(name, ir.DataType.FLOAT, [GEMM_SIZE, GEMM_SIZE]) for name in ("left", "right")]
    node = ir.node("MatMul", inputs)
    return _model(inputs, [node], node.outputs[0])


def _inputs(heads: int, kv_heads: int, dim: int) -> list[ir.Value]:
    fp32, int32 = ir.DataType.FLOAT, ir.DataType.INT32
    pages: list[int | str] = ["pages", PAGE_SIZE, kv_heads, dim]
    return [
        _value("query", fp32, ["tokens", heads * dim]),
        _value("key", fp32, ["tokens", kv_heads * dim]),
        _value("value", fp32, ["tokens", kv_heads * dim]),
        _value("key_pages", fp32, pages),
        _value("value_pages", fp32, pages),
        _value("row_starts", int32, ["row_ends"]),
        _value("past_lengths", int32, ["rows"]),
        _value("page_table", int32, ["rows", "table"]),
    ]


def _value(name: str, dtype: ir.DataType, shape: list[int | str]) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))


def _model(inputs: list[ir.Value], nodes: list[ir.Node], output: ir.Value) -> bytes:
    output.name, output.type = "output", ir.TensorType(ir.DataType.FLOAT)
    graph = ir.Graph(inputs, [output], nodes=nodes, opset_imports={"": OPSET, "llm_runtime": 1}, name="attention")
    return ir.to_proto(ir.Model(graph, ir_version=11)).SerializeToString()


def session(model: bytes, threads: int) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    options.register_custom_ops_library(str(library_path()))
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def make_layers(shape: tuple[int, int, int], rows: int, past: int, tokens: int) -> list[Feeds]:
    """Inputs of as many layers as fill BYTES_IN_ROTATION; pages of a row are scattered over the pool."""
    heads, kv_heads, dim = shape
    rng = np.random.default_rng(0)
    pages = rows * (past // PAGE_SIZE)
    layer_bytes = 2 * pages * PAGE_SIZE * kv_heads * dim * 4
    num_layers = max(2, min(64, BYTES_IN_ROTATION // layer_bytes))

    def normal(*shape: int) -> NDArray[np.float32]:
        return rng.standard_normal(shape, dtype=np.float32)

    common: Feeds = {
        "query": normal(rows * tokens, heads * dim),
        "key": normal(rows * tokens, kv_heads * dim),
        "value": normal(rows * tokens, kv_heads * dim),
        "row_starts": np.arange(0, rows * tokens + 1, tokens, dtype=np.int32),
        "past_lengths": np.full(rows, past, np.int32),
        "page_table": rng.permutation(pages).astype(np.int32).reshape(rows, -1),
    }
    block = normal(pages, PAGE_SIZE, kv_heads, dim)
    return [common | {"key_pages": block.copy(), "value_pages": block.copy()} for _ in range(num_layers)]


def bind(runner: ort.InferenceSession, feeds: Feeds) -> Callable[[], None]:
    binding = runner.io_binding()
    names = {value.name for value in runner.get_inputs()}
    for name, array in feeds.items():
        if name in names:
            binding.bind_cpu_input(name, array)
    binding.bind_output("output", "cpu")
    return lambda: runner.run_with_iobinding(binding)


def best_times(versions: list[list[Callable[[], None]]], seconds: float) -> list[float]:
    """The fastest run of each version in seconds; a version is one callable per layer, run in turn."""
    best = [float("inf")] * len(versions)
    for calls in versions:
        for call in calls[:2]:
            call()
    end, step = time.perf_counter() + seconds, 0
    while time.perf_counter() < end or step < 4:
        for index, calls in enumerate(versions):
            # Several layers in a row, as a model runs them: the threads of the session stay awake in between.
            for repeat in range(4):
                call = calls[(4 * step + repeat) % len(calls)]
                start = time.perf_counter()
                call()
                best[index] = min(best[index], time.perf_counter() - start)
        step += 1
    return best


class Machine:
    """The best memory read rate (bytes per second) and float32 GEMM rate (operations per second) seen so far."""

    def __init__(self, threads: int) -> None:
        self.bandwidth = 0.0
        self.gemm = 0.0
        self._parts = np.split(np.ones(threads * (128 << 20) // 4, np.float32), threads)
        self._pool = ThreadPoolExecutor(threads)
        matrix = np.ones((GEMM_SIZE, GEMM_SIZE), np.float32)
        self._multiply = bind(session(gemm_graph(), threads), {"left": matrix, "right": matrix})

    def measure(self) -> None:
        for _ in range(3):
            start = time.perf_counter()
            list(self._pool.map(np.max, self._parts))  # np.max reads at full width; np.sum, being pairwise, is slower
            self.bandwidth = max(self.bandwidth, sum(part.nbytes for part in self._parts) / (time.perf_counter() - start))
            start = time.perf_counter()
            self._multiply()
            self.gemm = max(self.gemm, 2 * GEMM_SIZE**3 / (time.perf_counter() - start))


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def versions_for(
    shape: tuple[int, int, int], rows: int, past: int, tokens: int, threads: int
) -> list[list[Callable[[], None]]]:
    layers = make_layers(shape, rows, past, tokens)
    causal = np.tril(np.ones((tokens, tokens), bool))
    mask = np.concatenate([np.ones((tokens, past), bool), causal], axis=1)
    mask = np.broadcast_to(mask, (rows, 1, *mask.shape)).copy()
    fused = session(fused_graph(*shape), threads)
    standard = session(standard_graph(*shape, tokens), threads)
    versions = [[bind(fused, layer) for layer in layers], [bind(standard, layer | {"mask": mask}) for layer in layers]]
    outputs = [fused.run(None, layers[0])[0], standard.run(None, layers[0] | {"mask": mask})[0]]
    np.testing.assert_allclose(outputs[0], outputs[1].reshape(outputs[0].shape), atol=1e-4)
    return versions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--quick", action="store_true", help="fewer sizes and a shorter time for each")
    options = parser.parse_args()
    seconds = 0.3 if options.quick else 1.0
    contexts, batches = ((512,), (1, 8)) if options.quick else ((512, 1024, 2048), (1, 8, 32))

    machine = Machine(options.threads)
    decode: list[tuple[tuple[int, int, int], int, int, float, float]] = []
    prefill: list[tuple[tuple[int, int, int], float, float]] = []
    for shape in SHAPES:
        for rows in batches:
            for past in contexts:
                machine.measure()
                kernel, standard = best_times(versions_for(shape, rows, past, 1, options.threads), seconds)
                decode.append((shape, rows, past, kernel, standard))
        machine.measure()
        kernel, standard = best_times(versions_for(shape, 1, 512, 256, options.threads), seconds)
        prefill.append((shape, kernel, standard))

    print(f"{cpu_name()}, {options.threads} threads, onnxruntime {ort.__version__}, numpy {np.__version__}")
    print(f"float32 pages of {PAGE_SIZE} tokens, scattered over the pool")
    print(f"memory read {machine.bandwidth / 1e9:.1f} GB/s, float32 MatMul {machine.gemm / 1e9:.0f} GFLOP/s")
    print("\ndecode, one token a row\nheads/kv/dim  batch  context  kernel ms  GB/s of KV  of memory  standard ms  ratio")
    for shape, rows, past, kernel, standard in decode:
        rate = rows * past * shape[1] * shape[2] * 8 / kernel
        print(
            f"{'/'.join(map(str, shape)):12}{rows:7}{past:9}{kernel * 1e3:11.3f}{rate / 1e9:12.1f}"
            f"{rate / machine.bandwidth:11.0%}{standard * 1e3:13.3f}{standard / kernel:7.1f}"
        )
    print("\nprefill, 256 tokens on 512\nheads/kv/dim  kernel ms  GFLOP/s  of MatMul  standard ms  ratio")
    for shape, kernel, standard in prefill:
        pairs = 256 * 512 + 256 * 257 // 2  # of a query and a key it sees
        rate = 4 * pairs * shape[0] * shape[2] / kernel
        print(
            f"{'/'.join(map(str, shape)):12}{kernel * 1e3:11.3f}{rate / 1e9:9.0f}{rate / machine.gemm:11.0%}"
            f"{standard * 1e3:13.3f}{standard / kernel:7.1f}"
        )


if __name__ == "__main__":
    main()
