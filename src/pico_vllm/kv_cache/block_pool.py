"""BlockPool: reference counts and the free list over the ids of KV cache blocks.

It knows ids [0, num_blocks) and how many logical owners each has, not who they are, how many tokens a block holds, or
where its tensor lies. Owners are of two kinds: those that hold a block whatever happens (a request's block table, a
copy in flight, a node of the radix tree that a running request stands on or below), and evictable ones (every other
node). Only KVCacheManager and its RadixTree call it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class BlockPool:
    """Block ids with a reference count each. Conservation: free + active + cached = ``num_blocks``, always.

    The free list is a stack. A fresh pool hands out 0, 1, 2, …; a block that was released last is handed out first (it
    is the likeliest to be in a cache, and a use after free shows soon), and blocks released together come back in the
    order in which they were listed: after ``release([5, 3])``, ``allocate(2)`` is ``[5, 3]``.

    Args:
        num_blocks: how many blocks there are, >= 0.
    """

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 0, num_blocks
        self._ref_counts = [0] * num_blocks  # owners of both kinds
        self._pin_counts = [0] * num_blocks  # those that are not evictable
        self._free_ids = list(range(num_blocks - 1, -1, -1))  # the top of the stack is the end of the list
        self._num_cached = 0

    @property
    def num_blocks(self) -> int:
        """All blocks."""
        return len(self._ref_counts)

    @property
    def num_free_blocks(self) -> int:
        """Blocks without an owner."""
        return len(self._free_ids)

    @property
    def num_cached_blocks(self) -> int:
        """Blocks all of whose owners are evictable."""
        return self._num_cached

    @property
    def num_available_blocks(self) -> int:
        """Blocks that can be had: free ones, and cached ones after an eviction."""
        return len(self._free_ids) + self._num_cached

    def logical_ref_count(self, block_id: int) -> int:
        """How many owners the block has; 0 = free."""
        return self._ref_counts[block_id]

    def pin_count(self, block_id: int) -> int:
        """How many of them are not evictable."""
        return self._pin_counts[block_id]

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Take ``num_blocks`` free blocks with one owner each: all of them, or None and nothing changes."""
        assert num_blocks >= 0, num_blocks
        num_left = len(self._free_ids) - num_blocks
        if num_left < 0:
            return None
        block_ids = self._free_ids[num_left:]
        block_ids.reverse()
        del self._free_ids[num_left:]
        refs, pins = self._ref_counts, self._pin_counts
        for block_id in block_ids:
            refs[block_id] = pins[block_id] = 1
        return block_ids

    def acquire(self, block_ids: Iterable[int], *, evictable: bool = False) -> None:
        """Add an owner to each block, which must have one already."""
        refs = self._ref_counts
        for block_id in block_ids:
            assert refs[block_id] > 0, f"block {block_id} is free: allocate it, don't acquire it"
            refs[block_id] += 1
        if not evictable:
            self.pin(block_ids)

    def release(self, block_ids: Sequence[int]) -> None:
        """Take an owner that is not evictable from each block; a block without any is free again."""
        refs, pins = self._ref_counts, self._pin_counts
        for block_id in reversed(block_ids):
            assert pins[block_id] > 0, f"block {block_id} is free already, or held by evictable owners only"
            refs[block_id] -= 1
            pins[block_id] -= 1
            if refs[block_id] == 0:
                self._free_ids.append(block_id)
            elif pins[block_id] == 0:
                self._num_cached += 1

    def pin(self, block_ids: Iterable[int]) -> None:
        """An evictable owner of each block becomes one that is not."""
        pins = self._pin_counts
        for block_id in block_ids:
            if pins[block_id] == 0:
                self._num_cached -= 1
            pins[block_id] += 1

    def unpin(self, block_ids: Iterable[int]) -> None:
        """An owner of each block becomes evictable."""
        pins = self._pin_counts
        for block_id in block_ids:
            assert pins[block_id] > 0, f"no owner of block {block_id} is left to become evictable"
            pins[block_id] -= 1
            if pins[block_id] == 0:
                self._num_cached += 1

    def evict(self, block_id: int) -> None:
        """Take an evictable owner from a block; without any it is free again."""
        assert self._ref_counts[block_id] > self._pin_counts[block_id], f"block {block_id} has no evictable owner"
        self._ref_counts[block_id] -= 1
        if self._ref_counts[block_id] == 0:
            self._num_cached -= 1
            self._free_ids.append(block_id)

    def check_invariants(self) -> None:
        """Assert conservation: each id is in the free list once and has no owner, or isn't there and has one. O(n)."""
        free_ids = set(self._free_ids)
        assert len(free_ids) == len(self._free_ids), f"a block is free twice: {sorted(self._free_ids)}"
        unowned_ids = {block_id for block_id, count in enumerate(self._ref_counts) if count == 0}
        assert free_ids == unowned_ids, f"free list and reference counts differ in {sorted(free_ids ^ unowned_ids)}"
        counts = list(zip(self._ref_counts, self._pin_counts, strict=True))
        assert all(0 <= pins <= refs for refs, pins in counts), counts
        assert self._num_cached == sum(refs > 0 and pins == 0 for refs, pins in counts), (self._num_cached, counts)
