"""Two captures side by side."""

import io

import pytest
from rich.console import Console

import profiles
from pico_vllm.profiling.compare import ComparedRow, compare, render_comparison
from pico_vllm.profiling.profile import HostPhase, StepTimes
from pico_vllm.profiling.report import render


def printed(what, width=140):
    out = io.StringIO()
    Console(file=out, width=width).print(what, highlight=False, crop=False)
    return out.getvalue()


def test_a_ratio_is_b_over_a_and_needs_both():
    assert ComparedRow("x", 2.0, 3.0).ratio == 1.5
    assert ComparedRow("x", None, 3.0).ratio is None
    assert ComparedRow("x", 2.0, None).ratio is None
    assert ComparedRow("x", 0.0, 3.0).ratio is None


def test_times_are_a_step_so_that_captures_of_different_length_compare():
    b = profiles.profile(num_steps=5, step=StepTimes(1, 50.0, 1, 1), busy_us=200.0)
    rows = {row.name: (row.a, row.b, row.ratio) for row in compare(profiles.profile(), b).whole}
    assert rows["step p50, µs"] == (100, 50, 0.5)
    assert rows["device busy, µs a step"] == (80, 40, 0.5)
    assert rows["device idle, µs a step"] == (20, 160, 8)
    assert rows["longest gap, µs"] == (150, 150, 1)


def test_phases_of_either_are_there_the_longest_first():
    b = profiles.profile(host={"forward": HostPhase(10, 300.0, 0.3, 0, 0.0), "wait": HostPhase(10, 500.0, 0.5, 0, 0.0)})
    rows = [(row.name, row.a, row.b, row.ratio) for row in compare(profiles.profile(), b).host]
    assert rows == [("forward", 60, 30, 0.5), ("wait", None, 50, None), ("schedule", 40, None, None)]


def test_an_op_is_also_held_against_its_own_devices_ceiling():
    """B takes twice as long and is at the same share of its ceiling: the device is half as fast, not the code."""
    b = profiles.profile(
        environment={"gpu": "GPU B"}, ops=[profiles.row("linear 8 x 16", 20, 800.0, bandwidth_share=0.5)]
    )
    (op,) = compare(profiles.profile(), b).ops
    assert (op.each_us.a, op.each_us.b, op.each_us.ratio) == (20, 40, 2)
    assert (op.step_us.a, op.step_us.b) == (40, 80)
    assert op.ceiling_share.ratio == 1


def test_kernels_that_only_one_has_stand_alone_and_the_op_keeps_them_apart():
    b = profiles.profile(kernels=[profiles.row("mm", 20, 500.0, op="linear 9 x 9")])
    rows = [(row.name, row.each_us.a, row.each_us.b) for row in compare(profiles.profile(), b).kernels]
    assert rows == [("mm", None, 25), ("mm", 20, None), ("graph[kernel]", 40, None)]


def matched(a, b):
    """Kernels of two captures as (name, op, grid, µs of A, µs of B) each."""
    rows = compare(profiles.profile(kernels=a), profiles.profile(kernels=b)).kernels
    return [(row.name, row.op, row.grid, row.each_us.a, row.each_us.b) for row in rows]


def test_kernels_match_by_grid():
    a = [profiles.row("mm", 20, 400.0, grid="280"), profiles.row("mm", 20, 200.0, grid="64")]
    b = [profiles.row("mm", 20, 300.0, grid="280"), profiles.row("mm", 20, 100.0, grid="64")]
    assert matched(a, b) == [("mm", None, "280", 20, 15), ("mm", None, "64", 10, 5)]


def test_a_replayed_kernel_matches_the_launched_one_by_grid_and_is_told_its_op():
    graph = [profiles.row("mm", 20, 400.0, grid="280"), profiles.row("mm", 20, 200.0, grid="64")]
    eager = [
        profiles.row("mm", 20, 300.0, op="gated_linear", grid="280"),
        profiles.row("mm", 20, 100.0, op="linear", grid="64"),
    ]
    assert matched(graph, eager) == [("mm", "gated_linear", "280", 20, 15), ("mm", "linear", "64", 10, 5)]


def test_where_grids_are_others_kernels_match_without_them():
    """Another card: the ops are what tells rows apart, and calls of an op with several grids are added up."""
    a = [profiles.row("mm", 20, 400.0, op="x", grid="280"), profiles.row("mm", 20, 200.0, op="y", grid="64")]
    b = [
        profiles.row("mm", 10, 100.0, op="x", grid="140"),
        profiles.row("mm", 10, 300.0, op="x", grid="144"),
        profiles.row("mm", 10, 200.0, op="y", grid="64"),
    ]
    assert matched(a, b) == [("mm", "x", None, 20, 20), ("mm", "y", "64", 10, 20)]


def test_where_neither_ops_nor_grids_agree_a_kernel_is_one_row():
    graph = [profiles.row("mm", 20, 400.0, grid="280"), profiles.row("mm", 20, 200.0, grid="64")]
    eager = [
        profiles.row("mm", 20, 300.0, op="x", grid="140", bandwidth_share=0.5),
        profiles.row("mm", 20, 100.0, grid="64"),
    ]
    assert matched(graph, eager) == [("mm", None, None, 15, 10)]
    (row,) = compare(profiles.profile(kernels=graph), profiles.profile(kernels=eager)).kernels
    assert (row.step_us.a, row.step_us.b, row.ceiling_share.b) == (60, 40, None)


