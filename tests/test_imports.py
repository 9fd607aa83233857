"""Who may import whom: arrows point from Triton, GPU and files towards plain data (docs/architecture.md)."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RUNTIME = ROOT / "model_repository" / "llm" / "1" / "llm_runtime"
OURS = {"llm_runtime", "build_engines", "client", "tests", "benchmarks"}


def imports(path: Path) -> set[str]:
    """Full names of what a file imports anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def ours(path: Path) -> set[str]:
    return {name for name in imports(path) if name.split(".")[0] in OURS}


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def names(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


@pytest.mark.parametrize("path", files(RUNTIME), ids=names(files(RUNTIME)))
def test_the_runtime_imports_only_itself_and_triton_only_at_its_edge(path):
    assert all(name.startswith("llm_runtime") for name in ours(path))
    if "triton_python_backend_utils" in imports(path):
        assert path.parent.name == "triton"
    if path.parent.name != "triton":
        assert not any(name.startswith("llm_runtime.triton") for name in ours(path))


@pytest.mark.parametrize(
    "name", ["scheduler", "block_manager", "page_pool", "sequence", "types", "errors", "fields", "sampler"]
)
def test_plain_modules_know_no_clock_thread_or_device(name):
    modules = {module.split(".")[0] for module in imports(RUNTIME / f"{name}.py")}
    assert not modules & {"time", "threading", "queue", "asyncio", "onnxruntime", "torch", "tensorrt", "tokenizers"}


@pytest.mark.parametrize("path", files(ROOT / "build_engines"), ids=names(files(ROOT / "build_engines")))
def test_the_builder_imports_of_the_runtime_only_manifest_and_errors(path):
    allowed: tuple[str, ...] = ("build_engines", "llm_runtime.manifest", "llm_runtime.errors")
    if path.name == "evaluate.py":  # the one module that runs engines, by the runtime's own executors
        allowed += ("llm_runtime.executors", "llm_runtime.config", "llm_runtime.page_pool")
    assert all(name.startswith(allowed) for name in ours(path))


@pytest.mark.parametrize("path", files(ROOT / "client"), ids=names(files(ROOT / "client")))
def test_the_client_imports_nothing_of_the_rest(path):
    assert all(name.split(".")[0] == "client" for name in ours(path))


def test_nothing_imports_tests_or_benchmarks():
    for path in files(ROOT / "build_engines") + files(ROOT / "client") + files(RUNTIME) + files(ROOT / "scripts"):
        assert not {name.split(".")[0] for name in ours(path)} & {"tests", "benchmarks"}
