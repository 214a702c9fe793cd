"""An engine core in a process of its own: the same results, errors where they belong, a noticed death, a clean end.

A watchdog ends the engine of a test that takes too long, so that nothing here can hang.
"""

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from contextlib import contextmanager

import psutil
import pytest

import tiny_models
from child_processes import NOTICED_S, assert_end, is_running
from engine_runs import greedy, make_llm
from pico_vllm import SamplingParams
from pico_vllm.engine.core_client import ProcessCoreClient, core_in_this_process
from pico_vllm.engine.stats import EngineStats
from pico_vllm.errors import ConfigError, EngineDeadError, RequestError, WeightLoadError
from pico_vllm.request import FinishReason, Request
from pico_vllm.sampling_params import StructuredOutputsParams

pytestmark = pytest.mark.multiprocess

WATCHDOG_S = 60.0
BLOCK_SIZE, NUM_BLOCKS = 8, 64
# Long prompts run in chunks of 32 tokens, and of eight requests four wait.
OPTIONS = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "block_size": BLOCK_SIZE,
    "num_gpu_blocks_override": NUM_BLOCKS,
}
PROMPTS = [[(7 * i + 3 * j) % 290 + 2 for j in range(n)] for i, n in enumerate([1, 5, 63, 100, 17, 40, 8, 9])]
PARAMS = [
    SamplingParams(temperature=0.9, top_k=5, seed=100 + i, max_tokens=20, ignore_eos=True) if i % 2 else greedy(20)
    for i in range(len(PROMPTS))
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("llama")
    tiny_models.save_tiny_model(tiny_models.MODELS["llama-gqa3-d64-tied"], directory)
    return directory


@pytest.fixture(scope="module")
def in_process(checkpoint):
    return make_llm(checkpoint, **OPTIONS)


@pytest.fixture(scope="module")
def shared(checkpoint):
    llm = make_llm(checkpoint, engine_core_process=True, **OPTIONS)
    yield llm
    llm.engine.core.shutdown()


@pytest.fixture
def llm(shared):
    """The module's engine in another process; it has to be idle and alive afterwards."""
    with watched(shared):
        yield shared
        assert not shared.engine.core.has_unfinished_requests()
        assert shared.engine.core._live_ids == {}


@pytest.fixture
def own_llm(checkpoint):
    """An engine that the test may kill."""
    llm = make_llm(checkpoint, engine_core_process=True, **OPTIONS)
    with watched(llm):
        yield llm
    llm.engine.core.shutdown()


@contextmanager
def watched(llm):
    timer = threading.Timer(WATCHDOG_S, setattr, (llm.engine.core, "_death", "the watchdog has ended it"))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def requests(prefix="r"):
    return [
        Request(f"{prefix}{i}", prompt, params, seed=params.seed or 0)
        for i, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True))
    ]


def collect(core, arrivals=(), *, results=None, before_step=lambda results: None):
    """Run to the end, one new request a step; [token ids, finish reason] of each request."""
    arrivals = list(arrivals)
    results = defaultdict(lambda: [[], None]) if results is None else results
    while arrivals or core.has_unfinished_requests():
        if arrivals:
            core.add_request(arrivals.pop(0))
        before_step(results)
        for output in core.step():
            assert results[output.request_id][1] is None, f"{output} after its end"
            results[output.request_id][0] += output.new_token_ids
            results[output.request_id][1] = output.finish_reason
    return results


@pytest.fixture(scope="module")
def expected(in_process):
    """What each request gives in process, all together."""
    core = in_process.engine.core
    for request in requests():
        core.add_request(request)
    results = collect(core)
    assert [len(results[f"r{i}"][0]) for i in range(8)] == [20] * 8
    return results


# --------------------------------------------------------------------------------------------------- same results
def test_the_core_runs_in_another_process(llm):
    assert isinstance(llm.engine.core, ProcessCoreClient)
    assert psutil.Process(llm.engine.core.pid).ppid() == os.getpid()


@pytest.mark.parametrize("arrival", ["together", "staggered", "reversed"])
def test_greedy_and_seeded_requests_give_the_same_tokens(llm, expected, arrival):
    """Some waiting, some in chunks, some decoding: the core decides by itself which step a request joins."""
    core, arrivals = llm.engine.core, requests()
    if arrival == "reversed":
        arrivals.reverse()
    if arrival != "staggered":
        for request in arrivals:
            core.add_request(request)
        arrivals = []
    assert collect(core, arrivals) == expected


