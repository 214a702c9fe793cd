"""Small hand-written benchmark records for the tests of reports, comparisons and plots."""

from __future__ import annotations

import statistics
from typing import Any

MACHINE = {"gpu": "NVIDIA H200", "driver": "580.1", "torch": "2.11.0", "model": "tiny", "dtype": "bfloat16"}


def record(point: str = "c1", engine: str = "pico-vllm", *, runs: list[dict[str, Any]] | None = None, **fields: Any):
    """A record of one case; its metrics are the medians and spreads of the runs."""
    made = {**MACHINE, "engine": engine, "point": point, **fields}
    if runs is not None:
        made["runs"] = runs
        made["metrics"] = {name: _fold([run[name] for run in runs]) for name in runs[0] if is_number(runs[0][name])}
    return made


def c1(engine: str = "pico-vllm", input_len: int = 512, *, ttft: list[float], decode: list[float], **fields: Any):
    """One request at a time, 128 tokens out."""
    runs = [{"ttft_ms_median": t, "decode_tok_s": d} for t, d in zip(ttft, decode, strict=True)]
    return record("c1", engine, runs=runs, input_len=input_len, output_len=128, concurrency=1, **fields)


def loop(point: str, engine: str, concurrency: int, *, rate: list[float], itl: list[float], **fields: Any):
    """A point of sweep or burst."""
    runs = [{"out_tok_s": r, "itl_ms_p99": i} for r, i in zip(rate, itl, strict=True)]
    return record(point, engine, runs=runs, input_len=512, output_len=128, concurrency=concurrency, **fields)


def poisson(engine: str, rate: float, *, goodput: list[float]):
    """Arrivals at a rate."""
    runs = [{"goodput_req_s": value} for value in goodput]
    fields = {
        "input_len": 512,
        "output_len": 128,
        "concurrency": None,
        "objective": {"ttft_ms": 200.0, "tpot_ms": 20.0},
    }
    return record("poisson", engine, runs=runs, rate=rate, **fields)


def prefix(engine: str, *, cached: bool, ttft: list[list[float]], **fields: Any):
    """Each run's TTFTs, one a request."""
    made = record("prefix", engine, input_len=2112, output_len=16, concurrency=1, prefix_caching=cached, **fields)
    return made | {"runs": [{"ttft_ms": times} for times in ttft]}


def kernel(op: str, case: str, *, median: float, floor: float, torch: float | None = None, **fields: Any):
    """A row of the kernel table: times in µs, p20 and p80 ten percent around the median."""
    times = {"median": median, "p20": 0.9 * median, "p80": 1.1 * median, "best": 0.8 * median}
    made = {
        **MACHINE,
        **{"engine": "pico-vllm", "point": "kernel", "backend": "triton", "mode": "graph", "model": "shapes-1b"},
        **{"op": op, "case": case, "floor_us": floor, "time_us": times, "fraction": floor / median},
        **{"baseline_us": torch, "speedup": torch and torch / median, "missing": None, "error": None},
    }
    return made | fields


def is_number(value: object) -> bool:
    return isinstance(value, int | float)


def _fold(values: list[float]) -> dict[str, float]:
    median = statistics.median(values)
    return {"median": median, "best": min(values), "spread": (max(values) - min(values)) / median if median else 0.0}
