"""Attention and KV store in Triton; the contract and the reference are in ``attention``.

The first ``num_decode_reqs`` sequences go to the decode kernel, all others and the padded tokens that belong to no
sequence to the prefill kernel; each is launched only if there may be something for it. Launches depend on tensor shapes
and on the host bounds of the metadata alone, lengths are read on the device: a CUDA graph may capture any of it.

A padded decode without a token has an index that is another sequence's token: the decode kernel may write 0 there, and
the prefill kernel, which runs after it, what belongs there.
"""

# pyright: reportCallIssue=false
# (a launch takes num_warps and num_stages beside the parameters of the kernel)

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from pico_vllm.kernels.attention import AttentionInputs, KVCacheShape
from pico_vllm.kernels.attention_config import AttentionConfig, Device, device_of, select_config
from pico_vllm.kernels.attention_decode import decode_attention_triton
from pico_vllm.kernels.attention_prefill import prefill_attention_triton
from pico_vllm.kernels.attention_tiles import start_after_predecessors


@dataclass(frozen=True, slots=True)
class TritonAttentionMetadata:
    """What the kernels need of a step, shared by all layers.

    Attributes:
        slot_mapping, block_tables, query_start_loc, seq_lens: as in ``AttentionInputs``.
        num_decode_reqs: the first sequences, each with one token, which may be a padded one; the last may have none.
        max_seq_len: bound of ``seq_lens``.
        prefill_seq_len: what the prefill kernel is shaped for.
        device: where the tensors are.
        decodes_only, decode_order: as in ``ForwardBatch``.
        decode_query_len: bound of the tokens of a decode, 1 to 8. Above 1 (speculation) a decode may have fewer.
        config: launch shapes; None = the ones tuned for the device.
    """

    slot_mapping: torch.Tensor
    block_tables: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    num_decode_reqs: int
    max_seq_len: int
    prefill_seq_len: int
    device: Device
    decodes_only: bool = False
    decode_order: torch.Tensor | None = None
    decode_query_len: int = 1
    config: AttentionConfig | None = None


def prepare_attention_triton(inputs: AttentionInputs, shape: KVCacheShape) -> TritonAttentionMetadata:
    """Take the tensors as they are: the kernels do the index arithmetic."""
    return TritonAttentionMetadata(
        slot_mapping=inputs.slot_mapping,
        block_tables=inputs.block_tables,
        query_start_loc=inputs.query_start_loc,
        seq_lens=inputs.seq_lens,
        num_decode_reqs=inputs.num_decode_reqs,
        max_seq_len=inputs.max_seq_len,
        prefill_seq_len=inputs.max_seq_len if inputs.prefill_seq_len is None else inputs.prefill_seq_len,
        device=device_of(inputs.seq_lens.device.index),
        decodes_only=inputs.decodes_only,
        decode_order=inputs.decode_order,
    )


def paged_attention_triton(
    query: torch.Tensor, kv_cache: torch.Tensor, metadata: TritonAttentionMetadata, scale: float
) -> torch.Tensor:
    """``paged_attention_reference`` in one launch for decodes and one for prefills.

    A merge follows each that split contexts. Needs scale > 0 and contiguous rows of head_dim numbers in ``query`` and
    ``kv_cache``.
    """
    num_tokens, num_heads, head_dim = query.shape
    assert query.stride(2) == 1 and kv_cache.stride(4) == 1
    out = torch.empty((num_tokens, num_heads, head_dim), dtype=query.dtype, device=query.device)
    device, num_decodes = metadata.device, metadata.num_decode_reqs
    block_d = max(16, triton.next_power_of_2(head_dim))
    config = metadata.config or select_config(device.architecture, block_d, query.element_size())
    if num_decodes > 0:
        decode_attention_triton(query, kv_cache, out, metadata, scale, config)
    num_decode_tokens = (
        num_decodes if metadata.decode_query_len == 1 else 0
    )  # at least, padded ones without a token too
    assert num_decode_tokens <= num_tokens
    if num_tokens > num_decode_tokens:
        prefill_attention_triton(query, kv_cache, out, metadata, scale, config)
    return out


@triton.jit(do_not_specialize_on_alignment=["slot_mapping"])
def _store_kv_kernel(
    key,
    value,
    kv_cache,
    slot_mapping,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    block_stride,
    value_offset,
    kv_head_stride,
    offset_stride,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """kv_cache[slot // BLOCK_SIZE, 0 | 1, :, slot % BLOCK_SIZE] = key | value [token].

    Grid: (num_tokens,). A program copies all KV heads of one token; slot -1 stores nothing.
    """
    start_after_predecessors(PDL)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    if slot < 0:
        return
    heads = tl.arange(0, BLOCK_H)[:, None]
    dims = tl.arange(0, BLOCK_D)[None, :]
    mask = (heads < NUM_KV_HEADS) & (dims < HEAD_DIM)
    k = tl.load(key + token * key_token_stride + heads * key_head_stride + dims, mask=mask)
    v = tl.load(value + token * value_token_stride + heads * value_head_stride + dims, mask=mask)
    keys = kv_cache + slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * offset_stride
    tl.store(keys + heads * kv_head_stride + dims, k, mask=mask)
    tl.store(keys + value_offset + heads * kv_head_stride + dims, v, mask=mask)


def store_kv_triton(
    key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, metadata: TritonAttentionMetadata
) -> None:
    """``store_kv_reference`` in one launch. Needs contiguous rows of head_dim numbers."""
    num_tokens, num_kv_heads, head_dim = key.shape
    if num_tokens == 0:
        return
    assert key.stride(2) == 1 and value.stride(2) == 1 and kv_cache.stride(4) == 1
    _store_kv_kernel[(num_tokens,)](
        key,
        value,
        kv_cache,
        metadata.slot_mapping,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        kv_cache.stride(0),
        kv_cache.stride(1),
        kv_cache.stride(2),
        kv_cache.stride(3),
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=kv_cache.shape[3],
        BLOCK_H=triton.next_power_of_2(num_kv_heads),
        BLOCK_D=triton.next_power_of_2(head_dim),
        PDL=metadata.device.launches_early,
        num_warps=1,
        launch_pdl=metadata.device.launches_early,
    )
