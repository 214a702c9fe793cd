"""InputProcessor: from what a client sends to a Request, or to an error the client can act on."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pico_vllm.errors import RequestError
from pico_vllm.kernels.philox import derive_seed
from pico_vllm.request import Request
from pico_vllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from pico_vllm.config import ModelConfig
    from pico_vllm.engine.engine_core import EngineLimits
    from pico_vllm.engine.tokenizer import Tokenizer

#: A prompt: text, token ids, or {"prompt": text} / {"prompt_token_ids": ids} as in vLLM.
Prompt = str | Sequence[int] | Mapping[str, Any]


class InputProcessor:
    """Tokenises, validates and completes requests. Keeps a counter of requests and nothing else."""

    def __init__(
        self, tokenizer: Tokenizer | None, model_config: ModelConfig, limits: EngineLimits, engine_seed: int
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = model_config.vocab_size
        self._eos_token_ids = model_config.eos_token_ids
        self._limits = limits
        self._engine_seed = engine_seed
        self._num_requests = 0

    def process(self, request_id: str, prompt: Prompt, params: SamplingParams) -> tuple[Request, str | None]:
        """Make a request.

        Args:
            request_id: unique among live requests.
            prompt: text or token ids.
            params: how to sample.

        Returns:
            The request, and the prompt's text if it came as text.

        Raises:
            RequestError: the prompt is empty, too long, not text or ids, or holds ids outside the vocabulary.
        """
        if not isinstance(params, SamplingParams):
            raise RequestError(f"params must be a SamplingParams, got {type(params).__name__}")
        text, token_ids = self._text_and_ids(prompt)
        self._check_length(len(token_ids))
        if params.max_tokens is None:
            params = dataclasses.replace(params, max_tokens=self._limits.max_request_tokens - len(token_ids))
        seed = params.seed
        if seed is None:
            seed = derive_seed(self._engine_seed, self._num_requests)
        return Request(request_id, token_ids, params, seed=seed, eos_token_ids=self._eos_token_ids), text

    def accepted(self) -> None:
        """The core has taken the last request: the next one without a seed gets another. Refused ones don't count."""
        self._num_requests += 1

    def _text_and_ids(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, Mapping):
            if unknown := sorted(set(prompt) - {"prompt", "prompt_token_ids"}, key=str):
                raise RequestError(f"prompt has unknown keys {unknown}; known: 'prompt', 'prompt_token_ids'")
            if prompt.get("prompt_token_ids") is not None:
                return prompt.get("prompt"), self._checked_ids(prompt["prompt_token_ids"])
            prompt = prompt.get("prompt", "")
        if isinstance(prompt, str):
            return prompt, self._encode(prompt)
        return None, self._checked_ids(prompt)

    def _encode(self, text: str) -> list[int]:
        if self._tokenizer is None:
            raise RequestError("this engine has no tokenizer (skip_tokenizer_init=True): send token ids")
        return self._checked_ids(self._tokenizer.encode(text))

    def _checked_ids(self, token_ids: Any) -> list[int]:
        if isinstance(token_ids, bytes) or not isinstance(token_ids, Sequence):
            raise RequestError(f"a prompt must be text or a list of token ids, got {type(token_ids).__name__}")
        if len(token_ids) == 0:
            raise RequestError("the prompt is empty: at least one token is needed")
        for token_id in token_ids:
            if type(token_id) is not int:
                raise RequestError(f"token id {token_id!r} is a {type(token_id).__name__}, not an int")
        low, high = min(token_ids), max(token_ids)
        if low < 0 or high >= self._vocab_size:
            bad = low if low < 0 else high
            raise RequestError(f"token id {bad} is outside the vocabulary: ids go from 0 to {self._vocab_size - 1}")
        return list(token_ids)

    def _check_length(self, num_tokens: int) -> None:
        limits = self._limits
        if num_tokens >= limits.max_model_len:
            raise RequestError(
                f"the prompt has {num_tokens} tokens, but max_model_len={limits.max_model_len} must hold it and at "
                f"least one new token: shorten it to {limits.max_model_len - 1}"
            )
        if num_tokens >= limits.max_request_tokens:
            raise RequestError(
                f"the prompt has {num_tokens} tokens, but the KV cache of {limits.num_blocks} blocks x "
                f"{limits.block_size} tokens holds {limits.num_blocks * limits.block_size}: shorten it, or give the "
                "cache more memory"
            )
