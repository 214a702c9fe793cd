"""Overlapped scheduling on a GPU: what the plain loop gives, with everything in flight that can be."""

import random

import pytest
import torch

import tiny_models
from engine_runs import greedy
from pico_vllm import LLM, SamplingParams
from pico_vllm.sampling_params import StructuredOutputsParams

OPTIONS = {"device": "cuda", "dtype": "float32", "max_num_seqs": 48, "num_gpu_blocks_override": 2000}
OPTIONS |= {"target_itl_ms": 0}  # which cuts prompts by what steps take here


pytestmark = pytest.mark.usefixtures("exact_fp32_products")


@pytest.fixture(scope="module", params=["qwen2-gqa6-d64-tied", "llama-gqa3-d64-tied"])
def checkpoint(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp(request.param)
    tiny_models.save_tiny_model(tiny_models.MODELS[request.param], directory)
    return directory


@pytest.fixture(scope="module", params=["graphs", "eager"])
def overlapped(checkpoint, request):
    llm = LLM(str(checkpoint), **OPTIONS, enforce_eager=request.param == "eager")
    assert llm.engine.core.overlaps, "the default on a GPU"
    return llm


@pytest.fixture(scope="module")
def plain(checkpoint):
    llm = LLM(str(checkpoint), **OPTIONS, async_scheduling=False)
    assert not llm.engine.core.overlaps
    return llm


def make_prompts(count, longest, seed=0):
    rng = random.Random(seed)
    return [[rng.randrange(2, 258) for _ in range(rng.randrange(1, longest))] for _ in range(count)]


def outputs(llm, prompts, params):
    return [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]


def assert_same(ours, theirs, prompts, params):
    found, expected = outputs(ours, prompts, params), outputs(theirs, prompts, params)
    for mine, other in zip(found, expected, strict=True):
        assert (mine.token_ids, mine.text, mine.finish_reason) == (other.token_ids, other.text, other.finish_reason)
        if other.cumulative_logprob is not None:
            assert mine.cumulative_logprob == pytest.approx(other.cumulative_logprob, abs=1e-4 * len(other.token_ids))


def every_kind():
    """Ends that nobody can foresee, masks, penalties, draws, log-probabilities, a grammar."""

    def sampled(**kwargs):
        return SamplingParams(**({"temperature": 0.9, "seed": len(kwargs), "max_tokens": 24} | kwargs))

    return [
        greedy(24, logprobs=2, prompt_logprobs=1),
        greedy(1),
        sampled(logit_bias={1: 4.0}),
        sampled(logit_bias={1: 4.0}, min_tokens=6, logprobs=0),
        sampled(stop=["e", "k"]),
        sampled(top_p=0.8, top_k=30, logprobs=3),
        sampled(min_p=0.1, frequency_penalty=1.0, repetition_penalty=1.2),
        sampled(bad_words=["ab", "e"], allowed_token_ids=list(range(60, 130))),
        greedy(9, allowed_token_ids=[7], stop_token_ids=[7], min_tokens=2),
        sampled(logits_processors=[lambda ids, logits: logits.roll(len(ids))]),
        sampled(structured_outputs=StructuredOutputsParams(regex="[0-9]{5}")),
        sampled(structured_outputs=StructuredOutputsParams(regex="[a-z]+")),
    ]


def test_every_kind_of_request_gives_the_same(overlapped, plain):
    params = every_kind() * 4
    assert_same(overlapped, plain, make_prompts(len(params), 60), params)


@pytest.mark.parametrize("num_seqs", [1, 2, 7, 48, 100])
def test_decodes_of_many_sizes_give_the_same(overlapped, plain, num_seqs):
    assert_same(overlapped, plain, make_prompts(num_seqs, 20, num_seqs), greedy(30, logprobs=0))


def test_preemption_and_chunks_give_the_same(checkpoint, plain):
    options = {"num_gpu_blocks_override": 30, "max_num_batched_tokens": 64}
    llm = LLM(str(checkpoint), **(OPTIONS | options))
    params = every_kind() * 3 + [greedy(90)] * 12
    assert_same(llm, plain, make_prompts(len(params), 90), params)
    assert llm.engine.core.scheduler.num_preemptions > 0


def test_memory_that_runs_out_ends_one_request(checkpoint, plain, monkeypatch):
    llm = LLM(str(checkpoint), **OPTIONS, enforce_eager=True)
    model = llm.engine.core.executor.runner._model
    original, calls = model.hidden_rows, iter(range(1000))

    def needs_too_much(*args):
        if next(calls) == 0:
            torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
        return original(*args)

    monkeypatch.setattr(model, "hidden_rows", needs_too_much)
    prompts = [[5, 6, 7], [9] * 100, [11, 3]]
    found, expected = outputs(llm, prompts, greedy(6)), outputs(plain, prompts, greedy(6))
    assert [completion.finish_reason for completion in found] == ["length", "error", "length"]
    assert [found[i].token_ids for i in (0, 2)] == [expected[i].token_ids for i in (0, 2)]


def test_the_host_never_waits_but_for_results(overlapped):
    """Whatever synchronises while a step is prepared and launched would wait for the step that runs."""
    engine, runner = overlapped.engine, overlapped.engine.core.executor.runner
    params = [param for param in every_kind() if not (param.logits_processors or param.structured_outputs)]
    prompts = make_prompts(len(params), 40)
    outputs(overlapped, prompts, params)  # what is done once is done
    start, sample = runner.start, runner.sample

    def strictly(function):
        def call(*args):
            torch.cuda.set_sync_debug_mode("error")
            try:
                return function(*args)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        return call

    runner.start, runner.sample = strictly(start), strictly(sample)
    try:
        outputs(overlapped, prompts, params)
    finally:
        runner.start, runner.sample = start, sample
    assert not engine.has_unfinished_requests()


def test_two_thousand_mixed_requests_with_random_aborts_give_everything_back(overlapped):
    rng = random.Random(4)
    engine, kinds = overlapped.engine, every_kind()
    core = engine.core
    outputs(overlapped, make_prompts(len(kinds), 50), kinds)  # tables that the first requests make
    core.step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    waiting = list(range(2000))
    while waiting or engine.has_unfinished_requests():
        while waiting and engine.num_unfinished_requests < 60:
            prompt = [rng.randrange(2, 258) for _ in range(rng.randrange(1, 50))]
            engine.add_request(str(waiting.pop()), prompt, rng.choice(kinds))
        for delta in engine.step():
            if delta.finish_reason is None and rng.random() < 0.02:
                engine.abort(delta.request_id)
    manager = core.kv_cache_manager
    assert manager.num_free_blocks == manager.num_blocks
    manager.check_invariants()
    core.step()
    assert core._inflight is None and core.executor.runner.num_rows == 0
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before < 1 << 20
