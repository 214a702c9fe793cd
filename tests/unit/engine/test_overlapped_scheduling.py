"""Overlapped scheduling gives what the plain loop gives: tokens, ends, log-probabilities, whatever is asked for."""

import asyncio
import random

import pytest

import tiny_models
from engine_runs import greedy, make_llm
from every_kind import assert_idle, assert_same, everything, make_prompts, result_of
from pico_vllm import AsyncLLM, SamplingParams
from pico_vllm.sampling_params import StructuredOutputsParams
from pico_vllm.worker.host_ring import Slot

OVERLAP = {"async_scheduling": True}
SETTINGS = {
    "plenty": {},
    "chunks-of-1": {"max_num_batched_tokens": 1},
    "chunks-of-7": {"max_num_batched_tokens": 7},
    "tiny-pool": {"num_gpu_blocks_override": 12, "block_size": 4},
    "tiny-pool-tiny-chunks": {"num_gpu_blocks_override": 11, "block_size": 4, "max_num_batched_tokens": 5},
    "three-at-a-time": {"max_num_seqs": 3},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("llama")
    tiny_models.save_tiny_model(tiny_models.MODELS["llama-gqa3-d64-tied"], directory)
    return directory


@pytest.fixture(scope="module")
def plain(checkpoint):
    llm = make_llm(checkpoint)
    assert not llm.engine.core.overlaps, "the CPU's default"
    return llm


@pytest.fixture(scope="module")
def overlapped(checkpoint):
    llm = make_llm(checkpoint, **OVERLAP)
    assert llm.engine.core.overlaps
    return llm


@pytest.mark.parametrize("setting", SETTINGS)
def test_every_kind_of_request_gives_the_same(checkpoint, plain, setting):
    params = everything(plain.engine.tokenizer)
    prompts = make_prompts(len(params))
    expected = plain.generate(prompts, params, use_tqdm=False)
    reasons = {c.finish_reason for output in expected for c in output.outputs}
    assert reasons == {"stop", "length", "error"}, "worth comparing with"
    llm = make_llm(checkpoint, **OVERLAP, **SETTINGS[setting])
    for _ in range(2):  # rows are used again
        assert_same(llm.generate(prompts, params, use_tqdm=False), expected)
        assert_idle(llm.engine)
    assert (llm.engine.core.scheduler.num_preemptions > 0) == setting.startswith("tiny-pool")


def test_a_clients_functions_are_called_as_often_and_with_the_same(plain, overlapped):
    """An overrun would call them with a token behind the end, and once too often."""

    def calls(llm):
        seen = {name: [] for name in "ab"}

        def remember(name):
            return lambda ids, logits: seen[name].append(list(ids)) or logits

        params = [greedy(9, logits_processors=[remember("a")], logit_bias={1: 100}, min_tokens=4, ignore_eos=False)]
        params += [greedy(6, logits_processors=[remember("b")]), greedy(12)]
        _, b, _ = llm.generate(make_prompts(3), params, use_tqdm=False)
        assert seen["b"] == [b.outputs[0].token_ids[:n] for n in range(6)]
        return seen

    assert calls(overlapped) == calls(plain)


def test_nobody_reads_the_memory_of_a_step_that_is_over(checkpoint, plain, monkeypatch):
    """A slot is poisoned when the next step takes it."""
    params = everything(plain.engine.tokenizer)
    prompts = make_prompts(len(params))
    expected = plain.generate(prompts, params, use_tqdm=False)
    begin, begun = Slot.begin, []

    def poison_and_begin(slot):
        slot._array.fill(0xFF)
        slot._ids.fill_(-(2**40))
        begin(slot)
        begun.append(slot)

    monkeypatch.setattr(Slot, "begin", poison_and_begin)
    llm = make_llm(checkpoint, **OVERLAP)
    assert_same(llm.generate(prompts, params, use_tqdm=False), expected)
    assert len(set(begun)) == 2, "the slots take turns"


def test_requests_that_come_while_others_run(plain, overlapped):
    """One arrives at every step, some of them to be ended by the step that is in flight."""
    params = everything(plain.engine.tokenizer)
    prompts = make_prompts(len(params))

    def run(llm):
        finals, arrivals = {}, list(enumerate(zip(prompts, params, strict=True)))
        while arrivals or llm.engine.has_unfinished_requests():
            if arrivals:
                index, (prompt, param) = arrivals.pop(0)
                llm.engine.add_request(str(index), prompt, param)
            for delta in llm.engine.step():
                if delta.final is not None:
                    finals[int(delta.request_id)] = delta.final
        return [finals[index] for index in range(len(prompts))]

    assert_same(run(overlapped), run(plain))
    assert_idle(overlapped.engine)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("seed", range(3))
def test_aborts_in_every_state_leave_nothing_and_touch_nobody(checkpoint, plain, setting, seed):
    """Ids come again at once after an abort. What a request got until then is what it would have got."""
    rng = random.Random(seed)
    asks = []
    for prompt in make_prompts(16, seed):
        param = rng.choice([greedy(rng.randrange(1, 14)), SamplingParams(seed=rng.randrange(99), max_tokens=9)])
        asks.append((prompt, param))
    alone = [output.outputs[0] for output in plain.generate(*map(list, zip(*asks, strict=True)), use_tqdm=False)]
    llm = make_llm(checkpoint, **OVERLAP, **SETTINGS[setting])
    engine, got, live, num_aborted = llm.engine, {}, {}, 0  # request id → which ask it is
    waiting = list(range(len(asks))) * 2
    while waiting or engine.has_unfinished_requests():
        for request_id in "abcdef":
            if waiting and request_id not in live and rng.random() < 0.5:
                live[request_id] = waiting.pop()
                got[request_id] = []
                engine.add_request(request_id, *asks[live[request_id]])
        for delta in engine.step():
            completion = alone[live[delta.request_id]]
            got[delta.request_id] += delta.new_token_ids
            assert got[delta.request_id] == completion.token_ids[: len(got[delta.request_id])]
            if delta.finish_reason is not None:
                assert (got[delta.request_id], delta.finish_reason) == (completion.token_ids, completion.finish_reason)
                del live[delta.request_id]
        for request_id in list(live):
            if rng.random() < 0.1:
                assert engine.abort(request_id)
                del live[request_id]
                num_aborted += 1
    assert num_aborted > 2
    assert_idle(engine)


@pytest.mark.parametrize("setting", SETTINGS)
def test_grammars_beside_others_give_the_same(checkpoint, plain, setting):
    grammars = [
        StructuredOutputsParams(regex="[0-9]{3}"),
        StructuredOutputsParams(choice=("yes", "no, never")),
        StructuredOutputsParams(json='{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'),
        StructuredOutputsParams(regex="[a-z]+"),
        StructuredOutputsParams(regex=""),
    ]
    params = [
        SamplingParams(temperature=t, seed=3, max_tokens=12, structured_outputs=g) for t in (0.0, 1.0) for g in grammars
    ]
    params += [greedy(9), SamplingParams(temperature=1.0, seed=1, max_tokens=12)]
    params += [SamplingParams(temperature=1.0, seed=9, max_tokens=9, structured_outputs=grammars[3], stop=["e", "k"])]
    params += [greedy(8, structured_outputs=grammars[3], logits_processors=[lambda ids, logits: logits])]
    prompts = make_prompts(len(params))
    expected = plain.generate(prompts, params, use_tqdm=False)
    assert {output.outputs[0].finish_reason for output in expected} == {"stop", "length"}
    llm = make_llm(checkpoint, **OVERLAP, **SETTINGS[setting])
    assert_same(llm.generate(prompts, params, use_tqdm=False), expected)
    assert llm.engine.core.structured_output.num_matchers == 0
    assert_idle(llm.engine)


def test_streams_of_an_async_engine_are_the_same(checkpoint, plain):
    params = [param for param in everything(plain.engine.tokenizer) if param.n == 1]
    prompts = make_prompts(len(params))
    expected = [result_of(output)[0] for output in plain.generate(prompts, params, use_tqdm=False)]

    async def final(llm, prompt, param):
        async for delta in llm.generate(prompt, param):
            last = delta
        return last.final

    async def run():
        llm = AsyncLLM(str(checkpoint), device="cpu", dtype="float32", num_gpu_blocks_override=256, **OVERLAP)
        try:
            return await asyncio.gather(*(final(llm, *ask) for ask in zip(prompts, params, strict=True)))
        finally:
            await llm.shutdown()

    assert [result_of(output)[0] for output in asyncio.run(run())] == expected


@pytest.mark.multiprocess
def test_a_core_in_its_own_process_gives_the_same(checkpoint, plain):
    params = [param for param in everything(plain.engine.tokenizer) if not param.logits_processors]
    prompts = make_prompts(len(params))
    expected = plain.generate(prompts, params, use_tqdm=False)
    llm = make_llm(checkpoint, engine_core_process=True, max_num_batched_tokens=16, **OVERLAP)
    try:
        for _ in range(2):
            assert_same(llm.generate(prompts, params, use_tqdm=False), expected)
    finally:
        llm.engine.shutdown()
