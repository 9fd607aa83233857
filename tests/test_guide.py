"""Output that is bound to a schema, an expression, a choice or a grammar is that, whatever the model would rather say."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from tokenizers import Tokenizer

from llm_runtime.errors import RequestError
from llm_runtime.guide import Guides
from llm_runtime.types import GenerationRequest, SamplingParams
from tests.engines import load_executor
from tests.servers import Client, assert_idle, make_repository, post, request_inputs, running
from tests.test_engine import make_engine, run
from tests.test_speculation import fixed_cost

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "size": {"enum": ["small", "large"]},
        "count": {"type": "integer"},
    },
    "required": ["name", "size", "count"],
    "additionalProperties": False,
}
PROMPT = "one two three"


@pytest.fixture(scope="module")
def engine(shelf):
    return shelf.engine("llama")


@pytest.fixture(scope="module")
def guides(engine):
    manifest = json.loads((engine / "engine.json").read_text())
    return Guides(engine / "tokenizer.json", manifest["model"]["vocab_size"], manifest["model"]["eos_token_ids"])


@pytest.fixture(scope="module")
def server(engine, tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    repository = make_repository(folder / "repository", kv_cache_memory_mb="8", num_threads="1", speculation="ngram")
    with running(repository, engine, folder / "triton.log") as server:
        yield server


def guided(client: Client, kind: str, guide: str = "", **fields):
    options = {"max_tokens": 200, "temperature": 1.0, "seed": 1} | fields
    return client.generate(PROMPT, guided_decoding_guide_type=kind, guided_decoding_guide=guide, **options)


def bits(words: np.ndarray) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist())


def test_states_of_one_guide_do_not_touch_each_other(guides):
    guide = guides.compile("choice", '["ab", "cd"]')
    one, other = guide.start(), guide.start()
    first = bits(one.allowed())
    one.accept(min(first))
    assert bits(one.allowed()) != first
    assert bits(other.allowed()) == first
    assert guides.compile("choice", '["ab", "cd"]') is guide, "compiled once"


@pytest.mark.parametrize("seed", range(4))
def test_json_of_a_schema(client, seed):
    reply = guided(client, "json_schema", json.dumps(SCHEMA), seed=seed, max_tokens=300)
    assert reply.last.finish_reason == "stop"
    value = json.loads(reply.text)
    assert set(value) == {"name", "size", "count"}
    assert value["size"] in ("small", "large")
    assert isinstance(value["count"], int)
    assert len(value["name"]) <= 8


@pytest.mark.parametrize(
    ("kind", "guide", "wanted"),
    [
        ("regex", r"[0-9]{3}-[a-f]{2}", r"[0-9]{3}-[a-f]{2}"),
        ("choice", '["yes", "no, \\"never\\"", "maybe é"]', r'yes|no, "never"|maybe é'),
        ("ebnf_grammar", 'root ::= ("x" | "y") digit digit "."\ndigit ::= [0-9]', r"[xy][0-9]{2}\."),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_other_guides(client, kind, guide, wanted, temperature):
    reply = guided(client, kind, guide, temperature=temperature)
    assert re.fullmatch(wanted, reply.text), reply.text
    assert reply.last.finish_reason == "stop"


GUIDES = {
    "json_schema": json.dumps(SCHEMA),
    "regex": r"(the same words, )+[0-9]{2}",
    "choice": '["a long answer that has no choice after its first word", "another"]',
    "ebnf_grammar": 'root ::= ("x" | "y") " = [" digit (", " digit)* "]"\ndigit ::= [0-9]',
}


@pytest.mark.parametrize("kind", GUIDES)
def test_guesses_change_no_token(client, kind):
    guide = {"guided_decoding_guide_type": kind, "guided_decoding_guide": GUIDES[kind], "max_tokens": 120}
    options = [guide | {"seed": seed, "temperature": float(seed % 3)} for seed in range(6)]
    plain = [client.generate(PROMPT, speculation=False, **each) for each in options]
    requests = [client.send(request_inputs(PROMPT, **each)) for each in options]
    together = [client.receive(request) for request in requests]
    alone = [client.generate(PROMPT, **each) for each in options]
    for guessed in (together, alone):
        assert [reply.token_ids for reply in guessed] == [reply.token_ids for reply in plain]
        assert [reply.last.finish_reason for reply in guessed] == [reply.last.finish_reason for reply in plain]
    assert all(int(reply.last.outputs["num_draft_tokens"].item()) == 0 for reply in plain)


@pytest.mark.parametrize("kind", GUIDES)
def test_what_has_no_choice_is_guessed(engine, guides, kind):
    prompt_ids = tuple(Tokenizer.from_file(str(engine / "tokenizer.json")).encode(PROMPT).ids)
    guide = guides.compile(kind, GUIDES[kind])
    results = {}
    for max_draft_tokens in (0, 8):
        runner = make_engine(load_executor(engine), max_draft_tokens=max_draft_tokens, max_context=200)
        if max_draft_tokens:
            fixed_cost(runner)  # whether guesses pay does not depend on this machine's speed
        for seed in range(6):
            sampling = SamplingParams(120, guide=guide, seed=seed, temperature=float(seed % 3))
            runner.add(GenerationRequest(str(seed), prompt_ids, sampling))
        results[max_draft_tokens] = {name: result.token_ids for name, result in run(runner).items()}
    assert results[8] == results[0]
    assert runner.stats.draft_tokens > 0
    # The tiny model spells the names of properties in pieces of its own.
    assert kind == "json_schema" or runner.stats.accepted_tokens > 0


def test_a_fork_goes_ahead_and_leaves_the_state_where_it_was(guides):
    state = guides.compile("choice", '["abcdefgh"]').start()
    first = bits(state.allowed())
    forced = state.forced()
    assert forced
    assert state.num_allowed(forced) == len(forced)
    assert state.num_allowed([*forced, *forced]) == len(forced), "the end of the choice, and no more"
    ahead = state.fork()
    for token_id in forced:
        ahead.accept(token_id)
    assert ahead.is_complete
    assert ahead.allowed().any()  # whatever a guess does there, it does not fail
    ahead.accept(forced[0])
    assert ahead.allowed().any()
    assert not state.is_complete
    assert bits(state.allowed()) == first


def test_any_json_and_max_tokens_cut_it_short(client):
    reply = guided(client, "json", max_tokens=5)
    assert reply.last.finish_reason == "length"
    assert len(reply.token_ids) == 5


def test_vllms_words_and_a_client_that_does_not_stream(server):
    sampling = {"max_tokens": 60, "guided_decoding": {"choice": ["left", "right"]}}
    for model in ("llm", "llm_vllm"):
        body = {"text_input": PROMPT, "sampling_parameters": json.dumps(sampling)}
        status, text = post(server, f"{model}/generate", body)
        assert status == 200, text
        assert json.loads(text)["text_output"] in ("left", "right")


def test_guided_and_free_requests_in_one_batch_do_not_disturb_each_other(client):
    alone = client.generate(PROMPT, max_tokens=20, ignore_eos=True)
    inputs = {"text_input": PROMPT, "stream": True, "return_output_ids": True}
    guide = {"guided_decoding_guide_type": "regex", "guided_decoding_guide": "[ab]{12}", "temperature": 1.0}
    requests = []
    for seed in range(8):
        requests.append(client.send(inputs | guide | {"max_tokens": 50, "seed": seed}))
        requests.append(client.send(inputs | {"max_tokens": 20, "ignore_eos": True}))
    replies = [client.receive(request) for request in requests]
    assert all(re.fullmatch("[ab]{12}", reply.text) for reply in replies[::2])
    assert all(reply.token_ids == alone.token_ids for reply in replies[1::2])
    assert len({reply.text for reply in replies[::2]}) > 1


def test_several_outputs_are_each_guided(client):
    inputs = {"text_input": PROMPT, "stream": False, "num_return_sequences": 3, "temperature": 1.0, "seed": 3, "max_tokens": 60}
    guide = {"guided_decoding_guide_type": "regex", "guided_decoding_guide": "[a-c]{6}"}
    reply = client.receive(client.send(inputs | guide))
    texts = [text.decode() for text in reply.last.outputs["text_output"]]
    assert len(texts) == 3
    assert all(re.fullmatch("[a-c]{6}", text) for text in texts)


@pytest.mark.parametrize(
    ("kind", "guide", "message"),
    [
        ("json_schema", "{", "guided_decoding_guide: got '{'; allowed: what json_schema takes:"),
        ("json_schema", '{"type": 7}', "guided_decoding_guide: got '{\"type\": 7}'; allowed: what json_schema takes:"),
        ("regex", "a(", "guided_decoding_guide: got 'a('; allowed: what regex takes:"),
        ("choice", "yes", "guided_decoding_guide: got 'yes'; allowed: what choice takes:"),
        ("choice", "[]", "guided_decoding_guide: got '[]'; allowed: what choice takes: a JSON list of strings is needed"),
        ("ebnf_grammar", "root ::= x", "guided_decoding_guide: got 'root ::= x'; allowed: what ebnf_grammar takes:"),
        ("regex", "", "guided_decoding_guide: missing; give what regex takes"),
        ("", "a", "guided_decoding_guide_type: missing; give one of json,"),
        ("yaml", "a", "guided_decoding_guide_type: got 'yaml'; allowed: json, json_schema,"),
    ],
)
def test_a_bad_guide_is_refused_in_a_line(client, kind, guide, message):
    error = guided(client, kind, guide).error
    assert error.startswith(message)
    assert "\n" not in error


def test_a_client_that_leaves_and_a_guide_that_cannot_be_met_leave_nothing(server, client):
    leaving = Client(server.grpc_address)
    fields = {"guided_decoding_guide_type": "regex", "guided_decoding_guide": "[ab]{900}", "max_tokens": 950}
    request = leaving.send({"text_input": PROMPT, "stream": True} | fields)
    leaving.next(request)
    leaving.close(cancel=True)
    # Every letter of the choice is banned: the sequence ends with an error, and the others go on.
    banned = guided(client, "choice", '["a"]', sampling_parameters=json.dumps({"bad_words": ["a"]}))
    assert banned.error == "bad_words, min_tokens and the guide leave no token to choose"
    assert_idle(server)


def test_a_tokenizer_that_cannot_be_used_refuses_guides_only(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    broken = Guides(tmp_path / "tokenizer.json", 512, [2])
    with pytest.raises(RequestError, match="guided decoding is not to be had with this tokenizer"):
        broken.compile("regex", "a")
