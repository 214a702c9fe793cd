"""AsyncLLM: many generators on one engine; whoever goes away frees what it held, and a death reaches everyone."""

import asyncio
import contextlib
import gc
import os
import subprocess
import sys
import threading
import time
import weakref

import pytest

import tiny_models
from engine_runs import greedy, make_llm
from pico_vllm import AsyncLLM, SamplingParams
from pico_vllm.errors import ConfigError, EngineDeadError, RequestError
from pico_vllm.sampling_params import StructuredOutputsParams

PROMPT = [10, 20, 30, 40, 50]
OPTIONS = {"device": "cpu", "dtype": "float32", "num_gpu_blocks_override": 256, "max_num_seqs": 16}
TIMEOUT_S = 20.0  # for what takes milliseconds, on a machine that does much else


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("llama")
    tiny_models.save_tiny_model(tiny_models.MODELS["llama-gqa3-d64-tied"], directory)
    (directory / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    return directory


@pytest.fixture(scope="module")
def shared(checkpoint):
    return AsyncLLM(str(checkpoint), **OPTIONS)


@pytest.fixture
def llm(shared):
    """One engine for all tests that leave it alive; each leaves it idle."""
    yield shared
    wait_until_idle(shared)


@pytest.fixture
def mortal(checkpoint):
    llm = AsyncLLM(str(checkpoint), **OPTIONS)
    yield llm
    llm._thread.stop_and_join(TIMEOUT_S)


@pytest.fixture(scope="module")
def offline(checkpoint):
    return make_llm(checkpoint)


def wait_until(condition, timeout_s=TIMEOUT_S):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.002)


def wait_until_idle(llm):
    core = llm.engine.core
    wait_until(lambda: not llm.engine.num_unfinished_requests and not core.has_unfinished_requests())
    assert core.kv_cache_manager.num_free_blocks == core.kv_cache_manager.num_blocks
    assert not llm._thread._streams


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, TIMEOUT_S))


async def collect(generator):
    """Token ids by sample, text by sample, and the final output."""
    ids, texts, final = {}, {}, None
    async for delta in generator:
        assert final is None, "a delta after the last"
        ids.setdefault(delta.index, []).extend(delta.new_token_ids)
        texts[delta.index] = texts.get(delta.index, "") + delta.new_text
        final = delta.final
    return ids, texts, final


@pytest.fixture
def aborted(llm, monkeypatch):
    """Ids that the core was told to abort."""
    core_ids = []
    abort = llm.engine.core.abort
    monkeypatch.setattr(llm.engine.core, "abort", lambda core_id: core_ids.append(core_id) or abort(core_id))
    return core_ids


# -------------------------------------------------------------------------------------------------------- requests
def test_many_at_once_get_what_each_gets_alone(llm, offline):
    prompts = [[10 + i] * (1 + i % 7) for i in range(40)]
    params = [greedy(1 + i % 9, n=1 + i % 2) for i in range(40)]
    expected = offline.generate(prompts, params)

    async def main():
        return await asyncio.gather(*(collect(llm.generate(*each)) for each in zip(prompts, params, strict=True)))

    results = run(main())
    for (ids, texts, final), output in zip(results, expected, strict=True):
        assert final.outputs == output.outputs
        assert [ids[c.index] for c in final.outputs] == [c.token_ids for c in output.outputs]
        assert [texts[c.index] for c in final.outputs] == [c.text for c in output.outputs]
    assert len({final.request_id for _, _, final in results}) == 40, "an id of its own for each"


def test_deltas_come_while_the_request_runs(llm):
    async def main():
        request = llm.generate(PROMPT, greedy(200))
        first = await anext(request)
        assert len(first.new_token_ids) == 1 and first.final is None
        await request.aclose()

    run(main())


def test_without_parameters_those_of_the_checkpoint_are_taken(llm, offline):
    _, _, final = run(collect(llm.generate(PROMPT)))
    assert final.outputs == offline.generate(PROMPT)[0].outputs


def test_chat_is_what_llm_chat_gives(llm, offline):
    messages = [{"role": "user", "content": "hello"}]
    _, _, final = run(collect(llm.chat(messages, greedy(6))))
    (output,) = offline.chat(messages, greedy(6))
    assert (final.prompt, final.outputs) == (output.prompt, output.outputs)


