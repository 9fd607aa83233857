"""INT4: what is exported is what was simulated, bit for bit, and what cannot be quantized is refused before any work."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from build_engines import calibration, quantize
from build_engines.checkpoint import FloatWeights, Fp4Weights, Int4Weights, linear_names
from build_engines.checkpoint.hf import HfCheckpoint
from build_engines.checkpoint.modelopt import ModeloptCheckpoint, is_modelopt_folder, pack_int4, unpack_int4
from build_engines.checkpoint.types import linear_facts
from build_engines.quantize import Recipe
from build_engines.rounding import round_to_e4m3, round_weight
from tests.building import one_thread, refused  # noqa: F401 - one_thread acts by being here
from tests.engines import dequantized_model
from tests.tiny_models import BOS, TINY_FAMILIES, make_tiny_model

TEXT = "A small text about nothing, repeated until it is long enough to be cut into windows of tokens. " * 40
IDS = torch.arange(3, 120)[None]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("llama"))


class TestPacking:
    def test_every_pair_of_values_round_trips_in_both_nibbles(self) -> None:
        low, high = np.meshgrid(np.arange(-8, 8), np.arange(-8, 8))
        values = np.stack([low.ravel(), high.ravel()]).astype(np.int8)
        packed = pack_int4(values)
        assert packed.shape == (1, 256)
        assert packed.dtype == np.uint8
        assert len(np.unique(packed)) == 256
        np.testing.assert_array_equal(unpack_int4(packed), values)

    def test_the_layout_is_that_of_modelopt(self) -> None:
        from modelopt.torch.export.quant_utils import pack_int4_in_uint8

        values = np.random.default_rng(0).integers(-8, 8, (6, 128)).astype(np.int8)
        theirs = pack_int4_in_uint8(torch.from_numpy(values).float(), torch.ones(6, 1), 128).numpy()
        np.testing.assert_array_equal(pack_int4(values), theirs)
        np.testing.assert_array_equal(unpack_int4(theirs), values)

    def test_an_odd_number_of_rows_is_refused(self) -> None:
        with pytest.raises(ValueError, match="3 rows cannot be packed"):
            pack_int4(np.zeros((3, 8), np.int8))

    @pytest.mark.parametrize("value", [-9, 8])
    def test_values_outside_four_bits_are_refused(self, value: int) -> None:
        with pytest.raises(ValueError, match=r"lie in -8\.\.7"):
            pack_int4(np.array([[0], [value]], np.int8))

    def test_other_types_and_shapes_are_refused(self) -> None:
        with pytest.raises(ValueError, match="matrix of int8"):
            pack_int4(np.zeros((2, 2), np.int32))
        with pytest.raises(ValueError, match="matrix of uint8"):
            unpack_int4(np.zeros((2, 2), np.int8))
        with pytest.raises(ValueError, match="matrix of uint8"):
            unpack_int4(np.zeros(4, np.uint8))


RECIPES = {
    "int4_rtn": Recipe("int4", 64, "rtn"),
    "int4_awq": Recipe("int4", 64, "awq"),
    "int8": Recipe("int8"),
    "int8_sq": Recipe("int8", activations=True),
    "fp8": Recipe("fp8"),
    "mixed": Recipe("mixed", 64, effective_bits=6.0),
}


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_the_export_is_what_was_simulated(tmp_path: Path, family: str, name: str) -> None:
    original, recipe = make_tiny_model(family, tmp_path / "original"), RECIPES[name]
    shutil.copy(original / "tokenizer.json", tmp_path / "tokenizer.json")
    windows = calibration.token_windows(TEXT, original / "tokenizer.json", BOS, 4, 32)
    with quantize.quiet_libraries():
        model = quantize.load_model(original)
        quantize.simulate(model, recipe, windows if recipe.needs_text else None)
        with torch.no_grad():
            expected_logits = model(IDS).logits
            expected = {
                n: model.get_submodule(n).weight_quantizer(model.get_submodule(n).weight)
                for n in linear_names(_config(original))
            }
        quantize.export(model, tmp_path)

    checkpoint = ModeloptCheckpoint(tmp_path)
    assert checkpoint.source.quantization == name
    for layer, weight in expected.items():
        actual = torch.from_numpy(checkpoint.linear(layer).dequantize())
        differs = (actual - weight).abs() > 1e-6 * weight.abs() + 1e-7
        # A weight halfway between two steps may go either way: the exporter divides by a scale, the simulation multiplies.
        assert differs.float().mean() < (0 if name.startswith("int4") else 1e-3) + 1e-9, layer
    assert isinstance(checkpoint.linear("lm_head"), FloatWeights)
    with torch.no_grad():
        logits = dequantized_model(original, checkpoint)(IDS).logits
    if recipe.activations or recipe.precision == "fp8":  # a last bit may decide how an input is rounded
        assert (logits - expected_logits).abs().mean() < 0.05
    else:
        torch.testing.assert_close(logits, expected_logits, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("activations", [False, True])
def test_nvfp4_is_the_nearest_of_its_grid(llama: Path, tmp_path: Path, activations: bool) -> None:
    """Its simulation needs a GPU, so that the export is held against the format's own arithmetic."""
    quantize.quantize(llama, tmp_path / "out", Recipe("fp4", activations=activations), TEXT)
    original, checkpoint = HfCheckpoint(llama), ModeloptCheckpoint(tmp_path / "out")
    assert checkpoint.source.quantization == ("nvfp4" if activations else "nvfp4_weight_only")
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    grid = np.concatenate([-grid[:0:-1], grid])
    for name in linear_names(original.config):
        weights, wanted = checkpoint.linear(name), original.linear(name).weight  # type: ignore[union-attr]
        assert isinstance(weights, Fp4Weights)
        assert (weights.input_scale is not None) == activations
        scales = np.repeat(weights.scales, 16, axis=1)
        nearest = np.abs(wanted[..., None] / scales[..., None] - grid).min(axis=-1) * scales
        np.testing.assert_allclose(np.abs(weights.dequantize() - wanted), nearest, rtol=1e-3, atol=1e-5 * np.abs(wanted).max())
        ideal = np.abs(wanted.reshape(len(wanted), -1, 16)).max(axis=2) / 6
        np.testing.assert_allclose(weights.scales, ideal, rtol=1 / 15)  # E4M3 has steps of an eighth


