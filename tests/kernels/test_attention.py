import dataclasses
import itertools
import math

import pytest
import torch
from transformers.models.llama.modeling_llama import eager_attention_forward

from kernel_cases import NAN, Heads, PagedCase, Step, build_paged_case, with_empty_decodes
from kernel_implementations import (
    CPU_ATTENTION,
    REFERENCE_ATTENTION,
    AttentionOps,
    assert_bitwise,
    assert_near_oracle,
    each_implementation,
    each_implementation_and_dtype,
    uninitialised_memory_is_nan,
)
from pico_vllm.kernels import attention
from pico_vllm.kernels.attention import AttentionInputs

HEADS = (
    Heads(num_kv_heads=2, group=1, head_dim=64, block_size=16),
    Heads(num_kv_heads=3, group=3, head_dim=64, block_size=16),  # SmolLM2-135M
    Heads(num_kv_heads=2, group=6, head_dim=128, block_size=32),  # Qwen2.5-1.5B
    Heads(num_kv_heads=1, group=6, head_dim=64, block_size=1),
)
SMALL = Heads(num_kv_heads=2, group=3, head_dim=64, block_size=16)
# Lengths around the block sizes 16 and 32, and the odd ones.
STEPS = {
    "decodes": Step(((1, 1), (1, 63), (1, 100), (1, 15), (1, 16), (1, 17), (1, 31), (1, 32), (1, 33)), 9),
    "decodes_of_one_length": Step(((1, 33),) * 4, 4),
    "decodes_of_full_blocks": Step(((1, 32),) * 3, 3),
    "one_decode": Step(((1, 100),), 1),
    "first_token_as_decode": Step(((1, 1),), 1),
    "one_whole_prompt": Step(((100, 100),), 0),
    "whole_prompts": Step(((63, 63), (1, 1), (15, 15), (16, 16), (33, 33)), 0),
    "chunks_with_cached_context": Step(((7, 40), (16, 17), (1, 33), (63, 100), (16, 32), (1, 16)), 0),
    "mixed": Step(((1, 33), (1, 1), (1, 100), (17, 17), (7, 63), (1, 5), (16, 48)), 3),
    "padded_tokens": Step(((1, 33), (1, 100), (17, 17), (7, 63)), 2, num_padded_tokens=5, bound_slack=9),
    "padded_sequences": Step(((1, 33), (1, 100), (17, 17)), 2, num_padded_seqs=3, bound_slack=9),
    "padded": Step(((1, 33), (1, 100), (7, 63)), 2, num_padded_tokens=3, num_padded_seqs=2, bound_slack=100),
    "padded_decodes": Step(((1, 33), (1, 100), (1, 16)), 3, num_padded_tokens=5, num_padded_seqs=5, bound_slack=50),
}
each_step = pytest.mark.parametrize("step", STEPS.values(), ids=STEPS.keys())
each_heads = pytest.mark.parametrize("heads", HEADS, ids=str)


def run_step(ops: AttentionOps, case: PagedCase) -> tuple[torch.Tensor, torch.Tensor]:
    """Store, then attend: (output, cache)."""
    cache = case.kv_cache.clone()
    metadata = ops.prepare_attention(case.inputs, case.heads.cache_shape)
    ops.store_kv(case.projected.key, case.projected.value, cache, metadata)
    with uninitialised_memory_is_nan():
        out = ops.paged_attention(case.projected.query, cache, metadata, case.scale)
    return out, cache


def oracle(case: PagedCase) -> torch.Tensor:
    """Reference in fp64: [num_tokens, num_heads, head_dim] without padded tokens."""
    query, cache = case.projected.query.double(), case.stored_cache.double()
    return REFERENCE_ATTENTION.paged_attention(query, cache, case.inputs, case.scale)[: case.num_tokens]


def formula(case: PagedCase) -> torch.Tensor:
    """The docstring's formula, token by token in fp64, on keys and values that were never paged."""
    out, starts = torch.zeros(case.projected.query.shape, dtype=torch.float64), case.inputs.query_start_loc.tolist()
    for s, (keys, values) in enumerate(case.dense):
        for t in range(starts[s], starts[s + 1]):
            p = len(keys) - (starts[s + 1] - t)
            for h in range(case.heads.num_heads):
                g = h // case.heads.group
                weights = (keys[: p + 1, g].double() @ case.projected.query[t, h].double() * case.scale).exp()
                out[t, h] = weights / weights.sum() @ values[: p + 1, g].double()
    return out[: case.num_tokens]


