from __future__ import annotations

import dataclasses
import json
import math
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pico_vllm.errors import RequestError
from pico_vllm.sampling_params import (
    MAX_LOGPROBS,
    MAX_N,
    MAX_SEED,
    MIN_TEMPERATURE,
    SamplingParams,
    StructuredOutputsParams,
)

NAN, INF = math.nan, math.inf


def halve(output_ids, logits):
    return logits / 2


SCHEMA = StructuredOutputsParams(json='{"type": "object"}')

#: Kept as they are.
GOOD = {
    "n": [1, 2, MAX_N],
    "temperature": [0, 0.0, -0.0, 1e-9, 1, 0.7, 100.0, 1e300],
    "top_k": [-1, 0, 1, 50, 10**6, 2**31 - 1],
    "top_p": [1, 1.0, 0.5, 1e-6],
    "min_p": [0, 0.0, 0.05, 1, 1.0],
    "repetition_penalty": [1, 1.0, 0.001, 0.5, 1.3, 1000, 1000.0],
    "presence_penalty": [0, 0.0, -2, 2, 1.5, -2.0],
    "frequency_penalty": [0, 0.0, -2, 2, 1.5, -2.0],
    "logit_bias": [None, {5: 1.0}, {0: -100.0, 2**31 - 1: 100.0}],
    "bad_words": [(), ("x", " two words")],
    "allowed_token_ids": [None, (0,), (1, 2, 2), (2**31 - 1,)],
    "logits_processors": [(), (halve,), (halve, halve)],
    "seed": [None, 0, 1, MAX_SEED],
    "max_tokens": [None, 1, 10**9],
    "min_tokens": [0, 1, 16],
    "stop": [(), ("\n",), ("é", "ab")],
    "stop_token_ids": [(), (0,), (1, 2), (2**31 - 1,)],
    "include_stop_str_in_output": [True, False],
    "ignore_eos": [True, False],
    "logprobs": [None, 0, 1, MAX_LOGPROBS],
    "prompt_logprobs": [None, 0, 1, MAX_LOGPROBS],
    "skip_special_tokens": [True, False],
    "detokenize": [True, False],
    "structured_outputs": [None, SCHEMA],
}
#: (given, kept)
NORMALISED = {
    "logit_bias": [
        ({}, None),
        ({5: 1}, {5: 1.0}),
        ({"5": 1.5, 6: 0}, {5: 1.5, 6: 0.0}),  # as JSON has it
        (MappingProxyType({7: 2.5}), {7: 2.5}),
    ],
    "bad_words": [(None, ()), ([], ()), (["x", " two words"], ("x", " two words")), (iter("ab"), ("a", "b"))],
    "allowed_token_ids": [([0], (0,)), (range(3), (0, 1, 2)), ({7}, (7,))],
    "logits_processors": [(None, ()), ([], ()), ([halve], (halve,))],
    "stop": [(None, ()), ([], ()), ("\n", ("\n",)), ("ab", ("ab",)), (["a", "end"], ("a", "end")), ({"x"}, ("x",))],
    "stop_token_ids": [(None, ()), ([], ()), ([0], (0,)), ({7}, (7,)), (range(3), (0, 1, 2))],
}
BAD = {
    "n": [0, -1, MAX_N + 1, 1.0, NAN, True, False, None, "2", [1]],
    "temperature": [NAN, INF, -INF, -0.1, -1, 10**400, True, False, "1", None, [1.0], 1j],
    "top_k": [NAN, INF, -2, 1.0, 2**31, True, False, "5", None, [5]],
    "top_p": [NAN, INF, -INF, 0, 0.0, -0.0, -0.5, 1.0001, 2, 10**400, True, "0.5", None],
    "min_p": [NAN, INF, -INF, -0.1, 1.0001, 2, 10**400, True, False, "0.5", None, [0.5]],
    "repetition_penalty": [NAN, INF, -INF, 0, 0.0, -1.0, 1e-50, 0.0009, 1001, 1e300, 10**400, True, "1.1", None],
    "presence_penalty": [NAN, INF, -INF, -2.01, 2.01, 10**400, True, False, "1", None],
    "frequency_penalty": [NAN, INF, -INF, -2.01, 2.01, 10**400, True, False, "1", None],
    "logit_bias": [
        {-1: 1.0}, {2**31: 1.0}, {1.0: 1.0}, {True: 1.0}, {None: 1.0}, {"x": 1.0}, {"-1": 1.0}, {"1.0": 1.0}, {"": 1.0},
        {"9" * 5000: 1.0}, {(1,): 1.0}, {5: NAN}, {5: INF}, {5: 100.1}, {5: -100.1}, {5: True}, {5: "1"}, {5: None},
        [(5, 1.0)], [5], 5, "5", True, 1.0,
    ],
    "bad_words": ["x", b"x", "", [""], ["x", ""], [b"x"], [1], [None], [["x"]], 5, True, 1.5],
    "allowed_token_ids": [[], (), 5, "12", b"12", 1.5, True, [-1], [2**31], [1.0], ["a"], [True], [None], [[1]]],
    "logits_processors": [5, True, halve, [None], ["x"], "x", [halve, 5], [[halve]], 1.5],
    "seed": [-1, MAX_SEED + 1, 1.0, NAN, True, False, "0"],
    "max_tokens": [0, -1, 1.0, NAN, INF, True, "16", [1]],
    "min_tokens": [-1, 17, 1.0, NAN, INF, True, False, None, "1"],
    "stop": ["", [""], ["x", ""], b"x", [b"x"], [1], [None], [["x"]], 5, True, 1.5],
    "stop_token_ids": [5, "12", b"12", 1.5, True, [-1], [2**31], [1.0], ["a"], [True], [None], [NAN], [[1]]],
    "include_stop_str_in_output": [0, 1, None, "true"],
    "ignore_eos": [0, 1, None, "true", []],
    "logprobs": [-1, MAX_LOGPROBS + 1, 1.0, NAN, True, False, "5", [1]],
    "prompt_logprobs": [-1, MAX_LOGPROBS + 1, 1.0, NAN, True, False, "5", [1]],
    "skip_special_tokens": [0, 1, None, "false"],
    "detokenize": [0, 1, None, ""],
    "structured_outputs": [{"json": {}}, "{}", {}, True, [SCHEMA]],
}  # fmt: skip


