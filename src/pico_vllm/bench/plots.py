"""Records as PNGs for a README: 1200 pixels wide, a run looks the same in every plot.

Whiskers span the runs, from the lowest to the highest. A plot is made only where there is data for it. Needs
matplotlib, which is imported on first use: ``pip install "pico-vllm[bench]"``.
"""

from __future__ import annotations

import textwrap
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pico_vllm.bench.cases import POINT_TITLES, Case, case_words, sort_cases, varying_parts
from pico_vllm.bench.drawing import (
    DPI,
    GREY,
    GRID,
    SMALL,
    STYLE,
    Bar,
    Line,
    Look,
    Looks,
    add_legend,
    assign_looks,
    draw_bar,
    draw_groups,
    draw_lines,
    group_thousands,
    log_x,
    log_y,
    name_bars,
    new_figure,
    number_bar,
    paler,
)
from pico_vllm.bench.results import HARDWARE_POINTS, Measure, Record, failure_of, measure, number_of
from pico_vllm.bench.run_labels import Records, RunRecords, collect_runs, hardware_of
from pico_vllm.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from matplotlib.figure import Figure

_TORCH = "torch"
_LATENCIES = {"itl_ms_p99": "ITL p99 (ms)", "tpot_ms_median": "TPOT median (ms)"}  # the first that was measured
_LOADS = {"sweep": "closed loop", "burst": "burst"}


@dataclass(frozen=True, slots=True)
class Data:
    """What every plot is made from; ``about`` names model, dtype and hardware."""

    runs: tuple[RunRecords, ...]
    looks: Looks
    about: str


