"""Checkpoints that others quantized: read as their public formats say, bit for bit, or refused in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch

from build_engines import quantize
from build_engines.checkpoint import FloatWeights, Int4Weights, dequantize_to, linear_names, open_checkpoint, tensor_shapes
from build_engines.checkpoint.bitsandbytes import BitsandbytesCheckpoint
from build_engines.checkpoint.gptq import GptqCheckpoint
from build_engines.checkpoint.hf import HfCheckpoint
from build_engines.checkpoint.modelopt import ModeloptCheckpoint
from build_engines.checkpoint.packing import unpack_nibbles, unpack_words
from build_engines.checkpoint.types import LinearWeights
from tests.building import one_thread, refused  # noqa: F401 - one_thread acts by being here
from tests.packers import FP4, NF4, Packed, pack_awq, pack_bitsandbytes, pack_gptq
from tests.tiny_models import make_tiny_model

FAMILIES = ("llama", "qwen2", "gemma3")
LAYER = "model.layers.1.mlp.down_proj"
PACKERS: dict[str, Callable[[Path, Path], Packed]] = {
    "gptq": lambda source, folder: pack_gptq(source, folder, symmetric=False),
    "awq": pack_awq,
    "bitsandbytes": pack_bitsandbytes,
}


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("originals")
    return {family: make_tiny_model(family, root / family) for family in FAMILIES}


@pytest.fixture
def llama(originals: dict[str, Path]) -> Path:
    return originals["llama"]


@pytest.fixture
def gptq(llama: Path, tmp_path: Path) -> Packed:
    return pack_gptq(llama, tmp_path / "gptq")


@pytest.fixture
def awq(llama: Path, tmp_path: Path) -> Packed:
    return pack_awq(llama, tmp_path / "awq")


@pytest.fixture
def nf4(llama: Path, tmp_path: Path) -> Packed:
    return pack_bitsandbytes(llama, tmp_path / "nf4")


def assert_same_bits(ours: np.ndarray | None, expected: np.ndarray) -> None:
    assert ours is not None
    assert ours.dtype == np.float32
    np.testing.assert_array_equal(ours, expected)


def check_whole(packed: Packed, original: Path) -> list[LinearWeights]:
    """Every packed layer stands for what the packer says, and everything else is the original's; returns the packed layers."""
    ours, source = open_checkpoint(packed.folder), HfCheckpoint(original)
    layers = []
    for name in linear_names(ours.config):
        weights, expected = ours.linear(name), source.linear(name)
        if name in packed.weights:
            assert_same_bits(weights.dequantize(), packed.weights[name])
            layers.append(weights)
        else:
            assert_same_bits(weights.dequantize(), expected.dequantize())
        if expected.bias is None:
            assert weights.bias is None
        else:
            assert_same_bits(weights.bias, expected.bias)
    assert_same_bits(ours.linear("lm_head").dequantize(), source.linear("lm_head").dequantize())
    for name in tensor_shapes(ours.config):
        assert_same_bits(ours.tensor(name), source.tensor(name))
    assert layers
    return layers


def check_warning(packed: Packed, *words: str) -> None:
    checkpoint = open_checkpoint(packed.folder)
    assert checkpoint.is_dequantized
    assert checkpoint.precision is None
    (warning,) = checkpoint.warnings
    assert "\n" not in warning
    for word in (*words, checkpoint.format, "dequantized", "second time"):
        assert word in warning


class TestPacking:
    def test_nibbles_and_words_are_read_from_the_lowest(self) -> None:
        assert unpack_nibbles(np.array([[0x10, 0x32]], np.uint8)).tolist() == [[0, 1, 2, 3]]
        assert unpack_words(np.array([[0x76543210, -1]], np.int32)).tolist() == [[*range(8), *[15] * 8]]


