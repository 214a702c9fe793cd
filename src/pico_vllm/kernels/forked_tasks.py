"""Tasks run in copies of this process, made by ``fork``: many at once, where threads would wait for Python's lock.

A copy has all that this process has imported, so it starts in milliseconds and need not be told what to do. It knows
nothing of what happens here afterwards, and whatever a task is to leave it must write to the disk. A copy must not
touch the GPU. Nothing here is needed: what no copy has done, the caller does. Called by parallel_compile.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import sys
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from typing import NoReturn

#: Nothing that is done takes so long; a copy may hang if another thread held a lock when it was made.
_PATIENCE_S = 60.0
_INDEX_BYTES = 2


def run_in_copies(
    tasks: Sequence[Callable[[], object]], num_processes: int, *, patience_s: float = _PATIENCE_S
) -> Generator[int]:
    """Run tasks, each in whichever copy is free.

    Args:
        tasks: at most 2^15; begun in this order.
        num_processes: copies; fewer are made if the system allows no more.
        patience_s: without any result for so long, all copies are ended.

    Yields:
        The index of each task that has been done, as soon as it is. Not those of tasks that raised, or whose copy died.
    """
    todo, done = os.pipe(), os.pipe()
    os.write(todo[1], b"".join(index.to_bytes(_INDEX_BYTES, "big") for index in range(len(tasks))))
    os.close(todo[1])  # who reads on when all are taken is at an end
    copies: list[int] = []
    try:
        with warnings.catch_warnings(), suppress(OSError):  # no more processes, or no memory for them
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of locks that other threads hold
            for _ in range(min(num_processes, len(tasks))):
                pid = os.fork()
                if pid == 0:
                    _work(tasks, todo[0], done[1])
                copies.append(pid)
    finally:
        os.close(todo[0])
        os.close(done[1])
    results = select.poll()
    results.register(done[0])
    try:
        while results.poll(patience_s * 1e3) and (index := os.read(done[0], _INDEX_BYTES)):
            yield int.from_bytes(index, "big")
    finally:
        os.close(done[0])
        for pid in copies:
            with suppress(OSError):  # somebody else has waited for it
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def _work(tasks: Sequence[Callable[[], object]], todo: int, done: int) -> NoReturn:
    """What a copy does; it leaves without anything that this process does at its end."""
    try:
        gc.disable()  # the destructor of a tensor or an event would go to the GPU
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(null, stream)
        sys.stdout = sys.stderr = open(1, "w", closefd=False)  # noqa: SIM115 (the caller will hear it)
        # Whoever waits for the end of this process's sockets and pipes is not to wait for its copies.
        low, high = sorted((todo, done))
        os.closerange(3, low)
        os.closerange(low + 1, high)
        os.closerange(high + 1, os.sysconf("SC_OPEN_MAX"))
        while index := os.read(todo, _INDEX_BYTES):
            try:
                tasks[int.from_bytes(index, "big")]()
            except Exception:  # the caller will do it again, and see
                continue
            os.write(done, index)  # fails, and ends this, when the caller has gone
    finally:
        os._exit(0)
