"""Latency of one request from the timestamps of its responses: kept as they came, derived when asked for."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Timing:
    """When a request was sent, answered and ended, in seconds of one monotonic clock.

    `arrivals` has (time, tokens) of each response that brought tokens. TTFT: from sending to the first of them. ITL: the gap
    between two responses over the tokens of the later one, since a server that is behind sends several tokens in one response;
    each of these tokens counts with its share. Undefined values are None: a request that is not streamed has neither, for its
    one response says nothing of when its tokens came.
    """

    sent_at: float
    streamed: bool = True
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    ended_at: float | None = None

    def arrived(self, now: float, num_tokens: int) -> None:
        """Note a response. One without tokens says nothing of the tokens' times, so it is left out."""
        if num_tokens:
            self.arrivals.append((now, num_tokens))

    @property
    def num_tokens(self) -> int:
        """Tokens of all responses."""
        return sum(count for _, count in self.arrivals)

    @property
    def ttft(self) -> float | None:
        """Time to the first token."""
        return self.arrivals[0][0] - self.sent_at if self.arrivals and self.streamed else None

    @property
    def end_to_end(self) -> float | None:
        """From sending to the end of the last response."""
        return None if self.ended_at is None else self.ended_at - self.sent_at

    @property
    def itls(self) -> list[float]:
        """Inter-token latencies: one value for each token after the first response's."""
        gaps = zip(self.arrivals, self.arrivals[1:], strict=False)
        return [(later - earlier) / count for (earlier, _), (later, count) in gaps for _ in range(count)]

    @property
    def mean_itl(self) -> float | None:
        """Mean over tokens, not over responses."""
        itls = self.itls
        return sum(itls) / len(itls) if itls else None

    @property
    def tokens_per_second(self) -> float | None:
        """Of the whole request, waiting and prefill included."""
        return self.num_tokens / self.end_to_end if self.end_to_end else None
