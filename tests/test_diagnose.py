"""The rules of a diagnosis, each by hand at its boundaries."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tritonclient.grpc import model_config_pb2

from client import engine_rules, queue_rules
from client.diagnose import diagnose
from client.findings import Finding, Move, lines
from client.metrics import Snapshot
from client.readings import Readings, take_readings

KNOBS = {
    "max_sequences": 8,
    "prefill_chunk_tokens": 128,
    "max_step_tokens": 512,
    "max_batch_size": 8,
    "max_queue_delay_microseconds": 0,
    "preferred_batch_size": (),
    "priority_levels": 0,
    "max_queue_size": 100,
    "default_timeout_microseconds": 60_000_000,
    "kv_cache_memory_mb": 1024,
}
# A server with nothing amiss: half of its sequences run, nothing waits, tokens come evenly.
WELL = Readings(
    seconds=20.0,
    knobs=KNOBS,
    requests=100,
    prompt_tokens=10_000,
    prefix_hit_tokens=1_000,
    generated_tokens=6_400,
    max_sequences=8,
    running=4.0,
    running_max=6,
    active_share=1.0,
    busy_share=0.95,
    queue_ms=0.5,
    inside_wait_ms=5.0,
    ttft_p50_ms=60.0,
    ttft_p99_ms=120.0,
    itl_p50_ms=15.0,
    itl_p99_ms=30.0,
    itl_count=6_300,
    step_mean_ms=14.0,
    steps=1_400,
    prefill_steps=100,
    decode_steps=1_380,
    queue_batch_size=1.2,
    prefill_batch_size=1.1,
    decode_batch_size=4.5,
    kv_pages=1000,
    kv_used_share=0.3,
    kv_cached_share=0.2,
    finished={"length": 100},
)


def with_knobs(readings: Readings = WELL, /, **knobs: Any) -> Readings:
    return replace(readings, knobs=dict(readings.knobs) | knobs)


def found(readings: Readings, rule: str) -> Finding:
    return next(finding for finding in diagnose(readings) if finding.rule == rule)


def rules(readings: Readings) -> set[str]:
    """Rules that ask for something."""
    return {finding.rule for finding in diagnose(readings) if finding.moves or finding.advice}


def test_a_server_that_does_well_is_told_so_and_nothing_is_to_be_moved():
    assert rules(WELL) == set()
    assert diagnose(WELL)[0].rule == "nothing"
    assert "4.0 of 8 sequences run" in diagnose(WELL)[0].says


def test_without_traffic_nothing_is_judged():
    idle = Readings(seconds=20.0, knobs=with_knobs(max_queue_delay_microseconds=500_000).knobs, max_sequences=8)
    assert [finding.rule for finding in diagnose(idle)] == ["no_traffic"]


@pytest.mark.parametrize("sign", [{"requests": 1}, {"running_max": 1}, {"pending_max": 1}, {"failures": {"REJECTED": 1.0}}])
def test_any_sign_of_a_request_is_traffic(sign):
    assert "no_traffic" not in {f.rule for f in diagnose(Readings(seconds=20.0, **sign))}


@pytest.mark.parametrize(("requests", "expected"), [(9, True), (10, False)])
def test_few_requests_are_said_to_be_few(requests, expected):
    assert ("few_requests" in {f.rule for f in diagnose(replace(WELL, requests=requests))}) is expected


DELAYED = replace(with_knobs(max_queue_delay_microseconds=500_000), queue_ms=400.0)


def test_a_wait_for_a_batch_with_sequences_free_asks_for_a_shorter_delay():
    finding = diagnose(DELAYED)[0]
    assert finding.rule == "queue_delay"
    assert finding.moves == (Move("max_queue_delay_microseconds", "lower", 500_000, 1000),)
    assert finding.evidence["queue_ms"] == 400.0
    assert list(lines(finding))[1] == "-> lower max_queue_delay_microseconds, now 500000 (try 1000)"


@pytest.mark.parametrize(
    ("readings", "expected"),
    [
        (replace(DELAYED, queue_ms=queue_rules.QUEUE_MS), True),
        (replace(DELAYED, queue_ms=queue_rules.QUEUE_MS - 0.1), False),
        (replace(DELAYED, queue_ms=None), False),
        (replace(DELAYED, running=queue_rules.FREE * 8 - 0.1), True),
        (replace(DELAYED, running=queue_rules.FREE * 8), False),
        (replace(DELAYED, running_max=8, pending=1.0), False),  # it waits for sequences to end
        (replace(DELAYED, preemptions=1), False),  # the pages are short, not the batch
        (with_knobs(DELAYED, max_queue_delay_microseconds=0), False),
    ],
)
def test_when_a_delay_is_too_long(readings, expected):
    assert ("queue_delay" in rules(readings)) is expected


def test_a_short_delay_that_still_costs_is_to_go_altogether():
    finding = found(with_knobs(DELAYED, max_queue_delay_microseconds=20_000), "queue_delay")
    assert finding.moves[0].to == 0


@pytest.mark.parametrize(("size", "expected"), [(1.2, True), (3.9, True), (4.0, False), (6.0, False)])
def test_a_preferred_batch_that_never_comes_is_named_with_the_delay(size, expected):
    readings = replace(with_knobs(DELAYED, preferred_batch_size=(4, 8)), queue_batch_size=size)
    moves = found(readings, "queue_delay").moves
    assert (Move("preferred_batch_size", "lower", (4, 8)) in moves) is expected


FULL = replace(WELL, running=8.0, running_max=8, pending=10.0, pending_max=14, waiting=2.0, queue_ms=900.0, kv_used_share=0.4)


def test_a_full_engine_with_a_deep_queue_asks_for_more_sequences_where_the_pages_hold_them():
    finding = diagnose(FULL)[0]
    assert finding.rule == "saturated"
    assert finding.moves == (Move("max_sequences", "raise", 8, 16),)
    assert "about 20" in finding.advice
    assert "12.0 requests wait (10.0 of them in Triton's queue)" in finding.says


@pytest.mark.parametrize(
    ("readings", "expected"),
    [
        (replace(FULL, running=0.9 * 8, running_max=7), True),
        (replace(FULL, running=0.5 * 8), True),  # all of them at times, while others wait
        (replace(FULL, running=0.5 * 8 - 0.1), False),
        (replace(FULL, running=0.9 * 8 - 0.1, running_max=7), False),  # never all of them
        (replace(FULL, pending=1.0, waiting=0.0), True),
        (replace(FULL, pending=0.5, waiting=0.4), False),
    ],
)
def test_when_an_engine_is_saturated(readings, expected):
    assert ("saturated" in rules(readings)) is expected


@pytest.mark.parametrize(
    ("used", "move"),
    [
        (0.4, Move("max_sequences", "raise", 8, 16)),
        (0.7, Move("max_sequences", "raise", 8, 11)),  # no more than the pages hold
        (0.8, Move("max_sequences", "raise", 8, 10)),  # exactly room for 1.25 times as many
        (0.85, Move("kv_cache_memory_mb", "raise", 1024, 2048)),
    ],
)
def test_how_many_sequences_the_pages_hold_decides_which_knob(used, move):
    assert found(replace(FULL, kv_used_share=used), "saturated").moves == (move,)


def test_a_full_engine_whose_sequences_were_paused_is_not_given_more_of_them():
    assert found(replace(FULL, preemptions=3), "saturated").moves[0].knob == "kv_cache_memory_mb"


def test_sequences_are_counted_for_each_instance():
    readings = replace(FULL, instances=2, max_sequences=16, running=16.0)
    assert found(readings, "saturated").moves == (Move("max_sequences", "raise", 8, 16),)


def test_max_sequences_that_is_not_in_the_configuration_is_read_from_the_metrics():
    knobs = {name: value for name, value in KNOBS.items() if name != "max_sequences"}
    assert found(replace(FULL, knobs=knobs), "saturated").moves[0].present == 8


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"preemptions": 1}, True),
        ({"kv_used_share": 0.95, "waiting": 1.0}, True),
        ({"kv_used_share": 0.94, "waiting": 1.0}, False),
        ({"kv_used_share": 0.95, "waiting": 0.9}, False),
    ],
)
def test_when_pages_run_short(change, expected):
    assert ("kv_pages" in rules(replace(WELL, **change))) is expected


def test_short_pages_ask_for_memory_or_for_fewer_sequences():
    finding = found(replace(WELL, preemptions=30, kv_used_share=0.97), "kv_pages")
    assert finding.moves == (Move("kv_cache_memory_mb", "raise", 1024, 2048), Move("max_sequences", "lower", 8, 4))
    assert finding.weight == pytest.approx(0.5 + 0.5 * 0.3)


def test_on_a_gpu_the_fraction_is_the_knob():
    finding = found(replace(WELL, preemptions=30, kv_cache_gpu_fraction=0.8), "kv_pages")
    assert str(finding.moves[0]) == "raise kv_cache_gpu_fraction, now 0.8"


STARVED = replace(WELL, itl_p99_ms=150.0, prefill_steps=100)


def test_a_long_tail_of_itl_beside_prompts_asks_for_smaller_chunks():
    finding = found(STARVED, "prefill_starves_decode")
    assert finding.moves == (Move("prefill_chunk_tokens", "lower", 128, 45),)  # half of the 90 tokens that a step carries
    assert "10.0 times p50" in finding.says


@pytest.mark.parametrize(
    ("readings", "expected"),
    [
        (replace(STARVED, itl_p99_ms=45.0), True),
        (replace(STARVED, itl_p99_ms=44.9), False),
        (replace(STARVED, itl_count=100), True),
        (replace(STARVED, itl_count=99), False),
        (replace(STARVED, prefill_steps=14), True),
        (replace(STARVED, prefill_steps=13), False),
        (replace(STARVED, itl_p50_ms=None, itl_p99_ms=None), False),
        (replace(STARVED, preemptions=1), False),  # a pause is a long gap too
    ],
)
def test_when_prompts_hold_up_streams(readings, expected):
    assert ("prefill_starves_decode" in rules(readings)) is expected


@pytest.mark.parametrize(("chunk", "to"), [(64, 32), (32, 16), (31, None), (16, None)])
def test_a_chunk_is_not_lowered_under_what_it_is_good_for(chunk, to):
    moves = found(with_knobs(STARVED, prefill_chunk_tokens=chunk), "prefill_starves_decode").moves
    assert moves == ((Move("prefill_chunk_tokens", "lower", chunk, to),) if to else ())


# Prompts of 900 tokens in chunks of 128 beside streams.
LATE = replace(WELL, prompt_tokens=90_000, prefix_hit_tokens=0, ttft_p50_ms=300.0, prefill_steps=750)


def test_late_first_tokens_of_many_chunks_ask_for_larger_ones():
    finding = found(LATE, "small_prefill")
    assert finding.moves == (Move("prefill_chunk_tokens", "raise", 128, 256),)
    assert "900 tokens" in finding.says


@pytest.mark.parametrize(
    ("readings", "expected"),
    [
        (replace(LATE, ttft_p50_ms=8 * 15.0), True),
        (replace(LATE, ttft_p50_ms=8 * 15.0 - 0.1), False),
        (replace(LATE, prompt_tokens=100 * 256), True),  # two chunks a prompt
        (replace(LATE, prompt_tokens=100 * 255), False),
        (replace(LATE, prompt_tokens=100 * 100, waiting=1.0), True),  # short prompts that wait for each other
        (replace(LATE, prompt_tokens=100 * 100, waiting=0.9), False),
        (replace(LATE, prompt_tokens=100 * 100, waiting=1.0, running=8.0), False),  # it is sequences that they wait for
        (replace(LATE, preemptions=1), False),
        (replace(LATE, itl_p99_ms=150.0), False),  # larger chunks would starve streams even more
        (replace(LATE, running=8.0, inside_wait_ms=200.0), False),  # most of the time is for others to end
    ],
)
def test_when_prompts_are_computed_in_too_small_pieces(readings, expected):
    assert ("small_prefill" in rules(readings)) is expected


def test_the_binding_limit_is_the_step_where_the_chunk_is_as_large_or_nothing_decodes():
    assert found(with_knobs(LATE, prefill_chunk_tokens=512, max_step_tokens=256), "small_prefill").moves[0] == Move(
        "max_step_tokens", "raise", 256, 512
    )
    alone = replace(LATE, prompt_tokens=300_000, decode_steps=100)
    assert found(alone, "small_prefill").moves[0] == Move("max_step_tokens", "raise", 512, 1024)


def test_refusals_by_a_full_queue_name_its_size():
    refused = replace(WELL, failures={"REJECTED": 25.0}, pending_max=80)
    finding = diagnose(refused)[0]
    assert finding.rule == "rejections"
    assert finding.moves == (Move("max_queue_size", "raise", 100, 200),)
    assert "25 requests (20%) were refused" in finding.says


@pytest.mark.parametrize(
    "change",
    [
        {"failures": {"REJECTED": 25.0}, "pending_max": 79},  # the queue was never near its size
        {"finished": {"length": 90, "queue_timeout": 10.0}, "pending_max": 100},
    ],
)
def test_refusals_with_room_in_the_queue_or_inside_the_model_are_timeouts(change):
    finding = found(replace(WELL, **change), "rejections")
    assert finding.moves == (Move("default_timeout_microseconds", "raise", 60_000_000, 120_000_000),)


def test_without_a_timeout_of_the_queue_it_was_the_clients():
    readings = with_knobs(replace(WELL, failures={"REJECTED": 5.0}), default_timeout_microseconds=0, max_queue_size=0)
    finding = found(readings, "rejections")
    assert finding.moves == ()
    assert "clients send" in finding.advice


def test_a_full_engine_comes_before_the_queue_that_refuses_because_of_it():
    readings = replace(FULL, failures={"REJECTED": 25.0}, pending_max=100)
    assert [finding.rule for finding in diagnose(readings)][:2] == ["saturated", "rejections"]
    assert "more capacity first" in found(readings, "rejections").advice


def test_other_failures_are_no_refusals():
    assert "rejections" not in rules(replace(WELL, failures={"CANCELED": 5.0, "BACKEND": 1.0}))


@pytest.mark.parametrize(("hits", "evicted", "expected"), [(500, 1, True), (499, 1, False), (500, 0, False)])
def test_pages_that_would_be_reused_and_are_given_up_ask_for_memory(hits, evicted, expected):
    readings = replace(WELL, prefix_hit_tokens=hits, evicted_pages=evicted)
    finding = found(readings, "prefix_cache")
    assert (finding.moves == (Move("kv_cache_memory_mb", "raise", 1024, 2048),)) is expected
    assert f"{hits / 10_000:.0%}" in finding.says


def test_a_prefix_cache_that_is_off_is_said_to_be_off():
    assert "off" in found(replace(WELL, prefix_caching=False), "prefix_cache").says


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"busy_share": 0.59}, True),
        ({"busy_share": 0.6}, False),
        ({"busy_share": 0.2, "active_share": 0.49}, False),
        ({"busy_share": 0.3, "instances": 2, "max_sequences": 16}, False),
    ],
)
def test_when_time_goes_between_steps(change, expected):
    assert ("between_steps" in rules(replace(WELL, **change))) is expected


@pytest.mark.parametrize(("levels", "expected"), [(0, False), (1, False), (2, True)])
def test_priorities_are_said_to_be_out_of_sight(levels, expected):
    findings = {finding.rule for finding in diagnose(with_knobs(priority_levels=levels))}
    assert ("priorities" in findings) is expected


def test_findings_come_by_weight():
    readings = replace(with_knobs(FULL, priority_levels=3), itl_p99_ms=150.0, failures={"REJECTED": 25.0}, pending_max=100)
    weights = [finding.weight for finding in diagnose(readings)]
    assert weights == sorted(weights, reverse=True)
    assert len(weights) >= 4


def labelled(**labels: str) -> frozenset:
    return frozenset(labels.items())


def test_readings_are_means_of_gauges_and_growth_of_counters():
    config = model_config_pb2.ModelConfig(max_batch_size=4)
    config.parameters["max_sequences"].string_value = "3"
    config.parameters["prefix_caching"].string_value = "false"
    config.dynamic_batching.preferred_batch_size[:] = [2, 4]
    none = frozenset()

    def sample(time: float, running: float, used: float, tokens: float) -> Snapshot:
        return Snapshot(
            time,
            {
                "llm_running_sequences": {none: running},
                "llm_max_sequences": {none: 3.0},
                "llm_kv_pages": {labelled(state="used"): used, labelled(state="free"): 10 - used},
                "llm_generated_tokens": {none: tokens},
                "llm_step_seconds_sum": {none: tokens / 100},
                "nv_inference_request_success": {none: tokens / 10},
                "nv_inference_queue_duration_us": {none: tokens * 500},
                "llm_finished_requests": {labelled(reason="stop"): tokens / 20, labelled(reason="length"): 7.0},
            },
        )

    readings = take_readings([sample(0.0, 0, 1, 0), sample(1.0, 3, 9, 100), sample(2.0, 3, 8, 200)], config)
    assert (readings.seconds, readings.running, readings.running_max, readings.max_sequences) == (2.0, 2.0, 3, 3)
    assert readings.active_share == pytest.approx(2 / 3)
    assert readings.kv_used_share == pytest.approx(0.6)
    assert (readings.generated_tokens, readings.busy_share) == (200, 1.0)
    assert readings.queue_ms == pytest.approx(5.0)
    assert readings.finished == {"stop": 10.0}
    window = {"llm_kv_window_pages": {labelled(state="used"): 18.0, labelled(state="free"): 2.0}}
    fuller = [Snapshot(time, {**sample(time, 1, 5, 0).series, **window}) for time in (0.0, 1.0)]
    assert take_readings(fuller, config).kv_used_share == pytest.approx(0.9), "of the pool that is fuller"
    assert (readings.ttft_p50_ms, readings.itl_count) == (None, 0)
    assert readings.knobs == {
        "max_sequences": 3,
        "max_batch_size": 4,
        "max_queue_delay_microseconds": 0,
        "preferred_batch_size": (2, 4),
        "priority_levels": 0,
    }
    assert readings.prefix_caching is False


def test_every_threshold_keeps_a_full_engine_and_one_with_room_apart():
    assert queue_rules.FREE < engine_rules.FULL
