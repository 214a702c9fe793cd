"""What only the Triton attention has: tiles, splits, query tiles that find their sequence, bounds above the lengths."""

import dataclasses

import pytest
import torch

from kernel_cases import (
    NAN,
    TINY_DECODE,
    TINY_PREFILL,
    TINY_TILES,
    Heads,
    PagedCase,
    Step,
    build_paged_case,
    with_empty_decodes,
)
from kernel_implementations import (
    REFERENCE_ATTENTION,
    RUNS_TRITON,
    TRITON_DEVICE,
    assert_bitwise,
    assert_near_oracle,
    uninitialised_memory_is_nan,
)

if not RUNS_TRITON:
    pytest.skip("needs a GPU or TRITON_INTERPRET=1", allow_module_level=True)

from pico_vllm.kernels import attention_prefill
from pico_vllm.kernels.attention_config import AttentionConfig, Device, MergeConfig
from pico_vllm.kernels.attention_triton import (
    TritonAttentionMetadata,
    paged_attention_triton,
    prepare_attention_triton,
    store_kv_triton,
)

SMALL = Heads(num_kv_heads=2, group=3, head_dim=64, block_size=16)
UNPACKED = dataclasses.replace(TINY_PREFILL, packs_group=False)
TINY_UNPACKED = dataclasses.replace(TINY_TILES, prefill=UNPACKED, short_prefill=UNPACKED)
FOUR_SMS = Device(architecture=0, num_sms=4)


def attend(case: PagedCase, **changed_metadata: object) -> torch.Tensor:
    """Store and attend with changed metadata; asserts what padded tokens must give. [num_tokens, num_heads, dim]."""
    cache = case.kv_cache.clone()
    metadata: TritonAttentionMetadata = prepare_attention_triton(case.inputs, case.heads.cache_shape)
    metadata = dataclasses.replace(metadata, **{"device": FOUR_SMS, **changed_metadata})
    store_kv_triton(case.projected.key, case.projected.value, cache, metadata)
    with uninitialised_memory_is_nan():
        out = paged_attention_triton(case.projected.query, cache, metadata, case.scale)
    assert_bitwise(cache, case.stored_cache)
    assert_bitwise(out[case.num_tokens :], torch.zeros_like(out[case.num_tokens :]))
    return out[: case.num_tokens]


def oracle(case: PagedCase) -> torch.Tensor:
    query, cache = case.projected.query.double(), case.stored_cache.double()
    return REFERENCE_ATTENTION.paged_attention(query, cache, case.inputs, case.scale)[: case.num_tokens]


def build(step: Step, heads: Heads = SMALL, dtype: torch.dtype = torch.float32) -> PagedCase:
    return build_paged_case(step, heads, dtype=dtype, device=TRITON_DEVICE)


# Tile sizes and block sizes ± 1, odd lengths, chunks after contexts of every alignment, padding of both kinds.
TILED_STEPS = {
    "decodes": Step(((1, 1), (1, 15), (1, 16), (1, 17), (1, 63), (1, 100)), 6),
    "one_long_decode": Step(((1, 257),), 1),
    "prompts": Step(((100, 100), (1, 1), (15, 15), (16, 16), (17, 17)), 0),
    "chunks": Step(((7, 40), (16, 17), (1, 33), (31, 64), (16, 32), (1, 16), (33, 100)), 0),
    "mixed": Step(((1, 33), (1, 100), (17, 17), (7, 63)), 2, num_padded_tokens=5, num_padded_seqs=2, bound_slack=900),
}


@pytest.mark.parametrize("step", TILED_STEPS.values(), ids=TILED_STEPS.keys())
def test_many_tiles_and_splits_are_near_the_oracle(step):
    case = build(step)
    assert_near_oracle("attention", attend(case, config=TINY_TILES), oracle(case))


