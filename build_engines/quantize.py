"""Quantized weights by nvidia-modelopt, on a CPU, and its Hugging Face export.

INT4 AWQ here is modelopt's search for the scales of activations, and then rounding that keeps outputs close (rounding.py) in
place of rounding to nearest; FP8 weights are rounded so too. Everything else is modelopt's own.
"""

import contextlib
import copy
import io
import shutil
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from logging import ERROR, getLogger
from pathlib import Path
from typing import Any

from build_engines import calibration
from build_engines.checkpoint.hf import TOKENIZER_FILES, HfCheckpoint
from build_engines.checkpoint.types import FP4_BLOCK, DecoderConfig, bits_per_weight, linear_names, linear_shape
from build_engines.errors import BuildError
from build_engines.rounding import round_layers

ALGORITHMS = ("awq", "rtn")
BLOCK_SIZES = (64, 128)

# Measured on Gemma 3 270M; see docs/quantization.md.
_WINDOW_LENGTH = 256
_NUM_WINDOWS = 24
# The search for AWQ's scales takes most of the time and needs less text than the rounding after it.
_NUM_SEARCH_WINDOWS = 8
_ALPHA_STEP = 0.2
_NUM_ALPHAS = round(1 / _ALPHA_STEP) + 1
# All linears of a decoder layer. Those that share an input share AWQ's scale for it.
GROUPS = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)

Progress = Callable[[float], None]


def check_block_size(config: DecoderConfig, block_size: int) -> None:
    """Raises BuildError unless `block_size` is an allowed one that divides the input of every linear layer."""
    allowed = ", ".join(map(str, BLOCK_SIZES))
    if block_size not in BLOCK_SIZES:
        raise BuildError(f"block size {block_size} is not supported; allowed are {allowed}")
    for name in linear_names(config):
        num_in = linear_shape(config, name)[1]
        if num_in % block_size:
            working = [size for size in BLOCK_SIZES if not any(linear_shape(config, n)[1] % size for n in linear_names(config))]
            hint = f"a block size of {working[0]} would work" if working else f"none of the allowed ones ({allowed}) would work"
            raise BuildError(f"{name} has {num_in} inputs, which blocks of {block_size} do not divide; {hint}")


@dataclass(frozen=True)
class Recipe:
    """What to make of the linear layers but `lm_head`.

    precision: "int4", "int8", "fp8", "fp4" (NVFP4), "mixed", or "none" where only `cache_fp8` is wanted. block_size: of INT4.
    algorithm: "awq", or "rtn" (rounding to nearest), also of FP8. activations: whether inputs are rounded as well (INT8:
    SmoothQuant, arXiv 2211.10438; FP8: always). effective_bits, wide: mixed chooses for each layer between INT4 and `wide`
    ("int8" or "fp8") so that weights take so many bits on average. cache_fp8: find scales for FP8 keys and values.
    """

    precision: str
    block_size: int = 128
    algorithm: str = "awq"
    activations: bool = False
    effective_bits: float | None = None
    wide: str = "int8"
    cache_fp8: bool = False

    @property
    def has_int4(self) -> bool:
        return self.precision in ("int4", "mixed")

    @property
    def is_awq(self) -> bool:
        return self.has_int4 and self.algorithm == "awq"

    @property
    def keeps_outputs_close(self) -> bool:
        """Whether weights are rounded by rounding.py, rather than to nearest."""
        return self.is_awq or (self.precision == "fp8" and self.algorithm != "rtn")

    @property
    def needs_text(self) -> bool:
        """Whether it looks at activations; else weights alone decide."""
        return self.is_awq or self.precision in ("fp8", "mixed") or self.activations or self.cache_fp8

    def __str__(self) -> str:
        names = {"int8": "INT8", "fp8": "FP8", "fp4": "NVFP4", "mixed": "mixed", "none": "KV cache"}
        smooth = self.precision == "int8" and self.activations
        return self.algorithm.upper() if self.precision == "int4" else "SmoothQuant" if smooth else names[self.precision]


def check_recipe(config: DecoderConfig, recipe: Recipe) -> None:
    """Raises BuildError for what does not fit the model: before any work."""
    if recipe.algorithm not in ALGORITHMS:
        raise BuildError(f"algorithm {recipe.algorithm!r} is unknown; known are {', '.join(ALGORITHMS)}")
    if recipe.has_int4:
        check_block_size(config, recipe.block_size)
    if recipe.precision == "fp4":
        for name in linear_names(config):
            num_in = linear_shape(config, name)[1]
            if num_in % FP4_BLOCK:
                raise BuildError(f"{name} has {num_in} inputs, which NVFP4's blocks of {FP4_BLOCK} do not divide")
    if recipe.precision == "mixed":
        low, high = bits_per_weight("int4", recipe.block_size), bits_per_weight(recipe.wide, None)
        if recipe.effective_bits is None:
            raise BuildError(f"--precision mixed needs --effective-bits, a number between {low:g} and {high:g}")
        if not low <= recipe.effective_bits <= high:
            raise BuildError(
                f"--effective-bits {recipe.effective_bits}: INT4 in blocks of {recipe.block_size} takes {low:g} bits a weight"
                f" and {recipe.wide.upper()} {high:g}; choose a number between them"
            )


