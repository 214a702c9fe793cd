"""Any server that speaks OpenAI's /v1/completions, over HTTP: vLLM, SGLang, llama.cpp, our own.

Prompts are sent as token ids. Ids of the answer come back where the server knows ``return_token_ids``; for another one
the checkpoint's tokenizer makes them of the whole text, for the check of correctness. Tokens are counted by the
server's ``usage`` where a chunk has it, else a chunk with text is one token until the last usage tells.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pico_vllm.bench.engines.engine import EngineInfo, EngineOptions, StreamingEngine
from pico_vllm.errors import ConfigError

if TYPE_CHECKING:
    from pico_vllm.bench.traces import Trace
    from pico_vllm.bench.workloads import Workload

_TIMEOUT_S = 600.0
_CONNECT_TIMEOUT_S = 10.0


class OpenAIEngine(StreamingEngine):
    """A server's completions endpoint.

    Args:
        url: with or without ``/v1``.
        options: ``model`` is the checkpoint it serves; ``extra`` goes into every request's body, but for "served_model"
            (the name it is served under; default: the first of /v1/models), "api_key" and "prefix_caching" (whether
            the server has its prefix cache on, which it tells nobody; without it records leave that open).

    Raises:
        ConfigError: nothing answers there, what answers is no such server, or an option is one of the server's start.
    """

    def __init__(self, url: str, options: EngineOptions) -> None:
        import httpx2

        start = time.perf_counter()
        self._url = url.rstrip("/").removesuffix("/v1") + "/v1"
        self._extra = dict(options.extra)
        key = self._extra.pop("api_key", None)
        prefix_caching = self._extra.pop("prefix_caching", None)
        if prefix_caching not in (True, False, None):
            raise ConfigError(f"prefix_caching={prefix_caching!r} of {url} must be true or false")
        if options.enable_prefix_caching and prefix_caching is not True:
            raise ConfigError(
                "enable_prefix_caching=True can't be asked of a running server: start it with its prefix cache and say "
                f'so with {url}={{"prefix_caching": true}}, or leave it at False'
            )
        if options.max_num_seqs is not None:
            raise ConfigError(
                f"max_num_seqs={options.max_num_seqs} can't be asked of a running server: start it so, and leave it out"
            )
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        try:
            answer = httpx2.get(f"{self._url}/models", headers=self._headers, timeout=_CONNECT_TIMEOUT_S)
            answer.raise_for_status()
            names = [model["id"] for model in answer.json()["data"]]
        except (httpx2.HTTPError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"no OpenAI-compatible server at {self._url}: {type(error).__name__}: {error}") from None
        self._served_model = self._extra.pop("served_model", None) or next(iter(names), "")
        self._model_dir = Path(options.model)
        self._tokenizer: Any = None
        version = answer.headers.get("server", "unknown")
        settings = {
            "url": self._url,
            "served_model": self._served_model,
            "prefix_caching": prefix_caching,
            "extra": self._extra,
        }
        self.info = EngineInfo("openai", version, "server", round(time.perf_counter() - start, 2), settings)

    def serve(self, workload: Workload) -> list[Trace]:
        """Run a workload on the clock, with a connection a live request."""
        traces: list[Trace] = asyncio.run(self._serve_with_client(workload))
        return traces

    async def stream(
        self, prompt_token_ids: Sequence[int], max_tokens: int, temperature: float
    ) -> AsyncIterator[tuple[int, Sequence[int]]]:
        """New tokens, chunk by chunk."""
        body = {
            "model": self._served_model,
            "prompt": list(prompt_token_ids),
            "max_tokens": max_tokens,
            "temperature": temperature,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "return_token_ids": True,
        } | self._extra
        num_tokens, num_ids, text = 0, 0, ""
        async with self._client.sse(f"{self._url}/completions", method="POST", json=body) as events:
            if events.response.status_code != 200:
                await events.response.aread()
                raise ConfigError(f"{self._url} answers {events.response.status_code}: {events.response.text[:500]}")
            async for event in events:
                if event.data == "[DONE]":
                    break
                chunk: Any = event.json()
                if "error" in chunk:
                    raise ConfigError(f"{self._url} answers: {chunk['error']}")
                choice = next(iter(chunk.get("choices") or ()), {})
                ids = choice.get("token_ids") or []
                new_text = choice.get("text") or ""
                usage = chunk.get("usage") or {}
                total = usage.get("completion_tokens", num_tokens + (len(ids) or bool(new_text)))
                yield total - num_tokens, ids
                num_tokens, num_ids, text = total, num_ids + len(ids), text + new_text
        if num_ids == 0 and text:
            yield 0, self._ids_of(text)

    async def _serve_with_client(self, workload: Workload) -> list[Trace]:
        import httpx2

        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
        timeout = httpx2.Timeout(_TIMEOUT_S, connect=_CONNECT_TIMEOUT_S)
        async with httpx2.AsyncClient(headers=self._headers, limits=limits, timeout=timeout) as self._client:
            return await self._serve(workload)

    def _ids_of(self, text: str) -> list[int]:
        if self._tokenizer is None:
            from pico_vllm.engine.tokenizer import Tokenizer

            self._tokenizer = Tokenizer.from_directory(self._model_dir)
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids
