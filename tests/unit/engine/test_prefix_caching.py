"""The prefix cache changes no result: tokens, ends, log-probabilities, whatever is asked for and whatever is shared."""

import asyncio
import random

import pytest
import torch

import tiny_models
from engine_runs import MAX_LOGPROB_ERROR, greedy, make_llm
from every_kind import assert_idle, everything
from every_kind import assert_same as assert_same_within
from pico_vllm import AsyncLLM, SamplingParams
from pico_vllm.errors import RequestError

CACHE = {"enable_prefix_caching": True}
SETTINGS = {
    "plenty": {},
    "chunks-of-1": {"max_num_batched_tokens": 1},
    "chunks-of-7": {"max_num_batched_tokens": 7},
    "whole-prompts": {"enable_chunked_prefill": False, "max_num_batched_tokens": 256},
    "block-size-1": {"block_size": 1, "num_gpu_blocks_override": 1024},
    "block-size-4": {"block_size": 4},
    "tiny-pool": {"num_gpu_blocks_override": 20, "block_size": 4},
    "tiny-pool-tiny-chunks": {"num_gpu_blocks_override": 19, "block_size": 4, "max_num_batched_tokens": 5},
    "three-at-a-time": {"max_num_seqs": 3},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("qwen2")
    tiny_models.save_tiny_model(tiny_models.MODELS["qwen2-gqa6-d64-tied"], directory)
    return directory


@pytest.fixture(scope="module")
def plain(checkpoint):
    return make_llm(checkpoint)


@pytest.fixture(scope="module")
def cached(checkpoint):
    return make_llm(checkpoint, **CACHE)


def sharing_prompts(count, seed=0):
    """Prompts that begin alike for 31, 16, 5 … tokens, are the same, or are the beginning of each other."""
    rng = random.Random(seed)
    trunk = [rng.randrange(2, 258) for _ in range(40)]
    lengths = (31, 16, 5, 32, 40, 33, 1, 15, 17, 31)
    own = (1, 0, 7, 0, 3, 2, 0, 17, 1, 1)
    prompts = []
    for i in range(count):
        index = i % len(lengths)
        prompts.append(trunk[: lengths[index]] + [rng.randrange(2, 258) for _ in range(own[index])])
    return prompts


def assert_same(ours, theirs):
    """Within what fp32 allows for sums in another order: a hit changes how a prompt is cut, as chunks do.

    (Chunks of 1 without a cache differ by 9.3e-6 here, with one by as much, tiny chunks in a tiny pool by 1.1e-5.)
    """
    assert_same_within(ours, theirs, MAX_LOGPROB_ERROR)


def hits(llm):
    return llm.engine.cache_stats.num_hit_tokens


@pytest.fixture(scope="module")
def expected(plain):
    params = everything(plain.engine.tokenizer)
    return plain.generate(sharing_prompts(len(params)), params)


@pytest.mark.parametrize("overlap", [False, True], ids=["plain-loop", "overlap"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_every_kind_of_request_gives_the_same(checkpoint, plain, expected, setting, overlap):
    """Twice in the same engine: the second time nearly everything is there."""
    params = everything(plain.engine.tokenizer)
    prompts = sharing_prompts(len(params))
    llm = make_llm(checkpoint, async_scheduling=overlap, **CACHE, **SETTINGS[setting])
    for _ in range(2):
        assert_same(llm.generate(prompts, params), expected)
        assert_idle(llm.engine)
    assert hits(llm) > 200
    assert (llm.engine.core.scheduler.num_preemptions > 0) == setting.startswith("tiny-pool")
    assert (llm.engine.cache_stats.num_evicted_blocks > 0) == setting.startswith("tiny-pool")


def test_the_naive_ops_give_the_same_too(checkpoint):
    """Compared with themselves: their log-probabilities are rounded in another way than those of the other backends."""
    engines = [make_llm(checkpoint, backend="reference", enable_prefix_caching=caching) for caching in (True, False)]
    params = everything(engines[0].engine.tokenizer)
    outputs = [llm.generate(sharing_prompts(len(params)), params) for llm in engines]
    assert_same(*outputs)
    assert hits(engines[0]) > 200


def test_unused_slots_are_never_read(checkpoint, plain, expected):
    """Every block is NaN before it is written, and so is what follows the valid part of a copied block."""
    params = everything(plain.engine.tokenizer)
    llm = make_llm(checkpoint, **CACHE, block_size=4)
    for kv_cache in llm.engine.core.executor.runner.kv_caches:
        kv_cache.fill_(float("nan"))
    for _ in range(2):
        assert_same(llm.generate(sharing_prompts(len(params)), params), expected)


def test_shared_slots_are_never_written_again(cached):
    """A prompt of two whole blocks twice: the second time not a bit of them changes."""
    prompt = list(range(10, 42))
    cached.generate(prompt, greedy(1))
    core = cached.engine.core
    match = core.kv_cache_manager._tree.match(None, memoryview_bytes(prompt))
    blocks = core.kv_cache_manager._tree.block_ids(match, 32)
    before = [kv_cache[blocks].clone() for kv_cache in core.executor.runner.kv_caches]
    output = cached.generate(prompt, greedy(5))[0]
    assert output.num_cached_tokens == 31
    after = [kv_cache[blocks] for kv_cache in core.executor.runner.kv_caches]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def memoryview_bytes(token_ids):
    return torch.tensor(token_ids, dtype=torch.int32).numpy().tobytes()


@pytest.mark.parametrize("overlap", [False, True], ids=["plain-loop", "overlap"])
def test_a_conversation_hits_its_own_answers(checkpoint, plain, overlap):
    llm = make_llm(checkpoint, async_scheduling=overlap, **CACHE)
    conversation = list(range(20, 43))
    for turn in range(4):
        output, other = (each.generate(conversation, greedy(9))[0] for each in (llm, plain))
        assert output.outputs[0].token_ids == other.outputs[0].token_ids
        # Of the turn before all but its last token, whose KV is stored only if a step followed.
        assert output.num_cached_tokens == (0 if turn == 0 else len(conversation) - 3 - 1)
        conversation = [*conversation, *output.outputs[0].token_ids, 50 + turn, 60, 70]


def test_a_burst_computes_a_shared_prefix_once(checkpoint, plain):
    llm = make_llm(checkpoint, **CACHE)
    header = list(range(30, 94))
    prompts = [[*header, 100 + i, 7] for i in range(8)]
    outputs = llm.generate(prompts, greedy(4))
    assert [o.outputs[0].token_ids for o in outputs] == [
        o.outputs[0].token_ids for o in plain.generate(prompts, greedy(4))
    ]
    assert [output.num_cached_tokens for output in outputs] == [0] + [64] * 7
    assert llm.engine.stats.num_tokens == 66 + 7 * 2 + 8 * 3


def test_forks_share_their_prompt(checkpoint, plain):
    llm = make_llm(checkpoint, **CACHE)
    params = SamplingParams(n=4, temperature=1.0, seed=3, max_tokens=6, ignore_eos=True)
    prompt = list(range(40, 75))  # 2 blocks of 16, and 3
    ours, theirs = (each.generate(prompt, params)[0] for each in (llm, plain))
    assert [c.token_ids for c in ours.outputs] == [c.token_ids for c in theirs.outputs]
    assert ours.num_cached_tokens == 0
    assert llm.engine.stats.num_tokens == 35 + 3 * 3 + 4 * 5


def test_num_cached_tokens_is_none_until_it_is_known(cached):
    engine = cached.engine
    engine.add_request("r", list(range(9)), greedy(3))
    (delta,) = engine.abort("r")
    assert delta.final.num_cached_tokens is None


def test_tenants_never_share(checkpoint):
    llm = make_llm(checkpoint, **CACHE)

    def cached_tokens(salt):
        prompt = {"prompt_token_ids": list(range(20, 40)), "cache_salt": salt}
        return llm.generate(prompt, greedy(1))[0].num_cached_tokens

    assert [cached_tokens(salt) for salt in ("a", "b", None, "a", None)] == [0, 0, 0, 19, 19]


@pytest.mark.parametrize("salt", ["", 5, "a\ud800"])
def test_a_wrong_salt_is_refused(cached, salt):
    with pytest.raises(RequestError, match="cache_salt"):
        cached.generate({"prompt_token_ids": [5], "cache_salt": salt}, greedy(1))


def test_reset_forgets_everything_and_is_refused_while_a_request_runs(checkpoint):
    llm = make_llm(checkpoint, **CACHE)
    prompt = list(range(20, 40))
    stream = llm.generate(prompt, greedy(5), stream=True)
    next(stream)
    assert not llm.reset_prefix_cache()
    stream.close()
    assert llm.engine.cache_stats.num_cached_blocks > 0
    assert llm.reset_prefix_cache()
    assert llm.engine.cache_stats.num_free_blocks == llm.engine.core.limits.num_blocks
    assert llm.generate(prompt, greedy(1))[0].num_cached_tokens == 0


def test_a_failed_step_empties_the_cache_and_costs_no_request(checkpoint, plain, monkeypatch):
    """What the step should have stored is garbage; nobody may match it."""
    llm = make_llm(checkpoint, **CACHE)
    prompts = [list(range(20, 50)), [*range(20, 45), 99]]
    runner, engine = llm.engine.core.executor.runner, llm.engine
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, greedy(6))
    tokens = {"0": [], "1": []}

    def garbage(*_):
        for kv_cache in runner.kv_caches:
            kv_cache.fill_(float("nan"))
        raise RuntimeError("the device has failed")

    with monkeypatch.context() as patch:
        patch.setattr(runner, "_forward", garbage)
        with pytest.raises(RuntimeError, match="the device has failed"):
            engine.step()
    assert engine.cache_stats.num_free_blocks == engine.core.limits.num_blocks
    while engine.has_unfinished_requests():
        for delta in engine.step():
            tokens[delta.request_id] += delta.new_token_ids
    assert list(tokens.values()) == [o.outputs[0].token_ids for o in plain.generate(prompts, greedy(6))]


@pytest.mark.multiprocess
def test_a_core_in_another_process_tells_and_resets_the_same(checkpoint):
    llm = make_llm(checkpoint, engine_core_process=True, **CACHE)
    try:
        prompt = {"prompt_token_ids": list(range(20, 40)), "cache_salt": "t"}
        assert [llm.generate(prompt, greedy(2))[0].num_cached_tokens for _ in range(2)] == [0, 19]
        stats = llm.engine.cache_stats
        assert (stats.num_prompt_tokens, stats.num_hit_tokens, stats.num_active_blocks) == (40, 19, 0)
        assert llm.reset_prefix_cache()
        assert llm.engine.cache_stats.num_cached_blocks == 0
        assert llm.generate(prompt, greedy(1))[0].num_cached_tokens == 0
    finally:
        llm.engine.shutdown()


def test_an_async_engine_resets_between_two_steps(checkpoint):
    async def run():
        options = {"device": "cpu", "dtype": "float32", "num_gpu_blocks_override": 64}
        async with AsyncLLM(str(checkpoint), **options) as llm:
            counts = []
            for _ in range(2):
                async for delta in llm.generate(list(range(20, 40)), greedy(2)):
                    if delta.final is not None:
                        counts.append(delta.final.num_cached_tokens)
            return counts, await llm.reset_prefix_cache(), llm.engine.cache_stats.num_cached_blocks

    assert asyncio.run(run()) == ([0, 19], True, 0)


def test_it_is_on_unless_it_is_turned_off():
    from pico_vllm import EngineConfig

    assert EngineConfig.from_options().cache.enable_prefix_caching
