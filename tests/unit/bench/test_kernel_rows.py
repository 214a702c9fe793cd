"""Rows as records and as tables."""

import io
import json

from rich.console import Console

from pico_vllm.bench.kernel_rows import KernelRow, kernel_table
from pico_vllm.bench.timing import Timing

WHERE = {"shapes": "tiny", "backend": "cpu", "dtype": "bfloat16", "device": "cpu"}
GOOD = KernelRow(
    op="gated_linear",
    case="17 tokens",
    num_bytes=6_000_000,
    flops=2_000_000_000,
    floor_s=25e-6,
    timing=Timing(50e-6, 45e-6, 60e-6, 40e-6, "eager"),
    rotated=True,
    baseline_name="F.linear, F.silu * up",
    baseline_s=75e-6,
    **WHERE,
)
WRONG = KernelRow(op="greedy", case="[5] x 100", floor_s=1e-6, error="1 of 5 elements | differ", **WHERE)
MISSING = KernelRow(op="fused", case="all", missing="backend cpu has no fused", **WHERE)


def test_a_record_has_these_fields():
    record = GOOD.to_dict()
    assert record == {
        "engine": "pico-vllm",
        "point": "kernel",
        "model": "tiny",
        "op": "gated_linear",
        "case": "17 tokens",
        "backend": "cpu",
        "dtype": "bfloat16",
        "device": "cpu",
        "bytes": 6_000_000,
        "flops": 2_000_000_000,
        "floor_us": 25.0,
        "time_us": {"median": 50.0, "p20": 45.0, "p80": 60.0, "best": 40.0},
        "fraction": 0.5,
        "mode": "eager",
        "rotated": True,
        "baseline_name": "F.linear, F.silu * up",
        "baseline_us": 75.0,
        "speedup": 1.5,
        "missing": None,
        "error": None,
    }
    json.dumps(record)


def test_a_wrong_op_has_no_time_in_its_record():
    record = WRONG.to_dict()
    assert (record["time_us"], record["fraction"], record["speedup"], record["mode"]) == (None, None, None, None)
    assert record["error"] == "1 of 5 elements | differ"


def test_the_terminal_table_shows_brackets_as_they_are():
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(kernel_table([GOOD, WRONG, MISSING]))
    text = console.export_text()
    assert "[5] x 100" in text
    assert "WRONG: 1 of 5 elements" in text and "backend cpu has no fused" in text
    assert "17 tokens (eager)" in text and "45–60" in text
    assert GOOD.op in [line.strip() for line in text.splitlines()]  # a heading