def test_others_stream_while_a_grammar_is_compiled(llm, offline, monkeypatch):
    """The compiler is held up until a plain request, begun later, has ended."""
    manager = llm.engine.core.structured_output
    compile_now, may_go = manager._compile, threading.Event()
    monkeypatch.setattr(manager, "_compile", lambda grammar: may_go.wait(TIMEOUT_S) and compile_now(grammar))
    grammar = StructuredOutputsParams(choice=("yes", "no"))

    async def main():
        structured = asyncio.ensure_future(collect(llm.generate(PROMPT, SamplingParams(structured_outputs=grammar))))
        await asyncio.sleep(0)
        plain = await collect(llm.generate(PROMPT, greedy(8)))
        assert not structured.done()
        may_go.set()
        return plain, await structured

    (_, _, plain), (_, _, structured) = run(main())
    assert plain.outputs[0].token_ids == offline.generate(PROMPT, greedy(8))[0].outputs[0].token_ids
    assert structured.outputs[0].text in ("yes", "no")


def test_an_error_is_raised_in_its_own_generator_only(llm, offline):
    class NotAPrompt(list):
        def __len__(self):
            raise ZeroDivisionError("an error that nobody thought of")

    async def main():
        generators = [
            llm.generate(PROMPT, greedy(30)),
            llm.generate([999], greedy(3)),
            llm.generate(NotAPrompt(), greedy(3)),
            llm.generate(PROMPT, SamplingParams(stop_token_ids=(1000,))),
            llm.chat([{"content": "no role"}], greedy(3)),
        ]
        return await asyncio.gather(*map(collect, generators), return_exceptions=True)

    good, wrong_id, unexpected, wrong_params, wrong_message = run(main())
    assert good[2].outputs == offline.generate(PROMPT, greedy(30))[0].outputs
    assert isinstance(wrong_id, RequestError) and "999" in str(wrong_id)
    assert isinstance(unexpected, ZeroDivisionError)
    assert isinstance(wrong_params, RequestError) and "1000" in str(wrong_params)
    assert isinstance(wrong_message, RequestError) and "message 0" in str(wrong_message)


def test_an_id_in_use_is_refused_and_its_owner_goes_on(llm, offline):
    async def main():
        owner = llm.generate(PROMPT, greedy(40), "same")
        first = await anext(owner)
        with pytest.raises(RequestError, match="same"):
            await collect(llm.generate(PROMPT, greedy(2), "same"))
        ids, _, _ = await collect(owner)
        again, _, _ = await collect(llm.generate(PROMPT, greedy(2), "same"))
        return [*first.new_token_ids, *ids[0]], again[0]

    ids, again = run(main())
    answer = offline.generate(PROMPT, greedy(40))[0].outputs[0].token_ids
    assert ids == answer and again == answer[:2]


# -------------------------------------------------------------------------------------------------- going away
async def _break(request):
    async for _ in request:
        break


async def _close(request):
    await anext(request)
    await request.aclose()


async def _drop(request):
    await anext(request)
    del request
    gc.collect()
    await asyncio.sleep(0)


async def _cancel(request):
    task = asyncio.create_task(collect(request))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def _cancel_before_the_first_delta(request):
    task = asyncio.create_task(collect(request))
    await asyncio.sleep(0)  # it has been queued, no more
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def _time_out(request):
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await collect(request)


async def _raise(request):
    with pytest.raises(ZeroDivisionError):
        async for _ in request:
            raise ZeroDivisionError


@pytest.mark.parametrize("go_away", [_break, _close, _drop, _cancel, _cancel_before_the_first_delta, _time_out, _raise])
def test_a_consumer_that_goes_away_aborts_its_request_and_no_other(llm, offline, aborted, go_away):
    async def main():
        other = asyncio.create_task(collect(llm.generate(PROMPT, greedy(60), "other")))
        await go_away(llm.generate(PROMPT, greedy(240, n=2), "victim"))
        await asyncio.sleep(0.05)  # the event loop closes generators that were dropped
        wait_until(lambda: len(aborted) == 2)
        return await other

    ids, _, _ = run(main())
    assert sorted(aborted) == ["victim#0", "victim#1"]
    assert ids[0] == offline.generate(PROMPT, greedy(60))[0].outputs[0].token_ids


def test_a_generator_that_was_never_started_adds_nothing(llm, aborted):
    async def main():
        before = llm.engine.stats.num_prompt_tokens
        request = llm.generate(PROMPT, greedy(5))
        await request.aclose()
        await collect(llm.generate(PROMPT, greedy(1)))
        assert llm.engine.stats.num_prompt_tokens - before == len(PROMPT)

    run(main())
    assert aborted == []


