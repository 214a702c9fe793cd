"""What a front end and an engine core in another process say to each other: msgpack, never pickle.

Owns the structs and the way there and back for Request and EngineCoreOutput. It knows no sockets.
Every message is an array that starts with its type's name; ``Hello`` goes first and carries PROTOCOL_VERSION, so two
versions of the package refuse each other before anything else is read.

Requests go by a number, their key: an id may be used again while outputs of its former owner are on their way.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec

from pico_vllm.engine.stats import StepTimes
from pico_vllm.errors import RequestError
from pico_vllm.kv_cache import CacheStats
from pico_vllm.outputs import EngineCoreOutput, TokenLogprobs
from pico_vllm.request import FinishReason, Request
from pico_vllm.sampling_params import SamplingParams, StructuredOutputsParams
from pico_vllm.scheduler_output import plain_value

#: Raised whenever a message changes its meaning or its fields.
PROTOCOL_VERSION = 3


class _Message(msgspec.Struct, tag=True, array_like=True, frozen=True, gc=False):
    """Tagged with the name of its class."""


# ------------------------------------------------------------------------------------------------ front end to core
class Start(_Message, frozen=True):
    """Build an engine core.

    Attributes:
        options: of ``EngineConfig.from_options``; the model is a path on this machine.
        log_level: from which level on the core logs, to stderr.
        num_threads: what torch may use; None = its own choice.
    """

    options: dict[str, Any]
    log_level: int
    num_threads: int | None


class AddRequest(_Message, frozen=True):
    """Queue a request.

    Attributes:
        params: the fields of its SamplingParams that are not at their defaults.
        stop_token_ids: all ids that end it, the model's own among them.
        cache_salt: whom it shares KV with.
        wants_reply: send an ``AddReply`` in any case; a refusal is always sent.
    """

    key: int
    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: dict[str, Any]
    seed: int
    stop_token_ids: tuple[int, ...]
    sample_index: int
    bad_words_token_ids: tuple[tuple[int, ...], ...]
    cache_salt: str | None
    wants_reply: bool


class Abort(_Message, frozen=True):
    """End a request; unknown and finished ones are no error."""

    request_id: str


class ResetPrefixCache(_Message, frozen=True):
    """Forget all KV that is kept for later hits; answered by a ``ResetReply`` with the same key."""

    key: int


class Shutdown(_Message, frozen=True):
    """End the process after the step in progress."""


# ------------------------------------------------------------------------------------------------ core to front end
class Hello(_Message, frozen=True):
    """The core's process is there."""

    version: int = PROTOCOL_VERSION


class Progress(_Message, frozen=True):
    """How far the start has come; total 0 = not known."""

    phase: str
    done: int
    total: int


class Ready(_Message, frozen=True):
    """The core is built; the fields of its EngineLimits."""

    limits: dict[str, int]


class Failed(_Message, frozen=True):
    """The core could not be built, or has failed for good; the process ends after this message."""

    error_type: str
    message: str
    traceback: str


class AddReply(_Message, frozen=True):
    """The core's word on one request: None, or why it is refused."""

    key: int
    error: str | None


class ResetReply(_Message, frozen=True):
    """Whether the prefix cache has been reset: not while a request ran."""

    key: int
    is_done: bool
    cache: CacheStats


#: The fields of a TokenLogprobs.
LogprobsFields = tuple[tuple[int, ...], tuple[float, ...], int]


class RequestStep(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """An EngineCoreOutput under the key of its request."""

    key: int
    new_token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    stop_reason: int | None
    logprobs: tuple[LogprobsFields, ...]
    prompt_logprobs: tuple[LogprobsFields, ...]
    num_cached_tokens: int = 0


class StepOutputs(_Message, frozen=True):
    """What a step gave. ``times`` are also of the steps before it that gave nothing, and so sent nothing."""

    steps: tuple[RequestStep, ...]
    times: StepTimes
    cache: CacheStats


ToCore = Start | AddRequest | Abort | ResetPrefixCache | Shutdown
FromCore = Hello | Progress | Ready | Failed | AddReply | ResetReply | StepOutputs


_encoder = msgspec.msgpack.Encoder(enc_hook=plain_value)
_to_core_decoder = msgspec.msgpack.Decoder(ToCore)
_from_core_decoder = msgspec.msgpack.Decoder(FromCore)

encode = _encoder.encode
decode_to_core = _to_core_decoder.decode
decode_from_core = _from_core_decoder.decode


# ------------------------------------------------------------------------------------------------ there and back
def encode_request(key: int, request: Request, *, wants_reply: bool = False) -> bytes:
    """An ``AddRequest``, encoded.

    Raises:
        RequestError: it holds logits processors, or a value that msgpack has no place for; both are named.
    """
    if request.params.logits_processors:
        raise RequestError(
            "logits_processors are functions and cannot be sent to an engine core in another process: use "
            "engine_core_process=False"
        )
    message = AddRequest(
        key=key,
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        params=_fields_of(request.params),
        seed=request.seed,
        stop_token_ids=tuple(sorted(request.stop_token_ids)),
        sample_index=request.sample_index,
        bad_words_token_ids=request.bad_words_token_ids,
        cache_salt=request.cache_salt,
        wants_reply=wants_reply,
    )
    try:
        return encode(message)
    except UnicodeEncodeError as error:
        raise RequestError(f"{error.object!r} holds half a surrogate pair, which no UTF-8 has: remove it") from None
    except (OverflowError, TypeError, ValueError) as error:
        raise RequestError(f"the request cannot be sent to the engine core's process: {error}") from None


def decode_request(message: AddRequest) -> Request:
    """The request as it was when it was encoded, before the scheduler had seen it."""
    values = dict(message.params)
    if (structured := values.get("structured_outputs")) is not None:
        values["structured_outputs"] = StructuredOutputsParams(**structured)
    return Request(
        message.request_id,
        message.prompt_token_ids,
        SamplingParams(**values),
        seed=message.seed,
        eos_token_ids=message.stop_token_ids,
        sample_index=message.sample_index,
        bad_words_token_ids=message.bad_words_token_ids,
        cache_salt=message.cache_salt,
    )


def step_of(key: int, output: EngineCoreOutput) -> RequestStep:
    """An output as it is sent."""
    return RequestStep(
        key,
        output.new_token_ids,
        output.finish_reason,
        output.stop_reason,
        tuple([(entry.token_ids, entry.logprobs, entry.rank) for entry in output.logprobs]),
        tuple([(entry.token_ids, entry.logprobs, entry.rank) for entry in output.prompt_logprobs]),
        output.num_cached_tokens,
    )


def output_of(request_id: str, step: RequestStep) -> EngineCoreOutput:
    """An output as it was before it was sent."""
    return EngineCoreOutput(
        request_id,
        step.new_token_ids,
        step.finish_reason,
        step.stop_reason,
        tuple([TokenLogprobs(*fields) for fields in step.logprobs]),
        tuple([TokenLogprobs(*fields) for fields in step.prompt_logprobs]),
        step.num_cached_tokens,
    )


def _fields_of(params: SamplingParams | StructuredOutputsParams) -> dict[str, Any]:
    """The fields that are not at their defaults, by name: a new one needs no line here."""
    values = {field.name: (getattr(params, field.name), field.default) for field in dataclasses.fields(params)}
    changed = {name: value for name, (value, default) in values.items() if value != default}
    if isinstance(structured := changed.get("structured_outputs"), StructuredOutputsParams):
        changed["structured_outputs"] = _fields_of(structured)
    return changed
