"""What all kernel benchmarks share: the device, its backend, and the machine's speeds in the JSON for the gate.

pytest benchmarks/kernels --benchmark-json FILE [--shape SHAPE]
pico-vllm bench gate FILE --baseline benchmarks/baselines --points kernel
"""

from __future__ import annotations

from typing import Any

import pytest

from pico_vllm.bench.calibration import calibrate
from pico_vllm.bench.ceilings import measure_ceilings
from pico_vllm.bench.kernel_cases.shapes import SHAPES
from pico_vllm.bench.kernel_suite import MACHINE_KEY, KernelSuite, make_suite
from pico_vllm.bench.records import machine_fields
from pico_vllm.worker.model_runner import resolve_device


def pytest_addoption(parser: pytest.Parser) -> None:
    """A model's sizes."""
    parser.addoption("--shape", choices=sorted(SHAPES), help="default: qwen2.5-1.5b on a GPU, else smollm2-135m")


@pytest.fixture(scope="session")
def suite(pytestconfig: pytest.Config) -> KernelSuite:
    """Of the whole session."""
    return make_suite(pytestconfig.getoption("--shape"))


def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    """Called once, before the report is written."""
    device = resolve_device("auto")
    machine_info[MACHINE_KEY] = {
        "fields": machine_fields(device),
        "calib": calibrate(device),
        "ceilings": measure_ceilings(device),
    }
