"""How plots are drawn: one look a run, bars and lines with whiskers over the runs, labels that cover nothing.

A run has a colour (Okabe and Ito's, told apart by colour-blind readers), a marker and a hatch, so grey print works too.
Knows values and names only, no records. Called by ``plots``; matplotlib is imported inside the functions.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from pico_vllm.bench.results import Measure, format_number

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 150
WIDTH_INCHES = 8.0  # 1200 pixels
HEIGHT_INCHES = 4.8
AXES_PIXELS = 1050  # of the width, roughly

# Okabe & Ito, "Color Universal Design" (2008), without yellow, which is too pale for a line on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")  # one more than colours: pairs repeat late
HATCHES = ("", "//", "\\\\", "xx", "..", "--", "++", "oo")
GREY = "#555555"
GRID = {"color": "#dddddd", "linewidth": 0.8}

STYLE = {
    "font.size": 10.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.ymargin": 0.1,
    "hatch.linewidth": 0.6,
}
MAX_DIRECT_LABELS = 5
SMALL = 8  # points; a character is about 9 pixels wide

Box = tuple[float, float, float, float]  # left, bottom, right, top


@dataclass(frozen=True, slots=True)
class Look:
    """How a run is drawn, everywhere."""

    colour: str
    marker: str
    hatch: str


Looks = dict[str, Look]  # by the run's label


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar; ``label`` is the run's."""

    label: str
    measure: Measure


@dataclass(frozen=True, slots=True)
class Line:
    """One run's values over x, and a name for each point where x doesn't tell it."""

    label: str
    xs: tuple[float, ...]
    ys: tuple[Measure, ...]
    names: tuple[str, ...] = ()


def assign_looks(labels: Iterable[str]) -> Looks:
    """A colour, a marker and a hatch a label, by position."""
    return {
        label: Look(COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)], HATCHES[i % len(HATCHES)])
        for i, label in enumerate(dict.fromkeys(labels))
    }


def new_figure(title: str, about: str, *, height: float = HEIGHT_INCHES) -> tuple[Figure, Axes]:
    """A figure with its title, and what was measured in grey below it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_INCHES, height), dpi=DPI, layout="constrained")
    ax = figure.subplots()
    about = textwrap.fill(about, 115)
    ax.set_title(title, loc="left", fontweight="bold", fontsize=12, pad=12 + 12 * (1 + about.count("\n")))
    ax.annotate(
        about, (0, 1), xycoords="axes fraction", xytext=(0, 10), textcoords="offset points", fontsize=8.5, color=GREY
    )
    ax.grid(axis="y", **GRID)
    return figure, ax


# Bars


def draw_groups(ax: Axes, groups: Sequence[tuple[str, list[Bar]]], looks: Looks) -> None:
    """Bars of a group side by side, without gaps for the runs that have no value; with numbers where they fit."""
    width = 0.84 / max(len(bars) for _, bars in groups)
    longest = max(len(format_number(bar.measure.median)) for _, bars in groups for bar in bars)
    has_numbers = longest * 9 <= AXES_PIXELS / len(groups) * width
    for i, (_, bars) in enumerate(groups):
        for j, bar in enumerate(bars):
            x = i + (j - (len(bars) - 1) / 2) * width
            draw_bar(ax, x, bar.measure, width * 0.94, looks[bar.label].colour, looks[bar.label].hatch)
            if has_numbers:
                number_bar(ax, x, bar.measure)
    name_bars(ax, [name for name, _ in groups])


def draw_bar(
    ax: Axes, at: float, value: Measure, width: float, colour: str, hatch: str = "", *, horizontal: bool = False
) -> None:
    """A bar to the median, and a whisker from the lowest run to the highest where there were several."""
    look: dict[str, Any] = {"color": colour, "hatch": hatch, "edgecolor": "white", "linewidth": 0}
    whisker: dict[str, Any] = {"fmt": "none", "ecolor": "black", "elinewidth": 1, "capsize": 2}
    reach = [[value.median - value.low], [value.high - value.median]]
    if horizontal:
        ax.barh(at, value.median, width, **look)
        if value.spread is not None:
            ax.errorbar(value.median, at, xerr=reach, **whisker)
    else:
        ax.bar(at, value.median, width, **look)
        if value.spread is not None:
            ax.errorbar(at, value.median, yerr=reach, **whisker)


def number_bar(ax: Axes, x: float, value: Measure) -> None:
    """The median, above the whisker."""
    text = format_number(value.median)
    ax.annotate(
        text, (x, value.high), xytext=(0, 3), textcoords="offset points", ha="center", va="bottom", fontsize=SMALL
    )


def name_bars(ax: Axes, names: Sequence[str]) -> None:
    """The groups' names under them; the axis starts at 0."""
    ax.set_xticks(range(len(names)), names)
    ax.tick_params(axis="x", length=0)
    ax.set_ylim(bottom=0)
    group_thousands(ax)


