"""Knobs set in the text of a config.pbtxt: what is written, what stays, and that it means what was wanted."""

from __future__ import annotations

import difflib

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from client.knobs import KnobError, read_setting, with_setting
from client.pbtxt import message_text, read_message, read_pbtxt, set_knobs
from client.pbtxt_syntax import PbtxtError, parse
from tests.servers import ROOT

SHIPPED = (ROOT / "model_repository" / "llm" / "config.pbtxt").read_text()


def changed(before: str, after: str) -> tuple[list[str], list[str]]:
    """Lines that went and lines that came."""
    diff = list(difflib.ndiff(before.splitlines(), after.splitlines()))
    return [line[2:] for line in diff if line[0] == "-"], [line[2:] for line in diff if line[0] == "+"]


def test_a_parameter_of_the_shipped_file_changes_in_its_place_only():
    went, came = changed(SHIPPED, set_knobs(SHIPPED, {"max_sequences": 48}))
    assert went == ['  { key: "max_sequences" value: { string_value: "32" } },']
    assert came == ['  { key: "max_sequences" value: { string_value: "48" } },']


def test_fields_of_the_shipped_file_change_in_their_places_and_a_commented_one_comes_alive():
    setting = {"max_batch_size": 16, "max_queue_delay_microseconds": 2000, "preferred_batch_size": (4, 16), "max_queue_size": 9}
    went, came = changed(SHIPPED, set_knobs(SHIPPED, setting))
    assert went == [
        "max_batch_size: 8",
        "  # preferred_batch_size: [ 4, 8 ]",
        "  max_queue_delay_microseconds: 0",
        "    max_queue_size: 256",
    ]
    assert came == [
        "max_batch_size: 16",
        "  preferred_batch_size: [ 4, 16 ]",
        "  max_queue_delay_microseconds: 2000",
        "    max_queue_size: 9",
    ]


def test_what_is_so_already_changes_nothing():
    setting = read_setting(read_message(SHIPPED), ["max_sequences", "max_batch_size", "preferred_batch_size"])
    assert set_knobs(SHIPPED, setting) == SHIPPED


@pytest.mark.parametrize(
    ("text", "setting", "expected"),
    [
        # scalars: present, in any notation
        ("max_batch_size:8", {"max_batch_size": 4}, "max_batch_size:4"),
        ("max_batch_size : 0x8 # eight", {"max_batch_size": 4}, "max_batch_size : 4 # eight"),
        (
            "dynamic_batching < max_queue_delay_microseconds: 5; >",
            {"max_queue_delay_microseconds": 6},
            "dynamic_batching < max_queue_delay_microseconds: 6; >",
        ),
        # absent: in a block of lines, a block in one line, and none at all
        (
            "dynamic_batching {\n    # slow\n    priority_levels: 2\n}\n",
            {"max_queue_delay_microseconds": 6},
            "dynamic_batching {\n    # slow\n    priority_levels: 2\n    max_queue_delay_microseconds: 6\n}\n",
        ),
        (
            "dynamic_batching { } # all defaults\n",
            {"max_queue_delay_microseconds": 6},
            "dynamic_batching { max_queue_delay_microseconds: 6 } # all defaults\n",
        ),
        (
            'name: "x"',
            {"max_queue_delay_microseconds": 6},
            'name: "x"\ndynamic_batching {\n  max_queue_delay_microseconds: 6\n}\n',
        ),
        (
            "dynamic_batching {\n}\n",
            {"max_queue_size": 6},
            "dynamic_batching {\n  default_queue_policy {\n    max_queue_size: 6\n  }\n}\n",
        ),
        # commented out
        (
            "dynamic_batching {\n  # max_queue_delay_microseconds: 100  # try it\n}\n",
            {"max_queue_delay_microseconds": 6},
            "dynamic_batching {\n  max_queue_delay_microseconds: 6  # try it\n}\n",
        ),
        (  # a comment that only speaks of it, and one in another block
            "# max_queue_delay_microseconds: 7\ndynamic_batching {\n  # max_queue_delay_microseconds: the longest wait\n}\n",
            {"max_queue_delay_microseconds": 6},
            "# max_queue_delay_microseconds: 7\ndynamic_batching {\n  # max_queue_delay_microseconds: the longest wait\n"
            "  max_queue_delay_microseconds: 6\n}\n",
        ),
        # lists
        (
            "dynamic_batching { preferred_batch_size: [ 4, 8 ] priority_levels: 2 }",
            {"preferred_batch_size": (2,)},
            "dynamic_batching { preferred_batch_size: [ 2 ] priority_levels: 2 }",
        ),
        (
            "dynamic_batching {\n  preferred_batch_size: 4 # small\n  preferred_batch_size: 8\n}\n",
            {"preferred_batch_size": (2, 6)},
            "dynamic_batching {\n  preferred_batch_size: [ 2, 6 ] # small\n}\n",
        ),
        (
            "dynamic_batching { preferred_batch_size: 4, preferred_batch_size: 8, priority_levels: 2 }",
            {"preferred_batch_size": ()},
            "dynamic_batching { preferred_batch_size: [ ], priority_levels: 2 }",
        ),
        (
            "dynamic_batching { preferred_batch_size: [ 4 ] }",
            {"preferred_batch_size": ()},
            "dynamic_batching { preferred_batch_size: [ ] }",
        ),
        # parameters: present in any notation
        (
            "parameters { key: 'max_sequences' value < string_value: '32' > }",
            {"max_sequences": 4},
            "parameters { key: 'max_sequences' value < string_value: '4' > }",
        ),
        (  # of equal keys the last counts
            'parameters { key: "max_sequences" value { string_value: "1" } }\n'
            'parameters { key: "max_sequences" value { string_value: "2" } }',
            {"max_sequences": 4},
            'parameters { key: "max_sequences" value { string_value: "1" } }\n'
            'parameters { key: "max_sequences" value { string_value: "4" } }',
        ),
        # absent
        (
            'parameters [\n  { key: "a" value: { string_value: "1" } } # one\n]\nbackend: "python"\n',
            {"max_sequences": 4},
            'parameters [\n  { key: "a" value: { string_value: "1" } }, # one\n'
            '  { key: "max_sequences" value: { string_value: "4" } }\n]\nbackend: "python"\n',
        ),
        (
            'parameters [ { key: "a" value: { string_value: "1" } } ]',
            {"max_sequences": 4},
            'parameters [ { key: "a" value: { string_value: "1" } }, { key: "max_sequences" value: { string_value: "4" } } ]',
        ),
        ("parameters [ ]", {"max_sequences": 4}, 'parameters [ { key: "max_sequences" value: { string_value: "4" } } ]'),
        (
            'parameters {\n  key: "a"\n  value: { string_value: "1" }\n}\nbackend: "python"\n',
            {"max_sequences": 4},
            'parameters {\n  key: "a"\n  value: { string_value: "1" }\n}\n'
            'parameters { key: "max_sequences" value: { string_value: "4" } }\nbackend: "python"\n',
        ),
        ("", {"max_sequences": 4}, 'parameters { key: "max_sequences" value: { string_value: "4" } }\n'),
        (  # commented out: the comment stays
            'parameters [\n  # { key: "max_sequences" value: { string_value: "9" } },\n'
            '  { key: "a" value: { string_value: "# ] }" } }\n]\n',
            {"max_sequences": 4},
            'parameters [\n  # { key: "max_sequences" value: { string_value: "9" } },\n'
            '  { key: "a" value: { string_value: "# ] }" } },\n  { key: "max_sequences" value: { string_value: "4" } }\n]\n',
        ),
    ],
)
def test_every_notation_by_hand(text, setting, expected):
    result = set_knobs(text, setting)
    assert result == expected
    assert read_message(result) == with_setting(read_message(text), setting)


