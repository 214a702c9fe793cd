"""What can go wrong with shared blocks, each by its name, with exact ids. Blocks of 4 tokens, mostly."""

from __future__ import annotations

import pytest

from pico_vllm.kv_cache import CacheStats, KVCacheManager
from pico_vllm.outputs import TokenLogprobs
from pico_vllm.request import Request
from pico_vllm.sampling_params import SamplingParams
from pico_vllm.scheduler import Scheduler
from pico_vllm.scheduler_output import ModelRunnerOutput


class Books:
    """A manager and the part that the scheduler plays: each ``start`` is a step unless it is told otherwise."""

    def __init__(self, num_blocks=16, block_size=4):
        self.manager = KVCacheManager(num_blocks, block_size, enable_prefix_caching=True)

    def start(self, name, token_ids, *, num_scheduled=None, same_step=False, headroom=0, salt=None):
        """Admit and insert; returns (request, cached tokens, block table)."""
        request = Request(name, token_ids, SamplingParams(max_tokens=50), cache_salt=salt)
        if not same_step:
            self.manager.take_block_copies()
            self.manager.begin_step()
        num_cached = self.manager.admit(request, headroom=headroom)
        self.manager.check_invariants()
        if num_cached is not None:
            self.manager.insert(request, request.num_tokens if num_scheduled is None else num_scheduled)
            self.manager.check_invariants()
        return request, num_cached, list(self.manager.block_table(name))

    def copies(self):
        copies = self.manager.take_block_copies()
        self.manager.check_invariants()
        return list(copies)

    def answer(self, request, token_ids):
        """Tokens that are computed one after the other; full blocks are inserted."""
        for token_id in token_ids:
            request.output_token_ids.append(token_id)
            if new := self.manager.allocate_slots(request.request_id, request.num_tokens):
                self.manager.insert(request, request.num_tokens - len(new))
            self.manager.check_invariants()

    def end(self, request, num_tokens=None):
        self.manager.free(request, request.num_tokens if num_tokens is None else num_tokens)
        self.manager.check_invariants()

    def shape(self):
        return [(node.start, node.end, node.block_ids, node.lock_ref) for node in self.manager.nodes()]

    def states(self):
        stats = self.manager.stats
        return stats.num_free_blocks, stats.num_active_blocks, stats.num_cached_blocks


# ---------------------------------------------------------------------------------------------------------- matching
def test_prompts_that_share_fewer_tokens_than_a_block():
    books = Books()
    books.end(books.start("a", [1, 2, 3, 4])[0])
    _, num_cached, table = books.start("b", [1, 2, 3, 9, 9])
    assert (num_cached, table, books.copies()) == (3, [1, 2], [(0, 1)])


def test_a_shared_header_of_31_tokens_gives_31_cached_tokens():
    books = Books(block_size=16)
    header = list(range(31))
    books.end(books.start("a", [*header, 100])[0])
    _, num_cached, table = books.start("b", [*header, 200])
    assert (num_cached, table, books.copies()) == (31, [0, 2], [(1, 2)])


