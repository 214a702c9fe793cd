"""Which KV cache block belongs to whom. Plain Python; the tensors themselves are the worker's."""

from pico_vllm.kv_cache.block_pool import BlockPool
from pico_vllm.kv_cache.kv_cache_manager import CacheStats, KVCacheManager
from pico_vllm.kv_cache.radix_tree import RadixTree

__all__ = ["BlockPool", "CacheStats", "KVCacheManager", "RadixTree"]
