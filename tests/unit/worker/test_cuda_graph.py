"""Captured passes without a GPU: `rerun` stands in for the capture, everything else is what a GPU does too.

Padding, sizes, the device's block tables and the choice between captured and eager are all here; that a replay computes
what was captured is tests/gpu's.
"""

import random

import pytest
import torch

import tiny_models
from engine_runs import greedy, make_llm
from pico_vllm import SamplingParams
from pico_vllm.kernels.decode_inputs import fill_decode_inputs_reference
from pico_vllm.worker import cuda_graph
from pico_vllm.worker.cuda_graph import CudaGraphRunner, rerun

PROMPTS = [[5, 6, 7], [9] * 20, [11, 3] * 8, list(range(20, 53)), [42]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("graphs")
    tiny_models.save_tiny_model(tiny_models.MODELS["qwen2-gqa3-d128-untied"], directory)
    return directory


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch):
    monkeypatch.setattr(cuda_graph, "DECODE_SIZES", (1, 2, 4, 8))
    monkeypatch.setattr(cuda_graph, "PROMPT_SIZES", (8, 32))
    monkeypatch.setattr(cuda_graph, "PROMPT_MAX_SEQS", 3)
    monkeypatch.setattr(cuda_graph, "PROMPT_MAX_SEQ_LEN", 64)


def with_graphs(llm):
    """Give an engine on the CPU its captures; returns the sizes that steps run on: ("decode" | "prompt", size)."""
    runner = llm.engine.core.executor.runner
    with torch.inference_mode():
        runner._graphs = graphs = CudaGraphRunner(
            runner._model,
            runner.kv_caches,
            block_table_rows=runner._rows.block_table_rows,
            last_token_ids=runner._rows.last_token_ids,
            max_num_seqs=llm.engine.config.scheduler.max_num_seqs,
            max_model_len=llm.engine.core.limits.max_model_len,
            block_size=llm.engine.config.cache.block_size,
            fill_decode_inputs=fill_decode_inputs_reference,
            ring=runner._ring,
            record=rerun,
        )
    used = []
    decode, prompt = graphs.decode, graphs.prompt
    graphs.decode = lambda size, *args: used.append(("decode", size)) or decode(size, *args)
    graphs.prompt = lambda size, *args: used.append(("prompt", size)) or prompt(size, *args)
    return used


def ids(outputs):
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("num_seqs, size", [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (8, 8)])
def test_a_decode_runs_on_the_smallest_size_that_holds_it(checkpoint, num_seqs, size):
    prompts = [[7 + i] * (i + 2) for i in range(num_seqs)]
    expected = ids(make_llm(checkpoint).generate(prompts, greedy(5), use_tqdm=False))
    llm = make_llm(checkpoint)
    used = with_graphs(llm)
    assert ids(llm.generate(prompts, greedy(5), use_tqdm=False)) == expected
    assert [step for step in used if step[0] == "decode"] == [("decode", size)] * 4


@pytest.mark.parametrize("overlap", [False, True])
def test_a_prefix_hit_is_no_captured_decode_and_what_follows_is(checkpoint, overlap):
    """Its one token comes from the host and is stored nowhere; its block table is new on the device."""
    prompts = [list(range(20, 52)), [*range(20, 45), 7], list(range(20, 52))]
    expected = ids(make_llm(checkpoint).generate(prompts, greedy(9), use_tqdm=False))
    llm = make_llm(checkpoint, enable_prefix_caching=True, async_scheduling=overlap)
    used = with_graphs(llm)
    for kv_cache in llm.engine.core.executor.runner.kv_caches:
        kv_cache.fill_(float("nan"))
    assert ids(llm.generate(prompts, greedy(9), use_tqdm=False)) == expected
    used.clear()
    assert ids(llm.generate(prompts, greedy(9), use_tqdm=False)) == expected
    assert used == [("prompt", 8)] + [("decode", 4)] * 8
    assert [llm.generate(prompts[0], greedy(1))[0].num_cached_tokens] == [31]


def test_more_sequences_than_any_size_run_eagerly(checkpoint):
    prompts = [[7 + i] * 3 for i in range(9)]
    expected = ids(make_llm(checkpoint).generate(prompts, greedy(4), use_tqdm=False))
    llm = make_llm(checkpoint)
    used = with_graphs(llm)
    assert ids(llm.generate(prompts, greedy(4), use_tqdm=False)) == expected
    assert used == []