class TestGptq:
    @pytest.mark.parametrize("family", FAMILIES)
    @pytest.mark.parametrize("layout", ["gptq", "gptq_v2"])
    @pytest.mark.parametrize("group_size", [64, 128])
    def test_symmetric_weights_are_read_exactly(
        self, originals: dict[str, Path], tmp_path: Path, family: str, layout: str, group_size: int
    ) -> None:
        packed = pack_gptq(originals[family], tmp_path / "packed", group_size, layout=layout)
        layers = check_whole(packed, originals[family])
        for name, weights in zip(linear_names(open_checkpoint(packed.folder).config), layers, strict=True):
            assert isinstance(weights, Int4Weights)
            assert weights.values.dtype == np.int8
            np.testing.assert_array_equal(weights.values, packed.codes[name] - 8)
            assert_same_bits(weights.scales, packed.scales[name].astype(np.float32).T)
            assert (weights.block_size, weights.pre_quant_scale) == (group_size, None)
        values = np.concatenate([codes.reshape(-1) for codes in packed.codes.values()])
        assert set(values) == set(range(16))

    def test_what_it_says_of_itself(self, gptq: Packed) -> None:
        checkpoint = open_checkpoint(gptq.folder, model="someone/model-gptq", revision="abc")
        assert isinstance(checkpoint, GptqCheckpoint)
        source = checkpoint.source
        assert (source.model, source.revision, source.format, source.quantization) == (
            "someone/model-gptq",
            "abc",
            "gptq",
            "gptq",
        )
        assert (checkpoint.warnings, checkpoint.is_dequantized, checkpoint.precision) == ((), False, "int4")
        assert checkpoint.cache_scales(0) is None
        with pytest.raises(KeyError, match="nothing"):
            checkpoint.linear("nothing")

    @pytest.mark.parametrize("layout", ["gptq", "gptq_v2"])
    def test_zero_points(self, originals: dict[str, Path], tmp_path: Path, layout: str) -> None:
        packed = pack_gptq(originals["qwen2"], tmp_path / "packed", symmetric=False, layout=layout)
        assert all(isinstance(weights, FloatWeights) for weights in check_whole(packed, originals["qwen2"]))
        check_warning(packed, "zero points")

    def test_inputs_out_of_order(self, llama: Path, tmp_path: Path) -> None:
        packed = pack_gptq(llama, tmp_path / "packed", shuffled=True)
        assert all(isinstance(weights, FloatWeights) for weights in check_whole(packed, llama))
        check_warning(packed, "desc_act")

    def test_desc_act_that_moved_nothing_is_exact(self, llama: Path, tmp_path: Path) -> None:
        packed = pack_gptq(llama, tmp_path / "packed", desc_act=True)
        assert all(isinstance(weights, Int4Weights) for weights in check_whole(packed, llama))

    @pytest.mark.parametrize(("group_size", "words"), [(32, "groups of 32"), (-1, "one scale a row")])
    def test_other_groups(self, llama: Path, tmp_path: Path, group_size: int, words: str) -> None:
        packed = pack_gptq(llama, tmp_path / "packed", group_size)
        assert all(isinstance(weights, FloatWeights) for weights in check_whole(packed, llama))
        check_warning(packed, words)

    def test_groups_that_do_not_divide_a_row(self, tmp_path: Path) -> None:
        original = make_tiny_model("llama", tmp_path / "original", intermediate_size=200)
        packed = pack_gptq(original, tmp_path / "packed", 64)
        assert all(isinstance(weights, FloatWeights) for weights in check_whole(packed, original))
        check_warning(packed, "do not divide a row")

    def test_layers_left_alone_stay_as_they_are(self, llama: Path, gptq: Packed) -> None:
        gptq.settings(dynamic={"-:.*down_proj": {}})
        tensors = {name: tensor for name, tensor in gptq.tensors().items() if "down_proj" not in name}
        source = HfCheckpoint(llama)
        for name in list(gptq.weights):
            if name.endswith("down_proj"):
                tensors[f"{name}.weight"] = source.linear(name).dequantize()
                del gptq.weights[name]
        gptq.save(tensors)
        check_whole(gptq, llama)

    def test_a_packed_head(self, gptq: Packed) -> None:
        # Its input is as wide as that of q_proj, and the tiny vocabulary four times as wide as its output.
        tensors = gptq.tensors()
        del tensors["lm_head.weight"]
        one = "model.layers.0.self_attn.q_proj"
        for end, axis in (("qweight", 1), ("qzeros", 1), ("scales", 1)):
            tensors[f"lm_head.{end}"] = np.concatenate([tensors[f"{one}.{end}"]] * 4, axis)
        tensors["lm_head.g_idx"] = tensors[f"{one}.g_idx"]
        gptq.save(tensors)
        head = open_checkpoint(gptq.folder).linear("lm_head")
        assert isinstance(head, Int4Weights)
        assert_same_bits(head.dequantize(), np.concatenate([gptq.weights[one]] * 4))

    def test_settings_may_be_left_out(self, llama: Path, gptq: Packed) -> None:
        gptq.settings(sym=None, checkpoint_format=None, desc_act=None)
        check_whole(gptq, llama)

    def test_a_file_named_by_autogptq(self, llama: Path, gptq: Packed) -> None:
        (gptq.folder / "model.safetensors").rename(gptq.folder / "gptq_model-4bit-64g.safetensors")
        weights = open_checkpoint(gptq.folder).linear(LAYER)
        assert_same_bits(weights.dequantize(), gptq.weights[LAYER])

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"bits": 8}, "quantization_config.bits 8 is not supported for gptq; supported: 4"),
            ({"bits": 3}, "bits 3"),
            ({"bits": None}, "bits None"),
            (
                {"checkpoint_format": "marlin"},
                "checkpoint_format 'marlin' is not supported for gptq; supported: 'gptq', 'gptq_v2'",
            ),
            ({"is_marlin_format": True}, "is_marlin_format True"),
            ({"pack_dtype": "int8"}, "pack_dtype 'int8'"),
            ({"sym": "yes"}, "sym 'yes'"),
            ({"group_size": 0}, "group_size 0"),
            ({"group_size": "64"}, "group_size '64'"),
            ({"group_size": True}, "group_size True"),
            ({"dynamic": {"+:.*up_proj": {"bits": 8}}}, "dynamic '+:.*up_proj'"),
        ],
    )
    def test_refused_settings(self, gptq: Packed, changes: dict[str, Any], words: str) -> None:
        gptq.settings(**changes)
        message = refused(lambda: open_checkpoint(gptq.folder))
        assert words in message
        assert "config.json" in message

    @pytest.mark.parametrize("end", ["qweight", "qzeros", "scales", "g_idx"])
    def test_a_missing_tensor(self, gptq: Packed, end: str) -> None:
        gptq.edit(f"{LAYER}.{end}", None)
        assert f"tensor {LAYER}.{end} is missing" in refused(lambda: open_checkpoint(gptq.folder))

    @pytest.mark.parametrize("end", ["qweight", "qzeros", "scales", "g_idx"])
    def test_a_tensor_of_another_shape(self, gptq: Packed, end: str) -> None:
        gptq.edit(f"{LAYER}.{end}", gptq.tensors()[f"{LAYER}.{end}"][:-1])
        assert f"tensor {LAYER}.{end} has shape" in refused(lambda: open_checkpoint(gptq.folder))

    @pytest.mark.parametrize("end", ["qweight", "qzeros", "g_idx"])
    def test_a_tensor_of_another_type(self, gptq: Packed, end: str) -> None:
        gptq.edit(f"{LAYER}.{end}", gptq.tensors()[f"{LAYER}.{end}"].astype(np.int64))
        assert f"tensor {LAYER}.{end} has type I64; gptq has I32" in refused(lambda: open_checkpoint(gptq.folder))

    def test_a_tensor_too_many(self, gptq: Packed) -> None:
        gptq.save(gptq.tensors() | {f"{LAYER}.weight": np.zeros((128, 256), np.float32)})
        assert f"tensor {LAYER}.weight does not belong" in refused(lambda: open_checkpoint(gptq.folder))

    @pytest.mark.parametrize("group", [-1, 4, 2**31 - 1])
    def test_a_group_that_is_not_there(self, gptq: Packed, group: int) -> None:
        groups = gptq.tensors()[f"{LAYER}.g_idx"]
        groups[-1] = group
        gptq.edit(f"{LAYER}.g_idx", groups)
        message = refused(lambda: open_checkpoint(gptq.folder))
        assert f"tensor {LAYER}.g_idx names group {group}; the layer has groups 0..3" in message

    @pytest.mark.parametrize("value", [np.nan, np.inf, 0, -0.01])
    def test_a_scale_that_is_none_is_found_when_its_layer_is_read(self, gptq: Packed, value: float) -> None:
        scales = gptq.tensors()[f"{LAYER}.scales"]
        scales[0, 0] = value
        gptq.edit(f"{LAYER}.scales", scales)
        checkpoint = open_checkpoint(gptq.folder)
        other = "model.layers.0.mlp.down_proj"
        assert_same_bits(checkpoint.linear(other).dequantize(), gptq.weights[other])
        assert f"tensor {LAYER}.scales holds values that are not finite" in refused(lambda: checkpoint.linear(LAYER))

    @pytest.mark.parametrize("group_size", [64, 32])
    def test_zero_points_under_sym(self, llama: Path, tmp_path: Path, group_size: int) -> None:
        packed = pack_gptq(llama, tmp_path / "packed", group_size, symmetric=False, sym=True)
        checkpoint = open_checkpoint(packed.folder)
        assert f"tensor {LAYER}.qzeros holds zero points other than 8" in refused(lambda: checkpoint.linear(LAYER))

    def test_a_zero_point_that_the_older_layout_cannot_hold(self, llama: Path, tmp_path: Path) -> None:
        packed = pack_gptq(llama, tmp_path / "packed", symmetric=False)
        zeros = packed.tensors()[f"{LAYER}.qzeros"]
        zeros[0, 0] = -1
        packed.edit(f"{LAYER}.qzeros", zeros)
        checkpoint = open_checkpoint(packed.folder)
        assert f"tensor {LAYER}.qzeros holds a zero point of 0" in refused(lambda: checkpoint.linear(LAYER))
        packed.settings(checkpoint_format="gptq_v2")
        assert isinstance(open_checkpoint(packed.folder).linear(LAYER), FloatWeights)

    def test_layers_that_cannot_be_packed(self, tmp_path: Path) -> None:
        original = make_tiny_model("llama", tmp_path / "original", intermediate_size=260)
        config = json.loads((original / "config.json").read_text())
        settings = {"quant_method": "gptq", "bits": 4, "group_size": 64}
        (original / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
        packed = Packed(original)
        packed.save(packed.tensors() | {f"{LAYER}.qweight": np.zeros((32, 128), np.int32)})
        message = refused(lambda: open_checkpoint(original))
        assert message.endswith(f"{LAYER} is [128, 260]; gptq packs inputs and outputs in eights")


class TestAwq:
    @pytest.mark.parametrize("family", FAMILIES)
    @pytest.mark.parametrize("group_size", [64, 128, 32, -1])
    def test_weights_are_dequantized_by_the_formula(
        self, originals: dict[str, Path], tmp_path: Path, family: str, group_size: int
    ) -> None:
        packed = pack_awq(originals[family], tmp_path / "packed", group_size)
        assert all(isinstance(weights, FloatWeights) for weights in check_whole(packed, originals[family]))
        check_warning(packed, "zero points")
        source = open_checkpoint(packed.folder).source
        assert (source.format, source.quantization) == ("awq", "awq")

    def test_symmetric_weights_are_read_exactly(self, originals: dict[str, Path], tmp_path: Path) -> None:
        packed = pack_awq(originals["qwen2"], tmp_path / "packed", symmetric=True)
        checkpoint = open_checkpoint(packed.folder)
        assert all(isinstance(weights, Int4Weights) for weights in check_whole(packed, originals["qwen2"]))
        layer = checkpoint.linear(LAYER)
        assert isinstance(layer, Int4Weights)
        np.testing.assert_array_equal(layer.values, packed.codes[LAYER] - 8)
        assert_same_bits(layer.scales, packed.scales[LAYER].astype(np.float32).T)
        assert (checkpoint.warnings, checkpoint.precision) == ((), "int4")

    @pytest.mark.parametrize(
        "changes", [{"version": "GEMM"}, {"version": None}, {"version": None, "checkpoint_format": "gemm"}]
    )
    def test_names_of_the_version(self, awq: Packed, changes: dict[str, Any]) -> None:
        awq.settings(**changes)
        assert_same_bits(open_checkpoint(awq.folder).linear(LAYER).dequantize(), awq.weights[LAYER])

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"version": "gemv"}, "quantization_config.version 'gemv' is not supported for awq; supported: 'gemm'"),
            ({"version": "gemv_fast"}, "'gemv_fast'"),
            ({"version": "exllama"}, "'exllama'"),
            ({"version": None, "checkpoint_format": "llm-awq"}, "checkpoint_format 'llm-awq'"),
            ({"bits": 8}, "bits 8"),
            ({"zero_point": "no"}, "zero_point 'no'"),
            ({"group_size": None}, "group_size None"),
            ({"group_size": 100}, "in whole groups of 100"),
        ],
    )
    def test_refused_settings(self, awq: Packed, changes: dict[str, Any], words: str) -> None:
        awq.settings(**changes)
        assert words in refused(lambda: open_checkpoint(awq.folder))

    @pytest.mark.parametrize("end", ["qweight", "qzeros", "scales"])
    def test_damaged_tensors(self, awq: Packed, end: str) -> None:
        good = awq.tensors()[f"{LAYER}.{end}"]
        awq.edit(f"{LAYER}.{end}", good[:-1])
        assert f"tensor {LAYER}.{end} has shape" in refused(lambda: open_checkpoint(awq.folder))
        awq.edit(f"{LAYER}.{end}", None)
        assert f"tensor {LAYER}.{end} is missing" in refused(lambda: open_checkpoint(awq.folder))

    @pytest.mark.parametrize("value", [np.nan, np.inf, 0])
    def test_a_scale_that_is_none(self, awq: Packed, value: float) -> None:
        scales = awq.tensors()[f"{LAYER}.scales"]
        scales[-1, -1] = value
        awq.edit(f"{LAYER}.scales", scales)
        checkpoint = open_checkpoint(awq.folder)
        assert f"tensor {LAYER}.scales" in refused(lambda: checkpoint.linear(LAYER))

    def test_zero_points_where_config_says_there_are_none(self, llama: Path, tmp_path: Path) -> None:
        packed = pack_awq(llama, tmp_path / "packed", zero_point=False)
        checkpoint = open_checkpoint(packed.folder)
        assert f"tensor {LAYER}.qzeros" in refused(lambda: checkpoint.linear(LAYER))