def test_a_mixture_takes_the_bits_it_was_given_and_spends_them(llama: Path, tmp_path: Path) -> None:
    bits = {}
    for wanted in (4.25, 5.0, 6.5, 8.0):
        quantize.quantize(llama, tmp_path / str(wanted), Recipe("mixed", 64, effective_bits=wanted), TEXT)
        checkpoint = ModeloptCheckpoint(tmp_path / str(wanted))
        facts = [linear_facts(checkpoint.linear(name)) for name in linear_names(checkpoint.config)]
        bits[wanted] = sum(fact.bits * fact.num_weights for fact in facts) / sum(fact.num_weights for fact in facts)
    assert all(actual <= wanted for wanted, actual in bits.items())
    assert bits[4.25] == 4.25
    assert bits[4.25] < bits[5.0] < bits[6.5] < bits[8.0]


def test_scales_of_the_cache_are_exported(llama: Path, tmp_path: Path) -> None:
    quantize.quantize(llama, tmp_path / "out", Recipe("none", cache_fp8=True), TEXT)
    checkpoint = ModeloptCheckpoint(tmp_path / "out")
    assert isinstance(checkpoint.linear("model.layers.0.self_attn.q_proj"), FloatWeights)
    scales = [checkpoint.cache_scales(layer) for layer in range(checkpoint.config.num_layers)]
    assert all(pair is not None and min(pair) > 0 for pair in scales)


def _config(folder: Path) -> Any:
    return HfCheckpoint(folder).config


def test_scales_of_activations_are_folded_into_norms_or_kept(llama: Path, tmp_path: Path) -> None:
    quantize.quantize(llama, tmp_path / "out", Recipe("int4", 64, "awq"), TEXT)
    original, checkpoint = HfCheckpoint(llama), ModeloptCheckpoint(tmp_path / "out")
    kept = {name: checkpoint.linear(name).pre_quant_scale is not None for name in linear_names(checkpoint.config)}  # type: ignore[union-attr]
    assert all(is_kept == name.endswith(("o_proj", "down_proj")) for name, is_kept in kept.items())
    norm = "model.layers.0.input_layernorm.weight"
    assert not np.allclose(original.tensor(norm), checkpoint.tensor(norm))
    np.testing.assert_array_equal(original.tensor("model.norm.weight"), checkpoint.tensor("model.norm.weight"))


def test_a_checkpoint_goes_in_and_a_whole_one_comes_out(llama: Path, tmp_path: Path) -> None:
    fractions: list[float] = []
    output = tmp_path / "out"
    quantize.quantize(llama, output, Recipe("int4", 128, "awq"), TEXT, fractions.append)
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0
    assert is_modelopt_folder(output)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    files = {path.name for path in ModeloptCheckpoint(output, model="tiny").tokenizer_files}
    assert files >= {"tokenizer.json", "tokenizer_config.json", "generation_config.json"}


