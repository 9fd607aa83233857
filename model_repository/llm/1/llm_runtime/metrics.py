"""What the engine counts, and the names under which it is shown."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

GAUGES = {
    "llm_running_sequences": "Sequences that generate now",
    "llm_waiting_sequences": "Sequences inside the model that wait to start or were preempted; Triton's own queue is not in it",
    "llm_kv_pages": "Pages of the KV cache by state: used, cached (kept for prompts that start the same), free",
    "llm_decode_batch_size": "Decode tokens of the last step",
    "llm_prefill_batch_size": "Prompts with a chunk in the last step that had one",
}
COUNTERS = {
    "llm_steps": "Steps that ran",
    "llm_prompt_tokens": "Prompt tokens of requests that started",
    "llm_prefix_hit_tokens": "Prompt tokens whose keys and values the prefix cache had",
    "llm_generated_tokens": "Tokens generated",
    "llm_preemptions": "Times a sequence gave up its pages to be computed again later",
    "llm_evicted_pages": "Cached pages given up for others",
    "llm_finished_requests": "Requests by how they ended",
}


@dataclass(slots=True)
class Stats:
    """Gauges are of now, counters since the load. Read by other threads: single values are right, sums may be a step apart."""

    running: int = 0
    waiting: int = 0
    pages_used: int = 0
    pages_cached: int = 0
    pages_free: int = 0
    decode_batch_size: int = 0
    prefill_batch_size: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    prefix_hit_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    evicted_pages: int = 0
    finished: Counter[str] = field(default_factory=Counter)  # by finish reason


def gauge_values(stats: Stats) -> dict[tuple[str, str], float]:
    """Values by (name, "label=value" or "")."""
    return {
        ("llm_running_sequences", ""): stats.running,
        ("llm_waiting_sequences", ""): stats.waiting,
        ("llm_kv_pages", "state=used"): stats.pages_used,
        ("llm_kv_pages", "state=cached"): stats.pages_cached,
        ("llm_kv_pages", "state=free"): stats.pages_free,
        ("llm_decode_batch_size", ""): stats.decode_batch_size,
        ("llm_prefill_batch_size", ""): stats.prefill_batch_size,
    }


def counter_values(stats: Stats) -> dict[tuple[str, str], float]:
    """Values by (name, "label=value" or "")."""
    values: dict[tuple[str, str], float] = {
        ("llm_steps", ""): stats.steps,
        ("llm_prompt_tokens", ""): stats.prompt_tokens,
        ("llm_prefix_hit_tokens", ""): stats.prefix_hit_tokens,
        ("llm_generated_tokens", ""): stats.generated_tokens,
        ("llm_preemptions", ""): stats.preemptions,
        ("llm_evicted_pages", ""): stats.evicted_pages,
    }
    return values | {("llm_finished_requests", f"reason={reason}"): count for reason, count in list(stats.finished.items())}
