"""The regression gate: planted slowdowns are found, an unchanged run passes, what can't be compared is refused.

Times are made, never measured. The simulations take the spread that the committed H200 baseline records.
"""

from __future__ import annotations

import functools
import io
import json
import math
import random
import re
import statistics
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from bench_records import MACHINE, kernel
from pico_vllm.bench.baseline import (
    Baseline,
    baseline_name,
    propose_baseline,
    read_baseline,
    student_quantile,
    write_baseline,
)
from pico_vllm.bench.commands import app
from pico_vllm.bench.machine_speed import Bounds, Speeds, bounds_of, time_like
from pico_vllm.bench.measured_run import MeasuredRun, Reading, read_run
from pico_vllm.bench.regression_gate import gate, render
from pico_vllm.errors import ConfigError

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "benchmarks" / "results"
#: What the committed baseline is made of; a run has both.
H200_ENGINE = [RESULTS / f"h200_gate_{i}.jsonl" for i in (1, 2, 3)]
H200_KERNELS = [RESULTS / f"h200_kernel_benchmarks_{i}.json" for i in (1, 2)]
H200_RUNS = [*H200_ENGINE, *H200_KERNELS]
#: Of the whole preset, on two machines.
OLDER_RUNS = [RESULTS / "h200_gpu_engine.jsonl", RESULTS / "h200_gpu_engine_before.jsonl"]
H200_BASELINE = ROOT / "benchmarks" / "baselines" / "h200.json"
SETTINGS = {"max_num_seqs": 256, "num_blocks": 1000, "prefix_caching": False}


def machine(speed: float = 1.0, **fields) -> list[dict]:
    """Calibration and ceilings of a machine ``speed`` times as fast as the usual one."""
    at = {**MACHINE, **fields}
    rates = {"read_TBps": 4.5, "copy_TBps": 4.2, "matmul_8192_bf16_TFLOPs": 750.0}
    return [
        {**at, "point": "calib", "when": "before", "metrics": {"eager_launch_us": [8.0 / speed] * 5}},
        {
            **at,
            "point": "ceilings",
            "metrics": {k: {"median": v * speed, "best": v * speed, "what": ""} for k, v in rates.items()},
        },
    ]


def loop(concurrency: int, rate: list[float], slower: float = 1.0, **fields) -> dict:
    """A closed loop: bandwidth and matrix products bound it alike."""
    runs = [
        {"out_tok_s": r / slower, "ttft_ms_median": 2e5 / r * slower, "bandwidth_share": 0.4, "flops_share": 0.4}
        for r in rate
    ]
    at = {**MACHINE, "engine": "pico-vllm", "settings": SETTINGS, **fields}
    return {**at, "point": "sweep", "input_len": 512, "output_len": 128, "concurrency": concurrency, "runs": runs}


def alone(ttft: list[float], tpot: list[float], **fields) -> dict:
    runs = [
        {"ttft_ms_median": t, "tpot_ms_median": p, "bandwidth_share": 0.7, "flops_share": 0.1}
        for t, p in zip(ttft, tpot, strict=True)
    ]
    at = {**MACHINE, "engine": "pico-vllm", "settings": SETTINGS, **fields}
    return {**at, "point": "c1", "input_len": 64, "output_len": 128, "concurrency": 1, "runs": runs}


def records(speed: float = 1.0, slower: dict[int, float] | None = None, **fields) -> list[dict]:
    """Closed loops at 8, 32, 64 and a request alone; ``slower`` by concurrency."""
    slower = slower or {}
    loops = [
        loop(n, [base * speed * x for x in (0.999, 1.0, 1.001)], slower.get(n, 1.0), **fields)
        for n, base in ((8, 5000.0), (32, 15000.0), (64, 22000.0))
    ]
    times = [x / speed * slower.get(1, 1.0) for x in (0.998, 1.0, 1.002)]
    return [*machine(speed, **fields), *loops, alone([3 * x for x in times], times, **fields)]


