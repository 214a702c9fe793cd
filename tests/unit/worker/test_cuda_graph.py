"""Captured passes without a GPU: `rerun` stands in for the capture, everything else is what a GPU does too.

Padding, sizes, the device's block tables and the choice between captured and eager are all here; that a replay computes
what was captured is tests/gpu's.
"""

import random

import pytest

import tiny_models
from engine_runs import greedy, make_llm, with_graphs
from pico_vllm import SamplingParams
from pico_vllm.kernels.attention_config import HOPPER_BLOCK_M, choose_prefill, num_prefill_splits, select_config
from pico_vllm.worker import cuda_graph
from pico_vllm.worker.cuda_graph import mixed_sizes, typical_seq_len
from pico_vllm.worker.host_ring import HostRing

PROMPTS = [[5, 6, 7], [9] * 20, [11, 3] * 8, list(range(20, 53)), [42]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("graphs")
    tiny_models.save_tiny_model(tiny_models.MODELS["qwen2-gqa3-d128-untied"], directory)
    return directory


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch):
    monkeypatch.setattr(cuda_graph, "DECODE_SIZES", (1, 2, 4, 8))
    monkeypatch.setattr(cuda_graph, "PROMPT_SIZES", (8, 16, 32))
    monkeypatch.setattr(cuda_graph, "MIXED_SIZES", (16, 32))
    monkeypatch.setattr(cuda_graph, "MIXED_DECODES", (2, 6))
    monkeypatch.setattr(cuda_graph, "PROMPT_MAX_SEQS", 3)
    monkeypatch.setattr(cuda_graph, "PROMPT_MAX_SEQ_LEN", 64)


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


def test_a_greedy_captured_step_sends_its_inputs_and_what_has_changed_of_block_tables_only(checkpoint, monkeypatch):
    llm = make_llm(checkpoint)
    used = with_graphs(llm)
    ring = llm.engine.core.executor.runner._ring
    copies = []
    send_into = ring.send_into
    monkeypatch.setattr(ring, "send_into", lambda *args: copies.append(args) or send_into(*args))
    monkeypatch.delattr(HostRing, "send")
    monkeypatch.delattr(HostRing, "send_int32")
    llm.generate([PROMPTS[0]], greedy(3), use_tqdm=False)
    assert used == [("prompt", 8), ("decode", 1), ("decode", 1)]
    assert len(copies) == 1 + len(used)


def test_more_sequences_than_any_size_run_eagerly(checkpoint):
    prompts = [[7 + i] * 3 for i in range(9)]
    expected = ids(make_llm(checkpoint).generate(prompts, greedy(4), use_tqdm=False))
    llm = make_llm(checkpoint)
    used = with_graphs(llm)
    assert ids(llm.generate(prompts, greedy(4), use_tqdm=False)) == expected
    assert used == [("eager", 27)] + [("eager", 9)] * 3


