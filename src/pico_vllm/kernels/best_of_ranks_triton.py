# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false
# pyright: reportAttributeAccessIssue=false
# (a launch takes num_warps beside the parameters of the kernel; inside of one, types and ranges are Triton's)

"""The largest logit of each row where ranks have the logits of a part of the vocabulary each.

A rank sends its best value and that one's id, 8 bytes a row instead of its share of 300 KB, through the lines of
``all_reduce_triton``: a ``SymmetricRows`` of its own whose rows are one chunk. All ranks choose the same id.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pico_vllm.kernels.all_reduce_triton import LINE_BYTES, SymmetricRows, _poll_lines, _send_lines
from pico_vllm.kernels.attention_config import device_of
from pico_vllm.kernels.attention_tiles import start_after_predecessors
from pico_vllm.kernels.greedy_triton import _best_chunk, best_of_chunks


@triton.jit
def _best_of_ranks_kernel(
    values_ptr,
    ids_ptr,
    token_ids_ptr,
    last_token_ids_ptr,
    rows_ptr,
    peers_ptr,
    epochs_ptr,
    abort_ptr,
    num_chunks,
    first_id,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    MAX_ROWS: tl.constexpr,
    CHUNKS_BLOCK: tl.constexpr,
    IS_COMPILED: tl.constexpr,
    PDL: tl.constexpr,
):
    """token_ids[row] and last_token_ids[rows[row]] = the smallest id, of all ranks, that has the row's largest value.

    Grid: (num_rows,), one warp; its first thread has the row's line. Epochs and slots as in ``_all_reduce_kernel``.
    """
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, 32)
    is_first = lanes == 0
    own_buffer = tl.load(peers_ptr + RANK)
    start_after_predecessors(PDL)
    epoch = tl.load(epochs_ptr + row) + 1
    value, token_id = _best_chunk(values_ptr, ids_ptr, row, num_chunks, CHUNKS_BLOCK)
    bits = value.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    own = tl.zeros((32,), tl.int64) + (((token_id + first_id).to(tl.int64) << 32) | bits)
    lines = ((epoch & 1).to(tl.int64) * SIZE * MAX_ROWS + row + lanes) * LINE_BYTES  # sender 0's
    for i in tl.static_range(1, SIZE):
        buffer = tl.load(peers_ptr + (RANK + i) % SIZE)
        _send_lines(buffer + RANK * MAX_ROWS * LINE_BYTES + lines, own, epoch, is_first, IS_COMPILED)
    received = _poll_lines(
        own_buffer + lines, is_first, epoch, abort_ptr, SIZE, RANK, MAX_ROWS * LINE_BYTES, IS_COMPILED, 1
    )
    best = own if RANK == 0 else received[0]
    for rank in tl.static_range(1, SIZE):
        other = own if rank == RANK else received[rank - (rank > RANK)]
        best = tl.where(_value_of(other) > _value_of(best), other, best)  # ids grow with ranks
    chosen = best >> 32
    tl.store(token_ids_ptr + row + lanes, chosen, mask=is_first)
    kept_ptrs = last_token_ids_ptr + tl.load(rows_ptr + row) + lanes
    tl.store(kept_ptrs, chosen.to(tl.int32), mask=is_first)
    tl.debug_barrier()  # all threads have read the old count
    tl.store(epochs_ptr + row, epoch)


@triton.jit
def _value_of(chunk):
    return chunk.to(tl.int32).to(tl.float32, bitcast=True)


def greedy_of_ranks_triton(
    logits: torch.Tensor, last_token_ids: torch.Tensor, rows: torch.Tensor, lines: SymmetricRows
) -> torch.Tensor:
    """``greedy_reference`` of the logits of all ranks, side by side in their order.

    Args:
        logits: [num_rows, vocab_size / ranks], of this rank's tokens; rows are contiguous. At most ``lines.max_rows``.
        last_token_ids, rows: as of ``greedy_reference``.
        lines: where ranks meet: of rows of two fp32. Every rank launches the same sequence of row counts.

    Returns:
        [num_rows] int64, the same on all ranks.
    """
    num_rows, num_tokens = logits.shape
    assert num_rows <= lines.max_rows and lines.hidden_size == 2 and lines.dtype == torch.float32
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows == 0:
        return token_ids
    device = device_of(logits.device.index)
    values, ids = best_of_chunks(logits)
    num_chunks = values.shape[1]
    _best_of_ranks_kernel[(num_rows,)](
        values,
        ids,
        token_ids,
        last_token_ids,
        rows,
        lines.peers,
        lines.epochs,
        lines.abort,
        num_chunks,
        lines.rank * num_tokens,
        RANK=lines.rank,
        SIZE=lines.size,
        MAX_ROWS=lines.max_rows,
        CHUNKS_BLOCK=triton.next_power_of_2(num_chunks),
        IS_COMPILED=device.architecture > 0,
        PDL=device.launches_early,
        num_warps=1,
        launch_pdl=device.launches_early,
    )
    return token_ids