@pytest.mark.parametrize("name", ["prompts", "chunks", "mixed"])
def test_query_tiles_of_one_head_each_are_near_the_oracle(name):
    case = build(TILED_STEPS[name])
    assert_near_oracle("attention", attend(case, config=TINY_UNPACKED), oracle(case))


@pytest.mark.parametrize("name", ["chunks", "mixed"])
def test_one_loop_for_full_and_diagonal_tiles_is_near_the_oracle(name):
    one_loop = dataclasses.replace(TINY_PREFILL, separates_diagonal=False)
    case = build(TILED_STEPS[name])
    config = dataclasses.replace(TINY_TILES, prefill=one_loop, short_prefill=one_loop)
    assert_near_oracle("attention", attend(case, config=config), oracle(case))


@pytest.mark.parametrize("packs_group", [True, False])
@pytest.mark.parametrize(
    "heads",
    [
        Heads(num_kv_heads=2, group=1, head_dim=96, block_size=64),
        Heads(num_kv_heads=1, group=6, head_dim=80, block_size=32),
        Heads(num_kv_heads=2, group=8, head_dim=128, block_size=16),
        Heads(num_kv_heads=3, group=3, head_dim=16, block_size=8),
    ],
    ids=str,
)
def test_every_head_dim_group_and_block_size_is_near_the_oracle(heads, packs_group):
    case = build(Step(((1, 1), (1, 63), (1, 65), (5, 40), (16, 16)), 3, num_padded_tokens=1), heads)
    assert_near_oracle("attention", attend(case, config=TINY_TILES if packs_group else TINY_UNPACKED), oracle(case))


def with_decode(**changes: object) -> AttentionConfig:
    decode = dataclasses.replace(TINY_DECODE, **changes)
    return dataclasses.replace(TINY_TILES, decodes=(decode,), short_decodes=(decode,))


@pytest.mark.parametrize("merge", [MergeConfig(4, 2, 64, 4), MergeConfig(1, 8, 16, 2), MergeConfig(16, 16, 128, 4)])
@pytest.mark.parametrize("num_sms", [1, 2, 3, 100])
def test_any_number_of_splits_gives_the_same_attention(num_sms, merge):
    """100 positions are 7 tiles, in 1, 2, 3 or 7 splits; rows and splits are merged in one step or in many."""
    case = build(Step(((1, 100), (1, 97), (1, 5)), 3))
    config = dataclasses.replace(with_decode(programs_per_sm=6), merges=(merge,))
    out = attend(case, config=config, device=Device(0, num_sms))
    assert_near_oracle("attention", out, oracle(case))


@pytest.mark.parametrize("max_seq_len", [112, 113])
def test_a_tile_a_program_and_a_bound_that_would_be_one_more(max_seq_len):
    """2 sequences x 2 KV heads x 7 splits = 28 programs; a bound of 113 positions would be 8 tiles."""
    case = build(Step(((1, 112), (1, 35)), 2))
    config = with_decode(programs_per_sm=7)
    assert_near_oracle("attention", attend(case, config=config, max_seq_len=max_seq_len), oracle(case))


def test_empty_decodes_among_split_ones_give_zeros():
    step = Step(((1, 1), (1, 100), (1, 1)), 3)
    case = build(step)
    seq_lens = case.inputs.seq_lens.clone()
    seq_lens[[0, 2]] = 0
    metadata = dataclasses.replace(
        prepare_attention_triton(dataclasses.replace(case.inputs, seq_lens=seq_lens), SMALL.cache_shape),
        config=with_decode(programs_per_sm=24),
        device=FOUR_SMS,
    )
    case.projected.qkv[[0, 2]] = NAN
    expected = oracle(case)
    expected[[0, 2]] = 0.0
    with uninitialised_memory_is_nan():
        out = paged_attention_triton(case.projected.query, case.stored_cache, metadata, case.scale)
    assert_near_oracle("attention", out, expected)


