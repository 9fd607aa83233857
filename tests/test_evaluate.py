"""`evaluate` against transformers on the same windows; `select` keeps the first that is good enough, and says why no other."""

from __future__ import annotations

import functools
import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from build_engines import calibration
from build_engines.build import BuildOptions, build
from build_engines.cli import app
from build_engines.evaluate import CHUNK, WINDOW, Conditions, Evaluated, HeldOut, evaluate
from build_engines.select import parse_candidate, parse_percent
from build_engines.targets import Wanted
from llm_runtime.errors import EngineError
from llm_runtime.executors.ort import OrtExecutor
from llm_runtime.manifest import check_files, read_manifest, sha256_file
from tests.building import one_thread, refused  # noqa: F401 - one_thread acts by being here
from tests.engines import PAGE_SIZE, RECIPES, EngineShelf, dequantized_model, load_executor, reference_logprobs, reference_model
from tests.tiny_models import BOS, make_tiny_model

WORDS = ["one", "small", "model", "reads", "text", "and", "says", "again", "what", "it", "has", "seen", "17", "times"]
CALIBRATION = Path(calibration.__file__).parent / "data" / "calibration.txt"


def some_text(seed: int, num_words: int = 900) -> str:
    """Words mostly in their order above, so that there is something to learn, with jumps, so that no two texts are alike."""
    generator, at, words = random.Random(seed), 0, []
    for _ in range(num_words):
        at = generator.randrange(len(WORDS)) if generator.random() < 0.1 else (at + 1) % len(WORDS)
        words.append(WORDS[at])
    return " ".join(words) + "\n"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "held-out.txt"
    path.write_text(some_text(1))
    return path


@functools.cache
def tokens(checkpoint: Path, text: Path) -> list[int]:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(checkpoint)(text.read_text(), add_special_tokens=False)["input_ids"]


def conditions(text: Path, num_windows: int = 2, skip: int = 0) -> Conditions:
    """With activations in float32, so that only the weights' precision differs from a reference."""
    return Conditions(HeldOut(text), num_windows, skip, matmul_accuracy="fp32", num_threads=1)


def measured(folder: Path, text: Path, reference: Path | str | None = None, **options: int) -> tuple[Evaluated, list[str]]:
    """The result, and what was said."""
    said: list[str] = []
    where = None if reference is None else str(reference)
    (result,) = evaluate([folder], conditions(text, **options), where, lambda step, fraction: None, said.append)
    return result, said


def copy(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to))


def edited(folder: Path, *path: str, value: Any) -> Path:
    """The engine folder, with another value in engine.json."""
    content = json.loads((folder / "engine.json").read_text())
    parent = content
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = value
    (folder / "engine.json").write_text(json.dumps(content))
    return folder


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "250"})


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_the_figures_are_those_of_transformers(shelf: EngineShelf, text: Path, family: str) -> None:
    result, _ = measured(shelf.engine(family, "int4", 64), text, shelf.engine(family), skip=1)
    original = reference_model(shelf.checkpoint(family))
    quantized = dequantized_model(shelf.checkpoint(family), shelf.quantized(family, RECIPES["int4-64-rtn"]))
    losses, expected_losses, agreed, divergence = [], [], [], []
    for index in (1, 2):
        window = [BOS, *tokens(shelf.checkpoint(family), text)[index * WINDOW : (index + 1) * WINDOW]]
        p, q = (reference_logprobs(model, window[:-1]).astype(np.float64) for model in (original, quantized))
        at = np.arange(WINDOW), np.array(window[1:])
        losses.append(-q[at])
        expected_losses.append(-p[at])
        agreed.append(p.argmax(axis=1) == q.argmax(axis=1))
        divergence.append((np.exp(p) * (p - q)).sum(axis=1))
    scores = result.scores
    assert scores.num_tokens == 2 * WINDOW
    assert scores.perplexity == pytest.approx(np.exp(np.mean(losses)), rel=1e-4)
    assert scores.reference_perplexity == pytest.approx(np.exp(np.mean(expected_losses)), rel=1e-4)
    assert scores.top1_agreement == pytest.approx(np.mean(agreed), abs=2 / 1024)  # near-ties may fall either way
    assert scores.kl_divergence == pytest.approx(np.mean(divergence), rel=1e-3)
    assert 0 < scores.top1_agreement < 1  # type: ignore[operator]


