"""Profile: the numbers of one capture, and their file ``profile.json``.

Plain values with a version. Written by ``capture``, shown by ``report`` and ``compare``; times in microseconds.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from pico_vllm.errors import ConfigError

SCHEMA = "pico-vllm-profile"
VERSION = 1
PROFILE_FILE = "profile.json"
TRACE_FILE = "trace.json.gz"


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Durations of the calls of ``step``."""

    p20_us: float
    p50_us: float
    p80_us: float
    max_us: float


@dataclass(frozen=True, slots=True)
class HostPhase:
    """What the host did in one phase; time in a phase within it is that one's.

    Attributes:
        calls: ranges of the phase.
        total_us, share: of the window.
        num_gaps: gaps of the device of which most lies in this phase.
        gap_us: time of the phase in which the device had nothing to do, gaps too short to count included.
    """

    calls: int
    total_us: float
    share: float
    num_gaps: int
    gap_us: float


@dataclass(frozen=True, slots=True)
class Gaps:
    """When the device had nothing to do.

    Attributes:
        num, total_us: of gaps of ``min_us`` and more.
        longest_us, longest_phase: the longest one, and the phase of the host that most of it lies in.
        num_shorter, shorter_us: of the others, mostly between two kernels.
    """

    min_us: float
    num: int
    total_us: float
    longest_us: float
    longest_phase: str | None
    num_shorter: int
    shorter_us: float


@dataclass(frozen=True, slots=True)
class WorkRow:
    """Calls of one op or kernel.

    Attributes:
        name: of the op or kernel.
        op: of a kernel, the op that launches it; None = unknown, as in a CUDA graph.
        calls, total_us: on the device; a kernel's wait for the one before it on its stream doesn't count, kernels of
            two streams count in full.
        time_share: of all kernels' time.
        num_bytes, flops: what the calls can't do without; None = unknown.
        bandwidth_share, flops_share: of the device's ceilings; None where they weren't measured or the cost is unknown.
        grid: of a kernel's launches; None = unknown, or it has none.
    """

    name: str
    op: str | None
    calls: int
    total_us: float
    time_share: float
    num_bytes: int | None = None
    flops: int | None = None
    bandwidth_share: float | None = None
    flops_share: float | None = None
    grid: str | None = None

    @property
    def each_us(self) -> float:
        """Of one call."""
        return self.total_us / self.calls

    @property
    def ceiling_share(self) -> float | None:
        """Of the ceiling that bounds it: the larger of the two shares."""
        shares = [share for share in (self.bandwidth_share, self.flops_share) if share is not None]
        return max(shares, default=None)


@dataclass(frozen=True, slots=True)
class Summary:
    """What a trace says.

    Attributes:
        on_gpu: whether the device is a GPU; on a CPU "busy" means that one of our ops computes.
        window_us: from the first step's beginning to the last one's end.
        num_steps: calls of ``step``.
        busy_us, busy_share: at least one kernel ran.
        host: by phase; their times add up to the window.
        layers_us: device time of each layer in a step; empty where passes were replayed.
        ops: by time; those that were launched from Python.
        kernels: by time; of a CPU none, its ops are all there is.
        whole: all kernels, and the least work of the steps.
    """

    on_gpu: bool
    window_us: float
    num_steps: int
    step: StepTimes
    busy_us: float
    busy_share: float
    gaps: Gaps
    host: dict[str, HostPhase]
    layers_us: list[float]
    ops: list[WorkRow]
    kernels: list[WorkRow]
    whole: WorkRow


@dataclass(frozen=True, slots=True)
class Profile:
    """One capture.

    Attributes:
        environment: machine, versions, commit, date.
        model, dtype: what ran.
        engine: its settings.
        workload: what it was given.
        ceilings: of the device; bytes and operations a second; None = not measured.
        unprofiled_step_us: median of the same steps without profiler and ranges; None = no warm-up.
        summary: of the trace.
    """

    environment: dict[str, Any]
    model: str
    dtype: str
    engine: dict[str, Any]
    workload: dict[str, Any]
    ceilings: dict[str, float] | None
    unprofiled_step_us: float | None
    summary: Summary


def write_profile(profile: Profile, path: Path) -> None:
    """Write ``profile.json``."""
    fields = {"schema": SCHEMA, "version": VERSION, **dataclasses.asdict(profile)}
    path.write_text(json.dumps(fields, indent=1, allow_nan=False) + "\n")


def read_profile(path: Path) -> Profile:
    """Read a ``profile.json``, or that of a capture's folder.

    Raises:
        ConfigError: there is none, it is something else, or of another version.
    """
    path = path / PROFILE_FILE if path.is_dir() else path
    try:
        fields = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(
            f"can't read the capture {path}: {error.strerror}; `pico-vllm profile run --out DIR` makes one"
        ) from None
    except ValueError as error:
        raise ConfigError(f"{path} is no {PROFILE_FILE}: {error}") from None
    if not isinstance(fields, dict) or fields.get("schema") != SCHEMA:
        raise ConfigError(f"{path} is no {PROFILE_FILE} of `pico-vllm profile run`")
    if fields.get("version") != VERSION:
        raise ConfigError(
            f"{path} has version {fields.get('version')!r} of the format and this program reads version {VERSION}: "
            "capture it anew, or read it with the program that made it"
        )
    try:
        return msgspec.convert(fields, Profile)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path} is damaged: {error}") from None
