"""Attention over the paged KV cache, and the store that precedes it in every layer.

For query token t of sequence s at position p, and query head h of the group of KV head g:

    out[t, h] = sum_j softmax_j(scale * q[t, h] . K_s[j, g]) V_s[j, g],     j in [0, p]

The KV cache of a layer is one tensor [num_blocks, 2, num_kv_heads, block_size, head_dim] (index 0 = K, 1 = V). Position
j of sequence s lives in block ``block_tables[s, j // block_size]`` at offset ``j % block_size``. New tokens are stored
before attention runs, so fresh and cached context are read the same way. The query tokens of a sequence are its last
ones: token i of [query_start_loc[s], query_start_loc[s + 1]) has position seq_lens[s] - query_len[s] + i.

Contract: a token with slot -1 is not stored; a sequence with seq_len 0 has no tokens, or one whose output is 0; blocks
and offsets past seq_len may hold NaN, and what is read of them is masked before it can spread. Softmax and sums are in
fp32 or wider.
Source: Vaswani et al. 2017; Kwon et al. 2023 (paged attention).

``prepare`` runs once a step and its result is shared by all layers: index arithmetic is not repeated a layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """What attention must know of a step; fields and padding as in ``ForwardBatch``."""

    slot_mapping: torch.Tensor
    block_tables: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    num_decode_reqs: int
    max_query_len: int
    max_seq_len: int
    prefill_seq_len: int | None = None
    decodes_only: bool = False
    decode_order: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class KVCacheShape:
    """The part of the cache's shape that index arithmetic needs."""

    num_kv_heads: int
    block_size: int


# ------------------------------------------------------------------------------------------------------- reference
def prepare_attention_reference(inputs: AttentionInputs, shape: KVCacheShape) -> AttentionInputs:
    """Nothing to prepare."""
    return inputs


def store_kv_reference(
    key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, metadata: AttentionInputs
) -> None:
    """Write each token's K and V into its slot; writes ``kv_cache`` in place.

    Args:
        key, value: [num_tokens, num_kv_heads, head_dim], may be strided views.
        kv_cache: [num_blocks, 2, num_kv_heads, block_size, head_dim].
        metadata: of this step.
    """
    block_size = kv_cache.shape[3]
    for token, slot in enumerate(metadata.slot_mapping.tolist()):
        if slot >= 0:
            block, offset = divmod(slot, block_size)
            kv_cache[block, 0, :, offset] = key[token]
            kv_cache[block, 1, :, offset] = value[token]


