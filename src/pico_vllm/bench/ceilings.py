"""What this device does at best: bytes a second copied and read, floating-point operations a second multiplied.

Every fraction in a table of ours is of these, measured on the same machine in the same run. Keys and definitions:

    copy_TBps                   a large buffer to another, bytes read + written
    read_TBps                   a sum over a large buffer, the fastest of several Triton launches (else torch's sum)
    read_torch_sum_TBps         torch.sum of the buffer
    matmul_<n>_<dtype>_TFLOPs   torch.matmul of two n x n matrices of normal numbers, 2 n^3 operations

Each is {"median", "best", "what"}. Called by ``kernels`` and the CLI; knows nothing of either.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from pico_vllm.bench.cuda_timing import events_s

logger = logging.getLogger(__name__)

Metric = dict[str, Any]
_Call = Callable[[], Any]

_DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_MATMUL = "torch.matmul, random normal data"
_TERA = 1e12
_GPU_BUFFER_BYTES = 4 << 30
_QUICK_GPU_BUFFER_BYTES = 1 << 30
_CPU_BUFFER_BYTES = 256 << 20
_QUICK_CPU_BUFFER_BYTES = 64 << 20
#: Of the read kernel: programs a multiprocessor, int64 elements a block, warps.
_READ_LAUNCHES = tuple((per, block, warps) for per in (4, 8, 16) for block in (1024, 2048, 4096) for warps in (4, 8))


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The three numbers that a floor is made of."""

    read_bytes_per_s: float
    copy_bytes_per_s: float
    matmul_flops_per_s: float


def measure_ceilings(device: torch.device, *, quick: bool = False) -> dict[str, Metric]:
    """Measure all ceilings of a device; its memory is free again afterwards.

    Args:
        device: a GPU (about 5 s and 8 GiB, or a third of what is free) or the CPU (about 4 s and 0.5 GiB).
        quick: smaller buffers and matrices, fewer runs: good for a test, not for a table.
    """
    if device.type != "cuda":
        return _measure_cpu(quick)
    with torch.cuda.device(device):
        try:
            return _measure_gpu(device, quick)
        finally:
            torch.cuda.empty_cache()


def statistic_of(device: torch.device) -> Literal["median", "best"]:
    """Which of a metric's two numbers is the ceiling. A CPU has other work: its median may be a third of it."""
    return "median" if device.type == "cuda" else "best"


def ceilings_from(
    measured: dict[str, Metric],
    dtype: torch.dtype = torch.bfloat16,
    statistic: Literal["median", "best"] = "median",
) -> Ceilings:
    """What floors are made of, in bytes and operations a second.

    Args:
        measured: by ``measure_ceilings``.
        dtype: of the matrices. One that wasn't multiplied gets the fastest rate there is: the floor is too low then.
        statistic: of the device, as ``statistic_of`` has it.
    """
    rates = {key: metric[statistic] * _TERA for key, metric in measured.items()}
    matmuls = {key: rate for key, rate in rates.items() if key.startswith("matmul_")}
    name = _DTYPE_NAMES.get(dtype, "")
    same_dtype = [rate for key, rate in matmuls.items() if f"_{name}_" in key]
    return Ceilings(rates["read_TBps"], rates["copy_TBps"], max(same_dtype or matmuls.values()))


