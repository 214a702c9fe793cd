"""What the attention kernels share: rows of query heads attend to a range of positions of one paged sequence.

Device functions only. A tile is BLOCK_N consecutive positions of one sequence and KV head; its rows lie in several
blocks of BLOCK_SIZE, so every row finds its own block in the block table.
Source: Milakov and Gimelshein 2018 (online softmax); Dao 2023 (FlashAttention-2).
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportOperatorIssue=false
# (a constexpr takes a Python value)

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

#: Sequences whose starts one step of ``find_tile`` loads.
SEARCH_BLOCK = 256


@triton.jit
def start_after_predecessors(PDL: tl.constexpr) -> None:
    """First statement of a kernel: nothing may be written before it, and only what has been there for long be read.

    That is: weights; and what the layers of a step share (lengths, block tables, slots, angles), since a kernel that
    doesn't launch early came after whatever wrote them.

    With PDL (programmatic dependent launch, sm_90 and later) a kernel is launched while its predecessor still runs.
    The first instruction lets the next kernel come as early; the second waits until all predecessors have ended and
    what they wrote is visible. A program that returned without waiting would let successors overtake predecessors.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def sequence_of_program(decode_order, HAS_ORDER: tl.constexpr) -> tl.tensor:
    """Which sequence the programs of one index of the grid's last axis decode; programs start in that axis' order."""
    seq = tl.program_id(2)
    if HAS_ORDER:
        seq = tl.load(decode_order + seq)
    return seq.to(tl.int64)


