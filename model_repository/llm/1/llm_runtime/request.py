"""From a request's checked fields to what the engine runs and how the reply is to look."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tokenizers import Tokenizer

from llm_runtime.errors import RequestError
from llm_runtime.fields import GUIDE_KINDS, MAX_WORDS, UINT64_MAX, read_fields
from llm_runtime.guide import Guides
from llm_runtime.types import GenerationRequest, Guide, SamplingParams


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds a request; tokens and milliseconds."""

    max_context: int
    default_max_tokens: int
    max_deadline_ms: int  # 0: none
    vocab_size: int
    bos_token_id: int | None


@dataclass(frozen=True, slots=True)
class ReplyOptions:
    """What the client wants to see. `prompt_text` stands before the output (never in a stream)."""

    stream: bool = False
    prompt_text: str = ""
    batch_index: int = 0
    sequence_index: int = 0
    num_sequences: int = 1  # of this prompt
    log_probs: bool = False
    logprobs_json: bool = False
    cumulative_logprob: bool = False
    num_input_tokens: bool = False
    finish_reason: bool = False
    output_ids: bool = False


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    generation: GenerationRequest
    reply: ReplyOptions


def encode_prompt(tokenizer: Tokenizer, text: str, bos_token_id: int | None) -> tuple[int, ...]:
    """Token ids of a text that starts a sequence. Raises RequestError where there are none."""
    if not text:
        raise RequestError("text_input: got ''; allowed: at least one character")
    ids = tokenizer.encode(text).ids
    # A prompt made by a chat template starts with the text of BOS already; the model was trained on one.
    if len(ids) > 1 and ids[0] == ids[1] == bos_token_id:
        del ids[0]
    if not ids:
        raise RequestError(f"text_input: got {text[:40]!r}, which the tokenizer turns into no tokens")
    return tuple(ids)


