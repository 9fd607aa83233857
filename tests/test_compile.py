"""Plans that tensorrt-rtx really compiles, ahead of time, for GPUs that are not here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from build_engines import compile as compiler
from build_engines.compile import PLAN_NAME, CompileOptions, plan_profiles, resolve_capabilities
from build_engines.engine import EngineOptions, write_engine
from build_engines.graph.decoder import EMBEDDING, Decoder
from build_engines.graph.linear import FloatLinear
from build_engines.graph.numerics import Numerics
from llm_runtime.manifest import Limits, read_manifest
from tests.building import one_thread, refused  # noqa: F401 - one_thread acts by being here
from tests.engines import PAGE_SIZE, RECIPES, EngineShelf
from tests.tiny_models import TINY_FAMILIES, VOCAB_SIZE

pytest.importorskip("tensorrt_rtx")

# Precision, and the lowest compute capability that runs it.
QUANTIZED = {
    "int4-64": "8.0",
    "int4-128": "8.0",
    "int8": "7.5",
    "int8-smoothquant": "7.5",
    "fp8": "8.9",
    "fp4": "12.0",
    "fp4-activations": "12.0",
    "mixed": "8.0",
    "mixed-fp8": "8.9",
}
FLOAT = {"fp16": "7.5", "bf16": "8.0", "fp32": "8.0"}


def options(
    tmp_path: Path, compute: str, capability: str, *, cache: str | None = None, lm_head: str | None = None
) -> EngineOptions:
    return EngineOptions(
        "tiny",
        lm_head=lm_head or compute,
        page_size=PAGE_SIZE,
        numerics=Numerics("tensorrt-rtx", compute, compute, cache or compute),  # type: ignore[arg-type]
        compiler=CompileOptions((capability,), max_batch=8, max_step_tokens=64, max_prefill_rows=2, log=tmp_path / "log"),
    )


def logged(path: Path, name: str) -> int:
    """The last figure of this name in the compiler's own log."""
    return int(re.findall(rf"{name}: (\d+) bytes", path.read_text())[-1])


def packed_bytes(checkpoint, chosen: EngineOptions) -> int:
    """All weights as the graph has them: 4-bit ones two to a byte, a table that is the head too once."""
    table = checkpoint.tensor("model.embed_tokens.weight")
    name = EMBEDDING if checkpoint.config.tie_embeddings else "lm_head"
    head = FloatLinear(name, checkpoint.linear("lm_head"), chosen.numerics)
    tensors = Decoder(checkpoint, head, table, chosen.numerics).tensors().values()
    return sum(tensor.nbytes for tensor in tensors)


@pytest.mark.parametrize("recipe", QUANTIZED)
@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_quantized_weights_stay_packed_in_the_plan(shelf: EngineShelf, tmp_path: Path, family: str, recipe: str) -> None:
    checkpoint = shelf.quantized(family, RECIPES[recipe])
    compute = "bf16" if family == "gemma3" and QUANTIZED[recipe] != "7.5" else "fp16"
    chosen = options(tmp_path, compute, QUANTIZED[recipe])
    manifest = write_engine(checkpoint, tmp_path / "engine", chosen, lambda fraction: None)
    check_plan(tmp_path, manifest, QUANTIZED[recipe])
    assert manifest.precision.weights == RECIPES[recipe].precision
    assert manifest.precision.compute == manifest.precision.kv_cache == compute
    assert logged(tmp_path / "log", "Total Weights Memory") == pytest.approx(packed_bytes(checkpoint, chosen), rel=0.03)


@pytest.mark.parametrize("compute", FLOAT)
@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_float_plans(shelf: EngineShelf, tmp_path: Path, family: str, compute: str) -> None:
    from build_engines.checkpoint.hf import HfCheckpoint

    checkpoint, chosen = HfCheckpoint(shelf.checkpoint(family)), options(tmp_path, compute, FLOAT[compute])
    manifest = write_engine(checkpoint, tmp_path / "engine", chosen, lambda fraction: None)
    check_plan(tmp_path, manifest, FLOAT[compute])
    assert manifest.precision.weights == manifest.precision.lm_head == manifest.precision.embedding == compute