def write(path: Path, lines: list[dict]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def baseline_file(tmp_path: Path) -> Path:
    """Of two runs half a percent apart."""
    runs = [
        read_run([write(tmp_path / f"{speed}.jsonl", records(1.0, dict.fromkeys((1, 8, 32, 64), slow)))], "pico-vllm")
        for speed, slow in ((1, 1.0), (2, 1.005))
    ]
    path = tmp_path / "baselines" / "h200.json"
    write_baseline(propose_baseline(runs, "pico-vllm"), path)
    return path


def run_gate(path: Path | list[Path], baseline: Path, *options: str) -> tuple[int, str]:
    """(exit code, what it says, spaces merged)."""
    paths = map(str, path if isinstance(path, list) else [path])
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["gate", *paths, "--baseline", str(baseline), *options])
    if isinstance(result.exception, ConfigError):
        return 1, str(result.exception)
    return result.exit_code, re.sub(r" +", " ", result.output)


def text_of(result) -> str:
    file = io.StringIO()
    Console(file=file, width=200).print(render(result))
    return file.getvalue()


# Planted changes


@pytest.mark.parametrize("speed", [1.0, 1 / 1.05, 1.05])
@pytest.mark.parametrize("concurrency", [8, 32, 64])
def test_a_point_that_is_ten_percent_slower_fails_and_is_named(tmp_path, baseline_file, speed, concurrency):
    path = write(tmp_path / "run.jsonl", records(speed, {concurrency: 1.1}))
    code, output = run_gate(path, baseline_file)
    assert code == 2
    slower = [line for line in output.splitlines() if line.strip().startswith("slower")]
    assert len(slower) == 2  # its tok/s and its TTFT, nothing else
    assert all(f"concurrency {concurrency}," in line and "+9.7%" in line for line in slower)  # of the mean of two runs
    assert "FAILED: 2 of 8 gated numbers slower" in output


def test_a_slower_decode_alone_is_found_beside_its_unchanged_prompt(tmp_path, baseline_file):
    lines = [r if r["point"] != "c1" else alone([3.0] * 3, [1.1, 1.101, 1.099]) for r in records()]
    code, output = run_gate(write(tmp_path / "run.jsonl", lines), baseline_file)
    assert code == 2
    assert "FAILED: 1 of 8" in output
    assert "TPOT ms median 1.00 1.10 +9.7%" in output


@pytest.mark.parametrize("speed", [0.5, 1 / 1.05, 1.0, 1.05])
def test_a_machine_that_is_slower_in_everything_explains_slower_points(tmp_path, baseline_file, speed):
    code, output = run_gate(write(tmp_path / "run.jsonl", records(speed)), baseline_file)
    assert (code, "PASSED: none of 8 gated numbers is slower" in output) == (0, True)


def test_a_machine_of_the_same_speed_explains_nothing(tmp_path, baseline_file):
    lines = [*machine(1.0), *records(1 / 1.1)[2:]]
    code, output = run_gate(write(tmp_path / "run.jsonl", lines), baseline_file)
    assert (code, "FAILED: 8 of 8" in output) == (2, True)


def test_a_faster_run_passes_and_says_that_a_baseline_could_be_proposed(tmp_path, baseline_file):
    code, output = run_gate(write(tmp_path / "run.jsonl", records(1.0, {8: 0.8})), baseline_file)
    assert code == 0
    assert "2 faster" in output
    assert "A new baseline could be proposed: pico-vllm bench baseline" in output


def test_a_point_that_is_noisy_in_this_run_is_reported_only(tmp_path, baseline_file):
    lines = [r if r.get("concurrency") != 32 else loop(32, [10000, 11000, 12000]) for r in records()]
    code, output = run_gate(write(tmp_path / "run.jsonl", lines), baseline_file)
    assert code == 0
    assert re.search(r"noisy .*concurrency 32,.* \+36\.\d% – 9\.\d%", output)
    assert "2 too noisy to gate (CV > 3%)" in output


