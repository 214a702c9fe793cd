"""Workloads: seeded, exact, and the same after a round trip through a file."""

import itertools
import json
import random

import pytest

from pico_vllm.bench import workloads as w
from pico_vllm.errors import ConfigError


def test_a_run_is_the_same_every_time_and_other_runs_seeds_and_names_differ():
    draw = w.fixed_lengths(3, 20, 5, 50_000)
    plan = w.WorkloadPlan("a", 7, draw, 2)
    assert plan.run(0) == plan.run(0)
    prompts = {plan.run(0).requests[0].prompt_token_ids, plan.run(1).requests[0].prompt_token_ids}
    prompts.add(w.WorkloadPlan("a", 8, draw, 2).run(0).requests[0].prompt_token_ids)
    prompts.add(w.WorkloadPlan("b", 7, draw, 2).run(0).requests[0].prompt_token_ids)
    assert len(prompts) == 4


def test_the_same_on_every_machine():
    """Python's generator is specified; a change here makes old records incomparable."""
    assert w.WorkloadPlan("a", 7, w.fixed_lengths(1, 4, 1, 151_936)).run(0).requests[0].prompt_token_ids == (
        61986,
        71060,
        117056,
        11246,
    )


@pytest.mark.parametrize("vocab_size, low, high", [(151_936, 1000, 150_000), (49_152, 1000, 49_152), (500, 50, 500)])
def test_ids_stay_in_the_vocabulary_and_off_its_special_start(vocab_size, low, high):
    ids = w.random_ids(random.Random(0), 20_000, vocab_size)
    assert low <= min(ids) < low + 20 and high - 20 <= max(ids) < high


def test_uniform_lengths_reach_both_ends():
    requests = w.uniform_lengths(200, (3, 5), (7, 9), 5000)(random.Random(0))
    assert {len(r.prompt_token_ids) for r in requests} == {3, 4, 5}
    assert {r.max_tokens for r in requests} == {7, 8, 9}


def test_shared_prefix_is_shared_and_the_rest_is_not():
    a, b = w.shared_prefix(2, 30, 4, 16, 50_000)(random.Random(0))
    assert a.prompt_token_ids[:30] == b.prompt_token_ids[:30]
    assert a.prompt_token_ids[30:] != b.prompt_token_ids[30:]
    assert len(a.prompt_token_ids) == 34


def test_turns_follow_their_own_conversation():
    requests = w.multi_turn(2, 3, 10, 4, 6, 50_000)(random.Random(0))
    assert [r.follows for r in requests] == [None, None, 0, 1, 2, 3]
    assert [len(r.prompt_token_ids) for r in requests] == [10, 10, 4, 4, 4, 4]
    assert w.Workload(tuple(requests), 2).prompt_lens() == [10, 10, 20, 20, 30, 30]


def test_prompts_of_a_file_come_in_random_order_and_again_when_there_are_too_few():
    prompts = [([i], i) for i in range(1, 4)]
    requests = w.from_prompts(prompts, 7)(random.Random(0))
    assert len(requests) == 7
    assert sorted(r.max_tokens for r in requests[:3]) == sorted(r.max_tokens for r in requests[3:6]) == [1, 2, 3]
    assert len(w.from_prompts(prompts)(random.Random(0))) == 3


def test_poisson_arrivals_have_the_asked_rate():
    plan = w.WorkloadPlan("p", 1, w.fixed_lengths(4000, 1, 1, 50), None, 20.0)
    arrivals = [r.arrival_s for r in plan.run(0).requests]
    assert arrivals[0] == 0.0 and arrivals == sorted(arrivals)
    gaps = [b - a for a, b in itertools.pairwise(arrivals)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / 20, rel=0.05)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert variance**0.5 == pytest.approx(mean, rel=0.06)  # exponential: deviation = mean


def test_concurrency_0_is_a_burst():
    assert w.WorkloadPlan("b", 1, w.fixed_lengths(5, 1, 1, 50), 0).run(0).concurrency == 5


