"""EngineCore: token ids in, token ids out.

Owns the scheduler, the KV cache manager and the executor, and is the only place that builds them. It knows no text, no
files but the checkpoint's, and no clients, so it can run in a process of its own. A step is three lines.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pico_vllm.engine.stats import StepTimes
from pico_vllm.errors import ConfigError, EngineDeadError
from pico_vllm.kv_cache import KVCacheManager
from pico_vllm.scheduler.scheduler import Scheduler
from pico_vllm.worker.executor import UniProcExecutor

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pico_vllm.config import EngineConfig, ModelConfig
    from pico_vllm.models.source import ModelSource
    from pico_vllm.models.weights import Progress
    from pico_vllm.outputs import EngineCoreOutput
    from pico_vllm.request import Request


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What the core has learned at its start and the front end must know to refuse early.

    Attributes:
        max_model_len: prompt + output tokens of a request at most.
        max_request_tokens: the same with the KV cache taken into account.
        num_blocks, block_size: of the KV cache.
    """

    max_model_len: int
    max_request_tokens: int
    num_blocks: int
    block_size: int


class EngineCore:
    """The loop's body; whoever calls ``step`` is the loop."""

    def __init__(
        self, config: EngineConfig, model_config: ModelConfig, source: ModelSource, *, progress: Progress | None = None
    ) -> None:
        max_model_len = _resolve_max_model_len(config, model_config)
        self.executor = UniProcExecutor(config, model_config, source, max_model_len=max_model_len, progress=progress)
        self.kv_cache_manager = KVCacheManager(self.executor.num_blocks, config.cache.block_size)
        self.scheduler = Scheduler(
            kv_cache_manager=self.kv_cache_manager,
            max_num_seqs=config.scheduler.max_num_seqs,
            max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
            max_model_len=max_model_len,
            enable_chunked_prefill=config.scheduler.enable_chunked_prefill,
        )
        self.limits = EngineLimits(
            max_model_len=max_model_len,
            max_request_tokens=self.scheduler.max_request_tokens,
            num_blocks=self.kv_cache_manager.num_blocks,
            block_size=config.cache.block_size,
        )
        self.last_times = StepTimes()
        self._cause_of_death: BaseException | None = None

    def add_request(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RequestError: its id is in use, or it can never fit; both numbers are named.
        """
        self.scheduler.add(request)

    def abort(self, request_id: str) -> bool:
        """End a request in any state; False when it is unknown or finished already."""
        return self.scheduler.abort(request_id)

    def has_unfinished_requests(self) -> bool:
        """Whether ``step`` has anything to do."""
        return self.scheduler.has_unfinished_requests()

    def step(self) -> list[EngineCoreOutput]:
        """Run one step and return the requests that have new tokens or have ended.

        Raises:
            EngineDeadError: an earlier step has failed inside the books, so they can't be trusted.
            Exception: whatever the device's part of the step raised. No request is lost then: all of them are
                recomputed from the next step on, and abort works as ever.
        """
        if self._cause_of_death is not None:
            raise EngineDeadError(f"the engine has failed: {self._cause_of_death!r}") from self._cause_of_death
        start = time.perf_counter()
        with self._fatal():
            plan = self.scheduler.schedule()
        scheduled = time.perf_counter()
        try:
            result = self.executor.execute(plan)
        except BaseException:  # Ctrl-C included
            with self._fatal():
                self._recompute_everything()
            raise
        executed = time.perf_counter()
        with self._fatal():
            outputs = self.scheduler.update_from_output(plan, result)
        self.last_times = StepTimes(
            num_tokens=plan.num_tokens,
            num_seqs=len(plan.scheduled),
            schedule_s=scheduled - start,
            execute_s=executed - scheduled,
            forward_s=self.executor.last_forward_s,
            update_s=time.perf_counter() - executed,
        )
        return outputs

    def _recompute_everything(self) -> None:
        """After a failed step nobody knows what the device has done: give up all rows and all computed tokens."""
        self.scheduler.preempt_all()
        self.executor.reset()

    @contextmanager
    def _fatal(self) -> Iterator[None]:
        """An error in here leaves the books half-written: remember it, and refuse every later step."""
        try:
            yield
        except BaseException as error:
            self._cause_of_death = error
            raise


def _resolve_max_model_len(config: EngineConfig, model_config: ModelConfig) -> int:
    limit = model_config.max_position_embeddings
    wanted = config.scheduler.max_model_len
    if wanted is None:
        return limit
    if wanted > limit:
        raise ConfigError(
            f"max_model_len={wanted} exceeds the model's max_position_embeddings={limit}; "
            "lower it, or raise the model's limit in config.json together with a rope scaling"
        )
    return wanted
