"""The regression gate: a run against a baseline, number by number, and the table of what slowed by how much.

A number is slower if its normalised time is longer than the baseline's by more than its margin (``baseline``). One that
is noisy, in the baseline or in this run, is shown and decides nothing. Refuses to compare what isn't comparable.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pico_vllm.bench.baseline import MAX_CV, Baseline, Entry, configuration_differences
from pico_vllm.bench.machine_speed import Speeds, mean_speeds, time_like
from pico_vllm.bench.results import format_number, metric_title
from pico_vllm.errors import ConfigError

if TYPE_CHECKING:
    from pico_vllm.bench.measured_run import MeasuredRun, Reading

Verdict = Literal["slower", "faster", "same", "noisy"]

_STYLES: dict[Verdict, str] = {"slower": "bold red", "faster": "green", "same": "", "noisy": "dim"}
_ORDER: tuple[Verdict, ...] = ("slower", "faster", "noisy", "same")
_MAX_NAMED = 5  # points in a message


@dataclass(frozen=True, slots=True)
class Change:
    """One number against its baseline.

    Attributes:
        expected: the baseline's value on this run's machine.
        value: what was measured, in the same unit.
        slowdown: normalised time / the baseline's; 1.1 = 10 % slower, whether it is a rate or a time.
        allowed: the largest slowdown that is no failure.
        cv: of this run's repetitions.
    """

    entry: Entry
    expected: float
    value: float
    slowdown: float
    allowed: float
    cv: float | None

    @property
    def verdict(self) -> Verdict:
        """Faster is beyond the same margin on the other side."""
        if self.entry.is_noisy or (self.cv is not None and self.cv > MAX_CV):
            return "noisy"
        return "slower" if self.slowdown > self.allowed else "faster" if self.slowdown < 1 / self.allowed else "same"


@dataclass(frozen=True, slots=True)
class GateResult:
    """A run against a baseline.

    Attributes:
        changes: one an entry, in the baseline's order.
        extra: measured, but not in the baseline.
        speeds: of this run's machine; ``reference`` of the baseline's.
    """

    changes: tuple[Change, ...]
    extra: tuple[str, ...]
    speeds: Speeds
    reference: Speeds

    @property
    def slower(self) -> list[Change]:
        """What fails the gate."""
        return [change for change in self.changes if change.verdict == "slower"]

    @property
    def faster(self) -> list[Change]:
        """What a new baseline would move."""
        return [change for change in self.changes if change.verdict == "faster"]


def gate(run: MeasuredRun, baseline: Baseline, points: Sequence[str] | None = None) -> GateResult:
    """Hold a run against a baseline.

    Args:
        run: of the same hardware and configuration.
        baseline: all of whose entries the run must have.
        points: names; None = all of the baseline's.

    Raises:
        ConfigError: they can't be compared, or an entry is missing in the run; says what to do.
    """
    if run.hardware != baseline.hardware:
        raise ConfigError(
            f"{run.name} was measured on {run.hardware}, the baseline on {baseline.hardware}: "
            "their times don't compare. Give the baseline of this hardware, or propose one: "
            "pico-vllm bench baseline RUN.jsonl --out FILE"
        )
    if different := configuration_differences(baseline.configurations, run.configurations):
        raise ConfigError(
            f"{run.name} isn't configured as the baseline is: {'; '.join(different)}. Measure with the baseline's "
            "configuration, or propose a baseline of this one"
        )
    entries = [entry for entry in baseline.entries if points is None or entry.gated.case.point in points]
    if not entries:
        have = ", ".join(dict.fromkeys(entry.gated.case.point for entry in baseline.entries))
        raise ConfigError(f"the baseline has nothing of the points {', '.join(points or ())}; it has {have}")
    _refuse_missing(run, entries)
    quantiles = {kind: baseline.quantile(kind) for kind in {entry.gated.kind for entry in entries}}
    changes = tuple(
        _change(entry, run.readings[entry.gated], baseline.speeds, quantiles[entry.gated.kind]) for entry in entries
    )
    known = {entry.gated for entry in baseline.entries}
    extra = dict.fromkeys(gated.words for gated in run.readings if gated not in known)
    speeds = mean_speeds(run.readings[entry.gated].speeds for entry in entries)
    return GateResult(changes, tuple(extra), speeds, baseline.speeds)


def _refuse_missing(run: MeasuredRun, entries: Sequence[Entry]) -> None:
    missing: dict[str, list[str]] = {}
    for entry in entries:
        if entry.gated not in run.readings:
            reason = run.failures.get(entry.gated.case)
            words = entry.gated.words + (f" ({reason})" if reason else "")
            missing.setdefault(words, []).append(entry.gated.metric)
    if not missing:
        return
    names = _some([f"{words}: {', '.join(metrics)}" for words, metrics in missing.items()])
    raise ConfigError(
        f"{run.name} lacks {len(missing)} point(s) of the baseline: {names}. Measure them, gate what "
        "is there (--points NAMES), or propose a baseline without them"
    )


def _some(names: Sequence[str]) -> str:
    """The first few, and how many more there are."""
    more = f"; and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return "; ".join(names[:_MAX_NAMED]) + more


def _change(entry: Entry, reading: Reading, reference: Speeds, quantile: float) -> Change:
    metric = entry.gated.metric
    machine = entry.bounds.slowdown(reading.speeds, reference)
    expected = time_like(metric, entry.value) * machine
    slowdown = time_like(metric, reading.value) / expected
    allowed = math.exp(quantile * entry.predicted_spread)
    return Change(entry, time_like(metric, expected), reading.value, slowdown, allowed, reading.cv)


# For a terminal


def render(result: GateResult, *, everything: bool = False) -> RenderableType:
    """What slowed, sped up or is noisy, worst first; the rest is counted, or shown too with ``everything``."""
    shown = [c for c in result.changes if everything or c.verdict != "same"]
    parts: list[RenderableType] = [Text(_machine_words(result))]
    if shown:
        parts.append(_table(sorted(shown, key=lambda c: (_ORDER.index(c.verdict), -c.slowdown))))
    if result.extra:
        parts.append(Text(f"not in the baseline: {_some(result.extra)}", "dim"))
    parts.append(Text(_sentence(result), _sentence_style(result)))
    if result.faster and not result.slower:
        parts.append(Text("A new baseline could be proposed: pico-vllm bench baseline RUN.jsonl … --out FILE"))
    return Group(*parts)


def _machine_words(result: GateResult) -> str:
    ratios = (
        f"{name} {getattr(result.speeds, name) / getattr(result.reference, name):.3f}×"
        for name in ("bandwidth", "matmul", "host")
    )
    return f"this machine against the baseline's: {', '.join(ratios)}; expected values are for this machine"


def _table(changes: Sequence[Change]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("", "what", "metric"):
        table.add_column(heading, overflow="fold")
    for heading in ("expected", "measured", "time", "allowed", "CV"):
        table.add_column(heading, justify="right", no_wrap=True)
    for change in changes:
        cv = max((value for value in (change.cv, change.entry.cv) if value is not None), default=None)
        table.add_row(
            change.verdict,
            change.entry.gated.words,
            metric_title(change.entry.gated.metric),
            format_number(change.expected),
            format_number(change.value),
            f"{change.slowdown - 1:+.1%}",
            f"{change.allowed - 1:+.1%}" if change.verdict != "noisy" else "–",
            "–" if cv is None else f"{cv:.1%}",
            style=_STYLES[change.verdict],
        )
    return table


def _sentence_style(result: GateResult) -> str:
    if result.slower:
        return "bold red"
    return "bold green" if any(change.verdict != "noisy" for change in result.changes) else "bold yellow"


def _sentence(result: GateResult) -> str:
    counts = Counter(change.verdict for change in result.changes)
    gated = len(result.changes) - counts["noisy"]
    noisy = f"; {counts['noisy']} too noisy to gate (CV > {MAX_CV:.0%})" if counts["noisy"] else ""
    faster = f", {counts['faster']} faster" if counts["faster"] else ""
    if not gated:
        num = len(result.changes)
        return f"NOTHING GATED: all {num} numbers are too noisy (CV > {MAX_CV:.0%}); use an idle machine"
    if not counts["slower"]:
        return f"PASSED: none of {gated} gated numbers is slower{faster}{noisy}"
    return f"FAILED: {counts['slower']} of {gated} gated numbers slower{faster}{noisy}"
