"""A real Triton over a copy of the model repository and a tiny engine, and a plain client that sees every response."""

from __future__ import annotations

import json
import queue
import shutil
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2
from tritonclient.utils import InferenceServerException

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

from triton_server import ServerError, TritonServer, free_ports  # noqa: E402, F401

WATCHDOG_SECONDS = 60.0
TYPES = {"STRING": "BYTES", "INT32": "INT32", "FP32": "FP32", "BOOL": "BOOL", "UINT64": "UINT64"}


def read_config(path: Path) -> Any:
    return text_format.Parse(path.read_text(), model_config_pb2.ModelConfig())


CONFIG = read_config(ROOT / "model_repository" / "llm" / "config.pbtxt")
INPUT_TYPES = {each.name: TYPES[model_config_pb2.DataType.Name(each.data_type).removeprefix("TYPE_")] for each in CONFIG.input}
LISTS = {each.name for each in CONFIG.input if list(each.dims) == [-1]}


def make_repository(folder: Path, config: str = "", **parameters: str) -> Path:
    """A copy of the repository whose `llm` has these parameters; `config` is merged into its configuration as text, and a
    list in it replaces the one that is there."""
    shutil.copytree(ROOT / "model_repository", folder, ignore=shutil.ignore_patterns("__pycache__"))
    edit_config(folder, config, **parameters)
    return folder


def edit_config(repository: Path, config: str = "", **parameters: str) -> None:
    path = repository / "llm" / "config.pbtxt"
    edited = read_config(path)
    for key, value in parameters.items():
        edited.parameters[key].string_value = value
    for descriptor, _ in text_format.Parse(config, model_config_pb2.ModelConfig()).ListFields():
        if descriptor.is_repeated:
            edited.ClearField(descriptor.name)
    text_format.Merge(config, edited)
    path.write_text(text_format.MessageToString(edited))


def reconfigure(server: TritonServer, config: str = "", **parameters: str) -> None:
    """What an operator does: write config.pbtxt anew (the shipped one with these changes), and load the model again."""
    shutil.copy(ROOT / "model_repository" / "llm" / "config.pbtxt", server.repository / "llm" / "config.pbtxt")
    edit_config(server.repository, config, **parameters)
    reload_model(server)


def reload_model(server: TritonServer, model: str = "llm") -> None:
    """Returns when the new one serves."""
    repository_api(server, f"models/{model}/load")


def repository_api(server: TritonServer, path: str) -> str:
    request = urllib.request.Request(f"{server.http_url}/v2/repository/{path}", b"{}", method="POST")
    with urllib.request.urlopen(request, timeout=WATCHDOG_SECONDS) as response:
        return response.read().decode()


def live_config(server: TritonServer, model: str = "llm") -> dict[str, Any]:
    """The configuration that is served now."""
    with urllib.request.urlopen(f"{server.http_url}/v2/models/{model}/config", timeout=10) as response:
        return json.load(response)


@contextmanager
def running(repository: Path, engine: Path, log: Path) -> Iterator[TritonServer]:
    server = TritonServer.on_free_ports(repository, log, environment={"LLM_ENGINE_DIR": str(engine)}, exit_seconds=3)
    with server:
        yield server


def post(server: TritonServer, path: str, body: dict) -> tuple[int, str]:
    """(status, body) of an HTTP request to the model."""
    request = urllib.request.Request(f"{server.http_url}/v2/models/{path}", json.dumps(body).encode(), method="POST")
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@dataclass
class Response:
    """One message of a stream: outputs by name, or an error; and whether it carried the final flag."""

    outputs: dict[str, np.ndarray] = field(default_factory=dict)
    error: InferenceServerException | None = None
    final: bool = False

    @property
    def text(self) -> str:
        return self.outputs["text_output"].item().decode() if "text_output" in self.outputs else ""

    @property
    def finish_reason(self) -> str:
        return self.outputs["finish_reason"].item().decode() if "finish_reason" in self.outputs else ""


@dataclass
class Reply:
    """All responses of one request."""

    responses: list[Response]

    @property
    def text(self) -> str:
        return "".join(response.text for response in self.responses)

    @property
    def token_ids(self) -> list[int]:
        return [int(t) for response in self.responses for t in response.outputs.get("output_ids", np.zeros(0)).reshape(-1)]

    @property
    def last(self) -> Response:
        return self.responses[-1]

    @property
    def error(self) -> str:
        return self.last.error.message() if self.last.error else ""


