"""`build` from a checkpoint to an engine folder: what it keeps, what it leaves as it is, what it refuses."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from build_engines.build import BuildOptions, build
from build_engines.checkpoint import open_checkpoint
from build_engines.checkpoint.modelopt import ModeloptCheckpoint
from build_engines.cli import app
from build_engines.targets import Wanted
from llm_runtime.manifest import read_manifest
from tests.building import one_thread, refused  # noqa: F401 - one_thread acts by being here
from tests.engines import (
    PAGE_SIZE,
    RECIPES,
    TEXT,
    EngineShelf,
    dequantized_model,
    load_executor,
    reference_logprobs,
    run_in_chunks,
)
from tests.packers import Packed, pack_awq, pack_bitsandbytes, pack_gptq
from tests.tiny_models import make_tiny_model

PROMPT = list(range(3, 40))


def built(model: Path, output: Path, wanted: Wanted, **options) -> Path:
    build(BuildOptions(str(model), wanted, page_size=PAGE_SIZE, **options), output, lambda step, fraction: None)
    return output


def logits(folder: Path) -> np.ndarray:
    return run_in_chunks(load_executor(folder, attention="standard"), PROMPT, [len(PROMPT)], list(range(8)))


@pytest.mark.parametrize(
    ("recipe", "precision", "block_size", "activations"),
    [
        ("int4-64", "int4", 64, None),
        ("int4-128", "int4", 128, None),
        ("int8", "int8", None, None),
        ("int8-smoothquant", "int8", None, "int8"),
        ("fp8", "fp8", None, "fp8"),
        ("fp4", "fp4", None, None),
        ("fp4-activations", "fp4", None, None),
        ("mixed", "mixed", 64, None),
    ],
)
def test_a_quantized_checkpoint_stays_as_it_is(
    shelf: EngineShelf, tmp_path: Path, recipe: str, precision: str, block_size: int | None, activations: str | None
) -> None:
    checkpoint = shelf.quantized("llama", RECIPES[recipe])
    before = (checkpoint.folder / "model.safetensors").read_bytes()
    manifest = read_manifest(built(checkpoint.folder, tmp_path / "engine", Wanted()))
    assert manifest.precision.weights == precision
    assert manifest.precision.block_size == block_size
    assert manifest.precision.activations == activations
    assert manifest.source.quantization == checkpoint.source.quantization == manifest.precision.algorithm
    assert (checkpoint.folder / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize("group_size", [64, 128])
def test_gptq_goes_into_the_engine_as_it_is(shelf: EngineShelf, tmp_path: Path, group_size: int) -> None:
    packed = pack_gptq(shelf.checkpoint("llama"), tmp_path / "gptq", group_size)
    said: list[str] = []
    options = BuildOptions(str(packed.folder), Wanted(lm_head="fp32"), page_size=PAGE_SIZE)
    build(options, tmp_path / "engine", lambda step, fraction: None, said.append)
    precision = read_manifest(tmp_path / "engine").precision
    assert (precision.weights, precision.block_size, precision.algorithm) == ("int4", group_size, "gptq")
    assert said == []
    expected = reference_logprobs(dequantized_model(shelf.checkpoint("llama"), open_checkpoint(packed.folder)), PROMPT)
    np.testing.assert_allclose(logits(tmp_path / "engine"), expected, atol=1e-3)
    message = refused(lambda: built(packed.folder, tmp_path / "other", Wanted(precision="fp8")))
    assert message.endswith("a checkpoint quantized already (int4) stays as it is; use --precision int4")


@pytest.mark.parametrize("pack", [pack_awq, pack_bitsandbytes])
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_weights_of_no_engine_are_dequantized_and_the_user_is_told(
    shelf: EngineShelf, tmp_path: Path, pack: Callable[..., Packed], precision: str
) -> None:
    packed = pack(shelf.checkpoint("llama"), tmp_path / "packed")
    said: list[str] = []
    options = BuildOptions(str(packed.folder), Wanted(precision=precision), page_size=PAGE_SIZE)
    build(options, tmp_path / "engine", lambda step, fraction: None, said.append)
    (warning,) = said
    assert warning.startswith(f"warning: {open_checkpoint(packed.folder).format} weights")
    assert "dequantized" in warning
    manifest = read_manifest(tmp_path / "engine")
    assert manifest.precision.weights == precision
    assert manifest.source.model == str(packed.folder)
    expected = reference_logprobs(dequantized_model(shelf.checkpoint("llama"), open_checkpoint(packed.folder)), PROMPT)
    difference = np.abs(logits(tmp_path / "engine") - expected)
    assert difference.max() < 1e-3 if precision == "fp32" else 0 < difference.mean() < 0.1


def test_one_quantization_serves_every_target(shelf: EngineShelf, tmp_path: Path) -> None:
    """A saved checkpoint builds the very engine that was built when it was saved."""
    model, wanted = shelf.checkpoint("qwen3"), Wanted(precision="mixed")
    calibration = tmp_path / "text"
    calibration.write_text(TEXT)
    first = built(
        model, tmp_path / "first", wanted, effective_bits=6.0, save_checkpoint=tmp_path / "kept", calibration=calibration
    )
    second = built(tmp_path / "kept", tmp_path / "second", Wanted())
    np.testing.assert_array_equal(logits(first), logits(second))
    assert read_manifest(first).precision == read_manifest(second).precision
    assert 4.25 < read_manifest(first).precision.effective_bits <= 6.0  # type: ignore[operator]
    assert ModeloptCheckpoint(tmp_path / "kept").precision == "mixed"


@pytest.mark.parametrize("floats", ["fp16", "bf16"])
def test_weights_may_be_stored_in_half(shelf: EngineShelf, tmp_path: Path, floats: str) -> None:
    full, half = shelf.engine("llama"), built(shelf.checkpoint("llama"), tmp_path / "half", Wanted(precision=floats))
    assert read_manifest(half).precision.weights == floats
    assert read_manifest(half).precision.compute == "fp32"
    sizes = [(folder / "weights.bin").stat().st_size for folder in (full, half)]
    assert sizes[1] == pytest.approx(sizes[0] / 2, rel=0.05)
    difference = np.abs(logits(full) - logits(half))
    assert 0 < difference.mean() < (0.01 if floats == "fp16" else 0.1)


def test_a_plan_and_its_name(shelf: EngineShelf, tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx")
    wanted = Wanted("tensorrt-rtx", "int4", capabilities=("8.9",))
    manifest = read_manifest(built(shelf.checkpoint("llama"), tmp_path / "engine", wanted, algorithm="rtn", max_context=512))
    assert manifest.name == "llama-1024-int4-b128"
    assert manifest.limits.max_context == 512
    assert manifest.plan is not None


def test_a_long_context_is_cut_for_tensorrt(tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx")
    model = make_tiny_model("llama", tmp_path / "model", max_position_embeddings=32768)
    wanted = Wanted("tensorrt-rtx", "fp16", capabilities=("8.9",))
    assert read_manifest(built(model, tmp_path / "engine", wanted)).limits.max_context == 8192
    assert read_manifest(built(model, tmp_path / "long", wanted, max_context=16384)).limits.max_context == 16384


class TestRefusals:
    @pytest.mark.parametrize(
        ("recipe", "wanted", "options", "words"),
        [
            ("fp8", Wanted(precision="int4"), {}, "--precision int4: {} stays as it is; use --precision fp8"),
            ("int4-64", Wanted(precision="fp32"), {}, "--precision fp32: {} stays as it is; use --precision int4"),
            ("int4-64", Wanted(), {"block_size": 128}, "--block-size 128: {} has blocks of 64"),
            ("int8-smoothquant", Wanted(activations="none"), {}, "--activations none: {} has int8 activations"),
            ("int8", Wanted(precision="int8", activations="int8"), {}, "--activations int8: {} has none"),
            (
                "int8",
                Wanted("tensorrt-rtx", kv_cache="fp8", capabilities=("8.9",)),
                {},
                "--kv-cache fp8: {} has no scales for one; quantize the original",
            ),
            ("fp8", Wanted("tensorrt-rtx", capabilities=("8.0",)), {}, "--precision fp8: not with tensorrt-rtx on"),
        ],
    )
    def test_a_quantized_checkpoint_as_something_else(
        self, shelf: EngineShelf, tmp_path: Path, recipe: str, wanted: Wanted, options: dict, words: str
    ) -> None:
        checkpoint = shelf.quantized("llama", RECIPES[recipe])
        message = refused(lambda: built(checkpoint.folder, tmp_path / "engine", wanted, **options))
        where = f"{checkpoint.folder}: a checkpoint quantized already ({checkpoint.precision})"
        assert message.startswith(words.format(where))
        assert list(tmp_path.iterdir()) == []

    def test_a_checkpoint_to_save_where_something_is(self, shelf: EngineShelf, tmp_path: Path) -> None:
        message = refused(lambda: built(shelf.checkpoint("llama"), tmp_path / "engine", Wanted(), save_checkpoint=tmp_path))
        assert message == f"--save-checkpoint {tmp_path}: exists already"

    def test_bits_of_what_is_no_mixture(self, shelf: EngineShelf, tmp_path: Path) -> None:
        message = refused(
            lambda: built(shelf.checkpoint("llama"), tmp_path / "engine", Wanted(precision="int8"), effective_bits=5.0)
        )
        assert message == "--effective-bits 5.0: only with --precision mixed"

    def test_bits_that_no_mixture_can_have(self, shelf: EngineShelf, tmp_path: Path) -> None:
        message = refused(
            lambda: built(shelf.checkpoint("llama"), tmp_path / "engine", Wanted(precision="mixed"), effective_bits=3.0)
        )
        assert message.startswith("--effective-bits 3.0: INT4 in blocks of 64 takes 4.25 bits")


class TestCommands:
    def run(self, *arguments: object):
        return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "200"})

    def test_the_help_names_every_precision_and_target(self) -> None:
        text = re.sub(r"\x1b\[[0-9;]*m", "", self.run("build", "--help").output)
        for word in ("fp32|fp16|bf16|fp8|int8|int4|fp4|mixed", "onnxruntime|tensorrt|tensorrt-rtx", "--effective-bits"):
            assert word in text

    def test_check_passes_a_whole_engine_and_names_what_is_wrong_with_another(self, shelf: EngineShelf, tmp_path: Path) -> None:
        folder = shutil.copytree(shelf.engine("llama"), tmp_path / "engine")
        result = self.run("check", folder)
        assert result.exit_code == 0, result.output
        (folder / "weights.bin").write_bytes(b"damaged")
        result = self.run("check", folder)
        assert result.exit_code == 1
        assert "weights.bin is damaged" in result.output
        assert self.run("check", tmp_path / "none").exit_code == 1

    def test_check_of_a_plan_looks_at_version_and_gpu(
        self, shelf: EngineShelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pytest.importorskip("tensorrt_rtx")
        from build_engines import check

        wanted = Wanted("tensorrt-rtx", "int8", capabilities=("8.9",))
        folder = built(shelf.checkpoint("llama"), tmp_path / "engine", wanted)
        monkeypatch.setattr(check, "gpu_at_hand", lambda: None)
        assert "made for a GPU of compute capability 8.9; this machine shows none" in self.run("check", folder).output
        monkeypatch.setattr(check, "gpu_at_hand", lambda: ("8.0", "NVIDIA A100"))
        assert "made for compute capability 8.9; the GPU here, a NVIDIA A100, has 8.0" in self.run("check", folder).output
        monkeypatch.setattr(check, "gpu_at_hand", lambda: ("8.9", "NVIDIA L4"))
        assert self.run("check", folder).exit_code == 0
        manifest = json.loads((folder / "engine.json").read_text())
        manifest["plan"]["tensorrt_version"] = "1.0.0"
        (folder / "engine.json").write_text(json.dumps(manifest))
        assert "made by tensorrt-rtx 1.0.0; installed is" in self.run("check", folder).output

    def test_build_if_needed_keeps_an_engine_that_matches(self, shelf: EngineShelf, tmp_path: Path) -> None:
        model = shelf.checkpoint("llama")

        def build_again(*options: object) -> str:
            result = self.run("build", "--if-needed", "--model", model, "--output", tmp_path / "e", *options)
            assert result.exit_code == 0, result.output
            return result.output

        assert "Built" in build_again("--precision", "fp32")
        before = (tmp_path / "e" / "engine.json").stat().st_ino
        assert "is there already" in build_again("--precision", "fp32", "--block-size", "64")
        assert "is there already" in build_again()
        assert (tmp_path / "e" / "engine.json").stat().st_ino == before
        output = build_again("--precision", "fp32", "--lm-head", "int8")
        assert "--lm-head int8 is asked for, and the engine there has fp32" in output
        output = build_again("--precision", "int8")
        assert "Building anew" in output
        assert "--precision int8 is asked for, and the engine there has fp32" in output
        assert read_manifest(tmp_path / "e").precision.weights == "int8"
        (tmp_path / "e" / "weights.bin").write_bytes(b"damaged")
        assert "weights.bin is damaged" in build_again("--precision", "int8")
        assert "is there already" in build_again("--precision", "int8")

    def test_an_error_is_one_line_and_exit_status_1(self, shelf: EngineShelf, tmp_path: Path) -> None:
        result = self.run(
            "build",
            "--model",
            shelf.checkpoint("llama"),
            "--output",
            tmp_path / "e",
            "--precision",
            "int4",
            "--block-size",
            "32",
        )
        assert result.exit_code == 1
        assert "error: block size 32 is not supported; allowed are 64, 128" in result.output
        assert "Traceback" not in result.output

    def test_the_card_says_what_the_engine_is(self, shelf: EngineShelf) -> None:
        folder = shelf.engine("llama", precision="int8", activations="int8")
        output = self.run("inspect", folder).output
        for words in ("int8 (int8_sq)", "int8, computed in fp32", "onnxruntime"):
            assert words in output
