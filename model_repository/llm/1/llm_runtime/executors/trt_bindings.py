"""What is bound to a TensorRT engine, and the calls that a step is cut into: plain numpy, no device, no TensorRT.

A call has one of the plan's two optimization profiles. Rows of one token share decode calls, whose numbers of rows and of page
table columns are rounded up to few sizes, so that few shapes come up and each can have its CUDA graph. What a decode call is
filled up with are rows too, of one token in the scratch page: the page after the pool's last, which no sequence has.

    decode call, 3 rows in a bucket of 4, 5 pages in a bucket of 8 (s: scratch page)

    input_ids      17  4 92  0
    past_lengths   70  9 33  0
    page_table      6  2  9  1  4  s  s  s
                    7  3  s  s  s  s  s  s
                    5  8 11  s  s  s  s  s
                    s  s  s  s  s  s  s  s
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from llm_runtime.batch import make_batch
from llm_runtime.errors import EngineError
from llm_runtime.executors.base import Row
from llm_runtime.manifest import BYTES, EngineManifest, Plan, Profile
from llm_runtime.types import MAX_PROMPT_LOGITS

PREFILL, DECODE = 0, 1  # the plan's optimization profiles
PROFILE_NAMES = ("prefill", "decode")
ALIGNMENT = 256  # bytes, of every address that TensorRT is given
# Device bytes of each logit: in two buffers, adjusted, scaled, as a weight, as a sort key, and room for sorting.
SAMPLING_BYTES = 64
GRAPH_BYTES = 256 << 20  # what CUDA graphs and their contexts may take in all
TENSORRT_TYPES = {"fp32": "FLOAT", "fp16": "HALF", "bf16": "BF16", "fp8": "FP8", "int32": "INT32", "int64": "INT64"}
# The int inputs of a call, and `slots`, where the executor then writes the new keys and values. The page table, whose size
# differs most from call to call, comes last: what is copied to the device ends with it.
STEP_INPUTS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("input_ids", "int64", ("T",)),
    ("position_ids", "int64", ("T",)),
    ("past_lengths", "int32", ("B",)),
    ("logit_positions", "int64", ("L",)),
    ("row_tokens", "int64", ("B", "M")),
    ("token_slots", "int64", ("T",)),
    ("slots", "int64", ("T",)),
    ("page_table", "int32", ("B", "P")),
)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """An input or output of the engine; `axes` are sizes, or names as docs/architecture.md has them."""

    name: str
    is_input: bool
    dtype: str  # as in the manifest: "int64", "fp16", ...
    axes: tuple[int | str, ...]

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(sizes[axis] if isinstance(axis, str) else axis for axis in self.axes)


def io_table(manifest: EngineManifest) -> tuple[TensorSpec, ...]:
    """Every tensor of the engine."""
    model, cache = manifest.model, manifest.precision.kv_cache
    page = ("N", manifest.limits.page_size, model.num_kv_heads, model.head_dim)
    new = (model.num_layers, 2, "T", model.num_kv_heads, model.head_dim)
    return (
        *(TensorSpec(name, True, dtype, axes) for name, dtype, axes in STEP_INPUTS if name != "slots"),
        *([TensorSpec("window_page_table", True, "int32", ("B", "P"))] if manifest.window_table else []),
        *(
            TensorSpec(f"{part}_pages.{layer}", True, cache, page)
            for layer in range(model.num_layers)
            for part in ("key", "value")
        ),
        TensorSpec("logits", False, "fp32", ("L", model.vocab_size)),
        TensorSpec("new_keys_values", False, cache, new),
    )


def profile_of(plan: Plan, index: int) -> Profile:
    return plan.prefill if index == PREFILL else plan.decode


def largest_sizes(plan: Plan, index: int) -> dict[str, int]:
    """The most that each axis may have in a profile; the least is 1."""
    profile = profile_of(plan, index)
    return {
        "T": profile.max_tokens,
        "B": profile.max_rows,
        "M": profile.max_row_tokens,
        "P": profile.max_row_pages,
        "L": profile.max_logits,
        "N": plan.max_pages,
    }


class EngineLike(Protocol):
    """What of TensorRT's ICudaEngine is asked here."""

    @property
    def num_io_tensors(self) -> int: ...
    @property
    def num_optimization_profiles(self) -> int: ...
    def get_tensor_name(self, index: int, /) -> str: ...
    def get_tensor_mode(self, name: str, /) -> Any: ...
    def get_tensor_dtype(self, name: str, /) -> Any: ...
    def get_tensor_shape(self, name: str, /) -> Sequence[int]: ...
    def get_tensor_profile_shape(self, name: str, profile_index: int, /) -> Sequence[Sequence[int]]: ...


