"""The request's fields: every name a client may send, what it may hold, and where it may stand.

A value comes as a tensor, as a key of the JSON in `sampling_parameters`, or as a request parameter, in this order of
precedence. Anything wrong is a RequestError of one line: the field, the value, what is allowed.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from llm_runtime.errors import RequestError

INT32_MAX = 2**31 - 1
UINT64_MAX = 2**64 - 1
# Of a list of words: every word is looked for at every step, on the thread that all requests share.
MAX_WORDS = 1024
MAX_WORD_LENGTH = 1024
MAX_SEQUENCES = 64  # of one prompt
MAX_GUIDE_LENGTH = 65_536
# TensorRT-LLM's words, and choice: any JSON (the guide is not read), a JSON schema, a regular expression, a JSON list of
# strings, a grammar (GBNF, as llama.cpp and XGrammar have it, or Lark).
GUIDE_KINDS = ("json", "json_schema", "regex", "choice", "ebnf_grammar")
VLLM_GUIDES = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "ebnf_grammar"}
MAX_BIAS = 100.0  # bans or forces a token in any model


@dataclass(frozen=True)
class Field:
    """`parse` turns one raw value into the field's type or raises ValueError with what is allowed."""

    parse: Callable[[Any], Any]
    allowed: str


def _number(raw: Any) -> float:
    """Numbers may come as strings, as the vLLM backend's clients send them."""
    if isinstance(raw, bool) or not isinstance(raw, int | float | str):
        raise ValueError
    return float(raw)


def _integer(low: int, high: int) -> Field:
    def parse(raw: Any) -> int:
        if isinstance(raw, str) or (isinstance(raw, float) and raw.is_integer()):
            raw = int(raw)
        if isinstance(raw, bool) or not isinstance(raw, int) or not low <= raw <= high:
            raise ValueError
        return raw

    return Field(parse, f"an integer from {low} to {high}")


def _real(low: float, high: float, *, above: bool = False) -> Field:
    def parse(raw: Any) -> float:
        value = _number(raw)
        if not math.isfinite(value) or not low <= value <= high or (above and value == low):
            raise ValueError
        return value

    return Field(parse, f"a number {'above' if above else 'from'} {low:g} {'up ' if above else ''}to {high:g}")


def _boolean(raw: Any) -> bool:
    if isinstance(raw, bool):
        return raw
    if raw in ("true", "false"):
        return raw == "true"
    raise ValueError


def _text(raw: Any) -> str:
    if not isinstance(raw, str):
        raise ValueError
    raw.encode()  # half a surrogate pair, which JSON can carry, is no text: UnicodeEncodeError is a ValueError
    return raw


def _all_words(raw: Any) -> tuple[str, ...]:
    """With empty ones, which have their place where each word has a weight."""
    raw = [raw] if isinstance(raw, str) else raw
    if not isinstance(raw, list | tuple) or len(raw) > MAX_WORDS or any(len(_text(word)) > MAX_WORD_LENGTH for word in raw):
        raise ValueError
    return tuple(raw)


def _words(raw: Any) -> tuple[str, ...]:
    """An empty element means none, as in lists that clients pad."""
    return tuple(word for word in _all_words(raw) if word)


def _neutral(*values: Any) -> Field:
    """Declared because clients send it, but only values that ask for nothing are served."""

    def parse(raw: Any) -> None:
        if raw not in values:
            raise ValueError

    return Field(parse, f"{' or '.join(repr(v) for v in values)} (nothing else is offered)")


def _guide_kind(raw: Any) -> str:
    if raw not in ("", *GUIDE_KINDS):
        raise ValueError
    return raw


def _guide_text(raw: Any) -> str:
    text = _text(raw)
    if len(text) > MAX_GUIDE_LENGTH:
        raise ValueError
    return text


def _guided_decoding(raw: Any) -> tuple[str, str]:
    """(kind, guide). A schema may be an object or JSON text."""
    if not isinstance(raw, Mapping) or len(raw) != 1 or (name := next(iter(raw))) not in VLLM_GUIDES:
        raise ValueError
    value = raw[name]
    return VLLM_GUIDES[name], _guide_text(value if isinstance(value, str) else json.dumps(value))


def _bias_weights(raw: Any) -> tuple[float, ...]:
    raw = raw if isinstance(raw, list | tuple) else [raw]
    if len(raw) > MAX_WORDS:
        raise ValueError
    return tuple(_bias(value) for value in raw)


def _bias(raw: Any) -> float:
    value = _number(raw)
    if not -MAX_BIAS <= value <= MAX_BIAS:  # nor NaN
        raise ValueError
    return value


def _logit_bias(raw: Any) -> tuple[tuple[int, float], ...]:
    """A JSON object with token ids as keys, as OpenAI's clients send it."""
    if not isinstance(raw, Mapping) or len(raw) > MAX_WORDS:
        raise ValueError
    return tuple((_integer(0, INT32_MAX).parse(token_id), _bias(bias)) for token_id, bias in raw.items())


BOOLEAN = Field(_boolean, "true or false")
TEXT = Field(_text, "a string")
WORDS = Field(
    _words,
    f"a list of up to {MAX_WORDS} strings of up to {MAX_WORD_LENGTH} characters; over HTTP a JSON list beside text_input",
)

