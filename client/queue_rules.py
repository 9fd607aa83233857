"""Rules of a diagnosis about Triton's queue: waiting for batches, a full engine, refusals, priorities."""

from __future__ import annotations

import math

from client.engine_rules import DEEP, are_pages_short, is_full, more_pages
from client.findings import Finding, Move, milliseconds, number
from client.readings import Readings

FREE = 0.75  # with fewer of its sequences running the engine has room, so nothing should wait
QUEUE_MS = 5.0  # a shorter wait in Triton's queue is not worth a word
ROOM_FOR_PAGES = 1.25  # so many times the sequences must fit before more of them are worth a try
NEARLY_FULL = 0.8  # of max_queue_size at the deepest sample: samples miss the peak


def has_room(r: Readings) -> bool:
    """Few of the sequences run, and no pages are missing for more: a request need not wait."""
    return r.running < FREE * r.max_sequences and not is_full(r) and not are_pages_short(r)


def queue_delay(r: Readings) -> Finding | None:
    """Requests wait in Triton's queue for a batch while the engine could take them."""
    delay_us = number(r, "max_queue_delay_microseconds")
    preferred = r.knobs.get("preferred_batch_size")
    if not delay_us or r.queue_ms is None or r.queue_ms < QUEUE_MS or not has_room(r):
        return None
    moves = [Move("max_queue_delay_microseconds", "lower", delay_us, _lower_delay(delay_us))]
    says = (
        f"Requests wait {r.queue_ms:.0f} ms in Triton's queue for a batch (max_queue_delay_microseconds {delay_us}) while only "
        f"{r.running:.1f} of {r.max_sequences:.0f} sequences run: a sequence can join at any step."
    )
    size = r.queue_batch_size or 0.0
    if isinstance(preferred, tuple) and preferred and size < min(preferred):
        says += f" Batches come with {size:.1f} requests, so the smallest of preferred_batch_size is hardly ever reached."
        moves.append(Move("preferred_batch_size", "lower", preferred))
    evidence = {"queue_ms": r.queue_ms, "running": r.running, "max_sequences": r.max_sequences, "queue_batch_size": size}
    return Finding("queue_delay", 0.4 + 0.5 * _wait_share(r), says, tuple(moves), evidence=evidence)


def _lower_delay(delay_us: int) -> int:
    """Bursts of short prompts may want a little; a millisecond is less than a step of most engines."""
    return 1000 if delay_us > 20_000 else 0


def saturated(r: Readings) -> Finding | None:
    """All sequences run, and more requests wait."""
    if not is_full(r) or r.queued < DEEP:
        return None
    says = (
        f"The engine is full: {r.running:.1f} of {r.max_sequences:.0f} sequences run, {r.queued:.1f} requests wait "
        f"({r.pending:.1f} of them in Triton's queue), {r.wait_ms:.0f} ms each; steps take {r.busy_share:.0%} of the time."
    )
    evidence = {
        "running": r.running,
        "max_sequences": r.max_sequences,
        "queued": r.queued,
        "wait_ms": r.wait_ms,
        "busy_share": r.busy_share,
        "decode_batch_size": r.decode_batch_size,
        "kv_used_share": r.kv_used_share,
    }
    weight = 0.5 + 0.5 * _wait_share(r)
    present = number(r, "max_sequences")
    if present is None:
        present = round(r.max_sequences / r.instances)
    fitting = _fitting_sequences(r)
    if are_pages_short(r) or fitting < ROOM_FOR_PAGES * present:
        advice = "The KV pages do not hold more sequences: more memory for them, or another instance or server."
        move = more_pages(r)
        return Finding("saturated", weight, says, (move,), advice, evidence)
    to = int(min(2 * present, fitting))
    room = f"The KV pages would hold about {fitting:.0f}. " if math.isfinite(fitting) else ""
    advice = (
        f"{room}Each stream gets slower (ITL p50 now {milliseconds(r.itl_p50_ms)}); where that is too slow, or tokens/s get no "
        "better, add an instance or a server."
    )
    return Finding("saturated", weight, says, (Move("max_sequences", "raise", present, to),), advice, evidence)


def _fitting_sequences(r: Readings) -> float:
    """Sequences of an instance that its KV pages would hold, at the present pages a sequence."""
    if not r.kv_used_share or not r.running:
        return float("inf")
    return r.running / r.kv_used_share / r.instances


def rejections(r: Readings) -> Finding | None:
    """Requests refused by the queue: it was full, or they waited too long."""
    inside = r.finished.get("queue_timeout", 0.0)
    rejected = r.failures.get("REJECTED", 0.0)
    if not rejected + inside:
        return None
    share = (rejected + inside) / max(1.0, r.requests + rejected)
    size = number(r, "max_queue_size") or 0
    moves: tuple[Move, ...]
    was_full = size > 0 and r.pending_max >= NEARLY_FULL * size
    evidence = {"rejected": rejected, "queue_timeouts_inside": inside, "pending_max": r.pending_max, "share": share}
    says = f"{rejected + inside:.0f} requests ({share:.0%}) were refused: "
    if was_full and not inside:
        says += f"the queue was full ({r.pending_max:.0f} waiting at most; max_queue_size {size} for each priority level)."
        moves, advice = (Move("max_queue_size", "raise", size, 2 * size),), ""
    else:
        of = f" of max_queue_size {size}" if size else ""
        says += f"they waited past a timeout (at most {r.pending_max:.0f}{of} were in the queue)."
        moves, advice = _longer_timeout(r)
    if is_full(r):
        advice = f"The engine is full: more capacity first, since a longer queue only makes all wait longer. {advice}".strip()
    return Finding("rejections", min(1.0, 0.5 + 0.5 * share), says, moves, advice, evidence)


def _longer_timeout(r: Readings) -> tuple[tuple[Move, ...], str]:
    timeout_us = number(r, "default_timeout_microseconds")
    if not timeout_us:
        return (), "The queue has no timeout of its own (default_timeout_microseconds): it is the one that clients send."
    move = Move("default_timeout_microseconds", "raise", timeout_us, 2 * timeout_us)
    return (move,), "Or the timeout that clients send, where that is the shorter one."


def priorities(r: Readings) -> Finding | None:
    levels = number(r, "priority_levels")
    if not levels or levels < 2:
        return None
    says = f"What each of the {levels} priority levels waits is not on the metrics port: measure it from the clients."
    return Finding("priorities", 0.0, says)


def _wait_share(r: Readings) -> float:
    """Of the time to the first token, as its client sees it."""
    total = (r.queue_ms or 0.0) + (r.ttft_p50_ms or 0.0)
    return min(1.0, r.wait_ms / total) if total else 0.0
