"""The smallest engine that is good enough: from the heaviest quantization up, the first that keeps within a bound on perplexity
(docs/quality.md)."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from build_engines import calibration
from build_engines.build import (
    BuildOptions,
    Report,
    Say,
    check_context,
    check_output,
    is_quantized,
    known_target,
    open_model,
    place,
    quantize_checkpoint,
    recipe_for,
    write,
)
from build_engines.card import size_bytes
from build_engines.checkpoint.hf import HfCheckpoint
from build_engines.checkpoint.types import DecoderConfig, bits_per_weight
from build_engines.errors import BuildError
from build_engines.evaluate import (
    WINDOW,
    Conditions,
    Subject,
    measure,
    open_subject,
    quality,
    runs_here,
    write_quality,
)
from build_engines.quantize import BLOCK_SIZES, Recipe, check_recipe
from build_engines.targets import FLOATS, Resolved, Wanted, check_target, resolve
from llm_runtime.errors import EngineError
from llm_runtime.manifest import BYTES

KEPT = "kept"
KNOWN = "int4-128, int4-64, fp4, mixed-BITS (mixed-5), fp8, int8, fp16, bf16, fp32"
DEFAULT_CANDIDATES = ("int4-128", "int4-64", "fp4", "mixed-5", "mixed-6", "fp8", "int8")  # and the target's float after them


@dataclass(frozen=True)
class Candidate:
    """bits: a weight of the decoder's linear layers takes, its share of the scales included."""

    name: str
    precision: str
    bits: float
    block_size: int | None = None
    effective_bits: float | None = None


@dataclass(frozen=True)
class Try:
    """What became of a candidate. increase: of perplexity over the unquantized model's, as a fraction. bytes: of the engine
    that was measured."""

    candidate: Candidate
    verdict: str
    perplexity: float | None = None
    increase: float | None = None
    bytes: int | None = None


@dataclass(frozen=True)
class Selection:
    """`tries` in the order of bits; `kept` is one of them, or None."""

    reference_perplexity: float | None
    tries: list[Try]
    kept: Try | None


@dataclass(frozen=True)
class _Planned:
    candidate: Candidate
    options: BuildOptions
    resolved: Resolved
    recipe: Recipe | None


def parse_percent(text: str) -> float:
    """The fraction that "3%", "3 %", "3" or "0.5%" names: all are percent. Raises BuildError for anything else."""
    match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*%?\s*", text, re.ASCII)
    if match is None:
        raise BuildError(f"--max-perplexity-increase {text!r}: not a percentage of 0 or more, such as 3% or 0.5%")
    return float(match[1]) / 100


def parse_candidate(name: str) -> Candidate:
    """Raises BuildError for an unknown name."""
    if name in FLOATS:
        return Candidate(name, name, 8.0 * BYTES[name])
    if name in ("fp4", "fp8", "int8"):
        return Candidate(name, name, bits_per_weight(name, None))
    kind, _, number = name.partition("-")
    if kind == "int4" and number in map(str, BLOCK_SIZES):
        return Candidate(name, kind, bits_per_weight(kind, int(number)), block_size=int(number))
    if kind == "mixed" and re.fullmatch(r"\d+(\.\d+)?", number, re.ASCII):
        return Candidate(name, kind, float(number), effective_bits=float(number))
    raise BuildError(f"--candidates {name}: unknown; known are {KNOWN}")


def select(
    options: BuildOptions,
    names: Sequence[str] | None,
    max_increase: float,
    conditions: Conditions,
    output: Path,
    report: Report,
    say: Say,
) -> Selection:
    """Builds candidates for `options.wanted`'s target in the order of their bits, and keeps the first whose perplexity is at
    most (1 + max_increase) of the unquantized model's, in `output`, with its quality in engine.json.

    `names` of candidates; None: DEFAULT_CANDIDATES and the float type that the target uses. What of `options` a candidate
    decides (precision, block size, effective bits) does not count. Raises BuildError, before any work, where nothing can be
    selected at all.
    """
    check_output(output)
    wanted = known_target(options.wanted)
    chosen = None if names is None else [parse_candidate(name) for name in dict.fromkeys(names)]
    if options.max_context and options.max_context < WINDOW:
        raise BuildError(f"--max-context {options.max_context}: a window of the held-out text has {WINDOW} tokens")
    text = calibration.read_text(options.calibration) if options.calibration else None
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}-") as folder:
        scratch = Path(folder)
        checkpoint = open_model(options, scratch, report, say)
        if is_quantized(checkpoint):
            raise BuildError(f"{options.model}: a checkpoint quantized already leaves nothing to select; use build")
        check_context(options, checkpoint)
        tokenizer, bos = checkpoint.folder / "tokenizer.json", checkpoint.config.bos_token_id
        conditions.text.windows(tokenizer, bos, conditions.num_windows, conditions.skip_windows)
        tries, plan = _plan(options, wanted, checkpoint.config, chosen)
        if not plan:
            return Selection(None, tries, None)
        is_here = runs_here(wanted.target, wanted.capabilities)
        if not is_here:
            # Layers that round no inputs compute in floats there.
            conditions = replace(conditions, matmul_accuracy="fp32")
            say(
                f"Engines for {wanted.target} cannot run here: candidates are measured as ONNX Runtime engines of the same"
                f" quantized weights; the first that passes is compiled for compute capability {', '.join(wanted.capabilities)}"
            )
        trial = _Trial(checkpoint, conditions, is_here, max_increase, text, scratch, report)
        reference = trial.reference(options)
        reference_perplexity = trial.perplexity(reference, "Reference")
        tries += trial.run(plan, reference, reference_perplexity, output)
    tries.sort(key=lambda tried: tried.candidate.bits)
    return Selection(reference_perplexity, tries, next((tried for tried in tries if tried.verdict == KEPT), None))


