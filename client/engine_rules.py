"""Rules of a diagnosis about the engine: KV pages, prompts beside streams, the prefix cache, time between steps."""

from __future__ import annotations

from client.findings import Finding, Move, milliseconds, number
from client.readings import Readings

FULL = 0.9  # share of its sequences that run, from which on the engine is full
DEEP = 1.0  # requests that wait, on average, from which on a queue is one
PAGES_SHORT = 0.95  # used share of the KV pages from which on a sequence may not find one
STARVED = 3.0  # ITL p99 over p50
MIN_ITLS = 100  # fewer say nothing of a 99th percentile
MIN_PREFILL_SHARE = 0.01  # of steps: rarer ones do not reach the 99th percentile
MIN_CHUNK = 16  # a smaller prefill_chunk_tokens costs more than it saves
LONG_TTFT = 8.0  # TTFT p50 over ITL p50
MANY_CHUNKS = 2.0  # chunks of one prompt from which on a larger chunk shortens its prefill
USEFUL_HITS = 0.05  # share of prompt tokens from the cache, from which on an evicted page may be missed
STEPPING = 0.6  # of the time in which sequences run: with less spent in steps, something else takes it
MOSTLY = 0.5  # share of steps, or of the time, from which on a thing is the rule


def is_full(r: Readings) -> bool:
    """Nearly all sequences run all the time, or all of them at times while others wait: where requests are short, the change
    from one to the next takes a part of the time in which none counts as running."""
    nearly_all = r.running >= FULL * r.max_sequences
    at_times = r.running >= MOSTLY * r.max_sequences and r.running_max >= r.max_sequences and r.queued >= DEEP
    return r.max_sequences > 0 and (nearly_all or at_times)


def are_pages_short(r: Readings) -> bool:
    """Sequences were paused for want of pages, or wait for some."""
    return r.preemptions > 0 or (r.kv_used_share >= PAGES_SHORT and r.waiting >= DEEP)


def more_pages(r: Readings) -> Move:
    """Turn up the knob that decides how many pages there are."""
    if r.kv_cache_gpu_fraction:
        return Move("kv_cache_gpu_fraction", "raise", r.kv_cache_gpu_fraction)
    megabytes = number(r, "kv_cache_memory_mb")
    return Move("kv_cache_memory_mb", "raise", megabytes, megabytes and 2 * megabytes)


def kv_pages(r: Readings) -> Finding | None:
    """Sequences are paused, or kept waiting, for want of pages."""
    if not are_pages_short(r):
        return None
    ended = max(1.0, r.requests, sum(r.finished.values()))
    says = f"KV pages run short: {r.kv_used_share:.0%} in use, {r.preemptions:.0f} sequences were paused and computed again."
    if not r.preemptions:
        says = f"KV pages run short: {r.kv_used_share:.0%} in use, and {r.waiting:.1f} requests wait for some."
    moves = [more_pages(r)]
    present = number(r, "max_sequences")
    fewer = max(1, int(r.running / r.instances))
    if r.preemptions and present is not None and fewer < present:
        moves.append(Move("max_sequences", "lower", present, fewer))
    advice = "Where memory is short, fewer sequences at a time lose less than pausing them does." if len(moves) > 1 else ""
    evidence = {"preemptions": r.preemptions, "kv_used_share": r.kv_used_share, "waiting": r.waiting}
    return Finding("kv_pages", 0.5 + 0.5 * min(1.0, r.preemptions / ended), says, tuple(moves), advice, evidence)


def is_starved(r: Readings) -> bool:
    """Some tokens take far longer than most, there are enough to tell, and it is not pauses that do it."""
    if not r.itl_p50_ms or not r.itl_p99_ms or r.itl_count < MIN_ITLS or r.preemptions:
        return False
    return r.itl_p99_ms >= STARVED * r.itl_p50_ms and r.prefill_steps >= MIN_PREFILL_SHARE * r.steps


def prefill_starves_decode(r: Readings) -> Finding | None:
    """Prompt chunks in a step hold up the streams that run beside them."""
    chunk = number(r, "prefill_chunk_tokens")
    if not is_starved(r) or r.itl_p99_ms is None or r.itl_p50_ms is None:
        return None
    ratio = r.itl_p99_ms / r.itl_p50_ms
    per_step = r.prefill_tokens_per_step
    says = (
        f"Prompts hold up running streams: ITL p99 {milliseconds(r.itl_p99_ms)} is {ratio:.1f} times p50 "
        f"{milliseconds(r.itl_p50_ms)}, and {r.prefill_steps / r.steps:.0%} of steps have prompt chunks, of "
        f"{per_step:.0f} tokens on average."
    )
    evidence = {"itl_p99_ms": r.itl_p99_ms, "itl_p50_ms": r.itl_p50_ms, "prefill_tokens_per_step": per_step}
    # A chunk larger than what steps carry does not bind: halving it would change nothing.
    to = int(min(chunk, max(per_step, MIN_CHUNK)) / 2) if chunk else None
    if chunk is not None and (chunk <= MIN_CHUNK or (to is not None and to < MIN_CHUNK)):
        advice = f"prefill_chunk_tokens, now {chunk}, can hardly go lower: prompts and streams need an instance or server more."
        return Finding("prefill_starves_decode", 0.3, says, (), advice, evidence)
    move = Move("prefill_chunk_tokens", "lower", chunk, to)
    advice = f"TTFT, now p50 {milliseconds(r.ttft_p50_ms)}, gets longer for it."
    return Finding("prefill_starves_decode", min(0.8, 0.3 + 0.02 * ratio), says, (move,), advice, evidence)


