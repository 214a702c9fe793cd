from __future__ import annotations

import pytest

from pico_vllm.errors import ConfigError, RequestError
from pico_vllm.kv_cache import KVCacheManager
from pico_vllm.outputs import EngineCoreOutput, TokenLogprobs
from pico_vllm.request import FinishReason, Request, RequestStatus
from pico_vllm.sampling_params import SamplingParams
from pico_vllm.scheduler import Scheduler
from pico_vllm.scheduler_output import ModelRunnerOutput, NewRequestData, ScheduledRequest, SchedulerOutput

EOS = 2


def make_scheduler(num_blocks=64, block_size=4, enable_prefix_caching=False, **limits):
    defaults = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 64}
    manager = KVCacheManager(num_blocks, block_size, enable_prefix_caching=enable_prefix_caching)
    return Scheduler(kv_cache_manager=manager, **{**defaults, **limits})


def make_request(request_id, num_prompt_tokens, max_tokens=10, **params):
    """The prompt of "a" is 100, 101, …; that of "b" 200, 201, …"""
    first = 100 * (ord(request_id[0]) - ord("a") + 1)
    prompt = range(first, first + num_prompt_tokens)
    return Request(
        request_id, prompt, SamplingParams(max_tokens=max_tokens, **params), seed=first, eos_token_ids=(EOS,)
    )


def add(scheduler, *sizes, **kwargs):
    """Add requests "a", "b", … with these prompt lengths."""
    requests = [make_request(chr(ord("a") + index), size, **kwargs) for index, size in enumerate(sizes)]
    for request in requests:
        scheduler.add(request)
    return requests


def run_model(output, **sampled):
    """What a worker would return: 7, or the named token."""
    rows = ((sampled.get(row.request_id, 7),) if row.samples else () for row in output.scheduled)
    return ModelRunnerOutput(tuple(rows))


def step(scheduler, **sampled):
    output = scheduler.schedule()
    return output, scheduler.update_from_output(output, run_model(output, **sampled))


def entry(token_id):
    return TokenLogprobs((token_id,), (-1.0,), 1)


def run_model_with_logprobs(output, requests, **sampled):
    """The same, with an entry for each prompt position asked for and for each sampled token of who asks."""
    token_ids = run_model(output, **sampled).token_ids
    asks = {request.request_id: request.params.logprobs is not None for request in requests}
    logprobs = zip(output.scheduled, token_ids, strict=True)
    return ModelRunnerOutput(
        token_ids,
        logprobs=tuple(tuple(map(entry, ids)) if asks[row.request_id] else () for row, ids in logprobs),
        prompt_logprobs=tuple(tuple(map(entry, row.prompt_targets)) for row in output.scheduled),
    )


def step_with_logprobs(scheduler, requests, **sampled):
    output = scheduler.schedule()
    return output, scheduler.update_from_output(output, run_model_with_logprobs(output, requests, **sampled))


def steps(scheduler, count):
    for _ in range(count):
        step(scheduler)


def shares(output):
    """{request id: number of new tokens} in order."""
    return {row.request_id: row.num_new_tokens for row in output.scheduled}


def row_of(output, request_id):
    (row,) = (row for row in output.scheduled if row.request_id == request_id)
    return row


def free_blocks(scheduler):
    return scheduler._kv_cache_manager.num_free_blocks


def assert_nothing_is_left(scheduler):
    manager = scheduler._kv_cache_manager
    containers = {**vars(scheduler), **vars(manager)}
    assert {name: value for name, value in containers.items() if hasattr(value, "__len__") and len(value)} == {}
    assert manager.num_free_blocks == manager.num_blocks
    assert (scheduler.num_running, scheduler.num_waiting) == (0, 0)
    assert not scheduler.has_unfinished_requests()


# The life of one request


def test_request_runs_from_prompt_to_last_token():
    scheduler = make_scheduler()
    (request,) = add(scheduler, 5, max_tokens=3)
    assert (scheduler.num_running, scheduler.num_waiting) == (0, 1)

    output, outputs = step(scheduler, a=30)
    row = NewRequestData(params=request.params, seed=100, num_prompt_tokens=5, stop_token_ids=(EOS,))
    prompt = ScheduledRequest("a", (100, 101, 102, 103, 104), 0, 5, (0, 1), True, row)
    assert output == SchedulerOutput(scheduled=(prompt,), num_decode_reqs=0, num_tokens=5)
    assert outputs == [EngineCoreOutput("a", (30,))]
    assert (request.num_computed_tokens, request.num_inflight_tokens, request.num_tokens) == (5, 0, 6)
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 0)

    output, outputs = step(scheduler, a=31)
    decode = ScheduledRequest("a", (), 5, 1, (), True)
    assert output == SchedulerOutput(scheduled=(decode,), num_decode_reqs=1, num_tokens=1)
    assert outputs == [EngineCoreOutput("a", (31,))]

    output, outputs = step(scheduler, a=32)
    assert outputs == [EngineCoreOutput("a", (32,), FinishReason.LENGTH)]
    assert (request.status, request.output_token_ids) == (RequestStatus.FINISHED, [30, 31, 32])
    assert not scheduler.has_unfinished_requests()

    assert scheduler.schedule() == SchedulerOutput((), 0, 0, dropped_request_ids=("a",))
    assert_nothing_is_left(scheduler)


def test_tokens_are_in_flight_between_schedule_and_update():
    scheduler = make_scheduler(max_num_batched_tokens=3)
    (request,) = add(scheduler, 5)
    output = scheduler.schedule()
    assert (request.num_computed_tokens, request.num_inflight_tokens) == (0, 3)
    scheduler.update_from_output(output, run_model(output))
    assert (request.num_computed_tokens, request.num_inflight_tokens) == (3, 0)


def test_block_is_appended_when_a_boundary_is_crossed():
    scheduler = make_scheduler(block_size=4)
    add(scheduler, 3)
    appended = [step(scheduler)[0].scheduled[0].new_block_ids for _ in range(7)]
    assert appended == [(0,), (), (1,), (), (), (), (2,)]


# Admission, order and budget


