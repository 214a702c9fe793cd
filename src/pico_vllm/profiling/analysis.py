"""From a trace to numbers: pure functions, no torch, no clock.

The window is [start of the first step, end of the last step): everything is clipped to it. The device is busy while at
least one kernel of any stream runs; the rest of the window is gaps. The host is in one phase at every moment: the
innermost one of those that are open, ``OTHER`` in a step but in no phase, ``CALLER`` between two steps. So the phases
add up to the window, and each microsecond of a gap lies in one of them.

A kernel that is launched early starts while the one before it on its stream runs, and waits inside for its end
(programmatic dependent launch). What counts of a kernel is its own time, without that wait; own times of one stream add
up to the time in which it is busy.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pico_vllm.errors import ConfigError
from pico_vllm.profiling.intervals import Interval, gaps_between, merged, overlaps, total
from pico_vllm.profiling.profile import Gaps, HostPhase, StepTimes, Summary, WorkRow

if TYPE_CHECKING:
    from pico_vllm.bench.ceilings import Ceilings
    from pico_vllm.bench.kernel_cases.case import Cost
    from pico_vllm.profiling.trace import Kernel, Range, Trace

OTHER = "other"
CALLER = "caller"
MIN_GAP_US = 1.0


@dataclass(frozen=True, slots=True)
class Segment:
    """The host was in one phase during [start_us, end_us)."""

    phase: str
    start_us: float
    end_us: float


def summarize(
    trace: Trace,
    costs: Sequence[Cost | None] = (),
    *,
    whole_cost: Cost | None = None,
    ceilings: Ceilings | None = None,
    min_gap_us: float = MIN_GAP_US,
) -> Summary:
    """All numbers of a trace.

    Args:
        trace: to look at.
        costs: of each op of the trace, in their order; () = none is known.
        whole_cost: of all steps together.
        ceilings: of the device.
        min_gap_us: what is shorter is no gap of its own.

    Raises:
        ConfigError: nothing was recorded.
    """
    if not trace.steps:
        raise ConfigError("nothing was recorded: no step of the engine lies in the capture")
    if not trace.kernels:
        raise ConfigError("nothing was recorded but the host: no kernel and no op lies in the capture")
    window = trace.steps[0].start_us, max(step.end_us for step in trace.steps)
    union = merged(((kernel.start_us, kernel.end_us) for kernel in trace.kernels), window)
    gaps = gaps_between(union, window)
    segments = host_segments(trace.steps, trace.phases, window)
    gap_summary, host = _gaps_and_host(trace, gaps, segments, window, min_gap_us)
    ops, kernels = work_rows(trace, costs, ceilings)
    return Summary(
        on_gpu=trace.on_gpu,
        window_us=window[1] - window[0],
        num_steps=len(trace.steps),
        step=_step_times(trace.steps),
        busy_us=total(union),
        busy_share=total(union) / (window[1] - window[0]),
        gaps=gap_summary,
        host=host,
        layers_us=_layers_us(trace),
        ops=ops,
        kernels=kernels if trace.on_gpu else [],
        # Held against the time in which the device was busy: kernels that overlap count once.
        whole=_row("all kernels", len(trace.kernels), total(union), total(union), whole_cost, ceilings),
    )


def host_segments(steps: Sequence[Range], phases: Sequence[Range], window: Interval) -> list[Segment]:
    """Cut a window into the host's phases; ranges of one thread, sorted by start, that nest."""
    nested = [(step.start_us, step.end_us, OTHER) for step in steps]
    nested += [(phase.start_us, phase.end_us, phase.name) for phase in phases]
    nested.sort(key=lambda r: (r[0], -r[1]))
    segments: list[Segment] = []
    open_ranges: list[tuple[float, str]] = []  # (end, phase), the innermost last
    now = window[0]

    def reach(until: float, phase: str) -> None:
        nonlocal now
        until = min(until, window[1])
        if until > now:
            segments.append(Segment(phase, now, until))
            now = until

    for start, end, phase in nested:
        while open_ranges and open_ranges[-1][0] <= start:
            reach(*open_ranges.pop())
        reach(start, open_ranges[-1][1] if open_ranges else CALLER)
        open_ranges.append((end, phase))
    while open_ranges:
        reach(*open_ranges.pop())
    reach(window[1], CALLER)
    return segments