@pytest.mark.parametrize(
    "length, used_first",
    [
        (1, ("prompt", 8)),
        (8, ("prompt", 8)),
        (9, ("prompt", 16)),
        (17, ("prompt", 32)),
        (32, ("prompt", 32)),
        (33, ("eager", 33)),
    ],
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
    kinds = {kind for kind, *_ in used}
    assert {"decode", "prompt", "mixed"} <= kinds if "max_num_batched_tokens" in options else "decode" in kinds


def test_decodes_are_captured_for_short_contexts_and_for_any(checkpoint, monkeypatch):
    monkeypatch.setattr(cuda_graph, "SHORT_DECODES", 40)
    prompts = [list(range(3, 23)), list(range(9))]  # 20 tokens, and 26 to come
    expected = ids(make_llm(checkpoint).generate(prompts, greedy(26), use_tqdm=False))
    llm = make_llm(checkpoint)
    with_graphs(llm)
    graphs, lengths = llm.engine.core.executor.runner._graphs, []
    decode_size = graphs.decode_size

    def noting(*args):
        size = decode_size(*args)
        lengths.append((args[1], size.seq_len))
        return size

    graphs.decode_size = noting
    assert ids(llm.generate(prompts, greedy(26), use_tqdm=False)) == expected
    limit = llm.engine.core.limits.max_model_len
    assert {seq_len: size for seq_len, size in lengths} == {n: 40 if n <= 40 else limit for n in range(21, 46)}


def test_many_decodes_are_taken_up_longest_first(checkpoint, monkeypatch):
    monkeypatch.setattr(cuda_graph, "MAX_UNORDERED_DECODES", 2)
    llm = make_llm(checkpoint)
    with_graphs(llm)
    batches = []
    model = llm.engine.core.executor.runner._graphs
    decode_batch = model._decode_batch
    monkeypatch.setattr(model, "_decode_batch", lambda size: batches.append(decode_batch(size)) or batches[-1])
    llm.generate([[5, 6, 7], [9] * 20, [11, 3] * 4], greedy(3), use_tqdm=False)
    # One tensor, as the last step left it.
    assert [batch.seq_lens.tolist() for batch in batches] == [[5, 22, 10, 0]] * 2
    assert [batch.decode_order.tolist() for batch in batches] == [[1, 2, 0, 3]] * 2
    llm.generate([[5, 6, 7], [9] * 20], greedy(3), use_tqdm=False)
    assert [batch.decode_order for batch in batches[2:]] == [None, None]


@pytest.mark.parametrize("wanted", [{"temperature": 0.9, "seed": 5}, {"logit_bias": {7: 50.0}}, {"logprobs": 2}])
def test_what_is_not_greedy_starts_from_the_logits_of_the_capture(checkpoint, wanted):
    """Beside greedy rows; the next step continues with what was sampled, not with the largest logit."""
    params = [greedy(8), SamplingParams(**({"temperature": 0.0, "max_tokens": 8, "ignore_eos": True} | wanted))]
    expected = make_llm(checkpoint).generate(PROMPTS[:2], params, use_tqdm=False)
    llm = make_llm(checkpoint)
    with_graphs(llm)
    outputs = llm.generate(PROMPTS[:2], params, use_tqdm=False)
    assert ids(outputs) == ids(expected)
    if "logprobs" in wanted:
        for output, other in zip(outputs[1].outputs[0].logprobs, expected[1].outputs[0].logprobs, strict=True):
            assert output == other


def test_greedy_steps_of_a_capture_run_no_sampler(checkpoint, monkeypatch):
    llm = make_llm(checkpoint)
    with_graphs(llm)
    runner = llm.engine.core.executor.runner
    monkeypatch.setattr(runner, "_sampler", None)
    assert len(llm.generate(PROMPTS[:1], greedy(8), use_tqdm=False)[0].outputs[0].token_ids) == 8


def test_unused_blocks_and_padding_never_matter(checkpoint):
    """NaN everywhere in the cache at the start: what padding reads or writes would spread."""
    expected = ids(make_llm(checkpoint).generate(PROMPTS, greedy(20), use_tqdm=False))
    llm = make_llm(checkpoint)
    with_graphs(llm)
    for kv_cache in llm.engine.core.executor.runner.kv_caches:
        kv_cache.fill_(float("nan"))
    assert ids(llm.generate(PROMPTS, greedy(20), use_tqdm=False)) == expected


def run_arrivals(llm, arrivals):
    """Run requests that arrive before the step they are listed under, {step: [(prompt, params)]}; their ids."""
    engine, found, step = llm.engine, [], 0
    while step <= max(arrivals) or engine.has_unfinished_requests():
        for prompt, params in arrivals.get(step, ()):
            engine.add_request(str(len(found)), prompt, params)
            found.append([])
        for delta in engine.step():
            found[int(delta.request_id)] += delta.new_token_ids
        step += 1
    return found


def assert_same_as_eager(checkpoint, arrivals, **options):
    """Returns what each step ran on. Every block that isn't used is NaN."""
    expected = run_arrivals(make_llm(checkpoint, **options), arrivals)
    llm = make_llm(checkpoint, **options)
    used = with_graphs(llm)
    for kv_cache in llm.engine.core.executor.runner.kv_caches:
        kv_cache.fill_(float("nan"))
    assert run_arrivals(llm, arrivals) == expected
    return used


def decodes(count, length=3, max_tokens=8):
    return [([40 + i] * (length + i % 2), greedy(max_tokens)) for i in range(count)]


def prompt_of(length, first=3):
    return [(first + 7 * i) % 290 for i in range(length)]


@pytest.mark.parametrize(
    "num_decodes, length, expected",
    [
        (1, 14, ("mixed", 16, 2)),
        (1, 15, ("mixed", 16, 2)),
        (1, 16, ("mixed", 32, 2)),
        (2, 14, ("mixed", 16, 2)),
        (3, 13, ("mixed", 16, 6)),
        (2, 30, ("mixed", 32, 2)),
        (3, 29, ("mixed", 32, 6)),
        (3, 30, ("eager", 33)),
        (6, 10, ("mixed", 16, 6)),
        (7, 2, ("eager", 9)),
    ],
)
def test_a_mixed_step_runs_on_the_smallest_size_that_holds_it(checkpoint, num_decodes, length, expected):
    arrivals = {0: decodes(num_decodes), 2: [(prompt_of(length), greedy(5))]}
    used = assert_same_as_eager(checkpoint, arrivals)
    assert used[2] == expected


@pytest.mark.parametrize("num_prompts, expected", [(2, ("mixed", 16, 2)), (3, ("mixed", 16, 2)), (4, ("eager", 18))])
def test_several_prompts_join_the_decodes(checkpoint, num_prompts, expected):
    prompts = [(prompt_of(3 + i, first=50 * i), greedy(4)) for i in range(num_prompts)]
    used = assert_same_as_eager(checkpoint, {0: decodes(2)[:1], 1: decodes(1), 3: prompts})
    if num_prompts == 4:
        expected = ("eager", sum(3 + i for i in range(4)) + 2)
    assert used[3] == expected


def test_a_prompt_of_one_token_joins_the_decodes(checkpoint):
    """The scheduler counts it among the decodes, but its id comes from the host."""
    used = assert_same_as_eager(checkpoint, {0: decodes(2), 2: [([77], greedy(5)), ([78], greedy(3))]})
    assert used[2] == ("mixed", 16, 2)


def test_a_chunk_that_does_not_sample_and_the_next_one_beside_decodes(checkpoint):
    arrivals = {0: decodes(2, max_tokens=12), 1: [(prompt_of(50), greedy(4))]}
    used = assert_same_as_eager(checkpoint, arrivals, max_num_batched_tokens=16)
    assert used[1:5] == [("mixed", 16, 2)] * 4


def test_a_chunk_whose_context_is_beyond_the_bound_runs_eagerly(checkpoint):
    arrivals = {0: decodes(1, max_tokens=12), 1: [(prompt_of(70), greedy(3))]}
    used = assert_same_as_eager(checkpoint, arrivals, max_num_batched_tokens=16)
    assert used[1:6] == [("mixed", 16, 2)] * 4 + [("eager", 11)]


def test_a_long_decode_beside_a_prompt_is_within_any_bound(checkpoint):
    arrivals = {0: [(prompt_of(90), greedy(12))], 4: [(prompt_of(9), greedy(4))]}
    assert assert_same_as_eager(checkpoint, arrivals)[4] == ("mixed", 16, 2)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5])
