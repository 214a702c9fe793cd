"""``pico-vllm bench gate | baseline``. Parses and prints; ``baseline`` and ``regression_gate`` do the rest."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from pico_vllm.errors import ConfigError

EXIT_SLOWER = 2

_Runs = Annotated[
    list[Path], typer.Argument(metavar="RUN.jsonl …", help="JSONL of run, suite, kernels; JSON of benchmarks/kernels.")
]


def gate(
    runs: _Runs,
    baseline: Annotated[Path, typer.Option(help="A file, or a folder that has one named by the hardware.")],
    points: Annotated[
        str | None, typer.Option(help="Only these, comma-separated. Default: all of the baseline.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Show what hasn't changed too.")] = False,
) -> None:
    """Hold the files of one run against a baseline; exit code 2 and a table where something is slower."""

    from pico_vllm.bench.baseline import baseline_name, read_baseline
    from pico_vllm.bench.measured_run import hardware_of_files, read_run
    from pico_vllm.bench.regression_gate import gate as hold_against
    from pico_vllm.bench.regression_gate import render
    from pico_vllm.tables import print_tables

    if baseline.is_dir():
        hardware = hardware_of_files(runs)
        folder, baseline = baseline, baseline / baseline_name(hardware)
        if not baseline.exists():
            raise ConfigError(
                f"{folder} has no baseline of {hardware}; make one: "
                f"pico-vllm bench baseline {' '.join(map(str, runs))} --out {baseline}"
            )
    base = read_baseline(baseline)
    names = None if points is None else [name.strip() for name in points.split(",") if name.strip()]
    result = hold_against(read_run(runs, base.engine, names), base, names)
    print_tables(render(result, everything=everything))
    if result.slower:
        sys.exit(EXIT_SLOWER)


def baseline(
    runs: _Runs,
    out: Annotated[Path, typer.Option(help="JSON file to write, replaced if it is there.")],
    engine: Annotated[str, typer.Option(help="Whose records count.")] = "pico-vllm",
    points: Annotated[str | None, typer.Option(help="Only these, comma-separated.")] = None,
) -> None:
    """Propose a baseline from runs, a file each, of machines of one kind; look at it and commit it."""
    from pico_vllm.bench.baseline import MAX_CV, propose_baseline, write_baseline
    from pico_vllm.bench.measured_run import read_run

    names = None if points is None else [name.strip() for name in points.split(",") if name.strip()]
    proposed = propose_baseline([read_run([path], engine, names) for path in runs], engine)
    write_baseline(proposed, out)
    for entry in proposed.entries:
        spread = f"±{entry.spread:.1%}, finds 10 % in {proposed.power(entry):.0%} of runs"
        noisy = f"CV {entry.cv or 0:.1%} > {MAX_CV:.0%}: reported, not gated"
        print(f"{entry.gated.words}, {entry.gated.metric}: {noisy if entry.is_noisy else spread}")
    weak = sum(not entry.is_noisy and proposed.power(entry) < 0.95 for entry in proposed.entries)
    num_gated = sum(not entry.is_noisy for entry in proposed.entries)
    print(f"{out}: {proposed.hardware}, {num_gated} gated numbers of {len(proposed.entries)}, from {len(runs)} run(s)")
    if weak:
        print(f"{weak} would miss a slowdown of 10 % in more than 5 % of runs: give more runs")
