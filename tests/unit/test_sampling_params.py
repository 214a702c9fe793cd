from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pico_vllm.errors import RequestError
from pico_vllm.sampling_params import _NOT_IMPLEMENTED, MAX_SEED, MIN_TEMPERATURE, SamplingParams

NAN, INF = math.nan, math.inf

GOOD = {
    "temperature": [0, 0.0, -0.0, 1e-9, 1, 0.7, 100.0],
    "top_p": [1, 1.0, 0.5, 1e-6],
    "top_k": [-1, 0, 1, 50, 10**6, 2**31 - 1],
    "max_tokens": [None, 1, 10**9],
    "seed": [None, 0, 1, MAX_SEED],
    "stop_token_ids": [None, (), [], [0], (1, 2), {7}, range(3), [2**31 - 1]],
    "ignore_eos": [True, False],
    "skip_special_tokens": [True, False],
    "detokenize": [True, False],
}
BAD = {
    "temperature": [NAN, INF, -INF, -0.1, -1, 10**400, True, False, "1", None, [1.0], 1j],
    "top_p": [NAN, INF, -INF, 0, 0.0, -0.0, -0.5, 1.0001, 2, 10**400, True, "0.5", None],
    "top_k": [NAN, INF, -2, 1.0, 2**31, True, False, "5", None, [5]],
    "max_tokens": [0, -1, 1.0, NAN, INF, True, "16", [1]],
    "seed": [-1, MAX_SEED + 1, 1.0, NAN, True, False, "0"],
    "stop_token_ids": [5, "12", b"12", 1.5, True, [-1], [2**31], [1.0], ["a"], [True], [None], [NAN], [[1]]],
    "ignore_eos": [0, 1, None, "true", []],
    "skip_special_tokens": [0, 1, None, "false"],
    "detokenize": [0, 1, None, ""],
}
ASKED_FOR = {
    "n": [2, 0, True, None],
    "min_p": [0.1, NAN],
    "repetition_penalty": [1.1, 0.0, NAN],
    "presence_penalty": [0.5, -2.0],
    "frequency_penalty": [0.5, NAN],
    "logit_bias": [{5: 1.0}],
    "bad_words": [["x"]],
    "allowed_token_ids": [[1, 2]],
    "min_tokens": [1, -1, False],
    "stop": ["\n", ["\n"], ""],
    "include_stop_str_in_output": [True],
    "logprobs": [0, 5],
    "prompt_logprobs": [0, 1],
    "structured_outputs": [{"json": {}}],
}


def cases(table):
    return [pytest.param(name, value, id=f"{name}={value!r:.20}") for name, values in table.items() for value in values]


@pytest.mark.parametrize(("name", "value"), cases(GOOD))
def test_good_value_is_accepted(name, value):
    got = getattr(SamplingParams(**{name: value}), name)
    assert got == (tuple(value or ()) if name == "stop_token_ids" else value)


@pytest.mark.parametrize(("name", "value"), cases(BAD))
def test_bad_value_is_refused_by_name(name, value):
    with pytest.raises(RequestError, match=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(("name", "value"), cases(ASKED_FOR))
def test_what_is_not_implemented_is_refused_by_name(name, value):
    with pytest.raises(RequestError, match=f"^{name}=.* is not implemented"):
        SamplingParams(**{name: value})


def test_what_is_not_implemented_is_accepted_at_its_default():
    defaults = {field.name: field.default for field in dataclasses.fields(SamplingParams)}
    assert set(ASKED_FOR) == set(_NOT_IMPLEMENTED)
    assert SamplingParams(**{name: defaults[name] for name in _NOT_IMPLEMENTED}) == SamplingParams()


def test_every_field_is_in_one_of_the_tables_above():
    assert {field.name for field in dataclasses.fields(SamplingParams)} == set(GOOD) | set(ASKED_FOR)


def test_int_where_a_float_is_the_default_is_the_default():
    assert SamplingParams(repetition_penalty=1, min_p=0, presence_penalty=0) == SamplingParams()


def test_unknown_name_is_refused():
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1.0)  # pyright: ignore[reportCallIssue]


def test_message_carries_the_value_and_the_limit():
    with pytest.raises(RequestError, match=r"^top_p=1.5 is out of range: it must be 0 … 1$"):
        SamplingParams(top_p=1.5)
    with pytest.raises(RequestError, match=r"^max_tokens=0 is out of range: it must be >= 1$"):
        SamplingParams(max_tokens=0)


@pytest.mark.parametrize(
    ("temperature", "greedy"), [(0, True), (MIN_TEMPERATURE / 2, True), (MIN_TEMPERATURE, False), (1.0, False)]
)
def test_greedy_is_a_temperature_below_the_smallest(temperature, greedy):
    assert SamplingParams(temperature=temperature, top_k=5, top_p=0.5, seed=1).is_greedy is greedy


def test_frozen_hashable_and_equal_by_value():
    params = SamplingParams(stop_token_ids=[1, 2])
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = 0.5  # pyright: ignore[reportAttributeAccessIssue]
    assert hash(params) == hash(SamplingParams(stop_token_ids=(1, 2)))


@given(
    name=st.sampled_from([field.name for field in dataclasses.fields(SamplingParams)]),
    value=st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary(), st.lists(st.integers(-2, 9))
    ),
)
def test_any_value_is_taken_or_refused_with_a_request_error(name, value):
    try:
        SamplingParams(**{name: value})
    except RequestError as error:
        assert name in str(error)
