"""Numbers of traces that are written by hand: every expected value can be checked with a pencil."""

import pytest

from pico_vllm.bench.ceilings import Ceilings
from pico_vllm.bench.kernel_cases.case import Cost
from pico_vllm.errors import ConfigError
from pico_vllm.profiling.analysis import Segment, host_segments, own_times, quantile, summarize, work_rows
from pico_vllm.profiling.intervals import gaps_between, merged, overlaps
from pico_vllm.profiling.trace import Range, read_trace
from traces import host, kernel, launch

#: 1 byte and 2 operations a microsecond; copies half as fast as reads.
CEILINGS = Ceilings(read_bytes_per_s=1e6, copy_bytes_per_s=0.5e6, matmul_flops_per_s=2e6)


# -------------------------------------------------------------------------------------------------------- intervals
def test_a_union_joins_what_overlaps_or_touches_and_is_clipped():
    assert merged([(5, 7), (0, 2), (1, 3), (3, 4), (6, 20), (8, 8)], (1, 10)) == [(1, 4), (5, 10)]
    assert merged([], (0, 1)) == []


def test_gaps_are_what_is_left():
    assert gaps_between([(1, 4), (5, 9)], (0, 10)) == [(0, 1), (4, 5), (9, 10)]
    assert gaps_between([(0, 10)], (0, 10)) == []
    assert gaps_between([], (0, 10)) == [(0, 10)]


def test_overlaps_with_disjoint_intervals():
    assert list(overlaps((2, 8), [(0, 1), (1, 3), (3, 5), (7, 9), (9, 10)])) == [(1, 1), (2, 2), (3, 1)]
    assert list(overlaps((0, 1), [(2, 3)])) == []


def test_a_quantile_lies_between_its_neighbours():
    assert quantile([10.0], 0.5) == 10
    assert quantile([0.0, 10.0], 0.2) == 2
    assert quantile([1.0, 2.0, 3.0], 0.5) == 2


# ------------------------------------------------------------------------------------------------------------- host
def test_the_innermost_phase_counts_and_nothing_counts_twice():
    """A step [0, 100): forward [10, 60) with build [20, 30) and forward again [40, 50) in it; then [60, 70) wait."""
    phases = [Range("forward", 10, 60), Range("build", 20, 30), Range("forward", 40, 50), Range("wait", 60, 70)]
    segments = host_segments([Range("", 0, 100)], phases, (0, 100))
    assert [(s.phase, s.start_us, s.end_us) for s in segments] == [
        ("other", 0, 10),
        ("forward", 10, 20),
        ("build", 20, 30),
        ("forward", 30, 40),
        ("forward", 40, 50),
        ("forward", 50, 60),
        ("wait", 60, 70),
        ("other", 70, 100),
    ]


def test_between_two_steps_it_is_the_callers_turn():
    segments = host_segments([Range("", 0, 10), Range("", 15, 20)], [], (0, 20))
    assert segments == [Segment("other", 0, 10), Segment("caller", 10, 15), Segment("other", 15, 20)]


def test_a_range_that_begins_where_another_ends_is_not_in_it():
    segments = host_segments([Range("", 0, 10)], [Range("a", 0, 5), Range("b", 5, 10)], (0, 10))
    assert segments == [Segment("a", 0, 5), Segment("b", 5, 10)]


# -------------------------------------------------------------------------------------------------------------- GPU
def two_steps():
    """Two steps with kernels on two streams.

    host   step ───────────────────────── 100 │ step ──────────────── 200
           schedule 0–10, forward 10–60, wait 60–100 │ 100: caller to 110; 110: schedule to 140, forward to 200
    GPU    stream 7: 20–60            stream 7: 150–190
           stream 8:     40–90        stream 8: 190.5–199
    """
    return [
        host("step", 0, 100),
        host("phase.schedule", 0, 10),
        host("phase.forward", 10, 60),
        host("phase.wait", 60, 100),
        host("step", 110, 200),
        host("phase.schedule", 110, 140),
        host("phase.forward", 140, 200),
        launch(12, 1),
        launch(30, 2),
        launch(145, 3),
        launch(146, 4),
        kernel("matmul", 20, 60, 1, 7),
        kernel("attend", 40, 90, 2, 8),
        kernel("matmul", 150, 190, 3, 7),
        kernel("attend", 190.5, 199, 4, 8),
    ]


def test_kernels_that_overlap_on_two_streams_make_the_gpu_busy_once():
    summary = summarize(read_trace(two_steps()))
    assert summary.on_gpu and summary.num_steps == 2 and summary.window_us == 200
    assert summary.busy_us == 70 + 40 + 8.5  # [20, 90), [150, 190), [190.5, 199)
    assert summary.busy_share == 118.5 / 200
    assert (summary.step.p50_us, summary.step.max_us) == (95, 100)