def check_plan(tmp_path: Path, manifest, capability: str) -> None:
    """What every plan has: profiles as asked for, inputs and outputs of the graph, a manifest that names it."""
    assert manifest == read_manifest(tmp_path / "engine")
    assert manifest.runtime == "tensorrt-rtx"
    assert manifest.graphs == {}
    plan = manifest.plan
    assert plan.compute_capabilities == (capability,)
    assert plan.device is None
    pages = 1024 // PAGE_SIZE
    assert plan.prefill.model_dump() == {
        "max_rows": 2, "max_tokens": 64, "max_row_tokens": 64, "max_row_pages": pages, "max_logits": 2,
    }  # fmt: skip
    assert plan.decode.model_dump() == {
        "max_rows": 8, "max_tokens": 8, "max_row_tokens": 1, "max_row_pages": pages, "max_logits": 8,
    }  # fmt: skip
    names = {path.name for path in (tmp_path / "engine").iterdir()}
    assert {PLAN_NAME, "tokenizer.json", "engine.json"} <= names
    assert not names & {"graph.onnx", "weights.bin"}
    inputs = 7 + manifest.window_table + 2 * manifest.model.num_layers
    log = (tmp_path / "log").read_text()
    # Once for each profile.
    assert log.count(f"Detected {inputs} inputs and 2 output network tensors.") == 2
    content = (tmp_path / "engine" / PLAN_NAME).read_bytes()
    names = [
        "input_ids",
        "page_table",
        "row_tokens",
        "token_slots",
        "key_pages.0",
        "value_pages.1",
        "logits",
        "new_keys_values",
    ]
    assert [name for name in names if name.encode() not in content] == []


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("recipe", ["fp8-cache", "fp8-fp8-cache"])
def test_an_fp8_cache_is_never_widened_as_a_whole(shelf: EngineShelf, tmp_path: Path, family: str, recipe: str) -> None:
    checkpoint = shelf.quantized(family, RECIPES[recipe])
    compute = "bf16" if family == "gemma3" else "fp16"
    chosen = options(tmp_path, compute, "8.9", cache="fp8")
    manifest = write_engine(checkpoint, tmp_path / "engine", chosen, lambda fraction: None)
    assert manifest.precision.kv_cache == "fp8"
    model = manifest.model
    assert manifest.page_bytes == 2 * model.num_layers * model.num_kv_heads * model.head_dim * PAGE_SIZE
    # One layer's pool alone, at the most pages that the plan takes, has 2 GiB.
    assert logged(tmp_path / "log", "Total Activation Memory") < 100 << 20


def test_the_largest_pool_is_what_32_bits_address(shelf: EngineShelf, tmp_path: Path) -> None:
    manifest = write_engine(
        shelf.quantized("llama", RECIPES["int8"]), tmp_path / "engine", options(tmp_path, "fp16", "8.9"), lambda fraction: None
    )
    model, plan = manifest.model, manifest.plan
    assert plan is not None
    elements = plan.max_pages * PAGE_SIZE * model.num_kv_heads * model.head_dim
    assert elements < 2**31 <= elements + PAGE_SIZE * model.num_kv_heads * model.head_dim


@pytest.mark.parametrize(("lm_head", "part"), [("int8", 1 / 2), ("int4", 1 / 4)])
def test_a_head_of_fewer_bits_saves_them(shelf: EngineShelf, tmp_path: Path, lm_head: str, part: float) -> None:
    checkpoint = shelf.quantized("llama", RECIPES["int4-128"])
    sizes = {}
    for head in ("fp16", lm_head):
        manifest = write_engine(
            checkpoint, tmp_path / head, options(tmp_path, "fp16", "8.9", lm_head=head), lambda fraction: None
        )
        assert manifest.precision.lm_head == head
        assert manifest.precision.embedding == "fp16"
        sizes[head] = logged(tmp_path / "log", "Total Weights Memory")
    full = VOCAB_SIZE * checkpoint.config.hidden_size * 2
    assert sizes["fp16"] - sizes[lm_head] == pytest.approx(full * (1 - part), rel=0.1)