def cases(table):
    return [pytest.param(name, value, id=f"{name}={value!r:.20}") for name, values in table.items() for value in values]


@pytest.mark.parametrize(("name", "value"), cases(BAD))
def test_bad_value_is_refused_by_name(name, value):
    with pytest.raises(RequestError, match=name):
        SamplingParams(**{name: value})


def cases_of_pairs(table):
    return [(name, *pair) for name, pairs in table.items() for pair in pairs]


@pytest.mark.parametrize(("name", "value"), cases(GOOD))
def test_good_value_is_kept(name, value):
    kept = getattr(SamplingParams(**{name: value}), name)
    assert kept == value and type(kept) is type(value)


@pytest.mark.parametrize(("name", "given_value", "expected"), cases_of_pairs(NORMALISED))
def test_what_is_given_in_another_form_is_kept_in_one(name, given_value, expected):
    kept = getattr(SamplingParams(**{name: given_value}), name)
    assert kept == expected and type(kept) is type(expected)


def test_every_field_is_in_both_tables():
    names = {field.name for field in dataclasses.fields(SamplingParams)}
    assert names == set(GOOD) == set(BAD)


def test_int_where_a_float_is_the_default_is_the_default():
    assert SamplingParams(repetition_penalty=1, min_p=0, presence_penalty=0, temperature=1) == SamplingParams()


def test_none_and_empty_where_nothing_is_the_default_are_the_default():
    empty = SamplingParams(stop=[], bad_words=[], logit_bias={}, stop_token_ids=[], logits_processors=[])
    none = SamplingParams(stop=None, bad_words=None, logit_bias=None, stop_token_ids=None, logits_processors=None)
    assert empty == none == SamplingParams()