def test_an_engine_against_itself(shelf: EngineShelf, text: Path, tmp_path: Path) -> None:
    folder = shelf.engine("llama")
    for reference in (folder, copy(folder, tmp_path / "copy")):  # one executor, and two
        scores = measured(folder, text, reference)[0].scores
        assert scores.top1_agreement == 1.0
        assert scores.kl_divergence == 0.0
        assert scores.perplexity == scores.reference_perplexity


def test_quantized_pages_are_measured_against_the_engine_with_its_own(shelf: EngineShelf, text: Path, tmp_path: Path) -> None:
    folder = copy(shelf.engine("llama"), tmp_path / "engine")
    result = run("evaluate", folder, "--text", text, "--windows", 1, "--kv-cache-dtype", "fp8", "--threads", 1)
    assert result.exit_code == 0, result.output
    figures = read_manifest(folder).quality
    assert figures is not None
    assert figures.kv_cache == "fp8"
    window = [BOS, *tokens(shelf.checkpoint("llama"), text)[:WINDOW]]
    expected = reference_logprobs(reference_model(shelf.checkpoint("llama")), window[:-1], "fp8").astype(np.float64)
    loss = -expected[np.arange(WINDOW), np.array(window[1:])].mean()
    assert figures.perplexity == pytest.approx(np.exp(loss), rel=1e-3)
    assert 0 < figures.kl_divergence < 0.01  # type: ignore[operator]


