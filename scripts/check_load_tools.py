"""Do load tools and clients made for Triton run unchanged against this server? `python scripts/check_load_tools.py`

Installs each tool of load_tool_table.py into a throwaway environment (2.5 GB in all, from PyPI), starts a server, runs each
against it for some seconds, and prints what it reported. Exit status: 0, 1 where one did not do what is expected of it.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import signal
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from load_tool_table import PERF_ANALYZER_NEW, PERF_ANALYZER_OLD, TOOLS, Tool
from triton_server import DIRECT, ROOT, ServerError, TritonServer, free_ports

console = Console(highlight=False)
# What perf_analyzer of before glibc 2.38 needs beside the system's libraries, as nvidia-pytriton's wheel names them.
OLD_LIBRARIES = {"libb64.so.0d": "libb64-*.so.0d", "libcudart.so.12": "libcudart-*.so.12*"}
SHOWN_LINES = 15
COUNT_SECONDS = 3.0  # Triton counts a request a moment after it was answered


class ToolError(Exception):
    """A tool could not be installed, or did not do what is expected of it; what it said last."""


@dataclass
class Environments:
    """Virtual environments under `folder`, one for each set of requirements, made when first asked for."""

    folder: Path
    timeout_seconds: float
    _made: dict[str, Path] = field(default_factory=dict)

    def bin(self, requirement: str, *options: str) -> Path:
        """Its folder of programs. Raises ToolError with pip's last words."""
        if requirement not in self._made:
            folder = self.folder / "".join(c if c.isalnum() else "-" for c in requirement)
            # Half an environment would pass for a whole one the next time.
            if not (folder / ".installed").exists():
                shutil.rmtree(folder, ignore_errors=True)
                python = folder / "bin" / "python"
                self._run([sys.executable, "-m", "venv", str(folder)], folder)
                self._run([str(python), "-m", "pip", "install", "--quiet", *options, requirement], folder)
                (folder / ".installed").touch()
            self._made[requirement] = folder / "bin"
        return self._made[requirement]

    def perf_analyzer(self) -> tuple[Path, dict[str, str]]:
        """Its folder of programs, and what it needs in its environment. Raises ToolError where it cannot run here."""
        name, version = platform.libc_ver()
        if name == "glibc" and tuple(map(int, version.split("."))) >= (2, 38):
            return self.bin(PERF_ANALYZER_NEW, "--no-deps"), {}
        programs = self.bin(PERF_ANALYZER_OLD, "--no-deps")
        libraries = programs.parent / "libraries"
        libraries.mkdir(exist_ok=True)
        for library, pattern in OLD_LIBRARIES.items():
            found = next((path for folder in sys.path for path in Path(folder).glob(f"nvidia_pytriton.libs/{pattern}")), None)
            if found is None:
                raise ToolError(
                    f"perf_analyzer needs {library} on {name} {version}; nvidia-pytriton has it, and is not installed"
                )
            (libraries / library).unlink(missing_ok=True)
            (libraries / library).symlink_to(found)
        return programs, {"LD_LIBRARY_PATH": str(libraries)}

    def _run(self, command: list[str], folder: Path) -> None:
        status, printed = run(command, {}, folder.with_suffix(".log"), self.timeout_seconds)
        if status != 0:
            raise ToolError(f"installing failed: {shlex.join(command)}\n{last_lines(printed)}")


def run(command: list[str], environment: Mapping[str, str], log: Path, timeout_seconds: float) -> tuple[int, str]:
    """Exit status and output of a command that is run from the repository's root. Raises ToolError when it takes longer; it and
    all that it started are ended then."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            raise ToolError(f"not done after {timeout_seconds:.0f} s\n{last_lines(log.read_text(errors='replace'))}") from None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return status, log.read_text(errors="replace")


def last_lines(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.strip().splitlines()[-SHOWN_LINES:])


def addresses(server: TritonServer) -> dict[str, str]:
    """The variables of a tool's command but for those of one run."""
    others = free_ports(3)
    return {
        "HTTP": f"{server.host}:{server.http_port}",
        "GRPC": server.grpc_address,
        "METRICS": f"{server.host}:{server.metrics_port}",
        **{f"OTHER_{name}": f"{server.host}:{port}" for name, port in zip(("HTTP", "GRPC", "METRICS"), others, strict=True)},
        "ENGINE": server.environment["LLM_ENGINE_DIR"],
        "PYTHON": sys.executable,
    }


def command_of(tool: Tool, variables: Mapping[str, str]) -> list[str]:
    return shlex.split(string.Template(tool.command).substitute({k: shlex.quote(v) for k, v in variables.items()}))


def served_requests(server: TritonServer) -> int:
    """All that the server has answered without an error, of every model. Requests that llm_vllm passed on count twice."""
    with DIRECT.open(server.metrics_url, timeout=10) as response:
        lines = response.read().decode().splitlines()
    return sum(int(float(line.split()[-1])) for line in lines if line.startswith("nv_inference_request_success{"))


