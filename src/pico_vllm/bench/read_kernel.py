"""The kernel behind the read ceiling: a sum, which reads every byte once and writes next to nothing.

Apart from its caller because it imports triton; ``ceilings`` imports this module only where there is a GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

if TYPE_CHECKING:
    import torch


@triton.jit
def _partial_sum_kernel(x_ptr, partial_ptr, num_elements, BLOCK: tl.constexpr):
    """partial[p] = sum of blocks p, p + P, p + 2 P, … of x, for P programs; the last block is padded with 0."""
    program = tl.program_id(0)
    total = tl.zeros([BLOCK], dtype=tl.int64)
    for start in range(program * BLOCK, num_elements, tl.num_programs(0) * BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        total += tl.load(x_ptr + offsets, mask=offsets < num_elements, other=0)
    tl.store(partial_ptr + program, tl.sum(total, axis=0))


def partial_sum(x: torch.Tensor, partial: torch.Tensor, *, block: int, num_warps: int) -> None:
    """Sum x by as many programs as ``partial`` has elements; writes ``partial`` in place.

    Args:
        x: [num_elements] int64, contiguous, fewer than 2^31 - 2^24 elements.
        partial: [num_programs] int64; sums to x's sum (modulo 2^64).
        block: elements that a program reads at once, a power of 2.
        num_warps: of a program.
    """
    launch: Any = _partial_sum_kernel[(partial.shape[0],)]  # takes options that aren't parameters of the kernel
    launch(x, partial, x.shape[0], BLOCK=block, num_warps=num_warps)