def paged_attention_reference(
    query: torch.Tensor, kv_cache: torch.Tensor, metadata: AttentionInputs, scale: float
) -> torch.Tensor:
    """Attend, one sequence and one KV head at a time.

    Args:
        query: [num_tokens, num_heads, head_dim], may be a strided view.
        kv_cache: [num_blocks, 2, num_kv_heads, block_size, head_dim], this step's tokens stored already.
        metadata: of this step.
        scale: factor on the scores, usually head_dim ** -0.5.

    Returns:
        [num_tokens, num_heads, head_dim] in query's dtype; rows of padded tokens are 0.
    """
    num_kv_heads = kv_cache.shape[2]
    group = query.shape[1] // num_kv_heads
    wide = torch.promote_types(query.dtype, torch.float32)
    out = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
    starts = metadata.query_start_loc.tolist()
    for s, seq_len in enumerate(metadata.seq_lens.tolist()):
        start, end = starts[s], starts[s + 1]
        if start == end:
            continue
        keys, values = _sequence_kv(kv_cache, metadata.block_tables[s], seq_len)  # [num_kv_heads, seq_len, head_dim]
        positions = torch.arange(seq_len - (end - start), seq_len, device=query.device)
        future = torch.arange(seq_len, device=query.device)[None, :] > positions[:, None]  # [query_len, seq_len]
        for h in range(query.shape[1]):
            scores = query[start:end, h].to(wide) @ keys[h // group].to(wide).T * scale
            weights = scores.masked_fill(future, float("-inf")).softmax(dim=-1)
            out[start:end, h] = (weights @ values[h // group].to(wide)).to(query.dtype)
    return out


def _sequence_kv(kv_cache: torch.Tensor, block_table: torch.Tensor, seq_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    block_size = kv_cache.shape[3]
    blocks = kv_cache[block_table[: -(-seq_len // block_size)].long()]  # [num_blocks, 2, num_kv_heads, block_size, D]
    merged = blocks.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :seq_len]  # [2, num_kv_heads, seq_len, head_dim]
    return merged[0], merged[1]


# ------------------------------------------------------------------------------------------------- vectorised torch
@dataclass(frozen=True, slots=True)
class _Rows:
    """A set of sequences that attend in one call.

    The cache seen as rows [num_blocks * 2 * num_kv_heads, block_size * head_dim] gives K and V of these sequences as
    [num_seqs, num_kv_heads, num_blocks * block_size, head_dim] in one index_select each.
    """

    start: int  # first query token
    end: int
    key_rows: torch.Tensor  # [num_seqs * num_kv_heads * num_blocks]
    value_rows: torch.Tensor
    num_seqs: int
    context: int  # keys to look at: the longest seq_len of the set
    mask: torch.Tensor | None  # bool, broadcast to [num_seqs, 1, query rows, context]; None = no mask but `is_causal`
    is_causal: bool  # a whole prompt: query i sees keys [0, i]
    tail: torch.Tensor | None  # gathered rows past their sequence's end, [num_tail_rows]; None = there are none


@dataclass(frozen=True, slots=True)
class CpuAttentionMetadata:
    """Indices of one step, made once for all layers."""

    slot_mapping: torch.Tensor  # of the step
    blocks: torch.Tensor  # [num_stored] block of each stored token
    offsets: torch.Tensor  # [num_stored]
    stored: torch.Tensor | None  # [num_stored] token indices; None = every token is stored
    decodes: tuple[_Rows, ...]
    prefills: tuple[_Rows, ...]
    num_tokens: int
    covers_all_tokens: bool  # False when padded tokens exist: their output rows must be zeroed
    decodes_only: bool = False  # whatever the step is: the op that is for decodes alone takes as long here


#: Decode calls with fewer (sequence, KV head) pairs use the fused attention of torch, larger ones two batched products:
#: 16 against 33 µs for 1 x 3 heads, 76 against 70 for 8 x 3, 299 against 194 for 32 x 3 (context 160, bf16, 2 cores).
_MIN_PAIRS_FOR_MATMUL = 16
#: Gathered keys of one attention call: bounds the temporary memory of long contexts.
_MAX_GATHERED_TOKENS = 1 << 18


def prepare_attention_cpu(inputs: AttentionInputs, shape: KVCacheShape) -> CpuAttentionMetadata:
    """Turn block tables and lengths into gather indices and masks. Reads lengths on the host (free on a CPU)."""
    slots = inputs.slot_mapping.long()
    stored = None
    if bool((slots < 0).any()):
        stored = (slots >= 0).nonzero().flatten()
        slots = slots[stored]
    seq_lens = inputs.seq_lens.tolist()
    starts = inputs.query_start_loc.tolist()
    decodes = _decode_rows(inputs, shape, starts, seq_lens)
    prefills = tuple(
        _prefill_rows(inputs, shape, s, starts[s], starts[s + 1], seq_lens[s])
        for s in range(inputs.num_decode_reqs, len(seq_lens))
        if seq_lens[s] > 0
    )
    num_covered = sum(rows.end - rows.start for rows in (*decodes, *prefills))
    num_tokens = inputs.slot_mapping.shape[0]
    return CpuAttentionMetadata(
        slot_mapping=inputs.slot_mapping,
        blocks=slots // shape.block_size,
        offsets=slots % shape.block_size,
        stored=stored,
        decodes=decodes,
        prefills=prefills,
        num_tokens=num_tokens,
        covers_all_tokens=num_covered == num_tokens,
    )


def _decode_rows(
    inputs: AttentionInputs, shape: KVCacheShape, starts: list[int], seq_lens: list[int]
) -> tuple[_Rows, ...]:
    """Sequences with one query token, split at padding and where a call would gather too many keys."""
    rows, first = [], 0
    while first < inputs.num_decode_reqs:
        end, longest = first, 0
        while end < inputs.num_decode_reqs and seq_lens[end] > 0:
            longest_with_next = max(longest, seq_lens[end])
            if end > first and longest_with_next * (end + 1 - first) > _MAX_GATHERED_TOKENS:
                break
            longest, end = longest_with_next, end + 1
        if end == first:  # padding
            first += 1
            continue
        lens = seq_lens[first:end]
        mask = tail = None
        if min(lens) < longest:
            keys = torch.arange(-(-longest // shape.block_size) * shape.block_size, device=inputs.seq_lens.device)
            valid = keys[None, None, :] < inputs.seq_lens[first:end, None, None]  # [num_seqs, 1, gathered keys]
            mask = valid[:, :, None, :longest]
            tail = (~valid).expand(-1, shape.num_kv_heads, -1).flatten().nonzero().flatten()
        key_rows, value_rows = _gather_rows(inputs.block_tables[first:end], longest, shape)
        num_seqs, start = end - first, starts[first]
        rows.append(_Rows(start, start + num_seqs, key_rows, value_rows, num_seqs, longest, mask, False, tail))
        first = end
    return tuple(rows)


def _prefill_rows(inputs: AttentionInputs, shape: KVCacheShape, s: int, start: int, end: int, seq_len: int) -> _Rows:
    """One sequence with several query tokens and a causal mask."""
    is_causal = end - start == seq_len
    mask = None
    if not is_causal:
        keys = torch.arange(seq_len, device=inputs.seq_lens.device)
        positions = keys[seq_len - (end - start) :]
        mask = (keys[None, :] <= positions[:, None])[None, None]  # [1, 1, query_len, context]
    key_rows, value_rows = _gather_rows(inputs.block_tables[s : s + 1], seq_len, shape)
    return _Rows(start, end, key_rows, value_rows, 1, seq_len, mask, is_causal, None)


def _gather_rows(block_tables: torch.Tensor, context: int, shape: KVCacheShape) -> tuple[torch.Tensor, torch.Tensor]:
    num_blocks = -(-context // shape.block_size)
    heads = torch.arange(shape.num_kv_heads, device=block_tables.device)
    blocks = block_tables[:, None, :num_blocks].long() * (2 * shape.num_kv_heads)
    key_rows = (blocks + heads[None, :, None]).flatten()  # [num_seqs * num_kv_heads * num_blocks]
    return key_rows, key_rows + shape.num_kv_heads


def store_kv_cpu(
    key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, metadata: CpuAttentionMetadata
) -> None:
    """``store_kv_reference`` as two index_puts."""
    if metadata.stored is not None:
        key, value = key[metadata.stored], value[metadata.stored]
    by_slot = kv_cache.permute(1, 0, 3, 2, 4)  # [2, num_blocks, block_size, num_kv_heads, head_dim]
    by_slot[0].index_put_((metadata.blocks, metadata.offsets), key)
    by_slot[1].index_put_((metadata.blocks, metadata.offsets), value)


def paged_attention_cpu(
    query: torch.Tensor, kv_cache: torch.Tensor, metadata: CpuAttentionMetadata, scale: float
) -> torch.Tensor:
    """``paged_attention_reference`` with one scaled_dot_product_attention for all decodes and one a prompt chunk."""
    make = torch.empty if metadata.covers_all_tokens else torch.zeros
    out = make(query.shape, dtype=query.dtype, device=query.device)
    num_kv_heads, head_dim = kv_cache.shape[2], kv_cache.shape[4]
    group = query.shape[1] // num_kv_heads
    cache_rows = kv_cache.view(-1, kv_cache.shape[3] * head_dim)
    for rows in metadata.decodes:
        keys, values = _gather(cache_rows, rows, num_kv_heads, head_dim)
        # The group of a KV head is the query length of the call: [num_seqs, num_kv_heads, group, head_dim].
        q = query[rows.start : rows.end].reshape(rows.num_seqs, num_kv_heads, group, head_dim)
        attended = _attend_decodes(q, keys, values, rows.mask, scale)
        out[rows.start : rows.end] = attended.reshape(rows.num_seqs, -1, head_dim)
    for rows in metadata.prefills:
        keys, values = _gather(cache_rows, rows, num_kv_heads, head_dim)
        q = query[rows.start : rows.end].transpose(0, 1).unsqueeze(0)  # [1, num_heads, query_len, head_dim]
        attended = F.scaled_dot_product_attention(
            q, keys, values, attn_mask=rows.mask, is_causal=rows.is_causal, scale=scale, enable_gqa=True
        )
        out[rows.start : rows.end] = attended.squeeze(0).transpose(0, 1)
    return out


def _attend_decodes(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """[num_seqs, num_kv_heads, group, head_dim] over [num_seqs, num_kv_heads, context, head_dim]."""
    if query.shape[0] * query.shape[1] < _MIN_PAIRS_FOR_MATMUL:
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale)
    # Scores in fp32, as in the fused attention: unscaled ones overflow fp16 and lose the small differences in bf16.
    scores = torch.matmul(query.float(), keys.float().transpose(2, 3)).mul_(scale)
    if mask is not None:
        scores.masked_fill_(~mask, float("-inf"))
    weights = scores.softmax(dim=-1)
    if values.dtype == torch.float16:  # some CPUs sum fp16 products in fp16
        return torch.matmul(weights, values.float()).to(values.dtype)
    return torch.matmul(weights.to(values.dtype), values)


def _gather(
    cache_rows: torch.Tensor, rows: _Rows, num_kv_heads: int, head_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    keys = cache_rows.index_select(0, rows.key_rows)
    values = cache_rows.index_select(0, rows.value_rows)
    if rows.tail is not None:
        # A masked key has weight 0, but 0 * NaN = NaN: what lies past a sequence's end must not be NaN.
        keys.view(-1, head_dim).index_fill_(0, rows.tail, 0.0)
        values.view(-1, head_dim).index_fill_(0, rows.tail, 0.0)
    shape = (rows.num_seqs, num_kv_heads, -1, head_dim)
    return keys.view(shape)[:, :, : rows.context], values.view(shape)[:, :, : rows.context]
