"""Two captures side by side: commits, settings, GPUs.

A ratio is B / A of a time: below 1 B is faster. Where both captures have their device's ceilings, ops and kernels of
known cost also get the share of the ceiling that bounds them, and the ratio of these shares: what is left of a
difference when each device is held against what it can do.

Kernels of one name are told apart as far as both captures can do it. Where one has replayed the kernel in CUDA graphs
and so knows no op, ops don't count; where they have launched other grids (another card, another batch), grids don't.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.markup import escape

from pico_vllm.profiling.report import MAX_ROWS, headline, kernel_name, microseconds, share, table_title
from pico_vllm.tables import UNKNOWN, NumberTable

if TYPE_CHECKING:
    from pico_vllm.profiling.profile import Profile, WorkRow

#: Settings whose names in profile.json don't say it; the others are called as they are there.
_IN_WORDS = {
    "input_len": "tokens in",
    "output_len": "tokens out",
    "concurrency": "requests at a time",
    "num_steps": "recorded steps",
    "skip_steps": "steps left out before",
    "seed": "seed of the prompts",
    "cuda_graphs": "CUDA graphs",
    "async_scheduling": "overlapped scheduling",
    "enable_prefix_caching": "prefix cache",
    "tensor_parallel_size": "GPUs that share the model",
    "max_num_batched_tokens": "tokens of a step at most",
    "block_size": "tokens of a KV block",
}


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
        op, grid: of a kernel, where it is but one.
    """

    name: str
    each_us: ComparedRow
    step_us: ComparedRow
    ceiling_share: ComparedRow
    op: str | None = None
    grid: str | None = None


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
    for name, one, two in (
        ("model", a.model, b.model),
        ("dtype", a.dtype, b.dtype),
        *((name, a.workload.get(name), b.workload.get(name)) for name in sorted({*a.workload, *b.workload})),
        *((name, a.engine.get(name), b.engine.get(name)) for name in sorted({*a.engine, *b.engine})),
    ):
        if one != two:
            warnings.append(f"differ in {_IN_WORDS.get(name, name)}: A {_value(name, one)}, B {_value(name, two)}")
    if a.summary.on_gpu != b.summary.on_gpu:
        warnings.append("one capture is of a GPU and one of a CPU")
    for name, profile in (("A", a), ("B", b)):
        if profile.ceilings is None:
            warnings.append(f"{name} has no ceilings: shares of them are left out")
    return warnings


def _value(name: str, value: Any) -> str:
    if value is None:
        return "one burst to its end" if name == "num_steps" else "unknown"
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value)


def _compare_work(
    a: Sequence[WorkRow], b: Sequence[WorkRow], steps_of_a: int, steps_of_b: int
) -> tuple[ComparedWork, ...]:
    compared = []
    for one, two in _matched(a, b):
        compared.append(
            ComparedWork(
                (one or two)[0].name,
                ComparedRow("", _each_us(one), _each_us(two)),
                ComparedRow("", _step_us(one, steps_of_a), _step_us(two, steps_of_b)),
                ComparedRow("", _ceiling_share(one), _ceiling_share(two)),
                op=_the_only({row.op for row in one}, {row.op for row in two}),
                grid=_the_only({row.grid for row in one}, {row.grid for row in two}),
            )
        )
    return tuple(sorted(compared, key=lambda row: -max(row.step_us.a or 0.0, row.step_us.b or 0.0)))


def _matched(a: Sequence[WorkRow], b: Sequence[WorkRow]) -> list[tuple[list[WorkRow], list[WorkRow]]]:
    """(of a, of b): what is compared with what; one of the two may be empty."""
    matched: dict[tuple[str | None, ...], tuple[list[WorkRow], list[WorkRow]]] = defaultdict(lambda: ([], []))
    for name in {row.name: None for row in (*a, *b)}:
        one, two = ([row for row in rows if row.name == name] for rows in (a, b))
        by_op, by_grid = _told_apart_by(one, two) if one and two else (True, True)
        for side, rows in enumerate((one, two)):
            for row in rows:
                key = name, row.op if by_op else None, row.grid if by_grid else None
                matched[key][side].append(row)
    return list(matched.values())


def _told_apart_by(one: Sequence[WorkRow], two: Sequence[WorkRow]) -> tuple[bool, bool]:
    """Whether (ops, grids) mean the same in both captures' rows of a kernel."""
    ops = [{row.op for row in rows} for rows in (one, two)]
    grids = [{row.grid for row in rows} for rows in (one, two)]
    return ops[0] == ops[1] or None not in ops[0] | ops[1], grids[0] == grids[1]


def _each_us(rows: Sequence[WorkRow]) -> float | None:
    return sum(row.total_us for row in rows) / sum(row.calls for row in rows) if rows else None


def _step_us(rows: Sequence[WorkRow], num_steps: int) -> float | None:
    return sum(row.total_us for row in rows) / num_steps if rows else None


def _ceiling_share(rows: Sequence[WorkRow]) -> float | None:
    """None of rows that were added up: each may have a ceiling of its own."""
    return rows[0].ceiling_share if len(rows) == 1 else None


def _the_only(one: set[str | None], two: set[str | None]) -> str | None:
    """What both say, or one of them where the other one knows nothing."""
    values = (one if one != {None} else set()) | (two if two != {None} else set())
    return values.pop() if len(values) == 1 else None


def _plain_table(title: str, rows: Sequence[ComparedRow]) -> NumberTable:
    cells = [(row.name, _us(row.a), _us(row.b), _ratio(row)) for row in rows]
    return NumberTable(title, ("", "A", "B", "B / A"), cells)


def _work_table(title: str, rows: Sequence[ComparedWork], max_rows: int) -> NumberTable:
    header = (
        "",
        "grid",
        "A µs each",
        "B µs each",
        "B / A",
        "A µs a step",
        "B µs a step",
        "A of ceiling",
        "B of ceiling",
        "B / A",
        "op",
    )
    cells = [
        (
            kernel_name(row.name),
            row.grid or UNKNOWN,
            _us(row.each_us.a),
            _us(row.each_us.b),
            _ratio(row.each_us),
            _us(row.step_us.a),
            _us(row.step_us.b),
            share(row.ceiling_share.a),
            share(row.ceiling_share.b),
            _ratio(row.ceiling_share),
            row.op or UNKNOWN,
        )
        for row in rows[:max_rows]
    ]
    return NumberTable(table_title(title, len(rows), max_rows), header, cells)


def _us(value: float | None) -> str:
    return UNKNOWN if value is None else microseconds(value)


def _ratio(row: ComparedRow) -> str:
    return UNKNOWN if row.ratio is None else f"{row.ratio:.2f}"
