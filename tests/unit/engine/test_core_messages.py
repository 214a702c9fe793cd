"""What crosses the border to a core in another process comes back as it was: every field of every type, any value."""

import dataclasses
import math

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pico_vllm import EngineConfig, SamplingParams
from pico_vllm.engine.core_client import _start_error
from pico_vllm.engine.core_messages import (
    PROTOCOL_VERSION,
    Abort,
    AddReply,
    Failed,
    Hello,
    Progress,
    Ready,
    ResetPrefixCache,
    ResetReply,
    Shutdown,
    Start,
    StepOutputs,
    decode_from_core,
    decode_request,
    decode_to_core,
    encode,
    encode_request,
    output_of,
    step_of,
)
from pico_vllm.engine.stats import StepTimes
from pico_vllm.errors import ConfigError, EngineDeadError, RequestError, WeightLoadError
from pico_vllm.kv_cache import CacheStats
from pico_vllm.outputs import EngineCoreOutput, TokenLogprobs
from pico_vllm.request import FinishReason, Request
from pico_vllm.sampling_params import MAX_SEED, MAX_TOKEN_ID, StructuredOutputsParams

CACHE = CacheStats(10, 4, 3, 2, 1, 0)

token_ids = st.integers(0, MAX_TOKEN_ID)
id_tuples = st.lists(token_ids, max_size=4).map(tuple)
texts = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8)
text_tuples = st.lists(texts, max_size=3).map(tuple)
flags = st.booleans()


def numbers(low, high=None):
    """Within the bounds, among them whole numbers given as int."""
    return st.floats(low, high, allow_nan=False, allow_infinity=False) | st.integers(math.ceil(low), int(high or 2**40))


structured_outputs = st.one_of(
    st.builds(StructuredOutputsParams, json=st.just({"type": "object"}) | texts),
    st.builds(StructuredOutputsParams, regex=texts),
    st.builds(StructuredOutputsParams, choice=st.lists(texts, min_size=1, max_size=3)),
    st.builds(StructuredOutputsParams, grammar=texts),
)
PARAMS = {
    "n": st.integers(1, 256),
    "temperature": numbers(0.0),
    "top_k": st.integers(-1, MAX_TOKEN_ID),
    "top_p": numbers(1e-9, 1.0),
    "min_p": numbers(0.0, 1.0),
    "repetition_penalty": numbers(1e-3, 1e3),
    "presence_penalty": numbers(-2.0, 2.0),
    "frequency_penalty": numbers(-2.0, 2.0),
    "logit_bias": st.none() | st.dictionaries(token_ids, numbers(-100.0, 100.0), max_size=4),
    "bad_words": text_tuples,
    "allowed_token_ids": st.none() | st.lists(token_ids, min_size=1, max_size=4),
    "seed": st.none() | st.integers(0, MAX_SEED),
    "max_tokens": st.integers(10, 2**63 - 1),
    "min_tokens": st.integers(0, 10),
    "stop": text_tuples,
    "stop_token_ids": id_tuples,
    "include_stop_str_in_output": flags,
    "ignore_eos": flags,
    "logprobs": st.none() | st.integers(0, 100),
    "prompt_logprobs": st.none() | st.integers(0, 100),
    "skip_special_tokens": flags,
    "detokenize": flags,
    "structured_outputs": st.none() | structured_outputs,
}
params = (
    st.fixed_dictionaries({}, optional=PARAMS)
    .filter(lambda values: values.get("detokenize", True) or not values.get("stop"))
    .map(lambda values: SamplingParams(**values))
)
requests = st.builds(
    Request,
    texts,
    st.lists(token_ids, min_size=1, max_size=5),
    params,
    seed=st.integers(0, MAX_SEED),
    eos_token_ids=id_tuples,
    sample_index=st.integers(0, 255),
    bad_words_token_ids=st.lists(id_tuples, max_size=3).map(tuple),
    cache_salt=st.none() | texts,
)
token_logprobs = st.builds(
    lambda entries, rank: TokenLogprobs(tuple(i for i, _ in entries), tuple(p for _, p in entries), rank),
    st.lists(st.tuples(token_ids, st.floats(max_value=0.0, allow_nan=False)), max_size=3),
    st.integers(1, MAX_TOKEN_ID),
)
OUTPUT = {
    "request_id": texts,
    "new_token_ids": id_tuples,
    "finish_reason": st.none() | st.sampled_from(FinishReason),
    "stop_reason": st.none() | token_ids,
    "logprobs": st.lists(token_logprobs, max_size=2).map(tuple),
    "prompt_logprobs": st.lists(token_logprobs, max_size=3).map(tuple),
    "num_cached_tokens": token_ids,
}
outputs = st.fixed_dictionaries(OUTPUT).map(lambda values: EngineCoreOutput(**values))


