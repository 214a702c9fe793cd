"""ModelRunner: owns the model, the KV tensors and the rows of one device, and runs one step at a time."""

from __future__ import annotations

import importlib.util
import logging
import time
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch

from pico_vllm.config import MIN_COMPUTE_CAPABILITY, triton_is_interpreted
from pico_vllm.distributed.tensor_parallel import TensorParallelGroup
from pico_vllm.errors import ConfigError
from pico_vllm.kernels.backend import CPU, REFERENCE, KernelBackend
from pico_vllm.models.registry import model_class
from pico_vllm.models.weights import ParameterPlace, dummy_parameters, load_parameters
from pico_vllm.scheduler_output import ModelRunnerOutput
from pico_vllm.worker.cuda_graph import Capturing, CudaGraphRunner
from pico_vllm.worker.input_builder import InputBuilder
from pico_vllm.worker.kv_cache_memory import allocate_kv_caches, resolve_num_blocks
from pico_vllm.worker.memory_budget import CudaMemoryMeter
from pico_vllm.worker.sampler import Sampler
from pico_vllm.worker.start_probe import TRIAL_BLOCKS, StartProbe

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pico_vllm.config import EngineConfig, ModelConfig
    from pico_vllm.models.source import ModelSource
    from pico_vllm.models.weights import Parameters, Progress
    from pico_vllm.scheduler_output import GrammarMasks, MeasuredSteps, SchedulerOutput
    from pico_vllm.worker.cuda_graph import Recorder
    from pico_vllm.worker.input_builder import SamplingBatch
    from pico_vllm.worker.memory_budget import MemoryBudget, MemoryMeter

