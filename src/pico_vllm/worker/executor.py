"""Executor: the engine core's handle on the devices. UniProcExecutor has one runner, in the same process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from pico_vllm.worker.cuda_graph import no_garbage_collection
from pico_vllm.worker.model_runner import ModelRunner

if TYPE_CHECKING:
    from collections.abc import Callable

    from pico_vllm.config import EngineConfig, ModelConfig
    from pico_vllm.models.source import ModelSource
    from pico_vllm.models.weights import Progress
    from pico_vllm.sampling_params import SamplingParams
    from pico_vllm.scheduler_output import GrammarMasks, MeasuredSteps, ModelRunnerOutput, SchedulerOutput
    from pico_vllm.worker.device_time import DeviceTime
    from pico_vllm.worker.pending_step import PendingStep


class Executor(Protocol):
    """Runs steps, on however many devices.

    Attributes:
        runner: of this process.
        num_blocks, max_num_batched_tokens, measured_steps: what was learned at the start, of all devices.
    """

    runner: ModelRunner
    num_blocks: int
    max_num_batched_tokens: int
    measured_steps: MeasuredSteps | None

    @property
    def device_time(self) -> DeviceTime:
        """How long the device of this process had something to do; sums since the start."""
        ...

    @property
    def computes_beside_the_host(self) -> bool:
        """Whether the devices compute while the host does something else."""
        ...

    def check_request(self, params: SamplingParams) -> None:
        """RequestError for what cannot be run here."""
        ...

    def reset(self) -> None:
        """Forget every request and every step in flight."""
        ...

    def execute(
        self, step: SchedulerOutput, make_masks: Callable[[], GrammarMasks | None] | None = None
    ) -> ModelRunnerOutput:
        """``start``, ``sample`` and ``finish`` in one."""
        ...

    def start(self, step: SchedulerOutput) -> PendingStep:
        """Launch a step's forward pass."""
        ...

    def sample(self, pending: PendingStep, masks: GrammarMasks | None) -> None:
        """Launch the choice of its tokens."""
        ...

    def finish(self, pending: PendingStep) -> ModelRunnerOutput:
        """Wait for its sampled ids."""
        ...

    def shutdown(self) -> None:
        """End whatever processes there are."""
        ...


def start_executor(
    config: EngineConfig,
    model_config: ModelConfig,
    source: ModelSource,
    *,
    max_model_len: int,
    progress: Progress | None = None,
) -> Executor:
    """Build what runs the steps of an engine: for one rank in this process, for several in as many processes.

    Args:
        config: of the engine.
        model_config: of the model.
        source: where its checkpoint is.
        max_model_len: positions a sequence may have.
        progress: called with (parameters loaded, parameters in all).

    Raises:
        ConfigError, WeightLoadError: the model cannot be read or run here.
        EngineDeadError: a rank could not be built; carries its traceback.
    """
    if config.parallel.tensor_parallel_size == 1:
        return UniProcExecutor(config, model_config, source, max_model_len=max_model_len, progress=progress)
    from pico_vllm.worker.multi_rank_executor import MultiRankExecutor  # torch.distributed: 0.1 s

    return MultiRankExecutor(config, model_config, source, max_model_len=max_model_len, progress=progress)


class UniProcExecutor:
    """Runs steps on one device."""

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        source: ModelSource,
        *,
        max_model_len: int,
        progress: Progress | None = None,
    ) -> None:
        with no_garbage_collection():  # what is made here stays: looking through it again and again frees nothing
            self.runner = ModelRunner(config, model_config, source, max_model_len=max_model_len, progress=progress)
        #: Learned from the memory that was left; the engine passes it on to the KV cache manager.
        self.num_blocks = self.runner.num_blocks
        #: Of a step at most: what the device has memory for.
        self.max_num_batched_tokens = self.runner.max_num_batched_tokens
        #: What steps take on this device; None where there is no target to keep.
        self.measured_steps = self.runner.measured_steps

    @property
    def device_time(self) -> DeviceTime:
        """How long the device had something to do; sums since the start."""
        return self.runner.device_time

    @property
    def computes_beside_the_host(self) -> bool:
        """Whether the device computes while the host does something else."""
        return self.runner.computes_beside_the_host

    def check_request(self, params: SamplingParams) -> None:
        """Everything can be run in this process."""

    def reset(self) -> None:
        """Forget every request and every step in flight: the next step sends all of them anew."""
        self.runner.reset()

    def execute(
        self, step: SchedulerOutput, make_masks: Callable[[], GrammarMasks | None] | None = None
    ) -> ModelRunnerOutput:
        """Run one step and wait for its sampled ids; ``make_masks`` is called while the device computes."""
        return self.runner.execute(step, make_masks)

    def start(self, step: SchedulerOutput) -> PendingStep:
        """Launch a step's forward pass; the step before it has been sampled, and may still be on the device."""
        return self.runner.start(step)

    def sample(self, pending: PendingStep, masks: GrammarMasks | None) -> None:
        """Launch the choice of its tokens."""
        self.runner.sample(pending, masks)

    def finish(self, pending: PendingStep) -> ModelRunnerOutput:
        """Wait for its sampled ids; steps are finished in the order in which they were started."""
        return self.runner.finish(pending)

    def shutdown(self) -> None:
        """No process was started."""
