"""``timing`` on a GPU: calls captured in one CUDA graph, replays timed by events.

An op that waits for the device inside can't be captured; it is timed call by call, launches from Python included.
Called by ``kernels`` and ``ceilings``.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import torch

from pico_vllm.bench.timing import FULL_BUDGET, Budget, Call, Rotation, Timing, sample_blocks
from pico_vllm.worker.cuda_graph import no_garbage_collection

_MIN_REPLAY_S = 2e-3
_MAX_REPLAY_S = 20e-3
_MAX_GRAPH_CALLS = 2000


def calls_per_replay(call_s: float, num_sets: int, max_calls: int | None) -> int:
    """Calls to capture: a replay takes 2 to 20 ms and visits every set equally often, where both can be had.

    Args:
        call_s: seconds of one call.
        num_sets: of the rotation.
        max_calls: before the sets are restored; None: any number.
    """
    call_s = max(call_s, 1e-7)
    most = min(_MAX_GRAPH_CALLS, max_calls or _MAX_GRAPH_CALLS, max(1, int(_MAX_REPLAY_S / call_s)))
    wanted = math.ceil(_MIN_REPLAY_S / call_s)
    rounds = math.ceil(wanted / num_sets)
    return min(rounds * num_sets, most)


def time_on_cuda(rotation: Rotation, device: torch.device, budget: Budget = FULL_BUDGET) -> Timing:
    """Seconds of one call, by replays of a CUDA graph where the op allows it; waits for the device."""
    with torch.cuda.device(device):
        before = torch.cuda.current_stream()
        stream = torch.cuda.Stream()  # the default stream can't be captured
        stream.wait_stream(before)
        with torch.cuda.stream(stream):
            timing = _time_on_stream(rotation, budget)
        before.wait_stream(stream)
    return timing


def _time_on_stream(rotation: Rotation, budget: Budget) -> Timing:
    # Compiles, tunes, makes cuBLAS's workspace of this stream.
    for call in rotation.take(2):
        call()
    torch.cuda.synchronize()
    if _waits_for_device(rotation.take(1)[0]):
        return _time_eagerly(rotation, budget)
    call_s = events_s(rotation.take(1))  # of a launch from Python: an upper bound
    try:
        num_calls = calls_per_replay(call_s, len(rotation.calls), rotation.max_calls)
        graph = capture(rotation.take(num_calls), len(rotation.calls))
        call_s = _replay_s(graph, rotation, 2)[-1] / num_calls
        wanted = calls_per_replay(call_s, len(rotation.calls), rotation.max_calls)
        if wanted > num_calls:
            graph.reset()
            num_calls = wanted
            graph = capture(rotation.take(num_calls), len(rotation.calls))
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # something else that a graph can't hold
        torch.cuda.synchronize()
        return _time_eagerly(rotation, budget)
    samples = [took_s / num_calls for took_s in _replay_s(graph, rotation, budget.replays + 2)[2:]]
    graph.reset()
    return Timing.from_samples(samples, "graph")


def _time_eagerly(rotation: Rotation, budget: Budget) -> Timing:
    return Timing.from_samples(sample_blocks(rotation, events_s, budget, _MIN_REPLAY_S), "eager")


def _waits_for_device(call: Call) -> bool:
    """Whether torch sees the call wait for the device, or copy to or from pageable memory."""
    previous = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        return True
    finally:
        torch.cuda.set_sync_debug_mode(previous)
    return False


def events_s(calls: Sequence[Call]) -> float:
    """Seconds between two events around the calls; waits for the second."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for call in calls:
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e-3


def capture(calls: list[Call], num_sets: int) -> torch.cuda.CUDAGraph:
    """Capture the calls on the current stream.

    The results of the last ``num_sets`` calls are kept, so outputs rotate through memory as inputs do. The context
    manager ``torch.cuda.graph`` isn't used: it empties the allocator's cache each time.
    """
    graph = torch.cuda.CUDAGraph()
    pool = torch.cuda.graph_pool_handle()
    results: list[Any] = [None] * num_sets
    with no_garbage_collection():
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            for i, call in enumerate(calls):
                results[i % num_sets] = call()
            graph.capture_end()
        except BaseException:
            _abandon(graph, pool)
            raise
    return graph


def _abandon(graph: torch.cuda.CUDAGraph, pool: Any) -> None:
    """End a capture that has failed, so that the allocator can go on.

    Torch 2.11 leaves the allocator inside the capture when CUDA reports the failure at its end, and every later
    ``empty_cache`` fails (https://github.com/pytorch/pytorch/pull/180395); so its part is ended by hand. Where torch
    has done that already, it refuses.
    """
    with contextlib.suppress(RuntimeError):
        graph.capture_end()
    with contextlib.suppress(RuntimeError):
        torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)


def _replay_s(graph: torch.cuda.CUDAGraph, rotation: Rotation, replays: int) -> list[float]:
    """Seconds of each replay. All are enqueued before the first is waited for: no launch latency between the events."""
    events = []
    for _ in range(replays):
        if rotation.restore is not None:
            rotation.restore()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        events.append((start, end))
    torch.cuda.synchronize()
    return [start.elapsed_time(end) * 1e-3 for start, end in events]