logger = logging.getLogger(__name__)

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class ModelRunner:
    """One device's share of the engine.

    Args:
        config: of the engine.
        model_config: of the model.
        source: where its checkpoint is.
        max_model_len: positions a sequence may have.
        progress: called with (parameters loaded, parameters in all).

    Raises:
        ConfigError: the device, backend, dtype or memory asked for is not there.
        WeightLoadError: the checkpoint is not the model's.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        source: ModelSource,
        *,
        max_model_len: int,
        progress: Progress | None = None,
    ) -> None:
        start = time.perf_counter()
        #: Seconds of the phases of the start: weights, memory, captures, times.
        self.start_s: dict[str, float] = {}
        self.model_config = model_config
        self.device = resolve_device(config.device)
        if self.device.type == "cuda":  # Triton launches on the current device
            torch.cuda.set_device(self.device)
        self.dtype = _DTYPES[model_config.dtype if config.dtype == "auto" else config.dtype]
        self._max_model_len = max_model_len
        backend = resolve_backend(config.backend, self.device)
        on_gpu = self.device.type == "cuda"
        #: New tokens of a step at most; what memory is kept for.
        self.max_num_batched_tokens = config.scheduler.token_bound(
            max_model_len, fast_prompts=on_gpu and backend.name == "triton"
        )
        with self._timed("weights"):
            self.parameters = self._load_parameters(config, source, backend, progress)
            self.set_backend(backend)

        block_size = config.cache.block_size
        max_blocks_per_seq = -(-max_model_len // block_size)
        rows = (config.scheduler.max_num_seqs, max_blocks_per_seq, block_size, model_config.vocab_size, self.device)
        self._new_rows = partial(InputBuilder, *rows)
        self._rows = self._new_rows()
        self._capture_stream = torch.cuda.Stream(self.device) if on_gpu else None
        probe = StartProbe(
            self._model,
            backend,
            max_num_seqs=config.scheduler.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=max_model_len,
            block_size=block_size,
            device=self.device,
        )
        #: What a GPU's memory is for; None on a CPU, and where the size of the KV cache was given.
        self.memory: MemoryBudget | None = None
        with self._timed("memory"):
            if on_gpu and config.cache.is_sized_by_share:
                self.memory = self._plan_memory(config, probe, CudaMemoryMeter(self.device))
        self.num_blocks = resolve_num_blocks(
            config.cache,
            model_config,
            dtype=self.dtype,
            max_useful_blocks=config.scheduler.max_num_seqs * max_blocks_per_seq,
            memory=self.memory,
        )
        self.kv_caches = self._new_caches(self.num_blocks, block_size)
        if self.device.type == "cuda":
            self._pinned_ids = torch.empty(config.scheduler.max_num_seqs, dtype=torch.int64, pin_memory=True)
            self._ids_are_there = torch.cuda.Event()
        self._graphs: CudaGraphRunner | None = None
        with self._timed("captures"):
            if self._captures(config):
                self._graphs = self._capture(config, self.kv_caches, Capturing(self._capture_stream))
        self._captured_backend = backend
        #: What steps take; None where there is no target to keep.
        self.measured_steps: MeasuredSteps | None = None
        with self._timed("times"):
            if config.scheduler.wants_step_times(on_gpu=on_gpu):
                self.measured_steps = self._measure_steps(probe)
        #: Seconds of the last step's forward pass and sampling on the host clock, the wait for the ids included.
        self.last_forward_s = 0.0
        #: Called after each step with its plan: who records ops learns whose rows they have computed.
        self.step_observer: Callable[[SchedulerOutput], None] | None = None
        logger.info(
            "%s on %s, %s, backend %s, %d KV blocks of %d tokens, ready in %.2f s",
            model_config.architecture, self.device, self.dtype, self.backend.name, self.num_blocks, block_size,
            time.perf_counter() - start,
        )  # fmt: skip

    @property
    def num_rows(self) -> int:
        """Requests the device holds a row for."""
        return self._rows.num_rows

    @property
    def uses_cuda_graphs(self) -> bool:
        """Whether steps that fit a captured size are replayed."""
        return self._graphs is not None

    def set_backend(self, backend: KernelBackend) -> None:
        """Run with other ops from the next step on; parameters and KV cache stay. For recording and bisecting."""
        self.backend = backend
        self._model = model_class(self.model_config.architecture)(
            self.model_config,
            self.parameters,
            max_model_len=self._max_model_len,
            backend=backend,
            group=TensorParallelGroup(backend),
        )
        self._sampler = Sampler(backend)

    def reset(self) -> None:
        """Forget every request, in whatever state a failed step has left its row."""
        fresh = self._new_rows()
        fresh.adopt_device_rows(self._rows)
        self._rows = fresh

    def _captures(self, config: EngineConfig) -> bool:
        """Whether passes are captured: with Triton's backend alone, since others look at lengths on the host."""
        return self.device.type == "cuda" and self.backend.name == "triton" and not config.enforce_eager

    @torch.inference_mode()
    def _capture(
        self,
        config: EngineConfig,
        kv_caches: list[torch.Tensor],
        record: Recorder,
        *,
        trial: bool = False,
    ) -> CudaGraphRunner:
        """CUDA graphs of the forward pass on these caches."""
        from pico_vllm.kernels.decode_inputs_triton import fill_decode_inputs_triton

        return CudaGraphRunner(
            self._model,
            kv_caches,
            block_table_rows=self._rows.block_table_rows,
            last_token_ids=self._rows.last_token_ids,
            max_num_seqs=config.scheduler.max_num_seqs,
            max_model_len=self._max_model_len,
            block_size=config.cache.block_size,
            fill_decode_inputs=fill_decode_inputs_triton,
            record=record,
            trial=trial,
        )

    @torch.inference_mode()
    def _plan_memory(self, config: EngineConfig, probe: StartProbe, meter: MemoryMeter) -> MemoryBudget:
        """Measure what is needed beside the KV cache, on a KV cache of a few blocks."""
        weights = torch.cuda.memory_allocated(self.device)
        trial_caches = self._new_caches(TRIAL_BLOCKS, config.cache.block_size)
        budget = probe.memory_budget(
            meter,
            trial_caches,
            self._rows,
            utilization=config.cache.gpu_memory_utilization,
            weights=weights,
            trial_captures=(
                partial(self._capture, config, trial_caches, trial=True) if self._captures(config) else None
            ),
            recorder=partial(Capturing, self._capture_stream),
        )
        logger.info("memory of %s: %s", self.device, budget)
        return budget

    @torch.inference_mode()
    def _measure_steps(self, probe: StartProbe) -> MeasuredSteps:
        return probe.step_times(self.kv_caches, self._rows, self._graphs)

    def _new_caches(self, num_blocks: int, block_size: int) -> list[torch.Tensor]:
        return allocate_kv_caches(
            self.model_config, num_blocks=num_blocks, block_size=block_size, dtype=self.dtype, device=self.device
        )

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.start_s[phase] = time.perf_counter() - start

    @torch.inference_mode()
    def execute(
        self, step: SchedulerOutput, make_masks: Callable[[], GrammarMasks | None] | None = None
    ) -> ModelRunnerOutput:
        """Run one step: build inputs, forward, sample, and wait for the sampled ids.

        ``make_masks`` (grammar masks of the step, or None) is called when the forward pass has been launched: on a GPU
        the host makes them while the device computes.
        """
        if not step.scheduled:  # nothing runs, but rows may have to go
            self._rows.drop(step.dropped_request_ids)
            self.last_forward_s = 0.0
            return ModelRunnerOutput(())
        hidden, sampling, built = self._forward(step)
        num_sampled = len(sampling.host_rows)  # behind them are prompt positions whose log-probabilities are wanted
        logits = self._model.lm_head(hidden[:num_sampled])
        output = self._sample(
            logits, hidden[num_sampled:], step, sampling, None if make_masks is None else make_masks()
        )
        self.last_forward_s = time.perf_counter() - built
        if self.step_observer is not None:
            self.step_observer(step)
        return output

    def _forward(self, step: SchedulerOutput) -> tuple[torch.Tensor, SamplingBatch, float]:
        """Launch the step's forward pass, captured if a capture holds it.

        Returns:
            Hidden rows of the wanted tokens, how to sample, and when the inputs were ready.
        """
        graphs = self._graphs if self._graphs is not None and self.backend is self._captured_backend else None
        if graphs is None:
            batch, sampling = self._rows.build(step)
        else:
            continues = not any(request.new_token_ids for request in step.scheduled)
            size = graphs.decode_size(len(step.scheduled)) if continues else None
            if size is not None:
                rows, seq_lens, new_block_ids, sampling = self._rows.lay_out_decode(step)
                built = time.perf_counter()
                return graphs.decode(size, rows, seq_lens, new_block_ids), sampling, built
            host = self._rows.lay_out(step)
            size = graphs.prompt_size(host)
            if size is not None:
                sampling = self._rows.sampling(host)
                built = time.perf_counter()
                return graphs.prompt(size, host), sampling, built
            batch, sampling = self._rows.to_device(host, step.num_decode_reqs)
        built = time.perf_counter()
        return self._model.hidden_rows(batch, self.kv_caches), sampling, built

    def _sample(
        self,
        logits: torch.Tensor,
        prompt_hidden: torch.Tensor,
        step: SchedulerOutput,
        sampling: SamplingBatch,
        grammar: GrammarMasks | None,
    ) -> ModelRunnerOutput:
        """Choose tokens, keep them for the next step, and hand them out in the order of the scheduled requests."""
        if len(logits) + len(prompt_hidden) == 0:
            return ModelRunnerOutput(((),) * len(step.scheduled))
        masks = None if grammar is None else self._grammar_rows(step, grammar)

        def prompt_logits(start: int, end: int) -> torch.Tensor:
            return self._model.lm_head(prompt_hidden[start:end])

        sampled = self._sampler(logits, sampling, self._rows.logits_processors, masks, prompt_logits)
        self._rows.record_sampled(sampling, sampled.token_ids)
        ids = iter(self._ids_on_host_sync(sampled.token_ids))
        logprobs = iter(sampled.logprobs)
        return ModelRunnerOutput(
            token_ids=tuple((next(ids),) if r.samples else () for r in step.scheduled),
            logprobs=tuple(next(logprobs) if r.samples else () for r in step.scheduled) if sampled.logprobs else (),
            prompt_logprobs=sampled.prompt_logprobs,
        )

    def _ids_on_host_sync(self, token_ids: torch.Tensor) -> list[int]:
        """Wait for the sampled ids of the step."""
        if self.device.type != "cuda":
            return token_ids.tolist()
        on_host = self._pinned_ids[: len(token_ids)]
        on_host.copy_(token_ids, non_blocking=True)
        self._ids_are_there.record()
        self._ids_are_there.synchronize()
        return on_host.tolist()

    def _grammar_rows(self, step: SchedulerOutput, grammar: GrammarMasks) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Indices among the sampled rows, and the bitmask, on the device."""
        sampled = [request.request_id for request in step.scheduled if request.samples]
        index_of = {request_id: index for index, request_id in enumerate(sampled)}
        indices = torch.tensor([index_of[request_id] for request_id in grammar.request_ids], dtype=torch.int64)
        return indices.to(self.device), torch.from_numpy(grammar.bitmask).to(self.device)

    def _load_parameters(
        self, config: EngineConfig, source: ModelSource, backend: KernelBackend, progress: Progress | None
    ) -> Parameters:
        specs = model_class(self.model_config.architecture).parameter_specs(self.model_config)
        place = ParameterPlace(self.dtype, self.device, backend.pack_linear)
        if config.load_format == "dummy":
            return dummy_parameters(specs, place, seed=config.seed, progress=progress)
        with source.open_checkpoint() as checkpoint:
            return load_parameters(specs, checkpoint, place, progress=progress)


def resolve_device(name: str) -> torch.device:
    """Find the device; "auto" is a GPU where torch sees one, else the CPU.

    Raises:
        ConfigError: a GPU is asked for that torch doesn't see, or something that is neither a GPU nor the CPU.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device={name!r} must be auto, cpu, cuda or cuda:N")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise ConfigError(f"device={name!r}: torch sees {count} GPU(s) here; use device='cpu'")
        device = torch.device("cuda", device.index or 0)
    return device


def resolve_backend(name: str, device: torch.device) -> KernelBackend:
    """Find the ops; "auto" is Triton's on a GPU that it compiles for, else torch's. Triton is imported if it is chosen.

    Raises:
        ConfigError: Triton's are asked for and cannot run.
    """
    if name == "auto":
        name = "triton" if device.type == "cuda" and _why_no_triton(device) is None else "cpu"
    if name != "triton":
        return REFERENCE if name == "reference" else CPU
    if (why_not := _why_no_triton(device)) is not None:
        raise ConfigError(f"backend='triton' needs {why_not}; backend='cpu' runs on any device")
    from pico_vllm.kernels.triton_backend import TRITON

    return TRITON


def _why_no_triton(device: torch.device) -> str | None:
    """What is missing, or None."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton, which isn't installed"
    if triton_is_interpreted():
        return None
    if device.type != "cuda":
        return f"a CUDA GPU, and this engine runs on {device} (TRITON_INTERPRET=1 interprets the kernels, for tests)"
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_COMPUTE_CAPABILITY:
        needed, found = (".".join(map(str, version)) for version in (MIN_COMPUTE_CAPABILITY, capability))
        return f"a GPU of compute capability {needed} or more, {device} has {found}"
    return None
