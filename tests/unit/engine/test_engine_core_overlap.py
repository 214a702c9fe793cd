"""EngineCore with overlap: the order of its calls, what an error costs, what is in flight, and the clock."""

import pytest
import torch

import tiny_models
from engine_runs import greedy, make_llm
from pico_vllm.engine import engine_core
from pico_vllm.engine.stats import EngineStats, StepTimes
from pico_vllm.errors import DeviceOutOfMemoryError
from pico_vllm.request import FinishReason, Request
from pico_vllm.sampling_params import SamplingParams, StructuredOutputsParams
from pico_vllm.worker import device_time

PROMPT = [10, 20, 30, 40, 50]
DIGITS = StructuredOutputsParams(regex="[0-9]{4}")
LOOPS = {"plain": False, "overlap": True}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("llama")
    tiny_models.save_tiny_model(tiny_models.MODELS["llama-gqa3-d64-tied"], directory)
    return directory


@pytest.fixture
def core(checkpoint):
    return make_llm(checkpoint, async_scheduling=True).engine.core


@pytest.fixture(params=LOOPS)
def any_core(checkpoint, request):
    return make_llm(checkpoint, async_scheduling=LOOPS[request.param]).engine.core


def add(core, request_id, params, prompt=PROMPT, eos=()):
    core.add_request(Request(request_id, prompt, params, eos_token_ids=eos))


def run(core, ids=None):
    """Steps to the end; {request id: token ids}, {request id: finish reason}."""
    tokens, ends = {} if ids is None else ids, {}
    while core.has_unfinished_requests():
        collect(core.step(), tokens, ends)
    return tokens, ends


def collect(outputs, tokens, ends):
    for output in outputs:
        assert output.request_id not in ends, "nothing comes after the end"
        tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
        if output.finish_reason is not None:
            ends[output.request_id] = output.finish_reason


def recorded(core, monkeypatch):
    """Notes each call of the executor with the number of its step; a step that runs nothing has none."""
    calls, numbers = [], {}

    def watch(name, original):
        def call(step, *args):
            result = original(step, *args)
            if name == "start":
                if not step.scheduled:
                    return result
                numbers[id(result)] = len(numbers), result  # kept alive: the id stays its own
                step = result
            if id(step) in numbers:
                calls.append(f"{name} {numbers[id(step)][0]}")
            return result

        return call

    for name in ("start", "sample", "finish"):
        monkeypatch.setattr(core.executor, name, watch(name, getattr(core.executor, name)))
    schedule = core.scheduler.schedule
    monkeypatch.setattr(core.scheduler, "schedule", lambda: calls.append("schedule") or schedule())
    update = core.scheduler.update_from_output
    monkeypatch.setattr(core.scheduler, "update_from_output", lambda *args: calls.append("update") or update(*args))
    return calls


# ------------------------------------------------------------------------------------------------------- the order
def test_the_next_step_is_launched_before_the_host_waits_for_the_one_before(core, monkeypatch):
    calls = recorded(core, monkeypatch)
    add(core, "r", greedy(3))
    tokens = [[i for output in core.step() for i in output.new_token_ids] for _ in range(4)]
    assert [len(ids) for ids in tokens] == [0, 1, 1, 1]
    assert calls == [
        "schedule", "start 0", "sample 0",
        "schedule", "start 1", "sample 1", "finish 0", "update",
        "schedule", "start 2", "sample 2", "finish 1", "update",
        "schedule", "finish 2", "update",
    ]  # fmt: skip
    assert not core.has_unfinished_requests()


def test_a_grammars_mask_waits_for_the_token_before_it_but_the_forward_pass_does_not(core, monkeypatch):
    calls = recorded(core, monkeypatch)
    masks = core.structured_output.masks
    monkeypatch.setattr(core.structured_output, "masks", lambda plan: calls.append("masks") or masks(plan))
    add(core, "r", greedy(2, structured_outputs=DIGITS))
    for _ in range(3):
        core.step()
    assert calls == [
        "schedule", "start 0", "masks", "sample 0",
        "schedule", "start 1", "finish 0", "update", "masks", "sample 1",
        "schedule", "finish 1", "update",
    ]  # fmt: skip


def test_rows_are_dropped_in_the_step_that_names_them(core):
    rows = core.executor.runner
    add(core, "a", greedy(4))
    add(core, "b", greedy(1))
    core.step()
    core.step()
    assert rows.num_rows == 2, "b has ended just now"
    core.step()
    assert rows.num_rows == 1
    core.abort("a")
    assert core.step() == [] and rows.num_rows == 0


def test_an_overrun_stays_in_flight_and_the_next_step_takes_it_in(core):
    """The EOS of step 0 ends all requests while step 1 is in flight with them."""
    add(core, "r", SamplingParams(temperature=0.0, max_tokens=9, logit_bias={1: 100}), eos=(1,))
    core.step()
    (output,) = core.step()
    assert (output.new_token_ids, output.finish_reason) == ((1,), FinishReason.STOP)
    assert not core.has_unfinished_requests() and core._inflight is not None
    assert core.kv_cache_manager.num_free_blocks == core.kv_cache_manager.num_blocks
    add(core, "r", greedy(4))
    tokens, _ = run(core)
    assert core.executor.runner.num_rows == 1 and core._inflight is None
    add(core, "again", greedy(4))
    assert run(core)[0]["again"] == tokens["r"] and len(tokens["r"]) == 4


