"""Runs a TensorRT engine: pages, buffers and steps, in torch. What is TensorRT's own stands behind `Runner`.

    host                                  device, one stream
    rows ─► calls ─► pinned bytes ──copy──► input bytes ─┐
                                            key_pages ───┤
                                            value_pages ─┴─► engine ─► new_keys_values ──scatter──► pool
                                                                   └─► logits ─► sampler ─┐
    choices ◄──────────────────copy (waits)───────────────────────────────────────────────┘

Addresses never change, so a CUDA graph of a call stays valid. Nothing but the copy of what was chosen waits for the device.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from llm_runtime import torch_sampler
from llm_runtime.config import GpuMemory
from llm_runtime.executors.base import Row
from llm_runtime.executors.trt_bindings import (
    ALIGNMENT,
    DECODE,
    PREFILL,
    Call,
    InputLayout,
    beside_pool_bytes,
    largest_sizes,
    make_calls,
)
from llm_runtime.executors.trt_engine import TrtOptions, TrtRunner
from llm_runtime.manifest import BYTES, EngineManifest
from llm_runtime.page_pool import PageGroup
from llm_runtime.sampler import Choice, SamplerState

# Keys and values are moved as bits, whatever they stand for.
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
# A number whose bits under the mask are all set is NaN or infinite (E4M3 has no infinity).
NOT_FINITE = {"fp32": 0x7F800000, "fp16": 0x7C00, "bf16": 0x7F80, "fp8": 0x7F}


class Runner(Protocol):
    """Runs the engine's calls on the device and stream that are current."""

    description: str

    def bind(self, addresses: Mapping[str, int], num_pages: int) -> None:
        """Where every tensor of the engine lies, for good, and how many pages the pool has."""
        ...

    def run(self, profile: int, sizes: Mapping[str, int]) -> None:
        """Start a run; its outputs are there for what is started after it. `sizes` are of the axes T, B, M, P and L.

        Raises EngineError.
        """
        ...

    def close(self) -> None: ...


def open_tensorrt(
    folder: Path, manifest: EngineManifest, options: TrtOptions, choose_page_groups: Callable[[GpuMemory], Sequence[PageGroup]]
) -> TrtExecutor:
    """choose_page_groups: from the memory that is left once the engine is loaded.

    Raises EngineError where the engine cannot be run here.
    """
    runner = TrtRunner(folder, manifest, options)
    free, _ = torch.cuda.mem_get_info()
    page_groups = choose_page_groups(GpuMemory(free, beside_pool_bytes(manifest)))
    return TrtExecutor(manifest, page_groups, runner, torch.device("cuda"))


