import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from kernel_cases import NAN, ODD_SIZES, fused_qkv, random_tensor
from kernel_implementations import (
    assert_bitwise,
    assert_near_oracle,
    each_implementation,
    each_implementation_and_dtype,
)
from pico_vllm.kernels.rotary_embedding import rotary_embedding_reference


def cos_sin_of(positions: torch.Tensor, head_dim: int, dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    inv_freq = 10000.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.outer(positions.double(), inv_freq)  # [num_tokens, head_dim / 2]
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(device=device, dtype=dtype)


def oracle(heads: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    rotated = heads.double()
    rotary_embedding_reference(rotated, cos_sin.double())
    return rotated


@each_implementation("rotary_embedding")
def test_quarter_turn_and_no_turn_by_hand(impl):
    # Pairs are (0, 2) and (1, 3): the first turns by 90 degrees, the second stays. cos | sin = [0, 1 | 1, 0].
    heads = torch.tensor([[[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]]], device=impl.device)
    impl.op(heads, torch.tensor([[0.0, 1.0, 1.0, 0.0]], device=impl.device))
    assert heads.tolist() == [[[-3.0, 2.0, 1.0, 4.0], [-7.0, 6.0, 5.0, 8.0]]]


@each_implementation("rotary_embedding")
def test_each_token_has_its_own_angle(impl):
    # Two tokens, one pair: 60 degrees, then -90 degrees.
    heads = torch.tensor([[[2.0, 0.0]], [[3.0, 4.0]]], device=impl.device)
    cos_sin = torch.tensor([[0.5, math.sqrt(0.75)], [0.0, -1.0]], device=impl.device)
    impl.op(heads, cos_sin)
    assert heads.flatten().tolist() == pytest.approx([1.0, math.sqrt(3.0), 4.0, -3.0], rel=1e-6)


def test_reference_computes_fp64_in_fp64():
    heads = random_tensor(3, 2, 8, dtype=torch.float64) + 1e-12  # digits that fp32 hasn't
    cos_sin = cos_sin_of(torch.tensor([1, 50, 4000]), 8, torch.float64)
    rotated = heads.clone()
    rotary_embedding_reference(rotated, cos_sin)
    for t, h, i in torch.cartesian_prod(torch.arange(3), torch.arange(2), torch.arange(4)).tolist():
        turned = complex(*heads[t, h, i::4].tolist()) * complex(*cos_sin[t, i::4].tolist())
        assert rotated[t, h, i::4].tolist() == pytest.approx([turned.real, turned.imag], abs=1e-14)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("num_heads", [1, 9])
@pytest.mark.parametrize("num_tokens", ODD_SIZES)
@each_implementation_and_dtype("rotary_embedding")
def test_rotation_is_near_the_oracle(impl, dtype, num_tokens, num_heads, head_dim):
    heads = random_tensor(num_tokens, num_heads, head_dim, dtype=dtype, device=impl.device)
    cos_sin = cos_sin_of(torch.arange(num_tokens) * 37, head_dim, dtype, impl.device)
    expected = oracle(heads, cos_sin)
    impl.op(heads, cos_sin)
    assert_near_oracle("rotary_embedding", heads, expected)


@pytest.mark.parametrize("group", [1, 3, 6])
@each_implementation_and_dtype("rotary_embedding")
def test_query_and_key_heads_of_a_fused_projection_turn_in_place_and_values_stay(impl, dtype, group):
    num_heads, num_kv_heads, head_dim = 2 * group, 2, 64
    qkv = random_tensor(63, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype, device=impl.device)
    before = fused_qkv(qkv.clone(), num_heads, num_kv_heads, head_dim)
    after = fused_qkv(qkv, num_heads, num_kv_heads, head_dim)
    cos_sin = cos_sin_of(torch.arange(63), head_dim, dtype, impl.device)
    q_and_k = qkv[:, : (num_heads + num_kv_heads) * head_dim].view(63, -1, head_dim)
    assert not q_and_k.is_contiguous()
    cos_sin_before = cos_sin.clone()
    impl.op(q_and_k, cos_sin)
    assert_near_oracle("rotary_embedding", after.query, oracle(before.query, cos_sin))
    assert_near_oracle("rotary_embedding", after.key, oracle(before.key, cos_sin))
    assert_bitwise(after.value, before.value)
    assert_bitwise(cos_sin, cos_sin_before)


@each_implementation_and_dtype("rotary_embedding")
def test_position_0_changes_nothing(impl, dtype):
    heads = random_tensor(3, 2, 64, dtype=dtype, device=impl.device)
    before = heads.clone()
    impl.op(heads, cos_sin_of(torch.zeros(3), 64, dtype, impl.device))
    assert_bitwise(heads, before)


@each_implementation_and_dtype("rotary_embedding")
def test_nan_in_a_padded_token_spoils_only_that_token(impl, dtype):
    heads = random_tensor(5, 3, 64, dtype=dtype, device=impl.device)
    cos_sin = cos_sin_of(torch.arange(5), 64, dtype, impl.device)
    clean = heads.clone()
    impl.op(clean, cos_sin)
    heads[3] = NAN
    impl.op(heads, cos_sin)
    others = [0, 1, 2, 4]
    assert_bitwise(heads[others], clean[others])


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("num_tokens", ODD_SIZES)
@each_implementation_and_dtype("rotary_embedding", equal_to_hf=True)
def test_rotation_equals_transformers_bitwise(impl, dtype, num_tokens, head_dim):
    config = LlamaConfig(hidden_size=6 * head_dim, num_attention_heads=6, num_key_value_heads=2, head_dim=head_dim)
    qkv = random_tensor(num_tokens, (6 + 2 + 2) * head_dim, dtype=dtype, device=impl.device)
    parts = fused_qkv(qkv, 6, 2, head_dim)
    positions = torch.arange(5, 5 + num_tokens)[None]
    cos, sin = LlamaRotaryEmbedding(config)(qkv, positions)  # [1, num_tokens, head_dim], halves repeated
    q, k = (part.transpose(0, 1)[None] for part in (parts.query, parts.key))  # [1, heads, num_tokens, head_dim]
    q, k = apply_rotary_pos_emb(q, k, cos, sin)
    half = head_dim // 2
    cos_sin = torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=-1).to(impl.device)
    impl.op(qkv[:, : 8 * head_dim].view(num_tokens, 8, head_dim), cos_sin)
    assert_bitwise(parts.query, q[0].transpose(0, 1))
    assert_bitwise(parts.key, k[0].transpose(0, 1))
