"""Sum over the ranks of a group, alone and fused with the residual add and RMSNorm that follow it.

    x         = cast(sum_r cast(partial_r))                   (in fp32, in the order of ranks)
    residual' = residual + x                                  (in the residual's dtype)
    y         = weight * cast(x' / sqrt(mean(x'^2) + eps))    (as in ``rms_norm``)

The same order on every rank, so all have the same bits. These references have all ranks' partials at once; a rank of
its own is ``all_reduce_triton``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pico_vllm.kernels.rms_norm import add_rms_norm_reference


def all_reduce_reference(partials: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Sum over ranks.

    Args:
        partials: of each rank, [num_rows, hidden_size] of ``dtype``, or [num_splits, num_rows, hidden_size] fp32:
            partial sums, which are added in fp32 and rounded once before ranks are summed.
        dtype: of the result.

    Returns:
        A new tensor, [num_rows, hidden_size].
    """
    rounded = [partial if partial.dim() == 2 else partial.sum(dim=0).to(dtype) for partial in partials]
    total = rounded[0].float()
    for partial in rounded[1:]:
        total = total + partial.float()
    return total.to(dtype)


def all_reduce_add_rms_norm_reference(
    partials: Sequence[torch.Tensor], residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum over ranks, add to the residual stream, then normalise the sum.

    Args:
        partials: as of ``all_reduce_reference``.
        residual: [num_rows, hidden_size].
        weight: [hidden_size].
        eps: added to the mean square.

    Returns:
        (normalised, new residual), both [num_rows, hidden_size]; the arguments are left alone.
    """
    return add_rms_norm_reference(all_reduce_reference(partials, residual.dtype), residual, weight, eps)
