"""Runs side by side, each against a baseline: across engines, commits and machines.

A ratio above 1 always means better than the baseline, whether the metric is a rate or a time. A difference that the
spread of the runs explains is marked, and so is one whose spread isn't known.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pico_vllm.bench.cases import POINT_TITLES, Case, case_cells, sort_cases, sort_points, varying_parts
from pico_vllm.bench.report import markdown_table
from pico_vllm.bench.results import (
    HARDWARE_POINTS,
    Measure,
    Record,
    failure_of,
    format_metric,
    higher_is_better,
    measure,
    measured_metrics,
    metric_names,
    metric_title,
)
from pico_vllm.bench.run_labels import Records, RunRecords, collect_runs, hardware_of, is_measured
from pico_vllm.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

# "same": the ranges of the runs overlap. "unclear": one run only, its spread isn't known.
Verdict = Literal["better", "worse", "same", "unclear"]

MAX_CALIB_DIFFERENCE = 0.15  # of python_loop_ns: hosts further apart move every number that Python makes

_THROUGHPUT = ("out_tok_s", "ttft_ms_median", "itl_ms_p99")
_METRICS = {
    "c1": ("ttft_ms_median", "itl_ms_median", "itl_ms_p99", "decode_tok_s"),
    "prefix": ("ttft_first_ms", "ttft_rest_ms"),
    "prefix_burst": ("ttft_ms_max", "ttft_ms_median"),
    "multi_turn": ("ttft_ms_median", "out_tok_s"),
    "kernel": ("time_us",),
    "poisson": ("goodput_req_s", "ttft_ms_p99", "itl_ms_p99"),
}
_STYLES = {"better": "green", "worse": "red", "same": "dim", "unclear": "yellow"}


@dataclass(frozen=True, slots=True)
class Cell:
    """One run's value; ``ratio`` and ``verdict`` are None in the baseline's column and where it has no value."""

    metric: str
    measure: Measure
    ratio: float | None = None
    verdict: Verdict | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """One case. A cell is None where the run has no such record, and a message where it failed."""

    names: tuple[str, ...]
    cells: tuple[Cell | str | None, ...]


@dataclass(frozen=True, slots=True)
class Block:
    """One metric of one point: rows are cases, columns are runs."""

    title: str
    headings: tuple[str, ...]
    columns: tuple[str, ...]
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class Section:
    """One point."""

    title: str
    shared: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Every point that several runs measured; ``baseline`` is a column's label, ``notes`` tell what is left out."""

    baseline: str
    sections: tuple[Section, ...]
    warnings: tuple[str, ...]
    notes: tuple[str, ...]


def compare(records: Records, baseline: str | None = None) -> Comparison:
    """Put runs side by side.

    Args:
        records: by file, where runs of different files stay apart even if they are of one engine and commit; or a list.
        baseline: a run's label, a part of one label only, or a file; the first run of the first file by default.

    Raises:
        ConfigError: there is nothing to compare, or no run or more than one is called so.
    """
    runs = collect_runs(records)
    if not runs:
        raise ConfigError("nothing to compare: the files hold no benchmark records")
    base = _find_baseline(runs, baseline)
    sections, notes = [], []
    for point in sort_points(point for run in runs for point in run.points - {"parity"}):
        columns = [run for run in runs if point in run.points]
        if len(columns) > 1:
            sections.append(_section(point, columns, base))
        elif point not in HARDWARE_POINTS:
            notes.append(f"Only {columns[0].name} measured the point {point}.")
    return Comparison(base.name, tuple(sections), tuple(_warnings(runs)), tuple(notes))


def _find_baseline(runs: Sequence[RunRecords], name: str | None) -> RunRecords:
    engines = [run for run in runs if run.points - {*HARDWARE_POINTS}] or list(runs)
    if name is None:
        return engines[0]
    of_file = [run for run in engines if run.run.file == name][:1]
    same = [run for run in engines if run.name == name]
    found = of_file or same or [run for run in engines if name in run.name]
    if len(found) != 1:
        how_many = "no run" if not found else f"{len(found)} runs"
        labels = ", ".join(repr(run.name) for run in engines)
        raise ConfigError(f"baseline {name!r} names {how_many}; the runs are {labels}")
    return found[0]


# Sections


def _section(point: str, runs: Sequence[RunRecords], base: RunRecords) -> Section:
    """The baseline's column comes first, then its file's. Machines and kernels have no engine: the first is theirs."""
    columns = sorted(runs, key=lambda run: (run.run != base.run, run.run.file != base.run.file))
    if point in HARDWARE_POINTS:
        return Section(POINT_TITLES[point], "", (_hardware_block(point, columns),))
    found = [run.by_case(point) for run in columns]
    cases = sort_cases(case for by_case in found for case in by_case)
    headings, shared = varying_parts(case for case in cases if is_measured(case, found))
    has_base = columns[0].run == base.run or point == "kernel"
    records = [record for by_case in found for record in by_case.values()]
    blocks = []
    for metric in measured_metrics(records, _METRICS.get(point, _THROUGHPUT)):
        rows = [
            Row(
                tuple(case_cells(case, headings)),
                _cells([by_case.get(case) for by_case in found], metric, has_base=has_base),
            )
            for case in cases
        ]
        rows = [row for row in rows if any(cell is not None for cell in row.cells)]
        blocks.append(
            Block(
                f"{metric_title(metric)} {_arrow(metric)}",
                tuple(headings),
                tuple(run.name for run in columns),
                tuple(rows),
            )
        )
    return Section(POINT_TITLES.get(point, point), shared, tuple(blocks))


def _arrow(metric: str) -> str:
    return "↑" if higher_is_better(metric) else "↓"