def test_the_same_input_gives_the_same_weights(llama: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        quantize.quantize(llama, tmp_path / name, Recipe("int4", 64, "awq"), TEXT)
    assert (tmp_path / "one/model.safetensors").read_bytes() == (tmp_path / "two/model.safetensors").read_bytes()


def test_smaller_blocks_err_no_more_than_larger_ones(llama: Path, tmp_path: Path) -> None:
    original = HfCheckpoint(llama)
    checkpoints = {}
    for block_size in quantize.BLOCK_SIZES:
        quantize.quantize(llama, tmp_path / str(block_size), Recipe("int4", block_size, "rtn"))
        checkpoints[block_size] = ModeloptCheckpoint(tmp_path / str(block_size))
    for name in linear_names(original.config):
        weight = torch.from_numpy(original.linear(name).weight)  # type: ignore[union-attr]
        errors = {
            size: float((torch.from_numpy(checkpoint.linear(name).dequantize()) - weight).square().sum())  # type: ignore[arg-type]
            for size, checkpoint in checkpoints.items()
        }
        assert errors[64] <= errors[128], name


def test_a_block_of_zeros_stays_zero(llama: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(llama, tmp_path / "zeros")
    _edit(folder, lambda tensors: tensors["model.layers.0.mlp.up_proj.weight"][:5, :64].zero_())
    for algorithm in quantize.ALGORITHMS:
        quantize.quantize(folder, tmp_path / algorithm, Recipe("int4", 64, algorithm), TEXT)
        weights = ModeloptCheckpoint(tmp_path / algorithm).linear("model.layers.0.mlp.up_proj")
        assert isinstance(weights, Int4Weights)
        assert not weights.dequantize()[:5, :64].any()
        assert np.isfinite(weights.scales).all()
        assert (weights.scales > 0).all()


def _edit(folder: Path, edit: Any) -> None:
    from safetensors.torch import load_file, save_file

    tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


class TestRounding:
    def test_values_are_on_the_grid_of_their_scales(self) -> None:
        weight, moments = _random_layer()
        rounded, scales = round_weight(weight, moments, 64)
        multiples = rounded / scales.repeat_interleave(64, dim=1)
        torch.testing.assert_close(multiples, multiples.round(), rtol=0, atol=1e-4)
        assert multiples.min() >= -8.001
        assert multiples.max() <= 7.001

    def test_outputs_are_closer_than_with_rounding_to_nearest(self) -> None:
        weight, moments = _random_layer()
        rounded, _ = round_weight(weight, moments, 64)
        scales = (weight.reshape(32, 2, 64).abs().amax(2) / 7).repeat_interleave(64, dim=1)
        nearest = (weight / scales).round().clamp(-8, 7) * scales
        assert _cost(rounded - weight, moments) < 0.7 * _cost(nearest - weight, moments)

    def test_it_is_as_good_as_the_algorithm_written_plainly(self) -> None:
        weight, moments = _random_layer()
        rounded, scales = round_weight(weight, moments, 64)
        plain = _gptq(weight.double(), moments.double(), scales.double(), 64)
        # A value halfway between two multiples may go either way, and then all after it differ.
        ratio = _cost(rounded - weight, moments) / _cost(plain.float() - weight, moments)
        assert 0.9 < ratio < 1.1

    def test_e4m3_values_are_on_their_grid_and_outputs_closer_than_with_rounding_to_nearest(self) -> None:
        weight, moments = _random_layer()
        scale = float(weight.abs().max()) / 448
        rounded = round_to_e4m3(weight, moments, scale)
        assert torch.equal(_e4m3(rounded, scale), rounded)
        assert _cost(rounded - weight, moments) < 0.7 * _cost(_e4m3(weight, scale) - weight, moments)

    def test_e4m3_takes_a_width_that_no_block_divides(self) -> None:
        weight, moments = _random_layer()
        rounded = round_to_e4m3(weight[:, :75], moments[:75, :75], 0.01)
        assert rounded.shape == (32, 75)
        assert torch.equal(_e4m3(rounded, 0.01), rounded)

    def test_inputs_that_are_always_zero_do_no_harm(self) -> None:
        weight, moments = _random_layer()
        moments[:10] = 0
        moments[:, :10] = 0
        rounded, scales = round_weight(weight, moments, 64)
        assert torch.isfinite(rounded).all()
        assert (scales > 0).all()

    def test_nothing_given_is_changed(self) -> None:
        weight, moments = _random_layer()
        before = weight.clone(), moments.clone()
        round_weight(weight, moments, 64)
        assert torch.equal(weight, before[0])
        assert torch.equal(moments, before[1])


def _random_layer() -> tuple[torch.Tensor, torch.Tensor]:
    """A weight [32, 128], and the second moments of inputs that are correlated, as those of real layers are."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(512, 16, generator=generator) @ torch.randn(16, 128, generator=generator)
    inputs += 0.3 * torch.randn(512, 128, generator=generator)
    return torch.randn(32, 128, generator=generator), inputs.T @ inputs


def _gptq(weight: torch.Tensor, moments: torch.Tensor, scales: torch.Tensor, block_size: int) -> torch.Tensor:
    """GPTQ one column at a time: the remaining weights move to where they best make good the error of the column fixed."""
    weight, rounded = weight.clone(), torch.empty_like(weight)
    moments = moments + 0.01 * moments.diagonal().mean() * torch.eye(len(moments))
    for i in range(weight.shape[1]):
        inverse = torch.linalg.inv(moments[i:, i:])
        scale = scales[:, i // block_size]
        rounded[:, i] = (weight[:, i] / scale).round().clamp(-8, 7) * scale
        error = (weight[:, i] - rounded[:, i]) / inverse[0, 0]
        weight[:, i:] -= error[:, None] * inverse[0]
    return rounded


def _e4m3(values: torch.Tensor, scale: float) -> torch.Tensor:
    return (values / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


def _cost(error: torch.Tensor, moments: torch.Tensor) -> float:
    return float((error @ moments * error).sum())


class TestRefusals:
    """Before any work: nothing is written."""

    def test_other_block_sizes(self, llama: Path, tmp_path: Path) -> None:
        message = refused(lambda: quantize.quantize(llama, tmp_path / "out", Recipe("int4", 32, "rtn")))
        assert message == "block size 32 is not supported; allowed are 64, 128"
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize(
        ("num_in", "block_size", "hint"),
        [
            (1376, 64, "none of the allowed ones (64, 128) would work"),
            (1376, 128, "none of the allowed ones (64, 128) would work"),
            (3136, 128, "a block size of 64 would work"),
        ],
    )
    def test_blocks_that_do_not_divide_a_layer(self, tmp_path: Path, num_in: int, block_size: int, hint: str) -> None:
        folder = make_tiny_model("llama", tmp_path / "model", intermediate_size=num_in)
        message = refused(lambda: quantize.quantize(folder, tmp_path / "out", Recipe("int4", block_size, "awq")))
        layer = "model.layers.0.mlp.down_proj"
        assert message == f"{layer} has {num_in} inputs, which blocks of {block_size} do not divide; {hint}"

    def test_blocks_of_64_divide_3136(self, tmp_path: Path) -> None:
        quantize.check_block_size(_config(make_tiny_model("llama", tmp_path, intermediate_size=3136)), 64)

    def test_an_unknown_algorithm(self, llama: Path, tmp_path: Path) -> None:
        assert "known are awq, rtn" in refused(lambda: quantize.quantize(llama, tmp_path / "out", Recipe("int4", 128, "gptq")))

    def test_a_text_that_is_too_short(self, llama: Path, tmp_path: Path) -> None:
        message = refused(lambda: quantize.quantize(llama, tmp_path / "out", Recipe("int4", 128, "awq"), "too short"))
        assert "the calibration text has" in message

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_weights_that_are_not_finite(self, llama: Path, tmp_path: Path, value: float) -> None:
        folder = shutil.copytree(llama, tmp_path / "model")
        _edit(folder, lambda tensors: tensors["model.layers.1.self_attn.v_proj.weight"].view(-1)[:1].fill_(value))
        message = refused(lambda: quantize.quantize(folder, tmp_path / "out", Recipe("int4", 128, "rtn")))
        assert message.startswith("model.layers.1.self_attn.v_proj: its weights hold NaN or infinity")

    def test_an_export_of_an_unknown_precision(self, llama: Path, tmp_path: Path) -> None:
        quantize.quantize(llama, tmp_path / "out", Recipe("int4", 128, "rtn"))
        path = tmp_path / "out/hf_quant_config.json"
        path.write_text(path.read_text().replace("W4A16_AWQ", "W4A8_AWQ"))
        assert "quant_algo 'W4A8_AWQ' is not supported; supported are W4A16_AWQ" in refused(
            lambda: ModeloptCheckpoint(tmp_path / "out")
        )

    @pytest.mark.parametrize(
        ("bits", "words"),
        [
            (None, "--precision mixed needs --effective-bits, a number between 4.125 and 8"),
            (4.0, "--effective-bits 4.0: INT4 in blocks of 128 takes 4.125 bits a weight and INT8 8; choose a number between"),
            (9.0, "--effective-bits 9.0: INT4 in blocks"),
        ],
    )
    def test_bits_that_no_mixture_has(self, llama: Path, tmp_path: Path, bits: float | None, words: str) -> None:
        message = refused(lambda: quantize.quantize(llama, tmp_path / "out", Recipe("mixed", effective_bits=bits), TEXT))
        assert message.startswith(words)

    def test_fp4_blocks_that_do_not_divide_a_layer(self, tmp_path: Path) -> None:
        folder = make_tiny_model("llama", tmp_path / "model", intermediate_size=1000)
        message = refused(lambda: quantize.quantize(folder, tmp_path / "out", Recipe("fp4")))
        assert message == "model.layers.0.mlp.down_proj has 1000 inputs, which NVFP4's blocks of 16 do not divide"


class TestFp8Scales:
    """They are finite and positive whatever the weights are, or the weights are refused by name."""

    LAYER = "model.layers.0.mlp.up_proj"

    @pytest.mark.parametrize(
        "edit",
        [
            lambda weight: weight.zero_(),
            lambda weight: weight[3].zero_(),
            lambda weight: weight.view(-1)[:1].fill_(1e4),
            lambda weight: weight.mul_(1e-30),
        ],
        ids=["zeros", "a row of zeros", "an outlier", "tiny"],
    )
    @pytest.mark.parametrize("recipe", ["fp8", "int8", "int8_sq", "fp4"])
    def test_strange_weights(self, llama: Path, tmp_path: Path, edit: Any, recipe: str) -> None:
        folder = shutil.copytree(llama, tmp_path / "model")
        _edit(folder, lambda tensors: edit(tensors[f"{self.LAYER}.weight"]))
        quantize.quantize(folder, tmp_path / "out", RECIPES.get(recipe, Recipe("fp4")), TEXT)
        weights = ModeloptCheckpoint(tmp_path / "out").linear(self.LAYER)
        assert not isinstance(weights, FloatWeights)
        assert np.isfinite(weights.scales).all()
        assert (weights.scales >= 0).all()
        assert np.isfinite(weights.dequantize()).all()
        wanted = HfCheckpoint(folder).linear(self.LAYER).weight  # type: ignore[union-attr]
        pre = 1.0 if weights.pre_quant_scale is None else weights.pre_quant_scale
        error = np.abs(weights.dequantize() * pre - wanted).max()
        assert error <= max(0.14 * np.abs(wanted).max(), 1e-20)

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_weights_that_are_not_finite(self, llama: Path, tmp_path: Path, value: float) -> None:
        folder = shutil.copytree(llama, tmp_path / "model")
        _edit(folder, lambda tensors: tensors[f"{self.LAYER}.weight"].view(-1)[:1].fill_(value))
        message = refused(lambda: quantize.quantize(folder, tmp_path / "out", RECIPES["fp8"], TEXT))
        assert message.startswith(f"{self.LAYER}: its weights hold NaN or infinity")


class TestCalibration:
    def test_windows_begin_with_bos_and_spread_over_the_text(self, llama: Path) -> None:
        windows = calibration.token_windows(TEXT, llama / "tokenizer.json", BOS, 5, 16)
        assert windows.shape == (5, 16)
        assert windows.dtype == np.int64
        assert (windows[:, 0] == BOS).all()
        assert not (windows[:, 1:] == BOS).any()

    def test_a_short_text_gives_fewer_windows(self, llama: Path) -> None:
        assert len(calibration.token_windows(TEXT, llama / "tokenizer.json", None, 10_000, 64)) < 10_000

    def test_the_default_text_has_no_header_and_many_scripts(self) -> None:
        text = calibration.default_text()
        assert not text.startswith("#")
        assert len(text) > 20_000
        assert all(word in text for word in ("Question:", "def ", "SELECT", "Straße", "北京", "भारत"))

    def test_a_text_that_cannot_be_read(self, tmp_path: Path) -> None:
        assert "cannot be read" in refused(lambda: calibration.read_text(tmp_path / "none.txt"))
        (tmp_path / "latin.txt").write_bytes(b"\xe9\xe8")
        assert "UTF-8" in refused(lambda: calibration.read_text(tmp_path / "latin.txt"))


def test_nothing_reaches_the_terminal(llama: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = make_tiny_model("gemma3", tmp_path / "model")
    capfd.readouterr()
    quantize.quantize(folder, tmp_path / "out", Recipe("int4", 64, "awq"), TEXT)
    assert capfd.readouterr() == ("", "")