def quantize(
    folder: Path,
    output: Path,
    recipe: Recipe,
    text: str | None = None,
    progress: Progress = lambda fraction: None,
) -> None:
    """Quantizes the Hugging Face model in `folder`; writes modelopt's export to `output`.

    text: what activations are calibrated on; None: the built-in one. progress is called with the fraction done.

    `output` appears whole or not at all. Raises BuildError, before any work, for what `check_recipe` refuses, a text that is
    too short, or a checkpoint that cannot be read; and for a weight that is not finite, naming its layer.
    """
    checkpoint = HfCheckpoint(folder)
    check_recipe(checkpoint.config, recipe)
    windows = None
    if recipe.needs_text:
        length = min(_WINDOW_LENGTH, checkpoint.config.max_context)
        tokenizer, bos = folder / "tokenizer.json", checkpoint.config.bos_token_id
        text = calibration.default_text() if text is None else text
        windows = calibration.token_windows(text, tokenizer, bos, _NUM_WINDOWS, length)

    partial = output.with_name(output.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    with quiet_libraries():
        model = load_model(folder)
        _check_finite(model, checkpoint.config)
        progress(0.02)
        simulate(model, recipe, windows, lambda fraction: progress(0.02 + 0.9 * fraction))
        export(model, partial)
    for name in TOKENIZER_FILES:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, partial / name)
    shutil.rmtree(output, ignore_errors=True)
    partial.rename(output)
    progress(1.0)


