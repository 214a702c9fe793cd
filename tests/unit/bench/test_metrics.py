"""Numbers of hand-written traces, worked out by hand."""

import pytest

from pico_vllm.bench.metrics import Objective, fold, inter_token_latencies_s, percentile, summarize
from pico_vllm.bench.traces import Trace


def trace(prompt_len, submit_s, events, arrival_s=None):
    """events: (time, tokens) pairs."""
    times, counts = zip(*events, strict=True)
    return Trace(prompt_len, submit_s if arrival_s is None else arrival_s, submit_s, list(times), list(counts))


ONE = trace(10, 1.0, [(1.5, 1), (1.6, 1), (1.8, 1), (1.9, 1)])  # gaps 100, 200, 100 ms


@pytest.mark.parametrize(
    "values, share, expected",
    [
        ([], 0.5, None),
        ([7.0], 0.99, 7.0),
        ([3.0, 1.0, 2.0], 0.5, 2.0),
        ([1.0, 2.0], 0.5, 1.5),
        ([0.0, 10.0], 0.99, 9.9),
        (list(range(101)), 0.9, 90),
        ([1.0, 2.0, 3.0, 4.0], 1.0, 4.0),
        ([1.0, 2.0, 3.0, 4.0], 0.0, 1.0),
    ],
)
def test_percentile_interpolates_between_order_statistics(values, share, expected):
    assert percentile(values, share) == (expected if expected is None else pytest.approx(expected, abs=1e-12))


def test_one_request():
    run = summarize([ONE])
    assert run["dur_s"] == 0.9  # 1.0 → 1.9
    assert run["out_tokens"] == 4
    assert run["out_tok_s"] == 4.44  # 4 / 0.9
    assert run["total_tok_s"] == 15.56  # (10 + 4) / 0.9
    assert run["ttft_ms_median"] == run["ttft_ms_p99"] == run["ttft_ms_min"] == run["ttft_ms_max"] == 500.0
    assert run["itl_ms_median"] == 100.0
    assert run["itl_ms_mean"] == 133.3333
    assert run["itl_ms_max"] == 200.0
    assert run["itl_ms_p90"] == 180.0  # 100, 100, 200: place 1.8
    assert run["itl_ms_p99"] == 198.0
    assert run["tpot_ms_median"] == 133.3333  # (1.9 - 1.5) / 3
    assert run["e2e_ms_median"] == 900.0
    assert run["decode_tok_s"] == 7.5  # 1 / 0.13333
    assert run["raw"] == {
        "ttft_ms": [500.0],
        "tpot_ms": [133.3333],
        "e2e_ms": [900.0],
        "itl_ms": [100.0, 200.0, 100.0],
    }
    assert "goodput_req_s" not in run and "submit_late_ms_max" not in run


def test_tokens_that_arrive_together_share_their_gap():
    bundled = trace(1, 0.0, [(1.0, 1), (1.3, 3), (1.4, 1)])
    assert inter_token_latencies_s(bundled) == pytest.approx([0.1, 0.1, 0.1, 0.1])
    run = summarize([bundled])
    assert run["out_tokens"] == 5
    assert run["tpot_ms_median"] == 100.0  # 0.4 s over the 4 tokens after the first


def test_a_first_arrival_of_several_tokens_counts_them_out_of_tpot():
    run = summarize([trace(1, 0.0, [(1.0, 2), (1.2, 2)])])
    assert run["tpot_ms_median"] == 100.0
    assert run["itl_ms_median"] == 100.0


def test_a_single_token_has_no_tpot():
    run = summarize([trace(5, 0.0, [(0.25, 1)])])
    assert run["ttft_ms_median"] == 250.0
    assert run["itl_ms_median"] is run["itl_ms_mean"] is run["tpot_ms_median"] is None
    assert run["raw"]["tpot_ms"] == [None]
    assert "decode_tok_s" not in run


def test_two_requests_from_first_submit_to_last_token():
    other = trace(30, 1.2, [(1.4, 1), (2.2, 1)])
    run = summarize([ONE, other])
    assert run["dur_s"] == 1.2  # 1.0 → 2.2
    assert run["out_tok_s"] == 5.0  # 6 tokens
    assert run["total_tok_s"] == 38.33  # 46 / 1.2
    assert run["req_s"] == 1.6667
    assert run["ttft_ms_median"] == 350.0  # of 500 and 200
    assert run["itl_ms_median"] == 150.0  # of 100, 100, 200, 800
    assert run["tpot_ms_max"] == 800.0
    assert "decode_tok_s" not in run


def test_latencies_count_from_the_arrival_not_from_the_submission():
    late = trace(1, 1.5, [(2.0, 1), (2.1, 1)], arrival_s=1.0)
    run = summarize([late])
    assert run["ttft_ms_median"] == 1000.0
    assert run["e2e_ms_median"] == 1100.0
    assert run["submit_late_ms_max"] == 500.0
    assert run["dur_s"] == 0.6  # from the submission


@pytest.mark.parametrize(
    "objective, good",
    [
        (Objective(), 2),
        (Objective(ttft_ms=501), 2),
        (Objective(ttft_ms=499), 1),
        (Objective(tpot_ms=134), 1),
        (Objective(tpot_ms=133), 0),
        (Objective(ttft_ms=201, tpot_ms=801), 1),
        (Objective(e2e_ms=950), 1),
        (Objective(e2e_ms=1001, ttft_ms=300), 1),
    ],
)
def test_goodput_counts_requests_that_meet_all_of_the_objective(objective, good):
    other = trace(30, 1.2, [(1.4, 1), (2.2, 1)])  # TTFT 200, TPOT 800, e2e 1000
    run = summarize([ONE, other], objective)  # ONE: TTFT 500, TPOT 133, e2e 900
    assert run["goodput_share"] == good / 2
    assert run["goodput_req_s"] == round(good / 1.2, 4)


def test_a_request_of_one_token_meets_any_tpot():
    assert summarize([trace(1, 0.0, [(0.1, 1)])], Objective(tpot_ms=1.0))["goodput_share"] == 1.0


def test_fold_takes_the_lowest_time_and_the_highest_rate_as_best():
    runs = [{"ttft_ms_median": 4.0, "out_tok_s": 100.0}, {"ttft_ms_median": 2.0, "out_tok_s": 300.0}]
    runs.append({"ttft_ms_median": 3.0, "out_tok_s": 200.0})
    assert fold(runs) == {
        "ttft_ms_median": {"median": 3.0, "best": 2.0, "spread": 0.6667},  # (4 - 2) / 3
        "out_tok_s": {"median": 200.0, "best": 300.0, "spread": 1.0},
    }


def test_fold_leaves_out_what_is_no_metric():
    assert fold([{"out_tokens": 5, "raw": {}, "tpot_ms_median": None, "dur_s": 2.0}]) == {
        "dur_s": {"median": 2.0, "best": 2.0, "spread": 0.0}
    }


def test_of_very_many_gaps_a_record_holds_quantiles():
    times = [(i * (i + 1) / 2 / 1e3, 1) for i in range(2050)]  # gaps of 1, 2 … 2049 ms
    raw = summarize([trace(1, -1.0, times)])["raw"]
    assert "itl_ms" not in raw
    quantiles = raw["itl_ms_quantiles"]
    assert len(quantiles) == 201
    assert (quantiles[0], quantiles[100], quantiles[200]) == (1.0, 1025.0, 2049.0)
