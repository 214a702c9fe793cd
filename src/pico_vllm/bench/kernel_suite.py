"""The suite in ``benchmarks/kernels``: what it runs on, and the JSON that pytest-benchmark writes of it as records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from pico_vllm.bench.kernel_cases.shapes import SHAPES, KernelShapes
from pico_vllm.bench.results import Record, number_of
from pico_vllm.errors import ConfigError
from pico_vllm.kernels.backend import KernelBackend
from pico_vllm.worker.model_runner import resolve_backend, resolve_device

#: Where the suite's conftest puts the machine's fields and speeds, and each test what it ran.
MACHINE_KEY, CASE_KEY = "pico_vllm", "pico_vllm"
_DEFAULT_SHAPES = {"cuda": "qwen2.5-1.5b", "cpu": "smollm2-135m"}
_IQR_SIGMAS = 1.349  # between the quartiles of a normal distribution
_P80_SIGMAS = 0.8416


@dataclass(frozen=True, slots=True)
class KernelSuite:
    """What the ops run on, and at which sizes."""

    backend: KernelBackend
    device: torch.device
    dtype: torch.dtype
    shapes: KernelShapes


def make_suite(shape: str | None) -> KernelSuite:
    """In bf16 on the device and backend that the engine takes here; on a CPU each op at its smallest size only.

    Args:
        shape: of ``SHAPES``; None = one that suits the device.
    """
    device = resolve_device("auto")
    shapes = SHAPES[shape or _DEFAULT_SHAPES[device.type]]
    if device.type == "cpu":
        shapes = shapes.smallest()
    return KernelSuite(resolve_backend("auto", device), device, torch.bfloat16, shapes)


def records_of_benchmarks(report: dict[str, Any], where: str) -> list[Record]:
    """Records of a report; a benchmark calls its op ``calls`` times a round.

    Raises:
        ConfigError: another suite wrote it.
    """
    machine = report.get("machine_info", {}).get(MACHINE_KEY)
    if not isinstance(machine, dict):
        raise ConfigError(f"{where}: not of `pytest benchmarks/kernels --benchmark-json FILE`: it tells no ceilings")
    fields = machine["fields"]
    records = [fields | {"point": point, "metrics": machine[point]} for point in ("calib", "ceilings")]
    for benchmark in report["benchmarks"]:
        case = benchmark.get("extra_info", {}).get(CASE_KEY)
        if not isinstance(case, dict):
            raise ConfigError(f"{where}: {benchmark.get('name')} doesn't tell what it ran")
        records.append(fields | case | {"point": "kernel", "time_us": _time_us(benchmark["stats"], case["calls"])})
    return records


def _time_us(stats: dict[str, Any], calls: int) -> dict[str, float]:
    """Of one call. The spread is the quartiles': single rounds that something else has interrupted don't count."""
    median, iqr = (1e6 * (number_of(stats[name]) or 0.0) / calls for name in ("median", "iqr"))
    margin = _P80_SIGMAS * iqr / _IQR_SIGMAS
    return {"median": median, "p20": median - margin, "p80": median + margin, "best": 1e6 * stats["min"] / calls}
