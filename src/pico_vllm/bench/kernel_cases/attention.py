"""Attention over the paged KV cache.

Sequences lie over shuffled blocks, as in an engine that has run for a while. Queries, keys and values are views of one
fused projection. Torch's attention gets contiguous keys and values: what paging costs is part of the comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from pico_vllm.bench.kernel_cases.case import Baseline, BoundCall, Cost, KernelCase, Tensors, generator, normal, spread
from pico_vllm.kernels.attention import AttentionInputs, KVCacheShape
from pico_vllm.kernels.backend import REFERENCE

if TYPE_CHECKING:
    from pico_vllm.bench.kernel_cases.shapes import KernelShapes
    from pico_vllm.kernels.backend import KernelBackend

_NUM_CHECKED_TOKENS = 6


@dataclass(frozen=True, slots=True)
class PromptStep:
    """Equal sequences, each with its last ``query_len`` tokens new."""

    num_seqs: int
    query_len: int
    seq_len: int

    @property
    def num_tokens(self) -> int:
        """New tokens of all sequences."""
        return self.num_seqs * self.query_len

    @property
    def is_decode(self) -> bool:
        """One new token a sequence."""
        return self.query_len == 1

    @property
    def checked_tokens(self) -> list[int]:
        """Those whose outputs are compared with the oracle."""
        return spread(self.num_tokens, _NUM_CHECKED_TOKENS)


# -------------------------------------------------------------------------------------------------------- attention
def attention_cost(
    num_seqs: int,
    query_len: int,
    seq_len: int,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    element_bytes: int,
) -> Cost:
    """Queries and each sequence's keys and values in, one vector a query head out; two products a visible pair.

    A query at position p sees p + 1 keys; a query head and a key meet in head_dim products and as many sums, twice.
    """
    heads = num_seqs * query_len * num_heads * head_dim
    keys_and_values = 2 * num_seqs * seq_len * num_kv_heads * head_dim
    pairs = num_seqs * (query_len * (seq_len - query_len) + query_len * (query_len + 1) // 2)
    flops = 4 * pairs * num_heads * head_dim
    return Cost((heads + keys_and_values) * element_bytes, heads * element_bytes, flops)


def decode_cases(shapes: KernelShapes, dtype: torch.dtype) -> Iterator[KernelCase]:
    """One new token a sequence."""
    for num_seqs, context in shapes.decodes:
        name = f"{num_seqs} x {context} context"
        yield _attention_case(name, PromptStep(num_seqs, 1, context), shapes, dtype)


def prefill_cases(shapes: KernelShapes, dtype: torch.dtype) -> Iterator[KernelCase]:
    """One sequence with many new tokens."""
    for num_new, num_cached in shapes.prefills:
        name = f"{num_new} new on {num_cached} cached" if num_cached else f"{num_new} new, causal"
        yield _attention_case(name, PromptStep(1, num_new, num_cached + num_new), shapes, dtype)


def _attention_case(name: str, step: PromptStep, shapes: KernelShapes, dtype: torch.dtype) -> KernelCase:
    scale = shapes.head_dim**-0.5

    def bind(backend: KernelBackend, t: Tensors) -> BoundCall:
        query, kv_cache = t["heads"][:, : shapes.num_heads], t["kv_cache"]
        metadata = prepare(backend, step, shapes, t)
        return lambda: (backend.paged_attention(query, kv_cache, metadata, scale),)

    def expected(t: Tensors) -> tuple[torch.Tensor, ...]:
        # A token at position p, alone, is a decode of a sequence of p + 1 tokens: no score of the others is needed.
        tokens = step.checked_tokens
        seqs = [token // step.query_len for token in tokens]
        lens = [step.seq_len - step.query_len + token % step.query_len + 1 for token in tokens]
        alone = AttentionInputs(
            slot_mapping=t["slot_mapping"][tokens],
            block_tables=t["block_tables"][seqs],
            query_start_loc=torch.arange(len(tokens) + 1, dtype=torch.int32),
            seq_lens=torch.tensor(lens, dtype=torch.int32),
            num_decode_reqs=len(tokens),
            max_query_len=1,
            max_seq_len=step.seq_len,
        )
        query = t["heads"][tokens, : shapes.num_heads].double()
        return (REFERENCE.paged_attention(query, t["kv_cache"], alone, scale),)

    return KernelCase(
        name=name,
        cost=attention_cost(
            step.num_seqs,
            step.query_len,
            step.seq_len,
            num_heads=shapes.num_heads,
            num_kv_heads=shapes.num_kv_heads,
            head_dim=shapes.head_dim,
            element_bytes=dtype.itemsize,
        ),
        make=make_inputs(step, shapes, dtype),
        bind=bind,
        expected=expected,
        compared=lambda outputs: (outputs[0][step.checked_tokens],),
        baselines=_sdpa_baselines(step, shapes),
    )


# ----------------------------------------------------------------------------------------------------------- inputs
def make_inputs(step: PromptStep, shapes: KernelShapes, dtype: torch.dtype) -> Callable[[torch.device], Tensors]:
    """Heads of a step's tokens, a cache that holds their context and has room for them, and the step's indices."""

    def make(device: torch.device) -> Tensors:
        g = generator(device)
        size = shapes.block_size
        blocks_a_seq = -(-step.seq_len // size)
        num_blocks = step.num_seqs * blocks_a_seq + 1  # block 0 belongs to nobody
        shuffled = torch.randperm(num_blocks - 1, generator=g, device=device) + 1
        tables = shuffled.view(step.num_seqs, blocks_a_seq)
        positions = torch.arange(step.seq_len - step.query_len, step.seq_len, device=device)
        slots = tables[:, positions // size] * size + positions % size  # [num_seqs, query_len]
        num_heads = shapes.num_heads + 2 * shapes.num_kv_heads
        return {
            "heads": normal(g, step.num_tokens, num_heads, shapes.head_dim, dtype=dtype),
            "kv_cache": normal(g, num_blocks, 2, shapes.num_kv_heads, size, shapes.head_dim, dtype=dtype),
            "slot_mapping": slots.flatten().int(),
            "block_tables": tables.int(),
            "query_start_loc": torch.arange(step.num_seqs + 1, device=device, dtype=torch.int32) * step.query_len,
            "seq_lens": torch.full((step.num_seqs,), step.seq_len, device=device, dtype=torch.int32),
        }

    return make


def prepare(backend: KernelBackend, step: PromptStep, shapes: KernelShapes, t: Tensors) -> Any:
    """The backend's metadata of a step over ``make_inputs``' tensors."""
    inputs = AttentionInputs(
        slot_mapping=t["slot_mapping"],
        block_tables=t["block_tables"],
        query_start_loc=t["query_start_loc"],
        seq_lens=t["seq_lens"],
        num_decode_reqs=step.num_seqs if step.is_decode else 0,
        max_query_len=step.query_len,
        max_seq_len=step.seq_len,
    )
    return backend.prepare_attention(inputs, KVCacheShape(shapes.num_kv_heads, shapes.block_size))


# ------------------------------------------------------------------------------------------------ torch's attention
_GPU_KERNELS = (
    ("SDPA cuDNN", SDPBackend.CUDNN_ATTENTION),
    ("SDPA flash", SDPBackend.FLASH_ATTENTION),
    ("SDPA efficient", SDPBackend.EFFICIENT_ATTENTION),
)


def _sdpa_baselines(step: PromptStep, shapes: KernelShapes) -> tuple[Baseline, ...]:
    """Torch's choice on a CPU; on a GPU each of its kernels by name."""
    make = _bind_sdpa_decode if step.is_decode else _bind_sdpa_prefill

    def binder(kernel: SDPBackend | None) -> Callable[[Tensors], BoundCall]:
        def bind(t: Tensors) -> BoundCall:
            if (t["heads"].device.type == "cuda") != (kernel is not None):
                raise RuntimeError("a kernel of the other kind of device")
            return make(step, shapes, t, kernel)

        return bind

    choices = (("SDPA", None), *_GPU_KERNELS)
    return tuple(Baseline(f"{name}, contiguous K/V", binder(kernel)) for name, kernel in choices)