def test_a_finished_request_is_not_aborted(llm, aborted):
    async def main():
        async for delta in llm.generate(PROMPT, greedy(3)):
            if delta.final is not None:
                break

    run(main())
    wait_until_idle(llm)
    assert aborted == []


def test_a_loop_that_is_closed_without_a_word_leaves_nothing_running(llm, aborted):
    loop = asyncio.new_event_loop()
    request = llm.generate(PROMPT, greedy(240), "orphan")
    loop.run_until_complete(anext(request))
    loop.close()
    wait_until(lambda: aborted == ["orphan"])
    wait_until_idle(llm)
    del request


# ------------------------------------------------------------------------------------------------------------ abort
def test_abort_by_id_ends_the_generator_with_its_last_delta(llm):
    async def main():
        request = llm.generate(PROMPT, greedy(240, n=2), "victim")
        first = await anext(request)
        assert await llm.abort("victim") is True
        assert await llm.abort("victim") is False
        ids, texts, final = await collect(request)
        ids[first.index] = [*first.new_token_ids, *ids[first.index]]
        texts[first.index] = first.new_text + texts[first.index]
        assert [c.finish_reason for c in final.outputs] == ["abort", "abort"]
        assert [ids[c.index] for c in final.outputs] == [c.token_ids for c in final.outputs]
        assert [texts[c.index] for c in final.outputs] == [c.text for c in final.outputs]

    run(main())


def test_abort_of_a_request_that_waits_or_is_unknown(llm):
    async def main():
        assert await llm.abort("nobody") is False
        running = [asyncio.create_task(collect(llm.generate(PROMPT, greedy(100)))) for _ in range(16)]
        await asyncio.sleep(0.01)
        waiting = asyncio.create_task(collect(llm.generate(PROMPT, greedy(100), "waiting")))
        await asyncio.sleep(0)
        assert await llm.abort("waiting") is True
        ids, _, final = await waiting
        assert (ids, final.outputs[0].finish_reason) == ({0: []}, "abort")
        assert all(len(result[0][0]) == 100 for result in await asyncio.gather(*running))

    run(main())


# ------------------------------------------------------------------------------------------------------------ death
def test_a_dying_engine_tells_every_waiter_the_cause(mortal, monkeypatch):
    async def main():
        tasks = [asyncio.create_task(collect(mortal.generate(PROMPT, greedy(240)))) for _ in range(20)]
        await asyncio.sleep(0.02)

        def fail():
            raise MemoryError("no memory for step 7")

        monkeypatch.setattr(mortal.engine.core, "step", fail)
        start = time.monotonic()
        errors = await asyncio.gather(*tasks, return_exceptions=True)
        assert time.monotonic() - start < 20
        for error in errors:
            assert isinstance(error, EngineDeadError)
            assert "no memory for step 7" in str(error)
            assert isinstance(error.__cause__, MemoryError)
        assert len({id(error) for error in errors}) == 20, "each waiter has an exception of its own"
        with pytest.raises(EngineDeadError, match="no memory for step 7"):
            await collect(mortal.generate(PROMPT, greedy(2)))
        with pytest.raises(EngineDeadError, match="no memory for step 7"):
            await mortal.abort("x")
        await mortal.shutdown()

    run(main())
    assert not mortal._thread._thread.is_alive()


def test_a_core_that_is_found_dead_when_a_request_is_added_tells_everyone(mortal, monkeypatch):
    async def main():
        def dead(request):
            raise EngineDeadError("killed by signal 9")

        first = asyncio.create_task(collect(mortal.generate(PROMPT, greedy(240))))
        await asyncio.sleep(0.02)
        monkeypatch.setattr(mortal.engine.core, "add_request", dead)
        second = asyncio.create_task(collect(mortal.generate(PROMPT, greedy(2))))
        for error in await asyncio.gather(first, second, return_exceptions=True):
            assert isinstance(error, EngineDeadError) and str(error) == "killed by signal 9"

    run(main())