def test_requests_are_admitted_in_order_of_arrival():
    scheduler = make_scheduler()
    add(scheduler, 3, 9, 2, 5)
    output, _ = step(scheduler)
    assert list(shares(output)) == ["a", "b", "c", "d"]


def test_no_more_than_max_num_seqs_run():
    scheduler = make_scheduler(max_num_seqs=2)
    add(scheduler, 3, 3, 3, max_tokens=2)
    assert shares(step(scheduler)[0]) == {"a": 3, "b": 3}
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 1)
    assert shares(step(scheduler)[0]) == {"a": 1, "b": 1}
    assert shares(step(scheduler)[0]) == {"c": 3}


def test_decodes_and_prompt_chunks_share_the_budget_and_decodes_come_first():
    scheduler = make_scheduler(max_num_batched_tokens=10)
    add(scheduler, 3)
    step(scheduler)
    for request in (make_request("b", 12), make_request("c", 20)):
        scheduler.add(request)
    output, _ = step(scheduler)
    assert (shares(output), output.num_tokens, output.num_decode_reqs) == ({"a": 1, "b": 9}, 10, 1)
    output, _ = step(scheduler)
    assert (shares(output), output.num_tokens, output.num_decode_reqs) == ({"a": 1, "b": 3, "c": 6}, 10, 1)
    output, _ = step(scheduler)
    assert (shares(output), output.num_tokens, output.num_decode_reqs) == ({"a": 1, "b": 1, "c": 8}, 10, 2)


def test_prompt_above_the_budget_runs_in_chunks_and_samples_only_at_the_last():
    scheduler = make_scheduler(max_num_batched_tokens=4)
    (request,) = add(scheduler, 10)
    first, outputs = step(scheduler)
    assert first.scheduled[0].new_request is not None
    assert (first.scheduled[0].new_token_ids, first.scheduled[0].samples) == ((100, 101, 102, 103), False)
    assert outputs == []
    second, outputs = step(scheduler)
    assert second.scheduled == (ScheduledRequest("a", (104, 105, 106, 107), 4, 4, (), False),)
    assert outputs == []
    third, outputs = step(scheduler)
    assert third.scheduled == (ScheduledRequest("a", (108, 109), 8, 2, (), True),)
    assert outputs == [EngineCoreOutput("a", (7,))]
    assert request.num_computed_tokens == 10


def test_all_blocks_of_a_prompt_are_its_own_from_the_first_chunk_on():
    scheduler = make_scheduler(num_blocks=8, block_size=4, max_num_batched_tokens=4)
    add(scheduler, 10)
    output, _ = step(scheduler)
    assert output.scheduled[0].new_block_ids == (0, 1, 2)
    assert free_blocks(scheduler) == 5


def test_last_token_of_a_prompt_is_sent_though_it_is_alone():
    scheduler = make_scheduler(max_num_batched_tokens=4)
    add(scheduler, 5)
    step(scheduler)
    output, _ = step(scheduler)
    assert output.scheduled == (ScheduledRequest("a", (104,), 4, 1, (), True),)
    assert output.num_decode_reqs == 1
    output, _ = step(scheduler)
    assert output.scheduled == (ScheduledRequest("a", (), 5, 1, (), True),)


def test_requests_with_one_new_token_come_first_in_stable_order():
    scheduler = make_scheduler()
    add(scheduler, 3, 1, 2, 1)
    output, outputs = step(scheduler, a=30, b=31, c=32, d=33)
    assert list(shares(output)) == ["b", "d", "a", "c"]
    assert output.num_decode_reqs == 2
    assert [(o.request_id, o.new_token_ids) for o in outputs] == [
        ("b", (31,)),
        ("d", (33,)),
        ("a", (30,)),
        ("c", (32,)),
    ]
    output, _ = step(scheduler)
    assert list(shares(output)) == ["a", "b", "c", "d"]


def test_budget_below_the_running_requests_serves_the_oldest():
    scheduler = make_scheduler(max_num_batched_tokens=1, max_num_seqs=3)
    add(scheduler, 1, 1, max_tokens=2)
    assert [list(shares(step(scheduler)[0])) for _ in range(4)] == [["a"], ["a"], ["b"], ["b"]]
    assert not scheduler.has_unfinished_requests()


def test_without_chunking_a_prompt_waits_until_it_fits_whole_and_nobody_overtakes():
    scheduler = make_scheduler(max_num_batched_tokens=10, max_model_len=10, enable_chunked_prefill=False)
    add(scheduler, 6, 5, 1, max_tokens=3)
    assert shares(step(scheduler)[0]) == {"a": 6}
    assert shares(step(scheduler)[0]) == {"a": 1, "b": 5, "c": 1}


def test_without_chunking_a_budget_below_max_model_len_is_refused_with_both_numbers():
    with pytest.raises(ConfigError, match="max_num_batched_tokens=9 is below max_model_len=10"):
        make_scheduler(max_num_batched_tokens=9, max_model_len=10, enable_chunked_prefill=False)
    make_scheduler(max_num_batched_tokens=10, max_model_len=10, enable_chunked_prefill=False)
    make_scheduler(max_num_batched_tokens=9, max_model_len=10)


@pytest.mark.parametrize("limit", ["max_num_seqs", "max_num_batched_tokens", "max_model_len"])
def test_limit_below_one_is_refused_by_name(limit):
    with pytest.raises(ConfigError, match=f"{limit}=0"):
        make_scheduler(**{limit: 0})


@pytest.mark.parametrize(("num_blocks", "admitted"), [(10, ["a", "b"]), (11, ["a", "b", "c"])])
def test_admission_leaves_a_free_block_for_each_request_that_would_run(num_blocks, admitted):
    scheduler = make_scheduler(num_blocks=num_blocks, block_size=4)
    add(scheduler, 8, 20, 1)  # 2, 5 and 1 blocks; "c" needs 1 + 3 of the 3 or 4 that are left
    assert list(shares(step(scheduler)[0])) == [i for i in ["c", "a", "b"] if i in admitted]


