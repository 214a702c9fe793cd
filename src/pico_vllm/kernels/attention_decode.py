"""Decode attention: one query token a sequence (up to eight under speculation) against a long paged context.

A decode reads every K and V once and computes almost nothing, so all SMs must read: the context of a sequence is split
among programs, and what they found is merged (Dao et al. 2023, flash-decoding). The query heads that share a KV head,
times the query tokens, are the rows of one small matrix product.

The number of splits comes from host bounds; split i has the tiles i, i + num_splits, ... that the length on the device
leaves: a CUDA graph captured for 32k positions decodes 500 of them on as many programs as there are tiles, and a
program knows its first tile before it knows the length.

At batch 1 latency is all. What waits for what in a program of one tile: launch > q > K and V > product, softmax,
product > partial result > (next kernel) > partial results > sum > store; the length and the block ids are there before
q is. (``rotary_decode_attention_triton`` has K and V there as well.) A kernel that asks for the length, then blocks,
then K, then V, and for the length again to merge waits six times.
"""

# pyright: reportCallIssue=false, reportArgumentType=false
# (a launch takes num_warps and num_stages beside the parameters of the kernel; a constexpr takes a Python value)

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pico_vllm.kernels.attention_config import (
    AttentionConfig,
    DecodeConfig,
    choose_decode,
    choose_merge,
    num_kv_splits,
)
from pico_vllm.kernels.attention_merge import allocate_partials, merge_splits
from pico_vllm.kernels.attention_tiles import (
    attend_positions,
    load_blocks,
    load_rows,
    sequence_of_program,
    write_rows,
)

if TYPE_CHECKING:
    from pico_vllm.kernels.attention_triton import TritonAttentionMetadata