@pytest.mark.parametrize("length", [4, 8, 12])
def test_a_prompt_of_exact_blocks_sent_twice_needs_no_copy_and_no_block(length):
    """Its last token is computed again for the logits, and stored nowhere."""
    books = Books()
    first, _, table = books.start("a", list(range(length)))
    books.end(first)
    _, num_cached, again = books.start("b", list(range(length)))
    assert (num_cached, again, books.copies()) == (length, table, [])
    assert books.states() == (16 - length // 4, length // 4, 0)


def test_identical_prompts_in_flight_together_share_full_blocks_at_once_and_the_rest_a_step_later():
    books = Books()
    prompt = [1, 2, 3, 4, 5, 6]
    _, _, table = books.start("a", prompt)
    assert table == [0, 1]
    _, num_cached, table = books.start("b", prompt, same_step=True)
    assert (num_cached, table, books.copies()) == (4, [0, 2], [])
    _, num_cached, table = books.start("c", prompt)
    assert (num_cached, table, books.copies()) == (6, [0, 3], [(1, 3)])


def test_a_copy_in_flight_is_no_source_of_the_same_step():
    """B's block 2 is written by the step's own copies; C must copy what was there before."""
    books = Books()
    books.end(books.start("a", [1, 2, 3, 4, 5, 6])[0])
    _, num_cached, _ = books.start("b", [1, 2, 3, 4, 5, 6, 7])
    assert num_cached == 6
    _, num_cached, _ = books.start("c", [1, 2, 3, 4, 5, 6, 7, 8], same_step=True)
    assert (num_cached, books.copies()) == (6, [(1, 2), (1, 3)])


def test_a_full_block_that_begins_with_a_copy_is_shared_in_the_same_step():
    """Copies come before the forward pass, and stores before attention: block 2 is whole when C reads it."""
    books = Books()
    books.end(books.start("a", [1, 2, 3, 4, 5, 6])[0])
    books.start("b", [1, 2, 3, 4, 5, 6, 7, 8, 9])
    _, num_cached, table = books.start("c", [1, 2, 3, 4, 5, 6, 7, 8, 10], same_step=True)
    assert (num_cached, table[:2]) == (8, [0, 2])


def test_a_chunk_that_is_not_scheduled_yet_is_not_shared():
    books = Books()
    books.start("a", list(range(12)), num_scheduled=5)
    assert books.start("b", list(range(12)))[1] == 5


def test_tenants_never_share():
    books = Books()
    books.end(books.start("a", list(range(8)), salt="one")[0])
    assert books.start("b", list(range(8)), salt="two")[1] == 0
    assert books.start("c", list(range(8)))[1] == 0
    assert books.start("d", list(range(8)), salt="one")[1] == 8


def test_who_starts_above_what_the_same_step_adds_shares_what_comes_after_it():
    books = Books()
    books.end(books.start("a", [*range(8), 50])[0])
    books.start("b", list(range(10)))
    assert books.start("c", list(range(11)), same_step=True)[1] == 8
    assert books.start("d", list(range(12)))[1] == 11


# -------------------------------------------------------------------------------------------------- one appender
def test_the_owner_appends_to_its_own_inserted_tail_without_a_copy():
    books = Books()
    a, _, table = books.start("a", [1, 2, 3, 4, 5, 6])
    b, num_cached, _ = books.start("b", [1, 2, 3, 4, 5, 6, 7])
    assert (table, num_cached, books.copies()) == ([0, 1], 6, [(1, 2)])
    books.answer(a, [50, 51, 52])  # fills block 1, begins a new one
    assert (books.manager.block_table("a"), books.copies()) == ((0, 1, 3), [])
    books.end(a)
    books.end(b)
    assert books.shape() == [(0, 6, [0, 1], 0), (6, 7, [2], 0), (6, 9, [1, 3], 0)]


def test_of_two_that_match_a_partial_block_each_gets_a_copy():
    books = Books()
    books.end(books.start("a", [1, 2, 3, 4, 5, 6])[0])
    _, _, b = books.start("b", [1, 2, 3, 4, 5, 60])
    _, _, c = books.start("c", [1, 2, 3, 4, 5, 61], same_step=True)
    assert (b, c, books.copies()) == ([0, 2], [0, 3], [(1, 2), (1, 3)])


def test_forks_share_every_full_block_and_have_a_tail_each():
    books = Books()
    prompt = list(range(10))
    tables = [books.start("a", prompt)[2]]
    tables += [books.start(name, prompt, same_step=True)[2] for name in "bc"]
    assert tables == [[0, 1, 2], [0, 1, 3], [0, 1, 4]]


# ------------------------------------------------------------------------------------------------------ conversation
def test_a_conversation_finds_its_own_answers():
    books = Books()
    a, _, _ = books.start("a", [1, 2, 3, 4, 5])
    books.answer(a, [6, 7, 8, 9])
    books.end(a, 8)  # the KV of the last token was never stored
    _, num_cached, _ = books.start("b", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10])
    assert num_cached == 8


def test_a_running_request_shares_the_blocks_its_answer_has_filled():
    books = Books()
    a, _, _ = books.start("a", [1, 2, 3, 4, 5])
    books.answer(a, [6, 7, 8, 9])
    assert books.start("b", [1, 2, 3, 4, 5, 6, 7, 8, 9])[1] == 8


def test_a_turn_leaves_one_copy_of_a_block_not_two():
    books = Books()
    books.end(books.start("a", [1, 2, 3, 4, 5, 6])[0])
    b, _, _ = books.start("b", [1, 2, 3, 4, 5, 6, 7])
    assert books.copies() == [(1, 2)]
    books.end(b)
    assert books.shape() == [(0, 6, [0, 2], 0), (6, 7, [2], 0)]
    assert books.states() == (14, 0, 2)


