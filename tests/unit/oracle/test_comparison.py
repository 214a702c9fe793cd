"""The sums and bounds, on numbers by hand."""

import math

import pytest
import torch

from pico_vllm.oracle.comparison import ErrorSum, first_failure
from pico_vllm.oracle.points import Point

POINT = Point(0, "attention", "paged_attention")


def error_of(dtype, *sequences):
    total = ErrorSum(POINT, dtype)
    for ours, truth, theirs in sequences:
        total.add(ours, truth, theirs)
    return total.result()


def test_errors_are_summed_over_sequences_by_hand():
    ones = torch.ones(2, 4)
    result = error_of(torch.bfloat16, (ones + 0.5, ones, ones + 0.25), (3 * ones, 3 * ones, 3 * ones))
    assert result.num_rows == 4
    assert result.largest == 0.5
    assert result.rms == pytest.approx(0.5 / math.sqrt(2))  # half of the elements are 0.5 off
    assert result.value_rms == pytest.approx(math.sqrt(5))
    assert result.bound == pytest.approx(1.5 * 0.25 / math.sqrt(2))
    assert (result.worst_row, result.row_bound) == (0.5, 4 * 0.25)
    assert not result.passes


def test_ours_may_be_one_and_a_half_times_as_wrong_as_theirs_and_no_more():
    ones = torch.ones(8, 4)
    for factor, passes in ((1.49, True), (1.51, False)):
        assert error_of(torch.bfloat16, (ones + 0.1 * factor, ones, ones + 0.1)).passes is passes


def test_exact_values_of_theirs_leave_one_unit_in_the_last_place():
    ones = torch.ones(8, 4)
    eps = torch.finfo(torch.bfloat16).eps
    assert error_of(torch.bfloat16, (ones * (1 + 0.9 * eps), ones, ones)).passes
    assert not error_of(torch.bfloat16, (ones * (1 + 1.1 * eps), ones, ones)).passes


def test_one_wrong_position_among_thousands_is_not_averaged_away():
    truth = torch.ones(4000, 4)
    ours = truth.clone()
    ours[1234] *= 1 + 5e-4
    result = error_of(torch.float32, (ours, truth, None))
    assert result.rms <= result.bound
    assert result.worst_row == pytest.approx(5e-4, rel=1e-3)
    assert not result.passes


@pytest.mark.parametrize("where", ["first", "second"])
def test_nan_never_passes(where):
    ones = torch.ones(2, 4)
    bad = ones.clone()
    bad[0, 0] = math.nan
    sequences = [(bad, ones, None), (ones, ones, None)]
    result = error_of(torch.float32, *(sequences if where == "first" else reversed(sequences)))
    assert not result.passes
    assert first_failure([result]) is result


def test_a_row_whose_truth_is_zero_hides_nothing():
    truth = torch.ones(4000, 4)
    ours = truth.clone()
    ours[1234] *= 1 + 5e-4
    truth[7] = ours[7] = 0.0
    result = error_of(torch.float32, (ours, truth, None))
    assert result.worst_row == pytest.approx(5e-4, rel=1e-3)
    assert not result.passes
    ours[7] = 1e-9
    assert error_of(torch.float32, (ours, truth, None)).worst_row == math.inf


def test_a_point_that_is_zero_everywhere_passes_and_can_be_shown():
    from pico_vllm.oracle.report import _nearness

    zeros = torch.zeros(3, 4)
    result = error_of(torch.float32, (zeros, zeros, None))
    assert result.passes
    assert _nearness(result) == 0.0
