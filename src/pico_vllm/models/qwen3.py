"""Qwen3: the block of Qwen2 with a norm on every query and key head before rotation, and no bias in qkv.

Source: Yang et al. 2025 (Qwen3 technical report); ``Qwen3ForCausalLM`` of transformers 5.x.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pico_vllm.kernels.rotary_embedding_and_store_kv import QKNorm
from pico_vllm.layers.attention import SelfAttention
from pico_vllm.models.qwen2 import LayerParts, Qwen2DecoderLayer, Qwen2ForCausalLM
from pico_vllm.models.weights import ParameterSpec, TensorSpec

if TYPE_CHECKING:
    from pico_vllm.config import ModelConfig


class Qwen3DecoderLayer(Qwen2DecoderLayer):
    """A Qwen2 layer whose query and key heads are normalised, each over its own head_dim, before they are rotated."""

    def attention(self, parts: LayerParts) -> SelfAttention:
        """Attention with head norms."""
        q_norm, k_norm = parts.norm("q_norm"), parts.norm("k_norm")
        return SelfAttention(
            parts.linear("qkv_proj"),
            parts.partial_linear("o_proj"),
            **parts.head_shape,
            backend=parts.backend,
            qk_norm=QKNorm(q_norm.weight, k_norm.weight, parts.config.rms_norm_eps),
        )


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