# ------------------------------------------------------------------------------------------------- values by hand
def step_by_hand(
    device: str, slots: list[int], tables: list[list[int]], starts: list[int], lens: list[int], num_decode_reqs: int
) -> AttentionInputs:
    def ints(values: list[int] | list[list[int]]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    query_lens = [end - start for start, end in itertools.pairwise(starts)]
    return AttentionInputs(
        slot_mapping=torch.tensor(slots, dtype=torch.int64, device=device),
        block_tables=ints(tables),
        query_start_loc=ints(starts),
        seq_lens=ints(lens),
        num_decode_reqs=num_decode_reqs,
        max_query_len=max(query_lens),
        max_seq_len=max(lens),
    )


@each_implementation_and_dtype("attention")
def test_store_puts_each_token_into_its_block_head_and_offset_by_hand(impl, dtype):
    # 3 blocks of 2 tokens, 2 KV heads, head_dim 1. Slots 5, -1, 0, 2: block 2 offset 1, nowhere, block 0 and block 1.
    key = torch.tensor([[[1.0], [2.0]], [[NAN], [NAN]], [[3.0], [4.0]], [[5.0], [6.0]]], dtype=dtype)
    cache = torch.full((3, 2, 2, 2, 1), -1.0, dtype=dtype, device=impl.device)
    inputs = step_by_hand(impl.device, [5, -1, 0, 2], [[2, 0, 1]], [0, 4], [4], 0)
    metadata = impl.op.prepare_attention(inputs, attention.KVCacheShape(2, 2))
    impl.op.store_kv(key.to(impl.device), 10 * key.to(impl.device), cache, metadata)
    assert cache[..., 0].tolist() == [
        [[[3.0, -1.0], [4.0, -1.0]], [[30.0, -1.0], [40.0, -1.0]]],
        [[[5.0, -1.0], [6.0, -1.0]], [[50.0, -1.0], [60.0, -1.0]]],
        [[[-1.0, 1.0], [-1.0, 2.0]], [[-1.0, 10.0], [-1.0, 20.0]]],
    ]


@each_implementation("attention")
def test_equal_keys_give_the_mean_of_the_values_up_to_the_own_position(impl):
    # Keys are 0, value j is j + 1 (KV head 1: 100 more): position p gives (p + 2) / 2. Blocks of 2; block 0 is used.
    # Sequence 0 decodes its position 4, sequence 1 is a prompt of 3, sequence 2 a chunk of 2 after a context of 2.
    heads = Heads(num_kv_heads=2, group=2, head_dim=64, block_size=2)
    tables = [[5, 0, 2], [1, 7, 0], [6, 3, 0]]
    inputs = step_by_hand(impl.device, [-1] * 6, tables, [0, 1, 4, 6], [5, 3, 4], 1)
    cache = torch.full((8, 2, 2, 2, 64), NAN, device=impl.device)
    for s, seq_len in enumerate((5, 3, 4)):
        for j in range(seq_len):
            cache[tables[s][j // 2], 0, :, j % 2] = 0.0
            cache[tables[s][j // 2], 1, 0, j % 2] = j + 1
            cache[tables[s][j // 2], 1, 1, j % 2] = j + 101
    metadata = impl.op.prepare_attention(inputs, heads.cache_shape)
    query = torch.full((6, 4, 64), 3.0, device=impl.device)
    out = impl.op.paged_attention(query, cache, metadata, 0.125)
    means = [3.0, 1.0, 1.5, 2.0, 2.0, 2.5]
    for h, offset in enumerate((0.0, 0.0, 100.0, 100.0)):
        for token, mean in enumerate(means):
            assert out[token, h].tolist() == pytest.approx([mean + offset] * 64, rel=1e-6)


@pytest.mark.parametrize("num_decode_reqs", [0, 1])
@each_implementation("attention")
def test_scores_are_scaled_and_softmaxed_by_hand(impl, num_decode_reqs):
    # Scores ln 3 and 0, so weights 3/4 and 1/4, of the values 8 and 0: 6. Twice the scale: 9/10 and 1/10: 7.2.
    inputs = step_by_hand(impl.device, [-1], [[1]], [0, 1], [2], num_decode_reqs)
    cache = torch.full((2, 2, 1, 4, 64), NAN, device=impl.device)
    cache[1, 0, 0, :2] = 0.0
    cache[1, 0, 0, 0, 5] = 2.0
    cache[1, 1, 0, 0], cache[1, 1, 0, 1] = 8.0, 0.0
    query = torch.zeros(1, 1, 64, device=impl.device)
    query[0, 0, 5] = math.log(3.0)
    metadata = impl.op.prepare_attention(inputs, attention.KVCacheShape(1, 4))
    for scale, expected in ((0.5, 6.0), (1.0, 7.2)):
        out = impl.op.paged_attention(query, cache, metadata, scale)
        assert out.flatten().tolist() == pytest.approx([expected] * 64, rel=1e-6)


# ------------------------------------------------------------------------------------------------ against the oracle
@each_heads
@each_step
def test_reference_in_fp64_is_the_formula_on_unpaged_keys_and_values(step, heads):
    case = build_paged_case(step, heads, dtype=torch.float64)
    out, _ = run_step(REFERENCE_ATTENTION, case)
    torch.testing.assert_close(out[: case.num_tokens], formula(case), rtol=1e-12, atol=1e-13)


@each_heads
@each_step
@each_implementation_and_dtype("attention")
def test_attention_is_near_the_oracle_and_writes_its_slots_only(impl, dtype, step, heads):
    case = build_paged_case(step, heads, dtype=dtype, device=impl.device)
    projected_before = case.projected.qkv.clone()
    out, cache = run_step(impl.op, case)
    assert out.dtype == dtype and out.shape == case.projected.query.shape
    assert_near_oracle("attention", out[: case.num_tokens], oracle(case))
    assert_bitwise(out[case.num_tokens :], torch.zeros_like(out[case.num_tokens :]))
    assert_bitwise(cache, case.stored_cache)
    assert_bitwise(case.projected.qkv, projected_before)


@each_implementation("attention")
def test_whole_prompt_is_near_transformers_eager_attention(impl):
    case = build_paged_case(STEPS["one_whole_prompt"], SMALL, dtype=torch.float32, device=impl.device)
    out, _ = run_step(impl.op, case)
    layer = torch.nn.Module().eval()
    layer.num_key_value_groups = SMALL.group
    parts = (case.projected.query, case.projected.key, case.projected.value)
    q, k, v = (part.cpu().transpose(0, 1)[None] for part in parts)  # [1, heads, 100, head_dim]
    mask = torch.full((100, 100), float("-inf")).triu(1)[None, None]
    expected, _ = eager_attention_forward(layer, q, k, v, mask, scaling=case.scale)  # [1, 100, heads, head_dim]
    assert_near_oracle("attention", out, expected[0].double())


@each_implementation_and_dtype("attention")
def test_large_scores_do_not_overflow(impl, dtype):
    # Scores up to ±8 * 50: exp overflows fp32 beyond 88 unless the maximum is taken off first.
    case = build_paged_case(STEPS["mixed"], SMALL, dtype=dtype, device=impl.device)
    case.projected.query.mul_(50.0)
    out, _ = run_step(impl.op, case)
    assert out.isfinite().all()
    assert out.abs().max() <= 4.0 * (1 + 2.0**-7)  # a mean of values in [-4, 4]


@each_implementation_and_dtype("attention")
def test_padding_among_the_decodes_as_a_graph_bucket_has_it_gives_zeros(impl, dtype):
    """Three decodes in a bucket of eight: five padded sequences of one padded token each, counted as decodes."""
    case = build_paged_case(STEPS["padded_decodes"], SMALL, dtype=dtype, device=impl.device)
    starts = torch.arange(9, dtype=torch.int32, device=impl.device)
    bucket = dataclasses.replace(
        case, inputs=dataclasses.replace(case.inputs, num_decode_reqs=8, query_start_loc=starts)
    )
    out, cache = run_step(impl.op, bucket)
    assert_near_oracle("attention", out[:3], oracle(case))
    assert_bitwise(out[3:], torch.zeros_like(out[3:]))
    assert_bitwise(cache, case.stored_cache)


@each_implementation_and_dtype("attention")
def test_padded_decodes_without_tokens_disturb_nobody(impl, dtype):
    """A captured step of decodes and chunks: two decodes in a bucket of five, whose other three have no tokens."""
    case = build_paged_case(Step(((1, 33), (1, 7), (6, 20), (9, 9)), 2, 3), SMALL, dtype=dtype, device=impl.device)
    out, cache = run_step(impl.op, with_empty_decodes(case, 3))
    assert_near_oracle("attention", out[: case.num_tokens], oracle(case))
    assert_bitwise(out[case.num_tokens :], torch.zeros_like(out[case.num_tokens :]))
    assert_bitwise(cache, case.stored_cache)


@each_implementation_and_dtype("attention", dtypes=(torch.bfloat16, torch.float16))
@pytest.mark.parametrize("num_seqs", [1, 7, 8, 12])
def test_large_equal_parts_of_scores_neither_overflow_nor_swallow_the_small_ones(impl, dtype, num_seqs):
    """36 added to q and k, as by biases: unscaled scores of 83,000 overflow fp16, and in 16 bits they are 64 apart.

    2 KV heads: 2, 14, 16 and 24 pairs of sequence and head, on both sides of where an implementation may switch.
    """
    case = build_paged_case(Step(((1, 33),) * num_seqs, num_seqs), SMALL, dtype=dtype, device=impl.device)
    keys = (case.kv_cache[:, 0], case.stored_cache[:, 0])
    for tensor in (case.projected.query, case.projected.key, *keys):
        tensor.add_(36.0).mul_(4).round_().div_(4)  # quarters: sums of products are exact in fp32, in any order
    out, _ = run_step(impl.op, case)
    assert_near_oracle("attention", out, oracle(case))


@each_implementation("attention")
def test_int32_slots_are_as_good_as_int64_ones(impl):
    # ForwardBatch promises int64; a packed step buffer is int32.
    step = STEPS["padded"]
    wide, narrow = (
        build_paged_case(step, SMALL, dtype=torch.float32, device=impl.device, slot_dtype=slot_dtype)
        for slot_dtype in (torch.int64, torch.int32)
    )
    for expected, got in zip(run_step(impl.op, wide), run_step(impl.op, narrow), strict=True):
        assert_bitwise(got, expected)


@each_implementation("attention")
def test_metadata_of_a_step_serves_every_layer(impl):
    cases = [build_paged_case(STEPS["padded"], SMALL, dtype=torch.float32, device=impl.device)]
    layer2 = build_paged_case(STEPS["padded"], SMALL, dtype=torch.float32, device=impl.device, seed=0)
    layer2.projected.qkv.mul_(-0.5)  # other numbers, the same block tables
    cases.append(layer2)
    metadata = impl.op.prepare_attention(cases[0].inputs, SMALL.cache_shape)
    for case in cases:
        expected_out, expected_cache = run_step(impl.op, case)
        cache = case.kv_cache.clone()
        impl.op.store_kv(case.projected.key, case.projected.value, cache, metadata)
        out = impl.op.paged_attention(case.projected.query, cache, metadata, case.scale)
        assert_bitwise(cache, expected_cache)
        assert_bitwise(out, expected_out)


@each_implementation("attention")
def test_contiguous_inputs_give_the_same_as_views_of_a_fused_projection(impl):
    case = build_paged_case(STEPS["mixed"], SMALL, dtype=torch.float32, device=impl.device)
    assert not case.projected.query.is_contiguous()
    copied = dataclasses.replace(
        case,
        projected=dataclasses.replace(
            case.projected,
            query=case.projected.query.contiguous(),
            key=case.projected.key.contiguous(),
            value=case.projected.value.contiguous(),
        ),
    )
    for expected, got in zip(run_step(impl.op, case), run_step(impl.op, copied), strict=True):
        assert_bitwise(got, expected)


# ------------------------------------------------------------------------------------------------------------ cpu
@pytest.mark.parametrize(
    "limit, expected_calls",
    # A call of n decodes gathers n * (its longest context) keys.
    [(1 << 18, [5]), (200, [2, 2, 1]), (199, [1, 1, 2, 1]), (100, [1, 1, 1, 1, 1]), (1, [1, 1, 1, 1, 1])],
)
def test_long_contexts_split_the_decode_call_and_change_nothing(monkeypatch, limit, expected_calls):
    step = Step(((1, 63), (1, 100), (1, 90), (1, 70), (1, 100), (7, 40)), 5)
    case = build_paged_case(step, SMALL, dtype=torch.float32)
    monkeypatch.setattr(attention, "_MAX_GATHERED_TOKENS", limit)
    metadata = CPU_ATTENTION.prepare_attention(case.inputs, SMALL.cache_shape)
    assert [rows.num_seqs for rows in metadata.decodes] == expected_calls
    out, _ = run_step(CPU_ATTENTION, case)
    assert_near_oracle("attention", out, oracle(case))


def test_cpu_makes_a_mask_only_where_one_is_needed():
    def metadata_of(name: str) -> attention.CpuAttentionMetadata:
        case = build_paged_case(STEPS[name], SMALL, dtype=torch.float32)
        return attention.prepare_attention_cpu(case.inputs, SMALL.cache_shape)

    (equal,) = metadata_of("decodes_of_one_length").decodes
    assert equal.mask is None and equal.tail is None
    (unequal,) = metadata_of("decodes").decodes
    assert unequal.mask is not None and unequal.tail is not None
    (prompt,) = metadata_of("one_whole_prompt").prefills
    assert prompt.is_causal and prompt.mask is None
    chunk = metadata_of("chunks_with_cached_context").prefills[0]
    assert not chunk.is_causal and chunk.mask is not None
