"""How good an engine is on held-out text: perplexity, and how close it stays to the unquantized model (docs/quality.md).

The one module of the builder that runs engines, hence the only one that imports the runtime's executors.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from build_engines import calibration
from build_engines.build import BuildOptions, Report, Say, build
from build_engines.compile import gpu_at_hand
from build_engines.errors import BuildError
from build_engines.targets import Wanted
from llm_runtime.errors import ConfigError
from llm_runtime.executors.base import Executor, Row
from llm_runtime.manifest import (
    MANIFEST_NAME,
    EngineManifest,
    Quality,
    Runtime,
    check_files,
    read_manifest,
    sha256_file,
    write_manifest,
)

WINDOW = 512
NUM_WINDOWS = 8
CHUNK = 128  # tokens whose logits are held at a time: a vocabulary of 262,144 makes each a megabyte

MatmulAccuracy = Literal["int8", "fp32"]
PageChoice = Literal["auto", "int8", "fp8"]


class HeldOut:
    """A text that no quantization has looked at, cut into windows: BOS where the model has one, then WINDOW tokens."""

    def __init__(self, path: Path, calibrated_on: Path | None = None) -> None:
        """`calibrated_on`: None stands for the built-in calibration text. Raises BuildError for a text that cannot be read as
        UTF-8, and for the calibration text itself."""
        self.name = path.name
        try:
            self._text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise BuildError(f"--text {path}: cannot be read as UTF-8 ({error})") from error
        self.sha256 = sha256_file(path)
        if self.sha256 in _calibration_hashes(calibrated_on):
            which = calibrated_on or "built in"
            raise BuildError(
                f"--text {path}: it is the calibration text ({which}), which the weights were fitted to; use another"
            )
        self._ids: dict[str, list[int]] = {}

    def windows(self, tokenizer: Path, bos: int | None, num_windows: int, skip: int) -> list[list[int]]:
        """The first `num_windows` windows after the first `skip`. Raises BuildError where the text has fewer."""
        from tokenizers import Tokenizer

        key = sha256_file(tokenizer)
        if key not in self._ids:
            self._ids[key] = Tokenizer.from_file(str(tokenizer)).encode(self._text, add_special_tokens=False).ids
        ids, wanted = self._ids[key], num_windows + skip
        if len(ids) < wanted * WINDOW:
            after = f" and --skip-windows {skip}" if skip else ""
            raise BuildError(
                f"--windows {num_windows}{after}: {self.name} has {len(ids):,} tokens, enough for {len(ids) // WINDOW}"
                f" windows of {WINDOW}"
            )
        first = [] if bos is None else [bos]
        return [first + ids[i * WINDOW : (i + 1) * WINDOW] for i in range(skip, wanted)]


@dataclass(frozen=True)
class Conditions:
    """`matmul_accuracy` is of ONNX Runtime engines, as in config.pbtxt. num_threads 0: one a core."""

    text: HeldOut
    num_windows: int = NUM_WINDOWS
    skip_windows: int = 0
    matmul_accuracy: MatmulAccuracy = "int8"
    num_threads: int = 0
    kv_cache_dtype: PageChoice = "auto"  # of the engines, not of what they are compared with


@dataclass(frozen=True)
class Subject:
    """An engine that can be measured here, and the tokens that it is measured on."""

    folder: Path
    manifest: EngineManifest
    windows: list[list[int]] = field(repr=False)

    @property
    def what_runs(self) -> tuple[Path, str]:
        """Subjects of which this is the same are one."""
        return self.folder, self.manifest.precision.kv_cache


@dataclass(frozen=True)
class Scores:
    """The last three are None without a reference; `kl_divergence` is KL(reference || engine) in nats a token."""

    num_tokens: int
    perplexity: float
    reference_perplexity: float | None = None
    top1_agreement: float | None = None
    kl_divergence: float | None = None


@dataclass(frozen=True)
class Evaluated:
    """`reference`: the engine folder or the model compared with; None: nothing."""

    subject: Subject
    scores: Scores
    reference: str | None


def evaluate(
    folders: Sequence[Path], conditions: Conditions, reference: str | None, report: Report, say: Say
) -> list[Evaluated]:
    """Measures engines, those with one reference in one pass. `reference`: an unquantized engine's folder, or a model.

    None: an unquantized engine of the same model among `folders`, or one that is built for the purpose from the model that
    engine.json names; where that cannot be opened, `say` is told and only perplexity is measured. Raises BuildError or
    EngineError for an engine, or a reference, that cannot be measured.
    """
    subjects = [open_subject(folder, conditions) for folder in folders]
    groups: dict[tuple[str, str | None], list[Subject]] = {}
    for subject in subjects:
        source = subject.manifest.source
        groups.setdefault(("", None) if reference else (source.model, source.revision), []).append(subject)
    found: dict[Path, Evaluated] = {}
    for group in groups.values():
        with tempfile.TemporaryDirectory(prefix="reference-") as scratch:
            name, compared = _reference(group, reference, Path(scratch), conditions, report, say)
            step = "Measuring" if len(groups) == 1 else f"Measuring {group[0].manifest.name}"
            all_scores = measure(group, compared, conditions, partial(report, step))
        found |= {s.folder: Evaluated(s, scores, name) for s, scores in zip(group, all_scores, strict=True)}
    return [found[subject.folder] for subject in subjects]


def open_subject(folder: Path, conditions: Conditions) -> Subject:
    """Raises BuildError or EngineError where the engine is damaged, cannot run here, or is made for less than a window."""
    manifest = read_manifest(folder)
    capabilities = manifest.plan.compute_capabilities if manifest.plan else ()
    if not runs_here(manifest.runtime, capabilities):
        raise BuildError(
            f"{folder}: made for {manifest.runtime} on compute capability {', '.join(capabilities)}, which no GPU here has"
        )
    if manifest.limits.max_context < WINDOW:
        raise BuildError(f"{folder}: made for up to {manifest.limits.max_context} tokens; a window has {WINDOW}")
    check_files(folder, manifest)
    manifest = _with_pages(folder, manifest, conditions)
    bos = manifest.model.bos_token_id
    windows = conditions.text.windows(folder / "tokenizer.json", bos, conditions.num_windows, conditions.skip_windows)
    return Subject(folder, manifest, windows)


def measure(
    subjects: Sequence[Subject], reference: Subject | None, conditions: Conditions, progress: Callable[[float], None]
) -> list[Scores]:
    """Runs all side by side over the same tokens, a chunk at a time, so that no more than a chunk's logits are ever held.

    The first token of a window is not scored. Raises BuildError where the subjects differ in tokens or vocabulary, or where
    logits are not finite; EngineError where one cannot be loaded.
    """
    everyone = [*subjects, *([reference] if reference else [])]
    for other in everyone[1:]:
        if other.windows != everyone[0].windows or other.manifest.model.vocab_size != everyone[0].manifest.model.vocab_size:
            raise BuildError(f"{other.folder}: not the tokens or vocabulary of {everyone[0].folder}, with which it is compared")
    windows, chunk = everyone[0].windows, min(_chunk(subject.manifest) for subject in everyone)
    sums = [_Sums() for _ in subjects]
    with ExitStack() as stack:
        executors: dict[tuple[Path, str], Executor] = {}
        for subject in everyone:
            if subject.what_runs not in executors:
                executors[subject.what_runs] = _open(subject, conditions)
                stack.callback(executors[subject.what_runs].close)
        progress(0.0)
        for done, ids in enumerate(windows):
            for start in range(0, len(ids) - 1, chunk):
                tokens = ids[start : min(start + chunk, len(ids) - 1)]
                targets = np.array(ids[start + 1 : start + 1 + len(tokens)])
                expected = _Predictions(executors[reference.what_runs], tokens, start) if reference else None
                for subject, subject_sums in zip(subjects, sums, strict=True):
                    is_reference = reference is not None and subject.what_runs == reference.what_runs
                    own = None if is_reference else _Predictions(executors[subject.what_runs], tokens, start)
                    subject_sums.add(own or expected, expected, targets)  # type: ignore[arg-type]
                progress((done + (start + len(tokens)) / len(ids)) / len(windows))
    progress(1.0)
    return [subject_sums.scores(subject.folder) for subject, subject_sums in zip(subjects, sums, strict=True)]


class _Predictions:
    """What a model says of the tokens after each of a chunk: float32 [tokens, vocab], softmax = weights / totals."""

    def __init__(self, executor: Executor, tokens: list[int], past: int) -> None:
        self.logits: NDArray[np.float32] = executor.execute(
            [Row(tokens, past, range(executor.page_groups[0].num_pages), len(tokens))]
        )
        top = self.logits.max(axis=1)
        self.weights: NDArray[np.float32] = np.exp(self.logits - top[:, None])
        self.totals: NDArray[np.float64] = self.weights.sum(axis=1, dtype=np.float64)
        self.log_totals = top + np.log(self.totals)


class _Sums:
    """Over the tokens so far."""

    def __init__(self) -> None:
        self._num_tokens = self._agreed = 0
        self._loss = self._reference_loss = self._divergence = 0.0
        self._has_reference = False

    def add(self, own: _Predictions, reference: _Predictions | None, targets: NDArray[np.int64]) -> None:
        """targets: int64 [tokens], what came next."""
        at = np.arange(len(targets)), targets
        self._num_tokens += len(targets)
        self._loss += float((own.log_totals - own.logits[at]).sum())
        if reference is None:
            return
        self._has_reference = True
        self._reference_loss += float((reference.log_totals - reference.logits[at]).sum())
        self._agreed += int((own.logits.argmax(axis=1) == reference.logits.argmax(axis=1)).sum())
        # log p - log q = (logits of p - its log total) - (logits of q - its log total), averaged under p.
        difference = reference.logits - own.logits
        difference *= reference.weights
        mean = difference.sum(axis=1, dtype=np.float64) / reference.totals
        self._divergence += float((mean - (reference.log_totals - own.log_totals)).sum())

    def scores(self, folder: Path) -> Scores:
        if not np.isfinite(self._loss):
            raise BuildError(f"{folder}: its logits are not finite; it cannot be measured")
        perplexity = float(np.exp(self._loss / self._num_tokens))
        if not self._has_reference:
            return Scores(self._num_tokens, perplexity)
        return Scores(
            self._num_tokens,
            perplexity,
            float(np.exp(self._reference_loss / self._num_tokens)),
            self._agreed / self._num_tokens,
            max(0.0, self._divergence / self._num_tokens),  # of rounding alone it may be -1e-9
        )


def quality(scores: Scores, measured: EngineManifest, conditions: Conditions) -> Quality:
    """What engine.json says of it; `measured` is what ran."""
    return Quality(
        text=conditions.text.name,
        sha256=conditions.text.sha256,
        window=WINDOW,
        skip_windows=conditions.skip_windows,
        runtime=measured.runtime,
        matmul_accuracy=conditions.matmul_accuracy if measured.runtime == "onnxruntime" else None,
        kv_cache=measured.precision.kv_cache,
        **vars(scores),
    )


def write_quality(folder: Path, figures: Quality) -> None:
    """Into the folder's engine.json. Raises BuildError where that cannot be written."""
    try:
        write_manifest(folder, read_manifest(folder).model_copy(update={"quality": figures}))
    except OSError as error:
        raise BuildError(f"{folder / MANIFEST_NAME}: cannot be written ({error.strerror})") from error


