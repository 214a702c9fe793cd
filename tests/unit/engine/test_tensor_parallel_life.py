"""Ranks that fail, die or are left alone: the engine says who and why within seconds, and no process stays behind."""

import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import psutil
import pytest

import tiny_models
from child_processes import NOTICED_S, assert_end, is_running
from engine_runs import greedy, make_llm
from pico_vllm.distributed.communicator import RankLostError
from pico_vllm.errors import ConfigError, EngineDeadError, WeightLoadError
from pico_vllm.worker import followers
from pico_vllm.worker.followers import Followers
from pico_vllm.worker.rank_messages import RankChannel, Ready

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("one_thread")]

SCRIPT_S = 60.0
PROMPT = [5, 6, 7, 8]
OPTIONS = {"tensor_parallel_size": 2, "max_num_seqs": 4, "num_gpu_blocks_override": 64}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("llama")
    tiny_models.save_tiny_model(tiny_models.MODELS["llama-biases-llama3-rope"], directory)
    return directory


@pytest.fixture(scope="module")
def expected(checkpoint):
    return make_llm(checkpoint).generate(PROMPT, greedy(5))[0].outputs[0].token_ids


@pytest.fixture(autouse=True)
def nothing_stays(tmp_path, monkeypatch):
    """Neither processes nor files."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    before = children()
    yield
    gc.collect()
    deadline = time.monotonic() + NOTICED_S
    while (left := children() - before) or list((tmp_path / "tmp").iterdir()):
        assert time.monotonic() < deadline, f"left behind: processes {left}, {list((tmp_path / 'tmp').iterdir())}"
        time.sleep(0.02)


def children():
    return {child.pid for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE}


def in_followers(work, monkeypatch, code):
    """Run code in every rank's process but this one's before anything else: a fault that rank 0 doesn't have."""
    indented = "\n".join(f"    {line}" for line in code.splitlines())
    (work / "sitecustomize.py").write_text(
        f"import sys\nif 'pico_vllm.worker.follower' in sys.orig_argv:\n{indented}\n"
    )
    monkeypatch.syspath_prepend(str(work))


FAILS_AT_START = """
from pico_vllm.worker.model_runner import ModelRunner
def fail(self, *args, **options):
    raise ZeroDivisionError("no such luck")
ModelRunner.__init__ = fail
"""
FAILS_ON_THE_WAY = """
from pico_vllm.worker.model_runner import ModelRunner
def fail(self, *args, **options):
    raise ZeroDivisionError("half built")
ModelRunner._new_caches = fail
"""
ENDS_BEFORE_IT_MEETS_THE_OTHERS = """
import os
from pico_vllm.distributed.communicator import GlooCommunicator
GlooCommunicator.__init__ = lambda *args, **options: os._exit(9)
"""
ENDS_AT_START = """
import os
os._exit(7)
"""
FAILS_IN_A_STEP = """
from pico_vllm.worker.model_runner import ModelRunner
start, count = ModelRunner.start, 0
def fail(self, step):
    global count
    count += 1
    if count == 4:
        raise ZeroDivisionError("in step 4")
    return start(self, step)
ModelRunner.start = fail
"""


# ------------------------------------------------------------------------------------------------------ the start
@pytest.mark.parametrize(
    ("code", "words"),
    [
        (FAILS_AT_START, ["ZeroDivisionError: no such luck", "Traceback", "in fail"]),
        (FAILS_ON_THE_WAY, ["ZeroDivisionError: half built", "Traceback", "in fail"]),
        (ENDS_BEFORE_IT_MEETS_THE_OTHERS, ["has ended with exit code 9"]),
        (ENDS_AT_START, ["has ended with exit code 7"]),
    ],
)
def test_a_rank_that_fails_at_the_start_is_named_with_its_traceback(checkpoint, tmp_path, monkeypatch, code, words):
    in_followers(tmp_path, monkeypatch, code)
    start = time.monotonic()
    with pytest.raises(EngineDeadError) as error:
        make_llm(checkpoint, **OPTIONS)
    assert time.monotonic() - start < NOTICED_S
    assert str(error.value).startswith("rank 1 (pid ")
    assert all(word in str(error.value) for word in words), error.value