def test_what_makes_them_hard_to_compare_is_told():
    b = profiles.profile(model="N", ceilings=None, on_gpu=False, workload={"input_len": 64}, engine={"backend": "cpu"})
    assert compare(profiles.profile(), profiles.profile()).warnings == ()
    assert compare(profiles.profile(), b).warnings == (
        "differ in model: A M, B N",
        "differ in requests at a time: A 8, B unknown",
        "differ in tokens in: A 512, B 64",
        "differ in tokens out: A 32, B unknown",
        "differ in backend: A triton, B cpu",
        "differ in CUDA graphs: A on, B unknown",
        "one capture is of a GPU and one of a CPU",
        "B has no ceilings: shares of them are left out",
    )


def test_a_whole_burst_against_some_steps_is_told_in_words():
    a, b = (profiles.profile(workload={"num_steps": num}, engine={"cuda_graphs": num is None}) for num in (None, 40))
    assert compare(a, b).warnings == (
        "differ in recorded steps: A one burst to its end, B 40",
        "differ in CUDA graphs: A on, B off",
    )


def test_the_comparison_as_it_is_printed():
    text = printed(render_comparison(profiles.profile(), profiles.profile(environment={"gpu": "GPU B"})))
    assert "GPU A" in text and "GPU B" in text and "busy: A 80.0%, B 80.0% of the time" in text
    assert "graph[kernel]" in text  # no markup
    assert "linear 8 x 16" in text and "50.0%" in text and "–" in text


def test_the_tables_of_one_capture_as_they_are_printed():
    text = printed(render(profiles.profile()))
    assert "p50 0.10 ms (p20 0.09, p80 0.11); without profiler 0.08 ms" in text
    assert "80.0%, 0.8 ms" in text
    assert "1 of 1 µs or more, 0.1 ms; the longest 150.0 µs, in schedule; 20 shorter, 0.05 ms" in text
    assert "25.0% of bandwidth, 5.0% of FLOPs" in text
    assert "2, device time a step: p50 35.0 µs (30.0 to 40.0)" in text
    assert "graph[kernel]" in text and "--eager shows them" in text


@pytest.mark.parametrize("num, told", [(2, False), (1, True)])
def test_rows_that_are_left_out_are_told(num, told):
    assert ("kernels, by time (the first 1 of 2)" in printed(render(profiles.profile(), max_rows=num))) is told


# ------------------------------------------------------------------------------------------------------------ widths
HEADINGS = ("grid", "calls", "ms", "µs each", "share", "of bandwidth", "of FLOPs", "op")
NUMBERS = ("65535 x 5 x 8", "123456", "9,876,543.21", "80,001", "50.0%", "78.9%", "3.7%")
COMPARED = ("A µs each", "B µs each", "B / A", "A µs a step", "B µs a step", "A of ceiling", "B of ceiling")


@pytest.mark.parametrize("width", [10, 80, 140, 10_000])
def test_numbers_and_headings_are_whole_at_any_width(width):
    text = printed(render(profiles.wide_profile()), width)
    kernels = text[text.index("kernels, by time") :].splitlines()
    assert all(heading in kernels[2] for heading in HEADINGS)
    assert all(number in line for number in NUMBERS for line in kernels[4:6])
    text = printed(render_comparison(profiles.wide_profile(), profiles.wide_profile()), width)
    kernels = text[text.index("kernels") :].splitlines()
    assert all(heading in kernels[2] for heading in COMPARED)
    assert all(number in line for number in ("80,001", "987,654,321", "1.00", "78.9%") for line in kernels[4:6])


def test_names_give_way_to_the_width_there_is():
    """The longer one first, down to 18 characters; a name of torch's has no namespace."""

    def names(width):
        text = printed(render(profiles.wide_profile()), width)
        line = text[text.index("kernels, by time") :].splitlines()[4]
        return line.split("65535")[0].strip(), line.split("%")[-1].strip()

    kernel = "indexSelectSmallIndex<c10::BFloat16, int, unsigned int, 2, 2, -2>(long)"
    op = "gated_linear 1536 x 2 x 8960"
    assert names(10_000) == (kernel[:59] + "…", op)
    assert names(147) == (kernel[:29] + "…", op)
    assert names(80) == (kernel[:17] + "…", op[:17] + "…")


def test_a_table_that_has_room_is_as_wide_as_the_terminal_at_most():
    text = printed(render(profiles.wide_profile()), 130)
    assert max(map(len, text[text.index("ops launched") :].splitlines())) == 130


def test_a_column_in_which_nothing_is_known_is_left_out():
    text = printed(render(profiles.profile(ops=[], kernels=[profiles.row("mm", 1, 1.0)])), 80)
    assert text[text.index("kernels, by time") :].splitlines()[2].split() == ["calls", "ms", "µs", "each", "share"]
