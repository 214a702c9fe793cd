"""Keys and number of values; never how fast this machine is."""

import torch

from pico_vllm.bench.calibration import calibrate


def test_calibration_has_the_records_keys_and_positive_values():
    measured = calibrate(torch.device("cpu"))
    assert {key: len(values) for key, values in measured.items()} == {
        "python_loop_ns": 5,
        "eager_launch_us": 5,
        "launch_and_wait_us": 2,
        "pipe_round_trip_us_after_0ms": 2,
        "pipe_round_trip_us_after_10ms": 2,
    }
    assert all(value > 0 for values in measured.values() for value in values)
    for key in ("launch_and_wait_us", "pipe_round_trip_us_after_0ms", "pipe_round_trip_us_after_10ms"):
        p50, p99 = measured[key]
        assert p50 <= p99
