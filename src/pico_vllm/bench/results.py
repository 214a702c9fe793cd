"""Records as their readers see them: files, and the metrics of a record with their spread.

A record is one JSON object a line: what ran (engine, version, commit, hardware), what was asked of it and what was
measured (``metrics`` over ``runs``), or an ``error``. Any field but ``point`` may be missing: records of other engines,
of other scripts and of older commits are read too. Knows nothing of how records are made.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pico_vllm.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Record = dict[str, Any]

HARDWARE_POINTS = ("ceilings", "calib")  # about the machine, not about an engine
RATE_ENDINGS = ("tok_s", "req_s", "_share", "fraction", "speedup", "TBps", "TFLOPs")
MAX_FAILURE = 160  # characters of a failure's message
LOWER_IS_BETTER = ("host_share",)  # in spite of its ending

_TITLES = {
    "req_s": "requests/s",
    "ttft_first_ms": "TTFT ms, first request",
    "ttft_rest_ms": "TTFT ms, later requests",
    "goodput_req_s": "goodput requests/s",
    "baseline_us": "torch us",
    "fraction": "of the floor",
    "speedup": "× torch",
}
_WORDS = {
    **{"ttft_": "TTFT_", "itl_": "ITL_", "tpot_": "TPOT_", "e2e_": "end-to-end_"},
    **{"out_tok_s": "output tok/s", "tok_s": "tok/s"},
}


@dataclass(frozen=True, slots=True)
class Measure:
    """One metric of one record: the median over its runs, their range, and (max − min) / median where it is known."""

    median: float
    low: float
    high: float
    spread: float | None

    def overlaps(self, other: Measure) -> bool:
        """Whether the ranges of the runs touch: then the difference of the medians may be chance."""
        return self.low <= other.high and other.low <= self.high


def load_records(paths: Iterable[str | Path]) -> list[Record]:
    """Read JSON Lines files, in the order given.

    Raises:
        ConfigError: a file can't be read or a line is no record; names the file and the line.
    """
    return [record for path in paths for record in _read_file(Path(path))]


def _read_file(path: Path) -> list[Record]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read benchmark records from {path}: {error}") from error
    return [_parse(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]


def _parse(line: str, where: str) -> Record:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON ({error}); a benchmark file holds one JSON object a line") from error
    if not isinstance(record, dict) or not isinstance(record.get("point"), str):
        raise ConfigError(
            f'{where}: not a benchmark record; expected an object with a "point", such as {{"point": "c1", …}}'
        )
    return record


def higher_is_better(metric: str) -> bool:
    """Rates and shares grow, times shrink."""
    return metric.endswith(RATE_ENDINGS) and metric not in LOWER_IS_BETTER


def measure(record: Record, metric: str) -> Measure | None:
    """One metric of a record, or None if it has none."""
    summary = summaries_of(record).get(metric)
    values = run_values(record, metric) or _samples(summary)
    median = _median_of(summary)
    if median is None:
        if not values:
            return None
        median = statistics.median(values)
    if values:
        spread = (max(values) - min(values)) / median if len(values) > 1 and median else None
        return Measure(median, min(*values, median), max(*values, median), spread)
    return _without_runs(median, summary if isinstance(summary, dict) else {})


def _without_runs(median: float, summary: Record) -> Measure:
    """What a summary alone tells: the middle samples' range (p20 … p80), a spread, or nothing."""
    low, high = number_of(summary.get("p20")), number_of(summary.get("p80"))
    if low is not None and high is not None:
        return Measure(median, min(low, median), max(high, median), (high - low) / median if median else None)
    spread = number_of(summary.get("spread"))
    margin = abs(median) * (spread or 0.0)  # the runs lie somewhere in it
    return Measure(median, median - margin, median + margin, spread)


def failure_of(record: Record) -> str | None:
    """Why there are no numbers: ``failed: …`` or ``missing: …`` in one line; None if all is well."""
    for field, word in (("error", "failed"), ("missing", "missing")):
        if record.get(field):
            text = " ".join(str(record[field]).split())
            return f"{word}: {text if len(text) <= MAX_FAILURE else text[: MAX_FAILURE - 1] + '…'}"
    return None