def test_line_ends_stay_as_they_are():
    result = set_knobs('name: "x"\r\ndynamic_batching {\r\n}\r\n', {"max_queue_delay_microseconds": 6, "max_sequences": 4})
    assert result.count("\n") == result.count("\r\n") == 5
    assert read_setting(read_message(result), ["max_sequences"]) == {"max_sequences": 4}


def test_several_knobs_at_once_mean_what_was_wanted_in_the_shipped_files():
    setting = {"max_sequences": 5, "prefill_chunk_tokens": 64, "max_step_tokens": 96, "preferred_batch_size": (2, 4)}
    setting |= {"max_batch_size": 4, "max_queue_delay_microseconds": 500}
    for path in (ROOT / "model_repository").glob("*/config.pbtxt"):
        text = read_pbtxt(path)
        assert read_message(set_knobs(text, setting)) == with_setting(read_message(text), setting)


def test_a_configuration_without_a_file_is_written_as_text():
    config = with_setting(read_message(SHIPPED), {"max_sequences": 7})
    assert text_format.Parse(message_text(config), model_config_pb2.ModelConfig()) == config


def test_what_cannot_be_edited_is_an_error_and_no_wrong_file():
    with pytest.raises(PbtxtError, match="no string_value"):
        set_knobs('parameters { key: "max_sequences" }', {"max_sequences": 4})
    with pytest.raises(PbtxtError, match="line 2"):
        parse('name: "x"\n[some.extension]: 3')


def test_what_is_no_configuration_is_an_error_of_one_line_that_names_the_file(tmp_path):
    path = tmp_path / "config.pbtxt"
    path.write_text("max_batch_sizes: 3")
    with pytest.raises(PbtxtError, match=r"config\.pbtxt: .*max_batch_sizes") as raised:
        read_pbtxt(path)
    assert "\n" not in str(raised.value)
    with pytest.raises(PbtxtError, match=r"nothing\.pbtxt"):
        read_pbtxt(tmp_path / "nothing.pbtxt")


def test_unknown_knobs_and_values_that_are_no_numbers_are_named():
    with pytest.raises(KnobError, match="unknown knob 'max_sequence'; allowed: max_sequences"):
        read_setting(read_message(SHIPPED), ["max_sequence"])
    text = 'parameters { key: "max_sequences" value { string_value: "many" } }'
    with pytest.raises(KnobError, match="'many'"):
        read_setting(read_message(text), ["max_sequences"])