# -------------------------------------------------------------------------------------------------------------- CPU
def _measure_cpu(quick: bool) -> dict[str, Metric]:
    """In several rounds over all ceilings: a CPU has other work, and one bad second should not spoil one ceiling."""
    num_bytes = _QUICK_CPU_BUFFER_BYTES if quick else _CPU_BUFFER_BYTES
    rounds, budget_s = (1, 0.05) if quick else (4, 0.2)
    x = torch.randint(0, 1 << 40, (num_bytes // 8,))  # int64: the sum that torch's CPU code does fastest
    y = torch.empty_like(x)
    size = _size(num_bytes)
    of_int64 = f"torch.sum of {size} int64"
    jobs = {  # key: (amount, what, call)
        "copy_TBps": (2 * num_bytes, f"{size} to {size}, bytes read + written", lambda: y.copy_(x)),
        "read_torch_sum_TBps": (num_bytes, of_int64, x.sum),
    }
    n = 512 if quick else 2048
    for dtype in (torch.bfloat16, torch.float32):
        jobs[_matmul_key(n, dtype)] = (2 * n**3, _MATMUL, _matmul(torch.device("cpu"), dtype, n))
    samples: dict[str, list[float]] = {key: [] for key in jobs}
    for _ in range(rounds):
        for key, (_, _, call) in jobs.items():
            samples[key] += _time_on_cpu(call, budget_s)
    measured = {key: _rate(amount, samples[key], what) for key, (amount, what, _) in jobs.items()}
    measured["read_TBps"] = {**measured["read_torch_sum_TBps"], "what": f"{of_int64} (no Triton on a CPU)"}
    return measured


def _time_on_cpu(call: _Call, budget_s: float) -> list[float]:
    """Seconds of each run."""
    call()
    samples: list[float] = []
    while sum(samples) < budget_s and len(samples) < 20:
        began = time.perf_counter()
        call()
        samples.append(time.perf_counter() - began)
    return samples


# -------------------------------------------------------------------------------------------------------------- GPU
def _measure_gpu(device: torch.device, quick: bool) -> dict[str, Metric]:
    wanted = _QUICK_GPU_BUFFER_BYTES if quick else _GPU_BUFFER_BYTES
    free, _ = torch.cuda.mem_get_info(device)
    runs = 5 if quick else 20
    measured = _gpu_bandwidths(device, min(wanted, free // 3) >> 20 << 20, quick, runs)
    torch.cuda.empty_cache()
    n = 4096 if quick else 8192
    samples = _time_on_gpu(_matmul(device, torch.bfloat16, n), runs)
    return {**measured, _matmul_key(n, torch.bfloat16): _rate(2 * n**3, samples, _MATMUL)}


def _gpu_bandwidths(device: torch.device, num_bytes: int, quick: bool, runs: int) -> dict[str, Metric]:
    # Random numbers: a memory that compresses zeros would be faster on them.
    x = torch.randn(1 << 19, device=device, dtype=torch.bfloat16).repeat(num_bytes >> 20)
    y = torch.empty_like(x)
    size = _size(num_bytes)
    copied = _time_on_gpu(lambda: y.copy_(x), runs)
    summed = _time_on_gpu(lambda: torch.sum(x, dtype=torch.float32), runs)
    torch_sum = _rate(num_bytes, summed, f"torch.sum of {size} bf16 in float32")
    return {
        "copy_TBps": _rate(2 * num_bytes, copied, f"{size} to {size}, bytes read + written"),
        "read_TBps": _read(x.view(torch.int64), quick, torch_sum),
        "read_torch_sum_TBps": torch_sum,
    }


def _read(x: torch.Tensor, quick: bool, torch_sum: Metric) -> Metric:
    """The fastest launch of the Triton sum; ``torch_sum`` where Triton doesn't compile (no C compiler, an old GPU)."""
    try:
        from pico_vllm.bench.read_kernel import partial_sum

        total = int(x.sum())
        processors = torch.cuda.get_device_properties(x.device).multi_processor_count
        best: tuple[list[float], str] | None = None
        for per, block, warps in _READ_LAUNCHES[-2:] if quick else _READ_LAUNCHES:
            partial = torch.empty(per * processors, dtype=torch.int64, device=x.device)

            def call(partial: torch.Tensor = partial, block: int = block, warps: int = warps) -> None:
                partial_sum(x, partial, block=block, num_warps=warps)

            samples = _time_on_gpu(call, 10)
            if best is None or statistics.median(samples) < statistics.median(best[0]):
                best = samples, f"{len(partial)} programs, block {block} x int64, {warps} warps"
            if int(partial.sum()) != total:
                raise RuntimeError("the sum is wrong, so not every byte has been read")
    except Exception as error:  # triton's errors have no common class
        logger.warning("Triton can't measure the read ceiling (%s); torch.sum stands in", error)
        return {**torch_sum, "what": f"{torch_sum['what']} (Triton failed: {type(error).__name__})"}
    assert best is not None
    return _rate(x.nbytes, best[0], f"Triton sum over {_size(x.nbytes)}; {best[1]}")


def _time_on_gpu(call: _Call, runs: int, warmup: int = 3) -> list[float]:
    """Seconds of each run between two events."""
    for _ in range(warmup):
        call()
    return [events_s([call]) for _ in range(runs)]


# ------------------------------------------------------------------------------------------------------------- both
def _matmul(device: torch.device, dtype: torch.dtype, n: int) -> _Call:
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    return lambda: a @ b


def _matmul_key(n: int, dtype: torch.dtype) -> str:
    return f"matmul_{n}_{_DTYPE_NAMES[dtype]}_TFLOPs"


def _rate(amount: int, samples_s: list[float], what: str) -> Metric:
    """Amount a second in units of 10^12, rounded to 4 digits after the point."""
    median, best = (amount / seconds / _TERA for seconds in (statistics.median(samples_s), min(samples_s)))
    return {"median": round(median, 4), "best": round(best, 4), "what": what}


def _size(num_bytes: int) -> str:
    return f"{num_bytes >> 30} GiB" if num_bytes % (1 << 30) == 0 else f"{num_bytes >> 20} MiB"
