"""Plain data that crosses the runtime's borders: what is asked for, and what comes back.

Nothing here has behaviour beyond small derived facts; nothing imports Triton, a device or a clock.
All times are seconds of one monotonic clock, read by the caller and passed in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

# Rows of logits in a step for the log-probabilities of prompts, and so tokens of such prompts: 64 MiB for 262,144 tokens.
MAX_PROMPT_LOGITS = 64


class FinishReason(str, Enum):
    """Why a sequence ended, in the words clients see."""

    STOP = "stop"  # end-of-sequence token or a stop string
    LENGTH = "length"  # max_tokens, or the context is full
    TIMEOUT = "timeout"  # deadline_ms passed while generating
    CANCELLED = "cancelled"
    ERROR = "error"


class GuideState(Protocol):
    """How far one sequence has got in its guide (guide.py)."""

    def fork(self) -> GuideState:
        """Another at the same place."""

    def forced(self) -> list[int]:
        """Tokens that spell all that may come next, where there is no choice."""

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        """How many of these, from the first, may come next."""

    def prepare(self) -> None:
        """Begin to work out what may come next."""

    def allowed(self) -> NDArray[np.int32]:
        """A bit for each token that may come next, 32 in an integer, the lowest first."""

    def accept(self, token_id: int) -> None: ...

    @property
    def is_complete(self) -> bool:
        """Whether nothing may follow."""

    @property
    def error(self) -> str:
        """Why it cannot go on, or ""."""


class Guide(Protocol):
    """What output is bound to."""

    def start(self) -> GuideState: ...


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens. Neutral values switch a rule off; `temperature` 0 is greedy."""

    max_tokens: int = 128
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    min_p: float = 0.0  # 0: off
    repetition_penalty: float = 1.0  # 1: off; over prompt and output (CTRL, arXiv 1909.05858)
    presence_penalty: float = 0.0  # output tokens only
    frequency_penalty: float = 0.0  # output tokens only
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, what is added to its logit)
    seed: int | None = None
    ignore_eos: bool = False
    end_ids: tuple[int, ...] | None = None  # None: the engine's own end-of-sequence ids
    stop_strings: tuple[str, ...] = ()
    bad_token_sequences: tuple[tuple[int, ...], ...] = ()
    num_top_logprobs: int = 0  # alternatives to report beside the chosen token's own
    wants_logprobs: bool = False
    num_prompt_logprobs: int | None = None  # alternatives to report beside each prompt token's own; None: report none at all
    guide: Guide | None = None
    speculation: bool = True  # where the engine offers it; changes no token


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt to continue. `request_id` is unique among live requests."""

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    cache_salt: str = ""  # equal salts share cached prefixes, different ones never do
    queue_deadline: float | None = None  # refused if still waiting then
    deadline: float | None = None  # ended with what it has then (FinishReason.TIMEOUT)
    arrived_at: float = 0.0  # when Triton handed it over
    after: str | None = None  # a request with the same prompt, which this one waits for, to share its pages


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural-log probability of one token, generated or of the prompt, under the model's own distribution (before any
    penalty, temperature or filter), with the `num_top_logprobs` likeliest alternatives, likeliest first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class SequenceOutput:
    """What one step added to one request. The last one of a request has `finish_reason` set.

    `text` is the text that became final in this step (never repeated, may be empty while a stop string or
    a multi-byte character is undecided); `token_ids` are the tokens generated in this step.
    """

    request_id: str
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] | None = None  # of all prompt tokens but the first; with the first token, if asked for
    finish_reason: FinishReason | None = None
    error: str | None = None  # set with FinishReason.ERROR
    queue_timed_out: bool = False  # set with FinishReason.TIMEOUT when nothing of it ever ran
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache when first scheduled
    num_output_tokens: int = 0  # total so far
    num_draft_tokens: int = 0  # guessed ahead and checked, so far
    num_accepted_tokens: int = 0  # those of them that were right, and came out
