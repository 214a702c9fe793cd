"""LLM: the offline interface. Prompts or conversations in; finished outputs, or a stream of deltas, back."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

from pico_vllm.config import EngineConfig
from pico_vllm.engine.llm_engine import LLMEngine
from pico_vllm.errors import EngineDeadError, RequestError
from pico_vllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from pico_vllm.engine.input_processor import Prompt
    from pico_vllm.outputs import RequestDelta, RequestOutput

Message = Mapping[str, Any]
Params = SamplingParams | Sequence[SamplingParams] | None


class LLM:
    """An engine for a batch of prompts.

    Args:
        model: a directory, a .gguf file or a hub id (owner/name); None = SmolLM2-135M-Instruct, fetched once.
        progress: called with (phase, done, total) while the model is fetched and loaded.
        options: any field of ``EngineConfig`` and its groups (dtype, block_size, max_num_seqs, …).

    Raises:
        ConfigError, WeightLoadError: an option is wrong, or the model cannot be had, read or run here.

    Example:
        >>> llm = LLM()
        >>> llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=4))[0].outputs[0].text
    """

    def __init__(
        self, model: str | None = None, *, progress: Callable[[str, int, int], None] | None = None, **options: Any
    ) -> None:
        self.engine = LLMEngine(EngineConfig.from_options(model=model, **options), progress=progress)
        self._call_numbers = itertools.count()
        self._calls: dict[str, _Call] = {}  # by the request id of every request that has not ended
        #: Held while the engine is at work: a stream that is garbage-collected then must wait with its aborts.
        self._engine_lock = threading.Lock()
        self._abandoned: deque[str] = deque()

    @overload
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        use_tqdm: bool = False,
        stream: Literal[False] = False,
    ) -> list[RequestOutput]: ...

    @overload
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        use_tqdm: bool = False,
        stream: Literal[True],
    ) -> DeltaStream: ...

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        use_tqdm: bool = False,
        stream: bool = False,
    ) -> list[RequestOutput] | DeltaStream:
        """Complete prompts.

        Args:
            prompts: one prompt or several; each is text, a list of token ids, or {"prompt_token_ids": ids}, the latter
                also with a "cache_salt": only prompts with the same one share KV in the prefix cache.
            sampling_params: one for all prompts, one for each, or None for the checkpoint's own defaults.
            use_tqdm: show a progress bar on stderr (not with ``stream``).
            stream: return what happens as it happens.

        Returns:
            One finished output a prompt, in the order of the prompts; or the stream of their deltas.

        Raises:
            RequestError: a prompt or its parameters are wrong; names the prompt's index. Nothing has run then.
        """
        call = self._add_all(_as_prompts(prompts), sampling_params, "prompt")
        return DeltaStream(self, call) if stream else self._run(call, use_tqdm)

    @overload
    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params = None,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        cache_salt: str | None = None,
        use_tqdm: bool = False,
        stream: Literal[False] = False,
    ) -> list[RequestOutput]: ...

    @overload
    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params = None,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        cache_salt: str | None = None,
        use_tqdm: bool = False,
        stream: Literal[True],
    ) -> DeltaStream: ...

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params = None,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        cache_salt: str | None = None,
        use_tqdm: bool = False,
        stream: bool = False,
    ) -> list[RequestOutput] | DeltaStream:
        """Answer conversations.

        Args:
            messages: one conversation (a list of {"role": ..., "content": ...}) or a list of conversations.
            sampling_params, use_tqdm, stream: as of ``generate``.
            add_generation_prompt: end the prompt with the header of the assistant's turn.
            tools: JSON schemas of functions that the model may call.
            chat_template_kwargs: more variables for the chat template, such as Qwen3's ``enable_thinking``.
            cache_salt: only conversations with the same one share KV in the prefix cache.

        Returns:
            One finished output a conversation; its ``prompt`` is what the chat template has made of the messages.

        Raises:
            RequestError: a message is wrong (named by its index, and that of its conversation if there are several),
                the model has no chat template, or as of ``generate``. Nothing has run then.
        """
        conversations = _as_conversations(messages)
        prompts: list[Prompt] = []
        for index, conversation in enumerate(conversations):
            try:
                prompts.append(
                    self.engine.chat_prompt(
                        conversation,
                        add_generation_prompt=add_generation_prompt,
                        tools=tools,
                        chat_template_kwargs=chat_template_kwargs,
                        cache_salt=cache_salt,
                    )
                )
            except RequestError as error:
                raise RequestError(_at("conversation", index, len(conversations), error)) from None
        call = self._add_all(prompts, sampling_params, "conversation")
        return DeltaStream(self, call) if stream else self._run(call, use_tqdm)

    def reset_prefix_cache(self) -> bool:
        """Forget all KV that is kept for later hits; False, and nothing happens, while a request runs."""
        with self._engine_lock:
            return self.engine.reset_prefix_cache()

    def _add_all(self, prompts: Sequence[Prompt], params: Params, noun: str) -> _Call:
        """Queue all requests of a call, or none."""
        params_list = self._as_params(params, len(prompts), noun)
        call_number = next(self._call_numbers)
        call = _Call([f"{call_number}-{index}" for index in range(len(prompts))])
        try:
            for index, (prompt, request_params) in enumerate(zip(prompts, params_list, strict=True)):
                self._calls[call.request_ids[index]] = call  # first: an interrupt may come before the next line ends
                try:
                    with self._engine_lock:
                        self.engine.add_request(call.request_ids[index], prompt, request_params)
                except RequestError as error:
                    raise RequestError(_at(noun, index, len(prompts), error)) from None
        except BaseException:
            self._end(call)
            raise
        self._abort_abandoned()
        return call

    def _run(self, call: _Call, use_tqdm: bool) -> list[RequestOutput]:
        from tqdm import tqdm

        finished: dict[str, RequestOutput] = {}
        num_tokens = 0
        num_prompts = len(call.request_ids)
        try:
            with tqdm(total=num_prompts, desc="Generating", unit="prompt", disable=not use_tqdm) as bar:
                while len(finished) < num_prompts:
                    delta = self._next_delta(call)
                    if delta is None:
                        raise RequestError("a request of this call was aborted from outside: it has no output")
                    num_tokens += len(delta.new_token_ids)
                    if delta.final is None:
                        continue
                    finished[delta.request_id] = delta.final
                    if use_tqdm and (elapsed := bar.format_dict["elapsed"]):
                        bar.set_postfix_str(f"{num_tokens / elapsed:.1f} tok/s", refresh=False)
                    bar.update()
        finally:  # Ctrl-C included: whatever happens, no request stays behind
            self._end(call)
        return [finished[request_id] for request_id in call.request_ids]

    def _next_delta(self, call: _Call) -> RequestDelta | None:
        """The next delta of a call that has not ended; deltas of other calls wait for those.

        None when there will be none, because its requests were aborted through the engine.
        """
        while not call.deltas:
            if not self.engine.num_unfinished_requests:
                return None
            with self._engine_lock:
                try:
                    deltas = self.engine.step()
                except BaseException:  # a step's tokens are lost: no request that runs has a whole output any more
                    self._abandoned.extend(self._calls)
                    raise
            for delta in deltas:
                owner = self._calls.get(delta.request_id)
                if owner is None:  # added to the engine by hand
                    continue
                owner.deltas.append(delta)
                if delta.final is not None:
                    del self._calls[delta.request_id]
            self._abort_abandoned()
        return call.deltas.popleft()

    def _end(self, call: _Call) -> None:
        """Abort what is left of a call; safe at any moment, also from a finaliser in the middle of a step."""
        self._abandoned.extend(request_id for request_id in call.request_ids if request_id in self._calls)
        call.deltas.clear()
        self._abort_abandoned()

    def _abort_abandoned(self) -> None:
        while self._abandoned and self._engine_lock.acquire(blocking=False):
            try:
                while self._abandoned:
                    request_id = self._abandoned.popleft()
                    self._calls.pop(request_id, None)
                    with contextlib.suppress(EngineDeadError):  # then nothing runs any more
                        self.engine.abort(request_id)
            finally:
                self._engine_lock.release()

    def _as_params(self, params: Params, num_prompts: int, noun: str) -> list[SamplingParams]:
        if params is None:
            params = self.engine.default_sampling_params()
        if isinstance(params, SamplingParams):
            return [params] * num_prompts
        if not isinstance(params, Sequence):
            raise RequestError(
                f"sampling_params must be a SamplingParams or a list of them, got {type(params).__name__}"
            )
        if len(params) != num_prompts:
            raise RequestError(f"{len(params)} sampling_params for {num_prompts} {noun}s: give one, or one for each")
        return list(params)


class DeltaStream(Iterator["RequestDelta"]):
    """Deltas of one call of ``generate`` or ``chat``, in the order in which they happen.

    The part of ``RequestDelta.request_id`` after the last "-" is the index of the prompt. Whoever stops early aborts
    what is left: by ``close()``, by leaving a ``with`` block, or by dropping the stream. Calls of one LLM may be
    interleaved: a step serves all of them, and what belongs to another call waits there.
    """

    def __init__(self, llm: LLM, call: _Call) -> None:
        self._llm = llm
        self._call = call
        self._num_unfinished = len(call.request_ids)

    def __next__(self) -> RequestDelta:
        if not self._num_unfinished:
            raise StopIteration
        try:
            delta = self._llm._next_delta(self._call)
        except BaseException:
            self.close()
            raise
        if delta is None:
            self.close()
            raise StopIteration
        self._num_unfinished -= delta.final is not None
        return delta

    def close(self) -> None:
        """Abort what has not ended; the stream is over."""
        if self._num_unfinished:
            self._num_unfinished = 0
            self._llm._end(self._call)

    def __enter__(self) -> DeltaStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


class _Call:
    """The requests of one call, and the deltas of theirs that nobody has taken yet."""

    __slots__ = ("deltas", "request_ids")

    def __init__(self, request_ids: list[str]) -> None:
        self.request_ids = request_ids
        self.deltas: deque[RequestDelta] = deque()


def _at(noun: str, index: int, count: int, error: RequestError) -> str:
    return f"{noun} {index}: {error}" if count > 1 else str(error)


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A single prompt (text, a mapping, or a flat list of ids) becomes a list of one."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise RequestError(f"prompts must be text, token ids or a list of them, got {type(prompts).__name__}")
    if len(prompts) and isinstance(prompts[0], int):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _as_conversations(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[Sequence[Message]]:
    """A single conversation (its first item is no list) becomes a list of one."""
    is_several = (
        isinstance(messages, Sequence)
        and len(messages) > 0
        and isinstance(messages[0], Sequence)
        and not isinstance(messages[0], str | bytes)
    )
    return list(messages) if is_several else [messages]  # type: ignore[return-value,list-item]
