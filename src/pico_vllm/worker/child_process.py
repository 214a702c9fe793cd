"""Processes of our own: how one is started, and how it ends with the process that has started it.

Used by the engine core's process and by those of the ranks. Standard library only: a child imports this first.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

PARENT_CHECK_S = 0.5
STDIN, STDERR = 0, 2


def start_module(name: str, *arguments: str, pass_fds: Sequence[int] = ()) -> subprocess.Popen[bytes]:
    """Run a module with the Python, the environment and the import path of this process.

    - Its standard input is a pipe that nobody writes to: when it ends, in whatever way this process has died, the child
      ends too (``end_with_parent``).
    - Its standard output is our standard error; so is its own standard error, with its logs.
    - Ctrl-C at a terminal reaches both. The child is started with SIGINT blocked, and later ignores it.

    Args:
        name: of the module.
        arguments: of its command line.
        pass_fds: file descriptors that it keeps.
    """
    command = [sys.executable, "-P", "-m", name, *arguments]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # a new process inherits the mask
    try:
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=STDERR, env=environment, pass_fds=pass_fds)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def how_it_ended(process: subprocess.Popen[bytes]) -> str | None:
    """How a child has ended, or None while it lives. 1 us."""
    code = process.poll()
    if code is None:
        return None
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"has ended with exit code {code}"


def ignore_ctrl_c() -> None:
    """In a child, once it runs: Ctrl-C is its parent's business."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def end_with_parent(clean_up: Callable[[], None] = lambda: None) -> None:
    """End this process when its parent is gone: its standard input ends, or it has got another parent.

    (A fork of the parent may hold the other end of the pipe and outlive it; hence both.)

    Args:
        clean_up: called before that.
    """
    threading.Thread(target=_watch_parent, args=(os.getppid(), clean_up), daemon=True).start()


def _watch_parent(parent_pid: int, clean_up: Callable[[], None]) -> None:
    while True:
        readable, _, _ = select.select([STDIN], [], [], PARENT_CHECK_S)
        if (readable and not os.read(STDIN, 1)) or os.getppid() != parent_pid:
            clean_up()
            os._exit(1)
