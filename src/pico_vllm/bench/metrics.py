"""From traces to numbers.

    TTFT    first token seen - arrival
    ITL     gap between a request's arrivals of tokens, divided by the tokens of the later one, once for each of them
    TPOT    (last token - first token) / tokens after the first arrival, one a request
    e2e     last token seen - arrival
    tok/s   output tokens / (first submit to last token)

Percentiles interpolate linearly between order statistics. Times are in ms in results, rounded to 0.1 us.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pico_vllm.bench import timing
from pico_vllm.bench.results import higher_is_better
from pico_vllm.bench.traces import Trace

#: Gaps between tokens that a record lists one by one; of more it holds the quantiles 0, 1/200 … 1.
_MAX_RAW_GAPS = 2048
_NUM_GAP_QUANTILES = 200
#: Numbers of a run that describe it and are not folded over runs.
_NOT_METRICS = ("out_tokens", "raw")


@dataclass(frozen=True, slots=True)
class Objective:
    """What a user asks of each request; a request that meets all of it counts as goodput.

    Attributes:
        ttft_ms, tpot_ms, e2e_ms: at most; None = no demand.
    """

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None

    def is_met(self, ttft_ms: float, tpot_ms: float | None, e2e_ms: float) -> bool:
        """Whether a request meets it; a request of one token has no TPOT and meets any."""
        measured = ((ttft_ms, self.ttft_ms), (tpot_ms, self.tpot_ms), (e2e_ms, self.e2e_ms))
        return all(limit is None or value is None or value <= limit for value, limit in measured)


def percentile(values: Sequence[float], share: float) -> float | None:
    """The value below which ``share`` (0 … 1) of the values lie; None without values."""
    return timing.percentile(values, share) if values else None


def inter_token_latencies_s(trace: Trace) -> list[float]:
    """Seconds between tokens; tokens that arrive together share their gap evenly."""
    gaps: list[float] = []
    for i in range(1, len(trace.times_s)):
        count = trace.counts[i]
        gaps += [(trace.times_s[i] - trace.times_s[i - 1]) / count] * count
    return gaps


def time_per_output_token_s(trace: Trace) -> float | None:
    """Mean seconds a token after the first arrival; None where there is none."""
    after_first = trace.num_tokens - trace.counts[0]
    return (trace.times_s[-1] - trace.times_s[0]) / after_first if after_first else None


def summarize(traces: Sequence[Trace], objective: Objective | None = None) -> dict[str, Any]:
    """One run's numbers, with each request's in ``raw``.

    Args:
        traces: of all requests; each has given a token at least.
        objective: for goodput.
    """
    ttft = [t.times_s[0] - t.arrival_s for t in traces]
    e2e = [t.times_s[-1] - t.arrival_s for t in traces]
    tpot = [time_per_output_token_s(t) for t in traces]
    itl = [gap for t in traces for gap in inter_token_latencies_s(t)]
    seconds = max(t.times_s[-1] for t in traces) - min(t.submit_s for t in traces)
    num_out = sum(t.num_tokens for t in traces)
    run: dict[str, Any] = {
        "dur_s": round(seconds, 5),
        "out_tokens": num_out,
        "out_tok_s": round(num_out / seconds, 2),
        "total_tok_s": round((num_out + sum(t.prompt_len for t in traces)) / seconds, 2),
        "req_s": round(len(traces) / seconds, 4),
    }
    known_tpot = [value for value in tpot if value is not None]
    for name, values in (("ttft", ttft), ("itl", itl), ("tpot", known_tpot), ("e2e", e2e)):
        run |= _statistics(name, values)
    if len(traces) == 1 and known_tpot:
        run["decode_tok_s"] = round(1 / known_tpot[0], 2)
    if objective is not None:
        met = [objective.is_met(a * 1e3, b and b * 1e3, c * 1e3) for a, b, c in zip(ttft, tpot, e2e, strict=True)]
        run |= {"goodput_req_s": round(sum(met) / seconds, 4), "goodput_share": round(sum(met) / len(met), 4)}
    late = max(t.submit_s - t.arrival_s for t in traces)
    if late > 0:
        run["submit_late_ms_max"] = _ms(late)
    run["raw"] = {"ttft_ms": [_ms(x) for x in ttft], "tpot_ms": [_ms(x) for x in tpot], "e2e_ms": [_ms(x) for x in e2e]}
    run["raw"] |= _raw_gaps(itl)
    return run


def _raw_gaps(itl: Sequence[float]) -> dict[str, list[float | None]]:
    """All gaps, or of very many their quantiles: a record stays one readable line."""
    if len(itl) <= _MAX_RAW_GAPS:
        return {"itl_ms": [_ms(x) for x in itl]}
    shares = (i / _NUM_GAP_QUANTILES for i in range(_NUM_GAP_QUANTILES + 1))
    ordered = sorted(itl)
    return {"itl_ms_quantiles": [_ms(percentile(ordered, share)) for share in shares]}


def _statistics(name: str, values: Sequence[float]) -> dict[str, float | None]:
    found = {
        "median": percentile(values, 0.5),
        "p90": percentile(values, 0.9),
        "p99": percentile(values, 0.99),
        "max": max(values, default=None),
        "min": min(values, default=None),
        "mean": statistics.mean(values) if values else None,
    }
    return {f"{name}_ms_{what}": _ms(value) for what, value in found.items()}


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 4)


def fold(runs: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Runs → {metric: {median, best, spread}} over runs; spread = (max - min) / median."""
    folded: dict[str, dict[str, float]] = {}
    for name in runs[0]:
        values = [run[name] for run in runs if isinstance(run.get(name), int | float)]
        if name in _NOT_METRICS or not values:
            continue
        median = statistics.median(values)
        best = max(values) if higher_is_better(name) else min(values)
        spread = (max(values) - min(values)) / median if median else 0.0
        folded[name] = {"median": round(median, 6), "best": best, "spread": round(spread, 4)}
    return folded