def _bind_sdpa_decode(step: PromptStep, shapes: KernelShapes, t: Tensors, kernel: SDPBackend | None) -> BoundCall:
    """The group of a KV head as the queries of one call, so keys and values are read once."""
    keys, values = _contiguous_kv(step, t)
    shape = (step.num_seqs, shapes.num_kv_heads, -1, shapes.head_dim)
    query = t["heads"][:, : shapes.num_heads].reshape(shape).contiguous()
    attend = _with_kernel(kernel, lambda: F.scaled_dot_product_attention(query, keys, values))
    return lambda: (attend().reshape(step.num_tokens, shapes.num_heads, shapes.head_dim),)


def _bind_sdpa_prefill(step: PromptStep, shapes: KernelShapes, t: Tensors, kernel: SDPBackend | None) -> BoundCall:
    keys, values = _contiguous_kv(step, t)  # [1, num_kv_heads, seq_len, head_dim]
    query = t["heads"][None, :, : shapes.num_heads].transpose(1, 2).contiguous()  # [1, num_heads, query_len, head_dim]
    is_whole = step.query_len == step.seq_len
    mask: torch.Tensor | None = None
    if not is_whole and kernel is SDPBackend.FLASH_ATTENTION:
        # It takes no mask; this one is recognised by its type, and chooses the kernel itself.
        mask, kernel = causal_lower_right(step.query_len, step.seq_len), None
    elif not is_whole:
        every = torch.ones(step.query_len, step.seq_len, dtype=torch.bool, device=query.device)
        mask = every.tril(step.seq_len - step.query_len)

    def with_heads(keys: torch.Tensor, values: torch.Tensor, enable_gqa: bool) -> Callable[[], torch.Tensor]:
        return _with_kernel(
            kernel,
            lambda: F.scaled_dot_product_attention(
                query, keys, values, attn_mask=mask, is_causal=is_whole, enable_gqa=enable_gqa
            ),
        )

    attend = with_heads(keys, values, True)
    try:
        attend()
    except Exception:  # this kernel knows no groups: give each query head a copy of its keys and values
        group = shapes.num_heads // shapes.num_kv_heads
        attend = with_heads(keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1), False)
    return lambda: (attend()[0].transpose(0, 1),)


def _with_kernel(kernel: SDPBackend | None, attend: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    if kernel is None:
        return attend

    def call() -> torch.Tensor:
        with sdpa_kernel(kernel):
            return attend()

    return call


def _contiguous_kv(step: PromptStep, t: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values, [num_seqs, num_kv_heads, seq_len, head_dim] each, out of the paged cache."""
    blocks = t["kv_cache"][t["block_tables"].long()]  # [num_seqs, num_blocks, 2, num_kv_heads, block_size, head_dim]
    merged = blocks.permute(2, 0, 3, 1, 4, 5).flatten(3, 4)[:, :, :, : step.seq_len]
    return merged[0].contiguous(), merged[1].contiguous()