def test_admission_counts_all_known_tokens_not_only_the_first_chunk():
    scheduler = make_scheduler(num_blocks=10, block_size=4, max_num_batched_tokens=6)
    add(scheduler, 4, 25)  # "b": a first chunk of 2 tokens, but 7 + 2 of 9 blocks
    assert shares(step(scheduler)[0]) == {"a": 4, "b": 2}
    scheduler = make_scheduler(num_blocks=9, block_size=4, max_num_batched_tokens=6)
    add(scheduler, 4, 25)
    assert shares(step(scheduler)[0]) == {"a": 4}


def test_empty_engine_admits_a_request_that_needs_every_block():
    scheduler = make_scheduler(num_blocks=4, block_size=4)
    add(scheduler, 16, max_tokens=1)
    assert shares(step(scheduler)[0]) == {"a": 16}


# Preemption


def test_newest_request_is_preempted_and_resumes_with_all_its_tokens():
    scheduler = make_scheduler(num_blocks=4, block_size=4)
    a, b = add(scheduler, 4, 4, max_tokens=8)
    first, _ = step(scheduler)
    assert [row.new_block_ids for row in first.scheduled] == [(0,), (1,)]
    second, _ = step(scheduler)
    assert [row.new_block_ids for row in second.scheduled] == [(2,), (3,)]
    steps(scheduler, 3)
    assert free_blocks(scheduler) == 0

    sixth, outputs = step(scheduler)  # position 8 of both: "a" takes the first of b's blocks 1 and 3
    assert sixth == SchedulerOutput((ScheduledRequest("a", (), 8, 1, (1,), True),), 1, 1, dropped_request_ids=("b",))
    assert [o.request_id for o in outputs] == ["a"]
    assert (b.status, b.num_computed_tokens, b.num_inflight_tokens) == (RequestStatus.WAITING, 0, 0)
    assert (b.num_preemptions, a.num_preemptions, scheduler.num_preemptions) == (1, 0, 1)
    assert b.output_token_ids == [7] * 5
    assert (scheduler.num_running, scheduler.num_waiting, free_blocks(scheduler)) == (1, 1, 1)

    for _ in range(2):
        output, outputs = step(scheduler)
        assert list(shares(output)) == ["a"]
    assert outputs[0].finish_reason is FinishReason.LENGTH

    ninth, outputs = step(scheduler, b=8)  # "a" held 0, 2, 1
    row = NewRequestData(params=b.params, seed=200, num_prompt_tokens=4, stop_token_ids=(EOS,))
    resumed = ScheduledRequest("b", (200, 201, 202, 203, 7, 7, 7, 7, 7), 0, 9, (0, 2, 1), True, row)
    assert ninth == SchedulerOutput((resumed,), 0, 9, dropped_request_ids=("a",))
    assert outputs == [EngineCoreOutput("b", (8,))]
    tenth, _ = step(scheduler, b=9)
    assert tenth.scheduled == (ScheduledRequest("b", (), 9, 1, (), True),)
    _, outputs = step(scheduler, b=10)
    assert outputs == [EngineCoreOutput("b", (10,), FinishReason.LENGTH)]
    assert b.output_token_ids == [7] * 5 + [8, 9, 10]


def test_resumed_request_samples_only_after_its_last_chunk():
    scheduler = make_scheduler(num_blocks=4, block_size=4, max_num_batched_tokens=8)
    add(scheduler, 4, 4, max_tokens=8)
    steps(scheduler, 8)
    first, outputs = step(scheduler)
    row = first.scheduled[0]
    assert (row.new_token_ids, row.samples) == ((200, 201, 202, 203, 7, 7, 7, 7), False)
    assert outputs == []
    second, outputs = step(scheduler)
    assert second.scheduled == (ScheduledRequest("b", (7,), 8, 1, (), True),)  # the new row never sampled it
    assert outputs == [EngineCoreOutput("b", (7,))]


def test_newest_request_that_needs_the_block_itself_is_preempted():
    scheduler = make_scheduler(num_blocks=5, block_size=4)
    add(scheduler, 5, 4)
    steps(scheduler, 5)
    assert free_blocks(scheduler) == 0
    output, _ = step(scheduler)  # "a" is at position 9 of its three blocks, "b" at position 8 of its two
    assert (shares(output), output.dropped_request_ids) == ({"a": 1}, ("b",))
    assert free_blocks(scheduler) == 2


def test_preempted_request_finds_all_that_it_had_computed_in_the_prefix_cache(monkeypatch):
    scheduler = make_scheduler(enable_prefix_caching=True)
    add(scheduler, 4, 4)
    steps(scheduler, 3)
    manager = scheduler._kv_cache_manager
    allocate_slots = manager.allocate_slots

    def refuse_a_while_b_holds_blocks(request_id, *args, **kwargs):
        return None if request_id == "a" and manager.block_table("b") else allocate_slots(request_id, *args, **kwargs)

    monkeypatch.setattr(manager, "allocate_slots", refuse_a_while_b_holds_blocks)
    assert step(scheduler)[0].dropped_request_ids == ("b",)
    monkeypatch.undo()
    resumed = row_of(step(scheduler)[0], "b")  # 4 of the prompt, 3 sampled: all but the last were computed
    assert (resumed.num_computed_tokens, resumed.num_new_tokens) == (6, 1)


def test_every_preemption_counts():
    scheduler = make_scheduler()
    a, b = add(scheduler, 4, 4)
    for _ in range(2):
        step(scheduler)
        scheduler.preempt_all()
    assert (a.num_preemptions, b.num_preemptions, scheduler.num_preemptions) == (2, 2, 4)


def test_two_preempted_in_one_step_keep_their_order():
    scheduler = make_scheduler(num_blocks=8, block_size=4)
    add(scheduler, 4, 4, 4, 1)
    steps(scheduler, 5)
    assert free_blocks(scheduler) == 0
    output, _ = step(scheduler)  # "a" and "b" take d's two blocks, "c" finds none but its own
    assert (shares(output), output.dropped_request_ids) == ({"a": 1, "b": 1}, ("d", "c"))
    resumed = []
    while scheduler.has_unfinished_requests():
        resumed += [row.request_id for row in step(scheduler)[0].scheduled if row.new_request]
    assert resumed == ["c", "d"]