FIELDS: dict[str, Field] = {
    "max_tokens": _integer(1, INT32_MAX),
    "max_completion_tokens": _integer(1, INT32_MAX),
    "min_tokens": _integer(0, INT32_MAX),
    "min_length": _integer(0, INT32_MAX),
    "stop_words": WORDS,
    "bad_words": WORDS,
    "end_id": _integer(-1, INT32_MAX),
    "pad_id": _integer(-1, INT32_MAX),
    "ignore_eos": BOOLEAN,
    "deadline_ms": _integer(1, INT32_MAX),
    "temperature": _real(0, 100),
    "top_k": _integer(0, INT32_MAX),
    "top_p": _real(0, 1),
    "min_p": _real(0, 1),
    "repetition_penalty": _real(0.01, 100),
    "presence_penalty": _real(-2, 2),
    "frequency_penalty": _real(-2, 2),
    "length_penalty": _neutral(1.0, 0.0),
    "seed": _integer(0, UINT64_MAX),
    "random_seed": _integer(0, UINT64_MAX),
    "stream": BOOLEAN,
    "exclude_input_in_output": BOOLEAN,
    "return_log_probs": BOOLEAN,
    "return_logprobs": BOOLEAN,
    "return_cumulative_logprob": BOOLEAN,
    "return_num_input_tokens": BOOLEAN,
    "return_num_output_tokens": BOOLEAN,
    "return_finish_reason": BOOLEAN,
    "return_output_ids": BOOLEAN,
    "cache_salt": TEXT,
    "speculation": BOOLEAN,
    "logprobs": Field(lambda raw: 0 if raw is False else _integer(0, 20).parse(raw), "an integer from 0 to 20"),
    "prompt_logprobs": _integer(0, 20),
    "use_beam_search": _neutral(False),
    "skip_special_tokens": _neutral(True),
    "spaces_between_special_tokens": _neutral(True, False),
    "beam_width": _neutral(1, 0),
    "num_return_sequences": _integer(0, MAX_SEQUENCES),
    "best_of": _integer(0, MAX_SEQUENCES),
    "return_perf_metrics": _neutral(False),
    "return_context_logits": _neutral(False),
    "return_generation_logits": _neutral(False),
    "logit_bias": Field(
        _logit_bias, f"an object of up to {MAX_WORDS} token ids, each with a number from -{MAX_BIAS:g} to {MAX_BIAS:g}"
    ),
    "embedding_bias_words": Field(_all_words, WORDS.allowed),
    "embedding_bias_weights": Field(
        _bias_weights,
        f"a list of up to {MAX_WORDS} numbers from -{MAX_BIAS:g} to {MAX_BIAS:g}, one for each of embedding_bias_words",
    ),
    "guided_decoding_guide_type": Field(_guide_kind, f"{', '.join(GUIDE_KINDS)}, or '' for none"),
    "guided_decoding_guide": Field(_guide_text, f"a string of up to {MAX_GUIDE_LENGTH} characters"),
    "guided_decoding": Field(
        _guided_decoding, f"an object with one of {', '.join(VLLM_GUIDES)}, of up to {MAX_GUIDE_LENGTH} characters of JSON"
    ),
}
# Other names for the same thing in `sampling_parameters` and request parameters (the vLLM backend's words).
ALIASES = {"stop": "stop_words", "n": "num_return_sequences"}


def read_fields(tensors: Mapping[str, Any], parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Checked values by field name. `tensors` are one row's values as Python objects; `parameters` the request's."""
    json_text = tensors.get("sampling_parameters", "")
    from_json = _rename("sampling_parameters", _parse_json(json_text) if json_text else {})
    for name in from_json:
        if name not in FIELDS:
            raise RequestError(f"sampling_parameters: unknown key {name!r}{_hint(name)}")
    raw = _known_parameters(parameters) | from_json | {k: v for k, v in tensors.items() if k in FIELDS}
    return {name: _check(name, value) for name, value in raw.items()}


def _check(name: str, value: Any) -> Any:
    try:
        return FIELDS[name].parse(value)
    except (ValueError, TypeError, OverflowError):
        raise RequestError(f"{name}: got {shown(value)}; allowed: {FIELDS[name].allowed}") from None


def _known_parameters(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Fields that came as request parameters. A name that looks like a slip is refused, one that is foreign is left alone:
    load balancers and gateways add parameters of their own."""
    known = {}
    for name, value in _rename("request", parameters).items():
        if name in FIELDS:
            known[name] = value
        elif near := difflib.get_close_matches(name, FIELDS, n=1, cutoff=0.8):
            raise RequestError(f"{name}: unknown; did you mean {near[0]!r}?")
    return known


def _rename(where: str, values: Mapping[str, Any]) -> dict[str, Any]:
    renamed: dict[str, Any] = {}
    for name, value in values.items():
        target = ALIASES.get(name, name)
        if value is not None and target in renamed and renamed[target] != value:
            raise RequestError(f"{where}: {name!r} and another name of {target!r} differ; give one")
        if value is not None:
            renamed[target] = value
    return renamed


def _parse_json(text: str) -> dict[str, Any]:
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"sampling_parameters: not JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise RequestError(f"sampling_parameters: got {shown(parsed)}; allowed: a JSON object")
    return parsed


def _hint(name: str) -> str:
    near = difflib.get_close_matches(name, [*FIELDS, *ALIASES], n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else "; docs/requests.md lists what is known"


def shown(value: Any) -> str:
    """As messages quote what was given."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
