"""PendingStep: a step between its launch and its results. The model runner makes it, the engine core keeps it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pico_vllm.scheduler_output import ModelRunnerOutput
from pico_vllm.worker.logprobs import entries_by_count

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from pico_vllm.scheduler_output import SchedulerOutput
    from pico_vllm.worker.cuda_graph import ForwardOutput
    from pico_vllm.worker.host_ring import Slot
    from pico_vllm.worker.input_builder import SamplingBatch
    from pico_vllm.worker.logprobs import LogprobsTensors


@dataclass(slots=True)
class PendingStep:
    """What is known of a step so far.

    Attributes:
        step: its plan.
        slot: its host memory; None for a step that runs nothing.
        forward: of its launch, until it has been sampled.
        sampling: how to sample, for as long.
        token_ids: [S] int64 on the host, from ``sample`` on, valid once the slot has been waited for.
        logprobs, prompt_logprobs: likewise; None where nobody asked.
        custom_outputs: (index among the sampled rows, list to append its id to) of rows with custom logits processors.
    """

    step: SchedulerOutput
    slot: Slot | None = None
    forward: ForwardOutput | None = None
    sampling: SamplingBatch | None = None
    token_ids: torch.Tensor | None = None
    logprobs: LogprobsTensors | None = None
    prompt_logprobs: LogprobsTensors | None = None
    prompt_counts: Sequence[int] = ()
    custom_outputs: Sequence[tuple[int, list[int]]] = ()

    def output(self) -> ModelRunnerOutput:
        """The results, in the order of the scheduled requests; its slot has been waited for."""
        scheduled = self.step.scheduled
        if self.token_ids is None:
            return ModelRunnerOutput(((),) * len(scheduled))
        token_ids = self.token_ids.tolist()
        for index, output_token_ids in self.custom_outputs:
            output_token_ids.append(token_ids[index])
        ids = iter(token_ids)
        return ModelRunnerOutput(
            token_ids=tuple((next(ids),) if r.samples else () for r in scheduled),
            logprobs=entries_by_count(self.logprobs, [int(r.samples) for r in scheduled]),
            prompt_logprobs=entries_by_count(self.prompt_logprobs, self.prompt_counts),
        )
