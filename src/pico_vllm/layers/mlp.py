"""Gated feed-forward layer: down(silu(gate(x)) * up(x)), gate and up in one product."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from pico_vllm.kernels.backend import KernelBackend
    from pico_vllm.layers.linear import Linear


class GatedMLP:
    """SwiGLU feed-forward."""

    def __init__(self, gate_up_proj: Linear, down_proj: Linear, backend: KernelBackend) -> None:
        self.gate_up_proj = gate_up_proj
        self.down_proj = down_proj
        self._swiglu = backend.swiglu

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[num_tokens, hidden_size] → the same shape, this rank's partial sum."""
        return self.down_proj(self._swiglu(self.gate_up_proj(x)))
