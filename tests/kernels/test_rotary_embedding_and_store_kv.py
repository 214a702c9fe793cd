import dataclasses

import pytest
import torch

from kernel_cases import NAN, ODD_SIZES, in_wider_rows, random_tensor
from kernel_implementations import (
    assert_bitwise,
    assert_near_oracle,
    each_implementation,
    each_implementation_and_dtype,
)
from pico_vllm.kernels.attention import AttentionInputs, CpuAttentionMetadata, KVCacheShape, prepare_attention_cpu
from pico_vllm.kernels.rms_norm import rms_norm_reference
from pico_vllm.kernels.rotary_embedding import rotary_embedding_reference
from pico_vllm.kernels.rotary_embedding_and_store_kv import QKNorm

BLOCK_SIZE = 4
EPS = 1e-5
#: query heads, KV heads, head_dim: Qwen2.5-1.5B, SmolLM2-135M, one head, Qwen3-0.6B, and a head_dim like no other.
GEOMETRIES = ((12, 2, 128), (9, 3, 64), (1, 1, 64), (16, 8, 128), (3, 1, 20))
each_geometry = pytest.mark.parametrize("num_heads, num_kv_heads, head_dim", GEOMETRIES)


def metadata_of(slots: list[int], device: str, dtype: torch.dtype = torch.int32) -> CpuAttentionMetadata:
    """Of a step with these slots; every implementation takes what has a ``slot_mapping``."""
    n = len(slots)
    inputs = AttentionInputs(
        slot_mapping=torch.tensor(slots, dtype=dtype, device=device),
        block_tables=torch.zeros(1, 1, dtype=torch.int32, device=device),
        query_start_loc=torch.tensor([0, n], dtype=torch.int32, device=device),
        seq_lens=torch.tensor([0], dtype=torch.int32, device=device),
        num_decode_reqs=0,
        max_query_len=n,
        max_seq_len=n,
    )
    return prepare_attention_cpu(inputs, KVCacheShape(1, BLOCK_SIZE))


def some_slots(num_tokens: int) -> list[int]:
    """Distinct slots out of order, with gaps between them."""
    return (2 * torch.randperm(num_tokens, generator=torch.Generator().manual_seed(3)) + 1).tolist()