def work_rows(
    trace: Trace, costs: Sequence[Cost | None], ceilings: Ceilings | None
) -> tuple[list[WorkRow], list[WorkRow]]:
    """(ops, kernels), each by time.

    What an op can't do without is known; of a kernel only where it is the only one of its op.

    Args:
        trace: whose ops are to be added up.
        costs: of each op, or ().
        ceilings: of the device.
    """
    assert not costs or len(costs) == len(trace.ops), f"{len(costs)} costs of {len(trace.ops)} ops"
    op_of_kernel = [_containing(trace.ops, kernel.launched_us) for kernel in trace.kernels]
    own_us = own_times(trace.kernels)
    times_of_op: dict[int, list[float]] = defaultdict(list)
    for us, op in zip(own_us, op_of_kernel, strict=True):
        if op is not None:
            times_of_op[op].append(us)
    all_us = sum(own_us)

    by_op: dict[str, _Sum] = defaultdict(_Sum)
    for index, op in enumerate(trace.ops):
        times = times_of_op[index]
        if times:  # one that launches nothing, such as a lookup on the host, is the host's time
            by_op[op.name].add(sum(times), costs[index] if costs else None)
    by_kernel: dict[tuple[str, str | None, str | None], _Sum] = defaultdict(_Sum)
    for kernel, us, op in zip(trace.kernels, own_us, op_of_kernel, strict=True):
        is_alone = op is not None and len(times_of_op[op]) == 1
        cost = costs[op] if costs and op is not None and is_alone else None
        name = None if op is None else trace.ops[op].name
        by_kernel[kernel.name, name, kernel.grid].add(us, cost)

    ops = [_row(name, s.calls, s.us, all_us, s.cost, ceilings) for name, s in by_op.items()]
    kernels = [
        _row(name, s.calls, s.us, all_us, s.cost, ceilings, op=op, grid=grid)
        for (name, op, grid), s in by_kernel.items()
    ]
    return sorted(ops, key=_by_time), sorted(kernels, key=_by_time)


def own_times(kernels: Sequence[Kernel]) -> list[float]:
    """Microseconds of each kernel since its start, or since its stream's earlier ones have ended where that is later.

    Args:
        kernels: sorted by start.
    """
    ends: dict[tuple[int, int], float] = {}
    times = []
    for kernel in kernels:
        waits_until = ends.get(kernel.stream, kernel.start_us)
        times.append(max(0.0, kernel.end_us - max(kernel.start_us, waits_until)))
        ends[kernel.stream] = max(waits_until, kernel.end_us)
    return times


# ---------------------------------------------------------------------------------------------------------- private
class _Sum:
    """Calls of one kind; the cost is known while that of every call is."""

    def __init__(self) -> None:
        self.calls = 0
        self.us = 0.0
        self._costs: list[Cost] | None = []

    def add(self, us: float, cost: Cost | None) -> None:
        self.calls += 1
        self.us += us
        if cost is None:
            self._costs = None
        elif self._costs is not None:
            self._costs.append(cost)

    @property
    def cost(self) -> Cost | None:
        return sum_of(self._costs) if self._costs else None


def sum_of(costs: Sequence[Cost]) -> Cost:
    """Of at least one."""
    kind = type(costs[0])
    return kind(
        sum(cost.bytes_read for cost in costs),
        sum(cost.bytes_written for cost in costs),
        sum(cost.flops for cost in costs),
    )