def test_texts_stop_strings_and_statistics_are_the_same(in_process, llm):
    prompts = ["some text", "another one", "a third, longer one"]
    plain = in_process.generate(prompts, greedy(12))
    stop = plain[0].outputs[0].text[3:5]
    for params in (greedy(12), greedy(12, stop=[stop]), SamplingParams(temperature=1.0, top_k=4, seed=3, max_tokens=9)):
        outputs = []
        for each in (in_process, llm):
            each.engine.stats = EngineStats()
            outputs.append([(o.outputs[0].text, o.outputs[0].finish_reason) for o in each.generate(prompts, params)])
        assert outputs[0] == outputs[1]
        assert llm.engine.stats.num_output_tokens >= 9
        # The core may have gone on for a moment after a stop string; it never does less.
        assert llm.engine.stats.num_tokens >= in_process.engine.stats.num_tokens - 3
        assert llm.engine.stats.num_steps > 0 < llm.engine.stats.busy_s
        assert 0 <= llm.engine.stats.overhead <= 1


def test_no_step_is_missing_in_the_statistics(llm):
    """A prompt of 100 tokens: three chunks that give nothing, a fourth that gives the first token."""
    llm.engine.stats = EngineStats()
    llm.generate(PROMPTS[3], greedy(6))
    stats = llm.engine.stats
    assert (stats.num_steps, stats.num_tokens, stats.num_output_tokens) == (4 + 5, 100 + 5, 6)


def test_logprobs_and_prompt_logprobs_come_across_unchanged(in_process, llm):
    params = greedy(5, logprobs=3, prompt_logprobs=2)
    outputs = [each.generate(PROMPTS[4], params)[0] for each in (in_process, llm)]
    assert outputs[0].outputs[0].logprobs is not None
    assert outputs[0].prompt_logprobs is not None
    assert outputs[0].outputs[0].logprobs == outputs[1].outputs[0].logprobs
    assert outputs[0].prompt_logprobs == outputs[1].prompt_logprobs


def test_structured_outputs_are_the_same(in_process, llm):
    params = SamplingParams(
        temperature=0.0, max_tokens=12, structured_outputs=StructuredOutputsParams(choice=("yes", "no, never"))
    )
    texts = [each.generate("Is it so?", params)[0].outputs[0].text for each in (in_process, llm)]
    assert texts[0] == texts[1]
    assert texts[0] in ("yes", "no, never")


def test_the_core_goes_on_while_nobody_asks(llm):
    core = llm.engine.core
    core.add_request(Request("r", PROMPTS[0], greedy(10)))
    assert len(core.step()) >= 1
    time.sleep(0.5)
    outputs = core.step()
    assert len(outputs) > 1, "the core waited for its front end"
    assert core.last_times.num_steps == len(outputs)
    collect(core)


def test_a_step_without_requests_returns_at_once(llm):
    assert llm.engine.core.step() == []
    assert llm.engine.core.last_times.num_steps == 0


# --------------------------------------------------------------------------------------------------------- errors
@pytest.mark.parametrize("max_tokens", [1, 16])
@pytest.mark.parametrize("num_prompt_tokens", [255, 256, 300])
def test_what_can_never_fit_is_refused_at_once_in_the_same_words(in_process, llm, num_prompt_tokens, max_tokens):
    words = []
    for each in (in_process, llm):
        request = Request("r", [5] * num_prompt_tokens, greedy(max_tokens))
        try:
            each.engine.core.add_request(request)
        except RequestError as error:
            words.append(str(error))
        else:
            words.append(f"max_tokens={request.max_tokens}")
            each.engine.core.abort("r")
    assert words[0] == words[1]


def test_the_pool_bounds_a_request_as_it_does_in_process(checkpoint, llm):
    small = make_llm(checkpoint, **(OPTIONS | {"num_gpu_blocks_override": 3})).engine.core
    core = llm.engine.core
    limits, core.limits = core.limits, small.limits  # what a core with three blocks would have said
    try:
        words = []
        for each in (small, core):
            with pytest.raises(RequestError) as error:
                each.add_request(Request("r", [5] * 20, greedy(10)))
            words.append(str(error.value))
    finally:
        core.limits = limits
    assert words[0] == words[1]
    assert "whole cache has 3" in words[0]


