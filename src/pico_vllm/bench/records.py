"""Records: one JSON object a measured point and engine, with everything needed to read the number years later."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

import torch
import transformers
import triton

from pico_vllm.environment import collect_environment
from pico_vllm.errors import ConfigError

_CLEAR_REFS, _STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


class RecordWriter:
    """Writes records to a JSONL file, each flushed at once: a run that is cut short keeps what it has finished.

    Args:
        path: to append to.
        model: what is written as the model's name.
        dtype, device: of the engines.
        tag: of the whole run.

    Raises:
        ConfigError: the file can't be written.
    """

    def __init__(self, path: Path, *, model: str, dtype: str, device: torch.device, tag: str = "") -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: TextIO = path.open("a")
        except OSError as error:
            raise ConfigError(f"can't write records to {path}: {error}") from None
        self._machine = machine_fields(device) | {"model": model, "dtype": dtype, "tag": tag}
        self.records: list[dict[str, Any]] = []

    def write(self, **fields: Any) -> dict[str, Any]:
        """Complete a record, keep it and write it."""
        record = self._machine | fields
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        self.records.append(record)
        return record

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def machine_fields(device: torch.device) -> dict[str, Any]:
    """Hardware, versions, commit and time."""
    environment = collect_environment()
    on_gpu = device.type == "cuda"
    return {
        "gpu": torch.cuda.get_device_name(device) if on_gpu else None,
        "driver": environment.driver_version if on_gpu else None,
        "device": device.type,
        "cpu": environment.cpu_model,
        "cpus": environment.num_cpus,
        "torch": torch.__version__.partition("+")[0],
        "triton": triton.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "commit": current_commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }


def current_commit() -> str | None:
    """Short commit of the source tree, "+changes" if it has any; $PICO_COMMIT where there is no git."""
    if "PICO_COMMIT" in os.environ:
        return os.environ["PICO_COMMIT"]
    tree = Path(__file__).parents[3]
    try:
        commit = _git(tree, "rev-parse", "--short", "HEAD")
        is_dirty = bool(_git(tree, "status", "--porcelain", "-uno"))
    except (OSError, subprocess.SubprocessError):
        return None
    return commit + ("+changes" if is_dirty else "")


def restart_peak_memory() -> None:
    """Let the peak of this process's memory count from now; where that can't be done it counts from further back."""
    with contextlib.suppress(OSError):
        _CLEAR_REFS.write_text("5")


def memory_used_bytes(device: torch.device, *, peak: bool = False) -> Mapping[str, int]:
    """Memory in use: of the whole GPU (other processes' engines count too), and of this process on the host.

    Args:
        device: whose memory.
        peak: of the host's the highest since ``restart_peak_memory``. A GPU's is what engines hold, and they hold what
            they have once used.
    """
    import psutil

    used = {"host": (_host_peak_bytes() if peak else None) or psutil.Process().memory_info().rss}
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        used["device"] = total - free
    return used


def _host_peak_bytes() -> int | None:
    """None where the system doesn't tell."""
    try:
        lines = _STATUS.read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        return None


def _git(tree: Path, *args: str) -> str:
    done = subprocess.run(["git", "-C", str(tree), *args], capture_output=True, text=True, timeout=20, check=True)
    return done.stdout.strip()
