"""Prefill attention: the query tokens of many sequences, causal, over the block table.

A sequence brings its whole prompt, a chunk of it, or what a prefix hit left over: its query tokens are its last ones,
and everything before them is read from the cache like the tokens themselves. Forward pass of FlashAttention-2
(Dao 2023).

The grid comes from host bounds alone: each program finds its sequence on the device (``_find_tile``).
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false
# (a launch takes num_warps and num_stages beside the parameters of the kernel; a constexpr takes a Python value)

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from pico_vllm.kernels.attention_config import PrefillConfig
from pico_vllm.kernels.attention_tiles import attend_positions, load_rows, store_rows

if TYPE_CHECKING:
    from pico_vllm.kernels.attention_triton import TritonAttentionMetadata

#: Sequences whose starts one step of ``_find_tile`` loads.
_SEARCH_BLOCK = 256


@triton.jit
def _find_tile(
    query_start_loc, tile, first_seq, num_seqs, HEADS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr
):
    """Which sequence the tile belongs to, and which of its tiles it is.

    Sequence i, counted from ``first_seq``, has its first tile at floor(rows before it / BLOCK_M) + i: never too close
    to the next one, because floor(a + b) + 1 >= floor(a) + ceil(b). Index ``num_seqs`` stands for the tokens after the
    last sequence.
    """
    first_token = tl.load(query_start_loc + first_seq)
    num_started = 0
    for first in range(first_seq, num_seqs + 1, BLOCK_S):
        seqs = first + tl.arange(0, BLOCK_S)
        starts = tl.load(query_start_loc + seqs, mask=seqs <= num_seqs, other=0)
        first_tiles = (starts - first_token) * HEADS // BLOCK_M + seqs - first_seq
        is_started = (first_tiles <= tile) & (seqs <= num_seqs)
        num_started = num_started + tl.sum(is_started.to(tl.int32), axis=0)
    seq = first_seq + num_started - 1
    start = tl.load(query_start_loc + seq)
    return seq, tile - (start - first_token) * HEADS // BLOCK_M - num_started + 1


@triton.jit(
    do_not_specialize=["first_seq", "num_seqs", "num_tokens", "table_stride"],
    do_not_specialize_on_alignment=["block_tables", "query_start_loc", "seq_lens"],
)
def _prefill_kernel(
    query,
    kv_cache,
    out,
    block_tables,
    query_start_loc,
    seq_lens,
    qk_scale,
    first_seq,
    num_seqs,
    num_tokens,
    query_token_stride,
    query_head_stride,
    block_stride,
    value_offset,
    kv_head_stride,
    offset_stride,
    table_stride,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """out[t, h] = sum_j softmax_j(scale q[t, h] . k_j) v_j, j in [0, position of t].

    Grid: (num_heads / HEADS, tiles). A program computes BLOCK_M rows of one sequence: row r is token r // HEADS and
    query head r % HEADS of its HEADS ones, which share a KV head. The last tiles of a sequence see the most and start
    first. Rows past the sequence compute on zeros and aren't stored; tokens of a sequence of length 0, and those after
    the last sequence (index ``num_seqs``), see nothing and get 0. Accumulates in fp32.
    """
    # 1. The rows [first_row, num_rows) of a sequence. Late tiles first.
    first_head = tl.program_id(0) * HEADS
    num_heads = tl.num_programs(0) * HEADS
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    seq, tile = _find_tile(query_start_loc, tile, first_seq, num_seqs, HEADS, BLOCK_M, BLOCK_S)
    first_token = tl.load(query_start_loc + seq)
    query_len = tl.load(query_start_loc + seq + 1, mask=seq < num_seqs, other=num_tokens) - first_token
    first_row, num_rows = tile * BLOCK_M, query_len * HEADS
    if first_row >= num_rows:
        return
    seq_len = tl.load(seq_lens + seq, mask=seq < num_seqs, other=0)
    rows = first_row + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    is_row = rows < num_rows
    tokens = (first_token + rows // HEADS).to(tl.int64)
    heads = first_head + rows % HEADS
    query_offsets = tokens * query_token_stride + heads * query_head_stride
    q = load_rows(query, query_offsets, dims, is_row, HEAD_DIM, BLOCK_D)

    # 2. Every row sees the positions [0, all_visible), no row sees any at some_visible or after.
    num_cached = seq_len - query_len
    last_visible = num_cached + rows // HEADS
    last_row = tl.minimum(first_row + BLOCK_M, num_rows) - 1
    all_visible = tl.maximum((num_cached + first_row // HEADS + 1) // BLOCK_N * BLOCK_N, 0)  # in whole tiles
    some_visible = num_cached + last_row // HEADS + 1

    # 3. Online softmax: full tiles without any mask, then those on the diagonal.
    kv_head = first_head // GROUP
    keys = kv_cache + kv_head * kv_head_stride
    values = keys + value_offset
    block_table = block_tables + seq.to(tl.int64) * table_stride
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    acc, row_max, row_sum = attend_positions(
        q, keys, values, block_table, 0, all_visible, last_visible, acc, row_max, row_sum, qk_scale,
        block_stride, offset_stride, HEAD_DIM, BLOCK_SIZE, BLOCK_N, BLOCK_D, MASKED=False,
    )  # fmt: skip
    acc, row_max, row_sum = attend_positions(
        q, keys, values, block_table, all_visible, some_visible, last_visible, acc, row_max, row_sum, qk_scale,
        block_stride, offset_stride, HEAD_DIM, BLOCK_SIZE, BLOCK_N, BLOCK_D, MASKED=True,
    )  # fmt: skip

    # 4. Write; the sum is 0 where a row saw nothing.
    result = acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
    store_rows(out, (tokens * num_heads + heads) * HEAD_DIM, dims, is_row, result, HEAD_DIM, BLOCK_D)


def prefill_attention_triton(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    out: torch.Tensor,
    metadata: TritonAttentionMetadata,
    scale: float,
    config: PrefillConfig,
) -> None:
    """Attend from the sequences after the decodes; writes their rows of ``out``, and 0 into those nobody owns.

    Args:
        query: [num_tokens, num_heads, head_dim], rows contiguous.
        kv_cache: [num_blocks, 2, num_kv_heads, block_size, head_dim], rows contiguous.
        out: [num_tokens, num_heads, head_dim], contiguous.
        metadata: of this step.
        scale: factor on the scores, above 0.
        config: shape of the launch.
    """
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads, block_size = kv_cache.shape[2:4]
    group = num_heads // num_kv_heads
    heads = group if config.packs_group else 1
    first_seq, num_seqs = metadata.num_decode_reqs, metadata.seq_lens.shape[0]
    num_tiles = num_tokens * heads // config.block_m + num_seqs - first_seq + 1  # as _find_tile places them
    _prefill_kernel[(num_heads // heads, num_tiles)](
        query,
        kv_cache,
        out,
        metadata.block_tables,
        metadata.query_start_loc,
        metadata.seq_lens,
        scale * math.log2(math.e),
        first_seq,
        num_seqs,
        num_tokens,
        query.stride(0),
        query.stride(1),
        kv_cache.stride(0),
        kv_cache.stride(1),
        kv_cache.stride(2),
        kv_cache.stride(3),
        metadata.block_tables.stride(0),
        GROUP=group,
        HEADS=heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        BLOCK_S=_SEARCH_BLOCK,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
