"""The search for serving settings: which setting is measured at which request rate, and what is concluded.

Knows neither server nor clock of its own: `evaluate(setting, rate)` measures, `now()` tells the time. What a setting is worth
is its capacity: the highest rate at which the SLO holds. Outcomes are noisy, so a setting replaces another only after both were
measured again in turn and every new outcome of the one is better than every new outcome of the other.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from statistics import fmean

from client.calibrate_moves import Candidate, Hint, candidates, key
from client.calibrate_record import Outcome, Result, SettingRefusedError, Trial
from client.knobs import Setting

MAX_RATE, MIN_RATE = 1024.0, 1 / 8  # multiples of the workload's own rate
COARSE, FINE = 1.2, 1.07  # how near a failing rate is to one that holds, before and after the search
RAISE = 1.25  # next rate for a setting that holds where the best before it failed
GAIN = 0.05  # a smaller gain is not worth another setting
REPEATS = 2  # of each of two settings that are compared
SWEEP_SHARE, SEARCH_SHARE = 0.35, 0.8  # of the budget: when the baseline's sweep, and the search, have to be over
CURVE = (0.25, 0.5, 0.75, 1.0, 1.25)  # rates of the final curves, as parts of the capacity that was found
NEAR = 1.1  # a rate that was measured stands for one this near


Evaluate = Callable[[Setting, float], Awaitable[Outcome]]


class Search:
    """One search. `say` is told what is being done, in a line each; `result` is complete up to the last measurement whenever
    the search is interrupted."""

    def __init__(
        self,
        evaluate: Evaluate,
        baseline: Setting,
        knobs: Sequence[str],
        budget_seconds: float,
        now: Callable[[], float],
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._evaluate = evaluate
        self._knobs = knobs
        self._budget = budget_seconds
        self._now = now
        self._say = say
        self._started = now()
        self._seconds: list[float] = []  # of each trial, the setting's load included
        self._adopted: list[Hint] = []
        self.result = Result(dict(baseline), dict(baseline))

    async def run(self) -> Result:
        """Sweep the baseline, search, sweep the winner. Raises what `evaluate` raises; SettingRefusedError only for the
        baseline."""
        result = self.result
        baseline = result.baseline
        await self._sweep(baseline, 1.0, COARSE, SWEEP_SHARE)
        fails_at = self.result.lowest_failing(baseline)
        if fails_at is None:
            result.decisions.append("The SLO holds at every rate that was tried: nothing is short.")
            best = baseline
        else:
            best = await self._climb(baseline, fails_at)
        await self._finish(best)
        return result

    # Time

    def _can_afford(self, count: int, share: float = 1.0) -> bool:
        """Whether so many more trials end within this share of the budget, if they take as long as those before."""
        longest = max(self._seconds[-4:], default=0.0)
        return self._now() - self._started + count * longest <= share * self._budget

    async def _measure(self, setting: Setting, rate: float, purpose: str) -> Outcome:
        self._say(f"{purpose}, at {rate:.3g} times the workload's rate")
        started = self._now()
        try:
            outcome = await self._evaluate(setting, rate)
        except SettingRefusedError as error:
            self.result.trials.append(Trial(dict(setting), rate, purpose, None, str(error)))
            raise
        self._seconds.append(self._now() - started)
        self.result.trials.append(Trial(dict(setting), rate, purpose, outcome))
        return outcome

    # The baseline, and later the winner: where the SLO stops to hold

    async def _sweep(self, setting: Setting, start: float, resolution: float, share: float, name: str = "baseline") -> None:
        """Double until it fails, or halve until it holds; then halve the gap."""
        low, high = self.result.capacity(setting), self.result.lowest_failing(setting)
        rate = start
        while low is None or high is None:
            if low is not None:
                rate = 2 * low
            elif high is not None:
                rate = high / 2
            if not MIN_RATE <= rate <= MAX_RATE:
                return
            if self._seconds and not self._can_afford(1, share):
                self.result.skipped.append(f"the sweep of the {name} stopped before {rate:.3g} times the workload's rate")
                return
            await self._measure(setting, rate, f"sweep of the {name}")
            low, high = self.result.capacity(setting), self.result.lowest_failing(setting)
        while high / low > resolution and self._can_afford(1, share):
            await self._measure(setting, math.sqrt(low * high), f"sweep of the {name}")
            low, high = self.result.capacity(setting), self.result.lowest_failing(setting)
            if low is None or high is None:  # a repeat at a known rate turned it over
                return

    # Coordinate search

    async def _climb(self, best: Setting, fails_at: float) -> Setting:
        """Move one knob at a time, at the lowest rate where the best so far fails, until no move is better."""
        tried = {(key(best), fails_at)}
        surpassed: set[object] = set()
        while True:
            queue = [c for c in self._candidates(best, fails_at) if (key(c.setting), fails_at) not in tried]
            queue = [c for c in queue if key(c.setting) not in surpassed]
            for place, candidate in enumerate(queue):
                if not self._can_afford(1, SEARCH_SHARE):
                    self.result.skipped += [f"not tried: {each}" for each in queue[place:]]
                    return best
                tried.add((key(candidate.setting), fails_at))
                if await self._is_better(candidate, best, fails_at):
                    surpassed.add(key(best))
                    best = candidate.setting
                    fails_at = await self._next_failing(best, fails_at)
                    break  # its own neighbours come next
            else:
                return best
            if self.result.ratio(best, fails_at) <= 1.0:  # it holds as far as could be measured
                return best

    def _candidates(self, best: Setting, fails_at: float) -> list[Candidate]:
        """What was better last goes on first, then what the server's own numbers suggest."""
        hints = [
            hint for trial in self.result.of(best) if trial.outcome and trial.rate == fails_at for hint in trial.outcome.hints
        ]
        return candidates(best, self._knobs, [*self._adopted[-1:], *hints])

    async def _is_better(self, candidate: Candidate, best: Setting, rate: float) -> bool:
        """Measured once; and if that is better, both again in turn, and judged by these alone: the first may have been luck."""
        decisions = self.result.decisions
        at = f"at rate {rate:.3g}"
        try:
            first = await self._measure(candidate.setting, rate, f"trying {candidate}")
        except SettingRefusedError as error:
            decisions.append(f"{candidate}: refused by the server: {error}")
            return False
        known = self.result.ratio(best, rate)
        if not first.ratio < known * (1 - GAIN):
            decisions.append(f"{candidate}: not better {at} ({first.ratio:.2f} of the SLO's limit, against {known:.2f})")
            return False
        if not self._can_afford(2 * REPEATS, SEARCH_SHARE):
            decisions.append(f"{candidate}: looked better {at} ({first.ratio:.2f} against {known:.2f}), no time to make sure")
            self.result.skipped.append(f"not confirmed: {candidate}")
            return False
        is_better, figures = await self._duel(candidate.setting, best, rate, f"{candidate} against the best so far")
        decisions.append(f"{candidate}: {'adopted' if is_better else 'within the noise'} {at} ({figures})")
        if is_better:
            self._adopted.append((candidate.knob, candidate.direction))
        return is_better

    async def _duel(self, setting: Setting, other: Setting, rate: float, name: str) -> tuple[bool, str]:
        """Both in turn: whether the first is better every time, and by enough; and the figures."""
        mine, others = [], []
        for _ in range(REPEATS):
            others.append((await self._measure(other, rate, f"repeating {name}")).ratio)
            mine.append((await self._measure(setting, rate, f"repeating {name}")).ratio)
        is_better = max(mine) < min(others) and fmean(mine) < fmean(others) * (1 - GAIN)
        return is_better, f"{_listed(mine)} of the SLO's limit, against {_listed(others)}"

    async def _next_failing(self, best: Setting, rate: float) -> float:
        """The rate at which the new best fails, from where the one before did; the last one that could be measured."""
        while self.result.ratio(best, rate) <= 1.0 and rate * RAISE <= MAX_RATE and self._can_afford(1, SEARCH_SHARE):
            rate *= RAISE
            await self._measure(best, rate, "raising the rate of the best so far")
        return rate

    # The end

    async def _finish(self, best: Setting) -> None:
        result = self.result
        await self._refine(result.baseline, best)
        self._decide(best)
        if result.verdict == "improved" and not await self._is_confirmed(best):
            best = result.baseline
            self._decide(best)
        await self._draw_curves()
        self._decide(best)  # the curves' measurements count too

    async def _is_confirmed(self, best: Setting) -> bool:
        """The winner against the baseline once more, where that fails: each step to it may have been luck."""
        result = self.result
        rate = result.lowest_failing(result.baseline)
        if rate is None or not self._can_afford(2 * REPEATS):
            result.skipped.append("the winner was not measured against the baseline once more")
            return True
        is_better, figures = await self._duel(best, result.baseline, rate, "the winner against the baseline")
        words = "better than the baseline again" if is_better else "within the noise of the baseline: not suggested"
        result.decisions.append(f"winner: {words} at rate {rate:.3g} ({figures})")
        return is_better

    async def _refine(self, baseline: Setting, best: Setting) -> None:
        """Bring both capacities near to where each fails."""
        for setting, name in [(best, "winner"), (baseline, "baseline")] if key(best) != key(baseline) else [(best, "baseline")]:
            start = self.result.capacity(setting) or self.result.lowest_failing(setting) or 1.0
            await self._sweep(setting, start, FINE, 0.9, name)

    def _decide(self, best: Setting) -> None:
        result = self.result
        own, other = self.result.capacity(result.baseline), self.result.capacity(best)
        result.baseline_capacity = own
        if own is None and other is None:
            result.verdict, result.chosen, result.chosen_capacity = "none", best, None
            return
        fails_at = self.result.lowest_failing(result.baseline)
        if key(best) != key(result.baseline) and other is not None and (own is None or (fails_at and other >= fails_at)):
            result.verdict, result.chosen, result.chosen_capacity = "improved", best, other
        else:
            result.verdict, result.chosen, result.chosen_capacity = "baseline", result.baseline, own

    async def _draw_curves(self) -> None:
        result = self.result
        top = result.chosen_capacity or min(self.result.rates(result.baseline), default=1.0)
        settings = [(result.chosen, "chosen setting"), (result.baseline, "baseline")]
        for part in CURVE:
            for setting, name in settings if key(result.chosen) != key(result.baseline) else settings[1:]:
                rate = part * top
                if rate > MAX_RATE or any(1 / NEAR <= known / rate <= NEAR for known in self.result.rates(setting)):
                    continue
                if not self._can_afford(1):
                    result.skipped.append(f"the {name}'s curve has no point at {rate:.3g} times the workload's rate")
                    continue
                await self._measure(setting, rate, f"curve of the {name}")


def _listed(ratios: Sequence[float]) -> str:
    return ", ".join(f"{ratio:.2f}" for ratio in ratios)
