"""One step at a time: decide what runs, run it, choose tokens, turn them into text, and say what came of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tokenizers import Tokenizer

from llm_runtime.block_manager import BlockManager, StaticBlocks
from llm_runtime.detokenizer import Detokenizer, StopMatcher
from llm_runtime.draft import DraftSpeculator
from llm_runtime.errors import EngineError, RequestError
from llm_runtime.executors.base import Executor, Row
from llm_runtime.metrics import Stats
from llm_runtime.sampler import Choice, SamplerState
from llm_runtime.scheduler import ScheduledRow, Scheduler, StepPlan
from llm_runtime.sequence import Sequence, make_row
from llm_runtime.speculation import Speculator
from llm_runtime.types import FinishReason, GenerationRequest, SamplingParams, SequenceOutput


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Limits in sequences and tokens; `end_ids` end a sequence unless its request says otherwise."""

    max_sequences: int
    max_step_tokens: int
    prefill_chunk_tokens: int
    max_context: int
    end_ids: tuple[int, ...]
    prefix_caching: bool = True
    static_cache: bool = False  # a region of max_context tokens for each sequence, in place of pages as it grows
    max_draft_tokens: int = 0  # guessed ahead for a sequence in a step; 0: no speculation


class LiveSequence:
    """A sequence with what its text and its choices need."""

    def __init__(self, sequence: Sequence, tokenizer: Tokenizer, end_ids: tuple[int, ...]) -> None:
        request = sequence.request
        self.sequence = sequence
        self.sampler = SamplerState(request.sampling, request.prompt_ids, end_ids)
        self.detokenizer = Detokenizer(tokenizer, request.prompt_ids)
        self.stops = StopMatcher(request.sampling.stop_strings)
        self.last_token_at: float | None = None
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0


