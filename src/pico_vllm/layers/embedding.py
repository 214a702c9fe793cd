"""Embedding and lm_head: from token ids to vectors and back to scores over the vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from pico_vllm.distributed.tensor_parallel import TensorParallelGroup
    from pico_vllm.kernels.backend import KernelBackend
    from pico_vllm.kernels.linear import LinearWeight


class VocabEmbedding:
    """One vector a token id."""

    def __init__(self, weight: torch.Tensor, backend: KernelBackend) -> None:
        self.weight = weight  # [vocab_size, hidden_size]
        self._embedding = backend.embedding

    def __call__(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[num_tokens] int32 → [num_tokens, hidden_size]."""
        hidden: torch.Tensor = self._embedding(input_ids, self.weight)
        return hidden


class LMHead:
    """Scores of every token of the vocabulary; tied to the embedding when the loader gave it the same matrix."""

    def __init__(self, weight: LinearWeight, backend: KernelBackend, group: TensorParallelGroup) -> None:
        self.weight = weight
        self._linear = backend.linear
        self._group = group

    def __call__(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """[num_rows, hidden_size] → logits [num_rows, vocab_size] in hidden's dtype; into ``out``, if it is there."""
        return self._group.gather_logits(self._linear(hidden, self.weight, out))
