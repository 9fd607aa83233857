"""What a load test sends: lengths, arrivals, traces, objectives; all with a seed, and by hand where that can be done."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest

from client.errors import RefusedError
from client.lengths import parse_lengths
from client.slo import Limit, parse_slo, statistic
from client.workload import TrafficClass, WorkloadSpec, arrival_times, make_workload, read_workload


def spec(**fields) -> WorkloadSpec:
    return WorkloadSpec.model_validate(fields)


def test_an_slo_is_a_list_of_limits():
    slo = parse_slo("ttft_p99=500ms, itl_mean=80us,e2e_p50=2s")
    assert slo.limits == (Limit("ttft", "p99", 0.5), Limit("itl", "mean", 80 * 1e-6), Limit("e2e", "p50", 2.0))
    assert slo.is_met_by({"ttft": [0.1] * 99 + [0.4], "itl": [1e-5], "e2e": [1.0, 9.0, 1.0]})
    assert not slo.is_met_by({"ttft": [0.1], "itl": [1e-3], "e2e": [1.0]})
    assert not slo.is_met_by({"ttft": [], "itl": [1e-5], "e2e": [1.0]}), "what was never measured is not met"
    assert slo.is_good({"ttft": 0.5, "itl": None, "e2e": 2.0})
    assert not slo.is_good({"ttft": 0.6, "itl": None, "e2e": 2.0})


@pytest.mark.parametrize("text", ["", "ttft=1s", "ttft_p0=1s", "ttft_p101=1s", "tpot_p99=1s", "ttft_p99=1", "ttft_p99=0ms"])
def test_an_slo_that_is_none_is_refused_by_name(text):
    with pytest.raises(RefusedError, match="slo: got"):
        parse_slo(text)


def test_statistics_by_hand():
    assert statistic([], "p99") is None
    assert statistic([1.0, 2.0, 6.0], "mean") == 3.0
    assert statistic([0.0, 10.0], "p90") == 9.0  # linear between the nearest


def test_lengths_have_their_distribution():
    rng = np.random.default_rng(3)
    assert set(parse_lengths("7", "x").sample(rng, 10)) == {7}
    uniform = parse_lengths("uniform:2,4", "x").sample(rng, 3000)
    assert {int(value): round(float((uniform == value).mean()), 1) for value in set(uniform)} == {2: 0.3, 3: 0.3, 4: 0.3}
    normal = parse_lengths("normal:100,10", "x").sample(rng, 3000)
    assert (normal.mean(), normal.std()) == (pytest.approx(100, abs=1), pytest.approx(10, abs=0.5))
    lognormal = parse_lengths("lognormal:100,0.5", "x").sample(rng, 3000)
    assert np.median(lognormal) == pytest.approx(100, rel=0.05)
    assert np.log(lognormal).std() == pytest.approx(0.5, rel=0.05)
    assert parse_lengths("normal:1,50", "x").sample(rng, 100).min() == 1


@pytest.mark.parametrize("text", ["0", "-3", "uniform:9,2", "normal:3", "poisson:3", "uniform:0,4"])
def test_lengths_that_are_none_are_refused_by_name(text):
    with pytest.raises(RefusedError, match="output_tokens: got"):
        parse_lengths(text, "output_tokens")


def test_poisson_arrivals_have_exponential_gaps_and_constant_ones_equal_gaps():
    gaps = np.diff(arrival_times(np.random.default_rng(1), 4000, 10.0, "poisson"))
    assert gaps.mean() == pytest.approx(0.1, rel=0.05)
    assert gaps.std() == pytest.approx(0.1, rel=0.05)  # of an exponential distribution, equal to the mean
    assert (gaps > 0.1).mean() == pytest.approx(np.exp(-1), abs=0.03)
    assert np.diff(arrival_times(np.random.default_rng(1), 50, 4.0, "constant")) == pytest.approx(np.full(49, 0.25))
    assert arrival_times(np.random.default_rng(1), 3, 4.0, "poisson")[0] == 0.0


def test_the_same_seed_gives_the_same_requests_at_the_same_times():
    same = [spec(requests=20, rate=5, seed=4).build() for _ in range(2)]
    assert same[0] == same[1]
    assert spec(requests=20, rate=5, seed=5).build() != same[0]
    assert len({each.request.prompt for each in same[0].planned}) == 20
    assert same[0].scaled(2.0).planned[-1].at == pytest.approx(same[0].planned[-1].at / 2)


def test_classes_have_their_share_lengths_and_limits():
    classes = [
        {"name": "chat", "share": 3, "prompt_tokens": "20", "output_tokens": "5", "priority": 1, "timeout_ms": 900},
        {"name": "batch", "prompt_tokens": "50", "prefix_tokens": 30, "prefix_count": 2, "salted": True, "deadline_ms": 7},
    ]
    planned = spec(requests=400, classes=classes).build().planned
    chat = [each.request for each in planned if each.group == "chat"]
    batch = [each.request for each in planned if each.group == "batch"]
    assert len(chat) / len(planned) == pytest.approx(0.75, abs=0.06)
    assert {(len(r.prompt.split()), r.max_tokens, r.priority, r.timeout_ms) for r in chat} == {(20, 5, 1, 900)}
    assert {len(r.prompt.split()) for r in batch} == {50}
    assert {r.cache_salt for r in batch} == {"batch-0", "batch-1"}
    assert len({tuple(r.prompt.split()[:30]) for r in batch}) == 2
    assert {r.deadline_ms for r in batch} == {7}


def test_our_own_trace_has_times_prompts_and_groups(tmp_path):
    lines = [{"at": 5.5, "prompt_tokens": 4, "output_tokens": 2, "group": "b"}, {"at": 5.0, "prompt": "hi", "output_tokens": 3}]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    planned = read_workload(path).planned
    assert [(each.at, each.group, each.request.max_tokens) for each in planned] == [(0.0, "default", 3), (0.5, "b", 2)]
    assert planned[0].request.prompt == "hi"


def test_an_azure_trace(tmp_path):
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,374,44\n2023-11-16 18:17:04.0799600,12,1\n"
    )
    planned = read_workload(path).planned
    assert [len(each.request.prompt.split()) for each in planned] == [374, 12]
    assert [each.request.max_tokens for each in planned] == [44, 1]
    assert planned[1].at == pytest.approx(0.1, abs=1e-5)


def test_a_mooncake_trace_has_equal_text_for_equal_hashes(tmp_path):
    lines = [
        {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [1, 2, 3]},
        {"timestamp": 2500, "input_length": 1030, "output_length": 6, "hash_ids": [1, 2, 9]},
    ]
    path = tmp_path / "mooncake.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    first, second = read_workload(path).planned
    texts = [each.request.prompt.split() for each in (first, second)]
    assert [len(text) for text in texts] == [1100, 1030]
    assert texts[0][:1024] == texts[1][:1024]
    assert texts[0][1024:1030] != texts[1][1024:]
    assert second.at == 2.5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"at": 0, "prompt_tokens": 3, "output_tokens": 2}\n{"at": -1, "prompt_tokens": 3, "output_tokens": 2}', "line 2: at"),
        ('{"at": 0, "output_tokens": 2}', "line 1: prompt, prompt_tokens"),
        ('{"at": 0, "prompt_tokens": 3, "output_tokens": 2}\nnonsense', "line 2: not JSON"),
        ('{"timestamp": 0, "input_length": 0, "output_length": 1, "hash_ids": []}', "line 1: input_length"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,1", "line 2: TIMESTAMP"),
        ('{"requests": 5,\n "rates": 3}', "rates"),
        ('{"classes": [{"prompt_tokens": "many"}]}', "classes.0.prompt_tokens"),
        ("what is this", "neither a trace nor JSON"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens", "has no request with an output"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path, text, message):
    path = tmp_path / "workload"
    path.write_text(text)
    with pytest.raises(RefusedError, match=message):
        read_workload(path)


def test_a_class_has_defaults():
    assert TrafficClass.model_validate({}).prompt_tokens == "128"


def test_a_sustained_rate_lasts_as_long_as_the_workload():
    workload = make_workload({"requests": 40, "rate": 2.0, "seed": 3, "classes": [{"salted": True, "prefix_tokens": 5}]})
    for factor in (0.5, 1.0, 2.5, 8.0):
        sustained = workload.sustained(factor)
        assert sustained.rate == pytest.approx(factor * workload.rate, rel=0.05)
        assert len(sustained.planned) == (max(1.0, factor) * 40)
        times = [each.at for each in sustained.planned]
        assert times == sorted(times)
    prompts = Counter((each.request.prompt, each.request.cache_salt) for each in workload.sustained(8.0).planned)
    assert set(prompts.values()) == {1}, "a round may find nothing of the one before in the prefix cache"
    assert workload.sustained(1.0).planned == workload.planned


def test_runs_that_are_kept_apart_share_no_salt_and_keep_their_groups():
    workload = make_workload(
        {"requests": 30, "classes": [{"salted": True, "prefix_tokens": 5, "prefix_count": 3}, {"share": 2}]}
    )
    salts = {}
    for run in ("a", "b"):
        salts[run] = [each.request.cache_salt for each in workload.apart(run).planned]
        groups = {(before.request.cache_salt, salt) for before, salt in zip(workload.planned, salts[run], strict=True)}
        assert len(groups) == len({before for before, _ in groups}) == 4
    assert not set(salts["a"]) & set(salts["b"])