def test_a_point_that_is_noisy_in_the_baseline_is_reported_only(tmp_path):
    noisy = [r if r.get("concurrency") != 32 else loop(32, [14000, 15000, 16000]) for r in records()]
    proposed = propose_baseline([read_run([write(tmp_path / "a.jsonl", noisy)], "pico-vllm")], "pico-vllm")
    run = read_run([write(tmp_path / "b.jsonl", records(1.0, {32: 1.5}))], "pico-vllm")
    result = gate(run, proposed)
    assert not result.slower
    assert [c.verdict for c in result.changes if c.entry.gated.case.concurrency == 32] == ["noisy", "noisy"]
    assert "noisy" in text_of(result)


def test_a_run_in_which_everything_is_noisy_says_that_nothing_was_gated(tmp_path, baseline_file):
    shaken = [r if r["point"] != "sweep" else loop(r["concurrency"], [10000, 15000, 20000]) for r in records()]
    code, output = run_gate(write(tmp_path / "run.jsonl", shaken), baseline_file, "--points", "sweep")
    assert (code, "NOTHING GATED: all 6 numbers are too noisy (CV > 3%)" in output) == (0, True)


# What can't be compared


def test_missing_points_are_named_with_the_remedy(tmp_path, baseline_file):
    lines = [r for r in records() if r.get("concurrency") != 32]
    code, output = run_gate(write(tmp_path / "run.jsonl", lines), baseline_file)
    assert code == 1
    assert "lacks 1 point(s)" in output
    assert "concurrency 32, streamed, greedy: out_tok_s, ttft_ms_median" in output
    assert "--points" in output


def test_a_point_that_failed_is_missing_with_its_reason(tmp_path, baseline_file):
    failed = {**{k: v for k, v in loop(32, [1.0]).items() if k != "runs"}, "error": "WrongOutputError: 3 tokens"}
    lines = [r if r.get("concurrency") != 32 else failed for r in records()]
    code, output = run_gate(write(tmp_path / "run.jsonl", lines), baseline_file)
    assert (code, "(failed: WrongOutputError: 3 tokens)" in output) == (1, True)


def test_only_the_points_asked_for_are_gated(tmp_path, baseline_file):
    lines = [r for r in records(1.0, {8: 1.2}) if r["point"] != "c1"]
    path = write(tmp_path / "run.jsonl", lines)
    assert run_gate(path, baseline_file, "--points", "sweep")[0] == 2
    code, output = run_gate(path, baseline_file, "--points", "burst")
    assert (code, "the baseline has nothing of the points burst; it has sweep, c1" in output) == (1, True)


def test_points_that_the_baseline_lacks_are_told_and_decide_nothing(tmp_path, baseline_file):
    lines = [*records(), loop(128, [1.0, 1.0, 1.0])]
    code, output = run_gate(write(tmp_path / "run.jsonl", lines), baseline_file)
    assert (code, "not in the baseline: sweep 512 tokens in, 128 out, concurrency 128" in output) == (0, True)


def test_another_gpu_is_refused_with_the_remedy(tmp_path, baseline_file):
    path = write(tmp_path / "run.jsonl", records(gpu="NVIDIA B200"))
    code, output = run_gate(path, baseline_file)
    assert code == 1
    assert "measured on B200, the baseline on H200" in output
    assert "pico-vllm bench baseline" in output
    code, output = run_gate(path, baseline_file.parent)  # a folder: by the hardware's name
    assert (code, "has no baseline of B200; make one: pico-vllm bench baseline" in output) == (1, True)
    assert run_gate(write(tmp_path / "ours.jsonl", records()), baseline_file.parent)[0] == 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": "other"}, "model 'tiny' → 'other'"),
        ({"dtype": "float16"}, "dtype 'bfloat16' → 'float16'"),
        ({"settings": SETTINGS | {"max_num_seqs": 128}}, "settings.max_num_seqs 256 → 128"),
        ({"settings": SETTINGS | {"prefix_caching": True}}, "settings.prefix_caching False → True"),
    ],
)
def test_another_model_or_setting_is_refused(tmp_path, baseline_file, change, words):
    lines = [r if "runs" not in r else r | change for r in records()]
    code, output = run_gate(write(tmp_path / "run.jsonl", lines), baseline_file)
    assert (code, words in output) == (1, True)


