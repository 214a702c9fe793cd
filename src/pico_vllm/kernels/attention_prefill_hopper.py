"""Prefill attention on Hopper (sm_90): what ``attention_prefill`` computes, by warps that have different work.

A program has 128 rows. One warp, the producer, copies tiles of K and V from the blocks of the cache to shared memory
(TMA). Two warpgroups, the consumers, have 64 rows each: the tensor cores multiply for one while the other takes its
softmax. Barriers say which stages of K and V are full, and which may be written again.

With a triton that ``gluon_compat`` doesn't know, importing this module raises ImportError. ``attention_prefill``
launches it.
Source: Shah et al. 2024 (FlashAttention-3). On an H200 the consumers find their turns by themselves: ping-pong, which
enforces them, took as long or longer, and so did a softmax beside products of the consumer's own.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportAssignmentType=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# (a launch takes num_warps beside the parameters of the kernel; a constexpr takes a Python value; static_range loops)

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from pico_vllm.kernels.attention_config import HOPPER_BLOCK_M
from pico_vllm.kernels.attention_tiles import SEARCH_BLOCK, find_tile, start_after_predecessors
from pico_vllm.kernels.gluon_compat import async_load, reinterpret, thread_barrier

if TYPE_CHECKING:
    from pico_vllm.kernels.attention_triton import TritonAttentionMetadata

#: Rows of a program and of a consumer, positions of a tile, tiles of K and of V in shared memory.
_BLOCK_M = gl.constexpr(HOPPER_BLOCK_M)
_ROWS = gl.constexpr(64)
_BLOCK_N = gl.constexpr(128)
_STAGES = gl.constexpr(2)
#: Sequences whose starts ``find_tile`` loads at once, by the 4 warps that there are before they split up.
_BLOCK_S = gl.constexpr(SEARCH_BLOCK)
_STARTS = gl.constexpr(gl.BlockedLayout([SEARCH_BLOCK // 128], [32], [4], [0]))
#: Shared memory has rows of 128 bytes, which TMA and the tensor cores swizzle: a wider tile lies as two halves.
_COLUMNS = gl.constexpr(64)
_SWIZZLED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
#: Scores of a consumer; rows of them.
_SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
_SCORE_ROWS = gl.constexpr(gl.SliceLayout(1, _SCORES.value))
#: Registers a thread of the second consumer (the first has what is left) and of the producer.
_CONSUMER_REGISTERS = gl.constexpr(240)
_PRODUCER_REGISTERS = gl.constexpr(24)


@gluon.jit
def _weigh_scores(scores, row_max, row_sum, qk_scale, last_visible, tile_start, MASKED: gl.constexpr):
    """Softmax of one more tile, as in ``attend_tile``: weights, rescale (of the sums so far), row_max, row_sum."""
    if MASKED:
        positions = tile_start + gl.arange(0, _BLOCK_N, gl.SliceLayout(0, _SCORES))
        is_visible = gl.expand_dims(positions, 0) <= gl.expand_dims(last_visible, 1)
        scores = gl.where(is_visible, scores, float("-inf"))
    new_max = gl.maximum(row_max, gl.max(scores, axis=1) * qk_scale)
    shift = new_max
    if MASKED:  # a row that has seen nothing yet: -inf - -inf would be NaN
        shift = gl.where(new_max == float("-inf"), 0.0, new_max)
    weights = gl.exp2(gl.fma(scores, qk_scale, -gl.expand_dims(shift, 1)))
    rescale = gl.exp2(row_max - shift)
    return weights, rescale, new_max, row_sum * rescale + gl.sum(weights, axis=1)


@gluon.jit
def _start_scores(q, k_tiles, k_full, i):
    """Start q k^T of the i-th tile, once its K is there."""
    mbarrier.wait(k_full.index(i % _STAGES), i // _STAGES & 1)
    zeros = gl.zeros([_ROWS, _BLOCK_N], gl.float32, _SCORES)
    return warpgroup_mma(q, k_tiles.index(i % _STAGES).permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _start_sum(weights, rescale, acc, v_tiles, v_full, i):
    """Start acc * rescale + weights v of the i-th tile, once its V is there."""
    OUT: gl.constexpr = acc.type.layout
    mbarrier.wait(v_full.index(i % _STAGES), i // _STAGES & 1)
    acc = acc * gl.expand_dims(gl.convert_layout(rescale, gl.SliceLayout(1, OUT)), 1)
    weights = gl.convert_layout(weights.to(v_tiles.dtype), gl.DotOperandLayout(0, OUT, 2))
    return warpgroup_mma(weights, v_tiles.index(i % _STAGES), acc, is_async=True)


@gluon.jit
def _attend_tiles(
    q, k_tiles, v_tiles, barriers, begin, end, last_tile, weights, rescale, acc, row_max, row_sum, qk_scale,
    last_visible, MASKED: gl.constexpr,
):  # fmt: skip
    """For i in [begin, end): scores of tile i and the sum over tile i - 1 back to back, then the weights of tile i."""
    k_full, k_empty, v_full, v_empty = barriers
    for i in range(begin, end):
        scores_token = _start_scores(q, k_tiles, k_full, i)
        acc_token = _start_sum(weights, rescale, acc, v_tiles, v_full, i - 1)
        scores = warpgroup_mma_wait(1, [scores_token])
        mbarrier.arrive(k_empty.index(i % _STAGES))
        acc = warpgroup_mma_wait(0, [acc_token])
        mbarrier.arrive(v_empty.index((i - 1) % _STAGES))
        weights, rescale, row_max, row_sum = _weigh_scores(
            scores, row_max, row_sum, qk_scale, last_visible, (last_tile - i) * _BLOCK_N, MASKED
        )
    return weights, rescale, acc, row_max, row_sum


@gluon.jit
def _head_rows(rows, first_token, GROUP: gl.constexpr):
    """Where the rows are in ``out`` [num_tokens * num_heads, head_dim]."""
    return ((first_token + rows // GROUP).to(gl.int64) * gl.num_programs(0) + gl.program_id(0)) * GROUP + rows % GROUP


@gluon.jit
def _consume(
    query, out, partial_out, partial_lse, q_memory, k_tiles, v_tiles, barriers, rows_of, tiles, qk_scale,
    query_token_stride, query_head_stride, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, IS_SPLIT: gl.constexpr,
    FIRST: gl.constexpr,
):  # fmt: skip
    """A consumer: 64 of the program's rows, from FIRST on, over the tiles of positions from the last to the first."""
    first_row, num_rows, first_token, num_cached, seq_len = rows_of
    last_tile, num_tiles, num_masked = tiles
    k_full, k_empty, v_full, _ = barriers
    first_row = first_row + FIRST

    # 1. Queries to shared memory, zeros past the sequence.
    LOADS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
    rows = first_row + gl.arange(0, _ROWS, gl.SliceLayout(1, LOADS))
    dims = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, LOADS))
    tokens = (first_token + rows // GROUP).to(gl.int64)
    offsets = tokens * query_token_stride + (gl.program_id(0) * GROUP + rows % GROUP) * query_head_stride
    offsets = gl.expand_dims(offsets, 1) + gl.expand_dims(dims, 0)
    q_memory.store(gl.load(query + offsets, mask=gl.expand_dims(rows < num_rows, 1), other=0.0))
    fence_async_shared()
    thread_barrier()

    # 2. Weights of the last tile.
    score_rows = first_row + gl.arange(0, _ROWS, _SCORE_ROWS)
    last_visible = num_cached + score_rows // GROUP
    scores = warpgroup_mma_wait(0, [_start_scores(q_memory, k_tiles, k_full, 0)])
    mbarrier.arrive(k_empty.index(0))
    row_max = gl.full([_ROWS], float("-inf"), gl.float32, _SCORE_ROWS)
    row_sum = gl.zeros([_ROWS], gl.float32, _SCORE_ROWS)
    weights, rescale, row_max, row_sum = _weigh_scores(
        scores, row_max, row_sum, qk_scale, last_visible, last_tile * _BLOCK_N, True
    )

    # 3. Its values past the sequence may be NaN, and 0 x NaN is NaN. Both consumers write the same.
    if (last_tile + 1) * _BLOCK_N > seq_len:
        mbarrier.wait(v_full.index(0), 0)
        positions = last_tile * _BLOCK_N + gl.arange(0, _BLOCK_N, gl.SliceLayout(1, LOADS))
        v_tile = v_tiles.index(0)
        v_tile.store(gl.where(gl.expand_dims(positions < seq_len, 1), v_tile.load(LOADS), 0.0))
        fence_async_shared()
        thread_barrier()

    # 4. The other tiles on the diagonal, then full ones without masks, then the sum over the one that is left.
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    acc = gl.zeros([_ROWS, HEAD_DIM], gl.float32, OUT)
    weights, rescale, acc, row_max, row_sum = _attend_tiles(
        q_memory, k_tiles, v_tiles, barriers, 1, num_masked, last_tile, weights, rescale, acc, row_max, row_sum,
        qk_scale, last_visible, True,
    )  # fmt: skip
    weights, rescale, acc, row_max, row_sum = _attend_tiles(
        q_memory, k_tiles, v_tiles, barriers, num_masked, num_tiles, last_tile, weights, rescale, acc, row_max, row_sum,
        qk_scale, last_visible, False,
    )  # fmt: skip
    acc = warpgroup_mma_wait(0, [_start_sum(weights, rescale, acc, v_tiles, v_full, num_tiles - 1)])

    # 5. Normalise and write, as ``write_rows`` does.
    row_sum = gl.where(row_sum == 0.0, 1.0, row_sum)
    result = acc * gl.expand_dims(gl.convert_layout(1.0 / row_sum, gl.SliceLayout(1, OUT)), 1)
    if IS_SPLIT:
        rows = first_row + gl.arange(0, _ROWS, gl.SliceLayout(1, OUT))
        dims = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, OUT))
        split_rows = _head_rows(rows, first_token, GROUP) * gl.num_programs(1) + gl.program_id(1)
        offsets = gl.expand_dims(split_rows * HEAD_DIM, 1) + gl.expand_dims(dims, 0)
        gl.store(partial_out + offsets, result, mask=gl.expand_dims(rows < num_rows, 1))
        split_rows = _head_rows(score_rows, first_token, GROUP) * gl.num_programs(1) + gl.program_id(1)
        gl.store(partial_lse + split_rows, row_max + gl.log2(row_sum), mask=score_rows < num_rows)
    else:
        q_memory.store(result.to(out.dtype.element_ty))  # there and back: a thread then has 16 bytes of a row
        thread_barrier()
        # Not the layout of the loads: with it their row numbers were kept in registers all the time.
        STORES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        rows = first_row + gl.arange(0, _ROWS, gl.SliceLayout(1, STORES))
        dims = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, STORES))
        head_rows = _head_rows(rows, first_token, GROUP)
        offsets = gl.expand_dims(head_rows * HEAD_DIM, 1) + gl.expand_dims(dims, 0)
        gl.store(out + offsets, q_memory.load(STORES), mask=gl.expand_dims(rows < num_rows, 1))


