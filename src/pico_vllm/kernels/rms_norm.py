"""RMSNorm, alone and fused with the residual add.

    residual' = residual + x                                  (in the input's dtype)
    x         = cast(sum_s x_s)                               where x comes as partial sums (``linear``)
    y         = weight * cast(x' / sqrt(mean(x'^2) + eps))    (mean and division in fp32)

Contract: rows are independent; padded rows may hold anything, NaN included, and only spoil themselves.
Source: Zhang & Sennrich 2019; rounding order of ``LlamaRMSNorm`` / ``Qwen2RMSNorm`` in transformers 5.x, which rounds
to the input's dtype *before* it multiplies by the weight.
"""

from __future__ import annotations

import torch


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise the last dimension.

    Args:
        x: [num_tokens, hidden_size], or [num_tokens, num_heads, head_dim] for a norm over heads, may be a strided view;
            any float dtype; fp64 stays fp64, everything else is computed in fp32.
        weight: [hidden_size] (or [head_dim]), same dtype.
        eps: added to the mean square.

    Returns:
        A new tensor of x's shape and dtype.
    """
    compute = torch.promote_types(x.dtype, torch.float32)
    wide = x.to(compute)
    mean_square = (wide * wide).mean(dim=-1, keepdim=True)
    return weight * (wide / torch.sqrt(mean_square + eps)).to(x.dtype)


def add_rms_norm_reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add x to the residual stream, then normalise the sum.

    Args:
        x: [num_tokens, hidden_size] of residual's dtype, or [num_splits, num_tokens, hidden_size] fp32: partial sums,
            which are added in fp32 (fp64 in fp64) and rounded once.
        residual: [num_tokens, hidden_size].
        weight: [hidden_size].
        eps: added to the mean square.

    Returns:
        (normalised, new residual), both [num_tokens, hidden_size]; the arguments are left alone.
    """
    summed = _added_up(x, residual.dtype) + residual
    return rms_norm_reference(summed, weight, eps), summed


def rms_norm_cpu(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``rms_norm_reference`` with fewer passes: the wide copy is scaled in place."""
    wide = x.float()
    inverse_rms = torch.mean(wide * wide, -1, True).add_(eps).rsqrt_()  # [num_tokens, 1]
    return wide.mul_(inverse_rms).to(x.dtype).mul_(weight) if wide is not x else (wide * inverse_rms).mul_(weight)


def add_rms_norm_cpu(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``add_rms_norm_reference`` that writes the sum into ``residual`` in place and returns it."""
    residual.add_(_added_up(x, residual.dtype))
    return rms_norm_cpu(residual, weight, eps), residual


def _added_up(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x if x.dim() == 2 else x.sum(dim=0).to(dtype)