def paler(colour: str) -> str:
    """The colour mixed with white."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(0.38 * part + 0.62 * 255):02x}" for part in (red, green, blue))


# Lines


def draw_lines(figure: Figure, ax: Axes, lines: Sequence[Line], looks: Looks) -> None:
    """Lines with their names at their ends, or in a legend if they are many or don't end together.

    The last step of a plot: it needs the axes' scales, and freezes their limits.
    """
    for line in lines:
        _draw_line(ax, line, looks[line.label])
    if ax.get_yscale() == "linear":
        ax.set_ylim(bottom=0)
        group_thousands(ax)
    if len(lines) <= MAX_DIRECT_LABELS and len({line.xs[-1] for line in lines}) == 1:
        _label_ends(figure, ax, lines, looks)
    else:
        add_legend(figure, [line.label for line in lines], looks, lines=True)
    if any(line.names for line in lines):
        _name_points(figure, ax, lines, looks)


def _draw_line(ax: Axes, line: Line, look: Look) -> None:
    reach = [[y.median - y.low for y in line.ys], [y.high - y.median for y in line.ys]]
    ax.errorbar(
        line.xs,
        [y.median for y in line.ys],
        yerr=reach,
        color=look.colour,
        marker=look.marker,
        markersize=5,
        linewidth=1.6,
        elinewidth=1,
        capsize=2,
    )


def _label_ends(figure: Figure, ax: Axes, lines: Sequence[Line], looks: Looks) -> None:
    """Names in the right margin, moved apart where lines end close to each other."""
    figure.draw_without_rendering()
    to_axes = ax.transData + ax.transAxes.inverted()
    heights = {line.label: float(to_axes.transform((line.xs[-1], line.ys[-1].median))[1]) for line in lines}
    labels = sorted(heights, key=lambda label: heights[label])
    for label, height in zip(labels, spread_out([heights[label] for label in labels], gap=0.055), strict=True):
        ax.annotate(
            label,
            (1, height),
            xycoords="axes fraction",
            xytext=(8, 0),
            textcoords="offset points",
            va="center",
            color=looks[label].colour,
        )


def _name_points(figure: Figure, ax: Axes, lines: Sequence[Line], looks: Looks) -> None:
    figure.draw_without_rendering()  # the layout decides what is near what
    to_pixels = ax.transData.transform
    paths = [_pairs(to_pixels([(x, y.median) for x, y in zip(line.xs, line.ys, strict=True)])) for line in lines]
    whiskers = [
        _pairs(to_pixels([(x, y.low), (x, y.high)])) for line in lines for x, y in zip(line.xs, line.ys, strict=True)
    ]
    frame = ax.get_window_extent()
    named = [(name, i, k) for i, line in enumerate(lines) for k, name in enumerate(line.names)]
    points = [(name, paths[i][k]) for name, i, k in named]
    offsets = place_names(points, paths + whiskers, (frame.x0, frame.y0, frame.x1, frame.y1))
    for (name, i, k), offset in zip(named, offsets, strict=True):
        if offset is not None:
            ax.annotate(
                name,
                (lines[i].xs[k], lines[i].ys[k].median),
                xytext=(offset[0] * 72 / DPI, offset[1] * 72 / DPI),
                textcoords="offset points",
                ha="center",
                va="center",
                fontsize=SMALL,
                color=looks[lines[i].label].colour,
            )


def _pairs(points: Iterable[Any]) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in points]


# Where labels go


def spread_out(places: Sequence[float], *, gap: float) -> list[float]:
    """Move rising places apart to at least ``gap``, each cluster around its middle."""
    clusters = [[place] for place in places]
    while True:
        starts = [sum(members) / len(members) - gap * (len(members) - 1) / 2 for members in clusters]
        ends = [start + gap * (len(members) - 1) for start, members in zip(starts, clusters, strict=True)]
        close = (i for i, (a, b) in enumerate(pairwise(zip(starts, ends, strict=True))) if b[0] - a[1] < gap - 1e-9)
        if (i := next(close, None)) is None:
            return [
                start + gap * k for start, members in zip(starts, clusters, strict=True) for k in range(len(members))
            ]
        clusters[i : i + 2] = [clusters[i] + clusters[i + 1]]


def place_names(
    points: Sequence[tuple[str, tuple[float, float]]], paths: Sequence[Sequence[tuple[float, float]]], frame: Box
) -> list[tuple[float, float] | None]:
    """Offsets from points to the middles of their names, each where it covers least; all in pixels.

    Args:
        points: names and their points. A name that a close neighbour already has is left out: None.
        paths: lines and whiskers, as corners.
        frame: names stay inside of it if they can.
    """
    inked = [spot for path in paths for spot in _along(path)]
    placed: list[tuple[str, tuple[float, float], Box]] = []
    offsets: list[tuple[float, float] | None] = []
    for name, (x, y) in points:
        if any(name == other and abs(x - u) + abs(y - v) < 24 for other, (u, v), _ in placed):
            offsets.append(None)
            continue
        choices = [
            (dx, dy) for dx, dy in ((0, 18), (0, -18), (-20, 12), (20, -12), (-20, -12), (20, 12), (24, 0), (-24, 0))
        ]
        boxes = [_name_box(name, x + dx, y + dy) for dx, dy in choices]
        costs = [
            sum(10 for *_, other in placed if _overlap(box, other))
            + sum(box[0] < u < box[2] and box[1] < v < box[3] for u, v in inked)
            + (5 if box[0] < frame[0] or box[1] < frame[1] or box[2] > frame[2] or box[3] > frame[3] else 0)
            for box in boxes
        ]
        best = costs.index(min(costs))
        placed.append((name, (x, y), boxes[best]))
        offsets.append(choices[best])
    return offsets


def _along(path: Sequence[tuple[float, float]], step: float = 5) -> list[tuple[float, float]]:
    """Spots on a line, one every few pixels."""
    spots = list(path)
    for (x, y), (u, v) in pairwise(path):
        num = int(max(abs(u - x), abs(v - y)) / step)
        spots += [(x + (u - x) * k / num, y + (v - y) * k / num) for k in range(1, num)]
    return spots


def _name_box(name: str, x: float, y: float) -> Box:
    half = 5.5 * len(name)
    return x - half, y - 9, x + half, y + 9


def _overlap(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


# Axes and legends


def add_legend(figure: Figure, labels: Iterable[str], looks: Mapping[str, Look], *, lines: bool) -> None:
    """Below the axes, where it covers nothing."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles = []
    for label in dict.fromkeys(labels):
        look = looks[label]
        if lines:
            handles.append(Line2D([], [], color=look.colour, marker=look.marker, label=label))
        else:
            handles.append(Patch(facecolor=look.colour, hatch=look.hatch, edgecolor="white", linewidth=0, label=label))
    longest = max(len(str(handle.get_label())) for handle in handles)
    num_columns = max(1, min(len(handles), 110 // (longest + 8)))
    figure.legend(handles=handles, loc="outside lower center", ncols=num_columns, frameon=False)


def log_x(ax: Axes, lines: Sequence[Line]) -> None:
    """Powers of two; the measured values are named, and nothing between them."""
    ax.set_xscale("log", base=2)
    xs = sorted({x for line in lines for x in line.xs})
    ax.set_xticks(xs, [f"{x:g}" for x in xs])
    ax.minorticks_off()


def log_y(ax: Axes) -> None:
    """Named at 1, 2 and 5, without exponents."""
    from matplotlib.ticker import LogLocator, NullFormatter

    ax.set_yscale("log")
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.yaxis.set_minor_formatter(NullFormatter())


def group_thousands(ax: Axes, *, x: bool = False) -> None:
    """13,966 instead of 13966."""
    (ax.xaxis if x else ax.yaxis).set_major_formatter(lambda value, _: f"{value:,.10g}")