@pytest.mark.parametrize(
    "length, used_first",
    [(1, ("prompt", 8)), (8, ("prompt", 8)), (9, ("prompt", 32)), (32, ("prompt", 32)), (33, ("decode", 1))],
)
def test_a_prompt_runs_on_the_smallest_size_that_holds_it(checkpoint, length, used_first):
    prompt = [list(range(3, 3 + length))]
    expected = ids(make_llm(checkpoint).generate(prompt, greedy(3), use_tqdm=False))
    llm = make_llm(checkpoint)
    used = with_graphs(llm)
    assert ids(llm.generate(prompt, greedy(3), use_tqdm=False)) == expected
    assert used[0] == used_first


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 8},  # chunks, with decodes beside them
        {"num_gpu_blocks_override": 70},  # preemption, where blocks are small
        {"max_num_seqs": 2},
    ],
)
def test_the_tokens_are_those_of_eager_steps(checkpoint, block_size, options):
    if block_size == 1 and "num_gpu_blocks_override" not in options:
        options = options | {"num_gpu_blocks_override": 400}
    sampled = SamplingParams(temperature=0.8, seed=3, max_tokens=9, ignore_eos=True)
    penalised = SamplingParams(temperature=0.0, max_tokens=6, repetition_penalty=1.3, ignore_eos=True)
    params = [greedy(12), sampled, greedy(30), penalised, greedy(1)]
    expected = ids(make_llm(checkpoint, block_size=block_size, **options).generate(PROMPTS, params, use_tqdm=False))
    llm = make_llm(checkpoint, block_size=block_size, **options)
    used = with_graphs(llm)
    for _ in range(2):  # rows are used again
        assert ids(llm.generate(PROMPTS, params, use_tqdm=False)) == expected
    kinds = {kind for kind, _ in used}
    assert kinds == {"decode", "prompt"} if "max_num_batched_tokens" in options else "decode" in kinds


def test_unused_blocks_and_padding_never_matter(checkpoint):
    """NaN everywhere in the cache at the start: what padding reads or writes would spread."""
    expected = ids(make_llm(checkpoint).generate(PROMPTS, greedy(20), use_tqdm=False))
    llm = make_llm(checkpoint)
    with_graphs(llm)
    for kv_cache in llm.engine.core.executor.runner.kv_caches:
        kv_cache.fill_(float("nan"))
    assert ids(llm.generate(PROMPTS, greedy(20), use_tqdm=False)) == expected


def test_requests_that_come_and_go_at_random(checkpoint):
    """Mixed steps, aborts and new rows: captured = eager, request by request."""
    rng = random.Random(0)
    prompts = [[rng.randrange(2, 290) for _ in range(rng.choice([1, 3, 15, 16, 17, 40]))] for _ in range(24)]
    lengths = [rng.randrange(1, 25) for _ in prompts]
    aborted = {i: rng.randrange(1, 10) for i in rng.sample(range(24), 6)}

    def run(llm):
        engine, done, tokens = llm.engine, 0, {str(i): [] for i in range(24)}
        waiting = list(range(24))
        while waiting or engine.has_unfinished_requests():
            for i in waiting[:2]:
                engine.add_request(str(i), prompts[i], greedy(lengths[i]))
            del waiting[:2]
            for delta in engine.step():
                tokens[delta.request_id] += delta.new_token_ids
                i = int(delta.request_id)
                if delta.finish_reason is None and len(tokens[delta.request_id]) >= aborted.get(i, 1000):
                    engine.abort(delta.request_id)
            done += 1
        assert engine.core.kv_cache_manager.num_free_blocks == engine.core.kv_cache_manager.num_blocks
        return tokens

    expected = run(make_llm(checkpoint, max_num_seqs=8))
    llm = make_llm(checkpoint, max_num_seqs=8)
    used = with_graphs(llm)
    assert run(llm) == expected
    assert len(used) > 20


def test_another_backend_runs_eagerly(checkpoint):
    """The oracle's taps swap the backend: a captured pass would not be seen."""
    from pico_vllm.kernels.backend import recording

    llm = make_llm(checkpoint)
    used = with_graphs(llm)
    runner = llm.engine.core.executor.runner
    seen = []
    runner.set_backend(recording(runner.backend, lambda op, args, result: seen.append(op)))
    llm.generate([[5, 6, 7]], greedy(3), use_tqdm=False)
    assert used == [] and "paged_attention" in seen


def test_a_failed_step_leaves_the_captures_usable(checkpoint):
    expected = ids(make_llm(checkpoint).generate(PROMPTS, greedy(6), use_tqdm=False))
    llm = make_llm(checkpoint)
    with_graphs(llm)
    llm.generate(PROMPTS[:2], greedy(3), use_tqdm=False)
    llm.engine.core._recompute_everything()  # what a step that raises leads to
    assert ids(llm.generate(PROMPTS, greedy(6), use_tqdm=False)) == expected
