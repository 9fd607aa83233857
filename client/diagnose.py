"""Which way a server's batching is off under its present traffic, and which knob to move: rules on plain numbers.

Each rule looks at one thing that can be wrong, gives a finding where its numbers say so, and names them. Thresholds are the
constants at the top of their files. No rule knows what latency is wanted: that, and whether a move pays, is for a measurement
to say (`calibrate`).
"""

from __future__ import annotations

from collections.abc import Callable

from client import engine_rules, queue_rules
from client.findings import Finding
from client.readings import Readings

FEW_REQUESTS = 10


def diagnose(readings: Readings) -> list[Finding]:
    """What is off, the weightiest first; never empty."""
    if idle := _no_traffic(readings):
        return [idle]
    findings = [finding for rule in RULES if (finding := rule(readings)) is not None]
    if not any(finding.moves or finding.advice for finding in findings):
        findings.append(_nothing(readings))
    return sorted(findings, key=lambda finding: -finding.weight)


def _no_traffic(r: Readings) -> Finding | None:
    if r.requests or r.running_max or r.pending_max or r.generated_tokens or r.failures:
        return None
    return Finding("no_traffic", 1.0, f"No request came or ran in {r.seconds:.0f} s: there is nothing to judge.")


def _nothing(r: Readings) -> Finding:
    says = f"Nothing stands out: {r.running:.1f} of {r.max_sequences:.0f} sequences run, {r.queued:.1f} requests wait."
    return Finding("nothing", 0.1, says, evidence={"running": r.running, "queued": r.queued})


def _few_requests(r: Readings) -> Finding | None:
    if r.requests >= FEW_REQUESTS:
        return None
    return Finding("few_requests", 0.05, f"Only {r.requests:.0f} requests in {r.seconds:.0f} s: the figures are rough.")


RULES: tuple[Callable[[Readings], Finding | None], ...] = (
    _few_requests,
    queue_rules.queue_delay,
    queue_rules.saturated,
    queue_rules.rejections,
    queue_rules.priorities,
    engine_rules.kv_pages,
    engine_rules.prefill_starves_decode,
    engine_rules.small_prefill,
    engine_rules.prefix_cache,
    engine_rules.between_steps,
)
