"""The search for settings, on a server made up by hand: one whose best setting is known, with noise and without."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Sequence

import pytest

from client.bench import Measurement, Record
from client.calibrate import is_hopeless
from client.calibrate_moves import candidates, key
from client.calibrate_record import Outcome, Result, SettingRefusedError, Trial
from client.calibrate_search import MAX_RATE, Search
from client.knobs import Setting
from client.slo import parse_slo
from client.timing import Timing
from client.wire import GenerateRequest
from client.workload import Planned

BASELINE: Setting = {
    "max_sequences": 8,
    "prefill_chunk_tokens": 128,
    "max_step_tokens": 512,
    "max_batch_size": 8,
    "max_queue_delay_microseconds": 0,
    "preferred_batch_size": (),
}
KNOBS = list(BASELINE)


class MadeUpServer:
    """A measurement takes a second. `capacity(setting)` is where the SLO stops to hold; over it latency grows steeply."""

    def __init__(self, capacity: Callable[[Setting], float], noise: float = 0.0, seed: int = 0) -> None:
        self.capacity = capacity
        self.noise = noise
        self.random = random.Random(seed)
        self.now = 0.0
        self.measured: list[tuple[Setting, float]] = []
        self.refuses: Callable[[Setting], bool] = lambda setting: False
        self.hints: tuple[tuple[str, str], ...] = ()

    async def evaluate(self, setting: Setting, rate: float) -> Outcome:
        if self.refuses(setting):
            raise SettingRefusedError("it does not fit")
        self.now += 1.0
        self.measured.append((dict(setting), rate))
        return Outcome((rate / self.capacity(setting)) ** 2 * math.exp(self.random.gauss(0, self.noise)), self.hints)

    def search(self, budget: float = 200.0, baseline: Setting = BASELINE) -> Result:
        search = Search(self.evaluate, baseline, KNOBS, budget, lambda: self.now)
        return asyncio.run(search.run())


def falls_off(value: object, best: float) -> float:
    """1 at the best value, half as much for each factor of two beside it."""
    return 0.5 ** abs(math.log2(max(float(value), 0.01) / best))  # type: ignore[arg-type]


def two_knobs(setting: Setting) -> float:
    """Best at 32 sequences and chunks of 64."""
    return 10 * falls_off(setting["max_sequences"], 32) * falls_off(setting["prefill_chunk_tokens"], 64) ** 0.5


def flat(setting: Setting) -> float:
    return 3.0


def test_the_known_optimum_is_found_from_the_baseline():
    server = MadeUpServer(two_knobs)
    result = server.search()
    assert result.verdict == "improved"
    assert result.chosen == BASELINE | {"max_sequences": 32, "prefill_chunk_tokens": 64}
    assert result.chosen_capacity == pytest.approx(10, rel=0.08)
    assert result.baseline_capacity == pytest.approx(two_knobs(BASELINE), rel=0.08)
    assert result.chosen_capacity <= 10  # never a rate at which it fails
    assert result.skipped == []


@pytest.mark.parametrize("seed", range(20))
def test_the_optimum_is_nearly_found_under_noise(seed):
    result = MadeUpServer(two_knobs, noise=0.1, seed=seed).search()
    assert result.verdict == "improved"
    assert two_knobs(result.chosen) >= 2 * two_knobs(BASELINE)
    assert result.chosen_capacity <= 1.2 * two_knobs(result.chosen)


def test_noise_alone_hardly_ever_makes_a_better_setting():
    results = [MadeUpServer(flat, noise=0.15, seed=seed).search() for seed in range(40)]
    assert sum(result.verdict == "improved" for result in results) <= 3
    assert {result.verdict for result in results} <= {"improved", "baseline"}


def test_without_noise_a_flat_server_keeps_its_baseline():
    result = MadeUpServer(flat).search()
    assert (result.verdict, result.chosen) == ("baseline", BASELINE)
    assert all("not better" in decision for decision in result.decisions)
    assert len(result.decisions) == len(candidates(BASELINE, KNOBS))


def test_a_baseline_that_is_best_is_said_to_be():
    server = MadeUpServer(lambda setting: 3 * falls_off(setting["max_sequences"], 8))
    result = server.search()
    assert (result.verdict, result.chosen) == ("baseline", BASELINE)
    assert result.chosen_capacity == result.baseline_capacity == pytest.approx(3, rel=0.08)


def test_one_lucky_measurement_adopts_nothing():
    server = MadeUpServer(flat)
    lucky = BASELINE | {"max_sequences": 16}

    async def evaluate(setting: Setting, rate: float) -> Outcome:
        is_first = not any(key(each) == key(lucky) for each, _ in server.measured)
        outcome = await server.evaluate(setting, rate)
        return Outcome(0.1) if is_first and key(setting) == key(lucky) else outcome

    result = asyncio.run(Search(evaluate, BASELINE, KNOBS, 200.0, lambda: server.now).run())
    assert (result.verdict, result.chosen) == ("baseline", BASELINE)
    assert any("within the noise" in decision for decision in result.decisions)


def test_a_rival_is_measured_in_turn_with_the_best_so_far_at_the_rate_where_that_fails():
    server = MadeUpServer(lambda setting: 3.0 if setting["max_sequences"] == 8 else 4.0)
    asyncio.run(Search(server.evaluate, BASELINE, ["max_sequences"], 200.0, lambda: server.now).run())
    first = next(place for place, (setting, _) in enumerate(server.measured) if setting["max_sequences"] == 16)
    turn = server.measured[first : first + 5]
    assert [setting["max_sequences"] for setting, _ in turn] == [16, 8, 16, 8, 16]
    assert len({rate for _, rate in turn}) == 1
    assert 3.0 < turn[0][1] < 3.0 * 1.2


def test_a_refused_setting_is_recorded_with_its_reason_and_the_search_goes_on():
    server = MadeUpServer(two_knobs)
    server.refuses = lambda setting: setting["max_sequences"] > 16
    result = server.search()
    assert result.chosen == BASELINE | {"max_sequences": 16, "prefill_chunk_tokens": 64}
    refused = [trial for trial in result.trials if trial.outcome is None]
    assert refused
    assert {trial.refused for trial in refused} == {"it does not fit"}
    assert all(trial.setting["max_sequences"] > 16 for trial in refused)
    assert any("refused by the server: it does not fit" in decision for decision in result.decisions)


@pytest.mark.parametrize("budget", [3, 10, 20, 40, 50])
def test_the_budget_is_kept_and_what_was_left_out_is_named(budget):
    server = MadeUpServer(two_knobs, noise=0.05)
    result = server.search(budget)
    assert server.now <= budget
    assert result.skipped
    assert len(result.trials) == len(server.measured)


def test_a_suggestion_was_always_measured_where_the_baseline_fails():
    for seed in range(20):
        result = MadeUpServer(two_knobs, noise=0.3, seed=seed).search(60)
        if result.verdict == "improved":
            assert result.ratio(result.chosen, result.chosen_capacity) <= 1.0
            assert result.chosen_capacity >= (result.lowest_failing(result.baseline) or 0)


def test_where_no_setting_meets_the_slo_the_nearest_one_is_named():
    server = MadeUpServer(lambda setting: 0.001 * two_knobs(setting))
    result = server.search()
    assert result.verdict == "none"
    assert result.chosen_capacity is None
    assert result.chosen == BASELINE | {"max_sequences": 32, "prefill_chunk_tokens": 64}


def test_a_server_that_is_never_short_is_left_as_it_is():
    server = MadeUpServer(lambda setting: 1e9)
    result = server.search()
    assert (result.verdict, result.chosen_capacity) == ("baseline", MAX_RATE)
    assert {key(setting) for setting, _ in server.measured} == {key(BASELINE)}
    assert "nothing is short" in result.decisions[0]


def test_hinted_moves_are_tried_first():
    server = MadeUpServer(flat)
    server.hints = (("max_step_tokens", "raise"),)
    server.search()
    first = next(setting for setting, _ in server.measured if key(setting) != key(BASELINE))
    assert first == BASELINE | {"max_step_tokens": 1024}


def test_the_winner_and_the_baseline_are_swept_at_the_same_rates():
    server = MadeUpServer(two_knobs)
    result = server.search()
    for part in (0.25, 0.5, 0.75, 1.0, 1.25):
        for setting in (result.chosen, result.baseline):
            assert any(1 / 1.1 <= known / (part * result.chosen_capacity) <= 1.1 for known in result.rates(setting))


def test_an_interrupted_search_has_what_was_measured_so_far():
    server = MadeUpServer(two_knobs)

    async def evaluate(setting: Setting, rate: float) -> Outcome:
        if len(server.measured) == 9:
            raise asyncio.CancelledError
        return await server.evaluate(setting, rate)

    search = Search(evaluate, BASELINE, KNOBS, 200.0, lambda: server.now)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(search.run())
    assert len(search.result.trials) == 9


def test_capacity_ends_at_the_first_failure_and_repeats_count_by_their_median():
    result = Result(BASELINE, BASELINE)
    for rate, ratio in [(1, 0.2), (2, 0.8), (2, 1.4), (2, 0.9), (4, 1.3), (8, 0.9)]:
        result.trials.append(Trial(BASELINE, rate, "", Outcome(ratio)))
    assert result.ratio(BASELINE, 2) == 0.9
    assert (result.capacity(BASELINE), result.lowest_failing(BASELINE)) == (2, 4)
    assert result.capacity(BASELINE | {"max_sequences": 1}) is None


def moves(setting: Setting, *knobs: str, hints: tuple[tuple[str, str], ...] = ()) -> list[str]:
    return [str(candidate) for candidate in candidates(setting, knobs or KNOBS, hints)]


def test_moves_are_one_notch_of_one_knob():
    assert moves(BASELINE) == [
        "max_sequences 8 -> 16",
        "max_sequences 8 -> 4",
        "prefill_chunk_tokens 128 -> 256",
        "prefill_chunk_tokens 128 -> 64",
        "max_step_tokens 512 -> 1024",
        "max_step_tokens 512 -> 256",
        "max_batch_size 8 -> 16",
        "max_batch_size 8 -> 4",
        "max_queue_delay_microseconds 0 -> 500",
    ]


@pytest.mark.parametrize(
    ("changes", "knob", "expected"),
    [
        ({"max_sequences": 1}, "max_sequences", ["1 -> 2"]),
        ({"max_sequences": 4096}, "max_sequences", ["4096 -> 2048"]),
        ({"prefill_chunk_tokens": 512}, "prefill_chunk_tokens", ["512 -> 256"]),  # more than a step has no effect
        ({"max_step_tokens": 8, "prefill_chunk_tokens": 8}, "max_step_tokens", ["8 -> 16"]),
        ({"max_step_tokens": 16, "max_sequences": 16}, "max_step_tokens", ["16 -> 32"]),
        ({"max_queue_delay_microseconds": 300_000}, "max_queue_delay_microseconds", ["300000 -> 0", "300000 -> 100000"]),
        ({"max_queue_delay_microseconds": 500}, "max_queue_delay_microseconds", ["500 -> 0", "500 -> 1000"]),
        ({"max_queue_delay_microseconds": 500}, "preferred_batch_size", ["[ ] -> [ 4, 8 ]"]),
        ({"max_queue_delay_microseconds": 0}, "preferred_batch_size", []),  # nobody waits for it
        ({"preferred_batch_size": (4, 8)}, "preferred_batch_size", ["[ 4, 8 ] -> [ ]", "[ 4, 8 ] -> [ 2, 4 ]"]),
        ({"preferred_batch_size": (1,)}, "preferred_batch_size", ["[ 1 ] -> [ ]"]),
        ({"preferred_batch_size": (4, 8)}, "max_batch_size", ["8 -> 16"]),  # Triton refuses a larger preferred one
    ],
)
def test_notches_at_their_ends(changes, knob, expected):
    assert moves(BASELINE | changes, knob) == [f"{knob} {each}" for each in expected]


def test_knobs_that_the_configuration_does_not_have_are_not_moved():
    assert moves({"max_sequences": 2}) == ["max_sequences 2 -> 4", "max_sequences 2 -> 1"]


def test_hints_come_first_in_their_order():
    hints = (("max_batch_size", "lower"), ("max_sequences", "lower"))
    assert moves(BASELINE, hints=hints)[:3] == ["max_batch_size 8 -> 4", "max_sequences 8 -> 4", "max_sequences 8 -> 16"]


def measured(ttfts: list[float], itls: Sequence[float] = ()) -> Measurement:
    """Requests that ended: with one token, or with two."""
    records = []
    for index, ttft in enumerate(ttfts):
        timing = Timing(sent_at=0.0, streamed=True)
        timing.arrived(ttft, 1)
        if index < len(itls):
            timing.arrived(ttft + itls[index], 1)
        timing.ended_at = ttft
        records.append(Record(Planned(GenerateRequest("a", 2), 0.0), 0.0, timing=timing))
    return Measurement(records, 1.0, 0.0, [])


def test_a_trial_is_hopeless_by_what_was_measured_and_not_by_what_was_not():
    slo = parse_slo("ttft_p99=100ms,itl_p99=50ms")
    assert not is_hopeless(measured([0.05] * 40), slo), "no ITL yet says nothing of ITL"
    assert is_hopeless(measured([0.5] * 40), slo)
    assert not is_hopeless(measured([0.5] * 10), slo), "too few to tell"
    assert is_hopeless(measured([0.05] * 40, [0.2] * 40), slo)
    assert not is_hopeless(measured([0.15] * 40), slo), "missed, but near: the rest says by how much"
