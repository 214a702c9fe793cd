"""The matrix products of real models, for what depends on their shapes: launch shapes and compiling."""

from __future__ import annotations

from dataclasses import dataclass

from pico_vllm.kernels.linear_config import Product


@dataclass(frozen=True, slots=True)
class ProductShape:
    """One product; out_features are those of the result."""

    name: str
    kind: Product
    out_features: int
    in_features: int
    has_bias: bool = False


def _products(
    hidden: int, heads: int, kv_heads: int, head_dim: int, intermediate: int, vocab: int, *, qkv_bias: bool = False
) -> tuple[ProductShape, ...]:
    return (
        ProductShape("qkv", Product.WHOLE, (heads + 2 * kv_heads) * head_dim, hidden, qkv_bias),
        ProductShape("o", Product.PARTIAL, hidden, heads * head_dim),
        ProductShape("gate_up", Product.GATED, intermediate, hidden),
        ProductShape("down", Product.PARTIAL, hidden, intermediate),
        ProductShape("lm_head", Product.WHOLE, vocab, hidden),
    )


MODELS = {
    "Qwen2.5-1.5B": _products(1536, 12, 2, 128, 8960, 151936, qkv_bias=True),
    "SmolLM2-135M": _products(576, 9, 3, 64, 1536, 49152),
    "Qwen3-0.6B": _products(1024, 16, 8, 128, 3072, 151936),
}
