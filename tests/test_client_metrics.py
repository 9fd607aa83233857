"""The client's reader of Triton's metrics port: pages by hand, and a real server's."""

from __future__ import annotations

import asyncio

import pytest

from client.errors import RefusedError, ServerError, UnreachableError
from client.metrics import MetricsReader, Snapshot, Window, parse
from tests.servers import Client, make_repository, running, settled_metrics

PAGE = """
# HELP nv_inference_request_success Number of successful requests
# TYPE nv_inference_request_success counter
nv_inference_request_success{model="llm",version="1"} 3
nv_inference_request_success{model="llm",version="2"} 4
nv_inference_request_success{model="other",version="1"} 100
# TYPE llm_kv_pages gauge
llm_kv_pages{model="llm",state="used",version="1"} 5
llm_kv_pages{model="llm",state="free",version="1"} 11
# TYPE nv_cpu_utilization gauge
nv_cpu_utilization 0.5
"""


def snapshot(time: float = 0.0, **values: float) -> Snapshot:
    return Snapshot(time, {name: {frozenset(): value} for name, value in values.items()})


def histogram(counts: dict[str, float], total: float = 0.0, time: float = 0.0) -> Snapshot:
    """A snapshot of `h` with these cumulative counts."""
    series: dict = {"h_bucket": {frozenset({("le", bound)}): count for bound, count in counts.items()}}
    return Snapshot(time, series | {"h_count": {frozenset(): counts["+Inf"]}, "h_sum": {frozenset(): total}})


def test_a_page_is_read_for_one_model_with_its_versions_added_up():
    page = Snapshot(0.0, parse(PAGE, "llm"))
    assert page.counter("nv_inference_request_success") == 3 + 4
    assert page.gauge("llm_kv_pages") == 16
    assert page.gauge("llm_kv_pages", state="used") == 5
    assert page.by_label("llm_kv_pages", "state") == {"used": 5, "free": 11}
    assert not page.has("nv_cpu_utilization")


def test_what_is_absent_reads_as_0():
    page = Snapshot(0.0, parse(PAGE, "llm"))
    assert page.gauge("llm_preemptions") == page.gauge("llm_kv_pages", state="cached") == 0
    window = Window(page, page)
    assert (window.delta("llm_preemptions"), window.rate("llm_preemptions")) == (0, 0)
    assert window.mean("llm_itl_seconds") is window.quantile("llm_itl_seconds", 0.5) is None


def test_what_is_no_metrics_page_is_an_error_of_one_line():
    with pytest.raises(ServerError, match="not a page of Prometheus metrics") as raised:
        parse("<html>\nIt works!</html>", "llm", "http://host/metrics")
    assert "\n" not in str(raised.value)


def test_deltas_and_rates_are_of_the_window():
    window = Window(snapshot(10.0, a=5), snapshot(14.0, a=25))
    assert (window.seconds, window.delta("a"), window.rate("a")) == (4.0, 20.0, 5.0)


def test_a_counter_that_fell_was_reset_and_counts_from_0():
    assert Window(snapshot(a=50), snapshot(1.0, a=3)).delta("a") == 3


def test_a_series_that_appears_counts_from_0():
    assert Window(snapshot(), snapshot(1.0, a=3)).delta("a") == 3


def test_deltas_by_label_name_those_that_grew():
    before = Snapshot(0.0, {"f": {frozenset({("reason", "stop")}): 2.0, frozenset({("reason", "length")}): 5.0}})
    after = Snapshot(1.0, {"f": {frozenset({("reason", "stop")}): 4.0, frozenset({("reason", "length")}): 5.0}})
    assert Window(before, after).deltas("f", "reason") == {"stop": 2.0}


EMPTY = histogram({"1": 0, "2": 0, "+Inf": 0})


@pytest.mark.parametrize(
    ("counts", "q", "expected"),
    [
        ({"1": 10, "2": 10, "+Inf": 10}, 0.5, 0.5),  # the first bucket starts at 0
        ({"1": 10, "2": 20, "+Inf": 20}, 0.75, 1.5),
        ({"1": 10, "2": 20, "+Inf": 20}, 0.5, 1.0),  # exactly on a bound
        ({"1": 0, "2": 4, "+Inf": 4}, 0.0, 1.0),  # the lowest bound of the first bucket that has any
        ({"1": 0, "2": 4, "+Inf": 4}, 1.0, 2.0),
        ({"1": 0, "2": 1, "+Inf": 10}, 0.99, 2.0),  # above all bounds: the highest finite one
    ],
)
def test_quantiles_by_hand(counts, q, expected):
    assert Window(EMPTY, histogram(counts)).quantile("h", q) == pytest.approx(expected)


def test_quantiles_and_means_are_of_what_came_within_the_window():
    before, after = histogram({"1": 100, "2": 100, "+Inf": 100}, 50.0), histogram({"1": 100, "2": 104, "+Inf": 104}, 57.0, 1.0)
    window = Window(before, after)
    assert window.quantile("h", 0.5) == pytest.approx(1.5)
    assert (window.count("h"), window.mean("h")) == (4, pytest.approx(7.0 / 4))


@pytest.fixture(scope="module")
def server(shelf, tmp_path_factory):
    folder = tmp_path_factory.mktemp("client-metrics")
    repository = make_repository(folder / "repository", max_sequences="3", num_threads="1", kv_cache_memory_mb="4")
    with running(repository, shelf.engine("llama"), folder / "triton.log") as server:
        yield server


def read(url: str, model: str = "llm", *, check: bool = True) -> Snapshot:
    async def main() -> Snapshot:
        reader = MetricsReader(url, model)
        try:
            return await (reader.check() if check else reader.read())
        finally:
            await reader.close()

    return asyncio.run(main())


def test_a_real_servers_numbers_add_up(server):
    url = server.metrics_url.removeprefix("http://").removesuffix("/metrics")
    before = read(url)
    assert before.gauge("llm_max_sequences") == 3
    client = Client(server.grpc_address)
    for index in range(4):
        client.generate(f"The quick brown fox {index}", max_tokens=5, ignore_eos=True)
    client.close()
    settled_metrics(server)
    window = Window(before, read(server.metrics_url))
    assert window.delta("llm_generated_tokens") == 4 * 5
    assert (window.count("llm_ttft_seconds"), window.count("llm_itl_seconds")) == (4, 4 * 4)
    assert window.deltas("llm_finished_requests", "reason") == {"length": 4}
    assert 0 < window.quantile("llm_itl_seconds", 0.5) <= window.quantile("llm_itl_seconds", 0.99)
    assert 0 < window.mean("llm_itl_seconds") * 4 * 4 <= window.seconds


def test_a_model_that_shows_nothing_is_named(server):
    with pytest.raises(RefusedError, match="nothing of model 'nobody'"):
        read(server.metrics_url, "nobody")
    with pytest.raises(RefusedError, match="only Triton's own metrics of model 'llm_vllm'"):
        read(server.metrics_url, "llm_vllm")
    assert read(server.metrics_url, "nobody", check=False).series == {}


def test_the_wrong_port_is_named(server):
    with pytest.raises(ServerError, match="metrics port"):
        read(server.http_url)
    with pytest.raises(UnreachableError, match=r"127\.0\.0\.1:9"):
        read("127.0.0.1:9")
