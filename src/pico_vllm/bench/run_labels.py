"""What ran: which records belong to one run of one engine, and the shortest name that tells it from the others."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pico_vllm.bench.cases import Case, case_of
from pico_vllm.bench.results import Record, failure_of, settings_of

# A list, or the records of each file: runs of different files stay apart where they measured the same.
Records = Sequence[Record] | Mapping[str, Sequence[Record]]

_NAMES = ("engine", "version", "mode", "label", "tag", "commit", "model", "dtype")  # a record's fields and a Run's
_FORMS = {"label": " {}", "version": " {}", "mode": " [{}]", "tag": " [{}]", "commit": " @ {}"}
# What an engine found out, or says twice: two starts of one configuration may differ in it.
_NOT_CONFIGURATION = ("num_blocks", "disable_radix_cache")


@dataclass(frozen=True, slots=True)
class Run:
    """What ran: records of one run differ in their case only."""

    engine: str
    version: str = ""
    mode: str = ""
    label: str = ""
    tag: str = ""
    commit: str = ""
    model: str = ""
    dtype: str = ""
    hardware: str = ""
    settings: tuple[tuple[str, str], ...] = ()
    prefix_caching: str = ""
    file: str = ""

    def may_join(self, other: Run) -> bool:
        """Whether they are the same but for the file and the prefix cache."""
        return replace(self, file=other.file, prefix_caching=other.prefix_caching) == other


@dataclass(frozen=True, slots=True)
class RunRecords:
    """The records of one run, with a name that tells it from the other runs."""

    run: Run
    name: str
    records: tuple[Record, ...]

    @property
    def points(self) -> set[str]:
        """The points that it has records of."""
        return {record["point"] for record in self.records}

    def records_of(self, point: str) -> list[Record]:
        """Every record of a point, in the order in which they were written."""
        return [record for record in self.records if record["point"] == point]

    def by_case(self, point: str) -> dict[Case, Record]:
        """The record of each case; of several the last one that isn't an error."""
        found: dict[Case, Record] = {}
        for record in self.records_of(point):
            case = case_of(record)
            if case not in found or failure_of(record) is None:
                found[case] = record
        return found


def is_measured(case: Case, found: Iterable[Mapping[Case, Record]]) -> bool:
    """Whether any run has numbers for the case."""
    return any(case in by_case and failure_of(by_case[case]) is None for by_case in found)


def collect_runs(records: Records) -> tuple[RunRecords, ...]:
    """Group records by what ran, in the order in which the runs first appear.

    What differs only in its file, or in whether the prefix cache is on, is one run unless both measured the same case.
    """
    grouped: dict[Run, list[Record]] = defaultdict(list)
    for file, of_file in (records if isinstance(records, Mapping) else {"": records}).items():
        for record in of_file:
            grouped[run_of(record, file)].append(record)
    merged: dict[Run, list[Record]] = {}
    for run, of_run in grouped.items():
        cases = set(map(case_of, of_run))
        homes = (home for home in merged if home.may_join(run) and cases.isdisjoint(map(case_of, merged[home])))
        merged.setdefault(next(homes, run), []).extend(of_run)
    labels = run_labels(list(merged))
    return tuple(RunRecords(run, labels[run], tuple(of_run)) for run, of_run in merged.items())


def run_of(record: Record, file: str = "") -> Run:
    """What ran, as far as the record says."""
    if record["point"] == "kernel":
        return _run_of_kernels(record, file)
    settings = {key: _setting(value) for key, value in settings_of(record).items() if key not in _NOT_CONFIGURATION}
    cached = settings.pop("prefix_caching", _setting(record.get("prefix_caching")))
    fields = {name: str(record.get(name) or "") for name in _NAMES}
    return Run(
        **{**fields, "commit": short_commit(fields["commit"])},
        hardware=hardware_of(record),
        settings=tuple(sorted(settings.items())),
        prefix_caching=cached,
        file=file,
    )


def _run_of_kernels(record: Record, file: str) -> Run:
    """Of a backend, not of an engine; sizes and dtype are the case's."""
    tag, commit = (str(record.get(name) or "") for name in ("tag", "commit"))
    engine = f"{record.get('backend') or '?'} kernels"
    return Run(engine, tag=tag, commit=short_commit(commit), hardware=hardware_of(record), file=file)


def short_commit(commit: str) -> str:
    """Nine digits, and what follows a plus (uncommitted changes)."""
    digits, plus, rest = commit.partition("+")
    return digits[:9] + plus + rest


def hardware_of(record: Record) -> str:
    """The GPU, or the CPU for a record made without one."""
    device = str(record.get("device") or "")
    fields = ("cpu", "gpu") if device == "cpu" else ("gpu", "cpu")
    name = next((str(record[field]) for field in fields if record.get(field)), device if device != "cuda" else "")
    return name.removeprefix("NVIDIA ")


def run_labels(runs: Sequence[Run]) -> dict[Run, str]:
    """A name a run, ``engine version [mode] [tag] @ commit · hardware``, with only the parts that tell runs apart.

    Model, dtype and hardware are named in every label as soon as two runs differ in them. Settings come after them,
    only those that are needed, and the file only where nothing else differs.
    """
    labels = {run: run.engine or "?" for run in runs}
    for name, form in _FORMS.items():
        _tell_apart(labels, {run: _filled(form, getattr(run, name)) for run in runs})
    for name in ("model", "dtype", "hardware"):
        if len({getattr(run, name) for run in runs} - {""}) > 1:
            labels = {run: label + _filled(" · {}", getattr(run, name)) for run, label in labels.items()}
    for key in _setting_names(runs):
        _tell_apart(labels, {run: _setting_words(key, dict(run.settings).get(key, "")) for run in runs})
    _tell_apart(labels, {run: _setting_words("prefix_caching", run.prefix_caching) for run in runs})
    _tell_apart(labels, {run: _filled(" ({})", Path(run.file).stem) for run in runs})
    _tell_apart(labels, {run: _filled(" ({})", run.file) for run in runs})
    _tell_apart(labels, {run: f" #{i}" for i, run in enumerate(runs, 1)})
    return labels


def _setting_names(runs: Sequence[Run]) -> list[str]:
    """Those with plain values first: ``cache=static`` says more than the object it came from."""
    names = {key: value.startswith(("{", "[")) for run in runs for key, value in run.settings}
    return sorted(names, key=lambda key: (names[key], key))


def _setting_words(key: str, value: str) -> str:
    """``, cache=static``; a flag that is on is its name, one that is off is left out."""
    if value.lower() in ("true", "false", ""):
        return f", {key}" if value.lower() == "true" else ""
    return f", {key}={value}"


def _tell_apart(labels: dict[Run, str], suffixes: Mapping[Run, str]) -> None:
    """Add to equal labels, in place, the suffixes that differ."""
    equal: dict[str, list[Run]] = defaultdict(list)
    for run, label in labels.items():
        equal[label].append(run)
    for label, runs in equal.items():
        if len({suffixes[run] for run in runs}) > 1:
            labels.update({run: label + suffixes[run] for run in runs})


def _filled(form: str, value: str) -> str:
    return form.format(value) if value else ""


def _setting(value: object) -> str:
    return "" if value is None else value if isinstance(value, str) else json.dumps(value, sort_keys=True)