def test_what_an_engine_finds_out_and_newer_settings_are_no_difference(tmp_path, baseline_file):
    lines = [r if "runs" not in r else r | {"settings": SETTINGS | {"num_blocks": 7, "new": 1}} for r in records()]
    assert run_gate(write(tmp_path / "run.jsonl", lines), baseline_file)[0] == 0


def test_a_run_without_ceilings_or_with_a_point_twice_is_refused(tmp_path, baseline_file):
    code, output = run_gate(write(tmp_path / "run.jsonl", records()[2:]), baseline_file)
    assert (code, "no ceilings and calib records" in output) == (1, True)
    code, output = run_gate(write(tmp_path / "run.jsonl", [*records(), *records()]), baseline_file)
    assert (code, "measured twice" in output) == (1, True)


def test_runs_of_different_machines_make_no_baseline(tmp_path):
    paths = [write(tmp_path / f"{gpu}.jsonl", records(gpu=gpu)) for gpu in ("NVIDIA H200", "NVIDIA B200")]
    with pytest.raises(ConfigError, match="a baseline is of one kind of machine"):
        propose_baseline([read_run([path], "pico-vllm") for path in paths], "pico-vllm")


@pytest.mark.parametrize("text", ["{}", "[1]", "not JSON", '{"format": 1, "hardware": "H200"}'])
def test_what_is_no_baseline_is_refused(tmp_path, text):
    path = tmp_path / "broken.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"broken\.json"):
        read_baseline(path)


# Normalisation


def test_each_number_goes_with_the_speed_that_bounds_it():
    speeds = Speeds(4e12, 8e14, 1e5)
    record = alone([1.0], [1.0])
    assert bounds_of(record, "ttft_ms_median", speeds) == Bounds(matmul=1.0)
    assert bounds_of(record, "tpot_ms_median", speeds) == Bounds(bandwidth=1.0)
    assert bounds_of(loop(8, [1.0]), "out_tok_s", speeds) == Bounds(bandwidth=0.5, matmul=0.5)
    waiting = alone([1.0], [1.0])
    waiting["runs"][0]["host_share"] = 0.25
    assert bounds_of(waiting, "tpot_ms_median", speeds) == Bounds(bandwidth=0.75, host=0.25)
    op = kernel("linear", "1", median=1.0, floor=1.0) | {"bytes": 4e6, "flops": 24e8}
    assert bounds_of(op, "time_us", speeds) == Bounds(bandwidth=0.25, matmul=0.75)


def test_a_slowdown_is_of_the_speeds_that_a_number_goes_with():
    reference, now = Speeds(4.0, 800.0, 10.0), Speeds(2.0, 800.0, 40.0)
    assert Bounds(bandwidth=1.0).slowdown(now, reference) == 2.0
    assert Bounds(matmul=1.0).slowdown(now, reference) == 1.0
    assert Bounds(bandwidth=0.5, host=0.5).slowdown(now, reference) == pytest.approx(2**0.5 / 2)


def test_each_session_of_a_file_is_normalised_by_its_own_ceilings(tmp_path):
    first, second = records(1.0)[:5], [*machine(0.5), records(0.5)[-1]]
    run = read_run([write(tmp_path / "run.jsonl", first + second)], "pico-vllm")
    assert {g.case.point: r.speeds.bandwidth for g, r in run.readings.items()} == {"sweep": 4.5e12, "c1": 2.25e12}


def test_other_engines_of_a_file_are_left_alone(tmp_path):
    lines = [*records(), loop(8, [1.0, 1.0], engine="vllm"), loop(8, [1.0, 1.0], label="eager")]
    run = read_run([write(tmp_path / "run.jsonl", lines)], "pico-vllm")
    assert len(run.readings) == 8


# Kernels


