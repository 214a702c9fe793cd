"""A kernel benchmark as a user asks for it: names in, a line of progress a case, records and rows out."""

from __future__ import annotations

import sys
from collections.abc import Collection
from pathlib import Path

import torch

from pico_vllm.bench.kernel_cases.shapes import SHAPES
from pico_vllm.bench.kernel_rows import KernelRow
from pico_vllm.bench.kernels import bench_kernels
from pico_vllm.bench.records import RecordWriter
from pico_vllm.bench.runner import Say
from pico_vllm.config import BACKENDS
from pico_vllm.errors import ConfigError
from pico_vllm.worker.model_runner import resolve_backend

#: What is timed if nobody says: a model that keeps a GPU busy, and one that 2 cores get through in a minute.
_DEFAULT_SHAPES = {"cuda": "qwen2.5-1.5b", "cpu": "smollm2-135m"}


def run_kernels(
    shape: str | None,
    device: torch.device,
    *,
    backend: str = "auto",
    dtype: str = "bfloat16",
    only: Collection[str] | None = None,
    out: Path | None = None,
    tag: str = "",
    say: Say = lambda line: print(line, file=sys.stderr, flush=True),
) -> list[KernelRow]:
    """Check and time every op of a backend, and append the records to ``out``.

    Args:
        shape: a model of ``SHAPES``; None = the device's default.
        device: to run on.
        backend: one of ``BACKENDS``; "auto" is what the engine takes.
        dtype: of ``config.DTYPES``.
        only: names of ops; None = all.
        out: JSONL file; None = no records.
        tag: goes into every record.
        say: called with a line a case.

    Raises:
        ConfigError: an unknown shape, backend or op.
    """
    shape = shape or _DEFAULT_SHAPES[device.type]
    if shape not in SHAPES:
        raise ConfigError(f"unknown --shape {shape!r}; known: {', '.join(SHAPES)}")
    if backend not in BACKENDS:
        raise ConfigError(f"--backend={backend!r} must be one of {', '.join(BACKENDS)}")
    chosen = resolve_backend(backend, device)

    writer = None
    if out is not None:
        writer = RecordWriter(out, model=f"{shape} shape", dtype=dtype, device=device, tag=tag)

    def tell(row: KernelRow) -> None:
        if writer is not None:
            writer.write(**{k: v for k, v in row.to_dict().items() if k not in ("device", "dtype")})
        outcome = row.error or row.missing or f"{row.fraction:.0%} of the floor's speed"
        say(f"{row.op:24s} {row.case}: {outcome}")

    try:
        return bench_kernels(chosen, device, getattr(torch, dtype), SHAPES[shape], only, on_row=tell)
    finally:
        if writer is not None:
            writer.close()