def test_preempted_request_goes_to_the_front_and_nobody_overtakes_it():
    scheduler = make_scheduler(num_blocks=8, block_size=4, max_num_seqs=2)
    a, b = add(scheduler, 4, 20)
    step(scheduler)
    scheduler.add(make_request("c", 1))
    steps(scheduler, 4)
    output, _ = step(scheduler)
    assert output.dropped_request_ids == ("b",)
    assert free_blocks(scheduler) == 5  # enough for "c" (1 + 2), not for "b" (7 + 2)
    steps(scheduler, 3)
    assert (a.status, b.status, scheduler.num_waiting) == (RequestStatus.RUNNING, RequestStatus.WAITING, 2)
    step(scheduler)  # "a" makes its tenth token
    assert list(shares(step(scheduler)[0])) == ["b"]


def test_no_one_is_admitted_in_a_step_that_preempts(monkeypatch):
    scheduler = make_scheduler(num_blocks=64)
    add(scheduler, 4, 4)
    step(scheduler)
    manager = scheduler._kv_cache_manager
    allocate_slots = manager.allocate_slots

    def refuse_a_while_b_holds_blocks(request_id, *args, **kwargs):
        return None if request_id == "a" and manager.block_table("b") else allocate_slots(request_id, *args, **kwargs)

    monkeypatch.setattr(manager, "allocate_slots", refuse_a_while_b_holds_blocks)
    output, _ = step(scheduler)  # "b" would fit again at once, with 62 free blocks
    assert (shares(output), output.dropped_request_ids) == ({"a": 1}, ("b",))
    assert shares(step(scheduler)[0])["b"] == 5


