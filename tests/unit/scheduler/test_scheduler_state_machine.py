"""Scheduler, manager and pool under arbitrary traffic, beside a worker that knows only what the protocol tells it.

The worker's model is a checksum over the tokens it finds in a request's slots, so that a wrong id, position, slot or
block table anywhere in the past changes what is generated. Whatever happens, each request must get the tokens it would
have got alone. With prefix caching, likewise: each slot remembers the whole prefix it was computed from, and whatever
a request or the radix tree counts on must be what it was computed from.
"""

from __future__ import annotations

import zlib
from array import array
from collections import deque
from dataclasses import dataclass, field, replace
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pico_vllm.errors import RequestError
from pico_vllm.kv_cache import KVCacheManager
from pico_vllm.kv_cache.radix_tree import Match
from pico_vllm.outputs import TokenLogprobs
from pico_vllm.request import FinishReason, Request, RequestStatus
from pico_vllm.sampling_params import SamplingParams
from pico_vllm.scheduler import Scheduler
from pico_vllm.scheduler.step_time import StepTimeModel, TargetITL
from pico_vllm.scheduler_output import ModelRunnerOutput

VOCAB_SIZE = 50
EXTRAS = [{}, {"prompt_logprobs": 0}, {"presence_penalty": 1.0}, {"logits_processors": [lambda ids, logits: logits]}]
EOS = 0
STOP = 1
ONE_S_A_TOKEN = StepTimeModel(((1, 1.0), (2, 2.0)), seconds_per_token=1.0, attention_ratio=0.0)  # also of a decode


def next_token(token_ids, seed):
    return zlib.crc32(bytes(token_ids), seed) % VOCAB_SIZE


def generate_alone(request, max_model_len):
    """What a request gets from an engine of its own: (token ids, finish reason, stop reason)."""
    params = request.params
    token_ids, output = list(request.prompt_token_ids), []
    while True:
        token = next_token(token_ids, request.seed)
        token_ids.append(token)
        output.append(token)
        if token in params.stop_token_ids:
            return output, FinishReason.STOP, token
        if token == EOS and not params.ignore_eos:
            return output, FinishReason.STOP, None
        if len(output) == params.max_tokens or len(token_ids) == max_model_len:
            return output, FinishReason.LENGTH, None


@dataclass
class Row:
    seed: int
    num_prompt_tokens: int
    num_tokens: int = 0
    block_table: list[int] = field(default_factory=list)
    last_sampled: tuple[int, int] | None = None  # position, token id
    history: list[int] | None = None  # what a request with penalties was told and has sampled since


@dataclass
class Entry:
    position: int
    token_id: int
    prefix: tuple[int, ...] | None = None  # all tokens up to this one, as attention has seen them


