"""Rotation, stopping rule and summary, by a clock that the calls themselves move."""

from collections import Counter

import pytest

from pico_vllm.bench.timing import (
    MAX_CALLS_BETWEEN_RESTORES,
    MAX_SETS,
    Budget,
    Rotation,
    Timing,
    cache_bytes,
    num_sets,
    percentile,
    time_on_host,
)

MIB = 1 << 20


class Clock:
    """Stands still but for what the calls take; counts who is called and how often it is read."""

    def __init__(self):
        self.now = 0.0
        self.num_readings = 0
        self.called = Counter()

    def __call__(self):
        self.num_readings += 1
        return self.now

    def calls(self, count, *, taking):
        def make(index):
            def call():
                self.called[index] += 1
                self.now += taking

            return call

        return [make(index) for index in range(count)]


def test_a_call_of_a_millisecond_is_timed_until_the_time_is_full():
    clock = Clock()
    rotation = Rotation(clock.calls(3, taking=2**-10))
    timing = time_on_host(rotation, Budget(min_s=0.125, min_samples=10, max_s=1.0), clock)
    assert timing == Timing(2**-10, 2**-10, 2**-10, 2**-10, "host")
    assert clock.called.total() == 2 + 128  # warm-up; 128 * 2^-10 s = 0.125 s
    assert sorted(clock.called.values()) == [43, 43, 44]  # in turn


def test_short_calls_are_timed_in_blocks():
    clock = Clock()
    rotation = Rotation(clock.calls(3, taking=2**-20))  # 0.95 µs
    timing = time_on_host(rotation, Budget(min_s=2**-10, min_samples=1, max_s=1.0), clock)
    assert timing.median_s == 2**-20
    # 53 calls fill 50 µs; 20 blocks of them fill 2^-10 s = 1024 calls.
    assert clock.called.total() == 2 + 20 * 53
    assert clock.num_readings == 2 * (2 + 20)


def test_few_samples_of_a_slow_call():
    clock = Clock()
    timing = time_on_host(Rotation(clock.calls(3, taking=0.25)), Budget(min_s=0.1, min_samples=10, max_s=0.5), clock)
    assert timing.median_s == 0.25
    assert clock.called.total() == 2 + 2  # then the 0.5 s are over


def test_a_call_longer_than_the_whole_budget_is_made_once():
    clock = Clock()
    timing = time_on_host(Rotation(clock.calls(3, taking=2.0)), Budget(max_s=0.5), clock)
    assert timing.best_s == 2.0
    assert clock.called.total() == 1


def test_at_least_so_many_samples():
    clock = Clock()
    time_on_host(Rotation(clock.calls(1, taking=0.125)), Budget(min_s=0.1, min_samples=4, max_s=10.0), clock)
    assert clock.called.total() == 2 + 4


def test_restoring_happens_between_the_samples_and_often_enough():
    clock = Clock()
    calls = clock.calls(2, taking=2**-10)
    most_since_restore, num_restores = 0, 0

    def restore():
        nonlocal num_restores
        num_restores += 1
        clock.called.clear()
        clock.now += 100.0  # would be seen in every statistic

    def watched(call):
        def run():
            nonlocal most_since_restore
            call()
            most_since_restore = max(most_since_restore, *clock.called.values())

        return run

    rotation = Rotation([watched(call) for call in calls], restore)
    assert rotation.max_calls == 2 * MAX_CALLS_BETWEEN_RESTORES
    timing = time_on_host(rotation, Budget(min_s=0.125, min_samples=10, max_s=1.0), clock)
    assert (timing.best_s, timing.p80_s) == (2**-10, 2**-10)
    assert most_since_restore == MAX_CALLS_BETWEEN_RESTORES
    assert num_restores == (2 + 128 - 1) // (2 * MAX_CALLS_BETWEEN_RESTORES)


def test_blocks_are_no_longer_than_what_may_run_between_two_restores():
    clock = Clock()
    rotation = Rotation(clock.calls(1, taking=2**-30), lambda: None)
    time_on_host(rotation, Budget(min_s=0.0, min_samples=5, max_s=1.0), clock)
    assert clock.called.total() == 2 + 5 * MAX_CALLS_BETWEEN_RESTORES


def test_summary_of_samples_by_hand():
    timing = Timing.from_samples([5.0, 1.0, 4.0, 2.0, 3.0], "graph")
    assert (timing.median_s, timing.best_s, timing.mode) == (3.0, 1.0, "graph")
    assert timing.p20_s == pytest.approx(1.8)  # 0.2 of the 4 steps from 1 to 5
    assert timing.p80_s == pytest.approx(4.2)


def test_percentile_of_one_sample_and_of_the_ends():
    assert percentile([7.0], 0.99) == 7.0
    assert percentile([3.0, 1.0], 0.0) == 1.0
    assert percentile([3.0, 1.0], 1.0) == 3.0


def test_sets_overrun_the_cache():
    # 3 * 50 MiB / 1 MiB
    assert num_sets(MIB, MIB, cache_bytes=50 * MIB, memory_bytes=1 << 40) == 150
    # a small cache: 64 MiB at least
    assert num_sets(MIB, MIB, cache_bytes=MIB, memory_bytes=1 << 40) == 64
    # 4.5 MiB: 15 sets are 67.5 MiB
    assert num_sets(9 * MIB // 2, MIB, cache_bytes=MIB, memory_bytes=1 << 40) == 15


def test_sets_are_limited_by_memory_and_number_and_there_is_always_one():
    assert num_sets(MIB, 100 * MIB, cache_bytes=50 * MIB, memory_bytes=1 << 30) == 10
    assert num_sets(1000, 1000, cache_bytes=50 * MIB, memory_bytes=1 << 30) == MAX_SETS
    assert num_sets(1 << 30, 1 << 34, cache_bytes=50 * MIB, memory_bytes=1 << 30) == 1


def test_this_machines_cache_is_known(monkeypatch):
    import torch

    assert cache_bytes(torch.device("cpu")) >= MIB
    monkeypatch.setattr("pico_vllm.bench.timing._CPU_CACHE_SIZE_FILE", "/no/such/file")
    assert cache_bytes(torch.device("cpu")) == 32 * MIB
