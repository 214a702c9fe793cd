"""Nsight Systems around the same command: ``nsys profile … pico-vllm profile run … --nvtx``."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from pico_vllm.errors import ConfigError

REPORT = "nsys"  # nsys adds .nsys-rep


def nsys_command(nsys: str, out: Path, arguments: Sequence[str]) -> list[str]:
    """What runs this program's ``arguments`` under nsys, which records between cudaProfilerStart and -Stop."""
    return [
        nsys,
        "profile",
        "--trace=cuda,nvtx,osrt",
        "--cuda-graph-trace=node",
        "--capture-range=cudaProfilerApi",
        "--capture-range-end=stop",
        "--force-overwrite=true",
        f"--output={out / REPORT}",
        sys.executable,
        "-m",
        "pico_vllm",
        *("--nvtx" if argument == "--nsys" else argument for argument in arguments),
    ]


def find_nsys() -> str:
    """Where nsys is.

    Raises:
        ConfigError: it isn't installed.
    """
    nsys = shutil.which("nsys")
    if nsys is None:
        raise ConfigError(
            "--nsys needs Nsight Systems, and there is no nsys on the PATH; without --nsys torch's profiler writes the "
            "trace"
        )
    return nsys


def run_under_nsys(out: Path, arguments: Sequence[str]) -> Path:
    """Run this program again under nsys; returns the report's file.

    Raises:
        ConfigError: nsys isn't installed, or the run failed.
    """
    done = subprocess.run(nsys_command(find_nsys(), out, arguments))
    report = out / f"{REPORT}.nsys-rep"
    if done.returncode != 0 or not report.exists():
        raise ConfigError(f"the run under nsys has ended with code {done.returncode} and left no {report}")
    return report