def test_gaps_lie_in_the_phase_that_most_of_them_is_in():
    """[0, 20): 10 schedule, 10 forward, the first wins; [90, 150): 30 schedule, 10 each wait, caller, forward."""
    summary = summarize(read_trace(two_steps()))
    gaps = summary.gaps
    assert (gaps.num, gaps.total_us) == (3, 20 + 60 + 1)  # [199, 200) is 1 us: just long enough
    assert (gaps.longest_us, gaps.longest_phase) == (60, "schedule")
    assert (gaps.num_shorter, gaps.shorter_us) == (1, 0.5)
    assert {name: (p.num_gaps, p.gap_us) for name, p in summary.host.items()} == {
        "forward": (1, 10 + 10 + 0.5 + 1),
        "wait": (0, 10),
        "schedule": (2, 10 + 30),
        "caller": (0, 10),
    }
    assert sum(phase.gap_us for phase in summary.host.values()) == summary.window_us - summary.busy_us


def test_phases_add_up_to_the_window_and_are_sorted():
    host_phases = summarize(read_trace(two_steps())).host
    assert {name: (p.calls, p.total_us) for name, p in host_phases.items()} == {
        "forward": (2, 110),
        "schedule": (2, 40),
        "wait": (1, 40),
        "caller": (1, 10),
    }
    assert sum(phase.share for phase in host_phases.values()) == pytest.approx(1)
    assert next(iter(host_phases)) == "forward"


def test_what_runs_outside_of_the_window_is_cut_off():
    events = [host("step", 100, 200), kernel("early", 50, 120), kernel("late", 190, 300)]
    summary = summarize(read_trace(events))
    assert (summary.window_us, summary.busy_us) == (100, 30)


def test_kernels_are_sorted_by_time_with_calls_and_shares():
    kernels = summarize(read_trace(two_steps())).kernels
    assert [(k.name, k.op, k.calls, k.total_us, k.each_us) for k in kernels] == [
        ("matmul", None, 2, 80, 40),
        ("attend", None, 2, 58.5, 29.25),
    ]
    assert kernels[0].time_share == 80 / 138.5
    assert kernels[0].num_bytes is None and kernels[0].bandwidth_share is None


# -------------------------------------------------------------------------------------------------- launched early
def launched_early():
    """Two kernels of stream 7 start while their predecessor runs, the third one doesn't; stream 8 has a copy.

    GPU    stream 7: 10–20, 12–30 (waits until 20), 29–45 (until 30), 50–60
           stream 8: 15–25
    """
    return [
        host("step", 0, 100),
        host("layer.0", 0, 10),
        host("op.linear", 0, 2),
        launch(1, 1),
        host("op.attention", 2, 10),
        launch(3, 2),
        launch(4, 3),
        launch(11, 4),
        launch(12, 5),
        kernel("mm", 10, 20, 1, grid=(64, 1, 1)),
        kernel("split", 12, 30, 2, grid=(2, 5, 8)),
        kernel("merge", 29, 45, 3, grid=(8, 1, 1)),
        kernel("mm", 50, 60, 4, grid=(280, 1, 1)),
        kernel("copy", 15, 25, 5, stream=8),
    ]


def test_a_wait_for_the_kernel_before_is_not_a_kernels_own_time():
    kernels = read_trace(launched_early()).kernels
    assert [(k.name, us) for k, us in zip(kernels, own_times(kernels), strict=True)] == [
        ("mm", 10),
        ("split", 10),
        ("copy", 10),
        ("merge", 15),
        ("mm", 10),
    ]


def test_own_times_of_a_stream_add_up_to_its_busy_time():
    events = [event for event in launched_early() if event["name"] != "copy"]
    summary = summarize(read_trace(events))
    assert sum(kernel.total_us for kernel in summary.kernels) == summary.busy_us == 35 + 10


def test_a_kernel_that_ends_within_its_predecessor_adds_nothing():
    kernels = read_trace([kernel("long", 0, 10), kernel("short", 2, 5), kernel("next", 6, 12)]).kernels
    assert own_times(kernels) == [10, 0, 2]


def test_ops_layers_shares_and_costs_are_of_own_times():
    costs = [Cost(5, 0, 2), Cost(25, 0, 0)]
    summary = summarize(read_trace(launched_early()), costs, ceilings=CEILINGS)
    attention, linear = summary.ops
    assert (attention.name, attention.total_us, attention.time_share) == ("attention", 10 + 15, 25 / 55)
    assert (linear.name, linear.total_us, linear.bandwidth_share) == ("linear", 10, 0.5)
    assert attention.bandwidth_share == 1
    assert summary.layers_us == [35]


def test_launches_of_one_kernel_with_other_grids_are_rows_of_their_own():
    kernels = summarize(read_trace(launched_early())).kernels
    assert [(row.name, row.grid, row.calls, row.total_us) for row in kernels] == [
        ("merge", "8", 1, 15),
        ("copy", None, 1, 10),
        ("mm", "280", 1, 10),
        ("mm", "64", 1, 10),
        ("split", "2 x 5 x 8", 1, 10),
    ]


