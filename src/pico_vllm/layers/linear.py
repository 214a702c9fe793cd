"""Linear: a matrix product through the backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from pico_vllm.kernels.backend import KernelBackend
    from pico_vllm.kernels.linear import LinearWeight


class Linear:
    """y = x W^T + b. For a row-split weight y is this rank's partial sum."""

    def __init__(self, weight: LinearWeight, backend: KernelBackend) -> None:
        self.weight = weight
        self._linear = backend.linear

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[num_tokens, in_features] → [num_tokens, out_features]."""
        y: torch.Tensor = self._linear(x, self.weight)
        return y