def _plan(
    options: BuildOptions, wanted: Wanted, config: DecoderConfig, chosen: Sequence[Candidate] | None
) -> tuple[list[Try], list[_Planned]]:
    """Those that target or model rule out, with the reason; and what can be tried, the fewest bits first.

    `wanted`: that of the options, with the compute capabilities known.
    """
    if chosen is None:
        float_type = resolve(replace(wanted, precision="int8"), config.family).numerics.floats
        chosen = [parse_candidate(name) for name in (*DEFAULT_CANDIDATES, float_type)]
    skipped: list[Try] = []
    plan: list[_Planned] = []
    for candidate in sorted(chosen, key=lambda candidate: candidate.bits):
        own = replace(wanted, precision=candidate.precision)
        its = replace(
            options,
            wanted=replace(options.wanted, precision=candidate.precision),
            block_size=candidate.block_size,
            effective_bits=candidate.effective_bits,
        )
        try:
            check_target(own)
            resolved = resolve(own, config.family)
            recipe = recipe_for(its, own, resolved)
            if recipe is not None:
                check_recipe(config, recipe)
        except BuildError as error:
            skipped.append(Try(candidate, f"skipped: {error}"))
            continue
        plan.append(_Planned(candidate, its, resolved, recipe))
    return skipped, plan


@dataclass(frozen=True)
class _Trial:
    """What all candidates share."""

    checkpoint: HfCheckpoint
    conditions: Conditions
    is_here: bool  # whether engines for the target can be run on this machine
    max_increase: float
    calibration_text: str | None
    scratch: Path
    report: Report

    def reference(self, options: BuildOptions) -> Subject:
        resolved = resolve(Wanted(precision="fp32"), self.checkpoint.config.family)
        folder = self.scratch / "reference"
        write(options, self.checkpoint, resolved, folder, self._steps("Reference"))
        return open_subject(folder, self.conditions)

    def perplexity(self, subject: Subject, name: str) -> float:
        (scores,) = measure([subject], None, self.conditions, partial(self._steps(name), "Measuring"))
        return scores.perplexity

    def run(self, plan: Sequence[_Planned], reference: Subject, reference_perplexity: float, output: Path) -> list[Try]:
        """Tries one after another until one passes, which is then in `output`."""
        tries: list[Try] = []
        for index, planned in enumerate(plan):
            folder = self.scratch / planned.candidate.name
            folder.mkdir()
            tried = self._one(planned, folder, reference, reference_perplexity, output)
            shutil.rmtree(folder)
            tries.append(tried)
            if tried.verdict == KEPT:
                return tries + [Try(other.candidate, "not needed") for other in plan[index + 1 :]]
        return tries

    def _one(self, planned: _Planned, folder: Path, reference: Subject, reference_perplexity: float, output: Path) -> Try:
        name, report = planned.candidate.name, self._steps(planned.candidate.name)
        tried = Try(planned.candidate, "")
        try:
            made = self.checkpoint
            if planned.recipe is not None:
                made = quantize_checkpoint(planned.options, made, planned.recipe, folder, self.calibration_text, report)
            subject = self._measurable(planned, made, folder / "measured", report)
            perplexity = self.perplexity(subject, name)
            increase = perplexity / reference_perplexity - 1
            tried = replace(tried, perplexity=perplexity, increase=increase, bytes=size_bytes(subject.folder, subject.manifest))
            if increase > self.max_increase:
                return replace(tried, verdict=f"failed: more than {100 * self.max_increase:g}%")
            engine = subject.folder
            if not self.is_here:
                engine = folder / "engine"
                write(planned.options, made, planned.resolved, engine, report)
            (scores,) = measure([subject], reference, self.conditions, partial(report, "Comparing"))
            write_quality(engine, quality(scores, subject.manifest, self.conditions))
        except (BuildError, EngineError) as error:
            return replace(tried, verdict=f"failed: {error}")
        place(engine, output)
        return replace(tried, verdict=KEPT)

    def _measurable(self, planned: _Planned, made: HfCheckpoint, folder: Path, report: Report) -> Subject:
        """The engine for the target where that runs here; else one for ONNX Runtime that differs from it only in arithmetic."""
        resolved = planned.resolved
        if not self.is_here:
            resolved = resolve(Wanted(precision=planned.candidate.precision), made.config.family)
            resolved = replace(resolved, lm_head=resolved.numerics.floats)
        write(planned.options, made, resolved, folder, report)
        return open_subject(folder, self.conditions)

    def _steps(self, name: str) -> Report:
        return lambda step, fraction: self.report(f"{name}: {step}", fraction)