def test_decodes_begin_a_block_in_a_mixed_step(checkpoint, length):
    """Of four tokens: for one of the lengths, and then again two mixed steps in a row."""
    late = [(prompt_of(6), greedy(6)), (prompt_of(7), greedy(6))]
    arrivals = {0: decodes(2, length=length, max_tokens=16), 2: late[:1], 3: late[1:], 6: [(prompt_of(5), greedy(3))]}
    used = assert_same_as_eager(checkpoint, arrivals, block_size=4)
    assert [used[step][0] for step in (2, 3, 6)] == ["mixed"] * 3


@pytest.mark.parametrize(
    "length, expected", [(3, ("prompt", 8)), (5, ("mixed", 16, 2)), (9, ("mixed", 16, 6)), (10, ("eager", 10))]
)
def test_prompt_logprobs_want_more_rows(checkpoint, length, expected):
    """There is room for one of each sequence, of 3 prompts and 0, 2 or 6 decodes."""
    params = greedy(3, prompt_logprobs=0)
    eager = make_llm(checkpoint).generate([prompt_of(length)], params, use_tqdm=False)
    llm = make_llm(checkpoint)
    used = with_graphs(llm)
    captured = llm.generate([prompt_of(length)], params, use_tqdm=False)
    assert ids(captured) == ids(eager) and used[0] == expected

    def logprobs(outputs):
        return [next(iter(entry.values())).logprob for entry in outputs[0].prompt_logprobs if entry]

    assert len(logprobs(captured)) == length - 1
    assert logprobs(captured) == pytest.approx(logprobs(eager), abs=1e-4)