class RequestParser:
    """Checks a request at the border; what it lets through can run."""

    def __init__(self, tokenizer: Tokenizer, limits: Limits, guides: Guides) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self._guides = guides

    def parse(
        self,
        make_id: Callable[[], str],
        row: int,
        tensors: Mapping[str, Any],
        parameters: Mapping[str, Any],
        timeout_us: int,
        now: float,
    ) -> list[ParsedRequest]:
        """What is to run for one row: a request for each sequence that it asks for.

        `make_id` gives each an id; `tensors` holds row `row`'s values as Python objects (text, numbers, lists); `timeout_us` 0
        is none; `now` in seconds of the monotonic clock that the engine is driven by. Raises RequestError.
        """
        fields = read_fields(tensors, parameters)
        prompt_ids = self._prompt_ids(tensors)
        sampling = self._sampling(fields)
        deadline_ms = fields.get("deadline_ms", self._limits.max_deadline_ms)
        if self._limits.max_deadline_ms:
            deadline_ms = min(deadline_ms, self._limits.max_deadline_ms)
        first = GenerationRequest(
            request_id=make_id(),
            prompt_ids=prompt_ids,
            sampling=sampling,
            cache_salt=fields.get("cache_salt", ""),
            queue_deadline=now + timeout_us / 1e6 if timeout_us else None,
            deadline=now + deadline_ms / 1e3 if deadline_ms else None,
            arrived_at=now,
        )
        reply = _reply_options(fields, tensors, row)
        parsed = [ParsedRequest(first, reply)]
        for index in range(1, reply.num_sequences):
            seed = None if sampling.seed is None else (sampling.seed + index) % (UINT64_MAX + 1)
            # Part of what has started once the first has: no timeout of the queue is theirs.
            other = replace(
                first,
                request_id=make_id(),
                sampling=replace(sampling, seed=seed, num_prompt_logprobs=None),  # the first has them for all
                after=first.request_id,
                queue_deadline=None,
            )
            parsed.append(ParsedRequest(other, replace(reply, sequence_index=index)))
        return parsed

    def _prompt_ids(self, tensors: Mapping[str, Any]) -> tuple[int, ...]:
        text, ids = tensors.get("text_input"), tensors.get("input_ids")
        if text is not None and ids is not None:
            raise RequestError("text_input, input_ids: both given; give one")
        if text is not None:
            name, prompt = "text_input", encode_prompt(self._tokenizer, text, self._limits.bos_token_id)
        elif ids is not None:
            name, prompt = "input_ids", tuple(ids)
            self._check_ids(prompt)
        else:
            raise RequestError("text_input: missing; give it or input_ids")
        longest = self._limits.max_context - 1
        if len(prompt) > longest:
            raise RequestError(
                f"{name}: got {len(prompt)} tokens; allowed: up to {longest} "
                f"(a context of {self._limits.max_context} less one token to generate)"
            )
        return prompt

    def _check_ids(self, ids: Sequence[int]) -> None:
        if not ids:
            raise RequestError("input_ids: got []; allowed: at least one token id")
        for token_id in ids:
            if not 0 <= token_id < self._limits.vocab_size:
                raise RequestError(f"input_ids: got {token_id}; allowed: 0 to {self._limits.vocab_size - 1}")

    def _sampling(self, fields: Mapping[str, Any]) -> SamplingParams:
        max_tokens = fields.get("max_tokens", self._limits.default_max_tokens)
        max_tokens = min(max_tokens, fields.get("max_completion_tokens", max_tokens))
        min_tokens = fields.get("min_tokens", fields.get("min_length", 0))
        if min_tokens > max_tokens:
            raise RequestError(f"min_tokens: got {min_tokens}; allowed: up to max_tokens, {max_tokens}")
        top_k, top_p, min_p = fields.get("top_k", 0), fields.get("top_p", 0.0), fields.get("min_p", 0.0)
        filters = top_k > 1 or 0 < top_p < 1 or min_p > 0
        end_id = fields.get("end_id", -1)
        num_top = fields.get("logprobs", 0)
        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            # top_k 1 is greedy whatever the temperature; a filter alone means that the client wants to sample.
            temperature=0.0 if top_k == 1 else fields.get("temperature", 1.0 if filters else 0.0),
            top_k=top_k,
            top_p=top_p or 1.0,  # 0 is how TensorRT-LLM's clients say "off"
            min_p=min_p,
            repetition_penalty=fields.get("repetition_penalty", 1.0),
            presence_penalty=fields.get("presence_penalty", 0.0),
            frequency_penalty=fields.get("frequency_penalty", 0.0),
            seed=fields.get("seed", fields.get("random_seed")),
            ignore_eos=fields.get("ignore_eos", False),
            end_ids=(end_id,) if end_id >= 0 else None,
            stop_strings=fields.get("stop_words", ()),
            bad_token_sequences=self._bad_sequences(fields.get("bad_words", ())),
            logit_bias=self._logit_bias(fields),
            num_top_logprobs=num_top,
            num_prompt_logprobs=fields.get("prompt_logprobs"),
            guide=self._guide(fields),
            speculation=fields.get("speculation", True),
            wants_logprobs=num_top > 0
            or any(fields.get(name, False) for name in ("return_log_probs", "return_logprobs", "return_cumulative_logprob")),
        )

    def _guide(self, fields: Mapping[str, Any]) -> Guide | None:
        kind, text = fields.get("guided_decoding_guide_type", ""), fields.get("guided_decoding_guide", "")
        if "guided_decoding" in fields:
            if kind or text:
                raise RequestError("guided_decoding, guided_decoding_guide: both given; give one")
            kind, text = fields["guided_decoding"]
        if not kind and text:
            raise RequestError(f"guided_decoding_guide_type: missing; give one of {', '.join(GUIDE_KINDS)}")
        if not kind:
            return None
        if not text and kind != "json":
            raise RequestError(f"guided_decoding_guide: missing; give what {kind} takes")
        return self._guides.compile(kind, "" if kind == "json" else text)

    def _logit_bias(self, fields: Mapping[str, Any]) -> tuple[tuple[int, float], ...]:
        """By token id, and by word: each token of a word as it is written and after a space."""
        bias: dict[int, float] = {}
        for token_id, value in fields.get("logit_bias", ()):
            if token_id >= self._limits.vocab_size:
                raise RequestError(f"logit_bias: got token id {token_id}; allowed: 0 to {self._limits.vocab_size - 1}")
            bias[token_id] = value
        words, weights = fields.get("embedding_bias_words", ()), fields.get("embedding_bias_weights", ())
        if any(words) and len(words) != len(weights):
            raise RequestError(f"embedding_bias_weights: got {len(weights)}; allowed: one for each of {len(words)} words")
        for word, value in zip(words, weights, strict=False):  # weights without words mean nothing
            for token_id in sorted({token_id for ids in self._spellings(word) for token_id in ids}):
                if token_id < self._limits.vocab_size:  # a tokenizer may have more than the model
                    bias[token_id] = bias.get(token_id, 0.0) + value
        if len(bias) > MAX_WORDS:
            raise RequestError(f"embedding_bias_words: they have {len(bias)} tokens; allowed: up to {MAX_WORDS}")
        return tuple(bias.items())

    def _spellings(self, word: str) -> list[tuple[int, ...]]:
        """A word at the start of a text and after a space have different tokens."""
        encoded = (tuple(self._tokenizer.encode(text, add_special_tokens=False).ids) for text in (word, f" {word}"))
        return [ids for ids in encoded if ids]

    def _bad_sequences(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        return tuple(dict.fromkeys(ids for word in words for ids in self._spellings(word)))


def _reply_options(fields: Mapping[str, Any], tensors: Mapping[str, Any], row: int) -> ReplyOptions:
    stream = fields.get("stream", False)
    echo = not stream and not fields.get("exclude_input_in_output", True)
    num_sequences = fields.get("num_return_sequences", 1) or 1
    if fields.get("best_of", 1) > num_sequences:
        raise RequestError(f"best_of: got {fields['best_of']}; allowed: up to n, {num_sequences} (all that run are returned)")
    return ReplyOptions(
        stream=stream,
        prompt_text=tensors.get("text_input", "") if echo else "",
        batch_index=row,
        num_sequences=num_sequences,
        log_probs=fields.get("return_log_probs", False),
        logprobs_json=fields.get("return_logprobs", False),
        cumulative_logprob=fields.get("return_cumulative_logprob", False),
        num_input_tokens=fields.get("return_num_input_tokens", False),
        finish_reason=fields.get("return_finish_reason", False),
        output_ids=fields.get("return_output_ids", False),
    )