def test_the_cause_is_told_from_a_core_process_too(checkpoint, tmp_path, monkeypatch):
    in_followers(tmp_path, monkeypatch, FAILS_IN_A_STEP)
    llm = make_llm(checkpoint, engine_core_process=True, **OPTIONS)
    with pytest.raises(EngineDeadError, match=r"rank 1 .* has failed: ZeroDivisionError: in step 4"):
        llm.generate(PROMPT, greedy(20))
    llm.engine.shutdown()


@pytest.mark.parametrize("kind", [ConfigError, WeightLoadError])
def test_what_is_wrong_for_all_ranks_is_the_same_error_as_with_one(checkpoint, tmp_path, kind):
    directory, options = checkpoint, {}
    if kind is ConfigError:  # found after the ranks are there
        options = {"enable_chunked_prefill": False, "max_num_batched_tokens": 8}
    else:
        directory = tmp_path / "model"
        directory.mkdir()
        for path in checkpoint.iterdir():
            (directory / path.name).write_bytes(path.read_bytes())
        weights = directory / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1000])
    errors = []
    for size in (1, 2):
        with pytest.raises(kind) as error:
            make_llm(directory, **(OPTIONS | options | {"tensor_parallel_size": size}))
        errors.append(str(error.value))
    assert errors[0] == errors[1]


def test_an_exception_of_the_applications_during_the_start_ends_the_ranks(checkpoint):
    def progress(phase, done, total):
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as interrupt:  # its traceback keeps everything that was built
        make_llm(checkpoint, progress=progress, **OPTIONS)
    del interrupt


# ------------------------------------------------------------------------------------------------------ in a step
def assert_dead(llm, words):
    for call in (llm.engine.core.step, llm.engine.has_unfinished_requests, lambda: llm.generate(PROMPT, greedy(2))):
        with pytest.raises(EngineDeadError, match=words):
            call()


def test_a_rank_that_fails_in_a_step_is_named_with_its_traceback(checkpoint, tmp_path, monkeypatch):
    in_followers(tmp_path, monkeypatch, FAILS_IN_A_STEP)
    llm = make_llm(checkpoint, **OPTIONS)
    pids = llm.engine.core.executor.pids
    start = time.monotonic()
    with pytest.raises(EngineDeadError) as error:
        llm.generate([PROMPT, PROMPT], greedy(50))
    assert time.monotonic() - start < NOTICED_S
    assert str(error.value).startswith(f"rank 1 (pid {pids[0]}) has failed: ZeroDivisionError: in step 4")
    assert "Traceback" in str(error.value)
    assert_end(*pids)
    assert_dead(llm, "in step 4")


