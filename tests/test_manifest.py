"""engine.json: a wrong or missing field, and a damaged file, are errors that name it."""

import json

import pytest

from llm_runtime.errors import EngineError
from llm_runtime.manifest import check_files, read_manifest, sha256_file, write_manifest
from tests.manifests import make_manifest


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "weights.bin").write_bytes(b"weights")
    manifest = make_manifest().model_copy(update={"files": {"weights.bin": sha256_file(tmp_path / "weights.bin")}})
    write_manifest(tmp_path, manifest)
    return tmp_path


def test_what_is_written_is_read(folder):
    manifest = read_manifest(folder)
    assert manifest == make_manifest().model_copy(update={"files": manifest.files})
    check_files(folder, manifest)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("model", "num_layers"), None),
        (("model", "num_layers"), "three"),
        (("model", "surprise"), 1),
        (("precision", "weights"), "int3"),
        (("limits", "page_size"), 0),
        (("schema_version",), 1),
        (("files",), None),
    ],
)
def test_a_wrong_field_is_named(folder, path, value):
    content = json.loads((folder / "engine.json").read_text())
    parent = content
    for key in path[:-1]:
        parent = parent[key]
    if value is None:
        del parent[path[-1]]
    else:
        parent[path[-1]] = value
    (folder / "engine.json").write_text(json.dumps(content))
    with pytest.raises(EngineError) as error:
        read_manifest(folder)
    assert ".".join(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_no_manifest_and_no_json_are_said(tmp_path):
    with pytest.raises(EngineError, match="is not an engine directory"):
        read_manifest(tmp_path)
    (tmp_path / "engine.json").write_text("{")
    with pytest.raises(EngineError, match="the file"):
        read_manifest(tmp_path)


def test_a_damaged_or_missing_file_is_named(folder):
    manifest = read_manifest(folder)
    (folder / "weights.bin").write_bytes(b"weightz")
    with pytest.raises(EngineError, match=r"weights\.bin is damaged"):
        check_files(folder, manifest)
    (folder / "weights.bin").unlink()
    with pytest.raises(EngineError, match=r"weights\.bin is missing"):
        check_files(folder, manifest)