# ------------------------------------------------------------------------------------------------------ ops, layers
def eager_step():
    """Layer 0: linear with one kernel, attention with two; layer 1: linear. An op without kernels, and the reverse."""
    return [
        host("step", 0, 100),
        host("layer.0", 0, 20),
        host("op.linear", 0, 10),
        launch(1, 1),
        host("op.attention", 10, 20),
        launch(11, 2),
        launch(12, 3),
        host("op.prepare", 20, 25),
        host("layer.1", 25, 40),
        host("op.linear", 30, 40),
        launch(31, 4),
        launch(50, 5),
        kernel("mm", 10, 30, 1),
        kernel("split", 30, 40, 2),
        kernel("merge", 40, 45, 3),
        kernel("mm", 50, 70, 4),
        kernel("copy", 70, 75, 5),
    ]


COSTS = [Cost(8, 2, 20), Cost(30, 0, 4), None, Cost(8, 2, 20)]


def test_an_op_has_the_time_of_its_kernels_and_shares_of_the_ceilings():
    ops, _ = work_rows(read_trace(eager_step()), COSTS, CEILINGS)
    linear, attention = ops
    assert (linear.name, linear.calls, linear.total_us, linear.time_share) == ("linear", 2, 40, 40 / 60)
    assert (linear.num_bytes, linear.flops) == (20, 40)
    assert linear.bandwidth_share == pytest.approx(20 / 0.5 / 40)  # a fifth is written: held against copying
    assert linear.flops_share == pytest.approx(40 / 2 / 40)
    assert linear.ceiling_share == pytest.approx(1)
    assert (attention.name, attention.calls, attention.total_us) == ("attention", 1, 15)
    assert attention.bandwidth_share == pytest.approx(30 / 1 / 15)


def test_a_kernel_has_the_cost_of_its_op_only_if_it_is_the_ops_only_kernel():
    _, kernels = work_rows(read_trace(eager_step()), COSTS, CEILINGS)
    by_name = {row.name: row for row in kernels}
    assert (by_name["mm"].op, by_name["mm"].num_bytes, by_name["mm"].flops) == ("linear", 20, 40)
    assert (by_name["split"].op, by_name["split"].num_bytes) == ("attention", None)
    assert by_name["copy"].op is None and by_name["copy"].bandwidth_share is None


def test_one_call_of_unknown_cost_makes_the_sum_unknown():
    ops, _ = work_rows(read_trace(eager_step()), [Cost(8, 2, 20), None, None, None], CEILINGS)
    assert all(row.num_bytes is None and row.ceiling_share is None for row in ops)


def test_without_ceilings_there_are_costs_and_no_shares():
    ops, _ = work_rows(read_trace(eager_step()), COSTS, None)
    assert (ops[0].num_bytes, ops[0].bandwidth_share, ops[0].ceiling_share) == (20, None, None)


def test_layers_have_the_device_time_of_what_they_launch():
    assert summarize(read_trace(eager_step())).layers_us == [20 + 10 + 5, 20]


def test_layers_are_counted_as_numbers_and_a_step():
    events = [host("step", 0, 10), host("step", 10, 20), host("layer.10", 0, 2), host("layer.9", 3, 5), launch(1, 1)]
    events += [launch(4, 2), kernel("a", 2, 6, 1), kernel("b", 6, 8, 2)]
    assert summarize(read_trace(events)).layers_us == [1, 2]


def test_the_whole_is_held_against_the_busy_time():
    summary = summarize(read_trace(two_steps()), whole_cost=Cost(237, 0, 0), ceilings=CEILINGS)
    assert summary.whole.bandwidth_share == pytest.approx(237 / 118.5)
    assert (summary.whole.calls, summary.whole.total_us, summary.whole.flops_share) == (4, 118.5, 0)


# -------------------------------------------------------------------------------------------------------------- CPU
def test_on_a_cpu_the_ops_are_what_computes():
    events = [host("step", 0, 10), host("phase.forward", 1, 9), host("op.linear", 2, 6), host("layer.0", 2, 7)]
    summary = summarize(read_trace(events), [Cost(4, 0, 0)], ceilings=CEILINGS)
    assert not summary.on_gpu
    assert (summary.busy_us, summary.gaps.total_us) == (4, 6)
    assert [(row.name, row.total_us, row.bandwidth_share) for row in summary.ops] == [("linear", 4, 1)]
    assert summary.kernels == []
    assert summary.layers_us == [4]


# ------------------------------------------------------------------------------------------------------------ empty
@pytest.mark.parametrize("events", [[], [kernel("a", 0, 1)], [host("phase.schedule", 0, 1)]])
def test_a_trace_without_a_step_is_refused(events):
    with pytest.raises(ConfigError, match="nothing was recorded: no step"):
        summarize(read_trace(events))


def test_a_trace_without_kernels_and_ops_is_refused():
    with pytest.raises(ConfigError, match="nothing was recorded but the host"):
        summarize(read_trace([host("step", 0, 1)]))
