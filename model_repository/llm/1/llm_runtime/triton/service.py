"""Puts the parts together for one model instance: engine, worker, sender, metrics."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from llm_runtime.config import (
    Parameters,
    check_draft,
    check_prefixes,
    longest_context,
    read_parameters,
    resolve_engine_dir,
    size_pool,
    with_chosen_cache,
)
from llm_runtime.engine import Engine, EngineConfig
from llm_runtime.errors import ConfigError, RequestError
from llm_runtime.executors import open_executor
from llm_runtime.executors.base import Executor
from llm_runtime.guide import Guides
from llm_runtime.manifest import EngineManifest, check_files, read_manifest
from llm_runtime.page_pool import PageGroup
from llm_runtime.queue_policy import num_warmup_requests, read_queue_policy
from llm_runtime.request import Limits, ParsedRequest, RequestParser, encode_prompt
from llm_runtime.triton import codec
from llm_runtime.triton.metrics import EngineMetrics
from llm_runtime.triton.streams import FINAL, Group, RequestReplies, Stream, StreamSender
from llm_runtime.worker import Worker

log = logging.getLogger(__name__)


class Service:
    """One instance of the model, from load to unload.

    Raises ConfigError or EngineError when it cannot be loaded: one line that says what, where and what to do.
    """

    def __init__(self, model_config: Mapping[str, Any], model_folder: Path, version: str) -> None:
        self._parameters = read_parameters(model_config["parameters"])
        self._queue_policy = read_queue_policy(model_config)
        folder = self._folder = resolve_engine_dir(self._parameters.engine_dir, model_folder)
        manifest = self._manifest = with_chosen_cache(self._parameters, read_manifest(folder))
        check_files(folder, manifest)
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._draft = self._read_draft(model_folder)
        executor, draft = self._open_executors()
        self._prefixes = [
            (encode_prompt(self._tokenizer, prefix.text, manifest.model.bos_token_id), prefix.cache_salt)
            for prefix in self._parameters.pinned_prefixes
        ]
        lengths = [len(token_ids) for token_ids, _ in self._prefixes]
        groups = executor.page_groups
        pinned = check_prefixes(self._parameters, lengths, executor.page_size, groups)
        max_context = longest_context(self._parameters, manifest, groups, pinned)
        guides = Guides(folder / "tokenizer.json", manifest.model.vocab_size, manifest.model.eos_token_ids)
        self._parser = RequestParser(self._tokenizer, _limits(self._parameters, manifest, max_context), guides)
        engine_config = _engine_config(self._parameters, manifest, max_context)
        self._engine = Engine(executor, self._tokenizer, engine_config, draft=draft)
        self._pin_prefixes()
        self._metrics = EngineMetrics(model_config["name"], version, self._engine.stats)
        # Triton calls the model ready, and lets others in, only when these have ended.
        self._num_warming_up = num_warmup_requests(model_config)
        self._worker = Worker(self._engine, self._on_outputs, self._make_executor_again)
        self._sender = StreamSender(on_left=self._worker.cancel)
        self._ids = itertools.count()
        log.info(
            "%s: %d sequences, %s pages of %d tokens, context %d, on %s",
            manifest.name,
            self._parameters.max_sequences,
            " and ".join(f"{group.num_pages}" + f" window {group.window}" * bool(group.window) for group in groups),
            executor.page_size,
            max_context,
            executor.description,
        )
        self._sender.start()
        self._worker.start()
        self._metrics.start()

    def accept(self, requests: Sequence[Any]) -> None:
        """Take over Triton's requests: those that cannot be served are answered here, the others are submitted."""
        now = time.monotonic()
        self._count_arrivals(len(requests))
        accepted: list[ParsedRequest] = []
        for request in requests:
            sender = request.get_response_sender()
            try:
                accepted += self._open(request, sender, now)
            except RequestError as error:
                self._engine.stats.finished["refused"] += 1
                sender.send(codec.refusal(str(error)), flags=FINAL)
            except Exception as error:  # a defect of ours must not leave this client, or its batch mates, without an answer
                log.exception("a request could not be read")
                self._engine.stats.finished["refused"] += 1
                sender.send(codec.internal_error(f"the request could not be read: {error}"), flags=FINAL)
        self._worker.submit([parsed.generation for parsed in accepted])

    @property
    def is_healthy(self) -> bool:
        return self._worker.is_healthy

    def wait_for_room(self) -> None:
        self._worker.wait_for_room()

    def close(self) -> None:
        """End what still runs with an error, send everything, free the engine."""
        self._worker.stop()
        self._sender.stop()
        self._metrics.stop()
        self._engine.close()

    def _count_arrivals(self, num_requests: int) -> None:
        if self._num_warming_up > 0:
            self._num_warming_up -= num_requests
        else:
            self._metrics.count_from_now()
        self._engine.stats.queue_batch_size.observe(num_requests)

    def _open(self, request: Any, sender: Any, now: float) -> list[ParsedRequest]:
        """The rows of a request, each with a stream that waits for its outputs."""
        parsed_rows = self._parse(request, now)
        sequences = [parsed for row in parsed_rows for parsed in row]
        replies = RequestReplies(sender, len(sequences))
        outputs = frozenset(request.requested_output_names())
        for row in parsed_rows:
            group = Group(len(row))
            for parsed in row:
                self._sender.open(parsed.generation.request_id, Stream(replies, parsed.reply, outputs, group))
        return sequences

    def _parse(self, request: Any, now: float) -> list[list[ParsedRequest]]:
        """The sequences of each row."""
        parameters = codec.read_parameters(request)
        rows = codec.read_tensors(request)
        timeout_us = self._queue_policy.timeout_us(request.timeout())

        def make_id() -> str:
            return f"{next(self._ids)}"

        parsed = [self._parser.parse(make_id, index, row, parameters, timeout_us, now) for index, row in enumerate(rows)]
        if any(row[0].reply.stream != parsed[0][0].reply.stream for row in parsed):
            raise RequestError("stream: differs between the rows of one request; give all the same")
        return parsed

    def _on_outputs(self, outputs: list) -> None:
        self._sender.put(outputs)

    def _make_executor_again(self) -> None:
        """A device that failed is not to be trusted with the state it had. This Triton never restarts a model's process by
        itself, so the process stays, and only what failed is made anew."""
        self._engine.close()
        # The books are kept for as many pages as there were.
        self._engine.replace_executors(*self._open_executors(self._engine.executor.page_groups))
        self._pin_prefixes()

    def _read_draft(self, model_folder: Path) -> tuple[Path, EngineManifest] | None:
        """The engine that guesses, checked to fit."""
        if self._parameters.speculation != "draft":
            return None
        if not self._parameters.draft_engine_dir:
            raise ConfigError("config.pbtxt: speculation draft needs draft_engine_dir")
        folder = resolve_engine_dir(self._parameters.draft_engine_dir, model_folder)
        manifest = with_chosen_cache(self._parameters, read_manifest(folder))
        check_files(folder, manifest)
        check_draft(self._manifest, manifest)
        if Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab() != self._tokenizer.get_vocab():
            raise ConfigError(
                f"config.pbtxt: draft_engine_dir: {manifest.name} has another tokenizer than {self._manifest.name}"
            )
        return folder, manifest

    def _open_executors(self, groups: Sequence[PageGroup] | None = None) -> tuple[Executor, Executor | None]:
        """The engine's, and that of the engine that guesses for it."""
        if self._draft is None:
            return open_executor(self._folder, self._manifest, self._parameters, groups), None
        folder, manifest = self._draft
        groups = groups or size_pool(self._parameters, self._manifest, draft=manifest)
        executor = open_executor(self._folder, self._manifest, self._parameters, groups)
        return executor, open_executor(folder, manifest, self._parameters, groups)

    def _pin_prefixes(self) -> None:
        try:
            self._engine.pin(self._prefixes)
        except RequestError as error:
            raise ConfigError(f"config.pbtxt: pinned_prefixes: {error}") from error


