"""The attention kernel against a plain float64 reference, and its laws: a row's result depends on that row alone."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from llm_runtime.manifest import SCALE_BLOCK, quantized_head_bytes
from llm_runtime.native import build
from llm_runtime.native.build import NativeBuildError, library_path

ATOL = 1e-5
FORMATS = {"int8": 1, "fp8": 2}
NO_PAGE = 2**31 - 1  # in table entries past a row's need: reading such a page is an error, so none may be looked at

Feeds = dict[str, NDArray[np.generic]]


@dataclass(frozen=True)
class Shape:
    kv_heads: int
    ratio: int  # query heads of one key head
    dim: int
    page_size: int = 16
    window: int = 0
    format: str = "fp32"  # of pages

    @property
    def heads(self) -> int:
        return self.kv_heads * self.ratio

    @property
    def scale(self) -> float:
        return 0.7 * self.dim**-0.5


@dataclass
class Sequence:
    """One row's tokens, past ones first. query: [new, heads, dim]; keys and values: [past + new, kv_heads, dim]."""

    query: NDArray[np.float32]
    keys: NDArray[np.float32]
    values: NDArray[np.float32]

    @property
    def past(self) -> int:
        return len(self.keys) - len(self.query)


@pytest.fixture(scope="module", autouse=True)
def _library():
    try:
        library_path()
    except NativeBuildError as error:
        pytest.skip(str(error))


def make_session(shape: Shape, threads: int = 2, **changed: int | float | None) -> ort.InferenceSession:
    fp32, int32 = ir.DataType.FLOAT, ir.DataType.INT32
    kept, head = (fp32, shape.dim) if shape.format == "fp32" else (ir.DataType.UINT8, quantized_head_bytes(shape.dim))
    pages: list[int | str] = ["pages", shape.page_size, shape.kv_heads, head]
    inputs = [
        ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(dims))
        for name, dtype, dims in (
            ("query", fp32, ["tokens", "query_columns"]),
            ("key", fp32, ["key_tokens", "key_columns"]),
            ("value", fp32, ["value_tokens", "value_columns"]),
            ("key_pages", kept, pages),
            ("value_pages", kept, ["value_page_count", *pages[1:]]),
            ("row_starts", int32, ["row_ends"]),
            ("past_lengths", int32, ["rows"]),
            ("page_table", int32, ["table_rows", "table"]),
        )
    ]
    attributes: dict[str, int | float | None] = {
        "num_heads": shape.heads,
        "num_kv_heads": shape.kv_heads,
        "scale": shape.scale,
        "window": shape.window,
        **changed,
    }
    if shape.format == "fp32":
        node = ir.node("PagedAttention", inputs, attributes, domain="llm_runtime")
    else:
        attributes = {"format": FORMATS[shape.format], **attributes}
        node = ir.node("QuantizedPagedAttention", inputs, attributes, domain="llm_runtime", num_outputs=3)
    for value, name, dtype in zip(node.outputs, ("output", "kept_keys", "kept_values"), (fp32, kept, kept), strict=False):
        value.name, value.type = name, ir.TensorType(dtype)
    graph = ir.Graph(inputs, node.outputs, nodes=[node], opset_imports={"": 23, "llm_runtime": 1}, name="attention")
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4  # the messages of the errors that are wanted here would fill the terminal
    options.register_custom_ops_library(str(library_path()))
    model = ir.to_proto(ir.Model(graph, ir_version=11)).SerializeToString()
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def make_sequence(rng: np.random.Generator, shape: Shape, past: int, new: int) -> Sequence:
    kv = (past + new, shape.kv_heads, shape.dim)
    return Sequence(*(rng.standard_normal(s, np.float32) for s in ((new, shape.heads, shape.dim), kv, kv)))


