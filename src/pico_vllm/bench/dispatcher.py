"""Dispatcher: which request is sent when. Knows the workload and the traces; knows no engine and no clock.

A driver (stepped or asyncio) asks ``due`` what to send now, tells what comes back, and gets the traces. So closed loop,
burst, Poisson and conversations are one case for every engine.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pico_vllm.bench.traces import Trace

if TYPE_CHECKING:
    from pico_vllm.bench.workloads import Workload


class Dispatcher:
    """The state of one run.

    Args:
        workload: to run.
        start_s: the clock's reading that arrivals count from.
    """

    def __init__(self, workload: Workload, start_s: float) -> None:
        self._requests = workload.requests
        self._concurrency = workload.concurrency
        self._start_s = start_s
        self._traces: list[Trace | None] = [None] * len(self._requests)
        self._followers: dict[int, list[int]] = {}
        self._waiting: deque[int] = deque()
        for index, request in enumerate(self._requests):
            if request.follows is None:
                self._waiting.append(index)
            else:
                self._followers.setdefault(request.follows, []).append(index)
        self._live: set[int] = set()
        self._num_ended = 0

    @property
    def done(self) -> bool:
        """Whether every request has ended."""
        return self._num_ended == len(self._requests)

    @property
    def num_live(self) -> int:
        """Requests sent and not ended."""
        return len(self._live)

    @property
    def live(self) -> list[int]:
        """Indices of the requests sent and not ended."""
        return sorted(self._live)

    def traces(self) -> list[Trace]:
        """One a request, in the workload's order; all have ended."""
        assert self.done
        return [trace for trace in self._traces if trace is not None]

    def due(self, now_s: float) -> Iterator[tuple[int, Sequence[int]]]:
        """What is to be sent now: (index, whole prompt) each; call ``submitted`` for each before the next."""
        while self._waiting and self._may_send(self._waiting[0], now_s):
            index = self._waiting.popleft()
            yield index, self._prompt(index)

    def next_arrival_s(self) -> float | None:
        """When the next waiting request of an open loop is to be sent; None if time alone makes none due."""
        if self._concurrency is not None or not self._waiting:
            return None
        return self._arrival_s(self._waiting[0])

    def submitted(self, index: int, now_s: float, prompt_len: int) -> None:
        """A request is being sent; ``now_s`` was read just before."""
        arrival_s = now_s if self._concurrency is not None else self._arrival_s(index)
        self._traces[index] = Trace(prompt_len, arrival_s, now_s)
        self._live.add(index)

    def received(self, index: int, now_s: float, token_ids: Sequence[int], num_tokens: int | None = None) -> None:
        """New tokens of a live request were seen.

        Args:
            index: of the request.
            now_s: when.
            token_ids: that became known.
            num_tokens: that arrived; None = as many as ids. A server may tell the ids later than the tokens.
        """
        trace = self._trace(index)
        count = len(token_ids) if num_tokens is None else num_tokens
        if count:
            trace.times_s.append(now_s)
            trace.counts.append(count)
        trace.token_ids.extend(token_ids)

    def ended(self, index: int) -> None:
        """A request has given its last token; its followers may be sent."""
        self._live.discard(index)
        self._num_ended += 1
        for follower in self._followers.get(index, ()):
            if self._concurrency is not None:
                self._waiting.appendleft(follower)  # a conversation goes on before a new one starts
            else:
                bisect.insort(self._waiting, follower, key=self._arrival_s)

    # --------------------------------------------------------------------------------------------------- private
    def _may_send(self, index: int, now_s: float) -> bool:
        if self._concurrency is not None:
            return len(self._live) < self._concurrency
        return self._arrival_s(index) <= now_s

    def _arrival_s(self, index: int) -> float:
        """Of an open loop; a later turn arrives when its time has come and the turn before it has ended."""
        request = self._requests[index]
        assert request.arrival_s is not None
        planned = self._start_s + request.arrival_s
        if request.follows is None:
            return planned
        before = self._trace(request.follows)
        return max(planned, before.times_s[-1] if before.times_s else before.submit_s)

    def _prompt(self, index: int) -> Sequence[int]:
        request = self._requests[index]
        if request.follows is None:
            return request.prompt_token_ids
        before = self._trace(request.follows)
        return (*self._prompt(request.follows), *before.token_ids, *request.prompt_token_ids)

    def _trace(self, index: int) -> Trace:
        trace = self._traces[index]
        assert trace is not None, f"request {index} was not sent"
        return trace
