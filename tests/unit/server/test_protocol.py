"""OpenAI bodies to parameters and back."""

import dataclasses

import pytest

from pico_vllm.errors import RequestError
from pico_vllm.outputs import CompletionOutput, Logprob, RequestOutput
from pico_vllm.sampling_params import SamplingParams, StructuredOutputsParams
from pico_vllm.server.protocol import CHAT_URL, COMPLETIONS_URL, error_body, parse_request, response_body

MESSAGES = [{"role": "user", "content": "hi"}]


def chat(**body):
    return parse_request(CHAT_URL, {"model": "m", "messages": MESSAGES, **body})


def completion(**body):
    return parse_request(COMPLETIONS_URL, {"model": "m", "prompt": "hi", **body})


def test_defaults_are_those_of_the_endpoints():
    assert chat().params == SamplingParams(max_tokens=None)
    assert completion().params == SamplingParams(max_tokens=16)
    assert (chat().messages, chat().prompt) == (MESSAGES, None)
    assert (completion().messages, completion().prompt) == (None, "hi")


def test_a_cache_salt_is_taken_by_both_endpoints():
    assert (chat().cache_salt, completion().cache_salt) == (None, None)
    assert (chat(cache_salt="a").cache_salt, completion(cache_salt="b").cache_salt) == ("a", "b")


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"temperature": 0.5, "top_p": 0.9, "seed": 3, "n": 2}, {"temperature": 0.5, "top_p": 0.9, "seed": 3, "n": 2}),
        ({"stop": "x"}, {"stop": ("x",)}),
        ({"logit_bias": {"5": -100}}, {"logit_bias": {5: -100.0}}),
        ({"max_completion_tokens": 7, "max_tokens": 3}, {"max_tokens": 7}),
        ({"logprobs": True, "top_logprobs": 4}, {"logprobs": 4}),
        ({"logprobs": True}, {"logprobs": 0}),
        ({"logprobs": False}, {}),
        ({"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1}, {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1}),
        ({"response_format": {"type": "text"}}, {}),
        (
            {"response_format": {"type": "json_object"}},
            {"structured_outputs": StructuredOutputsParams(json={"type": "object"})},
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "array"}}}},
            {"structured_outputs": StructuredOutputsParams(json={"type": "array"})},
        ),
        ({"user": "me", "metadata": {"a": 1}, "stream": False, "temperature": None}, {}),
    ],
)
def test_chat_fields_become_parameters(body, expected):
    assert chat(**body).params == SamplingParams(**({"max_tokens": None} | expected))


def test_completion_fields_become_parameters():
    assert completion(logprobs=3, prompt=[1, 2], max_tokens=5).params == SamplingParams(max_tokens=5, logprobs=3)
    assert completion(prompt=[1, 2]).prompt == [1, 2]


def test_template_options_are_passed_on():
    parsed = chat(tools=[{"type": "function"}], chat_template_kwargs={"enable_thinking": False})
    assert parsed.template_options == {
        "tools": [{"type": "function"}],
        "chat_template_kwargs": {"enable_thinking": False},
    }


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"frobnicate": 1, "b": 2}, ["b, frobnicate"]),
        ({"stream": True}, ["stream=True"]),
        ({"tool_choice": "required"}, ["tool_choice='required'"]),
        ({"temperature": "hot"}, ["temperature='hot'"]),
        ({"top_logprobs": 3}, ["logprobs=true"]),
        ({"logprobs": 3}, ["logprobs=3"]),
        ({"response_format": {"type": "xml"}}, ["xml", "json_schema"]),
        ({"response_format": {"type": "json_schema"}}, ["schema"]),
        ({"messages": []}, ["messages"]),
        ({"prompt": "x"}, ["prompt"]),
    ],
)
def test_what_is_not_implemented_or_wrong_is_refused_by_name(body, words):
    with pytest.raises(RequestError) as error:
        chat(**body)
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize("prompt", [None, [], [1, "a"], ["a", "b"], 5, [True]])
def test_a_completion_needs_one_prompt(prompt):
    with pytest.raises(RequestError, match="prompt must be"):
        completion(prompt=prompt)


def test_responses_by_hand():
    logprobs = [{7: Logprob(-0.5, 2, "b"), 9: Logprob(-0.25, 1, "a")}]
    output = RequestOutput("id", "hi", [1, 2], [CompletionOutput(0, "b", [7], "stop", None, logprobs)], True)
    body = response_body(CHAT_URL, "m", output)
    assert body["id"] == "chatcmpl-id" and body["model"] == "m"
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "b"}
    assert choice["finish_reason"] == "stop"
    (entry,) = choice["logprobs"]["content"]
    assert (entry["token"], entry["logprob"], entry["bytes"]) == ("b", -0.5, [98])
    assert [best["token"] for best in entry["top_logprobs"]] == ["a", "b"]
    usage = {"prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3}
    assert body["usage"] == usage | {"prompt_tokens_details": {"cached_tokens": 0}}
    cached = dataclasses.replace(output, num_cached_tokens=1)
    assert response_body(CHAT_URL, "m", cached)["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}
    (choice,) = response_body(COMPLETIONS_URL, "m", output)["choices"]
    assert choice["text"] == "b"
    assert choice["logprobs"]["token_logprobs"] == [-0.5]
    assert choice["logprobs"]["top_logprobs"] == [{"b": -0.5, "a": -0.25}]
    assert error_body("x")["error"]["message"] == "x"
