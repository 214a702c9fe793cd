from __future__ import annotations

import io

import pytest
from rich.console import Console

from bench_records import c1, kernel, loop, poisson, prefix, record
from pico_vllm.bench.compare import Cell, compare, render, to_markdown
from pico_vllm.errors import ConfigError


def block(comparison, title: str):
    return next(block for section in comparison.sections for block in section.blocks if block.title == title)


def ratio_and_verdict(base: list[float], other: list[float], metric: str = "ttft") -> tuple[float | None, str | None]:
    """Of TTFT (less is better) or decode speed (more is better)."""
    values = {"ttft": base, "decode": [1] * len(base)}, {"ttft": other, "decode": [1] * len(other)}
    if metric == "decode":
        values = tuple({"ttft": v["decode"], "decode": v["ttft"]} for v in values)
    comparison = compare([c1("a", **values[0]), c1("b", **values[1])])
    title = "decode tok/s ↑" if metric == "decode" else "TTFT ms median ↓"
    cell = block(comparison, title).rows[0].cells[1]
    assert isinstance(cell, Cell)
    return cell.ratio, cell.verdict


def test_a_ratio_above_one_is_better_for_times_and_for_rates():
    assert ratio_and_verdict([20, 20, 20], [10, 10, 10]) == (2.0, "better")
    assert ratio_and_verdict([10, 10, 10], [20, 20, 20]) == (0.5, "worse")
    assert ratio_and_verdict([10, 10, 10], [20, 20, 20], "decode") == (2.0, "better")
    assert ratio_and_verdict([20, 20, 20], [10, 10, 10], "decode") == (0.5, "worse")


def test_a_difference_within_the_runs_is_marked():
    assert ratio_and_verdict([8, 10, 12], [11, 12.5, 14]) == (0.8, "same")
    assert ratio_and_verdict([8, 10, 12], [12.1, 12.5, 14]) == (0.8, "worse")


def test_a_difference_of_single_runs_is_unclear():
    assert ratio_and_verdict([10], [5]) == (2.0, "unclear")
    assert ratio_and_verdict([8, 10, 12], [5]) == (2.0, "unclear")
    assert ratio_and_verdict([8, 10, 12], [9]) == (10 / 9, "same")


def test_there_is_no_ratio_to_nothing():
    assert ratio_and_verdict([0, 0], [5, 5]) == (None, None)


def test_the_whole_table_as_markdown():
    comparison = compare(
        {
            "old.jsonl": [
                c1("pico-vllm", i, ttft=[10, 11, 12], decode=[500, 510, 520], commit="aaa") for i in (64, 512)
            ],
            "new.jsonl": [
                c1("pico-vllm", 64, ttft=[5, 5.5, 6], decode=[505, 515, 525], commit="bbb"),
                c1("vllm", 64, ttft=[22], decode=[255], version="0.24.0"),
                record("c1", "vllm", version="0.24.0", input_len=512, output_len=128, concurrency=1, error="boom"),
            ],
        }
    )
    assert to_markdown(comparison) == (
        "Medians; × is against pico-vllm @ aaa, above 1 is better. ≈: the ranges of the runs overlap. ?: one run only, "
        "so its spread isn't known. ↓: less is better.\n"
        "\n"
        "### One request at a time (concurrency 1, streamed, greedy)\n"
        "\n"
        "**TTFT ms median ↓**\n"
        "\n"
        "| in/out | pico-vllm @ aaa | pico-vllm @ bbb | vllm |\n"
        "| :--- | ---: | ---: | ---: |\n"
        "| 64/128 | 11.0 | 5.50 (2.00×) | 22.0 (0.50×?) |\n"
        "| 512/128 | 11.0 | – | failed: boom |\n"
        "\n"
        "**decode tok/s ↑**\n"
        "\n"
        "| in/out | pico-vllm @ aaa | pico-vllm @ bbb | vllm |\n"
        "| :--- | ---: | ---: | ---: |\n"
        "| 64/128 | 510 | 515 (≈1.01×) | 255 (0.50×?) |\n"
        "| 512/128 | 510 | – | failed: boom |\n"
    )


def test_the_baseline_is_the_first_run_of_the_first_file_with_an_engine():
    files = {
        "ceilings.jsonl": [record("ceilings", "ceilings", metrics={"copy_TBps": 4})],
        "b.jsonl": [c1("b", ttft=[1], decode=[1])],
        "a.jsonl": [c1("a", ttft=[1], decode=[1])],
    }
    assert compare(files).baseline == "b"
    assert compare(files, baseline="a.jsonl").baseline == "a"


def test_the_baseline_may_be_named_and_comes_first():
    records = [c1("vllm", ttft=[1], decode=[1], mode=mode) for mode in ("in-process", "multiprocess")]
    records.append(c1("sglang", ttft=[1], decode=[1]))
    for name in ("vllm [multiprocess]", "multi"):
        comparison = compare(records, baseline=name)
        assert comparison.baseline == "vllm [multiprocess]"
        assert comparison.sections[0].blocks[0].columns == ("vllm [multiprocess]", "vllm [in-process]", "sglang")


@pytest.mark.parametrize(("name", "problem"), [("vllm", "names 2 runs"), ("tensorrt", "names no run")])
def test_a_baseline_that_is_not_one_run_is_refused_with_the_choices(name, problem):
    records = [c1("vllm", ttft=[1], decode=[1], mode=mode) for mode in ("in-process", "multiprocess")]
    with pytest.raises(ConfigError, match=rf"{problem}; the runs are 'vllm \[in-process\]', 'vllm \[multiprocess\]'"):
        compare(records, baseline=name)


