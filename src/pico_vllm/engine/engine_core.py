"""EngineCore: token ids in, token ids out.

Owns the scheduler, the KV cache manager and the executor, and is the only place that builds them. It knows no text, no
files but the checkpoint's, and no clients, so it can run in a process of its own. A step is three lines.

What can go wrong in a step: an exception on the device is raised as it is and costs no request, since every running one
goes back to the queue and is computed anew. An exception in the books (scheduler, blocks, grammars) leaves them
half-written: the engine is dead, and every later call says why. Ctrl-C is neither: while a step runs on the main thread
it waits, and KeyboardInterrupt comes when the step is over.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from pico_vllm.engine.stats import StepTimes
from pico_vllm.engine.structured_output import StructuredOutputManager, read_tokenizer_json
from pico_vllm.errors import ConfigError, EngineDeadError
from pico_vllm.kv_cache import KVCacheManager
from pico_vllm.scheduler.scheduler import Scheduler
from pico_vllm.scheduler.step_time import StepTimeModel, TargetITL, attention_ratio
from pico_vllm.worker.executor import UniProcExecutor

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType, TracebackType

    from pico_vllm.config import EngineConfig, ModelConfig
    from pico_vllm.models.source import ModelSource
    from pico_vllm.models.weights import Progress
    from pico_vllm.outputs import EngineCoreOutput
    from pico_vllm.request import Request
    from pico_vllm.scheduler_output import MeasuredSteps

logger = logging.getLogger(__name__)


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
    """The loop's body; whoever calls ``step`` is the loop. One thread at a time.

    The EngineCoreClient of an engine whose core is in its own process.
    """

    def __init__(
        self, config: EngineConfig, model_config: ModelConfig, source: ModelSource, *, progress: Progress | None = None
    ) -> None:
        max_model_len = _resolve_max_model_len(config, model_config)
        self.executor = UniProcExecutor(config, model_config, source, max_model_len=max_model_len, progress=progress)
        self.kv_cache_manager = KVCacheManager(self.executor.num_blocks, config.cache.block_size)
        self.scheduler = Scheduler(
            kv_cache_manager=self.kv_cache_manager,
            max_num_seqs=config.scheduler.max_num_seqs,
            max_num_batched_tokens=self.executor.max_num_batched_tokens,
            max_model_len=max_model_len,
            enable_chunked_prefill=config.scheduler.enable_chunked_prefill,
            target_itl=_target_itl(config, model_config, self.executor.measured_steps),
        )
        self.structured_output = StructuredOutputManager(
            partial(read_tokenizer_json, config, source),
            vocab_size=model_config.vocab_size,
            eos_token_ids=model_config.eos_token_ids,
        )
        self.limits = EngineLimits(
            max_model_len=max_model_len,
            max_request_tokens=self.scheduler.max_request_tokens,
            num_blocks=self.kv_cache_manager.num_blocks,
            block_size=config.cache.block_size,
        )
        self.last_times = StepTimes(num_steps=0)
        self._death: str | None = None
        self._cause_of_death: BaseException | None = None

    def add_request(self, request: Request) -> None:
        """Queue a request; one with structured outputs waits here until its grammar is compiled.

        Raises:
            RequestError: its id is in use, it can never fit (both numbers are named), or its grammar is wrong.
            EngineDeadError: a step has failed, or the engine was shut down. So do all methods.
        """
        self._raise_if_dead()
        matcher = self.structured_output.compile(request)
        self.scheduler.add(request)
        if matcher is not None:
            self.structured_output.start(request, matcher)

    def abort(self, request_id: str) -> bool:
        """End a request in any state; False when it is unknown or finished already."""
        self._raise_if_dead()
        self.structured_output.drop(request_id)
        return self.scheduler.abort(request_id)

    def has_unfinished_requests(self) -> bool:
        """Whether ``step`` has anything to do."""
        self._raise_if_dead()
        return self.scheduler.has_unfinished_requests()

    def step(self) -> list[EngineCoreOutput]:
        """Run one step and return the requests that have new tokens or have ended.

        Raises:
            Exception: whatever the device's part of the step raised. No request is lost then: all of them are
                recomputed from the next step on, and abort works as ever.
            EngineDeadError: the books failed, in this step or an earlier one, so they can't be trusted any more.
            KeyboardInterrupt: Ctrl-C was pressed meanwhile. The step is complete and the engine sound, but what the
                step gave is lost: abort the requests that were under way.
        """
        self._raise_if_dead()
        with _InterruptWaits():
            return self._step()

    @contextmanager
    def _fatal(self) -> Iterator[None]:
        """An error in here leaves the books half-written: every later call is refused, with the cause."""
        try:
            yield
        except BaseException as error:
            self._death = f"the engine core has failed in a step: {type(error).__name__}: {error}"
            self._cause_of_death = error
            if isinstance(error, Exception):
                raise EngineDeadError(self._death) from error
            raise  # what a signal handler of the application's has raised stays what it is

    def shutdown(self) -> None:
        """End the engine; later calls raise EngineDeadError. Its memory is free when the engine is."""
        self._death = self._death or "the engine has been shut down"

    def _recompute_everything(self) -> None:
        """After a failed step nobody knows what the device has done: give up all rows and all computed tokens."""
        self.scheduler.preempt_all()
        self.executor.reset()

    def _raise_if_dead(self) -> None:
        if self._death is not None:
            raise EngineDeadError(self._death) from self._cause_of_death

    def _step(self) -> list[EngineCoreOutput]:
        start = time.perf_counter()
        with self._fatal():
            plan = self.scheduler.schedule()
        scheduled = time.perf_counter()
        try:
            result = self.executor.execute(plan, partial(self.structured_output.masks, plan))
        except BaseException:
            with self._fatal():
                self._recompute_everything()
            raise
        executed = time.perf_counter()
        with self._fatal():
            outputs, ended = self.structured_output.update(self.scheduler.update_from_output(plan, result))
            for request_id in ended:
                self.scheduler.abort(request_id)
        self.last_times = StepTimes(
            num_tokens=plan.num_tokens,
            num_seqs=len(plan.scheduled),
            schedule_s=scheduled - start,
            execute_s=executed - scheduled,
            forward_s=self.executor.last_forward_s,
            update_s=time.perf_counter() - executed,
        )
        return outputs


class _InterruptWaits:
    """Puts off the KeyboardInterrupt of a Ctrl-C to the end of a ``with``; 1 us where there is none.

    Only on the main thread, which alone gets one, and only in place of Python's own handler: an application that has
    set its own knows what it wants.
    """

    __slots__ = ("_is_ours", "_was_pressed")

    def __enter__(self) -> None:
        self._was_pressed = False
        on_main_thread = threading.current_thread() is threading.main_thread()
        self._is_ours = on_main_thread and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self._is_ours:
            signal.signal(signal.SIGINT, self._note)

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._is_ours:
            return
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if self._was_pressed and exc is None:
            raise KeyboardInterrupt

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self._was_pressed = True


def _target_itl(config: EngineConfig, model_config: ModelConfig, measured: MeasuredSteps | None) -> TargetITL | None:
    if measured is None:
        return None
    step_time = StepTimeModel.from_measured(measured, attention_ratio(model_config))
    target = TargetITL(config.scheduler.target_itl_s(step_time.decodes(1)), step_time)
    logger.info(
        "target inter-token latency %.2f ms: a step of one decode takes %.2f ms and leaves a new prompt %d tokens; of "
        "%d decodes %.2f ms and %d tokens",
        target.seconds * 1e3, step_time.decodes(1) * 1e3, target.allowance(1).tokens(0),
        measured.decode_s[-1][0], measured.decode_s[-1][1] * 1e3, target.allowance(measured.decode_s[-1][0]).tokens(0),
    )  # fmt: skip
    return target


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