def test_an_id_in_use_is_refused_and_its_owner_goes_on(llm, expected):
    core = llm.engine.core
    first = requests()[2]
    core.add_request(first)
    with pytest.raises(RequestError, match="'r2' is in use"):
        core.add_request(requests()[2])
    assert collect(core) == {"r2": expected["r2"]}
    core.add_request(requests()[2])  # free again
    assert collect(core) == {"r2": expected["r2"]}


def test_logits_processors_are_refused_and_leave_nothing_behind(llm):
    with pytest.raises(RequestError, match=r"logits_processors.*engine_core_process=False"):
        llm.generate(PROMPTS[0], greedy(2, logits_processors=[lambda ids, logits: logits]))


def test_a_grammar_that_does_not_compile_is_that_requests_error_alone(in_process, llm, expected):
    core = llm.engine.core
    core.add_request(requests()[3])
    words = []
    for each in (in_process, llm):
        params = greedy(4, structured_outputs=StructuredOutputsParams(regex="(unclosed"))
        with pytest.raises(RequestError) as error:
            each.engine.core.add_request(Request("bad", PROMPTS[0], params))
        words.append(str(error.value))
    assert words[0] == words[1]
    assert collect(core) == {"r3": expected["r3"]}


def test_a_request_that_only_the_core_refuses_is_aborted_alone(llm, expected, monkeypatch, caplog):
    """A bug of ours: the two checks differ."""
    core = llm.engine.core
    core.add_request(requests()[1])
    monkeypatch.setattr("pico_vllm.engine.core_client.checked_max_tokens", lambda request, **limits: 1)
    core.add_request(Request("r", [5] * 300, greedy(1)))
    assert collect(core) == {"r": [[], FinishReason.ABORT], "r1": expected["r1"]}
    assert "max_model_len=256" in caplog.text


def test_nobody_looks_into_a_core_in_another_process(llm):
    with pytest.raises(ConfigError, match="engine_core_process"):
        core_in_this_process(llm.engine.core)


# --------------------------------------------------------------------------------------------------------- aborts
def test_aborts_in_every_state_change_nobody_else_and_give_the_blocks_back(llm, expected):
    core = llm.engine.core
    victims = {"at once": 0, "waiting": 1, "in the middle": 2, "late": 5}  # when so many outputs have come
    arrivals = requests()
    for i, victim in enumerate(victims):
        arrivals.insert(2 * i, Request(victim, PROMPTS[3 - i], greedy(30)))
    for request in arrivals:
        core.add_request(request)
    aborted_at = {}

    def abort_some(results):
        num_outputs = sum(len(tokens) for tokens, _ in results.values())
        for victim, when in victims.items():
            if victim not in aborted_at and num_outputs >= when:
                assert core.abort(victim)
                assert not core.abort(victim), "twice"
                aborted_at[victim] = len(results[victim][0])
        assert not core.abort("nobody")

    results = collect(core, before_step=abort_some)
    assert aborted_at.keys() == victims.keys()
    for victim, num_tokens in aborted_at.items():
        assert len(results.pop(victim)[0]) == num_tokens, f"{victim}: tokens after its abort"
    assert results == expected
    assert_all_blocks_are_free(llm)


def assert_all_blocks_are_free(llm):
    """Two requests of 200 + 50 tokens each need all 64 blocks but one, and preempt each other in a smaller pool."""
    core = llm.engine.core
    for name in ("a", "b"):
        core.add_request(Request(name, [5] * 200, greedy(50)))
    results = collect(core)
    assert [len(results[name][0]) for name in ("a", "b")] == [50, 50]


def test_an_abort_of_a_request_that_has_ended_unseen_takes_its_outputs_away(llm):
    core = llm.engine.core
    core.add_request(Request("r", PROMPTS[0], greedy(3)))
    time.sleep(0.3)
    assert core.has_unfinished_requests(), "its end was not handed out"
    assert core.abort("r")
    assert not core.has_unfinished_requests()
    assert core.step() == []


def test_an_id_that_is_used_again_after_an_abort_gets_nothing_of_its_former_owner(llm, expected):
    core = llm.engine.core
    for _ in range(5):
        core.add_request(Request("r3", PROMPTS[0], greedy(50)))
        core.step()
        time.sleep(0.01)  # some of its tokens are under way
        core.abort("r3")
        core.add_request(requests()[3])
        assert collect(core) == {"r3": expected["r3"]}


