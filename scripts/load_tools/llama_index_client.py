"""LlamaIndex's NvidiaTriton: complete, stream_complete, and several at a time. `python llama_index_client.py HOST:8001`."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

from llama_index.llms.nvidia_triton import NvidiaTriton

NUM_REQUESTS = 20


def main() -> None:
    # `model_name`, not `model`: version 0.6.0 has both and heeds only the first.
    llm = NvidiaTriton(server_url=sys.argv[1], model_name="llm", tokens=16)
    whole = llm.complete("The quick brown fox").text
    streamed = "".join(chunk.delta for chunk in llm.stream_complete("The quick brown fox"))
    # It drops the last of 16 chunks; how many tokens a chunk has depends on how far the server is ahead of the client.
    if not whole or not (whole.startswith(streamed) or streamed.startswith(whole)):
        sys.exit(f"complete gave {whole!r}, stream_complete {streamed!r}")
    with ThreadPoolExecutor(4) as pool:
        texts = list(pool.map(lambda i: llm.complete(f"Number {i}:").text, range(NUM_REQUESTS - 2)))
    if not all(texts):
        sys.exit("an answer is empty")
    print(f"{NUM_REQUESTS} requests by complete and stream_complete")


if __name__ == "__main__":
    main()