def test_commands_that_are_on_their_way_when_the_engine_dies_are_answered(mortal, monkeypatch):
    """They are in the inbox while the last step fails."""
    in_step, may_fail = threading.Event(), threading.Event()

    def fail_slowly():
        in_step.set()
        may_fail.wait(TIMEOUT_S)
        raise MemoryError("no memory")

    async def main():
        monkeypatch.setattr(mortal.engine.core, "step", fail_slowly)
        tasks = [asyncio.create_task(collect(mortal.generate(PROMPT, greedy(5))))]
        await asyncio.to_thread(in_step.wait, TIMEOUT_S)
        tasks += [
            asyncio.create_task(collect(mortal.generate(PROMPT, greedy(5)))),
            asyncio.create_task(mortal.abort("x")),
        ]
        await asyncio.sleep(0.01)
        may_fail.set()
        for error in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(error, EngineDeadError) and "no memory" in str(error)

    run(main())


# --------------------------------------------------------------------------------------------------- start and stop
def test_shutdown_ends_running_requests_with_an_abort_and_the_thread(checkpoint):
    async def main():
        async with AsyncLLM(str(checkpoint), **OPTIONS) as llm:  # built inside the running loop
            request = llm.generate(PROMPT, greedy(240))
            await anext(request)
        _, _, final = await collect(request)
        assert final.outputs[0].finish_reason == "abort"
        await llm.shutdown()
        with pytest.raises(EngineDeadError, match="shut down"):
            await collect(llm.generate(PROMPT, greedy(2)))
        return llm

    llm = run(main())
    assert not llm._thread._thread.is_alive()
    pool = llm.engine.core.kv_cache_manager
    assert llm.engine.num_unfinished_requests == 0 and pool.num_free_blocks == pool.num_blocks


def test_one_engine_serves_one_loop_after_another_and_two_at_once(llm, offline):
    answer = offline.generate(PROMPT, greedy(20))[0].outputs
    assert run(collect(llm.generate(PROMPT, greedy(20))))[2].outputs == answer
    results = []
    threads = [
        threading.Thread(target=lambda: results.append(run(collect(llm.generate(PROMPT, greedy(20))))[2].outputs))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert results == [answer, answer]


def test_what_is_wrong_at_the_start_is_raised_where_it_is_built(checkpoint):
    before = threading.active_count()
    with pytest.raises(ConfigError, match="blok_size"):
        AsyncLLM(str(checkpoint), blok_size=3)
    with pytest.raises(ConfigError, match="512"):
        AsyncLLM(str(checkpoint), max_model_len=512, **OPTIONS)
    wait_until(lambda: threading.active_count() == before)


def test_an_idle_engine_does_nothing(llm, monkeypatch):
    run(collect(llm.generate(PROMPT, greedy(2))))
    wait_until_idle(llm)
    calls = []
    has_unfinished = llm.engine.core.has_unfinished_requests
    monkeypatch.setattr(
        llm.engine.core, "has_unfinished_requests", lambda: calls.append(1) is not None or has_unfinished()
    )
    time.sleep(0.2)
    assert len(calls) <= 1
    assert run(collect(llm.generate(PROMPT, greedy(3))))[2] is not None
    assert len(calls) >= 3, "else the count means nothing"


def test_an_idle_engine_holds_nothing_of_its_last_request(llm):
    class Prompt(list):
        pass

    async def refused(request):
        with contextlib.suppress(RequestError):
            await anext(request)

    prompt = Prompt([999])  # no step comes after it
    reference = weakref.ref(prompt)
    run(refused(llm.generate(prompt, greedy(2))))
    del prompt
    wait_until(lambda: gc.collect() >= 0 and reference() is None)


def test_an_engine_that_is_dropped_ends_its_thread(checkpoint):
    llm = AsyncLLM(str(checkpoint), **OPTIONS)
    run(collect(llm.generate(PROMPT, greedy(2))))
    thread, engine = llm._thread._thread, weakref.ref(llm.engine.core)
    del llm
    gc.collect()
    wait_until(lambda: not thread.is_alive())
    gc.collect()
    assert engine() is None


RUN_AND_EXIT = """
import asyncio, sys
from pico_vllm import AsyncLLM, SamplingParams

async def main():
    request = llm.generate([5, 6, 7], SamplingParams(max_tokens=240, ignore_eos=True))
    await anext(request)
    print("running", flush=True)
    sys.exit(0)

llm = AsyncLLM(sys.argv[1], device="cpu", num_gpu_blocks_override=256)
asyncio.run(main())
"""


def test_an_interpreter_that_exits_while_the_engine_runs_exits_cleanly(checkpoint):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", RUN_AND_EXIT, str(checkpoint)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stdout, result.stderr) == (0, "running\n", "")