@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_rank_is_noticed_and_the_others_end(checkpoint, victim):
    """The first or the last of three, whose neighbours in the ring of an all-reduce lose it first."""
    llm = make_llm(checkpoint, **(OPTIONS | {"tensor_parallel_size": 4}))
    pids = llm.engine.core.executor.pids
    stream = llm.generate([PROMPT, PROMPT], greedy(200), stream=True)
    for _ in range(5):
        next(stream)
    os.kill(pids[victim], signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(EngineDeadError, match=rf"rank {victim + 1} \(pid {pids[victim]}\) was killed by SIGKILL"):
        for _ in stream:
            pass
    assert time.monotonic() - start < NOTICED_S
    assert_end(*pids)
    assert_dead(llm, "SIGKILL")


def test_a_rank_that_dies_while_nobody_asks_is_noticed_by_the_next_call(checkpoint, expected):
    llm = make_llm(checkpoint, **OPTIONS)
    assert llm.generate(PROMPT, greedy(5))[0].outputs[0].token_ids == expected
    (pid,) = llm.engine.core.executor.pids
    os.kill(pid, signal.SIGKILL)
    assert_end(pid)
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        llm.generate(PROMPT, greedy(5))


def test_a_stuck_rank_is_ended_by_a_shutdown_from_another_thread(checkpoint):
    llm = make_llm(checkpoint, **OPTIONS)
    (pid,) = llm.engine.core.executor.pids
    os.kill(pid, signal.SIGSTOP)
    threading.Timer(0.3, llm.engine.shutdown).start()
    start = time.monotonic()
    with pytest.raises(EngineDeadError):
        llm.generate(PROMPT, greedy(5))
    assert time.monotonic() - start < NOTICED_S
    assert_end(pid)


def test_a_stuck_rank_is_noticed_when_a_step_takes_too_long(checkpoint, monkeypatch):
    monkeypatch.setitem(followers.STUCK_S, "cpu", 0.7)
    monkeypatch.setattr(followers, "LOOK_S", 0.1)
    llm = make_llm(checkpoint, **OPTIONS)
    (pid,) = llm.engine.core.executor.pids
    time.sleep(1.0)  # between steps there is no limit
    assert llm.generate(PROMPT, greedy(2))[0].outputs[0].token_ids
    os.kill(pid, signal.SIGSTOP)
    start = time.monotonic()
    with pytest.raises(EngineDeadError, match=f"has not ended in 1 s: a rank is stuck .*pid {pid}"):
        llm.generate(PROMPT, greedy(5))
    assert time.monotonic() - start < NOTICED_S
    assert_end(pid)
    assert_dead(llm, "a rank is stuck")


def test_time_in_which_the_process_was_stopped_does_not_count(monkeypatch):
    now = 100.0
    monkeypatch.setattr(followers.time, "monotonic", lambda: now)
    watch, step = followers._StepWatch(), (1, 300.0)
    for passed in [followers.LOOK_S] * 30 + [3600.0] + [followers.LOOK_S] * 27:
        now += passed
        assert watch.stuck_s(*step) is None  # 0, 145, 155, and 290 s in the end
    now += followers.LOOK_S
    assert watch.stuck_s(2, 300.0) is None  # another step
    for _ in range(61):  # the first look begins anew
        now += followers.LOOK_S
        assert watch.stuck_s(*step) is None
    now += followers.LOOK_S
    assert watch.stuck_s(*step) == 300.0
    assert watch.stuck_s(1, None) is None


def test_an_error_of_rank_0_in_a_step_ends_the_engine_with_its_traceback(checkpoint):
    llm = make_llm(checkpoint, **OPTIONS)
    pids = llm.engine.core.executor.pids

    def fail(op, *args):
        raise ZeroDivisionError("here")

    runner = llm.engine.core.executor.runner
    runner._model.layers[1].mlp = fail
    with pytest.raises(EngineDeadError, match="rank 0 has failed"):
        llm.generate(PROMPT, greedy(5))
    assert_end(*pids)
    assert_dead(llm, "rank 0 has failed")


def test_an_error_of_rank_0_that_comes_of_a_lost_rank_names_that_rank(checkpoint, monkeypatch):
    llm = make_llm(checkpoint, **OPTIONS)
    executor = llm.engine.core.executor
    (pid,) = executor.pids

    def fail(*args):
        os.kill(pid, signal.SIGKILL)
        while executor._followers.cause_of_death is None:
            time.sleep(0.01)
        raise RuntimeError("a library's complaint")

    monkeypatch.setattr(executor.runner, "finish", fail)
    with pytest.raises(EngineDeadError, match=rf"^rank 1 \(pid {pid}\) .*SIGKILL"):
        llm.generate(PROMPT, greedy(5))
    assert_end(pid)


def test_what_speaks_otherwise_is_no_rank():
    ours, theirs = socket.socketpair()
    followers = Followers([RankChannel(ours)])
    RankChannel(theirs).send(b"GET / HTTP/1.1")
    with pytest.raises(RankLostError, match="rank 1 has closed its connection"):
        followers.wait_for(Ready)
    followers.close()
    assert not followers._ranks.listener.is_alive()


# -------------------------------------------------------------------------------------------------------- the end
def test_a_collected_engine_takes_its_ranks_along(checkpoint):
    llm = make_llm(checkpoint, **OPTIONS)
    pids = llm.engine.core.executor.pids
    llm.engine.add_request("r", PROMPT, greedy(100))
    llm.engine.step()
    del llm
    gc.collect()
    assert_end(*pids)


def test_engines_follow_one_another_and_stand_side_by_side(checkpoint, expected):
    first = make_llm(checkpoint, **OPTIONS)
    second = make_llm(checkpoint, **OPTIONS)
    for llm in (first, second, first):
        assert llm.generate(PROMPT, greedy(5))[0].outputs[0].token_ids == expected
    first.engine.shutdown()
    assert second.generate(PROMPT, greedy(5))[0].outputs[0].token_ids == expected
    second.engine.shutdown()


SCRIPT = """
import json, os, signal, sys, time
import torch
torch.set_num_threads(1)
from pico_vllm import LLM, SamplingParams
signal.signal(signal.SIGINT, signal.default_int_handler)
def tell(**what):
    print(json.dumps(what), flush=True)
llm = LLM(sys.argv[1], tensor_parallel_size=2, device="cpu", dtype="float32", num_gpu_blocks_override=64)
def ids(max_tokens):
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return llm.generate([[5, 6, 7, 8]] * 4, params)[0].outputs[0].token_ids
tell(pids=llm.engine.core.executor.pids)
"""
INTERRUPTED_THEN_KILLED = """
try:
    while True:
        ids(200)
except KeyboardInterrupt:
    tell(interrupted=True)
tell(ids=ids(5))
while True:
    ids(200)
"""
ENDS = "tell(ids=ids(5))"
FAILS = "ids(5)\n1 / 0"


@pytest.fixture
def start_script(checkpoint, tmp_path):
    started = []

    def start(source, environment=()):
        paths = os.pathsep.join(path for path in sys.path if path)
        environment = os.environ | {"PYTHONPATH": paths, "TMPDIR": str(tmp_path / "tmp")} | dict(environment)
        process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT + source, str(checkpoint)],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def line(process):
    text = process.stdout.readline()
    assert text, process.stderr.read()
    return json.loads(text)