def metric_title(metric: str) -> str:
    """``itl_ms_p99`` as a heading: ``ITL ms p99``."""
    if metric in _TITLES:
        return _TITLES[metric]
    for name, title in _WORDS.items():
        metric = metric.replace(name, title)
    return metric.replace("_", " ")


def format_number(value: float) -> str:
    """Three or four significant digits: ``0.712``, ``9.73``, ``97.3``, ``13,966``."""
    size = abs(value)
    return f"{value:,.{3 if size < 1 else 2 if size < 10 else 1 if size < 100 else 0}f}"


def format_metric(metric: str, value: float) -> str:
    """A share in percent, everything else as a number."""
    return f"{value:.0%}" if metric.endswith(("_share", "fraction")) else format_number(value)


def metric_names(records: Iterable[Record]) -> list[str]:
    """The metrics that any of the records sums up, or gives for a run."""
    names: dict[str, None] = {}
    for record in records:
        names |= dict.fromkeys(summaries_of(record))
        for run in runs_of(record):
            names |= dict.fromkeys(name for name, value in run.items() if number_of(value) is not None)
    return list(names)


def measured_metrics(records: Sequence[Record], wanted: Iterable[str]) -> list[str]:
    """Those of the wanted that any record has, or else all that there are; one at least, under which failures stand."""
    found = [metric for metric in wanted if any(measure(record, metric) for record in records)]
    return found or metric_names(records) or ["out_tok_s"]


def run_values(record: Record, metric: str) -> list[float]:
    """What each run measured; empty where the record doesn't say."""
    values = (_run_value(run, metric) for run in runs_of(record))
    return [value for value in values if value is not None]


def runs_of(record: Record) -> list[Record]:
    """Each run's numbers; empty where the record has none."""
    runs = record.get("runs")
    return [run for run in runs if isinstance(run, dict)] if isinstance(runs, list) else []


def _run_value(run: Record, metric: str) -> float | None:
    if metric in run:
        return number_of(run[metric])
    times = numbers_of(run.get("ttft_ms"))  # a prefix run: the TTFT of each of its requests, in turn
    if len(times) < 2:
        return None
    return {"ttft_first_ms": times[0], "ttft_rest_ms": statistics.median(times[1:])}.get(metric)


def settings_of(record: Record) -> Record:
    """The engine's settings, ``{}`` where the record has none."""
    settings = record.get("settings")
    return settings if isinstance(settings, dict) else {}


def summaries_of(record: Record) -> Record:
    """What the record sums up, by metric: {median, best, …}, samples, or a number."""
    if record["point"] == "kernel":
        return _kernel_summaries(record)
    metrics = record.get("metrics")
    return metrics if isinstance(metrics, dict) else {}


def _kernel_summaries(record: Record) -> Record:
    """A kernel's record holds its numbers beside each other; its fraction of the floor spreads as its time does."""
    names = ("time_us", "floor_us", "fraction", "baseline_us", "speedup")
    found = {name: record[name] for name in names if record.get(name) is not None}
    time = found.get("time_us")
    if not isinstance(time, dict) or not all(number_of(time.get(name)) for name in ("median", "p20", "p80")):
        return found
    if (fraction := number_of(found.get("fraction"))) is not None:
        floor = fraction * time["median"]
        found["fraction"] = {"median": fraction, "p20": floor / time["p80"], "p80": floor / time["p20"]}
    return found


def _median_of(summary: object) -> float | None:
    """A summary is {median, best}, a number, samples, or a pair of p50 and p99."""
    if isinstance(summary, dict):
        return number_of(summary.get("median"))
    if numbers := numbers_of(summary):
        return numbers[0] if len(numbers) == 2 else statistics.median(numbers)
    return number_of(summary)


def _samples(summary: object) -> list[float]:
    numbers = numbers_of(summary)
    return numbers if len(numbers) > 2 else []


def number_of(value: object) -> float | None:
    """The value if it is a number."""
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def numbers_of(value: object) -> list[float]:
    """The numbers of a list; none of anything else."""
    return [x for x in value if number_of(x) is not None] if isinstance(value, list) else []