# ---------------------------------------------------------------------------------------------------------- errors
class Boom(Exception):
    pass


def fail_at(core, monkeypatch, name, number, error):
    """The call of this number raises, when it has done what it does."""
    original, calls = getattr(core.executor, name), iter(range(1000))

    def call(*args):
        result = original(*args)
        if next(calls) == number:
            raise error
        return result

    monkeypatch.setattr(core.executor, name, call)


def add_three(core):
    add(core, "a", greedy(8, logprobs=0, prompt_logprobs=0))
    add(core, "b", SamplingParams(temperature=1.0, seed=3, max_tokens=6, presence_penalty=1.0), prompt=[9] * 11)
    add(core, "c", greedy(9, structured_outputs=DIGITS), prompt=[5])


@pytest.fixture(scope="module")
def expected(checkpoint):
    core = make_llm(checkpoint).engine.core
    add_three(core)
    return run(core)


@pytest.mark.parametrize("error", [Boom, KeyboardInterrupt])
@pytest.mark.parametrize("name", ["start", "sample", "finish"])
@pytest.mark.parametrize("number", [0, 1, 2, 4])
def test_an_error_in_any_part_of_a_step_costs_no_token(core, expected, monkeypatch, name, number, error):
    """What was taken into the books before it comes with the next step."""
    fail_at(core, monkeypatch, name, number, error("once"))
    add_three(core)
    tokens, ends, num_errors, prompt_logprobs = {}, {}, 0, 0
    while core.has_unfinished_requests():
        try:
            outputs = core.step()
        except error:
            num_errors += 1
            assert core._inflight is None
            continue
        collect(outputs, tokens, ends)
        prompt_logprobs += sum(len(output.prompt_logprobs) for output in outputs)
    assert (num_errors, (tokens, ends)) == (1, expected)
    assert prompt_logprobs == len(PROMPT) - 1
    assert core.kv_cache_manager.num_free_blocks == core.kv_cache_manager.num_blocks


def test_an_abort_takes_back_what_was_not_delivered(core, monkeypatch):
    fail_at(core, monkeypatch, "sample", 1, Boom())
    add(core, "r", greedy(2, structured_outputs=DIGITS))
    core.step()
    with pytest.raises(Boom):
        core.step()
    assert [output.request_id for output in core._undelivered] == ["r"]
    assert core.abort("r")
    assert not core.has_unfinished_requests() and core.step() == []


def test_a_last_token_that_was_not_delivered_keeps_the_engine_going(core, monkeypatch):
    """The request has ended in the books; whoever asks for it has not seen that yet."""
    fail_at(core, monkeypatch, "sample", 1, Boom())
    add(core, "a", greedy(1))
    core.step()
    add(core, "b", greedy(3, structured_outputs=DIGITS))
    with pytest.raises(Boom):
        core.step()
    core.abort("b")
    assert core.has_unfinished_requests()
    (output,) = core.step()
    assert (output.request_id, output.finish_reason) == ("a", FinishReason.LENGTH)


# ---------------------------------------------------------------------------------------------------- out of memory
@pytest.mark.parametrize("number", [0, 1, 3])
@pytest.mark.parametrize("part", ["hidden_rows", "lm_head"])
def test_out_of_memory_ends_the_largest_request_and_no_other(any_core, expected, monkeypatch, caplog, part, number):
    """Torch's error, raised in the middle of a step; the prompt of "large" is there at every step, in chunks."""
    core = any_core
    core.scheduler._max_num_batched_tokens = 60
    model = core.executor.runner._model
    owner, name = (model, part) if part == "hidden_rows" else (model.lm_head, "own")
    original, calls = getattr(owner, name), iter(range(1000))

    def lacks_memory(*args):
        if next(calls) == number:
            raise torch.OutOfMemoryError("tried to allocate 3 GiB")
        return original(*args)

    monkeypatch.setattr(owner, name, lacks_memory)
    add_three(core)
    add(core, "large", greedy(4), prompt=[7] * 200)
    tokens, ends = run(core)
    assert ends.pop("large") is FinishReason.ERROR and tokens.pop("large") == []
    assert (tokens, ends) == expected
    (record,) = [r for r in caplog.records if r.levelname == "WARNING"]
    words = ("request large", "max_num_batched_tokens", "tried to allocate 3 GiB", "tokens in 4 requests")
    assert all(word in record.getMessage() for word in words)
    assert core.structured_output.num_matchers == 0
    assert core.kv_cache_manager.num_free_blocks == core.kv_cache_manager.num_blocks


def test_of_equals_the_newest_is_ended(any_core, monkeypatch):
    fail_at(any_core, monkeypatch, "start" if any_core.overlaps else "execute", 1, DeviceOutOfMemoryError("no"))
    for request_id in "abc":
        add(any_core, request_id, greedy(4))
    _, ends = run(any_core)
    assert ends == {"a": FinishReason.LENGTH, "b": FinishReason.LENGTH, "c": FinishReason.ERROR}


