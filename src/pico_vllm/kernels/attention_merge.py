"""Merge of attention over parts of a context: what flash-decoding adds to the online softmax.

A row is one query head of one token, and its index counts the rows of ``out``. Split s of a row leaves
partial_out[row, s] = its own softmax-weighted mean of values, and partial_lse[row, s] = log2 of its sum of weights; a
split that had nothing to read leaves -inf, and then what is in partial_out doesn't count. Both are fp32.
Source: Dao et al. 2023 (flash-decoding).
"""

# pyright: reportCallIssue=false, reportArgumentType=false
# (a launch takes num_warps beside the parameters of the kernel; a constexpr takes a Python value)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pico_vllm.kernels.attention_config import Device, MergeConfig
from pico_vllm.kernels.attention_tiles import start_after_predecessors


@triton.jit(
    do_not_specialize=["num_rows", "num_splits", "boundary_seq"], do_not_specialize_on_alignment=["query_start_loc"]
)
def _merge_kernel(
    out,
    partial_out,
    partial_lse,
    query_start_loc,
    boundary_seq,
    num_rows,
    num_splits,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BEFORE_BOUNDARY: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[r] = sum_s w_s partial_out[r, s] / sum_s w_s with w_s = 2^partial_lse[r, s]; 0 if nobody saw anything.

    Only the rows of [0, num_rows) that belong to the decodes, or to everything else, are written. Decodes are the
    tokens before the start of sequence ``boundary_seq``. Nothing here waits for a length: one wait on memory, since the
    boundary only masks the store. Loads past L1 (".cg"): other SMs wrote the partial results, under early launch after
    this kernel had been launched.

    Grid: (num_rows / BLOCK_R, HEAD_DIM / BLOCK_D). BLOCK_S splits are merged at a time.
    """
    start_after_predecessors(PDL)
    boundary = tl.load(query_start_loc + boundary_seq) * NUM_HEADS
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    dims = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    is_row = rows < num_rows
    rows = rows.to(tl.int64)
    acc = tl.zeros([BLOCK_R, BLOCK_D], dtype=tl.float32)
    max_lse = tl.full([BLOCK_R], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_R], dtype=tl.float32)
    for first_split in range(0, num_splits, BLOCK_S):
        splits = first_split + tl.arange(0, BLOCK_S)
        # Splits outermost: several rows give the threads enough to do, so that each sums its splits by itself.
        is_used = (splits < num_splits)[:, None] & is_row[None, :]  # [BLOCK_S, BLOCK_R]
        split_rows = rows[None, :] * num_splits + splits[:, None]
        pointers = partial_out + split_rows[:, :, None] * HEAD_DIM + dims[None, None, :]
        mask = is_used[:, :, None] & (dims < HEAD_DIM)[None, None, :]
        partial = tl.load(pointers, mask=mask, other=0.0, cache_modifier=".cg")
        lse = tl.load(partial_lse + split_rows, mask=is_used, other=float("-inf"), cache_modifier=".cg")
        new_max = tl.maximum(max_lse, tl.max(lse, axis=0))
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(lse - shift[None, :])
        rescale = tl.exp2(max_lse - shift)
        weighted = tl.where(weights[:, :, None] > 0.0, partial * weights[:, :, None], 0.0)
        total = total * rescale + tl.sum(weights, axis=0)
        acc = acc * rescale[:, None] + tl.sum(weighted, axis=0)
        max_lse = new_max
    result = acc * (1.0 / tl.where(total == 0.0, 1.0, total))[:, None]
    is_row = is_row & ((rows < boundary) == BEFORE_BOUNDARY)
    mask = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    tl.store(out + rows[:, None] * HEAD_DIM + dims[None, :], result.to(out.dtype.element_ty), mask=mask)


def allocate_partials(num_tokens: int, num_splits: int, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for the splits of the first ``num_tokens`` tokens of ``out``: partial_out and partial_lse.

    Both are ``out`` itself when there is one split only: kernels then write no partial results.
    """
    if num_splits == 1:
        return out, out
    num_heads, head_dim = out.shape[1:]
    shape = (num_tokens, num_heads, num_splits)
    partial_out = torch.empty((*shape, head_dim), dtype=torch.float32, device=out.device)
    return partial_out, torch.empty(shape, dtype=torch.float32, device=out.device)


def merge_splits(
    out: torch.Tensor,
    partial_out: torch.Tensor,
    partial_lse: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_decode_reqs: int,
    config: MergeConfig,
    device: Device,
    *,
    decodes: bool,
) -> None:
    """Merge the decodes' rows of ``out``, or all others.

    Args:
        out: [num_tokens, num_heads, head_dim], contiguous.
        partial_out: [num_tokens or fewer, num_heads, num_splits, head_dim].
        partial_lse: [num_tokens or fewer, num_heads, num_splits].
        query_start_loc, num_decode_reqs: of the step.
        config: shape of the launch.
        device: it runs on.
        decodes: which of the two.
    """
    num_tokens, num_heads, num_splits, head_dim = partial_out.shape
    num_rows = num_tokens * num_heads
    block_d = min(config.block_d, triton.next_power_of_2(head_dim))
    _merge_kernel[(triton.cdiv(num_rows, config.block_rows), triton.cdiv(head_dim, block_d))](
        out,
        partial_out,
        partial_lse,
        query_start_loc,
        num_decode_reqs,
        num_rows,
        num_splits,
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        BEFORE_BOUNDARY=decodes,
        BLOCK_R=config.block_rows,
        BLOCK_S=config.block_splits,
        BLOCK_D=block_d,
        PDL=device.launches_early,
        num_warps=config.num_warps,
        launch_pdl=device.launches_early,
    )