class TestBitsandbytes:
    def test_the_code_book_of_nf4_is_made_of_quantiles(self) -> None:
        """As QLoRA derives it: equally probable parts of a normal distribution, 8 values above 0 and 7 below, scaled to 1."""
        offset = (1 - 1 / 32 + 1 - 1 / 30) / 2
        above, below = np.linspace(offset, 0.5, 9)[:-1], np.linspace(offset, 0.5, 8)[:-1]
        quantile = NormalDist().inv_cdf
        book = np.sort([*map(quantile, above), 0.0, *(-quantile(p) for p in below)])
        np.testing.assert_allclose(NF4, book / book.max(), atol=1e-6)

    @pytest.mark.parametrize("family", FAMILIES)
    @pytest.mark.parametrize("kind", ["nf4", "fp4"])
    @pytest.mark.parametrize(("nested", "block"), [(True, 64), (False, 64), (True, 256), (False, 4096)])
    def test_weights_are_dequantized_by_the_formula(
        self, originals: dict[str, Path], tmp_path: Path, family: str, kind: str, nested: bool, block: int
    ) -> None:
        packed = pack_bitsandbytes(originals[family], tmp_path / "packed", kind, nested, block)
        assert all(isinstance(weights, FloatWeights) for weights in check_whole(packed, originals[family]))
        check_warning(packed, kind)
        source = open_checkpoint(packed.folder).source
        assert (source.format, source.quantization) == ("bitsandbytes", f"bitsandbytes_{kind}")

    def test_configs_before_methods_had_names(self, llama: Path, nf4: Packed) -> None:
        nf4.settings(quant_method=None)
        assert isinstance(open_checkpoint(nf4.folder), BitsandbytesCheckpoint)
        check_whole(nf4, llama)

    def test_layers_left_alone_stay_as_they_are(self, llama: Path, nf4: Packed) -> None:
        tensors = {name: tensor for name, tensor in nf4.tensors().items() if not name.startswith(f"{LAYER}.")}
        nf4.save(tensors | {f"{LAYER}.weight": HfCheckpoint(llama).linear(LAYER).dequantize()})
        del nf4.weights[LAYER]
        check_whole(nf4, llama)

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"load_in_8bit": True, "load_in_4bit": False}, "LLM.int8() is not read"),
            ({"load_in_4bit": None}, "load_in_4bit None"),
            (
                {"bnb_4bit_quant_type": "int4"},
                "bnb_4bit_quant_type 'int4' is not supported for bitsandbytes; supported: 'nf4', 'fp4'",
            ),
            ({"bnb_4bit_quant_storage": "bfloat16"}, "bnb_4bit_quant_storage 'bfloat16'"),
            ({"bnb_4bit_quant_type": "fp4"}, "quant_state.bitsandbytes__fp4 is missing"),
        ],
    )
    def test_refused_settings(self, nf4: Packed, changes: dict[str, Any], words: str) -> None:
        nf4.settings(**changes)
        assert words in refused(lambda: open_checkpoint(nf4.folder))

    @pytest.mark.parametrize(
        "end", ["absmax", "quant_map", "nested_absmax", "nested_quant_map", "quant_state.bitsandbytes__nf4"]
    )
    def test_a_missing_tensor(self, nf4: Packed, end: str) -> None:
        nf4.edit(f"{LAYER}.weight.{end}", None)
        assert f"tensor {LAYER}.weight.{end} is missing" in refused(lambda: open_checkpoint(nf4.folder))

    @pytest.mark.parametrize("end", ["", ".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map"])
    def test_a_tensor_of_another_shape(self, nf4: Packed, end: str) -> None:
        nf4.edit(f"{LAYER}.weight{end}", nf4.tensors()[f"{LAYER}.weight{end}"][:-1])
        assert f"tensor {LAYER}.weight{end} has shape" in refused(lambda: open_checkpoint(nf4.folder))

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"quant_type": "fp4"}, "has quant_type 'fp4', where it should be 'nf4'"),
            ({"shape": [256, 128]}, "has shape [256, 128], where it should be [128, 256]"),
            ({"blocksize": 0}, "has blocksize 0; allowed are 1 to 4096"),
            ({"blocksize": 10**12}, "has blocksize 1000000000000"),
            ({"nested_blocksize": None}, "has nested_blocksize None"),
            ({"nested_offset": None}, "has nested_offset None; it must be a finite number"),
            ({"nested_offset": float("nan")}, "has nested_offset nan"),
            ({"blocksize": 128}, "weight.absmax has shape [512]; config.json implies [256]"),
        ],
    )
    def test_a_state_that_does_not_fit(self, nf4: Packed, changes: dict[str, Any], words: str) -> None:
        tensor = f"{LAYER}.weight.quant_state.bitsandbytes__nf4"
        state = json.loads(nf4.tensors()[tensor].tobytes()) | changes
        nf4.edit(tensor, np.frombuffer(json.dumps(state).encode(), np.uint8))
        assert words in refused(lambda: open_checkpoint(nf4.folder))

    @pytest.mark.parametrize("text", [b"{", b"[]", b"\xff"])
    def test_a_state_that_is_none(self, nf4: Packed, text: bytes) -> None:
        tensor = f"{LAYER}.weight.quant_state.bitsandbytes__nf4"
        nf4.edit(tensor, np.frombuffer(text, np.uint8))
        assert f"tensor {tensor} does not hold" in refused(lambda: open_checkpoint(nf4.folder))

    def test_another_code_book(self, nf4: Packed) -> None:
        nf4.edit(f"{LAYER}.weight.quant_map", FP4)
        checkpoint = open_checkpoint(nf4.folder)
        assert f"tensor {LAYER}.weight.quant_map is not the code book of nf4" in refused(lambda: checkpoint.linear(LAYER))

    @pytest.mark.parametrize(
        ("nested", "end", "value"),
        [
            (False, "absmax", np.nan),
            (False, "absmax", np.inf),
            (False, "absmax", -1),
            (True, "nested_absmax", np.nan),
            (True, "nested_absmax", -1),
            (True, "nested_quant_map", np.inf),
        ],
    )
    def test_scales_that_are_none(self, llama: Path, tmp_path: Path, nested: bool, end: str, value: float) -> None:
        packed = pack_bitsandbytes(llama, tmp_path / "packed", nested=nested)
        values = packed.tensors()[f"{LAYER}.weight.{end}"]
        values[0] = value
        packed.edit(f"{LAYER}.weight.{end}", values)
        checkpoint = open_checkpoint(packed.folder)
        assert f"tensor {LAYER}.weight.{end} holds values" in refused(lambda: checkpoint.linear(LAYER))

    def test_a_block_of_zeros_is_none_of_these(self, llama: Path, tmp_path: Path) -> None:
        packed = pack_bitsandbytes(llama, tmp_path / "packed", nested=False)
        values = packed.tensors()[f"{LAYER}.weight.absmax"]
        values[0] = 0
        packed.edit(f"{LAYER}.weight.absmax", values)
        weight = open_checkpoint(packed.folder).linear(LAYER).dequantize()
        assert not weight[0, :64].any()
        assert_same_bits(weight[1:], packed.weights[LAYER][1:])


