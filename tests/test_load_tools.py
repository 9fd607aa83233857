"""docs/load-tools.md and scripts/check_load_tools.py: the commands are the same, and what needs no download runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.servers import ROOT, metrics

sys.path.insert(0, str(ROOT / "scripts"))

import check_load_tools

from load_tool_table import TOOLS, Tool

DOCUMENT = " ".join((ROOT / "docs" / "load-tools.md").read_text().replace("\\\n", " ").split())
HERE = [tool for tool in TOOLS if not tool.requirement.startswith(("litellm", "llama", "locust", "genai", "aiperf", "triton-"))]
HERE = [tool for tool in HERE if not tool.needs_perf_analyzer]


@pytest.fixture
def environments(tmp_path):
    """This one stands for every requirement: it has tritonclient, and nothing is downloaded."""
    made = check_load_tools.Environments(tmp_path / "environments", timeout_seconds=60)
    made._made = {tool.requirement: Path(sys.executable).parent for tool in HERE}
    return made


@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool.name)
def test_the_document_has_each_command_that_is_expected_to_work(tool):
    if not tool.fails_because:
        assert tool.command in DOCUMENT
    assert not tool.requirement or tool.requirement.split("==")[1] in DOCUMENT


@pytest.mark.parametrize("tool", HERE, ids=lambda tool: tool.name)
def test_clients_made_for_triton_run_unchanged(tool, server, environments, tmp_path):
    before = check_load_tools.served_requests(server)
    _, reported = check_load_tools.check(tool, server, environments, tmp_path / "output")
    assert reported
    assert check_load_tools.served_requests(server) - before >= tool.served
    assert metrics(server)["llm_kv_pages:free"] > 0


@pytest.mark.parametrize(
    ("command", "timeout_seconds", "message"),
    [
        ("sh -c 'echo what it said; exit 3'", 20, "exit status 3\n    what it said"),
        ("sh -c 'echo busy; sleep 60'", 1, "not done after 1 s\n    busy"),
        ("true", 20, "the server answered 0 requests; expected: 1 at least"),
        ("no-such-program-at-all", 20, "no-such-program-at-all cannot be run"),
    ],
)
def test_a_tool_that_does_not_do_what_is_expected_is_said_to_have_failed(
    server, environments, tmp_path, command, timeout_seconds, message
):
    tool = Tool("broken", "", command, lambda output, printed: "fine", served=1, timeout_seconds=timeout_seconds)
    with pytest.raises(check_load_tools.ToolError, match="(?s)^" + message.replace("/", ".")):
        check_load_tools.check(tool, server, environments, tmp_path / "output")


def test_an_unknown_tool_is_refused_with_what_there_is():
    command = [sys.executable, ROOT / "scripts" / "check_load_tools.py", "--only", "jmeter"]
    environment = os.environ | {"COLUMNS": "1000"}
    refused = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
    assert refused.returncode == 2
    assert "--only: got 'jmeter'; allowed: a part of 'curl', 'tritonclient'" in refused.stderr


def test_the_server_as_a_program_takes_tritons_options():
    command = [ROOT / "scripts" / "load_tools" / "tritonserver", "--help"]
    shown = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env=os.environ | {"PYTHON": sys.executable}
    )
    assert "--model-repository" in shown.stdout + shown.stderr
