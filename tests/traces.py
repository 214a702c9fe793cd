"""Chrome traces written by hand, as torch's profiler writes them."""

from __future__ import annotations

from typing import Any


def host(name: str, start: float, end: float) -> dict[str, Any]:
    """A range of ours in [start, end)."""
    return {"ph": "X", "cat": "user_annotation", "name": f"pico.{name}", "ts": start, "dur": end - start, "tid": 1}


def launch(at: float, correlation: int, category: str = "cuda_runtime") -> dict[str, Any]:
    """A call that launches a kernel."""
    args = {"correlation": correlation}
    return {"ph": "X", "cat": category, "name": "cudaLaunchKernel", "ts": at, "dur": 0.5, "tid": 1, "args": args}


def kernel(
    name: str,
    start: float,
    end: float,
    correlation: int = 0,
    stream: int = 7,
    device: int = 0,
    grid: tuple[int, int, int] | None = None,
) -> dict[str, Any]:
    """A kernel on a GPU."""
    args: dict[str, Any] = {"correlation": correlation, "device": device, "stream": stream}
    if grid is not None:
        args["grid"] = list(grid)
    return {"ph": "X", "cat": "kernel", "name": name, "ts": start, "dur": end - start, "tid": stream, "args": args}
