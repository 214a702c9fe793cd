"""The runner: engines side by side in one process, point by point, in an order that a drifting machine can't bend.

Every round runs all engines once; every second round runs them backwards (A B B A). A round draws new prompts, the same
for all engines. An engine that fails, or gives another number of tokens than it was asked for, loses that row, not the
others theirs.
"""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pico_vllm.bench.ceilings import Ceilings
from pico_vllm.bench.engines.engine import BenchEngine
from pico_vllm.bench.points import Point, Run
from pico_vllm.bench.records import RecordWriter, memory_used_bytes, restart_peak_memory
from pico_vllm.bench.traces import Trace
from pico_vllm.bench.work import ModelWork, least_bytes, least_flops
from pico_vllm.bench.workloads import Workload

logger = logging.getLogger(__name__)

Say = Callable[[str], None]


class WrongOutputError(Exception):
    """An engine gave another number of tokens than it was asked for."""


@dataclass(frozen=True, slots=True)
class Contestant:
    """An engine that has passed the gate.

    Attributes:
        name: for messages, unique.
        engine: ready.
        fields: what all its records say: versions, settings, the gate's result.
    """

    name: str
    engine: BenchEngine
    fields: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Measuring:
    """What the runner needs beside engines and points.

    Attributes:
        num_runs: timed runs of a point.
        device: whose memory is read.
        work: of the model, and ``ceilings`` of this machine, for shares; None = no shares.
        say: called with a line of progress.
    """

    num_runs: int
    device: torch.device
    work: ModelWork | None = None
    ceilings: Ceilings | None = None
    say: Say = lambda line: print(line, file=sys.stderr, flush=True)


def run_points(
    contestants: Sequence[Contestant], points: Sequence[Point], writer: RecordWriter, measuring: Measuring
) -> list[str]:
    """Measure every point on every engine and write the records; returns what was left out, with the reason."""
    left_out: list[str] = []
    for point in points:
        runs, errors = _run_point(contestants, point, measuring, left_out)
        for contestant in contestants:
            fields = {**contestant.fields, "point": point.name, **point.fields}
            if "prefix_caching" in fields:  # what the engine has, not what it was asked for
                fields["prefix_caching"] = contestant.fields.get("settings", {}).get("prefix_caching")
            if contestant.name in errors:
                record = writer.write(**fields, error=errors[contestant.name][:500])
            elif runs[contestant.name]:
                warm_up = int(point.warm_up)
                results = runs[contestant.name]
                record = writer.write(
                    **fields,
                    workload_sha256=point.workload(warm_up).digest(),
                    metrics=point.fold(results),
                    runs=results,
                )
            else:
                continue
            measuring.say(describe(contestant.name, record))
    return left_out


def _run_point(
    contestants: Sequence[Contestant], point: Point, measuring: Measuring, left_out: list[str]
) -> tuple[dict[str, list[Run]], dict[str, str]]:
    """Returns: each engine's timed runs, and the errors of those that failed. One that can't run it has neither."""
    runs: dict[str, list[Run]] = {contestant.name: [] for contestant in contestants}
    errors: dict[str, str] = {}
    able = []
    first = point.workload(0)
    for contestant in contestants:
        reason = contestant.engine.why_not(first)
        if reason is None:
            able.append(contestant)
        else:
            left_out.append(f"{contestant.name}: left out of {point.label}: {reason}")
            measuring.say(left_out[-1])
    rounds = int(point.warm_up) + (measuring.num_runs if point.num_runs is None else point.num_runs)
    for round_index in range(rounds):
        workload = point.workload(round_index)
        for contestant in able if round_index % 2 == 0 else reversed(able):
            if contestant.name in errors:
                continue
            try:
                run = _run_once(contestant.engine, point, workload, measuring)
            except Exception as error:
                logger.debug("%s failed", contestant.name, exc_info=True)
                errors[contestant.name] = f"{type(error).__name__}: {error}"
                continue
            if round_index > 0 or not point.warm_up:
                runs[contestant.name].append(run)
    return runs, errors


def _run_once(engine: BenchEngine, point: Point, workload: Workload, measuring: Measuring) -> Run:
    gc.collect()
    restart_peak_memory()
    before = memory_used_bytes(measuring.device)
    if point.offline:
        seconds, num_tokens = engine.run_offline(workload)
        if num_tokens != workload.num_output_tokens:
            raise WrongOutputError(f"{num_tokens} output tokens, {workload.num_output_tokens} were asked for")
        run: Run = {"dur_s": round(seconds, 4), "out_tokens": num_tokens, "out_tok_s": round(num_tokens / seconds, 2)}
    else:
        traces = engine.serve(workload)
        check_counts(workload, traces)
        run = point.summarize(traces, point.objective)
        seconds = max(t.times_s[-1] for t in traces) - min(t.submit_s for t in traces)
    after = memory_used_bytes(measuring.device, peak=True)
    run |= {f"{kind}_memory_gib": round(max(before[kind], after[kind]) / 2**30, 3) for kind in after}
    host_share = engine.host_share()
    if host_share is not None:
        run["host_share"] = round(host_share, 5)
    if measuring.work is not None and measuring.ceilings is not None:
        ceilings = measuring.ceilings
        run["bandwidth_share"] = round(least_bytes(measuring.work, workload) / seconds / ceilings.read_bytes_per_s, 5)
        run["flops_share"] = round(least_flops(measuring.work, workload) / seconds / ceilings.matmul_flops_per_s, 5)
    return run


def check_counts(workload: Workload, traces: Sequence[Trace]) -> None:
    """Every request must have given exactly what it was asked for.

    Raises:
        WrongOutputError: one has not.
    """
    for index, (request, trace) in enumerate(zip(workload.requests, traces, strict=True)):
        if trace.num_tokens != request.max_tokens:
            raise WrongOutputError(
                f"request {index} gave {trace.num_tokens} output tokens, {request.max_tokens} were asked for"
            )


def describe(name: str, record: Mapping[str, Any]) -> str:
    """A record as one line."""
    where = " ".join(
        f"{key}={record[key]}"
        for key in ("input_len", "output_len", "concurrency", "rate", "how", "temperature", "prefix_caching")
        if record.get(key) is not None
    )
    head = f"{name:12s} {record['point']:10s} {where}:"
    if "error" in record:
        return f"{head} failed: {record['error']}"
    metrics = record["metrics"]
    shown = (
        ("out_tok_s", "tok/s", 1), ("decode_tok_s", "decode tok/s", 1), ("ttft_ms_median", "ms TTFT", 2),
        ("itl_ms_median", "ms ITL", 3), ("itl_ms_p99", "ms ITL p99", 3), ("ttft_first_ms", "ms first", 2),
        ("ttft_rest_ms", "ms later", 2), ("goodput_share", "good", 3),
    )  # fmt: skip
    return head + "".join(
        f"  {metrics[key]['median']:.{digits}f} {unit}" for key, unit, digits in shown if key in metrics
    )
