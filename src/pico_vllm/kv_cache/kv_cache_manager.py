"""KVCacheManager: the block tables of the requests, and the only writer of references, free list and radix tree.

It counts in tokens towards the scheduler and in blocks towards the pool. It knows nothing of queues, budgets or
tensors. Position p of a request lives in block ``block_table[p // block_size]``, offset ``p % block_size``. The
scheduler calls it at schedule time only; every call costs O(blocks that change hands), never a scan.

With prefix caching (docs/radix-cache.md) what requests compute goes into a radix tree and stays there when they end,
until its blocks are needed. A table then begins with blocks that are shared, all of them full. The last block of a
table is always the request's own: it is the one appender, and whoever matches a part of that block copies it first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pico_vllm.errors import ConfigError
from pico_vllm.kv_cache.block_pool import BlockPool
from pico_vllm.kv_cache.radix_tree import ID_BYTES, Match, RadixTree, pack_token_ids

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pico_vllm.kv_cache.radix_tree import Node
    from pico_vllm.request import Request


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Of prefix caching: sums since the start, and where the blocks are now.

    Attributes:
        num_prompt_tokens: of admitted requests, those counted once that were preempted.
        num_hit_tokens: of these, those whose KV was there.
        num_evicted_blocks: cached blocks given to somebody else.
        num_free_blocks, num_active_blocks, num_cached_blocks: blocks nobody owns; those of running requests; those that
            are kept for a later hit.
    """

    num_prompt_tokens: int = 0
    num_hit_tokens: int = 0
    num_evicted_blocks: int = 0
    num_free_blocks: int = 0
    num_active_blocks: int = 0
    num_cached_blocks: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of the prompts' tokens that didn't have to be computed, 0 … 1."""
        return self.num_hit_tokens / self.num_prompt_tokens if self.num_prompt_tokens else 0.0


class _Place:
    """Where a request stands in the tree; ``node`` is None when it has stepped aside."""

    __slots__ = ("node", "num_inserted")

    def __init__(self, node: Node | None, num_inserted: int) -> None:
        self.node = node
        self.num_inserted = num_inserted


_NO_MATCH = Match((), 0, 0)


class KVCacheManager:
    """Gives each request a block table that grows with its tokens.

    Args:
        num_blocks: blocks in the cache.
        block_size: tokens a block.
        enable_prefix_caching: share what requests have in common, and keep what they leave behind.

    Raises:
        ConfigError: one of the sizes is below 1.
    """

    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool = False) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ConfigError(
                f"a KV cache of num_blocks={num_blocks} blocks of block_size={block_size} tokens holds nothing: "
                "both must be at least 1; give the cache more memory"
            )
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._pool = BlockPool(num_blocks)
        self._tree = RadixTree(self._pool, block_size)
        self._block_tables: dict[str, list[int]] = {}
        self._places: dict[str, _Place] = {}  # of the same requests, with prefix caching
        self._block_copies: list[tuple[int, int]] = []  # of the step that is being planned
        self._num_prompt_tokens = self._num_hit_tokens = 0

    @property
    def num_blocks(self) -> int:
        """Blocks in the cache, free and held."""
        return self._pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be had: those that no one owns, and those that are only kept for a later hit."""
        return self._pool.num_available_blocks

    @property
    def max_tokens(self) -> int:
        """Capacity: the most tokens whose KV the whole cache can hold."""
        return self._pool.num_blocks * self.block_size

    @property
    def stats(self) -> CacheStats:
        """As of now."""
        pool = self._pool
        num_active = pool.num_blocks - pool.num_free_blocks - pool.num_cached_blocks
        return CacheStats(
            self._num_prompt_tokens,
            self._num_hit_tokens,
            self._tree.num_evicted_blocks,
            pool.num_free_blocks,
            num_active,
            pool.num_cached_blocks,
        )

    def begin_step(self) -> None:
        """A step is planned from now on; everything scheduled before has been stored when it begins."""
        self._tree.begin_step()

    def get_num_cached_tokens(self, request: Request) -> int:
        """How many of its leading tokens have their KV in the cache; the scheduler asks before it admits a request.

        All known ones may be among them: the last one is recomputed all the same, since its logits are wanted.
        """
        assert request.request_id not in self._block_tables, f"{request.request_id!r} has a block table already"
        return self._usable_tokens(self._match(request))

    def admit(self, request: Request, *, headroom: int = 0) -> int | None:
        """Make a block table with a slot for each known token, on top of what is cached of them.

        A cached partial block is copied: ``take_block_copies`` has the copy.

        Args:
            request: it has no table.
            headroom: blocks that must still be to be had afterwards; 0 = no request has blocks.

        Returns:
            Leading tokens whose KV is in the table (after the copies); None when there are too few blocks, and then
            none has changed hands. Not all of them may be what ``get_num_cached_tokens`` has said if
            ``headroom`` is 0: a request that is alone gets in at any price.
        """
        match = self._match(request)
        num_cached = self._usable_tokens(match)
        admitted = self._try_admit(request, match, num_cached, headroom)
        if not admitted and headroom == 0 and num_cached:
            # Alone, and the cached blocks it stands on but doesn't use are in its way: it uses whole blocks and leaves.
            num_cached -= num_cached % self.block_size
            admitted = self._try_admit(request, self._match(request), num_cached, 0, steps_aside=True)
        if not admitted:
            return None
        if request.num_preemptions == 0 and self.enable_prefix_caching:
            self._num_prompt_tokens += request.num_prompt_tokens
            self._num_hit_tokens += min(num_cached, request.num_prompt_tokens - 1)
        return num_cached

    def allocate_slots(self, request_id: str, num_tokens_total: int, *, headroom: int = 0) -> tuple[int, ...] | None:
        """Lengthen a block table until positions [0, num_tokens_total) have a slot each.

        Args:
            request_id: its table is made when it gets its first block.
            num_tokens_total: tokens of the request, not only the new ones.
            headroom: blocks that must still be to be had afterwards (only asked of a table that grows).

        Returns:
            The appended blocks in order, () when the table is long enough already, and None when there are too few
            free blocks; then nothing has changed.
        """
        block_table = self._block_tables.get(request_id)
        num_held = 0 if block_table is None else len(block_table)
        num_new = -(-num_tokens_total // self.block_size) - num_held
        if num_new <= 0:
            return ()
        if num_new + headroom > self._pool.num_available_blocks:
            if len(self._block_tables) != 1 or not self._step_aside(request_id):
                return None
            if num_new + headroom > self._pool.num_available_blocks:
                return None
        block_ids = self._take(num_new)
        if block_table is None:
            self._block_tables[request_id] = block_ids
        else:
            block_table += block_ids
        return tuple(block_ids)

    def insert(self, request: Request, num_tokens: int) -> None:
        """Let others share its first ``num_tokens`` tokens, all of which are known and have been scheduled."""
        place = self._places.get(request.request_id)
        if place is None or place.node is None or num_tokens <= place.num_inserted:
            return
        token_ids = _packed(request, place.num_inserted, num_tokens)
        place.node = self._tree.insert(place.node, token_ids, self._block_tables[request.request_id])
        place.num_inserted = place.node.end

    def take_block_copies(self) -> tuple[tuple[int, int], ...]:
        """(source, destination) of each block to be copied before the planned step's forward pass.

        Until now nobody could get a source. A later step may write it: the device runs steps in order.
        """
        if not self._block_copies:
            return ()
        copies = tuple(self._block_copies)
        self._block_copies.clear()
        self._pool.release([source for source, _ in copies])
        return copies

    def free(self, request: Request, num_tokens: int = 0) -> None:
        """Give a request's blocks back and forget its table. Idempotent: no table, nothing to do.

        Args:
            request: it ends, or starts again later.
            num_tokens: of its known tokens, so many have been scheduled: they are kept for a later hit.
        """
        block_table = self._block_tables.get(request.request_id)
        if block_table is None:
            return
        if (place := self._places.get(request.request_id)) is not None:
            if place.node is None and num_tokens:
                place.node, place.num_inserted = self._tree.lock(request.cache_salt, _NO_MATCH, 0), 0
            self.insert(request, num_tokens)
            if place.node is not None:
                self._tree.drop_duplicates(place.node)
                self._tree.unlock(place.node)
            del self._places[request.request_id]
        del self._block_tables[request.request_id]
        self._pool.release(block_table)

    def reset_prefix_cache(self) -> bool:
        """Forget all that is kept for later hits; False, and nothing happens, while a request has blocks."""
        if self._block_tables:
            return False
        self._tree.clear()
        return True

    def block_table(self, request_id: str) -> tuple[int, ...]:
        """The blocks of a request in the order of its positions; () when it has none. A copy."""
        return tuple(self._block_tables.get(request_id, ()))

    def nodes(self) -> Iterator[Node]:
        """The nodes of the radix tree, parents first; for pictures and counts."""
        return self._tree.nodes()

    def check_invariants(self) -> None:
        """Assert that the pool and the tree are sound and that references = owners, counted anew. O(n)."""
        self._pool.check_invariants()
        owners = [0] * self._pool.num_blocks
        pins = [0] * self._pool.num_blocks
        for request_id, block_table in self._block_tables.items():
            assert block_table, f"{request_id!r} has an empty block table"
            assert len(set(block_table)) == len(block_table), f"{request_id!r} has a block twice: {block_table}"
            for block_id in block_table:
                owners[block_id] += 1
                pins[block_id] += 1
        for source, _ in self._block_copies:
            owners[source] += 1
            pins[source] += 1
        for node in self._tree.nodes():
            for block_id in node.block_ids:
                owners[block_id] += 1
                pins[block_id] += node.lock_ref > 0
        block_ids = range(self._pool.num_blocks)
        counts = [self._pool.logical_ref_count(block_id) for block_id in block_ids]
        assert owners == counts, f"owners {owners} and reference counts {counts} differ"
        counts = [self._pool.pin_count(block_id) for block_id in block_ids]
        assert pins == counts, f"owners that hold on {pins} and pin counts {counts} differ"
        self._tree.check_invariants([place.node for place in self._places.values() if place.node is not None])

    # --------------------------------------------------------------------------------------------------- private
    def _match(self, request: Request) -> Match:
        if not self.enable_prefix_caching or request.num_skippable_tokens == 0:
            return _NO_MATCH
        return self._tree.match(request.cache_salt, _packed(request, 0, request.num_skippable_tokens))

    def _usable_tokens(self, match: Match) -> int:
        """Whole blocks whenever they come; of a partial one what is there when the step's copies are made."""
        return max(match.num_tokens - match.num_tokens % self.block_size, match.num_ready_tokens)

    def _try_admit(
        self, request: Request, match: Match, num_cached: int, headroom: int, *, steps_aside: bool = False
    ) -> bool:
        """Take the blocks; False when there are too few."""
        cached_ids = self._tree.block_ids(match, num_cached)
        shared = cached_ids[: num_cached // self.block_size]
        num_new = -(-request.num_tokens // self.block_size) - len(shared)
        if num_new + headroom > self._pool.num_available_blocks:  # as in most steps in which the front of a queue waits
            return False
        place = None
        if self.enable_prefix_caching:
            place = _Place(self._tree.lock(request.cache_salt, match, num_cached), num_cached)
        self._pool.acquire(shared)
        if steps_aside and place is not None and place.node is not None:
            self._tree.unlock(place.node)
            place.node = None
        # What is shared was to be had until now: count again.
        if num_new + headroom > self._pool.num_available_blocks:
            self._pool.release(shared)
            if place is not None and place.node is not None:
                self._tree.unlock(place.node)
            return False
        if num_cached % self.block_size:
            self._pool.acquire(cached_ids[-1:])
        new_ids = self._take(num_new)
        if num_cached % self.block_size:
            self._block_copies.append((cached_ids[-1], new_ids[0]))
        self._block_tables[request.request_id] = shared + new_ids
        if place is not None:
            self._places[request.request_id] = place
        return True

    def _take(self, num_blocks: int) -> list[int]:
        """Free blocks first; then those of the sequences that were used last the longest time ago."""
        if self._pool.num_free_blocks < num_blocks:
            self._tree.evict(num_blocks)
        block_ids = self._pool.allocate(num_blocks)
        assert block_ids is not None
        return block_ids

    def _step_aside(self, request_id: str) -> bool:
        """Give up a request's place, with the cached blocks that it stands on and doesn't use; it keeps its table."""
        place = self._places.get(request_id)
        if place is None or place.node is None:
            return False
        self._tree.unlock(place.node)
        place.node = None
        return True


def _packed(request: Request, start: int, end: int) -> bytes:
    """Ids of positions [start, end); the prompt is packed once, while a request may be asked about many times."""
    if end <= request.num_prompt_tokens:
        return request.packed_prompt[start * ID_BYTES : end * ID_BYTES]
    return pack_token_ids(request.token_ids(start, end))
