"""Every op of the backend under pytest-benchmark, at a model's sizes. An op that is wrong isn't timed: it fails.

On a GPU a round replays a CUDA graph of some milliseconds and waits for it, on a CPU it calls from Python.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from pico_vllm.bench.cuda_timing import calls_per_replay, capture, events_s
from pico_vllm.bench.kernel_cases import OPS
from pico_vllm.bench.kernel_cases.case import BoundCall, KernelCase, KernelOp, Tensors
from pico_vllm.bench.kernel_suite import CASE_KEY, KernelSuite, make_suite
from pico_vllm.bench.kernels import make_rotation, mismatch
from pico_vllm.bench.timing import Rotation, cache_bytes

_MEMORY_BYTES = {"cuda": 16 << 30, "cpu": 256 << 20}
_ROUNDS = {"cuda": 30, "cpu": 20}
_ROUND_S = 2e-3  # on a CPU, at least


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test a case of each op that the backend has."""
    suite = make_suite(metafunc.config.getoption("--shape"))
    found = [
        pytest.param(op, case, id=f"{op.name}, {case.name}")
        for op in OPS
        if all(getattr(suite.backend, name, None) is not None for name in op.needs)
        for case in op.cases(suite.shapes, suite.dtype)
    ]
    metafunc.parametrize(("op", "case"), found)


@torch.inference_mode()
def test_op(benchmark: BenchmarkFixture, suite: KernelSuite, op: KernelOp, case: KernelCase) -> None:
    """Right first, then fast."""
    inputs = case.make(suite.device)

    def bind(tensors: Tensors) -> BoundCall:
        return case.bind(suite.backend, tensors)

    assert mismatch(case, bind, inputs, case.expected(inputs)) is None
    kind = suite.device.type
    rotation = make_rotation(
        case, bind, inputs, cache_bytes=cache_bytes(suite.device), memory_bytes=_MEMORY_BYTES[kind]
    )
    with _round(rotation, suite.device) as (call, calls):
        benchmark.extra_info[CASE_KEY] = {
            "op": op.name,
            "case": case.name,
            "model": f"{suite.shapes.name}, pytest-benchmark",
            "dtype": str(suite.dtype).removeprefix("torch."),
            "backend": suite.backend.name,
            "bytes": case.cost.num_bytes,
            "flops": case.cost.flops,
            "calls": calls,
        }
        setup = rotation.restore or (lambda: None)
        benchmark.pedantic(call, setup=setup, rounds=_ROUNDS[kind], iterations=1, warmup_rounds=2)


@contextmanager
def _round(rotation: Rotation, device: torch.device) -> Iterator[tuple[Callable[[], None], int]]:
    """(a round, how often it calls the op)."""
    if device.type == "cpu":
        call_s = min(_host_s(rotation) for _ in range(3))
        num = calls_per_replay(call_s * 2e-3 / _ROUND_S, len(rotation.calls), rotation.max_calls)
        calls = [rotation.calls[i % len(rotation.calls)] for i in range(num)]

        def run() -> None:
            for call in calls:
                call()

        yield run, num
        return
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in rotation.take(2):
            call()
        torch.cuda.synchronize()
        num = calls_per_replay(events_s(rotation.take(1)), len(rotation.calls), rotation.max_calls)
        graph = capture(rotation.take(num), len(rotation.calls))

        def replay() -> None:
            graph.replay()
            stream.synchronize()

        yield replay, num
        graph.reset()
    gc.collect()
    torch.cuda.empty_cache()


def _host_s(rotation: Rotation) -> float:
    (call,) = rotation.take(1)
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