class TestOthers:
    @pytest.mark.parametrize(
        "method",
        ["compressed-tensors", "fp8", "hqq", "eetq", "quanto", "torchao", "mxfp4", "aqlm", "auto-round", "modelopt", "new"],
    )
    def test_methods_that_are_not_read(self, gptq: Packed, method: str) -> None:
        gptq.settings(quant_method=method)
        message = refused(lambda: open_checkpoint(gptq.folder))
        assert f"weights quantized with {method} are not supported; supported are" in message
        for readable in ("modelopt", "gptq", "awq", "bitsandbytes", "nf4"):
            assert readable in message

    def test_no_method(self, gptq: Packed) -> None:
        gptq.settings(quant_method=None)
        assert "quantized with an unknown method" in refused(lambda: open_checkpoint(gptq.folder))

    def test_an_older_name_of_the_settings(self, gptq: Packed) -> None:
        path = gptq.folder / "config.json"
        path.write_text(path.read_text().replace("quantization_config", "compression_config").replace('"gptq"', '"sparse"'))
        assert "quantized with sparse" in refused(lambda: open_checkpoint(gptq.folder))

    def test_settings_that_are_no_object(self, gptq: Packed) -> None:
        path = gptq.folder / "config.json"
        config = json.loads(path.read_text()) | {"quantization_config": "gptq"}
        path.write_text(json.dumps(config))
        assert "quantization_config is not an object" in refused(lambda: open_checkpoint(gptq.folder))

    @pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes"])
    def test_a_plain_model_that_says_it_is_packed(self, llama: Path, tmp_path: Path, method: str) -> None:
        packed = PACKERS[method](llama, tmp_path / "packed")
        packed.save(Packed(llama).tensors())
        assert f"config.json says {method}, but no layer" in refused(lambda: open_checkpoint(packed.folder))

    def test_plain_models_are_read_as_before(self, llama: Path) -> None:
        checkpoint = open_checkpoint(llama, model="m")
        assert type(checkpoint) is HfCheckpoint
        assert (checkpoint.warnings, checkpoint.is_dequantized, checkpoint.source.model) == ((), False, "m")

    def test_modelopts_file_comes_first(self, gptq: Packed) -> None:
        (gptq.folder / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "nothing"}}))
        assert "quant_algo 'nothing' is not supported" in refused(lambda: open_checkpoint(gptq.folder))


