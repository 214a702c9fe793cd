from __future__ import annotations

from bench_records import c1, kernel, prefix, record
from pico_vllm.bench.run_labels import Run, collect_runs, hardware_of, run_labels, run_of


def labels(*runs: Run) -> list[str]:
    return list(run_labels(runs).values())


def test_engines_alone_need_no_more_than_their_names():
    assert labels(Run("pico-vllm", "0.1.0", commit="abc"), Run("vllm", "0.24.0", "in-process")) == ["pico-vllm", "vllm"]


def test_only_the_parts_that_differ_are_named_and_only_where_names_are_equal():
    runs = (Run("vllm", "0.24.0", "in-process"), Run("vllm", "0.24.0", "multiprocess"), Run("sglang", "0.5", "server"))
    assert labels(*runs) == ["vllm [in-process]", "vllm [multiprocess]", "sglang"]


def test_every_part_in_its_place():
    assert labels(
        Run("a", "1", "in-process", "b32", "x", "c0ffee"),
        Run("a", "2", "in-process", "b32", "x", "c0ffee"),
        Run("a", "1", "in-process", "b64", "x", "c0ffee"),
        Run("a", "1", "in-process", "b64", "y", "c0ffee"),
        Run("a", "1", "in-process", "b64", "y", "decade"),
        Run("a", "1", "server", "b64", "y", "decade"),
    ) == [
        "a b32 1",
        "a b32 2",
        "a b64 [in-process] [x]",
        "a b64 [in-process] [y] @ c0ffee",
        "a b64 [in-process] [y] @ decade",
        "a b64 [server]",
    ]


def test_commits_tell_two_runs_of_ours_apart():
    assert labels(Run("pico-vllm", commit="07840c9"), Run("pico-vllm", commit="e5112d6+changes")) == [
        "pico-vllm @ 07840c9",
        "pico-vllm @ e5112d6+changes",
    ]


def test_another_gpu_or_model_is_named_everywhere_and_nothing_is_said_of_a_run_that_names_none():
    assert labels(Run("pico-vllm", hardware="H200"), Run("vllm", hardware="H100"), Run("sglang")) == [
        "pico-vllm · H200",
        "vllm · H100",
        "sglang",
    ]
    assert labels(Run("vllm", model="1.5B"), Run("sglang", model="7B")) == ["vllm · 1.5B", "sglang · 7B"]


def test_settings_come_last_plain_values_first_and_a_flag_is_its_name():
    def with_settings(**settings: str) -> Run:
        return Run("vllm", settings=tuple(sorted(settings.items())))

    assert labels(
        with_settings(cache="dynamic", an_extra="{}"), with_settings(cache="static", an_extra='{"a": 1}')
    ) == [
        "vllm, cache=dynamic",
        "vllm, cache=static",
    ]
    assert labels(with_settings(graphs="true"), with_settings(graphs="false")) == ["vllm, graphs", "vllm"]


def test_equal_runs_of_two_files_are_named_by_file_and_in_the_last_resort_by_number():
    assert labels(Run("vllm", file="old/a.jsonl"), Run("vllm", file="new/b.jsonl")) == ["vllm (a)", "vllm (b)"]
    assert labels(Run("vllm", file="old/a.jsonl"), Run("vllm", file="new/a.jsonl")) == [
        "vllm (old/a.jsonl)",
        "vllm (new/a.jsonl)",
    ]
    assert labels(Run("vllm"), Run("vllm", settings=(("graphs", "false"),))) == ["vllm #1", "vllm #2"]


def test_a_run_is_what_the_record_says():
    settings = {"prefix_caching": True, "num_blocks": 5, "backend": "cpu", "extra": {"b": 1}}
    full = record(
        version="0.1.0", mode="in-process", tag="t", commit="0123456789abcdef", label="b32", settings=settings
    )
    assert run_of(full, "a.jsonl") == Run(
        *("pico-vllm", "0.1.0", "in-process", "b32", "t", "012345678", "tiny", "bfloat16", "H200"),
        settings=(("backend", "cpu"), ("extra", '{"b": 1}')),
        prefix_caching="true",
        file="a.jsonl",
    )
    assert run_of({"point": "c1"}) == Run("")
    assert labels(run_of({"point": "c1"})) == ["?"]


def test_hardware_is_the_gpu_or_the_cpu_that_did_the_work():
    assert hardware_of({"gpu": "NVIDIA H200", "cpu": "EPYC", "device": "cuda"}) == "H200"
    assert hardware_of({"gpu": "NVIDIA H200", "cpu": "EPYC", "device": "cpu"}) == "EPYC"
    assert hardware_of({"gpu": None, "cpu": "EPYC"}) == "EPYC"
    assert hardware_of({"device": "NVIDIA H100"}) == "H100"
    assert hardware_of({}) == hardware_of({"device": "cuda"}) == ""


def test_starts_that_differ_in_what_the_engine_found_out_are_one_run():
    found = [c1(input_len=i, ttft=[1], decode=[1], start_s=i, settings={"num_blocks": i}) for i in (64, 512)]
    assert len(collect_runs(found)) == 1


def test_cache_off_and_on_are_one_run_where_only_the_prefix_point_differs():
    off, on = ({"settings": {"prefix_caching": flag}} for flag in (False, True))
    (run,) = collect_runs(
        [
            c1("vllm", ttft=[1], decode=[1], **off),
            prefix("vllm", cached=False, ttft=[[2, 2]], **off),
            prefix("vllm", cached=True, ttft=[[2, 1]], **on),
        ]
    )
    assert run.name == "vllm"
    assert [case.prefix_caching for case in run.by_case("prefix")] == [False, True]


def test_cache_off_and_on_are_two_runs_where_both_measured_the_same():
    records = [c1("vllm", ttft=[1], decode=[1], settings={"prefix_caching": flag}) for flag in (False, True)]
    assert [run.name for run in collect_runs(records)] == ["vllm", "vllm, prefix_caching"]


def test_files_stay_apart_only_where_they_measured_the_same():
    one, other = c1("vllm", 64, ttft=[1], decode=[1]), c1("vllm", 512, ttft=[1], decode=[1])
    assert [run.name for run in collect_runs({"a.jsonl": [one], "b.jsonl": [other]})] == ["vllm"]
    assert [run.name for run in collect_runs({"a.jsonl": [one], "b.jsonl": [one]})] == ["vllm (a)", "vllm (b)"]


def test_of_equal_cases_the_last_that_did_not_fail_counts():
    first, second = c1(ttft=[1], decode=[1]), c1(ttft=[2], decode=[1])
    failed = {key: value for key, value in first.items() if key not in ("metrics", "runs")} | {"error": "boom"}
    (run,) = collect_runs([first, second, failed])
    assert list(run.by_case("c1").values()) == [second]
    (run,) = collect_runs([failed, failed])
    assert list(run.by_case("c1").values()) == [failed]


def test_kernels_are_a_run_of_their_backend_whatever_their_modes():
    rows = [
        kernel("rms_norm", "1 token", median=2, floor=1),
        kernel("sample", "1 row", median=2, floor=1, mode="eager"),
    ]
    assert [run.name for run in collect_runs([c1(ttft=[1], decode=[1]), *rows])] == ["pico-vllm", "triton kernels"]
