"""Inputs for the kernel tests: random numbers of known size, strided views in NaN, and steps over a paged KV cache."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from pico_vllm.kernels.attention import AttentionInputs, KVCacheShape
from pico_vllm.kernels.attention_config import AttentionConfig, DecodeConfig, MergeConfig, PrefillConfig

NAN = float("nan")
ODD_SIZES = (1, 63, 100)

#: Attention in tiles as small as they get, so that short contexts have many; on 4 SMs contexts are split into at most
#: 32 / (sequences x KV heads).
TINY_DECODE = DecodeConfig(block_n=16, num_warps=4, num_stages=2, programs_per_sm=8)
TINY_PREFILL = PrefillConfig(block_m=16, block_n=16, num_warps=4, num_stages=2)
TINY_MERGES = (MergeConfig(block_rows=4, block_splits=2, block_d=64, num_warps=4), MergeConfig(2, 4, 32, 4))
TINY_TILES = AttentionConfig((TINY_DECODE,), (TINY_DECODE,), TINY_PREFILL, TINY_PREFILL, TINY_MERGES)


def random_tensor(*shape: int, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> torch.Tensor:
    """Normal numbers clamped to [-4, 4]: the tolerances count on the bound."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).clamp_(-4, 4).to(device=device, dtype=dtype)


def in_wider_rows(x: torch.Tensor) -> torch.Tensor:
    """A non-contiguous view with x's numbers: a part of each row of a wider tensor that holds NaN elsewhere."""
    width = x.shape[-1]
    wide = torch.full((*x.shape[:-1], width + 8), NAN, dtype=x.dtype, device=x.device)
    view = wide[..., 3 : 3 + width]
    view.copy_(x)
    return view


@dataclass(frozen=True, slots=True)
class FusedQKV:
    """The output of a fused projection and its three parts, which are strided views of it."""

    qkv: torch.Tensor  # [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]
    query: torch.Tensor  # [num_tokens, num_heads, head_dim]
    key: torch.Tensor  # [num_tokens, num_kv_heads, head_dim]
    value: torch.Tensor


def fused_qkv(qkv: torch.Tensor, num_heads: int, num_kv_heads: int, head_dim: int) -> FusedQKV:
    sizes = [num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim]
    query, key, value = (part.view(len(qkv), -1, head_dim) for part in qkv.split(sizes, dim=-1))
    return FusedQKV(qkv, query, key, value)


@dataclass(frozen=True, slots=True)
class Heads:
    """Geometry of an attention layer and its cache."""

    num_kv_heads: int
    group: int  # query heads of each KV head
    head_dim: int
    block_size: int

    @property
    def num_heads(self) -> int:
        return self.num_kv_heads * self.group

    @property
    def cache_shape(self) -> KVCacheShape:
        return KVCacheShape(self.num_kv_heads, self.block_size)

    def __str__(self) -> str:
        return f"kv{self.num_kv_heads}x{self.group}-dim{self.head_dim}-block{self.block_size}"


@dataclass(frozen=True, slots=True)
class Step:
    """Lengths of the sequences of a step.

    Attributes:
        lens: (query_len, seq_len) of each sequence.
        num_decode_reqs: the first ones are decodes.
        num_padded_tokens: after all others; slot -1; their query, key and value are NaN.
        num_padded_seqs: after all others; seq_len 0 and no tokens.
        bound_slack: how far the bounds max_query_len and max_seq_len are above the lengths.
    """

    lens: tuple[tuple[int, int], ...]
    num_decode_reqs: int
    num_padded_tokens: int = 0
    num_padded_seqs: int = 0
    bound_slack: int = 0


@dataclass(frozen=True, slots=True)
class PagedCase:
    """A step over a paged cache in which whatever nobody owns is NaN."""

    heads: Heads
    inputs: AttentionInputs
    projected: FusedQKV
    kv_cache: torch.Tensor  # before the step: cached context, NaN elsewhere
    stored_cache: torch.Tensor  # what the store must make of it
    dense: tuple[tuple[torch.Tensor, torch.Tensor], ...]  # K and V of each sequence, [seq_len, num_kv_heads, head_dim]
    num_tokens: int  # without padding

    @property
    def scale(self) -> float:
        return self.heads.head_dim**-0.5


