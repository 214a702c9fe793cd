"""Choosing the next token.

    scores = logits / temperature
    top-k:  keep every score >= the k-th largest
    top-p:  of what is left, renormalised, keep every score >= the smallest of the most likely tokens that together
            reach probability p
    min-p:  keep every score >= the largest + ln(min_p)
    token:  the first id whose cumulative probability (in the order of ids) exceeds a uniform number in [0, 1)

Both filters are thresholds on the score, so equal scores are kept or dropped together and the result does not depend on
how a sort breaks ties. The uniform number comes from ``philox``: (seed, sample index, output position).
Order and meaning of the filters: transformers' ``TemperatureLogitsWarper``, ``TopKLogitsWarper``, ``TopPLogitsWarper``.
"""

from __future__ import annotations

import torch

#: How many of the largest scores are looked at for top-p before a full sort.
_TOP_P_CANDIDATES = 512
#: How many of the largest scores top-k may need, so many ties at the k-th one included.
_MAX_CANDIDATES, _TIES = 1024, 32


def greedy_reference(
    logits: torch.Tensor, last_token_ids: torch.Tensor | None = None, rows: torch.Tensor | None = None
) -> torch.Tensor:
    """The smallest id of the largest logit of each row.

    Args:
        logits: [num_rows, vocab_size].
        last_token_ids: int32, where the ids are kept too, at ``rows``; None = nowhere.
        rows: [num_rows]; of one that occurs more than once some id is kept.

    Returns:
        [num_rows] int64.
    """
    token_ids = (logits == logits.amax(dim=-1, keepdim=True)).int().argmax(dim=-1)
    return _kept(token_ids, last_token_ids, rows)


def greedy_cpu(
    logits: torch.Tensor, last_token_ids: torch.Tensor | None = None, rows: torch.Tensor | None = None
) -> torch.Tensor:
    """``greedy_reference`` in one pass; ``max`` is vectorised, ``argmax`` is not: 109 µs against 667 for 8 x 49152."""
    return _kept(logits.max(dim=-1).indices, last_token_ids, rows)


def _kept(token_ids: torch.Tensor, last_token_ids: torch.Tensor | None, rows: torch.Tensor | None) -> torch.Tensor:
    if last_token_ids is not None:
        last_token_ids[rows] = token_ids.to(last_token_ids.dtype)
    return token_ids


