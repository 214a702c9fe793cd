"""Chunks beside decodes, exact numbers: a token of a prompt takes 1 s, n decodes take n s."""

import pytest

from pico_vllm.config import EngineConfig, ModelConfig
from pico_vllm.engine import engine_core
from pico_vllm.kv_cache import KVCacheManager
from pico_vllm.request import Request
from pico_vllm.sampling_params import SamplingParams
from pico_vllm.scheduler import Scheduler
from pico_vllm.scheduler.step_time import StepTimeModel, TargetITL
from pico_vllm.scheduler_output import MeasuredSteps, ModelRunnerOutput

ONE_S_A_TOKEN = StepTimeModel(((1, 1.0), (2, 2.0)), seconds_per_token=1.0, attention_ratio=0.0)


def make(seconds, min_chunk=1, step_time=ONE_S_A_TOKEN, step_sizes=(), **options):
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 100, "max_model_len": 256}
    target_itl = TargetITL(seconds, step_time, step_sizes=step_sizes, min_chunk_tokens=min_chunk)
    return Scheduler(kv_cache_manager=KVCacheManager(256, 4), target_itl=target_itl, **(limits | options))


def add(scheduler, max_tokens=50, **prompt_lengths):
    """Add requests by name; returns the last."""
    for name, length in prompt_lengths.items():
        request = Request(name, [7] * length, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
        scheduler.add(request)
    return request


def next_shares(scheduler):
    """Run a step: {request id: number of new tokens}."""
    output = scheduler.schedule()
    ids = tuple((7,) if row.samples else () for row in output.scheduled)
    scheduler.update_from_output(output, ModelRunnerOutput(ids))
    return {row.request_id: row.num_new_tokens for row in output.scheduled}


def test_while_nothing_decodes_prompts_fill_the_step():
    scheduler = make(10)
    add(scheduler, a=180, b=60)
    assert next_shares(scheduler) == {"a": 100}
    assert next_shares(scheduler) == {"a": 80, "b": 20}


def test_beside_decodes_a_prompt_gets_what_they_leave_of_the_target():
    scheduler = make(10)
    add(scheduler, a=5, b=6)
    assert next_shares(scheduler) == {"a": 5, "b": 6}
    add(scheduler, c=20)
    assert next_shares(scheduler) == {"a": 1, "b": 1, "c": 8}
    assert next_shares(scheduler) == {"a": 1, "b": 1, "c": 8}
    assert next_shares(scheduler) == {"a": 1, "b": 1, "c": 4}
    assert next_shares(scheduler) == {"a": 1, "b": 1, "c": 1}


def test_while_more_waits_than_the_backlog_allows_prompts_fill_the_step_beside_decodes():
    """Only what could run counts: of eight sequences one decodes."""
    target = TargetITL(10.0, ONE_S_A_TOKEN, min_chunk_tokens=1, max_backlog=250)
    scheduler = make(10)
    scheduler._target_itl = target
    add(scheduler, a=5)
    next_shares(scheduler)
    add(scheduler, b=90, c=90, d=90)  # 270 wait
    assert next_shares(scheduler) == {"a": 1, "b": 90, "c": 9}
    assert next_shares(scheduler) == {"a": 1, "b": 1, "c": 8}  # 90 wait, and 81 of c: the target is kept


def test_as_much_as_the_backlog_allows_may_wait():
    scheduler = make(10)
    scheduler._target_itl = TargetITL(10.0, ONE_S_A_TOKEN, min_chunk_tokens=1, max_backlog=250)
    add(scheduler, a=5)
    next_shares(scheduler)
    add(scheduler, b=90, c=90, d=70)
    assert next_shares(scheduler) == {"a": 1, "b": 9}


def test_what_waits_for_a_free_sequence_is_no_backlog():
    target = TargetITL(10.0, ONE_S_A_TOKEN, min_chunk_tokens=1, max_backlog=250)
    scheduler = make(10, max_num_seqs=3)
    scheduler._target_itl = target
    add(scheduler, a=5)
    next_shares(scheduler)
    add(scheduler, b=90, c=90, d=90, e=90)  # b and c could run
    assert next_shares(scheduler) == {"a": 1, "b": 9}


def test_prompts_share_the_allowance_in_order_of_arrival():
    scheduler = make(11)
    add(scheduler, a=5)
    next_shares(scheduler)
    add(scheduler, b=4)
    add(scheduler, c=3)
    add(scheduler, d=9)
    add(scheduler, e=1)
    assert next_shares(scheduler) == {"a": 1, "b": 4, "c": 3, "d": 3}
    assert next_shares(scheduler) == {"a": 1, "b": 1, "c": 1, "d": 6, "e": 1}


def test_nobody_overtakes_a_prompt_that_was_cut():
    """Late in a long prompt a token costs more than the first ones of the next prompt, which would still fit."""
    dear = StepTimeModel(((1, 1.0),), seconds_per_token=1.0, attention_ratio=1.0)
    scheduler = make(11, step_time=dear)
    add(scheduler, a=5)
    next_shares(scheduler)
    add(scheduler, b=7)
    add(scheduler, c=1)
    assert next_shares(scheduler) == {"a": 1, "b": 3}  # 3 * (1 + 1.5) = 7.5 s; 4 tokens would take 12
    assert next_shares(scheduler) == {"a": 1, "b": 2}  # 2 * (1 + 3 + 1) = 10 s
    assert next_shares(scheduler) == {"a": 1, "b": 1}  # 1 + 5 + 0.5 s: the last two would take 14
    assert next_shares(scheduler) == {"a": 1, "b": 1, "c": 1}  # 7.5 s of b leave 2.5: enough for one of c


def test_a_target_that_the_decodes_alone_miss_leaves_prompts_the_least_chunk():
    scheduler = make(2, min_chunk=4)
    add(scheduler, a=5, b=5, c=5)
    next_shares(scheduler)
    add(scheduler, d=10)
    add(scheduler, e=10)
    assert next_shares(scheduler) == {"a": 1, "b": 1, "c": 1, "d": 4}
    assert next_shares(scheduler) == {"a": 1, "b": 1, "c": 1, "d": 4}
    assert next_shares(scheduler) == {"a": 1, "b": 1, "c": 1, "d": 2, "e": 2}  # 4 tokens together


def test_the_hard_bound_counts_decodes_and_prompts():
    scheduler = make(1000, max_num_batched_tokens=10)
    add(scheduler, a=4, b=5)
    next_shares(scheduler)
    add(scheduler, c=20)
    assert next_shares(scheduler) == {"a": 1, "b": 1, "c": 8}


def test_a_prompt_under_way_leaves_the_decodes_behind_it_their_tokens():
    """An older request that still has prompt to compute stands before a newer one that decodes."""
    scheduler = make(1000, max_num_batched_tokens=10)
    a = add(scheduler, a=30)
    next_shares(scheduler)  # a: 10 of 30
    add(scheduler, b=4)
    a.num_inflight_tokens += 20  # say its last chunk is on the device: b is admitted meanwhile
    assert next_shares(scheduler) == {"b": 4}
    a.num_inflight_tokens -= 20
    assert next_shares(scheduler) == {"b": 1, "a": 9}


def test_a_decode_behind_prompts_that_have_had_their_share_gets_its_token():
    scheduler = make(1000, max_num_batched_tokens=10)
    a = add(scheduler, a=30)
    next_shares(scheduler)  # a: 10 of 30
    a.num_inflight_tokens += 20  # say the rest of it is on the device, and so with b
    b = add(scheduler, b=30)
    next_shares(scheduler)
    b.num_inflight_tokens += 20
    add(scheduler, c=4)
    assert next_shares(scheduler) == {"c": 4}
    a.num_inflight_tokens -= 20
    b.num_inflight_tokens -= 20
    assert next_shares(scheduler) == {"c": 1, "a": 9}


def test_when_the_last_decode_has_ended_prompts_fill_the_step_again():
    scheduler = make(5)
    add(scheduler, a=5, max_tokens=2)
    next_shares(scheduler)
    add(scheduler, b=120)
    assert next_shares(scheduler) == {"a": 1, "b": 4}
    assert next_shares(scheduler) == {"b": 100}


@pytest.mark.parametrize("leave", ["abort", "preempt"])
def test_whoever_leaves_decodes_no_more(leave):
    scheduler = make(5)
    add(scheduler, a=5)
    next_shares(scheduler)
    if leave == "abort":
        scheduler.abort("a")
    else:
        scheduler.preempt_all()
    add(scheduler, b=20)
    assert next_shares(scheduler) == ({"b": 20} if leave == "abort" else {"a": 6, "b": 20})


def test_every_prompt_advances_in_every_step_however_tight_the_target():
    scheduler = make(0, min_chunk=1)
    add(scheduler, a=5, max_tokens=200)
    next_shares(scheduler)
    add(scheduler, b=30)
    for _ in range(30):
        assert next_shares(scheduler)["b"] == 1
    assert next_shares(scheduler) == {"a": 1, "b": 1}


def test_a_prompt_that_may_not_be_cut_knows_no_target():
    scheduler = make(5, enable_chunked_prefill=False, max_num_batched_tokens=256)
    add(scheduler, a=5)
    next_shares(scheduler)
    add(scheduler, b=60)
    assert next_shares(scheduler) == {"a": 1, "b": 60}


def test_a_prompt_that_may_not_be_cut_takes_exactly_what_is_left():
    scheduler = make(5, enable_chunked_prefill=False, max_num_batched_tokens=256)
    add(scheduler, a=56, b=200)
    assert next_shares(scheduler) == {"a": 56, "b": 200}


def test_a_step_with_cut_prompts_fills_a_captured_size():
    scheduler = make(20, step_sizes=(8, 16))
    add(scheduler, a=5, b=6)
    next_shares(scheduler)
    add(scheduler, c=30, d=5)
    assert next_shares(scheduler) == {"a": 1, "b": 1, "c": 14}  # of 18
    assert next_shares(scheduler) == {"a": 1, "b": 1, "c": 14}
    assert next_shares(scheduler) == {"a": 1, "b": 1, "c": 2, "d": 5}  # whole prompts are not cut


def test_decodes_behind_a_cut_prompt_count_towards_the_captured_size():
    scheduler = make(1000, max_num_batched_tokens=20, step_sizes=(8, 16))
    a = add(scheduler, a=50)
    next_shares(scheduler)  # a: 20 of 50
    add(scheduler, b=4)
    a.num_inflight_tokens += 30  # say the rest of it is on the device
    assert next_shares(scheduler) == {"b": 4}
    a.num_inflight_tokens -= 30
    assert next_shares(scheduler) == {"b": 1, "a": 15}  # of 19


@pytest.mark.parametrize(("options", "max_backlog"), [({}, 400), ({"target_itl_ms": 8}, None)])
def test_only_the_default_target_gives_way_to_a_backlog(options, max_backlog):
    """Of four full steps; a target that was asked for is kept."""
    model = ModelConfig("Qwen2ForCausalLM", 128, 32, 64, 1, 2, 1, 16, 256)
    measured = MeasuredSteps(decode_s=((1, 0.001),), prompt_tokens=100, prompt_s=0.002)
    target = engine_core._target_itl(EngineConfig.from_options(model="dir", **options), model, measured, 100)
    assert target is not None and target.max_backlog == max_backlog
