"""Gated feed-forward layer: down(silu(gate(x)) * up(x)), gate and up in one product."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from pico_vllm.layers.linear import GatedLinear, PartialLinear


class GatedMLP:
    """SwiGLU feed-forward."""

    def __init__(self, gate_up_proj: GatedLinear, down_proj: PartialLinear) -> None:
        self.gate_up_proj = gate_up_proj
        self.down_proj = down_proj

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[num_tokens, hidden_size] → partial sums of the same shape (``PartialLinear``)."""
        return self.down_proj(self.gate_up_proj(x))
