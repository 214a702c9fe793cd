"""How many KV blocks fit, and the tensors that hold them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pico_vllm.errors import ConfigError

if TYPE_CHECKING:
    from pico_vllm.config import CacheConfig, ModelConfig
    from pico_vllm.worker.memory_budget import MemoryBudget

_CPU_DEFAULT_LIMIT_BYTES = 4 << 30
_CPU_SHARE_OF_FREE = 0.25


def block_bytes(model: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers, K and V."""
    per_token = 2 * model.num_key_value_heads * model.head_dim * dtype.itemsize
    return model.num_hidden_layers * block_size * per_token


def resolve_num_blocks(
    cache: CacheConfig,
    model: ModelConfig,
    *,
    dtype: torch.dtype,
    max_useful_blocks: int,
    memory: MemoryBudget | None,
    num_ranks: int = 1,
) -> int:
    """Number of blocks from the override, or from the memory budget.

    Args:
        model: of one rank.
        memory: what has been measured to be left of a GPU; None on a CPU, or where ``cache`` names a number.
        num_ranks: that share the memory of a CPU.
        max_useful_blocks: what all sequences at full length would need; more is never allocated.

    Raises:
        ConfigError: the budget does not hold a single block.
    """
    if cache.num_gpu_blocks_override is not None:
        return cache.num_gpu_blocks_override
    one_block = block_bytes(model, cache.block_size, dtype)
    budget = cache.kv_cache_memory_bytes
    if budget is None:
        budget = _cpu_budget() // num_ranks if memory is None else memory.kv_cache
    if budget < one_block:
        raise ConfigError(
            f"the KV cache budget of {budget:,} bytes holds no block ({one_block:,} bytes a block of "
            f"{cache.block_size} tokens); raise kv_cache_memory_bytes or free memory"
        )
    return min(budget // one_block, max_useful_blocks)


def allocate_kv_caches(
    model: ModelConfig, *, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> list[torch.Tensor]:
    """One [num_blocks, 2, num_kv_heads, block_size, head_dim] a layer, uninitialised: what is past a length is unused.

    Raises:
        ConfigError: the memory cannot be had.
    """
    shape = (num_blocks, 2, model.num_key_value_heads, block_size, model.head_dim)
    try:
        return [torch.empty(shape, dtype=dtype, device=device) for _ in range(model.num_hidden_layers)]
    except RuntimeError as error:  # torch.OutOfMemoryError, or the CPU allocator's own RuntimeError
        wanted = num_blocks * block_bytes(model, block_size, dtype)
        raise ConfigError(
            f"cannot allocate {wanted:,} bytes for {num_blocks} KV blocks on {device}: "
            f"{str(error).splitlines()[0]}; lower num_gpu_blocks_override or kv_cache_memory_bytes"
        ) from None


def _cpu_budget() -> int:
    return min(int(_available_memory_bytes() * _CPU_SHARE_OF_FREE), _CPU_DEFAULT_LIMIT_BYTES)


def _available_memory_bytes() -> int:
    import psutil

    return int(psutil.virtual_memory().available)
