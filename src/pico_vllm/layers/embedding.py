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

    Vocabulary-parallel: a rank computes the scores of its own tokens. What is chosen greedily needs no more of the
    others' than their best ones; what is drawn needs all.
    """

    def __init__(self, weight: LinearWeight, group: TensorParallelGroup) -> None:
        self.weight = weight  # [vocab_size / ranks, hidden_size]
        self._own = group.own_logits
        self._all = group.all_logits
        self._greedy = group.greedy

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[num_rows, hidden_size] → logits [num_rows, vocab_size] in hidden's dtype."""
        return self._all(self._own(hidden, self.weight, None))

    def own(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """[num_rows, vocab_size / ranks], this rank's tokens; into ``out``, if it is there."""
        return self._own(hidden, self.weight, out)

    def whole(self, own: torch.Tensor) -> torch.Tensor:
        """All tokens' logits, of what ``own`` has returned on each rank."""
        return self._all(own)

    def greedy(self, own: torch.Tensor, last_token_ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """The best tokens of what ``own`` has returned on each rank, [num_rows] int64; kept in last_token_ids[rows]."""
        return self._greedy(own, last_token_ids, rows)
