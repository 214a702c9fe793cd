# pyright: reportCallIssue=false
# (a launch takes num_warps and num_stages beside the parameters of the kernel)

"""Penalties and bitmask in Triton: one pass over the logits instead of ten. Contracts as ``logits_processing``.

Log-probabilities stay torch's: they are computed for the few requests that ask, and a top-n needs a sort.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 2048
_NUM_WARPS = 4


@triton.jit
def _apply_penalties_kernel(
    logits_ptr,
    in_prompt_ptr,
    output_counts_ptr,
    repetition_ptr,
    presence_ptr,
    frequency_ptr,
    logits_stride,
    in_prompt_stride,
    output_counts_stride,
    vocab_size,
    blocks_a_row,
    BLOCK: tl.constexpr,
):
    """x = x / r if x > 0 else x * r where prompt or output hold the token; then x - frequency * count - presence.

    Grid: (num_rows * blocks_a_row,); a program has BLOCK tokens of a row. fp32, every operation rounded.
    """
    row = (tl.program_id(0) // blocks_a_row).to(tl.int64)
    ids = tl.program_id(0) % blocks_a_row * BLOCK + tl.arange(0, BLOCK)
    mask = ids < vocab_size
    logits_ptrs = logits_ptr + row * logits_stride + ids
    logits = tl.load(logits_ptrs, mask=mask, other=0.0)
    counts = tl.load(output_counts_ptr + row * output_counts_stride + ids, mask=mask, other=0)
    in_prompt = tl.load(in_prompt_ptr + row * in_prompt_stride + ids, mask=mask, other=0)
    repetition = tl.load(repetition_ptr + row)
    penalised = tl.where(logits > 0.0, tl.div_rn(logits, repetition), logits * repetition)
    logits = tl.where((in_prompt != 0) | (counts > 0), penalised, logits)
    logits -= tl.load(frequency_ptr + row) * counts.to(tl.float32)
    logits -= tl.where(counts > 0, tl.load(presence_ptr + row), 0.0)
    tl.store(logits_ptrs, logits, mask=mask)


@triton.jit
def _apply_bitmask_kernel(
    logits_ptr, bitmask_ptr, logits_stride, bitmask_stride, vocab_size, blocks_a_row, BLOCK: tl.constexpr
):
    """logits[r, t] = -inf where bit t % 32 of bitmask[r, t // 32] is 0; other logits are neither read nor written.

    Grid: (num_rows * blocks_a_row,); a program has BLOCK tokens of a row.
    """
    row = (tl.program_id(0) // blocks_a_row).to(tl.int64)
    ids = tl.program_id(0) % blocks_a_row * BLOCK + tl.arange(0, BLOCK)
    mask = ids < vocab_size
    words = tl.load(bitmask_ptr + row * bitmask_stride + ids // 32, mask=mask, other=-1)
    is_masked = mask & (((words >> (ids % 32)) & 1) == 0)
    tl.store(logits_ptr + row * logits_stride + ids, tl.full((BLOCK,), float("-inf"), tl.float32), mask=is_masked)


def apply_penalties_triton(
    logits: torch.Tensor,
    in_prompt: torch.Tensor,
    output_counts: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> None:
    """``apply_penalties_reference`` in one kernel."""
    num_rows, vocab_size = logits.shape
    blocks_a_row = triton.cdiv(vocab_size, _BLOCK)
    if num_rows:
        _apply_penalties_kernel[(num_rows * blocks_a_row,)](
            logits,
            in_prompt.view(torch.int8),
            output_counts,
            repetition,
            presence,
            frequency,
            logits.stride(0),
            in_prompt.stride(0),
            output_counts.stride(0),
            vocab_size,
            blocks_a_row,
            BLOCK=_BLOCK,
            num_warps=_NUM_WARPS,
            enable_fp_fusion=False,  # the product of frequency and count is rounded
        )


def apply_bitmask_triton(logits: torch.Tensor, bitmask: torch.Tensor) -> None:
    """``apply_bitmask_reference`` in one kernel."""
    num_rows, vocab_size = logits.shape
    blocks_a_row = triton.cdiv(vocab_size, _BLOCK)
    if num_rows:
        _apply_bitmask_kernel[(num_rows * blocks_a_row,)](
            logits,
            bitmask,
            logits.stride(0),
            bitmask.stride(0),
            vocab_size,
            blocks_a_row,
            BLOCK=_BLOCK,
            num_warps=_NUM_WARPS,
        )
