"""Sends what TensorRT-LLM's own gRPC client (end_to_end_grpc_client.py) sends, and reads the answers as it does.

`python tensorrt_llm_client.py HOST:8001 [MODEL]`. One stream for each request, closed before the answers are read; tensors with
a batch dimension; only the outputs that are asked for.
"""

from __future__ import annotations

import queue
import sys
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient
from tritonclient.utils import np_to_triton_dtype

PROMPTS = ["The quick brown fox", "Once upon a time there was"]
NUM_TOKENS = 16


def inputs(prompts: list[str], *, streaming: bool, options: dict[str, Any]) -> list[grpcclient.InferInput]:
    """Greedy (top_k 1), so that answers can be compared; the rest are that client's defaults."""
    fields: dict[str, np.ndarray] = {
        "text_input": np.array([[prompt] for prompt in prompts], np.object_),
        "max_tokens": np.full((len(prompts), 1), NUM_TOKENS, np.int32),
        "stream": np.full((len(prompts), 1), streaming),
        "beam_width": np.full((len(prompts), 1), 1, np.int32),
        "temperature": np.full((len(prompts), 1), 1.0, np.float32),
        "top_k": np.full((len(prompts), 1), 1, np.int32),
        "exclude_input_in_output": np.full((len(prompts), 1), False),
    }
    fields |= {name: np.array([[value]] * len(prompts)) for name, value in options.items()}
    tensors = []
    for name, array in fields.items():
        tensors.append(grpcclient.InferInput(name, array.shape, np_to_triton_dtype(array.dtype)))
        tensors[-1].set_data_from_numpy(array)
    return tensors


def generate(client: Any, model: str, prompts: list[str], *, streaming: bool, batched: bool, **options: Any) -> list[str]:
    """The text of each prompt. Raises the server's error."""
    outputs = [grpcclient.InferRequestedOutput("text_output")]
    if "return_log_probs" in options:
        outputs += [grpcclient.InferRequestedOutput(name) for name in ("cum_log_probs", "output_log_probs")]
    if batched:
        outputs.append(grpcclient.InferRequestedOutput("batch_index"))
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    client.start_stream(callback=lambda result, error: answers.put((result, error)))
    client.async_stream_infer(model, inputs(prompts, streaming=streaming, options=options), outputs=outputs, request_id="")
    client.stop_stream()
    texts = [""] * len(prompts)
    while not answers.empty():
        result, error = answers.get()
        if error is not None:
            raise error
        index = result.as_numpy("batch_index")
        row = 0 if index is None else index[0][0]
        text = result.as_numpy("text_output")[0].decode()
        texts[row] = texts[row] + text if streaming else text
    return texts


def main() -> None:
    model = sys.argv[2] if len(sys.argv) > 2 else "llm"
    client = grpcclient.InferenceServerClient(sys.argv[1])
    whole = [generate(client, model, [prompt], streaming=False, batched=False)[0] for prompt in PROMPTS]
    streamed = [
        generate(client, model, [prompt], streaming=True, batched=False, return_log_probs=True)[0] for prompt in PROMPTS
    ]
    batch = generate(client, model, PROMPTS, streaming=False, batched=True)
    expected = [prompt + text for prompt, text in zip(PROMPTS, streamed, strict=True)]
    if not all(streamed) or whole != expected or batch != expected:
        sys.exit(f"expected {expected}; whole: {whole}; as one batch: {batch}")
    print("5 requests: whole, streamed with log-probabilities, and a batch of 2 rows, all with the same text")


if __name__ == "__main__":
    main()
