"""CoreConnection: the front end's end of the wire to an engine core's process, and that process itself.

Owns the process, the two ZeroMQ pairs (Unix sockets in a private directory) and the directory. It knows when the
process is dead and how to end it; what is said over the wire is core_client.py's business.

How it is started and ends with its front end: worker/child_process.py.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from contextlib import suppress

import zmq

from pico_vllm.engine.core_messages import FromCore, Shutdown, decode_from_core, encode
from pico_vllm.engine.core_process import FROM_CORE, TO_CORE, open_socket
from pico_vllm.worker.child_process import how_it_ended, start_module

POLL_MS = 50
STOP_S = 1.0  # then the process is killed
MAX_SOCKET_PATH_BYTES = 100  # Linux takes 107, macOS 103


class CoreConnection:
    """A new process of ``core_process.py`` and the wire to it. ``send`` and ``receive`` take one thread each."""

    def __init__(self) -> None:
        self._owner_pid = os.getpid()
        self._directory = _private_directory()
        self._context = zmq.Context()
        try:
            self._to_core = open_socket(self._context)
            self._to_core.sndtimeo = POLL_MS
            self._to_core.bind(f"ipc://{self._directory}/{TO_CORE}")
            self._from_core = open_socket(self._context)
            self._from_core.bind(f"ipc://{self._directory}/{FROM_CORE}")
            self.process = start_module("pico_vllm.engine.core_process", self._directory)
        except BaseException:
            self._context.destroy(linger=0)
            self.remove_directory()
            raise

    def send(self, message: bytes) -> bool:
        """Queue a message; waits only for a core that has not connected yet. False when the process is dead."""
        while True:
            try:
                self._to_core.send(message)
                return True
            except zmq.Again:
                if self.cause_of_death() is not None:
                    return False

    def receive(self, timeout_ms: int) -> FromCore | None:
        """The next message, or None when none has come in time."""
        try:
            return decode_from_core(self._from_core.recv(zmq.NOBLOCK))
        except zmq.Again:
            if timeout_ms and self._from_core.poll(timeout_ms):
                return decode_from_core(self._from_core.recv())
            return None

    def cause_of_death(self) -> str | None:
        """How the process has ended, or None while it lives. 1 us."""
        how = how_it_ended(self.process)
        return None if how is None else f"the engine core's process (pid {self.process.pid}) {how}"

    def remove_directory(self) -> None:
        """Remove the sockets' names. Once both ends are connected nobody needs them, and no one else gets in."""
        shutil.rmtree(self._directory, ignore_errors=True)

    def close(self) -> None:
        """Ask the process to end, kill it if it does not within a second, and free everything."""
        if os.getpid() != self._owner_pid:  # a fork of the front end: nothing here is its own
            return
        with suppress(zmq.ZMQError):
            self._to_core.send(encode(Shutdown()), zmq.NOBLOCK)
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stdin is not None:
            self.process.stdin.close()
        self._context.destroy(linger=0)
        self.remove_directory()


def _private_directory() -> str:
    """A new directory that only this user may enter, short enough for the name of a Unix socket."""
    directory = tempfile.mkdtemp(prefix="pico-vllm-")
    if len(os.fsencode(f"{directory}/{FROM_CORE}")) <= MAX_SOCKET_PATH_BYTES:
        return directory
    os.rmdir(directory)
    return tempfile.mkdtemp(prefix="pico-vllm-", dir="/tmp")
