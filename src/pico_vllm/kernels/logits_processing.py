"""What is done to logits before a token is chosen, and what is reported of them.

    penalties:   for a token that prompt or output holds:   x = x / r if x > 0 else x * r
                 for a token that the output holds c times: x = x - frequency * c - presence
    bitmask:     x = -inf where the token's bit is 0
    logprobs:    log softmax of the model's own logits, and the rank of the chosen token

Contract: logits are fp32 and changed in place; rows are independent. Source: transformers'
``RepetitionPenaltyLogitsProcessor``; OpenAI's definition of presence and frequency penalty.
"""

from __future__ import annotations

import torch


def apply_penalties_reference(
    logits: torch.Tensor,
    in_prompt: torch.Tensor,
    output_counts: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> None:
    """Penalise repetition, one row and one token at a time; writes ``logits`` in place.

    Args:
        logits: [num_rows, vocab_size] fp32.
        in_prompt: [num_rows, vocab_size] bool.
        output_counts: [num_rows, vocab_size] int32, how often the output holds a token.
        repetition, presence, frequency: [num_rows] fp32.
    """
    for row in range(logits.shape[0]):
        for token in range(logits.shape[1]):
            count = int(output_counts[row, token])
            if count == 0 and not bool(in_prompt[row, token]):
                continue
            value = logits[row, token]
            value = value / repetition[row] if value > 0 else value * repetition[row]
            if count:
                value = value - frequency[row] * count - presence[row]
            logits[row, token] = value


def apply_penalties_cpu(
    logits: torch.Tensor,
    in_prompt: torch.Tensor,
    output_counts: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> None:
    """``apply_penalties_reference`` over whole rows."""
    in_output = output_counts > 0
    factor = torch.where(in_prompt | in_output, repetition[:, None], 1.0)
    logits.copy_(torch.where(logits > 0, logits / factor, logits * factor))
    logits.sub_(frequency[:, None] * output_counts).sub_(presence[:, None] * in_output)


def apply_bitmask_reference(logits: torch.Tensor, bitmask: torch.Tensor) -> None:
    """Mask every token whose bit is 0; writes ``logits`` in place.

    Args:
        logits: [num_rows, vocab_size] fp32.
        bitmask: [num_rows, ceil(vocab_size / 32)] int32; bit t % 32 of word t // 32 allows token t.
    """
    words = bitmask.tolist()
    for row in range(logits.shape[0]):
        for token in range(logits.shape[1]):
            if not words[row][token // 32] >> (token % 32) & 1:
                logits[row, token] = float("-inf")


def apply_bitmask_cpu(logits: torch.Tensor, bitmask: torch.Tensor) -> None:
    """``apply_bitmask_reference`` over whole rows."""
    bits = torch.arange(32, dtype=torch.int32, device=bitmask.device)
    allowed = ((bitmask[:, :, None] >> bits) & 1).bool().flatten(1)[:, : logits.shape[1]]
    logits.masked_fill_(~allowed, float("-inf"))


def logprobs_reference(
    logits: torch.Tensor, token_ids: torch.Tensor, num_best: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities of chosen tokens and of the best ones.

    Args:
        logits: [num_rows, vocab_size] of the model, any float dtype.
        token_ids: [num_rows] int64, the chosen ones.
        num_best: how many of the best to report; may be 0.

    Returns:
        (logprob of the chosen [num_rows] fp32, its rank from 1 [num_rows] int64,
        best ids [num_rows, num_best] int64, their logprobs [num_rows, num_best] fp32). Equal logits share the rank of
        the first of them; which of them is reported where not all fit is open.
    """
    wide = logits.double()
    shifted = wide - wide.amax(dim=-1, keepdim=True)
    logprobs = shifted - shifted.exp().sum(dim=-1, keepdim=True).log()
    chosen = token_ids[:, None]
    rank = (wide > wide.gather(1, chosen)).sum(dim=-1) + 1
    best_ids = wide.sort(dim=-1, descending=True, stable=True).indices[:, :num_best]
    return logprobs.gather(1, chosen)[:, 0].float(), rank, best_ids, logprobs.gather(1, best_ids).float()


def logprobs_cpu(
    logits: torch.Tensor, token_ids: torch.Tensor, num_best: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """``logprobs_reference`` without a sort and without a table of all log-probabilities."""
    wide = logits.float()
    normalizer = wide.logsumexp(dim=-1, keepdim=True)
    chosen = wide.gather(1, token_ids[:, None])
    rank = (wide > chosen).sum(dim=-1) + 1
    best = wide.topk(num_best, dim=-1)
    return (chosen - normalizer)[:, 0], rank, best.indices, best.values - normalizer
