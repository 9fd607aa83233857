"""The thread that talks back to Triton.

A response costs a fraction of a millisecond, so the engine never waits for one: outputs are queued, and this thread sends them.
When it falls behind, what has piled up for one stream goes out as one response. On a timer it also asks, for each live
request, whether its client has left (a message to the server and a wait each, so never once a token).
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import triton_python_backend_utils as pb_utils

from llm_runtime.request import ReplyOptions
from llm_runtime.triton import codec
from llm_runtime.types import SequenceOutput

log = logging.getLogger(__name__)
FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
POLL_SECONDS = 0.1


class RequestReplies:
    """The response sender of one Triton request, shared by its sequences; the last one to end sends the final flag."""

    def __init__(self, sender: Any, num_sequences: int) -> None:
        self.sender = sender
        self._num_open = num_sequences

    def end_one(self) -> None:
        self._num_open -= 1

    def send(self, response: Any) -> None:
        if self._num_open == 0:
            self.sender.send(response, flags=FINAL)
        else:
            self.sender.send(response)


class Group:
    """The sequences of one prompt whose client does not stream: they are answered together, in their order."""

    def __init__(self, num_sequences: int) -> None:
        self._ended: dict[int, tuple[SequenceOutput, float]] = {}
        self._num_sequences = num_sequences

    def end(self, index: int, output: SequenceOutput, cumulative_logprob: float) -> list[tuple[SequenceOutput, float]]:
        """All of them once this was the last, else none."""
        self._ended[index] = output, cumulative_logprob
        return [self._ended[i] for i in range(self._num_sequences)] if len(self._ended) == self._num_sequences else []


@dataclass(slots=True)
class Stream:
    """One row's way back, and what has not been sent of it. Only the sender thread touches it after `open`."""

    replies: RequestReplies
    reply: ReplyOptions
    outputs: frozenset[str]  # names of the output tensors that the client asked for
    group: Group
    pending: SequenceOutput | None = None
    cumulative_logprob: float = 0.0

    def add(self, output: SequenceOutput) -> None:
        """Merge an output into what waits to be sent."""
        if self.pending is None:
            self.pending = output
            return
        output.token_ids = self.pending.token_ids + output.token_ids
        output.logprobs = self.pending.logprobs + output.logprobs
        output.text = self.pending.text + output.text
        if self.pending.prompt_logprobs is not None:  # with the first token, so never with both
            output.prompt_logprobs = self.pending.prompt_logprobs
        self.pending = output

    def take_response(self) -> Any | None:
        """The response that is due now, or None while there is nothing to say."""
        output = self.pending
        if output is None:
            return None
        ended = output.finish_reason is not None
        # Text held back for a stop string or half a character is no event; its tokens are counted with the next one.
        if not ended and (not self.reply.stream or not output.text):
            return None
        self.pending = None
        self.cumulative_logprob += sum(entry.logprob for entry in output.logprobs)
        output.text = self.reply.prompt_text + output.text
        together = [(output, self.cumulative_logprob)]
        if not self.reply.stream:
            together = self.group.end(self.reply.sequence_index, output, self.cumulative_logprob)
        for each, _ in together:
            if (error := codec.failure(each)) is not None:
                return error
        return codec.make_response(together, self.reply, self.outputs) if together else None


class StreamSender:
    """Owns every open stream. `on_left(request_id)` is called for a request whose client went away."""

    def __init__(self, on_left: Callable[[str], None]) -> None:
        self._on_left = on_left
        self._queue: queue.SimpleQueue[list[SequenceOutput] | None] = queue.SimpleQueue()
        self._streams: dict[str, Stream] = {}
        self._thread = threading.Thread(target=self._run, name="stream-sender", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def open(self, request_id: str, stream: Stream) -> None:
        """Before the request is submitted, so that no output can come first."""
        self._streams[request_id] = stream

    def put(self, outputs: list[SequenceOutput]) -> None:
        self._queue.put(outputs)

    def stop(self) -> None:
        """Send everything that was put before, then end the thread."""
        self._queue.put(None)
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        next_poll = time.monotonic() + POLL_SECONDS
        running = True
        while running:
            running = self._send_queued(timeout=max(0.0, next_poll - time.monotonic()))
            if time.monotonic() >= next_poll:
                self._cancel_left()
                next_poll = time.monotonic() + POLL_SECONDS

    def _send_queued(self, timeout: float) -> bool:
        """Everything in the queue, merged by stream; False when the end was put."""
        touched: dict[str, Stream] = {}
        try:
            batch = self._queue.get(timeout=timeout)
            while batch is not None:
                for output in batch:
                    stream = self._streams[output.request_id]
                    stream.add(output)
                    touched[output.request_id] = stream
                batch = self._queue.get_nowait()
            running = False
        except queue.Empty:
            running = True
        for request_id, stream in touched.items():
            self._send(request_id, stream)
        return running

    def _send(self, request_id: str, stream: Stream) -> None:
        ended = stream.pending is not None and stream.pending.finish_reason is not None
        response = stream.take_response()
        if ended:
            del self._streams[request_id]
            stream.replies.end_one()
        if response is None:
            return
        try:
            stream.replies.send(response)
        except Exception:  # the server refuses responses of a request that it has given up on
            log.exception("a response to request %s could not be sent", request_id)
            self._on_left(request_id)

    def _cancel_left(self) -> None:
        left: dict[int, bool] = {}  # by request, which may have many streams
        for request_id, stream in list(self._streams.items()):
            key = id(stream.replies)
            if key not in left:
                left[key] = stream.replies.sender.is_cancelled()
            if left[key]:
                self._on_left(request_id)
