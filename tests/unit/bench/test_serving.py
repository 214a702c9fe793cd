"""The dispatcher and the stepped loop, on an engine whose latencies are known: measured is what is true."""

import pytest

from bench_fakes import FakeEngine
from pico_vllm.bench.metrics import summarize
from pico_vllm.bench.workloads import Workload, WorkloadPlan, WorkloadRequest, fixed_lengths, multi_turn


def requests(*max_tokens, **more):
    return tuple(WorkloadRequest((1, 2, 3), n, **more) for n in max_tokens)


def test_one_request_is_measured_exactly():
    run = summarize(FakeEngine(prefill_s=0.020, decode_s=0.005).serve(Workload(requests(11), 1)))
    assert run["ttft_ms_median"] == 20.0
    assert run["itl_ms_median"] == run["itl_ms_p99"] == run["tpot_ms_median"] == 5.0
    assert run["e2e_ms_median"] == 70.0
    assert run["decode_tok_s"] == 200.0
    assert run["out_tok_s"] == round(11 / 0.070, 2)


def test_a_closed_loop_keeps_its_concurrency_and_starts_the_next_when_one_ends():
    engine = FakeEngine(prefill_s=1.0, decode_s=0.1)
    traces = engine.serve(Workload(requests(2, 4, 2, 2), 2))
    # Step 1: both prompts, 2.0 s. Step 2 (+0.1): request 0 ends. Step 3 (+1.1): 2 begins. Step 4 (+0.1): 1 and 2 end.
    # Step 5 (+1.0): 3 begins, nothing else runs. Step 6 (+0.1): 3 ends.
    assert [round(t.submit_s - 100, 3) for t in traces] == [0.0, 0.0, 2.1, 3.3]
    assert [[round(x - 100, 3) for x in t.times_s] for t in traces] == [
        [2.0, 2.1],
        [2.0, 2.1, 3.2, 3.3],
        [3.2, 3.3],
        [4.3, 4.4],
    ]
    assert engine.num_steps == 6


def test_a_burst_is_sent_at_once():
    traces = FakeEngine(prefill_s=0.5).serve(Workload(requests(1, 1, 1), 3))
    assert {t.submit_s for t in traces} == {100.0}
    assert {t.times_s[0] for t in traces} == {101.5}


def test_an_open_loop_sends_at_the_arrivals_and_counts_from_them():
    engine = FakeEngine(prefill_s=1.0, decode_s=0.25)
    arrivals = [0.0, 0.5, 10.0]
    workload = Workload(tuple(WorkloadRequest((1,), 3, arrival_s=a) for a in arrivals), None)
    traces = engine.serve(workload)
    # Request 1 arrives while the step of request 0's prompt runs, and can be sent only after it, at 1.0.
    assert [t.arrival_s - 100 for t in traces] == arrivals
    assert [t.submit_s - 100 for t in traces] == [0.0, 1.0, 10.0]
    assert traces[1].times_s[0] - 100 == 2.25  # its prompt and one decode of request 0
    run = summarize(traces)
    assert run["raw"]["ttft_ms"] == [1000.0, 1750.0, 1000.0]
    assert run["submit_late_ms_max"] == 500.0


def test_an_engine_that_queues_shows_it_in_ttft():
    run = summarize(FakeEngine(prefill_s=1.0, decode_s=0.1, max_num_seqs=1).serve(Workload(requests(2, 2), 2)))
    assert run["raw"]["ttft_ms"] == [1000.0, 2100.0]


def test_a_turn_is_sent_after_the_one_before_with_the_whole_conversation():
    engine = FakeEngine()
    workload = WorkloadPlan("m", 1, multi_turn(2, 3, 5, 2, 4, 50_000), 2).run(0)
    traces = engine.serve(workload)
    assert [t.prompt_len for t in traces] == workload.prompt_lens() == [5, 5, 11, 11, 17, 17]
    first, answer = workload.requests[0].prompt_token_ids, traces[0].token_ids
    second, answer_2 = workload.requests[2].prompt_token_ids, traces[2].token_ids
    assert engine.prompts[2] == [*first, *answer, *second]
    assert engine.prompts[4] == [*first, *answer, *second, *answer_2, *workload.requests[4].prompt_token_ids]
    assert traces[2].submit_s >= traces[0].times_s[-1]


def test_a_conversation_goes_on_before_a_new_one_starts():
    order = []
    engine = FakeEngine()
    add = engine.add
    engine.add = lambda index, *rest: (order.append(index), add(index, *rest))
    engine.serve(WorkloadPlan("m", 1, multi_turn(2, 2, 5, 2, 4, 50_000), 1).run(0))
    assert order == [0, 2, 1, 3]


def test_turns_of_an_open_loop_wait_for_their_answer():
    workload = Workload(
        (
            WorkloadRequest((1,), 4, arrival_s=0.0),
            WorkloadRequest((2,), 1, arrival_s=0.001, follows=0),
            WorkloadRequest((3,), 1, arrival_s=50.0, follows=0),
            WorkloadRequest((4,), 1, arrival_s=20.0),
        ),
        None,
    )
    traces = FakeEngine(prefill_s=1.0, decode_s=1.0).serve(workload)
    assert traces[0].times_s[-1] == 104.0
    assert traces[1].arrival_s == 104.0  # the answer came later than the plan: it counts from the answer
    assert [t.submit_s for t in traces] == [100.0, 104.0, 150.0, 120.0]


def test_offline_counts_everything():
    engine = FakeEngine(prefill_s=0.5, decode_s=0.1)
    assert engine.run_offline(Workload(requests(3, 2), 2)) == (pytest.approx(1.2), 5)


def test_many_requests_of_one_length_all_give_their_tokens():
    workload = WorkloadPlan("x", 1, fixed_lengths(50, 4, 9, 5000), 7).run(0)
    traces = FakeEngine().serve(workload)
    assert [t.num_tokens for t in traces] == [9] * 50
    assert all(len(t.token_ids) == 9 for t in traces)
