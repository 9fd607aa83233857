"""What a load test sends and when: classes of traffic, drawn with a seed, or a recorded trace."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from client.errors import RefusedError
from client.lengths import parse_lengths
from client.wire import GenerateRequest

# Words that are one token each in most vocabularies, so that a prompt of n words has about n tokens.
_TEXT = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city name president team minute idea kid body information back "
    "parent face level office door health person art war history party result change morning reason research girl guy "
    "moment air teacher force "
)
WORDS = tuple(_TEXT.split())
FIXED_LENGTH: dict[str, Any] = {"ignore_eos": True, "temperature": 0}  # as many tokens as were asked for


@dataclass(frozen=True)
class Planned:
    """A request, the class it belongs to, and when it is sent, in seconds after the start; None in a closed loop."""

    request: GenerateRequest
    at: float | None
    group: str = "default"


@dataclass(frozen=True)
class Workload:
    """Requests in the order of their sending. `description` is a line for reports."""

    planned: tuple[Planned, ...]
    seed: int
    description: str

    @property
    def is_open(self) -> bool:
        """Whether the requests have times of their own."""
        return bool(self.planned) and self.planned[0].at is not None

    @property
    def rate(self) -> float | None:
        """Requests a second over the time in which they are sent; None where they have no times."""
        last = self.planned[-1].at if self.is_open else None
        return len(self.planned) / last if last else None

    def scaled(self, factor: float) -> Workload:
        """The same requests, `factor` times as many a second."""
        planned = tuple(each if each.at is None else replace(each, at=each.at / factor) for each in self.planned)
        return replace(self, planned=planned, description=f"{self.description}, {factor:g} times as fast")

    def apart(self, run: str) -> Workload:
        """The same requests with salts of this run, so that the prefix cache has nothing of another one."""
        return replace(self, planned=tuple(_apart(each, run) for each in self.planned))

    def sustained(self, factor: float) -> Workload:
        """`factor` times as many requests a second, for as long as this workload lasts: where it has too few, it is sent again,
        each time apart from the others."""
        if self.rate is None or factor <= 1:
            return self.scaled(factor)
        length = len(self.planned) / self.rate
        rounds = [
            replace(_apart(each, str(number)), at=(each.at or 0.0) + number * length)
            for number in range(math.ceil(factor))
            for each in self.planned
        ]
        count = round(factor * len(self.planned))
        return replace(self, planned=tuple(rounds[:count])).scaled(factor)


def _apart(planned: Planned, run: str) -> Planned:
    return replace(planned, request=replace(planned.request, cache_salt=f"{planned.request.cache_salt}/{run}"))


def _is_lengths(text: str) -> str:
    try:
        parse_lengths(text, "lengths")
    except RefusedError as error:
        raise ValueError(str(error)) from None
    return text


LengthsText = Annotated[str, AfterValidator(_is_lengths)]


class TrafficClass(BaseModel):
    """Requests of one kind; `share` is their weight among all classes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = "default"
    share: float = Field(1.0, gt=0)
    prompt_tokens: LengthsText = "128"
    output_tokens: LengthsText = "64"
    prefix_tokens: int = Field(0, ge=0, description="tokens that all prompts of a group start with; part of prompt_tokens")
    prefix_count: int = Field(1, ge=1, description="groups, each with a prefix of its own")
    salted: bool = Field(False, description="a cache_salt for each group")
    priority: int = Field(0, ge=0)
    timeout_ms: int = Field(0, ge=0)
    deadline_ms: int = Field(0, ge=0)
    sampling: dict[str, Any] = Field(default_factory=dict)


