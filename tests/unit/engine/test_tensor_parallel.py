"""Tensor parallelism through the whole engine: several ranks, one a process, give what one rank gives.

In float32, log-probabilities within 1e-4 and the same tokens up to a near-tie (``engine_runs``), whatever the setting.
The ranks of a setting start once and serve all of its tests. A watchdog ends ranks that take too long.
"""

import threading
from contextlib import contextmanager

import pytest

import tiny_models
from engine_runs import assert_close_logprobs, assert_same_tokens, greedy, make_llm, run_with_logits
from pico_vllm import SamplingParams
from pico_vllm.errors import ConfigError, EngineDeadError, RequestError
from pico_vllm.kernels.backend import REFERENCE
from pico_vllm.sampling_params import StructuredOutputsParams

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("one_thread")]

WATCHDOG_S = 120.0
NUM_TOKENS = 10
LENGTHS = (1, 5, 16, 17, 40, 63)
PROMPTS = [[(7 * i + 3 * j) % 290 + 2 for j in range(n)] for i, n in enumerate(LENGTHS)]
PARAMS = [
    greedy(NUM_TOKENS),
    SamplingParams(temperature=0.8, top_k=20, seed=7, max_tokens=NUM_TOKENS, ignore_eos=True),
    greedy(NUM_TOKENS),
    SamplingParams(temperature=1.1, top_p=0.9, min_p=0.01, seed=2**63 + 5, max_tokens=NUM_TOKENS, ignore_eos=True),
    SamplingParams(temperature=0.7, seed=1, max_tokens=NUM_TOKENS, ignore_eos=True),
    greedy(NUM_TOKENS),
]
SMALL = {"block_size": 8, "max_num_seqs": 4}
#: 4 query heads and 2 KV heads: of four ranks two share each KV head.
SETTINGS = {
    "tp2-cache-chunks-preemption": {
        "tensor_parallel_size": 2,
        "enable_prefix_caching": True,
        "max_num_batched_tokens": 24,
        "num_gpu_blocks_override": 10,
    },
    "tp2-overlap-and-target": {"tensor_parallel_size": 2, "async_scheduling": True, "target_itl_ms": 50.0},
    "tp4-cache": {"tensor_parallel_size": 4, "enable_prefix_caching": True, "max_num_batched_tokens": 40},
    "tp2-in-a-process": {"tensor_parallel_size": 2, "engine_core_process": True},
}
IN_PROCESS = [name for name in SETTINGS if name != "tp2-in-a-process"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("llama")
    tiny_models.save_tiny_model(tiny_models.MODELS["llama-biases-llama3-rope"], directory)
    return directory


@pytest.fixture(scope="module")
def single(checkpoint):
    return make_llm(checkpoint, **SMALL)


@pytest.fixture(scope="module")
def expected(single):
    """Each request alone, on one rank."""
    return [run_with_logits(single, [prompt], params)[0] for prompt, params in zip(PROMPTS, PARAMS, strict=True)]


@pytest.fixture(scope="module", params=SETTINGS)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def shared(checkpoint, name):
    llm = make_llm(checkpoint, **(SMALL | SETTINGS[name]))
    yield llm
    llm.engine.shutdown()


@pytest.fixture
def llm(shared):
    with watched(shared):
        yield shared
        assert not shared.engine.has_unfinished_requests()


@contextmanager
def watched(llm):
    """A hang is a failure: the ranks, or the process of the core, are then ended from outside."""
    timer = threading.Timer(WATCHDOG_S, llm.engine.shutdown)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def same(outputs, others):
    for ours, theirs in zip(outputs, others, strict=True):
        assert ours.outputs[0].token_ids == theirs.outputs[0].token_ids
        assert ours.outputs[0].text == theirs.outputs[0].text
        assert ours.outputs[0].finish_reason == theirs.outputs[0].finish_reason


def test_tokens_and_logits_are_those_of_one_rank(llm, name, expected):
    if name not in IN_PROCESS:
        outputs = llm.generate(PROMPTS, PARAMS)
        for output, run in zip(outputs, expected, strict=True):
            assert_same_tokens(output.outputs[0].token_ids, run.token_ids, run.logits)
        return
    runs = run_with_logits(llm, PROMPTS, PARAMS, order="staggered")
    for run, alone in zip(runs, expected, strict=True):
        assert_close_logprobs(run.logits, alone.logits)
        assert_same_tokens(run.token_ids, alone.token_ids, alone.logits)


def test_requests_that_preempt_each_other_are_computed_anew(llm, name, single):
    """Four that each begin with two blocks and end with five: the small pool holds ten."""
    prompts = [prompt[:12] for prompt in PROMPTS[2:]]
    params = [greedy(24) if i % 2 else SamplingParams(seed=i, max_tokens=24, ignore_eos=True) for i in range(4)]
    outputs = llm.generate(prompts, params)
    if name in IN_PROCESS:
        assert (llm.engine.core.scheduler.num_preemptions > 0) == ("preemption" in name)
    same(outputs, single.generate(prompts, params))


def test_what_the_prefix_cache_gives_is_the_same(llm, name, expected):
    """Once more in the same engine: with a prefix cache, prompts are hits, with partial blocks copied first."""
    outputs = llm.generate(PROMPTS[::-1], PARAMS[::-1])
    for output, run in zip(outputs[::-1], expected, strict=True):
        assert_same_tokens(output.outputs[0].token_ids, run.token_ids, run.logits)
    cached = llm.engine.cache_stats.num_hit_tokens
    assert (cached > 0) == ("cache" in name)


def test_logprobs_and_prompt_logprobs_are_those_of_one_rank(llm, single):
    params = [greedy(4, logprobs=3, prompt_logprobs=2), greedy(4, logprobs=0), greedy(4, prompt_logprobs=5)]
    prompts = [PROMPTS[3], PROMPTS[1], PROMPTS[4]]
    outputs, others = (each.generate(prompts, params) for each in (llm, single))
    same(outputs, others)
    for ours, theirs in zip(outputs, others, strict=True):
        for got, wanted in (
            (ours.outputs[0].logprobs, theirs.outputs[0].logprobs),
            (ours.prompt_logprobs, theirs.prompt_logprobs),
        ):
            assert (got is None) == (wanted is None)
            for at, other in zip(got or [], wanted or [], strict=True):
                if other is None:
                    assert at is None
                    continue
                assert at.keys() == other.keys()
                assert all(abs(at[i].logprob - other[i].logprob) < 1e-4 for i in at)
                assert [entry.rank for entry in at.values()] == [entry.rank for entry in other.values()]


def test_masks_bias_and_penalties_act_on_every_rank_alike(llm, single):
    """A rank that chose another token than rank 0 would go on with it: its KV, and all that follows, would differ."""
    params = [
        greedy(8, repetition_penalty=1.7, presence_penalty=0.5),
        SamplingParams(temperature=0.9, seed=3, max_tokens=8, ignore_eos=True, frequency_penalty=1.5),
        greedy(8, logit_bias={77: 100.0}, bad_words=["x", "ab"]),
        greedy(8, allowed_token_ids=tuple(range(100, 120)), min_tokens=2),
        SamplingParams(
            temperature=0.0, max_tokens=12, structured_outputs=StructuredOutputsParams(choice=("yes", "no"))
        ),
        SamplingParams(
            temperature=1.0, seed=5, max_tokens=12, structured_outputs=StructuredOutputsParams(regex="[a-f]{9}")
        ),
    ]
    prompts = ["some text", "another", "a third one", "b", "Is it so?", "spell"]
    outputs = llm.generate(prompts, params)
    same(outputs, single.generate(prompts, params))
    assert list(outputs[2].outputs[0].token_ids) == [77] * 8
    assert outputs[4].outputs[0].text in ("yes", "no")


def test_parallel_samples_and_aborts(llm, single):
    params = SamplingParams(temperature=1.0, seed=11, max_tokens=6, n=3, ignore_eos=True)
    ours, theirs = (each.generate([PROMPTS[2]], params)[0] for each in (llm, single))
    assert [c.token_ids for c in ours.outputs] == [c.token_ids for c in theirs.outputs]
    stream = llm.generate([PROMPTS[1], PROMPTS[2]], greedy(50), stream=True)
    next(stream)
    stream.close()
    same(llm.generate(PROMPTS[:2], greedy(5)), single.generate(PROMPTS[:2], greedy(5)))


def test_what_cannot_be_sent_is_refused_alone(llm, single):
    with pytest.raises(RequestError, match="logits_processors"):
        llm.generate(PROMPTS[0], greedy(2, logits_processors=[lambda ids, logits: logits]))
    with pytest.raises(RequestError, match="surrogate"):
        llm.generate(PROMPTS[0], greedy(2, stop=["\ud800"]))
    same(llm.generate(PROMPTS[:1], greedy(3)), single.generate(PROMPTS[:1], greedy(3)))


def test_an_error_between_launch_and_choice_is_forgotten_by_all_ranks(llm, name, single, monkeypatch):
    if name not in IN_PROCESS:
        return

    def fail(plan):
        raise ZeroDivisionError("masks")

    params = greedy(4, structured_outputs=StructuredOutputsParams(regex="[a-f]{9}"))
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.core.structured_output, "masks", fail)
        with pytest.raises(ZeroDivisionError):
            llm.generate(PROMPTS[:3], params)
    same(llm.generate(PROMPTS[:3], params), single.generate(PROMPTS[:3], params))