def test_the_same_answer_again_holds_no_second_copy():
    """Greedy decoding gives what the tree has already; the request stands on its prompt."""
    books = Books()
    a, _, _ = books.start("a", [1, 2, 3, 4])
    books.answer(a, [5, 6, 7, 8, 9])
    books.end(a, 8)
    b, num_cached, _ = books.start("b", [1, 2, 3, 4])
    assert num_cached == 4
    books.answer(b, [5, 6, 7, 8, 9])
    assert books.shape() == [(0, 4, [0], 1), (4, 8, [1], 0)]
    assert books.states() == (13 - 1, 3, 1)


# ---------------------------------------------------------------------------------------------------------- eviction
def test_free_blocks_go_first_and_then_the_oldest():
    books = Books(num_blocks=4)
    books.end(books.start("a", [1, 2, 3, 4])[0])
    books.end(books.start("b", [5, 6, 7, 8])[0])
    _, _, table = books.start("c", list(range(10, 22)))
    assert (table, books.manager.stats.num_evicted_blocks) == ([0, 2, 3], 1)
    assert [node.block_ids for node in books.manager.nodes()] == [[1], table]


def test_eviction_during_a_running_match():
    """The match of a new request would be the next to go: it is locked first, so something else goes."""
    books = Books(num_blocks=4)
    books.end(books.start("a", [1, 2, 3, 4])[0])
    books.end(books.start("b", [5, 6, 7, 8])[0])
    _, num_cached, table = books.start("c", [1, 2, 3, 4, *range(20, 28)])
    assert (num_cached, table[0]) == (4, 0)
    assert books.manager.stats.num_evicted_blocks == 0
    books2 = Books(num_blocks=3)
    books2.end(books2.start("a", [1, 2, 3, 4])[0])
    books2.end(books2.start("b", [5, 6, 7, 8])[0])
    _, num_cached, table = books2.start("c", [1, 2, 3, 4, *range(20, 28)])
    assert (num_cached, table, books2.manager.stats.num_evicted_blocks) == (4, [0, 1, 2], 1)


def test_a_source_is_held_until_the_step_is_planned():
    """C needs every block there is, but B's copy of block 1 has not been planned to its end."""
    books = Books(num_blocks=4)
    books.end(books.start("a", [1, 2, 3, 4, 5])[0])
    b, num_cached, _ = books.start("b", [1, 2, 3, 4, 5, 6])
    assert num_cached == 5
    assert books.manager._pool.pin_count(1) == 2  # the node that B stands below, and the copy
    assert books.copies() == [(1, 2)]
    assert books.manager._pool.pin_count(1) == 1
    books.end(b)


def test_an_admission_that_fails_changes_no_owner():
    books = Books(num_blocks=4)
    books.end(books.start("a", [1, 2, 3, 4, 5])[0])
    before = books.states(), [books.manager._pool.logical_ref_count(block) for block in range(4)]
    _, num_cached, table = books.start("b", [1, 2, 3, 4, 5, *range(10, 30)], headroom=1)
    assert (num_cached, table) == (None, [])
    assert (books.states(), [books.manager._pool.logical_ref_count(block) for block in range(4)]) == before


def test_what_a_match_locks_is_no_block_to_be_had():
    """3 of 4 blocks are cached, and B shares 2 of them: of the 2 that are left it can't get 3."""
    books = Books(num_blocks=4)
    books.end(books.start("a", list(range(12)))[0])
    books.start("other", [50])
    before = books.states()
    _, num_cached, _ = books.start("b", [*range(8), *range(20, 24)], headroom=2)
    assert (num_cached, books.states()) == (None, before)
    _, num_cached, table = books.start("b", [*range(8), *range(20, 24)])
    assert (num_cached, table) == (8, [0, 1, 2])


def test_an_idle_engine_is_entirely_evictable():
    books = Books(num_blocks=8)
    requests = [books.start(str(n), [n % 2, 1, 2, 3, n])[0] for n in range(3)]
    assert books.manager.num_free_blocks < 8
    for request in requests:
        books.end(request)
    assert books.manager.num_free_blocks == 8
    assert books.manager.allocate_slots("all", 32) is not None
    assert (books.shape(), books.states()) == ([], (0, 8, 0))


