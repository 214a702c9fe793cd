"""RMSNorm in Triton: a program normalises a few whole rows, so each element is read and written once.

Bound by memory: alone 2 passes over [num_tokens, hidden_size], fused with the residual add 4 (x and residual in, sum
and result out); each split of partial sums is one more, in fp32. Contract, formula and rounding order are those of
``rms_norm``.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false
# (a launch takes num_warps and num_stages beside the parameters of the kernel; the ranges of a kernel are Triton's)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pico_vllm.kernels.attention_config import device_of
from pico_vllm.kernels.attention_tiles import start_after_predecessors

#: Elements of a program when rows are short: several rows share one then.
_MIN_ELEMENTS_A_PROGRAM = 1024
_MAX_ROWS_A_PROGRAM = 16
#: 16 bf16 numbers a thread, in two 16-byte loads.
_ELEMENTS_A_WARP = 512


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    x_ptr,
    weight_ptr,
    y_ptr,
    token_stride,
    head_stride,
    num_rows,
    num_heads,
    eps,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """y[r] = weight * cast(x[r] / sqrt(mean(x[r]^2) + eps)), row r = head r % num_heads of token r // num_heads.

    Grid: (ceil(num_rows / ROWS),); a program has ROWS whole rows. Padded rows are computed like all others. The sum of
    squares, the root and the division are fp32; y is contiguous.
    """
    start_after_predecessors(PDL)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    mask = (rows < num_rows)[:, None] & (columns < HIDDEN)[None, :]
    x_rows = rows // num_heads * token_stride + rows % num_heads * head_stride
    x = tl.load(x_ptr + x_rows[:, None] + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=columns < HIDDEN, other=0.0)
    y = _normalise(x, weight, eps, HIDDEN)
    tl.store(y_ptr + rows[:, None] * HIDDEN + columns[None, :], y, mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _add_rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    x_stride,
    residual_stride,
    num_rows,
    eps,
    NUM_SPLITS: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """residual[r] = cast(x[r] + residual[r]) in place; y[r] = weight * cast(residual[r] / sqrt(mean(...) + eps)).

    Grid and precision as in ``_rms_norm_kernel``; what is normalised is the rounded sum. x is [NUM_SPLITS, num_rows,
    HIDDEN], and what is added is cast(sum of the splits). The norm's weight is read before the wait (``linear_triton``
    says why it may be).
    """
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    mask = (rows < num_rows)[:, None] & (columns < HIDDEN)[None, :]
    residual_ptrs = residual_ptr + rows[:, None] * residual_stride + columns[None, :]
    weight = tl.load(weight_ptr + columns, mask=columns < HIDDEN, other=0.0)
    start_after_predecessors(PDL)
    residual = tl.load(residual_ptrs, mask=mask, other=0.0)
    x = tl.load(x_ptr + rows[:, None] * x_stride + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    for split in tl.static_range(1, NUM_SPLITS):
        split_rows = split * num_rows + rows  # int64
        x += tl.load(x_ptr + split_rows[:, None] * x_stride + columns[None, :], mask=mask, other=0.0)
    y = _add_and_normalise(x, residual, residual_ptrs, mask, weight, eps, HIDDEN)
    tl.store(y_ptr + rows[:, None] * HIDDEN + columns[None, :], y, mask=mask)


@triton.jit
def _add_and_normalise(x, residual, residual_ptrs, mask, weight, eps, HIDDEN: tl.constexpr):
    """x [ROWS, BLOCK] fp32, rounded, and the residual: their rounded sum is stored there; returns its norm."""
    summed = (x.to(residual.dtype).to(tl.float32) + residual.to(tl.float32)).to(residual.dtype)
    tl.store(residual_ptrs, summed, mask=mask)
    return _normalise(summed.to(tl.float32), weight, eps, HIDDEN)


@triton.jit
def _normalise(x, weight, eps, HIDDEN: tl.constexpr):
    """Rows of x [ROWS, BLOCK] fp32, 0 past HIDDEN → the same shape in weight's dtype."""
    mean_square = tl.sum(x * x, axis=1) * (1.0 / HIDDEN)  # a GPU divides fp32 to 2 units in the last place only
    inverse_rms = tl.div_rn(1.0, tl.sqrt_rn(mean_square + eps))
    normalised = (x * inverse_rms[:, None]).to(weight.dtype)
    return (normalised.to(tl.float32) * weight.to(tl.float32)[None, :]).to(weight.dtype)


def rms_norm_triton(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``rms_norm_reference`` in one kernel; x may be a view whose last dimension is contiguous."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    num_heads = x.shape[1] if x.dim() == 3 else 1
    num_rows = x.shape[0] * num_heads
    if num_rows == 0:
        return y
    launches_early = device_of(x.device.index).launches_early
    block, rows, num_warps = _tile(x.shape[-1])
    _rms_norm_kernel[(triton.cdiv(num_rows, rows),)](
        x,
        weight,
        y,
        x.stride(0),
        x.stride(1) if x.dim() == 3 else 0,
        num_rows,
        num_heads,
        eps,
        HIDDEN=x.shape[-1],
        BLOCK=block,
        ROWS=rows,
        PDL=launches_early,
        num_warps=num_warps,
        launch_pdl=launches_early,
    )
    return y


def add_rms_norm_triton(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``add_rms_norm_reference`` in one kernel; writes the sum into ``residual`` in place and returns it."""
    num_rows, hidden_size = residual.shape
    y = torch.empty((num_rows, hidden_size), dtype=residual.dtype, device=x.device)
    if num_rows == 0:
        return y, residual
    assert x.dim() == 2 or x.is_contiguous()
    launches_early = device_of(x.device.index).launches_early
    block, rows, num_warps = _tile(hidden_size)
    _add_rms_norm_kernel[(triton.cdiv(num_rows, rows),)](
        x,
        residual,
        weight,
        y,
        x.stride(-2),
        residual.stride(0),
        num_rows,
        eps,
        NUM_SPLITS=x.shape[0] if x.dim() == 3 else 1,
        HIDDEN=hidden_size,
        BLOCK=block,
        ROWS=rows,
        PDL=launches_early,
        num_warps=num_warps,
        launch_pdl=launches_early,
    )
    return y, residual


def _tile(hidden_size: int) -> tuple[int, int, int]:
    """BLOCK, ROWS and warps of a program."""
    block = triton.next_power_of_2(hidden_size)
    rows = min(max(_MIN_ELEMENTS_A_PROGRAM // block, 1), _MAX_ROWS_A_PROGRAM)
    return block, rows, min(max(block * rows // _ELEMENTS_A_WARP, 1), 16)
