"""A trace as the analysis sees it, read from the events of a Chrome trace that torch's profiler has written.

Our ranges say in their names what they are: ``pico.step``, ``pico.phase.<phase>``, ``pico.layer.<index>`` and
``pico.op.<op>``. All of them are of the thread that steps the engine. What runs on a GPU is linked with the call that
has launched it by torch's correlation number.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pico_vllm.errors import ConfigError

STEP = "pico.step"
PHASE = "pico.phase."
LAYER = "pico.layer."
OP = "pico.op."

_RANGES = "user_annotation"
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")


@dataclass(frozen=True, slots=True)
class Range:
    """What the host did in [start_us, end_us)."""

    name: str
    start_us: float
    end_us: float


@dataclass(frozen=True, slots=True)
class Kernel:
    """What the device did in [start_us, end_us): a kernel, a copy, a fill; on a CPU, one of our ops.

    Attributes:
        launched_us: when the host has launched it; None = unknown.
        grid: of the launch, "280" or "2 x 5 x 8"; None = unknown, or it has none, such as a copy.
        stream: that it runs on, of its GPU.
    """

    name: str
    start_us: float
    end_us: float
    launched_us: float | None = None
    grid: str | None = None
    stream: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class Trace:
    """Sorted by start; names without their prefixes.

    Attributes:
        steps: calls of ``step``.
        phases: of the host; they may nest.
        layers: forward passes of a layer, as far as they were launched from Python.
        ops: calls of the backend's ops likewise; they don't nest.
        kernels: of all streams.
        on_gpu: whether ``kernels`` are a GPU's.
    """

    steps: tuple[Range, ...]
    phases: tuple[Range, ...]
    layers: tuple[Range, ...]
    ops: tuple[Range, ...]
    kernels: tuple[Kernel, ...]
    on_gpu: bool


def load_events(path: Path) -> list[dict[str, Any]]:
    """The events of a Chrome trace, compressed or not.

    Raises:
        ConfigError: there is no such file, or it is no trace.
    """
    try:
        data = path.read_bytes()
        text = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
        events: list[dict[str, Any]] = json.loads(text)["traceEvents"]
    except OSError as error:
        raise ConfigError(f"can't read the trace {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, EOFError, zlib.error) as error:
        raise ConfigError(f"{path} is no Chrome trace: {type(error).__name__}: {error}") from None
    return events


def read_trace(events: Iterable[Mapping[str, Any]]) -> Trace:
    """Pick what the analysis needs.

    On a trace without anything of a GPU the kernels are our ops: they run in place on the thread that calls them.
    """
    complete = [event for event in events if event.get("ph") == "X"]
    ranges: dict[str, list[Range]] = {STEP: [], PHASE: [], LAYER: [], OP: []}
    for event in complete:
        if event.get("cat") != _RANGES:
            continue
        prefix = next((prefix for prefix in ranges if event["name"].startswith(prefix)), None)
        if prefix is not None:
            start, end = _times(event)
            ranges[prefix].append(Range(event["name"].removeprefix(prefix), start, end))
    launched_us = {
        event["args"]["correlation"]: float(event["ts"])
        for event in complete
        if event.get("cat") in _LAUNCHES and "correlation" in event.get("args", {})
    }
    kernels = [_kernel(event, launched_us) for event in complete if event.get("cat") in _ON_DEVICE]
    on_gpu = bool(kernels)
    if not on_gpu:
        kernels = [Kernel(op.name, op.start_us, op.end_us, op.start_us) for op in ranges[OP]]
    sorted_ranges = {prefix: tuple(sorted(found, key=lambda r: r.start_us)) for prefix, found in ranges.items()}
    return Trace(
        steps=sorted_ranges[STEP],
        phases=sorted_ranges[PHASE],
        layers=sorted_ranges[LAYER],
        ops=sorted_ranges[OP],
        kernels=tuple(sorted(kernels, key=lambda kernel: kernel.start_us)),
        on_gpu=on_gpu,
    )


def _kernel(event: Mapping[str, Any], launched_us: Mapping[int, float]) -> Kernel:
    args = event.get("args", {})
    return Kernel(
        event["name"],
        *_times(event),
        launched_us=launched_us.get(args.get("correlation")),
        grid=_grid(args.get("grid")),
        stream=(args.get("device", 0), args.get("stream", 0)),
    )


def _grid(sizes: Sequence[int] | None) -> str | None:
    """As it is read, without the ones at its end."""
    if not sizes:
        return None
    last = max((axis for axis, size in enumerate(sizes) if size != 1), default=0)
    return " x ".join(str(size) for size in sizes[: last + 1])


def _times(event: Mapping[str, Any]) -> tuple[float, float]:
    start = float(event["ts"])
    return start, start + float(event.get("dur", 0))
