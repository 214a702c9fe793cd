"""LLMEngine: the front end. Text in, text out, around an EngineCore that knows only ids.

It resolves the model's files, tokenises and validates, follows every live request, and detokenises. ``LLM`` and the
CLI drive it; it has no loop of its own.
"""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pico_vllm.config import EngineConfig
from pico_vllm.engine.core_client import start_engine_core
from pico_vllm.engine.input_processor import InputProcessor
from pico_vllm.engine.output_processor import OutputProcessor
from pico_vllm.engine.stats import EngineStats
from pico_vllm.engine.tokenizer import Tokenizer
from pico_vllm.errors import RequestError
from pico_vllm.models.source import GgufSource, find_model
from pico_vllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pico_vllm.engine.input_processor import Prompt
    from pico_vllm.kv_cache import CacheStats
    from pico_vllm.outputs import RequestDelta

logger = logging.getLogger(__name__)


class LLMEngine:
    """Requests in, deltas out.

    Args:
        config: of the engine.
        progress: called with (phase, done, total) while the model is fetched and loaded; phases are "download",
            "convert" and "load".

    Raises:
        ConfigError, WeightLoadError: the model cannot be had, read or run here.
    """

    def __init__(self, config: EngineConfig, *, progress: Callable[[str, int, int], None] | None = None) -> None:
        self.config = config
        self.source = find_model(config.model, config.revision, progress=progress)
        self.model_config = self.source.model_config()
        if self.model_config.ignored_sampling:
            logger.warning(
                "generation_config.json asks for %s, which is not used: it is no default of this engine",
                ", ".join(self.model_config.ignored_sampling),
            )
        self.tokenizer = self._load_tokenizer()
        self.core = start_engine_core(config, self.model_config, self.source, progress=progress)
        self._inputs = InputProcessor(self.tokenizer, self.model_config, self.core.limits, config.seed)
        self._outputs = OutputProcessor(self.tokenizer)
        self.stats = EngineStats()

    @property
    def num_unfinished_requests(self) -> int:
        """Requests added and not ended."""
        return self._outputs.num_requests

    @property
    def cache_stats(self) -> CacheStats:
        """Of the KV cache: hits and evictions since the engine started, and where its blocks are now."""
        return self.core.cache_stats

    def reset_prefix_cache(self) -> bool:
        """Forget all KV that is kept for later hits; False, and nothing happens, while a request runs."""
        return self.core.reset_prefix_cache()

    def default_sampling_params(self, **overrides: Any) -> SamplingParams:
        """What the checkpoint's ``generation_config.json`` asks for (greedy if it doesn't), but for ``overrides``."""
        defaults: dict[str, Any] = {"temperature": 0.0}
        return SamplingParams(**(defaults | self.model_config.default_sampling | overrides))

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Prompt:
        """Return the prompt that a conversation makes.

        Args:
            messages: dicts with "role" and "content".
            options: add_generation_prompt, tools, chat_template_kwargs, as of ``Tokenizer.apply_chat_template``, and
                cache_salt.

        Raises:
            RequestError: the model has no chat template, or a message (named by its index) is wrong.
        """
        return self._inputs.chat_prompt(messages, **options)

    def add_request(self, request_id: str, prompt: Prompt, params: SamplingParams) -> None:
        """Queue a request; ``params.n`` > 1 makes it so many requests of the core.

        Args:
            request_id: unique among live requests, and among the ids ``f"{request_id}#{index}"`` of their samples.
            prompt: text or token ids.
            params: how to sample.

        Raises:
            RequestError: the request is wrong; the engine and all other requests go on.
        """
        requests, text = self._inputs.process(request_id, prompt, params)
        if self._outputs.is_live(request_id):
            raise RequestError(f"request_id {request_id!r} is in use by an unfinished request; choose another")
        for index, request in enumerate(requests):
            try:
                self.core.add_request(request)  # refuses the id of a sample that is in use
            except BaseException:
                for added in requests[:index]:
                    self.core.abort(added.request_id)
                raise
        self._inputs.accepted()
        self._outputs.add(request_id, requests, text)
        self.stats.num_prompt_tokens += requests[0].num_prompt_tokens

    def abort(self, request_id: str) -> list[RequestDelta]:
        """End a request in any state.

        Returns:
            A last delta for each of its samples that had not ended, the last of them with the final output; nothing
            when the request is unknown or has ended.
        """
        deltas, core_ids = self._outputs.abort(request_id)
        for core_id in core_ids:
            self.core.abort(core_id)
        return deltas

    def has_unfinished_requests(self) -> bool:
        """Whether ``step`` has anything to do."""
        return self.core.has_unfinished_requests()

    def step(self) -> list[RequestDelta]:
        """Run one step; returns what it added to each request that advanced or ended."""
        start = time.perf_counter()
        core_outputs = self.core.step()
        stepped = time.perf_counter()
        deltas, stopped_core_ids = self._outputs.process(core_outputs)
        for core_id in stopped_core_ids:
            self.core.abort(core_id)
        end = time.perf_counter()
        self.stats.num_output_tokens += sum(len(delta.new_token_ids) for delta in deltas)
        self.stats.add_step(self.core.last_times, output_s=end - stepped, total_s=end - start)
        return deltas

    def shutdown(self) -> None:
        """End the core, and its process if it has one; whatever was running gives nothing more."""
        self.core.shutdown()

    def _load_tokenizer(self) -> Tokenizer | None:
        if self.config.skip_tokenizer_init:
            return None
        if self.config.tokenizer is not None:
            return Tokenizer.from_directory(Path(self.config.tokenizer).expanduser())
        if isinstance(self.source, GgufSource):
            files = self.source.file.tokenizer_files()
            config = json.loads(files["tokenizer_config.json"])
            return Tokenizer.from_json(files["tokenizer.json"], config, source=str(self.source.path))
        return Tokenizer.from_directory(self.source.path)