def check_engine(engine: EngineLike, manifest: EngineManifest) -> None:
    """Raises EngineError that names the first tensor or profile in which the engine differs from its manifest."""
    plan = manifest.plan
    assert plan is not None
    table = {spec.name: spec for spec in io_table(manifest)}
    names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
    for name in table:
        if name not in names:
            raise EngineError(f"{plan.file}: has no tensor {name}; build the engine again")
    for name in names:
        if name not in table:
            raise EngineError(f"{plan.file}: has a tensor {name}, which this runtime does not know; build the engine again")
        _check_tensor(engine, table[name], plan)
    if engine.num_optimization_profiles != len(PROFILE_NAMES):
        raise EngineError(
            f"{plan.file}: has {engine.num_optimization_profiles} optimization profiles, not {' and '.join(PROFILE_NAMES)};"
            " build the engine again"
        )
    for spec in table.values():
        if spec.is_input:
            _check_profiles(engine, spec, plan)


def _check_tensor(engine: EngineLike, spec: TensorSpec, plan: Plan) -> None:
    shape = tuple(-1 if isinstance(axis, str) else axis for axis in spec.axes)
    wanted = ("INPUT" if spec.is_input else "OUTPUT", TENSORRT_TYPES[spec.dtype], shape)
    got = (
        engine.get_tensor_mode(spec.name).name,
        engine.get_tensor_dtype(spec.name).name,
        tuple(engine.get_tensor_shape(spec.name)),
    )
    if got != wanted:
        raise EngineError(
            f"{plan.file}: {spec.name} is {_words(*got)}, but engine.json needs {_words(*wanted)}; build the engine again"
        )


def _check_profiles(engine: EngineLike, spec: TensorSpec, plan: Plan) -> None:
    for index, profile in enumerate(PROFILE_NAMES):
        least, _, most = (tuple(shape) for shape in engine.get_tensor_profile_shape(spec.name, index))
        largest = largest_sizes(plan, index)
        wanted = spec.shape(dict.fromkeys(largest, 1)), spec.shape(largest)
        if (least, most) != wanted:
            raise EngineError(
                f"{plan.file}: profile {profile} takes {spec.name} from {list(least)} to {list(most)}, but engine.json says"
                f" from {list(wanted[0])} to {list(wanted[1])}; build the engine again"
            )


def _words(mode: str, dtype: str, shape: Sequence[int]) -> str:
    return f"{mode.lower()} {dtype} {list(shape)}"


@dataclass(frozen=True, slots=True)
class Call:
    """One run of the engine. `sizes` are those of the axes that differ from call to call.

    results: what of its logits is wanted, and where it goes: (first row of these, first row of the step's, how many).
    """

    profile: int
    sizes: dict[str, int]
    inputs: dict[str, NDArray]  # STEP_INPUTS
    results: tuple[tuple[int, int, int], ...]


def make_calls(rows: Sequence[Row], plan: Plan, page_size: int, scratch_page: int) -> Iterator[Call]:
    """The calls of a step in the order in which they must run: a row too long for one call is continued in later ones.

    They are made one by one, so that the next can be packed while one runs.
    """
    places = np.cumsum([0] + [row.num_logits for row in rows]).tolist()
    single = [
        _Piece(i, row, place) for i, (row, place) in enumerate(zip(rows, places, strict=False)) if len(row.token_ids) == 1
    ]
    decode = plan.decode
    limit = min(decode.max_rows, decode.max_tokens, decode.max_logits)
    for start in range(0, len(single), limit):
        yield _decode_call(single[start : start + limit], limit, decode, page_size, scratch_page)
    longer = [
        piece
        for i, (row, place) in enumerate(zip(rows, places, strict=False))
        if len(row.token_ids) > 1
        for piece in _split(i, row, place, plan.prefill)
    ]
    for group in _groups(longer, plan.prefill):
        yield _call(PREFILL, group, [piece.row for piece in group], plan.prefill, page_size, scratch_page)


@dataclass(frozen=True, slots=True)
class _Piece:
    """A row, or a part of one, whose logits go to the step's rows from `place` on."""

    index: int
    row: Row
    place: int


def _split(index: int, row: Row, place: int, profile: Profile) -> Iterator[_Piece]:
    """As few consecutive parts as one call each can take."""
    longest, length = min(profile.max_row_tokens, profile.max_tokens), len(row.token_ids)
    first_logit = length - row.num_logits
    start = 0
    while start < length:
        size = min(longest, length - start, max(first_logit - start, 0) + profile.max_logits)
        num_logits = max(0, start + size - max(first_logit, start))
        tokens = row.token_ids[start : start + size]
        part = replace(row, token_ids=tokens, past_length=row.past_length + start, num_logits=num_logits)
        yield _Piece(index, part, place)
        start, place = start + size, place + num_logits


