"""Token embedding: y[t] = weight[input_ids[t]]. Ids are in [0, vocab_size): the front end has checked them."""

from __future__ import annotations

import torch


def embedding_reference(input_ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Look up rows.

    Args:
        input_ids: [num_tokens] int32.
        weight: [vocab_size, hidden_size].

    Returns:
        [num_tokens, hidden_size], a new tensor.
    """
    return weight[input_ids.long()]


def embedding_cpu(input_ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``embedding_reference`` without the index conversion."""
    return weight.index_select(0, input_ids)
