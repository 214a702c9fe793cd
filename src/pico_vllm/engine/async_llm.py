"""AsyncLLM: one engine for many asyncio tasks; a request is an async generator of deltas.

Two halves. ``_EngineThread`` owns the LLMEngine: it builds it, runs it and is the only thread that touches it. It
blocks on its inbox while there is nothing to compute, and takes in what has arrived between two steps. ``AsyncLLM``
lives in the event loops: it posts commands into the inbox, and the deltas of a step come back with one
``call_soon_threadsafe`` for each loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import queue
import threading
import uuid
import weakref
from typing import TYPE_CHECKING, Any

from pico_vllm.config import EngineConfig
from pico_vllm.engine.engine_core import EngineCore
from pico_vllm.engine.llm_engine import LLMEngine
from pico_vllm.errors import EngineDeadError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Mapping, Sequence

    from pico_vllm.engine.input_processor import Prompt
    from pico_vllm.outputs import RequestDelta
    from pico_vllm.sampling_params import SamplingParams, StructuredOutputsParams

logger = logging.getLogger(__name__)

_MAX_STOP_S = 10.0  # at the interpreter's exit: longer than any step


class AsyncLLM:
    """An engine for asyncio; may be built inside or outside an event loop (it blocks while the model is loaded).

    Args:
        model: directory with config.json, safetensors and tokenizer.json; None = SmolLM2-135M-Instruct, fetched once.
        options: any field of ``EngineConfig`` and its groups (dtype, block_size, max_num_seqs, …).

    Raises:
        ConfigError, WeightLoadError: an option is wrong, or the model cannot be had, read or run here.

    Example:
        >>> async with AsyncLLM() as llm:
        ...     async for delta in llm.generate("The capital of France is", SamplingParams(max_tokens=4)):
        ...         print(delta.new_text, end="")
    """

    def __init__(self, model: str | None = None, **options: Any) -> None:
        progress = options.pop("progress", None)
        config = EngineConfig.from_options(model=model, **options)
        self._thread = _EngineThread(functools.partial(LLMEngine, config, progress=progress))
        # Also at the interpreter's exit, where a daemon thread in the middle of a step could crash it.
        self._stop_when_dropped = weakref.finalize(self, self._thread.stop_and_join, _MAX_STOP_S)

    @property
    def engine(self) -> LLMEngine:
        """The engine, to look at (its config, tokenizer, stats): only its own thread may call it."""
        return self._thread.engine

    def default_sampling_params(self, **overrides: Any) -> SamplingParams:
        """What the checkpoint's ``generation_config.json`` asks for (greedy if it doesn't), but for ``overrides``."""
        return self.engine.default_sampling_params(**overrides)

    def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, request_id: str | None = None
    ) -> AsyncGenerator[RequestDelta, None]:
        """Complete a prompt.

        The request is queued at the generator's first step, and aborted when it is closed, cancelled or dropped before
        its end.

        Args:
            prompt: text, token ids, or {"prompt_token_ids": ids}, there also with a "cache_salt".
            params: how to sample; None = the checkpoint's own defaults.
            request_id: unique among live requests; None = a new one.

        Yields:
            What each step adds, ``params.n`` samples interleaved; the last delta has ``final``. A request that was
            aborted by its id ends in the same way, with the finish reason "abort".

        Raises:
            RequestError: this request is wrong; all others go on.
            EngineDeadError: the engine has failed (the cause is chained) or was shut down.
        """
        return self._stream(lambda: prompt, params, request_id)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        cache_salt: str | None = None,
    ) -> AsyncGenerator[RequestDelta, None]:
        """Answer a conversation: ``generate`` on what the chat template makes of the messages.

        Args:
            messages: dicts with "role" and "content"; not to be changed before the first delta.
            add_generation_prompt, tools, chat_template_kwargs, cache_salt: as of ``LLM.chat``.
        """
        make_prompt = functools.partial(
            self.engine.chat_prompt,
            messages,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
            cache_salt=cache_salt,
        )
        return self._stream(make_prompt, params, request_id)

    async def abort(self, request_id: str) -> bool:
        """End a request in any state; its generator gets a last delta with the finish reason "abort".

        Returns:
            False when it is unknown or has ended: nothing happened.
        """
        return await self._ask(functools.partial(self._thread.abort_id, request_id))

    async def reset_prefix_cache(self) -> bool:
        """Forget all KV that is kept for later hits; False, and nothing happens, while a request runs."""
        return await self._ask(self.engine.reset_prefix_cache)

    async def _ask(self, ask: Callable[[], bool]) -> bool:
        """Let the engine's thread call something between two steps, and wait for what it says."""
        loop = asyncio.get_running_loop()
        reply: asyncio.Future[bool] = loop.create_future()
        self._thread.post(functools.partial(self._thread.answer, ask, loop, reply))
        return await reply

    async def shutdown(self) -> None:
        """Abort all requests (each generator gets its last delta) and end the engine; again does nothing."""
        await asyncio.to_thread(self._thread.stop_and_join)

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.shutdown()

    async def _stream(
        self, make_prompt: Callable[[], Prompt], params: SamplingParams | None, request_id: str | None
    ) -> AsyncGenerator[RequestDelta, None]:
        if request_id is None:
            request_id = f"request-{uuid.uuid4().hex}"
        stream = _Stream(request_id, asyncio.get_running_loop())
        if params is not None and params.structured_outputs is not None:
            await self._grammar_is_ready(params.structured_outputs)
        self._thread.post(functools.partial(self._thread.add, stream, make_prompt, params))
        has_ended = False
        try:
            while not has_ended:
                item = await stream.items.get()
                if isinstance(item, Exception):
                    has_ended = True
                    raise item
                has_ended = item.final is not None
                yield item
        finally:
            if not has_ended:
                with contextlib.suppress(EngineDeadError):
                    self._thread.post(functools.partial(self._thread.abort, stream))

    async def _grammar_is_ready(self, grammar: StructuredOutputsParams) -> None:
        """Wait for the grammar here, so that the engine's thread doesn't while others stream; errors come when added.

        A core in a process of its own compiles where it adds: a typical schema takes it a millisecond.
        """
        core = self.engine.core
        if isinstance(core, EngineCore):
            await asyncio.wait([asyncio.wrap_future(core.structured_output.prepare(grammar))])


