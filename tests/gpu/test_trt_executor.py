"""The TensorRT executor on a GPU, against ONNX Runtime on the CPU and against itself. Skipped where there is no GPU."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no GPU is visible", allow_module_level=True)

from build_engines.checkpoint.hf import HfCheckpoint  # noqa: E402
from build_engines.compile import CompileOptions, gpu_at_hand  # noqa: E402
from build_engines.engine import EngineOptions, write_engine  # noqa: E402
from build_engines.graph.numerics import Numerics  # noqa: E402
from build_engines.targets import can_run  # noqa: E402
from llm_runtime import sampler, torch_sampler  # noqa: E402
from llm_runtime.executors.base import Row  # noqa: E402
from llm_runtime.executors.trt import TrtExecutor, open_tensorrt  # noqa: E402
from llm_runtime.executors.trt_engine import MODULES, RUNTIME_CACHE_NAME, TrtOptions  # noqa: E402
from llm_runtime.manifest import read_manifest  # noqa: E402
from llm_runtime.page_pool import PageGroup  # noqa: E402
from llm_runtime.sampler import SamplerState  # noqa: E402
from llm_runtime.types import GenerationRequest, SamplingParams  # noqa: E402
from tests.engines import PAGE_SIZE, RECIPES, load_executor, log_softmax, run_in_chunks  # noqa: E402
from tests.test_torch_sampler import assert_same, choose_on_device, random_case  # noqa: E402
from tests.test_trt_executor import NUM_PAGES, generate, random_steps  # noqa: E402
from tests.tiny_models import VOCAB_SIZE  # noqa: E402

COMPILER = CompileOptions(max_batch=6, max_step_tokens=24, max_prefill_rows=3)
# Of log-probabilities against float32: mean and largest. Float32 on a GPU may multiply with the 10 bits that fp16 has, too.
MEAN, LARGEST = 0.02, 0.5
SAME = 1e-2  # of one engine's, with other kernels for another shape


@pytest.fixture(scope="module", params=MODULES)
def runtime(request) -> str:
    pytest.importorskip(MODULES[request.param])
    return request.param


@pytest.fixture(scope="module")
def engines(shelf, runtime, tmp_path_factory):
    """engine(family, compute, cache): its folder, compiled once."""
    made: dict[tuple[str, str, str], Path] = {}

    def engine(family: str = "llama", compute: str = "fp16", cache: str | None = None) -> Path:
        key = (family, compute, cache or compute)
        if key not in made:
            here = gpu_at_hand()
            assert here is not None
            for kind in key[1:]:
                if not can_run(kind, runtime, here[0]):
                    pytest.skip(f"{kind} does not run on compute capability {here[0]}")
            made[key] = tmp_path_factory.mktemp(runtime) / "-".join(key)
            checkpoint = shelf.quantized(family, RECIPES["fp8-cache"]) if cache else HfCheckpoint(shelf.checkpoint(family))
            numerics = Numerics(runtime, compute, compute, key[2])
            options = EngineOptions("tiny", lm_head=compute, page_size=PAGE_SIZE, numerics=numerics, compiler=COMPILER)
            write_engine(checkpoint, made[key], options, lambda fraction: None)
        return made[key]

    return engine


@pytest.fixture
def load() -> Iterator:
    opened: list[TrtExecutor] = []

    def load(folder: Path, num_pages: int = NUM_PAGES, **options: object) -> TrtExecutor:
        trt_options = TrtOptions(**options)  # type: ignore[arg-type]
        opened.append(open_tensorrt(folder, read_manifest(folder), trt_options, lambda gpu: [PageGroup(num_pages)]))
        return opened[-1]

    yield load
    for executor in opened:
        executor.close()


@pytest.mark.parametrize(
    ("family", "compute", "cache"),
    [
        ("llama", "fp32", None), ("llama", "fp16", None), ("llama", "bf16", None), ("llama", "fp16", "fp8"),
        ("mistral", "fp16", None), ("qwen2", "fp16", None), ("qwen3", "fp16", None), ("gemma3", "bf16", None),
        ("gemma3", "bf16", "fp8"),
    ],
)  # fmt: skip
def test_random_steps_give_the_logits_of_onnx_runtime(shelf, engines, load, family, compute, cache):
    reference = load_executor(shelf.engine(family), attention="standard", num_pages=NUM_PAGES)
    executor = load(engines(family, compute, cache))
    # bf16 has 3 bits less than fp16, and fp8 keeps 3 bits of keys and values.
    factor = 15 if cache else {"fp32": 1, "fp16": 1, "bf16": 8}[compute]
    differences = []
    for seed in (1, 2):
        for rows in random_steps(seed):
            wanted, got = reference.execute(rows), executor.execute(rows)
            assert got.shape == wanted.shape
            differences.append(np.abs(log_softmax(got) - log_softmax(wanted)).ravel())
    difference = np.concatenate(differences)
    assert difference.mean() < factor * MEAN
    assert difference.max() < factor * LARGEST


def decode_steps(count: int) -> list[list[Row]]:
    """A prompt, and then single tokens of it and of 0 to 5 short rows beside it."""
    rng = random.Random(4)
    tokens = [rng.randrange(3, VOCAB_SIZE) for _ in range(20 + count)]
    pages = rng.sample(range(20, NUM_PAGES), 12)
    steps = [[Row(tokens[:20], 0, pages, 1)]]
    for index in range(count):
        beside = [Row([5 + other], 0, [other], 1) for other in range(index // 4 % 6)]
        steps.append([Row([tokens[20 + index]], 20 + index, pages, 1), *beside])
    return steps


def test_replayed_graphs_give_what_launched_kernels_give(engines, load):
    """Most shapes come up four times: run, captured, replayed twice."""
    graphs, plain = load(engines()), load(engines(), cuda_graphs=False)
    for rows in decode_steps(48):
        np.testing.assert_allclose(log_softmax(graphs.execute(rows)), log_softmax(plain.execute(rows)), atol=1e-4)


def test_few_graphs_are_kept_and_those_that_went_come_back(engines, load):
    few, many = load(engines(), max_graphs=2), load(engines())
    for rows in decode_steps(24) * 2:
        np.testing.assert_allclose(log_softmax(few.execute(rows)), log_softmax(many.execute(rows)), atol=1e-4)
    assert len(few._runner._contexts) <= 2 + 2


def test_padding_does_not_reach_a_result(engines, load):
    executor = load(engines())
    tokens = [int(token) for token in np.random.default_rng(5).integers(3, VOCAB_SIZE, 40)]
    pages = [9, 3, 17, 4, 30]
    executor.execute([Row(tokens[:39], 0, pages, 0)])
    last = Row(tokens[39:], 39, pages, 1)
    wanted = log_softmax(executor.execute([last]))
    for count in range(1, 9):
        got = log_softmax(executor.execute([*(Row([5 + i], 0, [40 + i], 1) for i in range(count)), last]))
        np.testing.assert_allclose(got[-1:], wanted, atol=SAME)


def test_chunks_equal_the_whole_and_a_copied_page_reads_the_same(engines, load):
    executor = load(engines())
    tokens = [int(token) for token in np.random.default_rng(7).integers(3, VOCAB_SIZE, 24)]
    whole = run_in_chunks(executor, tokens, [24], [9, 3, 17])
    np.testing.assert_allclose(run_in_chunks(executor, tokens, [8, 1, 7, 8], [1, 2, 4]), whole, atol=SAME)
    executor.copy_page(1, 5)
    executor.execute([Row([3] * 8, 0, [1], 0)])
    got = log_softmax(executor.execute([Row([tokens[8]], 8, [5, 6], 1)]))
    np.testing.assert_allclose(got[0], whole[8], atol=SAME)


def test_nothing_waits_for_the_device_but_what_fetches_the_choices(engines, load):
    executor = load(engines())
    rows = [Row([5], 3, [7], 1), Row([6], 20, [8, 9, 10], 1), Row([5, 6, 7], 7, [20, 21], 1)]
    params = [SamplingParams(), SamplingParams(temperature=1.0, top_p=0.9, repetition_penalty=1.2, seed=1), SamplingParams(
        temperature=1.0, min_p=0.01, wants_logprobs=True, num_top_logprobs=3, min_tokens=2, seed=2)]  # fmt: skip
    states = [SamplerState(each, [1, 2, 3], (1,)) for each in params]
    for _ in range(4):  # until graphs are captured and pinned memory is there
        executor.sample(rows, states, [[1, 2, 3]] * 3)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            executor.sample(rows, states, [[1, 2, 3]] * 3)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len([entry for entry in caught if "synchronizing" in str(entry.message)]) == 1


def test_an_engine_generates_the_same_alone_and_in_company(engines):
    """Sampled on the GPU; where a near-tie changes with the company, the tokens from there on may differ."""
    folder = engines("llama", "fp32")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    rng = random.Random(3)
    requests = [
        GenerationRequest(
            str(index),
            tuple(rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(1, 40))),
            SamplingParams(max_tokens=20, temperature=[0.0, 0.8][index % 2], top_p=0.9, seed=index, ignore_eos=True),
        )
        for index in range(8)
    ]

    def run(some: list[GenerationRequest]) -> dict[str, list[int]]:
        executor = open_tensorrt(folder, read_manifest(folder), TrtOptions(), lambda gpu: 40)
        return generate(executor, tokenizer, some)

    together, alone = run(requests), {}
    for request in requests:
        alone |= run([request])
    same = [
        a == b for request in requests for a, b in zip(together[request.request_id], alone[request.request_id], strict=True)
    ]
    assert np.mean(same) > 0.9


@pytest.mark.parametrize("block", range(4))
def test_the_sampler_on_the_gpu_chooses_what_the_one_on_the_host_does(block):
    for seed in range(50 * block, 50 * (block + 1)):
        logits, states, token_ids = random_case(seed)
        got = choose_on_device(logits, states, token_ids, "cuda")
        assert_same(sampler.choose(logits, states, token_ids), got, seed)


def test_the_sampler_of_a_large_vocabulary():
    logits = np.random.default_rng(0).normal(0, 3, (8, 262_144)).astype(np.float32)
    params = [
        SamplingParams(temperature=1.0, seed=i, **extra) for i, extra in enumerate([{}, {"top_k": 50}, {"top_p": 0.95}] * 2)
    ]
    states = [
        SamplerState(each, [1], ()) for each in [*params, SamplingParams(), SamplingParams(temperature=3.0, top_p=0.9, seed=9)]
    ]
    got = torch_sampler.choose(torch.from_numpy(logits).cuda(), states, [[1]] * 8)
    assert_same(sampler.choose(logits, states, [[1]] * 8), got)


def test_a_closed_executor_leaves_room_for_the_next_and_compiled_kernels_on_disk(engines, runtime):
    folder = engines()
    wanted = None
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    for _ in range(3):
        executor = open_tensorrt(folder, read_manifest(folder), TrtOptions(), lambda gpu: NUM_PAGES)
        got = [executor.execute(rows) for rows in decode_steps(3)]
        executor.close()
        del executor
        if wanted is not None:
            for a, b in zip(wanted, got, strict=True):
                np.testing.assert_allclose(log_softmax(a), log_softmax(b), atol=SAME)
        wanted = got
    assert torch.cuda.mem_get_info()[0] > free - (256 << 20)
    assert (folder / RUNTIME_CACHE_NAME).is_file() == (runtime == "tensorrt-rtx")