class Engine:
    """Owns the sequences and the pages. Driven by one thread; every added request gets exactly one output with a finish reason.

    A token that ends a sequence as end of sequence is in `token_ids` and in the counts, and has no text.
    """

    def __init__(
        self,
        executor: Executor,
        tokenizer: Tokenizer,
        config: EngineConfig,
        clock: Callable[[], float] = time.monotonic,
        draft: Executor | None = None,
    ) -> None:
        """`clock` says when a step's tokens came; the `now` of each step is a time of the same clock. `draft`: guesses for the
        executor, and has its vocabulary and its pages' size and groups; None: guesses come from a sequence's own text."""
        self.executor = executor
        self.config = config
        self.stats = Stats(max_sequences=config.max_sequences)
        self._clock = clock
        self._tokenizer = tokenizer
        # Never more than the pool holds, or a sequence alone in it could wait for pages for ever.
        groups, page_size = executor.page_groups, executor.page_size
        self.blocks = BlockManager(groups, page_size, prefix_caching=config.prefix_caching)
        self.max_context = min(config.max_context, self.blocks.max_context() or config.max_context)
        if config.static_cache:
            self.blocks = StaticBlocks(groups[0].num_pages, page_size, -(-self.max_context // page_size))
        self.scheduler = Scheduler(
            self.blocks, config.max_sequences, config.max_step_tokens, config.prefill_chunk_tokens, self.max_context
        )
        self._speculator: Speculator | None = None
        if config.max_draft_tokens:
            limit = config.max_draft_tokens
            self._speculator = DraftSpeculator(limit, draft, clock) if draft else Speculator(limit)
        self._live: dict[str, LiveSequence] = {}
        self._outputs: list[SequenceOutput] = []  # owed to the caller; kept here so that a step that fails loses none
        self._arrivals = 0
        self._pinned: list[list[list[int]]] = []  # pages of each
        self._update_gauges()

    def close(self) -> None:
        """Free what the executors hold; nothing may follow but `replace_executors`."""
        self.executor.close()
        if isinstance(self._speculator, DraftSpeculator):
            self._speculator.executor.close()

    def replace_executors(self, executor: Executor, draft: Executor | None) -> None:
        """By others of as many pages, whose contents are not those of before."""
        self.executor = executor
        if draft is not None:
            assert isinstance(self._speculator, DraftSpeculator)
            self._speculator.executor = draft

    @property
    def shares_prefixes(self) -> bool:
        return self.config.prefix_caching and not self.config.static_cache

    @property
    def has_work(self) -> bool:
        return bool(self._live or self._outputs)

    def add(self, request: GenerationRequest) -> None:
        """Queue a request. Raises RequestError when its prompt cannot fit, or its id is that of a live request."""
        longest = self.max_context - 1
        if not 0 < len(request.prompt_ids) <= longest:
            raise RequestError(f"prompt: got {len(request.prompt_ids)} tokens; allowed: 1 to {longest}")
        if request.request_id in self._live:
            raise RequestError(f"request_id: got {request.request_id!r}, which is live; allowed: one of its own")
        leader = self._live.get(request.after or "") if self.shares_prefixes else None
        sequence = Sequence(request, self._arrivals, leader.sequence if leader else None)
        self._arrivals += 1
        self._live[request.request_id] = LiveSequence(sequence, self._tokenizer, self.config.end_ids)
        self.scheduler.add(sequence)
        self._update_gauges()

    def pin(self, prefixes: list[tuple[tuple[int, ...], str]]) -> None:
        """Compute these (token ids, salt) now, and keep their whole pages in the prefix cache for good, in place of what was
        pinned before. Call while nothing is live; nothing of it is counted. Raises RequestError for one that does not fit,
        EngineError."""
        while self._pinned:
            self.blocks.release(self._pinned.pop())
        counted, self.stats = self.stats, Stats()
        try:
            self._compute_pinned(prefixes)
        except (RequestError, EngineError) as error:
            self.fail_all(str(error))  # nobody waits for what is left of it
            raise
        finally:
            self.stats = counted
            self._update_gauges()

    def _compute_pinned(self, prefixes: list[tuple[tuple[int, ...], str]]) -> None:
        for token_ids, salt in prefixes:
            sampling = SamplingParams(max_tokens=1, ignore_eos=True, speculation=False)
            self.add(GenerationRequest("a pinned prefix", token_ids, sampling, cache_salt=salt))
            while self.has_work:
                for output in self.step(self._clock()):
                    if output.error is not None:
                        raise EngineError(f"a pinned prefix could not be computed: {output.error}")
            # One more than there are, since a match leaves a token to run.
            self._pinned.append(self.blocks.hold(self.blocks.match([*token_ids, 0], salt)))

    def cancel(self, request_id: str) -> None:
        """End a request now, running or waiting; no effect on one that has ended."""
        live = self._live.get(request_id)
        if live is not None:
            self.scheduler.finish(live.sequence, FinishReason.CANCELLED)
            self._outputs.append(self._final_output(live))
            self._update_gauges()

    def step(self, now: float) -> list[SequenceOutput]:
        """Run one step. Raises EngineError when the executor fails; `fail_all` then has the outputs that are owed."""
        for sequence in self.scheduler.expire(now):
            self._outputs.append(self._final_output(self._live[sequence.request.request_id]))
        if self._speculator:
            decoding = [sequence for sequence in self.scheduler.running if sequence.num_uncomputed == 1]
            self._speculator.propose(decoding, self._samplers(decoding))
        plan = self.scheduler.schedule()
        if plan.rows:
            if self._speculator:
                self._fill_guesses(plan, self._speculator)
            self._run(plan, now)
        self._update_gauges()
        return self._take_outputs()

    def _fill_guesses(self, plan: StepPlan, speculator: Speculator) -> None:
        try:
            speculator.fill(plan, self._samplers(row.sequence for row in plan.decode if row.draft_ids))
        except EngineError:
            raise
        except Exception as error:
            raise EngineError(f"the draft engine failed: {error}") from error

    def _samplers(self, sequences: Iterable[Sequence]) -> dict[str, SamplerState]:
        names = [sequence.request.request_id for sequence in sequences]
        return {name: self._live[name].sampler for name in names}

    def fail_all(self, message: str) -> list[SequenceOutput]:
        """End every live request with an error, and forget all cached prefixes: a device that failed may have lost them."""
        for live in list(self._live.values()):
            self.scheduler.finish(live.sequence, FinishReason.ERROR)
            self._outputs.append(self._final_output(live, error=message))
        self.blocks.forget_all()
        self._update_gauges()
        return self._take_outputs()

    def _take_outputs(self) -> list[SequenceOutput]:
        outputs, self._outputs = self._outputs, []
        return outputs

    def _run(self, plan: StepPlan, started_at: float) -> None:
        rows = plan.rows
        lives = [self._live[row.sequence.request.request_id] for row in rows]
        known_ids = [_known_ids(row) for row in rows]
        states: list[SamplerState] = []
        token_ids: list[list[int]] = []
        for row, live, known in zip(rows, lives, known_ids, strict=True):
            num_top = row.sequence.request.sampling.num_prompt_logprobs or 0
            states += [SamplerState.of_known(token_id, num_top) for token_id in known]
            token_ids += [[] for _ in known]
            if row.is_last_chunk:
                states += live.sampler.ahead(row.draft_ids)
                token_ids += _contexts(row)
        executor_rows = [_executor_row(row, len(known)) for row, known in zip(rows, known_ids, strict=True)]
        for state in states:
            if state.guide:
                state.guide.prepare()  # beside the step
        began_at = self._clock() if self._speculator else 0.0
        try:
            choices = iter(self.executor.sample(executor_rows, states, token_ids))
        except EngineError:
            raise
        except Exception as error:
            raise EngineError(f"the executor failed on {len(rows)} rows: {error}") from error
        ended_at = self._clock()
        self._count_step(plan, started_at, ended_at)
        if self._speculator and plan.decode and not plan.prefill:
            self._speculator.cost.observe(plan.num_decode_tokens, ended_at - began_at)
        for row in rows:
            self.scheduler.apply(row)
        for row, live, known, executor_row in zip(rows, lives, known_ids, executor_rows, strict=True):
            of_prompt = [next(choices) for _ in known]
            chosen = [next(choices) for _ in range(executor_row.num_logits - len(known))]
            if not self._keep_prompt_logprobs(live, of_prompt) or not chosen:
                continue
            confirmed = _confirmed(row.draft_ids, chosen)
            if row.draft_ids:
                self._learn(live, len(row.draft_ids), len(confirmed) - 1)
            self._accept_all(live, confirmed, ended_at)

    def _keep_prompt_logprobs(self, live: LiveSequence, choices: list[Choice]) -> bool:
        """False where one could not be computed: the sequence has ended."""
        for choice in choices:
            if choice.error:
                self.scheduler.finish(live.sequence, FinishReason.ERROR)
                self._outputs.append(self._final_output(live, error=choice.error))
                return False
            assert choice.logprob is not None
            live.sequence.prompt_logprobs.append(choice.logprob)
        return True

    def _accept_all(self, live: LiveSequence, choices: list[Choice], now: float) -> None:
        """Tokens of one step, in order, until one ends the sequence."""
        previous, first = live.last_token_at, len(self._outputs)
        for index, choice in enumerate(choices):
            if index > 0:  # the one before was guessed, so it was run in this step
                self.scheduler.advance(live.sequence, 1)
            if index < len(choices) - 1:  # a guess that is delivered; those after one that ends the sequence are not
                live.num_accepted_tokens += 1
                self.stats.accepted_tokens += 1
            self._outputs.append(self._accept(live, choice, now))
            if live.sequence.finish_reason is not None:
                break
        num_tokens = sum(len(output.token_ids) for output in self._outputs[first:])
        if previous is not None and num_tokens:  # tokens that came together shared the time
            self.stats.itl.observe((now - previous) / num_tokens, num_tokens)

    def _accept(self, live: LiveSequence, choice: Choice, now: float) -> SequenceOutput:
        """Append a token chosen just now to its sequence; end the sequence where that is due."""
        guide = live.sampler.guide
        if error := choice.error or (guide.error if guide else ""):
            self.scheduler.finish(live.sequence, FinishReason.ERROR)
            return self._final_output(live, error=error)
        sequence = live.sequence
        sequence.token_ids.append(choice.token_id)
        live.sampler.append(choice.token_id)
        self._count_token(live, now)
        output = self._output(live)
        output.token_ids = [choice.token_id]
        output.logprobs = [choice.logprob] if choice.logprob else []
        if sequence.num_output == 1 and sequence.request.sampling.num_prompt_logprobs is not None:
            output.prompt_logprobs = sequence.prompt_logprobs
        reason, output.text = self._advance_text(live, choice.token_id)
        if reason is not None:
            self.scheduler.finish(sequence, reason)
            self._close(live, output)
        return output

    def _advance_text(self, live: LiveSequence, token_id: int) -> tuple[FinishReason | None, str]:
        """(why the sequence ends with this token, or None; the text that can be shown)"""
        params, num_output = live.sequence.request.sampling, live.sequence.num_output
        if token_id in live.sampler.end_ids and not params.ignore_eos:
            return FinishReason.STOP, live.stops.push(live.detokenizer.finish()) + live.stops.finish()
        text = live.detokenizer.push(token_id)
        if num_output >= params.min_tokens:
            text = live.stops.push(text)
            if live.stops.stopped:
                return FinishReason.STOP, text
        is_complete = live.sampler.guide is not None and live.sampler.guide.is_complete
        if is_complete or num_output >= params.max_tokens or len(live.sequence.token_ids) >= self.max_context:
            text += live.stops.push(live.detokenizer.finish())
            is_stop = is_complete or live.stops.stopped
            return (FinishReason.STOP if is_stop else FinishReason.LENGTH), text + live.stops.finish()
        return None, text

    def _output(self, live: LiveSequence) -> SequenceOutput:
        sequence = live.sequence
        return SequenceOutput(
            request_id=sequence.request.request_id,
            num_prompt_tokens=sequence.num_prompt,
            num_cached_tokens=sequence.num_cached or 0,
            num_output_tokens=sequence.num_output,
            num_draft_tokens=live.num_draft_tokens,
            num_accepted_tokens=live.num_accepted_tokens,
        )

    def _final_output(self, live: LiveSequence, error: str | None = None) -> SequenceOutput:
        """The output of a sequence that the scheduler has just ended, not by a token of its own."""
        output = self._output(live)
        output.error = error
        if live.sequence.finish_reason is FinishReason.TIMEOUT:
            output.text = live.stops.push(live.detokenizer.finish()) + live.stops.finish()
            output.queue_timed_out = not live.sequence.has_started and live.sequence.request.after is None
        self._close(live, output)
        return output

    def _close(self, live: LiveSequence, output: SequenceOutput) -> None:
        reason = live.sequence.finish_reason
        assert reason is not None
        output.finish_reason = reason
        del self._live[output.request_id]
        if self._speculator:
            self._speculator.forget(output.request_id)
        self.stats.finished["queue_timeout" if output.queue_timed_out else reason.value] += 1

    def _count_step(self, plan: StepPlan, started_at: float, ended_at: float) -> None:
        stats = self.stats
        stats.step.observe(ended_at - started_at)
        if plan.decode:
            stats.decode_batch_size.observe(len(plan.decode))
        if plan.prefill:
            stats.prefill_batch_size.observe(len(plan.prefill))
        for sequence in plan.started:
            stats.queue_wait.observe(started_at - sequence.request.arrived_at)
            stats.prompt_tokens += sequence.num_prompt
            stats.prefix_hit_tokens += sequence.num_cached or 0

    def _count_token(self, live: LiveSequence, now: float) -> None:
        self.stats.generated_tokens += 1
        if live.last_token_at is None:
            self.stats.ttft.observe(now - live.sequence.request.arrived_at)
        live.last_token_at = now

    def _learn(self, live: LiveSequence, num_drafted: int, num_accepted: int) -> None:
        assert self._speculator is not None
        self._speculator.learn(live.sequence, num_drafted, num_accepted)
        live.num_draft_tokens += num_drafted
        self.stats.draft_tokens += num_drafted

    def _update_gauges(self) -> None:
        stats = self.stats
        stats.running, stats.waiting = len(self.scheduler.running), self.scheduler.num_waiting
        pool, *others = self.blocks.pools
        stats.pages_used, stats.pages_cached, stats.pages_free = pool.num_in_use, pool.num_cached, pool.num_free
        for window in others:
            stats.window_pages_used, stats.window_pages_cached = window.num_in_use, window.num_cached
            stats.window_pages_free = window.num_free
        stats.preemptions = self.scheduler.num_preemptions
        stats.evicted_pages = sum(pool.num_evictions for pool in self.blocks.pools)


def _known_ids(row: ScheduledRow) -> list[int]:
    """Tokens of the prompt whose log-probabilities come of this row: those after each of its last tokens but the newest."""
    sequence = row.sequence
    if not sequence.wants_prompt_logprobs:
        return []
    end = min(sequence.num_computed + row.num_tokens + 1, sequence.num_prompt)
    return sequence.token_ids[max(sequence.num_computed, len(sequence.prompt_logprobs)) + 1 : end]


def _executor_row(row: ScheduledRow, num_known: int) -> Row:
    sequence, start = row.sequence, row.sequence.num_computed
    token_ids = [*sequence.token_ids[start : start + row.num_tokens], *row.draft_ids]
    return make_row(sequence, token_ids, start, num_known + (1 + len(row.draft_ids) if row.is_last_chunk else 0))


def _contexts(row: ScheduledRow) -> list[list[int]]:
    """Prompt and output before the next token and, were the draft right, before each one after."""
    token_ids = row.sequence.token_ids
    return [token_ids, *([*token_ids, *row.draft_ids[:count]] for count in range(1, 1 + len(row.draft_ids)))]


def _confirmed(draft_ids: tuple[int, ...], choices: list[Choice]) -> list[Choice]:
    """Choices up to the first that is not what was guessed: those after it were made on a wrong guess."""
    right = 0
    while right < len(draft_ids) and choices[right].token_id == draft_ids[right]:
        right += 1
    return choices[: right + 1]