def test_ops_of_one_rank_are_not_swapped_while_the_others_replay(llm, name, monkeypatch):
    if name not in IN_PROCESS:
        return
    runner = llm.engine.core.executor.runner
    before = runner.backend
    with monkeypatch.context() as patch:
        patch.setattr(runner, "_graphs", object())
        with pytest.raises(ConfigError, match="enforce_eager=True"):
            runner.set_backend(REFERENCE)
        runner.set_backend(before)
    assert runner.backend is before


def test_the_prefix_cache_can_be_reset(llm, single):
    assert llm.reset_prefix_cache()
    same(llm.generate(PROMPTS[:2], greedy(3)), single.generate(PROMPTS[:2], greedy(3)))


def test_a_rank_has_its_share_of_the_kv_cache_only(llm, name):
    if name in IN_PROCESS:
        runner = llm.engine.core.executor.runner
        assert {cache.shape[2] for cache in runner.kv_caches} == {1}  # of 2 KV heads
        assert runner.parameters["embed_tokens"].shape[0] == tiny_models.VOCAB_SIZE // runner.group.shard.size


def test_a_step_of_many_tokens_in_two_tiles_gives_what_it_gives_whole(checkpoint, monkeypatch):
    """Six prompts in one step, 1,191 tokens; then decodes, which are too few."""
    prompts = [[(11 * i + 5 * j) % 290 + 2 for j in range(196 + i)] for i in range(6)]
    params = [greedy(4, logprobs=1) if i % 2 else SamplingParams(seed=i, max_tokens=4, logprobs=1) for i in range(6)]
    single = make_llm(checkpoint, max_num_seqs=8).generate(prompts, params)
    llm = make_llm(checkpoint, max_num_seqs=8, tensor_parallel_size=2, async_tensor_parallel=True)
    seen = []
    with watched(llm):
        model = llm.engine.core.executor.runner._model
        tiles = model.tiles
        monkeypatch.setattr(model, "tiles", lambda num_tokens: seen.append(tiles(num_tokens)) or seen[-1])
        outputs = llm.generate(prompts, params)
        llm.engine.shutdown()
    same(outputs, single)
    assert [[tile.stop for tile in step] for step in seen] == [[640, 1191]] + [[6]] * 3
    for ours, theirs in zip(outputs, single, strict=True):
        for at, other in zip(ours.outputs[0].logprobs, theirs.outputs[0].logprobs, strict=True):
            assert all(abs(at[i].logprob - other[i].logprob) < 1e-4 for i in at.keys() & other.keys())


# -------------------------------------------------------------------------------------------------------- refusals
@pytest.mark.parametrize(("size", "in_a_process"), [(3, False), (5, False), (8, True)])
def test_a_size_that_does_not_divide_is_refused_before_any_process_starts(checkpoint, size, in_a_process):
    with pytest.raises(ConfigError, match=rf"tensor_parallel_size={size} .* sizes that do: 1, 2, 4"):
        make_llm(checkpoint, tensor_parallel_size=size, engine_core_process=in_a_process)


def test_calls_after_the_end_say_so(checkpoint):
    llm = make_llm(checkpoint, tensor_parallel_size=2)
    pids = llm.engine.core.executor.pids
    llm.engine.shutdown()
    llm.engine.shutdown()
    with pytest.raises(EngineDeadError, match="shut down"):
        llm.generate(PROMPTS[0], greedy(1))
    assert len(pids) == 1
