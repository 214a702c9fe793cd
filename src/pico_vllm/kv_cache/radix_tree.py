"""RadixTree: which token sequences have their KV in the cache, and in which blocks. docs/radix-cache.md draws it.

A compressed tree, per token: an edge holds any number of token ids, a node is named by the path that leads to it. A
node owns (a logical reference each) every block that its tokens touch, so a node that starts in the middle of a block
has that block in common with its parent. Position p of a path lies at offset ``p % block_size`` of the block that the
*deepest* node of the path names for the index ``p // block_size``.

A running request stands on a node: ``lock_ref`` counts the requests on a node or below it, and what is locked isn't
evicted. Every other node is evictable, leaves first, least recently used first.

Ids are compared as packed 32-bit integers with ``bytes.startswith``, a memcmp. Every operation costs O(length of the
path); nothing scans the tree. It knows no requests; KVCacheManager calls it.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from pico_vllm.kv_cache.block_pool import BlockPool

ID_BYTES = 4


def pack_token_ids(token_ids: Iterable[int]) -> bytes:
    """Token ids as the tree compares them."""
    return array("i", token_ids).tobytes()


class Node:
    """One edge and the node at its end: positions [start, end) of the path.

    Attributes:
        token_ids: packed ids of the edge.
        start: position of its first token.
        block_ids: blocks of the indices ``start // block_size`` … ``(end - 1) // block_size``.
        parent: None = a root.
        children: by their first packed id.
        lock_ref: running requests on this node or below.
        last_use: clock of the last time it became unlocked.
        heap_number: of its valid entry in the heap of evictable leaves; 0 = none.
        new_step, new_start: positions from ``new_start`` on were inserted in step ``new_step`` (as the tree counts).
        salt: of a root.
    """

    __slots__ = (
        "block_ids",
        "children",
        "heap_number",
        "last_use",
        "lock_ref",
        "new_start",
        "new_step",
        "parent",
        "salt",
        "start",
        "token_ids",
    )

    def __init__(self, parent: Node | None, start: int, token_ids: bytearray, block_ids: list[int]) -> None:
        self.parent = parent
        self.start = start
        self.token_ids = token_ids
        self.block_ids = block_ids
        self.children: dict[bytes, Node] = {}
        self.lock_ref = self.last_use = self.heap_number = 0
        self.new_step = self.new_start = -1
        self.salt: str | None = None

    @property
    def end(self) -> int:
        """Position after its last token."""
        return self.start + len(self.token_ids) // ID_BYTES


@dataclass(frozen=True, slots=True)
class Match:
    """The longest known prefix of a sequence; valid until the tree changes.

    Attributes:
        path: nodes from the root (left out) down; the last one may be matched in part.
        num_tokens: matched.
        num_ready_tokens: of these, those that were inserted before the present step: their KV is there when the step
            begins, while that of the others comes in the course of it.
    """

    path: tuple[Node, ...]
    num_tokens: int
    num_ready_tokens: int


class RadixTree:
    """Prefixes of the cached sequences, a root for each salt.

    Args:
        pool: whose blocks the nodes own.
        block_size: tokens a block.
    """

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size
        self._roots: dict[str | None, Node] = {}
        self._heap: list[tuple[int, int, Node]] = []  # last use, heap_number, node; stale where that isn't the node's
        self._clock = self._heap_numbers = 0
        self._step = 0
        #: Nodes, roots left out.
        self.num_nodes = 0
        #: Sums since the start: blocks that evictions made free; nodes and tokens that ``match`` and ``insert`` looked
        #: at. Tests hold the cost of an operation to them.
        self.num_evicted_blocks = 0
        self.num_visited_nodes = 0
        self.num_compared_tokens = 0

    def begin_step(self) -> None:
        """What has been inserted so far is in the cache when the step that is planned from now on begins."""
        self._step += 1

    def match(self, salt: str | None, token_ids: bytes) -> Match:
        """Find the longest known prefix of packed ids. Changes nothing."""
        root = self._roots.get(salt)
        path, position = ([], 0) if root is None else self._walk(root, token_ids)
        num_tokens = num_ready = position // ID_BYTES
        for node in path:  # what is new on a path is its end
            if node.new_step == self._step:
                num_ready = min(num_ready, max(node.start, node.new_start))
                break
        return Match(tuple(path), num_tokens, num_ready)

    def block_ids(self, match: Match, num_tokens: int) -> list[int]:
        """The blocks of the first ``num_tokens`` matched positions; the last one may be filled in part."""
        block_ids: list[int] = []
        for node in match.path:
            if node.start >= num_tokens:
                break
            del block_ids[node.start // self._block_size :]
            block_ids += node.block_ids
        del block_ids[-(-num_tokens // self._block_size) :]
        return block_ids

    def lock(self, salt: str | None, match: Match, num_tokens: int) -> Node:
        """Stand on the node that ends after ``num_tokens`` matched positions: a node may be split for it."""
        node = self._root(salt)
        for deeper in match.path:
            if deeper.start >= num_tokens:
                break
            node = deeper
        if node.end > num_tokens:
            node = self._split(node, num_tokens)
        self._lock_path(node)
        return node

    def unlock(self, node: Node) -> None:
        """Leave a node."""
        above: Node | None = node
        while above is not None:
            above.lock_ref -= 1
            assert above.lock_ref >= 0, "a node is left more often than it was entered"
            if above.lock_ref == 0:
                self._pool.unpin(above.block_ids)
                self._clock += 1
                above.last_use = self._clock
                self._push_if_evictable(above)
            parent = above.parent
            if parent is None:
                self._drop_root_if_empty(above)
            above = parent

    def insert(self, node: Node, token_ids: bytes, block_table: Sequence[int]) -> Node:
        """Add what a request that stands on ``node`` has after it, and go on to the node where that ends.

        Tokens that the tree has already, in whatever blocks, are walked over (a node may be split) if new ones follow
        them. New ones lengthen the node if nobody else is there and their block is the request's own, else they become
        a child.

        Args:
            node: where the request stands, locked by it.
            token_ids: packed ids of the positions from ``node.end`` on.
            block_table: the request's blocks, from position 0 on.

        Returns:
            Where it stands now. That is ``node`` if there was nothing new: the request has its own blocks for what lies
            beyond, so it has no need to hold those.
        """
        known, position = self._walk(node, token_ids)
        if position == len(token_ids):
            return node
        start = node.end + position // ID_BYTES
        for child in known:
            node = child if child.end <= start else self._split(child, start)
            self._lock_node(node)
        end = start + (len(token_ids) - position) // ID_BYTES
        block_ids = list(block_table[start // self._block_size : -(-end // self._block_size)])
        if self._may_grow(node, block_ids[0]):
            if start % self._block_size:  # that block is the node's already
                del block_ids[0]
        else:
            parent, node = node, Node(node, start, bytearray(), [])
            parent.children[token_ids[position : position + ID_BYTES]] = node
            node.lock_ref = 1
            self.num_nodes += 1
        self._pool.acquire(block_ids)
        node.token_ids += token_ids[position:]
        node.block_ids += block_ids
        if node.new_step != self._step:
            node.new_step, node.new_start = self._step, start
        return node

    def drop_duplicates(self, node: Node) -> None:
        """Where a parent alone keeps a block that its child on this path has a copy of, let it name the child's.

        (A request that went on from a partial block has copied it. What it leaves behind is one block, not two.)
        """
        while (parent := node.parent) is not None and parent.parent is not None:
            if node.start % self._block_size:
                shared, own = node.block_ids[0], parent.block_ids[-1]
                if own != shared and self._pool.logical_ref_count(own) == 1:
                    self._pool.acquire((shared,))
                    self._pool.release((own,))
                    parent.block_ids[-1] = shared
            node = parent

    def evict(self, num_free_blocks: int) -> None:
        """Cut the least recently used leaves back until the pool has so many free blocks.

        The caller has made sure that there are so many: free, or owned by evictable nodes only.
        """
        self.num_evicted_blocks += num_free_blocks - self._pool.num_free_blocks
        while self._pool.num_free_blocks < num_free_blocks:
            _, number, node = heapq.heappop(self._heap)
            if node.heap_number != number:
                continue
            node.heap_number = 0
            while node.block_ids and self._pool.num_free_blocks < num_free_blocks:
                self._pool.evict(node.block_ids.pop())
            if node.block_ids:
                end = (node.start // self._block_size + len(node.block_ids)) * self._block_size
                del node.token_ids[(end - node.start) * ID_BYTES :]
                self._push_if_evictable(node)
            else:
                self._remove(node)

    def clear(self) -> None:
        """Forget everything; nobody may stand anywhere."""
        for node in list(self.nodes()):
            assert node.lock_ref == 0, "a request stands on a node"
            for block_id in node.block_ids:
                self._pool.evict(block_id)
        self._roots.clear()
        self._heap.clear()
        self.num_nodes = 0

    def nodes(self) -> Iterator[Node]:
        """All nodes but the roots, parents first; for tests, pictures and ``clear``."""
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            stack += reversed(node.children.values())
            if node.parent is not None:
                yield node

    def check_invariants(self, standing: Iterable[Node]) -> None:
        """Assert that locks = requests counted anew, that what is evictable is in the heap, and the shape. O(n).

        Args:
            standing: the node of each request that stands on one.
        """
        locks: dict[Node, int] = {}
        for node in standing:
            above: Node | None = node
            while above is not None:
                locks[above] = locks.get(above, 0) + 1
                above = above.parent
        entries = {(number, node) for _, number, node in self._heap}
        assert len(self._heap) <= 2 * self.num_nodes + 64, f"{len(self._heap)} entries for {self.num_nodes} nodes"
        num_nodes = 0
        for node in self.nodes():
            num_nodes += 1
            parent, size = node.parent, self._block_size
            assert parent is not None and parent.end == node.start < node.end
            assert parent.children[bytes(node.token_ids[:ID_BYTES])] is node
            assert len(node.block_ids) == -(-node.end // size) - node.start // size, (node.start, node.end)
            assert node.lock_ref == locks.pop(node, 0), f"lock_ref {node.lock_ref} of [{node.start}, {node.end})"
            is_evictable = not node.children and not node.lock_ref
            assert ((node.heap_number, node) in entries) == is_evictable == (node.heap_number > 0)
        assert num_nodes == self.num_nodes, (num_nodes, self.num_nodes)
        for salt, root in self._roots.items():
            assert root.salt == salt and (root.children or root.lock_ref), "an empty root stays"
            assert root.lock_ref == locks.pop(root, 0)
        assert not locks, "a request stands on a node that isn't in the tree"

    # --------------------------------------------------------------------------------------------------- private
    def _walk(self, node: Node, token_ids: bytes) -> tuple[list[Node], int]:
        """The nodes below ``node`` that packed ids lead over, the last one maybe in part, and how many bytes match."""
        path: list[Node] = []
        position = 0
        while position < len(token_ids):
            child = node.children.get(token_ids[position : position + ID_BYTES])
            if child is None:
                break
            path.append(child)
            num_common = self._common_bytes(child.token_ids, token_ids, position)
            position += num_common
            if num_common < len(child.token_ids):
                break
            node = child
        return path, position

    def _common_bytes(self, edge: bytearray, token_ids: bytes, position: int) -> int:
        """Bytes of whole ids that ``edge`` and ``token_ids[position:]`` begin with alike."""
        self.num_visited_nodes += 1
        if token_ids.startswith(edge, position):
            self.num_compared_tokens += len(edge) // ID_BYTES
            return len(edge)
        low, high = 0, min(len(edge), len(token_ids) - position) // ID_BYTES  # [0, low) is alike, the end isn't known
        while low < high:
            middle = (low + high + 1) // 2
            part = edge[low * ID_BYTES : middle * ID_BYTES]
            self.num_compared_tokens += middle - low
            if token_ids.startswith(part, position + low * ID_BYTES):
                low = middle
            else:
                high = middle - 1
        return low * ID_BYTES

    def _root(self, salt: str | None) -> Node:
        root = self._roots.get(salt)
        if root is None:
            root = self._roots[salt] = Node(None, 0, bytearray(), [])
            root.salt = salt
        return root

    def _lock_path(self, node: Node) -> None:
        above: Node | None = node
        while above is not None:
            self._lock_node(above)
            above = above.parent

    def _lock_node(self, node: Node) -> None:
        if node.lock_ref == 0:
            self._pool.pin(node.block_ids)
            node.heap_number = 0
        node.lock_ref += 1

    def _split(self, node: Node, position: int) -> Node:
        """Cut a node in two and return the upper one; both own the block that ``position`` lies in the middle of."""
        parent = node.parent
        assert parent is not None and node.start < position < node.end, (node.start, position, node.end)
        cut = (position - node.start) * ID_BYTES
        first = node.start // self._block_size
        upper = Node(
            parent, node.start, node.token_ids[:cut], node.block_ids[: -(-position // self._block_size) - first]
        )
        upper.lock_ref, upper.last_use = node.lock_ref, node.last_use
        upper.new_step, upper.new_start = node.new_step, node.new_start
        parent.children[bytes(upper.token_ids[:ID_BYTES])] = upper
        upper.children[bytes(node.token_ids[cut : cut + ID_BYTES])] = node
        node.parent, node.start = upper, position
        del node.token_ids[:cut]
        del node.block_ids[: position // self._block_size - first]
        if position % self._block_size:
            self._pool.acquire(node.block_ids[:1], evictable=node.lock_ref == 0)
        self.num_nodes += 1
        return upper

    def _may_grow(self, node: Node, block_id: int) -> bool:
        """Whether its one request may lengthen a node, whose next token goes into this block."""
        if node.parent is None or node.children or node.lock_ref > 1:
            return False
        return node.end % self._block_size == 0 or node.block_ids[-1] == block_id

    def _push_if_evictable(self, node: Node) -> None:
        if node.parent is None or node.children or node.lock_ref:
            return
        self._heap_numbers += 1
        node.heap_number = self._heap_numbers
        heapq.heappush(self._heap, (node.last_use, node.heap_number, node))
        self._rebuild_heap_if_stale()

    def _rebuild_heap_if_stale(self) -> None:
        """Drop stale entries when they are more than half; so each costs O(log n) once, whenever it goes."""
        if len(self._heap) > 2 * self.num_nodes + 64:
            self._heap = [entry for entry in self._heap if entry[2].heap_number == entry[1]]
            heapq.heapify(self._heap)

    def _remove(self, node: Node) -> None:
        """Take a leaf without blocks out of the tree."""
        parent = node.parent
        assert parent is not None
        del parent.children[bytes(node.token_ids[:ID_BYTES])]
        node.parent = None
        self.num_nodes -= 1
        self._rebuild_heap_if_stale()
        if parent.parent is None:
            self._drop_root_if_empty(parent)
        else:
            self._push_if_evictable(parent)

    def _drop_root_if_empty(self, root: Node) -> None:
        if not root.children and root.lock_ref == 0:
            del self._roots[root.salt]