def test_the_memory_error_holds_nothing_of_the_step(core, monkeypatch):
    """A traceback would keep the tensors of the failed step alive while the next one needs their memory."""
    runner = core.executor.runner

    def lacks_memory(*args):
        raise torch.OutOfMemoryError("no")

    monkeypatch.setattr(runner._model.lm_head, "own", lacks_memory)
    add(core, "r", greedy(2))
    with pytest.raises(DeviceOutOfMemoryError, match="no") as caught:
        core.executor.start(core.scheduler.schedule())
    assert caught.value.__context__ is None and caught.value.__cause__ is None


def test_out_of_memory_that_is_nobodys_is_raised(core, monkeypatch):
    add(core, "r", greedy(2))
    core.step()
    core.abort("r")
    fail_at(core, monkeypatch, "start", 0, DeviceOutOfMemoryError("no"))  # of a plan that only drops a row
    with pytest.raises(DeviceOutOfMemoryError):
        core.step()
    monkeypatch.undo()
    add(core, "r", greedy(2))
    assert len(run(core)[0]["r"]) == 2


# ------------------------------------------------------------------------------------------------------- the clock
@pytest.fixture
def ticking(monkeypatch):
    """Each look at the clock takes a second."""
    now = iter(range(10**6))
    for module in (engine_core, device_time):
        monkeypatch.setattr(module.time, "perf_counter", lambda: float(next(now)))


def run_beside_the_host(core, monkeypatch):
    """Times of the steps of a request of 4 tokens, as if the CPU computed beside the host."""
    monkeypatch.setattr(type(core.executor.runner), "computes_beside_the_host", True)
    add(core, "r", greedy(4))
    times = []
    while core.has_unfinished_requests():
        core.step()
        times.append(core.last_times)
    return times


def test_with_overlap_the_device_idles_before_the_first_step_only(core, monkeypatch, ticking):
    times = run_beside_the_host(core, monkeypatch)
    assert [t.num_steps for t in times] == [1, 1, 1, 1, 0]
    assert times[0].idle_s > 0 and times[0].wait_s == 0
    assert [t.idle_s for t in times[1:4]] == [0, 0, 0], "a step is in flight from one call to the next"
    assert [t.awaits_caller for t in times] == [False] * 4 + [True]
    assert times[4].idle_s > 0, "the last results are taken in with nothing in flight"
    assert all(t.wait_s > 0 for t in times[1:])


def test_in_the_plain_loop_the_device_idles_while_the_host_works(checkpoint, monkeypatch, ticking):
    core = make_llm(checkpoint).engine.core
    times = run_beside_the_host(core, monkeypatch)
    assert all(t.idle_s > t.schedule_s > 0 and t.awaits_caller for t in times) and len(times) == 4


@pytest.mark.parametrize("loop", LOOPS)
def test_phases_and_views_add_up(checkpoint, monkeypatch, ticking, loop):
    core = make_llm(checkpoint, async_scheduling=LOOPS[loop]).engine.core
    for t in run_beside_the_host(core, monkeypatch):
        assert t.schedule_s + t.launch_s + t.wait_s + t.update_s == pytest.approx(t.busy_s + t.idle_s)
        assert t.num_late_steps == 0


def test_a_cpu_is_idle_whenever_it_does_not_compute(core, ticking):
    add(core, "r", greedy(4))
    while core.has_unfinished_requests():
        core.step()
        assert core.last_times.awaits_caller and core.last_times.idle_s > 0


def test_late_steps_are_counted(core, monkeypatch):
    monkeypatch.setattr(core.executor.runner._ring, "previous_step_has_ended", lambda: True)
    add(core, "r", greedy(4))
    stats = EngineStats()
    while core.has_unfinished_requests():
        core.step()
        stats.add_step(core.last_times, output_s=0.0, total_s=0.0)
    assert (stats.num_late_steps, stats.num_steps) == (4, 4)


def test_overhead_is_the_share_in_which_the_device_waits():
    stats = EngineStats()
    assert stats.overhead == 0
    stats.add_step(StepTimes(busy_s=6.0, idle_s=1.0), output_s=5.0, total_s=12.0)
    assert stats.overhead == pytest.approx(1 / 7), "a step runs while the front end works"
    stats.add_step(StepTimes(busy_s=2.0, idle_s=1.0, awaits_caller=True), output_s=2.0, total_s=5.0)
    assert stats.overhead == pytest.approx(4 / 12)


def test_records_add_up_and_the_last_one_says_what_the_device_does():
    first = StepTimes(1, 2, 3, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10, False)
    total = first + StepTimes(10, 20, 30, 40.0, 50.0, 60.0, 70.0, 80.0, 90.0, 100, True)
    assert total == StepTimes(11, 22, 33, 44.0, 55.0, 66.0, 77.0, 88.0, 99.0, 110, True)
    assert (total + first).awaits_caller is False