def test_ctrl_c_is_rank_0s_business_and_no_orphan_is_left_when_it_is_killed_in_a_step(start_script, expected):
    script = start_script(INTERRUPTED_THEN_KILLED)
    pids = line(script)["pids"]
    time.sleep(0.3)
    os.killpg(script.pid, signal.SIGINT)  # as a terminal does
    assert line(script) == {"interrupted": True}
    assert line(script) == {"ids": expected}
    assert all(map(is_running, pids))
    time.sleep(0.1)
    script.kill()
    script.wait()
    assert_end(*pids)


@pytest.mark.parametrize(("source", "code"), [(ENDS, 0), (FAILS, 1)])
def test_the_end_of_a_script_ends_its_ranks(start_script, expected, source, code):
    script = start_script(source)
    pids = line(script)["pids"]
    assert script.wait(SCRIPT_S) == code
    assert_end(*pids)
    if code == 0:
        assert line(script) == {"ids": expected}
        assert script.stderr.read() == ""
    else:
        assert "ZeroDivisionError" in script.stderr.read()


# ------------------------------------------------------------------------------------------------------- torchrun
def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def as_torchrun_does(start_script, source, size=2):
    shared = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [start_script(source, shared | {"RANK": str(r), "LOCAL_RANK": str(r)}) for r in range(size)]


def test_under_torchrun_every_process_runs_the_script_and_the_others_serve_rank_0(start_script, expected):
    leader, follower = as_torchrun_does(start_script, ENDS)
    assert line(leader) == {"pids": []}
    assert line(leader) == {"ids": expected}
    assert (leader.wait(SCRIPT_S), follower.wait(SCRIPT_S)) == (0, 0)
    assert follower.stdout.read() == "", "a rank that serves goes no further than the engine"


def test_under_torchrun_a_rank_that_is_killed_is_noticed(start_script):
    leader, follower = as_torchrun_does(start_script, "while True: ids(200)")
    assert line(leader) == {"pids": []}
    time.sleep(0.3)
    follower.kill()
    code, stderr = leader.wait(SCRIPT_S), leader.stderr.read()
    assert code == 1 and "EngineDeadError: rank 1 has closed its connection" in stderr, f"{code}: {stderr}"


def test_under_torchrun_with_another_number_of_processes_all_refuse(start_script):
    for process in as_torchrun_does(start_script, ENDS, size=3):
        assert process.wait(SCRIPT_S) == 1
        assert "tensor_parallel_size=2, but torchrun has started 3 processes" in process.stderr.read()
