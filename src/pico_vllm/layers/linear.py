"""Matrix products through the backend: whole, as partial sums, and gated."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from pico_vllm.kernels.backend import KernelBackend
    from pico_vllm.kernels.linear import LinearWeight


class Linear:
    """y = x W^T + b. Column-parallel: a rank's rows of W give its own columns of y."""

    def __init__(self, weight: LinearWeight, backend: KernelBackend) -> None:
        self.weight = weight
        self._linear = backend.linear

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """[num_tokens, in_features] → [num_tokens, out_features]; into ``out``, if it is there."""
        y: torch.Tensor = self._linear(x, self.weight) if out is None else self._linear(x, self.weight, out)
        return y


class PartialLinear:
    """y = x W^T + b as partial sums, whose sum over ranks and splits the next norm takes.

    Row-parallel: a rank has the columns of W that its own columns of x meet, and the bias if it is rank 0.
    """

    def __init__(self, weight: LinearWeight, backend: KernelBackend) -> None:
        self.weight = weight
        self._partial_linear = backend.partial_linear

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[num_tokens, in_features] → [num_tokens, out_features], or [num_splits, num_tokens, out_features] fp32."""
        y: torch.Tensor = self._partial_linear(x, self.weight)
        return y


class GatedLinear:
    """y = silu(x G^T) * (x U^T), G the first and U the second half of the weight's rows.

    Column-parallel: a rank has the same rows of G and of U.
    """

    def __init__(self, weight: LinearWeight, backend: KernelBackend) -> None:
        self.weight = weight
        self._gated_linear = backend.gated_linear

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[num_tokens, in_features] → [num_tokens, out_features / 2]."""
        y: torch.Tensor = self._gated_linear(x, self.weight)
        return y
