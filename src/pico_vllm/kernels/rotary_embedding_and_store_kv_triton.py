"""Head norms, rotation and the KV store in one Triton kernel: q, k and v are read and written once.

Contract and composition are those of ``rotary_embedding_and_store_kv``; rounding orders those of its parts.
"""

# pyright: reportCallIssue=false
# (a launch takes num_warps and num_stages beside the parameters of the kernel)

from __future__ import annotations

from typing import Protocol

import torch
import triton
import triton.language as tl

from pico_vllm.kernels.attention_config import device_of
from pico_vllm.kernels.attention_tiles import start_after_predecessors
from pico_vllm.kernels.rotary_embedding_and_store_kv import QKNorm

#: 16 bf16 numbers a thread: two 16-byte loads.
_ELEMENTS_A_WARP = 512


class HasSlotMapping(Protocol):
    """Attention metadata of any backend."""

    @property
    def slot_mapping(self) -> torch.Tensor:
        """[num_tokens] int32 or int64; -1 = not stored."""
        ...


@triton.jit
def _rotary_embedding_and_store_kv_kernel(
    heads_ptr,
    cos_sin_ptr,
    kv_cache_ptr,
    slot_mapping_ptr,
    q_weight_ptr,
    k_weight_ptr,
    eps,
    token_stride,
    head_stride,
    cos_sin_stride,
    cache_block_stride,
    cache_kv_stride,
    cache_head_stride,
    cache_slot_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    CACHE_BLOCK_SIZE: tl.constexpr,
    HAS_QK_NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    """a' = a cos - b sin, b' = b cos + a sin for the halves [a, b] of q and k heads; q in place, k and v to the cache.

    Grid: (num_tokens,); a program has all heads of one token, [HEADS_BLOCK, HALF_BLOCK] twice. A token with slot -1 is
    computed and its q written, but nothing goes to the cache. Norms are fp32; every product and sum of the rotation is
    rounded to the input's dtype.
    """
    start_after_predecessors(PDL)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
    head = tl.arange(0, HEADS_BLOCK)[:, None]  # query | key | value heads
    column = tl.arange(0, HALF_BLOCK)[None, :]
    mask = (head < NUM_HEADS + 2 * NUM_KV_HEADS) & (column < HALF)
    is_query = head < NUM_HEADS
    is_value = head >= NUM_HEADS + NUM_KV_HEADS

    first_ptrs = heads_ptr + token * token_stride + head * head_stride + column
    first = tl.load(first_ptrs, mask=mask, other=0.0)
    second = tl.load(first_ptrs + HALF, mask=mask, other=0.0)
    cos_ptrs = cos_sin_ptr + token * cos_sin_stride + column
    cos = tl.load(cos_ptrs, mask=column < HALF, other=0.0)
    sin = tl.load(cos_ptrs + HALF, mask=column < HALF, other=0.0)

    a, b = first, second
    if HAS_QK_NORM:
        a, b = _normalise_heads(first, second, q_weight_ptr, k_weight_ptr, eps, is_query, column, HALF)
    rotated_a, rotated_b = rotate(a, b, cos, sin)
    tl.store(first_ptrs, rotated_a, mask=mask & is_query)
    tl.store(first_ptrs + HALF, rotated_b, mask=mask & is_query)

    if slot >= 0:
        # Index 1 of the cache: 0 = K, 1 = V. Products instead of tl.where: through them the 16-byte alignment is seen.
        kv = is_value.to(tl.int32)
        kv_head = head - NUM_HEADS - kv * NUM_KV_HEADS
        cache_row_ptr = kv_cache_ptr + slot // CACHE_BLOCK_SIZE * cache_block_stride
        cache_row_ptr += slot % CACHE_BLOCK_SIZE * cache_slot_stride
        cache_ptrs = cache_row_ptr + kv * cache_kv_stride + kv_head * cache_head_stride + column
        is_stored = mask & (head >= NUM_HEADS)
        tl.store(cache_ptrs, tl.where(is_value, first, rotated_a), mask=is_stored)
        tl.store(cache_ptrs + HALF, tl.where(is_value, second, rotated_b), mask=is_stored)


@triton.jit
def rotate(a, b, cos, sin) -> tuple[tl.tensor, tl.tensor]:
    """Both halves of heads, each product and sum rounded to their dtype."""
    rotated_a = (_product(a, cos).to(tl.float32) - _product(b, sin).to(tl.float32)).to(a.dtype)
    rotated_b = (_product(b, cos).to(tl.float32) + _product(a, sin).to(tl.float32)).to(a.dtype)
    return rotated_a, rotated_b


@triton.jit
def _normalise_heads(a, b, q_weight_ptr, k_weight_ptr, eps, is_query, column, HALF: tl.constexpr):
    """Both halves of every head, normalised over the whole head; value heads too, whose result nobody uses."""
    wide_a, wide_b = a.to(tl.float32), b.to(tl.float32)
    mean_square = (tl.sum(wide_a * wide_a, axis=1) + tl.sum(wide_b * wide_b, axis=1)) * (0.5 / HALF)
    inverse_rms = tl.div_rn(1.0, tl.sqrt_rn(mean_square + eps))[:, None]
    q_a = tl.load(q_weight_ptr + column, mask=column < HALF, other=0.0)
    q_b = tl.load(q_weight_ptr + HALF + column, mask=column < HALF, other=0.0)
    k_a = tl.load(k_weight_ptr + column, mask=column < HALF, other=0.0)
    k_b = tl.load(k_weight_ptr + HALF + column, mask=column < HALF, other=0.0)
    normalised_a = _product((wide_a * inverse_rms).to(a.dtype), tl.where(is_query, q_a, k_a))
    normalised_b = _product((wide_b * inverse_rms).to(b.dtype), tl.where(is_query, q_b, k_b))
    return normalised_a, normalised_b


@triton.jit
def _product(x, y):
    """Rounded to x's dtype."""
    return (x.to(tl.float32) * y.to(tl.float32)).to(x.dtype)


def rotary_embedding_and_store_kv_triton(
    heads: torch.Tensor,
    cos_sin: torch.Tensor,
    kv_cache: torch.Tensor,
    metadata: HasSlotMapping,
    num_heads: int,
    qk_norm: QKNorm | None = None,
) -> None:
    """``rotary_embedding_and_store_kv_reference`` in one kernel; the keys in ``heads`` stay as they were."""
    num_tokens, total_heads, head_dim = heads.shape
    if num_tokens == 0:
        return
    launches_early = device_of(heads.device.index).launches_early
    heads_block, half_block = triton.next_power_of_2(total_heads), triton.next_power_of_2(head_dim // 2)
    _rotary_embedding_and_store_kv_kernel[(num_tokens,)](
        heads,
        cos_sin,
        kv_cache,
        metadata.slot_mapping,
        heads if qk_norm is None else qk_norm.q_weight,
        heads if qk_norm is None else qk_norm.k_weight,
        0.0 if qk_norm is None else qk_norm.eps,
        heads.stride(0),
        heads.stride(1),
        cos_sin.stride(0),
        kv_cache.stride(0),
        kv_cache.stride(1),
        kv_cache.stride(2),
        kv_cache.stride(3),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=kv_cache.shape[2],
        HEADS_BLOCK=heads_block,
        HALF=head_dim // 2,
        HALF_BLOCK=half_block,
        CACHE_BLOCK_SIZE=kv_cache.shape[3],
        HAS_QK_NORM=qk_norm is not None,
        PDL=launches_early,
        num_warps=min(max(2 * heads_block * half_block // _ELEMENTS_A_WARP, 1), 8),
        launch_pdl=launches_early,
        enable_fp_fusion=False,  # a fused multiply-add would leave the rounding of the product out
    )