def runs_here(runtime: Runtime, capabilities: Sequence[str]) -> bool:
    """Whether this machine runs engines for `runtime`, and these compute capabilities where that is TensorRT."""
    if runtime == "onnxruntime":
        return True
    here = gpu_at_hand()
    return here is not None and here[0] in capabilities


def _open(subject: Subject, conditions: Conditions) -> Executor:
    """With the pages of one window."""
    try:
        from llm_runtime.config import Parameters
        from llm_runtime.executors import open_executor
        from llm_runtime.page_pool import PageGroup
    except ImportError as error:
        raise BuildError(f"{subject.folder}: cannot be run here: {error}; pip install onnxruntime") from error
    parameters = Parameters(
        engine_dir=str(subject.folder), matmul_accuracy=conditions.matmul_accuracy, num_threads=conditions.num_threads
    )  # type: ignore[call-arg, arg-type]
    groups = [PageGroup(-(-WINDOW // subject.manifest.limits.page_size))]
    return open_executor(subject.folder, subject.manifest, parameters, groups)


def _with_pages(folder: Path, manifest: EngineManifest, conditions: Conditions) -> EngineManifest:
    from llm_runtime.config import Parameters, with_chosen_cache

    if conditions.kv_cache_dtype == "auto":
        return manifest
    try:
        parameters = Parameters(engine_dir=str(folder), kv_cache_dtype=conditions.kv_cache_dtype)  # type: ignore[call-arg]
        return with_chosen_cache(parameters, manifest)
    except ConfigError as error:
        raise BuildError(f"--kv-cache-dtype: {folder}: {str(error).removeprefix('config.pbtxt: ')}") from error


def _chunk(manifest: EngineManifest) -> int:
    """Tokens whose logits one call may return."""
    largest = manifest.plan and manifest.plan.prefill
    return min(CHUNK, largest.max_logits, largest.max_row_tokens) if largest else CHUNK


def _calibration_hashes(path: Path | None) -> set[str]:
    """sha256 of a calibration text's file; of the built-in one with its header and without."""
    if path is not None:
        calibration.read_text(path)  # refuses what cannot be read
        return {sha256_file(path)}
    whole = files("build_engines").joinpath("data").joinpath("calibration.txt").read_bytes()
    return {hashlib.sha256(whole).hexdigest(), hashlib.sha256(calibration.default_text().encode()).hexdigest()}


def _reference(
    group: Sequence[Subject], wanted: str | None, scratch: Path, conditions: Conditions, report: Report, say: Say
) -> tuple[str | None, Subject | None]:
    """What to compare with, by its name and opened; (None, None): nothing."""
    conditions = replace(conditions, kv_cache_dtype="auto")
    if wanted is not None and (Path(wanted) / MANIFEST_NAME).is_file():
        subject = open_subject(Path(wanted), conditions)
        if not _is_unquantized(subject.manifest):
            weights = subject.manifest.precision.weights
            head = subject.manifest.precision.lm_head
            raise BuildError(f"--reference {wanted}: {weights} weights and an {head} head; a reference has fp32 for both")
        return wanted, subject
    if wanted is not None:
        return wanted, _built_reference(wanted, None, scratch, conditions, report)
    for subject in group:
        if _is_unquantized(subject.manifest):
            return str(subject.folder), replace(subject, manifest=read_manifest(subject.folder))
    source = group[0].manifest.source
    names = ", ".join(str(subject.folder) for subject in group)
    if source.format == "modelopt":
        say(f"{names}: only perplexity, since {source.model} is quantized itself; name the original with --reference")
        return None, None
    say(f"{names}: compared with {source.model} in fp32, built for it now; --reference DIR names an engine that is there")
    try:
        return source.model, _built_reference(source.model, source.revision, scratch, conditions, report)
    except BuildError as error:
        say(f"{names}: only perplexity, since there is no reference: {error}")
        return None, None


def _built_reference(model: str, revision: str | None, scratch: Path, conditions: Conditions, report: Report) -> Subject:
    options = BuildOptions(model=model, revision=revision, wanted=Wanted(precision="fp32"))
    build(options, scratch / "engine", lambda step, fraction: report(f"Reference: {step}", fraction))
    return open_subject(scratch / "engine", conditions)


def _is_unquantized(manifest: EngineManifest) -> bool:
    return manifest.precision.weights == manifest.precision.lm_head == "fp32"
