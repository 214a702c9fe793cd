"""Engines with known latencies on a clock that they move themselves: what is measured must be exactly that."""

from __future__ import annotations

from collections.abc import Sequence

from pico_vllm.bench.engines.engine import EngineInfo, ScoredOutput, Step, SteppedEngine
from pico_vllm.bench.workloads import Workload


class VirtualClock:
    """Seconds that pass only when somebody says so."""

    def __init__(self, start_s: float = 100.0) -> None:
        self.now_s = start_s

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds


class FakeEngine(SteppedEngine):
    """Continuous batching: a step takes ``prefill_s`` for each new prompt and ``decode_s`` once, all get a token."""

    def __init__(self, *, prefill_s: float = 0.020, decode_s: float = 0.005, max_num_seqs: int = 1000) -> None:
        self.info = EngineInfo("fake", "1", "in-process", 0.0, {})
        self.clock = VirtualClock()
        self.sleep = self.clock.advance
        self.prefill_s, self.decode_s, self.max_num_seqs = prefill_s, decode_s, max_num_seqs
        self.waiting: list[tuple[int, int]] = []
        self.running: dict[int, int] = {}
        self.prompts: dict[int, list[int]] = {}
        self.num_steps = 0
        self.short_by = 0
        self.refuses: str | None = None

    def why_not(self, workload: Workload) -> str | None:
        return self.refuses

    def add(self, index: int, prompt_token_ids: Sequence[int], max_tokens: int, temperature: float) -> None:
        self.prompts[index] = list(prompt_token_ids)
        self.waiting.append((index, max_tokens - self.short_by))

    def step(self) -> Step:
        self.num_steps += 1
        room = self.max_num_seqs - len(self.running)
        new, self.waiting = self.waiting[:room], self.waiting[room:]
        self.clock.advance(self.prefill_s * len(new) + (self.decode_s if self.running else 0.0))
        self.running |= dict(new)
        outputs: Step = []
        for index in list(self.running):
            self.running[index] -= 1
            outputs.append((index, [1000 + self.running[index]], self.running[index] == 0))
            if self.running[index] == 0:
                del self.running[index]
        return outputs

    def score(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[ScoredOutput] | None:
        return None