# ---------------------------------------------------------------------------------------------------------- deadlock
def test_alone_a_request_gets_in_though_its_own_match_is_in_the_way():
    """Two blocks in all. Copying block 1 would need a third: so two tokens fewer are taken from the cache."""
    books = Books(num_blocks=2)
    books.end(books.start("a", [1, 2, 3, 4, 5, 6])[0])
    request, num_cached, table = books.start("b", [1, 2, 3, 4, 5, 6, 7])
    assert (num_cached, table, books.copies()) == (4, [0, 1], [])
    books.end(request)
    assert books.manager.num_free_blocks == 2


def test_alone_a_request_steps_aside_to_get_its_last_block():
    """B stands below block 1, which it has only copied, and needs all three blocks in the end."""
    books = Books(num_blocks=3)
    books.end(books.start("a", [1, 2, 3, 4, 5, 6])[0])
    b, num_cached, table = books.start("b", [1, 2, 3, 4, 5, 6, 7])
    assert (num_cached, table, books.copies()) == (6, [0, 2], [(1, 2)])
    books.answer(b, [8, 9])
    assert books.manager.block_table("b") == (0, 2, 1)
    books.end(b)
    assert books.shape() == [(0, 9, [0, 2, 1], 0)]
    assert books.manager.num_free_blocks == 3


def test_alone_a_request_gets_in_though_a_block_above_its_match_is_in_the_way():
    """Four blocks in all, and C needs them. It shares 0 and 2, and stands below block 1, whose copy block 2 is."""
    books = Books(num_blocks=4)
    books.end(books.start("a", [1, 2, 3, 4, 5, 6, 7])[0])
    books.end(books.start("b", [1, 2, 3, 4, 5, 6, 8, 9, 10])[0])
    assert books.shape() == [(0, 6, [0, 1], 0), (6, 7, [1], 0), (6, 9, [2, 3], 0)]
    _, num_cached, table = books.start("c", [1, 2, 3, 4, 5, 6, 8, 9, *range(20, 28)])
    assert (num_cached, table[:2], sorted(table[2:])) == (8, [0, 2], [1, 3])


def test_who_stepped_aside_leaves_its_tokens_to_its_tenant_alone():
    books = Books(num_blocks=3)
    books.end(books.start("a", [1, 2, 3, 4, 5, 6], salt="one")[0])
    b, _, _ = books.start("b", [1, 2, 3, 4, 5, 6, 7], salt="one")
    assert books.copies() == [(1, 2)]
    books.answer(b, [8, 9])
    books.end(b)
    books.manager.begin_step()
    again = [Request("c", range(1, 10), SamplingParams(max_tokens=1), cache_salt=salt) for salt in ("one", None)]
    assert [books.manager.get_num_cached_tokens(request) for request in again] == [9, 0]


# ---------------------------------------------------------------------------------------------- through the scheduler
class Engine:
    """A scheduler whose model always gives 7."""

    def __init__(self, num_blocks=16, block_size=4, **limits):
        self.manager = KVCacheManager(num_blocks, block_size, enable_prefix_caching=True)
        defaults = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 64}
        self.scheduler = Scheduler(kv_cache_manager=self.manager, **{**defaults, **limits})

    def add(self, name, token_ids, max_tokens=4, **params):
        request = Request(name, token_ids, SamplingParams(max_tokens=max_tokens, **params))
        self.scheduler.add(request)
        return request

    def step(self):
        output = self.scheduler.schedule()
        self.manager.check_invariants()
        rows = tuple((7,) if row.samples else () for row in output.scheduled)
        entries = tuple(tuple(TokenLogprobs((t,), (0.0,), 1) for t in row.prompt_targets) for row in output.scheduled)
        outputs = self.scheduler.update_from_output(output, ModelRunnerOutput(rows, prompt_logprobs=entries))
        self.manager.check_invariants()
        return output, outputs

    def run(self):
        while self.scheduler.has_unfinished_requests():
            self.step()


def shares(output):
    """{request id: (first position, new tokens, first position that is stored)}"""
    rows = output.scheduled
    return {row.request_id: (row.num_computed_tokens, row.num_new_tokens, row.slots_start) for row in rows}


def test_a_recomputed_position_whose_kv_is_cached_is_not_stored():
    engine = Engine()
    engine.add("a", list(range(8)), max_tokens=1)
    engine.step()
    engine.add("b", list(range(8)), max_tokens=1)
    output, (out,) = engine.step()
    assert shares(output) == {"b": (7, 1, 8)}
    assert (output.num_decode_reqs, output.scheduled[0].new_token_ids, output.block_copies) == (1, (7,), ())
    assert out.num_cached_tokens == 7


