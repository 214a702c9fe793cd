"""SamplingParams: what a client may ask of the sampler and of the stop checks. Frozen, validated when it is made.

Names, defaults and meanings are vLLM's (and through it OpenAI's) unless the docstring says otherwise. The order in
which they act is that of ``docs/sampling.md``. Anything that is not a field here is refused by name.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from pico_vllm.errors import RequestError

#: Below this temperature the softmax is a one-hot in fp32 anyway, so sampling is greedy.
MIN_TEMPERATURE = 1e-5
MAX_SEED = 2**64 - 1
#: Token ids, and counts of them, are int32 on the device.
MAX_TOKEN_ID = 2**31 - 1
MAX_LOGPROBS = 100
MAX_N = 256
MAX_LOGIT_BIAS = 100.0

#: A processor of logits in the engine's process: (output token ids so far, logits [vocab_size] fp32) -> logits.
LogitsProcessor = Callable[[Sequence[int], Any], Any]


@dataclass(frozen=True, slots=True)
class StructuredOutputsParams:
    """What the output must look like; exactly one of the four.

    Args:
        json: a JSON schema, as a mapping or as JSON text.
        regex: a regular expression the whole output matches.
        choice: the output is one of these texts.
        grammar: a context-free grammar (Lark syntax).

    Raises:
        RequestError: none or several are given, or one has the wrong type. Whether it compiles is known when the
            request is added.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        given = [field.name for field in fields(self) if getattr(self, field.name) is not None]
        if len(given) != 1:
            raise RequestError(
                f"structured_outputs takes one of json, regex, choice, grammar; got {', '.join(given) or 'none'}"
            )
        if isinstance(self.json, Mapping):
            try:
                object.__setattr__(self, "json", json.dumps(self.json, allow_nan=False))
            except (TypeError, ValueError, RecursionError) as error:
                raise RequestError(f"structured_outputs.json is not a JSON schema: {error}") from None
        if self.choice is not None:
            object.__setattr__(self, "choice", _strings("structured_outputs.choice", self.choice))
            if not self.choice:
                raise RequestError("structured_outputs.choice is empty: nothing could be generated")
        for name in ("json", "regex", "grammar"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise RequestError(f"structured_outputs.{name}={value!r} must be text")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens, and when to stop.

    Args:
        n: completions of the prompt, 1 … 256; each is sampled on its own (its own sample index of the seed).
        temperature: 0 (or below 1e-5) takes the best token after masks, bias and penalties, whatever top_k, top_p,
            min_p and seed say; otherwise logits are divided by it.
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        top_p: keep the smallest set of most likely tokens whose probability reaches top_p; in (0, 1].
        min_p: keep tokens at least min_p times as likely as the most likely one; in [0, 1].
        repetition_penalty: 0.001 … 1000; logits of every token of prompt and output are divided by it where positive
            and multiplied where negative (Hugging Face's meaning); 1 = off.
        presence_penalty: -2 … 2, subtracted from the logit of every token that the output holds.
        frequency_penalty: -2 … 2, subtracted as often as the output holds the token.
        logit_bias: {token id: -100 … 100} added to the logits.
        bad_words: texts that must not appear; the token that would complete one is masked.
        allowed_token_ids: only these may be sampled.
        logits_processors: functions (output token ids, logits [vocab_size] fp32) -> logits, run in the engine's process
            after all of the above; slow, and refused by an engine whose core is in another process.
        seed: 0 … 2**64-1. The same seed draws the same numbers alone, in any batch and after preemption, so the tokens
            are the same unless the rounding of the logits, which in 16 bits depends on the batch, turns a near-tie.
            None: the engine draws one from its own seed and the request's number.
        max_tokens: how many tokens at most, >= 1; None: as many as max_model_len and the KV cache allow.
        min_tokens: before so many tokens no stop token, EOS or stop string ends the request.
        stop: texts that end the request; the output ends before the first of them.
        stop_token_ids: generation ends after any of these; the token is kept in ``token_ids``.
        include_stop_str_in_output: keep the stop text (and a stop token's text) in the output.
        ignore_eos: do not stop at the model's own end-of-sequence tokens.
        logprobs: log-probabilities of the chosen token and of so many best tokens, 0 … 100, of the distribution that
            the model gives, before masks, penalties and temperature. None = none.
        prompt_logprobs: the same for every prompt token but the first.
        skip_special_tokens: leave special tokens out of the text (never out of ``token_ids``).
        detokenize: make text at all; False saves the time and works without a tokenizer.
        structured_outputs: what the output must look like.

    Raises:
        RequestError: a value is out of range or of the wrong type; names it and the limit.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    bad_words: tuple[str, ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    logits_processors: tuple[LogitsProcessor, ...] = ()
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    detokenize: bool = True
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        self._normalise()
        self._check_ranges()
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens={self.min_tokens} exceeds max_tokens={self.max_tokens}: lower it")
        if self.stop and not self.detokenize:
            raise RequestError("stop needs text, and detokenize=False makes none: use stop_token_ids")

    @property
    def is_greedy(self) -> bool:
        """Whether the next token is the argmax."""
        return self.temperature < MIN_TEMPERATURE

    @property
    def has_penalties(self) -> bool:
        """Whether the next token depends on counts of earlier ones."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def _normalise(self) -> None:
        """Bring sequences to tuples and single texts to tuples of one."""
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        object.__setattr__(self, "stop", _strings("stop", stop))
        object.__setattr__(self, "bad_words", _strings("bad_words", self.bad_words))
        object.__setattr__(self, "stop_token_ids", _int_tuple("stop_token_ids", self.stop_token_ids))
        object.__setattr__(self, "logits_processors", _functions("logits_processors", self.logits_processors))
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", _int_tuple("allowed_token_ids", self.allowed_token_ids))
            if not self.allowed_token_ids:
                raise RequestError("allowed_token_ids is empty: nothing could be sampled")
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", _bias(self.logit_bias) or None)

    def _check_ranges(self) -> None:
        _check_int("n", self.n, low=1, high=MAX_N)
        _check_number("temperature", self.temperature, low=0.0)
        _check_int("top_k", self.top_k, low=-1, high=MAX_TOKEN_ID)
        _check_number("top_p", self.top_p, low=0.0, high=1.0)
        if self.top_p == 0.0:
            raise RequestError("top_p=0 keeps no token: it must be in (0, 1]; for greedy decoding use temperature=0")
        _check_number("min_p", self.min_p, low=0.0, high=1.0)
        # Not just above 0: in fp32 1e-50 is 0, and a masked logit times 0 is NaN.
        _check_number("repetition_penalty", self.repetition_penalty, low=0.001, high=1000.0)
        _check_number("presence_penalty", self.presence_penalty, low=-2.0, high=2.0)
        _check_number("frequency_penalty", self.frequency_penalty, low=-2.0, high=2.0)
        if self.seed is not None:
            _check_int("seed", self.seed, low=0, high=MAX_SEED)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, low=1)
        _check_int("min_tokens", self.min_tokens, low=0)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), low=0, high=MAX_LOGPROBS)
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "detokenize"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name}={getattr(self, name)!r} must be True or False")
        if self.structured_outputs is not None and not isinstance(self.structured_outputs, StructuredOutputsParams):
            raise RequestError(f"structured_outputs={self.structured_outputs!r} must be a StructuredOutputsParams")


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


def _strings(name: str, values: object) -> tuple[str, ...]:
    if values is None:
        return ()
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise RequestError(f"{name}={values!r} must be a list of texts")
    texts = tuple(values)
    for text in texts:
        if not isinstance(text, str) or not text:
            raise RequestError(f"{name} holds {text!r}: each must be a text of at least one character")
    return texts


def _functions(name: str, values: object) -> tuple[LogitsProcessor, ...]:
    if values is None:
        return ()
    if not isinstance(values, Iterable):
        raise RequestError(f"{name}={values!r} must be a list of functions")
    functions = tuple(values)
    for function in functions:
        if not callable(function):
            raise RequestError(f"{name} holds {function!r}, which cannot be called")
    return functions


def _bias(values: object) -> dict[int, float]:
    if not isinstance(values, Mapping):
        raise RequestError(f"logit_bias={values!r} must map token ids to numbers")
    bias: dict[int, float] = {}
    for token_id, value in values.items():
        is_text = isinstance(token_id, str) and token_id.isdecimal() and len(token_id) < 20  # as JSON has keys
        key: Any = int(token_id) if is_text else token_id
        _check_int("logit_bias key", key, low=0, high=MAX_TOKEN_ID)
        _check_number(f"logit_bias[{key}]", value, low=-MAX_LOGIT_BIAS, high=MAX_LOGIT_BIAS)
        bias[key] = float(value)
    return bias
