"""How long prompts and outputs are: distributions of numbers of tokens."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from client.errors import RefusedError

ALLOWED = "allowed: N, uniform:LOW,HIGH, normal:MEAN,DEVIATION or lognormal:MEDIAN,SIGMA"


@dataclass(frozen=True)
class Lengths:
    """`kind` with its parameters; see ALLOWED."""

    kind: str
    a: float
    b: float

    def sample(self, rng: np.random.Generator, count: int) -> NDArray[np.int64]:
        """`count` numbers of tokens, each at least 1."""
        if self.kind == "uniform":
            values = rng.integers(int(self.a), int(self.b) + 1, count).astype(float)
        elif self.kind == "normal":
            values = rng.normal(self.a, self.b, count)
        elif self.kind == "lognormal":
            values = self.a * np.exp(rng.normal(0.0, self.b, count))
        else:
            values = np.full(count, self.a)
        return np.maximum(1, np.rint(values)).astype(np.int64)


def parse_lengths(text: str, field: str) -> Lengths:
    """Raises RefusedError that names the field."""
    number = r"(\d+(?:\.\d+)?)"
    if re.fullmatch(r"\d+", text) and int(text) > 0:
        return Lengths("constant", float(text), 0.0)
    match = re.fullmatch(rf"(uniform|normal|lognormal):{number},{number}", text)
    if match is None or float(match[2]) < 1 or (match[1] == "uniform" and float(match[3]) < float(match[2])):
        raise RefusedError(f"{field}: got {text!r}; {ALLOWED}")
    return Lengths(match[1], float(match[2]), float(match[3]))
