"""Fields of a request: what is served, and the one line that refuses what is not."""

import math

import pytest

from llm_runtime.errors import RequestError
from llm_runtime.fields import read_fields


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_k", -1),
        ("temperature", -1.0),
        ("temperature", math.nan),
        ("top_p", 1.5),
        ("top_p", math.inf),
        ("min_p", -0.1),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 2**31),
        ("min_tokens", -1),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 3.0),
        ("seed", -1),
        ("deadline_ms", 0),
        ("stream", 1),
        ("stop_words", 3),
        ("beam_width", 2),
        ("num_return_sequences", 65),
        ("return_context_logits", True),
        ("length_penalty", 0.5),
        ("embedding_bias_weights", [101.0]),
        ("logit_bias", {"7": 101}),
        ("logit_bias", {"x": 1}),
        ("logit_bias", [7]),
        ("guided_decoding_guide_type", "yaml"),
        ("guided_decoding", {"json": {}, "regex": "a"}),
        ("guided_decoding", {"yaml": "a"}),
    ],
)
@pytest.mark.parametrize("where", ["tensor", "parameter"])
def test_a_bad_value_is_refused_with_field_value_and_what_is_allowed(name, value, where):
    with pytest.raises(RequestError) as refused:
        read_fields({name: value} if where == "tensor" else {}, {} if where == "tensor" else {name: value})
    message = str(refused.value)
    assert message.startswith(f"{name}: got {value!r}; allowed: ")
    assert "\n" not in message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_p", 0.0),
        ("top_k", 0),
        ("top_k", 1),
        ("temperature", 0.0),
        ("beam_width", 1),
        ("length_penalty", 1.0),
        ("num_return_sequences", 1),
        ("return_generation_logits", False),
        ("guided_decoding_guide", ""),
        ("end_id", -1),
        ("pad_id", 0),
    ],
)
def test_neutral_values_are_legal(name, value):
    assert name in read_fields({name: value}, {})


def test_empty_words_mean_none():
    assert read_fields({"stop_words": ["", "a", ""], "bad_words": [""]}, {}) == {"stop_words": ("a",), "bad_words": ()}


def test_sampling_parameters_take_numbers_as_strings_and_the_vllm_backends_names():
    text = '{"temperature": "0.5", "max_tokens": "7", "stop": "x", "n": 1, "ignore_eos": true, "top_p": null}'
    expected = {"temperature": 0.5, "max_tokens": 7, "stop_words": ("x",), "num_return_sequences": 1, "ignore_eos": True}
    assert read_fields({"sampling_parameters": text}, {}) == expected


def test_a_tensor_wins_over_json_and_json_over_a_parameter():
    fields = read_fields({"top_k": 1, "sampling_parameters": '{"top_k": 2, "seed": 2}'}, {"top_k": 3, "seed": 3, "end_id": 3})
    assert fields == {"top_k": 1, "seed": 2, "end_id": 3}


@pytest.mark.parametrize("text", ["{", "[1]", '"a"', '{"temperature": "hot"}', '{"temperature": []}'])
def test_malformed_sampling_parameters_are_refused(text):
    with pytest.raises(RequestError, match=r"^(sampling_parameters|temperature): "):
        read_fields({"sampling_parameters": text}, {})


def test_an_unknown_key_names_the_nearest():
    with pytest.raises(RequestError, match="sampling_parameters: unknown key 'temprature'; did you mean 'temperature'"):
        read_fields({"sampling_parameters": '{"temprature": 1}'}, {})


def test_a_parameter_that_looks_like_a_slip_is_refused_and_a_foreign_one_is_left_alone():
    with pytest.raises(RequestError, match="temprature: unknown; did you mean 'temperature'"):
        read_fields({}, {"temprature": 1})
    assert read_fields({}, {"traceparent": "00-1-2-01"}) == {}


@pytest.mark.parametrize(
    "text",
    [
        '{"temperature": 1' + "0" * 400 + "}",
        "[" * 100_000,
        '{"bad_words": ["\\ud800"]}',
        '{"cache_salt": "\\ud800"}',
        '{"repetition_penalty": 1e-38}',
        '{"bad_words": ' + str(["w"] * 2000).replace("'", '"') + "}",
    ],
    ids=range(6),
)
def test_what_would_break_or_stall_the_server_is_refused(text):
    with pytest.raises(RequestError):
        read_fields({"sampling_parameters": text}, {})


def test_neutral_values_of_other_servers_are_served():
    text = '{"n": 1, "best_of": 1, "logprobs": false, "use_beam_search": false, "skip_special_tokens": true}'
    assert read_fields({"sampling_parameters": text}, {})["logprobs"] == 0


def test_the_same_field_by_two_names_is_refused():
    with pytest.raises(RequestError, match="another name of 'stop_words' differ; give one"):
        read_fields({"sampling_parameters": '{"stop": "a", "stop_words": "b"}'}, {})


def test_a_long_value_is_cut_in_the_message():
    with pytest.raises(RequestError) as refused:
        read_fields({"max_tokens": "9" * 1000}, {})
    assert len(str(refused.value)) < 200
