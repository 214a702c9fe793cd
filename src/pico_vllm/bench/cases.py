"""What was asked of an engine: records of equal cases may be compared. Said in columns, or in words."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pico_vllm.bench.results import number_of, settings_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from pico_vllm.bench.results import Record

POINT_TITLES = {
    "c1": "One request at a time",
    "throughput": "Throughput: every request at once",
    "uniform": "Random lengths",
    "sweep": "Closed loop: a new request for each that ends",
    "burst": "Burst: all requests in one moment",
    "poisson": "Open loop: requests arrive at random (Poisson)",
    "multi_turn": "Conversations of several turns",
    "prefix": "Shared prefix, one request after the other",
    "prefix_burst": "Shared prefix, all requests in one moment",
    "file": "Requests from a file",
    "kernel": "Kernels",
    "ceilings": "What the hardware can do",
    "calib": "How fast the host is",
    "parity": "Greedy tokens",
}
CACHE_POINTS = ("prefix", "prefix_burst", "multi_turn")  # whether the prefix cache is on is part of the case here
_KERNEL_FIELDS = ("op", "case", "model", "dtype")


@dataclass(frozen=True, slots=True)
class Case:
    """What was asked of an engine: records of equal cases may be compared."""

    point: str
    input_len: int | str | None = None
    output_len: int | str | None = None
    concurrency: float | None = None
    rate: float | None = None
    objective: str = ""
    how: str = "stream"
    temperature: float = 0.0
    prefix_caching: bool | None = None
    workload: str = ""
    op: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CasePart:
    """One property of a case: a column's heading and cell, and the words that stand alone."""

    heading: str
    value: str
    words: str


def case_of(record: Record) -> Case:
    """What the record's point asked; what it doesn't say is greedy, streamed, and not about the prefix cache."""
    point = record["point"]
    cached = record.get("prefix_caching", settings_of(record).get("prefix_caching")) if point in CACHE_POINTS else None
    return Case(
        point=point,
        input_len=_length(record.get("input_len")),
        output_len=_length(record.get("output_len")),
        concurrency=number_of(record.get("concurrency")),
        rate=number_of(record.get("rate", record.get("request_rate"))),
        objective=_objective(record.get("objective")),
        how=str(record.get("how") or "stream"),
        temperature=number_of(record.get("temperature")) or 0.0,
        prefix_caching=cached if isinstance(cached, bool) else None,
        workload=str(record.get("workload") or ""),
        op=tuple(str(record.get(field) or "") for field in _KERNEL_FIELDS) if point == "kernel" else (),
    )


def sort_points(points: Iterable[str]) -> list[str]:
    """In the order of ``POINT_TITLES``; unknown ones last."""
    order = {point: rank for rank, point in enumerate(POINT_TITLES)}
    return sorted(set(points), key=lambda point: (order.get(point, len(order)), point))


def sort_cases(cases: Iterable[Case]) -> list[Case]:
    """The cases of one point by number, each once; what is missing comes last. Kernels stay in the records' order."""
    return sorted(dict.fromkeys(cases), key=_sort_key)


def varying_parts(cases: Iterable[Case]) -> tuple[list[str], str]:
    """Which headings tell the cases of one point apart, and the words for what they all share."""
    values: dict[str, list[CasePart | None]] = defaultdict(list)
    parts = [{part.heading: part for part in case_parts(case)} for case in cases]
    for heading in dict.fromkeys(heading for of_case in parts for heading in of_case):
        values[heading] = [of_case.get(heading) for of_case in parts]
    varying = [heading for heading, found in values.items() if len(set(found)) > 1]
    shared = [found[0].words for heading, found in values.items() if heading not in varying and found[0]]
    return varying, ", ".join(shared)


def case_cells(case: Case, headings: Sequence[str]) -> list[str]:
    """The case's value under each heading, "–" where it has none."""
    found = {part.heading: part.value for part in case_parts(case)}
    return [found.get(heading, "–") for heading in headings]


def case_words(case: Case, headings: Collection[str]) -> str:
    """The same in one phrase: ``offline, greedy``."""
    return ", ".join(part.words for part in case_parts(case) if part.heading in headings)


def case_parts(case: Case) -> list[CasePart]:
    """What a case says, in reading order; nothing for a case that only names its point (a failure, say)."""
    if case.op:
        headings = ("op", "case", "shapes", "dtype")
        words = ("{}", "{}", "shapes of {}", "{}")
        parts = zip(headings, words, case.op, strict=True)
        return [CasePart(heading, value, form.format(value)) for heading, form, value in parts if value]
    parts = []
    if case.workload:
        parts.append(CasePart("workload", case.workload, case.workload))
    if case.input_len is not None or case.output_len is not None:
        parts.append(_lengths_part(case.input_len, case.output_len))
    if case.concurrency is not None:
        parts.append(CasePart("concurrency", f"{case.concurrency:g}", f"concurrency {case.concurrency:g}"))
    if case.rate is not None:
        parts.append(CasePart("requests/s sent", f"{case.rate:g}", f"{case.rate:g} requests/s"))
    if parts:
        parts.append(CasePart("how", case.how, "streamed" if case.how == "stream" else case.how))
        words = f"T={case.temperature:g}" if case.temperature else "greedy"
        parts.append(CasePart("temperature", f"{case.temperature:g}", words))
    if case.objective:
        parts.append(CasePart("objective", case.objective, case.objective))
    if case.prefix_caching is not None:
        on_off = "on" if case.prefix_caching else "off"
        parts.append(CasePart("prefix cache", on_off, f"prefix cache {on_off}"))
    return parts


def _lengths_part(input_len: int | str | None, output_len: int | str | None) -> CasePart:
    i, o = ("?" if x is None else str(x) for x in (input_len, output_len))
    words = f"{i} tokens in and out" if i == o and not i.isdigit() else f"{i} tokens in, {o} out"
    return CasePart("in/out", f"{i}/{o}", words)


def _sort_key(case: Case) -> tuple[tuple[int, float, str], ...]:
    values = (
        *(case.workload, case.how, case.temperature, case.input_len, case.output_len),
        *(case.objective, case.rate, case.concurrency, case.prefix_caching),
    )
    return tuple(
        (2, 0.0, "") if x is None else (1, 0.0, x) if isinstance(x, str) else (0, float(x), "") for x in values
    )


def _length(value: object) -> int | str | None:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return value if isinstance(value, int | str) else None


def _objective(value: object) -> str:
    """``TTFT ≤ 200 ms, TPOT ≤ 20 ms``."""
    if not isinstance(value, dict):
        return ""
    limits = {name.removesuffix("_ms").upper(): number_of(limit) for name, limit in value.items()}
    return ", ".join(f"{name} ≤ {limit:g} ms" for name, limit in limits.items() if limit is not None)
