"""What happens between the qkv product and attention, as one op: head norms, rotation, and the store into the KV cache.

    q, k = norm(q), norm(k)              (models that normalise their heads: Qwen3)
    q, k = rotate(q), rotate(k)          by the angles of the token's position
    kv_cache[slot] = k, v                slot = slot_mapping of the token; -1 stores nothing

One op because a GPU reads and writes q, k and v once then, and because attention reads k and v from the cache alone:
the rotated k is written nowhere else. The parts and their contracts are ``rms_norm``, ``rotary_embedding`` and
``attention.store_kv``; here they are composed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pico_vllm.kernels.attention import AttentionInputs, CpuAttentionMetadata, store_kv_cpu, store_kv_reference
from pico_vllm.kernels.rms_norm import rms_norm_cpu, rms_norm_reference
from pico_vllm.kernels.rotary_embedding import rotary_embedding_cpu, rotary_embedding_reference


@dataclass(frozen=True, slots=True)
class QKNorm:
    """The norms of query and key heads, each over its own head_dim.

    Attributes:
        q_weight, k_weight: [head_dim].
        eps: added to the mean square.
    """

    q_weight: torch.Tensor
    k_weight: torch.Tensor
    eps: float


def rotary_embedding_and_store_kv_reference(
    heads: torch.Tensor,
    cos_sin: torch.Tensor,
    kv_cache: torch.Tensor,
    metadata: AttentionInputs,
    num_heads: int,
    qk_norm: QKNorm | None = None,
) -> None:
    """Normalise and rotate the queries in place; normalise and rotate the keys, and store them with the values.

    Args:
        heads: [num_tokens, num_heads + 2 * num_kv_heads, head_dim], query | key | value heads, may be strided but for
            the last dimension. Afterwards its query heads are rotated, its values as before, its keys unspecified.
        cos_sin: [num_tokens, head_dim], the first half cos, the second half sin, of the same dtype.
        kv_cache: [num_blocks, 2, num_kv_heads, block_size, head_dim]; the slots of this step are written.
        metadata: of the backend, for this step; every kind has a ``slot_mapping``.
        num_heads: query heads.
        qk_norm: None = the heads aren't normalised.
    """
    query, key, value = _split(heads, num_heads)
    if qk_norm is not None:
        query.copy_(rms_norm_reference(query, qk_norm.q_weight, qk_norm.eps))
        key.copy_(rms_norm_reference(key, qk_norm.k_weight, qk_norm.eps))
    rotary_embedding_reference(query, cos_sin)
    rotary_embedding_reference(key, cos_sin)
    store_kv_reference(key, value, kv_cache, metadata)


def rotary_embedding_and_store_kv_cpu(
    heads: torch.Tensor,
    cos_sin: torch.Tensor,
    kv_cache: torch.Tensor,
    metadata: CpuAttentionMetadata,
    num_heads: int,
    qk_norm: QKNorm | None = None,
) -> None:
    """``rotary_embedding_and_store_kv_reference`` with query and key heads rotated together."""
    query, key, value = _split(heads, num_heads)
    if qk_norm is not None:
        query.copy_(rms_norm_cpu(query, qk_norm.q_weight, qk_norm.eps))
        key.copy_(rms_norm_cpu(key, qk_norm.k_weight, qk_norm.eps))
    rotary_embedding_cpu(heads[:, : num_heads + key.shape[1]], cos_sin)
    store_kv_cpu(key, value, kv_cache, metadata)


def _split(heads: torch.Tensor, num_heads: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views of the query, key and value heads."""
    num_kv_heads = (heads.shape[1] - num_heads) // 2
    query, key, value = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    return query, key, value
