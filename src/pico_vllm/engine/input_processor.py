"""InputProcessor: from what a client sends to the core's requests, or to an error the client can act on.

Knows the tokenizer and the model's limits; keeps nothing of a request. ``LLMEngine`` calls it. What can be judged
without them (ranges, types) ``SamplingParams`` has refused already.

Bad words
    Each is tokenised as it is and, unless it begins with white space itself, as the start of a word, with a space
    before it: " cat" and "cat" are different tokens. A sequence that ends in another one is dropped, for the shorter
    one masks the same last token. Another way to spell the word in tokens is not masked (as in vLLM and transformers).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from pico_vllm.errors import RequestError
from pico_vllm.kernels.philox import derive_seed
from pico_vllm.request import Request
from pico_vllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from pico_vllm.config import ModelConfig
    from pico_vllm.engine.engine_core import EngineLimits
    from pico_vllm.engine.tokenizer import Tokenizer

#: A prompt: text, token ids, or {"prompt": text} / {"prompt_token_ids": ids} as in vLLM, there also with a
#: "cache_salt": only prompts with the same one share KV in the prefix cache.
Prompt = str | Sequence[int] | Mapping[str, Any]


class InputProcessor:
    """Tokenises, validates and completes requests. Keeps a counter of prompts and nothing else."""

    def __init__(
        self, tokenizer: Tokenizer | None, model_config: ModelConfig, limits: EngineLimits, engine_seed: int
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = model_config.vocab_size
        #: What a prompt must be; msgspec looks at types and limits in one pass, at 5 ns an id.
        self._token_ids_type = tuple[Annotated[int, msgspec.Meta(ge=0, lt=self._vocab_size)], ...]
        self._eos_token_ids = model_config.eos_token_ids
        self._limits = limits
        self._engine_seed = engine_seed
        self._num_prompts = 0

    def process(self, request_id: str, prompt: Prompt, params: SamplingParams) -> tuple[list[Request], str | None]:
        """Make the core's requests: one a sample, with one seed.

        Args:
            request_id: unique among live requests; it is the core's id too, or ``f"{request_id}#{index}"`` if
                ``params.n`` > 1.
            prompt: text or token ids.
            params: how to sample.

        Returns:
            The ``params.n`` requests, and the prompt's text if it came as text.

        Raises:
            RequestError: the prompt is empty, too long, not text or ids, or holds ids outside the vocabulary; the
                parameters name ids outside the vocabulary, or need a tokenizer and there is none.
        """
        if not isinstance(request_id, str) or not request_id:
            raise RequestError(f"request_id={request_id!r} must be a text of at least one character")
        _check_unicode("request_id", request_id)
        if not isinstance(params, SamplingParams):
            raise RequestError(f"params must be a SamplingParams, got {type(params).__name__}")
        self._check_params(params)
        bad_words_token_ids = self._bad_words_token_ids(params.bad_words)
        text, token_ids = self._text_and_ids(prompt)
        cache_salt = _cache_salt(prompt)
        self._check_length(len(token_ids))
        if params.max_tokens is None:
            params = dataclasses.replace(params, max_tokens=self._limits.max_request_tokens - len(token_ids))
        seed = params.seed
        if seed is None:  # who takes the best token draws nothing
            seed = 0 if params.is_greedy else derive_seed(self._engine_seed, self._num_prompts)
        first, *others = sample_ids(request_id, params.n)
        options: dict[str, Any] = {
            "seed": seed,
            "eos_token_ids": self._eos_token_ids,
            "bad_words_token_ids": bad_words_token_ids,
            "cache_salt": cache_salt,
        }
        requests = [Request(first, token_ids, params, **options)]
        if others and params.prompt_logprobs is not None:  # the prompt is the same: once is enough
            params = dataclasses.replace(params, prompt_logprobs=None)
        requests += [
            Request(core_id, token_ids, params, sample_index=index, **options)
            for index, core_id in enumerate(others, start=1)
        ]
        return requests, text

    def accepted(self) -> None:
        """The core has taken the last prompt: the next one without a seed gets another. Refused ones don't count."""
        self._num_prompts += 1

    def chat_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        cache_salt: str | None = None,
    ) -> Prompt:
        """Return the prompt that a conversation makes, as text and as ids; the template writes its special tokens.

        Raises:
            RequestError: there is no tokenizer or no chat template, a message is wrong (named by its index), or the
                template refuses them.
        """
        if self._tokenizer is None:
            raise RequestError("this engine has no tokenizer (skip_tokenizer_init=True): send token ids, not messages")
        if not isinstance(messages, Sequence) or isinstance(messages, bytes):
            raise RequestError(
                f'messages must be a list of {{"role": ..., "content": ...}}, not a {type(messages).__name__}'
            )
        text = self._tokenizer.apply_chat_template(
            messages,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
        )
        token_ids = self._tokenizer.encode(text, add_special_tokens=False)
        return {"prompt": text, "prompt_token_ids": token_ids, "cache_salt": cache_salt}

    def _check_params(self, params: SamplingParams) -> None:
        """Refuse what doesn't fit this model and this engine."""
        for name in ("logit_bias", "allowed_token_ids", "stop_token_ids"):
            token_ids = getattr(params, name)
            if token_ids and max(token_ids) >= self._vocab_size:
                raise RequestError(
                    f"{name} holds the token id {max(token_ids)}, outside the vocabulary: ids go from 0 to "
                    f"{self._vocab_size - 1}"
                )
        for text in params.stop:
            _check_unicode("stop", text)
        for name in ("stop", "bad_words"):
            texts = getattr(params, name)
            if texts and self._tokenizer is None:
                remedy = "use stop_token_ids" if name == "stop" else "use logit_bias or allowed_token_ids"
                raise RequestError(
                    f"{name} needs a tokenizer, and this engine has none (skip_tokenizer_init=True): {remedy}"
                )

    def _bad_words_token_ids(self, bad_words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The token sequences that must not be completed; what they are is told at the top of this file."""
        if not bad_words:
            return ()
        assert self._tokenizer is not None
        sequences: dict[tuple[int, ...], None] = {}
        for word in bad_words:
            variants = [word] if word[0].isspace() else [word, " " + word]
            encoded = [tuple(self._tokenizer.encode(variant, add_special_tokens=False)) for variant in variants]
            if not encoded[0]:
                raise RequestError(f"bad_words holds {word!r}, which this model's tokenizer makes no token of: drop it")
            sequences |= dict.fromkeys(encoded)
        return tuple(ids for ids in sequences if not any(ids[start:] in sequences for start in range(1, len(ids))))

    def _text_and_ids(self, prompt: Prompt) -> tuple[str | None, tuple[int, ...]]:
        if isinstance(prompt, Mapping):
            if unknown := sorted(set(prompt) - {"prompt", "prompt_token_ids", "cache_salt"}, key=str):
                raise RequestError(
                    f"prompt has unknown keys {unknown}; known: 'prompt', 'prompt_token_ids', 'cache_salt'"
                )
            if prompt.get("prompt_token_ids") is not None:
                return prompt.get("prompt"), self._checked_ids(prompt["prompt_token_ids"])
            prompt = prompt.get("prompt", "")
        if isinstance(prompt, str):
            return prompt, self._encode(prompt)
        return None, self._checked_ids(prompt)

    def _encode(self, text: str) -> tuple[int, ...]:
        if self._tokenizer is None:
            raise RequestError("this engine has no tokenizer (skip_tokenizer_init=True): send token ids")
        return self._checked_ids(self._tokenizer.encode(text))

    def _checked_ids(self, token_ids: Any) -> tuple[int, ...]:
        if isinstance(token_ids, bytes) or not isinstance(token_ids, Sequence):
            raise RequestError(f"a prompt must be text or a list of token ids, got {type(token_ids).__name__}")
        if len(token_ids) == 0:
            raise RequestError("the prompt is empty: at least one token is needed")
        try:
            return msgspec.convert(list(token_ids), self._token_ids_type)
        except msgspec.ValidationError:
            raise self._wrong_ids(token_ids) from None

    def _wrong_ids(self, token_ids: Sequence[Any]) -> RequestError:
        """What is wrong with ids that are no prompt."""
        if others := [t for t in token_ids if isinstance(t, bool) or not isinstance(t, int)]:
            return RequestError(f"token id {others[0]!r} is a {type(others[0]).__name__}, not an int")
        low, high = int(min(token_ids)), int(max(token_ids))
        bad = low if low < 0 else high
        shown = bad if bad.bit_length() <= 128 else f"of {bad.bit_length()} bits"
        return RequestError(f"token id {shown} is outside the vocabulary: ids go from 0 to {self._vocab_size - 1}")

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


def _cache_salt(prompt: Prompt) -> str | None:
    salt = prompt.get("cache_salt") if isinstance(prompt, Mapping) else None
    if salt is None:
        return None
    if not isinstance(salt, str) or not salt:
        raise RequestError(f"cache_salt={salt!r} must be a text of at least one character, or be left out")
    _check_unicode("cache_salt", salt)
    return salt


def _check_unicode(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{name} {text!r} is not valid Unicode: half a surrogate pair at character {error.start}"
        ) from None


def sample_ids(request_id: str, n: int) -> list[str]:
    """The core's ids of a client's request, one a sample."""
    return [request_id] if n == 1 else [f"{request_id}#{index}" for index in range(n)]
