"""What the runtime counts: by hand on a clock of its own, and on a real server, where everything has to add up."""

from __future__ import annotations

import itertools

import pytest

from llm_runtime.engine import Engine, EngineConfig
from llm_runtime.metrics import LATENCY_BOUNDS, Histogram, Stats, counter_values
from llm_runtime.types import GenerationRequest, SamplingParams
from tests.fake_executor import FakeExecutor
from tests.servers import Client, assert_idle, make_repository, metrics, request_inputs, running, settled_metrics, wait_until
from tests.test_engine import word_tokenizer

PROMPT = "The quick brown fox"
CONTEXT = 30_000


def test_a_value_counts_under_the_smallest_bound_that_holds_it():
    histogram = Histogram((1, 2, 4))
    for value in (0.5, 1, 1.5, 4, 9):
        histogram.observe(value)
    assert histogram.counts == [2, 1, 1, 1]
    assert (histogram.count, histogram.sum) == (5, 16)


def test_a_histogram_is_shown_as_counts_up_to_each_bound_from_the_widest_down():
    stats = Stats()
    for value in (0.0005, 0.004, 100.0):
        stats.itl.observe(value)
    shown = {series: value for series, value in counter_values(stats).items() if series[0].startswith("llm_itl_seconds")}
    labels = [label for name, label in shown if name.endswith("_bucket")]
    assert labels == ["le=+Inf", *(f"le={bound:g}" for bound in reversed(LATENCY_BOUNDS))]
    assert [shown["llm_itl_seconds_bucket", f"le={bound}"] for bound in ("0.001", "0.003", "0.005", "60", "+Inf")] == [
        1,
        1,
        2,
        2,
        3,
    ]
    assert shown["llm_itl_seconds_count", ""] == 3
    assert shown["llm_itl_seconds_sum", ""] == pytest.approx(100.0045)


def test_latency_bounds_reach_from_a_millisecond_to_a_minute_in_small_steps():
    assert (LATENCY_BOUNDS[0], LATENCY_BOUNDS[-1]) == (0.001, 60.0)
    assert max(b / a for a, b in itertools.pairwise(LATENCY_BOUNDS)) < 1.7