class TestDequantizeTo:
    @pytest.mark.parametrize("family", FAMILIES)
    @pytest.mark.parametrize("packer", PACKERS)
    def test_transformers_then_computes_with_the_dequantized_weights(
        self, originals: dict[str, Path], tmp_path: Path, family: str, packer: str
    ) -> None:
        packed = PACKERS[packer](originals[family], tmp_path / "packed")
        checkpoint = open_checkpoint(packed.folder)
        fractions: list[float] = []
        dequantize_to(checkpoint, tmp_path / "plain", fractions.append)
        assert fractions == sorted(fractions)
        assert fractions[-1] == 1.0

        expected = quantize.load_model(originals[family])
        for name, weight in packed.weights.items():
            expected.get_submodule(name).weight.data = torch.from_numpy(weight)
        model = quantize.load_model(tmp_path / "plain")
        assert not hasattr(model.config, "quantization_config")
        assert model.state_dict().keys() == expected.state_dict().keys()
        for name, tensor in expected.state_dict().items():
            assert torch.equal(model.state_dict()[name], tensor), name
        ids = torch.arange(3, 60)[None]
        assert torch.equal(model(ids).logits, expected(ids).logits)

        plain = open_checkpoint(tmp_path / "plain")
        assert type(plain) is HfCheckpoint
        assert plain.warnings == ()
        assert [path.name for path in plain.tokenizer_files] == [path.name for path in checkpoint.tokenizer_files]
        assert (tmp_path / "plain/tokenizer.json").read_bytes() == (originals[family] / "tokenizer.json").read_bytes()
        written = sorted((tmp_path / "plain").glob("*.safetensors"))
        assert len(written) > checkpoint.config.num_layers, "a file for each layer, so that memory stays at one"

    def test_what_it_writes_can_be_quantized(self, awq: Packed, tmp_path: Path) -> None:
        dequantize_to(open_checkpoint(awq.folder), tmp_path / "plain")
        quantize.quantize(tmp_path / "plain", tmp_path / "out", quantize.Recipe("int4", 64, "rtn"))
        checkpoint = open_checkpoint(tmp_path / "out")
        assert isinstance(checkpoint, ModeloptCheckpoint)
        weights = checkpoint.linear(LAYER)
        assert isinstance(weights, Int4Weights)
        error = weights.dequantize() - awq.weights[LAYER]
        assert np.abs(error).max() <= 0.51 * weights.scales.max()

    def test_a_scale_of_the_input_is_multiplied_into_the_weight(self, gptq: Packed, tmp_path: Path) -> None:
        checkpoint = open_checkpoint(gptq.folder)
        scale = np.linspace(0.5, 2, 256).astype(np.float32)
        read = checkpoint.linear

        def scaled(name: str) -> LinearWeights:
            weights = read(name)
            return replace(weights, pre_quant_scale=scale) if name == LAYER else weights  # type: ignore[call-arg]

        checkpoint.linear = scaled  # type: ignore[method-assign]
        dequantize_to(checkpoint, tmp_path / "plain")
        assert_same_bits(HfCheckpoint(tmp_path / "plain").linear(LAYER).dequantize(), gptq.weights[LAYER] * scale)

    def test_biases_of_zeros_that_the_model_has_not_are_left_out(self, gptq: Packed, tmp_path: Path) -> None:
        bias = np.zeros(128, np.float16)
        gptq.save(gptq.tensors() | {f"{LAYER}.bias": bias})
        dequantize_to(open_checkpoint(gptq.folder), tmp_path / "plain")
        assert HfCheckpoint(tmp_path / "plain").linear(LAYER).bias is None
        bias[3] = 1
        gptq.edit(f"{LAYER}.bias", bias)
        checkpoint = open_checkpoint(gptq.folder)
        assert f"tensor {LAYER}.bias is not 0" in refused(lambda: dequantize_to(checkpoint, tmp_path / "other"))
        assert not (tmp_path / "other/config.json").exists()
