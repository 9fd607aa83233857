"""Runs an engine with ONNX Runtime on the CPU.

The KV pool of a group of layers is one array [layers, 2, pages, page_size, kv_heads, head_dim] of float32 or, where heads are
quantized, of bytes, a head's scales and its values. Each layer's keys and values are bound once to the session as views of it,
so a step moves no cache. The graph returns the new keys and values of all layers in one tensor, group after group, each written
into its pool by one indexed assignment.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from llm_runtime.batch import Batch, make_batch
from llm_runtime.errors import EngineError
from llm_runtime.executors.base import Row, SamplesOnHost
from llm_runtime.manifest import EngineManifest
from llm_runtime.native import build as native
from llm_runtime.page_pool import PageGroup

log = logging.getLogger(__name__)
FLOAT = np.dtype(np.float32)


@dataclass(frozen=True)
class OrtOptions:
    """`matmul_accuracy` 4 multiplies INT4 weights with activations rounded to int8 in blocks (fast); 1 keeps float32."""

    num_threads: int = 0  # 0: one a core
    matmul_accuracy: int = 4
    attention: str = "auto"  # "fused", "standard", or "auto": fused when its kernel can be compiled
    allow_spinning: bool = False


class OrtExecutor(SamplesOnHost):
    """See executors.base.Executor."""

    def __init__(self, folder: Path, manifest: EngineManifest, page_groups: Sequence[PageGroup], options: OrtOptions) -> None:
        """page_groups: one that all layers share, or where the engine has two page tables, one for each."""
        model = manifest.model
        self.page_groups = tuple(page_groups)
        self.page_size = manifest.limits.page_size
        self.vocab_size = model.vocab_size
        cache = manifest.precision.kv_cache
        session_options = _session_options(options)
        self.attention = _choose_attention(options.attention, session_options, is_needed=cache != "fp32")
        self.description = f"ONNX Runtime {ort.__version__}, {self.attention} attention, {cache} pages"
        path = folder / _graph_file(manifest, self.attention)
        try:
            self._session = ort.InferenceSession(path, session_options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime raises many unrelated classes
            raise EngineError(f"{path} could not be loaded by ONNX Runtime {ort.__version__}: {error}") from error
        self._page_type = FLOAT if cache == "fp32" else np.dtype(np.uint8)
        self._kv_shape = (model.num_kv_heads, manifest.head_bytes // self._page_type.itemsize)
        self._num_layers = model.num_layers
        self._window_table = manifest.window_table
        self._slots: list[NDArray] = []  # of each group of layers, [layers, 2, slots, ...]
        self._binding = self._session.io_binding()
        for index, layers in enumerate(manifest.layer_groups):
            num_pages = self.page_groups[min(index, len(self.page_groups) - 1)].num_pages
            pool = np.zeros((len(layers), 2, num_pages, self.page_size, *self._kv_shape), self._page_type)
            self._slots.append(pool.reshape(len(layers), 2, num_pages * self.page_size, *self._kv_shape))
            for layer, (keys, values) in zip(layers, pool, strict=True):
                for name, pages in (("key_pages", keys), ("value_pages", values)):
                    self._binding.bind_ortvalue_input(f"{name}.{layer}", ort.OrtValue.ortvalue_from_numpy(pages))
        self._logits = np.empty(0, FLOAT)
        self._new = np.empty(0, self._page_type)

    def execute(self, rows: Sequence[Row]) -> NDArray[np.float32]:
        if self.attention == "fused":
            return self._run(make_batch(rows, self.page_size, rectangular=False, window_table=self._window_table))
        return self._execute_in_groups(rows)

    def close(self) -> None:
        del self._binding, self._session, self._slots

    def _execute_in_groups(self, rows: Sequence[Row]) -> NDArray[np.float32]:
        """Standard attention pads rows to the longest, so rows of one token run together and longer ones alone."""
        single = [i for i, row in enumerate(rows) if len(row.token_ids) == 1]
        groups = [[i] for i, row in enumerate(rows) if len(row.token_ids) > 1] + ([single] if single else [])
        parts: dict[int, NDArray[np.float32]] = {}
        for group in groups:
            batch = make_batch([rows[i] for i in group], self.page_size, rectangular=True, window_table=self._window_table)
            logits = self._run(batch).copy()
            ends = np.cumsum([rows[i].num_logits for i in group])
            parts |= dict(zip(group, np.split(logits, ends[:-1]), strict=True))
        return np.concatenate([parts[i] for i in range(len(rows))])

    def _run(self, batch: Batch) -> NDArray[np.float32]:
        """Logits [num_logits, vocab] in a buffer that the next call reuses."""
        logits_shape = (batch.num_logits, self.vocab_size)
        new_shape = (self._num_layers, 2, batch.num_tokens, *self._kv_shape)
        self._logits = _grown(self._logits, logits_shape)
        self._new = _grown(self._new, new_shape)
        logits, new = _view(self._logits, logits_shape), _view(self._new, new_shape)
        try:
            for name, array in batch.inputs.items():
                self._binding.bind_cpu_input(name, array)
            self._binding.bind_output("logits", "cpu", 0, FLOAT, logits_shape, self._logits.ctypes.data)
            self._binding.bind_output("new_keys_values", "cpu", 0, self._page_type, new_shape, self._new.ctypes.data)
            self._session.run_with_iobinding(self._binding)
        except Exception as error:  # onnxruntime raises many unrelated classes
            raise EngineError(f"ONNX Runtime failed on {batch.num_tokens} tokens: {error}") from error
        if self.attention == "standard":
            # Its masked slots count 0 times what is in them, and 0 times NaN is NaN: a sequence that left the range of float32
            # would spoil the next ones on its pages.
            np.nan_to_num(new, copy=False, nan=0, posinf=0, neginf=0)
        first = 0
        for pool, slots in zip(self._slots, (batch.slots, batch.window_slots), strict=False):
            pool[:, :, slots] = new[first : first + len(pool)]
            first += len(pool)
        return logits


def _session_options(options: OrtOptions) -> ort.SessionOptions:
    session_options = ort.SessionOptions()
    session_options.intra_op_num_threads = options.num_threads
    session_options.log_severity_level = 3
    session_options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", str(options.matmul_accuracy))
    session_options.add_session_config_entry("session.intra_op.allow_spinning", str(int(options.allow_spinning)))
    return session_options


def _graph_file(manifest: EngineManifest, attention: str) -> str:
    cache = manifest.precision.kv_cache
    name = attention if cache == "fp32" else f"{attention}_{cache}"
    if name not in manifest.graphs:
        raise EngineError(f"{manifest.name} has no graph for {cache} pages: build the engine again, or set kv_cache_dtype auto")
    return manifest.graphs[name]  # type: ignore[index]


def _choose_attention(wanted: str, session_options: ort.SessionOptions, is_needed: bool) -> str:
    """is_needed: only the fused kernel will do."""
    if wanted == "standard":
        return "standard"
    try:
        session_options.register_custom_ops_library(str(native.library_path()))
    except native.NativeBuildError as error:
        if wanted == "fused" or is_needed:
            raise EngineError(str(error)) from error
        log.warning("attention runs on standard operators, several times slower with long contexts: %s", error)
        return "standard"
    return "fused"


def _grown(buffer: NDArray, shape: tuple[int, ...]) -> NDArray:
    size = int(np.prod(shape))
    return buffer if buffer.size >= size else np.empty(max(size, 2 * buffer.size), buffer.dtype)


def _view(buffer: NDArray, shape: tuple[int, ...]) -> NDArray:
    return buffer[: int(np.prod(shape))].reshape(shape)
