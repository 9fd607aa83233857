"""The settings next to a setting: one knob moved one notch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from client.knobs import Setting, Value, shown

TUNED = (  # in this order, unless a measurement hints at another
    "max_sequences",
    "prefill_chunk_tokens",
    "max_step_tokens",
    "max_batch_size",
    "max_queue_delay_microseconds",
    "preferred_batch_size",
)
LEAST = {"max_sequences": 1, "prefill_chunk_tokens": 8, "max_step_tokens": 16, "max_batch_size": 1}
MOST = {"max_sequences": 4096, "prefill_chunk_tokens": 8192, "max_step_tokens": 16384, "max_batch_size": 256}
DELAYS_US = (0, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000)

Hint = tuple[str, str]  # knob, "raise" or "lower"


@dataclass(frozen=True)
class Candidate:
    """`setting` differs from the one it was made of in `knob` alone."""

    knob: str
    direction: str
    before: Value
    setting: Setting

    @property
    def value(self) -> Value:
        return self.setting[self.knob]

    def __str__(self) -> str:
        return f"{self.knob} {shown(self.before)} -> {shown(self.value)}"


def key(setting: Setting) -> tuple[tuple[str, Value], ...]:
    """Equal for equal settings."""
    return tuple(sorted(setting.items()))


def candidates(setting: Setting, knobs: Sequence[str], hints: Sequence[Hint] = ()) -> list[Candidate]:
    """Those of these knobs that the setting has, hinted moves first. Settings that Triton would refuse, or in which the move
    could have no effect, are left out."""
    found = [
        Candidate(knob, direction, setting[knob], dict(setting) | {knob: value})
        for knob in knobs
        if knob in setting
        for direction, value in _notches(knob, setting[knob], setting)
    ]
    found = [candidate for candidate in found if _makes_sense(candidate)]
    order = {hint: place for place, hint in enumerate(hints)}
    return sorted(found, key=lambda candidate: order.get((candidate.knob, candidate.direction), len(order)))


def _notches(knob: str, value: Value, setting: Setting) -> Iterator[tuple[str, Value]]:
    if isinstance(value, tuple):
        yield from _preferred(value, setting)
    elif knob == "max_queue_delay_microseconds":
        yield from _delays(value)
    else:
        if value < MOST[knob]:
            yield "raise", min(2 * value, MOST[knob])
        if value > LEAST[knob]:
            yield "lower", max(value // 2, LEAST[knob])


def _delays(value: int) -> Iterator[tuple[str, Value]]:
    """Not to wait at all is tried first: it is what suits an engine that sequences join at any step."""
    lower = [delay for delay in DELAYS_US if delay < value]
    if lower:
        yield "lower", 0
        if lower[-1] > 0:
            yield "lower", lower[-1]
    higher = [delay for delay in DELAYS_US if delay > value]
    if higher:
        yield "raise", higher[0]


def _preferred(value: tuple[int, ...], setting: Setting) -> Iterator[tuple[str, Value]]:
    if value:
        yield "lower", ()
        if max(value) > 1:
            yield "lower", tuple(sorted({max(1, size // 2) for size in value}))
        return
    size = setting.get("max_batch_size")
    if setting.get("max_queue_delay_microseconds") and isinstance(size, int) and size > 1:
        yield "raise", (size // 2, size)


def _makes_sense(candidate: Candidate) -> bool:
    setting = candidate.setting

    def number(knob: str, otherwise: int) -> int:
        value = setting.get(knob)
        return value if isinstance(value, int) else otherwise

    preferred = setting.get("preferred_batch_size")
    if isinstance(preferred, tuple) and preferred and max(preferred) > number("max_batch_size", max(preferred)):
        return False
    step = number("max_step_tokens", MOST["max_step_tokens"])
    if candidate.knob == "prefill_chunk_tokens" and candidate.direction == "raise":
        return number("prefill_chunk_tokens", 0) <= step
    if candidate.knob == "max_step_tokens" and candidate.direction == "lower":
        return step >= number("max_sequences", 0)
    return True
