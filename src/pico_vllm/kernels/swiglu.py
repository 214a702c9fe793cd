"""SwiGLU: the gate of the feed-forward layer.

    y = cast(silu(gate)) * up,   silu(z) = z / (1 + exp(-z))

gate and up come as the two halves of one matrix product. Source: Shazeer 2020; rounding order of ``LlamaMLP`` in
transformers 5.x (silu is rounded to the input's dtype before the product).
"""

from __future__ import annotations

import torch


def swiglu_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """Gate the second half of the last dimension by the first.

    Args:
        gate_up: [num_tokens, 2 * intermediate_size], gate first.

    Returns:
        [num_tokens, intermediate_size] in the same dtype.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    wide = gate.to(torch.promote_types(gate.dtype, torch.float32))
    return (wide * torch.sigmoid(wide)).to(gate.dtype) * up


def swiglu_cpu(gate_up: torch.Tensor) -> torch.Tensor:
    """``swiglu_reference`` in two passes."""
    half = gate_up.shape[-1] // 2
    return torch.nn.functional.silu(gate_up[:, :half]).mul_(gate_up[:, half:])
