from __future__ import annotations

import json

import pytest

from pico_vllm.request import FinishReason, Request, RequestStatus
from pico_vllm.sampling_params import SamplingParams


def make_request(prompt=(10, 11, 12), output=(), **kwargs):
    request = Request("r", prompt, SamplingParams(max_tokens=8), **kwargs)
    request.output_token_ids.extend(output)
    return request


def test_new_request_waits_with_nothing_computed():
    request = make_request()
    assert request.status is RequestStatus.WAITING
    assert (request.num_tokens, request.num_computed_tokens, request.num_inflight_tokens) == (3, 0, 0)
    assert (request.num_prefill_tokens, request.num_preemptions, request.output_token_ids) == (0, 0, [])
    assert request.max_tokens == 8


@pytest.mark.parametrize("start", range(6))
@pytest.mark.parametrize("end", range(6))
def test_token_ids_is_a_slice_of_prompt_and_output(start, end):
    request = make_request(prompt=(10, 11, 12), output=(20, 21))
    assert request.token_ids(start, end) == (10, 11, 12, 20, 21)[start:end]


def test_num_tokens_counts_prompt_and_output():
    assert make_request(prompt=(1, 2, 3), output=(4, 5)).num_tokens == 5


def test_prompt_is_copied():
    prompt = [1, 2]
    request = make_request(prompt=prompt)
    prompt.append(3)
    assert request.prompt_token_ids == (1, 2)


def test_eos_and_stop_token_ids_both_stop():
    request = Request("r", [1], SamplingParams(stop_token_ids=[5, 6]), eos_token_ids=(2, 6))
    assert request.stop_token_ids == {2, 5, 6}


def test_ignore_eos_keeps_only_the_stop_token_ids_asked_for():
    request = Request("r", [1], SamplingParams(stop_token_ids=[5], ignore_eos=True), eos_token_ids=(2,))
    assert request.stop_token_ids == {5}


@pytest.mark.parametrize(("prompt", "max_tokens"), [((), 1), ((1,), None)])
def test_what_the_front_end_has_to_resolve_is_asserted(prompt, max_tokens):
    with pytest.raises(AssertionError, match="front end"):
        Request("r", prompt, SamplingParams(max_tokens=max_tokens))


def test_a_request_is_sample_0_and_forbids_no_words_unless_told_otherwise():
    request = make_request()
    assert (request.sample_index, request.bad_words_token_ids, request.samples_from_history) == (0, (), False)
    forked = make_request(sample_index=3, bad_words_token_ids=((4, 5), (6,)))
    assert (forked.sample_index, forked.bad_words_token_ids) == (3, ((4, 5), (6,)))


@pytest.mark.parametrize(
    ("params", "bad_words", "expected"),
    [
        ({}, (), False),
        ({"logit_bias": {3: 1.0}, "min_tokens": 2, "allowed_token_ids": [3], "logprobs": 1}, (), False),
        ({"repetition_penalty": 1.1}, (), True),
        ({"presence_penalty": -0.5}, (), True),
        ({"frequency_penalty": 0.5}, (), True),
        ({"logits_processors": [lambda ids, logits: logits]}, (), True),
        ({}, ((4, 5),), True),
    ],
)
def test_history_is_needed_by_what_looks_at_earlier_tokens(params, bad_words, expected):
    request = Request("r", [1], SamplingParams(**params), bad_words_token_ids=bad_words)
    assert request.samples_from_history is expected


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 5, 9])
def test_prompt_targets_are_each_following_token_once_whatever_the_chunks(chunk):
    request = make_request(prompt=(10, 11, 12, 13, 14))
    taken = []
    for start in range(0, 5, chunk):
        end = min(start + chunk, 5)
        targets, first = request.take_prompt_targets(start, end)
        assert first == start and targets == (11, 12, 13, 14)[start:end]
        taken += targets
    assert taken == [11, 12, 13, 14]
    request.output_token_ids.append(20)
    assert request.take_prompt_targets(5, 6)[0] == ()


def test_prompt_targets_go_on_where_they_were_when_the_prompt_is_computed_again():
    request = make_request(prompt=(10, 11, 12, 13, 14))
    assert request.take_prompt_targets(0, 2) == ((11, 12), 0)
    assert request.take_prompt_targets(0, 1)[0] == ()
    assert request.take_prompt_targets(1, 4) == ((13, 14), 2)  # positions 2 and 3 predict 13 and 14
    assert request.take_prompt_targets(0, 5)[0] == ()


def test_a_prompt_of_one_token_has_no_targets():
    assert make_request(prompt=(10,)).take_prompt_targets(0, 1)[0] == ()


def test_unknown_attributes_are_refused():
    with pytest.raises(AttributeError):
        make_request().num_tokens_computed = 1  # pyright: ignore[reportAttributeAccessIssue]


def test_finish_reasons_are_the_openai_strings():
    assert [str(reason) for reason in FinishReason] == ["stop", "length", "abort", "error"]
    assert json.dumps(FinishReason.STOP) == '"stop"'


def test_repr_shows_where_the_request_stands():
    assert repr(make_request(output=(20,))) == "Request('r', WAITING, prompt=3, output=1, computed=0)"