def test_other_threads_may_add_and_abort_while_one_waits_in_step(llm, expected):
    core = llm.engine.core
    core.add_request(Request("long", PROMPTS[0], greedy(200)))
    results = defaultdict(lambda: [[], None])
    loop = threading.Thread(target=lambda: collect(core, results=results))
    loop.start()
    adders = [threading.Thread(target=core.add_request, args=(request,)) for request in requests()]
    for adder in adders:
        adder.start()
    params = greedy(4, structured_outputs=StructuredOutputsParams(regex="(unclosed"))
    with pytest.raises(RequestError):  # its reply may reach the thread in step
        core.add_request(Request("bad", PROMPTS[0], params))
    for adder in adders:
        adder.join()
    core.abort("long")
    loop.join()
    results.pop("long", None)  # not there if it was aborted before its first token
    assert results == expected


def test_step_returns_when_another_thread_has_aborted_all_it_waits_for(llm):
    core = llm.engine.core
    os.kill(core.pid, signal.SIGSTOP)  # nothing will come
    try:
        core.add_request(Request("r", PROMPTS[0], greedy(3)))
        timer = threading.Timer(0.2, core.abort, ("r",))
        timer.start()
        assert core.step() == []
        timer.join()
    finally:
        os.kill(core.pid, signal.SIGCONT)


# ---------------------------------------------------------------------------------------------------------- death
def assert_dead(core, cause):
    calls = [
        lambda: core.add_request(Request("other", PROMPTS[0], greedy(2))),
        lambda: core.abort("r"),
        core.has_unfinished_requests,
        core.step,
    ]
    for call in calls:
        start = time.monotonic()
        with pytest.raises(EngineDeadError, match=cause):
            call()
        assert time.monotonic() - start < NOTICED_S


def test_a_killed_core_is_noticed_by_the_step_that_waits_and_by_every_later_call(own_llm):
    core = own_llm.engine.core
    os.kill(core.pid, signal.SIGSTOP)  # so that step waits
    core.add_request(Request("r", PROMPTS[0], greedy(3)))
    killed_at = []

    def kill():
        killed_at.append(time.monotonic())
        os.kill(core.pid, signal.SIGKILL)

    threading.Timer(0.2, kill).start()
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        core.step()
    assert time.monotonic() - killed_at[0] < NOTICED_S
    assert_dead(core, "SIGKILL")
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        own_llm.generate(PROMPTS[0], greedy(2))


def test_an_error_in_a_step_reaches_the_front_end_with_its_traceback(checkpoint, own_llm):
    """A token that the embedding has no row for; the front end's checks are left out here.

    In this process the caller sees the error itself and can abort the culprit; a process of its own can only die of it.
    """
    here, there = make_llm(checkpoint, **OPTIONS).engine.core, own_llm.engine.core
    for core in (here, there):
        core.add_request(Request("healthy", PROMPTS[0], greedy(20)))
        core.add_request(Request("r", [300], greedy(3)))
    with pytest.raises(IndexError):
        here.step()
    assert here.abort("r")
    while here.has_unfinished_requests():
        here.step()
    with pytest.raises(EngineDeadError) as death:
        while True:
            there.step()
    assert "IndexError" in str(death.value).splitlines()[0]
    assert "Traceback (most recent call last)" in str(death.value)
    assert "core_process.py" in str(death.value)
    assert_dead(there, "IndexError")
    assert_end(there.pid)


# ------------------------------------------------------------------------------------------------------ the start
def start_error(*args, **options):
    with pytest.raises(Exception) as error:  # the test compares it
        make_llm(*args, **options)
    return error.value


def children():
    return {child.pid for child in psutil.Process().children()}


@pytest.mark.parametrize("kind", [ConfigError, WeightLoadError])
def test_what_is_wrong_at_the_start_is_the_same_error_as_in_process(checkpoint, tmp_path, kind):
    before = children()
    if kind is ConfigError:
        directory, options = checkpoint, {"max_model_len": 1000}
    else:
        directory, options = tmp_path, {}
        for path in checkpoint.iterdir():
            (tmp_path / path.name).write_bytes(path.read_bytes())
        weights = tmp_path / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1000])
    here, there = (start_error(directory, engine_core_process=where, **options) for where in (False, True))
    assert type(here) is type(there) is kind
    assert str(here) == str(there)
    assert children() == before


def test_progress_is_streamed_and_an_exception_there_ends_the_process(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before, calls = children(), []

    def progress(phase, done, total):
        calls.append((phase, done, total))
        if done == total:
            raise KeyboardInterrupt

    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt) as interrupt:  # its traceback keeps everything that was built
        make_llm(checkpoint, engine_core_process=True, progress=progress)
    assert calls == [("load", done, 21) for done in range(22)]
    assert children() == before
    assert list(tmp_path.iterdir()) == []
    assert time.monotonic() - start < 30
    del interrupt


