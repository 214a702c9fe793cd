"""A baseline: what one kind of machine measured, and how far apart runs of the same code lie there.

``propose_baseline`` makes one from runs, ``regression_gate`` holds a run against it. Every value is normalised to the
baseline's reference machine (``machine_speed``), the mean of those that its runs came from. The file is JSON with an
entry a line, so that a diff shows which points a new one moves.

Margins. ``spread`` is the standard deviation of the logarithm of a run's normalised value: between runs, that of all
entries of a kind, and as far as there are many runs the entry's own; at least what its repetitions explain. An entry's
margin is t * spread * sqrt(1 + 1 / runs). The root is the baseline's own error. t is Student's, for a spread that is
itself an estimate, and such that of an unchanged run's gated entries one is beyond its margin in ``FALSE_ALARMS`` of
runs.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pico_vllm.bench.cases import Case
from pico_vllm.bench.machine_speed import Bounds, Speeds, mean_bounds, mean_speeds, time_like
from pico_vllm.bench.measured_run import Gated, MeasuredRun
from pico_vllm.errors import ConfigError

FORMAT = 1
MAX_CV = 0.03  # above it an entry is reported, not gated
FALSE_ALARMS = 0.02  # of unchanged runs, all their entries together
MIN_SPREAD = 0.005
#: Between runs, of a baseline made from one run, which doesn't tell: what H200 hosts differ by.
ASSUMED_SPREAD = 0.02
_PRIOR_RUNS = 40  # as many runs' worth of the pooled spread are mixed with an entry's own: two runs say little of one


@dataclass(frozen=True, slots=True)
class Entry:
    """One gated number.

    Attributes:
        values: of each run, on the reference machine, in the metric's unit.
        bounds: which speeds it goes with.
        cv: of repetitions, or between runs if that is more; None: one repetition of one run.
        spread: standard deviation of the logarithm of one run's normalised value.
    """

    gated: Gated
    values: tuple[float, ...]
    bounds: Bounds
    cv: float | None
    spread: float

    @property
    def value(self) -> float:
        """What is expected of a run on the reference machine."""
        return statistics.geometric_mean(self.values)

    @property
    def num_runs(self) -> int:
        """That measured it."""
        return len(self.values)

    @property
    def predicted_spread(self) -> float:
        """Of the difference between a run and the baseline, whose value is a mean of a few runs."""
        return self.spread * math.sqrt(1 + 1 / self.num_runs)

    @property
    def is_noisy(self) -> bool:
        """Reported, not gated."""
        return self.cv is not None and self.cv > MAX_CV


@dataclass(frozen=True, slots=True)
class Baseline:
    """What a run of ``hardware`` is held against.

    Attributes:
        engine: whose records count.
        runs: about each: files, commit, date.
        speeds: of the reference machine.
        configurations: by kind, what a run must have in common with it.
    """

    hardware: str
    engine: str
    runs: tuple[dict[str, str], ...]
    speeds: Speeds
    configurations: dict[str, dict[str, Any]]
    entries: tuple[Entry, ...]

    def margin(self, entry: Entry) -> float:
        """Of the logarithm of its slowdown; more is a failure."""
        return self.quantile(entry.gated.kind) * entry.predicted_spread

    def quantile(self, kind: str) -> float:
        """How many standard deviations a margin of a kind's entries is."""
        quiet = [e for e in self.entries if not e.is_noisy]
        others = sum(e.num_runs - 1 for e in quiet if e.gated.kind == kind)
        return student_quantile((1 - FALSE_ALARMS) ** (1 / max(1, len(quiet))), others)

    def power(self, entry: Entry, slowdown: float = 1.1) -> float:
        """Share of runs in which an entry that has become ``slowdown`` times as slow is beyond its margin."""
        return statistics.NormalDist().cdf((math.log(slowdown) - self.margin(entry)) / entry.spread)


def student_quantile(share: float, freedom: int) -> float:
    """The value below which ``share`` of Student's t lies; of a normal distribution with no degrees of freedom.

    Abramowitz and Stegun 26.7.5: within 1 % from 5 degrees on, 7 % low with 2.
    """
    z = statistics.NormalDist().inv_cdf(share)
    if not freedom:
        return z
    terms = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + sum(term / freedom**power for power, term in enumerate(terms, 1))


def propose_baseline(runs: Sequence[MeasuredRun], engine: str) -> Baseline:
    """Make a baseline from runs of one configuration on machines of one kind.

    Raises:
        ConfigError: they are of different hardware or configurations, or nothing in them can be gated.
    """
    first = runs[0]
    for run in runs[1:]:
        if run.hardware != first.hardware:
            raise ConfigError(
                f"{run.name} is of {run.hardware}, {first.name} of {first.hardware}: "
                "a baseline is of one kind of machine"
            )
        if different := configuration_differences(first.configurations, run.configurations):
            raise ConfigError(f"{first.name} and {run.name} differ in {'; '.join(different)}")
    everything = list(dict.fromkeys(gated for run in runs for gated in run.readings))
    if not everything:
        raise ConfigError(
            f"{', '.join(run.name for run in runs)}: no numbers of engine {engine!r} and no kernels in it"
        )
    speeds = mean_speeds(reading.speeds for run in runs for reading in run.readings.values())
    found = [_Samples.collect(gated, runs, speeds) for gated in everything]
    pooled = {kind: _pooled_spread(s for s in found if s.gated.kind == kind) for kind in ("engine", "kernel")}
    configurations = {kind: value for run in runs for kind, value in run.configurations.items()}
    return Baseline(
        hardware=first.hardware,
        engine=engine,
        runs=tuple({"files": run.name, **run.about} for run in runs),
        speeds=speeds,
        configurations=configurations,
        entries=tuple(samples.entry(pooled[samples.gated.kind]) for samples in found),
    )


