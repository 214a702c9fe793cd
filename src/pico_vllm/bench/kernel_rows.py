"""A row of the kernel table, and the table for a person's eyes or a Markdown page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.table import Table

from pico_vllm.bench.timing import Timing

_HEADER = ("", "MB", "GFLOP", "floor µs", "µs", "p20–p80", "of floor", "torch µs", "× torch", "torch's op")
#: What the table needs to show a row in a line.
TABLE_WIDTH = 150
_CASE_WIDTH = 35


@dataclass(frozen=True, slots=True)
class KernelRow:
    """One op of one backend at one size.

    Attributes:
        shapes: the model whose sizes these are.
        num_bytes, flops: what a call can't do without.
        floor_s: the shortest time that the device's ceilings allow.
        timing: None if the op is missing or wrong.
        rotated: inputs and outputs together are larger than the cache, so every call moved its bytes through memory.
        baseline_name, baseline_s: torch's fastest right answer; None if there is none.
        missing: why the backend has no such op.
        error: how the op failed or by how much it was wrong.
    """

    shapes: str
    op: str
    case: str
    backend: str
    dtype: str
    device: str
    num_bytes: int = 0
    flops: int = 0
    floor_s: float = 0.0
    timing: Timing | None = None
    rotated: bool = False
    baseline_name: str | None = None
    baseline_s: float | None = None
    missing: str | None = None
    error: str | None = None

    @property
    def fraction(self) -> float | None:
        """Floor over median: 1 is as fast as the device can be.

        More than 1 is for inputs that stay in the cache, or for a ceiling that was measured while the host was busy.
        """
        return None if self.timing is None else self.floor_s / self.timing.median_s

    @property
    def speedup(self) -> float | None:
        """How many times faster than torch."""
        return None if self.timing is None or self.baseline_s is None else self.baseline_s / self.timing.median_s

    def to_dict(self) -> dict[str, Any]:
        """The record for a JSONL file; times in microseconds."""
        timing = self.timing
        return {
            "engine": "pico-vllm",
            "point": "kernel",
            "model": self.shapes,
            "op": self.op,
            "case": self.case,
            "backend": self.backend,
            "dtype": self.dtype,
            "device": self.device,
            "bytes": self.num_bytes,
            "flops": self.flops,
            "floor_us": _us(self.floor_s),
            "time_us": None
            if timing is None
            else {
                "median": _us(timing.median_s),
                "p20": _us(timing.p20_s),
                "p80": _us(timing.p80_s),
                "best": _us(timing.best_s),
            },
            "fraction": None if self.fraction is None else round(self.fraction, 4),
            "mode": None if timing is None else timing.mode,
            "rotated": self.rotated,
            "baseline_name": self.baseline_name,
            "baseline_us": None if self.baseline_s is None else _us(self.baseline_s),
            "speedup": None if self.speedup is None else round(self.speedup, 3),
            "missing": self.missing,
            "error": self.error,
        }


def kernel_table(rows: Sequence[KernelRow]) -> Table:
    """For a terminal, ops as headings; what is wrong is red, what is slower than torch yellow."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for name in _HEADER:
        justify = "left" if name in ("", "torch's op") else "right"
        table.add_column(name, justify=justify, no_wrap=name != "", min_width=_CASE_WIDTH if name == "" else None)
    op = None
    for row in rows:
        if row.op != op:
            op = row.op
            table.add_row(f"[bold]{op}[/]")
        style = "red" if row.error else "dim" if row.missing else None
        if row.speedup is not None and row.speedup < 1:
            style = "yellow"
        table.add_row(*(cell.replace("[", "\\[") for cell in _cells(row)), style=style)
    return table


def _cells(row: KernelRow) -> tuple[str, ...]:
    if row.missing is not None:
        return (f"  {row.missing}",)
    timing = row.timing
    cost = (f"{row.num_bytes / 1e6:.3g}", f"{row.flops / 1e9:.3g}", _short(row.floor_s))
    torch_cells = ("" if row.baseline_s is None else _short(row.baseline_s),)
    if timing is None or row.fraction is None:
        return (f"  {row.case}: WRONG: {row.error}", *cost, "", "", "", *torch_cells, "", row.baseline_name or "")
    notes = [note for note, holds in (("eager", timing.mode == "eager"), ("in cache", not row.rotated)) if holds]
    return (
        f"  {row.case}{' (' + ', '.join(notes) + ')' if notes else ''}",
        *cost,
        _short(timing.median_s),
        f"{_short(timing.p20_s)}–{_short(timing.p80_s)}",
        f"{100 * row.fraction:.3g} %",
        *torch_cells,
        "" if row.speedup is None else f"{row.speedup:.2f}",
        row.baseline_name or "",
    )


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 4)


def _short(seconds: float) -> str:
    """Microseconds with three digits, without an exponent."""
    us = seconds * 1e6
    return f"{us:.0f}" if us >= 100 else f"{us:.3g}" if us >= 0.001 else "0"
