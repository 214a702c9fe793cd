"""EngineCore: token ids in, token ids out.

Owns the scheduler, the KV cache manager and the executor, and is the only place that builds them. It knows no text, no
files but the checkpoint's, and no clients, so it can run in a process of its own.

A step is ``schedule → execute → update_from_output``. With overlapped scheduling (docs/overlapped-scheduling.md) a step
is launched before the results of the one before it are taken in, so there is always one on the device; the outputs of a
call of ``step`` are then those of the step that the call before has launched. Tokens and their order are the same.

What can go wrong in a step: an exception on the device is raised as it is and costs no request, since every running one
goes back to the queue and is computed anew. Only where the device lacks the memory, which it would again, the largest
request of the step ends with an error. An exception in the books (scheduler, blocks, grammars) leaves these half-done:
the engine is dead, and every later call says why. So it is when one of several ranks is gone, since the others wait for
it. Ctrl-C is neither: while a step runs on the main thread it waits, and KeyboardInterrupt comes when the step is over.
"""

from __future__ import annotations

import _signal  # pyright: ignore[reportMissingImports] (it has no stub)
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
from pico_vllm.errors import ConfigError, DeviceOutOfMemoryError, EngineDeadError
from pico_vllm.kv_cache import KVCacheManager
from pico_vllm.outputs import EngineCoreOutput
from pico_vllm.request import FinishReason
from pico_vllm.scheduler.scheduler import Scheduler
from pico_vllm.scheduler.step_time import StepTimeModel, TargetITL, attention_ratio
from pico_vllm.worker.executor import start_executor

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType, TracebackType

    from pico_vllm.config import EngineConfig, ModelConfig
    from pico_vllm.kv_cache import CacheStats
    from pico_vllm.models.source import ModelSource
    from pico_vllm.models.weights import Progress
    from pico_vllm.request import Request
    from pico_vllm.scheduler_output import MeasuredSteps, ModelRunnerOutput, SchedulerOutput
    from pico_vllm.worker.device_time import DeviceTime
    from pico_vllm.worker.pending_step import PendingStep

logger = logging.getLogger(__name__)

