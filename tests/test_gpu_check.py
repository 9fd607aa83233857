"""What benchmarks/gpu_check.py works out and compares, on real executors of a CPU: all of it but the GPU."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from dataclasses import asdict, replace

import numpy as np
import pytest
from rich.console import Console

from benchmarks import gpu_check
from benchmarks.gpu_check import Check, Comparison, Outcome, Timing, compare, prefill_flops, step_bytes, wanted_of
from build_engines.checkpoint.hf import HfCheckpoint
from build_engines.checkpoint.types import linear_names, linear_shape
from llm_runtime.manifest import read_manifest
from tests.building import refused
from tests.engines import load_executor
from tests.test_imports import ROOT
from tests.tiny_models import VOCAB_SIZE

IDS = [int(t) for t in np.random.default_rng(3).integers(3, VOCAB_SIZE, 40)]


def test_an_engine_agrees_with_itself_and_less_with_one_of_fewer_bits(shelf):
    full, few = (load_executor(shelf.engine("llama", precision=precision)) for precision in ("fp32", "int4"))
    same = compare(full, load_executor(shelf.engine("llama")), IDS)
    assert same.passes
    assert same == Comparison(pytest.approx(0, abs=1e-5), 1.0, gpu_check.GREEDY_TOKENS)
    other = compare(full, few, IDS)
    assert other.mean_difference > 0.05
    assert other.agreement < 1.0
    assert other.same_greedy_tokens < gpu_check.GREEDY_TOKENS
    assert not other.passes


@pytest.mark.parametrize(("precision", "bits"), [("fp32", 32), ("int4", 4.125), ("int8", 8)])
def test_bytes_and_operations_of_a_step(shelf, precision, bits):
    folder = shelf.engine("llama", precision=precision)
    manifest, config = read_manifest(folder), HfCheckpoint(shelf.checkpoint("llama")).config
    weights = sum(int(np.prod(linear_shape(config, name))) for name in linear_names(config))
    head = config.vocab_size * config.hidden_size
    token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * 4
    assert step_bytes(manifest, 3, 100) == pytest.approx(weights * bits / 8 + head * 4 + 3 * 100 * token)
    assert prefill_flops(manifest, 512) == 2 * (weights * 512 + head)


def test_a_window_is_read_no_further_than_it_reaches(shelf):
    manifest = read_manifest(shelf.engine("mistral"))
    windows = manifest.model.layer_windows
    assert any(windows)
    token = 2 * manifest.model.num_kv_heads * manifest.model.head_dim * 4
    grown = step_bytes(manifest, 1, 200) - step_bytes(manifest, 1, 100)
    assert grown == token * 100 * sum(not window for window in windows)


def test_steps_are_timed_for_every_batch(shelf, monkeypatch):
    monkeypatch.setattr(gpu_check, "CONTEXT", 60)
    monkeypatch.setattr(gpu_check, "PREFILL", 30)
    monkeypatch.setattr(gpu_check, "BATCHES", (1, 3))
    manifest, executor = gpu_check.open_engine(shelf.engine("llama"), 64)
    timings = gpu_check.time_steps(executor, manifest, 1e9, 2)
    assert [timing.what for timing in timings] == ["decode, batch 1", "decode, batch 3", "prefill, 30 tokens"]
    for timing, tokens in zip(timings, (1, 3, 30), strict=True):
        assert timing.tokens_per_second == pytest.approx(tokens / timing.seconds)
    assert timings[1].bandwidth == pytest.approx(step_bytes(manifest, 3, 60) / timings[1].seconds / 1e9)
    assert timings[2].flops == pytest.approx(prefill_flops(manifest, 30) / timings[2].seconds)


def test_a_precision_that_the_gpu_cannot_run_is_skipped_and_a_build_that_fails_is_said(shelf, tmp_path):
    model = str(shelf.checkpoint("llama"))
    check = Check(tmp_path, "tensorrt-rtx", "8.0", 1)
    skipped = check.run("fp8", model, "llama", 1.0, compared=True, timed=True)
    assert skipped.status == "skipped"
    assert skipped.reason == refused(lambda: wanted_of("fp8", "llama", "tensorrt-rtx", "8.0"))
    failed = check.run("int8", str(tmp_path / "none"), "llama", 1.0, compared=True, timed=True)
    assert failed.status == "failed"
    assert "\n" not in failed.reason
    assert failed.timings == []


def test_float_is_what_the_family_can_have():
    assert wanted_of("float", "gemma3", "tensorrt", "9.0")[0].precision == "bf16"
    assert wanted_of("float", "llama", "tensorrt", "7.5")[0].precision == "fp16"
    assert wanted_of("int4-64", "llama", "tensorrt", "9.0")[1] == 64


@pytest.mark.parametrize("name", ["float", "int8", "fp8", "int4-64"])
def test_both_sides_are_built_from_the_same_weights(shelf, tmp_path, name, monkeypatch):
    """The GPU's side is another ONNX Runtime engine here, so that what differs is nothing."""

    def on_a_cpu(*arguments):
        return replace(wanted_of(*arguments)[0], target="onnxruntime", lm_head="auto" if name == "float" else "fp32"), 64

    monkeypatch.setattr(gpu_check, "wanted_of", on_a_cpu)
    monkeypatch.setattr(gpu_check, "MAX_CONTEXT", 512)
    monkeypatch.setattr(gpu_check, "TEXT_TOKENS", 24)
    monkeypatch.setattr(gpu_check, "num_pages", lambda manifest: 64)
    outcome = Check(tmp_path, "tensorrt", "9.0", 1).run(
        name, str(shelf.checkpoint("qwen3")), "qwen3", 1.0, compared=True, timed=False
    )
    assert outcome.reason == ""
    assert outcome.comparison is not None
    assert outcome.comparison.mean_difference < 1e-4
    assert outcome.comparison.same_greedy_tokens == gpu_check.GREEDY_TOKENS


def test_the_table_and_the_json_have_everything():
    timing = Timing("decode, batch 1", 0.002, 500.0, bandwidth=0.81)
    outcomes = [
        Outcome(
            "demo fp8",
            comparison=Comparison(0.0123, 0.987, 32),
            timings=[timing, Timing("prefill", 0.01, 51200.0, flops=9.1e13)],
        ),
        Outcome("demo fp4", "skipped", "not on compute capability 9.0"),
    ]
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(gpu_check.report_table(outcomes))
    text = console.export_text()
    for word in ("0.0123", "98.7%", "32", "2.00", "500", "81%", "91.0", "skipped: not on compute capability 9.0"):
        assert word in text
    assert json.loads(json.dumps([asdict(outcome) for outcome in outcomes]))[0]["timings"][0]["bandwidth"] == 0.81


def test_a_random_model_can_be_built(tmp_path):
    folder = gpu_check.random_model(tmp_path / "random", 0.06)
    config = HfCheckpoint(folder).config
    assert (config.family, config.num_layers, config.hidden_size) == ("llama", 1, 2048)


def test_without_a_gpu_it_says_so():
    environment = {"PATH": "/usr/bin:/bin", "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run([ROOT / "scripts/gpu_check.sh"], env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 2, result.stderr
    assert result.stdout.strip() == "nothing to check: torch sees no NVIDIA GPU"
