"""Overlap, captured passes, prefix cache, chunks, preemption and a target latency at once, against none of them."""

import random

import pytest

import tiny_models
from engine_runs import greedy, make_llm, with_graphs
from pico_vllm import SamplingParams
from pico_vllm.worker import cuda_graph

NUM_REQUESTS = 24
SIZES = {
    "DECODE_SIZES": (1, 2, 4, 8),
    "PROMPT_SIZES": (8, 16, 32),
    "MIXED_SIZES": (16, 32, 48),
    "MIXED_DECODES": (2, 8),
    "PROMPT_MAX_SEQ_LEN": 64,
    "SHORT_DECODES": 24,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("together")
    tiny_models.save_tiny_model(tiny_models.MODELS["qwen2-gqa3-d128-untied"], directory)
    return directory


def random_params(rng):
    kind = rng.random()
    if kind < 0.6:
        return greedy(rng.randrange(1, 14))
    if kind < 0.8:
        max_tokens = rng.randrange(1, 12)
        return SamplingParams(temperature=0.8, seed=rng.randrange(100), max_tokens=max_tokens, ignore_eos=True)
    wanted = {"repetition_penalty": 1.3} if kind < 0.9 else {"prompt_logprobs": 1, "logprobs": 1}
    return SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, **wanted)


def random_requests(rng):
    """(prompt, params, step before which it arrives); prompts begin with parts of three heads."""
    heads = [[rng.randrange(2, 290) for _ in range(rng.randrange(1, 60))] for _ in range(3)]
    requests = []
    for _ in range(NUM_REQUESTS):
        head = rng.choice(heads)
        own = [rng.randrange(2, 290) for _ in range(rng.randrange(12))]
        prompt = head[: rng.randrange(1, len(head) + 1)] + own
        requests.append((prompt, random_params(rng), rng.randrange(30)))
    return sorted(requests, key=lambda request: request[2])


def run(llm, requests):
    """Ids of each request."""
    engine, found, step, to_come = llm.engine, {}, 0, list(enumerate(requests))
    while to_come or engine.has_unfinished_requests():
        while to_come and to_come[0][1][2] <= step:
            index, (prompt, params, _) = to_come.pop(0)
            engine.add_request(str(index), prompt, params)
        for delta in engine.step():
            if delta.final is not None:
                found[int(delta.request_id)] = delta.final.outputs[0].token_ids
        step += 1
    engine.core.kv_cache_manager.check_invariants()
    return [found[index] for index in range(len(requests))]


@pytest.mark.parametrize("seed", range(8))
def test_the_tokens_are_those_of_the_plain_loop(checkpoint, monkeypatch, seed):
    for name, value in SIZES.items():
        monkeypatch.setattr(cuda_graph, name, value)
    rng = random.Random(seed)
    requests = random_requests(rng)
    block_size = rng.choice([1, 4, 16])
    options = {
        "block_size": block_size,
        "num_gpu_blocks_override": -(-90 // block_size) + rng.randrange(2, 40),  # one request fits, all of them don't
        "max_num_seqs": rng.choice([2, 5, 12]),
        "max_num_batched_tokens": rng.choice([5, 16, 48, 200]),
    }
    expected = run(make_llm(checkpoint, async_scheduling=False, enable_prefix_caching=False, **options), requests)
    target = rng.choice([0, 0.01, 5])
    llm = make_llm(checkpoint, async_scheduling=True, enable_prefix_caching=True, target_itl_ms=target, **options)
    with_graphs(llm)
    for kv_cache in llm.engine.core.executor.runner.kv_caches:
        kv_cache.fill_(float("nan"))
    assert run(llm, requests) == expected
    assert llm.engine.core.kv_cache_manager.stats.num_hit_tokens > 0
