"""Triton's tensors to plain values, and outputs back to Triton's responses. What each name means: fields.py, config.pbtxt."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from numpy.typing import NDArray

from llm_runtime.errors import RequestError
from llm_runtime.request import ReplyOptions
from llm_runtime.types import FinishReason, SequenceOutput, TokenLogprob

LISTS = {"input_ids", "stop_words", "bad_words", "embedding_bias_words", "embedding_bias_weights"}


def read_tensors(request: Any) -> list[dict[str, Any]]:
    """One mapping of Python values for each row of the request's batch.

    Raises RequestError for text that is not UTF-8 or a shape other than [rows, 1] ([rows, n] for lists).
    """
    arrays = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
    num_rows = next((len(arrays[name]) for name in ("text_input", "input_ids") if name in arrays), 1)
    if num_rows == 0:
        raise RequestError("text_input: got shape [0]; allowed: [n, 1], one prompt a row")
    rows: list[dict[str, Any]] = [{} for _ in range(num_rows)]
    for name, array in arrays.items():
        wanted = f"[{num_rows}, n]" if name in LISTS else f"[{num_rows}, 1]"
        if array.ndim != 2 or len(array) != num_rows or (name not in LISTS and array.shape[1] != 1):
            raise RequestError(f"{name}: got shape {list(array.shape)}; allowed: {wanted}")
        for row, values in zip(rows, array.tolist(), strict=True):
            decoded = [_text(name, value) if isinstance(value, bytes) else value for value in values]
            row[name] = decoded if name in LISTS else decoded[0]
    return rows


def read_parameters(request: Any) -> dict[str, Any]:
    """The request's own parameters (JSON values by name)."""
    return json.loads(request.parameters() or "{}")


def _text(name: str, raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise RequestError(f"{name}: got bytes {raw[:20]!r}; allowed: UTF-8 text") from None


def make_response(together: Sequence[tuple[SequenceOutput, float]], reply: ReplyOptions, wanted: Set[str]) -> Any:
    """The response for an output (or for several of one stream merged into one), or for all sequences of a prompt, each with
    its cumulative log-probability so far. Tensors have an element for each sequence; what has several for one stands one after
    another, and `num_output_tokens` says where each begins.

    `num_output_tokens` counts this response's tokens; the prompt's counts and the reason come with the last response, and
    with every one where the client asks for them. Only `wanted` tensors may be in it: Triton would take the others out, but its
    Python backend (2.51) frees their arrays without holding Python's lock, which in time corrupts the memory of the process.
    """
    outputs = [output for output, _ in together]
    last = outputs[0].finish_reason is not None
    tensors = {
        "text_output": _strings(output.text for output in outputs),
        "num_output_tokens": np.array([len(output.token_ids) for output in outputs], np.int32),
    }
    if last or reply.num_input_tokens:
        tensors["num_input_tokens"] = _integers(outputs, "num_prompt_tokens")
    if last:
        tensors["num_cached_tokens"] = _integers(outputs, "num_cached_tokens")
        tensors["num_draft_tokens"] = _integers(outputs, "num_draft_tokens")
        tensors["num_accepted_tokens"] = _integers(outputs, "num_accepted_tokens")
    if last or reply.finish_reason:
        tensors["finish_reason"] = _strings(output.finish_reason.value if output.finish_reason else "" for output in outputs)
    if reply.batch_index or reply.num_sequences > 1 or last:
        # [1, 1], as TensorRT-LLM's ensemble gives them: its clients read [0][0].
        first = reply.sequence_index if len(outputs) == 1 else 0
        tensors["batch_index"] = np.full((len(outputs), 1), reply.batch_index, np.int32)
        tensors["sequence_index"] = np.arange(first, first + len(outputs), dtype=np.int32).reshape(-1, 1)
    if reply.output_ids:
        tensors["output_ids"] = np.array([token_id for output in outputs for token_id in output.token_ids], np.int32)
    tensors |= _logprob_tensors(together, reply)
    return pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in tensors.items() if name in wanted])


def _logprob_tensors(together: Sequence[tuple[SequenceOutput, float]], reply: ReplyOptions) -> Mapping[str, NDArray]:
    tensors: dict[str, NDArray] = {}
    cumulative = np.array([logprob for _, logprob in together], np.float32)
    if reply.log_probs:
        tensors["cum_log_probs"] = cumulative
        tensors["output_log_probs"] = np.array(
            [[entry.logprob for output, _ in together for entry in output.logprobs]], np.float32
        )
    if reply.cumulative_logprob:
        tensors["cumulative_logprob"] = cumulative
    if reply.logprobs_json:
        tensors["logprobs"] = _strings(json.dumps(_by_token(output.logprobs)) for output, _ in together)
    of_prompt = together[0][0].prompt_logprobs
    if of_prompt is not None:
        tensors["prompt_logprobs"] = _strings([json.dumps([None, *_by_token(of_prompt)])])  # nothing precedes the first token
    return tensors


def _by_token(logprobs: Iterable[TokenLogprob]) -> list[dict[str, float]]:
    return [{str(token): value for token, value in ((e.token_id, e.logprob), *e.top)} for e in logprobs]


def _integers(outputs: Sequence[SequenceOutput], name: str) -> NDArray[np.int32]:
    return np.array([getattr(output, name) for output in outputs], np.int32)


def _strings(texts: Iterable[str]) -> NDArray[np.object_]:
    return np.array([text.encode() for text in texts], np.object_)


def refusal(message: str) -> Any:
    """The response to a request that asks for something that cannot be served (HTTP 400)."""
    return _error(message, pb_utils.TritonError.INVALID_ARG)


def internal_error(message: str) -> Any:
    return _error(message, pb_utils.TritonError.INTERNAL)


def failure(output: SequenceOutput) -> Any:
    """The response to a request that ended without a result, or None where it has one."""
    if output.finish_reason is FinishReason.CANCELLED:
        return _error("the request was cancelled", pb_utils.TritonError.CANCELLED)
    if output.queue_timed_out:
        return _error("the request's timeout or deadline_ms passed while it waited to start", pb_utils.TritonError.UNAVAILABLE)
    if output.finish_reason is FinishReason.ERROR:
        return internal_error(output.error or "unknown error")
    return None


def _error(message: str, code: Any) -> Any:
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(message, code))
