"""How fast the host is: the speeds that decide how much of a step is Python, launches and messages.

A slow or shared CPU moves every engine's numbers, so these stand beside them in the record:

    python_loop_ns                  one turn of an interpreted loop
    eager_launch_us                 one small op enqueued from Python (on a CPU: executed)
    launch_and_wait_us              the same and the wait for its end, [p50, p99]
    pipe_round_trip_us_after_0ms    a message to another process and back, [p50, p99]
    pipe_round_trip_us_after_10ms   the same after 10 ms of silence, when the other process has gone to sleep

Called by the CLI; about 2 s. Knows nothing of engines.
"""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import time
from multiprocessing.connection import Connection

import torch

from pico_vllm.bench.timing import percentile

_LOOP_TURNS = 1_000_000
_LAUNCHES = 1000
_LAUNCHES_WAITED_FOR = 300
_ROUND_TRIPS = 100
_NUM_VALUES = 5
_EXIT_TIMEOUT_S = 10

#: Sends back what arrives until the other end is closed. A program of its own, not a fork: forking a process that has
#: used CUDA is undefined.
_ECHO_PROGRAM = """
import sys
from multiprocessing.connection import Connection
connection = Connection(int(sys.argv[1]))
try:
    while True:
        connection.send_bytes(connection.recv_bytes())
except (EOFError, OSError):
    pass
"""


def calibrate(device: torch.device) -> dict[str, list[float]]:
    """Measure the host's speeds.

    Args:
        device: where the small ops run.

    Returns:
        Values rounded to 2 digits after the point; see the module for the keys.
    """
    measured = {"python_loop_ns": _python_loop_ns(), **_launches_us(device), **_round_trips_us()}
    return {key: [round(value, 2) for value in values] for key, values in measured.items()}


def _python_loop_ns() -> list[float]:
    values = []
    for _ in range(_NUM_VALUES):
        began = time.perf_counter()
        total = 0
        for i in range(_LOOP_TURNS):
            total += i & 7
        values.append((time.perf_counter() - began) / _LOOP_TURNS * 1e9)
    return values


def _launches_us(device: torch.device) -> dict[str, list[float]]:
    x = torch.zeros(1, device=device)
    enqueued = []
    for _ in range(_NUM_VALUES + 2):  # two are warm-up
        _synchronize(device)
        began = time.perf_counter()
        for _ in range(_LAUNCHES):
            x.add_(1)
        enqueued.append((time.perf_counter() - began) / _LAUNCHES * 1e6)
    _synchronize(device)
    waited = []
    for _ in range(_LAUNCHES_WAITED_FOR):
        began = time.perf_counter()
        x.add_(1)
        _synchronize(device)
        waited.append((time.perf_counter() - began) * 1e6)
    return {"eager_launch_us": enqueued[2:], "launch_and_wait_us": _p50_p99(waited)}


def _round_trips_us() -> dict[str, list[float]]:
    ours, theirs = multiprocessing.Pipe()
    with ours, theirs:
        child = subprocess.Popen(
            [sys.executable, "-c", _ECHO_PROGRAM, str(theirs.fileno())], pass_fds=(theirs.fileno(),)
        )
        theirs.close()
        try:
            measured = {
                f"pipe_round_trip_us_after_{gap_ms}ms": _p50_p99(_time_round_trips(ours, gap_ms * 1e-3))
                for gap_ms in (0, 10)
            }
        finally:
            ours.close()
            try:
                child.wait(_EXIT_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
    return measured


def _time_round_trips(connection: Connection, gap_s: float) -> list[float]:
    _round_trip(connection)  # the first waits for the child's start
    samples = []
    for _ in range(_ROUND_TRIPS):
        if gap_s:
            time.sleep(gap_s)
        began = time.perf_counter()
        _round_trip(connection)
        samples.append((time.perf_counter() - began) * 1e6)
    return samples


def _round_trip(connection: Connection) -> None:
    connection.send_bytes(b"1")
    connection.recv_bytes()  # raises EOFError if the child has died


def _p50_p99(samples: list[float]) -> list[float]:
    return [percentile(samples, 0.5), percentile(samples, 0.99)]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
