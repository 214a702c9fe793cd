"""EngineCoreClient: how a front end reaches its core, in this process or in one of its own.

In this process the client is the EngineCore itself. ProcessCoreClient starts ``core_process.py`` (core_connection.py)
and speaks ``core_messages.py`` with it. The core runs its loop by itself, and ``step`` takes what has arrived: so
detokenising overlaps with the next step. The core does not wait for anyone to read: it may be several tokens ahead.
"""

from __future__ import annotations

import itertools
import logging
import os
import sys
import threading
import weakref
from collections import deque
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, TypeVar

from pico_vllm.engine.core_connection import POLL_MS, CoreConnection
from pico_vllm.engine.core_messages import (
    PROTOCOL_VERSION,
    Abort,
    AddReply,
    Failed,
    FromCore,
    Hello,
    Progress,
    Ready,
    RequestStep,
    ResetPrefixCache,
    ResetReply,
    Start,
    StepOutputs,
    encode,
    encode_request,
    output_of,
)
from pico_vllm.engine.engine_core import EngineCore, EngineLimits
from pico_vllm.engine.stats import StepTimes
from pico_vllm.errors import (
    ConfigError,
    EngineDeadError,
    KVTransferError,
    PicoVLLMError,
    RequestError,
    WeightLoadError,
)
from pico_vllm.kv_cache import CacheStats
from pico_vllm.request import FinishReason
from pico_vllm.scheduler.admission import checked_max_tokens
from pico_vllm.worker.follower import serve_if_launched_as_follower

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pico_vllm.config import EngineConfig, ModelConfig
    from pico_vllm.models.source import ModelSource
    from pico_vllm.outputs import EngineCoreOutput
    from pico_vllm.request import Request

    #: Called with (phase, done, total) while an engine starts.
    StartProgress = Callable[[str, int, int], None]

_MessageT = TypeVar("_MessageT", bound=FromCore)

logger = logging.getLogger(__name__)

LAST_WORDS_MS = 200  # what a process has sent before it died may still be on its way
_START_ERRORS: dict[str, type[PicoVLLMError]] = {
    kind.__name__: kind for kind in (ConfigError, RequestError, WeightLoadError, KVTransferError)
}


class EngineCoreClient(Protocol):
    """A core as its front end sees it. Once it has failed, every method raises EngineDeadError with the cause."""

    @property
    def limits(self) -> EngineLimits:
        """What the core has learned at its start."""
        ...

    @property
    def last_times(self) -> StepTimes:
        """Where the time went in the steps that the last call of ``step`` has brought."""
        ...

    @property
    def cache_stats(self) -> CacheStats:
        """Hits and evictions since the start, and where the blocks are, as far as is known here."""
        ...

    def add_request(self, request: Request) -> None:
        """Queue a request; RequestError if its id is in use or it can never run."""
        ...

    def abort(self, request_id: str) -> bool:
        """End a request in any state, with no further output; False when it is unknown or has finished."""
        ...

    def reset_prefix_cache(self) -> bool:
        """Forget all KV that is kept for later hits; False, and nothing happens, while a request runs."""
        ...

    def has_unfinished_requests(self) -> bool:
        """Whether ``step`` has anything to do."""
        ...

    def step(self) -> list[EngineCoreOutput]:
        """Wait for what is next; a request may appear more than once. Nothing when nothing is unfinished."""
        ...

    def shutdown(self) -> None:
        """End the core; later calls of the other methods raise EngineDeadError. Calling it twice does no harm."""
        ...


def start_engine_core(
    config: EngineConfig, model_config: ModelConfig, source: ModelSource, *, progress: StartProgress | None = None
) -> EngineCoreClient:
    """Build the core of an engine where its configuration wants it.

    Raises:
        ConfigError, WeightLoadError: the model cannot be read or run here; the same in either place.
        EngineDeadError: the core's process, or one of the ranks', has ended before it was ready.
        SystemExit: torchrun has started this process to serve as another rank, and rank 0 has ended.
    """
    serve_if_launched_as_follower(config, model_config, source)
    if config.engine_core_process:
        return ProcessCoreClient(config, source.path, progress=progress)
    load_progress = None if progress is None else lambda done, total: progress("load", done, total)
    return EngineCore(config, model_config, source, progress=load_progress)


def core_in_this_process(client: EngineCoreClient) -> EngineCore:
    """The core itself, for whoever looks inside it.

    Raises:
        ConfigError: it is in another process.
    """
    if not isinstance(client, EngineCore):
        raise ConfigError("engine_core_process=True: nobody can look into a core in another process; use False")
    return client


