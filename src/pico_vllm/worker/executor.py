"""UniProcExecutor: the engine core's handle on the devices; here one runner in the same process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pico_vllm.worker.model_runner import ModelRunner

if TYPE_CHECKING:
    from collections.abc import Callable

    from pico_vllm.config import EngineConfig, ModelConfig
    from pico_vllm.models.source import ModelSource
    from pico_vllm.models.weights import Progress
    from pico_vllm.scheduler_output import GrammarMasks, ModelRunnerOutput, SchedulerOutput


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
        self.runner = ModelRunner(config, model_config, source, max_model_len=max_model_len, progress=progress)
        #: Learned from the memory that was left; the engine passes it on to the KV cache manager.
        self.num_blocks = self.runner.num_blocks
        #: Of a step at most: what the device has memory for.
        self.max_num_batched_tokens = self.runner.max_num_batched_tokens
        #: What steps take on this device; None where there is no target to keep.
        self.measured_steps = self.runner.measured_steps

    @property
    def last_forward_s(self) -> float:
        """Seconds of the last step's forward pass and sampling."""
        return self.runner.last_forward_s

    def reset(self) -> None:
        """Forget every request: the next step sends all of them anew."""
        self.runner.reset()

    def execute(
        self, step: SchedulerOutput, make_masks: Callable[[], GrammarMasks | None] | None = None
    ) -> ModelRunnerOutput:
        """Run one step and wait for its sampled ids; ``make_masks`` is called while the device computes."""
        return self.runner.execute(step, make_masks)