def _hardware_block(point: str, columns: Sequence[RunRecords]) -> Block:
    """A row a metric; of several records of one machine the last one."""
    records = [run.records_of(point)[-1] for run in columns]
    rows = (
        Row((f"{metric} {_arrow(metric)}",), _cells(records, metric, has_base=True)) for metric in metric_names(records)
    )
    return Block("", ("metric",), tuple(run.name for run in columns), tuple(rows))


def _cells(records: Sequence[Record | None], metric: str, *, has_base: bool) -> tuple[Cell | str | None, ...]:
    base = measure(records[0], metric) if has_base and records[0] else None
    cells: list[Cell | str | None] = []
    for i, record in enumerate(records):
        if record is None:
            cells.append(None)
        elif (failure := failure_of(record)) is not None:
            cells.append(failure)
        elif (value := measure(record, metric)) is None:
            cells.append(None)
        else:
            cells.append(Cell(metric, value) if base is None or i == 0 else _against(base, value, metric))
    return tuple(cells)


def _against(base: Measure, value: Measure, metric: str) -> Cell:
    if min(base.median, value.median) <= 0:  # no ratio: a counter that stayed at 0, say
        return Cell(metric, value)
    ratio = value.median / base.median if higher_is_better(metric) else base.median / value.median
    if value.overlaps(base):
        return Cell(metric, value, ratio, "same")
    if value.spread is None or base.spread is None:
        return Cell(metric, value, ratio, "unclear")
    return Cell(metric, value, ratio, "better" if ratio > 1 else "worse")


# Warnings


def _warnings(runs: Sequence[RunRecords]) -> list[str]:
    """What keeps the numbers from being compared as they stand."""
    records = [record for run in runs for record in run.records]
    warnings: list[str] = []
    names: dict[str, list[Any]] = {"hardware": [hardware_of(record) for record in records]}
    for field in ("model", "dtype", "driver", "torch"):
        names[f"{field} versions" if field == "torch" else f"{field}s"] = [record.get(field) for record in records]
    for what, found in names.items():
        different = dict.fromkeys(str(name) for name in found if name)
        if len(different) > 1:
            warnings.append(f"different {what}: {' / '.join(different)}")
    return [*warnings, *_calib_warning(records), *_workload_warning(runs)]


def _calib_warning(records: Sequence[Record]) -> list[str]:
    loops = [m.median for r in records if r["point"] == "calib" and (m := measure(r, "python_loop_ns"))]
    if not loops or max(loops) <= min(loops) * (1 + MAX_CALIB_DIFFERENCE):
        return []
    low, high = min(loops), max(loops)
    return [
        f"the hosts were not equally fast, or not idle: a Python loop took {low:.1f} to {high:.1f} ns a turn "
        f"({high / low - 1:.0%} apart); what Python launches moves with it"
    ]


def _workload_warning(runs: Sequence[RunRecords]) -> list[str]:
    hashes: dict[Case, set[str]] = {}
    for run in runs:
        for point in run.points:
            for case, record in run.by_case(point).items():
                if record.get("workload_sha256"):
                    hashes.setdefault(case, set()).add(str(record["workload_sha256"]))
    points = sort_points(case.point for case, found in hashes.items() if len(found) > 1)
    return [f"the runs were given different requests at: {', '.join(points)}"] if points else []


# Rendering


def render(comparison: Comparison) -> RenderableType:
    """For a terminal: green and red where the runs' ranges don't touch."""
    parts: list[RenderableType] = [Text(f"warning: {warning}", "bold yellow") for warning in comparison.warnings]
    parts.append(Text(f"{_how_to_read(comparison)}\n"))
    for section in comparison.sections:
        parts.append(Text.assemble((section.title, "bold"), _shared(section)))
        parts += [_rich_table(block) for block in section.blocks]
    return Group(*parts, *map(Text, comparison.notes))


def to_markdown(comparison: Comparison) -> str:
    """The same for a README or a pull request; ends with a newline."""
    parts = [f"> **Warning:** {warning}" for warning in comparison.warnings]
    parts.append(_how_to_read(comparison))
    for section in comparison.sections:
        parts.append(f"### {section.title}{_shared(section)}")
        for block in section.blocks:
            rows = [[*row.names, *(_plain(cell) for cell in row.cells)] for row in block.rows]
            if block.title:
                parts.append(f"**{block.title}**")
            parts.append(markdown_table([*block.headings, *block.columns], rows, num_text_columns=len(block.headings)))
    return "\n\n".join([*parts, *comparison.notes]) + "\n"


def _how_to_read(comparison: Comparison) -> str:
    return (
        f"Medians; × is against {comparison.baseline}, above 1 is better. ≈: the ranges of the runs overlap. "
        "?: one run only, so its spread isn't known. ↓: less is better."
    )


def _shared(section: Section) -> str:
    return f" ({section.shared})" if section.shared else ""


def _rich_table(block: Block) -> Table:
    table = Table(title=block.title or None, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in block.headings:
        table.add_column(Text(heading), no_wrap=True)
    for column in block.columns:
        table.add_column(Text(column), justify="right")
    for row in block.rows:
        cells = (Text(_plain(cell), _style(cell)) for cell in row.cells)
        table.add_row(*map(Text, row.names), *cells)
    return table


def _plain(cell: Cell | str | None) -> str:
    if cell is None:
        return "–"
    if isinstance(cell, str):
        return cell
    number = format_metric(cell.metric, cell.measure.median)
    if cell.ratio is None:
        return number
    before, after = {"same": ("≈", ""), "unclear": ("", "?")}.get(cell.verdict or "", ("", ""))
    return f"{number} ({before}{cell.ratio:.2f}×{after})"


def _style(cell: Cell | str | None) -> str:
    if isinstance(cell, str):
        return "bold red"
    return _STYLES[cell.verdict] if cell and cell.verdict else ""