def check(tool: Tool, server: TritonServer, environments: Environments, output: Path) -> tuple[str, str]:
    """(version, what it reported). Raises ToolError."""
    version, path = "", []
    environment: dict[str, str] = {}
    if tool.requirement:
        path.append(environments.bin(tool.requirement))
        version = installed_version(path[0], tool.package)
    if tool.needs_perf_analyzer:
        programs, environment = environments.perf_analyzer()
        path.append(programs)
        version = version or installed_version(programs, "tritonclient")
    variables = addresses(server) | {"OUTPUT": str(output)}
    environment |= {name: string.Template(value).substitute(variables) for name, value in tool.environment.items()}
    environment["PATH"] = os.pathsep.join([*map(str, path), os.environ["PATH"]])
    command = command_of(tool, variables)
    program = shutil.which(command[0], path=environment["PATH"])
    if program is None:
        raise ToolError(f"{command[0]} cannot be run: it is not on the PATH {environment['PATH']}")
    command[0] = program
    before = served_requests(server)
    output.mkdir(parents=True, exist_ok=True)
    status, printed = run(command, environment, output / "output.log", tool.timeout_seconds)
    if tool.fails_because:
        if status == 0 or tool.fails_because not in printed:
            raise ToolError(f"expected to be refused with {tool.fails_because!r}; status {status}\n{last_lines(printed)}")
        return version, f"refused, as expected: {tool.fails_because} ..."
    if status != 0:
        raise ToolError(f"exit status {status}\n{last_lines(printed)}")
    try:
        reported = tool.report(output, printed)
    except (LookupError, OSError, ValueError) as error:
        raise ToolError(f"its figures are missing or bad: {type(error).__name__}: {error}\n{last_lines(printed)}") from None
    deadline = time.monotonic() + COUNT_SECONDS
    while (served := served_requests(server) - before) < tool.served and time.monotonic() < deadline:
        time.sleep(0.1)
    if served < tool.served:
        raise ToolError(f"the server answered {served} requests; expected: {tool.served} at least\n{last_lines(printed)}")
    return version, reported


def installed_version(programs: Path, package: str) -> str:
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    return subprocess.run([programs / "python", "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def engine_folder(given: Path | None, work: Path) -> Path:
    """The engine to serve: the given one, or one of a tiny model with random weights, made here in some seconds."""
    if given is not None:
        return given.resolve()
    checkpoint, engine = work / "tiny-model", work / "tiny-engine"
    environment = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "model_repository" / "llm" / "1")])}
    with console.status("Making an engine of a tiny model ..."):
        for command in (
            ["-m", "tests.tiny_models", "llama", str(checkpoint)],
            ["-m", "build_engines", "build", "--model", str(checkpoint), "--precision", "fp32", "--output", str(engine)],
        ):
            status, printed = run([sys.executable, *command], environment, work / "engine.log", 300)
            if status != 0:
                raise ToolError(f"the engine could not be made\n{last_lines(printed)}")
    return engine


def selected(names: list[str]) -> list[Tool]:
    unknown = [name for name in names if not any(name.lower() in tool.name.lower() for tool in TOOLS)]
    if unknown:
        known = ", ".join(repr(tool.name) for tool in TOOLS)
        raise typer.BadParameter(f"--only: got {unknown[0]!r}; allowed: a part of {known}")
    return [tool for tool in TOOLS if not names or any(name.lower() in tool.name.lower() for name in names)]


def main(
    only: Annotated[list[str] | None, typer.Option(help="A tool's name or a part of it; may be repeated.")] = None,
    engine: Annotated[
        Path | None, typer.Option(help="Engine folder to serve; without it a tiny one is made.", exists=True, file_okay=False)
    ] = None,
    keep: Annotated[
        Path | None, typer.Option(help="Keep environments and what the tools wrote here, for another run.", file_okay=False)
    ] = None,
    install_timeout: Annotated[int, typer.Option(help="Seconds for installing one tool.", min=1)] = 900,
) -> None:
    """Install load tools and clients into throwaway environments, and run each against a server."""
    tools = selected(only or [])
    work = keep.resolve() if keep else Path(tempfile.mkdtemp(prefix="load-tools-"))
    failures = 0
    try:
        shutil.rmtree(work / "tiny-engine", ignore_errors=True)
        folder = engine_folder(engine, work)
        failures = check_all(tools, folder, Environments(work / "environments", install_timeout), work)
    except (ToolError, ServerError) as error:
        console.print(f"error: {error}", style="bold red", markup=False, soft_wrap=True)
        failures = 1
    finally:
        if keep is None:
            shutil.rmtree(work, ignore_errors=True)
    raise typer.Exit(1 if failures else 0)


def check_all(tools: list[Tool], engine: Path, environments: Environments, work: Path) -> int:
    """Prints the table; returns how many did not do what is expected of them."""
    table = Table("tool", "version", Column("command", overflow="fold"), "result", show_lines=True)
    repository, failures = ROOT / "model_repository", 0
    server = TritonServer.on_free_ports(repository, work / "triton.log", environment={"LLM_ENGINE_DIR": str(engine)})
    with server:
        for number, tool in enumerate(tools, 1):
            started = time.monotonic()
            output = work / "output" / f"{number}-{''.join(c if c.isalnum() else '-' for c in tool.name)}"
            shutil.rmtree(output, ignore_errors=True)
            version = ""
            try:
                with console.status(f"{number}/{len(tools)} {tool.name}: installing and running ..."):
                    version, result = check(tool, server, environments, output)
                style = "green"
            except ToolError as error:
                result, style, failures = f"FAILED: {error}", "bold red", failures + 1
            console.print(f"{number}/{len(tools)} {tool.name} ({time.monotonic() - started:.0f} s)", markup=False)
            console.print(f"  {result}", style=style, markup=False, soft_wrap=True)
            table.add_row(tool.name, version, escape(tool.command), f"[{style}]{escape(result.splitlines()[0])}[/]")
    console.print(table)
    return failures


if __name__ == "__main__":
    typer.run(main)