class TrtExecutor:
    """See executors.base.Executor. All layers share one group of pages, and the pool has one page more: the scratch
    page, which padding uses."""

    def __init__(
        self, manifest: EngineManifest, page_groups: Sequence[PageGroup], runner: Runner, device: torch.device
    ) -> None:
        assert manifest.plan is not None
        model, self._plan = manifest.model, manifest.plan
        (group,) = self.page_groups = tuple(page_groups)
        num_pages = self._scratch_page = group.num_pages
        self.page_size = manifest.limits.page_size
        self.vocab_size = model.vocab_size
        self.description = runner.description
        self._runner = runner
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        sizes = [largest_sizes(self._plan, profile) for profile in (PREFILL, DECODE)]
        self._layout = InputLayout(self._plan)
        self._staging: list[_Staging] = []
        self._num_parts, self._token_size = 2 * model.num_layers, model.num_kv_heads * model.head_dim
        bits = BITS[BYTES[manifest.precision.kv_cache]]
        self._not_finite = NOT_FINITE[manifest.precision.kv_cache]
        with self._current():
            self._inputs = torch.zeros(self._layout.num_bytes, dtype=torch.uint8, device=device)
            self._logits = torch.zeros(max(s["L"] for s in sizes), self.vocab_size, device=device)
            most_new = self._num_parts * max(s["T"] for s in sizes) * self._token_size
            self._new = torch.zeros(most_new, dtype=bits, device=device)
            # Keys of a layer, its values, keys of the next, ...: each at an aligned address.
            num_slots = (num_pages + 1) * self.page_size
            stride = -(-num_slots * self._token_size // ALIGNMENT) * ALIGNMENT
            pool = torch.zeros(self._num_parts, stride, dtype=bits, device=device)[:, : num_slots * self._token_size]
            self._slots = pool.unflatten(1, (num_slots, self._token_size))
            self._pages = pool.unflatten(1, (num_pages + 1, self.page_size * self._token_size))
            runner.bind(self._addresses(manifest), num_pages + 1)

    def execute(self, rows: Sequence[Row]) -> NDArray[np.float32]:
        with self._current():
            return self._run(rows).cpu().numpy()

    def sample(self, rows: Sequence[Row], states: Sequence[SamplerState], token_ids: Sequence[Sequence[int]]) -> list[Choice]:
        with self._current():
            return torch_sampler.choose(self._run(rows), states, token_ids)

    def close(self) -> None:
        self._runner.close()
        del self._inputs, self._logits, self._new, self._slots, self._pages, self._staging
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # for the executor that may be made in this one's place

    def _current(self) -> contextlib.AbstractContextManager:
        return torch.cuda.stream(self._stream) if self._stream else contextlib.nullcontext()

    def _addresses(self, manifest: EngineManifest) -> dict[str, int]:
        addresses = {"logits": self._logits.data_ptr(), "new_keys_values": self._new.data_ptr()}
        for name, offset in self._layout.offsets.items():
            if name != "slots":
                addresses[name] = self._inputs.data_ptr() + offset
        if manifest.window_table:
            addresses["window_page_table"] = addresses["page_table"]
        layers = itertools.chain.from_iterable(manifest.layer_groups)
        for name, pages in zip((f"{part}_pages.{i}" for i in layers for part in ("key", "value")), self._pages, strict=True):
            addresses[name] = pages.data_ptr()
        return addresses

    def _run(self, rows: Sequence[Row]) -> torch.Tensor:
        """Logits [sum(row.num_logits), vocab] on the device, until the next step."""
        gathered = torch.empty(0, self.vocab_size, device=self._device)
        calls = make_calls(rows, self._plan, self.page_size, self._scratch_page)
        call, index = next(calls, None), 0
        while call is not None:
            self._run_call(index, call)
            following = next(calls, None)
            num_logits = sum(row.num_logits for row in rows)
            if index == 0 and following is None and call.results == ((0, 0, num_logits),):
                return self._logits[:num_logits]
            if index == 0:
                gathered = torch.empty(num_logits, self.vocab_size, device=self._device)
            for source, target, count in call.results:
                gathered[target : target + count] = self._logits[source : source + count]
            call, index = following, index + 1
        return gathered

    def _run_call(self, index: int, call: Call) -> None:
        while len(self._staging) <= index:
            self._staging.append(_Staging(self._layout.num_bytes, self._device))
        self._staging[index].send(lambda buffer: self._layout.pack(call, buffer), self._inputs)
        self._runner.run(call.profile, call.sizes)
        num_tokens = call.sizes["T"]
        new = self._new[: self._num_parts * num_tokens * self._token_size]
        offset = self._layout.offsets["slots"]
        slots = self._inputs[offset : offset + 8 * num_tokens].view(torch.int64)
        # A slot that is masked still counts 0 times what is in it, and 0 times NaN is NaN: a sequence that left the range of
        # its type would spoil the next ones on its pages.
        new.masked_fill_((new & self._not_finite) == self._not_finite, 0)
        self._slots.index_copy_(1, slots, new.view(self._num_parts, num_tokens, self._token_size))


class _Staging:
    """Host memory that calls are packed in on their way to the device: one for each call of a step, used again in the next."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._bytes = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=is_cuda)
        self._array = self._bytes.numpy()
        self._sent = torch.cuda.Event() if is_cuda else None

    def send(self, pack: Callable[[NDArray[np.uint8]], int], target: torch.Tensor) -> None:
        if self._sent:
            self._sent.synchronize()  # of the last step: long over, unless that one had no result to wait for
        num_bytes = pack(self._array)
        target[:num_bytes].copy_(self._bytes[:num_bytes], non_blocking=True)
        if self._sent:
            self._sent.record()