def test_never_more_than_a_chunk_of_logits(shelf: EngineShelf, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    num_logits: list[int] = []
    execute = OrtExecutor.execute

    def watched(self: OrtExecutor, rows: Any) -> Any:
        logits = execute(self, rows)
        num_logits.append(len(logits))
        return logits

    monkeypatch.setattr(OrtExecutor, "execute", watched)
    measured(shelf.engine("llama"), text, num_windows=1)
    assert num_logits == [CHUNK] * (WINDOW // CHUNK)


def test_windows_of_a_model_without_bos(shelf: EngineShelf, text: Path) -> None:
    checkpoint = shelf.checkpoint("llama")
    ids = tokens(checkpoint, text)
    windows = HeldOut(text).windows(checkpoint / "tokenizer.json", None, 2, 1)
    assert windows == [ids[WINDOW : 2 * WINDOW], ids[2 * WINDOW : 3 * WINDOW]]


class TestReference:
    def test_built_from_the_model_that_the_engine_is_of(self, shelf: EngineShelf, text: Path) -> None:
        folder = shelf.engine("llama", "int4", 64)
        built, said = measured(folder, text)
        assert built.reference == str(shelf.checkpoint("llama"))
        assert "built for it now" in said[0]
        assert built.scores == measured(folder, text, shelf.engine("llama"))[0].scores
        assert built.scores == measured(folder, text, shelf.checkpoint("llama"))[0].scores

    def test_an_unquantized_engine_beside_it(self, shelf: EngineShelf, text: Path) -> None:
        folders = [shelf.engine("llama", "int4", 64), shelf.engine("llama"), shelf.engine("gemma3")]
        said: list[str] = []
        results = evaluate(folders, conditions(text), None, lambda step, fraction: None, said.append)
        assert [result.subject.folder for result in results] == folders
        assert [result.reference for result in results] == [str(folders[1]), str(folders[1]), str(folders[2])]
        assert not said
        assert results[0].scores == measured(folders[0], text, folders[1])[0].scores
        assert [result.scores.kl_divergence for result in results[1:]] == [0.0, 0.0]

    def test_without_one_only_perplexity(self, shelf: EngineShelf, text: Path, tmp_path: Path) -> None:
        folder = copy(shelf.engine("llama", "int4", 64), tmp_path / "engine")
        with_reference, _ = measured(folder, text)
        alone, said = measured(edited(folder, "source", "model", value=str(tmp_path / "gone")), text)
        assert "only perplexity" in said[-1]
        assert "gone" in said[-1]
        assert alone.scores.perplexity == with_reference.scores.perplexity
        assert alone.reference is alone.scores.reference_perplexity is alone.scores.kl_divergence is None

    def test_a_quantized_checkpoint_is_none(self, shelf: EngineShelf, text: Path, tmp_path: Path) -> None:
        checkpoint = shelf.quantized("llama", RECIPES["int4-64-rtn"]).folder
        build(BuildOptions(str(checkpoint), page_size=PAGE_SIZE), tmp_path / "engine", lambda step, fraction: None)
        result, said = measured(tmp_path / "engine", text)
        assert result.reference is None
        assert said == [
            f"{tmp_path / 'engine'}: only perplexity, since {checkpoint} is quantized itself; name the original with"
            " --reference"
        ]


class TestEvaluateCommand:
    def test_figures_go_to_json_and_into_engine_json(self, shelf: EngineShelf, text: Path, tmp_path: Path) -> None:
        folder = copy(shelf.engine("llama", "int4", 64), tmp_path / "engine")
        before = read_manifest(folder)
        reference, file = shelf.engine("llama"), tmp_path / "figures.json"
        result = run("evaluate", folder, "--text", text, "--windows", 2, "--reference", reference, "--json", file)
        assert result.exit_code == 0, result.output
        content = json.loads(file.read_text())
        (engine,) = content["engines"]
        assert content["text"] == "held-out.txt"
        assert content["sha256"] == sha256_file(text)
        assert (content["windows"], content["window"], content["skip_windows"]) == (2, WINDOW, 0)
        assert content["matmul_accuracy"] == "int8"
        assert {"onnxruntime", "tokenizers", "numpy"} <= content["versions"].keys()
        assert engine["reference"] == str(reference)
        assert engine["num_tokens"] == 2 * WINDOW

        after = read_manifest(folder)
        check_files(folder, after)
        assert after.model_copy(update={"quality": None}) == before
        quality = after.quality
        assert quality is not None
        assert (quality.text, quality.sha256, quality.window) == ("held-out.txt", sha256_file(text), WINDOW)
        assert (quality.runtime, quality.matmul_accuracy) == ("onnxruntime", "int8")
        for name in ("num_tokens", "perplexity", "reference_perplexity", "top1_agreement", "kl_divergence"):
            assert getattr(quality, name) == engine[name]
        for words in (f"{quality.perplexity:.3f}", f"{quality.top1_agreement:.2%}", f"{quality.kl_divergence:.5f}"):
            assert words in result.output
        assert f"perplexity {quality.perplexity:.2f}, unquantized" in run("inspect", folder).output
        load_executor(folder).close()

    def test_an_error_is_one_line_and_exit_status_1(self, shelf: EngineShelf, text: Path, tmp_path: Path) -> None:
        result = run("evaluate", shelf.engine("llama"), "--text", text, "--json", tmp_path / "none" / "figures.json")
        assert result.exit_code == 1
        assert result.output.count("\n") == 1
        assert f"there is no folder {tmp_path / 'none'}" in result.output


class TestRefusals:
    def test_the_calibration_text(self, text: Path, tmp_path: Path) -> None:
        without_header = tmp_path / "calibration.txt"
        without_header.write_text(calibration.default_text())
        for path in (CALIBRATION, without_header):
            assert refused(lambda path=path: HeldOut(path)) == (
                f"--text {path}: it is the calibration text (built in), which the weights were fitted to; use another"
            )
        same = tmp_path / "same.txt"
        same.write_bytes(text.read_bytes())
        assert f"it is the calibration text ({same})" in refused(lambda: HeldOut(text, same))
        assert HeldOut(CALIBRATION, same).name == "calibration.txt"

    def test_what_is_no_text(self, tmp_path: Path) -> None:
        path = tmp_path / "text"
        assert "cannot be read as UTF-8" in refused(lambda: HeldOut(path))
        path.write_bytes(b"\xff\xfe")
        assert "cannot be read as UTF-8" in refused(lambda: HeldOut(path))

    def test_a_text_that_is_too_short(self, shelf: EngineShelf, text: Path) -> None:
        count = len(tokens(shelf.checkpoint("llama"), text))
        assert refused(lambda: measured(shelf.engine("llama"), text, num_windows=3, skip=20)) == (
            f"--windows 3 and --skip-windows 20: held-out.txt has {count:,} tokens, enough for {count // WINDOW} windows of 512"
        )

    def test_engines_that_cannot_be_measured(self, shelf: EngineShelf, text: Path, tmp_path: Path) -> None:
        short = edited(copy(shelf.engine("llama"), tmp_path / "short"), "limits", "max_context", value=256)
        assert refused(lambda: measured(short, text)) == f"{short}: made for up to 256 tokens; a window has 512"
        damaged = copy(shelf.engine("llama"), tmp_path / "damaged")
        (damaged / "weights.bin").write_bytes(b"damaged")
        with pytest.raises(EngineError, match=r"weights\.bin is damaged"):
            measured(damaged, text)
        with pytest.raises(EngineError, match="is not an engine directory"):
            measured(tmp_path, text)

    def test_a_runtime_that_is_not_here(self, shelf: EngineShelf, text: Path, tmp_path: Path) -> None:
        pytest.importorskip("tensorrt_rtx")
        wanted = Wanted("tensorrt-rtx", "int8", capabilities=("8.9",))
        options = BuildOptions(str(shelf.checkpoint("llama")), wanted)
        build(options, tmp_path / "engine", lambda step, fraction: None)
        message = refused(lambda: measured(tmp_path / "engine", text))
        assert message == f"{tmp_path / 'engine'}: made for tensorrt-rtx on compute capability 8.9, which no GPU here has"

    def test_references_that_are_none(self, shelf: EngineShelf, text: Path, tmp_path: Path) -> None:
        folder, quantized = shelf.engine("llama"), shelf.engine("llama", "int4", 64)
        assert refused(lambda: measured(folder, text, quantized)) == (
            f"--reference {quantized}: int4 weights and an fp32 head; a reference has fp32 for both"
        )
        assert "not a folder, nor a file" in refused(lambda: measured(folder, text, tmp_path / "gone"))
        without_bos = edited(copy(folder, tmp_path / "other"), "model", "bos_token_id", value=None)
        message = refused(lambda: measured(folder, text, without_bos))
        assert message == f"{without_bos}: not the tokens or vocabulary of {folder}, with which it is compared"

    def test_logits_that_are_not_finite(self, text: Path, tmp_path: Path) -> None:
        model = make_tiny_model("llama", tmp_path / "model")
        with torch.no_grad():
            broken = reference_model(model)
            broken.model.norm.weight.fill_(float("nan"))
            broken.save_pretrained(model)
        build(BuildOptions(str(model), Wanted(precision="fp32")), tmp_path / "engine", lambda step, fraction: None)
        message = refused(lambda: measured(tmp_path / "engine", text))
        assert message == f"{tmp_path / 'engine'}: its logits are not finite; it cannot be measured"

    def test_figures_that_cannot_be_written(self, shelf: EngineShelf, text: Path, tmp_path: Path) -> None:
        folder = copy(shelf.engine("llama"), tmp_path / "engine")
        (folder / ".engine.json.tmp").mkdir()
        result = run("evaluate", folder, "--text", text, "--windows", 1)
        assert result.exit_code == 1
        assert f"error: {folder / 'engine.json'}: cannot be written" in result.output


@pytest.mark.parametrize(
    ("text", "fraction"), [("3%", 0.03), ("3", 0.03), (" 0.5 % ", 0.005), (".5%", 0.005), ("0", 0.0), ("12.5%", 0.125)]
)
def test_percent(text: str, fraction: float) -> None:
    assert parse_percent(text) == pytest.approx(fraction)


@pytest.mark.parametrize("text", ["", "%", "-1%", "three", "nan", "inf", "3%%", "1e3", "3 percent", "1_0"])
def test_what_is_no_percent(text: str) -> None:
    message = refused(lambda: parse_percent(text))
    assert message == f"--max-perplexity-increase {text!r}: not a percentage of 0 or more, such as 3% or 0.5%"


def test_bits_of_candidates() -> None:
    names = ["int4-128", "int4-64", "fp4", "mixed-5", "mixed-6.5", "fp8", "int8", "fp16", "bf16", "fp32"]
    assert [parse_candidate(name).bits for name in names] == [4.125, 4.25, 4.5, 5.0, 6.5, 8.0, 8.0, 16.0, 16.0, 32.0]


@pytest.mark.parametrize("name", ["", "int3", "int4", "int4-32", "fp8-2", "mixed", "mixed-", "mixed-nan"])
def test_unknown_candidates(name: str) -> None:
    message = refused(lambda: parse_candidate(name))
    assert message.startswith(f"--candidates {name}: unknown; known are int4-128, int4-64")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that has learned some of the words, so that rounding its weights costs; blocks of 128 do not fit it."""
    folder = make_tiny_model("llama", tmp_path_factory.mktemp("model") / "learned", intermediate_size=192)
    text = folder / "text"
    text.write_text(some_text(2, 3000))
    ids = torch.tensor(tokens(folder, text))
    text.unlink()
    learner = reference_model(folder).train()
    optimizer = torch.optim.AdamW(learner.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(80):
        starts = torch.randint(len(ids) - 64, (8,), generator=generator)
        batch = torch.stack([ids[start : start + 64] for start in starts])
        loss = learner(batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 1.0
    learner.save_pretrained(folder)
    return folder


class TestSelect:
    def select(self, model: Path, text: Path, output: Path, bound: str, *more: object) -> Any:
        own = ("--model", model, "--text", text, "--output", output, "--max-perplexity-increase", bound)
        return run("select", *own, "--windows", 2, "--threads", 1, "--matmul-accuracy", "fp32", *more)

    def rows(self, result: Any) -> dict[str, list[str]]:
        """The cells of the final table after the first, by it."""
        lines = [line.strip(" │").split("│") for line in result.output.splitlines() if line.lstrip().startswith("│")]
        return {cells[0].strip(): [cell.strip() for cell in cells[1:]] for cells in lines if len(cells) == 6}

    def test_the_first_that_passes_is_kept(self, model: Path, text: Path, tmp_path: Path) -> None:
        output, names = tmp_path / "engine", ("--candidates", "fp32,int8,int4-128,int4-64")
        result = self.select(model, text, output, "1000%", *names)
        assert result.exit_code == 0, result.output
        rows = self.rows(result)
        assert list(rows) == ["int4-128", "int4-64", "int8", "fp32"]
        assert rows["int4-128"][4].startswith("skipped: model.layers.0.mlp.down_proj has 192 inputs, which blocks of 128")
        assert [rows[name][4] for name in ("int4-64", "int8", "fp32")] == ["kept", "not needed", "not needed"]
        manifest = read_manifest(output)
        check_files(output, manifest)
        assert manifest.name == "learned-int4-b64"
        assert (manifest.source.model, manifest.source.format) == (str(model), "hf")
        quality = manifest.quality
        assert quality is not None
        assert quality.reference_perplexity is not None
        increase = quality.perplexity / quality.reference_perplexity - 1
        assert rows["int4-64"][1:3] == [f"{quality.perplexity:.3f}", f"{increase:+.2%}"]
        evaluated, _ = measured(output, text, model)
        assert evaluated.scores.perplexity == quality.perplexity
        assert evaluated.scores.kl_divergence == quality.kl_divergence
        assert increase > 0.0002  # else the bound below would tell nothing

        result = self.select(model, text, output, f"{50 * increase}%", *names)  # in place of the engine that is there
        rows = self.rows(result)
        assert rows["int4-64"][4].startswith("failed: more than ")
        assert rows["int8"][4] == "kept"
        assert read_manifest(output).precision.weights == "int8"
        assert [path.name for path in tmp_path.iterdir()] == ["engine"]

    def test_where_all_fail_nothing_is_kept(self, model: Path, text: Path, tmp_path: Path) -> None:
        result = self.select(model, text, tmp_path / "engine", "0 %", "--candidates", "int4-64,fp4")
        assert result.exit_code == 1
        assert {row[4] for row in self.rows(result).values()} == {"failed: more than 0%"}
        assert "error: --max-perplexity-increase 0 %: no candidate passed; nothing was kept" in result.output
        result = self.select(model, text, tmp_path / "engine", "5%", "--candidates", "int4-128")
        assert result.exit_code == 1
        assert list(self.rows(result)) == ["int4-128"]
        assert list(tmp_path.iterdir()) == []

    def test_a_plan_is_compiled_from_what_was_measured(self, model: Path, text: Path, tmp_path: Path) -> None:
        pytest.importorskip("tensorrt_rtx")
        target = ("--target", "tensorrt-rtx", "--compute-capability", "8.6", "--max-context", "512")
        result = self.select(model, text, tmp_path / "engine", "1000%", *target, "--candidates", "fp4,mixed-6,int4-128")
        assert result.exit_code == 0, result.output
        assert "measured as ONNX Runtime engines of the same quantized weights" in result.output
        rows = self.rows(result)
        assert list(rows) == ["int4-128", "fp4", "mixed-6"]
        assert rows["fp4"][4].startswith("skipped: --precision fp4: not with tensorrt-rtx on compute capability 8.6")
        assert rows["mixed-6"][4] == "kept"
        manifest = read_manifest(tmp_path / "engine")
        check_files(tmp_path / "engine", manifest)
        assert manifest.plan is not None
        assert manifest.plan.compute_capabilities == ("8.6",)
        assert manifest.precision.weights == "mixed"
        assert manifest.source.model == str(model)
        assert manifest.quality is not None
        assert (manifest.quality.runtime, manifest.quality.matmul_accuracy) == ("onnxruntime", "fp32")
        assert "as an onnxruntime engine of the same weights" in run("inspect", tmp_path / "engine").output

    @pytest.mark.parametrize(
        ("more", "words"),
        [
            (("--candidates", "int4-64,int2"), "--candidates int2: unknown; known are"),
            (("--max-context", 256), "--max-context 256: a window of the held-out text has 512 tokens"),
            (("--max-context", 4096), "--max-context 4096: the model was made for up to 1024 tokens"),
            (("--windows", 1000), "--windows 1000: held-out.txt has"),
            (("--text", CALIBRATION), "it is the calibration text (built in)"),
            (("--calibration", "gone.txt"), "gone.txt: the calibration text cannot be read"),
            (("--max-perplexity-increase", "-1"), "--max-perplexity-increase '-1': not a percentage"),
            (("--compute-capability", "8.9"), "--compute-capability is of GPUs"),
            (("--output", Path(__file__).parent), "exists and is not an engine folder"),
        ],
    )
    def test_refusals_come_before_any_work(
        self, model: Path, text: Path, tmp_path: Path, more: tuple[object, ...], words: str
    ) -> None:
        result = self.select(model, text, tmp_path / "engine", "3%", *more)
        assert result.exit_code == 1
        assert words in result.output
        assert "Writing" not in result.output
        assert list(tmp_path.iterdir()) == []

    def test_a_quantized_checkpoint(self, shelf: EngineShelf, text: Path, tmp_path: Path) -> None:
        checkpoint = shelf.quantized("llama", RECIPES["int4-64-rtn"]).folder
        result = self.select(checkpoint, text, tmp_path / "engine", "3%")
        assert result.exit_code == 1
        assert f"error: {checkpoint}: a checkpoint quantized already leaves nothing to select; use build" in result.output
