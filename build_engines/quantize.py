"""INT4 weights by nvidia-modelopt, on a CPU: AWQ or round-to-nearest, and its Hugging Face export.

AWQ here is modelopt's search for the scales of activations, and then rounding that keeps outputs close (rounding.py) in place
of rounding to nearest.
"""

import contextlib
import copy
import io
import shutil
import warnings
from collections.abc import Callable, Iterator
from logging import ERROR, getLogger
from pathlib import Path
from typing import Any

from build_engines import calibration
from build_engines.checkpoint.hf import TOKENIZER_FILES, HfCheckpoint
from build_engines.checkpoint.types import DecoderConfig, linear_names, linear_shape
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
# Parts of the whole time, on the demo model.
_SEARCH_PART = 0.4
# All linears of a decoder layer. Those that share an input share AWQ's scale for it.
_GROUPS = (
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


def quantize(
    folder: Path,
    output: Path,
    algorithm: str = "awq",
    block_size: int = 128,
    text: str | None = None,
    progress: Progress = lambda fraction: None,
) -> None:
    """Quantizes all linear layers but `lm_head` of the Hugging Face model in `folder`; writes modelopt's export to `output`.

    algorithm: "awq" (activation-aware: needs a calibration text) or "rtn" (round to nearest). block_size: weights along a
    layer's input that share a scale, 64 or 128. text: calibrates AWQ; None: the built-in one. progress is called with the
    fraction done.

    `output` appears whole or not at all. Raises BuildError, before any work, for an unknown algorithm, a block size that is
    not allowed or does not divide a layer, a text that is too short, or a checkpoint that cannot be read; and for a weight
    that is not finite, naming its layer.
    """
    if algorithm not in ALGORITHMS:
        raise BuildError(f"algorithm {algorithm!r} is unknown; known are {', '.join(ALGORITHMS)}")
    checkpoint = HfCheckpoint(folder)
    check_block_size(checkpoint.config, block_size)
    windows = None
    if algorithm == "awq":
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
        simulate(model, algorithm, block_size, windows, lambda fraction: progress(0.02 + 0.9 * fraction))
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


def simulate(model: Any, algorithm: str, block_size: int, windows: Any, progress: Progress = lambda fraction: None) -> None:
    """Turns `model` in place into modelopt's simulation: the same model, its weights rounded when used.

    windows: int64 [n, tokens] for AWQ, else None. Layers that share an input get one scale for it, so that the export has the
    weights simulated here; left to itself, the exporter averages the scales and rounds anew.
    """
    import modelopt.torch.quantization as mtq
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if algorithm == "rtn":
            mtq.quantize(model, _with_block_size(mtq.INT4_BLOCKWISE_WEIGHT_ONLY_CFG, block_size))
        else:
            config = _with_block_size(mtq.INT4_AWQ_CFG, block_size)
            config["algorithm"] = {"method": "awq_lite", "alpha_step": _ALPHA_STEP}
            batch = torch.from_numpy(windows)
            # Spread over the text as all of them are.
            few = batch[:: max(1, len(batch) // _NUM_SEARCH_WINDOWS)]
            with _search_progress(model, lambda fraction: progress(_SEARCH_PART * fraction)):
                # All windows at once: the search rounds every weight for every candidate and batch. Without the head, which is
                # not quantized and for small models the larger part of the work.
                mtq.quantize(model, config, lambda m: m.model(few, use_cache=False))
            _share_scales(model)
            round_layers(
                model, batch, _GROUPS, block_size, lambda fraction: progress(_SEARCH_PART + (1 - _SEARCH_PART) * fraction)
            )
    progress(1.0)


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

    verbosity, had_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    modelopt = getLogger("modelopt")
    level = modelopt.level
    modelopt.setLevel(ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        modelopt.setLevel(level)
        logging.set_verbosity(verbosity)
        if had_bars:
            logging.enable_progress_bar()


def _with_block_size(preset: dict[str, Any], block_size: int) -> dict[str, Any]:
    config = copy.deepcopy(preset)
    for entry in config["quant_cfg"]:
        if (entry.get("cfg") or {}).get("block_sizes"):
            entry["cfg"]["block_sizes"] = {-1: block_size, "type": "static"}
    # The presets leave the head alone already; said again, since its precision is the graph builder's to choose.
    config["quant_cfg"].append({"quantizer_name": "*lm_head*", "enable": False})
    return config


@contextlib.contextmanager
def _search_progress(model: Any, progress: Progress) -> Iterator[None]:
    """Reports AWQ's progress layer by layer: one pass to see the activations, one that tries every alpha."""
    num_layers = len(model.model.layers)
    num_alphas = round(1 / _ALPHA_STEP) + 1
    total = num_layers * (1 + 1 + num_alphas)
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1
        searched = max(0, calls - num_layers)
        progress(min(1.0, (min(calls, num_layers) + searched * (1 + num_alphas)) / total))

    handles = [layer.register_forward_hook(count) for layer in model.model.layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _share_scales(model: Any) -> None:
    from modelopt.torch.export.quant_utils import preprocess_linear_fusion

    for layer in model.model.layers:
        for names in _GROUPS:
            preprocess_linear_fusion([layer.get_submodule(name) for name in names])


def _lift_zero_scales(model: Any) -> None:
    """A block of zeros has the scale 0, which the exporter refuses; any other one gives the same zeros."""
    for module in model.modules():
        quantizer = getattr(module, "weight_quantizer", None)
        if quantizer is not None and quantizer.is_enabled and quantizer.amax is not None:
            quantizer.amax = quantizer.amax.masked_fill(quantizer.amax == 0, 1.0)


def _check_finite(model: Any, config: DecoderConfig) -> None:
    import torch

    for name in linear_names(config):
        if not torch.isfinite(model.get_submodule(name).weight).all():
            raise BuildError(f"{name}: its weights hold NaN or infinity, which no scale can represent")
