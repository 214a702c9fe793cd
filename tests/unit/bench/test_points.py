"""Points: the definitions that every engine's records share."""

import pytest

from bench_fakes import FakeEngine
from pico_vllm.bench import points as p
from pico_vllm.bench.traces import Trace
from pico_vllm.errors import ConfigError

OPTIONS = p.PointOptions(151_936)


def one(name, options=OPTIONS):
    (point,) = p.make_points([name], options)
    return point


def test_c1_is_every_input_with_every_output_one_request_a_run():
    points = p.make_points(["c1"], OPTIONS)
    assert [(x.fields["input_len"], x.fields["output_len"]) for x in points] == [
        (i, o) for i in (64, 512, 2048, 8192) for o in (16, 128, 1024)
    ]
    workload = points[4].workload(1)
    assert [len(r.prompt_token_ids) for r in workload.requests] == [512]
    assert workload.requests[0].max_tokens == 128 and workload.concurrency == 1
    assert points[4].workload(1) != points[4].workload(2)


def test_throughput_has_the_tokens_of_the_committed_records():
    points = p.make_points(["throughput"], OPTIONS)
    assert [(x.fields["how"], x.fields["temperature"]) for x in points] == [
        ("offline", 0.0),
        ("stream", 0.0),
        ("offline", 0.6),
        ("stream", 0.6),
    ]
    assert points[0].fields["in_tokens"] == 142_827
    assert points[0].fields["out_tokens"] == 133_966
    workload = points[0].workload(0)
    assert workload.concurrency == len(workload.requests) == 256
    assert sum(len(r.prompt_token_ids) for r in workload.requests) == 142_827
    assert workload.num_output_tokens == 133_966
    assert points[0].offline and not points[1].offline
    assert points[1].num_runs == 1 and not points[1].warm_up
    assert {r.temperature for r in points[3].workload(0).requests} == {0.6}


def test_no_two_throughput_runs_share_a_prompt():
    points = p.make_points(["throughput"], OPTIONS)
    first = [point.workload(run).requests[0].prompt_token_ids for point in points for run in range(12)]
    assert len(set(first)) == len(first)


@pytest.mark.parametrize("name, num", [("sweep", [8, 32, 128, 256, 512, 1024]), ("burst", [1, 8, 32, 64, 128, 256])])
def test_sweep_and_burst_have_their_number_of_requests(name, num):
    points = p.make_points([name], OPTIONS)
    assert [x.fields["concurrency"] for x in points] == [1, 8, 32, 64, 128, 256]
    assert [x.fields["requests"] for x in points] == num
    small = p.PointOptions(1000, concurrencies=(8,), input_len=3, output_len=2)
    workload = one(name, small).workload(0)
    assert workload.concurrency == 8 and len(workload.requests) == num[1]
    assert {len(r.prompt_token_ids) for r in workload.requests} == {3}
    assert {r.max_tokens for r in workload.requests} == {2}


def test_prefix_is_eight_requests_in_turn_and_the_first_counts_alone():
    point = one("prefix")
    workload = point.workload(0)
    assert workload.concurrency == 1 and len(workload.requests) == 8
    assert {r.prompt_token_ids[:2048] for r in workload.requests} == {workload.requests[0].prompt_token_ids[:2048]}
    assert {len(r.prompt_token_ids) for r in workload.requests} == {2112}

    def run(*ttft_ms):
        return point.summarize([Trace(1, 0.0, 0.0, [ms / 1e3], [1]) for ms in ttft_ms], None)

    runs = [run(14, 7, 8, 9), run(12, 7, 7, 6), run(13, 7, 7, 10)]
    assert runs[0] == {"ttft_ms": [14.0, 7.0, 8.0, 9.0], "e2e_ms": [14.0, 7.0, 8.0, 9.0]}
    assert point.fold(runs) == {
        "ttft_first_ms": {"median": 13.0, "best": 12.0, "spread": 0.1538},
        "ttft_rest_ms": {"median": 7.0, "best": 6.0, "spread": 0.5714},
    }


def test_prefix_burst_is_prompts_at_once_that_begin_alike_and_anew_in_every_run():
    point = one("prefix_burst")
    workload = point.workload(0)
    assert workload.concurrency == len(workload.requests) == point.fields["concurrency"] == 32
    (prefix,) = {r.prompt_token_ids[:2048] for r in workload.requests}
    assert {len(r.prompt_token_ids) for r in workload.requests} == {2112}
    assert len({r.prompt_token_ids for r in workload.requests}) == 32
    assert point.workload(1).requests[0].prompt_token_ids[:2048] != prefix
    assert point.fields["prefix_caching"] is False


def test_poisson_reports_goodput_under_its_objective():
    options = p.PointOptions(1000, rates=(5.0,), num_poisson=20, input_len=3, output_len=4)
    point = one("poisson", options)
    assert point.fields["objective"] == {"ttft_ms": 200.0, "tpot_ms": 20.0}
    assert point.fields["rate"] == 5.0 and point.fields["concurrency"] is None
    run = point.summarize(FakeEngine(prefill_s=0.001, decode_s=0.001).serve(point.workload(0)), point.objective)
    assert run["goodput_share"] == 1.0
    slow = point.summarize(FakeEngine(prefill_s=0.001, decode_s=0.03).serve(point.workload(0)), point.objective)
    assert slow["goodput_share"] == 0.0


def test_multi_turn_and_uniform_run():
    options = p.PointOptions(1000, concurrencies=(2,), uniform=(2, 5), num_conversations=2, num_turns=2, input_len=3)
    point = one("multi_turn", options)
    assert point.fields["requests"] == 4
    assert [t.num_tokens for t in FakeEngine().serve(point.workload(0))] == [128] * 4
    point = one("uniform", options)
    assert point.fields["input_len"] == "uniform 2-5" and point.fields["requests"] == 8
    assert len(FakeEngine().serve(point.workload(0))) == 8


def test_a_file_warms_up_with_its_first_run():
    runs = [one("burst", p.PointOptions(1000, concurrencies=(2,), input_len=n)).workload(0) for n in (3, 4, 5)]
    (point,) = p.file_points("mine", runs)
    assert point.num_runs == 2
    assert [point.workload(i) for i in range(3)] == runs
    assert point.fields == {"workload": "mine", "input_len": 3, "output_len": 128, "concurrency": 2, "requests": 2}
    (single,) = p.file_points("mine", runs[:1])
    assert single.num_runs == 1 and single.workload(1) == runs[0]


def test_a_file_has_the_runs_and_the_vocabulary_that_are_asked_for():
    runs = [one("burst", p.PointOptions(1000, concurrencies=(2,), input_len=n)).workload(0) for n in (3, 4, 5)]
    (point,) = p.file_points("mine", runs, vocab_size=1000, num_runs=1)
    assert point.num_runs == 1
    with pytest.raises(ConfigError, match=r"--runs=3: workload mine holds 2 timed run\(s\); write it with --runs 4"):
        p.file_points("mine", runs, num_runs=3)
    with pytest.raises(ConfigError, match="the model has 0 to 99; write it with this model"):
        p.file_points("mine", runs, vocab_size=100)
