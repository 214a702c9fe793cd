from __future__ import annotations

import pytest

from pico_vllm.errors import ConfigError
from pico_vllm.kv_cache import KVCacheManager, kv_cache_manager
from pico_vllm.request import Request
from pico_vllm.sampling_params import SamplingParams


def make_request(request_id):
    return Request(request_id, [1, 2, 3], SamplingParams())


def test_table_grows_by_a_block_only_when_a_boundary_is_crossed():
    manager = KVCacheManager(num_blocks=8, block_size=4)
    appended = [manager.allocate_slots("a", num_tokens) for num_tokens in range(1, 10)]
    assert appended == [(0,), (), (), (), (1,), (), (), (), (2,)]
    assert manager.block_table("a") == (0, 1, 2)
    assert manager.num_free_blocks == 5


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(1, 1), (15, 1), (16, 1), (17, 2), (63, 4), (100, 7)])
def test_tokens_round_up_to_whole_blocks(num_tokens, num_blocks):
    manager = KVCacheManager(num_blocks=8, block_size=16)
    assert manager.allocate_slots("a", num_tokens) == tuple(range(num_blocks))


def test_two_requests_never_share_a_block():
    manager = KVCacheManager(num_blocks=4, block_size=4)
    assert manager.allocate_slots("a", 5) == (0, 1)
    assert manager.allocate_slots("b", 4) == (2,)
    assert manager.allocate_slots("a", 9) == (3,)
    assert manager.block_table("a") == (0, 1, 3)
    assert manager.block_table("b") == (2,)
    manager.check_invariants()


def test_too_few_free_blocks_change_nothing():
    manager = KVCacheManager(num_blocks=3, block_size=4)
    manager.allocate_slots("a", 8)
    assert manager.allocate_slots("a", 17) is None
    assert manager.allocate_slots("b", 5) is None
    assert manager.block_table("a") == (0, 1)
    assert manager.block_table("b") == ()
    assert manager.num_free_blocks == 1
    manager.check_invariants()


def test_headroom_stays_free():
    manager = KVCacheManager(num_blocks=4, block_size=4)
    assert manager.allocate_slots("a", 8, headroom=3) is None
    assert manager.allocate_slots("a", 8, headroom=2) == (0, 1)
    assert manager.allocate_slots("a", 7, headroom=99) == ()  # nothing new, nothing asked


def test_table_never_shrinks():
    manager = KVCacheManager(num_blocks=4, block_size=4)
    manager.allocate_slots("a", 9)
    assert manager.allocate_slots("a", 1) == ()
    assert manager.block_table("a") == (0, 1, 2)


def test_free_gives_every_block_back_and_forgets_the_table():
    manager = KVCacheManager(num_blocks=4, block_size=4)
    manager.allocate_slots("a", 5)
    manager.allocate_slots("b", 5)
    manager.free(make_request("a"))
    assert manager.num_free_blocks == 2
    assert manager.block_table("a") == ()
    assert manager.allocate_slots("c", 8) == (0, 1)  # in the order of the table that was freed
    manager.check_invariants()


def test_free_is_idempotent_and_knows_no_strangers():
    manager = KVCacheManager(num_blocks=4, block_size=4)
    manager.allocate_slots("a", 5)
    for _ in range(2):
        manager.free(make_request("a"))
        manager.free(make_request("never seen"))
    assert manager.num_free_blocks == 4
    assert not manager._block_tables
    manager.check_invariants()


def test_no_tokens_need_no_table():
    manager = KVCacheManager(num_blocks=1, block_size=4)
    assert manager.allocate_slots("a", 0) == ()
    assert not manager._block_tables


def test_block_table_is_a_copy():
    manager = KVCacheManager(num_blocks=4, block_size=4)
    before = manager.allocate_slots("a", 4)
    table = manager.block_table("a")
    manager.allocate_slots("a", 8)
    assert before == table == (0,)


def test_capacity_is_counted_in_tokens():
    manager = KVCacheManager(num_blocks=3, block_size=16)
    assert manager.max_tokens == 48
    assert manager.num_blocks == 3
    assert manager.block_size == 16


def test_nothing_is_cached_before_a_request_runs():
    manager = KVCacheManager(num_blocks=3, block_size=4)
    request = make_request("a")
    assert manager.get_num_cached_tokens(request) == 0
    assert manager.admit(request) == 0
    with pytest.raises(AssertionError, match="block table already"):
        manager.get_num_cached_tokens(request)


def test_a_prompt_that_waits_is_packed_once_however_often_it_is_asked_about(monkeypatch):
    manager = KVCacheManager(num_blocks=3, block_size=4, enable_prefix_caching=True)
    monkeypatch.setattr(kv_cache_manager, "pack_token_ids", lambda token_ids: pytest.fail("packed anew"))
    request = make_request("a")
    assert [manager.get_num_cached_tokens(request) for _ in range(2)] == [0, 0]


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 16), (-1, 16), (4, 0)])
def test_cache_that_holds_nothing_is_refused_with_both_numbers(num_blocks, block_size):
    with pytest.raises(ConfigError, match=f"num_blocks={num_blocks} .* block_size={block_size} "):
        KVCacheManager(num_blocks, block_size)


@pytest.mark.parametrize("tables", [{}, {"a": [0, 1], "b": [1]}, {"a": [0, 0]}, {"a": [0], "b": []}, {"a": [0, 1]}])
def test_check_invariants_notices_tables_that_differ_from_the_references(tables):
    manager = KVCacheManager(num_blocks=3, block_size=4)
    manager.allocate_slots("a", 4)
    manager._block_tables = tables
    with pytest.raises(AssertionError):
        manager.check_invariants()
