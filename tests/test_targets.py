"""What each target and GPU can run, and that the rest is refused before any work, with what can be run instead."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest

from build_engines.targets import GENERATIONS, PRECISIONS, SINCE, Wanted, check_target, resolve, runnable_precisions
from llm_runtime.manifest import Runtime
from tests.building import refused

TARGETS = get_args(Runtime)
GPU_TARGETS = [target for target in TARGETS if target != "onnxruntime"]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("target", GPU_TARGETS)
def test_a_gpu_runs_a_precision_or_the_refusal_says_what_it_runs(target, precision):
    for capability in GENERATIONS:
        wanted = Wanted(target, precision, capabilities=(capability,))
        if precision in runnable_precisions(target, [capability]):
            check_target(wanted)
            continue
        message = refused(lambda wanted=wanted: check_target(wanted))
        head, _, allowed = message.partition(", which can run ")
        assert head.startswith(f"--precision {precision}: not with {target} on compute capability {capability} (")
        assert precision not in allowed.split(", ")
        for other in allowed.split(", "):
            check_target(replace(wanted, precision=other))


@pytest.mark.parametrize(
    ("target", "capability", "precisions"),
    [
        ("tensorrt", "7.5", {"fp32", "fp16", "int8"}),
        ("tensorrt-rtx", "7.5", {"fp16", "int8"}),
        ("tensorrt", "8.0", {"fp32", "fp16", "bf16", "int8", "int4", "mixed"}),
        ("tensorrt-rtx", "8.9", {"fp32", "fp16", "bf16", "fp8", "int8", "int4", "mixed"}),
        ("tensorrt", "9.0", {"fp32", "fp16", "bf16", "fp8", "int8", "int4", "mixed"}),
        ("tensorrt", "10.0", set(PRECISIONS)),
        ("onnxruntime", None, set(PRECISIONS)),
    ],
)
def test_what_runs(target, capability, precisions):
    assert set(runnable_precisions(target, [capability] if capability else [])) == precisions


def test_several_gpus_run_what_each_of_them_runs():
    assert "fp8" in runnable_precisions("tensorrt-rtx", ["8.9", "12.0"])
    assert "fp8" not in runnable_precisions("tensorrt-rtx", ["8.9", "8.0"])
    message = refused(lambda: check_target(Wanted("tensorrt-rtx", "fp8", capabilities=("8.9", "8.0"))))
    assert "compute capability 8.0 (Ampere (A100))" in message


@pytest.mark.parametrize(("option", "value"), [("compute", "bf16"), ("kv_cache", "fp8"), ("lm_head", "int4")])
def test_every_option_that_names_a_type_is_held_against_the_gpu(option, value):
    wanted = Wanted("tensorrt", "int8", capabilities=("7.5",), **{option: value})
    assert refused(lambda: check_target(wanted)).startswith(f"--{option.replace('_', '-')} {value}: not with tensorrt on")
    check_target(replace(wanted, capabilities=("8.9",)))


def test_an_unknown_gpu():
    message = refused(lambda: check_target(Wanted("tensorrt", "int8", capabilities=("6.1",))))
    assert message == "--compute-capability 6.1 is unknown; known are " + ", ".join(GENERATIONS)


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (Wanted(compute="fp16"), "--compute fp16: --target onnxruntime computes in fp32"),
        (Wanted(kv_cache="fp8"), "--kv-cache fp8: --target onnxruntime keeps fp32"),
        (Wanted(capabilities=("8.9",)), "--compute-capability is of GPUs"),
    ],
)
def test_options_of_gpus_on_a_cpu(wanted, words):
    assert refused(lambda: check_target(wanted)).startswith(words)


@pytest.mark.parametrize(
    ("target", "precision", "activations", "allowed"),
    [
        ("onnxruntime", "int4", "int8", "none"),
        ("onnxruntime", "fp4", "fp4", "none"),
        ("onnxruntime", "fp8", "none", "fp8"),
        ("tensorrt", "int8", "fp8", "none, int8"),
        ("tensorrt", "int4", "fp8", "none"),
        ("tensorrt", "fp4", "int8", "none, fp4"),
    ],
)
def test_inputs_are_rounded_to_what_weights_are(target, precision, activations, allowed):
    message = refused(lambda: check_target(Wanted(target, precision, activations=activations)))
    assert message == f"--activations {activations}: with --precision {precision} and --target {target}, allowed: {allowed}"
    for value in allowed.split(", "):
        check_target(Wanted(target, precision, activations=value))


class TestResolve:
    def test_onnxruntime_computes_in_float32_whatever_it_stores(self):
        for precision in PRECISIONS:
            numerics = resolve(Wanted(precision=precision), "llama").numerics
            assert (numerics.compute, numerics.cache) == ("fp32", "fp32")
            assert numerics.floats == (precision if precision in ("fp16", "bf16") else "fp32")

    @pytest.mark.parametrize(("family", "compute"), [("llama", "fp16"), ("gemma3", "bf16")])
    def test_gemma_leaves_the_range_of_fp16(self, family, compute):
        resolved = resolve(Wanted("tensorrt", "int4", capabilities=("8.9",)), family)
        assert resolved.numerics.compute == resolved.numerics.cache == resolved.lm_head == compute

    def test_gemma_on_a_gpu_without_bf16(self):
        message = refused(lambda: resolve(Wanted("tensorrt", "int8", capabilities=("7.5",)), "gemma3"))
        assert message.endswith("compute capability 7.5 has none: use --compute fp32")
        message = refused(lambda: resolve(Wanted("tensorrt", "fp16", capabilities=("8.9",)), "gemma3"))
        assert message == "gemma3 in fp16: its activations leave the range of fp16 (65,504); use bf16 or fp32"

    @pytest.mark.parametrize(
        ("wanted", "head"),
        [
            (Wanted(precision="int4"), "int8"),
            (Wanted(precision="mixed"), "int8"),
            (Wanted(precision="int8"), "fp32"),
            (Wanted(precision="fp16"), "fp16"),
            (Wanted(precision="int4", lm_head="fp32"), "fp32"),
            (Wanted("tensorrt", "int4", capabilities=("8.9",)), "fp16"),
            (Wanted("tensorrt", "int4", lm_head="int8", capabilities=("8.9",)), "int8"),
        ],
    )
    def test_the_head(self, wanted, head):
        assert resolve(wanted, "llama").lm_head == head

    def test_a_head_in_a_float_that_the_engine_does_not_have(self):
        message = refused(lambda: resolve(Wanted("tensorrt", "int4", lm_head="bf16", capabilities=("8.9",)), "llama"))
        assert message == "--lm-head bf16: this engine keeps weights that are not quantized in fp16; use that, int8 or int4"

    @pytest.mark.parametrize(
        ("target", "capabilities", "wide"),
        [
            ("onnxruntime", (), "int8"),
            ("tensorrt", ("8.0",), "int8"),
            ("tensorrt", ("8.9",), "fp8"),
            ("tensorrt-rtx", ("8.9", "8.0"), "int8"),
        ],
    )
    def test_a_mixture_is_wide_in_what_the_gpus_have(self, target, capabilities, wide):
        assert resolve(Wanted(target, "mixed", capabilities=capabilities), "llama").wide == wide

    def test_a_float_precision_is_computed_in(self):
        assert resolve(Wanted("tensorrt", "fp32", capabilities=("8.9",)), "llama").numerics.compute == "fp32"
        message = refused(lambda: resolve(Wanted("tensorrt", "fp32", compute="fp16", capabilities=("8.9",)), "llama"))
        assert message == "--compute fp16: with --precision fp32 it is fp32"


def test_every_type_has_its_generation():
    assert set(PRECISIONS) - {"mixed"} == set(SINCE)