#: Full steps of prompts that may wait before they come first, unless a target is given.
BACKLOG_STEPS = 4


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
        self.executor = start_executor(config, model_config, source, max_model_len=max_model_len, progress=progress)
        try:
            self._keep_books(config, model_config, source, max_model_len)
        except BaseException:
            self.executor.shutdown()
            raise

    def _keep_books(
        self, config: EngineConfig, model_config: ModelConfig, source: ModelSource, max_model_len: int
    ) -> None:
        """Everything but the executor, whose limits it knows."""
        self.kv_cache_manager = KVCacheManager(
            self.executor.num_blocks,
            config.cache.block_size,
            enable_prefix_caching=config.cache.enable_prefix_caching,
        )
        self.scheduler = Scheduler(
            kv_cache_manager=self.kv_cache_manager,
            max_num_seqs=config.scheduler.max_num_seqs,
            max_num_batched_tokens=self.executor.max_num_batched_tokens,
            max_model_len=max_model_len,
            enable_chunked_prefill=config.scheduler.enable_chunked_prefill,
            target_itl=_target_itl(
                config, model_config, self.executor.measured_steps, self.executor.max_num_batched_tokens
            ),
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
        overlaps = config.scheduler.async_scheduling
        #: Whether a step is launched before the one before it has been taken in.
        self.overlaps = self.executor.computes_beside_the_host if overlaps is None else overlaps
        self._inflight: tuple[SchedulerOutput, PendingStep] | None = None
        self._undelivered: list[EngineCoreOutput] = []  # taken into the books by a call of ``step`` that then failed
        self.last_times = StepTimes(num_steps=0)
        self._death: str | None = None
        self._cause_of_death: BaseException | None = None

    def add_request(self, request: Request) -> None:
        """Queue a request; one with structured outputs waits here until its grammar is compiled.

        Raises:
            RequestError: its id is in use, it can never fit (both numbers are named), its grammar is wrong, or it
                cannot be sent to other ranks.
            EngineDeadError: a step has failed, or the engine was shut down. So do all methods.
        """
        self._raise_if_dead()
        self.executor.check_request(request.params)
        matcher = self.structured_output.compile(request)
        self.scheduler.add(request)
        if matcher is not None:
            self.structured_output.start(request, matcher)

    def abort(self, request_id: str) -> bool:
        """End a request in any state; False when it is unknown or finished already."""
        self._raise_if_dead()
        self.structured_output.drop(request_id)
        if self._undelivered:
            self._undelivered = [output for output in self._undelivered if output.request_id != request_id]
        return self.scheduler.abort(request_id)

    @property
    def cache_stats(self) -> CacheStats:
        """Hits and evictions since the start, and where the blocks are."""
        return self.kv_cache_manager.stats

    def reset_prefix_cache(self) -> bool:
        """Forget all KV that is kept for later hits.

        Returns:
            False while a request runs, and then nothing has happened: what it stands on cannot go. Requests that wait
            don't matter.
        """
        self._raise_if_dead()
        return self.kv_cache_manager.reset_prefix_cache()

    def has_unfinished_requests(self) -> bool:
        """Whether ``step`` has anything to do.

        A step that nobody waits for any more (its requests have ended before it) may be in flight: the next one takes
        it in.
        """
        self._raise_if_dead()
        return self.scheduler.has_unfinished_requests() or bool(self._undelivered)

    def step(self) -> list[EngineCoreOutput]:
        """Run one step and return the requests that have new tokens or have ended; with overlap, those of the step
        before, and none at first.

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
        """End the engine and its ranks; later calls raise EngineDeadError. Its memory is free when the engine is."""
        self._death = self._death or "the engine has been shut down"
        self.executor.shutdown()

    def _recompute_everything(self) -> None:
        """After a failed step nobody knows what the device has done: give up all rows and all KV, cached or not."""
        self._inflight = None
        self.scheduler.preempt_all()
        self.executor.reset()

    def _raise_if_dead(self) -> None:
        if self._death is not None:
            raise EngineDeadError(self._death) from self._cause_of_death

    def _step(self) -> list[EngineCoreOutput]:
        watch = _Stopwatch(self.executor.device_time)
        with self._fatal():
            plan = self.scheduler.schedule()
        watch.scheduled()
        outputs, self._undelivered = self._undelivered, []
        try:
            if self.overlaps:
                self._run_overlapped(plan, outputs, watch)
            else:
                result = self.executor.execute(plan, partial(self.structured_output.masks, plan))
                self._take_in(plan, result, outputs, watch)
        except BaseException as error:
            if self._death is not None:
                raise
            if isinstance(error, EngineDeadError):  # a rank is gone
                self._death, self._cause_of_death = str(error), error
                raise
            with self._fatal():
                self._recompute_everything()
                ended = self._end_largest(plan, error) if isinstance(error, DeviceOutOfMemoryError) else None
            if ended is None:
                self._undelivered = outputs
                raise
            outputs.append(ended)
        device_has_work = self._inflight is not None and self.executor.computes_beside_the_host
        self.last_times = watch.times(plan, awaits_caller=not device_has_work)
        return outputs

    def _run_overlapped(self, plan: SchedulerOutput, outputs: list[EngineCoreOutput], watch: _Stopwatch) -> None:
        """Launch a step, and only then take in the one before it.

        The masks of grammars need the tokens of the step before. They are made when these have come, while the new
        step's forward pass runs; its sampling waits for them.
        """
        pending, needs_masks = None, False
        if plan.scheduled or plan.dropped_request_ids:
            pending = self.executor.start(plan)
            needs_masks = self.structured_output.constrains(plan)
            if not needs_masks:
                self.executor.sample(pending, None)
        if self._inflight is not None:
            previous, pending_before = self._inflight
            result = self.executor.finish(pending_before)
            self._inflight = None
            self._take_in(previous, result, outputs, watch)
        if pending is not None and needs_masks:
            self.executor.sample(pending, self.structured_output.masks(plan))
        if pending is not None and plan.scheduled:
            self._inflight = (plan, pending)

    def _take_in(
        self, plan: SchedulerOutput, result: ModelRunnerOutput, outputs: list[EngineCoreOutput], watch: _Stopwatch
    ) -> None:
        """Put a step's results into the books; appends to ``outputs``."""
        start = time.perf_counter()
        with self._fatal():
            new, ended = self.structured_output.update(self.scheduler.update_from_output(plan, result))
            for request_id in ended:
                self.scheduler.abort(request_id)
        outputs += new
        watch.update_s += time.perf_counter() - start

    def _end_largest(self, plan: SchedulerOutput, error: DeviceOutOfMemoryError) -> EngineCoreOutput | None:
        """End the request that needed most of a step for which the device lacked the memory; None if all have ended.

        The newest among equals: the oldest request is the last one to go.
        """
        by_need = sorted(plan.scheduled, key=lambda scheduled: scheduled.num_new_tokens)
        for scheduled in reversed(by_need):
            if self.abort(scheduled.request_id):
                logger.warning(
                    "the device has no memory left for a step of %d tokens in %d requests; request %s with %d of them "
                    "ends with an error, the others are computed anew: lower max_num_batched_tokens or "
                    "gpu_memory_utilization (%s)",
                    plan.num_tokens, len(plan.scheduled), scheduled.request_id, scheduled.num_new_tokens, error,
                )  # fmt: skip
                return EngineCoreOutput(scheduled.request_id, (), FinishReason.ERROR)
        return None


class _Stopwatch:
    """Takes the times of one step."""

    def __init__(self, device_time: DeviceTime) -> None:
        self._device_time = device_time
        self._busy_s, self._wait_s = device_time.busy_s, device_time.wait_s
        self._num_late_steps = device_time.num_late_steps
        self._start = time.perf_counter()
        self._schedule_s = 0.0
        self.update_s = 0.0

    def scheduled(self) -> None:
        """The plan is there."""
        self._schedule_s = time.perf_counter() - self._start

    def times(self, plan: SchedulerOutput, *, awaits_caller: bool) -> StepTimes:
        """The step is over."""
        total_s = time.perf_counter() - self._start
        busy_s = min(total_s, self._device_time.busy_s - self._busy_s)
        wait_s = self._device_time.wait_s - self._wait_s
        return StepTimes(
            num_steps=int(bool(plan.scheduled)),
            num_tokens=plan.num_tokens,
            num_seqs=len(plan.scheduled),
            schedule_s=self._schedule_s,
            launch_s=total_s - self._schedule_s - wait_s - self.update_s,
            wait_s=wait_s,
            update_s=self.update_s,
            busy_s=busy_s,
            idle_s=total_s - busy_s,
            num_late_steps=self._device_time.num_late_steps - self._num_late_steps,
            awaits_caller=awaits_caller,
        )


class _InterruptWaits:
    """Puts off the KeyboardInterrupt of a Ctrl-C to the end of a ``with``; 2 us where there is none.

    Only on the main thread, which alone gets one, and only in place of Python's own handler: an application that has
    set its own knows what it wants. By the functions that ``signal`` wraps: it looks for an enum of each number and
    handler, and three calls of its own cost a step 10 to 20 us.
    """

    __slots__ = ("_is_ours", "_was_pressed")

    def __enter__(self) -> None:
        self._was_pressed = False
        on_main_thread = threading.current_thread() is threading.main_thread()
        self._is_ours = on_main_thread and _signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self._is_ours:
            _signal.signal(signal.SIGINT, self._note)

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._is_ours:
            return
        _signal.signal(signal.SIGINT, signal.default_int_handler)
        if self._was_pressed and exc is None:
            raise KeyboardInterrupt

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self._was_pressed = True


def _target_itl(
    config: EngineConfig, model_config: ModelConfig, measured: MeasuredSteps | None, max_num_batched_tokens: int
) -> TargetITL | None:
    if measured is None:
        return None
    step_time = StepTimeModel.from_measured(measured, attention_ratio(model_config))
    seconds, num_decode_steps = config.scheduler.target_itl()
    # A target that somebody has chosen is kept whatever waits.
    max_backlog = None if config.scheduler.target_itl_ms is not None else BACKLOG_STEPS * max_num_batched_tokens
    target = TargetITL(seconds, step_time, num_decode_steps, measured.step_sizes, max_backlog=max_backlog)
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
