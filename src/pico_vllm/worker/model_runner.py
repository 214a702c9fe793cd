"""ModelRunner: owns the model, the KV tensors and the rows of one device, and runs steps.

A step has three parts, so that the host can prepare the next one while the device computes: ``start`` launches the
forward pass, ``sample`` launches the choice of tokens, ``finish`` waits for them. Per step they come in this order, and
the next step starts when this one has been sampled; it may be finished later, one step later at most.
"""

from __future__ import annotations

import importlib.util
import logging
import time
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import numpy as np
import torch

from pico_vllm.config import MIN_COMPUTE_CAPABILITY, triton_is_interpreted
from pico_vllm.distributed.tensor_parallel import SingleRank
from pico_vllm.errors import ConfigError, DeviceOutOfMemoryError
from pico_vllm.kernels.backend import CPU, REFERENCE, KernelBackend
from pico_vllm.models.overlapped import OverlappedModel
from pico_vllm.models.registry import model_class
from pico_vllm.models.weights import ParameterPlace, dummy_parameters, load_parameters
from pico_vllm.scheduler_output import ModelRunnerOutput
from pico_vllm.worker.cuda_graph import Capturing, CudaGraphRunner, ForwardOutput, capture_stream, launch_shallow
from pico_vllm.worker.device_time import DeviceTime
from pico_vllm.worker.host_ring import HostRing
from pico_vllm.worker.input_builder import InputBuilder
from pico_vllm.worker.kv_cache_memory import allocate_kv_caches, resolve_num_blocks
from pico_vllm.worker.logprobs import LogprobsTensors
from pico_vllm.worker.memory_budget import CudaMemoryMeter
from pico_vllm.worker.pending_step import PendingStep
from pico_vllm.worker.sampler import Sampler
from pico_vllm.worker.start_probe import TRIAL_BLOCKS, StartProbe

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from pico_vllm.config import EngineConfig, ModelConfig
    from pico_vllm.distributed.tensor_parallel import TensorParallelGroup
    from pico_vllm.models.qwen2 import Qwen2ForCausalLM
    from pico_vllm.models.source import ModelSource
    from pico_vllm.models.weights import Parameters, Progress
    from pico_vllm.scheduler_output import GrammarMasks, MeasuredSteps, SchedulerOutput
    from pico_vllm.worker.cuda_graph import Recorder
    from pico_vllm.worker.host_ring import Slot
    from pico_vllm.worker.input_builder import SamplingBatch
    from pico_vllm.worker.memory_budget import MemoryBudget, MemoryMeter