def test_a_decode_step_after_mixed_ones_finds_all_its_blocks(checkpoint):
    """Blocks that began in a mixed, an eager and a decode step, all on the device at the end."""
    arrivals = {0: decodes(3, max_tokens=25), 5: [(prompt_of(9), greedy(15))], 9: [(prompt_of(40), greedy(12))]}
    used = assert_same_as_eager(checkpoint, arrivals, block_size=4)
    assert {kind for kind, *_ in used} == {"prompt", "mixed", "eager", "decode"}


def test_one_sequence_at_a_time_needs_no_mixed_size(checkpoint):
    arrivals = {0: decodes(2), 1: [(prompt_of(20), greedy(3))]}
    used = assert_same_as_eager(checkpoint, arrivals, max_num_seqs=1)
    assert {kind for kind, *_ in used} == {"prompt", "decode"}


# --------------------------------------------------------------------------------------------------------- sizes
def test_sizes_of_the_default_engine_by_hand(monkeypatch):
    monkeypatch.undo()
    sizes = mixed_sizes(2048, 256)
    assert len(sizes) == 15 + 26
    assert sizes[:6] == [(16, 0), (32, 0), (64, 0), (128, 0), (128, 8), (128, 64)]
    assert [s.num_decodes for s in sizes if s.num_tokens == 128] == [0, 8, 64, 127]
    assert [s.num_decodes for s in sizes if s.num_tokens == 2048] == [0, 64, 255]
    assert mixed_sizes(16384, 256) == sizes


def test_no_size_is_larger_than_a_step(monkeypatch):
    monkeypatch.undo()
    assert mixed_sizes(100, 4) == [(16, 0), (32, 0), (64, 0), (100, 0), (100, 3)]
    assert mixed_sizes(2048, 1)[-1] == (2048, 0)
    assert mixed_sizes(1, 8) == [(1, 0)]
    assert mixed_sizes(7, 8) == [(7, 0), (7, 6)]


@pytest.mark.parametrize("on_hopper", [False, True])
def test_attention_of_whole_prompts_is_unsplit_where_that_is_faster(monkeypatch, on_hopper):
    """Qwen2.5-1.5B (12 / 2 heads) on an H200: tiles of 64 rows, of 128 from 1536 tokens on, or Hopper's from 512 on."""
    monkeypatch.undo()
    config = select_config(90, 128, 2)
    splits = {}
    for num_tokens in cuda_graph.PROMPT_SIZES:
        seq_len = typical_seq_len(num_tokens)
        shape = choose_prefill(config, num_tokens * 12, seq_len, 132)
        assert shape is (config.prefill if num_tokens >= 1536 else config.short_prefill)
        block_m = HOPPER_BLOCK_M if on_hopper and num_tokens >= 512 else shape.block_m
        num_programs = -(-num_tokens * 6 // block_m) * 2
        splits[num_tokens] = num_prefill_splits(num_programs, seq_len, 132)
    assert splits.pop(192) == 3 and splits.pop(256) == 2
    assert all(n == (4 if num_tokens <= 128 else 1) for num_tokens, n in splits.items())


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
    assert {kind for kind, *_ in used} >= {"decode", "mixed", "eager"}


def test_another_backend_runs_eagerly(checkpoint):
    """The oracle's taps swap the backend: a captured pass would not be seen."""
    from pico_vllm.kernels.backend import recording

    llm = make_llm(checkpoint)
    used = with_graphs(llm)
    runner = llm.engine.core.executor.runner
    seen = []
    runner.set_backend(recording(runner.backend, lambda op, args, result: seen.append(op)))
    llm.generate([[5, 6, 7]], greedy(3), use_tqdm=False)
    assert {kind for kind, *_ in used} == {"eager"} and "paged_attention" in seen


def test_a_failed_step_leaves_the_captures_usable(checkpoint):
    expected = ids(make_llm(checkpoint).generate(PROMPTS, greedy(6), use_tqdm=False))
    llm = make_llm(checkpoint)
    with_graphs(llm)
    llm.generate(PROMPTS[:2], greedy(3), use_tqdm=False)
    llm.engine.core._recompute_everything()  # what a step that raises leads to
    assert ids(llm.generate(PROMPTS, greedy(6), use_tqdm=False)) == expected
