"""Decode attention: one query token a sequence (up to eight under speculation) against a long paged context.

A decode reads every K and V once and computes almost nothing, so all SMs must read: the context of a sequence is split
among programs, and a second kernel merges what they found (Dao et al. 2023, flash-decoding). The query heads that share
a KV head, times the query tokens, are the rows of one small matrix product.

The split *count* comes from host bounds, each split's *range* from the length on the device: a CUDA graph captured for
32k positions decodes 500 of them on as many programs as there are tiles.
"""

# pyright: reportCallIssue=false, reportArgumentType=false
# (a launch takes num_warps and num_stages beside the parameters of the kernel; a constexpr takes a Python value)

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from pico_vllm.kernels.attention_config import DecodeConfig, num_kv_splits
from pico_vllm.kernels.attention_tiles import attend_positions, load_rows, store_rows

if TYPE_CHECKING:
    from pico_vllm.kernels.attention_triton import TritonAttentionMetadata

#: Partial results that one step of the merge loads.
_COMBINE_BLOCK = 32


@triton.jit
def _positions_per_split(seq_len, num_splits, BLOCK_N: tl.constexpr):
    """n, so that split i has the positions [i * n, (i + 1) * n) of the sequence: whole tiles, one or more."""
    return tl.maximum(tl.cdiv(tl.cdiv(seq_len, BLOCK_N), num_splits), 1) * BLOCK_N


