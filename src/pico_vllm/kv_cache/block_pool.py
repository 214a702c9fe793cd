"""BlockPool: reference counts and the free list over the ids of KV cache blocks.

It knows ids [0, num_blocks) and how many logical owners each has (a request's block table is one), not who they are,
how many tokens a block holds, or where its tensor lies. Only KVCacheManager calls it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class BlockPool:
    """Block ids with a reference count each. Conservation: free + held = ``num_blocks``, always.

    The free list is a stack. A fresh pool hands out 0, 1, 2, …; a block that was released last is handed out first (it
    is the likeliest to be in a cache, and a use after free shows soon), and blocks released together come back in the
    order in which they were listed: after ``release([5, 3])``, ``allocate(2)`` is ``[5, 3]``.

    Args:
        num_blocks: how many blocks there are, >= 0.
    """

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 0, num_blocks
        self._ref_counts = [0] * num_blocks
        self._free_ids = list(range(num_blocks - 1, -1, -1))  # the top of the stack is the end of the list

    @property
    def num_blocks(self) -> int:
        """All blocks, free and held."""
        return len(self._ref_counts)

    @property
    def num_free_blocks(self) -> int:
        """Blocks without an owner."""
        return len(self._free_ids)

    def logical_ref_count(self, block_id: int) -> int:
        """How many owners the block has; 0 = free."""
        return self._ref_counts[block_id]

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Take ``num_blocks`` free blocks with one owner each: all of them, or None and nothing changes."""
        assert num_blocks >= 0, num_blocks
        num_left = len(self._free_ids) - num_blocks
        if num_left < 0:
            return None
        block_ids = self._free_ids[num_left:]
        block_ids.reverse()
        del self._free_ids[num_left:]
        for block_id in block_ids:
            self._ref_counts[block_id] = 1
        return block_ids

    def acquire(self, block_ids: Iterable[int]) -> None:
        """Add an owner to each block, which must have one already."""
        for block_id in block_ids:
            assert self._ref_counts[block_id] > 0, f"block {block_id} is free: allocate it, don't acquire it"
            self._ref_counts[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Take an owner from each block; a block without any is free again."""
        for block_id in reversed(block_ids):
            assert self._ref_counts[block_id] > 0, f"block {block_id} is free already"
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                self._free_ids.append(block_id)

    def check_invariants(self) -> None:
        """Assert conservation: each id is in the free list once and has no owner, or isn't there and has one. O(n)."""
        free_ids = set(self._free_ids)
        assert len(free_ids) == len(self._free_ids), f"a block is free twice: {sorted(self._free_ids)}"
        unowned_ids = {block_id for block_id, count in enumerate(self._ref_counts) if count == 0}
        assert free_ids == unowned_ids, f"free list and reference counts differ in {sorted(free_ids ^ unowned_ids)}"
        assert min(self._ref_counts, default=0) >= 0, self._ref_counts