def _row(
    name: str,
    calls: int,
    us: float,
    all_us: float,
    cost: Cost | None,
    ceilings: Ceilings | None,
    *,
    op: str | None = None,
    grid: str | None = None,
) -> WorkRow:
    bandwidth_share = flops_share = None
    if cost is not None and ceilings is not None and us > 0:
        kind, seconds = type(cost), us / 1e6
        bandwidth_share = kind(cost.bytes_read, cost.bytes_written, 0).floor_s(ceilings) / seconds
        flops_share = kind(0, 0, cost.flops).floor_s(ceilings) / seconds
    return WorkRow(
        name=name,
        op=op,
        calls=calls,
        total_us=us,
        time_share=us / all_us if all_us else 0.0,
        num_bytes=None if cost is None else cost.num_bytes,
        flops=None if cost is None else cost.flops,
        bandwidth_share=bandwidth_share,
        flops_share=flops_share,
        grid=grid,
    )


def _by_time(row: WorkRow) -> tuple[float, str, str]:
    return -row.total_us, row.name, row.grid or ""


def _containing(ranges: Sequence[Range], at_us: float | None) -> int | None:
    """Index of the range, of disjoint ones, that a moment lies in."""
    if at_us is None:
        return None
    index = bisect_right(ranges, at_us, key=lambda r: r.start_us) - 1
    return index if index >= 0 and at_us <= ranges[index].end_us else None


def _layers_us(trace: Trace) -> list[float]:
    """Device time of each layer, a step."""
    sums: dict[int, float] = defaultdict(float)
    for kernel, us in zip(trace.kernels, own_times(trace.kernels), strict=True):
        index = _containing(trace.layers, kernel.launched_us)
        if index is not None:
            sums[int(trace.layers[index].name)] += us
    return [sums[layer] / len(trace.steps) for layer in sorted(sums)]


def _step_times(steps: Sequence[Range]) -> StepTimes:
    durations = sorted(step.end_us - step.start_us for step in steps)
    p20, p50, p80 = (quantile(durations, q) for q in (0.2, 0.5, 0.8))
    return StepTimes(p20, p50, p80, durations[-1])


def quantile(ordered: Sequence[float], q: float) -> float:
    """Of sorted numbers, between neighbours in proportion."""
    place = q * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _gaps_and_host(
    trace: Trace, gaps: Sequence[Interval], segments: Sequence[Segment], window: Interval, min_gap_us: float
) -> tuple[Gaps, dict[str, HostPhase]]:
    places = [(segment.start_us, segment.end_us) for segment in segments]
    num_gaps: dict[str, int] = defaultdict(int)
    gap_us: dict[str, float] = defaultdict(float)
    longest_us, longest_phase = 0.0, None
    for gap in gaps:
        of_gap: dict[str, float] = defaultdict(float)
        for index, length in overlaps(gap, places):
            of_gap[segments[index].phase] += length
        for phase, length in of_gap.items():
            gap_us[phase] += length
        length, phase = gap[1] - gap[0], max(of_gap, key=lambda phase: of_gap[phase])
        if length >= min_gap_us:
            num_gaps[phase] += 1
            if length > longest_us:
                longest_us, longest_phase = length, phase
    counted = [gap for gap in gaps if gap[1] - gap[0] >= min_gap_us]
    summary = Gaps(
        min_us=min_gap_us,
        num=len(counted),
        total_us=total(counted),
        longest_us=longest_us,
        longest_phase=longest_phase,
        num_shorter=len(gaps) - len(counted),
        shorter_us=total(gaps) - total(counted),
    )
    calls: dict[str, int] = defaultdict(int)
    for phase in trace.phases:
        calls[phase.name] += 1
    calls[OTHER], calls[CALLER] = len(trace.steps), len(trace.steps) - 1
    host_us: dict[str, float] = defaultdict(float)
    for segment in segments:
        host_us[segment.phase] += segment.end_us - segment.start_us
    window_us = window[1] - window[0]
    host = {
        phase: HostPhase(calls[phase], us, us / window_us, num_gaps[phase], gap_us[phase])
        for phase, us in sorted(host_us.items(), key=lambda item: -item[1])
    }
    return summary, host
