"""Processes that a test has started, by way of the engine, and their end."""

from __future__ import annotations

import time

import psutil

# A hang is a failure. How long things take (well below a second) is nothing to test on a machine that others use too.
NOTICED_S = 20.0


def is_running(pid: int) -> bool:
    """Whether it is there and has not ended."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def assert_end(*pids: int) -> None:
    """Wait until all have ended."""
    deadline = time.monotonic() + NOTICED_S
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline, f"processes {[pid for pid in pids if is_running(pid)]} still run"
        time.sleep(0.01)
