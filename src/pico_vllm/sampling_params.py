"""SamplingParams: what a client may ask of the sampler and of the stop checks. Frozen, validated when it is made.

Names and defaults are vLLM's where the meaning is the same. Fields in ``_NOT_IMPLEMENTED`` are part of the interface
already; any value but the default is refused by name, so that nothing a client asks for is ignored.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

from pico_vllm.errors import RequestError

#: Below this temperature the softmax is a one-hot in fp32 anyway, so sampling is greedy.
MIN_TEMPERATURE = 1e-5
MAX_SEED = 2**64 - 1
#: Token ids, and counts of them, are int32 on the device.
MAX_TOKEN_ID = 2**31 - 1

_NOT_IMPLEMENTED = (
    "n",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "bad_words",
    "allowed_token_ids",
    "min_tokens",
    "stop",
    "include_stop_str_in_output",
    "logprobs",
    "prompt_logprobs",
    "structured_outputs",
)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens, and when to stop.

    Args:
        temperature: 0 (or below 1e-5) is greedy whatever top_k, top_p and seed say; otherwise logits are divided by it.
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        top_p: keep the smallest set of most likely tokens whose probability reaches top_p; in (0, 1].
        seed: 0 … 2**64-1. The same seed draws the same numbers alone, in any batch and after preemption, so the tokens
            are the same unless the rounding of the logits, which in 16 bits depends on the batch, turns a near-tie.
            None: the engine draws one from its own seed and the request's number.
        max_tokens: how many tokens at most, >= 1; None: as many as max_model_len and the KV cache allow.
        stop_token_ids: generation ends after any of these; the token is kept in ``token_ids``.
        ignore_eos: do not stop at the model's own end-of-sequence tokens.
        skip_special_tokens: leave special tokens out of the text (never out of ``token_ids``).
        detokenize: make text at all; False saves the time and works without a tokenizer.

    The remaining fields are refused unless they hold their default.

    Raises:
        RequestError: a value is out of range, or asks for something that is not implemented.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    max_tokens: int | None = 16
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True
    # Not implemented yet.
    n: int = 1
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    min_tokens: int = 0
    stop: str | list[str] | None = None
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_outputs: Any = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop_token_ids", _int_tuple("stop_token_ids", self.stop_token_ids))
        _check_number("temperature", self.temperature, low=0.0)
        _check_number("top_p", self.top_p, low=0.0, high=1.0)
        if self.top_p == 0.0:
            raise RequestError("top_p=0 keeps no token: it must be in (0, 1]; for greedy decoding use temperature=0")
        _check_int("top_k", self.top_k, low=-1, high=MAX_TOKEN_ID)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, low=1)
        if self.seed is not None:
            _check_int("seed", self.seed, low=0, high=MAX_SEED)
        for name in ("ignore_eos", "skip_special_tokens", "detokenize"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name}={getattr(self, name)!r} must be True or False")
        for field in fields(self):
            if field.name in _NOT_IMPLEMENTED and not _is_default(getattr(self, field.name), field.default):
                raise RequestError(
                    f"{field.name}={getattr(self, field.name)!r} is not implemented yet; leave it at {field.default!r}"
                )

    @property
    def is_greedy(self) -> bool:
        """Whether the next token is the argmax."""
        return self.temperature < MIN_TEMPERATURE


def _is_default(value: object, default: object) -> bool:
    # n=1.0 is the default 1; n=True is a mistake although True == 1.
    return value == default and isinstance(value, bool) == isinstance(default, bool)


def _check_number(name: str, value: object, *, low: float, high: float | None = None) -> None:
    limit = f"{low:g} … {high:g}" if high is not None else f">= {low:g}"
    # Not math.isfinite: that raises OverflowError for an int like 10**400. NaN compares False with everything.
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        raise RequestError(f"{name}={value!r} must be a finite number, {limit}")
    if value < low or (high is not None and value > high):
        raise RequestError(f"{name}={value!r} is out of range: it must be {limit}")


def _check_int(name: str, value: object, *, low: int, high: int | None = None) -> None:
    limit = f"{low} … {high}" if high is not None else f">= {low}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name}={value!r} must be an integer, {limit}")
    if value < low or (high is not None and value > high):
        raise RequestError(f"{name}={value!r} is out of range: it must be {limit}")


def _int_tuple(name: str, values: object) -> tuple[int, ...]:
    if values is None:
        return ()
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise RequestError(f"{name}={values!r} must be a list of token ids")
    ids = tuple(values)
    for value in ids:
        _check_int(name, value, low=0, high=MAX_TOKEN_ID)
    return ids
