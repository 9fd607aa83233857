"""Sets knobs in the text of a config.pbtxt and leaves its comments and layout as they are.

Every result is read back: it means what was wanted, or PbtxtError is raised. Nothing is ever half changed.
"""

from __future__ import annotations

import re
from pathlib import Path

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from client.errors import one_line
from client.knobs import KNOBS, Knob, ModelConfig, Setting, Value, shown, with_setting
from client.pbtxt_syntax import Field, Message, PbtxtError, parse

INDENT = 2


def read_pbtxt(path: Path) -> str:
    """The text as it is, with its line ends. Raises PbtxtError when it is no model configuration."""
    try:
        text = path.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise PbtxtError(f"{path}: {one_line(str(error))}") from error
    try:
        read_message(text)
    except PbtxtError as error:
        raise PbtxtError(f"{path}: {error}") from error
    return text


def read_message(text: str) -> ModelConfig:
    """What the text means. Raises PbtxtError."""
    try:
        return text_format.Parse(text, model_config_pb2.ModelConfig())
    except text_format.ParseError as error:
        raise PbtxtError(f"not a model configuration: {one_line(str(error))}") from error


def message_text(config: ModelConfig) -> str:
    """A configuration that has no file, as text."""
    return text_format.MessageToString(config)


def set_knobs(text: str, setting: Setting) -> str:
    """The text with these values. Raises PbtxtError."""
    wanted = with_setting(read_message(text), setting)
    for name, value in setting.items():
        before = read_message(text)
        if with_setting(before, {name: value}) != before:
            knob = KNOBS[name]
            text = _set_field(text, knob.path, value) if knob.path else _set_parameter(text, knob, value)
    try:
        is_right = read_message(text) == wanted
    except PbtxtError:
        is_right = False
    if not is_right:
        values = ", ".join(f"{name} {shown(value)}" for name, value in setting.items())
        raise PbtxtError(f"the file is written in a way that cannot be changed here; set by hand: {values}")
    return text


def _set_field(text: str, path: tuple[str, ...], value: Value) -> str:
    message = parse(text)
    for depth, name in enumerate(path[:-1]):
        fields = message.find(name)
        if not fields:
            return _append(text, message, _nested(path[depth:], value))
        inner = fields[-1].values[-1].message
        if inner is None:
            raise PbtxtError(f"{name}: not a message in brackets")
        message = inner
    name = path[-1]
    fields = message.find(name)
    if fields:
        return _replace_values(text, fields, value)
    commented = _commented_out(text, message, name)
    if commented is not None:
        return text[: commented[0]] + f"{name}: {shown(value)}" + text[commented[1] :]
    return _append(text, message, [f"{name}: {shown(value)}"])


# `# name: 12` or `# name: [ 4, 8 ]`, perhaps with a remark behind it.
_SETTING = re.compile(r"#\s*(?P<name>\w+)\s*:\s*(?:\d+|\[[\d\s,]*\])[,;]?(?=\s*(?:#.*)?$)")


def _commented_out(text: str, message: Message, name: str) -> tuple[int, int] | None:
    """Where, in a comment on a line of its own, the field would be set; a remark behind it is not in it."""
    for comment in message.comments:
        match = _SETTING.match(comment.text)
        if match and match["name"] == name and not text[_line_start(text, comment.start) : comment.start].strip():
            return comment.start, comment.start + match.end()
    return None


def _replace_values(text: str, fields: list[Field], value: Value) -> str:
    """The first one gets the value; others of a repeated field go."""
    for field in reversed(fields[1:]):
        text = _without(text, field)
    first = fields[0]
    if first.list_start is None and isinstance(value, tuple):
        return text[: first.start] + f"{first.name}: {shown(value)}" + text[first.end :]
    start = first.values[0].start if first.list_start is None else first.list_start
    return text[:start] + shown(value) + text[first.end :]


def _without(text: str, field: Field) -> str:
    """The text without a field and the comma behind it, and without its line where nothing else is in it."""
    rest = text[field.end :].lstrip(" \t")
    rest = rest[1:] if rest[:1] in (",", ";") else text[field.end :]
    start = _line_start(text, field.start)
    if text[start : field.start].strip() or rest[:1] not in ("\r", "\n"):
        return text[: field.start].rstrip(" \t") + rest
    return text[:start] + rest[rest.index("\n") + 1 :]


def _nested(path: tuple[str, ...], value: Value) -> list[str]:
    """Lines of a message that has only this field."""
    if len(path) == 1:
        return [f"{path[0]}: {shown(value)}"]
    return [f"{path[0]} {{", *(" " * INDENT + line for line in _nested(path[1:], value)), "}"]


def _append(text: str, message: Message, lines: list[str]) -> str:
    """Put lines at the end of a message: on lines of their own where its closing bracket has one, else beside the others."""
    newline = "\r\n" if "\r\n" in text else "\n"
    if message.end == len(text):
        start = text if not text or text.endswith("\n") else text + newline
        return start + newline.join(lines) + newline
    line_start = _line_start(text, message.end)
    before = text[line_start : message.end]
    if before.strip():
        return text[: message.end].rstrip(" ") + " " + " ".join(line.strip() for line in lines) + " " + text[message.end :]
    indent = before + " " * INDENT
    if message.fields:
        own = text[_line_start(text, message.fields[0].start) : message.fields[0].start]
        indent = own if not own.strip() else indent
    return text[:line_start] + "".join(indent + line + newline for line in lines) + text[line_start:]


def _set_parameter(text: str, knob: Knob, value: Value) -> str:
    root = parse(text)
    fields = root.find("parameters")
    entry = f'{{ key: "{knob.name}" value: {{ string_value: "{shown(value)}" }} }}'
    for field in reversed(fields):  # of equal keys the last counts
        for each in reversed(field.values):
            if each.message is not None and _key(text, each.message) == knob.name:
                return _replace_string(text, each.message, knob.name, value)
    if not fields:
        return _append(text, root, [f"parameters {entry}"])
    last = fields[-1]
    if last.list_start is None:
        return _insert_after(text, last.end, f"parameters {entry}", last.start)
    if not last.values:
        return text[: last.list_start] + f"[ {entry} ]" + text[last.end :]
    return _insert_after(text, last.values[-1].end, entry, last.values[-1].start, comma=True)


def _key(text: str, message: Message) -> str:
    keys = message.find("key")
    return text[keys[-1].values[-1].start + 1 : keys[-1].values[-1].end - 1] if keys else ""


def _replace_string(text: str, entry: Message, name: str, value: Value) -> str:
    for field in entry.find("value"):
        message = field.values[-1].message
        if message is not None and (strings := message.find("string_value")):
            place = strings[-1].values[-1]
            quote = text[place.start]
            return text[: place.start] + f"{quote}{shown(value)}{quote}" + text[place.end :]
    raise PbtxtError(f"parameter {name!r} has no string_value")


def _insert_after(text: str, end: int, entry: str, start: int, comma: bool = False) -> str:
    """Behind what stands from `start` to `end`: on the next line, indented as it is, where it ends its own."""
    own = text[_line_start(text, start) : start]
    line_end = next((i for i in range(end, len(text)) if text[i] in "\r\n"), len(text))
    mark = "," if comma else ""
    rest = text[end:line_end].strip()
    if own.strip() or (rest and not rest.startswith("#")):
        return text[:end] + f"{mark} {entry}" + text[end:]
    newline = "\r\n" if "\r\n" in text else "\n"
    return text[:end] + mark + text[end:line_end] + newline + own + entry + text[line_end:]


def _line_start(text: str, place: int) -> int:
    return text.rfind("\n", 0, place) + 1
