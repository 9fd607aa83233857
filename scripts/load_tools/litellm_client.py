"""litellm's `triton` provider: whole answers, streams, and several at a time. `python litellm_client.py http://HOST:8000`."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import litellm

NUM_REQUESTS = 20


def ask(url: str, *, stream: bool) -> str:
    # The address ends in /generate; litellm itself adds _stream. Its only OpenAI parameters are max_tokens and
    # max_completion_tokens; what stands in extra_body is sent on as it is.
    answer = litellm.completion(
        model="triton/llm",
        api_base=f"{url}/v2/models/llm/generate",
        messages=[{"role": "user", "content": "The quick brown fox"}],
        max_tokens=16,
        stream=stream,
        extra_body={"ignore_eos": True},
    )
    if stream:
        return "".join(chunk.choices[0].delta.content or "" for chunk in answer)
    return answer.choices[0].message.content


def main() -> None:
    url = sys.argv[1]
    with ThreadPoolExecutor(4) as pool:
        texts = list(pool.map(lambda i: ask(url, stream=bool(i % 2)), range(NUM_REQUESTS)))
    if not texts[0] or set(texts) != {texts[0]}:  # greedy: streamed or not, all must be the same
        sys.exit(f"answers are empty or differ: {set(texts)}")
    print(f"{NUM_REQUESTS} requests, every other one streamed, all with the same text")


if __name__ == "__main__":
    main()
