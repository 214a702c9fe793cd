"""transformers' ``generate``, one request at a time: the engine that everybody has.

``extra``: ``{"cache": "static"}`` compiles the decode step on a GPU; ``{"attention": "sdpa"}`` is the default.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pico_vllm.bench.engines.engine import EngineInfo, EngineOptions, Step, SteppedEngine
from pico_vllm.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from pico_vllm.bench.traces import Trace
    from pico_vllm.bench.workloads import Workload


class TransformersEngine(SteppedEngine):
    """``AutoModelForCausalLM.generate``."""

    def __init__(self, options: EngineOptions) -> None:
        import torch
        import transformers

        if options.enable_prefix_caching:
            raise ConfigError("transformers' generate has no prefix cache: leave enable_prefix_caching off")
        start = time.perf_counter()
        extra = dict(options.extra)
        self._cache = extra.pop("cache", None)
        attention = extra.pop("attention", "sdpa")
        if extra or self._cache not in (None, "static"):
            raise ConfigError(f"options of transformers are cache ('static') and attention, got {options.extra}")
        transformers.utils.logging.disable_progress_bar()
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            options.model, dtype=getattr(torch, options.dtype), attn_implementation=attention, local_files_only=True
        )
        self._model = model.to(options.device).eval()
        self._device = options.device
        # Nothing of the checkpoint's generation_config.json: a repetition penalty would change greedy answers too. And
        # EOS is a token like any other: min_new_tokens would mask it, and the answers would no longer be greedy.
        self._model.generation_config = transformers.GenerationConfig(pad_token_id=0)
        self._max_len = self._model.config.max_position_embeddings
        settings = {
            "cache": self._cache or "dynamic",
            "attention": attention,
            "prefix_caching": False,
            "max_num_seqs": 1,
        }
        start_s = round(time.perf_counter() - start, 2)
        self.info = EngineInfo("transformers", transformers.__version__, "in-process", start_s, settings)

    def why_not(self, workload: Workload) -> str | None:
        """More than one request at a time, or one longer than the model takes."""
        if workload.concurrency != 1 and len(workload.requests) > 1:
            return "transformers' generate runs one request at a time"
        longest = workload.longest_request()
        return None if longest <= self._max_len else f"{longest} tokens a request, the model takes {self._max_len}"

    def serve(self, workload: Workload) -> list[Trace]:
        """Run the requests one after the other; a streamer tells when each token is there."""
        from pico_vllm.bench.dispatcher import Dispatcher

        dispatcher = Dispatcher(workload, self.clock())
        while not dispatcher.done:
            for index, prompt in dispatcher.due(self.clock()):
                request = workload.requests[index]
                dispatcher.submitted(index, self.clock(), len(prompt))
                self._generate(dispatcher, index, prompt, request.max_tokens, request.temperature)
                dispatcher.ended(index)
        return dispatcher.traces()

    def step(self) -> Step:
        """Never called: ``generate`` has its own loop."""
        raise NotImplementedError

    def _generate(
        self, dispatcher: Any, index: int, prompt: Sequence[int], max_tokens: int, temperature: float
    ) -> None:
        import torch

        streamer = _Streamer(lambda ids: dispatcher.received(index, self.clock(), ids))
        options: dict[str, Any] = {"do_sample": temperature > 0}
        if temperature > 0:
            options |= {"temperature": temperature, "top_k": 0, "top_p": 1.0}
        if self._cache is not None:
            options["cache_implementation"] = self._cache
        ids = torch.tensor([list(prompt)], device=self._device)
        with torch.inference_mode():
            self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_tokens,
                streamer=streamer,
                **options,
            )


class _Streamer:
    """What ``generate`` calls: first with the prompt, then with each token, on the CPU by then."""

    def __init__(self, received: Any) -> None:
        self._received = received
        self._is_prompt = True

    def put(self, value: torch.Tensor) -> None:
        ids = value.flatten().tolist()
        if not self._is_prompt:
            self._received(ids)
        self._is_prompt = False

    def end(self) -> None:
        pass
