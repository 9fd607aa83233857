"""Compiles the paged-attention kernel on first use and keeps the library in a cache folder.

The cache is keyed by everything that decides the library's bytes: source, flags, compiler and the CPU's features (the
code is for this very CPU). Several processes may build at once; each compiles into a file of its own and moves it into
place in one step.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("paged_attention.c")
CACHE_NAME = "triton-llm-repository"
COMPILE_TIMEOUT_S = 300

# No -ffast-math: masks are infinities. Contraction into fused multiply-adds is what the inner loops need of it.
_FLAGS = (
    "-std=gnu11",
    "-O3",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
)


class NativeBuildError(RuntimeError):
    """The kernel could not be compiled; one line that says what was tried and how to get a compiler."""


def library_path() -> Path:
    """The shared object to hand to `SessionOptions.register_custom_ops_library`; compiles it where it is not cached.

    Tries $CC, cc, gcc, clang and PyPI's `ziglang`, in this order. Raises NativeBuildError when none of them works.
    """
    tried = []
    for command in _compilers():
        try:
            return _cached_or_compiled(command)
        except (OSError, subprocess.SubprocessError) as error:
            tried.append(f"{shlex.join(command)} ({_first_line(error)})")
    what = "; ".join(tried) if tried else "$CC, cc, gcc, clang and python -m ziglang, none is installed"
    raise NativeBuildError(
        f"could not compile the attention kernel: tried {what}; `apt-get install gcc` or `pip install ziglang` gives a compiler"
    )


def _compilers() -> list[list[str]]:
    commands = [shlex.split(os.environ.get("CC", "")), ["cc"], ["gcc"], ["clang"]]
    found = [command for command in commands if command and shutil.which(command[0])]
    if importlib.util.find_spec("ziglang"):
        found.append([sys.executable, "-m", "ziglang", "cc"])
    return found


def _cached_or_compiled(command: list[str]) -> Path:
    version = _run([*command, "--version"])
    key = hashlib.sha256()
    for part in (SOURCE.read_bytes(), repr((command, version, _flags(), _cpu())).encode()):
        key.update(hashlib.sha256(part).digest())
    folder = _cache_folder()
    target = folder / f"paged_attention-{key.hexdigest()[:20]}.so"
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:  # beside the target, so that the move is one step
        built = Path(scratch) / target.name
        _run([*command, *_flags(), str(SOURCE), "-o", str(built), "-lm"])
        built.replace(target)
    return target


def _flags() -> tuple[str, ...]:
    is_x86 = platform.machine().lower() in ("x86_64", "amd64", "i686")
    return (*_FLAGS, "-march=native" if is_x86 else "-mcpu=native")


def _cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / CACHE_NAME


def _cpu() -> str:
    """What `native` stands for on this machine: a cache on a shared disk may be read by another one."""
    lines = []
    info = Path("/proc/cpuinfo")
    if info.exists():
        wanted = ("model name", "flags", "Features", "CPU part")
        for line in info.read_text().split("\n\n")[0].splitlines():
            if line.startswith(wanted):
                lines.append(line)
    return "\n".join([platform.machine(), *lines])


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S)
    if done.returncode != 0:
        raise subprocess.CalledProcessError(done.returncode, command, done.stdout, done.stderr)
    return done.stdout


def _first_line(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        lines = error.stderr.splitlines()
        errors = [line for line in lines if "error" in line]
        return (errors or lines or [f"exit status {error.returncode}"])[0].strip()
    return str(error)
