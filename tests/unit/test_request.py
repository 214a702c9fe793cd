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


def test_unknown_attributes_are_refused():
    with pytest.raises(AttributeError):
        make_request().num_tokens_computed = 1  # pyright: ignore[reportAttributeAccessIssue]


def test_finish_reasons_are_the_openai_strings():
    assert [str(reason) for reason in FinishReason] == ["stop", "length", "abort"]
    assert json.dumps(FinishReason.STOP) == '"stop"'


def test_repr_shows_where_the_request_stands():
    assert repr(make_request(output=(20,))) == "Request('r', WAITING, prompt=3, output=1, computed=0)"