# -------------------------------------------------------------------------------------------------------- the end
def test_a_collected_engine_takes_its_process_along(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    llm = make_llm(checkpoint, engine_core_process=True, **OPTIONS)
    pid = llm.engine.core.pid
    assert list(tmp_path.iterdir()) == [], "the sockets' names are gone once both ends are connected"
    llm.engine.core.add_request(Request("r", PROMPTS[0], greedy(200)))
    llm.engine.core.step()
    start = time.monotonic()
    del llm
    gc.collect()
    assert time.monotonic() - start < NOTICED_S
    assert not is_running(pid)


def test_shutdown_ends_the_process_even_when_it_does_not_answer(own_llm):
    core = own_llm.engine.core
    os.kill(core.pid, signal.SIGSTOP)
    core.add_request(Request("r", PROMPTS[0], greedy(3)))
    noticed = threading.Event()

    def wait_in_step():
        with pytest.raises(EngineDeadError):
            core.step()
        noticed.set()

    threading.Thread(target=wait_in_step).start()
    start = time.monotonic()
    core.shutdown()
    core.shutdown()
    assert time.monotonic() - start < NOTICED_S
    assert not is_running(core.pid)
    assert noticed.wait(NOTICED_S), "the thread in step did not notice"
    assert_dead(core, "has been shut down")


def test_a_fork_that_exits_leaves_the_core_alone(llm, expected):
    pid = os.fork()
    if pid == 0:
        llm.engine.core._close()  # what its interpreter's end would do
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    llm.engine.core.add_request(requests()[0])
    assert collect(llm.engine.core) == {"r0": expected["r0"]}


SCRIPT = """
import json, signal, sys, time
from pico_vllm import LLM, SamplingParams
signal.signal(signal.SIGINT, signal.default_int_handler)
llm = LLM(sys.argv[1], engine_core_process=True, device="cpu", num_gpu_blocks_override=64)
def tell(**what):
    print(json.dumps(what), flush=True)
def ids(max_tokens):
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return llm.generate([[5, 6, 7]] * 8, params)[0].outputs[0].token_ids
tell(pid=llm.engine.core.pid)
"""
INTERRUPTED_THEN_KILLED = """
try:
    while True:
        ids(200)
except KeyboardInterrupt:
    tell(interrupted=True)
tell(ids=ids(5))
time.sleep(600)
"""
FAILS = """
llm.engine.add_request("r", [5], SamplingParams(max_tokens=200, ignore_eos=True))
llm.engine.step()
1 / 0
"""


class Script:
    """A front end in a process group of its own; every line it prints is JSON, so nothing else may write there.

    Each Python there greets on its standard output when it starts: that of the core must not arrive here.
    """

    def __init__(self, source, checkpoint, work):
        (work / "sitecustomize.py").write_text("print('\"hello\"', flush=True)")
        paths = [str(work), *(path for path in sys.path if path)]
        (work / "tmp").mkdir()
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "TMPDIR": str(work / "tmp")}
        self.process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT + source, str(checkpoint)],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        assert self.line() == "hello"

    def line(self):
        line = self.process.stdout.readline()
        assert line, self.process.stderr.read()
        return json.loads(line)


def test_ctrl_c_is_the_front_ends_business_and_no_orphan_is_left_when_it_is_killed(checkpoint, tmp_path, in_process):
    script = Script(INTERRUPTED_THEN_KILLED, checkpoint, tmp_path)
    core_pid = script.line()["pid"]
    try:
        time.sleep(0.3)
        os.killpg(script.process.pid, signal.SIGINT)  # as a terminal does
        assert script.line() == {"interrupted": True}
        assert script.line() == {"ids": in_process.generate([[5, 6, 7]], greedy(5))[0].outputs[0].token_ids}
        assert is_running(core_pid)
    finally:
        script.process.kill()
        script.process.wait()
    assert_end(core_pid)
    assert list((tmp_path / "tmp").iterdir()) == []
    assert '"hello"' in script.process.stderr.read()


def test_an_exception_in_the_front_end_ends_the_core(checkpoint, tmp_path):
    script = Script(FAILS, checkpoint, tmp_path)
    core_pid = script.line()["pid"]
    assert script.process.wait(20) == 1
    assert_end(core_pid)
    assert "ZeroDivisionError" in script.process.stderr.read()
