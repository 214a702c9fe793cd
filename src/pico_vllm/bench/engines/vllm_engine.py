"""vLLM, stepped in this process (or with its core in a process of its own: ``extra={"multiprocess": true}``)."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pico_vllm.bench.engines.engine import EngineInfo, EngineOptions, ScoredOutput, Step, SteppedEngine
from pico_vllm.errors import ConfigError

if TYPE_CHECKING:
    from pico_vllm.bench.workloads import Workload

_NUM_LOGPROBS = 20
#: Seconds that a core in another process gets to finish its last step before the next run.
_SETTLE_S = 0.02


class VllmEngine(SteppedEngine):
    """``vllm.LLM``'s engine, fed with token ids."""

    def __init__(self, options: EngineOptions) -> None:
        extra = dict(options.extra)
        self._multiprocess = bool(extra.pop("multiprocess", False))
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(self._multiprocess))
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        if not options.device.startswith("cuda"):
            raise ConfigError(f"the vLLM adapter runs on a GPU only, not on device={options.device!r}")
        import vllm  # pyright: ignore[reportMissingImports]
        from vllm.sampling_params import RequestOutputKind  # pyright: ignore[reportMissingImports]

        start = time.perf_counter()
        arguments: dict[str, Any] = {
            "model": options.model,
            "dtype": options.dtype,
            "skip_tokenizer_init": True,
            "gpu_memory_utilization": options.memory_share,
            "enable_prefix_caching": options.enable_prefix_caching,
            "seed": 0,
        }
        if options.max_num_seqs is not None:
            arguments["max_num_seqs"] = options.max_num_seqs
        self._llm = vllm.LLM(**(arguments | extra))
        self._engine = self._llm.llm_engine
        self._sampling_params, self._kinds = vllm.SamplingParams, RequestOutputKind
        self._run = 0
        config = self._engine.vllm_config
        self._max_model_len = config.model_config.max_model_len
        settings = {
            "prefix_caching": bool(config.cache_config.enable_prefix_caching),
            "max_num_seqs": config.scheduler_config.max_num_seqs,
            "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
            "max_model_len": self._max_model_len,
            "async_scheduling": config.scheduler_config.async_scheduling,
            "chunked_prefill": config.scheduler_config.enable_chunked_prefill,
            "compile_mode": str(config.compilation_config.mode),
            "cudagraph_mode": str(config.compilation_config.cudagraph_mode),
            "max_cudagraph_size": config.compilation_config.max_cudagraph_capture_size,
            "block_size": config.cache_config.block_size,
            "gpu_memory_utilization": (arguments | extra)["gpu_memory_utilization"],
            "extra": options.extra,
        }
        mode = "multiprocess" if self._multiprocess else "in-process"
        self.info = EngineInfo("vllm", vllm.__version__, mode, round(time.perf_counter() - start, 2), settings)

    def why_not(self, workload: Workload) -> str | None:
        """A request longer than the engine takes."""
        longest = workload.longest_request()
        limit = self._max_model_len
        return None if longest <= limit else f"{longest} tokens a request, the engine takes {limit}"

    def add(self, index: int, prompt_token_ids: Sequence[int], max_tokens: int, temperature: float) -> None:
        """Queue a request; ids are unique over the engine's life."""
        params = self._params(max_tokens, temperature, self._kinds.DELTA)
        self._engine.add_request(f"{self._run}-{index}", {"prompt_token_ids": list(prompt_token_ids)}, params)

    def step(self) -> Step:
        """Run one step, or take what the other process has sent."""
        of_this_run = f"{self._run}-"
        return [
            (int(o.request_id.removeprefix(of_this_run)), o.outputs[0].token_ids, o.finished)
            for o in self._engine.step()
            if o.request_id.startswith(of_this_run)
        ]

    def abort(self, indices: Sequence[int]) -> None:
        """End requests in any state."""
        self._engine.abort_request([f"{self._run}-{index}" for index in indices])

    def settle(self) -> None:
        """Let the step that runs ahead of the outputs end, so that it does not run into the next measurement."""
        self._run += 1
        if self._multiprocess:
            time.sleep(_SETTLE_S)
            return
        while getattr(self._engine.engine_core.engine_core, "batch_queue", None):
            self._engine.step()

    def run_offline(self, workload: Workload) -> tuple[float, int]:
        """``LLM.generate`` of everything at once."""
        prompts = [{"prompt_token_ids": list(request.prompt_token_ids)} for request in workload.requests]
        params = [self._params(r.max_tokens, r.temperature, self._kinds.FINAL_ONLY) for r in workload.requests]
        start = time.perf_counter()
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        self.settle()
        return seconds, sum(len(output.outputs[0].token_ids) for output in outputs)

    def score(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[ScoredOutput]:
        """Greedy tokens with log-probabilities, all prompts at once."""
        params = self._params(max_tokens, 0.0, self._kinds.FINAL_ONLY, logprobs=_NUM_LOGPROBS)
        outputs = self._llm.generate([{"prompt_token_ids": list(p)} for p in prompts], params, use_tqdm=False)
        self.settle()
        completions = [output.outputs[0] for output in outputs]
        return [
            ScoredOutput(list(c.token_ids), [{i: lp.logprob for i, lp in at.items()} for at in c.logprobs])
            for c in completions
        ]

    def close(self) -> None:
        """End the engine and free its memory."""
        self._engine.engine_core.shutdown()

    def _params(self, max_tokens: int, temperature: float, kind: Any, **more: Any) -> Any:
        return self._sampling_params(
            temperature=temperature, max_tokens=max_tokens, ignore_eos=True, detokenize=False, output_kind=kind, **more
        )
