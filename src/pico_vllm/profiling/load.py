"""The load of a capture: random prompts of one length, so many at a time, and the loop that steps the engine.

Without a number of steps it is one burst, from the first prompt pass to the last token. With one, a request that ends
is replaced by the next, until so many steps have run. Prompts are drawn anew for every run.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pico_vllm.bench.workloads import random_ids
from pico_vllm.errors import ConfigError
from pico_vllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pico_vllm.engine.llm_engine import LLMEngine


@dataclass(frozen=True, slots=True)
class Load:
    """What the engine is given.

    Attributes:
        input_len, output_len: tokens of every request; EOS is ignored.
        concurrency: requests at a time.
        num_steps: steps of a run; None = until one burst has ended.
        skip_steps: steps of a run before those that are looked at.
        temperature: 0 is greedy.
        seed: of the prompts.
    """

    input_len: int = 512
    output_len: int = 32
    concurrency: int = 8
    num_steps: int | None = None
    skip_steps: int = 0
    temperature: float = 0.0
    seed: int = 7


class LoadRun:
    """One run of a load on an engine that has nothing else to do.

    Args:
        engine: to step.
        load: to give it.
        index: of the run; another one has other prompts.
    """

    def __init__(self, engine: LLMEngine, load: Load, index: int) -> None:
        self._engine, self._load = engine, load
        self._rng = random.Random(f"profile/{load.seed}/{index}")
        self._params = SamplingParams(
            temperature=load.temperature,
            max_tokens=load.output_len,
            ignore_eos=True,
            detokenize=engine.tokenizer is not None,
        )
        self._live: set[str] = set()
        self._num_added = 0

    def skip(self) -> None:
        """Run the steps before those that are looked at.

        Raises:
            ConfigError: none are left then.
        """
        for _ in range(self._load.skip_steps):
            if not self._step():
                break
        if self._load.num_steps is None and self._num_added > 0 and not self._engine.has_unfinished_requests():
            raise ConfigError(
                f"nothing was recorded: the requests have ended within --skip={self._load.skip_steps} steps; lower it, "
                "or give a number of --steps"
            )

    def steps(self) -> Iterator[float]:
        """Run the others; yields the seconds of each."""
        num_run = 0
        while num_run != self._load.num_steps:
            start = time.perf_counter()
            if not self._step():
                return
            yield time.perf_counter() - start
            num_run += 1

    def end(self) -> None:
        """Leave the engine with nothing to do."""
        for request_id in self._live:
            self._engine.abort(request_id)
        self._live.clear()

    def _step(self) -> bool:
        """One step; False when the burst has ended."""
        is_burst = self._load.num_steps is None
        while len(self._live) < self._load.concurrency and not (is_burst and self._num_added >= self._load.concurrency):
            request_id = str(self._num_added)
            prompt = random_ids(self._rng, self._load.input_len, self._engine.model_config.vocab_size)
            self._engine.add_request(request_id, list(prompt), self._params)
            self._live.add(request_id)
            self._num_added += 1
        if not self._engine.has_unfinished_requests():
            return False
        for delta in self._engine.step():
            if delta.final is not None:
                self._live.discard(delta.request_id)
        return True
