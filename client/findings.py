"""What a diagnosis says: what is off, by which numbers, and which knob to move which way."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from client.knobs import Value, shown
from client.readings import Readings


@dataclass(frozen=True)
class Move:
    """Turn `knob` up or down from its present value (None: not in the configuration); `to` is a next value to try."""

    knob: str
    direction: str  # "raise" or "lower"
    present: Value | float | None
    to: Value | None = None

    def __str__(self) -> str:
        target = "" if self.to is None else f" (try {shown(self.to)})"
        return f"{self.direction} {self.knob}, now {shown(self.present)}{target}"


@dataclass(frozen=True)
class Finding:
    """`weight` 0 to 1 orders findings: what share of latency or of requests is at stake, roughly."""

    rule: str
    weight: float
    says: str
    moves: tuple[Move, ...] = ()
    advice: str = ""
    evidence: Mapping[str, float | None] = field(default_factory=dict)


def lines(finding: Finding) -> Iterator[str]:
    """A finding in plain lines: what is, then what to do."""
    yield finding.says
    for move in finding.moves:
        yield f"-> {move}"
    if finding.advice:
        yield f"   {finding.advice}"


def number(readings: Readings, knob: str) -> int | None:
    """Present value of a knob that is one number."""
    value = readings.knobs.get(knob)
    return value if isinstance(value, int) else None


def milliseconds(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.1f} ms"