def test_nothing_cannot_be_compared():
    with pytest.raises(ConfigError, match="nothing to compare"):
        compare([])


def test_a_run_against_itself_in_two_files_is_all_the_same():
    same = [loop("sweep", "vllm", c, rate=[90, 100, 110], itl=[1, 2, 3]) for c in (1, 8)]
    comparison = compare({"a.jsonl": same, "b.jsonl": same})
    assert comparison.baseline == "vllm (a)"
    cells = [row.cells[1] for section in comparison.sections for b in section.blocks for row in b.rows]
    assert [(cell.ratio, cell.verdict) for cell in cells] == [(1.0, "same")] * 4


def test_each_point_has_the_metrics_that_matter_and_were_measured():
    records = [
        record_of
        for engine in ("a", "b")
        for record_of in (
            loop("sweep", engine, 8, rate=[90, 100], itl=[1, 2]),
            poisson(engine, 8, goodput=[7, 8]),
            prefix(engine, cached=True, ttft=[[20, 5], [20, 6]]),
        )
    ]
    titles = [[b.title for b in section.blocks] for section in compare(records).sections]
    assert titles == [
        ["output tok/s ↑", "ITL ms p99 ↓"],
        ["goodput requests/s ↑"],
        ["TTFT ms, first request ↓", "TTFT ms, later requests ↓"],
    ]


def test_a_point_that_the_baseline_lacks_has_no_ratios_and_one_of_a_single_run_is_only_noted():
    records = [
        c1("a", ttft=[1, 1], decode=[1, 1]),
        *(loop("sweep", engine, 8, rate=[90, 100], itl=[1, 2]) for engine in ("b", "c")),
        loop("burst", "c", 8, rate=[90, 100], itl=[1, 2]),
    ]
    comparison = compare(records)
    assert [section.title for section in comparison.sections] == ["Closed loop: a new request for each that ends"]
    assert {cell.ratio for b in comparison.sections[0].blocks for row in b.rows for cell in row.cells} == {None}
    assert comparison.notes == ("Only a measured the point c1.", "Only c measured the point burst.")


def test_kernels_are_compared_with_the_first_backend():
    comparison = compare(
        [
            c1("pico-vllm", ttft=[1], decode=[1]),
            kernel("rms_norm", "1 token", median=20, floor=5, backend="cpu"),
            kernel("rms_norm", "1 token", median=10, floor=5),
        ]
    )
    rows = block(comparison, "time us ↓").rows
    assert [row.names for row in rows] == [()]
    assert [cell.ratio for cell in rows[0].cells] == [None, 2.0]


def test_machines_are_compared_metric_by_metric():
    comparison = compare(
        [
            record("ceilings", "ceilings", metrics={"copy_TBps": 4.0, "launch_us": 5}),
            record("ceilings", "ceilings", gpu="NVIDIA H100", metrics={"copy_TBps": 3.0, "launch_us": 4}),
        ]
    )
    (section,) = comparison.sections
    assert section.blocks[0].columns == ("ceilings · H200", "ceilings · H100")
    assert [(row.names, row.cells[1].ratio) for row in section.blocks[0].rows] == [
        (("copy_TBps ↑",), 0.75),
        (("launch_us ↓",), 1.25),
    ]
    assert comparison.warnings == ("different hardware: H200 / H100",)


def calib(*loops: float, **fields):
    return record("calib", "calib", metrics={"python_loop_ns": list(loops)}, **fields)


def test_hosts_far_apart_are_warned_of():
    ours = c1("a", ttft=[1], decode=[1])
    near = compare([ours, calib(40, 40, 40), calib(46, 46, 46)])
    assert near.warnings == ()
    far = compare({"a.jsonl": [ours, calib(40, 40, 40)], "b.jsonl": [calib(46.1, 46.1, 46.1)]})
    assert far.warnings == (
        "the hosts were not equally fast, or not idle: a Python loop took 40.0 to 46.1 ns a turn (15% apart); "
        "what Python launches moves with it",
    )
    assert to_markdown(far).startswith("> **Warning:** the hosts were not equally fast")


def test_what_else_differs_is_warned_of():
    records = [
        c1("a", ttft=[1], decode=[1], workload_sha256="11"),
        c1("b", ttft=[1], decode=[1], workload_sha256="22", model="other", dtype="float16", torch="2.13.0"),
    ]
    assert compare(records).warnings == (
        "different models: tiny / other",
        "different dtypes: bfloat16 / float16",
        "different torch versions: 2.11.0 / 2.13.0",
        "the runs were given different requests at: c1",
    )


def test_missing_fields_are_no_obstacle():
    comparison = compare([{"point": "c1", "engine": "a"}, {"point": "c1", "engine": "b", "error": "boom"}])
    assert "failed: boom" in to_markdown(comparison)


def test_a_terminal_shows_the_names_as_they_are():
    records = [c1("vllm", ttft=[1, 1], decode=[2, 2], mode=mode) for mode in ("in-process", "multiprocess")]
    records.append(c1("sglang", ttft=[2, 2], decode=[1, 1], gpu="NVIDIA H100"))
    out = io.StringIO()
    Console(file=out, width=120, color_system=None).print(render(compare(records)))
    text = out.getvalue()
    assert "warning: different hardware: H200 / H100" in text
    assert "vllm [in-process] · H200" in text
    assert "0.50×" in text and "≈1.00×" in text
