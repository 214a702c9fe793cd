"""A run as the regression gate sees it: one reading a gated metric, each with the speeds of its own session.

Reads JSONL records and the JSON that pytest-benchmark writes. A file may hold several sessions; what was measured after
a session's ceilings goes with them. Refuses what can't be compared; knows nothing of baselines.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pico_vllm.bench.cases import CACHE_POINTS, POINT_TITLES, Case, case_of, case_parts
from pico_vllm.bench.kernel_suite import records_of_benchmarks
from pico_vllm.bench.machine_speed import HOST_METRIC, Bounds, Speeds, bounds_of, read_speeds
from pico_vllm.bench.results import (
    HARDWARE_POINTS,
    Record,
    failure_of,
    load_records,
    measure,
    number_of,
    run_values,
    settings_of,
    summaries_of,
)
from pico_vllm.bench.run_labels import hardware_of
from pico_vllm.errors import ConfigError

#: What of each point is gated; a request alone has one number for its prompt and one for its answer.
_GATED = {
    "c1": ("ttft_ms_median", "tpot_ms_median"),
    "prefix": ("ttft_first_ms", "ttft_rest_ms"),
    "prefix_burst": ("ttft_ms_max",),
    "poisson": ("ttft_ms_median", "tpot_ms_median"),  # its tok/s are what was sent
    "kernel": ("time_us",),
}
_GATED_LOOPS = ("out_tok_s", "ttft_ms_median", "itl_ms_p99")
_NOT_GATED = (*HARDWARE_POINTS, "parity")
_P80_SIGMAS = 0.8416  # of a normal distribution, p20 and p80 are as many standard deviations from its median
#: Settings that an engine finds out for itself.
_FOUND_OUT = ("num_blocks",)


@dataclass(frozen=True, slots=True)
class Gated:
    """One number that is gated: a metric of a case."""

    case: Case
    metric: str

    @property
    def words(self) -> str:
        """``c1 64 tokens in, 128 out, concurrency 1``."""
        return " ".join([self.case.point, ", ".join(part.words for part in case_parts(self.case))])

    @property
    def kind(self) -> str:
        """Kernels and engines are configured, and spread, each in their own way."""
        return "kernel" if self.case.point == "kernel" else "engine"


@dataclass(frozen=True, slots=True)
class Reading:
    """What a run measured.

    Attributes:
        value: the median of its repetitions.
        cv: standard deviation of the repetitions over their mean; None: there is one only.
        num: of repetitions; 0 = many (a kernel's).
        speeds, bounds: of the session, and what of them the value goes with.
    """

    value: float
    cv: float | None
    num: int
    speeds: Speeds
    bounds: Bounds


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """All that was measured on one machine in one go.

    Attributes:
        name: the files.
        hardware: GPU, or CPU.
        about: commits and dates.
        configurations: by kind, what two runs must have in common.
        readings: what may be gated.
        failures: cases without a number, with the reason.
    """

    name: str
    hardware: str
    about: dict[str, str]
    configurations: dict[str, dict[str, Any]] = field(default_factory=dict)
    readings: dict[Gated, Reading] = field(default_factory=dict)
    failures: dict[Case, str] = field(default_factory=dict)


def read_run(paths: Sequence[Path], engine: str, points: Sequence[str] | None = None) -> MeasuredRun:
    """Read the files of one run.

    Args:
        paths: JSONL of ``bench run | suite | kernels``, JSON of pytest-benchmark.
        engine: whose records count; kernels have none.
        points: names; None = all.

    Raises:
        ConfigError: a file can't be read, its records can't be told apart, or the machine's speeds are missing.
    """
    name = ", ".join(path.name for path in paths)
    hardware = hardware_of_files(paths)
    files = [_load(path) for path in paths]
    first = next((r for of_file in files for r in of_file), {})
    run = MeasuredRun(name, hardware, {key: str(first[key]) for key in ("commit", "date", "tag") if first.get(key)})
    for of_file in files:
        for speeds, records in _sessions(of_file):
            for record in records:
                if _is_gated(record, engine, points):
                    _add(run, record, speeds)
    return run


def hardware_of_files(paths: Sequence[Path]) -> str:
    """GPU, or CPU, of the files of one run.

    Raises:
        ConfigError: there are records of several machines, or none.
    """
    found = {hardware_of(record) for path in paths for record in _load(path)} - {""}
    return _one("hardware", found, ", ".join(path.name for path in paths))


def _load(path: Path) -> list[Record]:
    try:
        whole = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # several objects, one a line; or load_records knows what to say
        whole = None
    if isinstance(whole, dict) and "benchmarks" in whole:
        return records_of_benchmarks(whole, str(path))
    return load_records([path])


def _is_gated(record: Record, engine: str, points: Sequence[str] | None) -> bool:
    point = record["point"]
    if point in _NOT_GATED or point not in POINT_TITLES or (points is not None and point not in points):
        return False
    return point == "kernel" or (record.get("engine") == engine and not record.get("label"))


def _sessions(records: Iterable[Record]) -> Iterator[tuple[Speeds | None, list[Record]]]:
    """A calibration "before", or ceilings after ceilings, begin a session."""
    session: list[Record] = []
    for record in records:
        begins = record["point"] == "calib" and record.get("when") == "before"
        again = record["point"] == "ceilings" and any(r["point"] == "ceilings" for r in session)
        if session and (begins or again):
            yield _speeds(session), session
            session = []
        session.append(record)
    if session:
        yield _speeds(session), session


def _speeds(session: Sequence[Record]) -> Speeds | None:
    ceilings = next((r for r in session if r["point"] == "ceilings"), None)
    calibs = [r for r in session if r["point"] == "calib" and HOST_METRIC in summaries_of(r)]
    if ceilings is None or not calibs:
        return None
    dtype = next((str(r["dtype"]) for r in session if r.get("dtype")), "bfloat16")
    return read_speeds(ceilings, calibs, dtype)


def _add(run: MeasuredRun, record: Record, speeds: Speeds | None) -> None:
    case = case_of(record)
    if (failure := failure_of(record)) is not None:
        run.failures.setdefault(case, failure)
        return
    if speeds is None:
        raise ConfigError(
            f"{run.name}: no ceilings and calib records go with {case.point}, so its times can't be normalised; "
            "`bench run`, `bench suite` and benchmarks/kernels write them"
        )
    run.failures.pop(case, None)
    for metric in _GATED.get(case.point, _GATED_LOOPS):
        gated = Gated(case, metric)
        found = measure(record, metric)
        if found is None or found.median <= 0:
            continue
        if gated in run.readings:
            raise ConfigError(f"{run.name}: {gated.words} was measured twice; give one run, not several in one file")
        cv, num = _spread(record, metric)
        run.readings[gated] = Reading(found.median, cv, num, speeds, bounds_of(record, metric, speeds))
        _configure(run, gated.kind, record)


def _spread(record: Record, metric: str) -> tuple[float | None, int]:
    """(CV, repetitions)."""
    if record["point"] == "kernel":
        time = summaries_of(record)[metric]
        low, median, high = (number_of(time.get(name)) for name in ("p20", "median", "p80"))
        cv = None if not (low and median and high) else (high - low) / (2 * _P80_SIGMAS * median)
        return cv, 0
    values = run_values(record, metric)
    if len(values) < 2:
        return None, len(values)
    return statistics.stdev(map(math.log, values)), len(values)


def _configure(run: MeasuredRun, kind: str, record: Record) -> None:
    """Add what the record says of its configuration; all of a run must say the same."""
    configuration = run.configurations.setdefault(kind, {})
    for key, value in _configuration(record).items():
        if configuration.setdefault(key, value) != value:
            raise ConfigError(
                f"{run.name} holds two configurations: {key} is {configuration[key]!r} and {value!r}; give one run"
            )


def _configuration(record: Record) -> dict[str, Any]:
    if record["point"] == "kernel":
        return {"backend": record.get("backend")}
    settings = {name: value for name, value in settings_of(record).items() if name not in _FOUND_OUT}
    if record["point"] in CACHE_POINTS:
        settings.pop("prefix_caching", None)  # a part of the case
    return {
        **{name: record.get(name) for name in ("engine", "model", "dtype", "mode")},
        **{f"settings.{name}": value for name, value in settings.items()},
    }


def _one(what: str, found: set[str], name: str) -> str:
    if len(found) != 1:
        how_many = "records of several machines" if found else "no records"
        raise ConfigError(
            f"{name}: {how_many} ({what}: {' / '.join(sorted(found)) or 'none'}); give the files of one run"
        )
    return next(iter(found))
