"""See config.pbtxt."""

import json
import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    def initialize(self, args):
        parameters = json.loads(args["model_config"])["parameters"]
        self.ttft = float(parameters["ttft_ms"]["string_value"]) / 1e3
        self.itl = float(parameters["itl_ms"]["string_value"]) / 1e3

    def execute(self, requests):
        for request in requests:
            text = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy().item().decode()
            count = int(pb_utils.get_input_tensor_by_name(request, "max_tokens").as_numpy().item())
            wanted = request.requested_output_names()
            threading.Thread(target=self.answer, args=(text, count, wanted, request.get_response_sender())).start()

    def answer(self, text, count, wanted, sender):
        start = time.monotonic()
        for index in range(count):
            time.sleep(max(0.0, start + self.ttft + index * self.itl - time.monotonic()))
            if text.startswith("refuse"):
                error = pb_utils.TritonError("prompt: got what is refused", pb_utils.TritonError.INVALID_ARG)
                sender.send(pb_utils.InferenceResponse(error=error), flags=FINAL)
                break
            last = index == count - 1
            arrays = {"text_output": np.array([b"a"], object), "num_output_tokens": np.array([1], np.int32)}
            if last:
                arrays["finish_reason"] = np.array([b"length"], object)
            tensors = [pb_utils.Tensor(name, array) for name, array in arrays.items() if name in wanted]
            sender.send(pb_utils.InferenceResponse(tensors), flags=FINAL if last else 0)
