from __future__ import annotations

import random

import pytest

from pico_vllm.kv_cache import BlockPool, RadixTree
from pico_vllm.kv_cache.radix_tree import ID_BYTES, pack_token_ids

BLOCK_SIZE = 4


class Trees:
    """A tree on a pool, with requests that own a whole block table each."""

    def __init__(self, num_blocks=64, block_size=BLOCK_SIZE):
        self.pool = BlockPool(num_blocks)
        self.tree = RadixTree(self.pool, block_size)
        self.block_size = block_size
        self.standing = []

    def insert(self, token_ids, salt=None):
        """A request that computes everything itself: (node, its block table)."""
        table = self.pool.allocate(-(-len(token_ids) // self.block_size))
        root = self.tree.lock(salt, self.match([]), 0)
        node = self.tree.insert(root, pack_token_ids(token_ids), table)
        self.standing.append(node)
        self.check()
        return node, table

    def leave(self, node, table):
        self.standing.remove(node)
        self.tree.unlock(node)
        self.pool.release(table)
        self.check()

    def keep(self, token_ids, salt=None):
        self.leave(*self.insert(token_ids, salt))
        self.tree.begin_step()

    def match(self, token_ids, salt=None):
        return self.tree.match(salt, pack_token_ids(token_ids))

    def blocks(self, token_ids):
        match = self.match(token_ids)
        return self.tree.block_ids(match, match.num_tokens)

    def shape(self):
        """(start, end, blocks) of each node, parents first."""
        return [(node.start, node.end, node.block_ids) for node in self.tree.nodes()]

    def check(self):
        self.pool.check_invariants()
        self.tree.check_invariants(self.standing)


def test_an_empty_tree_matches_nothing():
    t = Trees()
    assert (t.match([1, 2]).num_tokens, t.match([]).num_tokens) == (0, 0)


@pytest.mark.parametrize("num_common", [0, 1, 3, 4, 5, 8, 9])
def test_a_match_is_exact_to_the_token(num_common):
    t = Trees()
    t.keep(list(range(9)))
    known = list(range(9))[:num_common]
    assert t.match([*known, 100, 101]).num_tokens == num_common
    assert t.match(known).num_tokens == num_common


def test_ids_are_compared_whole_not_byte_by_byte():
    """0x0102 and 0x0302 begin with the same byte."""
    t = Trees()
    t.keep([7, 0x0102, 5])
    assert t.match([7, 0x0302, 5]).num_tokens == 1
    assert t.match([0x0107]).num_tokens == 0


def test_a_split_in_mid_block_makes_two_owners_of_the_block():
    t = Trees()
    t.keep([0, 1, 2, 3, 4, 5, 6, 7, 8])
    _, table = t.insert([0, 1, 2, 3, 4, 5, 90])
    assert t.shape() == [(0, 6, [0, 1]), (6, 9, [1, 2]), (6, 7, [4])]
    assert [t.pool.logical_ref_count(block) for block in (0, 1, 2)] == [1, 2, 1]
    assert table == [3, 4]
    assert t.blocks([0, 1, 2, 3, 4, 5, 90]) == [0, 4], "the deepest node names the block"
    assert t.blocks([0, 1, 2, 3, 4, 5, 6, 7]) == [0, 1]
    assert t.blocks([0, 1, 2, 3, 4, 5]) == [0, 1]


def test_a_split_at_a_block_boundary_shares_nothing():
    t = Trees()
    t.keep([0, 1, 2, 3, 4, 5])
    t.keep([0, 1, 2, 3, 90])
    assert t.shape() == [(0, 4, [0]), (4, 6, [1]), (4, 5, [3])]
    assert [t.pool.logical_ref_count(block) for block in (0, 1, 3)] == [1, 1, 1]


def test_one_request_alone_lengthens_its_node():
    t = Trees()
    node, table = t.insert([0, 1, 2, 3, 4])
    table += t.pool.allocate(1)
    same = t.tree.insert(node, pack_token_ids([5, 6, 7, 8]), table)
    assert same is node
    assert t.shape() == [(0, 9, [0, 1, 2])]


def test_a_node_that_others_stand_on_gets_a_child():
    t = Trees()
    node, table = t.insert([0, 1, 2, 3, 4])
    other = t.tree.lock(None, t.match([0, 1, 2, 3, 4]), 5)
    assert other is node
    t.standing.append(other)
    t.standing[0] = t.tree.insert(node, pack_token_ids([5, 6]), table)
    t.check()
    assert t.shape() == [(0, 5, [0, 1]), (5, 7, [1])]
    assert [n.lock_ref for n in t.tree.nodes()] == [2, 1]


def test_what_is_there_already_moves_nobody():
    t = Trees()
    t.keep([0, 1, 2, 3, 4, 5])
    node, table = t.insert([0, 1, 2])
    assert node.parent is None
    assert t.shape() == [(0, 6, [0, 1])]
    t.leave(node, table)


def test_a_locked_node_is_not_evicted_and_its_parents_neither():
    t = Trees(num_blocks=4)
    t.keep([0, 1, 2, 3, 4])
    node = t.tree.lock(None, t.match([0, 1, 2, 3, 4]), 5)
    t.standing.append(node)
    t.check()
    assert (t.pool.num_available_blocks, t.pool.num_cached_blocks) == (2, 0)
    with pytest.raises(IndexError):
        t.tree.evict(3)
    assert t.shape() == [(0, 5, [0, 1])]


def test_the_least_recently_used_leaf_goes_first_from_its_end():
    t = Trees(num_blocks=6)
    t.keep([1, 1, 1, 1, 1])
    t.keep([2, 2, 2, 2, 2])
    t.keep([3, 3, 3, 3, 3])
    node = t.tree.lock(None, t.match([1] * 5), 5)  # used again
    t.tree.unlock(node)
    t.tree.evict(1)
    t.check()
    assert [t.match([token] * 5).num_tokens for token in (1, 2, 3)] == [5, 4, 5]
    t.tree.evict(2)
    assert [t.match([token] * 5).num_tokens for token in (1, 2, 3)] == [5, 0, 5]
    t.tree.evict(3)
    assert [t.match([token] * 5).num_tokens for token in (1, 2, 3)] == [5, 0, 4]
    assert t.tree.num_evicted_blocks == 3
    t.check()


def test_a_split_in_mid_block_whose_lower_and_then_upper_part_is_evicted_frees_the_block_once():
    t = Trees(num_blocks=5)
    t.keep([0, 1, 2, 3, 4, 5, 6])  # blocks 0, 1
    t.keep([0, 1, 2, 3, 4, 5, 90, 91, 92])  # 2, 3, 4: splits at 6, in the middle of block 1
    assert t.shape() == [(0, 6, [0, 1]), (6, 7, [1]), (6, 9, [3, 4])]
    assert (t.pool.num_free_blocks, t.pool.num_cached_blocks) == (1, 4)
    t.tree.evict(2)  # the older leaf goes with its reference to block 1 and frees nothing; block 4 is freed
    t.check()
    assert t.shape() == [(0, 6, [0, 1]), (6, 8, [3])]
    assert t.pool.logical_ref_count(1) == 1
    t.tree.evict(3)
    assert t.shape() == [(0, 6, [0, 1])]
    t.tree.evict(4)  # now the upper part
    assert t.shape() == [(0, 4, [0])]
    t.tree.evict(5)
    t.check()
    assert (t.shape(), t.pool.num_free_blocks, t.tree._roots) == ([], 5, {})


def test_the_upper_part_of_a_split_outlives_the_request_that_owned_the_block():
    t = Trees()
    node, table = t.insert([0, 1, 2, 3, 4, 5, 6])
    upper = t.tree.lock(None, t.match([0, 1, 2, 3, 4]), 5)
    t.standing.append(upper)
    t.leave(node, table)
    assert [(n.end, n.lock_ref) for n in t.tree.nodes()] == [(5, 1), (7, 0)]
    assert (t.pool.num_cached_blocks, t.pool.num_free_blocks) == (0, 62), "block 1 is the upper part's too"


def test_a_parents_own_copy_of_a_block_gives_way_to_its_childs():
    t = Trees()
    t.keep([0, 1, 2, 3, 4])  # 0, 1
    node = t.tree.lock(None, t.match([0, 1, 2, 3, 4]), 5)
    copy = t.pool.allocate(1)  # of block 1, and goes on in it
    t.pool.acquire([0])
    node = t.tree.insert(node, pack_token_ids([5, 6]), [0, *copy])
    t.standing.append(node)
    assert t.shape() == [(0, 5, [0, 1]), (5, 7, [2])]
    t.tree.drop_duplicates(node)
    assert t.shape() == [(0, 5, [0, 2]), (5, 7, [2])]
    assert t.pool.logical_ref_count(1) == 0
    t.leave(node, [0, 2])


def test_a_parents_block_that_another_child_has_too_stays():
    t = Trees()
    t.keep([0, 1, 2, 3, 4, 60])
    node = t.tree.lock(None, t.match([0, 1, 2, 3, 4]), 5)
    copy = t.pool.allocate(1)
    node = t.tree.insert(node, pack_token_ids([5]), [0, *copy])
    t.standing.append(node)
    t.tree.drop_duplicates(node)
    assert t.shape()[0] == (0, 5, [0, 1])


def test_salts_have_trees_of_their_own_and_empty_ones_go():
    t = Trees()
    t.keep([1, 2, 3], salt="x")
    assert t.match([1, 2, 3]).num_tokens == 0
    assert t.match([1, 2, 3], salt="y").num_tokens == 0
    assert t.match([1, 2, 3], salt="x").num_tokens == 3
    t.tree.evict(64)
    assert t.tree._roots == {}


def test_what_was_inserted_in_this_step_is_not_ready():
    t = Trees()
    node, table = t.insert([0, 1, 2, 3, 4, 5])
    assert (t.match([0, 1, 2, 3, 4, 9]).num_tokens, t.match([0, 1, 2, 3, 4, 9]).num_ready_tokens) == (5, 0)
    t.tree.begin_step()
    assert t.match([0, 1, 2, 3, 4, 9]).num_ready_tokens == 5
    table += t.pool.allocate(1)
    t.standing[0] = t.tree.insert(node, pack_token_ids([6, 7, 8]), table)
    match = t.match(list(range(9)))
    assert (match.num_tokens, match.num_ready_tokens) == (9, 6)


def test_clear_gives_every_block_back():
    t = Trees()
    t.keep([0, 1, 2, 3, 4, 5])
    t.keep([0, 1, 9], salt="x")
    t.tree.clear()
    t.check()
    assert (t.shape(), t.pool.num_free_blocks) == ([], 64)


def test_check_invariants_notices_a_gap_in_a_path():
    t = Trees()
    t.keep([0, 1, 2, 3, 4, 5])
    t.keep([0, 1, 2, 3, 4, 9])
    (_, lower, _) = t.tree.nodes()
    lower.start += 1  # still in its block
    with pytest.raises(AssertionError):
        t.check()


def test_check_invariants_notices_a_root_that_stays_empty():
    t = Trees()
    t.tree._root("x")
    with pytest.raises(AssertionError):
        t.check()


def test_the_heap_stays_small_under_a_hot_node():
    t = Trees(num_blocks=8)
    t.keep([1, 2, 3])
    for _ in range(1000):
        t.tree.unlock(t.tree.lock(None, t.match([1, 2, 3]), 3))
    assert len(t.tree._heap) <= 2 * t.tree.num_nodes + 64
    t.check()


def test_the_heap_shrinks_with_the_tree():
    t = Trees(num_blocks=400)
    for token in range(400):
        t.keep([token])
    hot = range(300, 400)
    for token in [*hot] * 4:
        t.tree.unlock(t.tree.lock(None, t.match([token]), 1))
    t.standing += [t.tree.lock(None, t.match([token]), 1) for token in hot]
    assert len(t.tree._heap) == 800  # and 500 of these are stale, most of them behind the valid ones
    t.tree.evict(300)
    t.check()
    assert t.tree.num_nodes == 100


@pytest.mark.parametrize("num_sequences", [1, 1_000, 30_000])
def test_a_match_looks_at_its_own_path_whatever_else_there_is(num_sequences):
    """2,000 tokens over 8 nodes: 8 nodes and 2,000 tokens, and some more where one is matched in part."""
    t = Trees(num_blocks=num_sequences + 4100, block_size=1)
    rng = random.Random(0)
    trunk = [rng.randrange(2**31) for _ in range(2000)]

    def keep(token_ids):
        root, table = t.tree.lock(None, t.match([]), 0), t.pool.allocate(len(token_ids))
        t.tree.unlock(t.tree.insert(root, pack_token_ids(token_ids), table))
        t.pool.release(table)

    keep(trunk)
    for end in range(250, 2000, 250):
        keep([*trunk[:end], 5])
    for number in range(num_sequences):
        keep([-1 - number])
    before = t.tree.num_visited_nodes, t.tree.num_compared_tokens
    assert t.match([*trunk, 5]).num_tokens == 2000
    assert len(t.match(trunk).path) == 8
    visited = (t.tree.num_visited_nodes - before[0], t.tree.num_compared_tokens - before[1])
    assert visited == (16, 4000)
    before = t.tree.num_compared_tokens
    assert t.match([*trunk[:1900], 5]).num_tokens == 1900
    assert t.tree.num_compared_tokens - before == 1901  # each once, by halves at the end


def test_an_edge_is_compared_where_it_stands_and_not_at_the_front():
    t = Trees()
    t.keep([1, 2, 3, 1, 2])
    t.keep([1, 2, 3, 7])  # the second edge is [1, 2] now, which the sequence below begins with
    assert t.match([1, 2, 3, 1, 5]).num_tokens == 4


def test_a_long_answer_is_not_copied_again_and_again():
    """Appending to a node touches what is new, and compares nothing."""
    t = Trees(num_blocks=2100, block_size=1)
    node, table = t.insert([0])
    for token in range(1, 2000):
        table += t.pool.allocate(1)
        assert t.tree.insert(node, pack_token_ids([token]), table) is node
    assert (t.tree.num_visited_nodes, t.tree.num_compared_tokens, t.tree.num_nodes) == (0, 0, 1)
    assert len(node.token_ids) == 2000 * ID_BYTES
