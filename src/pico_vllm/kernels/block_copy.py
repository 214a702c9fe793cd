"""Whole KV blocks moved by id: copied inside the cache, gathered out of it, scattered back into it.

    copy:     kv_cache[destination[i]] = kv_cache[source[i]]      in every layer (copy-on-write)
    gather:   buffer[layer, i] = kv_caches[layer][block_ids[i]]   (offload, transfer)
    scatter:  kv_caches[layer][block_ids[i]] = buffer[layer, i]

Contract: ids are valid; destinations are distinct and none of them is a source of the same call. The buffer is
layer-major, so that a layer can be sent while the next one is computed. Called between steps, never inside a graph.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def copy_blocks_reference(
    kv_caches: Sequence[torch.Tensor], source_ids: torch.Tensor, destination_ids: torch.Tensor
) -> None:
    """Copy blocks inside every layer's cache, in place.

    Args:
        kv_caches: one [num_blocks, 2, num_kv_heads, block_size, head_dim] a layer, contiguous and of one shape.
        source_ids, destination_ids: [n] int32 or int64, on the caches' device.
    """
    for kv_cache in kv_caches:
        for source, destination in zip(source_ids.tolist(), destination_ids.tolist(), strict=True):
            kv_cache[destination] = kv_cache[source]


def gather_blocks_reference(kv_caches: Sequence[torch.Tensor], block_ids: torch.Tensor) -> torch.Tensor:
    """Collect blocks of every layer.

    Returns:
        [num_layers, n, 2, num_kv_heads, block_size, head_dim], a new contiguous tensor.
    """
    return torch.stack([kv_cache[block_ids.long()] for kv_cache in kv_caches])


def scatter_blocks_reference(buffer: torch.Tensor, kv_caches: Sequence[torch.Tensor], block_ids: torch.Tensor) -> None:
    """Write what ``gather_blocks_reference`` has collected into the blocks of these ids; ``kv_caches`` in place."""
    for blocks, kv_cache in zip(buffer, kv_caches, strict=True):
        for block, block_id in zip(blocks, block_ids.tolist(), strict=True):
            kv_cache[block_id] = block


def copy_blocks_cpu(kv_caches: Sequence[torch.Tensor], source_ids: torch.Tensor, destination_ids: torch.Tensor) -> None:
    """``copy_blocks_reference``, all blocks of a layer at once."""
    for kv_cache in kv_caches:
        kv_cache.index_copy_(0, destination_ids.long(), kv_cache.index_select(0, source_ids))


def gather_blocks_cpu(kv_caches: Sequence[torch.Tensor], block_ids: torch.Tensor) -> torch.Tensor:
    """``gather_blocks_reference`` straight into the buffer."""
    first = kv_caches[0]
    buffer = torch.empty(len(kv_caches), len(block_ids), *first.shape[1:], dtype=first.dtype, device=first.device)
    for blocks, kv_cache in zip(buffer, kv_caches, strict=True):
        torch.index_select(kv_cache, 0, block_ids, out=blocks)
    return buffer


def scatter_blocks_cpu(buffer: torch.Tensor, kv_caches: Sequence[torch.Tensor], block_ids: torch.Tensor) -> None:
    """``scatter_blocks_reference``, all blocks of a layer at once."""
    for blocks, kv_cache in zip(buffer, kv_caches, strict=True):
        kv_cache.index_copy_(0, block_ids.long(), blocks)
