# pyright: reportCallIssue=false, reportAttributeAccessIssue=false
# (a launch takes num_warps and num_stages beside the parameters of the kernel; inside of one, types are Triton's)

"""The largest logit of each row in Triton: chunks of the vocabulary in parallel, then the best of the chunks.

One row of 152k logits is read by many programs, so a batch of one is not slower than its share of the memory bandwidth.
Contract as ``greedy_reference``; a NaN counts as -inf, so that any row gives an id of the vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pico_vllm.kernels.attention_config import device_of
from pico_vllm.kernels.attention_tiles import start_after_predecessors

#: Logits of a program: (of few rows, for more programs; of many rows, for fewer), and how many rows are few.
_CHUNKS = (4096, 8192)
_FEW_ROWS = 16
_NUM_WARPS = 8


@triton.jit
def _best_of_chunk_kernel(
    logits_ptr, values_ptr, ids_ptr, row_stride, vocab_size, num_chunks, CHUNK: tl.constexpr, PDL: tl.constexpr
):
    """values[row, c] = max of chunk c of the row, ids[row, c] = the smallest id that has it.

    Grid: (num_rows * num_chunks,); a program has CHUNK logits. Comparisons are fp32, which is exact.
    """
    start_after_predecessors(PDL)
    row = (tl.program_id(0) // num_chunks).to(tl.int64)
    ids = tl.program_id(0) % num_chunks * CHUNK + tl.arange(0, CHUNK)
    logits = tl.load(logits_ptr + row * row_stride + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
    logits = tl.where(logits == logits, logits, float("-inf"))
    best = tl.max(logits, axis=0)
    tl.store(values_ptr + tl.program_id(0), best)
    tl.store(ids_ptr + tl.program_id(0), tl.min(tl.where(logits == best, ids, vocab_size), axis=0))


@triton.jit
def _best_chunk_kernel(
    values_ptr,
    ids_ptr,
    token_ids_ptr,
    last_token_ids_ptr,
    rows_ptr,
    num_chunks,
    CHUNKS_BLOCK: tl.constexpr,
    KEEPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """token_ids[row] = the smallest id among the chunks that have the row's largest value.

    Grid: (num_rows,). KEEPS: last_token_ids[rows[row]] is it too.
    """
    start_after_predecessors(PDL)
    row = tl.program_id(0)
    _, token_id = _best_chunk(values_ptr, ids_ptr, row, num_chunks, CHUNKS_BLOCK)
    tl.store(token_ids_ptr + row, token_id.to(tl.int64))
    if KEEPS:
        tl.store(last_token_ids_ptr + tl.load(rows_ptr + row), token_id)


@triton.jit
def _best_chunk(values_ptr, ids_ptr, row, num_chunks, CHUNKS_BLOCK: tl.constexpr):
    """The largest value of a row's chunks, and the smallest id that has it."""
    chunk = tl.arange(0, CHUNKS_BLOCK)
    is_chunk = chunk < num_chunks
    values = tl.load(values_ptr + row * num_chunks + chunk, mask=is_chunk, other=float("-inf"))
    ids = tl.load(ids_ptr + row * num_chunks + chunk, mask=is_chunk, other=0x7FFFFFFF)
    best = tl.max(values, axis=0)
    return best, tl.min(tl.where(values == best, ids, 0x7FFFFFFF), axis=0)


def greedy_triton(
    logits: torch.Tensor, last_token_ids: torch.Tensor | None = None, rows: torch.Tensor | None = None
) -> torch.Tensor:
    """``greedy_reference`` in two kernels; rows must be contiguous, their stride is free."""
    num_rows = len(logits)
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows == 0:
        return token_ids
    launches_early = device_of(logits.device.index).launches_early
    values, ids = best_of_chunks(logits)
    num_chunks = values.shape[1]
    keeps = last_token_ids is not None
    _best_chunk_kernel[(num_rows,)](
        values,
        ids,
        token_ids,
        last_token_ids if keeps else ids,
        rows if keeps else ids,
        num_chunks,
        CHUNKS_BLOCK=triton.next_power_of_2(num_chunks),
        KEEPS=keeps,
        PDL=launches_early,
        num_warps=1,
        launch_pdl=launches_early,
    )
    return token_ids


def best_of_chunks(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest logits of parts of the vocabulary, and the smallest ids that have them.

    Args:
        logits: [num_rows, vocab_size], at least one row; rows are contiguous.

    Returns:
        ([num_rows, num_chunks] fp32, the same shape in int32).
    """
    num_rows, vocab_size = logits.shape
    launches_early = device_of(logits.device.index).launches_early
    chunk = min(_CHUNKS[num_rows > _FEW_ROWS], max(triton.next_power_of_2(vocab_size), 16))
    num_chunks = triton.cdiv(vocab_size, chunk)
    values = torch.empty((num_rows, num_chunks), dtype=torch.float32, device=logits.device)
    ids = torch.empty((num_rows, num_chunks), dtype=torch.int32, device=logits.device)
    _best_of_chunk_kernel[(num_rows * num_chunks,)](
        logits,
        values,
        ids,
        logits.stride(0),
        vocab_size,
        num_chunks,
        CHUNK=chunk,
        PDL=launches_early,
        num_warps=_NUM_WARPS,
        launch_pdl=launches_early,
    )
    return values, ids
