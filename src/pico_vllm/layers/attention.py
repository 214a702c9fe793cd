"""Self-attention over the paged KV cache: project, (normalise,) rotate and store, attend, project back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from pico_vllm.kernels.backend import KernelBackend
    from pico_vllm.kernels.rotary_embedding_and_store_kv import QKNorm
    from pico_vllm.layers.linear import Linear, PartialLinear


class SelfAttention:
    """Grouped-query attention with rotary positions.

    Args:
        qkv_proj: hidden → [query heads | key heads | value heads], one product.
        o_proj: heads → hidden, partial sums.
        num_heads, num_kv_heads, head_dim: of this rank.
        qk_norm: norms of the query and key heads before they are rotated, where the model has them.
    """

    def __init__(
        self,
        qkv_proj: Linear,
        o_proj: PartialLinear,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        backend: KernelBackend,
        qk_norm: QKNorm | None = None,
    ) -> None:
        self.qkv_proj = qkv_proj
        self.o_proj = o_proj
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.scale = head_dim**-0.5
        self.qk_norm = qk_norm
        self._backend = backend

    def __call__(
        self,
        x: torch.Tensor,
        cos_sin: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: Any,
        rows: torch.Tensor | None = None,
        rows_metadata: Any = None,
    ) -> torch.Tensor:
        """Attend from the step's tokens to their sequences.

        Args:
            x: [num_tokens, hidden_size], normalised.
            cos_sin: [num_tokens, head_dim].
            kv_cache: [num_blocks, 2, num_kv_heads, block_size, head_dim]; this step's K and V are written into it.
            metadata: of the backend, for this step.
            rows: [num_rows] tokens that are projected back, None = all of them.
            rows_metadata: of the backend, under which each of ``rows`` is a sequence of its own; None = all tokens
                attend.

        Returns:
            Partial sums of [num_rows, hidden_size] (``PartialLinear``).
        """
        return self.o_proj(self.attend(self.qkv_proj(x), cos_sin, kv_cache, metadata, rows, rows_metadata))

    def attend(
        self,
        qkv: torch.Tensor,
        cos_sin: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: Any,
        rows: torch.Tensor | None = None,
        rows_metadata: Any = None,
    ) -> torch.Tensor:
        """What lies between the two products: [num_tokens, (query + key + value heads) * head_dim] →
        [num_rows, num_heads * head_dim]; all else is as of ``__call__``.
        """
        # [num_tokens, query + key + value heads, head_dim]
        heads = qkv.view(qkv.shape[0], self.num_heads + 2 * self.num_kv_heads, self.head_dim)
        if metadata.decodes_only and rows is None:
            attended: torch.Tensor = self._backend.rotary_decode_attention(
                heads, cos_sin, kv_cache, metadata, self.num_heads, self.scale, self.qk_norm
            )
            return attended.flatten(1)
        self._backend.rotary_embedding_and_store_kv(heads, cos_sin, kv_cache, metadata, self.num_heads, self.qk_norm)
        query = heads[:, : self.num_heads]
        if rows is not None and rows_metadata is not None:
            query, metadata, rows = query.index_select(0, rows), rows_metadata, None
        attended = self._backend.paged_attention(query, kv_cache, metadata, self.scale).flatten(1)
        return attended if rows is None else attended.index_select(0, rows)
