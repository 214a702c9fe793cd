"""The tables of one capture, for a person's eyes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from pico_vllm.profiling.analysis import quantile
from pico_vllm.tables import UNKNOWN, NumberTable

if TYPE_CHECKING:
    from pico_vllm.profiling.profile import Profile, Summary, WorkRow

MAX_ROWS = 20
#: Of every kernel of torch's.
_CPP_NOISE = ("void ", "at::native::", "(anonymous namespace)::")


def render(profile: Profile, *, max_rows: int = MAX_ROWS) -> RenderableType:
    """All tables; of ops and kernels the ``max_rows`` longest."""
    summary = profile.summary
    parts: list[RenderableType] = [headline(profile), _overview(profile), _host(summary)]
    if summary.ops:
        of = "ops launched from Python" if summary.on_gpu else "ops"
        parts.append(_work(f"{of}, by time", summary.ops, max_rows))
    if summary.kernels:
        parts.append(_work("kernels, by time", summary.kernels, max_rows))
    if summary.on_gpu and profile.engine.get("cuda_graphs"):
        parts.append(
            "Kernels without an op were replayed in CUDA graphs, where layers and ops aren't seen: --eager shows them."
        )
    return Group(*parts)


def headline(profile: Profile) -> str:
    """Model, machine, versions and load in two lines."""
    machine, load = profile.environment, profile.workload
    device = machine.get("gpu") or f"{machine.get('cpu')}, {machine.get('cpus')} cores"
    return escape(
        f"{profile.model}, {profile.dtype} on {device}; torch {machine.get('torch')}, commit {machine.get('commit')}\n"
        f"{load.get('concurrency')} requests at a time, {load.get('input_len')} tokens in, {load.get('output_len')} out"
        f"; backend {profile.engine.get('backend')}, "
        f"{'CUDA graphs' if profile.engine.get('cuda_graphs') else 'no CUDA graphs'}"
    )


def share(value: float | None) -> str:
    """A part of a whole; what isn't known is a dash."""
    return UNKNOWN if value is None else f"{value:.1%}"


def microseconds(value: float) -> str:
    """With one digit after the point where there are few before it."""
    return f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"


def kernel_name(name: str) -> str:
    """Without what all kernels of torch have in their names."""
    for noise in _CPP_NOISE:
        name = name.replace(noise, "")
    return name


def table_title(title: str, num_rows: int, max_rows: int) -> str:
    """Says when rows are left out."""
    return f"{title} (the first {max_rows} of {num_rows})" if num_rows > max_rows else title


# ---------------------------------------------------------------------------------------------------------- private
def _overview(profile: Profile) -> Table:
    summary, gaps = profile.summary, profile.summary.gaps
    device = "GPU" if summary.on_gpu else "ops (on the CPU)"
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    step = summary.step
    without = ""
    if profile.unprofiled_step_us is not None:
        without = f"; without profiler {profile.unprofiled_step_us / 1e3:.2f} ms"
    table.add_row("steps", f"{summary.num_steps} in {summary.window_us / 1e3:,.1f} ms")
    table.add_row(
        "step time",
        f"p50 {step.p50_us / 1e3:.2f} ms (p20 {step.p20_us / 1e3:.2f}, p80 {step.p80_us / 1e3:.2f}){without}",
    )
    table.add_row(f"{device} busy", f"{share(summary.busy_share)}, {summary.busy_us / 1e3:,.1f} ms")
    longest = f"; the longest {microseconds(gaps.longest_us)} µs, in {gaps.longest_phase}" if gaps.num else ""
    table.add_row(
        "gaps",
        f"{gaps.num} of {gaps.min_us:g} µs or more, {gaps.total_us / 1e3:,.1f} ms{longest}; "
        f"{gaps.num_shorter} shorter, {gaps.shorter_us / 1e3:,.2f} ms",
    )
    whole = summary.whole
    if whole.num_bytes is not None and whole.flops is not None:
        of_ceilings = f"{share(whole.bandwidth_share)} of bandwidth, {share(whole.flops_share)} of FLOPs"
        table.add_row(
            "least work",
            f"{whole.num_bytes / 1e9:,.2f} GB, {whole.flops / 1e9:,.1f} GFLOP: while busy {of_ceilings}",
        )
    if summary.layers_us:
        ordered = sorted(summary.layers_us)
        table.add_row(
            "layers",
            f"{len(ordered)}, device time a step: p50 {microseconds(quantile(ordered, 0.5))} µs "
            f"({microseconds(ordered[0])} to {microseconds(ordered[-1])})",
        )
    return table


def _host(summary: Summary) -> NumberTable:
    rows = [
        (
            name,
            str(phase.calls),
            microseconds(phase.total_us / summary.num_steps),
            share(phase.share),
            str(phase.num_gaps),
            f"{phase.gap_us / 1e3:,.2f}",
        )
        for name, phase in summary.host.items()
    ]
    return NumberTable("host, by phase", ("", "calls", "µs a step", "share", "gaps in it", "their ms"), rows)


def _work(title: str, rows: Sequence[WorkRow], max_rows: int) -> NumberTable:
    header = ("", "grid", "calls", "ms", "µs each", "share", "of bandwidth", "of FLOPs", "op")
    cells = [
        (
            kernel_name(row.name),
            row.grid or UNKNOWN,
            str(row.calls),
            f"{row.total_us / 1e3:,.2f}",
            microseconds(row.each_us),
            share(row.time_share),
            share(row.bandwidth_share),
            share(row.flops_share),
            row.op or UNKNOWN,
        )
        for row in rows[:max_rows]
    ]
    return NumberTable(table_title(title, len(rows), max_rows), header, cells)
