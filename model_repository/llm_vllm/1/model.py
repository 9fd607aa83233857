"""Passes unbatched requests in the vLLM backend's format on to `llm` (Triton's business logic scripting).

A request is forwarded on a thread of its own, response by response. Triton cannot cancel a forwarded request, so when a
client leaves, its id is sent to `llm` over a socket (llm_runtime/triton/cancels.py).
"""

import json
import os
import socket
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
POLL_SECONDS = 0.1
# What vLLM does with a request that does not say.
VLLM_DEFAULTS = {"temperature": 1.0, "max_tokens": 16}


class ClientStream:
    """Responses to one client. To ask whether it has left after its last response crashes the server: the request is freed."""

    def __init__(self, sender):
        self._sender = sender
        self._lock = threading.Lock()
        self._ended = False

    def send(self, response, final):
        """Nothing is sent after the final response."""
        with self._lock:
            if not self._ended:
                self._ended = final
                self._sender.send(response, flags=FINAL if final else 0)

    def client_left(self):
        with self._lock:
            return not self._ended and self._sender.is_cancelled()


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        parameters = {key: entry["string_value"] for key, entry in config["parameters"].items()}
        self.target = parameters["target_model"]
        self.pool = ThreadPoolExecutor(int(parameters["max_forwarded"]), thread_name_prefix="forward")
        self.live = {}  # id of the forwarded request -> ClientStream
        self.closing = threading.Event()
        self.watcher = threading.Thread(target=self._cancel_left, daemon=True)
        self.watcher.start()

    def execute(self, requests):
        for request in requests:
            self.pool.submit(self._forward, request, ClientStream(request.get_response_sender()))

    def finalize(self):
        self.closing.set()
        self.watcher.join()
        self.pool.shutdown()

    def _forward(self, request, stream):
        forwarded_id = str(uuid.uuid4())
        self.live[forwarded_id] = stream
        try:
            self._pass_on(request, stream, forwarded_id)
        except Exception as error:
            pb_utils.Logger.log_error(f"forwarding to {self.target} failed: {error}")
            stream.send(pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error))), final=True)
        finally:
            del self.live[forwarded_id]

    def _pass_on(self, request, stream, forwarded_id):
        arrays = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        arrays["sampling_parameters"] = _with_defaults(arrays.get("sampling_parameters"))
        # No more than the client's may go back (see make_response in llm); the reason says which response is the last.
        wanted = set(request.requested_output_names())
        inner = self._request(forwarded_id, arrays, wanted, request.timeout(), json.loads(request.parameters() or "{}"))
        for response in inner.exec(decoupled=True):
            if response.has_error():
                stream.send(pb_utils.InferenceResponse(error=response.error()), final=True)
                return
            tensors = response.output_tensors()
            if not tensors:  # the empty response that ends a decoupled stream
                continue
            reason = next((tensor.as_numpy()[0] for tensor in tensors if tensor.name() == "finish_reason"), b"")
            tensors = [tensor for tensor in tensors if tensor.name() in wanted]
            stream.send(pb_utils.InferenceResponse(tensors), final=bool(reason))

    def _request(self, request_id, arrays, wanted, timeout_us, parameters):
        return pb_utils.InferenceRequest(
            model_name=self.target,
            request_id=request_id,
            inputs=[pb_utils.Tensor(name, array.reshape(1, -1)) for name, array in arrays.items()],
            requested_output_names=sorted(wanted | {"finish_reason"}),
            timeout=timeout_us,
            parameters=parameters,
        )

    def _cancel_left(self):
        """Tell `llm` once of each forwarded request whose client has left."""
        told = set()
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            while not self.closing.wait(POLL_SECONDS):
                live = dict(self.live)
                told &= set(live)
                for forwarded_id, stream in live.items():
                    if forwarded_id not in told and stream.client_left():
                        told.add(forwarded_id)
                        _send_cancel(sender, forwarded_id)


def _send_cancel(sender, forwarded_id):
    """To every instance: which one has the request is not known here."""
    prefix = f"@llm-cancels-{os.getppid()}-"  # /proc/net/unix shows the abstract namespace's zero byte as @
    with open("/proc/net/unix") as sockets:
        names = {line.split()[-1] for line in sockets}
    for name in names:
        if name.startswith(prefix):
            try:
                sender.sendto(forwarded_id.encode(), "\0" + name[1:])
            except OSError as error:  # an instance that has just been unloaded
                pb_utils.Logger.log_info(f"{name}: {error}")


def _with_defaults(array):
    """vLLM's defaults under the client's own values. Text that is not a JSON object goes on as it is, to be refused."""
    text = array.reshape(-1)[0].decode(errors="replace") if array is not None else "{}"
    try:
        given = json.loads(text or "{}")
    except (ValueError, RecursionError):
        given = None
    merged = json.dumps(VLLM_DEFAULTS | given) if isinstance(given, dict) else text
    return np.array([merged.encode()], np.object_)
