"""Rotation, store and attention of decodes in one op: against the two ops that it stands for."""

import dataclasses
from dataclasses import dataclass

import pytest
import torch

from kernel_cases import NAN, TINY_DECODE, TINY_TILES, Heads, PagedCase, Step, build_paged_case
from kernel_implementations import (
    IMPLEMENTATIONS,
    REFERENCE_ATTENTION,
    RUNS_TRITON,
    TRITON_DEVICE,
    DecodeOps,
    assert_bitwise,
    assert_near_oracle,
    each_implementation,
    each_implementation_and_dtype,
    uninitialised_memory_is_nan,
)
from pico_vllm.kernels.attention_config import Device
from pico_vllm.kernels.rotary_embedding_and_store_kv import QKNorm, rotary_embedding_and_store_kv_reference

GEOMETRIES = (
    Heads(num_kv_heads=2, group=6, head_dim=128, block_size=16),  # Qwen2.5-1.5B
    Heads(num_kv_heads=3, group=3, head_dim=64, block_size=16),  # SmolLM2-135M
    Heads(num_kv_heads=1, group=1, head_dim=32, block_size=1),
    Heads(num_kv_heads=2, group=17, head_dim=32, block_size=8),
)
LENGTHS = (1, 2, 15, 16, 17, 18, 32, 33, 34, 63, 64, 65, 100)
SMALL = Heads(num_kv_heads=2, group=3, head_dim=64, block_size=16)


@dataclass(frozen=True)
class DecodeCase:
    """Decodes over a paged cache, their heads before the rotation, and what the two reference ops make of them."""

    paged: PagedCase
    heads: torch.Tensor  # [num_seqs, num_heads + 2 * num_kv_heads, head_dim]
    cos_sin: torch.Tensor
    stored_cache: torch.Tensor
    expected: torch.Tensor  # fp64, of the queries and keys that the reference has rotated in the tested dtype
    qk_norm: QKNorm | None

    def run(self, ops: DecodeOps, **changes: object) -> tuple[torch.Tensor, torch.Tensor]:
        """(output, cache)."""
        case = self.paged
        metadata = ops.prepare_attention(case.inputs, case.heads.cache_shape)
        metadata = dataclasses.replace(metadata, **changes) if changes else metadata
        heads, cache = self.heads.clone(), case.kv_cache.clone()
        with uninitialised_memory_is_nan():
            out = ops.rotary_decode_attention(
                heads, self.cos_sin, cache, metadata, case.heads.num_heads, case.scale, self.qk_norm
            )
        return out, cache