def round_trip(request, **options):
    return decode_request(decode_to_core(encode_request(7, request, **options)))


def request_of(**overrides):
    return Request("r", [1, 2], SamplingParams(**overrides))


# ------------------------------------------------------------------------------------------------------- requests
def test_no_field_of_a_request_or_an_output_is_left_out_of_these_tests():
    assert {field.name for field in dataclasses.fields(SamplingParams)} - set(PARAMS) == {"logits_processors"}
    assert {field.name for field in dataclasses.fields(EngineCoreOutput)} == set(OUTPUT)


@given(requests)
def test_a_request_comes_back_with_every_field(request):
    restored = round_trip(request)
    for name in Request.__slots__:
        assert getattr(restored, name) == getattr(request, name), name
        assert type(getattr(restored, name)) is type(getattr(request, name)), name


@given(requests, st.integers(0, 2**63 - 1), st.booleans())
def test_an_encoded_request_carries_its_key_and_whether_it_waits(request, key, wants_reply):
    message = decode_to_core(encode_request(key, request, wants_reply=wants_reply))
    assert (message.key, message.wants_reply) == (key, wants_reply)


def test_only_what_is_not_a_default_is_sent():
    message = decode_to_core(encode_request(0, request_of(temperature=0.5, max_tokens=16, logprobs=0)))
    assert message.params == {"temperature": 0.5, "logprobs": 0}


def test_logits_processors_are_refused_with_the_remedy():
    with pytest.raises(RequestError, match=r"logits_processors.*engine_core_process=False"):
        encode_request(0, request_of(logits_processors=[lambda ids, logits: logits]))


def test_numbers_that_derive_from_pythons_own_are_sent_as_those():
    params = round_trip(request_of(temperature=np.float64(0.25))).params
    assert (params.temperature, type(params.temperature)) == (0.25, float)


@pytest.mark.parametrize(
    ("params", "words"),
    [({"stop": ["a\ud800"]}, ["\\ud800", "UTF-8"]), ({"max_tokens": 10**30}, ["cannot be sent"])],
    ids=["surrogate", "big"],
)
def test_what_msgpack_has_no_place_for_is_that_requests_error(params, words):
    with pytest.raises(RequestError) as error:
        encode_request(0, request_of(**params))
    assert all(word in str(error.value) for word in words), error.value


# -------------------------------------------------------------------------------------------------------- outputs
@given(st.lists(outputs, max_size=4))
def test_outputs_come_back_with_every_field(step):
    times = StepTimes(num_steps=3, num_tokens=5, num_seqs=2, schedule_s=0.5, launch_s=4.0, busy_s=3.0, num_late_steps=2)
    message = StepOutputs(tuple(step_of(key, output) for key, output in enumerate(step)), times, CACHE)
    restored = decode_from_core(encode(message))
    assert (restored.times, restored.cache) == (times, CACHE)
    assert [sent.key for sent in restored.steps] == list(range(len(step)))
    for sent, output in zip(restored.steps, step, strict=True):
        assert output_of(output.request_id, sent) == output