@triton.jit(
    do_not_specialize=["table_stride", "table_positions"],
    do_not_specialize_on_alignment=["block_tables", "query_start_loc", "seq_lens", "decode_order"],
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
    decode_order,
    qk_scale,
    query_token_stride,
    query_head_stride,
    block_stride,
    value_offset,
    kv_head_stride,
    offset_stride,
    table_stride,
    table_positions,
    GROUP: tl.constexpr,
    QUERY_LEN: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[t, h] = sum_j softmax_j(scale q[t, h] . k_j) v_j over the positions j of one split of one sequence.

    Grid: (num_kv_heads, num_splits, num_seqs). A program computes the QUERY_LEN x GROUP rows of one KV head: row r is
    query token r // GROUP and query head r % GROUP of the group. Unsplit, it writes ``out``; split, what
    ``attention_merge`` needs. Rows past the sequence's query tokens and up to BLOCK_M compute on zeros and aren't
    stored; a sequence of length 0 gives rows of 0. Accumulates in fp32.
    """
    if PDL:
        gdc_launch_dependents()
    kv_head, split, seq = tl.program_id(0), tl.program_id(1), sequence_of_program(decode_order, HAS_ORDER)
    num_kv_heads, num_splits = tl.num_programs(0), tl.num_programs(1)

    # 1. What the layers share, in memory since before the first of them (see start_after_predecessors): the length, the
    # first tile's blocks. Then the query rows of a sequence of one token.
    seq_len = tl.load(seq_lens + seq)
    positions = split * BLOCK_N + tl.arange(0, BLOCK_N)
    block_table = block_tables + seq * table_stride
    blocks = load_blocks(block_table, positions, table_positions, BLOCK_SIZE)
    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    if QUERY_LEN == 1:
        first_token, query_len = seq, 1
    else:
        first_token = tl.load(query_start_loc + seq).to(tl.int64)
        query_len = (tl.load(query_start_loc + seq + 1) - first_token).to(tl.int32)
    if PDL:
        gdc_wait()
    tokens = first_token + rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    is_row = rows < query_len * GROUP
    q = load_rows(query, tokens * query_token_stride + heads * query_head_stride, dims, is_row, HEAD_DIM, BLOCK_D)
    head_rows = tokens * (num_kv_heads * GROUP) + heads  # of out

    # 2. Splits past the sequence have nothing to say; one at least says that the length is 0.
    num_used = tl.minimum(tl.maximum(tl.cdiv(seq_len, BLOCK_N), 1), num_splits)
    if IS_SPLIT and split >= num_used:
        nothing = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
        tl.store(partial_lse + head_rows * num_splits + split, nothing, mask=is_row)
        return

    # 3. Online softmax over the tiles.
    last_visible = seq_len - query_len + rows // GROUP
    keys = kv_cache + kv_head * kv_head_stride
    values = keys + value_offset
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    acc, row_max, row_sum = attend_positions(
        q, keys, values, block_table, blocks, split * BLOCK_N, seq_len, num_splits * BLOCK_N, last_visible,
        acc, row_max, row_sum, qk_scale, block_stride, offset_stride, HEAD_DIM, BLOCK_SIZE, BLOCK_N, BLOCK_D,
        MASKED=True,
    )  # fmt: skip

    # 4. Write.
    write_rows(
        out, partial_out, partial_lse, head_rows, split, num_splits, dims, is_row, acc, row_max, row_sum,
        HEAD_DIM, BLOCK_D, IS_SPLIT,
    )  # fmt: skip


def decode_attention_triton(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    out: torch.Tensor,
    metadata: TritonAttentionMetadata,
    scale: float,
    config: AttentionConfig,
) -> None:
    """Attend from the decodes of a step; writes their rows of ``out``.

    Args:
        query: [num_tokens, num_heads, head_dim], rows contiguous.
        kv_cache: [num_blocks, 2, num_kv_heads, block_size, head_dim], rows contiguous.
        out: [num_tokens, num_heads, head_dim], contiguous.
        metadata: of this step; its first ``num_decode_reqs`` sequences have at most ``decode_query_len`` tokens each,
            and exactly one if that is 1.
        scale: factor on the scores, above 0.
        config: of the device.
    """
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads, block_size = kv_cache.shape[2:4]
    group, device = num_heads // num_kv_heads, metadata.device
    num_seqs, query_len = metadata.num_decode_reqs, metadata.decode_query_len
    decode, num_splits = choose_decode_shape(config, metadata, num_seqs * num_kv_heads)
    num_decode_tokens = min(num_tokens, num_seqs * query_len)  # at most
    partial_out, partial_lse = allocate_partials(num_decode_tokens, num_splits, out)
    _decode_kernel[(num_kv_heads, num_splits, num_seqs)](
        query,
        kv_cache,
        out,
        partial_out,
        partial_lse,
        metadata.block_tables,
        metadata.query_start_loc,
        metadata.seq_lens,
        metadata.seq_lens if metadata.decode_order is None else metadata.decode_order,
        scale * math.log2(math.e),
        query.stride(0),
        query.stride(1),
        kv_cache.stride(0),
        kv_cache.stride(1),
        kv_cache.stride(2),
        kv_cache.stride(3),
        metadata.block_tables.stride(0),
        metadata.block_tables.shape[1] * block_size,
        GROUP=group,
        QUERY_LEN=query_len,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        BLOCK_M=max(16, triton.next_power_of_2(query_len * group)),
        BLOCK_N=decode.block_n,
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        IS_SPLIT=num_splits > 1,
        HAS_ORDER=metadata.decode_order is not None,
        PDL=device.launches_early,
        num_warps=decode.num_warps,
        num_stages=decode.num_stages,
        launch_pdl=device.launches_early,
    )
    if num_splits > 1:
        merge = choose_merge(config, num_splits, num_decode_tokens * num_heads, device.num_sms)
        merge_splits(out, partial_out, partial_lse, metadata.query_start_loc, num_seqs, merge, device, decodes=True)


def choose_decode_shape(
    config: AttentionConfig, metadata: TritonAttentionMetadata, num_groups: int
) -> tuple[DecodeConfig, int]:
    """The kernel's shape and the number of splits."""
    num_sms, max_seq_len = metadata.device.num_sms, metadata.max_seq_len
    decode = choose_decode(config, num_groups, max_seq_len)
    num_splits = num_kv_splits(decode, num_groups, max_seq_len, num_sms)
    max_tiles = -(-max_seq_len // (num_splits * decode.block_n))
    # What a program of one tile would prefetch is only overhead.
    return dataclasses.replace(decode, num_stages=min(decode.num_stages, max_tiles + 1)), num_splits
