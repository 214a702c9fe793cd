"""How fast a machine was in one session, and how much of a difference in time that explains.

A session's records tell three speeds, and each gated number says by its bounds how far it depends on each of them:

    bandwidth   the read ceiling: decodes read every weight once a token
    matmul      the matrix ceiling: prompts multiply
    host        1 / calib's ``eager_launch_us``: an op launched from Python, as a step launches its ops

A number whose bounds are w takes Π (reference speed / speed) ** w times as long as on the reference machine. Bounds sum
to 1, so a machine that is x % slower in all three makes everything x % slower. Called by ``measured_run``.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch

from pico_vllm.bench.ceilings import ceilings_from
from pico_vllm.bench.results import (
    Record,
    higher_is_better,
    number_of,
    numbers_of,
    run_values,
    summaries_of,
)
from pico_vllm.config import DTYPES

if TYPE_CHECKING:
    from pico_vllm.bench.ceilings import Metric

HOST_METRIC = "eager_launch_us"


@dataclass(frozen=True, slots=True)
class Speeds:
    """Bytes/s read, matrix FLOPs/s, launches/s."""

    bandwidth: float
    matmul: float
    host: float


@dataclass(frozen=True, slots=True)
class Bounds:
    """Shares of a time, 1 in sum: which speed it goes with."""

    bandwidth: float = 0.0
    matmul: float = 0.0
    host: float = 0.0

    def slowdown(self, speeds: Speeds, reference: Speeds) -> float:
        """How many times as long as on the reference machine it takes on a machine of these speeds."""
        names = ("bandwidth", "matmul", "host")
        return math.prod((getattr(reference, n) / getattr(speeds, n)) ** getattr(self, n) for n in names)


def read_speeds(ceilings: Record, calibs: Sequence[Record], dtype: str) -> Speeds:
    """A session's speeds.

    Of a GPU's read bandwidth the fastest sample counts: on ten recorded H200 runs it varies by 0.7 % and the median by
    2 %, in which decodes don't follow it. Of its matrix rate it is the median: prompts keep the GPU at its power limit,
    which the fastest sample hasn't reached yet. Of a CPU, which has other work, always the fastest.

    Args:
        ceilings: the record.
        calibs: of the same session, before and after its points.
        dtype: of the session's engines.
    """
    metrics: dict[str, Metric] = ceilings["metrics"]
    of_dtype: torch.dtype = getattr(torch, dtype) if dtype in DTYPES else torch.bfloat16
    on_gpu = bool(ceilings.get("gpu"))
    best = ceilings_from(metrics, of_dtype, "best")
    matmul = ceilings_from(metrics, of_dtype, "median" if on_gpu else "best").matmul_flops_per_s
    launches = [us for calib in calibs for us in numbers_of(summaries_of(calib).get(HOST_METRIC))]
    return Speeds(best.read_bytes_per_s, matmul, 1e6 / statistics.median(launches))


def bounds_of(record: Record, metric: str, speeds: Speeds) -> Bounds:
    """Which speeds one metric of a record goes with.

    A first token of a request that is alone is a prompt's: matmul. A token after it is a decode: bandwidth. What mixes
    both is bound as its least bytes and FLOPs are, at the session's ceilings. The host's part is what it kept the
    device waiting.
    """
    if record["point"] == "kernel":
        moved, computed = (number_of(record.get(name)) or 0.0 for name in ("bytes", "flops"))
        return _shares(moved / speeds.bandwidth, computed / speeds.matmul, 0.0)
    host = min(1.0, _share(record, "host_share") or 0.0)
    moved, computed = (_share(record, name) for name in ("bandwidth_share", "flops_share"))
    is_first_token = metric.startswith("ttft")
    is_alone = record.get("concurrency") == 1
    if (is_alone and metric.startswith(("ttft", "tpot", "itl"))) or moved is None or computed is None:
        return Bounds(0.0, 1 - host, host) if is_first_token else Bounds(1 - host, 0.0, host)
    return _shares(moved, computed, host)


def mean_bounds(bounds: Sequence[Bounds]) -> Bounds:
    """Of several runs."""
    return Bounds(*(statistics.fmean(values) for values in zip(*(asdict(b).values() for b in bounds), strict=True)))


def mean_speeds(speeds: Iterable[Speeds]) -> Speeds:
    """Geometric, of several machines."""
    return Speeds(*(statistics.geometric_mean(values) for values in zip(*map(_values, speeds), strict=True)))


def time_like(metric: str, value: float) -> float:
    """A time as it is, a rate as seconds a unit: what grows when something gets slower. Its own inverse."""
    return 1 / value if higher_is_better(metric) else value


def _values(speeds: Speeds) -> Iterable[float]:
    return asdict(speeds).values()


def _share(record: Record, name: str) -> float | None:
    values = run_values(record, name)
    return statistics.median(values) if values else None


def _shares(bandwidth: float, matmul: float, host: float) -> Bounds:
    total = bandwidth + matmul + host
    return Bounds(bandwidth / total, matmul / total, host / total) if total else Bounds(bandwidth=1.0)