def _limits(parameters: Parameters, manifest: EngineManifest, max_context: int) -> Limits:
    return Limits(
        max_context=max_context,
        default_max_tokens=parameters.default_max_tokens,
        max_deadline_ms=parameters.max_deadline_ms,
        vocab_size=manifest.model.vocab_size,
        bos_token_id=manifest.model.bos_token_id,
    )


def _engine_config(parameters: Parameters, manifest: EngineManifest, max_context: int) -> EngineConfig:
    return EngineConfig(
        max_sequences=parameters.max_sequences,
        max_step_tokens=parameters.max_step_tokens,
        prefill_chunk_tokens=parameters.prefill_chunk_tokens,
        max_context=max_context,
        end_ids=manifest.model.eos_token_ids,
        prefix_caching=parameters.prefix_caching,
        static_cache=parameters.kv_cache == "static",
        max_draft_tokens=_max_draft_tokens(parameters, manifest),
    )


def _max_draft_tokens(parameters: Parameters, manifest: EngineManifest) -> int:
    if parameters.speculation == "off":
        return 0
    if manifest.runtime != "onnxruntime":
        # Its plans, and the memory kept beside the pool, are sized for one row of logits a sequence.
        log.warning("speculation is not there for %s yet: the model serves without", manifest.runtime)
        return 0
    return parameters.max_draft_tokens