def _groups(pieces: Sequence[_Piece], profile: Profile) -> Iterator[list[_Piece]]:
    """Neighbours that fit one call. Attention pads them to the longest: at most to twice their tokens."""
    group: list[_Piece] = []
    for piece in pieces:
        lengths = [len(other.row.token_ids) for other in [*group, piece]]
        fits = (
            len(lengths) <= profile.max_rows
            and sum(lengths) <= profile.max_tokens
            and sum(other.row.num_logits for other in [*group, piece]) <= profile.max_logits
            and len(lengths) * max(lengths) <= 2 * sum(lengths)
        )
        if group and (not fits or group[-1].index == piece.index):
            yield group
            group = []
        group.append(piece)
    if group:
        yield group


def _decode_call(pieces: list[_Piece], limit: int, profile: Profile, page_size: int, scratch_page: int) -> Call:
    padding = Row([0], 0, [scratch_page])
    # Every row has logits, wanted or not, so that the number of rows alone says how many.
    rows = [replace(piece.row, num_logits=1) for piece in pieces]
    rows += [padding] * (round_up(len(rows), limit) - len(rows))
    return _call(DECODE, pieces, rows, profile, page_size, scratch_page)


def _call(
    profile_index: int, pieces: Sequence[_Piece], rows: Sequence[Row], profile: Profile, page_size: int, scratch_page: int
) -> Call:
    pages = max(1, *(-(-row.past_length // page_size) for row in rows))
    width = round_up(pages, profile.max_row_pages)
    batch = make_batch(rows, page_size, rectangular=True, table_width=width, unused_page=scratch_page)
    inputs = batch.inputs | {"slots": batch.slots}
    if not batch.num_logits:  # the engine wants one
        inputs["logit_positions"] = np.zeros(1, np.int64)
    sizes = {
        "T": batch.num_tokens,
        "B": len(rows),
        "M": inputs["row_tokens"].shape[1],
        "P": width,
        "L": len(inputs["logit_positions"]),
    }
    return Call(profile_index, sizes, inputs, _results(pieces, rows))


def _results(pieces: Sequence[_Piece], rows: Sequence[Row]) -> tuple[tuple[int, int, int], ...]:
    runs: list[tuple[int, int, int]] = []
    source = 0
    for piece, row in zip(pieces, rows, strict=False):
        count = piece.row.num_logits
        if runs and (runs[-1][0] + runs[-1][2], runs[-1][1] + runs[-1][2]) == (source, piece.place):
            runs[-1] = (*runs[-1][:2], runs[-1][2] + count)
        elif count:
            runs.append((source, piece.place, count))
        source += row.num_logits
    return tuple(runs)


def round_up(count: int, limit: int) -> int:
    """The next power of two, or the limit where that is over it. Raises EngineError where `count` is."""
    if count > limit:
        raise EngineError(f"a call needs {count} rows or pages a row, and the plan takes up to {limit}; set max_context lower")
    return min(limit, 1 << (count - 1).bit_length())


class InputLayout:
    """Where each of a call's inputs stands in one run of bytes, the same for every call, so that addresses never change."""

    def __init__(self, plan: Plan) -> None:
        self.offsets: dict[str, int] = {}
        self._dtypes = {name: np.dtype(dtype) for name, dtype, _ in STEP_INPUTS}
        profiles = [largest_sizes(plan, index) for index in (PREFILL, DECODE)]
        end = 0
        for name, _, axes in STEP_INPUTS:
            self.offsets[name] = end
            largest = max(int(np.prod([sizes[axis] for axis in axes])) for sizes in profiles)
            end += -(-largest * self._dtypes[name].itemsize // ALIGNMENT) * ALIGNMENT
        self.num_bytes = end

    def pack(self, call: Call, buffer: NDArray[np.uint8]) -> int:
        """Write the call's inputs into `buffer` [num_bytes]; returns how many bytes of it are to be copied."""
        for name, array in call.inputs.items():
            start, dtype = self.offsets[name], self._dtypes[name]
            size = array.size * dtype.itemsize
            buffer[start : start + size].view(dtype).reshape(array.shape)[...] = array
        name = STEP_INPUTS[-1][0]
        return self.offsets[name] + call.inputs[name].size * self._dtypes[name].itemsize


def beside_pool_bytes(manifest: EngineManifest) -> int:
    """Device memory that has to stay free beside the KV pool: buffers of this executor, the sampler's work, CUDA graphs."""
    plan, model = manifest.plan, manifest.model
    assert plan is not None
    rows = plan.prefill.max_logits + plan.decode.max_logits + MAX_PROMPT_LOGITS
    tokens = max(plan.prefill.max_tokens, plan.decode.max_tokens)
    new = 2 * model.num_layers * tokens * model.num_kv_heads * model.head_dim * BYTES[manifest.precision.kv_cache]
    return InputLayout(plan).num_bytes + new + SAMPLING_BYTES * rows * model.vocab_size + GRAPH_BYTES
