"""Trace: what the clock saw of one request. The only thing that metrics are made of."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Trace:
    """One request's times, in seconds of the clock that submitted it.

    Attributes:
        prompt_len: tokens of the whole prompt.
        arrival_s: when the workload wanted it to be sent. Latencies count from here, so an engine that keeps the sender
            busy is not flattered (coordinated omission). In a closed loop it is ``submit_s``.
        submit_s: when it was sent.
        times_s: when new tokens were seen; strictly one entry an arrival of tokens.
        counts: tokens of each arrival.
        token_ids: all output ids, as far as the engine tells them.
    """

    prompt_len: int
    arrival_s: float
    submit_s: float
    times_s: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Output tokens seen."""
        return sum(self.counts)
