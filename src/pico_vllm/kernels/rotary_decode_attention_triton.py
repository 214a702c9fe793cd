"""A decode's rotation, KV store and attention in one Triton kernel, and a merge if contexts are split.

Contract and reference are in ``rotary_decode_attention``; launch shapes and splits are those of ``attention_decode``.
What it saves over the two kernels: a launch, a trip of the new K and V through memory, and a wait. Everything but the
new token's heads is in memory long before the product that makes them ends, so the first tile of the context is read
while that product runs (programmatic dependent launch).
"""

# pyright: reportCallIssue=false, reportArgumentType=false
# (a launch takes num_warps and num_stages beside the parameters of the kernel; a constexpr takes a Python value)

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pico_vllm.kernels.attention_config import choose_merge, select_config
from pico_vllm.kernels.attention_decode import choose_decode_shape
from pico_vllm.kernels.attention_merge import allocate_partials, merge_splits
from pico_vllm.kernels.attention_tiles import (
    attend_positions,
    attend_tile,
    load_blocks,
    load_rows,
    sequence_of_program,
    write_rows,
)
from pico_vllm.kernels.attention_triton import TritonAttentionMetadata, paged_attention_triton
from pico_vllm.kernels.rotary_embedding_and_store_kv import QKNorm
from pico_vllm.kernels.rotary_embedding_and_store_kv_triton import rotary_embedding_and_store_kv_triton, rotate


