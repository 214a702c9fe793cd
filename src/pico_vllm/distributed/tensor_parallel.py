"""TensorParallelGroup: the seam where partial results of several ranks become one.

Row-parallel layers (o_proj, down_proj) return *partial sums*; only this class knows how many ranks there are, so models
contain no ``if tp``. Size 1 is the case that exists: reducing is then the fused add + norm of the backend alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from pico_vllm.kernels.backend import KernelBackend


class TensorParallelGroup:
    """One rank's view of its group; size 1."""

    def __init__(self, backend: KernelBackend) -> None:
        self.rank = 0
        self.size = 1
        self._backend = backend

    def reduce_add_rms_norm(
        self, partial: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum ``partial`` over the ranks, add it to the residual stream, and normalise.

        Args:
            partial: [num_tokens, hidden_size], this rank's share of a row-parallel product, or
                [num_splits, num_tokens, hidden_size] fp32 (``partial_linear``).
            residual: [num_tokens, hidden_size], equal on all ranks; may be overwritten.
            weight: [hidden_size] of the norm.
            eps: of the norm.

        Returns:
            (normalised, new residual), both [num_tokens, hidden_size].
        """
        normalised, summed = self._backend.add_rms_norm(partial, residual, weight, eps)
        return normalised, summed

    def gather_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """[num_rows, vocab_size / size] of each rank → [num_rows, vocab_size]."""
        return logits
