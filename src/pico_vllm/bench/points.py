"""The named points: which workloads are measured, under names and definitions that records share across engines.

    c1          one request at a time, a fresh prompt each run
    throughput  256 requests at once, prompt and output lengths uniform in [100, 1024], the same lengths every run
    sweep       closed loop at a concurrency: 4 x concurrency requests, at least 8
    burst       concurrency requests at once
    prefix      8 requests one after the other, a shared prefix and some tokens of their own each
    prefix_burst  32 such requests at once
    uniform     lengths uniform in a range, closed loop
    multi_turn  conversations: each turn's prompt is the conversation so far and some new tokens
    poisson     arrivals at a rate, whether the engine keeps up or not; goodput under an objective

Every point has one warm-up run that is not recorded (but streamed throughput, which follows its offline runs), and
prompts are drawn anew for every run.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pico_vllm.bench.metrics import Objective, fold, summarize
from pico_vllm.bench.traces import Trace
from pico_vllm.bench.workloads import (
    Workload,
    WorkloadPlan,
    WorkloadRequest,
    fixed_lengths,
    multi_turn,
    shared_prefix,
    uniform_lengths,
)
from pico_vllm.errors import ConfigError

Run = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Point:
    """One row of a benchmark.

    Attributes:
        name: of the point.
        fields: what a record says of it (input_len, output_len, concurrency, …).
        workload: run index → workload; run 0 is the warm-up.
        offline: through the engine's own batch call, which tells total time and tokens only.
        objective: for goodput.
        num_runs: timed runs; None = as many as asked for.
        warm_up: whether run 0 is there.
        summarize, fold: traces → a run's numbers, runs → metrics, where a point has its own.
    """

    name: str
    fields: dict[str, Any]
    workload: Callable[[int], Workload]
    offline: bool = False
    objective: Objective | None = None
    num_runs: int | None = None
    warm_up: bool = True
    summarize: Callable[[Sequence[Trace], Objective | None], Run] = summarize
    fold: Callable[[Sequence[Run]], dict[str, Any]] = field(default=fold)

    @property
    def label(self) -> str:
        """One line for progress messages."""
        parts = [f"{name}={value}" for name, value in self.fields.items()]
        return f"{self.name} {' '.join(parts)}"


@dataclass(frozen=True, slots=True)
class PointOptions:
    """Sizes of the points; the defaults are those of the committed records.

    Attributes:
        vocab_size: of the model.
        seed: of all prompts.
        inputs, outputs: lengths of c1.
        concurrencies: of sweep and burst.
        input_len, output_len: of sweep, burst and poisson.
        uniform: range of lengths of throughput and uniform.
        num_throughput: requests of throughput.
        temperatures: of throughput.
        prefix_len, own_len: of prefix and prefix_burst.
        num_sharing: requests of prefix_burst.
        num_conversations, num_turns: of multi_turn.
        rates: requests a second of poisson.
        num_poisson: requests of poisson.
        objective: of poisson.
        prefix_caching: whether the engines have it on; told in the records of the points that ask for it.
    """

    vocab_size: int
    seed: int = 7
    inputs: tuple[int, ...] = (64, 512, 2048, 8192)
    outputs: tuple[int, ...] = (16, 128, 1024)
    concurrencies: tuple[int, ...] = (1, 8, 32, 64, 128, 256)
    input_len: int = 512
    output_len: int = 128
    uniform: tuple[int, int] = (100, 1024)
    num_throughput: int = 256
    temperatures: tuple[float, ...] = (0.0, 0.6)
    prefix_len: int = 2048
    own_len: int = 64
    num_sharing: int = 32
    num_conversations: int = 16
    num_turns: int = 4
    rates: tuple[float, ...] = (8.0, 32.0)
    num_poisson: int = 128
    objective: Objective = field(default_factory=lambda: Objective(ttft_ms=200.0, tpot_ms=20.0))
    prefix_caching: bool = False


def make_points(names: Sequence[str], options: PointOptions) -> list[Point]:
    """The points of the given names, in that order.

    Raises:
        KeyError: a name that is not in ``POINT_NAMES``.
    """
    return [point for name in names for point in _MAKERS[name](options)]


def c1_points(o: PointOptions) -> list[Point]:
    """Every input length with every output length."""
    points = []
    for input_len in o.inputs:
        for output_len in o.outputs:
            draw = fixed_lengths(1, input_len, output_len, o.vocab_size)
            plan = WorkloadPlan(f"c1/{input_len}/{output_len}", o.seed, draw)
            points.append(Point("c1", {"input_len": input_len, "output_len": output_len, "concurrency": 1}, plan.run))
    return points


def throughput_points(o: PointOptions) -> list[Point]:
    """At each temperature: offline, then once with every token on the clock."""
    low, high = o.uniform
    lengths = _throughput_lengths(o.num_throughput, low, high)
    points: list[Point] = []
    for temperature in o.temperatures:
        for how in ("offline", "stream"):
            # A run has prompts of its own among all of them.
            place, stride = len(points), 2 * len(o.temperatures)
            fields = {
                "how": how,
                "temperature": temperature,
                "input_len": f"uniform {low}-{high}",
                "output_len": f"uniform {low}-{high}",
                "concurrency": o.num_throughput,
                "in_tokens": sum(len(prompt) for prompt, _ in lengths),
                "out_tokens": sum(num_out for _, num_out in lengths),
            }

            def workload(
                run: int, place: int = place, stride: int = stride, temperature: float = temperature
            ) -> Workload:
                return _throughput_run(lengths, run * stride + place, temperature, o.vocab_size)

            streams = how == "stream"
            num_runs = 1 if streams else None
            points.append(
                Point("throughput", fields, workload, offline=not streams, num_runs=num_runs, warm_up=not streams)
            )
    return points


def sweep_points(o: PointOptions) -> list[Point]:
    """Closed loop at each concurrency."""
    return [_loop_point("sweep", o, concurrency, max(8, 4 * concurrency)) for concurrency in o.concurrencies]


def burst_points(o: PointOptions) -> list[Point]:
    """Bursts of each size."""
    return [_loop_point("burst", o, concurrency, concurrency) for concurrency in o.concurrencies]


def prefix_points(o: PointOptions) -> list[Point]:
    """Requests in turn that begin alike: the first, and the seven after it."""
    draw = shared_prefix(8, o.prefix_len, o.own_len, 16, o.vocab_size)
    plan = WorkloadPlan(f"prefix/{o.prefix_len}/{o.own_len}", o.seed, draw)
    fields = {
        "input_len": o.prefix_len + o.own_len,
        "output_len": 16,
        "concurrency": 1,
        "prefix_caching": o.prefix_caching,
    }
    return [Point("prefix", fields, plan.run, summarize=_summarize_prefix, fold=_fold_prefix)]


def prefix_burst_points(o: PointOptions) -> list[Point]:
    """Requests at once that begin alike, nothing of it cached before: the last first token tells what sharing saves."""
    draw = shared_prefix(o.num_sharing, o.prefix_len, o.own_len, 16, o.vocab_size)
    plan = WorkloadPlan(f"prefix_burst/{o.prefix_len}/{o.own_len}", o.seed, draw, o.num_sharing)
    fields = {
        "input_len": o.prefix_len + o.own_len,
        "output_len": 16,
        "concurrency": o.num_sharing,
        "requests": o.num_sharing,
        "prefix_caching": o.prefix_caching,
    }
    return [Point("prefix_burst", fields, plan.run)]


def uniform_points(o: PointOptions) -> list[Point]:
    """Lengths uniform in the range of throughput, closed loop at each concurrency."""
    points = []
    for concurrency in o.concurrencies:
        num = max(8, 2 * concurrency)
        plan = WorkloadPlan(
            f"uniform/{concurrency}", o.seed, uniform_lengths(num, o.uniform, o.uniform, o.vocab_size), concurrency
        )
        lens = f"uniform {o.uniform[0]}-{o.uniform[1]}"
        fields = {"input_len": lens, "output_len": lens, "concurrency": concurrency, "requests": num}
        points.append(Point("uniform", fields, plan.run))
    return points


def multi_turn_points(o: PointOptions) -> list[Point]:
    """All conversations at once, turn after turn."""
    num, turns = o.num_conversations, o.num_turns
    draw = multi_turn(num, turns, o.input_len, o.own_len, o.output_len, o.vocab_size)
    plan = WorkloadPlan(f"multi_turn/{num}/{turns}", o.seed, draw, num)
    fields = {
        "input_len": o.input_len,
        "turn_len": o.own_len,
        "output_len": o.output_len,
        "concurrency": num,
        "turns": turns,
        "requests": num * turns,
        "prefix_caching": o.prefix_caching,
    }
    return [Point("multi_turn", fields, plan.run)]


def poisson_points(o: PointOptions) -> list[Point]:
    """Arrivals at each rate."""
    points = []
    for rate in o.rates:
        draw = fixed_lengths(o.num_poisson, o.input_len, o.output_len, o.vocab_size)
        plan = WorkloadPlan(f"poisson/{rate}", o.seed, draw, None, rate)
        objective = {name: getattr(o.objective, name) for name in ("ttft_ms", "tpot_ms", "e2e_ms")}
        fields = {
            "input_len": o.input_len,
            "output_len": o.output_len,
            "concurrency": None,
            "rate": rate,
            "requests": o.num_poisson,
            "objective": {name: limit for name, limit in objective.items() if limit is not None},
        }
        points.append(Point("poisson", fields, plan.run, objective=o.objective))
    return points


_MAKERS: dict[str, Callable[[PointOptions], list[Point]]] = {
    "c1": c1_points,
    "throughput": throughput_points,
    "sweep": sweep_points,
    "burst": burst_points,
    "prefix": prefix_points,
    "prefix_burst": prefix_burst_points,
    "uniform": uniform_points,
    "multi_turn": multi_turn_points,
    "poisson": poisson_points,
}
POINT_NAMES = tuple(_MAKERS)


def file_points(
    name: str, workloads: Sequence[Workload], *, vocab_size: int | None = None, num_runs: int | None = None
) -> list[Point]:
    """A workload that was read from a file: its first run warms up, the others are timed; a single run does both.

    Args:
        name: in records.
        workloads: one a run.
        vocab_size: of the model that is to run it.
        num_runs: timed runs; None = all that the file holds.

    Raises:
        ConfigError: a token id that the model doesn't know, or more runs than the file holds.
    """
    highest = max(max(request.prompt_token_ids) for w in workloads for request in w.requests)
    lowest = min(min(request.prompt_token_ids) for w in workloads for request in w.requests)
    if lowest < 0 or (vocab_size is not None and highest >= vocab_size):
        raise ConfigError(
            f"workload {name}: token ids from {lowest} to {highest}, the model has 0 to {(vocab_size or 0) - 1}; "
            "write it with this model"
        )
    held = max(1, len(workloads) - 1)
    if num_runs is not None and num_runs > held:
        raise ConfigError(
            f"--runs={num_runs}: workload {name} holds {held} timed run(s); write it with --runs {num_runs + 1}"
        )
    first = workloads[0]
    lens = [len(request.prompt_token_ids) for request in first.requests]
    outputs = [request.max_tokens for request in first.requests]
    fields: dict[str, Any] = {
        "workload": name,
        "input_len": _range(lens),
        "output_len": _range(outputs),
        "concurrency": first.concurrency,
        "requests": len(first.requests),
    }
    return [Point("file", fields, lambda run: workloads[min(run, len(workloads) - 1)], num_runs=num_runs or held)]


# ---------------------------------------------------------------------------------------------------------- private
def _range(values: Sequence[int]) -> int | str:
    low, high = min(values), max(values)
    return low if low == high else f"{low}-{high}"


def _loop_point(name: str, o: PointOptions, concurrency: int, num: int) -> Point:
    draw = fixed_lengths(num, o.input_len, o.output_len, o.vocab_size)
    plan = WorkloadPlan(f"{name}/{concurrency}", o.seed, draw, concurrency)
    fields = {"input_len": o.input_len, "output_len": o.output_len, "concurrency": concurrency, "requests": num}
    return Point(name, fields, plan.run)


def _throughput_lengths(num: int, low: int, high: int) -> list[tuple[list[int], int]]:
    """(base prompt, output length) pairs: with 256 of [100, 1024] the 133,966 output tokens of all records."""
    rng = random.Random(0)
    prompts = [[rng.randint(0, 10_000) for _ in range(rng.randint(low, high))] for _ in range(num)]
    return [(prompt, rng.randint(low, high)) for prompt in prompts]


def _throughput_run(
    lengths: Sequence[tuple[list[int], int]], run: int, temperature: float, vocab_size: int
) -> Workload:
    """Lengths stay, ids move by a constant a run, so a prefix cache never meets them again."""
    modulus = min(150_000, vocab_size)
    requests = [
        WorkloadRequest(tuple((token + run * 10_001) % modulus for token in prompt), num_out, temperature)
        for prompt, num_out in lengths
    ]
    return Workload(tuple(requests), len(requests))


def _summarize_prefix(traces: Sequence[Trace], objective: Objective | None) -> Run:
    raw = summarize(traces, objective)["raw"]
    return {"ttft_ms": raw["ttft_ms"], "e2e_ms": raw["e2e_ms"]}


def _fold_prefix(runs: Sequence[Run]) -> dict[str, Any]:
    """The first request of all runs, and all later ones."""
    first = [run["ttft_ms"][0] for run in runs]
    rest = [value for run in runs for value in run["ttft_ms"][1:]]
    return {
        name: {
            "median": round(statistics.median(values), 4),
            "best": min(values),
            "spread": round((max(values) - min(values)) / statistics.median(values), 4),
        }
        for name, values in (("ttft_first_ms", first), ("ttft_rest_ms", rest))
    }
