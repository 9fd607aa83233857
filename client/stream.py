"""One request from start to end: its chunks as they come, its timing, and what it amounted to."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from client.errors import ServerError
from client.timing import Timing
from client.transport import Transport
from client.wire import COUNTS, Chunk, GenerateRequest


@dataclass
class Generation:
    """What a finished request brought."""

    timing: Timing
    text: str = ""
    finish_reason: str = ""
    num_input_tokens: int | None = None
    num_cached_tokens: int | None = None
    num_draft_tokens: int | None = None  # guessed ahead by speculation
    num_accepted_tokens: int | None = None  # those of them that were right
    chunks: list[Chunk] = field(default_factory=list)


async def run(
    transport: Transport,
    request: GenerateRequest,
    on_chunk: Callable[[Chunk], None] = lambda chunk: None,
    clock: Callable[[], float] = time.perf_counter,
) -> Generation:
    """Send the request and wait for its end.

    `on_chunk` is called with each chunk as it comes. Cancelling the task cancels the request on the server, so a limit of the
    caller's own is `asyncio.wait_for(run(...), seconds)`. Raises ClientError, also for an answer that stops short.
    """
    generation = Generation(Timing(sent_at=clock(), streamed=request.stream))
    chunks = transport.generate(request)
    try:
        async for chunk in chunks:
            now = clock()
            generation.timing.arrived(now, chunk.num_tokens)
            generation.timing.ended_at = now
            generation.chunks.append(chunk)
            on_chunk(chunk)
    finally:
        await chunks.aclose()
    if not generation.chunks or not generation.chunks[-1].finish_reason:
        raise ServerError(f"the answer ended after {generation.timing.num_tokens} tokens, before its last response")
    last = generation.chunks[-1]
    generation.text = "".join(chunk.text for chunk in generation.chunks)
    generation.finish_reason = last.finish_reason
    for name in COUNTS:
        setattr(generation, name, getattr(last, name))
    return generation
