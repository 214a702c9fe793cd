from __future__ import annotations

import json

import pytest

from bench_records import c1, kernel, prefix, record
from pico_vllm.bench.results import (
    Measure,
    failure_of,
    format_metric,
    format_number,
    higher_is_better,
    load_records,
    measure,
    metric_title,
)
from pico_vllm.errors import ConfigError


def test_records_of_several_files_come_in_order_and_blank_lines_are_skipped(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"point": "c1", "tag": "a"}\n\n{"point": "sweep"}\n')
    (tmp_path / "b.jsonl").write_text('{"point": "c1", "tag": "b"}')
    records = load_records([tmp_path / "b.jsonl", str(tmp_path / "a.jsonl")])
    assert [r.get("tag") for r in records] == ["b", "a", None]


def test_a_line_separator_inside_of_a_string_ends_no_record(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"point": "c1", "tag": "a\u2028b"}, ensure_ascii=False), "utf-8")
    assert load_records([tmp_path / "a.jsonl"])[0]["tag"] == "a\u2028b"


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"point": "c1"', "not JSON"),
        ("[1, 2]", "not a benchmark record"),
        ('{"engine": "vllm"}', "not a benchmark record"),
        ('{"point": 3}', "not a benchmark record"),
    ],
)
def test_a_bad_line_is_refused_with_its_file_and_number(tmp_path, line, problem):
    path = tmp_path / "bad.jsonl"
    path.write_text(f'{{"point": "c1"}}\n{line}\n')
    with pytest.raises(ConfigError, match=rf"bad\.jsonl:2: {problem}"):
        load_records([path])


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read benchmark records from .*missing\.jsonl"):
        load_records([tmp_path / "missing.jsonl"])


def test_a_measure_spans_its_runs():
    m = measure(c1(ttft=[12, 10, 11], decode=[1, 1, 1]), "ttft_ms_median")
    assert m == Measure(median=11, low=10, high=12, spread=pytest.approx(2 / 11))


def test_the_spread_of_one_run_is_not_known():
    assert measure(c1(ttft=[12], decode=[1]), "ttft_ms_median") == Measure(12, 12, 12, None)


@pytest.mark.parametrize(
    ("summary", "expected"),
    [
        ({"median": 4.0, "best": 3.0}, Measure(4, 4, 4, None)),
        ({"median": 4.0, "spread": 0.25}, Measure(4, 3, 5, 0.25)),
        ({"median": 4.0, "p20": 3.0, "p80": 6.0}, Measure(4, 3, 6, 0.75)),
        ([3.0, 4.0, 5.0], Measure(4, 3, 5, 0.5)),  # samples
        ([4.0, 9.0], Measure(4, 4, 4, None)),  # p50 and p99
        (4, Measure(4, 4, 4, None)),
        ({"best": 3.0}, None),
        ("fast", None),
        (None, None),
    ],
)
def test_summaries_of_every_form_are_read(summary, expected):
    assert measure({"point": "calib", "metrics": {"x": summary}}, "x") == expected


@pytest.mark.parametrize("broken", [{}, {"metrics": None}, {"metrics": {}, "runs": None}, {"runs": [None, {"y": 1}]}])
def test_a_record_without_the_metric_has_no_measure(broken):
    assert measure({"point": "c1", **broken}, "x") is None


def test_a_median_that_was_not_written_comes_from_the_runs():
    assert measure({"point": "c1", "runs": [{"x": 1}, {"x": 5}, {"x": 2}]}, "x") == Measure(2, 1, 5, 2.0)


def test_a_prefix_run_tells_its_first_request_from_the_later_ones():
    r = prefix("vllm", cached=True, ttft=[[20, 5, 6, 7], [22, 5, 8, 9], [21, 4, 4, 4]])
    assert measure(r, "ttft_first_ms") == Measure(21, 20, 22, pytest.approx(2 / 21))
    assert measure(r, "ttft_rest_ms") == Measure(6, 4, 8, pytest.approx(4 / 6))


def test_a_kernels_fraction_spreads_as_its_time_does():
    m = measure(kernel("rms_norm", "1 token", median=10, floor=5), "fraction")
    assert m is not None
    assert (m.median, m.low, m.high) == pytest.approx((0.5, 5 / 11, 5 / 9))


def test_ranges_that_touch_overlap():
    assert Measure(2, 1, 3, 1.0).overlaps(Measure(4, 3, 5, 0.5))
    assert not Measure(2, 1, 3, 1.0).overlaps(Measure(4, 3.1, 5, 0.5))


@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        *((name, True) for name in ("out_tok_s", "decode_tok_s", "req_s", "goodput_req_s", "goodput_share")),
        *((name, True) for name in ("bandwidth_share", "flops_share", "read_TBps", "matmul_8192_bf16_TFLOPs")),
        *((name, False) for name in ("ttft_ms_median", "itl_ms_p99", "host_share", "python_loop_ns", "dur_s")),
        *((name, False) for name in ("launch_and_wait_us", "peak_memory_bytes", "time_us")),
    ],
)
def test_rates_and_shares_are_better_when_high(metric, expected):
    assert higher_is_better(metric) is expected


@pytest.mark.parametrize(
    ("value", "text"), [(0.71234, "0.712"), (9.734, "9.73"), (97.34, "97.3"), (973.4, "973"), (13966.2, "13,966")]
)
def test_numbers_have_three_digits_or_a_comma(value, text):
    assert format_number(value) == text


def test_shares_are_percent():
    assert format_metric("bandwidth_share", 0.714) == "71%"
    assert format_metric("goodput_req_s", 0.714) == "0.714"


@pytest.mark.parametrize(
    ("metric", "title"),
    [
        ("ttft_ms_median", "TTFT ms median"),
        ("itl_ms_p99", "ITL ms p99"),
        ("e2e_ms_max", "end-to-end ms max"),
        ("out_tok_s", "output tok/s"),
        ("decode_tok_s", "decode tok/s"),
        ("goodput_req_s", "goodput requests/s"),
        ("ttft_rest_ms", "TTFT ms, later requests"),
    ],
)
def test_metrics_have_titles(metric, title):
    assert metric_title(metric) == title


def test_a_failure_is_one_short_line():
    assert failure_of(record(error="RuntimeError: a\n  b")) == "failed: RuntimeError: a b"
    assert failure_of(record(error=None, missing="no such op")) == "missing: no such op"
    assert failure_of(record(error="x" * 200)) == "failed: " + "x" * 159 + "…"
    assert failure_of(record(error=None)) is None