def packed(x: NDArray[np.float32], form: str) -> NDArray[np.generic]:
    """What pages hold of [..., dim]: as it is, or bytes, the blocks' scales and then what each value is rounded to."""
    if form == "fp32":
        return x
    dim = x.shape[-1]
    blocks = np.split(x, range(SCALE_BLOCK, dim, SCALE_BLOCK), axis=-1)
    largest = np.stack([np.abs(block).max(axis=-1) for block in blocks], axis=-1) / np.float32(127 if form == "int8" else 448)
    halves = ((largest.view(np.uint32).astype(np.uint64) + 0xFFFF) >> 16).astype(np.uint16)  # bfloat16, rounded up
    scales = np.repeat((halves.astype(np.uint32) << 16).view(np.float32), SCALE_BLOCK, axis=-1)[..., :dim]
    scaled = x * (1 / np.where(scales > 0, scales, 1))
    rounded = np.nan_to_num(np.rint(scaled)).astype(np.int8) if form == "int8" else scaled.astype(ml_dtypes.float8_e4m3fn)
    return np.concatenate([halves.view(np.uint8), rounded.view(np.uint8)], axis=-1)


def unpacked(kept: NDArray[np.generic], form: str, dim: int) -> NDArray[np.float32]:
    if form == "fp32":
        return kept.astype(np.float32)
    halves, values = (np.ascontiguousarray(part) for part in np.split(kept, [kept.shape[-1] - dim], axis=-1))
    scales = (halves.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    numbers = values.view(np.int8 if form == "int8" else ml_dtypes.float8_e4m3fn).astype(np.float32)
    return numbers * np.repeat(scales, SCALE_BLOCK, axis=-1)[..., :dim]


def make_feeds(rng: np.random.Generator, shape: Shape, sequences: list[Sequence]) -> Feeds:
    """Pages in random order; every slot and table entry that no row needs holds what must never be read."""
    needs = [-(-sequence.past // shape.page_size) for sequence in sequences]
    num_pages = sum(needs) + 2
    key_pages = packed(np.full((num_pages, shape.page_size, shape.kv_heads, shape.dim), np.nan, np.float32), shape.format)
    value_pages = key_pages.copy()
    table = np.full((len(sequences), max(needs, default=0) + 1), NO_PAGE, np.int32)
    free = list(rng.permutation(num_pages))
    for row, (sequence, need) in enumerate(zip(sequences, needs, strict=True)):
        table[row, :need] = [free.pop() for _ in range(need)]
        for position in range(sequence.past):
            page, slot = table[row, position // shape.page_size], position % shape.page_size
            key_pages[page, slot] = packed(sequence.keys[position], shape.format)
            value_pages[page, slot] = packed(sequence.values[position], shape.format)
        first_visible = max(0, sequence.past - shape.window + 1) if shape.window else 0
        table[row, : first_visible // shape.page_size] = NO_PAGE  # pages that the window has left may be gone

    def new_tokens(parts: list[NDArray[np.float32]], heads: int) -> NDArray[np.float32]:
        return np.concatenate([np.empty((0, heads, shape.dim), np.float32), *parts]).reshape(-1, heads * shape.dim)

    return {
        "query": new_tokens([s.query for s in sequences], shape.heads),
        "key": new_tokens([s.keys[s.past :] for s in sequences], shape.kv_heads),
        "value": new_tokens([s.values[s.past :] for s in sequences], shape.kv_heads),
        "key_pages": key_pages,
        "value_pages": value_pages,
        "row_starts": np.cumsum([0, *(len(s.query) for s in sequences)]).astype(np.int32),
        "past_lengths": np.array([s.past for s in sequences], np.int32),
        "page_table": table,
    }


def reference(shape: Shape, sequence: Sequence) -> NDArray[np.float64]:
    """Attention of one row in float64, one query at a time, over what pages hold. Returns [new, heads * dim]."""
    kept = [unpacked(packed(x, shape.format), shape.format, shape.dim) for x in (sequence.keys, sequence.values)]
    rows = []
    for index, query in enumerate(sequence.query.astype(np.float64)):
        position = sequence.past + index
        seen = slice(max(0, position - shape.window + 1) if shape.window else 0, position + 1)
        keys, values = (np.repeat(x[seen].astype(np.float64), shape.ratio, axis=1) for x in kept)
        scores = np.einsum("hd,thd->ht", query, keys) * shape.scale
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        rows.append(np.einsum("ht,thd->hd", weights, values).reshape(-1))
    return np.stack(rows) if rows else np.empty((0, shape.heads * shape.dim))


def run(session: ort.InferenceSession, feeds: Feeds) -> NDArray[np.float32]:
    return session.run(None, feeds)[0]


def random_lengths(rng: np.random.Generator, shape: Shape) -> list[tuple[int, int]]:
    """(past, new) of up to 6 rows: decode and prompt chunks, around the edges of pages, blocks and splits."""
    pasts = [0, 1, shape.page_size - 1, shape.page_size, shape.page_size + 1, 3 * shape.page_size, 127, 128, 129, 300]
    news = [1, 1, 1, 2, 3, 17, 64, 65, 100]
    return [(int(rng.choice(pasts)), int(rng.choice(news))) for _ in range(rng.integers(1, 7))]


formats = pytest.mark.parametrize("form", ["fp32", *FORMATS])


@formats
@pytest.mark.parametrize("dim", [16, 64, 80, 128, 256, 24, 20])
@pytest.mark.parametrize("ratio", [1, 2, 4, 8])
def test_ragged_batches_equal_the_reference(dim, ratio, form):
    for seed in range(3):
        rng = np.random.default_rng([seed, dim, ratio])
        shape = Shape(
            kv_heads=int(rng.choice([1, 2, 3])),
            ratio=ratio,
            dim=dim,
            page_size=int(rng.choice([8, 16, 32])),
            window=int(rng.choice([0, 0, 1, 7, 32, 150])),
            format=form,
        )
        lengths = random_lengths(rng, shape)
        print(f"seed {seed}, {shape}, rows (past, new) {lengths}")
        sequences = [make_sequence(rng, shape, past, new) for past, new in lengths]
        output = run(make_session(shape), make_feeds(rng, shape, sequences))
        wanted = np.concatenate([reference(shape, sequence) for sequence in sequences])
        np.testing.assert_allclose(output, wanted, rtol=0, atol=ATOL)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("values", ["noise", "large", "small", "zeros", "one token far off"])
def test_new_keys_and_values_are_kept_as_the_format_rounds_them(form, values):
    shape = Shape(kv_heads=3, ratio=2, dim=48, format=form)
    rng = np.random.default_rng(3)
    sequence = make_sequence(rng, shape, 0, 50)
    sequence.keys = rng.standard_normal(sequence.keys.shape, np.float32)
    sequence.keys *= {"large": 1e30, "small": 1e-30, "zeros": 0}.get(values, 1)
    if values == "one token far off":
        sequence.keys[7] *= 1e6
    output, keys, _ = make_session(shape).run(None, make_feeds(rng, shape, [sequence]))
    kept = unpacked(keys.reshape(50, 3, -1), form, 48)
    np.testing.assert_array_equal(kept, unpacked(packed(sequence.keys, form), form, 48))
    blocks = np.abs(sequence.keys).reshape(50, 3, -1, 16).max(axis=-1)  # 32 and the last 16
    largest = np.repeat(np.stack([blocks[..., :2].max(axis=-1), blocks[..., 2]], axis=-1), [32, 16], axis=-1)
    largest *= 1 + 2**-7  # a scale is rounded up to bfloat16
    # Half a step: of int8 everywhere the same; of E4M3 a 16th of the value, and of its smallest steps 2^-10 of 448.
    bound = largest / 254 if form == "int8" else np.maximum(np.abs(sequence.keys) / 16, largest * 2.0**-10 / 448)
    assert np.all(np.abs(kept - sequence.keys) <= bound * 1.0001)
    if values != "large":  # there the scores of float32 have no digits left
        np.testing.assert_allclose(output, reference(shape, sequence), rtol=0, atol=1e-3 if "far" in values else ATOL)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("new", [1, 5])
@pytest.mark.parametrize("broken", [np.inf, -np.inf, np.nan])
def test_a_head_that_is_not_finite_shows_in_its_row_alone(form, new, broken):
    shape = Shape(kv_heads=2, ratio=1, dim=16, format=form)
    rng = np.random.default_rng(4)
    sequences = [make_sequence(rng, shape, 20, new) for _ in range(2)]
    feeds = make_feeds(rng, shape, sequences)
    feeds["value"][0, 3] = broken
    output = run(make_session(shape), feeds)
    assert not np.isfinite(output[0, :16]).any()
    assert np.isfinite(output[0, 16:]).all()
    assert np.isfinite(output[new:]).all()


@formats
@pytest.mark.parametrize("past", [1023, 1024, 2500, 9000])
@pytest.mark.parametrize("new", [1, 2, 20])
def test_a_long_context_is_cut_and_put_together_again(past, new, form):
    shape = Shape(kv_heads=1, ratio=2, dim=16, format=form)
    rng = np.random.default_rng(past + new)
    sequence = make_sequence(rng, shape, past, new)
    output = run(make_session(shape), make_feeds(rng, shape, [sequence]))
    np.testing.assert_allclose(output, reference(shape, sequence), rtol=0, atol=ATOL)


@formats
@pytest.mark.parametrize("kv_heads", [1, 40])
def test_many_heads_of_one_key_head_and_many_key_heads(kv_heads, form):
    shape = Shape(kv_heads=kv_heads, ratio=71 if kv_heads == 1 else 1, dim=8, format=form)
    rng = np.random.default_rng(kv_heads)
    sequences = [make_sequence(rng, shape, past, new) for past, new in ((140, 1), (0, 3), (9, 1))]
    output = run(make_session(shape), make_feeds(rng, shape, sequences))
    np.testing.assert_allclose(output, np.concatenate([reference(shape, s) for s in sequences]), rtol=0, atol=ATOL)


@formats
@pytest.mark.parametrize("window", [0, 40])
def test_a_row_alone_equals_the_row_in_a_batch_bit_for_bit(window, form):
    shape = Shape(kv_heads=2, ratio=3, dim=80, window=window, format=form)
    rng = np.random.default_rng(window)
    sequences = [make_sequence(rng, shape, past, new) for past, new in ((300, 1), (0, 50), (17, 1), (1500, 9), (128, 130))]
    session = make_session(shape)
    together = run(session, make_feeds(rng, shape, sequences))
    alone = [run(session, make_feeds(rng, shape, [sequence])) for sequence in sequences]
    np.testing.assert_array_equal(together, np.concatenate(alone))


def test_one_two_and_three_threads_give_the_same_bits():
    shape = Shape(kv_heads=2, ratio=4, dim=64)
    rng = np.random.default_rng(3)
    sequences = [make_sequence(rng, shape, past, new) for past, new in ((700, 1), (2100, 1), (33, 70), (1100, 4))]
    feeds = make_feeds(rng, shape, sequences)
    one, two, three = (run(make_session(shape, threads), feeds) for threads in (1, 2, 3))
    np.testing.assert_array_equal(one, two)
    np.testing.assert_array_equal(one, three)
    np.testing.assert_allclose(one, np.concatenate([reference(shape, s) for s in sequences]), rtol=0, atol=ATOL)


@formats
@pytest.mark.parametrize("window", [0, 30])
@pytest.mark.parametrize("sizes", [[1] * 40, [16, 16, 8], [39, 1], [7, 33]])
def test_chunks_equal_the_whole(window, sizes, form):
    shape = Shape(kv_heads=1, ratio=4, dim=64, window=window, format=form)
    rng = np.random.default_rng(5)
    whole = make_sequence(rng, shape, 21, 40)
    session = make_session(shape)
    wanted = run(session, make_feeds(rng, shape, [whole]))
    outputs, end = [], whole.past
    for size in sizes:
        query = whole.query[end - whole.past : end - whole.past + size]
        end += size
        chunk = Sequence(query, whole.keys[:end], whole.values[:end])
        outputs.append(run(session, make_feeds(rng, shape, [chunk])))
    np.testing.assert_allclose(np.concatenate(outputs), wanted, rtol=0, atol=ATOL)


def test_scores_far_apart_neither_overflow_nor_vanish():
    shape = Shape(kv_heads=1, ratio=2, dim=64)
    rng = np.random.default_rng(6)
    for new in (1, 40):
        sequence = make_sequence(rng, shape, 200, new)
        sequence.query *= 300
        output = run(make_session(shape), make_feeds(rng, shape, [sequence]))
        np.testing.assert_allclose(output, reference(shape, sequence), rtol=0, atol=1e-3)  # scores of 1e3 in float32


def test_rows_and_batches_without_tokens():
    shape = Shape(kv_heads=1, ratio=2, dim=16)
    rng = np.random.default_rng(7)
    sequences = [make_sequence(rng, shape, past, new) for past, new in ((5, 0), (20, 2), (0, 0), (9, 1), (3, 0))]
    session = make_session(shape)
    output = run(session, make_feeds(rng, shape, sequences))
    np.testing.assert_allclose(output, np.concatenate([reference(shape, s) for s in sequences]), rtol=0, atol=ATOL)
    assert run(session, make_feeds(rng, shape, [])).shape == (0, 32)


def test_sessions_run_at_the_same_time():
    """Two sessions and two calls in each share the kernel's buffers; every one gets its own result."""
    shapes = [Shape(kv_heads=1, ratio=4, dim=256), Shape(kv_heads=4, ratio=2, dim=64, window=50)]
    rng = np.random.default_rng(8)
    jobs = []
    for shape in shapes:
        session = make_session(shape)
        for lengths in ((600, 1), (90, 40)):
            feeds = make_feeds(rng, shape, [make_sequence(rng, shape, *lengths) for _ in range(3)])
            jobs.append((session, feeds, run(session, feeds)))

    def repeat(job: tuple[ort.InferenceSession, Feeds, NDArray[np.float32]]) -> None:
        session, feeds, wanted = job
        for _ in range(25):
            np.testing.assert_array_equal(run(session, feeds), wanted)

    with ThreadPoolExecutor(len(jobs)) as pool:
        list(pool.map(repeat, jobs))


def _set(name: str, index: tuple[int, ...] | int, value: int):
    def change(feeds: Feeds) -> None:
        feeds[name] = feeds[name].copy()
        feeds[name][index] = value

    return change


def _cut(name: str, *slices: slice):
    def change(feeds: Feeds) -> None:
        feeds[name] = np.ascontiguousarray(feeds[name][slices])

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_set("page_table", (1, 1), 99), "row 1 names page 99 at entry 1, there are"),
        (_set("page_table", (0, 0), -1), "row 0 names page -1 at entry 0"),
        (_set("past_lengths", 0, 10**6), "row 0 has 1000000 past tokens, its table has room for"),
        (_set("past_lengths", 1, -1), "row 1 has -1 past tokens"),
        (_set("row_starts", 1, 9), "row_starts falls at row 1"),
        (_set("row_starts", 2, 9), "row_starts runs from 0 to 9, wanted 0 to 4"),
        (_cut("row_starts", slice(2)), "row_starts has 2 entries, wanted rows \\+ 1 = 3"),
        (_cut("page_table", slice(1)), "page_table has 1 rows, past_lengths has 2"),
        (_cut("key", slice(3)), "key has 3 tokens, query has 4"),
        (_cut("value", slice(None), slice(16)), r"value has 16 columns, num_kv_heads \* head_dim is 2 \* 16"),
        (_cut("query", slice(None), slice(48)), r"query has 48 columns, num_heads \* head_dim is 4 \* 16"),
        (_cut("value_pages", slice(1)), "key_pages and value_pages differ in shape"),
    ],
)
def test_inputs_that_do_not_fit_are_an_error(change, message):
    shape = Shape(kv_heads=2, ratio=2, dim=16, page_size=8)
    rng = np.random.default_rng(9)
    feeds = make_feeds(rng, shape, [make_sequence(rng, shape, 5, 3), make_sequence(rng, shape, 12, 1)])
    session = make_session(shape)
    change(feeds)
    with pytest.raises(Exception, match=f"PagedAttention: {message}"):
        run(session, feeds)


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"num_heads": 3}, "num_heads 3 is no multiple of num_kv_heads 2"),
        ({"num_kv_heads": 0}, "num_heads 4 is no multiple of num_kv_heads 0"),
        ({"window": -1}, "window is -1"),
        ({"scale": None}, "scale"),
    ],
)
def test_attributes_that_do_not_fit_are_an_error(attributes, message):
    with pytest.raises(Exception, match=re.escape(message)):
        make_session(Shape(kv_heads=2, ratio=2, dim=16), **attributes)