def test_a_burst_with_one_prompt_computes_it_once():
    """Block size 4, 2 x 4 tokens and 2 more: the followers compute what the step itself can't copy."""
    engine = Engine()
    for name in "abcd":
        engine.add(name, list(range(10)))
    output, outputs = engine.step()
    assert shares(output) == {"a": (0, 10, 0), "b": (8, 2, 0), "c": (8, 2, 0), "d": (8, 2, 0)}
    assert [out.num_cached_tokens for out in outputs] == [0, 8, 8, 8]
    engine.add("e", list(range(10)))
    output, _ = engine.step()
    assert shares(output)["e"] == (9, 1, 10)
    assert len(output.block_copies) == 1


def test_two_whole_blocks_twice_in_one_step():
    """The follower stands before its leader in the plan, and reads what the leader stores in that very step."""
    engine = Engine()
    for name in "ab":
        engine.add(name, list(range(8)))
    output, _ = engine.step()
    assert [row.request_id for row in output.scheduled] == ["b", "a"]
    assert shares(output) == {"b": (7, 1, 8), "a": (0, 8, 0)}


def test_a_long_prompt_of_many_is_computed_once_in_chunks():
    engine = Engine(max_num_batched_tokens=8, num_blocks=32)
    for name in "abc":
        engine.add(name, list(range(20)), max_tokens=2)
    plans = [shares(engine.step()[0]) for _ in range(3)]
    assert plans[:2] == [{"a": (0, 8, 0)}, {"a": (8, 8, 0)}]
    assert plans[2] == {"a": (16, 4, 0), "b": (19, 1, 20), "c": (19, 1, 20)}


def test_a_leader_aborted_mid_prefill_leaves_its_followers_what_it_had_scheduled():
    engine = Engine(max_num_batched_tokens=6)
    engine.add("a", list(range(16)))
    engine.add("b", list(range(16)))
    assert shares(engine.step()[0]) == {"a": (0, 6, 0)}
    assert engine.scheduler.abort("a")
    engine.manager.check_invariants()
    output, _ = engine.step()
    assert shares(output) == {"b": (6, 6, 0)}
    assert output.block_copies == ((1, 2),)
    engine.run()
    assert engine.manager.num_free_blocks == 16


def test_a_leader_aborted_with_its_step_in_flight_leaves_what_was_scheduled():
    engine = Engine(max_num_batched_tokens=8)
    engine.add("a", list(range(12)))
    first = engine.scheduler.schedule()
    engine.scheduler.abort("a")
    engine.add("b", list(range(12)))
    second = engine.scheduler.schedule()
    assert shares(second) == {"b": (8, 4, 0)}
    engine.scheduler.update_from_output(first, ModelRunnerOutput(((),)))
    engine.scheduler.update_from_output(second, ModelRunnerOutput(((7,),)))
    engine.run()


def test_what_the_step_in_flight_stores_of_a_request_that_has_ended_is_found():
    engine = Engine()
    engine.add("a", list(range(4)), stop_token_ids=[7])
    first, second = engine.scheduler.schedule(), engine.scheduler.schedule()
    assert shares(second) == {"a": (4, 1, 0)}  # the 7 that the first step samples
    engine.scheduler.update_from_output(first, ModelRunnerOutput(((7,),)))
    engine.add("b", [0, 1, 2, 3, 7, 9])
    assert shares(engine.scheduler.schedule()) == {"b": (5, 1, 0)}


