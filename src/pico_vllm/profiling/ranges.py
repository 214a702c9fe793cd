"""Named ranges around what an engine in this process does: put there for the length of a ``with``, then gone.

Nothing of the engine knows of them: methods of its instances are wrapped, and the model's ops are those of a backend
that wraps them, as the oracle's are. An engine that isn't profiled runs no line of this file and tests no flag.

A pass that is replayed as a CUDA graph is one launch: no Python runs between its kernels, so it has no layers and no
ops. Eager passes (long prompts, ``enforce_eager``) and what the sampler does have them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, cast

from pico_vllm.engine.core_client import core_in_this_process
from pico_vllm.models.overlapped import OverlappedModel
from pico_vllm.profiling.op_costs import op_cost, op_label
from pico_vllm.profiling.trace import LAYER, OP, PHASE, STEP
from pico_vllm.worker.sampler import Sampler

if TYPE_CHECKING:
    from pico_vllm.bench.kernel_cases.case import Cost
    from pico_vllm.engine.llm_engine import LLMEngine
    from pico_vllm.kernels.backend import KernelBackend
    from pico_vllm.scheduler_output import SchedulerOutput
    from pico_vllm.worker.model_runner import ModelRunner
    from pico_vllm.worker.pending_step import PendingStep

#: Opens a range of a name.
Mark = Callable[[str], AbstractContextManager[Any]]


class RangeLog:
    """What a trace can't say of its ranges.

    Attributes:
        plans: of the steps that were launched.
        costs: of the ops, in the order of their calls.
    """

    def __init__(self) -> None:
        self.plans: list[SchedulerOutput] = []
        self.costs: list[Cost | None] = []


@contextmanager
def engine_ranges(engine: LLMEngine, mark: Mark) -> Iterator[RangeLog]:
    """Put ranges around the steps of an engine, their phases, the layers and the ops.

    Args:
        engine: with its core in this process; between two steps.
        mark: what opens a range.

    Raises:
        ConfigError: the core is in a process of its own.
    """
    core = core_in_this_process(engine.core)
    runner, log, patches = core.executor.runner, RangeLog(), _Patches()
    try:
        _replace_model(runner, mark, log, patches)
        patches.wrap(engine, "step", mark, STEP)
        patches.wrap(core.scheduler, "schedule", mark, PHASE + "schedule")
        for name in ("build", "lay_out_decode", "lay_out_mixed", "sampling"):
            patches.wrap(runner._rows, name, mark, PHASE + "build inputs")
        patches.set(runner, "start", _logging_plans(runner.start, log))
        patches.wrap(runner, "start", mark, PHASE + "forward")
        patches.wrap(core.structured_output, "masks", mark, PHASE + "masks")
        patches.wrap(runner, "sample", mark, PHASE + "sample")
        patches.wrap(runner, "finish", mark, PHASE + "wait")
        patches.wrap(core, "_take_in", mark, PHASE + "update")
        patches.wrap(engine._outputs, "process", mark, PHASE + "output")
        yield log
    finally:
        patches.undo()


# ---------------------------------------------------------------------------------------------------------- private
class _Patches:
    """Attributes of instances that are set now and given back later."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, bool, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Shadow an attribute of the instance or of its class."""
        self._before.append((owner, name, name in vars(owner), getattr(owner, name)))
        setattr(owner, name, value)

    def wrap(self, owner: Any, name: str, mark: Mark, range_name: str) -> None:
        """Put a range around a method of one instance."""
        self.set(owner, name, _ranged(getattr(owner, name), mark, range_name))

    def undo(self) -> None:
        """The last one first."""
        while self._before:
            owner, name, was_its_own, value = self._before.pop()
            if was_its_own:
                setattr(owner, name, value)
            else:
                delattr(owner, name)


def _ranged(function: Callable[..., Any], mark: Mark, range_name: str) -> Callable[..., Any]:
    def ranged(*args: Any, **kwargs: Any) -> Any:
        with mark(range_name):
            return function(*args, **kwargs)

    return ranged


def _logging_plans(
    start: Callable[[SchedulerOutput], PendingStep], log: RangeLog
) -> Callable[[SchedulerOutput], PendingStep]:
    def logged(plan: SchedulerOutput) -> PendingStep:
        if plan.scheduled:
            log.plans.append(plan)
        return start(plan)

    return logged


def _replace_model(runner: ModelRunner, mark: Mark, log: RangeLog, patches: _Patches) -> None:
    """Eager passes and the sampler run with ranges; captured passes stay in use, and are what they were."""
    ranged = _ranged_backend(runner.backend, mark, log)
    model = runner.model_with(ranged)
    # A model that runs in tiles has the layers in another; in two tiles it calls their parts, and the layers of such a
    # step have no ranges.
    holder = model.model if isinstance(model, OverlappedModel) else model
    holder.layers = cast(Any, [_RangedLayer(layer, mark, f"{LAYER}{i}") for i, layer in enumerate(holder.layers)])
    patches.set(runner, "_model", model)
    patches.set(runner, "_sampler", Sampler(ranged))
    if not runner.uses_cuda_graphs:  # a runner replays only while it has the backend that it has captured with
        patches.set(runner, "backend", ranged)


def _ranged_backend(backend: KernelBackend, mark: Mark, log: RangeLog) -> KernelBackend:
    def wrap(name: str, op: Callable[..., Any]) -> Callable[..., Any]:
        def ranged(*args: Any) -> Any:
            with mark(OP + op_label(name, args)):
                result = op(*args)
            log.costs.append(op_cost(name, args, log.plans[-1]))
            return result

        return ranged

    ops = {f.name: wrap(f.name, getattr(backend, f.name)) for f in dataclasses.fields(backend) if f.name != "name"}
    return dataclasses.replace(backend, **ops)


class _RangedLayer:
    """A layer whose call is a range; its parts are the layer's."""

    def __init__(self, layer: Any, mark: Mark, range_name: str) -> None:
        self._layer, self._mark, self._range_name = layer, mark, range_name

    def __call__(self, *args: Any) -> Any:
        with self._mark(self._range_name):
            return self._layer(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)
