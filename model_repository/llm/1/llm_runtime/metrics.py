"""What the engine counts, and the names under which it is shown; docs/metrics.md says what each one tells."""

from __future__ import annotations

import bisect
from collections import Counter
from dataclasses import dataclass, field

from llm_runtime.types import FinishReason

# Seconds: from a millisecond to a minute, each at most 1.7 times the one before, so that a quantile is off by less than that.
LATENCY_BOUNDS = (
    *(0.001, 0.0015, 0.002, 0.003, 0.005, 0.0075),
    *(0.01, 0.015, 0.02, 0.03, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 0.75),
    *(1.0, 1.5, 2.0, 3.0, 5.0, 7.5),
    *(10.0, 15.0, 20.0, 30.0, 45.0, 60.0),
)
BATCH_BOUNDS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024)

# Why a request ended: a sequence's reason, or that it waited too long to start, or that it was not one that can be served.
END_REASONS = (*(reason.value for reason in FinishReason), "queue_timeout", "refused")

GAUGES = {
    "llm_max_sequences": "Sequences that may generate at the same time",
    "llm_running_sequences": "Sequences that generate now",
    "llm_waiting_sequences": "Sequences inside the model that wait to start or were preempted; Triton's own queue is not in it",
    "llm_kv_pages": "Pages of the KV cache by state: used, cached (kept for prompts that start the same), free",
    "llm_kv_window_pages": "Of layers with a window, where they have pages of their own: as llm_kv_pages",
}
COUNTERS = {
    "llm_prompt_tokens": "Prompt tokens of requests that started",
    "llm_prefix_hit_tokens": "Prompt tokens whose keys and values the prefix cache had",
    "llm_generated_tokens": "Tokens generated",
    "llm_draft_tokens": "Tokens guessed ahead by speculation and checked",
    "llm_accepted_tokens": "Tokens guessed ahead that were right",
    "llm_preemptions": "Times a sequence gave up its pages to be computed again later",
    "llm_evicted_pages": "Cached pages given up for others",
    "llm_finished_requests": "Requests by how they ended",
}
HISTOGRAMS = {
    "llm_ttft_seconds": "From Triton's handing a request over to its first token",
    "llm_itl_seconds": "From one token of a sequence to its next",
    "llm_queue_wait_seconds": "From Triton's handing a request over to its start",
    "llm_step_seconds": "Duration of a step",
    "llm_queue_batch_size": "Requests that Triton handed over at once",
    "llm_prefill_batch_size": "Prompts with a chunk in a step, of steps that had one",
    "llm_decode_batch_size": "Decode tokens in a step, of steps that had one",
}


class Histogram:
    """Counts of values by upper bound. One thread observes; others may read, and see counts that are a moment old."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)  # of values up to each bound and over the one before; the last is over all bounds
        self.sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += count
        self.sum += value * count

    @property
    def count(self) -> int:
        return sum(self.counts)


def _seconds() -> Histogram:
    return Histogram(LATENCY_BOUNDS)


def _sizes() -> Histogram:
    return Histogram(BATCH_BOUNDS)


@dataclass(slots=True)
class Stats:
    """Gauges are of now, counters and histograms since the load. Read by other threads: single values are right, sums may be
    a step apart. The engine's thread writes all but `queue_batch_size` and the count of refused requests."""

    max_sequences: int = 0
    running: int = 0
    waiting: int = 0
    pages_used: int = 0
    pages_cached: int = 0
    pages_free: int = 0
    window_pages_used: int = 0
    window_pages_cached: int = 0
    window_pages_free: int = 0
    prompt_tokens: int = 0
    prefix_hit_tokens: int = 0
    generated_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    preemptions: int = 0
    evicted_pages: int = 0
    finished: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(END_REASONS, 0)))
    ttft: Histogram = field(default_factory=_seconds)
    itl: Histogram = field(default_factory=_seconds)
    queue_wait: Histogram = field(default_factory=_seconds)
    step: Histogram = field(default_factory=_seconds)
    queue_batch_size: Histogram = field(default_factory=_sizes)
    prefill_batch_size: Histogram = field(default_factory=_sizes)
    decode_batch_size: Histogram = field(default_factory=_sizes)


Series = tuple[str, str]  # name, "label=value" or ""


def gauge_values(stats: Stats) -> dict[Series, float]:
    return {
        ("llm_max_sequences", ""): stats.max_sequences,
        ("llm_running_sequences", ""): stats.running,
        ("llm_waiting_sequences", ""): stats.waiting,
        ("llm_kv_pages", "state=used"): stats.pages_used,
        ("llm_kv_pages", "state=cached"): stats.pages_cached,
        ("llm_kv_pages", "state=free"): stats.pages_free,
        ("llm_kv_window_pages", "state=used"): stats.window_pages_used,
        ("llm_kv_window_pages", "state=cached"): stats.window_pages_cached,
        ("llm_kv_window_pages", "state=free"): stats.window_pages_free,
    }


def counter_values(stats: Stats) -> dict[Series, float]:
    """Counters, and histograms in the form that Prometheus keeps them: counts up to each bound, their number and their sum.

    A histogram's series come from the widest bound down, so that one who reads while they are being passed on in this order
    never finds more values under a bound than under a wider one.
    """
    values: dict[Series, float] = {
        ("llm_prompt_tokens", ""): stats.prompt_tokens,
        ("llm_prefix_hit_tokens", ""): stats.prefix_hit_tokens,
        ("llm_generated_tokens", ""): stats.generated_tokens,
        ("llm_draft_tokens", ""): stats.draft_tokens,
        ("llm_accepted_tokens", ""): stats.accepted_tokens,
        ("llm_preemptions", ""): stats.preemptions,
        ("llm_evicted_pages", ""): stats.evicted_pages,
    }
    values |= {("llm_finished_requests", f"reason={reason}"): count for reason, count in list(stats.finished.items())}
    for name in HISTOGRAMS:
        values |= _histogram_values(name, getattr(stats, name.removeprefix("llm_").removesuffix("_seconds")))
    return values


def _histogram_values(name: str, histogram: Histogram) -> dict[Series, float]:
    counts, total = list(histogram.counts), histogram.sum
    count = sum(counts)
    values: dict[Series, float] = {
        (f"{name}_count", ""): count,
        (f"{name}_sum", ""): total,
        (f"{name}_bucket", "le=+Inf"): count,
    }
    for bound, over in zip(reversed(histogram.bounds), reversed(counts[1:]), strict=True):
        count -= over
        values[(f"{name}_bucket", f"le={bound:g}")] = count
    return values