def test_one_plan_for_several_gpus_with_every_option(shelf: EngineShelf, tmp_path: Path) -> None:
    fractions: list[float] = []
    chosen = EngineOptions(
        "tiny",
        lm_head="fp16",
        numerics=Numerics("tensorrt-rtx", "fp16", "fp16", "fp16"),
        compiler=CompileOptions(("8.0", "8.9", "12.0"), optimization_level=1, workspace_mb=64, log=tmp_path / "log"),
    )
    manifest = write_engine(shelf.quantized("qwen3", RECIPES["int4-64"]), tmp_path / "engine", chosen, fractions.append)
    assert manifest.plan is not None
    assert manifest.plan.compute_capabilities == ("8.0", "8.9", "12.0")
    assert manifest.builder["tensorrt-rtx"] == manifest.plan.tensorrt_version
    assert fractions[0] == 0.0
    assert fractions[-1] == 1.0
    assert len({f for f in fractions if 0.3 <= f <= 0.9}) > 10
    assert "[VERBOSE]" in (tmp_path / "log").read_text()


class TestRefusals:
    def test_what_the_compiler_refuses_is_one_line_of_its_own(self, shelf: EngineShelf, tmp_path: Path) -> None:
        checkpoint = shelf.quantized("llama", RECIPES["fp8"])
        message = refused(
            lambda: write_engine(checkpoint, tmp_path / "engine", options(tmp_path, "fp16", "8.0"), lambda fraction: None)
        )
        assert message.startswith("tensorrt-rtx cannot compile the graph: ")
        assert message.endswith(f"the whole log is in {tmp_path / 'log'}")

    def test_a_log_that_cannot_be_written(self, shelf: EngineShelf, tmp_path: Path) -> None:
        chosen = options(tmp_path / "none", "fp16", "8.9")
        checkpoint = shelf.quantized("llama", RECIPES["int8"])
        message = refused(lambda: write_engine(checkpoint, tmp_path / "engine", chosen, lambda fraction: None))
        assert message == f"--builder-log {tmp_path / 'none' / 'log'}: No such file or directory"

    def test_no_gpu_to_build_on(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        assert "no NVIDIA GPU to build on; build where the engine will run" in refused(
            lambda: resolve_capabilities("tensorrt", ())
        )
        assert "name what to build for with --compute-capability" in refused(lambda: resolve_capabilities("tensorrt-rtx", ()))

    def test_another_gpu_than_the_one_at_hand(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(compiler, "gpu_at_hand", lambda: ("9.0", "NVIDIA H100"))
        assert resolve_capabilities("tensorrt", ()) == (("9.0",), "NVIDIA H100")
        message = refused(lambda: resolve_capabilities("tensorrt", ("8.9",)))
        assert message == "--compute-capability 8.9: tensorrt builds for the GPU at hand only, a NVIDIA H100 with 9.0"

    def test_a_gpu_that_is_not_built_for_ahead_of_time(self) -> None:
        message = refused(lambda: resolve_capabilities("tensorrt-rtx", ("9.0",)))
        assert message.startswith(
            "--compute-capability 9.0: tensorrt-rtx builds ahead of time for 7.5, 8.0, 8.6, 8.9, 12.0, 12.1"
        )

    def test_a_module_that_is_not_installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(compiler.MODULES, "tensorrt", "no_such_module")
        message = refused(lambda: compiler.load_compiler("tensorrt"))
        assert message.startswith("--target tensorrt: No module named 'no_such_module'; pip install tensorrt")

    def test_a_timing_cache_where_nothing_is_timed(self, shelf: EngineShelf, tmp_path: Path) -> None:
        chosen = EngineOptions(
            "tiny",
            lm_head="fp16",
            numerics=Numerics("tensorrt-rtx", "fp16", "fp16", "fp16"),
            compiler=CompileOptions(("8.9",), timing_cache=tmp_path / "cache"),
        )
        checkpoint = shelf.quantized("llama", RECIPES["int8"])
        message = refused(lambda: write_engine(checkpoint, tmp_path / "engine", chosen, lambda fraction: None))
        assert message == "--timing-cache: tensorrt-rtx times no kernels; leave it out"


def test_profiles_cover_a_context_that_does_not_fill_its_last_page() -> None:
    prefill, decode = plan_profiles(Limits(max_context=100, page_size=16), CompileOptions(max_batch=3))
    assert prefill.max_row_pages == decode.max_row_pages == 7
    assert (decode.max_rows, decode.max_tokens, decode.max_logits) == (3, 3, 3)
