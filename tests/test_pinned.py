"""Prefixes that are listed in config.pbtxt are in the cache before the first request."""

from __future__ import annotations

import json
import urllib.error

import pytest

from tests.servers import Client, make_repository, metrics, reconfigure, running

SYSTEM = "one two three four five six seven eight nine ten eleven twelve thirteen"
OPTIONS = {"kv_cache_memory_mb": "8", "num_threads": "1"}


@pytest.fixture(scope="module")
def server(shelf, tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    prefixes = json.dumps([SYSTEM, {"text": SYSTEM, "cache_salt": "tenant"}])
    repository = make_repository(folder / "repository", pinned_prefixes=prefixes, **OPTIONS)
    with running(repository, shelf.engine("llama"), folder / "triton.log") as server:
        yield server


def test_the_first_request_finds_it_under_its_salt_and_nothing_was_counted(server):
    values = metrics(server)
    assert values["llm_kv_pages:used"] > 0
    assert values["llm_generated_tokens"] == values["llm_prompt_tokens"] == values["llm_ttft_seconds_count"] == 0
    client = Client(server.grpc_address)
    cached = {
        salt: int(client.generate(f"{SYSTEM} {salt}", max_tokens=2, cache_salt=salt).last.outputs["num_cached_tokens"].item())
        for salt in ("", "tenant", "another")
    }
    client.close()
    assert cached[""] == cached["tenant"] >= 8
    assert cached["another"] == 0


@pytest.mark.parametrize(
    ("prefixes", "message"),
    [("You are kind", "pinned_prefixes"), ('["a"]', "pinned_prefixes[0] has"), (json.dumps([SYSTEM * 400]), "pinned_prefixes")],
)
def test_what_cannot_be_pinned_is_refused_and_the_old_model_serves_on(server, prefixes, message):
    with pytest.raises(urllib.error.HTTPError) as refused:
        reconfigure(server, pinned_prefixes=prefixes, **OPTIONS)
    assert message in refused.value.read().decode()
    client = Client(server.grpc_address)
    assert client.generate(SYSTEM, max_tokens=2).last.error is None
    client.close()
