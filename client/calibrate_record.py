"""What a calibration measured, and what follows from it about each setting."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import median

from client.calibrate_moves import Hint, key
from client.errors import ClientError
from client.knobs import Setting


class SettingRefusedError(ClientError):
    """The server does not load the setting; says why."""


@dataclass(frozen=True)
class Outcome:
    """`ratio` is the worst of measured / allowed over the SLO's limits: the SLO holds at 1 or less. `hints` are moves that the
    server's own numbers suggest, `details` what else was measured."""

    ratio: float
    hints: tuple[Hint, ...] = ()
    details: dict[str, object] = field(default_factory=dict)

    @property
    def is_met(self) -> bool:
        return self.ratio <= 1.0


@dataclass(frozen=True)
class Trial:
    """One measurement, or one setting that was refused (`outcome` None)."""

    setting: Setting
    rate: float
    purpose: str
    outcome: Outcome | None
    refused: str = ""


@dataclass
class Result:
    """`verdict`: "improved", "baseline" (no better setting was found) or "none" (none meets the SLO; `chosen` is nearest)."""

    baseline: Setting
    chosen: Setting
    verdict: str = "baseline"
    baseline_capacity: float | None = None
    chosen_capacity: float | None = None
    trials: list[Trial] = field(default_factory=list)
    decisions: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    def ratios(self, setting: Setting, rate: float) -> list[float]:
        """Of every measurement at this very rate."""
        return [t.outcome.ratio for t in self.of(setting) if t.outcome and math.isclose(t.rate, rate, rel_tol=1e-6)]

    def ratio(self, setting: Setting, rate: float) -> float:
        return median(self.ratios(setting, rate))

    def rates(self, setting: Setting) -> list[float]:
        """Rates at which it was measured, ascending."""
        rates: list[float] = []
        for trial in sorted(self.of(setting), key=lambda trial: trial.rate):
            if trial.outcome and not (rates and math.isclose(rates[-1], trial.rate, rel_tol=1e-6)):
                rates.append(trial.rate)
        return rates

    def capacity(self, setting: Setting) -> float | None:
        """Highest rate at which it holds and below which it never failed; None when there is none."""
        held = None
        for rate in self.rates(setting):
            if self.ratio(setting, rate) > 1.0:
                break
            held = rate
        return held

    def lowest_failing(self, setting: Setting) -> float | None:
        return next((rate for rate in self.rates(setting) if self.ratio(setting, rate) > 1.0), None)

    def of(self, setting: Setting) -> list[Trial]:
        """The trials of one setting, as they came."""
        return [trial for trial in self.trials if key(trial.setting) == key(setting)]
