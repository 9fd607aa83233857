"""tritonclient's gRPC and asyncio gRPC streams, and what its HTTP client can ask of a decoupled model.

`python tritonclient_streams.py HOST:8001 HOST:8000`
"""

from __future__ import annotations

import asyncio
import queue
import sys
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient
import tritonclient.grpc.aio as aioclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

MODEL, NUM_REQUESTS, NUM_TOKENS = "llm", 20, 16
FIELDS = {
    "text_input": np.array([[b"The quick brown fox"]], np.object_),
    "max_tokens": np.array([[NUM_TOKENS]], np.int32),
    "ignore_eos": np.array([[True]]),
    "stream": np.array([[True]]),
}
TYPES = {"text_input": "BYTES", "max_tokens": "INT32", "ignore_eos": "BOOL", "stream": "BOOL"}


def inputs(module: Any) -> list[Any]:
    tensors = []
    for name, array in FIELDS.items():
        tensors.append(module.InferInput(name, array.shape, TYPES[name]))
        tensors[-1].set_data_from_numpy(array)
    return tensors


def text_of(results: list[Any]) -> str:
    """Of one request's responses. Exits where the end is not where clients look for it: on the last one, with its tensors."""
    finals = [result.get_response().parameters["triton_final_response"].bool_param for result in results]
    if finals != [False] * (len(results) - 1) + [True]:
        sys.exit(f"final flags: {finals}")
    texts = [result.as_numpy("text_output") for result in results]
    if any(text is None or text.shape != (1,) for text in texts):
        sys.exit(f"shapes of text_output: {[text.shape if text is not None else None for text in texts]}")
    return "".join(text[0].decode() for text in texts)


def by_callback(url: str) -> list[str]:
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    with grpcclient.InferenceServerClient(url) as client:
        client.start_stream(callback=lambda result, error: answers.put((result, error)))
        for number in range(NUM_REQUESTS):
            client.async_stream_infer(MODEL, inputs(grpcclient), request_id=f"{number}", enable_empty_final_response=True)
        client.stop_stream()
    return texts_by_id(list(answers.queue))


async def by_asyncio(url: str) -> list[str]:
    async def requests() -> AsyncIterator[dict[str, Any]]:
        for number in range(NUM_REQUESTS):
            yield {
                "model_name": MODEL,
                "inputs": inputs(aioclient),
                "request_id": f"{number}",
                "enable_empty_final_response": True,
            }

    async with aioclient.InferenceServerClient(url) as client:
        return texts_by_id([answer async for answer in client.stream_infer(requests())])


def texts_by_id(answers: list[tuple[Any, Any]]) -> list[str]:
    results: dict[str, list[Any]] = {}
    for result, error in answers:
        if error is not None:
            raise error
        results.setdefault(result.get_response().id, []).append(result)
    return [text_of(each) for each in results.values()]


def over_http(url: str) -> str:
    """What it says of the model; and its words for that it cannot infer with it."""
    with httpclient.InferenceServerClient(url) as client:
        if not (client.is_server_ready() and client.is_model_ready(MODEL)):
            sys.exit(f"{MODEL} is not ready over HTTP")
        if not client.get_model_config(MODEL)["model_transaction_policy"]["decoupled"]:
            sys.exit(f"{MODEL} is not decoupled")
        try:
            client.infer(MODEL, inputs(httpclient))
        except InferenceServerException as error:
            return error.message()
    return "served"


def main() -> None:
    texts = by_callback(sys.argv[1]) + asyncio.run(by_asyncio(sys.argv[1]))
    if len(texts) != 2 * NUM_REQUESTS or not texts[0] or set(texts) != {texts[0]}:
        sys.exit(f"{len(texts)} of {2 * NUM_REQUESTS} requests were answered, with {set(texts)}")
    print(f"{len(texts)} requests on a gRPC and an asyncio stream; infer over HTTP: {over_http(sys.argv[2])}")


if __name__ == "__main__":
    main()
