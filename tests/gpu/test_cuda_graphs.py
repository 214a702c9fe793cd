"""CUDA graphs on a GPU: the same tokens and logits as eager steps, at every border of every size, under load."""

import itertools
import random

import pytest
import torch

import tiny_models
from engine_runs import greedy
from pico_vllm import LLM, SamplingParams
from pico_vllm.worker.cuda_graph import DECODE_SIZES, MIXED_SIZES, PROMPT_SIZES, mixed_sizes

OPTIONS = {
    "device": "cuda",
    "dtype": "float32",
    "max_num_seqs": 48,
    "num_gpu_blocks_override": 2000,
    "enable_prefix_caching": False,  # every prompt is computed, so steps have the sizes that a test means
    "target_itl_ms": 0,  # which cuts prompts by what steps take here
}


@pytest.fixture(scope="module", params=["qwen2-gqa6-d64-tied", "qwen3-gqa2-d128-untied"])
def checkpoint(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp(request.param)
    tiny_models.save_tiny_model(tiny_models.MODELS[request.param], directory)
    return directory


@pytest.fixture(scope="module")
def graphs(checkpoint):
    llm = LLM(str(checkpoint), **OPTIONS)
    assert llm.engine.core.executor.runner.uses_cuda_graphs
    return llm


@pytest.fixture(scope="module")
def eager(checkpoint):
    llm = LLM(str(checkpoint), **OPTIONS, enforce_eager=True)
    assert not llm.engine.core.executor.runner.uses_cuda_graphs
    return llm


def outputs(llm, prompts, params):
    found = llm.generate(prompts, params, use_tqdm=False)
    return [(o.outputs[0].token_ids, o.outputs[0].cumulative_logprob) for o in found]


def assert_same(graphs, eager, prompts, params):
    assert_equal(outputs(graphs, prompts, params), outputs(eager, prompts, params))


def assert_equal(ours, theirs):
    assert [ids for ids, _ in ours] == [ids for ids, _ in theirs]
    for (ids, a), (_, b) in zip(ours, theirs, strict=True):
        assert a == pytest.approx(b, abs=1e-4 * len(ids))


@pytest.mark.parametrize("border", [size for size in DECODE_SIZES if size < 48] + [48])
@pytest.mark.parametrize("beside", [-1, 0, 1])
def test_decodes_at_the_borders_of_sizes(graphs, eager, border, beside):
    rng = random.Random(border)
    num_seqs = border + beside
    if not 1 <= num_seqs <= 48:
        pytest.skip("no such batch")
    prompts = [[rng.randrange(2, 290) for _ in range(rng.randrange(1, 30))] for _ in range(num_seqs)]
    assert_same(graphs, eager, prompts, greedy(4, logprobs=0))


@pytest.mark.parametrize("border", [size for size in PROMPT_SIZES if size < 250])
@pytest.mark.parametrize("beside", [-1, 0, 1])
def test_prompts_at_the_borders_of_sizes(graphs, eager, border, beside):
    rng = random.Random(border)
    prompts = [[rng.randrange(2, 290) for _ in range(border + beside)]]
    assert_same(graphs, eager, prompts, greedy(3, logprobs=0))


def run_joined(llm, decoding, joining):
    """(ids, sum of logprobs) of each request; those of ``joining`` come when the others have decoded for a step."""
    engine, found = llm.engine, {}
    numbers = itertools.count()

    def add(prompts):
        for prompt in prompts:
            engine.add_request(str(next(numbers)), prompt, greedy(6, logprobs=0))

    add(decoding)
    for step in range(20):
        if step == 2:
            add(joining)
        for delta in engine.step():
            if delta.final is not None:
                output = delta.final.outputs[0]
                found[int(delta.request_id)] = (output.token_ids, output.cumulative_logprob)
    return [found[i] for i in range(len(decoding) + len(joining))]


@pytest.mark.parametrize("border", [size for size in MIXED_SIZES if size < 400])
@pytest.mark.parametrize("beside", [-1, 0, 1])
@pytest.mark.parametrize("num_decodes", [1, 7, 8, 9, 31, 32, 33, 40])
@pytest.mark.parametrize("num_prompts", [1, 2, 8])
def test_mixed_steps_at_the_borders_of_sizes(graphs, eager, monkeypatch, border, beside, num_decodes, num_prompts):
    rng = random.Random(border + num_decodes)
    num_prompt_tokens = border + beside - num_decodes
    if num_prompt_tokens < num_prompts:
        pytest.skip("no such step")
    decoding = [[rng.randrange(2, 290) for _ in range(rng.randrange(1, 30))] for _ in range(num_decodes)]
    cuts = sorted(rng.sample(range(1, num_prompt_tokens), num_prompts - 1))
    lengths = [end - start for start, end in itertools.pairwise([0, *cuts, num_prompt_tokens])]
    if max(lengths) > 240:
        pytest.skip("longer than the model")
    joining = [[rng.randrange(2, 290) for _ in range(length)] for length in lengths]
    runner_graphs = graphs.engine.core.executor.runner._graphs
    used, mixed = [], runner_graphs.mixed
    monkeypatch.setattr(runner_graphs, "mixed", lambda size, step: used.append(size) or mixed(size, step))
    assert_equal(run_joined(graphs, decoding, joining), run_joined(eager, decoding, joining))
    fitting = [s for s in mixed_sizes(2048, 48) if s.num_tokens >= border + beside and s.num_decodes >= num_decodes]
    assert used[-1] == fitting[0]


def test_chunks_beside_decodes_are_replayed(checkpoint, eager):
    """Of prompts that are longer than a step, with blocks that begin in any step."""
    rng = random.Random(5)
    llm = LLM(str(checkpoint), **(OPTIONS | {"max_num_batched_tokens": 64, "block_size": 4}))
    prompts = [[rng.randrange(2, 290) for _ in range(rng.randrange(1, 200))] for _ in range(40)]
    assert_same(llm, eager, prompts, greedy(30, logprobs=0))


def test_padding_and_unused_blocks_never_matter(graphs, eager):
    rng = random.Random(1)
    prompts = [[rng.randrange(2, 290) for _ in range(n)] for n in (1, 15, 16, 17, 33, 100, 200)]
    for kv_cache in graphs.engine.core.executor.runner.kv_caches:
        kv_cache.fill_(float("nan"))
    assert_same(graphs, eager, prompts, greedy(40, logprobs=0))


def test_sampling_penalties_and_logprobs_are_those_of_eager_steps(graphs, eager):
    rng = random.Random(2)
    prompts = [[rng.randrange(2, 290) for _ in range(rng.randrange(1, 40))] for _ in range(6)]
    params = [
        SamplingParams(temperature=0.9, top_p=0.8, seed=1, max_tokens=20, ignore_eos=True, logprobs=2),
        SamplingParams(temperature=1.2, top_k=5, seed=2, max_tokens=20, ignore_eos=True, logprobs=0),
        SamplingParams(temperature=0.0, repetition_penalty=1.4, max_tokens=20, ignore_eos=True, logprobs=0),
        SamplingParams(temperature=0.7, seed=3, max_tokens=20, ignore_eos=True, min_p=0.1, logprobs=0),
        greedy(20, logprobs=5),
        greedy(1, logprobs=0),
    ]
    assert_same(graphs, eager, prompts, params)


def test_preemption_under_load(checkpoint, eager):
    """A pool so small that requests are thrown out and computed anew."""
    rng = random.Random(3)
    prompts = [[rng.randrange(2, 290) for _ in range(rng.randrange(1, 60))] for _ in range(30)]
    llm = LLM(str(checkpoint), **(OPTIONS | {"num_gpu_blocks_override": 40}))
    assert_same(llm, eager, prompts, greedy(40, logprobs=0))
    assert llm.engine.core.scheduler.num_preemptions > 0


def test_shared_prefixes_and_copies_between_replays(checkpoint, eager):
    """Prompts that share whole blocks, parts of blocks and everything, twice; answers go on in copied blocks."""
    rng = random.Random(5)
    trunk = [rng.randrange(2, 290) for _ in range(100)]
    prompts = [trunk[: rng.randrange(1, 100)] + [rng.randrange(2, 290)] * rng.randrange(3) for _ in range(40)]
    prompts += [trunk[:length] for length in (16, 32, 31, 33, 96, 96)]
    llm = LLM(str(checkpoint), **(OPTIONS | {"enable_prefix_caching": True, "num_gpu_blocks_override": 300}))
    for kv_cache in llm.engine.core.executor.runner.kv_caches:
        kv_cache.fill_(float("nan"))
    for _ in range(2):
        assert_same(llm, eager, prompts, greedy(20, logprobs=0))
    assert llm.engine.cache_stats.hit_rate > 0.8
    core = llm.engine.core
    core.kv_cache_manager.check_invariants()
    assert core.kv_cache_manager.num_free_blocks == core.kv_cache_manager.num_blocks


def test_two_thousand_requests_with_random_aborts_give_all_memory_back(graphs):
    rng = random.Random(4)
    engine = graphs.engine
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    waiting = list(range(2000))
    while waiting or engine.has_unfinished_requests():
        while waiting and engine.num_unfinished_requests < 60:
            i = waiting.pop()
            prompt = [rng.randrange(2, 290) for _ in range(rng.randrange(1, 50))]
            temperature = rng.choice([0.0, 0.8])
            params = SamplingParams(temperature=temperature, max_tokens=rng.randrange(1, 12), ignore_eos=True)
            engine.add_request(str(i), prompt, params)
        for delta in engine.step():
            if delta.finish_reason is None and rng.random() < 0.02:
                engine.abort(delta.request_id)
    manager = engine.core.kv_cache_manager
    assert manager.num_free_blocks == manager.num_blocks
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before < 1 << 20
