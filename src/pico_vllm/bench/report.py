"""Records as a table for pandas (CSV) and as the tables of a README (Markdown). Shows losing and failed rows too."""

from __future__ import annotations

import csv
import io
import json
from itertools import combinations
from typing import TYPE_CHECKING

from pico_vllm.bench.cases import POINT_TITLES, Case, case_cells, sort_cases, sort_points, varying_parts
from pico_vllm.bench.results import (
    HARDWARE_POINTS,
    Measure,
    Record,
    failure_of,
    format_metric,
    format_number,
    higher_is_better,
    load_records,
    measure,
    measured_metrics,
    metric_names,
    metric_title,
    numbers_of,
    runs_of,
    summaries_of,
)
from pico_vllm.bench.run_labels import (
    Records,
    RunRecords,
    collect_runs,
    hardware_of,
    is_measured,
    run_labels,
    short_commit,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

__all__ = ["load_records", "markdown_table", "run_labels", "to_csv", "to_markdown"]

_LATENCIES = ("ttft_ms_median", "ttft_ms_p99", "itl_ms_median", "itl_ms_p99")
_OPEN_LOOP = ("goodput_req_s", "goodput_share", "req_s", "out_tok_s", *_LATENCIES)
_METRICS = {
    "c1": ("ttft_ms_median", "itl_ms_median", "itl_ms_p99", "decode_tok_s", "bandwidth_share", "host_share"),
    "prefix": ("ttft_first_ms", "ttft_rest_ms", "ttft_ms_median"),
    "prefix_burst": ("ttft_ms_max", "ttft_ms_median"),
    "poisson": _OPEN_LOOP,
    "kernel": ("time_us", "floor_us", "fraction", "baseline_us", "speedup"),
}
_WITHOUT_SPREAD = ("fraction",)  # it is the time's, which stands beside it
_OTHER_METRICS = ("out_tok_s", "total_tok_s", "goodput_req_s", *_LATENCIES)

_CSV_FIELDS = (
    *("engine", "version", "mode", "label", "tag", "commit", "date", "device", "gpu", "cpu", "driver"),
    *("python", "torch", "triton", "transformers", "model", "dtype"),
    *("point", "input_len", "output_len", "concurrency", "requests", "rate", "how", "temperature"),
    *("prefix_caching", "workload", "workload_sha256", "objective", "backend", "op", "case", "when"),
)


# CSV


def to_csv(records: Records) -> str:
    """Tidy long: one row a value.

    ``statistic`` says what the value is: one run's (``run`` counts them from 0, ``request`` the requests of a run where
    it lists them), or the record's own ``median``, ``best``, ``spread``, ``p20`` or ``p80``. A record without numbers
    is one row with its ``error``. ``pandas.read_csv(f).query("statistic == 'run'")`` leaves the raw runs.
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["name", *_CSV_FIELDS, "metric", "statistic", "run", "request", "value", "error"])
    for run in collect_runs(records):
        for record in run.records:
            about = [run.name, *(_csv_cell(record.get(field)) for field in _CSV_FIELDS)]
            writer.writerows([*about, *values] for values in _csv_values(record))
    return out.getvalue()


def _csv_values(record: Record) -> Iterator[tuple[object, ...]]:
    """(metric, statistic, run, request, value, error) of one record."""
    if (failure := failure_of(record)) is not None:
        yield "", "", "", "", "", failure
    for metric, summary in summaries_of(record).items():
        if isinstance(summary, dict):
            found = ((name, summary.get(name)) for name in ("median", "best", "spread", "p20", "p80"))
            yield from ((metric, name, "", "", value, "") for name, value in found if value is not None)
        elif isinstance(summary, list):
            yield from ((metric, "run", i, "", value, "") for i, value in enumerate(summary))
        else:
            yield metric, "median", "", "", summary, ""
    for i, run in enumerate(runs_of(record)):
        for metric, value in _flat(run):
            if isinstance(value, list):
                yield from ((metric, "run", i, request, x, "") for request, x in enumerate(value))
            elif value is not None:
                yield metric, "run", i, "", value, ""


def _flat(run: Record) -> Iterator[tuple[str, object]]:
    """A run's numbers, with those of its requests (``raw``) beside them."""
    for metric, value in run.items():
        if isinstance(value, dict):
            yield from value.items()
        else:
            yield metric, value


def _csv_cell(value: object) -> object:
    return json.dumps(value) if isinstance(value, list | dict) else "" if value is None else value


# Markdown


def to_markdown(records: Records) -> str:
    """What ran on what, then a table a point; ends with a newline."""
    runs = collect_runs(records)
    everything = [record for run in runs for record in run.records]
    parts = [
        _facts([r for r in everything if r["point"] != "kernel"] or everything),
        _runs_table(runs),
        _how_to_read(runs),
    ]
    for point in sort_points(point for run in runs for point in run.points):
        if point in HARDWARE_POINTS:
            parts.append(_hardware_table(point, [record for record in everything if record["point"] == point]))
        elif point == "parity":
            parts.append(_parity_table(runs))
        else:
            parts.append(_point_table(point, runs))
    return "\n\n".join(part for part in parts if part) + "\n"


def markdown_table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, num_text_columns: int = 1) -> str:
    """A table whose first columns are text, on the left, and whose others are numbers, on the right."""
    rule = [":---" if i < num_text_columns else "---:" for i in range(len(heads))]
    lines = [[cell.replace("|", "\\|") for cell in row] for row in (heads, rule, *rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cases(runs: Sequence[RunRecords], point: str) -> list[Case]:
    return sort_cases(case for run in runs for case in run.by_case(point))


def _facts(records: Sequence[Record]) -> str:
    """One line: model, hardware, software. Where the records differ, every value."""

    def each(field: str, form: str) -> str:
        values = dict.fromkeys(str(record[field]) for record in records if record.get(field))
        return form.format(" / ".join(values)) if values else ""

    hardware = " / ".join(dict.fromkeys(name for record in records if (name := hardware_of(record))))
    groups = (
        (each("model", "{}"), each("dtype", "{}")),
        (hardware, each("driver", "driver {}")),
        (each("torch", "torch {}"), each("triton", "triton {}"), each("transformers", "transformers {}")),
        (each("python", "Python {}"),),
    )
    return " · ".join(text for group in groups if (text := ", ".join(filter(None, group))))


def _runs_table(runs: Sequence[RunRecords]) -> str:
    """What each label stands for; columns that say nothing are left out."""
    fields = {name: name for name in ("engine", "version", "mode", "label", "tag", "commit", "date")}
    fields |= {"start_s": "start, s", "gate": "tokens checked"}
    rows = [
        [run.name, *(_values_of(run, field) for field in fields)]
        for run in runs
        if run.points - {*HARDWARE_POINTS, "kernel"}
    ]
    used = [i for i in range(len(fields) + 1) if any(row[i] for row in rows)]
    heads = ["run", *fields.values()]
    table = [[row[i] or "–" for i in used] for row in rows]
    return markdown_table([heads[i] for i in used], table, num_text_columns=len(used)) if rows else ""


def _values_of(run: RunRecords, field: str) -> str:
    values = (record[field] for record in run.records if record.get(field) not in (None, ""))
    return ", ".join(dict.fromkeys(_value_cell(field, value) for value in values))


def _value_cell(field: str, value: object) -> str:
    if field == "gate":
        return str(value.get("num_tokens", "")) if isinstance(value, dict) else ""
    return {"date": str(value)[:10], "commit": short_commit(str(value))}.get(field, str(value))


def _how_to_read(runs: Sequence[RunRecords]) -> str:
    text = (
        "Medians over runs; in brackets (max − min) / median of the runs, where there were several. "
        "Bold: the best of its case, with those whose runs' ranges overlap with it; nothing is bold where all do."
    )
    num_again = sum(
        len(run.records_of(point)) - len(run.by_case(point))
        for run in runs
        for point in run.points - {*HARDWARE_POINTS}
    )
    if num_again:
        text += f" {num_again} records were measured again later; the later ones are shown."
    return text


def _point_table(point: str, runs: Sequence[RunRecords]) -> str:
    """A row a case and run, the runs of a case together."""
    found = {run.name: run.by_case(point) for run in runs}
    cases = _cases(runs, point)
    headings, shared = varying_parts(case for case in cases if is_measured(case, found.values()))
    records = [record for by_case in found.values() for record in by_case.values()]
    metrics = measured_metrics(records, _METRICS.get(point, _OTHER_METRICS))
    rows = []
    for case in cases:
        of_case = [(label, by_case[case]) for label, by_case in found.items() if case in by_case]
        cells = {metric: _cells([measure(record, metric) for _, record in of_case], metric) for metric in metrics}
        for i, (label, record) in enumerate(of_case):
            names = case_cells(case, headings) if i == 0 else [""] * len(headings)
            values = [cells[metric][i] for metric in metrics]
            if (failure := failure_of(record)) is not None:
                values = [failure, *[""] * (len(metrics) - 1)]
            rows.append([*names, label, *values])
    heads = [*headings, "run", *map(metric_title, metrics)]
    title = f"### {POINT_TITLES.get(point, point)}" + (f"\n\n{shared[0].upper()}{shared[1:]}." if shared else "")
    if point == "kernel":
        title += " In brackets: (p80 − p20) / median."
    return f"{title}\n\n{markdown_table(heads, rows, num_text_columns=len(headings) + 1)}"


def _cells(measures: Sequence[Measure | None], metric: str) -> list[str]:
    """The values of one case; bold is the best, with what can't be told from it, unless that is all."""
    known = [m for m in measures if m]
    if not known:
        return ["–"] * len(measures)
    best = (max if higher_is_better(metric) else min)(known, key=lambda m: m.median)
    stands_out = not all(m.overlaps(best) for m in known)
    return [_cell(m, metric, bold=stands_out and m is not None and m.overlaps(best)) for m in measures]


def _cell(m: Measure | None, metric: str, *, bold: bool = False) -> str:
    if m is None:
        return "–"
    number = format_metric(metric, m.median)
    number = f"**{number}**" if bold else number
    return number if m.spread is None or metric in _WITHOUT_SPREAD else f"{number} ({m.spread:.0%})"


def _hardware_table(point: str, records: Sequence[Record]) -> str:
    """A row a metric, a column a record: also two of the same machine, made before and after."""
    rows = []
    for metric in metric_names(records):
        summaries = [summaries_of(record).get(metric) for record in records]
        what = next((str(s["what"]) for s in summaries if isinstance(s, dict) and s.get("what")), "")
        rows.append([metric, what, *(_hardware_cell(record, metric) for record in records)])
    fields = ("tag", "when", "date")
    heads = [" ".join([hardware_of(r), *(str(r[field])[:16] for field in fields if r.get(field))]) for r in records]
    num_text_columns = 2
    if not any(what for _, what, *_ in rows):
        rows, num_text_columns = [[metric, *values] for metric, _, *values in rows], 1
    table = markdown_table(["metric", "what"][:num_text_columns] + heads, rows, num_text_columns=num_text_columns)
    return f"### {POINT_TITLES[point]}\n\n{table}"


def _hardware_cell(record: Record, metric: str) -> str:
    """A pair is p50 and p99."""
    numbers = numbers_of(summaries_of(record).get(metric))
    if len(numbers) == 2:
        return f"{format_number(numbers[0])} (p99 {format_number(numbers[1])})"
    return _cell(measure(record, metric), metric)


def _parity_table(runs: Sequence[RunRecords]) -> str:
    """Where the greedy tokens of two runs first differ, for every pair of runs and every prompt."""
    tokens = {run.name: record["tokens"] for run in runs for record in run.records if record.get("tokens")}
    rows = [
        [f"{a}, {b}", *(_first_difference(x, y) for x, y in zip(tokens[a], tokens[b], strict=False))]
        for a, b in combinations(tokens, 2)
    ]
    if not rows:
        return ""
    heads = ["runs", *(f"prompt {i}" for i in range(1, max(map(len, rows))))]
    rows = [[*row, *["–"] * (len(heads) - len(row))] for row in rows]
    title = f"### {POINT_TITLES['parity']}\n\nThe first token that differs, counted from 0."
    return f"{title}\n\n{markdown_table(heads, rows)}"


def _first_difference(a: Sequence[int], b: Sequence[int]) -> str:
    return next((str(i) for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), "none")
