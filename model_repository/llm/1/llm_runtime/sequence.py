"""One request on its way: its tokens, its pages, and how far it has got. Tokens live here and nowhere else."""

from __future__ import annotations

from enum import Enum

import numpy as np

from llm_runtime.block_manager import GONE, PrefixEntry
from llm_runtime.executors.base import Row
from llm_runtime.types import FinishReason, GenerationRequest, TokenLogprob


class State(Enum):
    WAITING = "waiting"  # not started, or preempted
    RUNNING = "running"
    FINISHED = "finished"


class Sequence:
    """`token_ids` are prompt and output; the first `num_computed` of them have keys and values in `page_ids`, a list for each
    group of layers (block_manager.py).

    tokens     |---- prompt ----|---- output ----|
    computed   |--------- num_computed ------|
    entries    |page|page|page|                    full computed pages, in the prefix cache
    """

    def __init__(self, request: GenerationRequest, arrival: int, leader: Sequence | None = None) -> None:
        self.request = request
        self.arrival = arrival
        self.leader = leader  # computes the same prompt first
        self.state = State.WAITING
        self.finish_reason: FinishReason | None = None
        self.token_ids = list(request.prompt_ids)
        self.num_prompt = len(request.prompt_ids)
        self.num_computed = 0
        self.num_cached: int | None = None  # prompt tokens found in the prefix cache when first started
        self.page_ids: list[list[int]] = []
        self.entries: list[PrefixEntry] = []
        self.prompt_logprobs: list[TokenLogprob] = []  # of the prompt's tokens after the first, as far as they are known
        self.draft_ids: list[int] = []  # guesses of the tokens after the newest, to be checked in the next step

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def num_uncomputed(self) -> int:
        """At least 1 while it runs: the newest token is always still to be run."""
        return len(self.token_ids) - self.num_computed

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether some of those that were asked for are still to be computed."""
        asked = self.request.sampling.num_prompt_logprobs is not None
        return asked and len(self.prompt_logprobs) < self.num_prompt - 1

    @property
    def num_pages_gone(self) -> int:
        """First pages that are out of the window of some layers."""
        return max((pages.count(GONE) for pages in self.page_ids), default=0)

    @property
    def waits_for_leader(self) -> bool:
        return self.leader is not None and self.leader.state is State.RUNNING and self.leader.num_output == 0

    @property
    def has_started(self) -> bool:
        return self.num_cached is not None


def make_row(sequence: Sequence, token_ids: list[int], past_length: int, num_logits: int) -> Row:
    """These tokens after so many of the sequence, on its pages."""
    pages = sequence.page_ids
    return Row(
        token_ids=np.array(token_ids, np.int64),  # type: ignore[arg-type]
        past_length=past_length,
        page_ids=pages[0],
        num_logits=num_logits,
        window_page_ids=pages[1] if len(pages) > 1 else None,
    )
