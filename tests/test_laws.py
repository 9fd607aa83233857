"""The laws on real engines: alone = in a batch = chunked = prefix-cached = preempted = speculated, token for token.

Kernels may sum in another order at another batch size, so a difference is allowed where the two candidates' log-probabilities
lie within a bound of each other, and only there. Where activations are rounded to int8 (the default beside INT4 weights), or
keys and values to int8 or fp8, a sum that differs in its last bit may round to another step, so the bound is wider.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from tokenizers import Tokenizer

from llm_runtime.engine import Engine, EngineConfig
from llm_runtime.executors.ort import OrtExecutor, OrtOptions
from llm_runtime.manifest import CacheName, read_manifest
from llm_runtime.page_pool import PageGroup
from llm_runtime.types import GenerationRequest, SamplingParams, TokenLogprob
from tests.test_speculation import Guesser
from tests.tiny_models import VOCAB_SIZE

FLOAT_TIE = 1e-3
INT8_TIE = 0.05
OUTPUT = 24

engines = pytest.mark.parametrize(
    ("family", "precision", "lm_head", "accuracy", "kv_cache", "tie"),
    [
        ("llama", "fp32", "fp32", 1, "fp32", FLOAT_TIE),
        ("gemma3", "fp32", "fp32", 1, "fp32", FLOAT_TIE),
        ("mistral", "int4", "fp32", 1, "fp32", FLOAT_TIE),
        ("qwen3", "int4", "int8", 4, "fp32", INT8_TIE),
        ("gemma3", "int4", "int8", 4, "fp32", INT8_TIE),
        ("llama", "fp32", "fp32", 1, "int8", INT8_TIE),
        ("gemma3", "fp32", "fp32", 1, "fp8", INT8_TIE),
    ],
)


class Loaded:
    """An engine on disk, run with any limits."""

    def __init__(self, folder, accuracy: int, kv_cache: CacheName) -> None:
        self.folder = folder
        self.manifest = read_manifest(folder).with_kv_cache(kv_cache)
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.options = OrtOptions(num_threads=2, matmul_accuracy=accuracy)

    def run(
        self,
        prompts: list[tuple[int, ...]],
        *,
        num_pages: int | Sequence[PageGroup] = 200,
        together: bool = True,
        guesses: dict[tuple[int, ...], int] | None = None,
        **limits,
    ) -> list[list[TokenLogprob]]:
        """The chosen tokens of each prompt with their log-probabilities and the runner-up's; all at once, or in turn.

        guesses: with speculation, the next token after each context; some are made wrong.
        """
        groups = [PageGroup(num_pages)] if isinstance(num_pages, int) else num_pages
        executor = OrtExecutor(self.folder, self.manifest, groups, self.options)
        values = {
            "max_sequences": 8,
            "max_step_tokens": 512,
            "prefill_chunk_tokens": 512,
            "max_context": 200,
            "end_ids": (),
        } | limits
        engine = Engine(executor, self.tokenizer, EngineConfig(**values, max_draft_tokens=0 if guesses is None else 5))
        if guesses is not None:
            engine._speculator = Guesser(seed=1, rule=lambda context: guesses.get(tuple(context), 5), longest=5)
        sampling = SamplingParams(max_tokens=OUTPUT, ignore_eos=True, wants_logprobs=True, num_top_logprobs=2)
        results: dict[str, list[TokenLogprob]] = {str(index): [] for index in range(len(prompts))}
        for index, prompt in enumerate(prompts):
            engine.add(GenerationRequest(str(index), prompt, sampling))
            while engine.has_work and not together:
                self._step(engine, results)
        while engine.has_work:
            self._step(engine, results)
        self.stats = engine.stats
        executor.close()
        return [results[str(index)] for index in range(len(prompts))]

    @staticmethod
    def _step(engine: Engine, results: dict[str, list[TokenLogprob]]) -> None:
        for output in engine.step(0.0):
            assert output.error is None
            results[output.request_id] += output.logprobs
        engine.blocks.check_invariants()


@pytest.fixture
def loaded(shelf, family, precision, lm_head, accuracy, kv_cache):
    return Loaded(shelf.engine(family, precision=precision, lm_head=lm_head), accuracy, kv_cache)


def make_prompts(seed: int, count: int = 6) -> list[tuple[int, ...]]:
    """Some share their first 40 tokens, some are short, some cross the tiny models' windows of 16."""
    rng = random.Random(seed)
    shared = [rng.randrange(3, VOCAB_SIZE) for _ in range(40)]
    tails = [[rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(1, 30))] for _ in range(count)]
    return [tuple(shared + tail if index % 2 else tail) for index, tail in enumerate(tails)]


def assert_same(expected: list[list[TokenLogprob]], actual: list[list[TokenLogprob]], tie: float) -> None:
    for wanted, got in zip(expected, actual, strict=True):
        assert len(wanted) == len(got) == OUTPUT
        for position, (a, b) in enumerate(zip(wanted, got, strict=True)):
            if a.token_id != b.token_id:
                first, second = a.top[0][1], dict(a.top).get(b.token_id, float("-inf"))
                assert first - second < tie, f"token {position}: {a} against {b}"
                break  # from here on the contexts differ


@engines
@pytest.mark.parametrize("seed", [1, 2])
def test_every_way_to_run_gives_the_same_tokens(loaded, seed, tie):
    prompts = make_prompts(seed)
    alone = loaded.run(prompts, together=False, prefix_caching=False)
    assert_same(alone, loaded.run(prompts, prefix_caching=False), tie)
    assert_same(alone, loaded.run(prompts, prefix_caching=False, max_step_tokens=16, prefill_chunk_tokens=5), tie)
    assert_same(alone, loaded.run([*prompts, *prompts][len(prompts) :], together=False), tie)
    assert loaded.stats.prefix_hit_tokens > 0
    assert_same(alone, loaded.run(prompts, num_pages=32, prefix_caching=False), tie)
    assert loaded.stats.preemptions > 0
    windows = loaded.manifest.model.layer_windows
    if loaded.manifest.window_table:
        groups = [PageGroup(200), PageGroup(60, max(windows))]
        for limits in ({}, {"prefill_chunk_tokens": 7, "max_step_tokens": 16}, {"prefix_caching": False}):
            assert_same(alone, loaded.run(prompts, num_pages=groups, **limits), tie)
    assert_same(alone, loaded.run(prompts, static_cache=True), tie)
    guesses = {
        (*prompt, *(choice.token_id for choice in output[:count])): output[count].token_id
        for prompt, output in zip(prompts, alone, strict=True)
        for count in range(OUTPUT)
    }
    assert_same(alone, loaded.run(prompts, guesses=guesses), tie)
    assert loaded.stats.draft_tokens > loaded.stats.accepted_tokens > 0
