"""Pico-vLLM, in this process."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from pico_vllm import __version__
from pico_vllm.bench.engines.engine import EngineInfo, EngineOptions, ScoredOutput, Step, SteppedEngine
from pico_vllm.config import EngineConfig
from pico_vllm.engine.core_client import core_in_this_process
from pico_vllm.engine.llm_engine import LLMEngine
from pico_vllm.engine.stats import EngineStats
from pico_vllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from pico_vllm.bench.traces import Trace
    from pico_vllm.bench.workloads import Workload

#: Best tokens whose log-probabilities the correctness gate compares.
_NUM_LOGPROBS = 20


def _memory_share_with_others(options: EngineOptions) -> float:
    """Our option counts everything in use on the GPU, so what other engines of this session hold is added to ours."""
    if not options.device.startswith("cuda"):
        return options.memory_share
    free, total = torch.cuda.mem_get_info(options.device)
    return min(0.95, options.memory_share + 1 - free / total)


class PicoEngine(SteppedEngine):
    """An LLMEngine without a tokenizer."""

    def __init__(self, options: EngineOptions) -> None:
        start = time.perf_counter()
        defaults = {
            "model": options.model,
            "dtype": options.dtype,
            "device": options.device,
            "gpu_memory_utilization": _memory_share_with_others(options),
            "skip_tokenizer_init": True,
            "enable_prefix_caching": options.enable_prefix_caching,
        }
        if options.max_num_seqs is not None:
            defaults["max_num_seqs"] = options.max_num_seqs
        self.engine = LLMEngine(EngineConfig.from_options(**(defaults | options.extra)))
        config, core = self.engine.config, core_in_this_process(self.engine.core)
        runner = core.executor.runner
        settings = {
            "backend": runner.backend.name,
            "cuda_graphs": runner.uses_cuda_graphs,
            "prefix_caching": config.cache.enable_prefix_caching,
            "block_size": config.cache.block_size,
            "num_blocks": self.engine.core.limits.num_blocks,
            "max_num_seqs": config.scheduler.max_num_seqs,
            "max_num_batched_tokens": runner.max_num_batched_tokens,
            "target_itl_ms": config.scheduler.target_itl_ms,
            "max_model_len": self.engine.core.limits.max_model_len,
            "chunked_prefill": config.scheduler.enable_chunked_prefill,
            "async_scheduling": core.overlaps,
            "gpu_memory_utilization": options.memory_share,
            "extra": options.extra,
        }
        start_s = round(time.perf_counter() - start, 3)
        self.info = EngineInfo("pico-vllm", __version__, "in-process", start_s, settings)

    def why_not(self, workload: Workload) -> str | None:
        """A request longer than the engine takes."""
        limit = self.engine.core.limits.max_request_tokens
        longest = workload.longest_request()
        return None if longest <= limit else f"{longest} tokens a request, the engine takes {limit}"

    def serve(self, workload: Workload) -> list[Trace]:
        """Run a workload on the clock, the engine's own statistics set to 0 before."""
        self.engine.stats = EngineStats()
        return super().serve(workload)

    def add(self, index: int, prompt_token_ids: Sequence[int], max_tokens: int, temperature: float) -> None:
        """Queue a request."""
        params = SamplingParams(temperature=temperature, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        self.engine.add_request(str(index), list(prompt_token_ids), params)

    def step(self) -> Step:
        """Run one step."""
        return [(int(d.request_id), d.new_token_ids, d.finish_reason is not None) for d in self.engine.step()]

    def abort(self, indices: Sequence[int]) -> None:
        """End requests in any state."""
        for index in indices:
            self.engine.abort(str(index))

    def score(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[ScoredOutput]:
        """Greedy tokens with log-probabilities, all prompts at once."""
        params = SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, logprobs=_NUM_LOGPROBS
        )
        for index, prompt in enumerate(prompts):
            self.engine.add_request(str(index), list(prompt), params)
        scored: dict[int, ScoredOutput] = {}
        while self.engine.has_unfinished_requests():
            for delta in self.engine.step():
                if delta.final is not None:
                    completion = delta.final.outputs[0]
                    logprobs = [{i: lp.logprob for i, lp in at.items()} for at in completion.logprobs or []]
                    scored[int(delta.request_id)] = ScoredOutput(completion.token_ids, logprobs)
        return [scored[index] for index in range(len(prompts))]

    def host_share(self) -> float | None:
        """Of the last run."""
        return self.engine.stats.overhead

    def close(self) -> None:
        """End the engine."""
        self.engine.shutdown()