class Client:
    """One gRPC stream, on which requests are told apart by id."""

    def __init__(self, address: str, model: str = "llm") -> None:
        self.address = address
        self.model = model
        self._client = grpcclient.InferenceServerClient(address)
        self._queues: dict[str, queue.Queue[Response]] = {}
        self._ended_at: dict[str, float] = {}
        self._ids = 0
        self._lock = threading.Lock()
        self._client.start_stream(self._on_response)

    def close(self, *, cancel: bool = False) -> None:
        self._client.stop_stream(cancel_requests=cancel)
        self._client.close()

    def send(self, inputs: dict[str, Any], **options: Any) -> str:
        """Send one request; `inputs` by name, with values as Python objects (arrays are sent as they are)."""
        with self._lock:
            self._ids += 1
            request_id = options.pop("request_id", f"r{self._ids}")
            self._queues[request_id] = queue.Queue()
            tensors = [_tensor(name, value, batched=self.model == "llm") for name, value in inputs.items()]
            self._client.async_stream_infer(
                self.model, tensors, request_id=request_id, enable_empty_final_response=True, **options
            )
        return request_id

    def receive(self, request_id: str) -> Reply:
        """Until the final flag."""
        responses: list[Response] = []
        while not responses or not responses[-1].final:
            responses.append(self.next(request_id))
        return Reply(responses)

    def next(self, request_id: str) -> Response:
        try:
            return self._queues[request_id].get(timeout=WATCHDOG_SECONDS)
        except queue.Empty:
            raise AssertionError(f"request {request_id}: no response for {WATCHDOG_SECONDS} s") from None

    def nothing_more(self, request_id: str) -> bool:
        return self._queues[request_id].empty()

    def generate(self, prompt: str | list[int], **fields: Any) -> Reply:
        return self.receive(self.send(request_inputs(prompt, **fields)))

    def _on_response(self, result: Any, error: InferenceServerException | None) -> None:
        if error is not None:
            # Errors of a decoupled request come without its id unless it is the only one.
            self._put(self._only_open(), Response(error=error, final=True))
            return
        message = result.get_response()
        outputs = {output.name: result.as_numpy(output.name) for output in message.outputs}
        self._put(message.id, Response(outputs, final=message.parameters["triton_final_response"].bool_param))

    def _put(self, request_id: str, response: Response) -> None:
        if response.final:
            self._ended_at[request_id] = time.monotonic()
        if request_id in self._queues:
            self._queues[request_id].put(response)

    def ended_at(self, request_id: str) -> float:
        """When its final response came, in seconds of the monotonic clock."""
        return self._ended_at[request_id]

    def _only_open(self) -> str:
        return next(reversed(self._queues), "")


def request_inputs(prompt: str | list[int], **fields: Any) -> dict[str, Any]:
    """The inputs of a streamed request with token ids in its responses, unless `fields` say otherwise."""
    name = "text_input" if isinstance(prompt, str) else "input_ids"
    return {name: prompt, "stream": True, "return_output_ids": True} | fields


def _tensor(name: str, value: Any, *, batched: bool) -> grpcclient.InferInput:
    kind = INPUT_TYPES.get(name, "BYTES")
    if not isinstance(value, np.ndarray):
        values = list(value) if name in LISTS else [value]
        if kind == "BYTES":
            array = np.array([v if isinstance(v, bytes) else str(v).encode() for v in values], np.object_)
        else:
            array = np.array(values, {"INT32": np.int32, "FP32": np.float32, "BOOL": np.bool_, "UINT64": np.uint64}[kind])
        value = array.reshape(1, -1) if batched else array
    tensor = grpcclient.InferInput(name, list(value.shape), kind)
    tensor.set_data_from_numpy(value)
    return tensor


def metrics(server: TritonServer) -> dict[str, float]:
    """Our metrics by name and distinguishing label: "llm_kv_pages:used"."""
    with urllib.request.urlopen(server.metrics_url, timeout=10) as response:
        text = response.read().decode()
    values = {}
    for line in text.splitlines():
        if line.startswith("llm_"):
            name, _, rest = line.partition("{")
            labels, _, value = rest.rpartition("} ")
            extra = [part.split("=")[1].strip('"') for part in labels.split(",") if not part.startswith(("model=", "version="))]
            values[":".join([name, *extra])] = float(value)
    return values


def settled_metrics(server: TritonServer) -> dict[str, float]:
    """The metrics once they have stopped changing: the server sends them on a timer."""
    values = metrics(server)
    while True:
        time.sleep(0.5)
        values, before = metrics(server), values
        if values == before:
            return values


def counted(server: TritonServer, metric: str) -> int:
    """The sum of the values of Triton's own series that start like this: a name, or a name and its first labels."""
    with urllib.request.urlopen(server.metrics_url, timeout=10) as response:
        lines = response.read().decode().splitlines()
    return sum(int(float(line.rpartition(" ")[2])) for line in lines if line.startswith(metric))


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come about"
        time.sleep(0.01)


def assert_idle(server: TritonServer, seconds: float = 10.0) -> dict[str, float]:
    """Running 0, waiting 0, no page in use, and none lost: at the latest after `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        values = metrics(server)
        busy = {
            key: values[key] for key in ("llm_running_sequences", "llm_waiting_sequences", "llm_kv_pages:used") if values[key]
        }
        if not busy:
            break
        assert time.monotonic() < deadline, f"not idle: {busy}"
        time.sleep(0.05)
    return values
