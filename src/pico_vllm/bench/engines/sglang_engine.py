"""SGLang's Engine: its scheduler runs in processes of its own, its tokenizer manager in this one."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

from pico_vllm.bench.engines.engine import EngineInfo, EngineOptions, StreamingEngine
from pico_vllm.errors import ConfigError

if TYPE_CHECKING:
    from pico_vllm.bench.traces import Trace
    from pico_vllm.bench.workloads import Workload

_SETTLE_S = 0.02
_REPORTED = (
    "attention_backend", "sampling_backend", "disable_radix_cache", "disable_overlap_schedule", "chunked_prefill_size",
    "max_prefill_tokens", "max_running_requests", "cuda_graph_max_bs", "disable_cuda_graph", "enable_torch_compile",
    "page_size", "stream_interval", "schedule_policy", "mem_fraction_static", "context_length",
)  # fmt: skip


class SglangEngine(StreamingEngine):
    """``sglang.Engine``, fed with token ids."""

    def __init__(self, options: EngineOptions) -> None:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        if not options.device.startswith("cuda"):
            raise ConfigError(f"the SGLang adapter runs on a GPU only, not on device={options.device!r}")
        import sglang  # pyright: ignore[reportMissingImports]

        start = time.perf_counter()
        arguments: dict[str, Any] = {
            "model_path": options.model,
            "dtype": options.dtype,
            "skip_tokenizer_init": True,
            "mem_fraction_static": options.memory_share,
            "disable_radix_cache": not options.enable_prefix_caching,
            "random_seed": 0,
        }
        if options.max_num_seqs is not None:
            arguments["max_running_requests"] = options.max_num_seqs
        self._engine = sglang.Engine(**(arguments | options.extra))
        arguments_used = self._engine.tokenizer_manager.server_args
        settings = {name: str(getattr(arguments_used, name, None)) for name in _REPORTED}
        settings |= {"prefix_caching": not arguments_used.disable_radix_cache, "extra": options.extra}
        start_s = round(time.perf_counter() - start, 2)
        self.info = EngineInfo("sglang", sglang.__version__, "multiprocess", start_s, settings)

    def run(self, main: Any) -> Any:
        """Run on the loop that the engine's sockets belong to."""
        return self._engine.loop.run_until_complete(main)

    def serve(self, workload: Workload) -> list[Trace]:
        """Run a workload on the clock."""
        traces = super().serve(workload)
        time.sleep(_SETTLE_S)  # its scheduler runs a step ahead
        return traces

    async def stream(
        self, prompt_token_ids: Sequence[int], max_tokens: int, temperature: float
    ) -> AsyncIterator[tuple[int, Sequence[int]]]:
        """New tokens; an output holds the ids so far, or with ``--stream-output`` the new ones: the count tells."""
        params = {"temperature": temperature, "max_new_tokens": max_tokens, "ignore_eos": True}
        seen = 0
        answer = await self._engine.async_generate(
            input_ids=list(prompt_token_ids), sampling_params=params, stream=True
        )
        async for output in answer:
            num_tokens = output["meta_info"]["completion_tokens"]
            if num_tokens > seen:
                yield num_tokens - seen, output["output_ids"][seen - num_tokens :]
                seen = num_tokens

    def run_offline(self, workload: Workload) -> tuple[float, int]:
        """``Engine.generate`` of everything at once."""
        requests = workload.requests
        params = [{"temperature": r.temperature, "max_new_tokens": r.max_tokens, "ignore_eos": True} for r in requests]
        start = time.perf_counter()
        ids = [list(r.prompt_token_ids) for r in requests]
        outputs = self._engine.generate(input_ids=ids, sampling_params=params)
        seconds = time.perf_counter() - start
        return seconds, sum(output["meta_info"]["completion_tokens"] for output in outputs)

    def close(self) -> None:
        """End its processes."""
        self._engine.shutdown()
