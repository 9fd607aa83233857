"""Text from tokens as they come, and the search for stop strings in it.

Laws: the pieces joined are the text of all output tokens as it continues the prompt; no replacement character is shown while a
character's bytes are still coming; a stop string is found wherever token borders fall, and no part of it is shown.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

REPLACEMENT = "\ufffd"
# Tokens of the prompt to decode with: decoders treat a text's first token in a way of its own (a space dropped, say).
CONTEXT_TOKENS = 4
MAX_CONTEXT_TOKENS = 16
# Tokens held back for a character that does not get complete. Three can be on their way to one of four bytes; a model that
# gives nothing but broken bytes must not have all of them decoded again with every new one.
MAX_HELD_TOKENS = 16
TOKENS_TO_COME = 3


class Detokenizer:
    """Decodes a short moving window twice, with and without the new tokens; the difference is the new text."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = _context(tokenizer, prompt_ids)
        self._start = 0  # of the window
        self._shown = len(self._ids)  # tokens whose text was returned

    def push(self, token_id: int) -> str:
        """The text that became final; empty while a character is incomplete."""
        self._ids.append(token_id)
        text = self._new_text()
        if text.endswith(REPLACEMENT):
            return self._show_broken() if len(self._ids) - self._shown > MAX_HELD_TOKENS else ""
        if text:  # a special token has no text, and would be a bad start of the window
            self._start = self._shown
        self._shown = len(self._ids)
        if self._start > 64:  # the window only ever looks back to its start
            del self._ids[: self._start]
            self._shown -= self._start
            self._start = 0
        return text

    def finish(self) -> str:
        """What is left: an incomplete character, shown as what it is."""
        text = self._new_text()
        self._start = self._shown = len(self._ids)
        return text

    def _show_broken(self) -> str:
        """Show what is held as the broken characters it is, but for the newest tokens, which may yet become one."""
        end = len(self._ids) - TOKENS_TO_COME
        text = self._new_text(end)
        self._start, self._shown = self._shown, end
        return text

    def _new_text(self, end: int | None = None) -> str:
        before = self._tokenizer.decode(self._ids[self._start : self._shown], skip_special_tokens=True)
        return self._tokenizer.decode(self._ids[self._start : end], skip_special_tokens=True)[len(before) :]


def _context(tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> list[int]:
    """The end of the prompt that starts with a whole character: of a run of byte tokens that starts inside one, decoders with
    byte fallback make nothing but replacement characters, the generated ones too."""
    for count in range(CONTEXT_TOKENS, MAX_CONTEXT_TOKENS + 1):
        context = list(prompt_ids[-count:])
        if REPLACEMENT not in tokenizer.decode(context, skip_special_tokens=True):
            return context
    return list(prompt_ids[-CONTEXT_TOKENS:])


class StopMatcher:
    """Looks for the stop string that is complete first (of two that end together, the longer).

    What may become one is held back.
    """

    def __init__(self, stop_strings: Sequence[str]) -> None:
        self._stops = tuple(stop_strings)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """The text that can be shown. Sets `stopped` when a stop string is complete; what follows it is dropped."""
        if not self._stops:
            return text
        buffer = self._held + text
        found = [(start + len(stop), start) for stop in self._stops if (start := buffer.find(stop)) >= 0]
        if found:
            self.stopped = True
            self._held = ""
            return buffer[: min(found)[1]]
        keep = max(_overlap(buffer, stop) for stop in self._stops)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep]

    def finish(self) -> str:
        """What was held back, when no more text comes."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`, short of all of it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