def load_model(folder: Path) -> Any:
    """The `transformers` model of a folder in float32, ready for inference."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    return model.eval()


def simulate(model: Any, recipe: Recipe, windows: Any, progress: Progress = lambda fraction: None) -> None:
    """Turns `model` in place into modelopt's simulation: the same model, its weights (and inputs) rounded when used.

    windows: int64 [n, tokens] where the recipe needs text, else None. Layers that share an input get one scale for it, so that
    the export has the weights simulated here; left to itself, the exporter averages the scales and rounds anew.
    """
    import modelopt.torch.quantization as mtq
    import torch

    batch = torch.from_numpy(windows) if windows is not None else None
    rounding_part = 0.6 if recipe.keeps_outputs_close else 0.0
    search_part = 1 - rounding_part

    def report(fraction: float) -> None:
        progress(search_part * fraction)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if recipe.precision == "mixed":
            choose_by_layer(model, recipe, batch, report)
        elif batch is None:
            mtq.quantize(model, _preset(recipe))
        else:
            # All windows at once: the search rounds every weight for every candidate and batch. Without the head, which is not
            # quantized and for small models the larger part of the work.
            few = _few(batch) if recipe.is_awq else batch
            num_passes = 2 + _NUM_ALPHAS if recipe.is_awq else 1
            with _layer_progress(model, num_passes, report):
                mtq.quantize(model, _preset(recipe), lambda m: m.model(few, use_cache=False))
        _share_scales(model)
        if recipe.keeps_outputs_close and batch is not None:
            round_layers(model, batch, GROUPS, lambda fraction: progress(search_part + rounding_part * fraction))
    progress(1.0)


def choose_by_layer(model: Any, recipe: Recipe, batch: Any, progress: Progress) -> None:
    """modelopt's `auto_quantize`: for each layer (or group that shares an input) INT4 or the wide format, by how much rounding
    it hurts the loss on the calibration text, to first order, under the bound on bits."""
    import modelopt.torch.quantization as mtq
    import torch

    wide = replace(recipe, precision=recipe.wide, activations=False)
    formats = [
        _preset(replace(recipe, precision="int4")) | {"effective_bits": bits_per_weight("int4", recipe.block_size)},
        _preset(wide) | {"effective_bits": bits_per_weight(recipe.wide, None)},
    ]
    few = _few(batch)

    def loss(output: Any, ids: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(output.logits[0, :-1].float(), ids[0, 1:])

    # Two calibrations that see all windows, one of them AWQ's search; then a forward and a backward pass for each score.
    num_passes = len(few) * (2 + _NUM_ALPHAS + 1 + 1)
    with _layer_progress(model, num_passes, progress):
        mtq.auto_quantize(
            model,
            constraints={"effective_bits": recipe.effective_bits, "cost": {"excluded_module_name_patterns": ["*lm_head*"]}},
            quantization_formats=formats,
            data_loader=[ids[None] for ids in few],
            forward_step=lambda m, ids: m(ids, use_cache=False),
            loss_func=loss,
            disabled_layers=["*lm_head*"],
            num_calib_steps=len(few),
            num_score_steps=len(few),
        )


def export(model: Any, folder: Path) -> None:
    """Writes the simulated model as packed weights with modelopt's exporter, which uses the model up."""
    import torch
    from modelopt.torch.export import export_hf_checkpoint

    model.config.architectures = [type(model).__name__]
    _lift_zero_scales(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        export_hf_checkpoint(model, dtype=torch.float32, export_dir=folder)


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Keeps what transformers and modelopt print, log and draw off the terminal; errors still raise."""
    from transformers.utils import logging

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from modelopt.torch.quantization import algorithms

    verbosity, had_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    modelopt = getLogger("modelopt")
    level = modelopt.level
    bars, algorithms.tqdm = algorithms.tqdm, lambda items, **_: items
    modelopt.setLevel(ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        algorithms.tqdm = bars
        modelopt.setLevel(level)
        logging.set_verbosity(verbosity)
        if had_bars:
            logging.enable_progress_bar()


def _preset(recipe: Recipe) -> dict[str, Any]:
    """modelopt's configuration of a recipe that is not mixed."""
    import modelopt.torch.quantization as mtq

    presets = {
        ("int4", False): mtq.INT4_AWQ_CFG if recipe.algorithm == "awq" else mtq.INT4_BLOCKWISE_WEIGHT_ONLY_CFG,
        ("int8", False): mtq.INT8_WEIGHT_ONLY_CFG,
        ("int8", True): mtq.INT8_SMOOTHQUANT_CFG,
        ("fp8", False): mtq.FP8_DEFAULT_CFG,
        ("fp8", True): mtq.FP8_DEFAULT_CFG,
        ("fp4", False): mtq.W4A16_NVFP4_CFG,
        ("fp4", True): mtq.NVFP4_DEFAULT_CFG,
        ("none", False): {"quant_cfg": [{"quantizer_name": "*", "enable": False}], "algorithm": "max"},
    }
    config = copy.deepcopy(presets[recipe.precision, recipe.activations])
    if recipe.precision == "int4":
        for entry in config["quant_cfg"]:
            if (entry.get("cfg") or {}).get("block_sizes"):
                entry["cfg"]["block_sizes"] = {-1: recipe.block_size, "type": "static"}
        if recipe.algorithm == "awq":
            config["algorithm"] = {"method": "awq_lite", "alpha_step": _ALPHA_STEP}
    # The presets leave the head alone already; said again, since its precision is the graph builder's to choose.
    config["quant_cfg"].append({"quantizer_name": "*lm_head*", "enable": False})
    if recipe.cache_fp8:
        config["quant_cfg"] += copy.deepcopy(mtq.FP8_KV_CFG["quant_cfg"])
    return config


def _few(batch: Any) -> Any:
    """Some of the windows, spread over the text as all of them are."""
    return batch[:: max(1, len(batch) // _NUM_SEARCH_WINDOWS)]


@contextlib.contextmanager
def _layer_progress(model: Any, num_passes: int, progress: Progress) -> Iterator[None]:
    """Reports progress layer by layer over so many passes through the decoder. AWQ's search tries every alpha in its second
    one, which therefore counts as much as all passes but the first."""
    num_layers = len(model.model.layers)
    total = num_layers * num_passes
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1
        second = max(0, calls - num_layers)
        progress(min(1.0, (min(calls, num_layers) + second * max(1, num_passes - 1)) / total))

    handles = [layer.register_forward_hook(count) for layer in model.model.layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _share_scales(model: Any) -> None:
    from modelopt.torch.export.quant_utils import preprocess_linear_fusion

    for layer in model.model.layers:
        for names in GROUPS:
            preprocess_linear_fusion([layer.get_submodule(name) for name in names])


def _lift_zero_scales(model: Any) -> None:
    """A block of zeros, or an input that was always zero, has the scale 0, which the exporter refuses; any other one gives the
    same zeros."""
    for module in model.modules():
        for name in ("weight_quantizer", "input_quantizer", "k_bmm_quantizer", "v_bmm_quantizer"):
            quantizer = getattr(module, name, None)
            if quantizer is not None and quantizer.is_enabled and quantizer.amax is not None:
                quantizer.amax = quantizer.amax.masked_fill(quantizer.amax == 0, 1.0)


def _check_finite(model: Any, config: DecoderConfig) -> None:
    import torch

    for name in linear_names(config):
        if not torch.isfinite(model.get_submodule(name).weight).all():
            raise BuildError(f"{name}: its weights hold NaN or infinity, which no scale can represent")