def plot_all(records: Records, out_dir: str | Path) -> list[Path]:
    """Draw what the records hold data for.

    Args:
        records: of any number of runs.
        out_dir: made if missing; files of the same names are overwritten.

    Returns:
        The PNGs, in the order of a reader's interest.

    Raises:
        ConfigError: matplotlib is missing.
    """
    matplotlib = require_matplotlib()
    runs = collect_runs(records)
    looks = assign_looks(run.name for run in runs if run.points - {*HARDWARE_POINTS})
    data = Data(runs, looks, _model_and_hardware([record for run in runs for record in run.records]))
    out_dir = Path(out_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, plot in PLOTS.items():
        with matplotlib.rc_context(STYLE):
            figure = plot(data)
            if figure is not None:
                paths.append(out_dir / f"{name}.png")
                figure.savefig(paths[-1], dpi=DPI)
    return paths


def require_matplotlib() -> Any:
    """Matplotlib, imported.

    Raises:
        ConfigError: it is missing, with the remedy.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError(
            f'plots need matplotlib, which can\'t be imported ({error}): pip install "pico-vllm[bench]"'
        ) from error
    return matplotlib


def _model_and_hardware(records: Sequence[Record]) -> str:
    records = [record for record in records if record["point"] != "kernel"] or records
    values = (
        dict.fromkeys(str(record["model"]) for record in records if record.get("model")),
        dict.fromkeys(str(record["dtype"]) for record in records if record.get("dtype")),
        dict.fromkeys(filter(None, map(hardware_of, records))),
    )
    return _joined(*(" / ".join(found) for found in values))


# The plots


def _plot_decode(data: Data) -> Figure | None:
    cases = _usual_cases(data, "c1", by="input_len")
    groups = _groups(data, [(str(case.input_len), case) for case in cases], "decode_tok_s")
    if not groups:
        return None
    about = _joined(data.about, f"{cases[0].output_len} output tokens")
    figure, ax = new_figure("Decoding, one request at a time", about)
    draw_groups(ax, groups, data.looks)
    ax.set_xlabel("input tokens")
    ax.set_ylabel("decode speed (tok/s)")
    add_legend(figure, _names_in(groups), data.looks, lines=False)
    return figure


def _plot_ttft(data: Data) -> Figure | None:
    cases = _usual_cases(data, "c1", by="input_len")
    lines = _lines(data, cases, "ttft_ms_median", by="input_len")
    if not _is_a_curve(lines):
        return None
    about = _joined(data.about, f"one request at a time, {cases[0].output_len} output tokens")
    figure, ax = new_figure("Time to first token over prompt length", about)
    log_x(ax, lines)
    log_y(ax)
    ax.set_xlabel("input tokens")
    ax.set_ylabel("TTFT (ms)")
    draw_lines(figure, ax, lines, data.looks)
    return figure


def _plot_throughput(data: Data) -> Figure | None:
    cases = _cases(data, "throughput")
    headings, shared = varying_parts(cases)
    groups = _groups(data, [(case_words(case, headings), case) for case in cases], "out_tok_s")
    if not groups:
        return None
    figure, ax = new_figure(POINT_TITLES["throughput"], _joined(data.about, shared))
    draw_groups(ax, groups, data.looks)
    ax.set_ylabel("throughput (output tok/s)")
    add_legend(figure, _names_in(groups), data.looks, lines=False)
    return figure


def _plot_scaling(data: Data, point: str) -> Figure | None:
    cases = _usual_cases(data, point, by="concurrency")
    lines = _lines(data, cases, "out_tok_s", by="concurrency")
    if not _is_a_curve(lines):
        return None
    figure, ax = new_figure(f"Throughput over concurrency: {_LOADS[point]}", _about(data, cases))
    log_x(ax, lines)
    ax.set_xlabel("concurrent requests")
    ax.set_ylabel("throughput (output tok/s)")
    draw_lines(figure, ax, lines, data.looks)
    return figure


def _plot_latency(data: Data, point: str) -> Figure | None:
    """Right and down is better; a curve that turns back has passed its best concurrency."""
    cases = _usual_cases(data, point, by="concurrency")
    rates = {
        line.label: dict(zip(line.xs, line.ys, strict=True))
        for line in _lines(data, cases, "out_tok_s", by="concurrency")
    }
    found = {metric: _lines(data, cases, metric, by="concurrency") for metric in _LATENCIES}
    metric = next((metric for metric, lines in found.items() if _is_a_curve(lines)), None)
    if metric is None:
        return None
    lines = []
    for line in found[metric]:
        rate = rates.get(line.label, {})
        known = [(rate[c].median, y, f"{c:g}") for c, y in zip(line.xs, line.ys, strict=True) if c in rate]
        if known:
            xs, ys, names = zip(*known, strict=True)
            lines.append(Line(line.label, xs, ys, names))
    figure, ax = new_figure(f"Latency against throughput: {_LOADS[point]}", _about(data, cases))
    log_y(ax)
    ax.set_xlim(0, 1.06 * max(x for line in lines for x in line.xs))
    group_thousands(ax, x=True)
    ax.set_xlabel("throughput (output tok/s); the numbers are concurrent requests")
    ax.set_ylabel(_LATENCIES[metric])
    draw_lines(figure, ax, lines, data.looks)
    return figure


def _plot_prefix(data: Data) -> Figure | None:
    """Two bars a run and setting of the cache: the first request, and those that share its prefix."""
    groups = []
    for run in data.runs:
        for case, record in sorted(run.by_case("prefix").items(), key=lambda item: bool(item[0].prefix_caching)):
            first, rest = measure(record, "ttft_first_ms"), measure(record, "ttft_rest_ms")
            if first and rest:
                state = "cache on" if case.prefix_caching else "cache off"
                groups.append((f"{textwrap.fill(run.name, 20)}\n{state}", data.looks[run.name], first, rest))
    if not groups:
        return None
    figure, ax = new_figure("Prefix cache: time to first token", _about(data, _cases(data, "prefix")))
    for i, (_, look, first, rest) in enumerate(groups):
        draw_bar(ax, i - 0.2, first, 0.38, paler(look.colour))
        draw_bar(ax, i + 0.2, rest, 0.38, look.colour)
        number_bar(ax, i - 0.2, first)
        number_bar(ax, i + 0.2, rest)
    name_bars(ax, [name for name, *_ in groups])
    ax.set_ylabel("TTFT (ms)")
    grey = {"first request": Look(paler(GREY), "", ""), "later requests": Look(GREY, "", "")}
    add_legend(figure, grey, grey, lines=False)
    return figure


def _plot_goodput(data: Data) -> Figure | None:
    cases = _usual_cases(data, "poisson", by="rate")
    lines = _lines(data, cases, "goodput_req_s", by="rate")
    if not _is_a_curve(lines):
        return None
    figure, ax = new_figure("Goodput over request rate", _about(data, cases))
    top = max(x for line in lines for x in line.xs)
    ax.plot([0, top], [0, top], color=GREY, linewidth=1, linestyle=":")
    ax.annotate(
        "every request in time",
        (top, top),
        xytext=(-8, 0),
        textcoords="offset points",
        ha="right",
        va="center",
        fontsize=SMALL,
        color=GREY,
    )
    ax.set_xlim(0, 1.04 * top)
    ax.set_xlabel("requests/s that arrive")
    ax.set_ylabel("goodput (requests/s within their limits)")
    draw_lines(figure, ax, lines, data.looks)
    return figure


def _plot_kernels(data: Data) -> Figure | None:
    """Lying bars, for names are long; the figure grows with their number. Torch's bars stand beside ours."""
    cases = _cases(data, "kernel")
    headings = {*varying_parts(cases)[0], "op", "case"}
    groups = [
        (name, bars + _torch_bars(data, case))
        for case in cases
        for name, bars in _groups(data, [(case_words(case, headings), case)], "fraction")
    ]
    if not groups:
        return None
    looks = {**data.looks, _TORCH: Look(GREY, "", "")}
    height = 1.6 + 0.15 * sum(len(bars) for _, bars in groups) + 0.1 * len(groups)
    figure, ax = new_figure("Kernels: how near to what the hardware allows", data.about, height=height)
    y, ticks = 0.0, []
    for _, bars in groups:
        ticks.append(y + 0.5 * (len(bars) - 1))
        for bar in bars:
            draw_bar(ax, y, bar.measure, 0.86, looks[bar.label].colour, looks[bar.label].hatch, horizontal=True)
            ax.annotate(f" {bar.measure.median:.0%}", (bar.measure.high, y), va="center", fontsize=SMALL)
            y += 1
        y += 0.7
    ax.set_yticks(ticks, [name for name, _ in groups])
    ax.tick_params(axis="y", length=0)
    ax.set_ylim(y - 1, -1)
    ax.set_xlim(0, max(1.05, 1.08 * max(bar.measure.high for _, bars in groups for bar in bars)))
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    ax.axvline(1, color=GREY, linewidth=1, linestyle=":")
    ax.grid(visible=False, axis="y")
    ax.grid(axis="x", **GRID)
    ax.set_xlabel("shortest possible time (from the measured ceilings) / time")
    add_legend(figure, _names_in(groups), looks, lines=False)
    return figure


def _torch_bars(data: Data, case: Case) -> list[Bar]:
    """The floor over the time of torch's own op, from the first run that has both."""
    for run in data.runs:
        record = run.by_case("kernel").get(case, {})
        floor, baseline = (number_of(record.get(name)) for name in ("floor_us", "baseline_us"))
        if floor is not None and baseline:
            share = floor / baseline
            return [Bar(_TORCH, Measure(share, share, share, None))]
    return []


PLOTS: dict[str, Callable[[Data], Figure | None]] = {
    "c1_decode": _plot_decode,
    "c1_ttft": _plot_ttft,
    "throughput": _plot_throughput,
    "sweep_throughput": lambda data: _plot_scaling(data, "sweep"),
    "sweep_latency": lambda data: _plot_latency(data, "sweep"),
    "burst_throughput": lambda data: _plot_scaling(data, "burst"),
    "burst_latency": lambda data: _plot_latency(data, "burst"),
    "prefix": _plot_prefix,
    "goodput": _plot_goodput,
    "kernels": _plot_kernels,
}


# What to draw


def _cases(data: Data, point: str) -> list[Case]:
    return sort_cases(
        case for run in data.runs for case, record in run.by_case(point).items() if failure_of(record) is None
    )


def _usual_cases(data: Data, point: str, *, by: str) -> list[Case]:
    """Cases that differ in one property only, a curve: those with most records, then the longest answers."""
    groups: dict[Case, list[Case]] = defaultdict(list)
    for run in data.runs:
        for case in run.by_case(point):
            if isinstance(getattr(case, by), int | float):
                groups[replace(case, **{by: None})].append(case)
    if not groups:
        return []
    usual = max(groups, key=lambda rest: (len(groups[rest]), str(rest.output_len).rjust(9)))
    return sort_cases(groups[usual])


def _about(data: Data, cases: Sequence[Case]) -> str:
    """Model and hardware, and what the cases have in common."""
    return _joined(data.about, varying_parts(cases)[1])


def _joined(*parts: str) -> str:
    return " · ".join(filter(None, parts))


def _groups(data: Data, named: Sequence[tuple[str, Case]], metric: str) -> list[tuple[str, list[Bar]]]:
    """A bar a run that measured the case; cases that nobody measured are left out."""
    groups = []
    for name, case in named:
        found = ((run.name, run.by_case(case.point).get(case)) for run in data.runs)
        bars = [Bar(label, value) for label, record in found if record and (value := measure(record, metric))]
        if bars:
            groups.append((name, bars))
    return groups


def _names_in(groups: Sequence[tuple[str, list[Bar]]]) -> list[str]:
    return [bar.label for _, bars in groups for bar in bars]


def _is_a_curve(lines: Sequence[Line]) -> bool:
    return any(len(line.xs) > 1 for line in lines)


def _lines(data: Data, cases: Sequence[Case], metric: str, *, by: str) -> list[Line]:
    """A line a run that has values, over the property in which the cases differ."""
    lines = []
    for run in data.runs:
        found = ((getattr(case, by), run.by_case(case.point).get(case)) for case in cases)
        known = [(x, value) for x, record in found if record and (value := measure(record, metric))]
        if known:
            xs, ys = zip(*known, strict=True)
            lines.append(Line(run.name, xs, ys))
    return lines