@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
def test_after_an_admission_block_size_steps_go_by_before_anyone_is_preempted(block_size):
    scheduler = make_scheduler(num_blocks=100 // block_size + 8, block_size=block_size)
    add(scheduler, *[1 + 5 * i % 9 for i in range(12)], max_tokens=50)
    num_steps = last_admission = 0
    while scheduler.has_unfinished_requests():
        num_preemptions = scheduler.num_preemptions
        output, _ = step(scheduler)
        num_steps += 1
        if scheduler.num_preemptions > num_preemptions:
            assert num_steps - last_admission > block_size
        if any(row.new_request for row in output.scheduled):
            last_admission = num_steps
    assert scheduler.num_preemptions > 0


def test_pool_of_one_request_serves_many_one_after_another():
    scheduler = make_scheduler(num_blocks=3, block_size=4)
    requests = add(scheduler, 5, 5, 5, 5, max_tokens=8)  # 12 slots each: the whole pool
    for _ in range(100):
        step(scheduler)
    assert [request.output_token_ids for request in requests] == [[7] * 8] * 4
    scheduler.schedule()
    assert_nothing_is_left(scheduler)


# Finishing


def finish(token, num_steps=1, **kwargs):
    """Run one request until it has num_steps tokens, all 7 but the last; return its last output and itself."""
    scheduler = make_scheduler(**{k: kwargs.pop(k) for k in ["max_model_len"] if k in kwargs})
    (request,) = add(scheduler, 5, **kwargs)
    for _ in range(num_steps - 1):
        _, (output,) = step(scheduler)
        assert output.finish_reason is None
    _, (output,) = step(scheduler, a=token)
    if output.finish_reason is not None:
        assert request.status is RequestStatus.FINISHED
        assert free_blocks(scheduler) == 64
        assert step(scheduler)[0].dropped_request_ids == ("a",)
        assert_nothing_is_left(scheduler)
    return output, request


def test_eos_stops_and_is_kept_in_the_output():
    output, request = finish(EOS, num_steps=3)
    assert output == EngineCoreOutput("a", (EOS,), FinishReason.STOP, stop_reason=None)
    assert request.output_token_ids == [7, 7, EOS]


def test_stop_token_id_stops_and_is_named():
    output, request = finish(9, num_steps=2, stop_token_ids=[9, 11])
    assert output == EngineCoreOutput("a", (9,), FinishReason.STOP, stop_reason=9)
    assert request.output_token_ids == [7, 9]


def test_eos_that_was_asked_for_as_a_stop_token_is_named():
    assert finish(EOS, stop_token_ids=[EOS])[0].stop_reason == EOS
    assert finish(EOS, stop_token_ids=[EOS], ignore_eos=True)[0].stop_reason == EOS


def test_ignored_eos_goes_on():
    assert finish(EOS, ignore_eos=True)[0] == EngineCoreOutput("a", (EOS,))


@pytest.mark.parametrize("max_tokens", [1, 2, 5])
def test_max_tokens_ends_at_exactly_that_many(max_tokens):
    output, request = finish(7, num_steps=max_tokens, max_tokens=max_tokens)
    assert output.finish_reason is FinishReason.LENGTH
    assert output.stop_reason is None
    assert len(request.output_token_ids) == max_tokens


@pytest.mark.parametrize("max_model_len", [6, 7, 12])
def test_max_model_len_ends_at_exactly_that_many_tokens(max_model_len):
    output, request = finish(7, num_steps=max_model_len - 5, max_tokens=1000, max_model_len=max_model_len)
    assert output.finish_reason is FinishReason.LENGTH
    assert request.num_tokens == max_model_len


def test_stop_wins_over_length_at_the_same_token():
    assert finish(EOS, num_steps=2, max_tokens=2)[0].finish_reason is FinishReason.STOP
    assert finish(9, num_steps=2, max_tokens=2, stop_token_ids=[9])[0].stop_reason == 9


def test_stop_token_in_the_prompt_does_not_stop():
    scheduler = make_scheduler()
    scheduler.add(Request("a", [EOS, 9, EOS], SamplingParams(stop_token_ids=[9]), eos_token_ids=(EOS,)))
    _, (output,) = step(scheduler)
    assert output.finish_reason is None


def test_others_go_on_when_one_finishes():
    scheduler = make_scheduler()
    add(scheduler, 3, 3, 3)
    _, outputs = step(scheduler, b=EOS)
    assert [(o.request_id, o.finish_reason) for o in outputs] == [("a", None), ("b", FinishReason.STOP), ("c", None)]
    output, _ = step(scheduler)
    assert (list(shares(output)), output.dropped_request_ids) == (["a", "c"], ("b",))


def test_finished_requests_leave_nothing_behind():
    scheduler = make_scheduler(max_num_seqs=16)
    for index in range(3000):
        scheduler.add(Request(f"r{index}", [1] * (1 + index % 7), SamplingParams(max_tokens=1 + index % 3)))
    while scheduler.has_unfinished_requests():
        output, _ = step(scheduler)
        assert len(output.dropped_request_ids) <= 16
    scheduler.schedule()
    assert_nothing_is_left(scheduler)


# Aborting


def test_abort_of_a_waiting_request_leaves_nothing_and_drops_no_row():
    scheduler = make_scheduler()
    (request,) = add(scheduler, 5)
    assert scheduler.abort("a") is True
    assert request.status is RequestStatus.FINISHED
    assert_nothing_is_left(scheduler)
    assert scheduler.schedule() == SchedulerOutput((), 0, 0)


def test_abort_in_the_middle_of_the_queue_keeps_the_order_of_the_others():
    scheduler = make_scheduler()
    add(scheduler, 2, 3, 4)
    scheduler.abort("b")
    assert shares(step(scheduler)[0]) == {"a": 2, "c": 4}


@pytest.mark.parametrize("num_steps", [1, 2, 3, 5], ids=["mid-prompt", "prompt done", "decoding", "decoding on"])
def test_abort_of_a_running_request_frees_its_blocks_and_drops_its_row(num_steps):
    scheduler = make_scheduler(max_num_batched_tokens=4)
    (request,) = add(scheduler, 7)
    steps(scheduler, num_steps)
    assert scheduler.abort("a") is True
    assert request.status is RequestStatus.FINISHED
    assert free_blocks(scheduler) == 64
    assert scheduler.schedule() == SchedulerOutput((), 0, 0, dropped_request_ids=("a",))
    assert_nothing_is_left(scheduler)


def test_abort_of_a_preempted_request_drops_no_second_row():
    scheduler = make_scheduler(num_blocks=4, block_size=4)
    add(scheduler, 4, 4)
    steps(scheduler, 6)
    assert scheduler.num_waiting == 1
    assert scheduler.abort("b") is True
    output, _ = step(scheduler)
    assert (list(shares(output)), output.dropped_request_ids) == (["a"], ())


def test_output_of_a_request_aborted_in_flight_is_discarded():
    scheduler = make_scheduler()
    a, _ = add(scheduler, 3, 3)
    output = scheduler.schedule()
    assert scheduler.abort("a") is True
    assert [o.request_id for o in scheduler.update_from_output(output, run_model(output))] == ["b"]
    assert a.output_token_ids == []
    output, _ = step(scheduler)
    assert (list(shares(output)), output.dropped_request_ids) == (["b"], ("a",))


def test_id_used_again_while_its_former_owner_is_in_flight_is_not_confused():
    scheduler = make_scheduler()
    old, _ = add(scheduler, 3, 1)
    first = scheduler.schedule()
    scheduler.abort("a")
    new = make_request("a", 6)
    scheduler.add(new)
    second = scheduler.schedule()
    assert (shares(second), second.dropped_request_ids) == ({"b": 1, "a": 6}, ("a",))
    assert [o.request_id for o in scheduler.update_from_output(first, run_model(first, a=30))] == ["b"]
    assert (old.output_token_ids, new.output_token_ids, new.num_inflight_tokens) == ([], [], 6)
    outputs = scheduler.update_from_output(second, run_model(second, a=31))
    assert outputs == [EngineCoreOutput("b", (7,)), EngineCoreOutput("a", (31,))]
    assert (new.output_token_ids, new.num_computed_tokens) == ([31], 6)


def test_abort_of_unknown_finished_and_aborted_requests_is_harmless():
    scheduler = make_scheduler()
    add(scheduler, 3, 3, max_tokens=2)
    step(scheduler, a=EOS)
    assert scheduler.abort("never seen") is False
    assert scheduler.abort("a") is False
    assert scheduler.abort("b") is True
    assert scheduler.abort("b") is False
    assert scheduler.schedule().dropped_request_ids == ("a", "b")
    assert_nothing_is_left(scheduler)


def test_rows_of_an_idle_engine_are_dropped_by_the_next_step_before_their_ids_return():
    scheduler = make_scheduler(max_num_seqs=2)
    add(scheduler, 3, 3, max_tokens=1)
    step(scheduler)
    assert not scheduler.has_unfinished_requests()
    scheduler.add(make_request("b", 2))
    output, _ = step(scheduler)
    assert (output.dropped_request_ids, shares(output)) == (("a", "b"), {"b": 2})
    assert output.scheduled[0].new_request is not None
    assert step(scheduler)[0].dropped_request_ids == ()


# Refusing


def test_prompt_that_leaves_no_room_in_max_model_len_is_refused_with_both_numbers():
    scheduler = make_scheduler(max_model_len=10)
    with pytest.raises(RequestError, match=r"10 tokens and max_model_len=10 .* shorten it to 9 tokens"):
        add(scheduler, 10)
    assert_nothing_is_left(scheduler)
    add(scheduler, 9)
    assert step(scheduler)[1] == [EngineCoreOutput("a", (7,), FinishReason.LENGTH)]


def test_request_that_fills_the_cache_exactly_runs_because_its_last_token_is_never_stored():
    scheduler = make_scheduler(num_blocks=4, block_size=4)
    (request,) = add(scheduler, 10, max_tokens=7)  # 17 tokens, 16 slots
    steps(scheduler, 7)
    assert (request.status, len(request.output_token_ids)) == (RequestStatus.FINISHED, 7)
    assert scheduler.num_preemptions == 0


def test_request_that_could_have_one_token_is_told_so():
    scheduler = make_scheduler(num_blocks=1, block_size=4)
    with pytest.raises(RequestError, match=r"cache has 1: lower max_tokens to 1, or"):
        add(scheduler, 4, max_tokens=2)


def test_request_that_can_never_fit_is_refused_with_both_numbers():
    scheduler = make_scheduler(num_blocks=4, block_size=4)
    with pytest.raises(RequestError, match=r"needs 5 KV cache blocks .* cache has 4: lower max_tokens to 7"):
        add(scheduler, 10, max_tokens=8)
    with pytest.raises(RequestError, match=r"needs 5 KV cache blocks .* cache has 4: shorten the prompt to at most 16"):
        add(scheduler, 17, max_tokens=1)
    assert_nothing_is_left(scheduler)
    add(scheduler, 16, max_tokens=1)
    assert step(scheduler)[1] == [EngineCoreOutput("a", (7,), FinishReason.LENGTH)]


def test_max_model_len_counts_before_the_cache_does():
    scheduler = make_scheduler(num_blocks=4, block_size=4, max_model_len=17)
    (request,) = add(scheduler, 10, max_tokens=1000)
    assert (request.max_tokens, request.params.max_tokens) == (7, 1000)
    steps(scheduler, 7)
    assert request.status is RequestStatus.FINISHED


@pytest.mark.parametrize(("num_blocks", "max_model_len", "expected"), [(4, 64, 17), (4, 17, 17), (4, 16, 16)])
def test_max_request_tokens_is_the_longest_request_that_add_takes(num_blocks, max_model_len, expected):
    scheduler = make_scheduler(num_blocks=num_blocks, block_size=4, max_model_len=max_model_len)
    assert scheduler.max_request_tokens == expected
    (request,) = add(scheduler, 1, max_tokens=expected - 1)
    steps(scheduler, expected - 1)
    assert request.num_tokens == expected


def test_id_in_use_is_refused_and_its_owner_goes_on():
    scheduler = make_scheduler()
    (request,) = add(scheduler, 3)
    with pytest.raises(RequestError, match="'a' is in use"):
        scheduler.add(make_request("a", 4))
    step(scheduler)
    with pytest.raises(RequestError, match="'a' is in use"):
        scheduler.add(make_request("a", 4))
    step(scheduler)
    assert request.output_token_ids == [7, 7]


# Steps in flight


def test_the_next_step_goes_on_with_the_token_that_is_still_in_flight():
    scheduler = make_scheduler(max_num_batched_tokens=4)
    a, b = add(scheduler, 2, 6)
    first = scheduler.schedule()
    assert shares(first) == {"a": 2, "b": 2}
    second = scheduler.schedule()
    decode = ScheduledRequest("a", (), 2, 1, (), True)
    assert second.scheduled[0] == decode
    assert (row_of(second, "b").new_token_ids, row_of(second, "b").samples) == ((202, 203, 204), False)
    assert [(r.num_inflight_tokens, r.num_inflight_samples) for r in (a, b)] == [(3, 2), (5, 0)]
    assert scheduler.update_from_output(first, run_model(first, a=30)) == [EngineCoreOutput("a", (30,))]
    assert [(r.num_inflight_tokens, r.num_inflight_samples) for r in (a, b)] == [(1, 1), (3, 0)]
    assert shares(scheduler.schedule()) == {"a": 1, "b": 1}
    assert scheduler.update_from_output(second, run_model(second, a=31)) == [EngineCoreOutput("a", (31,))]
    assert a.output_token_ids == [30, 31]


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_nothing_is_scheduled_past_max_tokens(max_tokens):
    scheduler = make_scheduler()
    (request,) = add(scheduler, 3, max_tokens=max_tokens)
    plans = [scheduler.schedule() for _ in range(max_tokens)]
    assert all(shares(plan) for plan in plans)
    assert scheduler.schedule() == SchedulerOutput((), 0, 0), "the last token is in flight"
    for plan in plans:
        (output,) = scheduler.update_from_output(plan, run_model(plan))
    assert output.finish_reason is FinishReason.LENGTH and len(request.output_token_ids) == max_tokens
    scheduler.schedule()
    assert_nothing_is_left(scheduler)


def test_nothing_is_scheduled_past_max_model_len():
    scheduler = make_scheduler(max_model_len=5)
    add(scheduler, 3, max_tokens=100)
    assert [len(scheduler.schedule().scheduled) for _ in range(3)] == [1, 1, 0]


@pytest.mark.parametrize("last", [EOS, -1], ids=["EOS", "masks left nothing"])
def test_what_a_step_samples_after_the_end_is_discarded(last):
    scheduler = make_scheduler()
    a, _ = add(scheduler, 3, 3)
    first, second = scheduler.schedule(), scheduler.schedule()
    assert shares(second) == {"a": 1, "b": 1}
    ended, _ = scheduler.update_from_output(first, run_model(first, a=last))
    assert ended.finish_reason is (FinishReason.STOP if last == EOS else FinishReason.ERROR)
    assert free_blocks(scheduler) == 64 - 1, "its blocks are free while the second step is on its way"
    third = scheduler.schedule()
    assert (shares(third), third.dropped_request_ids) == ({"b": 1}, ("a",))
    assert [o.request_id for o in scheduler.update_from_output(second, run_model(second))] == ["b"]
    assert a.output_token_ids == ([EOS] if last == EOS else [])


def test_a_request_whose_functions_want_the_last_token_is_not_scheduled_while_it_is_in_flight():
    scheduler = make_scheduler(max_num_batched_tokens=4)
    add(scheduler, 6, logits_processors=[lambda ids, logits: logits])
    scheduler.add(make_request("b", 1))
    first = scheduler.schedule()
    second = scheduler.schedule()
    assert (shares(first), shares(second)) == ({"a": 4}, {"a": 2, "b": 1}), "chunks of its prompt wait for nothing"
    third = scheduler.schedule()
    assert shares(third) == {"b": 1}
    for plan in (first, second):
        scheduler.update_from_output(plan, run_model(plan))
    assert shares(scheduler.schedule()) == {"a": 1, "b": 1}


def test_output_of_a_request_preempted_in_flight_is_discarded_and_made_again():
    scheduler = make_scheduler(num_blocks=4, block_size=4)
    _, b = add(scheduler, 4, 4, max_tokens=8)
    inflight = scheduler.schedule()
    for _ in range(4):
        output = scheduler.schedule()
        scheduler.update_from_output(inflight, run_model(inflight))
        inflight = output
    assert (shares(inflight), free_blocks(scheduler)) == ({"a": 1, "b": 1}, 0)
    output = scheduler.schedule()  # position 8 of "a"
    assert (shares(output), output.dropped_request_ids) == ({"a": 1}, ("b",))
    assert b.num_inflight_samples == 0
    outputs = scheduler.update_from_output(inflight, run_model(inflight, b=30))
    assert [o.request_id for o in outputs] == ["a"] and b.output_token_ids == [7] * 4
    scheduler.update_from_output(output, run_model(output))
    while scheduler.num_waiting:
        output, _ = step(scheduler, b=31)
    assert row_of(output, "b").new_token_ids == (200, 201, 202, 203, 7, 7, 7, 7)
    assert b.output_token_ids == [7, 7, 7, 7, 31]


def test_what_was_sampled_before_a_preemption_does_not_count_though_the_request_runs_again():
    scheduler = make_scheduler()
    (a,) = add(scheduler, 3)
    stale = scheduler.schedule()
    a_again = scheduler._running.popitem()[1]
    scheduler._preempt(a_again)
    again = scheduler.schedule()
    assert (shares(again), again.dropped_request_ids) == ({"a": 3}, ("a",))
    assert scheduler.update_from_output(stale, run_model(stale, a=30)) == []
    assert (a.output_token_ids, a.num_computed_tokens, a.num_inflight_tokens) == ([], 0, 3)
    assert scheduler.update_from_output(again, run_model(again, a=31)) == [EngineCoreOutput("a", (31,))]


def test_a_failed_step_gives_up_all_that_is_in_flight_and_asks_for_its_prompt_logprobs_again():
    scheduler = make_scheduler(max_num_batched_tokens=3)
    (request,) = add(scheduler, 6, prompt_logprobs=0)
    first = scheduler.schedule()
    second = scheduler.schedule()
    assert (first.scheduled[0].prompt_targets, second.scheduled[0].prompt_targets) == ((101, 102, 103), (104, 105))
    scheduler.update_from_output(first, run_model(first))
    third = scheduler.schedule()
    assert (shares(third), request.num_inflight_samples) == ({"a": 1}, 2)
    scheduler.preempt_all()
    assert (request.num_inflight_tokens, request.num_inflight_samples, request.num_prompt_logprobs) == (0, 0, 3)
    targets = [step(scheduler)[0].scheduled[0].prompt_targets for _ in range(2)]
    assert targets == [(), (104, 105)], "those of the first step have come"


def test_an_output_tells_what_was_cached_even_when_masks_left_nothing():
    scheduler = make_scheduler(enable_prefix_caching=True)
    for request_id in ("a1", "a2"):
        scheduler.add(make_request(request_id, 6, max_tokens=1))
        _, outputs = step(scheduler, a2=-1)
    assert outputs == [EngineCoreOutput("a2", (), FinishReason.ERROR, num_cached_tokens=5)]


# What sampling needs to know


def test_the_worker_is_told_all_of_a_new_request():
    scheduler = make_scheduler()
    params = SamplingParams(max_tokens=4, stop_token_ids=(9,), ignore_eos=True)
    request = Request("a", (5, 6), params, seed=3, sample_index=2, bad_words_token_ids=((4, 5), (6,)))
    scheduler.add(request)
    row = NewRequestData(
        params=params,
        seed=3,
        num_prompt_tokens=2,
        sample_index=2,
        stop_token_ids=(9,),
        bad_words_token_ids=((4, 5), (6,)),
        known_token_ids=(5, 6),
    )
    assert scheduler.schedule().scheduled == (ScheduledRequest("a", (5, 6), 0, 2, (0,), True, row),)


@pytest.mark.parametrize("penalty", [{"repetition_penalty": 1.2}, {"presence_penalty": 1.0}, {}])
def test_known_tokens_are_all_of_prompt_and_output_after_a_preemption_if_sampling_needs_them(penalty):
    """The first step after it computes a chunk of them only."""
    scheduler = make_scheduler(num_blocks=4, block_size=4, max_num_batched_tokens=8)
    add(scheduler, 4, 4, max_tokens=8, **penalty)
    known = [row.new_request.known_token_ids for row in step(scheduler)[0].scheduled]
    assert known == ([(100, 101, 102, 103), (200, 201, 202, 203)] if penalty else [(), ()])
    steps(scheduler, 7)
    (resumed,) = step(scheduler)[0].scheduled
    assert (resumed.request_id, resumed.num_new_tokens, resumed.samples) == ("b", 8, False)
    assert resumed.new_request.known_token_ids == ((200, 201, 202, 203, 7, 7, 7, 7, 7) if penalty else ())


def test_a_request_with_nothing_left_to_choose_ends_alone_and_gives_everything_back():
    scheduler = make_scheduler()
    _, b, _ = add(scheduler, 3, 3, 3, max_tokens=2)
    _, outputs = step(scheduler, b=-1)
    error = EngineCoreOutput("b", (), FinishReason.ERROR)
    assert outputs == [EngineCoreOutput("a", (7,)), error, EngineCoreOutput("c", (7,))]
    assert (b.status, b.output_token_ids) == (RequestStatus.FINISHED, [])
    output, outputs = step(scheduler)
    assert output.dropped_request_ids == ("b",)
    assert [o.finish_reason for o in outputs] == [FinishReason.LENGTH] * 2
    scheduler.schedule()
    assert_nothing_is_left(scheduler)


def test_a_stop_token_before_min_tokens_does_not_end_the_request():
    """The worker masks it; a custom processor may bring it back."""
    scheduler = make_scheduler()
    add(scheduler, 3, max_tokens=9, min_tokens=2)
    reasons = [step(scheduler, a=EOS)[1][0].finish_reason for _ in range(3)]
    assert reasons == [None, None, FinishReason.STOP]


# Logprobs


def test_logprobs_go_to_the_requests_that_asked():
    scheduler = make_scheduler()
    requests = [*add(scheduler, 3, 3, max_tokens=2), make_request("c", 3, max_tokens=2, logprobs=0)]
    scheduler.add(requests[-1])
    for _ in range(2):
        _, outputs = step_with_logprobs(scheduler, requests, a=30, b=31, c=32)
        assert [(o.request_id, o.logprobs) for o in outputs] == [("a", ()), ("b", ()), ("c", (entry(32),))]
        assert all(o.prompt_logprobs == () for o in outputs)
    assert outputs[-1].finish_reason is FinishReason.LENGTH


def test_prompt_logprobs_come_with_their_chunks_in_the_order_of_the_step():
    scheduler = make_scheduler(max_num_batched_tokens=4)
    requests = [make_request("a", 9, prompt_logprobs=0), make_request("b", 3, prompt_logprobs=1, max_tokens=1)]
    for request in requests:
        scheduler.add(request)
    _, outputs = step_with_logprobs(scheduler, requests)
    assert outputs == [EngineCoreOutput("a", (), prompt_logprobs=tuple(map(entry, (101, 102, 103, 104))))]
    _, outputs = step_with_logprobs(scheduler, requests)
    assert outputs == [EngineCoreOutput("a", (), prompt_logprobs=tuple(map(entry, (105, 106, 107, 108))))]
    output, outputs = step_with_logprobs(scheduler, requests)
    assert shares(output) == {"a": 1, "b": 3}
    of_b = tuple(map(entry, (201, 202)))
    assert outputs == [EngineCoreOutput("a", (7,)), EngineCoreOutput("b", (7,), FinishReason.LENGTH, None, (), of_b)]


def test_a_prompt_chunk_with_logprobs_keeps_its_place_before_sampled_tokens():
    scheduler = make_scheduler(max_num_batched_tokens=6)
    requests = [make_request("a", 8, prompt_logprobs=0, max_tokens=2), make_request("b", 4)]
    for request in requests:
        scheduler.add(request)
    step_with_logprobs(scheduler, requests)  # a: 6
    output, outputs = step_with_logprobs(scheduler, requests)
    assert shares(output) == {"a": 2, "b": 4}
    requests.append(make_request("c", 9, prompt_logprobs=0))
    scheduler.add(requests[-1])
    output, outputs = step_with_logprobs(scheduler, requests)
    assert shares(output) == {"a": 1, "b": 1, "c": 4}
    assert [o.request_id for o in outputs] == ["a", "b", "c"]
    requests += [make_request("d", 5, prompt_logprobs=0), make_request("e", 1)]
    for request in requests[-2:]:
        scheduler.add(request)
    output, outputs = step_with_logprobs(scheduler, requests)
    assert [row.request_id for row in output.scheduled] == [o.request_id for o in outputs] == ["b", "c"]
    output, outputs = step_with_logprobs(scheduler, requests)
    assert shares(output) == {"b": 1, "c": 1, "d": 4}
    output, outputs = step_with_logprobs(scheduler, requests)
    assert [row.request_id for row in output.scheduled] == [o.request_id for o in outputs] == ["b", "c", "d", "e"]


def test_prompt_logprobs_of_a_request_preempted_in_flight_arrive_and_are_not_asked_again():
    """Their values don't depend on what becomes of the request; and ``take_prompt_targets`` hands each out once."""
    scheduler = make_scheduler(num_blocks=17, block_size=2, max_num_batched_tokens=2)
    requests = [make_request("a", 2, max_tokens=20), make_request("b", 25, max_tokens=1, prompt_logprobs=0)]
    for request in requests:
        scheduler.add(request)
    inflight, received, lost = scheduler.schedule(), [], 0
    while scheduler.has_unfinished_requests():
        following = scheduler.schedule()
        lost += following.dropped_request_ids == ("b",) and "b" in shares(inflight)
        for output in scheduler.update_from_output(inflight, run_model_with_logprobs(inflight, requests)):
            received += [e.token_ids[0] for e in output.prompt_logprobs if output.request_id == "b"]
        inflight = following
    assert (requests[1].num_preemptions, lost) == (1, 1)
    assert received == list(range(201, 225))


def test_logprobs_of_a_token_that_is_discarded_are_discarded_with_it():
    scheduler = make_scheduler()
    request = make_request("a", 3, logprobs=0, prompt_logprobs=0)
    scheduler.add(request)
    output = scheduler.schedule()
    scheduler._preempt(scheduler._running.popitem()[1])
    prompt_logprobs = (entry(101), entry(102))
    outputs = scheduler.update_from_output(output, run_model_with_logprobs(output, [request]))
    assert outputs == [EngineCoreOutput("a", (), logprobs=(), prompt_logprobs=prompt_logprobs)]


def test_prompt_logprobs_of_an_aborted_request_are_discarded():
    scheduler = make_scheduler(max_num_batched_tokens=4)
    requests = [make_request("a", 9, prompt_logprobs=0)]
    scheduler.add(requests[0])
    output = scheduler.schedule()
    scheduler.abort("a")
    assert scheduler.update_from_output(output, run_model_with_logprobs(output, requests)) == []


# Our own faults


def test_steps_that_come_back_out_of_order_are_our_own_fault():
    scheduler = make_scheduler(max_num_batched_tokens=2)
    add(scheduler, 4)
    scheduler.schedule()
    second = scheduler.schedule()
    with pytest.raises(AssertionError, match="in the order of schedule"):
        scheduler.update_from_output(second, run_model(second))


@pytest.mark.parametrize("token_ids", [(), ((7,), (7,)), ((),), ((7, 7),)])
def test_output_of_another_shape_than_the_step_is_our_own_fault(token_ids):
    scheduler = make_scheduler()
    add(scheduler, 4)
    output = scheduler.schedule()
    with pytest.raises((AssertionError, ValueError)):
        scheduler.update_from_output(output, ModelRunnerOutput(token_ids))