@gluon.jit
def _copy_tile(
    kv_cache, rows, offset, memory, full, empty, i, HEAD_DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr
):  # fmt: skip
    """Start the copies of the i-th tile, one for each block and half of it, once its stage is empty."""
    BLOCKS: gl.constexpr = _BLOCK_N // BLOCK_SIZE
    HALVES: gl.constexpr = HEAD_DIM // _COLUMNS
    stage = i % _STAGES
    mbarrier.wait(empty.index(stage), i // _STAGES & 1 ^ 1)
    mbarrier.expect(full.index(stage), _BLOCK_N * HEAD_DIM * 2)
    for j in gl.static_range(BLOCKS):
        for half in gl.static_range(HALVES):
            part = memory.index((stage * HALVES + half) * BLOCKS + j)
            async_load(kv_cache, [rows[j] + offset, half * _COLUMNS], full.index(stage), part)


@gluon.jit
def _produce(
    kv_cache, k_blocks, v_blocks, barriers, last_tile, num_tiles, block_table, num_blocks, HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
):  # fmt: skip
    """The producer: K and V of the tiles of positions, from the last to the first.

    Blocks from ``num_blocks`` on are no blocks of the sequence: they are read past the end of the cache, which gives 0.
    """
    BLOCKS: gl.constexpr = _BLOCK_N // BLOCK_SIZE
    kv_head, num_kv_heads = gl.program_id(0), gl.num_programs(0)
    k_full, k_empty, v_full, v_empty = barriers
    for i in range(0, num_tiles):
        first_block = (last_tile - i) * BLOCKS
        rows = ()
        for j in gl.static_range(BLOCKS):
            is_block = first_block + j < num_blocks
            block = gl.load(block_table + first_block + j, mask=is_block, other=0)
            row = (block * 2 * num_kv_heads + kv_head) * BLOCK_SIZE
            rows += (gl.where(is_block, row, kv_cache.shape[0]),)
        _copy_tile(kv_cache, rows, 0, k_blocks, k_full, k_empty, i, HEAD_DIM, BLOCK_SIZE)
        _copy_tile(kv_cache, rows, num_kv_heads * BLOCK_SIZE, v_blocks, v_full, v_empty, i, HEAD_DIM, BLOCK_SIZE)


@gluon.jit(
    do_not_specialize=["first_seq", "num_seqs", "num_tokens", "table_stride"],
    do_not_specialize_on_alignment=["block_tables", "query_start_loc", "seq_lens"],
)
def _hopper_prefill_kernel(
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
    table_stride,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    IS_SPLIT: gl.constexpr,
    PDL: gl.constexpr,
):
    """out[t, h] = sum_j softmax_j(scale q[t, h] . k_j) v_j, j in [0, position of t], as in ``_prefill_kernel``.

    Grid: (num_kv_heads, num_splits, tiles). A program computes 128 rows of one sequence: row r is token r // GROUP and
    query head r % GROUP of the KV head. ``kv_cache`` is a descriptor of [rows of the cache, HEAD_DIM], of which
    [BLOCK_SIZE, 64] are copied at once. Padding as there; accumulates in fp32.
    """
    start_after_predecessors(PDL)
    # 1. The rows [first_row, num_rows) of a sequence. Late tiles first.
    tile = gl.num_programs(2) - 1 - gl.program_id(2)
    columns = gl.arange(0, _BLOCK_S, _STARTS)
    seq, tile, first_token, end_token = find_tile(
        query_start_loc, tile, first_seq, num_seqs, num_tokens, columns, GROUP, _BLOCK_M, _BLOCK_S
    )
    query_len = end_token - first_token
    first_row, num_rows = tile * _BLOCK_M, query_len * GROUP
    if first_row >= num_rows:
        return
    seq_len = gl.load(seq_lens + seq, mask=seq < num_seqs, other=0)
    num_cached = seq_len - query_len
    rows_of = (first_row, num_rows, first_token, num_cached, seq_len)

    # 2. The tiles [begin, end) of this split, at least one. Every row sees all positions of the first num_full tiles,
    # no row sees any at some_visible or after.
    last_row = gl.minimum(first_row + _BLOCK_M, num_rows) - 1
    some_visible = gl.maximum(num_cached + last_row // GROUP + 1, 0)
    num_full = gl.maximum(num_cached + first_row // GROUP + 1, 0) // _BLOCK_N
    begin, end = 0, gl.cdiv(some_visible, _BLOCK_N)
    if IS_SPLIT:
        span = gl.cdiv(end, gl.num_programs(1))
        begin = gl.program_id(1) * span
        end = gl.minimum(end, begin + span)
    num_tiles = gl.maximum(end - begin, 1)
    last_tile = begin + num_tiles - 1
    num_masked = gl.minimum(gl.maximum(last_tile + 1 - num_full, 1), num_tiles)
    tiles = (last_tile, num_tiles, num_masked)

    # 3. Shared memory: a tile of [BLOCK_N, HEAD_DIM] lies as its halves, each as its blocks.
    dtype: gl.constexpr = query.dtype.element_ty
    NUM_BLOCKS: gl.constexpr = _STAGES * (HEAD_DIM // _COLUMNS) * (_BLOCK_N // BLOCK_SIZE)
    q_memory = gl.allocate_shared_memory(dtype, [2, _ROWS, HEAD_DIM], _SWIZZLED)
    k_blocks = gl.allocate_shared_memory(dtype, [NUM_BLOCKS, BLOCK_SIZE, _COLUMNS], _SWIZZLED)
    v_blocks = gl.allocate_shared_memory(dtype, [NUM_BLOCKS, BLOCK_SIZE, _COLUMNS], _SWIZZLED)
    k_tiles = reinterpret(k_blocks, dtype, [_STAGES, _BLOCK_N, HEAD_DIM], _SWIZZLED)
    v_tiles = reinterpret(v_blocks, dtype, [_STAGES, _BLOCK_N, HEAD_DIM], _SWIZZLED)
    k_full = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(_STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=2)  # consumers
        mbarrier.init(v_empty.index(stage), count=2)
    fence_async_shared()
    thread_barrier()

    # 4. The warps split up.
    barriers = (k_full, k_empty, v_full, v_empty)
    block_table = block_tables + seq.to(gl.int64) * table_stride
    num_blocks = gl.cdiv(some_visible, BLOCK_SIZE)
    gl.warp_specialize(
        [
            (_consume, (
                query, out, partial_out, partial_lse, q_memory.index(0), k_tiles, v_tiles, barriers, rows_of, tiles,
                qk_scale, query_token_stride, query_head_stride, GROUP, HEAD_DIM, IS_SPLIT, 0,
            )),
            (_consume, (
                query, out, partial_out, partial_lse, q_memory.index(1), k_tiles, v_tiles, barriers, rows_of, tiles,
                qk_scale, query_token_stride, query_head_stride, GROUP, HEAD_DIM, IS_SPLIT, _ROWS,
            )),
            (_produce, (
                kv_cache, k_blocks, v_blocks, barriers, last_tile, num_tiles, block_table, num_blocks, HEAD_DIM,
                BLOCK_SIZE,
            )),
        ],
        [4, 1],
        [_CONSUMER_REGISTERS, _PRODUCER_REGISTERS],
    )  # fmt: skip


def launch_hopper_prefill(
    grid: tuple[int, int, int],
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    out: torch.Tensor,
    partial_out: torch.Tensor,
    partial_lse: torch.Tensor,
    metadata: TritonAttentionMetadata,
    scale: float,
) -> None:
    """Launch the kernel for what ``takes_hopper_prefill``; writes ``out`` or, with splits, the partial results.

    Args:
        grid: KV heads, splits, tiles of 128 rows as ``find_tile`` places them.
        query, out, metadata, scale: as in ``prefill_attention_triton``.
        kv_cache: [num_blocks, 2, num_kv_heads, block_size, head_dim], contiguous.
        partial_out, partial_lse: of ``allocate_partials``.
    """
    num_tokens, num_heads, head_dim = query.shape
    num_blocks, _, num_kv_heads, block_size, _ = kv_cache.shape
    shape = [num_blocks * 2 * num_kv_heads * block_size, head_dim]
    # Made anew for every launch (1.2 µs) and passed by value: a captured graph has its own.
    descriptor = TensorDescriptor(kv_cache, shape, [head_dim, 1], [block_size, _COLUMNS.value], _SWIZZLED.value)
    _hopper_prefill_kernel[grid](
        query,
        descriptor,
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
        metadata.block_tables.stride(0),
        GROUP=num_heads // num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        IS_SPLIT=grid[1] > 1,
        PDL=metadata.device.launches_early,
        num_warps=4,
        launch_pdl=metadata.device.launches_early,
    )