@pytest.mark.parametrize("name", ["temprature", "best_of", "use_beam_search", "length_penalty", "logit_bais"])
def test_unknown_name_is_refused(name):
    with pytest.raises(TypeError, match=name):
        SamplingParams(**{name: 1.0})


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"top_p": 1.5}, "top_p=1.5 is out of range: it must be 0 … 1"),
        ({"max_tokens": 0}, "max_tokens=0 is out of range: it must be >= 1"),
        ({"n": 257}, "n=257 is out of range: it must be 1 … 256"),
        ({"min_p": -0.5}, "min_p=-0.5 is out of range: it must be 0 … 1"),
        ({"repetition_penalty": 0}, "repetition_penalty=0 is out of range: it must be 0.001 … 1000"),
        ({"presence_penalty": 3}, "presence_penalty=3 is out of range: it must be -2 … 2"),
        ({"logprobs": 101}, "logprobs=101 is out of range: it must be 0 … 100"),
        ({"logit_bias": {5: 101}}, "logit_bias[5]=101 is out of range: it must be -100 … 100"),
        ({"logit_bias": {-5: 1}}, "logit_bias key=-5 is out of range: it must be 0 … 2147483647"),
        ({"stop": [""]}, "stop holds '': each must be a text of at least one character"),
        ({"allowed_token_ids": []}, "allowed_token_ids is empty: nothing could be sampled"),
        ({"min_tokens": 20}, "min_tokens=20 exceeds max_tokens=16: lower it"),
        ({"stop": "x", "detokenize": False}, "stop needs text, and detokenize=False makes none: use stop_token_ids"),
    ],
)
def test_message_carries_the_value_and_the_limit(wrong, message):
    with pytest.raises(RequestError) as error:
        SamplingParams(**wrong)
    assert str(error.value) == message


def test_min_tokens_may_be_as_many_as_max_tokens_and_any_number_without_a_limit():
    assert SamplingParams(min_tokens=7, max_tokens=7).min_tokens == 7
    assert SamplingParams(min_tokens=10**6, max_tokens=None).min_tokens == 10**6
    with pytest.raises(RequestError, match="min_tokens=8 exceeds max_tokens=7"):
        SamplingParams(min_tokens=8, max_tokens=7)


@pytest.mark.parametrize(
    ("temperature", "greedy"), [(0, True), (MIN_TEMPERATURE / 2, True), (MIN_TEMPERATURE, False), (1.0, False)]
)
def test_greedy_is_a_temperature_below_the_smallest(temperature, greedy):
    assert SamplingParams(temperature=temperature, top_k=5, top_p=0.5, seed=1).is_greedy is greedy


@pytest.mark.parametrize(
    ("given_value", "expected"),
    [
        ({}, False),
        ({"repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": -0.0}, False),
        ({"repetition_penalty": 0.99}, True),
        ({"presence_penalty": 0.1}, True),
        ({"frequency_penalty": -0.1}, True),
        ({"logit_bias": {1: 1.0}, "bad_words": ["x"]}, False),
    ],
)
def test_penalties_are_what_counts_tokens(given_value, expected):
    assert SamplingParams(**given_value).has_penalties is expected


def test_frozen_hashable_and_equal_by_value():
    params = SamplingParams(stop_token_ids=[1, 2], stop=["x"], bad_words=["y"], structured_outputs=SCHEMA)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = 0.5  # pyright: ignore[reportAttributeAccessIssue]
    same = SamplingParams(stop_token_ids=(1, 2), stop="x", bad_words=("y",), structured_outputs=SCHEMA)
    assert params == same and hash(params) == hash(same)


def test_what_the_client_does_to_its_lists_afterwards_changes_nothing():
    bias, stop, ids = {5: 1.0}, ["x"], [1]
    params = SamplingParams(logit_bias=bias, stop=stop, allowed_token_ids=ids)
    bias[6] = 2.0
    stop.append("y")
    ids.append(2)
    assert (params.logit_bias, params.stop, params.allowed_token_ids) == ({5: 1.0}, ("x",), (1,))


