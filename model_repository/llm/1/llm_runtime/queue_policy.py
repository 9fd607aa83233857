"""What the model configuration says about waiting: the timeouts of Triton's queue, and the requests it warms up with.

A request that Triton has handed over may still wait inside for a free sequence. It keeps the timeout it had in the queue, by
the queue's own rules (PolicyQueue::Enqueue in Triton's core). Two things a model is not told: the request's priority level, so
where levels differ the most patient one counts; and how long the request has waited already, so its time starts again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class LevelPolicy:
    """A ModelQueuePolicy of Triton's model configuration, as far as it is about time."""

    rejects: bool  # timeout_action REJECT; DELAY lets a request wait on behind the others
    default_timeout_us: int  # 0: none
    allows_override: bool

    def timeout_us(self, requested_us: int) -> int:
        """How long a request may wait; 0: for ever. A request's own timeout counts only where it is the shorter one, and so not
        where there is no default."""
        if not self.rejects:
            return 0
        if self.allows_override and 0 < requested_us < self.default_timeout_us:
            return requested_us
        return self.default_timeout_us


class QueuePolicy:
    """Of all priority levels together."""

    def __init__(self, levels: list[LevelPolicy]) -> None:
        self._levels = levels

    def timeout_us(self, requested_us: int) -> int:
        """How long a request may wait on inside the model, whatever its level; 0: for ever."""
        timeouts = [level.timeout_us(requested_us) for level in self._levels]
        return max(timeouts) if timeouts and all(timeouts) else 0


def read_queue_policy(model_config: Mapping[str, Any]) -> QueuePolicy:
    """From a model configuration as Triton gives it to the model; a queue without dynamic batching has no timeouts."""
    batching = model_config.get("dynamic_batching")
    if not batching:
        return QueuePolicy([])
    own = {int(level): _read_level(policy) for level, policy in (batching.get("priority_queue_policy") or {}).items()}
    default = _read_level(batching.get("default_queue_policy") or {})
    levels = range(1, int(batching.get("priority_levels") or 0) + 1)
    return QueuePolicy([own.get(level, default) for level in levels] or [default])


def num_warmup_requests(model_config: Mapping[str, Any]) -> int:
    """Requests that Triton sends to each instance before it calls the model ready."""
    return sum(max(1, int(each.get("count") or 0)) * int(each["batch_size"]) for each in model_config.get("model_warmup") or [])


def _read_level(policy: Mapping[str, Any]) -> LevelPolicy:
    return LevelPolicy(
        rejects=policy.get("timeout_action", "REJECT") in ("REJECT", 0),
        default_timeout_us=int(policy.get("default_timeout_microseconds") or 0),
        allows_override=bool(policy.get("allow_timeout_override")),
    )
