"""KVCacheManager: the block tables of the requests, and the only writer of references and the free list.

It counts in tokens towards the scheduler and in blocks towards the pool. It knows nothing of queues, budgets or
tensors. Position p of a request lives in block ``block_table[p // block_size]``, offset ``p % block_size``. The
scheduler calls it at schedule time only; every call costs O(blocks that change hands), never a scan.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pico_vllm.errors import ConfigError
from pico_vllm.kv_cache.block_pool import BlockPool

if TYPE_CHECKING:
    from pico_vllm.request import Request


class KVCacheManager:
    """Gives each request a block table that grows with its tokens.

    Args:
        num_blocks: blocks in the cache.
        block_size: tokens a block.

    Raises:
        ConfigError: one of them is below 1.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ConfigError(
                f"a KV cache of num_blocks={num_blocks} blocks of block_size={block_size} tokens holds nothing: "
                "both must be at least 1; give the cache more memory"
            )
        self.block_size = block_size
        self._pool = BlockPool(num_blocks)
        self._block_tables: dict[str, list[int]] = {}

    @property
    def num_blocks(self) -> int:
        """Blocks in the cache, free and held."""
        return self._pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no one owns."""
        return self._pool.num_free_blocks

    @property
    def max_tokens(self) -> int:
        """Capacity: the most tokens whose KV the whole cache can hold."""
        return self._pool.num_blocks * self.block_size

    def get_num_computed_tokens(self, request: Request) -> int:
        """How many of the request's leading tokens have their KV in the cache before it runs.

        The scheduler asks when it wants to admit a request that holds no blocks. Always 0: prefixes are not shared
        yet. At least the last known token is never among them, since its logits are wanted.
        """
        assert request.request_id not in self._block_tables, f"{request.request_id!r} has a block table already"
        return 0

    def allocate_slots(self, request_id: str, num_tokens_total: int, *, headroom: int = 0) -> tuple[int, ...] | None:
        """Lengthen a block table until positions [0, num_tokens_total) have a slot each.

        Args:
            request_id: its table is made when it gets its first block.
            num_tokens_total: tokens of the request, not only the new ones.
            headroom: blocks that must still be free afterwards (only asked of a table that grows).

        Returns:
            The appended blocks in order, () when the table is long enough already, and None when there are too few
            free blocks; then nothing has changed.
        """
        block_table = self._block_tables.get(request_id)
        num_held = 0 if block_table is None else len(block_table)
        num_new = -(-num_tokens_total // self.block_size) - num_held
        if num_new <= 0:
            return ()
        if num_new + headroom > self._pool.num_free_blocks:
            return None
        block_ids = self._pool.allocate(num_new)
        assert block_ids is not None
        if block_table is None:
            self._block_tables[request_id] = block_ids
        else:
            block_table += block_ids
        return tuple(block_ids)

    def free(self, request_id: str) -> None:
        """Give a request's blocks back and forget its table. Idempotent: no table, nothing to do."""
        block_table = self._block_tables.pop(request_id, None)
        if block_table is not None:
            self._pool.release(block_table)

    def block_table(self, request_id: str) -> tuple[int, ...]:
        """The blocks of a request in the order of its positions; () when it has none. A copy."""
        return tuple(self._block_tables.get(request_id, ()))

    def check_invariants(self) -> None:
        """Assert that the pool is sound and that references = owners, counted anew from the block tables. O(n)."""
        self._pool.check_invariants()
        owners = [0] * self._pool.num_blocks
        for request_id, block_table in self._block_tables.items():
            assert block_table, f"{request_id!r} has an empty block table"
            assert len(set(block_table)) == len(block_table), f"{request_id!r} has a block twice: {block_table}"
            for block_id in block_table:
                owners[block_id] += 1
        counts = [self._pool.logical_ref_count(block_id) for block_id in range(self._pool.num_blocks)]
        assert owners == counts, f"owners {owners} and reference counts {counts} differ"
