"""Everything that a machine with an NVIDIA GPU can tell about TensorRT engines, in one command: `scripts/gpu_check.sh`.

Builds engines with the TensorRT that is installed; compares their log-probabilities and greedy tokens with ONNX Runtime's on
the same quantized weights; runs the tests that need a GPU, and the server's on a TensorRT engine; and measures decode steps, as
a share of the memory bandwidth, and prefill, in FLOP/s. Needs no network. Exit status: 0, 1 where something failed, 2 where
there is no GPU or no TensorRT to check.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from build_engines.build import BuildOptions, build
from build_engines.calibration import default_text
from build_engines.checkpoint.types import bits_per_weight
from build_engines.compile import MODULES, CompileOptions, gpu_at_hand
from build_engines.console import progress_bars
from build_engines.targets import FLOATS, Wanted, check_target
from llm_runtime.config import Parameters
from llm_runtime.executors import open_executor
from llm_runtime.executors.base import Executor, Row
from llm_runtime.manifest import BYTES, EngineManifest, Runtime, read_manifest
from llm_runtime.page_pool import PageGroup
from llm_runtime.sampler import SamplerState
from llm_runtime.types import SamplingParams

ROOT = Path(__file__).resolve().parents[1]
# (name, precision, block size); "float" is fp16, or bf16 for Gemma 3.
COMPARED = (
    ("float", None, None),
    ("int8", "int8", None),
    ("fp8", "fp8", None),
    ("int4-64", "int4", 64),
    ("int4-128", "int4", 128),
)
COMPARED += (("fp4", "fp4", None),)
TIMED = ("float", "fp8", "int4-64", "int4-128")
BATCHES = (1, 8, 32)
CONTEXT = 1024
MAX_CONTEXT = 2048  # of the engines
PREFILL = 512
TEXT_TOKENS = 192
GREEDY_TOKENS = 32
# Of 16-bit arithmetic against 32-bit on the same weights; beyond, something is wrong rather than rounded.
MAX_DIFFERENCE, MIN_AGREEMENT = 0.1, 0.93


@dataclass(frozen=True)
class Comparison:
    """Of two executors over one text: the mean difference of the log-probabilities of its tokens, and the share of positions
    where both have the same first choice; how many greedy tokens are the same before one differs."""

    mean_difference: float
    agreement: float
    same_greedy_tokens: int

    @property
    def passes(self) -> bool:
        return self.mean_difference <= MAX_DIFFERENCE and self.agreement >= MIN_AGREEMENT


@dataclass(frozen=True)
class Timing:
    """seconds: of one step, the median. bandwidth, flops: as a part of the peak, and a second."""

    what: str
    seconds: float
    tokens_per_second: float
    bandwidth: float | None = None
    flops: float | None = None


@dataclass
class Outcome:
    """What became of one precision."""

    name: str
    status: str = "passed"  # or "skipped", "failed"
    reason: str = ""
    build_seconds: float = 0.0
    comparison: Comparison | None = None
    timings: list[Timing] = field(default_factory=list)


def installed_target() -> Runtime | None:
    """tensorrt before tensorrt-rtx, where both are there."""
    return next((target for target, module in MODULES.items() if importlib.util.find_spec(module)), None)


def wanted_of(name: str, family: str, target: Runtime, capability: str) -> tuple[Wanted, int | None]:
    """What to ask the builder for, and the block size. Raises BuildError where this GPU cannot run it."""
    _, precision, block_size = next(entry for entry in COMPARED if entry[0] == name)
    if precision is None:
        precision = "bf16" if family == "gemma3" else "fp16"
    wanted = Wanted(target, precision)
    check_target(replace(wanted, capabilities=(capability,)))
    return wanted, block_size


def compare(reference: Executor, executor: Executor, ids: Sequence[int]) -> Comparison:
    """Both over the same tokens, the last of which start a greedy continuation."""
    expected, actual = (_log_probabilities(each, ids) for each in (reference, executor))
    targets = np.arange(len(ids) - 1), np.array(ids[1:])
    difference = np.abs(expected[:-1][targets] - actual[:-1][targets]).mean()
    agreement = (expected.argmax(axis=1) == actual.argmax(axis=1)).mean()
    greedy = [_greedy(each, ids[:16]) for each in (reference, executor)]
    same = next((i for i, (a, b) in enumerate(zip(*greedy, strict=True)) if a != b), GREEDY_TOKENS)
    return Comparison(float(difference), float(agreement), same)


def step_bytes(manifest: EngineManifest, batch: int, context: int) -> float:
    """What a decode step has to read: every weight but the embedding table once, and each sequence's keys and values."""
    model, precision = manifest.model, manifest.precision
    linear = _linear_weights(manifest) * _bits(precision.weights, precision.block_size, precision.effective_bits) / 8
    head = model.vocab_size * model.hidden_size * _bits(precision.lm_head, None, None) / 8
    tokens = sum(min(context, window) if window else context for window in model.layer_windows)
    cache = 2 * tokens * model.num_kv_heads * model.head_dim * BYTES[precision.kv_cache]
    return linear + head + batch * cache