def small_prefill(r: Readings) -> Finding | None:
    """First tokens come late because a step takes few prompt tokens."""
    if r.ttft_p50_ms is None or not r.itl_p50_ms or is_starved(r) or are_pages_short(r) or not r.steps:
        return None
    # Of a full engine, what is waited for is the end of others, and the rest is prefill.
    prefill_ms = r.ttft_p50_ms - ((r.inside_wait_ms or 0.0) if is_full(r) else 0.0)
    if prefill_ms < LONG_TTFT * r.itl_p50_ms:
        return None
    beside_decode = r.decode_steps >= MOSTLY * r.steps
    chunk, step = number(r, "prefill_chunk_tokens"), number(r, "max_step_tokens")
    binding = "prefill_chunk_tokens" if beside_decode and not (chunk and step and chunk >= step) else "max_step_tokens"
    present = chunk if binding == "prefill_chunk_tokens" else step
    chunks = r.prefill_tokens_per_request / present if present else 0.0
    waits_for_tokens = r.waiting >= DEEP and not is_full(r)
    if chunks < MANY_CHUNKS and not waits_for_tokens:
        return None
    says = (
        f"First tokens come late: TTFT p50 {milliseconds(r.ttft_p50_ms)} is {r.ttft_p50_ms / r.itl_p50_ms:.0f} times ITL p50. "
        f"A prompt has {r.prefill_tokens_per_request:.0f} tokens to compute, a step takes {r.prefill_tokens_per_step:.0f} of "
        f"{r.prefill_batch_size or 0.0:.1f} prompts; {r.waiting:.1f} requests wait inside the model."
    )
    evidence = {
        "ttft_p50_ms": r.ttft_p50_ms,
        "itl_p50_ms": r.itl_p50_ms,
        "prefill_tokens_per_request": r.prefill_tokens_per_request,
        "prefill_tokens_per_step": r.prefill_tokens_per_step,
        "prefill_batch_size": r.prefill_batch_size,
        "waiting": r.waiting,
    }
    move = Move(binding, "raise", present, present and 2 * present)
    advice = f"ITL p99, now {milliseconds(r.itl_p99_ms)}, gets longer for it." if beside_decode else ""
    return Finding("small_prefill", 0.45, says, (move,), advice, evidence)


def prefix_cache(r: Readings) -> Finding | None:
    """What reuse of prompts brings, and whether pages that would be reused are given up."""
    if not r.prompt_tokens:
        return None
    if not r.prefix_caching:
        return Finding("prefix_cache", 0.15, "prefix_caching is off: prompts that start the same are computed each time.")
    evidence = {"hit_share": r.hit_share, "evicted_pages": r.evicted_pages, "kv_cached_share": r.kv_cached_share}
    says = (
        f"The prefix cache had {r.hit_share:.0%} of prompt tokens; it holds {r.kv_cached_share:.0%} of the pages and gave up "
        f"{r.evicted_pages:.0f}."
    )
    if r.evicted_pages and r.hit_share >= USEFUL_HITS:
        advice = "Prompts do share their starts, and pages of such were given up for others."
        return Finding("prefix_cache", 0.25, says, (more_pages(r),), advice, evidence)
    return Finding("prefix_cache", 0.02, says, evidence=evidence)


def between_steps(r: Readings) -> Finding | None:
    """Sequences run, but steps take only part of the time."""
    if r.active_share < MOSTLY or r.busy_share * r.instances >= STEPPING * r.active_share:
        return None
    says = (
        f"Sequences run {r.active_share:.0%} of the time, and steps take {r.busy_share:.0%}: the rest goes between "
        "steps, to the server's processor."
    )
    advice = "No batching knob changes that: look for what else runs on the server's cores, or give it more of them."
    evidence = {"active_share": r.active_share, "busy_share": r.busy_share, "step_mean_ms": r.step_mean_ms}
    return Finding("between_steps", 0.2, says, (), advice, evidence)
