"""RMSNorm: alone at the start of the stack, fused with reduce + residual add everywhere else."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from pico_vllm.distributed.tensor_parallel import TensorParallelGroup
    from pico_vllm.kernels.backend import KernelBackend


class RMSNorm:
    """Root-mean-square norm with a learned scale."""

    def __init__(self, weight: torch.Tensor, eps: float, backend: KernelBackend, group: TensorParallelGroup) -> None:
        self.weight = weight  # [hidden_size]
        self.eps = eps
        self._rms_norm = backend.rms_norm
        self._reduce_add_rms_norm = group.reduce_add_rms_norm
        self._start_reduce_add_rms_norm = group.start_reduce_add_rms_norm

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[num_tokens, hidden_size] → the same shape, normalised."""
        y: torch.Tensor = self._rms_norm(x, self.weight, self.eps)
        return y

    def add(self, partial: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Reduce ``partial`` over the ranks, add it to ``residual``, normalise: (normalised, new residual)."""
        return self._reduce_add_rms_norm(partial, residual, self.weight, self.eps)

    def start_add(
        self, partial: torch.Tensor, residual: torch.Tensor
    ) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
        """Begin to ``add``; what it gives is what the returned function gives, which may be called after other work."""
        return self._start_reduce_add_rms_norm(partial, residual, self.weight, self.eps)