def prefill_flops(manifest: EngineManifest, tokens: int) -> float:
    """Two for each weight of the linear layers and each token; one token passes the head. Attention is left out."""
    model = manifest.model
    return 2.0 * (_linear_weights(manifest) * tokens + model.vocab_size * model.hidden_size)


def time_steps(executor: Executor, manifest: EngineManifest, peak_bandwidth: float, repeats: int) -> list[Timing]:
    """Decode steps of several batches, and one prefill, each the median of `repeats`."""
    timings = []
    for batch in BATCHES:
        pages = -(-(CONTEXT + 1) // executor.page_size)
        rows = [Row([5 + i], CONTEXT, range(i * pages, (i + 1) * pages), 1) for i in range(batch)]
        seconds = _median_seconds(partial(_step, executor, rows), repeats)
        part = step_bytes(manifest, batch, CONTEXT) / seconds / peak_bandwidth
        timings.append(Timing(f"decode, batch {batch}", seconds, batch / seconds, bandwidth=part))
    ids = np.random.default_rng(0).integers(3, manifest.model.vocab_size, PREFILL).tolist()
    row = Row(ids, 0, range(num_pages_for(executor, PREFILL)), 1)
    seconds = _median_seconds(partial(_step, executor, [row]), repeats)
    flops = prefill_flops(manifest, PREFILL) / seconds
    return [*timings, Timing(f"prefill, {PREFILL} tokens", seconds, PREFILL / seconds, flops=flops)]


def num_pages(manifest: EngineManifest) -> int:
    """For the largest batch that is timed."""
    return max(BATCHES) * -(-(CONTEXT + 1) // manifest.limits.page_size)


def open_engine(folder: Path, pages: int) -> tuple[EngineManifest, Executor]:
    manifest = read_manifest(folder)
    # Activations in float32 on ONNX Runtime, so that only the weights are what the TensorRT engine has.
    parameters = Parameters(engine_dir=str(folder), matmul_accuracy="fp32")  # type: ignore[call-arg]
    return manifest, open_executor(folder, manifest, parameters, [PageGroup(pages)])


def report_table(outcomes: Sequence[Outcome]) -> Table:
    table = Table("precision", "status", "log-prob", "top-1", "greedy", "step", "ms", "tokens/s", "bandwidth", "TFLOP/s")
    for outcome in outcomes:
        found = outcome.comparison
        first = [outcome.name, outcome.status + (f": {outcome.reason}" if outcome.reason else "")]
        first += (
            [f"{found.mean_difference:.4f}", f"{found.agreement:.1%}", str(found.same_greedy_tokens)] if found else [""] * 3
        )
        for i, timing in enumerate(outcome.timings or [None]):
            cells = [""] * 5
            if timing is not None:
                cells = [timing.what, f"{timing.seconds * 1e3:.2f}", f"{timing.tokens_per_second:,.0f}"]
                cells += [
                    f"{timing.bandwidth:.0%}" if timing.bandwidth else "",
                    f"{timing.flops / 1e12:.1f}" if timing.flops else "",
                ]
            table.add_row(*(first if i == 0 else [""] * 5), *cells)
    return table


class Check:
    """One run: where things are put, what they are built from, and what is said meanwhile."""

    def __init__(self, scratch: Path, target: Runtime, capability: str, repeats: int) -> None:
        self.scratch, self.target, self.capability, self.repeats = scratch, target, capability, repeats

    def run(self, name: str, model: str, family: str, peak_bandwidth: float, *, compared: bool, timed: bool) -> Outcome:
        """One precision of one model; what goes wrong is its outcome, and the check goes on."""
        outcome = Outcome(f"{Path(model).name} {name}")
        folder = self.scratch / f"{Path(model).name}-{name}"
        try:
            wanted, block_size = wanted_of(name, family, self.target, self.capability)
        except Exception as error:
            outcome.status, outcome.reason = "skipped", _one_line(error)
            return outcome
        try:
            started = time.monotonic()
            checkpoint = self._build(model, folder, wanted, block_size, keeps=wanted.precision not in FLOATS)
            outcome.build_seconds = time.monotonic() - started
            if compared:
                self._build(checkpoint, folder.with_name(f"{folder.name}-cpu"), reference_of(wanted), None, keeps=False)
                outcome.comparison = self._compare(folder)
                if not outcome.comparison.passes:
                    outcome.status = "failed"
                    outcome.reason = f"over the bounds: log-prob {MAX_DIFFERENCE:g}, top-1 {MIN_AGREEMENT:.0%}"
            if timed:
                with opened(folder) as (manifest, executor):
                    outcome.timings = time_steps(executor, manifest, peak_bandwidth, self.repeats)
        except Exception as error:  # of the compiler, the driver, memory: each precision fails for itself
            outcome.status, outcome.reason = "failed", _one_line(error)
        return outcome

    def _build(self, model: str, output: Path, wanted: Wanted, block_size: int | None, *, keeps: bool) -> str:
        """The model that another target is to be built from: the quantized one, where that is kept."""
        kept = output.with_name(f"{output.name}-checkpoint") if keeps else None
        options = BuildOptions(
            model,
            wanted,
            block_size=block_size,
            algorithm="rtn",  # AWQ's search is minutes, and tells nothing here
            max_context=MAX_CONTEXT,
            save_checkpoint=kept,
            compiler=CompileOptions(
                max_batch=max(BATCHES), max_step_tokens=PREFILL, log=output.with_name(f"{output.name}.log")
            ),
        )
        with progress_bars() as report:
            build(options, output, lambda step, fraction: report(f"{output.name}: {step}", fraction))
        return str(kept) if kept else model

    def _compare(self, folder: Path) -> Comparison:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        ids = tokenizer.encode(default_text(), add_special_tokens=False).ids
        with opened(folder.with_name(f"{folder.name}-cpu")) as (manifest, reference), opened(folder) as (_, executor):
            bos = [] if manifest.model.bos_token_id is None else [manifest.model.bos_token_id]
            return compare(reference, executor, [*bos, *ids][:TEXT_TOKENS])


def reference_of(wanted: Wanted) -> Wanted:
    """The same weights for ONNX Runtime; one that is quantized stays as it is."""
    is_float = wanted.precision in FLOATS
    return Wanted(precision=wanted.precision if is_float else None, lm_head="auto" if is_float else "fp32")


@contextmanager
def opened(folder: Path) -> Iterator[tuple[EngineManifest, Executor]]:
    manifest, executor = open_engine(folder, num_pages(read_manifest(folder)))
    try:
        yield manifest, executor
    finally:
        executor.close()


def random_model(folder: Path, billions: float) -> Path:
    """A Llama of about so many billion random weights, in bfloat16, with a byte-level tokenizer."""
    import torch
    from tokenizers import decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM

    layers = max(1, round(billions / 0.06))
    config = LlamaConfig(
        vocab_size=32_000, hidden_size=2048, intermediate_size=8192, num_hidden_layers=layers, num_attention_heads=32,
        num_key_value_heads=8, head_dim=64, max_position_embeddings=4096, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    previous = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        LlamaForCausalLM(config).save_pretrained(folder)
    finally:
        torch.set_default_dtype(previous)
    tokenizer = Tokenizer(
        models.BPE({character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, [])
    )
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def peak_bandwidth() -> float:
    """Bytes a second that the GPU's memory reads and writes in a copy: the best of a few."""
    import torch

    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    best = min(_median_seconds(lambda: (target.copy_(source), torch.cuda.synchronize()), 5) for _ in range(3))
    return 2 * source.nbytes / best


def run_tests(arguments: Sequence[str], target: Runtime) -> str:
    """What pytest says last."""
    environment = os.environ | {"LLM_TEST_TARGET": target}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    last = (result.stdout.strip().splitlines() or [result.stderr.strip()])[-1]
    return f"{'passed' if result.returncode == 0 else 'failed'}: {last}"


def main(
    model: Annotated[str, typer.Option(help="Compared with ONNX Runtime: a folder, a GGUF file, or 'demo'.")] = "demo",
    family: Annotated[str, typer.Option(help="Of that model.")] = "gemma3",
    timed_billions: Annotated[float, typer.Option(help="Random weights of the model that is timed; 0: time --model.")] = 1.0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here too.")] = None,
    repeats: Annotated[int, typer.Option(help="Steps timed; the median counts.")] = 20,
    tests: Annotated[bool, typer.Option(help="Run the tests that need a GPU, and the server's on it.")] = True,
) -> None:
    """Check TensorRT engines on the GPU at hand."""
    console = Console()
    here, target = gpu_at_hand(), installed_target()
    if here is None or target is None:
        what = "torch sees no NVIDIA GPU" if here is None else f"neither {' nor '.join(MODULES.values())} is installed"
        console.print(f"nothing to check: {what}", soft_wrap=True)
        raise typer.Exit(2)
    capability, name = here
    started, peak = time.monotonic(), peak_bandwidth()
    conditions = _conditions(target, capability, name, peak)
    console.print(", ".join(f"{key} {value}" for key, value in conditions.items()), soft_wrap=True)
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as scratch:
        check = Check(Path(scratch), target, capability, repeats)
        for entry, _, _ in COMPARED:
            timed = not timed_billions and entry in TIMED
            outcomes.append(check.run(entry, model, family, peak, compared=True, timed=timed))
        if timed_billions:
            random = str(random_model(Path(scratch) / f"random-{timed_billions:g}b", timed_billions))
            outcomes += [check.run(entry, random, "llama", peak, compared=False, timed=True) for entry in TIMED]
    suites = {"GPU tests": ["tests/gpu"], "server tests": ["tests/test_server.py"]} if tests else {}
    results = {suite: run_tests(arguments, target) for suite, arguments in suites.items()}
    console.print(report_table(outcomes))
    for suite, result in results.items():
        console.print(f"{suite} {result}", soft_wrap=True)
    console.print(f"{time.monotonic() - started:.0f} s in all")
    if json_file is not None:
        found = {"conditions": conditions, "outcomes": [asdict(outcome) for outcome in outcomes], "tests": results}
        json_file.write_text(json.dumps(found, indent=2) + "\n")
    if any(o.status == "failed" for o in outcomes) or any(r.startswith("failed") for r in results.values()):
        raise typer.Exit(1)


def _conditions(target: Runtime, capability: str, name: str, peak: float) -> dict[str, str]:
    import torch

    module = importlib.import_module(MODULES[target])
    return {
        "GPU": name,
        "compute capability": capability,
        target: module.__version__,
        "torch": torch.__version__,
        "CUDA": str(torch.version.cuda),
        "Python": platform.python_version(),
        "memory bandwidth (copy)": f"{peak / 1e9:,.0f} GB/s",
        "context": f"{CONTEXT} tokens",
    }


def _linear_weights(manifest: EngineManifest) -> int:
    model = manifest.model
    query, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    layer = model.hidden_size * (2 * query + 2 * kv) + 3 * model.hidden_size * model.intermediate_size
    return model.num_layers * layer


def _bits(kind: str, block_size: int | None, effective_bits: float | None) -> float:
    if effective_bits is not None:
        return effective_bits
    return 8.0 * BYTES[kind] if kind in FLOATS else bits_per_weight(kind, block_size or 128)


def _step(executor: Executor, rows: Sequence[Row]) -> None:
    """As the engine makes it: tokens are chosen where the executor chooses them."""
    states = [SamplerState(SamplingParams(), [], []) for _ in rows]
    executor.sample(rows, states, [row.token_ids for row in rows])


def _log_probabilities(executor: Executor, ids: Sequence[int]) -> np.ndarray:
    """float64 [tokens, vocab], four tokens of logits at a time, which every plan can return."""
    parts = []
    for start in range(0, len(ids), 4):
        chunk = list(ids[start : start + 4])
        logits = executor.execute([Row(chunk, start, range(num_pages_for(executor, len(ids))), len(chunk))]).astype(np.float64)
        shifted = logits - logits.max(axis=1, keepdims=True)
        parts.append(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))
    return np.concatenate(parts)


def num_pages_for(executor: Executor, tokens: int) -> int:
    return -(-tokens // executor.page_size)


def _greedy(executor: Executor, prompt: Sequence[int]) -> list[int]:
    pages = range(num_pages_for(executor, len(prompt) + GREEDY_TOKENS))
    tokens, past, new = [], 0, list(prompt)
    while len(tokens) < GREEDY_TOKENS:
        logits = executor.execute([Row(new, past, pages, 1)])
        past, new = past + len(new), [int(logits[0].argmax())]
        tokens += new
    return tokens


def _median_seconds(step: Callable[[], Any], repeats: int) -> float:
    step()
    step()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return float(np.median(times))


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


if __name__ == "__main__":
    typer.run(main)
