"""BenchEngine: what the bench core asks of an engine, and the two loops that drive one.

An engine that is stepped in this process implements ``add`` and ``step``; one that streams (another process, a server)
implements ``stream``. Both loops are the same dispatcher under the same clock: ``time.perf_counter`` of the process
that submits.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from pico_vllm.bench.dispatcher import Dispatcher
from pico_vllm.bench.traces import Trace
from pico_vllm.bench.workloads import Workload


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What every adapter is told; one that can't do an option refuses it.

    Attributes:
        model: directory of a checkpoint; a server's own model is checked against it.
        dtype: "bfloat16", "float16" or "float32".
        device: "cpu", "cuda" or "cuda:N".
        memory_share: of the GPU's memory for weights and KV cache; several engines in one process must share.
        enable_prefix_caching: keep the KV cache of ended requests for new ones.
        max_num_seqs: requests at a time at most; None = the engine's default.
        extra: the engine's own options, passed on as they are.
    """

    model: str
    dtype: str
    device: str
    memory_share: float = 0.5
    enable_prefix_caching: bool = False
    max_num_seqs: int | None = None
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What a record says of an engine.

    Attributes:
        engine, version: names.
        mode: "in-process", "multiprocess" or "server".
        start_s: seconds from the start of loading to ready.
        settings: everything that may explain a number.
    """

    engine: str
    version: str
    mode: str
    start_s: float
    settings: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ScoredOutput:
    """Greedy tokens of one prompt with the engine's own log-probabilities.

    Attributes:
        token_ids: chosen.
        logprobs: {token id: log-probability} of each position, the chosen token and the likeliest ones.
    """

    token_ids: list[int]
    logprobs: list[dict[int, float]]


class BenchEngine(Protocol):
    """An engine that is ready."""

    info: EngineInfo

    def why_not(self, workload: Workload) -> str | None:
        """Why this engine can't run a workload (too long, one request at a time); None if it can."""
        ...

    def serve(self, workload: Workload) -> list[Trace]:
        """Run a workload on the clock; one trace a request, in its order."""
        ...

    def run_offline(self, workload: Workload) -> tuple[float, int]:
        """Run a burst through the engine's own batch call: (seconds, output tokens)."""
        ...

    def score(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[ScoredOutput] | None:
        """Greedy tokens with log-probabilities; None if the engine gives none."""
        ...

    def host_share(self) -> float | None:
        """Share of the last run's steps that the host spent outside the model, 0 … 1; None if not known."""
        ...

    def close(self) -> None:
        """Free everything."""
        ...


Clock = Callable[[], float]
Sleep = Callable[[float], None]
#: (index of the request, its new token ids, whether it has ended)
Step = list[tuple[int, Sequence[int], bool]]


class _Defaults:
    """What an engine need not say."""

    def why_not(self, workload: Workload) -> str | None:
        """Anything goes."""
        return None

    def score(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[ScoredOutput] | None:
        """No log-probabilities."""
        return None

    def host_share(self) -> float | None:
        """Not known."""
        return None

    def close(self) -> None:
        """Nothing to free."""


class SteppedEngine(_Defaults):
    """Base of the engines that this process steps: the loop, over ``add`` and ``step``."""

    info: EngineInfo
    #: Replaced by tests: an engine with known latencies moves the clock itself.
    clock: Clock = staticmethod(time.perf_counter)
    sleep: Sleep = staticmethod(time.sleep)

    def add(self, index: int, prompt_token_ids: Sequence[int], max_tokens: int, temperature: float) -> None:
        """Queue a request; EOS is ignored and nothing is detokenised."""
        raise NotImplementedError

    def step(self) -> Step:
        """Run one step."""
        raise NotImplementedError

    def abort(self, indices: Sequence[int]) -> None:
        """Forget requests of a run that has failed; some may never have reached the engine."""

    def settle(self) -> None:
        """Finish what the engine still does after its last token."""

    def serve(self, workload: Workload) -> list[Trace]:
        """Run a workload on the clock. If that fails, no request of it stays in the engine: other points go on."""
        dispatcher = Dispatcher(workload, self.clock())
        try:
            self._drive(workload, dispatcher)
        except Exception:
            with contextlib.suppress(Exception):  # the engine is broken: the first error says more
                self.abort(dispatcher.live)
                self.settle()
            raise
        self.settle()
        return dispatcher.traces()

    def _drive(self, workload: Workload, dispatcher: Dispatcher) -> None:
        clock, requests = self.clock, workload.requests
        while not dispatcher.done:
            for index, prompt in dispatcher.due(clock()):
                request = requests[index]
                dispatcher.submitted(index, clock(), len(prompt))
                self.add(index, prompt, request.max_tokens, request.temperature)
            if dispatcher.num_live == 0:
                next_s = dispatcher.next_arrival_s()
                assert next_s is not None
                self.sleep(max(0.0, next_s - clock()))
                continue
            outputs = self.step()
            now_s = clock()
            for index, token_ids, has_ended in outputs:
                if token_ids:
                    dispatcher.received(index, now_s, token_ids)
                if has_ended:
                    dispatcher.ended(index)

    def run_offline(self, workload: Workload) -> tuple[float, int]:
        """Run a burst; an engine without a batch call of its own is stepped."""
        start = self.clock()
        traces = self.serve(workload)
        return self.clock() - start, sum(trace.num_tokens for trace in traces)


class StreamingEngine(_Defaults):
    """Base of the engines that stream: the loop, as one asyncio task a live request, over ``stream``."""

    info: EngineInfo

    def stream(
        self, prompt_token_ids: Sequence[int], max_tokens: int, temperature: float
    ) -> AsyncIterator[tuple[int, Sequence[int]]]:
        """(tokens that have arrived, ids that have become known) of one request, as they come; EOS is ignored."""
        raise NotImplementedError

    def run(self, main: Any) -> Any:
        """Run a coroutine to its end; an engine that has a loop of its own uses that."""
        return asyncio.run(main)

    def serve(self, workload: Workload) -> list[Trace]:
        """Run a workload on the clock."""
        traces: list[Trace] = self.run(self._serve(workload))
        return traces

    def run_offline(self, workload: Workload) -> tuple[float, int]:
        """Run a burst; an engine without a batch call of its own streams."""
        start = time.perf_counter()
        traces = self.serve(workload)
        return time.perf_counter() - start, sum(trace.num_tokens for trace in traces)

    async def _serve(self, workload: Workload) -> list[Trace]:
        dispatcher = Dispatcher(workload, time.perf_counter())
        try:
            await self._drive(workload, dispatcher)
        except ExceptionGroup as group:
            raise _first_error(group) from None  # the group's own message says nothing
        return dispatcher.traces()

    async def _drive(self, workload: Workload, dispatcher: Dispatcher) -> None:
        async with asyncio.TaskGroup() as tasks:
            live: set[asyncio.Task[None]] = set()
            while not dispatcher.done:
                for index, prompt in dispatcher.due(time.perf_counter()):
                    live.add(tasks.create_task(self._one(dispatcher, workload, index, prompt)))
                    dispatcher.submitted(index, time.perf_counter(), len(prompt))
                next_s = dispatcher.next_arrival_s()
                wait_s = None if next_s is None else max(0.0, next_s - time.perf_counter())
                if live:
                    _, live = await asyncio.wait(live, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
                elif wait_s is not None:
                    await asyncio.sleep(wait_s)

    async def _one(self, dispatcher: Dispatcher, workload: Workload, index: int, prompt: Sequence[int]) -> None:
        request = workload.requests[index]
        async for num_tokens, token_ids in self.stream(prompt, request.max_tokens, request.temperature):
            dispatcher.received(index, time.perf_counter(), token_ids, num_tokens)
        dispatcher.ended(index)


def _first_error(group: ExceptionGroup[Exception]) -> Exception:
    error: Exception = group
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error
