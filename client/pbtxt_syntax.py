"""Where things stand in a file of protobuf's text format: fields, values and comments with their places.

`google.protobuf.text_format` reads what a file means; this reads where it says so, so that a value can be changed and all else
stay as it was written.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from client.errors import ClientError

_TOKEN = re.compile(
    r"""(?P<comment>\#[^\r\n]*)|(?P<string>"(?:\\.|[^"\\\r\n])*"|'(?:\\.|[^'\\\r\n])*')"""
    r"""|(?P<word>[-+.\w]+)|(?P<mark>[{}<>\[\]:,;])""",
    re.VERBOSE,
)
_CLOSING = {"{": "}", "<": ">"}


class PbtxtError(ClientError):
    """A configuration file that cannot be read or changed."""

    exit_code = 2


@dataclass(frozen=True)
class Token:
    kind: str
    text: str
    start: int
    end: int


@dataclass
class Message:
    """From behind its opening bracket to before its closing one (the whole file, for the outermost)."""

    start: int
    end: int
    fields: list[Field] = field(default_factory=list)
    comments: list[Token] = field(default_factory=list)  # those not inside one of its messages

    def find(self, name: str) -> list[Field]:
        return [each for each in self.fields if each.name == name]


@dataclass
class Value:
    """A scalar (strings side by side are one), or a message in brackets, with its place."""

    start: int
    end: int
    message: Message | None = None


@dataclass
class Field:
    """`name: value`, `name { ... }` or `name: [ ... ]`; the list's brackets are at `list_start` and before `end`."""

    name: str
    start: int
    end: int
    values: list[Value]
    list_start: int | None = None


def parse(text: str) -> Message:
    """Raises PbtxtError for what this reader does not know, such as extensions."""
    return _Parser(text).file()


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = list(_tokens(text))
        self._at = 0

    def file(self) -> Message:
        message = Message(0, len(self._text))
        self._fields(message, closing=None)
        return message

    def _fields(self, message: Message, closing: str | None) -> None:
        while (token := self._peek(message.comments)) is not None and token.text != closing:
            if token.text in (",", ";"):
                self._at += 1
            else:
                message.fields.append(self._field(message.comments))

    def _field(self, comments: list[Token]) -> Field:
        name = self._next(comments, "word")
        token = self._peek(comments)
        if token is not None and token.text == ":":
            self._at += 1
            token = self._peek(comments)
        if token is None or token.text != "[":
            value = self._value(comments)
            return Field(name.text, name.start, value.end, [value])
        self._at += 1
        values = []
        while (inner := self._peek(comments)) is not None and inner.text != "]":
            if inner.text == ",":
                self._at += 1
            else:
                values.append(self._value(comments))
        end = self._next(comments, "mark").end
        return Field(name.text, name.start, end, values, token.start)

    def _value(self, comments: list[Token]) -> Value:
        token = self._peek(comments)
        if token is not None and token.text in _CLOSING:
            self._at += 1
            message = Message(token.end, token.end)
            self._fields(message, _CLOSING[token.text])
            closing = self._next(message.comments, "mark")
            message.end = closing.start
            return Value(token.start, closing.end, message)
        first = self._next(comments, "string" if token is not None and token.kind == "string" else "word")
        end = first.end
        while first.kind == "string" and (more := self._peek(comments)) is not None and more.kind == "string":
            end = more.end
            self._at += 1
        return Value(first.start, end)

    def _peek(self, comments: list[Token]) -> Token | None:
        while self._at < len(self._tokens) and self._tokens[self._at].kind == "comment":
            comments.append(self._tokens[self._at])
            self._at += 1
        return self._tokens[self._at] if self._at < len(self._tokens) else None

    def _next(self, comments: list[Token], kind: str) -> Token:
        token = self._peek(comments)
        if token is None or token.kind != kind:
            place = len(self._text) if token is None else token.start
            raise PbtxtError(f"line {self._text.count(chr(10), 0, place) + 1}: not a form that can be edited here")
        self._at += 1
        return token


def _tokens(text: str) -> Iterator[Token]:
    place = 0
    while place < len(text):
        if text[place].isspace():
            place += 1
            continue
        match = _TOKEN.match(text, place)
        if match is None:
            raise PbtxtError(f"line {text.count(chr(10), 0, place) + 1}: not a form that can be edited here: {text[place]!r}")
        yield Token(match.lastgroup or "", match.group(), match.start(), match.end())
        place = match.end()
