"""How long one call takes, when no call finds its inputs in a cache: the parts that no device is needed for.

The same op is bound to several equal sets of tensors (a ``Rotation``); calls walk over the sets, so what a call reads
has left the cache since its last turn. ``time_on_host`` reads a clock around short blocks of calls; ``cuda_timing``
does it on a GPU. Knows nothing of ops or models. Called by ``kernels``.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

Call = Callable[[], Any]
Mode = Literal["graph", "eager", "host"]

#: Inputs together are this many times the cache: a cache that doesn't evict the oldest line first keeps some of them.
CACHE_MULTIPLE = 3
MIN_ROTATION_BYTES = 64 << 20
MAX_SETS = 512
#: In-place calls that one set gets before it is restored, so that sums and products stay finite.
MAX_CALLS_BETWEEN_RESTORES = 16

_DEFAULT_CPU_CACHE_BYTES = 32 << 20
_CPU_CACHE_SIZE_FILE = "/sys/devices/system/cpu/cpu0/cache/index3/size"
_MIN_BLOCK_S = 50e-6  # of calls between two looks at the host's clock, which cost about 0.1 µs


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds a call, over the samples of one measurement.

    Attributes:
        mode: "graph" (CUDA graph, events), "eager" (calls from Python, events), "host" (calls from Python, host clock).
    """

    median_s: float
    p20_s: float
    p80_s: float
    best_s: float
    mode: Mode

    @classmethod
    def from_samples(cls, samples_s: Sequence[float], mode: Mode) -> Timing:
        """Summarise seconds a call."""
        p20, p80 = percentile(samples_s, 0.2), percentile(samples_s, 0.8)
        return cls(statistics.median(samples_s), p20, p80, min(samples_s), mode)


@dataclass(frozen=True, slots=True)
class Budget:
    """When enough has been measured.

    Attributes:
        min_s: time spent in timed calls, at least.
        min_samples: and this many samples; unless ``max_s`` is over.
        max_s: no further sample after this much time.
        replays: of a CUDA graph.
    """

    min_s: float = 0.1
    min_samples: int = 10
    max_s: float = 0.5
    replays: int = 12


FULL_BUDGET = Budget()
QUICK_BUDGET = Budget(min_s=0.005, min_samples=3, max_s=0.05, replays=5)


class Rotation:
    """One op bound to several equal sets of inputs; walks over them for ever.

    Args:
        calls: the op, once a set.
        restore: undoes what the calls have changed in place, in all sets; None if they change nothing that adds up.
    """

    def __init__(self, calls: Sequence[Call], restore: Callable[[], None] | None = None) -> None:
        self.calls = calls
        self.restore = restore
        self._next = 0
        self._calls_since_restore = 0

    @property
    def max_calls(self) -> int | None:
        """Calls in a row before ``restore``; None: as many as one likes."""
        return None if self.restore is None else MAX_CALLS_BETWEEN_RESTORES * len(self.calls)

    def take(self, num_calls: int) -> list[Call]:
        """The next calls in turn. Restores first (so: not while timing) if they would be too many."""
        if self.restore is not None:
            if self._calls_since_restore + num_calls > MAX_CALLS_BETWEEN_RESTORES * len(self.calls):
                self.restore()
                self._calls_since_restore = 0
            self._calls_since_restore += num_calls
        taken = [self.calls[(self._next + i) % len(self.calls)] for i in range(num_calls)]
        self._next = (self._next + num_calls) % len(self.calls)
        return taken


def percentile(samples: Sequence[float], fraction: float) -> float:
    """Linear interpolation between the two nearest of the sorted samples; fraction in [0, 1]."""
    ordered = sorted(samples)
    place = fraction * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def cache_bytes(device: torch.device) -> int:
    """Size of the cache in front of the device's memory: L2 of a GPU, the last level of a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    try:
        with open(_CPU_CACHE_SIZE_FILE) as file:
            return int(file.read().strip().removesuffix("K")) << 10
    except (OSError, ValueError):
        return _DEFAULT_CPU_CACHE_BYTES


def num_sets(call_bytes: int, set_bytes: int, *, cache_bytes: int, memory_bytes: int) -> int:
    """How many sets of inputs a rotation needs.

    Args:
        call_bytes: that one call reads and writes.
        set_bytes: that one set occupies; more, if a call touches only a part.
        cache_bytes: that have to be overrun.
        memory_bytes: for all sets together; one set is made whatever it takes.

    Returns:
        A number in [1, MAX_SETS]: tiny inputs stay in the cache, as they do in a model, where the op before wrote them.
    """
    wanted = max(CACHE_MULTIPLE * cache_bytes, MIN_ROTATION_BYTES)
    return max(1, min(math.ceil(wanted / max(call_bytes, 1)), memory_bytes // max(set_bytes, 1), MAX_SETS))


def time_on_host(
    rotation: Rotation, budget: Budget = FULL_BUDGET, clock: Callable[[], float] = time.perf_counter
) -> Timing:
    """Read a clock around blocks of calls. Results are dropped at once, as the engine drops them."""

    def block(calls: list[Call]) -> float:
        began = clock()
        for call in calls:
            call()
        return clock() - began

    return Timing.from_samples(sample_blocks(rotation, block, budget, _MIN_BLOCK_S), "host")


def sample_blocks(
    rotation: Rotation, block: Callable[[list[Call]], float], budget: Budget, min_block_s: float
) -> list[float]:
    """Seconds a call, of each of several blocks of calls.

    Args:
        rotation: whose calls.
        block: runs the calls and returns the seconds they took.
        budget: when to stop.
        min_block_s: calls are taken together until a block is about this long. The first two calls are warm-up, and
            tell how many that is.
    """
    first_s = block(rotation.take(1))
    if first_s >= budget.max_s:
        return [first_s]  # a naive implementation: one look is enough
    call_s = block(rotation.take(1))
    block_len = math.ceil(min_block_s / max(call_s, 1e-9))
    block_len = min(block_len, rotation.max_calls or block_len)
    samples: list[float] = []
    spent_s = 0.0
    while (spent_s < budget.min_s or len(samples) < budget.min_samples) and spent_s < budget.max_s:
        took_s = block(rotation.take(block_len))
        samples.append(took_s / block_len)
        spent_s += took_s
    return samples