class SteppedClock:
    """Each step of the engine takes a tenth of a second."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.1
        return self.now


def test_latencies_and_batch_sizes_by_hand():
    clock = SteppedClock()
    engine = Engine(FakeExecutor(), word_tokenizer(), EngineConfig(1, 64, 64, 100, end_ids=(0,)), clock)
    for name, arrived_at in (("first", -1.0), ("second", -0.5)):
        engine.add(GenerationRequest(name, (5, 6, 7), SamplingParams(max_tokens=3), arrived_at=arrived_at))
    while engine.has_work:
        engine.step(clock.now)
    stats = engine.stats
    assert (stats.ttft.count, stats.itl.count, stats.queue_wait.count) == (2, 4, 2)
    assert stats.queue_wait.sum == pytest.approx(1.0 + 0.8)  # the second started at 0.3, when the first had its three tokens
    assert stats.ttft.sum == pytest.approx(1.1 + 0.9)
    assert stats.itl.sum == pytest.approx(4 * 0.1)
    assert stats.step.sum == pytest.approx(6 * 0.1)
    assert (stats.prefill_batch_size.count, stats.prefill_batch_size.sum) == (2, 2)
    assert (stats.decode_batch_size.count, stats.decode_batch_size.sum) == (4, 4)
    assert stats.finished["length"] == 2


def test_a_preempted_sequence_counts_its_pause_as_one_gap_and_its_first_token_once():
    clock = SteppedClock()
    engine = Engine(FakeExecutor(num_pages=6), word_tokenizer(), EngineConfig(2, 64, 64, 100, end_ids=(0,)), clock)
    for name in ("a", "b"):
        engine.add(GenerationRequest(name, tuple(range(5, 13)), SamplingParams(max_tokens=12, ignore_eos=True)))
    while engine.has_work:
        engine.step(clock.now)
    stats = engine.stats
    assert stats.preemptions > 0
    assert (stats.ttft.count, stats.itl.count) == (2, 22)
    assert stats.itl.sum == pytest.approx(clock.now * 2 - stats.ttft.sum - (clock.now - 1.3), abs=0.11)


@pytest.fixture(scope="module")
def server(shelf, tmp_path_factory):
    folder = tmp_path_factory.mktemp("metrics")
    config = """
    max_batch_size: 1
    instance_group { kind: KIND_CPU count: 2 }
    model_warmup { name: "prompt" batch_size: 1 count: 3 inputs { key: "text_input"
        value { data_type: TYPE_STRING dims: 1 input_data_file: "prompt" } } }
    """
    repository = make_repository(folder / "repository", config, max_sequences="2", num_threads="1", kv_cache_memory_mb="80")
    (repository / "llm" / "warmup").mkdir()
    text = PROMPT.encode()
    (repository / "llm" / "warmup" / "prompt").write_bytes(len(text).to_bytes(4, "little") + text)
    with running(repository, shelf.engine("llama", max_context=CONTEXT), folder / "triton.log") as server:
        yield server


def test_warming_up_leaves_nothing_in_the_metrics(server):
    # The server may be ready a moment before the gauges say that the last of it has ended.
    values = {
        name: value for name, value in assert_idle(server).items() if not name.startswith(("llm_kv_pages:free", "llm_max"))
    }
    # What is cached is a fact about memory, not a count of requests.
    assert {name for name, value in values.items() if value} <= {"llm_kv_pages:cached"}


def test_gauges_are_sums_over_instances_and_each_has_a_pool_of_its_own(server):
    values = assert_idle(server)
    assert values["llm_max_sequences"] == 2 * 2
    clients = [Client(server.grpc_address) for _ in range(4)]
    requests = [client.send(request_inputs(PROMPT, max_tokens=CONTEXT, ignore_eos=True)) for client in clients]
    for client, request in zip(clients, requests, strict=True):
        client.next(request)
    wait_until(lambda: metrics(server)["llm_running_sequences"] == 4)  # one instance could run 2
    for client in clients:
        client.close(cancel=True)
    assert_idle(server)


def test_counts_add_up(server):
    before = settled_metrics(server)
    client = Client(server.grpc_address)
    token_counts = (1, 2, 5, 9, 30, 7)
    sent = [client.send(request_inputs(PROMPT, max_tokens=count, ignore_eos=True)) for count in token_counts]
    for request in sent:
        assert client.receive(request).last.finish_reason == "length"
    assert "top_k" in client.generate(PROMPT, top_k=-1).error
    assert client.generate(PROMPT, max_tokens=CONTEXT, ignore_eos=True, deadline_ms=500).last.finish_reason == "timeout"
    leaving = Client(server.grpc_address)
    leaving.next(leaving.send(request_inputs(PROMPT, max_tokens=CONTEXT, ignore_eos=True)))
    leaving.close(cancel=True)
    assert_idle(server)
    values = settled_metrics(server)
    change = {name: value - before.get(name, 0.0) for name, value in values.items()}
    ended = {name.partition(":")[2]: n for name, n in change.items() if name.startswith("llm_finished_requests") and n}
    assert ended == {"length": len(token_counts), "refused": 1, "timeout": 1, "cancelled": 1}
    num_started = len(token_counts) + 2
    assert change["llm_queue_batch_size_sum"] == sum(ended.values())
    assert change["llm_queue_wait_seconds_count"] == change["llm_ttft_seconds_count"] == num_started
    assert change["llm_itl_seconds_count"] == change["llm_generated_tokens"] - num_started
    assert change["llm_generated_tokens"] >= sum(token_counts) + 2
    assert change["llm_prefill_batch_size_sum"] >= num_started
    assert change["llm_decode_batch_size_sum"] == change["llm_itl_seconds_count"]
    for name in ("llm_ttft_seconds", "llm_itl_seconds", "llm_step_seconds"):
        assert change[f"{name}_bucket:+Inf"] == change[f"{name}_count"]
    assert values["llm_ttft_seconds_sum"] >= values["llm_queue_wait_seconds_sum"]
    client.close()