@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["block_tables", "query_start_loc", "seq_lens"],
)
def _decode_kernel(
    query,
    kv_cache,
    out,
    partial_out,
    partial_lse,
    block_tables,
    query_start_loc,
    seq_lens,
    qk_scale,
    query_token_stride,
    query_head_stride,
    block_stride,
    value_offset,
    kv_head_stride,
    offset_stride,
    table_stride,
    GROUP: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    IS_SPLIT: tl.constexpr,
):
    """out[t, h] = sum_j softmax_j(scale q[t, h] . k_j) v_j over the positions j of one split of one sequence.

    Grid: (num_kv_heads, num_splits, num_seqs). A program computes the NUM_ROWS = query length x GROUP rows of one KV
    head: row r is query token r // GROUP and query head r % GROUP of the group. Unsplit, it writes ``out``; split, the
    split's normalised result and log2 of its sum of weights, both fp32, for ``_combine_kernel``. Splits past the
    sequence write nothing. Rows past the sequence's query tokens and up to BLOCK_M compute on zeros and aren't stored;
    a sequence of length 0 gives rows of 0. Accumulates in fp32.
    """
    kv_head, split, seq = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    num_kv_heads, num_splits = tl.num_programs(0), tl.num_programs(1)

    # 1. The positions [begin, end) of this split.
    seq_len = tl.load(seq_lens + seq)
    span = _positions_per_split(seq_len, num_splits, BLOCK_N)
    begin = split * span
    end = tl.minimum(begin + span, seq_len)
    if IS_SPLIT and begin >= seq_len:
        return

    # 2. The query rows.
    first_token = tl.load(query_start_loc + seq)
    query_len = tl.load(query_start_loc + seq + 1) - first_token
    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    tokens = (first_token + rows // GROUP).to(tl.int64)
    heads = kv_head * GROUP + rows % GROUP
    is_row = rows < query_len * GROUP
    last_visible = seq_len - query_len + rows // GROUP
    query_offsets = tokens * query_token_stride + heads * query_head_stride
    q = load_rows(query, query_offsets, dims, is_row, HEAD_DIM, BLOCK_D)

    # 3. Online softmax over the tiles.
    keys = kv_cache + kv_head * kv_head_stride
    values = keys + value_offset
    block_table = block_tables + seq * table_stride
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    acc, row_max, row_sum = attend_positions(
        q, keys, values, block_table, begin, end, last_visible, acc, row_max, row_sum, qk_scale,
        block_stride, offset_stride, HEAD_DIM, BLOCK_SIZE, BLOCK_N, BLOCK_D, MASKED=True,
    )  # fmt: skip

    # 4. Write; the sum is 0 where a row saw nothing.
    is_empty = row_sum == 0.0
    row_sum = tl.where(is_empty, 1.0, row_sum)
    result = acc / row_sum[:, None]
    if IS_SPLIT:
        row_base = ((seq * num_kv_heads + kv_head) * num_splits + split) * NUM_ROWS
        store_rows(partial_out, (row_base + rows) * HEAD_DIM, dims, is_row, result, HEAD_DIM, BLOCK_D)
        tl.store(partial_lse + row_base + rows, row_max + tl.log2(row_sum), mask=is_row)
    else:
        out_offsets = (tokens * (num_kv_heads * GROUP) + heads) * HEAD_DIM
        store_rows(out, out_offsets, dims, is_row, result, HEAD_DIM, BLOCK_D)


@triton.jit(
    do_not_specialize=["num_splits"],
    do_not_specialize_on_alignment=["query_start_loc", "seq_lens"],
)
def _combine_kernel(
    out,
    partial_out,
    partial_lse,
    query_start_loc,
    seq_lens,
    num_splits,
    GROUP: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """out[t, h] = sum_s w_s partial_out_s / sum_s w_s with w_s = 2^partial_lse_s, over the splits s of a sequence.

    Grid: (num_kv_heads x NUM_ROWS, num_seqs). A program merges one row, BLOCK_S splits at a time, in fp32. Rows past
    the sequence's query tokens aren't written; a sequence of length 0 has no splits and gives 0.
    """
    head_row, seq = tl.program_id(0), tl.program_id(1).to(tl.int64)
    num_kv_heads = tl.num_programs(0) // NUM_ROWS
    kv_head, row = head_row // NUM_ROWS, head_row % NUM_ROWS
    first_token = tl.load(query_start_loc + seq)
    query_len = tl.load(query_start_loc + seq + 1) - first_token
    if row >= query_len * GROUP:
        return

    seq_len = tl.load(seq_lens + seq)
    num_used = tl.cdiv(seq_len, _positions_per_split(seq_len, num_splits, BLOCK_N))
    row_base = (seq * num_kv_heads + kv_head) * num_splits * NUM_ROWS + row
    dims = tl.arange(0, BLOCK_D)
    acc = tl.zeros([BLOCK_D], dtype=tl.float32)
    max_lse = -float("inf")
    total = 0.0
    for first_split in range(0, num_used, BLOCK_S):
        splits = first_split + tl.arange(0, BLOCK_S)
        is_used = splits < num_used
        split_rows = row_base + splits * NUM_ROWS
        lse = tl.load(partial_lse + split_rows, mask=is_used, other=float("-inf"))
        partial = load_rows(partial_out, split_rows * HEAD_DIM, dims, is_used, HEAD_DIM, BLOCK_D)
        # Every row sees position 0, which is in split 0: the maximum is finite from the first step on.
        new_max = tl.maximum(max_lse, tl.max(lse, axis=0))
        weights = tl.exp2(lse - new_max)
        rescale = tl.exp2(max_lse - new_max)
        total = total * rescale + tl.sum(weights, axis=0)
        acc = acc * rescale + tl.sum(partial * weights[:, None], axis=0)
        max_lse = new_max

    result = acc / tl.where(total == 0.0, 1.0, total)
    token = first_token.to(tl.int64) + row // GROUP
    head = kv_head * GROUP + row % GROUP
    out_row = out + (token * (num_kv_heads * GROUP) + head) * HEAD_DIM
    tl.store(out_row + dims, result.to(out.dtype.element_ty), mask=dims < HEAD_DIM)


def decode_attention_triton(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    out: torch.Tensor,
    metadata: TritonAttentionMetadata,
    scale: float,
    config: DecodeConfig,
) -> None:
    """Attend from the decodes of a step; writes their rows of ``out``.

    Args:
        query: [num_tokens, num_heads, head_dim], rows contiguous.
        kv_cache: [num_blocks, 2, num_kv_heads, block_size, head_dim], rows contiguous.
        out: [num_tokens, num_heads, head_dim], contiguous.
        metadata: of this step; its first ``num_decode_reqs`` sequences have at most ``decode_query_len`` tokens each.
        scale: factor on the scores, above 0.
        config: shape of the launch.
    """
    num_kv_heads, block_size, head_dim = kv_cache.shape[2:]
    group = query.shape[1] // num_kv_heads
    num_seqs, num_rows = metadata.num_decode_reqs, metadata.decode_query_len * group
    num_programs = config.programs_per_sm * metadata.device.num_sms
    num_splits = num_kv_splits(num_seqs * num_kv_heads, metadata.max_seq_len, config.block_n, num_programs)
    partial_out = partial_lse = out
    if num_splits > 1:
        partial_rows = (num_seqs, num_kv_heads, num_splits, num_rows)
        partial_out = torch.empty((*partial_rows, head_dim), dtype=torch.float32, device=out.device)
        partial_lse = torch.empty(partial_rows, dtype=torch.float32, device=out.device)
    block_d = max(16, triton.next_power_of_2(head_dim))
    _decode_kernel[(num_kv_heads, num_splits, num_seqs)](
        query,
        kv_cache,
        out,
        partial_out,
        partial_lse,
        metadata.block_tables,
        metadata.query_start_loc,
        metadata.seq_lens,
        scale * math.log2(math.e),
        query.stride(0),
        query.stride(1),
        kv_cache.stride(0),
        kv_cache.stride(1),
        kv_cache.stride(2),
        kv_cache.stride(3),
        metadata.block_tables.stride(0),
        GROUP=group,
        NUM_ROWS=num_rows,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        BLOCK_M=max(16, triton.next_power_of_2(num_rows)),
        BLOCK_N=config.block_n,
        BLOCK_D=block_d,
        IS_SPLIT=num_splits > 1,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    if num_splits > 1:
        _combine_kernel[(num_kv_heads * num_rows, num_seqs)](
            out,
            partial_out,
            partial_lse,
            metadata.query_start_loc,
            metadata.seq_lens,
            num_splits,
            GROUP=group,
            NUM_ROWS=num_rows,
            HEAD_DIM=head_dim,
            BLOCK_N=config.block_n,
            BLOCK_S=_COMBINE_BLOCK,
            BLOCK_D=block_d,
            num_warps=4,
        )
