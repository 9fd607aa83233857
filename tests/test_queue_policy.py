"""The timeouts that a request keeps when it waits inside the model: those of Triton's queue."""

from __future__ import annotations

import pytest

from llm_runtime.queue_policy import num_warmup_requests, read_queue_policy


def config(default: dict, levels: int = 0, own: dict | None = None) -> dict:
    return {
        "dynamic_batching": {
            "priority_levels": levels,
            "default_queue_policy": {"timeout_action": "REJECT"} | default,
            "priority_queue_policy": {
                str(level): {"timeout_action": "REJECT"} | policy for level, policy in (own or {}).items()
            },
        }
    }


def timeouts(default_us: int, override: bool = True) -> dict:
    return {"default_timeout_microseconds": default_us, "allow_timeout_override": override}


@pytest.mark.parametrize(
    ("policy", "requested", "expected"),
    [
        (timeouts(1000), 0, 1000),
        (timeouts(1000), 400, 400),
        (timeouts(1000), 4000, 1000),  # a longer one does not count
        (timeouts(1000, override=False), 400, 1000),
        (timeouts(0), 400, 0),  # nothing is shorter than no default
        (timeouts(1000) | {"timeout_action": "DELAY"}, 400, 0),
        ({}, 400, 0),
    ],
)
def test_one_level_follows_tritons_queue(policy, requested, expected):
    assert read_queue_policy(config(policy)).timeout_us(requested) == expected


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ({1: timeouts(3000)}, 3000),  # the most patient level counts
        ({1: timeouts(0)}, 0),
        ({2: timeouts(1000) | {"timeout_action": "DELAY"}}, 0),
        ({1: timeouts(500), 2: timeouts(700)}, 700),  # no level is left for the default
    ],
)
def test_of_several_levels_the_most_patient_counts(own, expected):
    assert read_queue_policy(config(timeouts(1000), 2, own)).timeout_us(0) == expected


def test_without_dynamic_batching_there_is_no_timeout():
    assert read_queue_policy({"dynamic_batching": None}).timeout_us(400) == 0
    assert read_queue_policy({}).timeout_us(400) == 0


def test_warmup_requests_are_counted_as_triton_sends_them():
    assert num_warmup_requests({}) == 0
    assert num_warmup_requests({"model_warmup": [{"batch_size": 2, "count": 3}, {"batch_size": 1, "count": 0}]}) == 7