def benchmark_json(slower: float = 1.0) -> dict:
    """As pytest-benchmark writes it, for two ops; the second is ``slower``."""
    calib, ceilings = machine()
    fields = {**MACHINE, "device": "cuda", "cpu": "some"}
    cases = [("linear", 1e-6), ("rms_norm", 2e-6 * slower)]
    return {
        "machine_info": {"pico_vllm": {"fields": fields, "calib": calib["metrics"], "ceilings": ceilings["metrics"]}},
        "benchmarks": [
            {
                "name": op,
                "stats": {"median": 100 * s, "iqr": s, "min": 99 * s},
                "extra_info": {
                    "pico_vllm": {
                        **{"op": op, "case": "1 token", "model": "tiny", "dtype": "bfloat16", "backend": "triton"},
                        **{"bytes": 1e6, "flops": 1e6, "calls": 100},
                    }
                },
            }
            for op, s in cases
        ],
    }


def test_kernels_of_pytest_benchmark_pass_through_the_same_gate(tmp_path):
    paths = [tmp_path / name for name in ("a.json", "b.json", "slow.json")]
    for path, slower in zip(paths, (1.0, 1.005, 1.1), strict=True):
        path.write_text(json.dumps(benchmark_json(slower)))
    runs = [read_run([path], "pico-vllm") for path in paths]
    proposed = propose_baseline(runs[:2], "pico-vllm")
    assert [entry.value for entry in proposed.entries] == pytest.approx([1.0, 2.005], rel=1e-3)  # µs a call
    assert not gate(runs[1], proposed).slower
    assert [change.entry.gated.words for change in gate(runs[2], proposed).slower] == [
        "kernel rms_norm, 1 token, shapes of tiny, bfloat16"
    ]


def test_json_of_another_suite_is_refused(tmp_path):
    path = tmp_path / "other.json"
    path.write_text(json.dumps({"machine_info": {}, "benchmarks": []}))
    with pytest.raises(ConfigError, match="benchmarks/kernels"):
        read_run([path], "pico-vllm")


# The file


def test_a_baseline_survives_its_file(tmp_path):
    proposed = propose_baseline([read_run([path], "pico-vllm") for path in H200_RUNS], "pico-vllm")
    path = tmp_path / baseline_name("H200")
    write_baseline(proposed, path)
    found = read_baseline(path)
    assert path.name == "h200.json"
    assert [entry.gated for entry in found.entries] == [entry.gated for entry in proposed.entries]
    assert asdict(found)["speeds"] == asdict(proposed)["speeds"]
    write_baseline(found, tmp_path / "again.json")
    assert (tmp_path / "again.json").read_text() == path.read_text()


def test_the_committed_baseline_is_what_the_committed_runs_propose(tmp_path):
    result = CliRunner().invoke(app, ["baseline", *map(str, H200_RUNS), "--out", str(tmp_path / "h200.json")])
    assert result.exit_code == 0
    assert (tmp_path / "h200.json").read_text() == H200_BASELINE.read_text()


@pytest.mark.parametrize(("engine", "kernels"), [(0, 0), (1, 0), (2, 1)])
def test_the_runs_of_the_committed_baseline_pass_it(engine, kernels):
    assert run_gate([H200_ENGINE[engine], H200_KERNELS[kernels]], H200_BASELINE.parent)[0] == 0


def test_a_run_of_another_machine_passes_against_the_two_of_one(tmp_path):
    path = tmp_path / "h200.json"
    write_baseline(propose_baseline([read_run([run], "pico-vllm") for run in H200_ENGINE[:2]], "pico-vllm"), path)
    code, output = run_gate(H200_ENGINE[2], path)
    assert (code, "PASSED: none of 13 gated numbers is slower" in output) == (0, True)


def test_the_recorded_run_with_a_mistimed_start_fails(tmp_path):
    path = tmp_path / "h200.json"
    write_baseline(propose_baseline([read_run([run], "pico-vllm") for run in OLDER_RUNS], "pico-vllm"), path)
    code, output = run_gate(RESULTS / "h200_gpu_engine_mistimed.jsonl", path)
    assert (code, "FAILED: 11 of 17 gated numbers slower" in output) == (2, True)


# The two rates, on the spread that the committed baseline records


@functools.cache
def own_spread(values: tuple[float, ...]) -> float:
    return statistics.stdev(map(math.log, values))


