"""Pool, tree and manager under arbitrary calls, with a cache that remembers what each slot was computed from.

A step is planned (admissions, chunks, answers), then run: copies first, then every store. After every call: free +
active + cached = all; references = owners and locks = requests, counted anew; what the tree and the tables promise is
there when a step has run; nobody writes a block that is in another table.
"""

from __future__ import annotations

from array import array

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pico_vllm.kv_cache import KVCacheManager
from pico_vllm.kv_cache.radix_tree import Match
from pico_vllm.request import Request
from pico_vllm.sampling_params import SamplingParams

PARAMS = SamplingParams(max_tokens=100)
TOKENS = st.integers(0, 2)  # few, so that prompts begin alike
NAMES = "abcdef"


class ManagerMachine(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(3, 14), block_size=st.integers(1, 4))
    def build(self, num_blocks, block_size):
        self.manager = KVCacheManager(num_blocks, block_size, enable_prefix_caching=True)
        self.tree, self.block_size = self.manager._tree, block_size
        self.slots = {}  # (block, offset) → the tokens up to this one
        self.running = {}  # name → request
        self.num_scheduled = {}  # name → positions that have been planned
        self.plan = []  # (name, block, offset, tokens up to this one)
        self.sequences = [[0]]
        self.manager.begin_step()

    # ------------------------------------------------------------------------------------------------------- planning
    @rule(
        name=st.sampled_from(NAMES),
        prompt=st.lists(TOKENS, min_size=1, max_size=14),
        salt=st.sampled_from([None, None, None, "s"]),
        share=st.integers(1, 14),
    )
    def admit(self, name, prompt, salt, share):
        self._admit(name, Request(name, prompt, PARAMS, cache_salt=salt), share)

    @rule(
        name=st.sampled_from(NAMES),
        number=st.integers(0, 20),
        length=st.integers(1, 25),
        more=st.lists(TOKENS, max_size=4),
        share=st.integers(1, 20),
    )
    def admit_known(self, name, number, length, more, share):
        """A prompt that begins like one before it: a fork, if the other one runs and nothing is cut or added."""
        prompt = [*self.sequences[number % len(self.sequences)][:length], *more]
        self._admit(name, Request(name, prompt, PARAMS), share)

    def _admit(self, name, request, share):
        if name in self.running or request.num_tokens > self.manager.max_tokens:
            return
        before = self.manager.stats
        num_cached = self.manager.admit(request, headroom=len(self.running))
        if num_cached is None:
            assert self.running, "a request that is alone gets in"
            assert self.manager.stats == before, "a node may have been split, but no block has changed hands"
            return
        assert num_cached <= request.num_tokens
        self.running[name] = request
        self.num_scheduled[name] = num_cached
        self._schedule(name, max(num_cached, min(request.num_tokens, num_cached + share)))

    def _schedule(self, name, end):
        """Plan the stores of a request up to a position, and insert them."""
        request, table = self.running[name], self.manager.block_table(name)
        tokens = request.token_ids(0, request.num_tokens)
        for position in range(self.num_scheduled[name], end):
            block = table[position // self.block_size]
            others = [other for other in self.running if other != name and block in self.manager.block_table(other)]
            assert not others, f"{name} writes block {block} of {others}"
            self.plan.append((name, block, position % self.block_size, tokens[: position + 1]))
        self.num_scheduled[name] = end
        self.manager.insert(request, end)

    @rule(name=st.sampled_from(NAMES), tokens=st.lists(TOKENS, min_size=1, max_size=6))
    def advance(self, name, tokens):
        """The next chunk of a prompt, or a token of the answer after another (each in a step of its own)."""
        if name not in self.running:
            return
        request = self.running[name]
        if self.num_scheduled[name] < request.num_tokens:
            self._schedule(name, min(request.num_tokens, self.num_scheduled[name] + len(tokens)))
            return
        for token in tokens:
            if request.num_tokens + 1 > self.manager.max_tokens:
                return
            request.output_token_ids.append(token)
            while self.manager.allocate_slots(name, request.num_tokens) is None:
                if not self._preempt_somebody(name):
                    alone = len(self.running) == 1 and not self.manager._block_copies
                    assert not alone, "a request that is alone can have the whole pool"
                    request.output_token_ids.pop()
                    return
            self._schedule(name, request.num_tokens)

    def _preempt_somebody(self, name):
        """The newest other request that has no share of this step."""
        busy = {planned[0] for planned in self.plan}
        others = [other for other in self.running if other != name and other not in busy]
        if not others or self.manager._block_copies:
            return False
        self._free(others[-1], keep=True)
        return True

    # -------------------------------------------------------------------------------------------------------- running
    @rule()
    def run_step(self):
        copies = self.manager.take_block_copies()
        sources, destinations = {source for source, _ in copies}, [destination for _, destination in copies]
        assert len(set(destinations)) == len(destinations) and not sources & set(destinations)
        for source, destination in copies:
            for offset in range(self.block_size):
                self.slots[destination, offset] = self.slots.get((source, offset))
        for _, block, offset, tokens in self.plan:
            self.slots[block, offset] = tokens
        self.plan.clear()
        self.manager.begin_step()
        for name, request in self.running.items():
            table, tokens = self.manager.block_table(name), request.token_ids(0, self.num_scheduled[name])
            assert self._read(table, len(tokens)) == [tokens[: p + 1] for p in range(len(tokens))]
        self._check_tree()

    @precondition(lambda self: not self.plan and not self.manager._block_copies)
    @rule(name=st.sampled_from(NAMES), keep=st.booleans())
    def free(self, name, keep):
        """It ends, is aborted or preempted; or it leaves nothing behind."""
        if name in self.running:
            self._free(name, keep=keep)

    def _free(self, name, *, keep):
        request = self.running.pop(name)
        self.sequences.append(list(request.token_ids(0, request.num_tokens)))
        self.manager.free(request, self.num_scheduled.pop(name) if keep else 0)

    @rule()
    def lose_everything(self):
        """A step has failed."""
        self.manager.take_block_copies()
        for name in list(self.running):
            self._free(name, keep=False)
        assert self.manager.reset_prefix_cache()
        self.plan.clear()
        self.slots.clear()
        assert self.manager.stats.num_free_blocks == self.manager.num_blocks
        assert (self.tree.num_nodes, self.tree._roots) == (0, {})

    @rule()
    def reset(self):
        assert self.manager.reset_prefix_cache() == (not self.running)

    # --------------------------------------------------------------------------------------------------------- checks
    @invariant()
    def books_are_balanced(self):
        self.manager.check_invariants()
        stats = self.manager.stats
        counts = (stats.num_free_blocks, stats.num_active_blocks, stats.num_cached_blocks)
        assert sum(counts) == self.manager.num_blocks and min(counts) >= 0
        if not self.running and not self.manager._block_copies:
            assert self.manager.num_free_blocks == self.manager.num_blocks, "idle: all of it can be had"

    def _read(self, table, num_tokens):
        return [self.slots[table[p // self.block_size], p % self.block_size] for p in range(num_tokens)]

    def _check_tree(self):
        for node in self.tree.nodes():
            path, above = [], node
            while above.parent is not None:
                path.insert(0, above)
                above = above.parent
            tokens = tuple(array("i", b"".join(bytes(part.token_ids) for part in path)))
            table = self.tree.block_ids(Match(tuple(path), node.end, node.end), node.end)
            assert self._read(table, node.end) == [tokens[: p + 1] for p in range(node.end)]

    def teardown(self):
        if not hasattr(self, "manager"):
            return
        self.run_step()
        for name in list(self.running):
            self._free(name, keep=True)
        assert self.manager.allocate_slots("all", self.manager.max_tokens) is not None
        assert (self.tree.num_nodes, self.tree._roots, self.manager.stats.num_cached_blocks) == (0, {}, 0)


ManagerMachine.TestCase.settings = settings(max_examples=250, stateful_step_count=60, deadline=None)
TestManagerMachine = ManagerMachine.TestCase