class _Stream:
    """One request's way from the engine's thread to its generator."""

    __slots__ = ("items", "loop", "request_id")

    def __init__(self, request_id: str, loop: asyncio.AbstractEventLoop) -> None:
        self.request_id = request_id
        self.loop = loop
        self.items: asyncio.Queue[RequestDelta | Exception] = asyncio.Queue()


class _EngineThread:
    """The thread that owns an engine. ``post``, ``stop_and_join`` are for other threads; the rest runs in this one.

    Args:
        make_engine: called in the thread; what it raises is raised here.
    """

    def __init__(self, make_engine: Callable[[], LLMEngine]) -> None:
        self.engine: LLMEngine
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()  # None = stop
        self._streams: dict[str, _Stream] = {}  # live requests
        #: Why the thread takes no commands any more. Under the lock, so that none is posted unseen behind the last.
        self._end: Exception | None = None
        self._lock = threading.Lock()
        self._is_built = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(make_engine,), name="pico-vllm-engine", daemon=True)
        self._thread.start()
        try:
            self._is_built.wait()
        except BaseException:  # Ctrl-C while the model is loaded
            self._inbox.put(None)
            raise
        if self._end is not None:
            raise self._end

    # ---- from other threads ----------------------------------------------------------------------------------------

    def post(self, command: Callable[[], None]) -> None:
        """Have a command run between two steps.

        Raises:
            EngineDeadError: the thread has ended.
        """
        with self._lock:
            if self._end is not None:
                raise _dead(self._end)
            self._inbox.put(command)

    def stop_and_join(self, timeout_s: float | None = None) -> None:
        """Let the step in progress end, abort all requests, and end the thread."""
        with self._lock:
            if self._end is None:
                self._inbox.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    # ---- commands --------------------------------------------------------------------------------------------------

    def add(self, stream: _Stream, make_prompt: Callable[[], Prompt], params: SamplingParams | None) -> None:
        """Queue a request; whatever is wrong with it is its own generator's."""
        if self._end is not None:
            self._send(stream.loop, [(stream, _dead(self._end))])
            return
        try:
            params = self.engine.default_sampling_params() if params is None else params
            self.engine.add_request(stream.request_id, make_prompt(), params)
        except EngineDeadError as error:
            self._send(stream.loop, [(stream, _dead(error))])
            raise
        except Exception as error:
            self._send(stream.loop, [(stream, error)])
        else:
            self._streams[stream.request_id] = stream

    def abort(self, stream: _Stream) -> None:
        """End a request that nobody listens to, unless it has ended."""
        if self._end is None and self._streams.get(stream.request_id) is stream:
            del self._streams[stream.request_id]
            self.engine.abort(stream.request_id)

    def abort_id(self, request_id: str) -> bool:
        """End a request and tell its generator; whether there was one."""
        deltas = self.engine.abort(request_id)
        self._hand_over(deltas)
        return bool(deltas)

    def answer(self, ask: Callable[[], bool], loop: asyncio.AbstractEventLoop, reply: asyncio.Future[bool]) -> None:
        """Call ``ask`` and tell whoever waits for it in their loop, or why there is no answer any more."""
        result: bool | Exception
        try:
            result = _dead(self._end) if self._end is not None else ask()
        except EngineDeadError as error:  # the next step says so to everybody
            result = _dead(error)
        with contextlib.suppress(RuntimeError):  # that loop is closed
            loop.call_soon_threadsafe(_settle, reply, result)

    # ---- the thread ------------------------------------------------------------------------------------------------

    def _run(self, make_engine: Callable[[], LLMEngine]) -> None:
        try:
            self.engine = make_engine()
        except BaseException as error:
            self._end = error if isinstance(error, Exception) else _dead(error)
            return
        finally:
            del make_engine
            self._is_built.set()
        try:
            while self._take_in():
                self._hand_over(self.engine.step())
            end: Exception = EngineDeadError("the engine was shut down: build a new one")
            self._abort_all()
        except BaseException as error:
            logger.exception("the engine has failed")
            end = _dead(error)
        with self._lock:
            self._end = end
        for stream in self._streams.values():
            self._send(stream.loop, [(stream, _dead(end))])
        self._streams.clear()
        with contextlib.suppress(queue.Empty):
            while True:  # what was posted before the end: each command sees that it came too late
                command = self._inbox.get_nowait()
                if command is not None:
                    command()
        try:
            self.engine.shutdown()
        except Exception:
            logger.exception("the engine could not be shut down")

    def _take_in(self) -> bool:
        """Run what has arrived; waits while there is nothing to compute. False = stop."""
        while True:
            try:
                command = self._inbox.get(block=not self.engine.has_unfinished_requests())
            except queue.Empty:
                return True
            if command is None:
                return False
            command()
            del command  # it would keep the last request alive while the thread waits

    def _hand_over(self, deltas: Sequence[RequestDelta]) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Stream, RequestDelta | Exception]]] = {}
        for delta in deltas:
            stream = self._streams.get(delta.request_id)
            if stream is None:  # its generator is gone
                continue
            by_loop.setdefault(stream.loop, []).append((stream, delta))
            if delta.final is not None:
                del self._streams[delta.request_id]
        for loop, items in by_loop.items():
            self._send(loop, items)

    def _send(self, loop: asyncio.AbstractEventLoop, items: list[tuple[_Stream, RequestDelta | Exception]]) -> None:
        try:
            loop.call_soon_threadsafe(_deliver, items)
        except RuntimeError:  # the loop was closed before its requests had ended
            for stream, _ in items:
                self.abort(stream)

    def _abort_all(self) -> None:
        for request_id in list(self._streams):
            self._hand_over(self.engine.abort(request_id))


def _deliver(items: Sequence[tuple[_Stream, RequestDelta | Exception]]) -> None:
    for stream, item in items:
        stream.items.put_nowait(item)


def _settle(reply: asyncio.Future[bool], result: bool | Exception) -> None:
    if reply.done():  # cancelled meanwhile
        return
    if isinstance(result, Exception):
        reply.set_exception(result)
    else:
        reply.set_result(result)


def _dead(cause: BaseException) -> EngineDeadError:
    """A new error for one waiter: an exception that several tasks raise would collect all their tracebacks."""
    if isinstance(cause, EngineDeadError):
        error = EngineDeadError(str(cause))
        error.__cause__ = cause.__cause__
    else:
        error = EngineDeadError(f"the engine has failed ({type(cause).__name__}: {cause}): build a new one")
        error.__cause__ = cause
    return error
