"""How many calls a graph holds. What needs a GPU is in tests/gpu."""

from pico_vllm.bench.cuda_timing import calls_per_replay


def test_a_replay_takes_at_least_two_milliseconds():
    assert calls_per_replay(10e-6, 1, None) == 200
    assert calls_per_replay(1e-3, 1, None) == 2


def test_every_set_is_visited_equally_often():
    assert calls_per_replay(10e-6, 150, None) == 300  # 2 rounds are the first to reach 200 calls
    assert calls_per_replay(10e-6, 343, None) == 343


def test_a_replay_takes_at_most_twenty_milliseconds():
    assert calls_per_replay(1e-3, 343, None) == 20  # not all sets, then
    assert calls_per_replay(4.9e-3, 1, None) == 1
    assert calls_per_replay(0.5, 3, None) == 1  # one call is always captured


def test_a_graph_stays_small_and_stops_before_values_overflow():
    assert calls_per_replay(0.2e-6, 1, None) == 2000
    assert calls_per_replay(10e-6, 1, 16) == 16
    assert calls_per_replay(0.0, 1, None) == 2000  # faster than an event can tell
