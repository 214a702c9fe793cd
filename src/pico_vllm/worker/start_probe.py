"""StartProbe: what the worker learns of its device before the first request, by running made-up steps.

Memory: the peak of the fullest step that the limits allow, and what a few trial captures take; before the KV cache is
allocated, on a tiny one. Times: of a few decodes and of one prompt; with the KV cache and the captures in place. It
knows nothing of requests. Called by ModelRunner.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from pico_vllm.errors import ConfigError
from pico_vllm.scheduler_output import MeasuredSteps
from pico_vllm.worker.dummy_steps import DummySteps
from pico_vllm.worker.input_builder import RandomSampling, SamplingBatch
from pico_vllm.worker.memory_budget import MemoryBudget, MemoryMeter, graph_bytes, plan_memory, table_bytes
from pico_vllm.worker.sampler import PROMPT_LOGPROBS_ROWS, Sampler

if TYPE_CHECKING:
    from pico_vllm.distributed.tensor_parallel import TensorParallelGroup
    from pico_vllm.kernels.backend import KernelBackend
    from pico_vllm.models.overlapped import OverlappedModel
    from pico_vllm.models.qwen2 import Qwen2ForCausalLM
    from pico_vllm.worker.cuda_graph import CudaGraphRunner, Recorder, Tensors
    from pico_vllm.worker.input_builder import InputBuilder

#: Blocks of the cache on which memory is measured: no step writes into it.
TRIAL_BLOCKS = 2
#: Decodes that are timed, as far as max_num_seqs goes, and the positions of each sequence.
_TIMED_DECODES = (1, 16, 64, 128, 256)
_TIMED_CONTEXT = 512
#: Tokens of the prompt that is timed: enough to keep a GPU busy for longer than it takes to launch.
_TIMED_PROMPT_GPU, _TIMED_PROMPT_CPU = 2048, 128
_REPETITIONS = 3  # the best counts, so the first one warms up
#: No further size of decodes is timed after so many seconds (a slow model on a CPU), compiling aside.
_MAX_TIMING_S = 0.2

#: Runs something and returns the seconds it took on the device.
Clock = Callable[[Callable[[], object]], float]


@dataclass(frozen=True, slots=True)
class StartProbe:
    """One model on one device.

    Attributes:
        model, backend: that are measured.
        group: of the model's ranks, all of which measure the same; the slowest counts.
        max_num_seqs, max_num_batched_tokens, max_model_len, block_size: of the engine.
        device: that computes.
    """

    model: Qwen2ForCausalLM | OverlappedModel
    backend: KernelBackend
    group: TensorParallelGroup
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    device: torch.device

    def memory_budget(
        self,
        meter: MemoryMeter,
        trial_caches: list[torch.Tensor],
        rows: InputBuilder,
        *,
        utilization: float,
        weights: int,
        trial_captures: Callable[[MeteredRecorder], CudaGraphRunner] | None,
        recorder: Callable[[], Recorder],
    ) -> MemoryBudget:
        """Measure what the fullest step and the captures need, give all of it back, and divide the memory.

        Args:
            meter: of the device.
            trial_caches: a KV cache of ``TRIAL_BLOCKS`` blocks.
            rows: of the worker, all free.
            utilization: share of the memory that may be used.
            weights: bytes of the parameters.
            trial_captures: captures a few passes with a recorder; None = nothing will be captured.
            recorder: makes what captures.

        Raises:
            ConfigError: the fullest step alone is too much, or nothing is left for the KV cache.
        """
        meter.reset_peak()
        try:
            self._run_fullest(trial_caches, rows)
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"a step of max_num_batched_tokens={self.max_num_batched_tokens} tokens and max_num_seqs="
                f"{self.max_num_seqs} sequences does not fit the memory of {self.device}: {str(error).splitlines()[0]} "
                "Lower one of them, or free memory of other processes"
            ) from None
        peak = meter.peak()
        in_use = meter.used()
        graphs = 0
        if trial_captures is not None:
            metered = MeteredRecorder(recorder(), meter)
            graphs = metered.bytes_of(trial_captures(metered).num_captures)
            meter.used()  # gives back what the trial captures have held
        return plan_memory(
            total=meter.total,
            utilization=utilization,
            in_use=in_use,
            weights=weights,
            activations=max(peak - in_use, 0),
            graphs=graphs,
            tables=table_bytes(self.max_num_seqs, self.model.config.vocab_size),
        )

    def step_times(
        self, kv_caches: list[torch.Tensor], rows: InputBuilder, graphs: CudaGraphRunner | None
    ) -> MeasuredSteps:
        """Time decodes (captured, where they are) and a prompt. Writes K and V of made-up tokens into the cache."""
        clock = _cuda_seconds if self.device.type == "cuda" else _host_seconds
        steps = DummySteps(self.max_model_len, len(kv_caches[0]), self.block_size, self.device)
        context = min(_TIMED_CONTEXT, self.max_model_len)
        sizes = sorted({size for size in _TIMED_DECODES if size < self.max_num_seqs} | {min(self.max_num_seqs, 256)})
        decode_s: list[tuple[int, float]] = []
        for size in sizes:
            if sum(seconds for _, seconds in decode_s) * _REPETITIONS > _MAX_TIMING_S:
                break
            run = self._decode_run(size, context, steps, kv_caches, rows, graphs)
            decode_s.append((size, self.group.largest(_best(run, clock))))
        limit = _TIMED_PROMPT_GPU if self.device.type == "cuda" else _TIMED_PROMPT_CPU
        num_tokens = min(limit, self.max_num_batched_tokens, self.max_model_len)
        if graphs is not None:
            num_tokens = graphs.prompt_size(num_tokens) or num_tokens
        prompt = steps.prompt(num_tokens)
        # Captured, if that can be: a slow host that launches the pass would be timed instead of the device.
        replay = None if graphs is None else graphs.made_up_prompt(prompt)
        run_prompt = replay or (lambda: self._choose(self.model.hidden_rows(prompt, kv_caches)))
        prompt_s = self.group.largest(_best(run_prompt, clock))
        rows.block_table_rows.zero_()
        return MeasuredSteps(tuple(decode_s), num_tokens, prompt_s, () if graphs is None else graphs.step_sizes)

    def launch_everything(self, trial_caches: list[torch.Tensor]) -> None:
        """Launch every kernel that eager steps need, on numbers that mean nothing: see ``compiling_only``."""
        steps = DummySteps(self.max_model_len, len(trial_caches[0]), self.block_size, self.device)
        shallow, caches = self.model.outermost_layers(trial_caches)
        sampler = Sampler(self.backend)
        for num_tokens in sorted({self.max_num_batched_tokens, min(self.max_num_batched_tokens, 4096)}):
            num_seqs = min(self.max_num_seqs, num_tokens)
            batch = steps.fullest(num_tokens, num_seqs, num_logits=num_seqs, context=min(self.max_model_len, 1024))
            shallow.hidden_rows(batch, caches)
        for num_rows in sorted({1, min(8, self.max_num_seqs), self.max_num_seqs}):
            hidden = torch.zeros(num_rows, self.model.config.hidden_size, dtype=caches[0].dtype, device=self.device)
            logits = self.model.lm_head(hidden)
            for scores in (logits, logits.float()):
                sampler.choose(scores, _random(num_rows, self.device))

    def _run_fullest(self, trial_caches: list[torch.Tensor], rows: InputBuilder) -> None:
        """The fullest step, then logits, penalties, sampling and log-probabilities of as many rows as can want them."""
        steps = DummySteps(self.max_model_len, len(trial_caches[0]), self.block_size, self.device)
        num_tokens, num_rows = self.max_num_batched_tokens, max(self.max_num_seqs, PROMPT_LOGPROBS_ROWS)
        context = self.max_model_len
        if self.backend.name == "triton":  # allocates by the bound of the lengths, not by the lengths
            context = min(context, 1024)
        elif self.backend.name == "reference":  # a row at a time: it needs little beside the margin, but minutes
            num_tokens, num_rows, context = min(num_tokens, 8), 2, min(context, 8)
        batch = steps.fullest(num_tokens, self.max_num_seqs, num_logits=num_rows, context=context)
        own = self.model.lm_head.own(self.model.hidden_rows(batch, trial_caches))  # a step holds them to its end
        logits = self.model.lm_head.whole(own)
        processed = logits.to(torch.float32, copy=True)
        penalised = [torch.empty_like(processed, dtype=d) for d in (torch.float32, torch.bool, torch.int32)]
        del penalised
        Sampler(self.backend)(processed, _all_random(num_rows, self.device), rows.logits_processors)
        del own

    def _decode_run(
        self,
        size: int,
        context: int,
        steps: DummySteps,
        kv_caches: list[torch.Tensor],
        rows: InputBuilder,
        graphs: CudaGraphRunner | None,
    ) -> Callable[[], object]:
        if graphs is None or size > graphs.max_decodes:
            batch = steps.decodes(size, context)
            return lambda: self._choose(self.model.hidden_rows(batch, kv_caches))
        tables = steps.block_tables(size, context)
        rows.block_table_rows[:size, : tables.shape[1]] = tables
        device_rows, seq_lens, no_blocks = np.arange(size), np.full(size, context), np.full(size, -1)
        return lambda: graphs.decode(device_rows, seq_lens, no_blocks).greedy_ids

    def _choose(self, hidden: torch.Tensor) -> torch.Tensor:
        token_ids: torch.Tensor = self.backend.greedy(self.model.lm_head(hidden))
        return token_ids


class MeteredRecorder:
    """A Recorder that notes how much memory is in use before the first capture and after each."""

    def __init__(self, record: Recorder, meter: MemoryMeter) -> None:
        self._record, self._meter = record, meter
        self._used = [meter.used()]

    def __call__(
        self, run: Callable[[], Tensors], run_shallow: Callable[[], Tensors]
    ) -> tuple[Tensors, Callable[[], None]]:
        """Record, and read the meter."""
        recorded = self._record(run, run_shallow)
        self._used.append(self._meter.used())
        return recorded

    def bytes_of(self, num_captures: int) -> int:
        """What so many captures will take."""
        return graph_bytes(self._used, num_captures)


def _random(num_rows: int, device: torch.device) -> RandomSampling:
    """Every row samples with top-k, top-p and min-p."""

    def full(value: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((num_rows,), value, dtype=dtype, device=device)

    return RandomSampling(
        greedy=full(0, torch.bool),
        temperature=full(1.0, torch.float32),
        top_k=full(50, torch.int64),
        top_p=full(0.9, torch.float32),
        min_p=full(0.01, torch.float32),
        seeds=full(0, torch.int64),
        sample_indices=full(0, torch.int64),
        positions=full(0, torch.int64),
    )


def _all_random(num_rows: int, device: torch.device) -> SamplingBatch:
    """Every row samples, and wants log-probabilities."""
    numbers = np.arange(num_rows)
    return SamplingBatch(numbers * 0, numbers, _random(num_rows, device), num_logprobs=(1,) * num_rows)


def _best(run: Callable[[], object], clock: Clock) -> float:
    return min(clock(run) for _ in range(_REPETITIONS))


def _cuda_seconds(run: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def _host_seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
