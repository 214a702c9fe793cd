"""Sizes of two models: Qwen2.5-1.5B for a GPU, SmolLM2-135M for a CPU."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KernelShapes:
    """A model's dimensions and the batches to time it at.

    Attributes:
        qkv_bias: the fused projection has a bias.
        num_tokens: of the ops that work token by token.
        linear_tokens: rows of the matrix products.
        decodes: (sequences, context of each).
        prefills: (new tokens, cached tokens) of one sequence.
        num_rows: sampled rows.
    """

    name: str
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    qkv_bias: bool
    num_tokens: tuple[int, ...]
    linear_tokens: tuple[int, ...]
    decodes: tuple[tuple[int, int], ...]
    prefills: tuple[tuple[int, int], ...]
    num_rows: tuple[int, ...]
    block_size: int = 16

    def smallest(self) -> KernelShapes:
        """The same model at the first of each list of sizes."""
        sizes = ("num_tokens", "linear_tokens", "decodes", "prefills", "num_rows")
        return dataclasses.replace(self, **{name: getattr(self, name)[:1] for name in sizes})


QWEN2_5_1_5B = KernelShapes(
    name="qwen2.5-1.5b",
    hidden_size=1536,
    num_heads=12,
    num_kv_heads=2,
    head_dim=128,
    intermediate_size=8960,
    vocab_size=151936,
    qkv_bias=True,
    num_tokens=(1, 256, 8192),
    linear_tokens=(1, 8, 16, 32, 64, 128, 256, 512, 2048, 8192),
    decodes=((1, 512), (1, 8192), (1, 32768), (64, 4096), (256, 1024)),
    prefills=((512, 0), (2048, 0), (8192, 0), (512, 8192)),
    num_rows=(1, 256),
)

SMOLLM2_135M = KernelShapes(
    name="smollm2-135m",
    hidden_size=576,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    intermediate_size=1536,
    vocab_size=49152,
    qkv_bias=False,
    num_tokens=(1, 32, 1024),
    linear_tokens=(1, 8, 32, 128, 512),
    decodes=((1, 160), (1, 2048), (8, 512), (32, 256)),
    prefills=((128, 0), (512, 0), (128, 1024)),
    num_rows=(1, 32),
)

SHAPES = {shapes.name: shapes for shapes in (QWEN2_5_1_5B, SMOLLM2_135M)}