class FakeWorker:
    """Rows and slots as the protocol describes them, with nothing taken from the scheduler's objects."""

    def __init__(self, num_blocks, block_size, max_num_seqs):
        self.num_blocks, self.block_size, self.max_num_seqs = num_blocks, block_size, max_num_seqs
        self.rows = {}
        self.slots = {}  # slot → Entry

    def execute(self, output):
        for request_id in output.dropped_request_ids:
            del self.rows[request_id]
        new_tokens = [self._prepare(scheduled) for scheduled in output.scheduled]
        assert len(self.rows) <= self.max_num_seqs
        self._copy(output.block_copies)
        computed = []
        for scheduled, token_ids in zip(output.scheduled, new_tokens, strict=True):
            for position, token_id in enumerate(token_ids, scheduled.num_computed_tokens):
                if position >= scheduled.slots_start:
                    self.slots[self._slot(scheduled.request_id, position)] = Entry(position, token_id)
                computed.append((position, scheduled.request_id, token_id))
        for position, request_id, token_id in sorted(
            computed
        ):  # attention: every layer has stored the whole step before
            context = self.read(self.rows[request_id].block_table, position)
            entry = self.slots[self._slot(request_id, position)]
            assert (entry.position, entry.token_id) == (position, token_id)
            assert entry.prefix in (None, (*context, entry.token_id))
            entry.prefix = (*context, entry.token_id)
        return ModelRunnerOutput(
            tuple(self._sample(scheduled) for scheduled in output.scheduled),
            prompt_logprobs=tuple(self._prompt_logprobs(scheduled) for scheduled in output.scheduled),
        )

    def read(self, block_table, num_tokens):
        """The tokens of the first positions of a sequence; each must have been computed after all those before it."""
        entries = [self.slots[self.slot(block_table, position)] for position in range(num_tokens)]
        token_ids = tuple(entry.token_id for entry in entries)
        for position, entry in enumerate(entries):
            assert (entry.position, entry.prefix) == (position, token_ids[: position + 1])
        return token_ids

    def _copy(self, block_copies):
        sources, destinations = {source for source, _ in block_copies}, [target for _, target in block_copies]
        assert len(set(destinations)) == len(destinations) and not sources & set(destinations)
        for source, target in block_copies:
            for offset in range(self.block_size):
                entry = self.slots.get(source * self.block_size + offset)
                self.slots[target * self.block_size + offset] = entry and replace(entry)

    def _prepare(self, scheduled):
        request_id, start = scheduled.request_id, scheduled.num_computed_tokens
        if scheduled.new_request is not None:
            assert request_id not in self.rows
            data = scheduled.new_request
            assert data.params is not None
            history = list(data.known_token_ids) if data.params.has_penalties else None
            self.rows[request_id] = Row(data.seed, data.num_prompt_tokens, start, history=history)
        row = self.rows[request_id]
        assert start == row.num_tokens, "positions are contiguous"
        row.num_tokens += scheduled.num_new_tokens
        row.block_table += scheduled.new_block_ids
        if not scheduled.new_token_ids:
            assert row.last_sampled is not None and scheduled.num_new_tokens == 1
            position, token_id = row.last_sampled
            assert position == start
            return (token_id,)
        assert len(scheduled.new_token_ids) == scheduled.num_new_tokens
        return scheduled.new_token_ids

    def _sample(self, scheduled):
        row = self.rows[scheduled.request_id]
        token_ids = list(self.read(row.block_table, row.num_tokens))
        if not scheduled.samples:
            return ()
        assert row.num_tokens >= row.num_prompt_tokens
        token_id = next_token(token_ids, row.seed)
        row.last_sampled = (row.num_tokens, token_id)
        if row.history is not None:
            assert row.history == token_ids
            row.history.append(token_id)
        return (token_id,)

    def _prompt_logprobs(self, scheduled):
        """An entry says which position predicts which token."""
        start = scheduled.num_computed_tokens
        entries = list(enumerate(scheduled.prompt_targets, scheduled.prompt_targets_start))
        assert all(start <= position < start + scheduled.num_new_tokens for position, _ in entries)
        return tuple(TokenLogprobs((token_id,), (0.0,), position) for position, token_id in entries)

    def _slot(self, request_id, position):
        return self.slot(self.rows[request_id].block_table, position)

    def slot(self, block_table, position):
        block_id = block_table[position // self.block_size]
        assert 0 <= block_id < self.num_blocks
        return block_id * self.block_size + position % self.block_size


class SchedulerMachine(RuleBasedStateMachine):
    """Up to three steps are in flight; requests come, are aborted and come again under the same ids at any moment.

    The worker has run a step when the next is scheduled, and delivers it late: so what a step samples is known to it
    alone, and ends that nobody expected (EOS, stop ids) are overrun.
    """

    @initialize(
        num_blocks=st.integers(1, 16),
        block_size=st.integers(1, 4),
        max_num_seqs=st.integers(1, 5),
        budget=st.sampled_from([1, 2, 3, 5, 16]),
        max_model_len=st.sampled_from([2, 9, 20, 33, 34]),
        chunked=st.booleans(),
        target_s=st.sampled_from([None, 0, 2, 4, 100]),
        min_chunk=st.integers(1, 3),
        caching=st.booleans(),
    )
    def build(self, num_blocks, block_size, max_num_seqs, budget, max_model_len, chunked, target_s, min_chunk, caching):
        self.budget = budget if chunked else max(budget, max_model_len)
        self.chunked, self.max_num_seqs, self.max_model_len = chunked, max_num_seqs, max_model_len
        self.block_size = block_size
        self.caching = caching
        self.manager = KVCacheManager(num_blocks, block_size, enable_prefix_caching=caching)
        self.scheduler = Scheduler(
            kv_cache_manager=self.manager,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=self.budget,
            max_model_len=max_model_len,
            enable_chunked_prefill=chunked,
            target_itl=None if target_s is None else TargetITL(target_s, ONE_S_A_TOKEN, min_chunk_tokens=min_chunk),
        )
        self.target_s, self.min_chunk = target_s if chunked else None, min_chunk
        self.worker = FakeWorker(num_blocks, block_size, max_num_seqs)
        self.live = {}  # request id → request, in order of arrival
        self.arrival = {}  # request → number
        self.first_admissions = []
        self.received = {}  # request → tokens the client has seen
        self.received_of_prompt = {}  # request → (position, token) of the prompt logprobs it has seen
        self.inflight = deque()
        self.num_schedules = self.last_admission = 0

    @rule(
        name=st.sampled_from("abcdef"),
        prompt=st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=14),
        max_tokens=st.sampled_from([1, 2, 7, 15, 30, 1000]),
        stop=st.booleans(),
        ignore_eos=st.booleans(),
        extra=st.sampled_from(EXTRAS),
    )
    def add(self, name, prompt, max_tokens, stop, ignore_eos, extra, salt=None, seed=None):
        stop_token_ids = (STOP,) if stop else ()
        params = SamplingParams(max_tokens=max_tokens, stop_token_ids=stop_token_ids, ignore_eos=ignore_eos, **extra)
        seed = len(self.arrival) if seed is None else seed
        request = Request(name, prompt, params, seed=seed, eos_token_ids=(EOS,), cache_salt=salt)
        num_slots = min(len(prompt) + max_tokens, self.max_model_len) - 1
        fits = len(prompt) < self.max_model_len and num_slots <= self.manager.max_tokens
        if name in self.live or not fits:
            with pytest.raises(RequestError):
                self.scheduler.add(request)
            return
        self.scheduler.add(request)
        self.live[name] = request
        self.arrival[request] = len(self.arrival)
        self.received[request] = []
        self.received_of_prompt[request] = []

    @rule(name=st.sampled_from("abcdef"))
    def add_short_prompt(self, name):
        self.add(name, [len(self.arrival) % VOCAB_SIZE], 1000, False, True, {})

    @precondition(lambda self: self.arrival)
    @rule(
        name=st.sampled_from("abcdef"),
        number=st.integers(0, 5),
        length=st.integers(1, 20),
        more=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=5),
        max_tokens=st.sampled_from([1, 2, 7, 1000]),
        extra=st.sampled_from(EXTRAS),
        salt=st.sampled_from([None, None, None, "tenant"]),
    )
    def add_known_prefix(self, name, number, length, more, max_tokens, extra, salt):
        """A prompt that begins as what another one, whether it has ended or not, has had so far."""
        other = list(self.arrival)[-1 - number % len(self.arrival)]
        known = [*other.prompt_token_ids, *other.output_token_ids][:length]
        self.add(name, known + more, max_tokens, False, True, extra, salt, other.seed)

    @rule(index=st.integers(0, 5))
    def abort(self, index):
        """Abort the oldest request, the next one, …; or one that isn't there any more."""
        name = dict(enumerate(self.live)).get(index, "abcdef"[index])
        request = self.live.pop(name, None)
        assert self.scheduler.abort(name) is (request is not None)
        assert request is None or request.status is RequestStatus.FINISHED

    @precondition(lambda self: len(self.inflight) < 3)
    @rule()
    def begin_step(self):
        num_preemptions = self.scheduler.num_preemptions
        output = self.scheduler.schedule()
        self.num_schedules += 1
        self._check_step(output, self.scheduler.num_preemptions > num_preemptions)
        result = self.worker.execute(output)
        assert set(self.worker.rows) == {r.request_id for r in self.live.values() if r.status is RequestStatus.RUNNING}
        self.inflight.append((output, result))

    @rule()
    def lose_everything(self):
        """A step has failed: nothing of what is in flight comes back, and the worker forgets its rows."""
        self.scheduler.preempt_all()
        self.inflight.clear()
        self.worker.rows.clear()
        self.worker.slots.clear()  # nobody knows what is in them
        assert self.scheduler.num_running == 0

    @precondition(lambda self: self.inflight)
    @rule()
    def end_step(self):
        for output in self.scheduler.update_from_output(*self.inflight.popleft()):
            request = self.live[output.request_id]
            received = self.received[request]
            received += output.new_token_ids
            self._check_prompt_logprobs(request, output)
            expected, reason, stop_reason = generate_alone(request, self.max_model_len)
            assert request.output_token_ids == received == expected[: len(received)]
            assert (output.finish_reason is None) == (len(received) < len(expected))
            if output.finish_reason is not None:
                assert (output.finish_reason, output.stop_reason) == (reason, stop_reason)
                assert request.status is RequestStatus.FINISHED
                del self.live[output.request_id]

    def _check_prompt_logprobs(self, request, output):
        """Each position once, in order, and all of them before the first token: also after a preemption."""
        received = self.received_of_prompt[request]
        received += [(entry.rank, *entry.token_ids) for entry in output.prompt_logprobs]
        asked = request.params.prompt_logprobs is not None
        expected = list(enumerate(request.prompt_token_ids[1:])) if asked else []
        assert received == expected[: len(received)]
        assert len(received) == len(expected) or not output.new_token_ids

    @precondition(lambda self: not self.inflight)
    @rule(count=st.integers(1, 24))
    def whole_steps(self, count):
        for _ in range(count):
            self.begin_step()
            self.end_step()
            self.books_are_balanced()

    @precondition(lambda self: not self.inflight)
    @rule(count=st.integers(1, 24))
    def overlapped_steps(self, count):
        """One step is always in flight while the next is scheduled."""
        self.begin_step()
        for _ in range(count):
            self.begin_step()
            self.end_step()
            self.books_are_balanced()

    def _check_step(self, output, has_preempted):
        scheduled = output.scheduled
        sizes = [row.num_new_tokens for row in scheduled]
        assert output.num_tokens == sum(sizes) <= self.budget
        assert len({row.request_id for row in scheduled}) == len(scheduled) <= self.max_num_seqs
        assert all(size == 1 for size in sizes[: output.num_decode_reqs])
        assert all(size > 1 for size in sizes[output.num_decode_reqs :])
        assert self.chunked or all(row.samples for row in scheduled)
        for row in scheduled:
            request = self.live[row.request_id]
            assert row.num_computed_tokens + row.num_new_tokens < request.num_prompt_tokens + request.max_tokens
            if request.params.logits_processors:
                assert request.num_inflight_samples == row.samples, "its last token is not known yet"
        self._check_pace(output)
        assert scheduled or self.inflight or not self.live, "a step that may run something does"
        for part in (scheduled[: output.num_decode_reqs], scheduled[output.num_decode_reqs :]):
            numbers = [self.arrival[self.live[row.request_id]] for row in part]
            assert numbers == sorted(numbers), "order of arrival"
        admitted = [self.live[row.request_id] for row in scheduled if row.new_request is not None]
        assert not (admitted and has_preempted)
        if has_preempted and not self.caching:
            assert self.num_schedules - self.last_admission > self.block_size
        if admitted:
            self.last_admission = self.num_schedules
        first_time = sorted(self.arrival[request] for request in admitted if request.num_preemptions == 0)
        self.first_admissions += first_time
        assert self.first_admissions == sorted(self.first_admissions)

    def _check_pace(self, output):
        """Decodes are never left out while there is budget, and beside them prompts keep to the target."""
        num_decodes = sum(not row.new_token_ids for row in output.scheduled)
        if not self.inflight:
            rows = [row for name, row in self.worker.rows.items() if name not in output.dropped_request_ids]
            assert num_decodes == min(sum(row.last_sampled is not None for row in rows), self.budget)
        if num_decodes and self.target_s is not None:
            num_prompt_tokens = output.num_tokens - num_decodes
            assert num_prompt_tokens <= max(self.min_chunk, self.target_s - num_decodes)

    @invariant()
    def books_are_balanced(self):
        self.manager.check_invariants()
        running = [r for r in self.live.values() if r.status is RequestStatus.RUNNING]
        waiting = [r for r in self.live.values() if r.status is RequestStatus.WAITING]
        assert (len(running), len(waiting)) == (self.scheduler.num_running, self.scheduler.num_waiting)
        assert self.scheduler.has_unfinished_requests() == bool(self.live)
        tables = [self.manager.block_table(request.request_id) for request in running]
        block_ids = [block_id for table in tables for block_id in table]
        num_held = self.manager.num_blocks - self.manager.num_free_blocks
        if self.caching:
            assert len(set(block_ids)) <= num_held
            self._check_tree()
        else:
            assert len(set(block_ids)) == len(block_ids) == num_held
        for request, table in zip(running, tables, strict=True):
            assert request.num_computed_tokens + request.num_inflight_tokens <= len(table) * self.block_size
            assert request.num_computed_tokens + request.num_inflight_tokens <= request.num_tokens_with_inflight
            assert len(request.output_token_ids) + request.num_inflight_samples <= request.max_tokens
            in_flight = [row for step, _ in self.inflight for row in step.scheduled if row.request_id in self.live]
            assert request.num_inflight_samples <= sum(row.request_id == request.request_id for row in in_flight)
        for request in waiting:
            assert request.num_computed_tokens == request.num_inflight_tokens == request.num_inflight_samples == 0
            assert self.manager.block_table(request.request_id) == ()
        newest_running = max((self.arrival[request] for request in running), default=-1)
        assert all(self.arrival[request] > newest_running for request in waiting), "nobody overtakes"

    def _check_tree(self):
        """What the tree promises is in the slots."""
        for node in self.manager._tree.nodes():
            path = []
            above = node
            while above.parent is not None:
                path.insert(0, above)
                above = above.parent
            block_table = self.manager._tree.block_ids(Match(tuple(path), node.end, node.end), node.end)
            token_ids = array("i", b"".join(bytes(above.token_ids) for above in path))
            assert self.worker.read(block_table, node.end) == tuple(token_ids)

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        while self.inflight:
            self.end_step()
        # At least one token a step, and everything is at most recomputed once for each token of each other request.
        for _ in range(5_000):
            if not self.live:
                break
            self.begin_step()
            self.end_step()
            self.books_are_balanced()
        assert not self.live, "every request finishes"
        self.worker.execute(self.scheduler.schedule())
        assert self.worker.rows == {}
        for owner in (self.scheduler, self.manager):
            assert not any(len(value) for value in vars(owner).values() if hasattr(value, "__len__"))
        assert self.manager.num_free_blocks == self.manager.num_blocks
        assert self.manager.allocate_slots("all", self.manager.max_tokens) is not None
        assert (self.manager._tree.num_nodes, self.manager._tree._roots) == (0, {})


SchedulerMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)
TestSchedulerMachine = SchedulerMachine.TestCase


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("seed", range(60))
def test_long_contended_traffic(seed, caching):
    """The same machine on long random runs with a small cache: hypothesis prefers short ones.

    The 60 seeds preempt some 230 times, 175 of them a request that is in flight, and lose 150 steps.
    """
    random = Random(seed)
    machine = SchedulerMachine()
    machine.build(
        num_blocks=random.randint(8, 16),
        block_size=random.randint(1, 3),
        max_num_seqs=random.randint(3, 5),
        budget=random.choice([1, 2, 3, 5, 16]),
        max_model_len=random.choice([9, 20, 33]),
        chunked=random.random() < 0.8,
        target_s=(None, 0, 2, 4)[seed % 4],
        min_chunk=1 + seed % 3,
        caching=caching,
    )
    for _ in range(300):
        if random.random() < 0.3:
            prompt = [random.randrange(VOCAB_SIZE) for _ in range(random.randint(1, 6))]
            max_tokens, ignore_eos = random.choice([3, 7, 1000]), random.random() < 0.5
            extra = random.choice(EXTRAS)
            if caching and machine.arrival and random.random() < 0.7:
                numbers = random.randrange(6), random.randint(1, 20)
                salt = random.choice([None, None, "tenant"])
                machine.add_known_prefix(random.choice("abcdef"), *numbers, prompt[:3], max_tokens, extra, salt)
            else:
                machine.add(random.choice("abcdef"), prompt, max_tokens, False, ignore_eos, extra)
        if random.random() < 0.05:
            machine.abort(random.randrange(6))
        if len(machine.inflight) < 2:
            machine.begin_step()
        if random.random() < 0.01:
            machine.lose_everything()
        if machine.inflight and random.random() < 0.7:
            machine.end_step()
        machine.books_are_balanced()
    machine.teardown()