def test_without_chunking_a_cached_prompt_needs_room_for_one_token():
    engine = Engine(max_num_batched_tokens=10, max_model_len=10, enable_chunked_prefill=False)
    engine.add("a", list(range(4)), max_tokens=1)
    engine.step()
    engine.add("b", list(range(20, 29)))
    engine.add("c", list(range(4)))
    assert shares(engine.step()[0]) == {"c": (3, 1, 4), "b": (0, 9, 0)}


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 6])
def test_abort_in_every_state_leaves_only_cached_blocks(num_steps):
    """Waiting, in a chunk, at the end of its prompt, decoding."""
    engine = Engine(max_num_batched_tokens=5)
    engine.add("a", list(range(12)), max_tokens=20)
    for _ in range(num_steps):
        engine.step()
    assert engine.scheduler.abort("a")
    engine.manager.check_invariants()
    stats = engine.manager.stats
    assert (stats.num_active_blocks, engine.manager.num_free_blocks) == (0, 16)
    assert stats.num_cached_blocks == -(-[0, 5, 10, 12, 15][[0, 1, 2, 3, 6].index(num_steps)] // 4)


def test_preemption_while_others_share_the_blocks():
    """Blocks 0 and 1 are both requests': the one that is preempted keeps its place in the cache, not its hold on it."""
    engine = Engine(num_blocks=5, max_num_seqs=2)
    a = engine.add("a", list(range(8)), max_tokens=12)
    b = engine.add("b", [*range(8), 90], max_tokens=8)
    engine.run()
    assert engine.scheduler.num_preemptions > 0
    assert (a.output_token_ids, b.output_token_ids) == ([7] * 12, [7] * 8)
    assert engine.manager.num_free_blocks == 5


def test_a_preempted_request_mostly_finds_what_it_had():
    engine = Engine(num_blocks=5, max_num_seqs=2)
    engine.add("a", list(range(4)), max_tokens=9)
    engine.add("b", list(range(50, 54)), max_tokens=9)
    resumed = []
    while engine.scheduler.has_unfinished_requests():
        before = engine.scheduler.num_preemptions
        output, _ = engine.step()
        resumed += [row for row in output.scheduled if row.new_request is not None and before]
    assert engine.scheduler.num_preemptions > 0
    assert [row.request_id for row in resumed] == ["b"]
    assert resumed[0].num_computed_tokens >= 4


def test_a_failed_step_empties_the_cache():
    engine = Engine()
    engine.add("a", list(range(8)), max_tokens=1)
    engine.step()
    engine.add("b", list(range(8)))
    engine.step()
    engine.scheduler.preempt_all()
    engine.manager.check_invariants()
    assert engine.manager.stats.num_cached_blocks == engine.manager.stats.num_active_blocks == 0
    assert shares(engine.step()[0]) == {"b": (0, 9, 0)}


def test_who_wants_logprobs_of_the_prompt_computes_it_and_others_share_it():
    engine = Engine()
    engine.add("a", list(range(9)), max_tokens=1)
    engine.step()
    engine.add("b", list(range(9)), max_tokens=1, prompt_logprobs=0)
    engine.add("c", list(range(9)), max_tokens=1)
    output, outputs = engine.step()
    assert shares(output) == {"c": (8, 1, 9), "b": (0, 9, 0)}
    assert {out.request_id: out.num_cached_tokens for out in outputs} == {"b": 0, "c": 8}


def test_reset_is_refused_while_a_request_runs():
    engine = Engine()
    engine.add("a", list(range(8)))
    assert engine.manager.reset_prefix_cache(), "waiting requests hold nothing"
    engine.step()
    assert not engine.manager.reset_prefix_cache()
    engine.run()
    assert engine.manager.stats.num_cached_blocks == 3
    assert engine.manager.reset_prefix_cache()
    assert engine.manager.stats.num_free_blocks == 16


def test_stats_count_tokens_and_blocks():
    engine = Engine()
    engine.add("a", list(range(8)), max_tokens=1)
    engine.step()
    engine.add("b", [*range(6), 50, 51], max_tokens=2)
    engine.step()
    assert engine.manager.stats == CacheStats(16, 6, 0, num_free_blocks=13, num_active_blocks=3, num_cached_blocks=0)
    assert engine.manager.stats.hit_rate == 6 / 16


def test_without_prefix_caching_nothing_is_kept():
    manager = KVCacheManager(8, 4)
    scheduler = Scheduler(kv_cache_manager=manager, max_num_seqs=2, max_num_batched_tokens=64, max_model_len=32)
    for name in "ab":
        scheduler.add(Request(name, list(range(8)), SamplingParams(max_tokens=1)))
    output = scheduler.schedule()
    assert shares(output) == {"a": (0, 8, 0), "b": (0, 8, 0)}
    scheduler.update_from_output(output, ModelRunnerOutput(((7,), (7,))))
    assert manager.stats == CacheStats(num_free_blocks=8)


def test_hits_add_up_and_a_prompt_that_is_all_there_still_computes_its_last_token():
    books = Books()
    for name in ("a", "b", "c"):
        request, _, _ = books.start(name, range(8))
        books.end(request)
    stats = books.manager.stats
    assert (stats.num_prompt_tokens, stats.num_hit_tokens) == (24, 14)  # 0 + 7 + 7
