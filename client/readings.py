"""What a model did over a while, as plain numbers: from samples of its metrics and from its configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

from client.knobs import KNOBS, ModelConfig, Setting, count_instances, read_setting
from client.metrics import Snapshot, Window


@dataclass(frozen=True)
class Readings:
    """Means over a window unless the name says otherwise; a value that nothing was observed of is None.

    `knobs` are those that the configuration has. Waits: `queue_ms` in Triton's queue, `inside_wait_ms` from its handing a
    request over to the start; TTFT is counted from the hand-over, so the queue's wait comes before it.
    """

    seconds: float
    knobs: Setting = field(default_factory=dict)
    kv_cache_gpu_fraction: float = 0.0
    prefix_caching: bool = True
    instances: int = 1

    requests: float = 0.0  # handed over by Triton
    prompt_tokens: float = 0.0
    prefix_hit_tokens: float = 0.0
    generated_tokens: float = 0.0

    max_sequences: float = 0.0  # of all instances
    running: float = 0.0
    running_max: float = 0.0
    active_share: float = 0.0  # of samples with a running sequence
    busy_share: float = 0.0  # of the time of all instances, spent in steps
    waiting: float = 0.0  # inside the model
    pending: float = 0.0  # in Triton's queue
    pending_max: float = 0.0

    queue_ms: float | None = None
    inside_wait_ms: float | None = None
    ttft_p50_ms: float | None = None
    ttft_p99_ms: float | None = None
    itl_p50_ms: float | None = None
    itl_p99_ms: float | None = None
    itl_count: float = 0.0
    step_mean_ms: float | None = None
    steps: float = 0.0
    prefill_steps: float = 0.0
    decode_steps: float = 0.0
    queue_batch_size: float | None = None
    prefill_batch_size: float | None = None
    decode_batch_size: float | None = None

    kv_pages: float = 0.0
    kv_used_share: float = 0.0
    kv_cached_share: float = 0.0
    preemptions: float = 0.0
    evicted_pages: float = 0.0
    finished: dict[str, float] = field(default_factory=dict)  # by reason
    failures: dict[str, float] = field(default_factory=dict)  # of Triton, by reason

    @property
    def queued(self) -> float:
        """Requests that wait, in Triton's queue or inside the model."""
        return self.pending + self.waiting

    @property
    def wait_ms(self) -> float:
        """From arrival to start."""
        return (self.queue_ms or 0.0) + (self.inside_wait_ms or 0.0)

    @property
    def hit_share(self) -> float:
        return self.prefix_hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def prefill_tokens_per_step(self) -> float:
        """Prompt tokens computed in a step that has any."""
        return (self.prompt_tokens - self.prefix_hit_tokens) / self.prefill_steps if self.prefill_steps else 0.0

    @property
    def prefill_tokens_per_request(self) -> float:
        """Prompt tokens that had to be computed for one request."""
        return (self.prompt_tokens - self.prefix_hit_tokens) / self.requests if self.requests else 0.0


def take_readings(snapshots: Sequence[Snapshot], config: ModelConfig) -> Readings:
    """From two or more snapshots in order of time. Gauges are means over them; counters, from the first to the last."""
    window = Window(snapshots[0], snapshots[-1])
    instances = count_instances(config)
    running = [snapshot.gauge("llm_running_sequences") for snapshot in snapshots]
    pending = [snapshot.gauge("nv_inference_pending_request_count") for snapshot in snapshots]
    pages = fmean(snapshot.gauge("llm_kv_pages") for snapshot in snapshots)
    # Triton counts a request, and the time that it queued, when `execute` returns: for these models when it is handed over.
    handed_over = window.delta("nv_inference_request_success")
    return Readings(
        seconds=window.seconds,
        knobs=read_setting(config, KNOBS),
        kv_cache_gpu_fraction=float(_parameter(config, "kv_cache_gpu_fraction", "0")),
        prefix_caching=_parameter(config, "prefix_caching", "true").strip().lower() in ("true", "1", "yes", "on", "t", "y"),
        instances=instances,
        requests=window.delta("llm_queue_batch_size_sum"),
        prompt_tokens=window.delta("llm_prompt_tokens"),
        prefix_hit_tokens=window.delta("llm_prefix_hit_tokens"),
        generated_tokens=window.delta("llm_generated_tokens"),
        max_sequences=snapshots[-1].gauge("llm_max_sequences"),
        running=fmean(running),
        running_max=max(running),
        active_share=fmean(count > 0 for count in running),
        busy_share=min(1.0, window.rate("llm_step_seconds_sum") / instances),
        waiting=fmean(snapshot.gauge("llm_waiting_sequences") for snapshot in snapshots),
        pending=fmean(pending),
        pending_max=max(pending),
        queue_ms=window.delta("nv_inference_queue_duration_us") / 1e3 / handed_over if handed_over else None,
        inside_wait_ms=_ms(window.mean("llm_queue_wait_seconds")),
        ttft_p50_ms=_ms(window.quantile("llm_ttft_seconds", 0.5)),
        ttft_p99_ms=_ms(window.quantile("llm_ttft_seconds", 0.99)),
        itl_p50_ms=_ms(window.quantile("llm_itl_seconds", 0.5)),
        itl_p99_ms=_ms(window.quantile("llm_itl_seconds", 0.99)),
        itl_count=window.count("llm_itl_seconds"),
        step_mean_ms=_ms(window.mean("llm_step_seconds")),
        steps=window.count("llm_step_seconds"),
        prefill_steps=window.count("llm_prefill_batch_size"),
        decode_steps=window.count("llm_decode_batch_size"),
        queue_batch_size=window.mean("llm_queue_batch_size"),
        prefill_batch_size=window.mean("llm_prefill_batch_size"),
        decode_batch_size=window.mean("llm_decode_batch_size"),
        kv_pages=pages,
        # Sequences wait for whichever is full.
        kv_used_share=max(_share(snapshots, name, "used") for name in ("llm_kv_pages", "llm_kv_window_pages")),
        kv_cached_share=_share(snapshots, "llm_kv_pages", "cached"),
        preemptions=window.delta("llm_preemptions"),
        evicted_pages=window.delta("llm_evicted_pages"),
        finished=window.deltas("llm_finished_requests", "reason"),
        failures=window.deltas("nv_inference_request_failure", "reason"),
    )


def _share(snapshots: Sequence[Snapshot], name: str, state: str) -> float:
    """Of all pages in a pool, those in this state."""
    pages = fmean(snapshot.gauge(name) for snapshot in snapshots)
    return fmean(snapshot.gauge(name, state=state) for snapshot in snapshots) / pages if pages else 0.0


def _parameter(config: ModelConfig, name: str, default: str) -> str:
    return config.parameters[name].string_value if name in config.parameters else default


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3
