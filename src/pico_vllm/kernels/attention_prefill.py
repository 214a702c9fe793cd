"""Prefill attention: the query tokens of many sequences, causal, over the block table.

A sequence brings its whole prompt, a chunk of it, or what a prefix hit left over: its query tokens are its last ones,
and everything before them is read from the cache like the tokens themselves. Forward pass of FlashAttention-2
(Dao 2023). Large prefills on Hopper have a kernel of their own (``attention_prefill_hopper``), launched from here.

The grid comes from host bounds alone: each program finds its sequence on the device (``find_tile``).
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false
# (a launch takes num_warps and num_stages beside the parameters of the kernel; a constexpr takes a Python value)

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from pico_vllm.kernels.attention_config import (
    HOPPER_BLOCK_M,
    AttentionConfig,
    PrefillConfig,
    choose_merge,
    choose_prefill,
    num_prefill_splits,
    takes_hopper_prefill,
)
from pico_vllm.kernels.attention_merge import allocate_partials, merge_splits
from pico_vllm.kernels.attention_tiles import (
    SEARCH_BLOCK,
    attend_positions,
    find_tile,
    load_blocks,
    load_rows,
    start_after_predecessors,
    write_rows,
)

try:
    from pico_vllm.kernels.attention_prefill_hopper import launch_hopper_prefill
except ImportError:  # a Triton without it: the kernel below does everything
    launch_hopper_prefill = None

if TYPE_CHECKING:
    from pico_vllm.kernels.attention_triton import TritonAttentionMetadata


@triton.jit(
    do_not_specialize=["first_seq", "num_seqs", "num_tokens", "table_stride"],
    do_not_specialize_on_alignment=["block_tables", "query_start_loc", "seq_lens"],
)
def _prefill_kernel(
    query,
    kv_cache,
    out,
    partial_out,
    partial_lse,
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
    IS_SPLIT: tl.constexpr,
    SEPARATES_DIAGONAL: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[t, h] = sum_j softmax_j(scale q[t, h] . k_j) v_j, j in [0, position of t].

    Grid: (num_heads / HEADS, num_splits, tiles). A program computes BLOCK_M rows of one sequence: row r is token
    r // HEADS and query head r % HEADS of its HEADS ones, which share a KV head. The last tiles of a sequence see the
    most and start first. Split, it looks at one part of the positions that the tile sees, in whole tiles of BLOCK_N,
    and leaves what ``attention_merge`` needs. Rows past the sequence compute on zeros and aren't stored; tokens of a
    sequence of length 0, and those after the last sequence (index ``num_seqs``), see nothing and get 0. Accumulates in
    fp32.
    """
    start_after_predecessors(PDL)
    # 1. The rows [first_row, num_rows) of a sequence. Late tiles first.
    first_head = tl.program_id(0) * HEADS
    num_heads = tl.num_programs(0) * HEADS
    split, num_splits = tl.program_id(1), tl.num_programs(1)
    tile = tl.num_programs(2) - 1 - tl.program_id(2)
    seq, tile, first_token, end_token = find_tile(
        query_start_loc, tile, first_seq, num_seqs, num_tokens, tl.arange(0, BLOCK_S), HEADS, BLOCK_M, BLOCK_S
    )
    query_len = end_token - first_token
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
    all_visible = 0
    if SEPARATES_DIAGONAL:
        all_visible = tl.maximum((num_cached + first_row // HEADS + 1) // BLOCK_N * BLOCK_N, 0)  # in whole tiles
    some_visible = num_cached + last_row // HEADS + 1

    # 3. This split's part [begin, end) of them; all splits are the same number of tiles long but the last ones.
    begin, end, some_end = 0, all_visible, some_visible
    if IS_SPLIT:
        span = tl.cdiv(tl.cdiv(some_visible, BLOCK_N), num_splits) * BLOCK_N
        begin = split * span
        end = tl.minimum(all_visible, begin + span)
        some_end = tl.minimum(some_visible, begin + span)

    # 4. Online softmax: full tiles without any mask, then those on the diagonal.
    kv_head = first_head // GROUP
    keys = kv_cache + kv_head * kv_head_stride
    values = keys + value_offset
    block_table = block_tables + seq.to(tl.int64) * table_stride
    columns = tl.arange(0, BLOCK_N)
    diagonal = tl.maximum(begin, end)
    blocks = load_blocks(block_table, begin + columns, end, BLOCK_SIZE)
    diagonal_blocks = load_blocks(block_table, diagonal + columns, some_end, BLOCK_SIZE)
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    if SEPARATES_DIAGONAL:
        acc, row_max, row_sum = attend_positions(
            q, keys, values, block_table, blocks, begin, end, BLOCK_N, last_visible, acc, row_max, row_sum, qk_scale,
            block_stride, offset_stride, HEAD_DIM, BLOCK_SIZE, BLOCK_N, BLOCK_D, MASKED=False,
        )  # fmt: skip
    acc, row_max, row_sum = attend_positions(
        q, keys, values, block_table, diagonal_blocks, diagonal, some_end, BLOCK_N, last_visible, acc, row_max, row_sum,
        qk_scale, block_stride, offset_stride, HEAD_DIM, BLOCK_SIZE, BLOCK_N, BLOCK_D, MASKED=True,
    )  # fmt: skip

    # 5. Write.
    head_rows = tokens * num_heads + heads
    write_rows(
        out, partial_out, partial_lse, head_rows, split, num_splits, dims, is_row, acc, row_max, row_sum,
        HEAD_DIM, BLOCK_D, IS_SPLIT,
    )  # fmt: skip


def prefill_attention_triton(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    out: torch.Tensor,
    metadata: TritonAttentionMetadata,
    scale: float,
    config: AttentionConfig,
) -> None:
    """Attend from the sequences after the decodes; writes their rows of ``out``, and 0 into those nobody owns.

    Args:
        query: [num_tokens, num_heads, head_dim], rows contiguous.
        kv_cache: [num_blocks, 2, num_kv_heads, block_size, head_dim], rows contiguous.
        out: [num_tokens, num_heads, head_dim], contiguous.
        metadata: of this step.
        scale: factor on the scores, above 0.
        config: of the device.
    """
    num_tokens, num_heads, _ = query.shape
    group, device = num_heads // kv_cache.shape[2], metadata.device
    first_seq, num_seqs = metadata.num_decode_reqs, metadata.seq_lens.shape[0]
    num_decode_tokens = first_seq if metadata.decode_query_len == 1 else 0  # at least
    seq_len = metadata.prefill_seq_len
    num_rows = (num_tokens - num_decode_tokens) * num_heads
    prefill = choose_prefill(config, num_rows, seq_len, device.num_sms)
    launch_hopper = launch_hopper_prefill if takes_hopper_prefill(config, prefill, num_rows, device, kv_cache) else None
    block_m = HOPPER_BLOCK_M if launch_hopper else prefill.block_m
    heads = group if launch_hopper or prefill.packs_group else 1
    num_full_tiles = -(-(num_tokens - num_decode_tokens) * heads // block_m)
    num_programs = num_full_tiles * (num_heads // heads)
    num_splits = 1  # for padded tokens alone
    if num_seqs > first_seq:
        num_splits = num_prefill_splits(num_programs, seq_len, device.num_sms)
    partial_out, partial_lse = allocate_partials(num_tokens, num_splits, out)
    num_tiles = num_tokens * heads // block_m + num_seqs - first_seq + 1  # as find_tile places them
    grid = (num_heads // heads, num_splits, num_tiles)
    if launch_hopper:
        launch_hopper(grid, query, kv_cache, out, partial_out, partial_lse, metadata, scale)
    else:
        _launch_prefill(grid, query, kv_cache, out, partial_out, partial_lse, metadata, scale, prefill)
    if num_splits > 1:
        merge = choose_merge(config, num_splits, num_tokens * num_heads, device.num_sms)
        merge_splits(out, partial_out, partial_lse, metadata.query_start_loc, first_seq, merge, device, decodes=False)


def _launch_prefill(
    grid: tuple[int, int, int],
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    out: torch.Tensor,
    partial_out: torch.Tensor,
    partial_lse: torch.Tensor,
    metadata: TritonAttentionMetadata,
    scale: float,
    prefill: PrefillConfig,
) -> None:
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads, block_size = kv_cache.shape[2:4]
    device = metadata.device
    _prefill_kernel[grid](
        query,
        kv_cache,
        out,
        partial_out,
        partial_lse,
        metadata.block_tables,
        metadata.query_start_loc,
        metadata.seq_lens,
        scale * math.log2(math.e),
        metadata.num_decode_reqs,
        metadata.seq_lens.shape[0],
        num_tokens,
        query.stride(0),
        query.stride(1),
        kv_cache.stride(0),
        kv_cache.stride(1),
        kv_cache.stride(2),
        kv_cache.stride(3),
        metadata.block_tables.stride(0),
        GROUP=num_heads // num_kv_heads,
        HEADS=num_heads // grid[0],
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        BLOCK_M=prefill.block_m,
        BLOCK_N=prefill.block_n,
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        BLOCK_S=SEARCH_BLOCK,
        IS_SPLIT=grid[1] > 1,
        SEPARATES_DIAGONAL=prefill.separates_diagonal,
        PDL=device.launches_early,
        num_warps=prefill.num_warps,
        num_stages=prefill.num_stages,
        launch_pdl=device.launches_early,
    )