@pytest.mark.parametrize("num_splits", [2, 3, 7])
def test_prefill_in_splits_is_near_the_oracle(monkeypatch, num_splits):
    """Splits that end before, in and after the diagonal tiles, and ones that no position is left for."""
    monkeypatch.setattr(attention_prefill, "num_prefill_splits", lambda *_: num_splits)
    lens = ((1, 50), (1, 1), (1, 1), (18, 18), (1, 33), (7, 100))
    case = build(Step(lens, 1, num_padded_tokens=3, num_padded_seqs=2, bound_slack=99))
    assert_near_oracle("attention", attend(case, config=TINY_TILES), oracle(case))


def test_prefill_in_splits_leaves_the_decodes_to_the_decode_kernel(monkeypatch):
    """Under speculation the host doesn't know how many tokens are decodes'; both merges look at all of them."""
    monkeypatch.setattr(attention_prefill, "num_prefill_splits", lambda *_: 3)
    case = build(Step(((8, 17), (2, 50), (20, 90), (5, 7)), 2, num_padded_tokens=3))
    assert_near_oracle("attention", attend(case, config=TINY_TILES, decode_query_len=8), oracle(case))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_bounds_far_above_the_lengths_change_nothing_but_the_launch(dtype):
    """As in a CUDA graph captured for the longest context: most splits and query tiles find nothing to do."""
    case = build(Step(((1, 40), (1, 3), (7, 20)), 2), dtype=dtype)
    for max_seq_len in (40, 4096):
        bounds = {"max_seq_len": max_seq_len, "prefill_seq_len": max_seq_len}
        assert_near_oracle("attention", attend(case, config=TINY_TILES, **bounds), oracle(case))


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("programs_per_sm", [1, 24])  # decodes unsplit and split
def test_padded_decodes_without_tokens_leave_the_tokens_of_others(monkeypatch, num_splits, programs_per_sm):
    """As a captured mixed step has them: the decode kernel's zeros are overwritten, whatever was split."""
    monkeypatch.setattr(attention_prefill, "num_prefill_splits", lambda *_: num_splits)
    case = build(Step(((1, 33), (1, 70), (5, 40), (9, 9)), 2, num_padded_tokens=3))
    padded = with_empty_decodes(case, 4)
    out = attend(padded, config=with_decode(programs_per_sm=programs_per_sm))
    assert_near_oracle("attention", out, oracle(case))


def test_prefills_are_shaped_for_a_length_of_their_own(monkeypatch):
    """Long decodes beside a short prompt: and a length that is too small only costs time."""
    seen = []
    monkeypatch.setattr(attention_prefill, "num_prefill_splits", lambda _, seq_len, *rest: seen.append(seq_len) or 2)
    case = build(Step(((1, 100), (17, 40)), 1))
    inputs = dataclasses.replace(case.inputs, prefill_seq_len=20)
    out = attend(dataclasses.replace(case, inputs=inputs), config=TINY_TILES)
    assert_near_oracle("attention", out, oracle(case))
    assert seen == [20]


@pytest.mark.parametrize("num_decodes", [1, 2, 5])
def test_decodes_of_several_query_tokens_are_causal_among_them(num_decodes):
    """Speculation: 1 to 8 tokens a decode. Of 17 positions, the second tile of 16 is past all query tokens but one."""
    lens = ((8, 17), (1, 33), (8, 8), (3, 100), (5, 64))[:num_decodes]
    case = build(Step((*lens, (20, 23)), num_decodes, num_padded_tokens=3))
    assert_near_oracle("attention", attend(case, config=TINY_TILES, decode_query_len=8), oracle(case))


def test_several_query_tokens_in_one_pass_or_in_many_splits_agree():
    case = build(Step(((4, 100), (2, 17)), 2))
    for config in (with_decode(programs_per_sm=1), TINY_TILES):
        assert_near_oracle("attention", attend(case, config=config, decode_query_len=4), oracle(case))


