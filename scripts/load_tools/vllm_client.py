"""Sends what the vLLM backend's samples/client.py sends, to `llm_vllm`, and reads the answers as it does.

`python vllm_client.py HOST:8001`. All requests on one asyncio stream; tensors without a batch dimension; sampling parameters as
a JSON tensor, with numbers as strings, and once more as request parameters.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import tritonclient.grpc.aio as grpcclient

PROMPTS = ["The quick brown fox\n", "Once upon a time there was\n"]
ITERATIONS = 10
SAMPLING = {"temperature": "0.1", "top_p": "0.95", "max_tokens": "16"}


def tensor(name: str, kind: str, value: Any) -> grpcclient.InferInput:
    each = grpcclient.InferInput(name, [1], kind)
    each.set_data_from_numpy(np.array([value], np.object_ if kind == "BYTES" else bool))
    return each


async def requests(*, streaming: bool) -> AsyncIterator[dict[str, Any]]:
    for number in range(len(PROMPTS) * ITERATIONS):
        yield {
            "model_name": "llm_vllm",
            "inputs": [
                tensor("text_input", "BYTES", PROMPTS[number % len(PROMPTS)].encode()),
                tensor("stream", "BOOL", streaming),
                tensor("sampling_parameters", "BYTES", json.dumps(SAMPLING).encode()),
            ],
            "outputs": [grpcclient.InferRequestedOutput("text_output")],
            "request_id": str(number),
            "parameters": SAMPLING,
        }


async def generate(url: str, *, streaming: bool) -> dict[str, list[bytes]]:
    """The texts of each request by its id."""
    texts: dict[str, list[bytes]] = {}
    async with grpcclient.InferenceServerClient(url) as client:
        async for result, error in client.stream_infer(requests(streaming=streaming)):
            if error is not None:
                raise error
            texts.setdefault(result.get_response().id, []).extend(result.as_numpy("text_output"))
    return texts


def main() -> None:
    count = len(PROMPTS) * ITERATIONS
    for streaming in (False, True):
        texts = asyncio.run(generate(sys.argv[1], streaming=streaming))
        if len(texts) != count or not all(b"".join(parts) for parts in texts.values()):
            sys.exit(f"{len(texts)} of {count} requests were answered: {texts}")
        if not streaming and any(len(parts) != 1 for parts in texts.values()):
            sys.exit("a request that is not streamed had more than one response")
    print(f"{2 * count} requests on two streams, half of them streamed")


if __name__ == "__main__":
    main()