def empty_cache(num_tokens: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    shape = (2 * num_tokens // BLOCK_SIZE + 1, 2, num_kv_heads, BLOCK_SIZE, head_dim)
    return torch.full(shape, NAN, dtype=dtype, device=device)


def angles(num_tokens: int, head_dim: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    turns = torch.outer(torch.arange(num_tokens) + 1.0, torch.linspace(1.0, 0.01, head_dim // 2))
    return torch.cat((turns.cos(), turns.sin()), dim=-1).to(device, dtype)


def head_norms(head_dim: int, dtype: torch.dtype, device: str) -> QKNorm:
    """Weights in [0.5, 1.5]: the tolerance counts on the bound."""
    q, k = (1 + random_tensor(head_dim, dtype=torch.float32, seed=seed).div(8).to(dtype) for seed in (8, 9))
    return QKNorm(q.to(device), k.to(device), EPS)


def stored(cache: torch.Tensor, slots: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of each slot, [num_tokens, num_kv_heads, head_dim]."""
    rows = torch.stack([cache[slot // BLOCK_SIZE, :, :, slot % BLOCK_SIZE] for slot in slots])
    return rows[:, 0], rows[:, 1]


def rotated(heads: torch.Tensor, cos_sin: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
    """What the definition makes of query or key heads, in the dtype of ``heads``."""
    out = heads.clone() if weight is None else rms_norm_reference(heads, weight.to(heads.dtype), EPS)
    rotary_embedding_reference(out, cos_sin.to(heads.dtype))
    return out


@each_implementation("rotary_embedding_and_store_kv")
def test_rotated_keys_and_plain_values_go_to_their_slots_by_hand(impl):
    # Two query heads, one KV head of dimension 2: one pair, turned by 90 degrees in token 0 and not in token 1.
    heads = torch.tensor([[[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]]] * 2, device=impl.device)
    cos_sin = torch.tensor([[0.0, 1.0], [1.0, 0.0]], device=impl.device)
    cache = torch.full((2, 2, 1, BLOCK_SIZE, 2), -1.0, device=impl.device)
    impl.op(heads, cos_sin, cache, metadata_of([6, 0], impl.device), 2)
    assert heads[:, :2].tolist() == [[[-2.0, 1.0], [-4.0, 3.0]], [[1.0, 2.0], [3.0, 4.0]]]
    assert heads[:, 3].tolist() == [[7.0, 8.0]] * 2
    rest = [-1.0, -1.0]
    assert cache.tolist() == [
        [[[[5.0, 6.0], rest, rest, rest]], [[[7.0, 8.0], rest, rest, rest]]],
        [[[rest, rest, [-6.0, 5.0], rest]], [[rest, rest, [7.0, 8.0], rest]]],
    ]


@each_implementation("rotary_embedding_and_store_kv")
def test_head_norms_by_hand(impl):
    # 3 and 4 have the root mean square 12.5 ** 0.5: 0.8485 and 1.1314, times (1, 2) for q, (3, -1) for k.
    heads = torch.tensor([[[3.0, 4.0], [30.0, 40.0], [3.0, 4.0]]], device=impl.device)
    weights = (torch.tensor([1.0, 2.0], device=impl.device), torch.tensor([3.0, -1.0], device=impl.device))
    cache = torch.full((1, 2, 1, BLOCK_SIZE, 2), NAN, device=impl.device)
    no_turn = torch.tensor([[1.0, 0.0]], device=impl.device)
    impl.op(heads, no_turn, cache, metadata_of([1], impl.device), 1, QKNorm(*weights, 0.0))
    assert heads[0, 0].tolist() == pytest.approx([0.848528137, 2.262741700], rel=1e-6)
    assert cache[0, 0, 0, 1].tolist() == pytest.approx([2.545584412, -1.131370850], rel=1e-6)
    assert cache[0, 1, 0, 1].tolist() == [3.0, 4.0]


@pytest.mark.parametrize("has_qk_norm", [False, True], ids=["plain", "qk_norm"])
@pytest.mark.parametrize("num_tokens", ODD_SIZES)
@each_geometry
@each_implementation_and_dtype("rotary_embedding_and_store_kv")
def test_queries_and_stored_keys_are_near_the_oracle_and_values_are_copies(
    impl, dtype, num_heads, num_kv_heads, head_dim, num_tokens, has_qk_norm
):
    split = num_heads + num_kv_heads
    before = random_tensor(num_tokens, split + num_kv_heads, head_dim, dtype=dtype, device=impl.device)
    heads, cos_sin = before.clone(), angles(num_tokens, head_dim, dtype, impl.device)
    norm = head_norms(head_dim, dtype, impl.device) if has_qk_norm else None
    slots = some_slots(num_tokens)
    cache = empty_cache(num_tokens, num_kv_heads, head_dim, dtype, impl.device)
    impl.op(heads, cos_sin, cache, metadata_of(slots, impl.device), num_heads, norm)

    wide = before.double()
    query = rotated(wide[:, :num_heads], cos_sin, norm.q_weight if norm else None)
    key = rotated(wide[:, num_heads:split], cos_sin, norm.k_weight if norm else None)
    stored_key, stored_value = stored(cache, slots)
    tolerance = "rotary_embedding_of_normalised" if has_qk_norm else "rotary_embedding"
    assert_near_oracle(tolerance, heads[:, :num_heads], query)
    assert_near_oracle(tolerance, stored_key, key)
    assert_bitwise(stored_value, before[:, split:])
    assert_bitwise(heads[:, split:], before[:, split:])
    for slot in slots:
        cache[slot // BLOCK_SIZE, :, :, slot % BLOCK_SIZE] = NAN
    assert cache.isnan().all()  # nothing else was written


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@each_implementation("rotary_embedding_and_store_kv")
def test_rotation_makes_every_rounding_of_the_reference(impl, dtype):
    before = random_tensor(63, 16, 128, dtype=dtype, device=impl.device)
    heads, cos_sin, slots = before.clone(), angles(63, 128, dtype, impl.device), some_slots(63)
    cache = empty_cache(63, 2, 128, dtype, impl.device)
    impl.op(heads, cos_sin, cache, metadata_of(slots, impl.device), 12)
    assert_bitwise(heads[:, :12], rotated(before[:, :12], cos_sin))
    assert_bitwise(stored(cache, slots)[0], rotated(before[:, 12:14], cos_sin))


@pytest.mark.parametrize("has_qk_norm", [False, True], ids=["plain", "qk_norm"])
@each_implementation_and_dtype("rotary_embedding_and_store_kv")
def test_tokens_without_a_slot_are_stored_nowhere_and_spoil_nobody(impl, dtype, has_qk_norm):
    """Tokens 1, 3 and 4 are padding and hold NaN; the cache is 7.0 where nobody stores."""
    before = random_tensor(5, 8, 64, dtype=dtype, device=impl.device)
    cos_sin = angles(5, 64, dtype, impl.device)
    norm = head_norms(64, dtype, impl.device) if has_qk_norm else None
    results = []
    for spoil in (False, True):
        heads, cache = before.clone(), torch.full((2, 2, 2, BLOCK_SIZE, 64), 7.0, dtype=dtype, device=impl.device)
        if spoil:
            heads[[1, 3, 4]] = NAN
        impl.op(heads, cos_sin, cache, metadata_of([5, -1, 2, -1, -1], impl.device), 4, norm)
        results.append((heads[[0, 2], :4].clone(), cache))
    assert_bitwise(results[1][0], results[0][0])
    assert_bitwise(results[1][1], results[0][1])
    is_written = (results[1][1] != 7.0).any(dim=-1).any(dim=1).any(dim=1)  # [num_blocks, block_size]
    assert is_written.flatten().nonzero().flatten().tolist() == [2, 5]


@each_implementation("rotary_embedding_and_store_kv")
def test_heads_may_be_a_part_of_wider_rows_and_slots_of_any_integer_type(impl):
    before = random_tensor(63, 8, 64, dtype=torch.float32, device=impl.device)
    cos_sin, slots = angles(63, 64, torch.float32, impl.device), some_slots(63)
    results = []
    for heads, slot_dtype in ((before.clone(), torch.int32), (in_wider_rows(before), torch.int64)):
        cache = empty_cache(63, 2, 64, torch.float32, impl.device)
        impl.op(heads, in_wider_rows(cos_sin), cache, metadata_of(slots, impl.device, slot_dtype), 4)
        results.append((heads[:, :4], cache))
    assert_bitwise(results[1][0], results[0][0])
    assert_bitwise(results[1][1], results[0][1])


@each_implementation("rotary_embedding_and_store_kv")
def test_a_step_without_tokens_changes_nothing(impl):
    cache = torch.full((1, 2, 2, BLOCK_SIZE, 64), 7.0, device=impl.device)
    empty = torch.empty(0, dtype=torch.int64, device=impl.device)
    metadata = dataclasses.replace(metadata_of([0], impl.device), slot_mapping=empty, blocks=empty, offsets=empty)
    no_tokens = torch.empty(0, 8, 64, device=impl.device)
    impl.op(no_tokens, torch.empty(0, 64, device=impl.device), cache, metadata, 4)
    assert (cache == 7.0).all()