class ProcessCoreClient:
    """An engine core in a process of its own. Any thread may call any method, also while another waits in ``step``.

    Args:
        config: of the engine.
        model_path: of its model on this machine.
        progress: called with (phase, done, total) while the core starts.

    Raises:
        ConfigError, WeightLoadError: as ``EngineCore`` itself raises them.
        EngineDeadError: the process has ended before it was ready.
    """

    def __init__(self, config: EngineConfig, model_path: Path, *, progress: StartProgress | None = None) -> None:
        self.last_times = StepTimes(num_steps=0)
        self._keys = itertools.count()
        self._live_keys: dict[str, int] = {}  # of the requests whose end has not been handed out
        self._live_ids: dict[int, str] = {}  # the same the other way round
        self._arrived: deque[StepOutputs] = deque()
        self._awaited_keys: set[int] = set()
        self._replies: dict[int, AddReply | ResetReply] = {}
        #: As of the last outputs that have arrived.
        self.cache_stats = CacheStats()
        self._death: str | None = None
        self._send_lock = threading.Lock()
        self._receive_lock = threading.Lock()
        self._connection = CoreConnection()
        #: Runs when it is called, when this object is collected or when the interpreter ends: once.
        self._close = weakref.finalize(self, self._connection.close)
        try:
            self.limits = self._start(config, model_path, progress)
        except BaseException:
            self._close()
            raise

    @property
    def pid(self) -> int:
        """Of the core's process."""
        return self._connection.process.pid

    def add_request(self, request: Request) -> None:
        """Queue a request.

        Only the core can tell whether structured outputs compile, so such a request waits for its word, which comes
        between two steps. Everything else is known here.

        Raises:
            RequestError: its id is in use, it can never run, or it cannot be sent (logits processors).
            EngineDeadError: the core has failed. So do all methods.
        """
        self._raise_if_dead()
        limits = self.limits
        request.max_tokens = checked_max_tokens(
            request, max_model_len=limits.max_model_len, num_blocks=limits.num_blocks, block_size=limits.block_size
        )
        key = next(self._keys)
        wants_reply = request.params.structured_outputs is not None
        message = encode_request(key, request, wants_reply=wants_reply)
        if self._live_keys.setdefault(request.request_id, key) != key:
            raise RequestError(f"request_id {request.request_id!r} is in use by an unfinished request: choose another")
        self._live_ids[key] = request.request_id
        try:
            if wants_reply:
                reply = self._send_and_await_reply(key, message)
                assert isinstance(reply, AddReply)
                if reply.error is not None:
                    raise RequestError(reply.error)
            else:
                self._send(message)
        except BaseException:
            self._forget(key)
            with suppress(EngineDeadError):
                self._send(encode(Abort(request.request_id)))
            raise

    def abort(self, request_id: str) -> bool:
        """End a request in any state; False when it is unknown or its end was handed out. Does not wait."""
        self._raise_if_dead()
        key = self._live_keys.get(request_id)
        if key is None:
            return False
        self._forget(key)
        self._send(encode(Abort(request_id)))
        return True

    def reset_prefix_cache(self) -> bool:
        """Forget all KV that is kept for later hits; the core answers between two steps.

        Returns:
            False while a request runs there, and then nothing has happened.
        """
        self._raise_if_dead()
        key = next(self._keys)
        reply = self._send_and_await_reply(key, encode(ResetPrefixCache(key)))
        assert isinstance(reply, ResetReply)
        return reply.is_done

    def has_unfinished_requests(self) -> bool:
        """Whether ``step`` has anything to do."""
        self._raise_if_dead()
        return bool(self._live_keys)

    def step(self) -> list[EngineCoreOutput]:
        """Wait for outputs, and return all that have arrived.

        Raises:
            EngineDeadError: the core has failed.
            KeyboardInterrupt: Ctrl-C. The engine is sound, but what arrived meanwhile may be lost: abort the requests
                that were under way.
        """
        self.last_times = StepTimes(num_steps=0)
        self._receive(0)
        while True:
            if outputs := self._take_arrived():
                return outputs
            if not self.has_unfinished_requests():
                return []
            self._receive(POLL_MS)

    def shutdown(self) -> None:
        """End the process; if it does not end itself within a second, it is killed."""
        self._death = self._death or "the engine has been shut down"
        with self._send_lock, self._receive_lock:
            self._close()

    def _start(self, config: EngineConfig, model_path: Path, progress: StartProgress | None) -> EngineLimits:
        hello = self._await_start(Hello, None)
        if hello.version != PROTOCOL_VERSION:
            raise EngineDeadError(
                f"the engine core's process speaks protocol {hello.version} and this one {PROTOCOL_VERSION}: pico-vllm "
                "was changed on disk meanwhile; restart"
            )
        torch = sys.modules.get("torch")
        self._send(
            encode(
                Start(
                    options=replace(config, model=os.path.abspath(model_path), revision=None).to_options(),
                    log_level=logging.getLogger("pico_vllm").getEffectiveLevel(),
                    num_threads=None if torch is None else torch.get_num_threads(),
                )
            )
        )
        ready = self._await_start(Ready, progress)
        self._connection.remove_directory()
        logger.info("the engine core runs in process %d", self.pid)
        return EngineLimits(**ready.limits)

    def _await_start(self, kind: type[_MessageT], progress: StartProgress | None) -> _MessageT:
        """The next message of one kind, however long it takes while the process lives; reports progress meanwhile."""
        while True:
            message = self._connection.receive(POLL_MS)
            if message is None and (cause := self._connection.cause_of_death()) is not None:
                message = self._connection.receive(LAST_WORDS_MS)
                if message is None:
                    raise EngineDeadError(f"{cause} before it was ready; its standard error may say why")
            if isinstance(message, kind):
                return message
            if isinstance(message, Failed):
                raise _start_error(message)
            if isinstance(message, Progress) and progress is not None:
                progress(message.phase, message.done, message.total)

    def _raise_if_dead(self) -> None:
        if self._death is None and (cause := self._connection.cause_of_death()) is not None:
            self._receive(LAST_WORDS_MS)
            self._death = self._death or cause
        if self._death is not None:
            raise EngineDeadError(self._death)

    def _send(self, message: bytes) -> None:
        with self._send_lock:
            is_sent = self._death is None and self._connection.send(message)
        if not is_sent:
            self._raise_if_dead()

    def _send_and_await_reply(self, key: int, message: bytes) -> AddReply | ResetReply:
        self._awaited_keys.add(key)
        try:
            self._send(message)
            while key not in self._replies:
                self._raise_if_dead()
                self._receive(POLL_MS)
            return self._replies[key]
        finally:
            self._awaited_keys.discard(key)
            self._replies.pop(key, None)

    def _receive(self, timeout_ms: int) -> None:
        """Take in all that has arrived; if nothing has, wait for something."""
        if not self._receive_lock.acquire(timeout=timeout_ms / 1e3):
            return  # another thread is at it
        try:
            if self._death is not None:
                return
            message = self._connection.receive(timeout_ms)
            while message is not None:
                self._take_in(message)
                message = self._connection.receive(0)
        finally:
            self._receive_lock.release()

    def _take_in(self, message: FromCore) -> None:
        if isinstance(message, StepOutputs):
            self._arrived.append(message)
            self.cache_stats = message.cache
        elif isinstance(message, ResetReply):
            self.cache_stats = message.cache
            if message.key in self._awaited_keys:
                self._replies[message.key] = message
        elif isinstance(message, Failed):
            self._death = f"{_first_line(message)}\n\nIn the engine core's process:\n{message.traceback}"
        elif isinstance(message, AddReply):
            if message.key in self._awaited_keys:
                self._replies[message.key] = message
            elif message.error is not None:
                # The checks here and there are the same, so this is a bug of ours; it costs this request alone.
                logger.error("the engine core refuses a request that was let through: %s", message.error)
                step = RequestStep(message.key, (), FinishReason.ABORT, None, (), ())
                self._arrived.append(StepOutputs((step,), StepTimes(num_steps=0), self.cache_stats))

    def _take_arrived(self) -> list[EngineCoreOutput]:
        """Outputs of the requests that are still live; ends those that have ended."""
        outputs: list[EngineCoreOutput] = []
        while self._arrived:
            message = self._arrived.popleft()
            self.last_times += message.times
            for step in message.steps:
                request_id = self._live_ids.get(step.key)
                if request_id is None:  # aborted meanwhile
                    continue
                if step.finish_reason is not None:
                    self._forget(step.key)
                outputs.append(output_of(request_id, step))
        return outputs

    def _forget(self, key: int) -> None:
        request_id = self._live_ids.pop(key, None)
        if request_id is not None and self._live_keys.get(request_id) == key:
            del self._live_keys[request_id]


def _start_error(failure: Failed) -> PicoVLLMError:
    """The error that the core has raised while it was built; one that is not ours carries its traceback."""
    kind = _START_ERRORS.get(failure.error_type)
    if kind is None:
        return EngineDeadError(
            f"the engine core could not be built: {failure.error_type}: {failure.message}\n\n"
            f"In the engine core's process:\n{failure.traceback}"
        )
    error = kind(failure.message)
    error.add_note(f"In the engine core's process:\n{failure.traceback}")
    return error


def _first_line(failure: Failed) -> str:
    """The same words as in process for a step; others name the error."""
    if failure.error_type == EngineDeadError.__name__:
        return failure.message
    return f"the engine core has failed: {failure.error_type}: {failure.message}"
