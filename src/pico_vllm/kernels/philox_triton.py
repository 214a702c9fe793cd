# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false
# (a launch takes num_warps and num_stages beside the parameters of the kernel; inside of one, types are Triton's)

"""Philox4x32-10 in Triton: the uniform numbers of a step in one kernel instead of a hundred. Contract as ``philox``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 256


@triton.jit(do_not_specialize=["n"])
def _uniform_kernel(seeds_ptr, sample_indices_ptr, positions_ptr, uniform_ptr, n, BLOCK: tl.constexpr):
    """uniform[i] = (x0 << 21 | x1 >> 11) / 2^53 of Philox with key seeds[i], counter (positions[i], sample_indices[i]).

    Grid: (ceil(n / BLOCK),); a program has BLOCK numbers. The counter's words are 32 bits; the result is exact in fp64.
    """
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    seeds = tl.load(seeds_ptr + i, mask=i < n, other=0)
    c0 = tl.load(positions_ptr + i, mask=i < n, other=0).to(tl.uint32)
    c1 = tl.load(sample_indices_ptr + i, mask=i < n, other=0).to(tl.uint32)
    zero = tl.zeros((BLOCK,), tl.uint32)
    x0, x1, _, _ = tl.philox(seeds, c0, c1, zero, zero, 10)
    bits = (x0.to(tl.int64) << 21) | (x1.to(tl.int64) >> 11)
    tl.store(uniform_ptr + i, bits.to(tl.float64) * (1.0 / 9007199254740992.0), mask=i < n)


def uniform_triton(seeds: torch.Tensor, sample_indices: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """``uniform_cpu`` in one kernel; the arguments are contiguous."""
    uniform = torch.empty(len(seeds), dtype=torch.float64, device=seeds.device)
    if len(seeds):
        grid = (triton.cdiv(len(seeds), _BLOCK),)
        _uniform_kernel[grid](
            seeds, sample_indices, positions, uniform, len(seeds), BLOCK=_BLOCK, num_warps=_BLOCK // 32
        )
    return uniform