ANYTHING = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(),
    st.binary(),
    st.lists(st.integers(-2, 9)),
    st.lists(st.text(max_size=2)),
    st.dictionaries(st.one_of(st.integers(), st.text(max_size=3)), st.one_of(st.floats(), st.text(max_size=2))),
    st.functions(),
)


@given(name=st.sampled_from(sorted(GOOD)), value=ANYTHING)
def test_any_value_is_taken_or_refused_with_a_request_error(name, value):
    try:
        SamplingParams(**{name: value})
    except RequestError as error:
        assert name in str(error)


# Structured outputs


@pytest.mark.parametrize(
    ("given_value", "kept"),
    [
        ({"json": '{"type": "string"}'}, '{"type": "string"}'),
        ({"json": {"type": "object", "properties": {}}}, '{"type": "object", "properties": {}}'),
        ({"json": {}}, "{}"),
        ({"regex": r"\d{3}"}, r"\d{3}"),
        ({"choice": ["yes", "no"]}, ("yes", "no")),
        ({"choice": ("one",)}, ("one",)),
        ({"grammar": 'start: "x"'}, 'start: "x"'),
    ],
)
def test_one_of_the_four_is_kept_and_the_others_are_none(given_value, kept):
    ((name, _),) = given_value.items()
    structured = StructuredOutputsParams(**given_value)
    fields = dataclasses.asdict(structured)
    assert fields.pop(name) == kept and type(getattr(structured, name)) is type(kept)
    assert list(fields.values()) == [None] * 3
    assert hash(structured) == hash(StructuredOutputsParams(**given_value)) and len({structured}) == 1


def test_a_schema_given_as_a_mapping_is_json():
    schema = {"type": "object", "properties": {"é": {"enum": [1, 2.5, None, True]}}}
    kept = StructuredOutputsParams(json=schema).json
    assert isinstance(kept, str) and json.loads(kept) == schema


CIRCULAR: dict[str, object] = {}
CIRCULAR["self"] = CIRCULAR
DEEP: dict[str, object] = {}
for _ in range(100_000):
    DEEP = {"a": DEEP}


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({}, "takes one of json, regex, choice, grammar; got none"),
        ({"json": None}, "got none"),
        ({"json": "{}", "regex": "x"}, "got json, regex"),
        ({"json": "{}", "regex": "x", "choice": ["a"], "grammar": "g"}, "got json, regex, choice, grammar"),
        ({"json": 5}, "structured_outputs.json=5 must be text"),
        ({"json": ["a"]}, "structured_outputs.json=.* must be text"),
        ({"json": True}, "structured_outputs.json=True must be text"),
        ({"json": b"{}"}, "structured_outputs.json=.* must be text"),
        ({"json": {"a": {1, 2}}}, "structured_outputs.json is not a JSON schema"),
        ({"json": {"a": NAN}}, "structured_outputs.json is not a JSON schema"),
        ({"json": {(1, 2): 3}}, "structured_outputs.json is not a JSON schema"),
        ({"json": CIRCULAR}, "structured_outputs.json is not a JSON schema"),
        ({"json": DEEP}, "structured_outputs.json is not a JSON schema"),
        ({"regex": 5}, "structured_outputs.regex=5 must be text"),
        ({"regex": ["x"]}, "structured_outputs.regex"),
        ({"choice": []}, "structured_outputs.choice is empty"),
        ({"choice": "yes"}, "structured_outputs.choice='yes' must be a list of texts"),
        ({"choice": ["a", ""]}, "structured_outputs.choice holds ''"),
        ({"choice": [1]}, "structured_outputs.choice holds 1"),
        ({"choice": 5}, "structured_outputs.choice=5"),
        ({"grammar": b"x"}, "structured_outputs.grammar"),
    ],
    ids=lambda value: f"{value!r:.20}" if isinstance(value, str) else "-".join(value),
)
def test_wrong_structured_outputs_are_refused_by_name(wrong, words):
    with pytest.raises(RequestError, match=words):
        StructuredOutputsParams(**wrong)


def test_unknown_structured_output_is_refused():
    with pytest.raises(TypeError, match="xml"):
        StructuredOutputsParams(xml="<a/>")  # pyright: ignore[reportCallIssue]
