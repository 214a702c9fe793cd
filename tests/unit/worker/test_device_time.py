"""DeviceTime: the time in which a step was on the device, however steps overlap."""

import pytest

from pico_vllm.worker import device_time
from pico_vllm.worker.device_time import DeviceTime


@pytest.fixture
def at(monkeypatch):
    """Sets the clock."""
    now = [0.0]
    monkeypatch.setattr(device_time.time, "perf_counter", lambda: now[0])
    return lambda seconds: now.__setitem__(0, seconds)


def test_steps_that_do_not_overlap_add_up(at):
    clock = DeviceTime()
    for start, end in ((1, 4), (10, 11)):
        at(start)
        clock.begin()
        at(end)
        clock.end()
    at(100)
    assert clock.busy_s == 4


def test_overlapping_steps_count_once(at):
    clock = DeviceTime()
    at(1)
    clock.begin()
    at(3)
    clock.begin()
    at(5)
    clock.end()
    at(6)
    assert clock.busy_s == 5, "the second one runs"
    at(8)
    clock.end()
    at(9)
    assert clock.busy_s == 7


def test_what_is_given_up_counts_until_then(at):
    clock = DeviceTime()
    clock.begin()
    clock.begin()
    at(2)
    clock.forget_running()
    at(5)
    assert clock.busy_s == 2
    clock.begin()
    at(6)
    clock.end()
    assert clock.busy_s == 3
    with pytest.raises(AssertionError):
        clock.end()