@triton.jit(
    do_not_specialize=["table_stride", "table_positions"],
    do_not_specialize_on_alignment=["slot_mapping", "block_tables", "seq_lens", "decode_order"],
)
def _rotary_decode_kernel(
    heads,
    cos_sin,
    slot_mapping,
    kv_cache,
    out,
    partial_out,
    partial_lse,
    block_tables,
    seq_lens,
    decode_order,
    qk_scale,
    token_stride,
    head_stride,
    cos_sin_stride,
    block_stride,
    value_offset,
    kv_head_stride,
    offset_stride,
    table_stride,
    table_positions,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[s, h] = sum_j softmax_j(scale rotate(q[s, h]) . k_j) v_j over the positions j of one split of one sequence.

    Grid: (num_kv_heads, num_splits, num_seqs). Nobody waits for the new token's K and V to be stored: split 0 has them
    in registers, begins its softmax with them and stores them. The older positions are cut into splits as in
    ``attention_decode``. Before the wait only what was in memory before the first kernel of the step that is launched
    early may be read: older positions, and what the layers of a step share (lengths, block tables, slots, angles).
    """
    if PDL:
        gdc_launch_dependents()
    kv_head, split, seq = tl.program_id(0), tl.program_id(1), sequence_of_program(decode_order, HAS_ORDER)
    num_kv_heads, num_splits = tl.num_programs(0), tl.num_programs(1)
    HALF: tl.constexpr = HEAD_DIM // 2

    # 1. What is there already: the length, the first tile, the angles of the new token.
    seq_len = tl.load(seq_lens + seq)
    num_old = tl.maximum(seq_len - 1, 0)
    positions = split * BLOCK_N + tl.arange(0, BLOCK_N)
    block_table = block_tables + seq * table_stride
    blocks = load_blocks(block_table, positions, table_positions, BLOCK_SIZE)
    slot = tl.load(slot_mapping + seq).to(tl.int64)
    half, dims = tl.arange(0, HALF), tl.arange(0, HEAD_DIM)
    cos = tl.load(cos_sin + seq * cos_sin_stride + half)
    sin = tl.load(cos_sin + seq * cos_sin_stride + HALF + half)
    keys = kv_cache + kv_head * kv_head_stride
    values = keys + value_offset
    offsets = blocks.to(tl.int64) * block_stride + positions.to(tl.uint32) % BLOCK_SIZE * offset_stride
    k = load_rows(keys, offsets, dims, positions < num_old, HEAD_DIM, HEAD_DIM)
    v = load_rows(values, offsets, dims, positions < num_old, HEAD_DIM, HEAD_DIM)
    next_positions = positions + num_splits * BLOCK_N
    blocks = load_blocks(block_table, next_positions, num_old, BLOCK_SIZE)
    if PDL:
        gdc_wait()

    # 2. Splits past the sequence have nothing to say; one at least says that the length is 0.
    rows = tl.arange(0, BLOCK_M)
    is_row = rows < GROUP
    query_heads = kv_head * GROUP + rows
    head_rows = seq * (num_kv_heads * GROUP) + query_heads  # of out
    num_used = tl.minimum(tl.maximum(tl.cdiv(num_old, BLOCK_N), 1), num_splits)
    if IS_SPLIT and split >= num_used:
        nothing = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
        tl.store(partial_lse + head_rows * num_splits + split, nothing, mask=is_row)
        return

    # 3. The new token: queries for all splits, key and value for the first.
    token = heads + seq * token_stride
    query = token + query_heads[:, None] * head_stride + half[None, :]
    q_a = tl.load(query, mask=is_row[:, None], other=0.0)
    q_b = tl.load(query + HALF, mask=is_row[:, None], other=0.0)
    q_a, q_b = rotate(q_a, q_b, cos[None, :], sin[None, :])
    new_key = token + (num_kv_heads * GROUP + kv_head) * head_stride + half
    is_first = split == 0
    k_a, k_b = rotate(tl.load(new_key), tl.load(new_key + HALF), cos, sin)
    new_v = tl.load(token + (num_kv_heads * (GROUP + 1) + kv_head) * head_stride + dims)
    if is_first and slot >= 0:
        stored = slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * offset_stride
        tl.store(keys + stored + half, k_a)
        tl.store(keys + stored + HALF + half, k_b)
        tl.store(values + stored + dims, new_v)
    new_score = tl.sum(q_a.to(tl.float32) * k_a.to(tl.float32)[None, :], axis=1)
    new_score += tl.sum(q_b.to(tl.float32) * k_b.to(tl.float32)[None, :], axis=1)
    sees_new = is_first and seq_len > 0
    row_max = tl.where(sees_new, new_score * qk_scale, float("-inf"))
    row_sum = tl.where(sees_new, tl.full([BLOCK_M], 1.0, dtype=tl.float32), 0.0)
    acc = tl.where(sees_new, new_v.to(tl.float32)[None, :] + tl.zeros([BLOCK_M, HEAD_DIM], dtype=tl.float32), 0.0)
    q = tl.reshape(tl.permute(tl.join(q_a, q_b), (0, 2, 1)), [BLOCK_M, HEAD_DIM])

    # 4. Online softmax over the tiles.
    last_visible = tl.full([BLOCK_M], 0, dtype=tl.int32) + num_old - 1
    acc, row_max, row_sum = attend_tile(q, k, v, positions, last_visible, acc, row_max, row_sum, qk_scale, MASKED=True)
    acc, row_max, row_sum = attend_positions(
        q, keys, values, block_table, blocks, (split + num_splits) * BLOCK_N, num_old, num_splits * BLOCK_N,
        last_visible, acc, row_max, row_sum, qk_scale, block_stride, offset_stride, HEAD_DIM, BLOCK_SIZE, BLOCK_N,
        HEAD_DIM, MASKED=True,
    )  # fmt: skip
    write_rows(
        out, partial_out, partial_lse, head_rows, split, num_splits, dims, is_row, acc, row_max, row_sum,
        HEAD_DIM, HEAD_DIM, IS_SPLIT,
    )  # fmt: skip


def rotary_decode_attention_triton(
    heads: torch.Tensor,
    cos_sin: torch.Tensor,
    kv_cache: torch.Tensor,
    metadata: TritonAttentionMetadata,
    num_heads: int,
    scale: float,
    qk_norm: QKNorm | None = None,
) -> torch.Tensor:
    """``rotary_decode_attention_reference`` in one launch, or as the two ops where those are faster.

    Needs scale > 0 and contiguous rows of head_dim numbers. Head norms, and heads that are no power of two, are for the
    two ops.
    """
    num_seqs, _, head_dim = heads.shape
    num_kv_heads, block_size = kv_cache.shape[2:4]
    group, device = num_heads // num_kv_heads, metadata.device
    assert num_seqs == metadata.num_decode_reqs and metadata.decode_query_len == 1
    block_d = max(16, triton.next_power_of_2(head_dim))
    config = metadata.config or select_config(device.architecture, block_d, heads.element_size())
    decode, num_splits = choose_decode_shape(config, metadata, num_seqs * num_kv_heads)
    if not decode.rotates or qk_norm is not None or block_d != head_dim:
        rotary_embedding_and_store_kv_triton(heads, cos_sin, kv_cache, metadata, num_heads, qk_norm)
        return paged_attention_triton(heads[:, :num_heads], kv_cache, metadata, scale)
    out = torch.empty((num_seqs, num_heads, head_dim), dtype=heads.dtype, device=heads.device)
    partial_out, partial_lse = allocate_partials(num_seqs, num_splits, out)
    _rotary_decode_kernel[(num_kv_heads, num_splits, num_seqs)](
        heads,
        cos_sin,
        metadata.slot_mapping,
        kv_cache,
        out,
        partial_out,
        partial_lse,
        metadata.block_tables,
        metadata.seq_lens,
        metadata.seq_lens if metadata.decode_order is None else metadata.decode_order,
        scale * math.log2(math.e),
        heads.stride(0),
        heads.stride(1),
        cos_sin.stride(0),
        kv_cache.stride(0),
        kv_cache.stride(1),
        kv_cache.stride(2),
        kv_cache.stride(3),
        metadata.block_tables.stride(0),
        metadata.block_tables.shape[1] * block_size,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        BLOCK_M=max(16, triton.next_power_of_2(group)),
        BLOCK_N=decode.block_n,
        IS_SPLIT=num_splits > 1,
        HAS_ORDER=metadata.decode_order is not None,
        PDL=device.launches_early,
        num_warps=decode.num_warps,
        num_stages=decode.num_stages,
        launch_pdl=device.launches_early,
        enable_fp_fusion=False,  # a fused multiply-add would leave the rounding of the rotation's products out
    )
    if num_splits > 1:
        merge = choose_merge(config, num_splits, num_seqs * num_heads, device.num_sms)
        merge_splits(out, partial_out, partial_lse, metadata.query_start_loc, num_seqs, merge, device, decodes=True)
    return out