class WorkloadSpec(BaseModel):
    """A workload file. `rate` in requests a second; without one the load is a closed loop."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    requests: int = Field(100, ge=1)
    seed: int = Field(0, ge=0)
    rate: float | None = Field(None, gt=0)
    arrivals: Literal["poisson", "constant"] = "poisson"
    classes: tuple[TrafficClass, ...] = Field(default_factory=lambda: (TrafficClass.model_validate({}),), min_length=1)

    def build(self) -> Workload:
        """The same seed gives the same requests at the same times."""
        rng = np.random.default_rng(self.seed)
        shares = np.array([each.share for each in self.classes])
        chosen = rng.choice(len(self.classes), self.requests, p=shares / shares.sum())
        times = arrival_times(rng, self.requests, self.rate, self.arrivals) if self.rate else [None] * self.requests
        makers = [_request_maker(each, rng, int((chosen == index).sum())) for index, each in enumerate(self.classes)]
        planned = tuple(Planned(makers[index](), at, self.classes[index].name) for index, at in zip(chosen, times, strict=True))
        how = f"{self.arrivals} arrivals, {self.rate:g} requests/s" if self.rate else "closed loop"
        kinds = "; ".join(f"{each.name}: {each.prompt_tokens} in, {each.output_tokens} out" for each in self.classes)
        return Workload(planned, self.seed, f"{self.requests} requests ({kinds}), {how}, seed {self.seed}")


def arrival_times(rng: np.random.Generator, count: int, rate: float, arrivals: str) -> list[float]:
    """Seconds after the start: evenly spaced, or with exponential gaps (a Poisson process)."""
    gaps = np.full(count, 1.0 / rate) if arrivals == "constant" else rng.exponential(1.0 / rate, count)
    return [float(time) for time in np.cumsum(gaps) - gaps[0]]


def _request_maker(traffic: TrafficClass, rng: np.random.Generator, count: int) -> Callable[[], GenerateRequest]:
    prompts = iter(parse_lengths(traffic.prompt_tokens, "prompt_tokens").sample(rng, count))
    outputs = iter(parse_lengths(traffic.output_tokens, "output_tokens").sample(rng, count))
    prefixes = [words(rng, traffic.prefix_tokens) for _ in range(traffic.prefix_count)]

    def make() -> GenerateRequest:
        group = int(rng.integers(traffic.prefix_count))
        num_own = max(1, int(next(prompts)) - traffic.prefix_tokens)
        return GenerateRequest(
            prompt=" ".join([*prefixes[group], *words(rng, num_own)]),
            max_tokens=int(next(outputs)),
            cache_salt=f"{traffic.name}-{group}" if traffic.salted else "",
            sampling=FIXED_LENGTH | traffic.sampling,
            priority=traffic.priority,
            timeout_ms=traffic.timeout_ms,
            deadline_ms=traffic.deadline_ms,
        )

    return make


def words(rng: np.random.Generator, count: int) -> list[str]:
    """A text of about `count` tokens."""
    return [WORDS[index] for index in rng.integers(len(WORDS), size=count)]


def read_workload(path: Path) -> Workload:
    """From a workload file (JSON, see WorkloadSpec) or a trace (see client.traces). Raises RefusedError that names the file,
    the field and what is allowed."""
    from client.traces import is_trace, read_trace

    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise RefusedError(f"{path}: {error}") from None
    if is_trace(text):
        return read_trace(text, str(path))
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise RefusedError(f"{path}: neither a trace nor JSON: {error}") from None
    return make_workload(values, f"{path}: ")


def make_workload(values: Any, source: str = "") -> Workload:
    """From the values of a WorkloadSpec. Raises RefusedError: `source`, the field and what is allowed."""
    try:
        return WorkloadSpec.model_validate(values).build()
    except ValidationError as error:
        raise RefusedError(f"{source}{first_problem(error.errors())}") from None


def first_problem(errors: Sequence[Any]) -> str:
    """One line of pydantic's findings: field, what is allowed, what was there."""
    first = errors[0]
    where = ".".join(map(str, first["loc"])) or "the file"
    return f"{where}: {first['msg']}; got {str(first['input'])[:60]!r}"