def sample_reference(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    uniform: torch.Tensor,
    min_p: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sample one token a row, by a full sort in fp64.

    Args:
        logits: [num_rows, vocab_size].
        temperature: [num_rows] > 0.
        top_k: [num_rows] int; <= 0 or >= vocab_size keeps all.
        top_p: [num_rows] in (0, 1].
        uniform: [num_rows] fp64 in [0, 1).
        min_p: [num_rows] in [0, 1]; None and 0 keep all.

    Returns:
        [num_rows] int64.
    """
    chosen = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    for row in range(logits.shape[0]):
        # The scores are rounded to fp32 once, as in every other implementation: thresholds compare equal numbers.
        scores = (logits[row].float() / temperature[row].float()).double()
        ordered = scores.sort(descending=True).values
        k = int(top_k[row])
        if 0 < k < scores.numel():
            ordered = ordered[ordered >= ordered[k - 1]]
        cumulative = ordered.softmax(dim=0).cumsum(dim=0)
        if float(top_p[row]) < 1.0:
            needed = int((cumulative < float(top_p[row])).sum()) + 1
            ordered = ordered[: min(needed, ordered.numel())]
        kept = scores >= ordered[-1]
        weights = torch.where(kept, (scores - ordered[0]).exp(), 0.0)
        if min_p is not None:
            weights = torch.where(weights >= min_p[row].double(), weights, 0.0)
        chosen[row] = _pick(weights[None], uniform[row : row + 1])[0]
    return chosen


def sample_cpu(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    uniform: torch.Tensor,
    min_p: torch.Tensor | None = None,
) -> torch.Tensor:
    """``sample_reference`` for all rows at once; sorts only where the top-p set is larger than 512 tokens.

    When every row has a small top-k, all after it looks at those few candidates only. 32 rows of 49,152 in bf16 with
    top-k 50 and top-p 0.9, on 2 cores: 5.6 ms instead of 16.4.
    """
    scores = logits.float() / temperature[:, None].float()  # [num_rows, vocab_size]
    vocab_size = scores.shape[1]
    limits_k = (top_k > 0) & (top_k < vocab_size)
    if len(scores) > 0 and bool(limits_k.all()):
        candidates = _top_k_candidates(scores, top_k)
        if candidates is not None:
            kept, ids = candidates
            return ids.gather(1, _sample_kept(kept, top_p, uniform, min_p)[:, None])[:, 0]
    if bool(limits_k.any()):
        k = torch.where(limits_k, top_k, 1).long()
        largest = scores.topk(int(k.max()), dim=-1).values
        threshold = largest.gather(1, k[:, None] - 1)
        scores = scores.masked_fill(limits_k[:, None] & (scores < threshold), float("-inf"))
    return _sample_kept(scores, top_p, uniform, min_p)


def _top_k_candidates(scores: torch.Tensor, top_k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The scores that top-k keeps, and some that it doesn't as -inf, in the order of their ids: (scores, ids).

    Returns:
        Both [num_rows, num_candidates]; None if the candidates may not hold all that is kept: large k, or many ties.
    """
    num_candidates = int(top_k.max()) + _TIES
    if num_candidates > min(_MAX_CANDIDATES, scores.shape[1]):
        return None
    largest, ids = scores.topk(num_candidates, dim=-1)
    threshold = largest.gather(1, top_k.long()[:, None] - 1)
    if bool((largest[:, -1:] >= threshold).any()):  # as NaN never is: a row with one is left to the other way
        return None
    kept = largest.masked_fill(largest < threshold, float("-inf"))
    ids, order = ids.sort(dim=-1)
    return kept.gather(1, order), ids


def _sample_kept(
    scores: torch.Tensor, top_p: torch.Tensor, uniform: torch.Tensor, min_p: torch.Tensor | None
) -> torch.Tensor:
    """Index of the token in each row of scores, [num_rows]; -inf is not kept."""
    if bool((top_p < 1.0).any()):
        scores = scores.masked_fill(scores < _top_p_threshold(scores, top_p)[:, None], float("-inf"))
    wide = scores.double()  # before the subtraction: its rounding in fp32 would move the CDF by 1e-7
    weights = wide.sub_(wide.amax(dim=-1, keepdim=True)).exp_()
    if min_p is not None:
        weights.masked_fill_(weights < min_p[:, None].double(), 0.0)
    return _pick(weights, uniform)


def _top_p_threshold(scores: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Smallest kept score of each row, [num_rows]; -inf where top_p is 1."""
    normalizer = scores.double().logsumexp(dim=-1, keepdim=True)
    for candidates in (min(_TOP_P_CANDIDATES, scores.shape[1]), scores.shape[1]):
        largest = scores.topk(candidates, dim=-1).values
        cumulative = (largest.double() - normalizer).exp().cumsum(dim=-1)
        needed = (cumulative < top_p[:, None].double()).sum(dim=-1, keepdim=True)  # index of the last kept one
        unlimited = top_p >= 1.0
        if bool((unlimited | (needed[:, 0] < candidates)).all()):
            break
    threshold = largest.gather(1, needed.clamp(max=largest.shape[1] - 1))[:, 0]
    return torch.where(unlimited, float("-inf"), threshold)


def _pick(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """First id whose cumulative weight exceeds uniform * total; weights [num_rows, vocab_size] fp64."""
    cumulative = weights.cumsum(dim=-1)
    total = cumulative[:, -1:]
    # u * total may round up to total, and then no cumulative weight would exceed it.
    target = torch.minimum(uniform[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target, right=True)[:, 0].clamp(max=weights.shape[1] - 1)