def test_a_format_that_is_none_is_an_error():
    with pytest.raises(Exception, match="format is 3"):
        make_session(Shape(kv_heads=2, ratio=2, dim=16, format="int8"), format=3)


def test_an_onnx_runtime_that_is_too_old_is_told_so():
    """RegisterCustomOps against a runtime that knows no API version above 16."""
    messages: list[str] = []
    version = ctypes.create_string_buffer(b"1.16.3")

    @ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p)
    def create_status(_: int, message: bytes) -> int:
        messages.append(message.decode())
        return 1

    table = (ctypes.c_void_p * 1)(ctypes.cast(create_status, ctypes.c_void_p))
    get_api = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_uint32)(
        lambda number: ctypes.addressof(table) if number <= 16 else None
    )
    get_version = ctypes.CFUNCTYPE(ctypes.c_void_p)(lambda: ctypes.addressof(version))
    base = (ctypes.c_void_p * 2)(*(ctypes.cast(function, ctypes.c_void_p) for function in (get_api, get_version)))
    register = ctypes.CDLL(str(library_path())).RegisterCustomOps
    register.restype, register.argtypes = ctypes.c_void_p, (ctypes.c_void_p, ctypes.c_void_p)
    assert register(None, ctypes.addressof(base)) == 1
    assert messages == ["llm_runtime::PagedAttention needs ONNX Runtime 1.17 or later, this is 1.16.3"]


