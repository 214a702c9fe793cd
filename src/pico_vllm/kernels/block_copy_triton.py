"""Block copies in Triton: all blocks of all layers in one launch. Contract and formulas are those of ``block_copy``."""

# pyright: reportCallIssue=false
# (a launch takes num_warps and num_stages beside the parameters of the kernel)

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

_TILE = 4096
_NUM_WARPS = 8  # 16 bf16 numbers a thread: two 16-byte loads


@triton.jit
def _copy_blocks_kernel(
    source_ptr,
    destination_ptr,
    source_layers_ptr,
    destination_layers_ptr,
    source_ids_ptr,
    destination_ids_ptr,
    block_elements,
    tiles_a_block,
    IS_ALIGNED: tl.constexpr,
    TILE: tl.constexpr,
):
    """destination[layer][destination_ids[i]] = source[layer][source_ids[i]], blocks of block_elements elements.

    Grid: (n * tiles_a_block, num_layers); a program copies TILE elements of one block of one layer. The addresses of
    the layers are tables, [num_layers] int64; the first two arguments are there for their dtype alone.
    """
    i, layer = tl.program_id(0) // tiles_a_block, tl.program_id(1)
    elements = tl.program_id(0) % tiles_a_block * TILE + tl.arange(0, TILE)
    source = tl.load(source_layers_ptr + layer).to(source_ptr.dtype)
    destination = tl.load(destination_layers_ptr + layer).to(destination_ptr.dtype)
    if IS_ALIGNED:
        source, destination = tl.multiple_of(source, 16), tl.multiple_of(destination, 16)
    source += tl.load(source_ids_ptr + i).to(tl.int64) * block_elements
    destination += tl.load(destination_ids_ptr + i).to(tl.int64) * block_elements
    mask = elements < block_elements
    tl.store(destination + elements, tl.load(source + elements, mask=mask), mask=mask)


def copy_blocks_triton(
    kv_caches: Sequence[torch.Tensor], source_ids: torch.Tensor, destination_ids: torch.Tensor
) -> None:
    """``copy_blocks_reference`` in one launch."""
    _copy(kv_caches, kv_caches, source_ids, destination_ids)


def gather_blocks_triton(kv_caches: Sequence[torch.Tensor], block_ids: torch.Tensor) -> torch.Tensor:
    """``gather_blocks_reference`` in one launch."""
    first = kv_caches[0]
    buffer = torch.empty(len(kv_caches), len(block_ids), *first.shape[1:], dtype=first.dtype, device=first.device)
    _copy(kv_caches, buffer, block_ids, torch.arange(len(block_ids), device=first.device))
    return buffer


def scatter_blocks_triton(buffer: torch.Tensor, kv_caches: Sequence[torch.Tensor], block_ids: torch.Tensor) -> None:
    """``scatter_blocks_reference`` in one launch."""
    _copy(buffer, kv_caches, torch.arange(len(block_ids), device=buffer.device), block_ids)


def _copy(
    source: Sequence[torch.Tensor] | torch.Tensor,
    destination: Sequence[torch.Tensor] | torch.Tensor,
    source_ids: torch.Tensor,
    destination_ids: torch.Tensor,
) -> None:
    assert len(source) == len(destination) and all(layer.is_contiguous() for layer in (*source, *destination))
    if len(source) == 0 or len(source_ids) == 0:
        return
    block_elements = source[0][0].numel()
    tiles_a_block = triton.cdiv(block_elements, _TILE)
    source_layers, destination_layers = _addresses(source), _addresses(destination)
    addresses = torch.tensor((source_layers, destination_layers), dtype=torch.int64)
    addresses = addresses.pin_memory() if source[0].is_cuda else addresses  # pageable memory would wait for the stream
    addresses = addresses.to(source[0].device, non_blocking=True)
    _copy_blocks_kernel[(len(source_ids) * tiles_a_block, len(source))](
        source[0],
        destination[0],
        addresses[0],
        addresses[1],
        source_ids,
        destination_ids,
        block_elements,
        tiles_a_block,
        IS_ALIGNED=all(address % 16 == 0 for address in (*source_layers, *destination_layers)),
        TILE=_TILE,
        num_warps=_NUM_WARPS,
    )


def _addresses(layers: Sequence[torch.Tensor] | torch.Tensor) -> list[int]:
    return [layer.data_ptr() for layer in layers]
