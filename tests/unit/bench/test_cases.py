from __future__ import annotations

from bench_records import c1, kernel, loop, poisson, prefix, record
from pico_vllm.bench.cases import Case, case_cells, case_of, case_words, sort_cases, sort_points, varying_parts


def test_what_a_record_does_not_say_is_greedy_and_streamed():
    bare = c1(ttft=[1], decode=[1])
    assert case_of(bare) == case_of(bare | {"temperature": 0.0, "how": "stream"})
    assert case_of(bare) == Case("c1", 512, 128, 1)


def test_the_prefix_cache_is_part_of_the_case_only_where_it_is_the_question():
    settings = {"settings": {"prefix_caching": True}}
    assert case_of(record("c1", **settings)) == case_of(record("c1"))
    assert case_of(record("prefix", **settings)).prefix_caching is True
    assert case_of(record("prefix", prefix_caching=False, **settings)).prefix_caching is False


def test_fields_of_the_wrong_kind_are_as_good_as_missing():
    odd = record("sweep", concurrency="many", rate=[1], temperature="hot", input_len={"a": 1}, objective=3)
    assert case_of(odd) == Case("sweep")


def test_cases_are_sorted_by_number_not_by_text():
    cases = [Case("c1", i, o, 1) for i, o in ((2048, 16), (64, 1024), (512, 16), (64, 16), (64, 128))]
    assert [(c.input_len, c.output_len) for c in sort_cases([*cases, *cases])] == [
        *((64, 16), (64, 128), (64, 1024)),
        *((512, 16), (2048, 16)),
    ]


def test_a_case_that_says_nothing_comes_last():
    assert sort_cases([Case("sweep"), Case("sweep", 512, 128, 8)])[-1] == Case("sweep")


def test_points_come_in_the_readers_order_and_unknown_ones_last():
    assert sort_points(["my_point", "calib", "sweep", "c1", "sweep"]) == ["c1", "sweep", "calib", "my_point"]


def test_what_varies_becomes_columns_and_the_rest_a_caption():
    cases = [case_of(loop("sweep", "vllm", c, rate=[1], itl=[1])) for c in (1, 8)]
    headings, shared = varying_parts(cases)
    assert headings == ["concurrency"]
    assert shared == "512 tokens in, 128 out, streamed, greedy"
    assert [case_cells(case, headings) for case in cases] == [["1"], ["8"]]


def test_a_throughput_case_in_columns_and_in_words():
    lengths = {"input_len": "uniform 100-1024", "output_len": "uniform 100-1024", "concurrency": 256}
    cases = [case_of(record("throughput", how="offline", temperature=t, **lengths)) for t in (0.0, 0.6)]
    cases.append(case_of(record("throughput", how="stream", temperature=0.0, **lengths)))
    headings, shared = varying_parts(cases)
    assert headings == ["how", "temperature"]
    assert shared == "uniform 100-1024 tokens in and out, concurrency 256"
    assert [case_words(case, headings) for case in cases] == ["offline, greedy", "offline, T=0.6", "streamed, greedy"]


def test_a_goodput_case_names_its_objective():
    headings, shared = varying_parts([case_of(poisson("vllm", rate, goodput=[1])) for rate in (8, 32.5)])
    assert headings == ["requests/s sent"]
    assert shared == "512 tokens in, 128 out, streamed, greedy, TTFT ≤ 200 ms, TPOT ≤ 20 ms"


def test_prefix_cases_are_off_and_on():
    cases = [case_of(prefix("vllm", cached=cached, ttft=[[1, 2]])) for cached in (True, False)]
    assert [case_cells(case, ["prefix cache"]) for case in sort_cases(cases)] == [["off"], ["on"]]


def test_kernels_are_told_apart_by_op_and_size_and_keep_their_order():
    cases = [
        case_of(kernel(op, case, median=2, floor=1)) for op, case in (("rms_norm", "256 tokens"), ("linear", "1 row"))
    ]
    assert varying_parts(cases) == (["op", "case"], "shapes of shapes-1b, bfloat16")
    assert sort_cases(cases) == cases
