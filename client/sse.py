"""Server-sent events, as Triton's /generate_stream sends them: `data: {...}` and an empty line."""

from __future__ import annotations

import codecs


class EventParser:
    """Fed with bytes cut anywhere, even inside a character; gives back whole events.

    Source: the HTML standard's event stream format, of which Triton uses `data` lines only.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._rest = ""

    def push(self, data: bytes) -> list[str]:
        """The data of every event line that is complete now. Raises UnicodeDecodeError for bytes that are not UTF-8."""
        self._rest += self._decoder.decode(data)
        *lines, self._rest = self._rest.split("\n")
        return [event for line in lines if (event := _event(line)) is not None]

    def finish(self) -> list[str]:
        """What a server that ends without a newline left. Raises UnicodeDecodeError if that ends inside a character."""
        line, self._rest = self._rest + self._decoder.decode(b"", final=True), ""
        event = _event(line)
        return [] if event is None else [event]


def _event(line: str) -> str | None:
    name, colon, value = line.rstrip("\r").partition(":")
    return value.removeprefix(" ") if colon and name == "data" else None
