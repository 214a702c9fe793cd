"""Rotary position embedding, in place on the query and key heads of a fused projection.

For a head x = [a, b] of two halves and the angles of its position:

    a' = a cos - b sin        b' = b cos + a sin

Contract: ``cos_sin`` holds the row of each token, [cos | sin], so no kernel looks up a position. Padded tokens are
rotated too (harmless: they are never stored). Source: Su et al. 2021; ``apply_rotary_pos_emb`` in transformers 5.x
("rotate half"; every product and the sum are rounded to the input's dtype).
"""

from __future__ import annotations

import torch


def rotary_embedding_reference(heads: torch.Tensor, cos_sin: torch.Tensor) -> None:
    """Rotate every head of every token; writes ``heads`` in place.

    Args:
        heads: [num_tokens, num_heads, head_dim], may be a strided view (the q and k part of a fused qkv).
        cos_sin: [num_tokens, head_dim], the first half cos, the second half sin, of the same dtype.
    """
    half = heads.shape[-1] // 2
    cos, sin = cos_sin[:, None, :half], cos_sin[:, None, half:]
    a, b = heads[..., :half].clone(), heads[..., half:].clone()
    heads[..., :half] = a * cos + (-b) * sin
    heads[..., half:] = b * cos + a * sin


def rotary_embedding_cpu(heads: torch.Tensor, cos_sin: torch.Tensor) -> None:
    """``rotary_embedding_reference`` with three products of half heads instead of four temporaries."""
    half = heads.shape[-1] // 2
    cos, sin = cos_sin[:, None, :half], cos_sin[:, None, half:]
    a, b = heads[..., :half], heads[..., half:]
    a_sin, b_sin = a * sin, b * sin
    a.mul_(cos).sub_(b_sin)
    b.mul_(cos).add_(a_sin)