def simulated_run(
    baseline: Baseline, rng: random.Random, slow_point: object = None, *, own: bool = False
) -> MeasuredRun:
    """A run on a machine whose speeds differ.

    Args:
        baseline: whose numbers spread as it records: the spread that its margins are made of, or each number's ``own``
            where there are three values of it; two say nothing of one number.
        rng: that draws.
        slow_point: is 10 % slower in all that is measured of it.
    """
    speeds = Speeds(*(value * math.exp(rng.gauss(0, 0.03)) for value in asdict(baseline.speeds).values()))
    run = MeasuredRun("simulated", baseline.hardware, {}, baseline.configurations)
    for entry in baseline.entries:
        planted = 1.1 if entry.gated.case == slow_point else 1.0
        time = time_like(entry.gated.metric, entry.value) * entry.bounds.slowdown(speeds, baseline.speeds)
        spread = own_spread(entry.values) if own and entry.num_runs >= 3 else entry.spread
        time *= planted * math.exp(rng.gauss(0, spread))
        run.readings[entry.gated] = Reading(time_like(entry.gated.metric, time), 0.0, 2, speeds, entry.bounds)
    return run


NUM_RUNS = 2000


@pytest.mark.parametrize("own", [False, True], ids=["mean spread", "own spread"])
def test_an_unchanged_run_fails_in_at_most_two_percent_of_cases(own):
    baseline, rng = read_baseline(H200_BASELINE), random.Random(0)
    failed = sum(bool(gate(simulated_run(baseline, rng, own=own), baseline).slower) for _ in range(NUM_RUNS))
    assert failed / NUM_RUNS <= 0.02


@pytest.mark.parametrize("own", [False, True], ids=["mean spread", "own spread"])
def test_a_run_with_one_point_ten_percent_slower_fails_in_at_least_95_percent_of_cases(own):
    baseline, rng = read_baseline(H200_BASELINE), random.Random(1)
    points = list(dict.fromkeys(entry.gated.case for entry in baseline.entries if not entry.is_noisy))
    found = 0
    for i in range(NUM_RUNS):
        slow = points[i % len(points)]
        slower = gate(simulated_run(baseline, rng, slow, own=own), baseline).slower
        found += any(change.entry.gated.case == slow for change in slower)  # and it is named
    assert found / NUM_RUNS >= 0.95


@pytest.mark.parametrize(("num_runs", "at_most"), [(3, 0.04), (5, 0.03)])
def test_a_baseline_of_few_runs_that_happen_to_lie_close_raises_few_false_alarms(num_runs, at_most):
    """The whole procedure: runs, the baseline that they propose, another run. Two runs only guess at their spread."""
    recorded, rng = read_baseline(H200_BASELINE), random.Random(2)
    truth = replace(recorded, entries=tuple(entry for entry in recorded.entries if not entry.is_noisy))
    failed = 0
    for _ in range(300):
        proposed = propose_baseline([simulated_run(truth, rng) for _ in range(num_runs)], "pico-vllm")
        failed += bool(gate(simulated_run(truth, rng), proposed).slower)
    assert failed / 300 <= at_most


def test_margins_widen_with_the_number_of_gated_entries_and_shrink_with_runs():
    baseline = read_baseline(H200_BASELINE)
    entry = next(entry for entry in baseline.entries if not entry.is_noisy)
    # Entries of one run, so no degrees of freedom: Φ⁻¹(0.98) = 2.0537 standard deviations, and the baseline's own.
    single = replace(entry, spread=0.01, values=(1.0,))
    assert replace(baseline, entries=(single,) * 30).margin(single) > 0.04
    assert baseline.margin(replace(entry, values=(1.0,) * 5)) < baseline.margin(entry)
    assert replace(baseline, entries=(single,)).margin(single) == pytest.approx(0.020537 * 2**0.5, abs=1e-5)


def test_students_quantiles_are_those_of_the_tables():
    assert student_quantile(0.99, 5) == pytest.approx(3.365, rel=0.01)
    assert student_quantile(0.999, 17) == pytest.approx(3.646, rel=0.01)
    assert student_quantile(0.975, 30) == pytest.approx(2.042, rel=0.001)
    assert student_quantile(0.975, 0) == pytest.approx(1.960, rel=0.001)