def test_round_trip_through_a_file(tmp_path):
    runs = [
        w.WorkloadPlan("m", 1, w.multi_turn(2, 2, 3, 2, 4, 50), 2).run(0),
        w.WorkloadPlan("p", 1, w.uniform_lengths(3, (1, 4), (1, 4), 50, 0.7), None, 5.0).run(1),
    ]
    path = tmp_path / "w.jsonl"
    w.write_workloads(path, "mixed", runs)
    assert w.read_workloads(path) == ("mixed", runs)
    assert [a.digest() for a in runs] == [b.digest() for b in w.read_workloads(path)[1]]
    assert runs[0].digest() != runs[1].digest()


@pytest.mark.parametrize(
    "text, said",
    [
        ("", "line 1"),
        ("{}\n", "line 1"),
        ('{"workload": "x", "num_runs": 1, "concurrency": [1]}\n', "at least one request"),
        ('{"workload": "x", "num_runs": 1, "concurrency": [1]}\n{"run": 0}\n', "line 2"),
        ('{"workload": "x", "num_runs": 1, "concurrency": [1]}\n{"run": 3, "prompt_token_ids": [1]}\n', "line 2"),
        ('{"workload": "x", "num_runs": 1, "concurrency": [1]}\nnonsense\n', "line 2"),
        ('{"workload": "x", "num_runs": 0, "concurrency": []}\n', "line 1: .* num_runs=0 must be at least 1"),
        (
            '{"workload": "x", "num_runs": 1, "concurrency": [1]}\n'
            '{"run": -1, "prompt_token_ids": [1], "max_tokens": 1}\n',
            r"line 2: .* run=-1 must be in \[0, 0\]",
        ),
        (
            '{"workload": "x", "num_runs": 1, "concurrency": [1]}\n'
            '{"run": 0, "prompt_token_ids": ["a"], "max_tokens": 1}\n',
            "line 2: .* integers",
        ),
    ],
)
def test_a_file_that_is_no_workload_is_told_by_line(tmp_path, text, said):
    path = tmp_path / "w.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        w.read_workloads(path)


def test_a_file_that_cannot_be_written(tmp_path):
    with pytest.raises(ConfigError, match="can't write the workload"):
        w.write_workloads(tmp_path, "x", [])


def test_a_missing_file(tmp_path):
    with pytest.raises(ConfigError, match="can't read"):
        w.read_workloads(tmp_path / "none.jsonl")


@pytest.mark.parametrize(
    "requests, concurrency, said",
    [
        ([], 1, "at least one request"),
        ([w.WorkloadRequest((1,), 1)], 0, "at least 1"),
        ([w.WorkloadRequest((), 1)], 1, "a prompt token"),
        ([w.WorkloadRequest((1,), 0)], 1, "an output token"),
        ([w.WorkloadRequest((1,), 1)], None, "arrival_s"),
        ([w.WorkloadRequest((1,), 1, arrival_s=1.0)], 3, "arrival_s"),
        ([w.WorkloadRequest((1,), 1, follows=0)], 3, "earlier"),
        (
            [w.WorkloadRequest((1,), 1, arrival_s=a) for a in (0.0, 2.0, 1.0)],
            None,
            "request 2: arrival_s=1.0 is before 2.0",
        ),
        ([w.WorkloadRequest((1,), 1, arrival_s=-1.0)], None, "must be in"),
        ([w.WorkloadRequest((1,), 1, arrival_s=float("nan"))], None, "must be in"),
    ],
)
def test_a_workload_that_makes_no_sense_is_refused(requests, concurrency, said):
    with pytest.raises(ConfigError, match=said):
        w.Workload(tuple(requests), concurrency)


def test_a_plan_is_closed_or_open():
    draw = w.fixed_lengths(1, 1, 1, 50)
    with pytest.raises(ConfigError, match="either"):
        w.WorkloadPlan("x", 1, draw, 1, 2.0)
    with pytest.raises(ConfigError, match="above 0"):
        w.WorkloadPlan("x", 1, draw, None, 0.0)


def test_the_header_of_a_file_is_readable(tmp_path):
    path = tmp_path / "w.jsonl"
    w.write_workloads(path, "n", [w.WorkloadPlan("n", 1, w.fixed_lengths(1, 2, 3, 50), 1).run(0)])
    assert json.loads(path.read_text().splitlines()[0]) == {"workload": "n", "num_runs": 1, "concurrency": [1]}
