from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pico_vllm.kv_cache import BlockPool


def test_fresh_pool_hands_out_the_lowest_ids_in_order():
    pool = BlockPool(5)
    assert pool.allocate(2) == [0, 1]
    assert pool.allocate(1) == [2]
    assert pool.allocate(2) == [3, 4]
    pool.check_invariants()


def test_blocks_released_together_come_back_in_the_order_they_were_listed():
    pool = BlockPool(8)
    pool.allocate(6)
    pool.release([5, 3])
    assert pool.allocate(3) == [5, 3, 6]


def test_block_released_last_is_handed_out_first():
    pool = BlockPool(4)
    pool.allocate(3)
    pool.release([0])
    pool.release([2])
    assert pool.allocate(1) == [2]
    assert pool.allocate(1) == [0]
    assert pool.allocate(1) == [3]


def test_allocation_is_all_or_nothing():
    pool = BlockPool(3)
    pool.allocate(1)
    assert pool.allocate(3) is None
    assert pool.num_free_blocks == 2
    assert [pool.logical_ref_count(i) for i in range(3)] == [1, 0, 0]
    assert pool.allocate(2) == [1, 2]
    assert pool.allocate(1) is None
    assert pool.allocate(0) == []


def test_block_is_free_only_when_its_last_owner_has_released_it():
    pool = BlockPool(3)
    pool.allocate(2)
    pool.acquire([0])
    assert pool.logical_ref_count(0) == 2
    pool.release([0, 1])
    assert pool.logical_ref_count(0) == 1
    assert pool.num_free_blocks == 2
    pool.release([0])
    assert pool.logical_ref_count(0) == 0
    assert pool.num_free_blocks == pool.num_blocks == 3
    pool.check_invariants()


def test_releasing_a_free_block_is_our_own_fault():
    pool = BlockPool(2)
    with pytest.raises(AssertionError, match="block 1 is free already"):
        pool.release([1])


def test_acquiring_a_free_block_is_our_own_fault():
    pool = BlockPool(2)
    with pytest.raises(AssertionError, match="block 0 is free"):
        pool.acquire([0])


def test_what_only_an_evictable_owner_may_lose_is_not_taken_from_others():
    pool = BlockPool(1)
    pool.allocate(1)
    with pytest.raises(AssertionError, match="block 0 has no evictable owner"):
        pool.evict(0)
    pool.unpin([0])
    with pytest.raises(AssertionError, match="no owner of block 0 is left"):
        pool.unpin([0])


def test_empty_pool_has_nothing_to_give():
    pool = BlockPool(0)
    assert pool.allocate(1) is None
    assert pool.num_blocks == pool.num_free_blocks == 0
    pool.check_invariants()


@pytest.mark.parametrize(
    ("ref_counts", "free_ids"),
    [
        ([0, 1], [0, 0]),  # free twice
        ([0, 1], []),  # lost
        ([0, 1], [0, 1]),  # free and held
        ([-1, 1], []),
    ],
)
def test_check_invariants_notices_a_broken_free_list(ref_counts, free_ids):
    pool = BlockPool(2)
    pool._ref_counts, pool._free_ids = ref_counts, free_ids
    with pytest.raises(AssertionError):
        pool.check_invariants()


class BlockPoolMachine(RuleBasedStateMachine):
    """A pool beside a plain dict of owners."""

    num_blocks = 7

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(self.num_blocks)
        self.owners = {}

    @rule(count=st.integers(0, 8))
    def allocate(self, count):
        block_ids = self.pool.allocate(count)
        if count > self.num_blocks - len(self.owners):
            assert block_ids is None
            return
        assert block_ids is not None and len(block_ids) == count
        for block_id in block_ids:
            assert block_id not in self.owners
            self.owners[block_id] = 1

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def acquire(self, data):
        block_ids = data.draw(st.lists(st.sampled_from(sorted(self.owners)), unique=True))
        self.pool.acquire(block_ids)
        for block_id in block_ids:
            self.owners[block_id] += 1

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def release(self, data):
        block_ids = data.draw(st.lists(st.sampled_from(sorted(self.owners)), unique=True))
        self.pool.release(block_ids)
        for block_id in block_ids:
            self.owners[block_id] -= 1
            if self.owners[block_id] == 0:
                del self.owners[block_id]

    @invariant()
    def every_count_is_the_number_of_owners(self):
        self.pool.check_invariants()
        assert self.pool.num_free_blocks == self.num_blocks - len(self.owners)
        assert [self.pool.logical_ref_count(i) for i in range(self.num_blocks)] == [
            self.owners.get(i, 0) for i in range(self.num_blocks)
        ]


TestBlockPoolMachine = BlockPoolMachine.TestCase
