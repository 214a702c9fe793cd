from __future__ import annotations

import csv
import io

from bench_records import MACHINE, c1, kernel, loop, poisson, prefix, record
from pico_vllm.bench.report import markdown_table, to_csv, to_markdown


def table_of(markdown: str, title: str) -> list[str]:
    """The lines of a section's table, without the rule below its head."""
    section = markdown.split(f"### {title}\n", 1)[1].split("\n### ", 1)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [lines[0], *lines[2:]]


def rows_of(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_a_whole_report():
    ours = {"version": "0.1.0", "mode": "in-process", "commit": "07840c9", "date": "2026-01-02T03:04:05Z"}
    records = [
        c1("pico-vllm", 64, ttft=[10, 11, 12], decode=[500, 510, 520], gate={"num_tokens": 576}, start_s=1.5, **ours),
        c1("vllm", 64, ttft=[7, 8, 9], decode=[505, 515, 525], version="0.24.0"),
        c1("vllm", 512, ttft=[9], decode=[490], version="0.24.0"),
    ]
    assert to_markdown(records) == (
        "tiny, bfloat16 · H200, driver 580.1 · torch 2.11.0\n"
        "\n"
        "| run | engine | version | mode | commit | date | start, s | tokens checked |\n"
        "| :--- | :--- | :--- | :--- | :--- | :--- | :--- | :--- |\n"
        "| pico-vllm | pico-vllm | 0.1.0 | in-process | 07840c9 | 2026-01-02 | 1.5 | 576 |\n"
        "| vllm | vllm | 0.24.0 | – | – | – | – | – |\n"
        "\n"
        "Medians over runs; in brackets (max − min) / median of the runs, where there were several. Bold: the best of "
        "its case, with those whose runs' ranges overlap with it; nothing is bold where all do.\n"
        "\n"
        "### One request at a time\n"
        "\n"
        "Concurrency 1, streamed, greedy.\n"
        "\n"
        "| in/out | run | TTFT ms median | decode tok/s |\n"
        "| :--- | :--- | ---: | ---: |\n"
        "| 64/128 | pico-vllm | 11.0 (18%) | 510 (4%) |\n"
        "|  | vllm | **8.00** (25%) | 515 (4%) |\n"
        "| 512/128 | vllm | 9.00 | 490 |\n"
    )


def test_losing_rows_are_shown_in_the_order_of_the_cases():
    records = [
        *(loop("sweep", "slow", c, rate=[c, c, c], itl=[9, 9, 9]) for c in (32, 8)),
        loop("sweep", "fast", 8, rate=[80, 90, 100], itl=[2, 3, 8.9]),
        loop("sweep", "third", 8, rate=[99, 99, 99], itl=[4, 4, 4]),
    ]
    assert table_of(to_markdown(records), "Closed loop: a new request for each that ends") == [
        "| concurrency | run | output tok/s | ITL ms p99 |",
        "| 8 | slow | 8.00 (0%) | 9.00 (0%) |",
        "|  | fast | **90.0** (22%) | **3.00** (230%) |",
        "|  | third | **99.0** (0%) | **4.00** (0%) |",
        "| 32 | slow | 32.0 (0%) | 9.00 (0%) |",
    ]


def test_a_failure_is_a_row_whether_it_knows_its_case_or_not():
    records = [
        loop("sweep", "vllm", 8, rate=[80, 90], itl=[2, 3]),
        record("sweep", "pico-vllm", input_len=512, output_len=128, concurrency=8, error="OutOfMemory: a | b\nc"),
        record("sweep", "sglang", error="boom"),
    ]
    assert table_of(to_markdown(records), "Closed loop: a new request for each that ends") == [
        "| run | output tok/s | ITL ms p99 |",
        "| vllm | 85.0 (12%) | 2.50 (40%) |",
        "| pico-vllm | failed: OutOfMemory: a \\| b c |  |",
        "| sglang | failed: boom |  |",
    ]


def test_a_point_that_failed_everywhere_still_has_its_row():
    assert table_of(to_markdown([record("burst", error="boom")]), "Burst: all requests in one moment") == [
        "| run | output tok/s |",
        "| pico-vllm | failed: boom |",
    ]


def test_throughput_has_a_row_a_way_and_temperature():
    lengths = {"input_len": "uniform 1-9", "output_len": "uniform 1-9", "concurrency": 256}
    records = [
        record("throughput", how=how, temperature=t, runs=[{"out_tok_s": rate}], **lengths)
        for how, t, rate in (("stream", 0.0, 30000), ("offline", 0.6, 20000), ("offline", 0.0, 32097.4))
    ]
    assert table_of(to_markdown(records), "Throughput: every request at once") == [
        "| how | temperature | run | output tok/s |",
        "| offline | 0 | pico-vllm | 32,097 |",
        "| offline | 0.6 | pico-vllm | 20,000 |",
        "| stream | 0 | pico-vllm | 30,000 |",
    ]


def test_the_prefix_cache_is_shown_off_and_on():
    records = [
        prefix("vllm", cached=True, ttft=[[20, 5, 5], [22, 5, 5]]),
        prefix("vllm", cached=False, ttft=[[20, 19, 19], [20, 21, 21]]),
    ]
    assert table_of(to_markdown(records), "Shared prefix, one request after the other") == [
        "| prefix cache | run | TTFT ms, first request | TTFT ms, later requests |",
        "| off | vllm | 20.0 (0%) | 20.0 (10%) |",
        "| on | vllm | 21.0 (10%) | 5.00 (0%) |",
    ]


def test_goodput_is_shown_over_the_rate_with_its_objective():
    markdown = to_markdown([poisson("vllm", rate, goodput=[rate * 0.9] * 2) for rate in (32.0, 8.0)])
    assert "\n512 tokens in, 128 out, streamed, greedy, TTFT ≤ 200 ms, TPOT ≤ 20 ms.\n" in markdown
    assert table_of(markdown, "Open loop: requests arrive at random (Poisson)") == [
        "| requests/s sent | run | goodput requests/s |",
        "| 8 | vllm | 7.20 (0%) |",
        "| 32 | vllm | 28.8 (0%) |",
    ]


def test_ceilings_and_calibrations_have_a_column_a_record():
    markdown = to_markdown(
        [
            record("ceilings", "ceilings", metrics={"copy_TBps": {"median": 4.218, "best": 4.24, "what": "4 GiB"}}),
            record("calib", "calib", when="before", metrics={"python_loop_ns": [38, 40, 42], "wait_us": [12.0, 30.0]}),
            record("calib", "calib", when="after", metrics={"python_loop_ns": [39, 41, 43]}),
        ]
    )
    assert table_of(markdown, "What the hardware can do") == [
        "| metric | what | H200 |",
        "| copy_TBps | 4 GiB | 4.22 |",
    ]
    assert table_of(markdown, "How fast the host is") == [
        "| metric | H200 before | H200 after |",
        "| python_loop_ns | 40.0 (10%) | 41.0 (10%) |",
        "| wait_us | 12.0 (p99 30.0) | – |",
    ]
    assert "| run |" not in markdown  # nothing ran


def test_kernels_show_floor_fraction_and_torch_and_what_is_missing():
    markdown = to_markdown(
        [
            kernel("rms_norm", "1 token", median=10, floor=5, torch=20),
            kernel("linear", "8 rows", median=200, floor=150, torch=100),
            kernel("sample", "all", median=1, floor=1, missing="backend has no sample", time_us=None, fraction=None),
        ]
    )
    assert "Shapes of shapes-1b, bfloat16. In brackets: (p80 − p20) / median." in markdown
    assert table_of(markdown, "Kernels") == [
        "| op | case | run | time us | floor us | of the floor | torch us | × torch |",
        "| rms_norm | 1 token | triton kernels | 10.0 (20%) | 5.00 | 50% | 20.0 | 2.00 |",
        "| linear | 8 rows | triton kernels | 200 (20%) | 150 | 75% | 100 | 0.500 |",
        "| sample | all | triton kernels | missing: backend has no sample |  |  |  |  |",
    ]


def test_parity_tells_the_first_token_that_differs_for_every_pair():
    tokens = {"a": [[1, 2, 3], [4, 5]], "b": [[1, 2, 9], [4, 5]], "c": [[7, 2, 3]]}
    markdown = to_markdown([record("parity", engine, tokens=found) for engine, found in tokens.items()])
    assert table_of(markdown, "Greedy tokens") == [
        "| runs | prompt 1 | prompt 2 |",
        "| a, b | 2 | none |",
        "| a, c | 0 | – |",
        "| b, c | 0 | – |",
    ]


def test_an_unknown_point_shows_all_that_it_measured():
    markdown = to_markdown([record("my_point", runs=[{"my_metric": 1.5}], requests=3)])
    assert table_of(markdown, "my_point") == ["| run | my metric |", "| pico-vllm | 1.50 |"]


def test_a_record_of_almost_nothing_makes_a_report():
    assert "### One request at a time" in to_markdown([{"point": "c1"}])
    assert to_markdown([]).endswith("\n")


def test_what_was_measured_again_is_counted():
    again = [c1(ttft=[1], decode=[1])] * 3
    assert " 2 records were measured again later; the later ones are shown." in to_markdown(again)
    assert "measured again" not in to_markdown(again[:1])


def test_every_value_of_a_machine_that_changed_is_named():
    records = [c1("vllm", ttft=[1], decode=[1]), c1("sglang", ttft=[1], decode=[1], gpu="NVIDIA H100", torch="2.13.0")]
    first_line = to_markdown(records).splitlines()[0]
    assert first_line == "tiny, bfloat16 · H200 / H100, driver 580.1 · torch 2.11.0 / 2.13.0"


def test_a_cell_cannot_break_its_table():
    assert markdown_table(["a|b", "n"], [["c|d", "1"]]) == "| a\\|b | n |\n| :--- | ---: |\n| c\\|d | 1 |"


def test_csv_has_a_row_a_value():
    rows = rows_of(to_csv([c1("vllm", 64, ttft=[10.5, 11.5], decode=[500, 510], commit="abc", temperature=0.0)]))
    runs = [(r["metric"], r["run"], r["value"]) for r in rows if r["statistic"] == "run"]
    assert runs == [
        *(("ttft_ms_median", "0", "10.5"), ("decode_tok_s", "0", "500")),
        *(("ttft_ms_median", "1", "11.5"), ("decode_tok_s", "1", "510")),
    ]
    medians = [(r["metric"], r["value"]) for r in rows if r["statistic"] == "median"]
    assert medians == [("ttft_ms_median", "11.0"), ("decode_tok_s", "505.0")]
    about = {"name": "vllm", "engine": "vllm", "commit": "abc", "gpu": MACHINE["gpu"], "point": "c1", "input_len": "64"}
    assert all(row.items() >= about.items() for row in rows)
    assert {row["statistic"] for row in rows} == {"run", "median", "best", "spread"}


def test_csv_lists_the_requests_of_a_run():
    rows = rows_of(to_csv([prefix("vllm", cached=True, ttft=[[20, 5], [22, 6]])]))
    assert [(r["metric"], r["run"], r["request"], r["value"]) for r in rows] == [
        *(("ttft_ms", "0", "0", "20"), ("ttft_ms", "0", "1", "5")),
        *(("ttft_ms", "1", "0", "22"), ("ttft_ms", "1", "1", "6")),
    ]
    raw = rows_of(to_csv([record(runs=[{"dur_s": 2, "raw": {"ttft_ms": [7]}}])]))
    assert [(r["metric"], r["request"], r["value"]) for r in raw if r["statistic"] == "run"] == [
        ("dur_s", "", "2"),
        ("ttft_ms", "0", "7"),
    ]


def test_csv_has_failures_samples_and_kernels():
    rows = rows_of(
        to_csv(
            [
                record("sweep", error="boom"),
                record("calib", "calib", metrics={"python_loop_ns": [38, 40]}),
                kernel("rms_norm", "1 token", median=10, floor=5),
            ]
        )
    )
    found = [(r["point"], r["op"], r["metric"], r["statistic"], r["value"], r["error"]) for r in rows]
    assert found[:3] == [
        ("sweep", "", "", "", "", "failed: boom"),
        ("calib", "", "python_loop_ns", "run", "38", ""),
        ("calib", "", "python_loop_ns", "run", "40", ""),
    ]
    assert ("kernel", "rms_norm", "time_us", "p80", "11.0", "") in found
    assert ("kernel", "rms_norm", "floor_us", "median", "5", "") in found


def test_csv_quotes_what_needs_it():
    (row, *_) = rows_of(to_csv([c1(ttft=[1], decode=[1], model='a "b", c', objective={"ttft_ms": 1})]))
    assert row["model"] == 'a "b", c'
    assert row["objective"] == '{"ttft_ms": 1}'


def test_csv_skips_runs_that_are_no_runs():
    odd = [record("c1", metrics={"out_tok_s": 1.0}) | {"runs": runs} for runs in (3, ["x", None], None, {"a": 1})]
    assert [r["value"] for r in rows_of(to_csv(odd))] == ["1.0"] * 4