@triton.jit
def find_tile(
    query_start_loc,
    tile,
    first_seq,
    num_seqs,
    num_tokens,
    columns,
    HEADS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_S: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Which sequence the tile belongs to, which of its tiles it is, and the sequence's tokens [start, end).

    Sequence i, counted from ``first_seq``, has its first tile at floor(rows before it / BLOCK_M) + i: never too close
    to the next one, because floor(a + b) + 1 >= floor(a) + ceil(b). Index ``num_seqs`` stands for the tokens after the
    last sequence. Starts grow with the index, so the sequence's own is the largest one of those that have begun.
    ``columns`` is [0, BLOCK_S).
    """
    first_token = tl.load(query_start_loc + first_seq)
    num_started, start, end = 0, first_token, num_tokens
    for first in range(first_seq, num_seqs + 1, BLOCK_S):
        seqs = first + columns
        starts = tl.load(query_start_loc + seqs, mask=seqs <= num_seqs, other=num_tokens)
        first_tiles = (starts - first_token) * HEADS // BLOCK_M + seqs - first_seq
        is_started = (first_tiles <= tile) & (seqs <= num_seqs)
        num_started = num_started + tl.sum(is_started.to(tl.int32), axis=0)
        start = tl.maximum(start, tl.max(tl.where(is_started, starts, 0), axis=0))
        end = tl.minimum(end, tl.min(tl.where(is_started, num_tokens, starts), axis=0))
    return first_seq + num_started - 1, tile - (start - first_token) * HEADS // BLOCK_M - num_started + 1, start, end


@triton.jit
def load_rows(
    base,
    offsets,
    dims,
    is_valid,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ALL_VALID: tl.constexpr = False,
) -> tl.tensor:
    """Rows of HEAD_DIM numbers, [len(offsets), BLOCK_D]; 0 where a row is invalid and past HEAD_DIM."""
    pointers = base + offsets[:, None] + dims[None, :]
    if BLOCK_D != HEAD_DIM:
        mask = is_valid[:, None] & (dims < HEAD_DIM)[None, :]
        rows = tl.load(pointers, mask=mask, other=0.0)
    elif ALL_VALID:
        rows = tl.load(pointers)
    else:
        rows = tl.load(pointers, mask=is_valid[:, None], other=0.0)
    return rows


@triton.jit
def store_rows(base, offsets, dims, is_valid, rows, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr) -> None:
    """The inverse of ``load_rows``: nothing is written where a row is invalid, nor past HEAD_DIM."""
    mask = is_valid[:, None]
    if BLOCK_D != HEAD_DIM:
        mask = mask & (dims < HEAD_DIM)[None, :]
    tl.store(base + offsets[:, None] + dims[None, :], rows.to(base.dtype.element_ty), mask=mask)


@triton.jit
def load_blocks(block_table, positions, end, BLOCK_SIZE: tl.constexpr) -> tl.tensor:
    """Block ids of positions; 0 for those at ``end`` and after."""
    return tl.load(block_table + positions.to(tl.uint32) // BLOCK_SIZE, mask=positions < end, other=0)


@triton.jit
def attend_positions(
    q,
    keys,
    values,
    block_table,
    blocks,
    begin,
    end,
    step,
    last_visible,
    acc,
    row_max,
    row_sum,
    qk_scale,
    block_stride,
    offset_stride,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MASKED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Continue softmax(scale q k^T) v over the tiles of BLOCK_N positions at begin, begin + step, ... before end.

    With s_j = qk_scale (q . k_j) and qk_scale = scale log2(e) > 0 (exp2 is one instruction), over the positions so far:
    row_max = max_j s_j, row_sum = sum_j 2^(s_j - row_max), acc = sum_j 2^(s_j - row_max) v_j. All three in fp32; the
    weights are rounded to v's dtype for the second product.

    Args:
        q: [BLOCK_M, BLOCK_D], 0 past HEAD_DIM.
        keys, values: pointers to offset 0 of block 0, for the KV head.
        block_table: pointer to the sequence's row.
        blocks: [BLOCK_N] block ids of the first tile; those of ``end`` and after don't count.
        begin, end, step: begin and step are multiples of BLOCK_N.
        last_visible: [BLOCK_M] last position that each row sees.
        acc: [BLOCK_M, BLOCK_D].
        row_max, row_sum: [BLOCK_M].
        MASKED: some row doesn't see all of the range, or it doesn't end with a tile. What lies at ``end`` and after
            isn't loaded: it may be NaN, and 0 x NaN is NaN.

    Returns:
        acc, row_max, row_sum.
    """
    dims = tl.arange(0, BLOCK_D)
    for tile_start in range(begin, end, step):
        positions = tile_start + tl.arange(0, BLOCK_N)
        is_valid = positions < end
        offsets = blocks.to(tl.int64) * block_stride + positions.to(tl.uint32) % BLOCK_SIZE * offset_stride
        blocks = load_blocks(block_table, positions + step, end, BLOCK_SIZE)
        k = load_rows(keys, offsets, dims, is_valid, HEAD_DIM, BLOCK_D, not MASKED)
        v = load_rows(values, offsets, dims, is_valid, HEAD_DIM, BLOCK_D, not MASKED)
        acc, row_max, row_sum = attend_tile(q, k, v, positions, last_visible, acc, row_max, row_sum, qk_scale, MASKED)
    return acc, row_max, row_sum


@triton.jit
def attend_tile(
    q, k, v, positions, last_visible, acc, row_max, row_sum, qk_scale, MASKED: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """One tile of ``attend_positions``, loaded: k and v are [BLOCK_N, BLOCK_D]."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")  # [BLOCK_M, BLOCK_N]
    if MASKED:
        scores = tl.where(positions[None, :] <= last_visible[:, None], scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, axis=1) * qk_scale)
    # A row that has seen nothing yet: -inf - -inf would be NaN.
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(tl.fma(scores, qk_scale, -shift[:, None]))
    rescale = tl.exp2(row_max - shift)
    row_sum = row_sum * rescale + tl.sum(weights, axis=1)
    acc = tl.dot(weights.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
    return acc, new_max, row_sum


@triton.jit
def write_rows(
    out,
    partial_out,
    partial_lse,
    head_rows,
    split,
    num_splits,
    dims,
    is_row,
    acc,
    row_max,
    row_sum,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    IS_SPLIT: tl.constexpr,
) -> None:
    """Normalise and write: to ``out``, or what ``attention_merge`` needs of a split. Row indices count the rows of out.

    A row that saw nothing has a sum of 0 and gives 0.
    """
    row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)
    result = acc * (1.0 / row_sum)[:, None]
    if IS_SPLIT:
        split_rows = head_rows * num_splits + split
        store_rows(partial_out, split_rows * HEAD_DIM, dims, is_row, result, HEAD_DIM, BLOCK_D)
        tl.store(partial_lse + split_rows, row_max + tl.log2(row_sum), mask=is_row)
    else:
        store_rows(out, head_rows * HEAD_DIM, dims, is_row, result, HEAD_DIM, BLOCK_D)
