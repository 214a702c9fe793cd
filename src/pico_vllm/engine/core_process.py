"""An engine core in a process of its own: ``python -m pico_vllm.engine.core_process DIRECTORY``.

Started by core_connection.py, never by hand; DIRECTORY holds the sockets of its front end. It builds the core that a
``Start`` message describes and then runs steps as long as anything is unfinished, taking messages in between. It ends
when it is told to, when a step fails (after it has said why), and when its front end is gone.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import logging
import os
import sys
import traceback
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import zmq

from pico_vllm.config import EngineConfig
from pico_vllm.engine.core_messages import (
    Abort,
    AddReply,
    AddRequest,
    Failed,
    FromCore,
    Hello,
    Progress,
    Ready,
    ResetPrefixCache,
    ResetReply,
    Start,
    StepOutputs,
    ToCore,
    decode_request,
    decode_to_core,
    encode,
    step_of,
)
from pico_vllm.errors import RequestError
from pico_vllm.worker.child_process import end_with_parent, ignore_ctrl_c

if TYPE_CHECKING:
    from pico_vllm.engine.engine_core import EngineCore
    from pico_vllm.engine.stats import StepTimes
    from pico_vllm.outputs import EngineCoreOutput

#: The sockets in the front end's directory.
TO_CORE, FROM_CORE = "to-core", "from-core"
LINGER_MS = 1000  # for the last message


def open_socket(context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
    """One end of a pair; its queues have no limit, so neither side ever waits for the other to read."""
    socket = context.socket(zmq.PAIR)
    socket.sndhwm = socket.rcvhwm = 0
    return socket


def main() -> int:
    """Serve one front end; returns the exit code."""
    ignore_ctrl_c()
    if len(sys.argv) != 2:
        print("this is started by pico_vllm when engine_core_process=True", file=sys.stderr)  # noqa: T201 - a person reads it
        return 2
    directory = sys.argv[1]
    faulthandler.enable()
    end_with_parent(partial(_remove, directory))
    context = zmq.Context()
    try:
        return CoreProcess(context, directory).run()
    finally:
        context.destroy(linger=LINGER_MS)


class CoreProcess:
    """Messages in, steps, messages out."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], directory: str) -> None:
        self._to_core = open_socket(context)
        self._to_core.connect(f"ipc://{directory}/{TO_CORE}")
        self._from_core = open_socket(context)
        self._from_core.connect(f"ipc://{directory}/{FROM_CORE}")
        self._keys: dict[str, int] = {}  # of the unfinished requests
        self._unsent_times: StepTimes | None = None

    def run(self) -> int:
        """Build the core and run it to its end; returns the exit code."""
        self._send(Hello())
        try:
            core = self._build()
            while self._take_messages(core):
                self._send_outputs(core.step(), core)
        except BaseException as error:
            trace = "".join(traceback.format_exception(error))
            self._send(Failed(type(error).__name__, str(error), trace))
            return 1
        return 0

    def _build(self) -> EngineCore:
        start = self._receive(wait=True)
        assert isinstance(start, Start), f"the first message is {start}"
        logging.basicConfig(level=start.log_level, format="%(asctime)s core: %(name)s: %(message)s")
        import torch

        from pico_vllm.engine.engine_core import EngineCore
        from pico_vllm.models.source import find_model

        if start.num_threads is not None:
            torch.set_num_threads(start.num_threads)
        config = EngineConfig.from_options(**start.options)
        source = find_model(config.model, progress=self._send_progress)
        core = EngineCore(
            config,
            source.model_config(),
            source,
            progress=lambda done, total: self._send_progress("load", done, total),
        )
        limits = core.limits
        self._send(Ready({name: getattr(limits, name) for name in limits.__slots__}))
        return core

    def _take_messages(self, core: EngineCore) -> bool:
        """Do what the front end asks, waiting while there is nothing to compute; False when it asks to end."""
        while True:
            message = self._receive(wait=not core.has_unfinished_requests())
            if message is None:
                return True
            if isinstance(message, AddRequest):
                self._add_request(core, message)
            elif isinstance(message, Abort):
                self._keys.pop(message.request_id, None)
                core.abort(message.request_id)
            elif isinstance(message, ResetPrefixCache):
                is_done = core.reset_prefix_cache()
                self._send(ResetReply(message.key, is_done, core.cache_stats))
            else:
                return False

    def _add_request(self, core: EngineCore, message: AddRequest) -> None:
        error = None
        try:
            core.add_request(decode_request(message))
            self._keys[message.request_id] = message.key
        except RequestError as refusal:
            error = str(refusal)
        if error is not None or message.wants_reply:
            self._send(AddReply(message.key, error))

    def _send_outputs(self, outputs: list[EngineCoreOutput], core: EngineCore) -> None:
        times = dataclasses.replace(core.last_times, awaits_caller=False)  # this loop goes on by itself
        if self._unsent_times is not None:
            times = self._unsent_times + times
        self._unsent_times = None if outputs else times
        if not outputs:
            return
        steps = tuple([step_of(self._keys[output.request_id], output) for output in outputs])
        self._send(StepOutputs(steps, times, core.cache_stats))
        for output in outputs:
            if output.finish_reason is not None:
                del self._keys[output.request_id]

    def _send_progress(self, phase: str, done: int, total: int) -> None:
        self._send(Progress(phase, done, total))

    def _send(self, message: FromCore) -> None:
        self._from_core.send(encode(message))

    def _receive(self, *, wait: bool) -> ToCore | None:
        try:
            return decode_to_core(self._to_core.recv(0 if wait else zmq.NOBLOCK))
        except zmq.Again:
            return None


def _remove(directory: str) -> None:
    """Remove the sockets' names, left behind when the front end has died before this process was connected."""
    with suppress(OSError):
        for name in (TO_CORE, FROM_CORE):
            os.unlink(os.path.join(directory, name))
        os.rmdir(directory)


if __name__ == "__main__":
    sys.exit(main())