def configuration_differences(ours: dict[str, dict[str, Any]], theirs: dict[str, dict[str, Any]]) -> list[str]:
    """``model A → B`` a difference. What only one of them knows (a setting that an older version hadn't) is none."""
    return [
        f"{key} {value!r} → {theirs[kind][key]!r}"
        for kind in ours.keys() & theirs.keys()
        for key, value in ours[kind].items()
        if key in theirs[kind] and theirs[kind][key] != value
    ]


@dataclass(frozen=True, slots=True)
class _Samples:
    """One number in all runs: logarithms of its normalised times."""

    gated: Gated
    bounds: Bounds
    times: tuple[float, ...]
    within: float | None  # standard deviation of repetitions
    num: int  # of repetitions a run

    @classmethod
    def collect(cls, gated: Gated, runs: Sequence[MeasuredRun], reference: Speeds) -> _Samples:
        readings = [run.readings[gated] for run in runs if gated in run.readings]
        bounds = mean_bounds([reading.bounds for reading in readings])
        times = (math.log(time_like(gated.metric, r.value) / bounds.slowdown(r.speeds, reference)) for r in readings)
        cvs = [r.cv for r in readings if r.cv is not None]
        within = math.sqrt(statistics.fmean(cv**2 for cv in cvs)) if cvs else None
        return cls(gated, bounds, tuple(times), within, min(r.num for r in readings))

    @property
    def between(self) -> float | None:
        return statistics.stdev(self.times) if len(self.times) > 1 else None

    @property
    def cv(self) -> float | None:
        known = [value for value in (self.within, self.between) if value is not None]
        return max(known, default=None)

    def entry(self, pooled: float) -> Entry:
        others = len(self.times) - 1
        variance = (_PRIOR_RUNS * pooled**2 + others * (self.between or 0.0) ** 2) / (_PRIOR_RUNS + others)
        repeated = (self.within or 0.0) / math.sqrt(self.num) if self.num else 0.0
        values = tuple(_rounded(time_like(self.gated.metric, math.exp(time))) for time in self.times)
        spread = max(math.sqrt(variance), repeated, MIN_SPREAD)
        return Entry(self.gated, values, self.bounds, self.cv, spread)


def _pooled_spread(samples: Iterable[_Samples]) -> float:
    """Between runs, over all entries that are quiet enough to be gated."""
    known = [(s.between, len(s.times) - 1) for s in samples if s.between is not None and (s.cv or 0.0) <= MAX_CV]
    if not known:
        return ASSUMED_SPREAD
    return math.sqrt(sum(others * between**2 for between, others in known) / sum(others for _, others in known))


# The file


def write_baseline(baseline: Baseline, path: Path) -> None:
    """Write JSON, an entry a line.

    Raises:
        ConfigError: it can't be written.
    """
    head = {"format": FORMAT, **{k: v for k, v in asdict(baseline).items() if k != "entries"}}
    entries = ",\n".join(f"    {json.dumps(_entry_to_json(entry))}" for entry in baseline.entries)
    text = json.dumps(head, indent=2).removesuffix("\n}") + f',\n  "entries": [\n{entries}\n  ]\n}}\n'
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"can't write the baseline to {path}: {error}") from None


def read_baseline(path: Path) -> Baseline:
    """Read what ``write_baseline`` wrote.

    Raises:
        ConfigError: it isn't there, or isn't a baseline of this format.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"can't read the baseline {path}: {error}") from None
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        raise ConfigError(
            f"{path} is no baseline of format {FORMAT}; `pico-vllm bench baseline RUN.jsonl --out {path}` makes one"
        )
    try:
        return Baseline(
            hardware=raw["hardware"],
            engine=raw["engine"],
            runs=tuple(raw["runs"]),
            speeds=Speeds(**raw["speeds"]),
            configurations=raw["configurations"],
            entries=tuple(_entry_from_json(entry) for entry in raw["entries"]),
        )
    except (KeyError, TypeError) as error:
        raise ConfigError(f"{path} is a broken baseline ({type(error).__name__}: {error}); propose it anew") from None


def baseline_name(hardware: str) -> str:
    """Name of its file: ``h200.json``."""
    return "-".join("".join(c if c.isalnum() else " " for c in hardware.lower()).split()) + ".json"


def _entry_to_json(entry: Entry) -> dict[str, Any]:
    """Of the case only what it says."""
    empty = asdict(Case(""))
    case = {key: value for key, value in asdict(entry.gated.case).items() if value != empty[key]}
    return {
        "case": case,
        "metric": entry.gated.metric,
        "values": entry.values,
        "cv": None if entry.cv is None else round(entry.cv, 5),
        "spread": round(entry.spread, 5),
        "bounds": {name: round(share, 4) for name, share in asdict(entry.bounds).items()},
    }


def _entry_from_json(raw: dict[str, Any]) -> Entry:
    case = Case(**{**raw["case"], "op": tuple(raw["case"].get("op", ()))})
    return Entry(Gated(case, raw["metric"]), tuple(raw["values"]), Bounds(**raw["bounds"]), raw["cv"], raw["spread"])


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")