def decodes(
    lengths: tuple[int, ...],
    geometry: Heads = SMALL,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    padded: tuple[int, ...] = (),
    not_stored: tuple[int, ...] = (),
    has_qk_norm: bool = False,
) -> DecodeCase:
    """One decode a length; those of ``padded`` have no positions, those of ``not_stored`` the last one in the cache."""
    step = Step(tuple((1, length) for length in lengths), len(lengths))
    case = build_paged_case(step, geometry, dtype=dtype, device=device)
    num_seqs, dim = len(lengths), geometry.head_dim
    heads = case.projected.qkv.view(num_seqs, -1, dim)
    turns = torch.outer(torch.arange(num_seqs) + 1.0, torch.linspace(1.0, 0.01, dim // 2))
    cos_sin = torch.cat((turns.cos(), turns.sin()), dim=-1).to(device, dtype)
    slots, seq_lens = case.inputs.slot_mapping.clone(), case.inputs.seq_lens.clone()
    rotated, stored_cache = heads.clone(), case.kv_cache.clone()
    weights = (torch.linspace(0.5, 1.5, dim).to(device, dtype) for _ in range(2))
    norm = QKNorm(*weights, 1e-5) if has_qk_norm else None
    rotary_embedding_and_store_kv_reference(rotated, cos_sin, stored_cache, case.inputs, geometry.num_heads, norm)
    wide = rotated[:, : geometry.num_heads].double()
    expected = REFERENCE_ATTENTION.paged_attention(wide, stored_cache.double(), case.inputs, case.scale)
    kv_cache = case.kv_cache.clone()
    for s in not_stored:
        slot = int(slots[s])
        place = (slot // geometry.block_size, slice(None), slice(None), slot % geometry.block_size)
        kv_cache[place] = stored_cache[place]
        slots[s] = -1
    for s in padded:
        slot = int(slots[s])
        stored_cache[slot // geometry.block_size, :, :, slot % geometry.block_size] = NAN
        heads[s], slots[s], seq_lens[s], expected[s] = NAN, -1, 0, 0.0
    inputs = dataclasses.replace(case.inputs, slot_mapping=slots, seq_lens=seq_lens, decodes_only=True)
    paged = dataclasses.replace(case, inputs=inputs, kv_cache=kv_cache)
    return DecodeCase(paged, heads, cos_sin, stored_cache, expected, norm)


def assert_stored(case: DecodeCase, cache: torch.Tensor) -> None:
    """Keys are near the reference's, everything else is as it was, bit by bit."""
    new_keys = ~case.stored_cache[:, 0].isnan() & case.paged.kv_cache[:, 0].isnan()
    assert_near_oracle("rotary_embedding", cache[:, 0][new_keys], case.stored_cache[:, 0][new_keys].double())
    assert_bitwise(cache[:, 0].masked_fill(new_keys, 0.0), case.stored_cache[:, 0].masked_fill(new_keys, 0.0))
    assert_bitwise(cache[:, 1], case.stored_cache[:, 1])


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@each_implementation_and_dtype("rotary_decode_attention")
def test_decodes_are_near_the_oracle_and_stored(impl, dtype, geometry):
    case = decodes(LENGTHS, geometry, dtype=dtype, device=impl.device)
    out, cache = case.run(impl.op)
    assert out.dtype == dtype
    assert_near_oracle("attention", out, case.expected)
    assert_stored(case, cache)


@pytest.mark.parametrize("length", [1, 2, 100])
@each_implementation("rotary_decode_attention")
def test_one_decode_alone(impl, length):
    case = decodes((length,), device=impl.device)
    out, cache = case.run(impl.op)
    assert_near_oracle("attention", out, case.expected)
    assert_stored(case, cache)


@each_implementation("rotary_decode_attention")
def test_padded_sequences_give_zeros_and_store_nothing(impl):
    case = decodes((1, 40, 1, 17, 1), device=impl.device, padded=(0, 2, 4))
    out, cache = case.run(impl.op)
    assert_near_oracle("attention", out, case.expected)
    assert_bitwise(out[[0, 2, 4]], torch.zeros_like(out[[0, 2, 4]]))
    assert_stored(case, cache)


@each_implementation("rotary_decode_attention")
def test_a_token_whose_kv_is_cached_already_attends_and_is_not_stored(impl):
    case = decodes((33, 20, 16), device=impl.device, not_stored=(0, 2))
    out, cache = case.run(impl.op)
    assert_near_oracle("attention", out, case.expected)
    assert_stored(case, cache)


needs_triton = pytest.mark.skipif(not RUNS_TRITON, reason="needs a GPU or TRITON_INTERPRET=1")
TRITON_DECODE = IMPLEMENTATIONS["rotary_decode_attention"][-1].op
DECODE = dataclasses.replace(TINY_DECODE, rotates=True)
TINY = dataclasses.replace(TINY_TILES, decodes=(DECODE,), short_decodes=(DECODE,))


@each_implementation("rotary_decode_attention")
def test_head_norms_come_before_the_rotation(impl):
    case = decodes((33, 1, 20), device=impl.device, has_qk_norm=True)
    out, cache = case.run(impl.op)
    assert_near_oracle("attention", out, case.expected)
    new_keys = ~case.stored_cache[:, 0].isnan()
    assert torch.allclose(cache[:, 0][new_keys], case.stored_cache[:, 0][new_keys], atol=1e-6)


@needs_triton
@pytest.mark.parametrize("rotates", [True, False])
def test_the_order_in_which_decodes_are_taken_up_changes_nothing(rotates):
    """Nor does it whether a kernel of its own rotates."""
    case = decodes((17, 100, 1, 64, 33), device=TRITON_DEVICE)
    decode = dataclasses.replace(DECODE, rotates=rotates)
    config = dataclasses.replace(TINY, decodes=(decode,), short_decodes=(decode,))
    order = torch.tensor([1, 3, 4, 0, 2], dtype=torch.int32, device=TRITON_DEVICE)
    plain, _ = case.run(TRITON_DECODE, config=config)
    out, cache = case.run(TRITON_DECODE, config=config, decode_order=order)
    assert_bitwise(out, plain)
    assert_near_oracle("attention", out, case.expected)
    assert_stored(case, cache)


@needs_triton
@pytest.mark.parametrize("num_sms", [1, 2, 3, 100])
def test_any_number_of_splits_gives_the_same(num_sms):
    """99 older positions are 7 tiles, in 1, 2, 3 or 7 splits; a new token alone has none."""
    case = decodes((100, 97, 1), device=TRITON_DEVICE)
    out, cache = case.run(TRITON_DECODE, config=TINY, device=Device(0, num_sms))
    assert_near_oracle("attention", out, case.expected)
    assert_stored(case, cache)


@needs_triton
@pytest.mark.parametrize("length", [16, 17, 18, 112, 113, 114])
def test_a_bound_far_above_the_lengths_changes_nothing(length):
    """The new token is the first of its tile, or not; most splits find nothing to do."""
    case = decodes((length, 3), device=TRITON_DEVICE)
    out, cache = case.run(TRITON_DECODE, config=TINY, device=Device(0, 4), max_seq_len=4096)
    assert_near_oracle("attention", out, case.expected)
    assert_stored(case, cache)
