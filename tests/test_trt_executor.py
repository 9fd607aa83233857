"""The TensorRT executor against the ONNX Runtime one, with ONNX Runtime in TensorRT's place (tests/ort_runner.py)."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from build_engines.checkpoint.hf import HfCheckpoint
from llm_runtime.engine import Engine, EngineConfig
from llm_runtime.executors.base import Executor, Row
from llm_runtime.executors.trt import BITS, NOT_FINITE, TrtExecutor
from llm_runtime.executors.trt_bindings import ALIGNMENT, DECODE, PREFILL, io_table
from llm_runtime.manifest import BYTES
from llm_runtime.page_pool import PageGroup
from llm_runtime.types import GenerationRequest, SamplingParams
from tests.engines import PAGE_SIZE, load_executor, log_softmax, run_in_chunks
from tests.manifests import make_manifest, make_plan, with_plan
from tests.ort_runner import OrtRunner, make_executor, write_graph_for_tensorrt
from tests.tiny_models import TINY_FAMILIES, VOCAB_SIZE

TOLERANCE = 2e-4  # of log-probabilities: float32 summed in another order
NUM_PAGES = 64
PLAN = make_plan(max_batch=6, max_step_tokens=24, max_prefill_rows=3, max_row_pages=20)
families = pytest.mark.parametrize("family", TINY_FAMILIES)


@dataclass
class Growing:
    """A sequence of random tokens on pages of its own, neither in order nor adjacent."""

    tokens: list[int]
    pages: list[int]
    past: int = 0

    def next_row(self, length: int, num_logits: int) -> Row:
        row = Row(self.tokens[self.past : self.past + length], self.past, self.pages, num_logits)
        self.past += length
        return row


def random_steps(seed: int) -> list[list[Row]]:
    """Steps of prompt chunks of many lengths and of single tokens, mixed, until all sequences have run."""
    rng = random.Random(seed)
    pages = rng.sample(range(NUM_PAGES), NUM_PAGES)
    sequences = []
    for index in range(8):
        length = rng.randint(2, 8 * PAGE_SIZE)
        tokens = [rng.randrange(3, VOCAB_SIZE) for _ in range(length)]
        sequences.append(Growing(tokens, pages[8 * index : 8 * index + 8]))
    steps = []
    while unfinished := [s for s in sequences if s.past < len(s.tokens)]:
        rows = []
        for sequence in rng.sample(unfinished, rng.randint(1, len(unfinished))):
            left = len(sequence.tokens) - sequence.past
            length = min(left, rng.choice([1] * 8 + [5, 23, 60]))
            rows.append(sequence.next_row(length, rng.choice([0, 1, 1, min(2, length), length])))
        steps.append(rows)
    return steps


@families
@pytest.mark.parametrize("seed", [1, 2])
def test_random_steps_give_the_logits_of_the_onnx_runtime_executor(shelf, family, seed):
    reference = load_executor(shelf.engine(family), attention="standard", num_pages=NUM_PAGES)
    executor, runner = make_executor(shelf.engine(family), PLAN, NUM_PAGES)
    for number, rows in enumerate(random_steps(seed)):
        wanted, got = reference.execute(rows), executor.execute(rows)
        assert got.shape == wanted.shape == (sum(row.num_logits for row in rows), VOCAB_SIZE)
        np.testing.assert_allclose(log_softmax(got), log_softmax(wanted), atol=TOLERANCE, err_msg=f"step {number}")
    assert {sizes["B"] for profile, sizes in runner.calls if profile == DECODE} == {1, 2, 4, 6}
    assert {sizes["B"] for profile, sizes in runner.calls if profile == PREFILL} >= {1, 2}


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_what_a_row_gives_is_the_same_however_much_padding_is_beside_it(shelf, family):
    """Alone, and in decode calls filled up to 2, 4 and 6 rows and to more pages than it has."""
    rng = np.random.default_rng(5)
    prompt = [int(token) for token in rng.integers(3, VOCAB_SIZE, 40)]
    executor, runner = make_executor(shelf.engine(family), PLAN, NUM_PAGES)
    pages, others = [9, 3, 17, 4, 30, 2], [[40 + i] for i in range(4)]
    executor.execute([Row(prompt[:39], 0, pages, 0)])
    executor.execute([Row([7] * 100, 0, list(range(44, 57)), 0)])
    wanted = log_softmax(executor.execute([Row(prompt[39:], 39, pages, 1)]))
    for count in (2, 4):
        beside = [Row([5 + index], 0, others[index], 1) for index in range(count)]
        got = log_softmax(executor.execute([*beside, Row(prompt[39:], 39, pages, 1)]))
        np.testing.assert_allclose(got[-1:], wanted, atol=TOLERANCE)
    long = Row([8], 100, list(range(44, 57)), 1)
    np.testing.assert_allclose(
        log_softmax(executor.execute([long, Row(prompt[39:], 39, pages, 1)]))[1:], wanted, atol=TOLERANCE
    )
    decode = [sizes for profile, sizes in runner.calls if profile == DECODE]
    assert [(sizes["B"], sizes["P"]) for sizes in decode] == [(1, 8), (4, 8), (6, 8), (2, 16)]


def test_a_step_changes_no_slot_but_those_of_its_tokens_and_of_the_scratch_page(shelf):
    executor, _ = make_executor(shelf.engine("llama"), PLAN, NUM_PAGES)
    executor._slots.fill_(3)
    before = executor._slots.clone()
    executor.execute([Row([5], 3, [7], 1), Row([6], 0, [8], 1), Row([9], 16, [11, 12, 13], 1), Row([5, 6], 7, [20, 21], 0)])
    changed = (executor._slots != before).any(dim=2).all(dim=0).nonzero()[:, 0].tolist()
    scratch = NUM_PAGES * PAGE_SIZE
    assert changed == sorted([7 * PAGE_SIZE + 3, 8 * PAGE_SIZE, 13 * PAGE_SIZE, 20 * PAGE_SIZE + 7, 21 * PAGE_SIZE, scratch])


def test_a_row_too_long_for_a_call_gives_all_its_logits(shelf):
    tokens = [int(token) for token in np.random.default_rng(7).integers(3, VOCAB_SIZE, 61)]
    pages = [9, 3, 17, 4, 30, 2, 8, 21]
    executor, runner = make_executor(shelf.engine("llama"), PLAN, NUM_PAGES)
    wanted = run_in_chunks(load_executor(shelf.engine("llama"), attention="standard"), tokens, [61], pages)
    np.testing.assert_allclose(run_in_chunks(executor, tokens, [61], pages), wanted, atol=TOLERANCE)
    assert len(runner.calls) == 21  # 3 logits each


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("fp32", torch.float32), ("fp16", torch.float16), ("bf16", torch.bfloat16), ("fp8", torch.float8_e4m3fn)],
)
def test_bits_of_what_is_not_finite(name, dtype):
    values = torch.tensor([0.0, 1.5, -448.0, float("nan"), -float("nan"), 1e-3, float("inf"), -float("inf")]).to(dtype)
    bits = values.view(BITS[BYTES[name]])
    found = (bits & NOT_FINITE[name]) == NOT_FINITE[name]
    assert found.tolist() == (~torch.isfinite(values.float())).tolist()
    assert found.any()


def test_a_graph_in_16_bits_runs_on_pages_of_16_bits(shelf, tmp_path, monkeypatch):
    """The graph that TensorRT compiles, which ONNX Runtime can run too, against float32."""
    tokens = [int(token) for token in np.random.default_rng(7).integers(3, VOCAB_SIZE, 61)]
    pages = [9, 3, 17, 4, 30, 2, 8, 21]
    checkpoint = HfCheckpoint(shelf.checkpoint("llama"))
    manifest = write_graph_for_tensorrt(checkpoint, tmp_path / "engine", "fp16", PLAN, monkeypatch)
    assert manifest.precision.kv_cache == "fp16"
    executor = TrtExecutor(
        manifest, [PageGroup(NUM_PAGES)], OrtRunner(tmp_path / "engine" / "graph.onnx", manifest), torch.device("cpu")
    )
    wanted = run_in_chunks(load_executor(shelf.engine("llama"), attention="standard"), tokens, [61], pages)
    got = run_in_chunks(executor, tokens, [20, 1, 1, 1, 30, 8], pages)
    assert 1e-5 < np.abs(got - wanted).mean() < 0.02


@pytest.mark.parametrize("kv_cache", ["fp32", "fp16", "bf16", "fp8"])
@pytest.mark.parametrize(("page_size", "head_dim"), [(16, 32), (1, 8), (5, 24)])
def test_every_layers_pages_have_aligned_memory_of_their_own(kv_cache, page_size, head_dim):
    manifest = with_plan(make_manifest(num_layers=3, page_size=page_size, head_dim=head_dim), PLAN, kv_cache=kv_cache)
    bound = Bound()
    TrtExecutor(manifest, [PageGroup(7)], bound, torch.device("cpu"))
    starts = sorted(address for name, address in bound.addresses.items() if "_pages." in name)
    size = (7 + 1) * page_size * 2 * head_dim * BYTES[kv_cache]
    assert len(starts) == 6
    assert all(b - a >= size and (b - a) % ALIGNMENT == 0 for a, b in pairwise(starts))
    assert set(bound.addresses) == {spec.name for spec in io_table(manifest)}


class Bound:
    """A runner that only keeps what it is told."""

    description = ""

    def bind(self, addresses: Mapping[str, int], num_pages: int) -> None:
        self.addresses = addresses

    def run(self, profile: int, sizes: Mapping[str, int]) -> None:
        raise AssertionError("nothing is to be run")

    def close(self) -> None: ...


def generate(executor: Executor, tokenizer: Tokenizer, requests: list[GenerationRequest]) -> dict[str, list[int]]:
    config = EngineConfig(
        max_sequences=8, max_step_tokens=60, prefill_chunk_tokens=30, max_context=20 * PAGE_SIZE, end_ids=(1,)
    )
    engine = Engine(executor, tokenizer, config)
    for request in requests:
        engine.add(request)
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    while engine.has_work:
        for output in engine.step(0.0):
            assert output.error is None
            tokens[output.request_id] += output.token_ids
        engine.blocks.check_invariants()
    executor.close()
    return tokens


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_an_engine_generates_the_same_on_either_executor(shelf, family):
    """Greedy and sampled, with penalties and shared prefixes, in a pool that is too small for all at once."""
    rng = random.Random(3)
    shared = [rng.randrange(3, VOCAB_SIZE) for _ in range(20)]
    requests = []
    for index in range(9):
        tail = [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(1, 40))]
        sampling = SamplingParams(
            max_tokens=20,
            temperature=[0.0, 0.8, 1.2][index % 3],
            top_k=rng.choice([0, 20]),
            top_p=rng.choice([1.0, 0.9]),
            repetition_penalty=rng.choice([1.0, 1.3]),
            min_tokens=rng.choice([0, 10]),
            wants_logprobs=rng.random() < 0.5,
            num_top_logprobs=3,
            seed=index,
        )
        requests.append(GenerationRequest(str(index), tuple(shared + tail if index % 2 else tail), sampling))
    folder = shelf.engine(family)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    wanted = generate(load_executor(folder, attention="standard", num_pages=40), tokenizer, requests)
    executor, runner = make_executor(folder, PLAN, 40)
    assert generate(executor, tokenizer, requests) == wanted
    assert {sizes["B"] for profile, sizes in runner.calls if profile == DECODE} >= {1, 2, 4, 6}