logger = logging.getLogger(__name__)

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class ModelRunner:
    """One device's share of the engine.

    Args:
        config: of the engine.
        model_config: of the model.
        source: where its checkpoint is.
        max_model_len: positions a sequence may have.
        progress: called with (parameters loaded, parameters in all).
        device: of this rank; None = what the configuration says.
        new_group: makes the group of the ranks around a backend's ops.

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
        device: torch.device | None = None,
        new_group: Callable[[KernelBackend], TensorParallelGroup] = SingleRank,
    ) -> None:
        start = time.perf_counter()
        #: Seconds of the phases of the start: weights, compile, memory, captures, times.
        self.start_s: dict[str, float] = {}
        self.model_config = model_config
        self.device = resolve_device(config.device) if device is None else device
        if self.device.type == "cuda":  # Triton launches on the current device
            torch.cuda.set_device(self.device)
        self.dtype = _DTYPES[model_config.dtype if config.dtype == "auto" else config.dtype]
        self._max_model_len = max_model_len
        backend = resolve_backend(config.backend, self.device)
        self._new_group = new_group
        #: This rank and the others.
        self.group = new_group(backend)
        shard = self.group.shard
        on_gpu = self.device.type == "cuda"
        compiles = on_gpu and backend.name == "triton"
        #: New tokens of a step at most; what memory is kept for.
        self.max_num_batched_tokens = config.scheduler.token_bound(max_model_len, fast_prompts=compiles)
        self.group.reserve(self.max_num_batched_tokens, model_config.hidden_size, self.dtype)
        #: Of the smallest device: all ranks cut their steps in the same place.
        self._num_sms = -int(self.group.largest(-_num_sms(self.device))) if on_gpu else None
        self._graphs: CudaGraphRunner | None = None
        with self._timed("weights"), self._preparing() if compiles else nullcontext():
            self.parameters = self._load_parameters(config, source, backend, progress)
            self.set_backend(backend)

        block_size = config.cache.block_size
        max_blocks_per_seq = -(-max_model_len // block_size)
        rows = (config.scheduler.max_num_seqs, max_blocks_per_seq, block_size, model_config.vocab_size, self.device)
        self._ring = HostRing(self.device, config.scheduler.max_num_seqs)
        self._new_rows = partial(InputBuilder, *rows, self._ring)
        self._rows = self._new_rows()
        self._capture_stream = capture_stream(self.device) if on_gpu else None
        probe = StartProbe(
            self._model,
            backend,
            group=self.group,
            max_num_seqs=config.scheduler.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=max_model_len,
            block_size=block_size,
            device=self.device,
        )
        with self._timed("compile"):
            if compiles:
                self._compile(config, probe)
        #: What a GPU's memory is for; None on a CPU, and where the size of the KV cache was given.
        self.memory: MemoryBudget | None = None
        with self._timed("memory"):
            if on_gpu and config.cache.is_sized_by_share:
                self.memory = self._plan_memory(config, probe, CudaMemoryMeter(self.device))
        num_blocks = resolve_num_blocks(
            config.cache,
            self._rank_config,
            dtype=self.dtype,
            max_useful_blocks=config.scheduler.max_num_seqs * max_blocks_per_seq,
            memory=self.memory,
            num_ranks=shard.size,
        )
        #: Of the KV cache: what the rank with the least memory has room for.
        self.num_blocks = -int(self.group.largest(-num_blocks))
        self.kv_caches = self._new_caches(self.num_blocks, block_size)
        with self._timed("captures"):
            if self._captures(config):
                self._graphs = self._capture(config, self.kv_caches, Capturing(self._capture_stream))
        self._captured_backend = backend
        #: What steps take; None where there is no target to keep.
        self.measured_steps: MeasuredSteps | None = None
        with self._timed("times"):
            if config.scheduler.wants_step_times(on_gpu=on_gpu):
                self.measured_steps = self._measure_steps(probe)
        self.device_time = DeviceTime()
        #: Called when a step has been sampled, with its plan: who records ops learns whose rows they have computed.
        self.step_observer: Callable[[SchedulerOutput], None] | None = None
        logger.info(
            "%s on %s, %s, backend %s, %d KV blocks of %d tokens, ready in %.2f s",
            model_config.architecture, self.device, self.dtype, self.backend.name, self.num_blocks, block_size,
            time.perf_counter() - start,
        )  # fmt: skip

    @property
    def _rank_config(self) -> ModelConfig:
        """The model as its layers see it on one rank."""
        return self.group.shard.model_config(self.model_config)

    @property
    def num_rows(self) -> int:
        """Requests the device holds a row for."""
        return self._rows.num_rows

    @property
    def computes_beside_the_host(self) -> bool:
        """Whether a launched step runs on its own; a CPU has computed it when the launch returns."""
        return self.device.type == "cuda"

    @property
    def uses_cuda_graphs(self) -> bool:
        """Whether steps that fit a captured size are replayed."""
        return self._graphs is not None

    def set_backend(self, backend: KernelBackend) -> None:
        """Run with other ops from the next step on; parameters and KV cache stay. For recording and bisecting.

        What the prefix cache keeps was computed by the ops before: reset it where the new ones compute something else.

        Raises:
            ConfigError: other ranks replay captured passes, and this one would not.
        """
        if self._graphs is not None and self.group.shard.size > 1 and backend is not self._captured_backend:
            raise ConfigError(
                f"the ops of one of {self.group.shard.size} ranks cannot be swapped while the others replay captured "
                "passes: use enforce_eager=True"
            )
        self.backend = backend
        self._model = self.model_with(backend)
        self._sampler = Sampler(backend)

    def model_with(self, backend: KernelBackend) -> Qwen2ForCausalLM | OverlappedModel:
        """The model with other ops; every rank's must compute the same."""
        group = self._new_group(backend)
        model: Qwen2ForCausalLM = model_class(self.model_config.architecture)(
            self._rank_config, self.parameters, max_model_len=self._max_model_len, backend=backend, group=group
        )
        return OverlappedModel(model, self._num_sms) if group.overlaps else model

    def drop_graphs(self) -> None:
        """Free what was captured, as soon as no step replays it; later steps run eagerly."""
        self._graphs = None

    def reset(self) -> None:
        """Forget every request, in whatever state a failed step has left its row, and every step in flight."""
        self._ring.forget_inflight()
        self.device_time.forget_running()
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
            self._model.replayed() if isinstance(self._model, OverlappedModel) else self._model,
            kv_caches,
            block_table_rows=self._rows.block_table_rows,
            last_token_ids=self._rows.last_token_ids,
            max_num_seqs=config.scheduler.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self._max_model_len,
            block_size=config.cache.block_size,
            fill_decode_inputs=fill_decode_inputs_triton,
            ring=self._ring,
            record=record,
            trial=trial,
        )

    def _preparing(self) -> AbstractContextManager[None]:
        from pico_vllm.kernels.parallel_compile import preparing

        return preparing(self.device)

    @torch.inference_mode()
    def _compile(self, config: EngineConfig, probe: StartProbe) -> None:
        """Compile, in parallel, the kernels of everything that is run from here on, or load them from the disk."""
        from pico_vllm.kernels.parallel_compile import compiling_only

        trial_caches = self._new_caches(TRIAL_BLOCKS, config.cache.block_size)
        with compiling_only(self.device):
            probe.launch_everything(trial_caches)
            if self._captures(config):
                self._capture(config, trial_caches, launch_shallow)
        self._rows.last_token_ids.zero_()  # nobody has computed what was written there

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
            self._rank_config, num_blocks=num_blocks, block_size=block_size, dtype=self.dtype, device=self.device
        )

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.start_s[phase] = time.perf_counter() - start

    def execute(
        self, step: SchedulerOutput, make_masks: Callable[[], GrammarMasks | None] | None = None
    ) -> ModelRunnerOutput:
        """Run one step and wait for it; ``make_masks`` (grammar masks, or None) is called while the device computes.

        Raises:
            DeviceOutOfMemoryError: it needs more memory than the device has left.
        """
        pending = self.start(step)
        self.sample(pending, None if make_masks is None or not step.scheduled else make_masks())
        return self.finish(pending)

    def start(self, step: SchedulerOutput) -> PendingStep:
        """Apply what is new, and launch the step's forward pass.

        Raises:
            DeviceOutOfMemoryError: it needs more memory than the device has left.
        """
        if not step.scheduled:  # nothing runs, but rows may have to go
            self._rows.drop(step.dropped_request_ids)
            return PendingStep(step)
        return _naming_memory_errors(self._start, step)

    def sample(self, pending: PendingStep, grammar: GrammarMasks | None = None) -> None:
        """Launch the choice of the step's tokens; they stay on the device for the next step and go to the host.

        Raises:
            DeviceOutOfMemoryError: it needs more memory than the device has left.
        """
        if pending.slot is not None:
            _naming_memory_errors(self._sample, pending, grammar)

    def finish(self, pending: PendingStep) -> ModelRunnerOutput:
        """Wait for the step's results; the only place where the host waits for the device."""
        if pending.slot is None:
            return ModelRunnerOutput(())
        start = time.perf_counter()
        pending.slot.wait()
        self.device_time.wait_s += time.perf_counter() - start
        if self.computes_beside_the_host:
            self.device_time.end()
        return pending.output()

    @torch.inference_mode()
    def _start(self, step: SchedulerOutput) -> PendingStep:
        slot = self._ring.begin_step()
        if step.block_copies:
            sources, destinations = self._ring.send_int32(*np.array(step.block_copies).T)
            self.backend.copy_blocks(self.kv_caches, sources, destinations)
        forward, sampling = self._forward(step)
        if not self.computes_beside_the_host:
            self.device_time.end()
        return PendingStep(step, slot, forward, sampling)

    def _forward(self, step: SchedulerOutput) -> tuple[ForwardOutput, SamplingBatch]:
        """Launch the step's forward pass, captured if a capture holds it.

        Returns:
            What it gives, and how to sample.
        """
        graphs = self._graphs if self._graphs is not None and self.backend is self._captured_backend else None
        if graphs is not None:
            num_seqs = len(step.scheduled)
            # Decodes that continue with an id on the device come first; from here on somebody brings ids.
            num_decodes = next((s for s, r in enumerate(step.scheduled) if r.new_token_ids), num_seqs)
            if num_decodes == num_seqs and num_seqs <= graphs.max_decodes:
                rows, seq_lens, new_block_ids = self._rows.lay_out_decode(step)
                self._launches()
                forward = graphs.decode(rows, seq_lens, new_block_ids)
                return forward, self._rows.sampling(rows, seq_lens)
            if num_decodes < num_seqs and (size := graphs.mixed_size(step, num_decodes)) is not None:
                host = self._rows.lay_out_mixed(step, num_decodes)
                self._launches()
                forward = graphs.mixed(size, host)
                return forward, self._rows.sampling(host.sampled_rows, host.sampled_lens, host.prompt_logprobs)
        batch, sampling = self._rows.build(step)
        self._launches()
        hidden = self._model.hidden_rows(batch, self.kv_caches)
        return ForwardOutput(hidden, self._model.lm_head.own(hidden[: len(sampling.rows)])), sampling

    def _launches(self) -> None:
        """The inputs of a step are ready: it goes to the device now."""
        self.device_time.num_late_steps += self._ring.previous_step_has_ended()
        self.device_time.begin()

    @torch.inference_mode()
    def _sample(self, pending: PendingStep, grammar: GrammarMasks | None) -> None:
        if not self.computes_beside_the_host:
            self.device_time.begin()
        slot, forward, sampling = pending.slot, pending.forward, pending.sampling
        assert slot is not None and forward is not None and sampling is not None
        processors = self._rows.logits_processors
        takes_greedy = sampling.is_greedy and grammar is None and not processors.any_active(sampling.rows)
        if takes_greedy and forward.greedy_ids is not None:
            pending.token_ids = slot.fetch_ids(forward.greedy_ids)
        elif len(forward.hidden) > 0:
            self._choose(pending, slot, forward, sampling, grammar)
        pending.forward = pending.sampling = None  # their memory is the next step's
        slot.close()
        if not self.computes_beside_the_host:
            self.device_time.end()
        if self.step_observer is not None:
            self.step_observer(pending.step)

    def _choose(
        self,
        pending: PendingStep,
        slot: Slot,
        forward: ForwardOutput,
        sampling: SamplingBatch,
        grammar: GrammarMasks | None,
    ) -> None:
        """Sample as it was asked for, and record what was chosen."""
        assert forward.logits is not None
        prompt_hidden = forward.hidden[len(sampling.rows) :]  # positions whose log-probabilities are wanted

        def prompt_logits(start: int, end: int) -> torch.Tensor:
            return self._model.lm_head(prompt_hidden[start:end])

        masks = None if grammar is None else self._grammar_rows(pending.step, grammar)
        processors = self._rows.logits_processors
        logits = self._model.lm_head.whole(forward.logits)
        sampled = self._sampler(logits, sampling, processors, masks, prompt_logits)
        self._rows.record_sampled(sampling, sampled.input_ids)
        pending.token_ids = slot.fetch_ids(sampled.token_ids)
        pending.logprobs = self._fetch(slot, sampled.logprobs)
        pending.prompt_logprobs = self._fetch(slot, sampled.prompt_logprobs)
        pending.prompt_counts = () if sampling.prompt_logprobs is None else sampling.prompt_logprobs.counts
        pending.custom_outputs = processors.custom_outputs(sampling.rows)

    @staticmethod
    def _fetch(slot: Slot, logprobs: LogprobsTensors | None) -> LogprobsTensors | None:
        """Start to copy log-probabilities to the host."""
        return None if logprobs is None else LogprobsTensors(logprobs.num_best, tuple(slot.fetch(logprobs.tensors)))

    def _grammar_rows(self, step: SchedulerOutput, grammar: GrammarMasks) -> tuple[torch.Tensor, torch.Tensor]:
        """Indices among the sampled rows, and the bitmask, on the device."""
        sampled = [request.request_id for request in step.scheduled if request.samples]
        index_of = {request_id: index for index, request_id in enumerate(sampled)}
        indices = np.array([index_of[request_id] for request_id in grammar.request_ids], dtype=np.int64)
        on_device, bitmask = self._ring.send(indices, grammar.bitmask)
        return on_device, bitmask

    def _load_parameters(
        self, config: EngineConfig, source: ModelSource, backend: KernelBackend, progress: Progress | None
    ) -> Parameters:
        specs = model_class(self.model_config.architecture).parameter_specs(self.model_config)
        place = ParameterPlace(self.dtype, self.device, backend.pack_linear, self.group.shard)
        if config.load_format == "dummy":
            return dummy_parameters(specs, place, seed=config.seed, progress=progress)
        with source.open_checkpoint() as checkpoint:
            return load_parameters(specs, checkpoint, place, progress=progress)


def _num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _naming_memory_errors(
    function: Callable[_Arguments, _Result], *args: _Arguments.args, **kwargs: _Arguments.kwargs
) -> _Result:
    """Call it; what the device lacked memory for becomes a DeviceOutOfMemoryError, with all caches given back.

    That happens outside of the ``except``, where the frames that held the step's tensors are gone.
    """
    try:
        return function(*args, **kwargs)
    except torch.OutOfMemoryError as error:
        message = str(error)
    torch.cuda.empty_cache()
    raise DeviceOutOfMemoryError(message)


def resolve_device(name: str, local_rank: int = 0) -> torch.device:
    """Find the device; "auto" is a GPU where torch sees one, else the CPU.

    Args:
        name: as the configuration has it.
        local_rank: of those on this host; each takes the next GPU.

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
        index = (device.index or 0) + local_rank
        if index >= count:
            of_rank = f", and rank {local_rank} needs cuda:{index}" if local_rank else ""
            raise ConfigError(f"device={name!r}: torch sees {count} GPU(s) here{of_rank}; use device='cpu'")
        device = torch.device("cuda", index)
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
