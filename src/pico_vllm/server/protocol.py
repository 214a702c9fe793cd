"""OpenAI request bodies to prompts and SamplingParams, and outputs to response bodies.

Pure functions on plain dicts. A field is implemented, accepted because it changes nothing (``user``, ``metadata``), or
refused by name: nothing that a client asks for is ignored. Fields beyond OpenAI's (``top_k``, ``min_p``, …) have vLLM's
names.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pico_vllm.errors import RequestError
from pico_vllm.sampling_params import SamplingParams, StructuredOutputsParams

if TYPE_CHECKING:
    from pico_vllm.outputs import CompletionOutput, Logprob, RequestOutput

CHAT_URL = "/v1/chat/completions"
COMPLETIONS_URL = "/v1/completions"

#: Fields that are SamplingParams under the same name.
_SAME_NAME = (
    "n", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "logit_bias", "bad_words", "allowed_token_ids", "min_tokens", "stop_token_ids",
    "include_stop_str_in_output", "ignore_eos", "prompt_logprobs", "skip_special_tokens",
)  # fmt: skip
#: Fields that say something about the client or the account, not about the answer.
_WITHOUT_EFFECT = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
_CHAT_ONLY = (
    "messages", "tools", "max_completion_tokens", "top_logprobs", "response_format", "add_generation_prompt",
    "chat_template_kwargs",
)  # fmt: skip
_COMPLETION_ONLY = ("prompt",)
#: Fields that are accepted with these values only.
_FIXED: dict[str, tuple[Any, ...]] = {
    "stream": (False, None),
    "stream_options": (None,),
    "best_of": (None, 1),
    "echo": (False, None),
    "suffix": (None, ""),
    "tool_choice": (None, "none", "auto"),
    "parallel_tool_calls": (None, True, False),
    "functions": (None,),
    "function_call": (None,),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "reasoning_effort": (None,),
    "prediction": (None,),
}


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """One request body.

    Attributes:
        url: which endpoint's format it has.
        prompt: text or token ids (completions), else None.
        messages: the conversation (chat), else None.
        template_options: tools, add_generation_prompt, chat_template_kwargs of a chat.
        params: how to sample.
        cache_salt: only requests with the same one share KV in the prefix cache.
    """

    url: str
    prompt: str | list[int] | None
    messages: list[dict[str, Any]] | None
    template_options: dict[str, Any]
    params: SamplingParams
    cache_salt: str | None = None


def parse_request(url: str, body: Any) -> ParsedRequest:
    """Read the body of a request to ``url``.

    Raises:
        RequestError: the endpoint, a field or a value is not known or not implemented; names it.
    """
    if url not in (CHAT_URL, COMPLETIONS_URL):
        raise RequestError(f"url {url!r} is not served; known: {CHAT_URL}, {COMPLETIONS_URL}")
    if not isinstance(body, Mapping):
        raise RequestError(f"the body must be a JSON object, got {type(body).__name__}")
    is_chat = url == CHAT_URL
    _refuse_unknown(body, is_chat)
    options: dict[str, Any] = {name: body[name] for name in _SAME_NAME if body.get(name) is not None}
    options |= {"max_tokens": _max_tokens(body, is_chat), "logprobs": _num_logprobs(body, is_chat)}
    options["structured_outputs"] = _structured_outputs(body.get("response_format"))
    params = SamplingParams(**options)
    if not is_chat:
        return ParsedRequest(url, _prompt(body.get("prompt")), None, {}, params, body.get("cache_salt"))
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RequestError(f"messages={messages!r} must be a list of at least one message")
    template = {
        name: body[name] for name in ("tools", "add_generation_prompt", "chat_template_kwargs") if body.get(name)
    }
    return ParsedRequest(url, None, messages, template, params, body.get("cache_salt"))


def response_body(url: str, model: str, output: RequestOutput) -> dict[str, Any]:
    """The body that answers a request to ``url``."""
    is_chat = url == CHAT_URL
    choices = [_chat_choice(c) if is_chat else _completion_choice(c) for c in output.outputs]
    num_prompt = len(output.prompt_token_ids)
    num_new = sum(len(completion.token_ids) for completion in output.outputs)
    return {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{output.request_id}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": choices,
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_new,
            "total_tokens": num_prompt + num_new,
            "prompt_tokens_details": {"cached_tokens": output.num_cached_tokens or 0},
        },
    }


def error_body(message: str) -> dict[str, Any]:
    """The body that tells of a wrong request."""
    return {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": None}}


# ------------------------------------------------------------------------------------------------------- requests
def _refuse_unknown(body: Mapping[str, Any], is_chat: bool) -> None:
    known = {"model", "max_tokens", "logprobs", "cache_salt", *_SAME_NAME, *_WITHOUT_EFFECT, *_FIXED}
    known |= set(_CHAT_ONLY if is_chat else _COMPLETION_ONLY)
    if unknown := sorted(set(body) - known, key=str):
        raise RequestError(f"the body has fields that are not implemented: {', '.join(map(str, unknown))}")
    for name, allowed in _FIXED.items():
        if name in body and body[name] not in allowed:
            raise RequestError(f"{name}={body[name]!r} is not implemented; leave it out")


def _max_tokens(body: Mapping[str, Any], is_chat: bool) -> Any:
    value = body.get("max_tokens")
    if is_chat:
        newer = body.get("max_completion_tokens")
        return value if newer is None else newer  # None: as many as fit
    return 16 if value is None else value  # OpenAI's default for completions


def _num_logprobs(body: Mapping[str, Any], is_chat: bool) -> Any:
    value = body.get("logprobs")
    if not is_chat:
        return value
    if value not in (None, True, False):
        raise RequestError(f"logprobs={value!r} must be true or false in a chat; top_logprobs says how many")
    best = body.get("top_logprobs")
    if best is not None and not value:
        raise RequestError("top_logprobs needs logprobs=true")
    return (0 if best is None else best) if value else None


def _structured_outputs(response_format: Any) -> StructuredOutputsParams | None:
    if response_format is None:
        return None
    kind = response_format.get("type") if isinstance(response_format, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputsParams(json={"type": "object"})
    if kind == "json_schema":
        schema = (response_format.get("json_schema") or {}).get("schema")
        if not isinstance(schema, Mapping):
            raise RequestError("response_format.json_schema.schema must be a JSON schema")
        return StructuredOutputsParams(json=schema)
    raise RequestError(f"response_format={response_format!r}: type must be text, json_object or json_schema")


def _prompt(prompt: Any) -> str | list[int]:
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and prompt and all(type(token_id) is int for token_id in prompt):
        return prompt
    raise RequestError("prompt must be a text or a list of token ids (one prompt a request)")


# ------------------------------------------------------------------------------------------------------- responses
def _chat_choice(completion: CompletionOutput) -> dict[str, Any]:
    logprobs = None
    if completion.logprobs is not None:
        pairs = zip(completion.token_ids, completion.logprobs, strict=True)
        logprobs = {"content": [_token_entry(token_id, entries) for token_id, entries in pairs]}
    return {
        "index": completion.index,
        "message": {"role": "assistant", "content": completion.text},
        "logprobs": logprobs,
        "finish_reason": completion.finish_reason,
    }


def _token_entry(token_id: int, entries: Mapping[int, Logprob]) -> dict[str, Any]:
    best = sorted(entries.values(), key=lambda entry: entry.rank)
    return _one_entry(entries[token_id]) | {"top_logprobs": [_one_entry(entry) for entry in best]}


def _one_entry(entry: Logprob) -> dict[str, Any]:
    token = entry.decoded_token or ""
    return {"token": token, "logprob": entry.logprob, "bytes": list(token.encode())}


def _completion_choice(completion: CompletionOutput) -> dict[str, Any]:
    logprobs = None
    if completion.logprobs is not None:
        chosen = [entries[i] for i, entries in zip(completion.token_ids, completion.logprobs, strict=True)]
        logprobs = {
            "tokens": [entry.decoded_token or "" for entry in chosen],
            "token_logprobs": [entry.logprob for entry in chosen],
            "top_logprobs": [
                {entry.decoded_token or "": entry.logprob for entry in entries.values()}
                for entries in completion.logprobs
            ],
        }
    return {
        "index": completion.index,
        "text": completion.text,
        "logprobs": logprobs,
        "finish_reason": completion.finish_reason,
    }
