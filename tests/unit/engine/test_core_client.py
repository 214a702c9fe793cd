"""What a front end may rely on: an error in the books is the end, one on the device and Ctrl-C are not."""

import signal
import threading
import time

import pytest

import tiny_models
from engine_runs import greedy, make_llm
from pico_vllm import EngineConfig
from pico_vllm.engine.core_client import ProcessCoreClient
from pico_vllm.engine.engine_core import EngineCore
from pico_vllm.errors import EngineDeadError
from pico_vllm.request import Request

PROMPT = [10, 20, 30]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("llama")
    tiny_models.save_tiny_model(tiny_models.MODELS["llama-gqa3-d64-tied"], directory)
    return directory


@pytest.fixture
def core(checkpoint):
    return make_llm(checkpoint).engine.core


@pytest.fixture
def python_handles_ctrl_c():
    """SIGINT as a script has it; a runner of tests in the background may ignore it."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


def add(core, request_id="r", max_tokens=4):
    core.add_request(Request(request_id, PROMPT, greedy(max_tokens)))


def run(core):
    token_ids = []
    while core.has_unfinished_requests():
        token_ids += [token_id for output in core.step() for token_id in output.new_token_ids]
    return token_ids


def during_the_next_execute(monkeypatch, core, act):
    original = core.executor.execute

    def execute(*args):
        monkeypatch.undo()
        act()
        return original(*args)

    monkeypatch.setattr(core.executor, "execute", execute)


def during_the_next_update(monkeypatch, core, act):
    def update_from_output(*args):
        monkeypatch.undo()
        act()

    monkeypatch.setattr(core.scheduler, "update_from_output", update_from_output)


def fail():
    raise ValueError("the device is on fire")


def every_call(core):
    return [
        lambda: core.add_request(Request("other", PROMPT, greedy(2))),
        lambda: core.abort("r"),
        core.has_unfinished_requests,
        core.step,
    ]


def test_the_core_of_an_engine_is_in_its_process_unless_asked_otherwise(core):
    assert isinstance(core, EngineCore)


def test_an_error_on_the_device_stays_what_it_is_and_costs_no_request(core, monkeypatch):
    add(core)
    expected = run(core)
    add(core)
    during_the_next_execute(monkeypatch, core, fail)
    with pytest.raises(ValueError, match="on fire"):
        core.step()
    assert run(core) == expected


def test_an_error_in_the_books_is_the_end_and_every_later_call_says_why(core, monkeypatch):
    add(core)
    core.step()
    during_the_next_update(monkeypatch, core, fail)
    cause = "the engine core has failed in a step: ValueError: the device is on fire"
    with pytest.raises(EngineDeadError, match=cause) as death:
        core.step()
    assert isinstance(death.value.__cause__, ValueError)
    for call in every_call(core):
        with pytest.raises(EngineDeadError, match=cause):
            call()


def test_after_a_shutdown_every_call_says_so_and_another_shutdown_does_nothing(core):
    core.shutdown()
    core.shutdown()
    for call in every_call(core):
        with pytest.raises(EngineDeadError, match="has been shut down"):
            call()


def test_a_shutdown_does_not_hide_an_earlier_cause(core, monkeypatch):
    add(core)
    during_the_next_update(monkeypatch, core, fail)
    with pytest.raises(EngineDeadError):
        core.step()
    core.shutdown()
    with pytest.raises(EngineDeadError, match="on fire"):
        core.step()


def test_ctrl_c_in_a_step_comes_after_it_and_the_engine_goes_on(core, monkeypatch, python_handles_ctrl_c):
    add(core)
    expected = run(core)
    assert len(expected) == 4

    add(core, "interrupted", 50)
    core.step()
    during_the_next_execute(monkeypatch, core, lambda: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        core.step()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert core.abort("interrupted")
    assert core.kv_cache_manager.num_free_blocks == core.kv_cache_manager.num_blocks
    add(core)
    assert run(core) == expected


def test_an_applications_own_ctrl_c_handler_is_left_alone(core, monkeypatch, python_handles_ctrl_c):
    calls = []
    handler = lambda signum, frame: calls.append(signum)  # noqa: E731
    signal.signal(signal.SIGINT, handler)
    add(core)
    during_the_next_execute(monkeypatch, core, lambda: signal.raise_signal(signal.SIGINT))
    core.step()
    assert calls == [signal.SIGINT]
    assert signal.getsignal(signal.SIGINT) is handler


def test_an_exception_of_a_signal_handler_stays_what_it_is(core, monkeypatch):
    add(core)
    expected = run(core)

    def give_up():
        raise SystemExit(3)

    add(core)
    during_the_next_execute(monkeypatch, core, give_up)
    with pytest.raises(SystemExit):
        core.step()
    assert run(core) == expected
    add(core)
    during_the_next_update(monkeypatch, core, give_up)
    with pytest.raises(SystemExit):
        core.step()
    with pytest.raises(EngineDeadError, match="SystemExit: 3"):
        core.step()


def test_a_step_on_another_thread_touches_no_signal_handler(core, monkeypatch, python_handles_ctrl_c):
    add(core, max_tokens=2)
    seen, tokens = [], []
    during_the_next_execute(monkeypatch, core, lambda: seen.append(signal.getsignal(signal.SIGINT)))
    thread = threading.Thread(target=lambda: tokens.extend(run(core)))
    thread.start()
    thread.join()
    assert len(tokens) == 2
    assert seen == [signal.default_int_handler]


@pytest.mark.multiprocess
def test_a_process_that_ends_before_it_is_ready_is_an_error_at_once(checkpoint, monkeypatch):
    monkeypatch.setattr("sys.executable", "/bin/false")
    start = time.monotonic()
    with pytest.raises(EngineDeadError, match=r"exit code 1 before it was ready"):
        ProcessCoreClient(EngineConfig(), checkpoint)
    assert time.monotonic() - start < 20
