"""Two captures side by side: commits, settings, GPUs.

A ratio is B / A of a time: below 1 B is faster. Where both captures have their device's ceilings, ops and kernels of
known cost also get the share of the ceiling that bounds them, and the ratio of these shares: what is left of a
difference when each device is held against what it can do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich import box
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from pico_vllm.profiling.report import MAX_ROWS, headline, microseconds, share

if TYPE_CHECKING:
    from pico_vllm.profiling.profile import Profile, WorkRow


@dataclass(frozen=True, slots=True)
class ComparedRow:
    """One quantity of two captures; None where one of them has no such thing."""

    name: str
    a: float | None
    b: float | None

    @property
    def ratio(self) -> float | None:
        """B / A."""
        return self.b / self.a if self.a and self.b is not None else None


@dataclass(frozen=True, slots=True)
class ComparedWork:
    """One op or kernel of two captures.

    Attributes:
        each_us: of one call.
        step_us: of a step's calls.
        ceiling_share: of the device's ceiling.
    """

    name: str
    each_us: ComparedRow
    step_us: ComparedRow
    ceiling_share: ComparedRow


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two captures.

    Attributes:
        warnings: what makes them hard to compare.
        whole, host: times in microseconds (shares say so in their names).
        ops, kernels: those of either, by the longer time of a step.
    """

    warnings: tuple[str, ...]
    whole: tuple[ComparedRow, ...]
    host: tuple[ComparedRow, ...]
    ops: tuple[ComparedWork, ...]
    kernels: tuple[ComparedWork, ...]


def compare(a: Profile, b: Profile) -> Comparison:
    """Put two captures side by side."""
    one, two = a.summary, b.summary
    whole = (
        ComparedRow("step p50, µs", one.step.p50_us, two.step.p50_us),
        ComparedRow("step p50 without profiler, µs", a.unprofiled_step_us, b.unprofiled_step_us),
        ComparedRow("device busy, µs a step", one.busy_us / one.num_steps, two.busy_us / two.num_steps),
        ComparedRow(
            "device idle, µs a step",
            (one.window_us - one.busy_us) / one.num_steps,
            (two.window_us - two.busy_us) / two.num_steps,
        ),
        ComparedRow("longest gap, µs", one.gaps.longest_us, two.gaps.longest_us),
    )
    phases = sorted(
        {*one.host, *two.host},
        key=lambda name: -max(s.host[name].total_us / s.num_steps if name in s.host else 0.0 for s in (one, two)),
    )
    host = tuple(
        ComparedRow(name, *(s.host[name].total_us / s.num_steps if name in s.host else None for s in (one, two)))
        for name in phases
    )
    return Comparison(
        warnings=tuple(_differences(a, b)),
        whole=whole,
        host=host,
        ops=_compare_work(one.ops, two.ops, one.num_steps, two.num_steps),
        kernels=_compare_work(one.kernels, two.kernels, one.num_steps, two.num_steps),
    )


def render_comparison(a: Profile, b: Profile, *, max_rows: int = MAX_ROWS) -> RenderableType:
    """Tables for a terminal."""
    comparison = compare(a, b)
    parts: list[RenderableType] = [f"A  {headline(a)}", f"B  {headline(b)}"]
    parts += [f"[yellow]{escape(warning)}[/]" for warning in comparison.warnings]
    busy = f"busy: A {share(a.summary.busy_share)}, B {share(b.summary.busy_share)} of the time"
    parts += [busy, _plain_table("whole", comparison.whole), _plain_table("host by phase, µs a step", comparison.host)]
    for title, rows in (("ops", comparison.ops), ("kernels", comparison.kernels)):
        if rows:
            parts.append(_work_table(title, rows, max_rows))
    return Group(*parts)


# ---------------------------------------------------------------------------------------------------------- private
def _differences(a: Profile, b: Profile) -> list[str]:
    warnings = []
    for what, one, two in (
        ("model", a.model, b.model),
        ("dtype", a.dtype, b.dtype),
        *((name, a.workload.get(name), b.workload.get(name)) for name in sorted({*a.workload, *b.workload})),
        *((name, a.engine.get(name), b.engine.get(name)) for name in sorted({*a.engine, *b.engine})),
    ):
        if one != two:
            warnings.append(f"{what} differs: {one} and {two}")
    if a.summary.on_gpu != b.summary.on_gpu:
        warnings.append("one capture is of a GPU and one of a CPU")
    for name, profile in (("A", a), ("B", b)):
        if profile.ceilings is None:
            warnings.append(f"{name} has no ceilings: shares of them are left out")
    return warnings


def _compare_work(
    a: Sequence[WorkRow], b: Sequence[WorkRow], steps_of_a: int, steps_of_b: int
) -> tuple[ComparedWork, ...]:
    of_a, of_b = ({(row.name, row.op): row for row in rows} for rows in (a, b))
    compared = []
    for key in {**of_a, **of_b}:
        one, two = of_a.get(key), of_b.get(key)
        compared.append(
            ComparedWork(
                key[0],
                ComparedRow("", one and one.each_us, two and two.each_us),
                ComparedRow("", one and one.total_us / steps_of_a, two and two.total_us / steps_of_b),
                ComparedRow("", one and one.ceiling_share, two and two.ceiling_share),
            )
        )
    return tuple(sorted(compared, key=lambda row: -max(row.step_us.a or 0.0, row.step_us.b or 0.0)))


def _plain_table(title: str, rows: Sequence[ComparedRow]) -> Table:
    table = _table(title, ("", "A", "B", "B / A"))
    for row in rows:
        table.add_row(row.name, _us(row.a), _us(row.b), _ratio(row))
    return table


def _work_table(title: str, rows: Sequence[ComparedWork], max_rows: int) -> Table:
    title = f"{title} (the first {max_rows} of {len(rows)})" if len(rows) > max_rows else title
    header = (
        "",
        "A µs each",
        "B µs each",
        "B / A",
        "A µs a step",
        "B µs a step",
        "A of ceiling",
        "B of ceiling",
        "B / A",
    )
    table = _table(title, header)
    for row in rows[:max_rows]:
        table.add_row(
            escape(row.name if len(row.name) <= 40 else row.name[:39] + "…"),
            _us(row.each_us.a),
            _us(row.each_us.b),
            _ratio(row.each_us),
            _us(row.step_us.a),
            _us(row.step_us.b),
            share(row.ceiling_share.a),
            share(row.ceiling_share.b),
            _ratio(row.ceiling_share),
        )
    return table


def _table(title: str, header: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for name in header:
        table.add_column(name, justify="left" if name == "" else "right", no_wrap=True)
    return table


def _us(value: float | None) -> str:
    return "–" if value is None else microseconds(value)


def _ratio(row: ComparedRow) -> str:
    return "–" if row.ratio is None else f"{row.ratio:.2f}"
