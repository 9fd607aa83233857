"""Passes unbatched requests in the vLLM backend's format on to `llm`, as a gRPC client of the server that it runs in.

Not by Triton's business logic scripting: that cannot cancel what it forwarded, holds one of a few threads for each request that
waits for its first token (the streams that run then stand still), and crashed Triton 2.51 about once in 30,000 requests.

One thread, with an event loop, forwards all requests, sends all responses and asks which clients have left.
"""

import asyncio
import contextlib
import json
import os
import threading

import grpc
import numpy as np
import triton_python_backend_utils as pb_utils
import tritonclient.grpc.aio as grpcclient
from tritonclient.utils import np_to_triton_dtype

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
POLL_SECONDS = 0.1
# What vLLM does with a request that does not say.
VLLM_DEFAULTS = {"temperature": 1.0, "max_tokens": 16}
# Makes Triton end a stream with an error's own status; without, it is only text.
ERRORS_WITH_STATUS = {"triton_grpc_error": "true"}
# Names, since Triton puts TritonError into pb_utils only when the model is made.
ERROR_CODES = {
    grpc.StatusCode.INVALID_ARGUMENT: "INVALID_ARG",
    grpc.StatusCode.UNAVAILABLE: "UNAVAILABLE",
    grpc.StatusCode.CANCELLED: "CANCELLED",
    grpc.StatusCode.NOT_FOUND: "NOT_FOUND",
}
# The server is on this machine: a proxy of the environment is not on the way. Answers have any size.
CHANNEL = [("grpc.enable_http_proxy", 0), ("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
# Triton keeps these names of request parameters to itself; a client of /generate can send them all the same.
RESERVED = {"sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "headers", "binary_data_output"}


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        parameters = {key: entry["string_value"] for key, entry in config["parameters"].items()}
        self.target = parameters["target_model"]
        self.address = os.environ.get("LLM_GRPC_ADDRESS") or parameters["grpc_address"]
        self.live = {}  # response sender of a client -> task that forwards its request
        self.closing = asyncio.Event()
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self._run, name="forward", daemon=True)
        self.thread.start()

    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            try:
                wanted = frozenset(request.requested_output_names())
                forwarded, num_sequences = self._forwarded(request, wanted)
            except Exception as error:  # its neighbours go on
                pb_utils.Logger.log_error(f"a request could not be read: {error}")
                sender.send(_error(f"the request could not be read: {error}", "INTERNAL"), flags=FINAL)
                continue
            self.loop.call_soon_threadsafe(self._start, sender, forwarded, wanted, num_sequences)

    def finalize(self):
        self.loop.call_soon_threadsafe(self.closing.set)
        self.thread.join()

    def _forwarded(self, request, wanted):
        """The request to `llm`, with a batch dimension, and how many sequences it asks for: the last response is the one with
        the last of their reasons, which are asked for therefore."""
        arrays = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        text, sampling = _with_defaults(arrays.get("sampling_parameters"))
        arrays["sampling_parameters"] = np.array([text.encode()], np.object_)
        parameters = json.loads(request.parameters() or "{}")
        forwarded = {
            "model_name": self.target,
            "inputs": [_tensor(name, array) for name, array in arrays.items()],
            "outputs": [grpcclient.InferRequestedOutput(name) for name in sorted(wanted | {"finish_reason"})],
            "request_id": request.request_id(),
            "timeout": request.timeout() or None,
            "parameters": {
                key: value for key, value in parameters.items() if key not in RESERVED and not key.startswith("triton_")
            },
        }
        return forwarded, _num_sequences(sampling, parameters)

    def _run(self):
        asyncio.set_event_loop(self.loop)
        self.loop.run_until_complete(self._serve())
        self.loop.close()

    async def _serve(self):
        self.client = grpcclient.InferenceServerClient(self.address, channel_args=CHANNEL)
        while not self.closing.is_set():
            self._cancel_left()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self.closing.wait(), POLL_SECONDS)
        tasks = list(self.live.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks)
        await self.client.close()

    def _cancel_left(self):
        for sender, task in self.live.items():
            # Never after its last response: the request is freed, and to ask crashes the server.
            if sender.is_cancelled():
                task.cancel()

    def _start(self, sender, forwarded, wanted, num_sequences):
        self.loop.create_task(self._forward(sender, forwarded, wanted, num_sequences))

    async def _forward(self, sender, forwarded, wanted, num_sequences):
        self.live[sender] = asyncio.current_task()  # here, since a task that is cancelled before it starts does not run at all
        try:
            last = await self._pass_on(sender, forwarded, wanted, num_sequences)
        except grpc.RpcError as error:
            last = _error(self._said(error), ERROR_CODES.get(error.code(), "INTERNAL"))
        except asyncio.CancelledError:
            last = _error("the request was cancelled", "CANCELLED")
        except Exception as error:
            pb_utils.Logger.log_error(f"forwarding to {self.target} failed: {error}")
            last = _error(f"forwarding to {self.target} failed: {error}", "INTERNAL")
        del self.live[sender]
        try:
            sender.send(last, flags=FINAL)
        except Exception as error:  # the server refuses responses of a request that it has given up on
            pb_utils.Logger.log_info(f"a response could not be sent: {error}")

    async def _pass_on(self, sender, forwarded, wanted, num_sequences):
        """Send what comes but for the last response, which is returned."""

        async def one():
            yield forwarded

        num_ended, last = 0, None
        responses = self.client.stream_infer(one(), headers=ERRORS_WITH_STATUS)
        try:
            async for result, error in responses:
                if error is not None:
                    return _error(error.message(), "INTERNAL")
                response = _response(result, wanted)
                reasons = result.as_numpy("finish_reason")
                num_ended += 0 if reasons is None else np.count_nonzero(reasons)
                if num_ended == num_sequences:
                    last = response  # and on to the end: a stream that is cancelled as it ends can keep `llm` loaded for good
                else:
                    sender.send(response)
            return last or _error(f"{self.target} ended without a last response", "INTERNAL")
        finally:
            responses.cancel()

    def _said(self, error):
        if error.code() is grpc.StatusCode.UNAVAILABLE and "connect" in error.details():
            return (
                f"{self.target} cannot be reached at {self.address}: {error.details()}; "
                "grpc_address in llm_vllm/config.pbtxt or LLM_GRPC_ADDRESS has to name this server's gRPC endpoint"
            )
        return error.details()


def _response(result, wanted):
    """Only `wanted` outputs may be in it; see make_response in llm."""
    names = [output.name for output in result.get_response().outputs if output.name in wanted]
    return pb_utils.InferenceResponse([pb_utils.Tensor(name, result.as_numpy(name)) for name in names])


def _error(message, code):
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(message, getattr(pb_utils.TritonError, code)))


def _tensor(name, array):
    tensor = grpcclient.InferInput(name, [1, array.size], np_to_triton_dtype(array.dtype))
    tensor.set_data_from_numpy(array.reshape(1, -1))
    return tensor


def _with_defaults(array):
    """(JSON text, the object in it) of the client's own values over vLLM's defaults. Text that is not a JSON object goes on as
    it is, to be refused."""
    text = array.reshape(-1)[0].decode(errors="replace") if array is not None else "{}"
    try:
        given = json.loads(text or "{}")
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict):
        return text, {}
    merged = VLLM_DEFAULTS | given
    return json.dumps(merged), merged


def _num_sequences(sampling, parameters):
    """As `llm` reads it; what is no number it refuses, in a single response."""
    for values in (sampling, parameters):
        for name in ("num_return_sequences", "n"):
            if values.get(name) is not None:
                try:
                    return max(1, int(values[name]))
                except (TypeError, ValueError):
                    return 1
    return 1
