"""Configurations that change while the server runs: profiles, and a reload that no running stream notices."""

from __future__ import annotations

import urllib.error

import pytest

from tests.servers import (
    ROOT,
    Client,
    TritonServer,
    assert_idle,
    edit_config,
    live_config,
    make_repository,
    metrics,
    read_config,
    reload_model,
    request_inputs,
    running,
    wait_until,
)

CONFIGS = ROOT / "model_repository" / "llm" / "configs"
PROFILES = ("interactive", "balanced", "throughput")
PROMPT = "The quick brown fox"
TENSORS = (
    "# ----------------------------------------------------------------------------------------------------------- the tensors"
)


def test_profiles_declare_the_same_tensors_in_the_same_words():
    shipped = (CONFIGS.parent / "config.pbtxt").read_text().split(TENSORS)[1]
    assert {path.stem for path in CONFIGS.glob("*.pbtxt")} == set(PROFILES)
    assert all(path.read_text().split(TENSORS)[1] == shipped for path in CONFIGS.glob("*.pbtxt"))


def test_profiles_differ_from_config_pbtxt_only_in_knobs_of_batching():
    shipped = read_config(CONFIGS.parent / "config.pbtxt")
    changed = set()
    for path in CONFIGS.glob("*.pbtxt"):
        profile = read_config(path)
        assert profile.parameters.keys() == shipped.parameters.keys()
        for key, parameter in shipped.parameters.items():
            if profile.parameters[key].string_value != parameter.string_value:
                changed.add(key)
    assert changed == {"max_sequences", "prefill_chunk_tokens", "max_step_tokens", "speculation"}


@pytest.mark.parametrize("profile", PROFILES)
def test_a_profile_is_what_is_served_and_an_edit_of_its_file_takes_effect(shelf, tmp_path, profile):
    repository = make_repository(tmp_path / "repository", num_threads="1")
    path = repository / "llm" / "configs" / f"{profile}.pbtxt"
    expected = read_config(path)
    server = TritonServer.on_free_ports(
        repository,
        tmp_path / "triton.log",
        environment={"LLM_ENGINE_DIR": str(shelf.engine("llama"))},
        options=(f"--model-config-name={profile}",),
        exit_seconds=3,
    )
    with server:
        assert live_config(server)["max_batch_size"] == expected.max_batch_size
        assert metrics(server)["llm_max_sequences"] == int(expected.parameters["max_sequences"].string_value)
        before = '"max_sequences" value: { string_value: "'
        path.write_text(path.read_text().replace(before, f"{before}1"))
        reload_model(server)
        edited = int(read_config(path).parameters["max_sequences"].string_value)
        assert edited > int(expected.parameters["max_sequences"].string_value)
        wait_until(lambda: metrics(server)["llm_max_sequences"] == edited)


def test_a_reload_under_load_takes_effect_and_no_running_stream_notices(shelf, tmp_path):
    num_tokens = 6000
    repository = make_repository(tmp_path / "repository", max_sequences="8", num_threads="1", kv_cache_memory_mb="80")
    with running(repository, shelf.engine("llama", max_context=30_000), tmp_path / "triton.log") as server:
        client = Client(server.grpc_address)
        inputs = request_inputs(PROMPT, max_tokens=num_tokens, ignore_eos=True)
        expected = client.generate(PROMPT, max_tokens=50, ignore_eos=True).token_ids
        requests = [client.send(inputs) for _ in range(4)]
        first = [client.next(request) for request in requests]
        edit_config(repository, "dynamic_batching { max_queue_delay_microseconds: 7 }", max_sequences="3")
        reload_model(server)
        assert live_config(server)["dynamic_batching"]["max_queue_delay_microseconds"] == 7
        assert metrics(server)["llm_max_sequences"] == 8 + 3, "both are there while streams of the old one run"
        assert client.generate(PROMPT, max_tokens=50, ignore_eos=True).token_ids == expected  # the new one serves meanwhile
        for request, response in zip(requests, first, strict=True):
            reply = client.receive(request)
            reply.responses.insert(0, response)
            assert reply.last.finish_reason == "length"
            assert len(reply.token_ids) == num_tokens
            assert reply.token_ids[:50] == expected
        client.close()
        wait_until(lambda: metrics(server)["llm_max_sequences"] == 3)  # the old one has gone
        values = assert_idle(server)
        assert values["llm_ttft_seconds_count"] == len(requests) + 2, "counts go on over a reload"


def test_a_configuration_that_cannot_be_loaded_leaves_the_old_one_serving(shelf, tmp_path):
    repository = make_repository(tmp_path / "repository", num_threads="1")
    with running(repository, shelf.engine("llama"), tmp_path / "triton.log") as server:
        edit_config(repository, max_sequences="0")
        with pytest.raises(urllib.error.HTTPError) as refused:
            reload_model(server)
        assert "max_sequences" in refused.value.read().decode()
        client = Client(server.grpc_address)
        assert client.generate(PROMPT, max_tokens=3, ignore_eos=True).last.finish_reason == "length"
        client.close()
