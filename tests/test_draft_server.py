"""A second engine that guesses, behind Triton: the same tokens, and what does not fit is refused by name."""

from __future__ import annotations

import json
import shutil
import urllib.error

import pytest

from tests.servers import Client, assert_idle, make_repository, reconfigure, running, settled_metrics

OPTIONS = {"kv_cache_memory_mb": "16", "num_threads": "1", "speculation": "draft"}
PROMPTS = [f"{number} one two three four five" for number in range(8)]


@pytest.fixture(scope="module")
def engine(shelf):
    return shelf.engine("llama")


@pytest.fixture(scope="module")
def server(engine, tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    repository = make_repository(folder / "repository", draft_engine_dir=str(engine), **OPTIONS)
    with running(repository, engine, folder / "triton.log") as server:
        yield server


def test_an_engine_that_guesses_for_itself_is_always_right_and_changes_nothing(server):
    client = Client(server.grpc_address)
    # min_tokens: a guess that follows a guessed end is never used, so it is not counted as right.
    fields = {"max_tokens": 21, "ignore_eos": True, "min_tokens": 21}
    guide = {"guided_decoding_guide_type": "regex", "guided_decoding_guide": "[a-d]{11}( yes| no)*"}
    for sampling in ({}, {"temperature": 1.0, "seed": 7}, {"temperature": 1.0, "seed": 8, **guide}):
        plain = [client.generate(prompt, speculation=False, **fields, **sampling) for prompt in PROMPTS]
        guessed = [client.generate(prompt, **fields, **sampling) for prompt in PROMPTS]
        assert [reply.token_ids for reply in guessed] == [reply.token_ids for reply in plain]
    client.close()
    assert_idle(server)
    values = settled_metrics(server)
    assert values["llm_draft_tokens"] > 0
    assert values["llm_accepted_tokens"] == values["llm_draft_tokens"]


def test_quantized_pages_are_of_both_engines_and_hold_more(server, engine):
    def num_pages() -> float:
        values = settled_metrics(server)
        return sum(values[f"llm_kv_pages:{state}"] for state in ("used", "cached", "free"))

    before = num_pages()
    reconfigure(server, draft_engine_dir=str(engine), kv_cache_dtype="int8", **OPTIONS)
    assert num_pages() > 3 * before
    client = Client(server.grpc_address)
    replies = [client.generate(prompt, max_tokens=12, ignore_eos=True) for prompt in PROMPTS]
    assert [len(reply.token_ids) for reply in replies] == [12] * len(PROMPTS)
    assert sum(int(reply.last.outputs["num_draft_tokens"].item()) for reply in replies) > 0
    client.close()
    assert_idle(server)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"limits": {"page_size": 4}}, "has pages of 4; 8 is needed"),
        ({"limits": {"max_context": 64}}, "has a context of 64; 1024 or more is needed"),
    ],
)
def test_an_engine_that_does_not_fit_is_refused_by_name(server, engine, tmp_path, change, message):
    other = shutil.copytree(engine, tmp_path / "other")
    manifest = json.loads((other / "engine.json").read_text())
    for section, values in change.items():
        manifest[section] |= values
    (other / "engine.json").write_text(json.dumps(manifest))
    with pytest.raises(urllib.error.HTTPError) as refused:
        reconfigure(server, draft_engine_dir=str(other), **OPTIONS)
    assert message in refused.value.read().decode()


def test_a_missing_folder_is_refused(server):
    with pytest.raises(urllib.error.HTTPError) as refused:
        reconfigure(server, **OPTIONS)
    assert "speculation draft needs draft_engine_dir" in refused.value.read().decode()
