"""The graph's numbers against transformers on the same weights, in every family, with either attention."""

import shutil

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from build_engines.build import BuildOptions, build
from build_engines.engine import EngineOptions, write_engine
from build_engines.targets import Wanted
from llm_runtime.executors.base import Row
from tests.engines import (
    PAGE_SIZE,
    RECIPES,
    dequantized_model,
    load_executor,
    log_softmax,
    reference_logprobs,
    reference_model,
    run_in_chunks,
)
from tests.manifests import make_plan
from tests.ort_runner import make_executor
from tests.tiny_models import TINY_FAMILIES, VOCAB_SIZE

TOLERANCE = 2e-4  # of log-probabilities: float32 summed in another order
ROUNDED_TOLERANCE = 0.05  # on average
PROMPT = [int(t) for t in np.random.default_rng(7).integers(3, VOCAB_SIZE, 61)]  # past the tiny models' windows of 16
PAGES = [9, 3, 17, 4, 30, 2, 8, 21]  # neither in order nor adjacent

attentions = pytest.mark.parametrize("attention", ["standard", "fused"])
families = pytest.mark.parametrize("family", TINY_FAMILIES)


@families
@attentions
def test_logprobs_equal_transformers(shelf, family, attention):
    expected = reference_logprobs(reference_model(shelf.checkpoint(family)), PROMPT)
    executor = load_executor(shelf.engine(family), attention=attention)
    np.testing.assert_allclose(run_in_chunks(executor, PROMPT, [len(PROMPT)], PAGES), expected, atol=TOLERANCE)


@families
@pytest.mark.parametrize(("kv_cache", "bound"), [("int8", 0.05), ("fp8", 0.2)])
def test_quantized_pages_equal_transformers_with_keys_and_values_rounded_the_same(shelf, family, kv_cache, bound):
    model = reference_model(shelf.checkpoint(family))
    exact, expected = reference_logprobs(model, PROMPT), reference_logprobs(model, PROMPT, kv_cache)
    executor = load_executor(shelf.engine(family), kv_cache=kv_cache)
    for chunks in ([len(PROMPT)], [17, 1, 1, 30, 12], [1] * 61):
        found = run_in_chunks(executor, PROMPT, chunks, PAGES)
        # A sum in another order can round to another step, so some differ by more than float32's own noise.
        assert np.median(np.abs(found - expected)) < TOLERANCE
        assert np.abs(found - expected).mean() < np.abs(exact - expected).mean() / 4
        assert np.abs(found - expected).max() < bound


@families
@attentions
@pytest.mark.parametrize("chunks", [[1] * 61, [PAGE_SIZE] * 7 + [5], [17, 1, 1, 30, 12]])
def test_chunks_equal_the_whole(shelf, family, attention, chunks):
    executor = load_executor(shelf.engine(family), attention=attention)
    whole = run_in_chunks(executor, PROMPT, [len(PROMPT)], PAGES)
    np.testing.assert_allclose(run_in_chunks(executor, PROMPT, chunks, PAGES), whole, atol=TOLERANCE)


@families
@attentions
def test_a_row_does_not_depend_on_the_rows_beside_it(shelf, family, attention):
    executor = load_executor(shelf.engine(family), attention=attention)
    alone = run_in_chunks(executor, PROMPT, [40] + [1] * 21, PAGES)
    run_in_chunks(executor, PROMPT[:40], [40], PAGES)
    short, long = [10, 11], [12, 13, 14, 15]
    executor.execute([Row(PROMPT[:7], 0, short, 1)])
    beside = [
        Row([5], 7, short, 1),
        Row([PROMPT[40]], 40, PAGES, 1),
        Row(PROMPT[30:53], 0, long, 0),
        Row(PROMPT[3:9], 0, [16], 6),
    ]
    logits = log_softmax(executor.execute(beside))
    assert logits.shape == (1 + 1 + 0 + 6, VOCAB_SIZE)
    np.testing.assert_allclose(logits[1], alone[40], atol=TOLERANCE)


@pytest.mark.parametrize("recipe", [name for name in RECIPES if "cache" not in name and name != "int4-64"])
@families
def test_a_quantized_engine_equals_a_reference_with_the_same_weights_dequantized(shelf, tmp_path, family, recipe):
    quantized = shelf.quantized(family, RECIPES[recipe])
    options = EngineOptions("tiny", lm_head="fp32", page_size=PAGE_SIZE)
    manifest = write_engine(quantized, tmp_path / "engine", options, lambda fraction: None)
    assert manifest.precision.weights == RECIPES[recipe].precision
    expected = reference_logprobs(dequantized_model(shelf.checkpoint(family), quantized), PROMPT)
    for attention in ("standard", "fused"):
        executor = load_executor(tmp_path / "engine", attention=attention)
        actual = run_in_chunks(executor, PROMPT, [len(PROMPT)], PAGES)
        if manifest.precision.activations is None:
            np.testing.assert_allclose(actual, expected, atol=5 * TOLERANCE)
        else:  # a sum that differs in its last bit may round to the next step of eight bits
            assert np.abs(actual - expected).mean() < ROUNDED_TOLERANCE


@pytest.mark.parametrize(("lm_head", "bound"), [("int8", 0.1), ("int4", 1.5)])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_quantized_head_stays_near_the_float_one(shelf, family, lm_head, bound):
    expected = run_in_chunks(load_executor(shelf.engine(family), attention="standard"), PROMPT, [61], PAGES)
    executor = load_executor(shelf.engine(family, lm_head=lm_head), attention="standard")
    difference = np.abs(run_in_chunks(executor, PROMPT, [61], PAGES) - expected)
    assert 0 < difference.mean() < bound


@pytest.fixture(scope="module")
def overflowing(shelf, tmp_path_factory):
    """An engine in which token 5 has keys and values that are not finite."""
    folder = shutil.copytree(shelf.checkpoint("llama"), tmp_path_factory.mktemp("overflowing") / "checkpoint")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][5] = float("inf")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    output = folder.with_name("engine")
    build(BuildOptions(str(folder), Wanted(precision="fp32"), page_size=PAGE_SIZE), output, lambda step, fraction: None)
    return output


@pytest.mark.parametrize("make", ["standard", "fused", "tensorrt"])
def test_what_is_not_finite_does_not_reach_the_next_owner_of_its_pages(overflowing, make):
    if make == "tensorrt":
        plan = make_plan(max_batch=4, max_step_tokens=16, max_prefill_rows=2, max_row_pages=8)
        executor, _ = make_executor(overflowing, plan)
    else:
        executor = load_executor(overflowing, attention=make)
    prompt = [token for token in PROMPT[:11] if token != 5]
    expected = run_in_chunks(executor, prompt, [3] + [1] * (len(prompt) - 3), [1, 2])
    spoiled = executor.execute([Row([5] * PAGE_SIZE, 0, [3], PAGE_SIZE)])
    assert not np.isfinite(spoiled).all()
    executor.execute([Row([7, 5, 5, 7, 5, 5, 5], 1, [4], 0)])
    np.testing.assert_allclose(run_in_chunks(executor, prompt, [3] + [1] * (len(prompt) - 3), [3, 4]), expected, atol=1e-6)