def test_the_library_is_built_once_and_again_after_a_change(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = library_path()
    built_at = first.stat().st_mtime_ns
    assert library_path() == first
    assert first.stat().st_mtime_ns == built_at
    assert list(first.parent.iterdir()) == [first]
    monkeypatch.setattr(build, "_cpu", lambda: "another CPU")
    assert library_path() != first


def test_processes_that_build_at_the_same_time_agree(tmp_path):
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    code = "from llm_runtime.native.build import library_path; print(library_path())"
    processes = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    paths = {process.communicate(timeout=120)[0].strip() for process in processes}
    assert len(paths) == 1
    assert [str(path) for path in (tmp_path / build.CACHE_NAME).iterdir()] == list(paths)


def test_without_a_compiler_the_error_says_how_to_get_one(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "_compilers", lambda: [])
    with pytest.raises(NativeBuildError, match=r"none is installed; `apt-get install gcc` or `pip install ziglang`"):
        library_path()


def test_a_compiler_that_fails_is_named_and_the_next_one_tried(tmp_path, monkeypatch):
    broken = tmp_path / "broken-cc"
    broken.write_text("#!/bin/sh\necho 'fatal error: out of ideas' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    working = build._compilers()
    monkeypatch.setattr(build, "_compilers", lambda: [[str(broken)], *working])
    assert library_path().exists()
    monkeypatch.setattr(build, "_compilers", lambda: [[str(broken)]])
    with pytest.raises(NativeBuildError, match=r"tried .*broken-cc \(fatal error: out of ideas\); `apt-get"):
        library_path()
