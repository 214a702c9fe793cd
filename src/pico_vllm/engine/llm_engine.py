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
from pico_vllm.engine.engine_core import EngineCore
from pico_vllm.engine.input_processor import InputProcessor
from pico_vllm.engine.output_processor import OutputProcessor
from pico_vllm.engine.stats import EngineStats
from pico_vllm.engine.tokenizer import Tokenizer
from pico_vllm.errors import RequestError
from pico_vllm.models.source import GgufSource, find_model
from pico_vllm.request import FinishReason
from pico_vllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable

    from pico_vllm.engine.input_processor import Prompt
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
                "generation_config.json asks for %s, which is not implemented yet and not used",
                ", ".join(self.model_config.ignored_sampling),
            )
        self.tokenizer = self._load_tokenizer()
        load_progress = None if progress is None else lambda done, total: progress("load", done, total)
        self.core = EngineCore(config, self.model_config, self.source, progress=load_progress)
        self._inputs = InputProcessor(self.tokenizer, self.model_config, self.core.limits, config.seed)
        self._outputs = OutputProcessor(self.tokenizer)
        self.stats = EngineStats()

    @property
    def num_unfinished_requests(self) -> int:
        """Requests added and not ended."""
        return self._outputs.num_requests

    def default_sampling_params(self, **overrides: Any) -> SamplingParams:
        """What the checkpoint's ``generation_config.json`` asks for (greedy if it doesn't), but for ``overrides``."""
        defaults: dict[str, Any] = {"temperature": 0.0}
        return SamplingParams(**(defaults | self.model_config.default_sampling | overrides))

    def add_request(self, request_id: str, prompt: Prompt, params: SamplingParams) -> None:
        """Queue a request.

        Args:
            request_id: unique among live requests.
            prompt: text or token ids.
            params: how to sample.

        Raises:
            RequestError: the request is wrong; the engine and all other requests go on.
        """
        if self._outputs.is_live(request_id):
            raise RequestError(f"request_id {request_id!r} is in use by an unfinished request; choose another")
        request, text = self._inputs.process(request_id, prompt, params)
        self.core.add_request(request)
        self._inputs.accepted()
        self._outputs.add(request, text)
        self.stats.num_prompt_tokens += request.num_prompt_tokens

    def abort(self, request_id: str) -> RequestDelta | None:
        """End a request in any state; returns its last delta, or None when it is unknown or has ended."""
        self.core.abort(request_id)
        return self._outputs.abort(request_id, FinishReason.ABORT)

    def has_unfinished_requests(self) -> bool:
        """Whether ``step`` has anything to do."""
        return self.core.has_unfinished_requests()

    def step(self) -> list[RequestDelta]:
        """Run one step; returns what it added to each request that advanced or ended."""
        start = time.perf_counter()
        core_outputs = self.core.step()
        stepped = time.perf_counter()
        deltas = self._outputs.process(core_outputs)
        end = time.perf_counter()
        self.stats.num_output_tokens += sum(len(delta.new_token_ids) for delta in deltas)
        self.stats.add_step(self.core.last_times, output_s=end - stepped, total_s=end - start)
        return deltas

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
