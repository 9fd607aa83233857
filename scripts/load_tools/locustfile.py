"""Users that stream from `llm` over HTTP, one after another: TTFT and ITL stand beside locust's own table of requests."""

from __future__ import annotations

import json
import random
import time

from locust import HttpUser, between, task

MODEL = "llm"
PROMPTS = ("The quick brown fox", "Once upon a time there was", "def add(a, b):")


class StreamingUser(HttpUser):
    wait_time = between(0.0, 0.1)

    @task
    def generate(self) -> None:
        body = {"text_input": random.choice(PROMPTS), "max_tokens": 32, "ignore_eos": True, "stream": True}
        started = last = time.perf_counter()
        events: list[dict] = []
        path = f"/v2/models/{MODEL}/generate_stream"
        with self.client.post(path, json=body, stream=True, catch_response=True, name="generate_stream") as response:
            if response.status_code != 200:
                return response.failure(f"{response.status_code}: {response.text}")
            for line in response.iter_lines(chunk_size=None):
                if not line.startswith(b"data: "):
                    continue
                now = time.perf_counter()
                self._record("TTFT" if not events else "ITL", now - (last if events else started))
                last = now
                events.append(json.loads(line.removeprefix(b"data: ")))
            if not events or "error" in events[-1]:  # an error in a stream comes under status 200
                response.failure(events[-1]["error"] if events else "no event")
            elif sum(event["num_output_tokens"] for event in events) != body["max_tokens"]:
                response.failure("fewer tokens than asked for")
            else:
                response.success()
            # Without this, locust counts to the headers, which come with the first token.
            response.request_meta["response_time"] = 1000 * (last - started)

    def _record(self, what: str, seconds: float) -> None:
        """A row of its own in locust's table; its times are in ms, and its column "#/s" counts events."""
        self.environment.events.request.fire(
            request_type=what, name="event", response_time=1000 * seconds, response_length=0, exception=None, context={}
        )