@pytest.mark.parametrize("search_block", [1, 2, 4, 256])
def test_every_query_tile_finds_its_sequence(monkeypatch, search_block):
    """Sequences of less than, exactly and more than a tile of 16 rows, and empty ones between them."""
    monkeypatch.setattr(attention_prefill, "SEARCH_BLOCK", search_block)
    lens = ((1, 1), (5, 5), (6, 6), (16, 16), (1, 9), (17, 30), (2, 2))
    case = build(Step(lens, 0, num_padded_tokens=23, num_padded_seqs=4), Heads(1, 3, 16, 16))
    assert_near_oracle("attention", attend(case, config=TINY_TILES), oracle(case))


@pytest.mark.parametrize("num_decode_reqs", [0, 2])
def test_empty_sequences_among_others_give_zeros_and_disturb_nobody(num_decode_reqs):
    """A padded sequence of one padded token first, in the middle and last; its seq_len is 0."""
    step = Step(((1, 1), (1, 40), (1, 1), (3, 20), (1, 1)), num_decode_reqs)
    case = build(step)
    seq_lens = case.inputs.seq_lens.clone()
    padded = [0, 2, 4]
    seq_lens[padded] = 0
    tokens = case.inputs.query_start_loc[padded].tolist()
    slots = case.inputs.slot_mapping.clone()
    slots[tokens] = -1
    inputs = dataclasses.replace(case.inputs, seq_lens=seq_lens, slot_mapping=slots)
    metadata = dataclasses.replace(
        prepare_attention_triton(inputs, SMALL.cache_shape), config=TINY_TILES, device=FOUR_SMS
    )
    expected = oracle(case)
    expected[tokens] = 0.0
    case.projected.qkv[tokens] = NAN
    with uninitialised_memory_is_nan():
        out = paged_attention_triton(case.projected.query, case.stored_cache, metadata, case.scale)
    assert_near_oracle("attention", out, expected)
    assert_bitwise(out[tokens], torch.zeros_like(out[tokens]))


def test_a_step_of_padding_alone_gives_zeros():
    inputs = dataclasses.replace(
        build(Step(((1, 1),), 1)).inputs,
        slot_mapping=torch.full((9,), -1, device=TRITON_DEVICE),
        query_start_loc=torch.tensor([0, 1, 2, 2], dtype=torch.int32, device=TRITON_DEVICE),
        block_tables=torch.zeros(3, 1, dtype=torch.int32, device=TRITON_DEVICE),
        seq_lens=torch.zeros(3, dtype=torch.int32, device=TRITON_DEVICE),
        num_decode_reqs=2,
    )
    cache = torch.full((2, 2, 2, 16, 64), NAN, device=TRITON_DEVICE)
    query = torch.full((9, 6, 64), NAN, device=TRITON_DEVICE)
    metadata = prepare_attention_triton(inputs, SMALL.cache_shape)
    store_kv_triton(query[:, :2], query[:, 2:4], cache, metadata)
    with uninitialised_memory_is_nan():
        out = paged_attention_triton(query, cache, metadata, 0.125)
    assert_bitwise(out, torch.zeros_like(out))
    assert cache.isnan().all()


def test_a_cache_that_is_a_strided_view_is_read_and_written_in_place():
    """One layer of a tensor that holds several layers' blocks side by side."""
    case = build(Step(((1, 33), (7, 20)), 1))
    layers = torch.full((len(case.kv_cache), 3, *case.kv_cache.shape[1:]), NAN, device=TRITON_DEVICE)
    cache = layers[:, 1]
    cache.copy_(case.kv_cache)
    metadata = prepare_attention_triton(case.inputs, SMALL.cache_shape)
    store_kv_triton(case.projected.key, case.projected.value, cache, metadata)
    assert_bitwise(cache, case.stored_cache)
    assert layers[:, ::2].isnan().all()
    assert_near_oracle(
        "attention", paged_attention_triton(case.projected.query, cache, metadata, case.scale), oracle(case)
    )
