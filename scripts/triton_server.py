"""Find a Triton Inference Server, make it ready to run on this machine, and run it.

A `tritonserver` on the PATH is used as it is. Otherwise the one inside the PyPI package nvidia-pytriton is: a real server
that needs neither Docker nor a GPU, but expects the stub of the running Python beside its Python backend. It gets that in a
private copy under .cache/triton; nothing is written into site-packages.
"""

from __future__ import annotations

import contextlib
import errno
import http.client
import importlib.metadata
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.request
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / ".cache"
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
SHARED_MEMORY = Path("/dev/shm")
PORT_ERRORS = {errno.EADDRINUSE, errno.EACCES}
# The server is on this machine or network: asking a proxy of the environment for it would never find it.
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class ServerError(RuntimeError):
    """The server cannot be run, or could not load a model; one or a few lines that say why and what to do."""


@dataclass(frozen=True)
class Installation:
    """A server's program, where its backends are (None: its own default), and what it needs in its environment."""

    program: Path
    backends: Path | None
    environment: dict[str, str]

    @property
    def command(self) -> list[str]:
        """The program, and where its backends are."""
        return [str(self.program), *([f"--backend-directory={self.backends}"] if self.backends else [])]


def find_installation() -> Installation:
    """Raises ServerError that names what is missing and the command that installs it."""
    # The embedded interpreter finds its prefix, and so this environment's packages, by the first python3 on the PATH.
    environment = {"PATH": _prepended("PATH", str(Path(sys.prefix) / "bin"))}
    on_path = shutil.which("tritonserver")
    if on_path:
        return Installation(Path(on_path), None, environment)
    spec = importlib.util.find_spec("pytriton")  # found, not imported: the package has needs of its own
    if spec is None or not spec.submodule_search_locations:
        raise ServerError(
            "no tritonserver on the PATH and no nvidia-pytriton installed; install it with: pip install nvidia-pytriton==0.7.0"
        )
    package = Path(next(iter(spec.submodule_search_locations)))
    _check_numpy()
    libraries = package.parent / "nvidia_pytriton.libs"
    environment["LD_LIBRARY_PATH"] = _prepended("LD_LIBRARY_PATH", str(libraries), str(_libpython_folder()))
    server = package / "tritonserver"
    return Installation(server / "bin" / "tritonserver", _private_backends(server), environment)


def _check_numpy() -> None:
    version = importlib.metadata.version("numpy")
    if int(version.split(".")[0]) >= 2:
        raise ServerError(
            f"numpy {version} is installed, but nvidia-pytriton's server reads numpy 1's arrays and corrupts those of numpy 2; "
            "install numpy 1 with: pip install 'numpy<2' (there is none for Python 3.13: use 3.10, 3.11 or 3.12)"
        )


def _libpython_folder() -> Path:
    """Where libpython of the running version is; the stub is linked to it."""
    name = f"libpython{PYTHON}.so.1.0"
    for folder in (sysconfig.get_config_var("LIBDIR"), str(Path(sys.base_prefix) / "lib")):
        if folder and (Path(folder) / name).exists():
            return Path(folder)
    ldconfig = shutil.which("ldconfig", path=_prepended("PATH", "/sbin", "/usr/sbin"))
    if ldconfig:
        listing = subprocess.run([ldconfig, "-p"], capture_output=True, text=True, check=False).stdout
        for line in listing.splitlines():
            if line.strip().startswith(f"{name} "):
                return Path(line.split("=>")[1].strip()).parent
    raise ServerError(
        f"{name} is missing, which the server's Python backend needs; install it with: apt-get install libpython{PYTHON} "
        "(a Python built from source needs --enable-shared)"
    )


