"""Embedding and lm_head: from token ids to vectors and back to scores over the vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from pico_vllm.distributed.tensor_parallel import TensorParallelGroup
    from pico_vllm.kernels.linear import LinearWeight


class VocabEmbedding:
    """One vector a token id; vocabulary-parallel: a rank holds those of its own tokens."""

    def __init__(self, weight: torch.Tensor, group: TensorParallelGroup) -> None:
        self.weight = weight  # [vocab_size / ranks, hidden_size]
        self._embed = group.embed

    def __call__(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[num_tokens] int32 → [num_tokens, hidden_size], the same on all ranks."""
        return self._embed(input_ids, self.weight)


class LMHead:
    """Scores of every token of the vocabulary; tied to the embedding when the loader gave it the same matrix.

    Vocabulary-parallel: a rank computes the scores of its own tokens, and gets those of the others.
    """

    def __init__(self, weight: LinearWeight, group: TensorParallelGroup) -> None:
        self.weight = weight  # [vocab_size / ranks, hidden_size]
        self._logits = group.logits

    def __call__(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """[num_rows, hidden_size] → logits [num_rows, vocab_size] in hidden's dtype; into ``out``, if it is there."""
        return self._logits(hidden, self.weight, out)
