"""Qwen3: the block of Qwen2 with a norm on every query and key head before rotation, and no bias in qkv.

Source: Yang et al. 2025 (Qwen3 technical report); ``Qwen3ForCausalLM`` of transformers 5.x.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pico_vllm.layers.attention import SelfAttention
from pico_vllm.models.qwen2 import LayerParts, Qwen2DecoderLayer, Qwen2ForCausalLM
from pico_vllm.models.weights import ParameterSpec, TensorSpec

if TYPE_CHECKING:
    import torch

    from pico_vllm.config import ModelConfig


class Qwen3Attention(SelfAttention):
    """Attention whose query and key heads are normalised, each over its own head_dim, before they are rotated."""

    def __init__(self, parts: LayerParts) -> None:
        super().__init__(parts.linear("qkv_proj"), parts.linear("o_proj"), **parts.head_shape, backend=parts.backend)
        self.q_norm = parts.norm("q_norm")
        self.k_norm = parts.norm("k_norm")

    def project(self, x: torch.Tensor) -> torch.Tensor:
        """[num_tokens, hidden_size] → heads before rotation, q and k normalised in place."""
        heads = super().project(x)
        query = heads[:, : self.num_heads]
        key = heads[:, self.num_heads : self.num_heads + self.num_kv_heads]
        query.copy_(self.q_norm(query))
        key.copy_(self.k_norm(key))
        return heads


class Qwen3DecoderLayer(Qwen2DecoderLayer):
    """A Qwen2 layer around Qwen3's attention."""

    def attention(self, parts: LayerParts) -> SelfAttention:
        """Attention with head norms."""
        return Qwen3Attention(parts)


class Qwen3ForCausalLM(Qwen2ForCausalLM):
    """Qwen3, computed as Qwen2 is but for the head norms."""

    layer_class = Qwen3DecoderLayer

    @classmethod
    def layer_specs(cls, config: ModelConfig, ours: str, theirs: str) -> list[ParameterSpec]:
        """A Qwen2 layer's parameters and the two head norms."""
        norms = [
            TensorSpec(f"{ours}.{name}", f"{theirs}.self_attn.{name}.weight", (config.head_dim,))
            for name in ("q_norm", "k_norm")
        ]
        return [*super().layer_specs(config, ours, theirs), *norms]
