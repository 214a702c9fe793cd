"""The op between the qkv product and attention: rotation of queries and keys, store of keys and values."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from pico_vllm.bench.kernel_cases.attention import PromptStep, make_inputs, prepare
from pico_vllm.bench.kernel_cases.case import Baseline, BoundCall, Cost, KernelCase, Tensors, spread
from pico_vllm.bench.kernel_cases.tokens import cos_sin_rows, tokens_name
from pico_vllm.kernels.attention import AttentionInputs
from pico_vllm.kernels.backend import REFERENCE

if TYPE_CHECKING:
    from pico_vllm.bench.kernel_cases.shapes import KernelShapes
    from pico_vllm.kernels.backend import KernelBackend

_SLOT_BYTES = 4  # int32


def rotary_and_store_cost(
    num_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int, element_bytes: int
) -> Cost:
    """All heads in and out, a row of cos and sin and a slot a token in; 4 products and 2 sums a pair of elements."""
    all_heads = num_tokens * (num_heads + 2 * num_kv_heads) * head_dim
    rotated = num_tokens * (num_heads + num_kv_heads) * head_dim
    read = (all_heads + num_tokens * head_dim) * element_bytes + num_tokens * _SLOT_BYTES
    return Cost(read, all_heads * element_bytes, 3 * rotated)


def rotary_and_store_cases(shapes: KernelShapes, dtype: torch.dtype) -> Iterator[KernelCase]:
    """The tokens of one prompt."""
    for num_tokens in shapes.num_tokens:
        yield _case(PromptStep(1, num_tokens, num_tokens), shapes, dtype)


def _case(step: PromptStep, shapes: KernelShapes, dtype: torch.dtype) -> KernelCase:
    num_tokens, num_heads, num_kv_heads = step.num_tokens, shapes.num_heads, shapes.num_kv_heads
    rows = spread(num_tokens)

    def make(device: torch.device) -> Tensors:
        cos_sin = cos_sin_rows(num_tokens, shapes.head_dim, dtype, device)
        return {**make_inputs(step, shapes, dtype)(device), "cos_sin": cos_sin}

    def bind(backend: KernelBackend, t: Tensors) -> BoundCall:
        heads, cos_sin, kv_cache = t["heads"], t["cos_sin"], t["kv_cache"]
        metadata = prepare(backend, step, shapes, t)

        def call() -> tuple[torch.Tensor, ...]:
            backend.rotary_embedding_and_store_kv(heads, cos_sin, kv_cache, metadata, num_heads)
            return heads, kv_cache, t["slot_mapping"]

        return call

    def expected(t: Tensors) -> tuple[torch.Tensor, ...]:
        heads, kv_cache = t["heads"][rows].double(), t["kv_cache"].double()
        metadata: AttentionInputs = prepare(REFERENCE, step, shapes, t)
        metadata = dataclasses.replace(metadata, slot_mapping=t["slot_mapping"][rows])
        cos_sin = t["cos_sin"][rows].double()
        REFERENCE.rotary_embedding_and_store_kv(heads, cos_sin, kv_cache, metadata, num_heads)
        return heads[:, :num_heads], _stored(kv_cache, metadata.slot_mapping)

    def compared(outputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        heads, kv_cache, slot_mapping = outputs
        return heads[rows, :num_heads], _stored(kv_cache, slot_mapping[rows])

    def bind_torch(t: Tensors) -> BoundCall:
        rotated, half = t["heads"][:, : num_heads + num_kv_heads], shapes.head_dim // 2
        key, value = t["heads"][:, num_heads : num_heads + num_kv_heads], t["heads"][:, num_heads + num_kv_heads :]
        cos, sin = (part[:, None].repeat(1, 1, 2) for part in t["cos_sin"].split(half, dim=-1))
        by_slot = t["kv_cache"].permute(1, 0, 3, 2, 4)  # [2, num_blocks, block_size, num_kv_heads, head_dim]
        slots = t["slot_mapping"].long()
        place = (slots // shapes.block_size, slots % shapes.block_size)

        def call() -> tuple[torch.Tensor, ...]:
            turned = torch.cat((-rotated[..., half:], rotated[..., :half]), dim=-1)
            rotated.copy_(rotated * cos + turned * sin)
            by_slot[0].index_put_(place, key)
            by_slot[1].index_put_(place, value)
            return t["heads"], t["kv_cache"], t["slot_mapping"]

        return call

    return KernelCase(
        name=tokens_name(num_tokens),
        cost=rotary_and_store_cost(num_tokens, num_heads, num_kv_heads, shapes.head_dim, dtype.itemsize),
        make=make,
        bind=bind,
        expected=expected,
        compared=compared,
        baselines=(Baseline("rotate_half, index_put_ twice", bind_torch),),
    )


def _stored(kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> torch.Tensor:
    """K and V in the given slots, [num_slots, 2, num_kv_heads, head_dim]."""
    slots, block_size = slot_mapping.long(), kv_cache.shape[3]
    return kv_cache[slots // block_size, :, :, slots % block_size]
