"""The thread that owns all state.

    Triton's thread              worker thread                     sender thread
    execute(): submit ─────────► inbox
               wait_for_room ◄── live requests (condition)
                                 engine.step(now) ──outputs──────► on_outputs(...)
                                 inbox ◄──cancel(request_id)─────── polls for clients that left

Only the worker thread touches the engine. Others hand it messages through the inbox; what is live is counted under
one condition. `execute` returning only when there is room is what keeps the queue in Triton, where
its sizes, priorities and timeouts act.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from llm_runtime.engine import Engine
from llm_runtime.errors import EngineError, RequestError
from llm_runtime.types import FinishReason, GenerationRequest, SequenceOutput

log = logging.getLogger(__name__)
OutputHandler = Callable[[list[SequenceOutput]], None]


class Worker:
    """Runs an engine until it is stopped.

    Every submitted request gets exactly one final output, whatever happens. `on_outputs` is called on the worker thread and
    must not block. When a step fails, all live requests end with its message, and `recover` is to make the engine fit to go on;
    where it raises, every later request ends with an error at once.
    """

    def __init__(self, engine: Engine, on_outputs: OutputHandler, recover: Callable[[], None]) -> None:
        self._engine = engine
        self._on_outputs = on_outputs
        self._recover = recover
        self._broken = ""  # why nothing can be served any more
        self._changed = threading.Condition()
        self._inbox: list[GenerationRequest] = []
        self._cancelled: list[str] = []
        self._num_live = 0  # submitted, and not yet given its final output
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine-worker", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        with self._changed:
            self._inbox += requests
            self._num_live += len(requests)
            self._changed.notify_all()

    def cancel(self, request_id: str) -> None:
        """No effect when the request has ended."""
        with self._changed:
            self._cancelled.append(request_id)
            self._changed.notify_all()

    def wait_for_room(self) -> None:
        """Return when fewer requests are live than may run at once, or the worker has stopped.

        Counted here rather than asked of the engine, so that a caller never waits for a step to end while there is room:
        what arrives during a step, in however many batches, prefills together in the next one.
        """
        limit = self._engine.config.max_sequences
        with self._changed:
            self._changed.wait_for(lambda: self._num_live < limit or not self._thread.is_alive())

    def stop(self) -> None:
        """End every live request with an error, and the thread. Returns when both are done."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def is_healthy(self) -> bool:
        return not self._broken

    def _run(self) -> None:
        while self._take_messages():
            try:
                outputs = self._engine.step(time.monotonic())
            except Exception as error:  # whatever failed, what was in flight is lost
                log.exception("a step failed")
                outputs = self._engine.fail_all(f"the engine failed: {error}")
                self._publish(outputs)
                self._try_to_recover()
            else:
                self._publish(outputs)
        self._publish(self._engine.fail_all("the server is shutting down"))

    def _try_to_recover(self) -> None:
        try:
            self._recover()
        except Exception as error:
            log.exception("the engine could not be made again; reload the model")
            self._broken = f"the engine failed and could not be made again: {error}"

    def _take_messages(self) -> bool:
        """Wait for something to do and give it to the engine; False when it is time to stop."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or self._inbox or self._cancelled or self._engine.has_work)
            requests, self._inbox = self._inbox, []
            cancelled, self._cancelled = self._cancelled, []
            stopping = self._stopping
        for request in requests:
            try:
                if self._broken:
                    raise EngineError(self._broken)
                self._engine.add(request)
            except (RequestError, EngineError) as error:
                self._engine.stats.finished["refused" if isinstance(error, RequestError) else "error"] += 1
                self._publish([_failed(request, str(error))])
        for request_id in cancelled:
            self._engine.cancel(request_id)
        return not stopping

    def _publish(self, outputs: list[SequenceOutput]) -> None:
        if not outputs:
            return
        self._on_outputs(outputs)
        num_ended = sum(output.finish_reason is not None for output in outputs)
        if num_ended:
            with self._changed:
                self._num_live -= num_ended
                self._changed.notify_all()


def _failed(request: GenerationRequest, message: str) -> SequenceOutput:
    prompt_tokens = len(request.prompt_ids)
    return SequenceOutput(request.request_id, finish_reason=FinishReason.ERROR, error=message, num_prompt_tokens=prompt_tokens)