def test_a_finish_reason_is_the_enum_again():
    sent = decode_from_core(
        encode(StepOutputs((step_of(1, EngineCoreOutput("r", (4,), FinishReason.STOP)),), StepTimes(), CACHE))
    )
    assert output_of("r", sent.steps[0]).finish_reason is FinishReason.STOP


def test_an_impossible_logprob_survives():
    entry = TokenLogprobs((3, 4), (-math.inf, -0.0), 300)
    sent = decode_from_core(
        encode(StepOutputs((step_of(0, EngineCoreOutput("r", (3,), logprobs=(entry,))),), StepTimes(), CACHE))
    )
    assert output_of("r", sent.steps[0]).logprobs == (entry,)


# -------------------------------------------------------------------------------------------------- other messages
@pytest.mark.parametrize(
    "message",
    [Start({"model": "/m", "block_size": 8}, 20, None), Abort("r"), ResetPrefixCache(3), Shutdown()],
    ids=lambda m: type(m).__name__,
)
def test_messages_to_the_core_come_back(message):
    assert decode_to_core(encode(message)) == message


@pytest.mark.parametrize(
    "message",
    [
        Hello(),
        Progress("load", 1, 2),
        Ready({"num_blocks": 3}),
        Failed("E", "m", "t"),
        AddReply(1, None),
        AddReply(1, "no"),
        ResetReply(3, True, CacheStats(1, 2, 3, 4, 5, 6)),
    ],
    ids=lambda message: type(message).__name__,
)
def test_messages_from_the_core_come_back(message):
    assert decode_from_core(encode(message)) == message


def test_the_first_message_can_be_read_whatever_the_version():
    assert encode(Hello()) == msgspec.msgpack.encode(["Hello", PROTOCOL_VERSION])
    later = msgspec.msgpack.encode(["Hello", PROTOCOL_VERSION + 1, "a field of a later version"])
    assert decode_from_core(later).version == PROTOCOL_VERSION + 1


def test_a_message_of_the_wrong_direction_is_refused():
    with pytest.raises(msgspec.ValidationError):
        decode_to_core(encode(Hello()))


OPTIONS = {
    "model": "/some/model",
    "revision": "main",
    "tokenizer": "/some/tokenizer",
    "skip_tokenizer_init": False,
    "dtype": "float16",
    "load_format": "dummy",
    "device": "cuda:1",
    "backend": "reference",
    "enforce_eager": True,
    "seed": 2**63 - 1,
    "engine_core_process": True,
    "block_size": 8,
    "num_gpu_blocks_override": 5,
    "kv_cache_memory_bytes": 2**40,
    "gpu_memory_utilization": 0.25,
    "enable_prefix_caching": False,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 77,
    "target_itl_ms": 0.0,
    "max_model_len": 50,
    "enable_chunked_prefill": False,
    "async_scheduling": True,
    "tensor_parallel_size": 3,
    "async_tensor_parallel": False,
}


def test_a_configuration_comes_back_with_every_option():
    assert EngineConfig.from_options(**OPTIONS).to_options() == OPTIONS
    start = decode_to_core(encode(Start(OPTIONS, 20, 1)))
    assert EngineConfig.from_options(**start.options) == EngineConfig.from_options(**OPTIONS)
    assert EngineConfig.from_options(**EngineConfig().to_options()) == EngineConfig()


# --------------------------------------------------------------------------------------------------- start errors
@pytest.mark.parametrize("kind", [ConfigError, WeightLoadError])
def test_our_own_errors_at_the_start_keep_type_and_message(kind):
    error = _start_error(Failed(kind.__name__, "no such tensor", "Traceback: x"))
    assert type(error) is kind
    assert str(error) == "no such tensor"
    assert "Traceback: x" in error.__notes__[0]


def test_any_other_error_at_the_start_is_a_dead_engine_with_the_traceback():
    error = _start_error(Failed("ZeroDivisionError", "by zero", "Traceback: x"))
    assert type(error) is EngineDeadError
    assert all(words in str(error) for words in ("ZeroDivisionError: by zero", "Traceback: x"))