def _private_backends(server: Path) -> Path:
    """A copy of the backends with the stub of the running Python, made once for each version of both."""
    stub = server / "python_backend_stubs" / PYTHON / "triton_python_backend_stub"
    if not stub.exists():
        known = ", ".join(sorted(folder.name for folder in stub.parents[1].iterdir()))
        raise ServerError(f"nvidia-pytriton has no backend for Python {PYTHON}; it has {known}")
    target = CACHE / "triton" / f"{importlib.metadata.version('nvidia-pytriton')}-py{PYTHON}"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(dir=target.parent))
        shutil.copytree(server / "backends", unfinished, dirs_exist_ok=True)
        shutil.copy2(stub, unfinished / "python" / stub.name)
        (unfinished / "python" / stub.name).chmod(0o755)  # not every installer keeps the modes of a wheel's files
        with contextlib.suppress(OSError):  # another process was faster
            unfinished.rename(target)
        shutil.rmtree(unfinished, ignore_errors=True)
    return target


def _prepended(variable: str, *values: str) -> str:
    return os.pathsep.join([*values, *filter(None, [os.environ.get(variable)])])


def free_ports(count: int) -> list[int]:
    """Ports of the loopback address that nothing listens on now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@dataclass
class TritonServer:
    """One server process over a model repository. As a context manager: ready inside, gone after.

    Ends only what it started: the server, the stubs in its process group, and shared memory under a prefix of its own.
    """

    repository: Path
    http_port: int
    grpc_port: int
    metrics_port: int
    log: Path
    host: str = "127.0.0.1"
    environment: dict[str, str] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    exit_seconds: int = 10
    _process: subprocess.Popen | None = None

    def __post_init__(self) -> None:
        self.shared_memory_prefix = f"llm_{uuid.uuid4().hex[:12]}"

    @classmethod
    def on_free_ports(cls, repository: Path, log: Path, **fields) -> TritonServer:
        http_port, grpc_port, metrics_port = free_ports(3)
        return cls(repository, http_port, grpc_port, metrics_port, log, **fields)

    @property
    def http_url(self) -> str:
        return f"http://{self.host}:{self.http_port}"

    @property
    def grpc_address(self) -> str:
        return f"{self.host}:{self.grpc_port}"

    @property
    def metrics_url(self) -> str:
        return f"http://{self.host}:{self.metrics_port}/metrics"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def __enter__(self) -> TritonServer:
        self.start()
        try:
            self.wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def start(self) -> None:
        """Raises ServerError when a port is taken or no server is installed. The log of the run before is kept beside the
        new one, as NAME.previous."""
        self._check_ports()
        installation = find_installation()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        if self.log.exists():  # a server that is started again because it failed has the reason there
            self.log.replace(self.log.with_name(f"{self.log.name}.previous"))
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [*installation.command, *self._arguments()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | installation.environment | {"LLM_GRPC_ADDRESS": self.grpc_address} | self.environment,
                start_new_session=True,
            )

    def wait_until_ready(self, seconds: float = 300.0) -> None:
        """Until every model is loaded. Raises ServerError with the log's reasons when the server ends or takes longer."""
        deadline = time.monotonic() + seconds
        while not self.is_ready():
            if self._process is None or self._process.poll() is not None:
                raise ServerError(self._failure("the server ended while it loaded"))
            if time.monotonic() > deadline:
                raise ServerError(self._failure(f"the server was not ready after {seconds:.0f} s"))
            time.sleep(0.1)

    def is_ready(self) -> bool:
        try:
            # Triton opens its metrics port last, a moment after it calls itself ready.
            pages = (f"{self.http_url}/v2/health/ready", self.metrics_url)
            return all(self._answers(page) for page in pages)
        except (OSError, http.client.HTTPException):  # URLError is an OSError
            return False

    @staticmethod
    def _answers(url: str) -> bool:
        with DIRECT.open(url, timeout=2) as response:
            return response.status == 200

    def wait(self, seconds: float) -> int | None:
        """The exit status of a server that ended by itself within this time, or None."""
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(seconds)
        return None

    def has_lost_process(self, model: str) -> bool:
        """Whether a model that Triton calls ready has no process any more. This Triton then neither starts a new one nor ends
        what ran in it, so the server has to be started again."""
        try:
            with DIRECT.open(f"{self.http_url}/v2/models/{model}/ready", timeout=5):
                return not any(f"/{model}/" in command and "python_backend_stub" in command for command in self._commands())
        except (OSError, http.client.HTTPException):  # not ready, or unloaded
            return False

    def _commands(self) -> Iterator[str]:
        """Command lines of the processes that run in the server's session."""
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it ended meanwhile
                session = int((process / "stat").read_text().rpartition(") ")[2].split()[3])
                if session == self.pid:
                    yield (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")

    def stop(self, *, wait: bool = True) -> None:
        """Ask it to end, give running streams `exit_seconds` to finish, then end it; without `wait`, end it at once. Leaves
        nothing behind."""
        process = self._process
        if process is None:
            return
        try:
            if wait and process.poll() is None:
                process.send_signal(signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(self.exit_seconds + 5)
        finally:  # also when a second Ctrl-C cuts the wait short
            with contextlib.suppress(ProcessLookupError):  # the stubs, if any is left
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            self._wait_for_processes()
            for region in SHARED_MEMORY.glob(f"{self.shared_memory_prefix}*"):
                region.unlink(missing_ok=True)
            self._process = None
            self._wait_for_ports()

    def _arguments(self) -> Iterator[str]:
        yield f"--model-repository={self.repository}"
        for name, port in [("http", self.http_port), ("grpc", self.grpc_port), ("metrics", self.metrics_port)]:
            yield f"--{name}-address={self.host}"
            yield f"--{name}-port={port}"
        yield "--model-control-mode=explicit"
        yield "--load-model=*"
        yield f"--exit-timeout-secs={self.exit_seconds}"
        yield f"--backend-config=python,shm-region-prefix-name={self.shared_memory_prefix}"
        yield from self.options

    def _check_ports(self) -> None:
        """Named as the variables of the Makefile, which is how most people start a server."""
        with contextlib.ExitStack() as stack:  # all are held to the end, so that two equal ones are noticed
            for variable, port in [
                ("HTTP_PORT", self.http_port),
                ("GRPC_PORT", self.grpc_port),
                ("METRICS_PORT", self.metrics_port),
            ]:
                probe = stack.enter_context(socket.socket())
                try:
                    # Ports of connections that ended a moment ago are free for a server, but not for a plain bind.
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind((self.host, port))
                    probe.listen()
                except OSError as error:
                    remedy = f"choose another {variable}" if error.errno in PORT_ERRORS else "choose another HOST"
                    raise ServerError(f"port {port} of {self.host} cannot be used ({error.strerror}); {remedy}") from None

    def _wait_for_processes(self) -> None:
        """What was killed takes a moment to go; one that has ended, and waits for its parent to notice, has no command line."""
        for _ in range(50):
            if not any(self._commands()):
                return
            time.sleep(0.1)

    def _wait_for_ports(self) -> None:
        """Processes that were killed may hold the server's ports for a moment longer than it lived itself."""
        for _ in range(50):
            try:
                return self._check_ports()
            except ServerError:
                time.sleep(0.1)

    def _failure(self, what: str) -> str:
        return "\n".join([f"{what}; its log is {self.log}", *failure_reasons(self.log.read_text(errors="replace"))])


def failure_reasons(log: str) -> list[str]:
    """The lines of a server's log that say why it failed, each once, without Triton's tables and tracebacks."""
    reasons: list[str] = []
    for line in log.splitlines():
        line = line.strip()
        is_error = line.startswith("E") and line[1:2].isdigit() and "] " in line
        is_ours = line.startswith(("ERROR ", "CRITICAL ", "llm_runtime.errors."))
        is_syntax = line.startswith("[libprotobuf ERROR ")  # where in config.pbtxt
        if not (is_error or is_ours or is_syntax):
            continue
        reason = line.split("] ", 1)[-1].strip('"').split("\\n\\nAt:")[0]
        # Triton repeats a model's own error with more words around it each time.
        repeated = any(known.rsplit("Error: ", 1)[-1] in reason for known in reasons)
        if "CudaDriverHelper" not in reason and not repeated:
            reasons.append(reason)
    return [f"  {reason}" for reason in reasons[-6:]]


def main() -> None:
    """Become the server, with Triton's own options: for tools that start one themselves."""
    try:
        installation = find_installation()
    except ServerError as error:
        sys.exit(f"error: {error}")
    command = [*installation.command, *sys.argv[1:]]
    os.execve(command[0], command, os.environ | installation.environment)


if __name__ == "__main__":
    main()