def build_paged_case(
    step: Step,
    heads: Heads,
    *,
    dtype: torch.dtype,
    device: str = "cpu",
    seed: int = 0,
    slot_dtype: torch.dtype = torch.int64,
) -> PagedCase:
    """Lay the sequences out over shuffled blocks. Block 0 belongs to nobody: table entries past the end point to it."""
    size, dim = heads.block_size, heads.head_dim
    generator = torch.Generator().manual_seed(seed)
    num_blocks_of = [-(-seq_len // size) for _, seq_len in step.lens]
    num_blocks = sum(num_blocks_of) + 4
    shuffled = (torch.randperm(num_blocks - 1, generator=generator) + 1).tolist()
    num_tokens = sum(query_len for query_len, _ in step.lens)
    num_seqs = len(step.lens) + step.num_padded_seqs

    tables = torch.zeros(num_seqs, max(num_blocks_of) + 1, dtype=torch.int32)  # one column more than is needed
    kv_cache = torch.full((num_blocks, 2, heads.num_kv_heads, size, dim), NAN, dtype=dtype)
    stored_cache = kv_cache.clone()
    qkv = torch.full((num_tokens + step.num_padded_tokens, (heads.num_heads + 2 * heads.num_kv_heads) * dim), NAN)
    qkv[:num_tokens] = torch.randn(num_tokens, qkv.shape[1], generator=generator).clamp_(-4, 4)
    projected = fused_qkv(qkv.to(dtype), heads.num_heads, heads.num_kv_heads, dim)

    slots, starts, dense = [], [0], []
    for s, (query_len, seq_len) in enumerate(step.lens):
        for i in range(num_blocks_of[s]):
            tables[s, i] = shuffled.pop()
        start, num_cached = starts[-1], seq_len - query_len
        context = torch.randn(2, num_cached, heads.num_kv_heads, dim, generator=generator).clamp_(-4, 4).to(dtype)
        keys = torch.cat((context[0], projected.key[start : start + query_len]))
        values = torch.cat((context[1], projected.value[start : start + query_len]))
        dense.append((keys.to(device), values.to(device)))
        for position in range(seq_len):
            block, offset = int(tables[s, position // size]), position % size
            for cache in (kv_cache, stored_cache)[position >= num_cached :]:
                cache[block, 0, :, offset] = keys[position]
                cache[block, 1, :, offset] = values[position]
            if position >= num_cached:
                slots.append(block * size + offset)
        starts.append(start + query_len)

    slots += [-1] * step.num_padded_tokens
    starts += [num_tokens] * step.num_padded_seqs
    inputs = AttentionInputs(
        slot_mapping=torch.tensor(slots, dtype=slot_dtype, device=device),
        block_tables=tables.to(device),
        query_start_loc=torch.tensor(starts, dtype=torch.int32, device=device),
        seq_lens=torch.tensor([n for _, n in step.lens] + [0] * step.num_padded_seqs, dtype=torch.int32, device=device),
        num_decode_reqs=step.num_decode_reqs,
        max_query_len=max(n for n, _ in step.lens) + step.bound_slack,
        max_seq_len=max(n for _, n in step.lens) + step.bound_slack,
    )
    return PagedCase(
        heads=heads,
        inputs=inputs,
        projected=fused_qkv(projected.qkv.to(device), heads.num_heads, heads.num_kv_heads, dim),
        kv_cache=kv_cache.to(device),
        stored_cache=stored_cache.to(device),
        dense=tuple(dense),
        num_tokens=num_tokens,
    )


def with_empty_decodes(case: PagedCase, count: int) -> PagedCase:
    """The case with so many padded decodes, which have no tokens, after its own ones."""
    inputs, first = case.inputs, case.inputs.num_decode_reqs

    def insert(tensor: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return torch.cat((tensor[:first], values.expand(count, *tensor.shape[1:]), tensor[first:]))

    zero = inputs.seq_lens.new_zeros(1)
    padded = dataclasses.replace(
        inputs,
        block_tables=insert(inputs.block_tables, zero[:, None]),
        query_start_loc=insert(inputs.query_start_loc, inputs.query_start_loc[first : first + 1]),
        seq_lens=insert(inputs.seq_lens, zero),
        num_decode_reqs=first + count,
    )
    return dataclasses.replace(case, inputs=padded)
