"""The table of rotary angles: cos and sin of every position, with the scalings of long-context models.

Source: ``transformers.modeling_rope_utils`` 5.x for linear, llama3 and yarn; Peng et al. 2023 for yarn.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from pico_vllm.config import RopeConfig


class RotaryEmbedding:
    """cos | sin rows, computed in fp32 once and rounded to the model's dtype, as transformers does a step."""

    def __init__(
        self, rope: RopeConfig, head_dim: int, max_positions: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        inv_freq, attention_factor = inverse_frequencies(rope, head_dim)
        positions = torch.arange(max_positions, dtype=torch.float32)
        angles = torch.outer(positions, inv_freq)  # [max_positions, head_dim / 2]
        table = torch.cat((angles.cos(), angles.sin()), dim=-1) * attention_factor
        self.cos_sin = table.to(device=device, dtype=dtype)  # [max_positions, head_dim]

    def __call__(self, positions: torch.Tensor) -> torch.Tensor:
        """[num_tokens] int32 → [num_tokens, head_dim], the row of each token."""
        return self.cos_sin.index_select(0, positions)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[torch.Tensor, float]:
    """Angle per position of each pair of dimensions.

    Returns:
        ([head_dim / 2] fp32, the factor on cos and sin: 1 but for yarn).
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    inv_freq = 1.0 / (rope.theta**exponents)
    if rope.rope_type == "linear":
        return inv_freq / rope.factor, 1.0
    if rope.rope_type == "llama3":
        return _llama3(inv_freq, rope), 1.0
    if rope.rope_type == "yarn":
        factor = rope.attention_factor
        return _yarn(inv_freq, rope, head_dim), 0.1 * math.log(rope.factor) + 1.0 if factor is None else factor
    return inv_freq, 1.0


def _llama3(inv_freq: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Slow dimensions are stretched by ``factor``, fast ones kept, those between blended by wavelength."""
    wavelength = 2 * math.pi / inv_freq
    turns = rope.original_max_position_embeddings / wavelength
    smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    stretched = inv_freq / rope.factor
    blended = (1 - smooth) * stretched + smooth * inv_freq
    return torch.where(smooth <= 0, stretched, torch.where(smooth >= 1, inv_freq, blended))


def _yarn(inv_freq: torch.Tensor, rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Dimensions with few turns over the trained context are interpolated, those with many are kept."""

    def dimension_with(turns: float) -> float:
        period = rope.original_max_position_embeddings / (turns * 2 * math.pi)
        return head_dim * math.log(period) / (2 * math.log(rope.theta))

    low = max(math.floor(dimension_with(rope.beta_fast)), 0)
    high = min(math.ceil(dimension_with(rope.beta_slow)), head_dim - 1)
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    interpolated = ramp.clamp(0, 1)
    return inv_freq / rope.factor * interpolated + inv_freq * (1 - interpolated)
