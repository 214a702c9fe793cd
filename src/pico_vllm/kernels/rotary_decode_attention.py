"""A decode's rotation, KV store and attention as one op: what a layer of a decode step does between two products.

    q, k = rotate(norm(q)), rotate(norm(k))
    kv_cache[slot] = k, v
    out = attention of q to the sequence's positions in the cache, its own included

Only for steps in which nobody needs another's new token: every sequence has one, and all its older positions were
stored by earlier steps (``ForwardBatch.decodes_only``). Then the new K and V need not go through memory to be attended
to. The parts and their contracts are ``rotary_embedding_and_store_kv`` and ``attention``.
"""

from __future__ import annotations

import torch

from pico_vllm.kernels.attention import (
    AttentionInputs,
    CpuAttentionMetadata,
    paged_attention_cpu,
    paged_attention_reference,
)
from pico_vllm.kernels.rotary_embedding_and_store_kv import (
    QKNorm,
    rotary_embedding_and_store_kv_cpu,
    rotary_embedding_and_store_kv_reference,
)


def rotary_decode_attention_reference(
    heads: torch.Tensor,
    cos_sin: torch.Tensor,
    kv_cache: torch.Tensor,
    metadata: AttentionInputs,
    num_heads: int,
    scale: float,
    qk_norm: QKNorm | None = None,
) -> torch.Tensor:
    """Normalise and rotate queries and keys, store keys and values, attend.

    Args:
        heads: [num_seqs, num_heads + 2 * num_kv_heads, head_dim], query | key | value heads of each sequence's new
            token, may be strided but for the last dimension. What it holds afterwards is unspecified.
        cos_sin: [num_seqs, head_dim], the first half cos, the second half sin, of the same dtype.
        kv_cache: [num_blocks, 2, num_kv_heads, block_size, head_dim]; the slots of this step are written.
        metadata: of the backend, for this step; of sequences with one token each. A slot of -1 stores nothing, and
            the new token is attended to all the same; a sequence with seq_len 0 gives 0.
        num_heads: query heads.
        scale: factor on the scores, usually head_dim ** -0.5.
        qk_norm: None = the heads aren't normalised.

    Returns:
        [num_seqs, num_heads, head_dim] in the dtype of ``heads``.
    """
    rotary_embedding_and_store_kv_reference(heads, cos_sin, kv_cache, metadata, num_heads, qk_norm)
    return paged_attention_reference(heads[:, :num_heads], kv_cache, metadata, scale)


def rotary_decode_attention_cpu(
    heads: torch.Tensor,
    cos_sin: torch.Tensor,
    kv_cache: torch.Tensor,
    metadata: CpuAttentionMetadata,
    num_heads: int,
    scale: float,
    qk_norm: QKNorm | None = None,
) -> torch.Tensor:
    """``rotary_decode_attention_reference``, vectorised."""
    rotary_embedding_and_store_kv_cpu(heads, cos_sin, kv_cache, metadata, num_heads, qk_norm)
    return paged_attention_cpu(heads[:, :num_heads], kv_cache, metadata, scale)
