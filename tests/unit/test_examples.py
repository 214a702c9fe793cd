"""Every example runs as a script and prints the line that is its point."""

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"

#: How the lines begin that a reader should come away with. Errors differ by machine: the examples assert them.
TELLING_LINES = {
    "block_pool": [
        "C wants 2, one is free: None, no change      owners [1, 1, 1, 1, 1, 0]  free 1",
        "A releases all of its blocks: C keeps two    owners [1, 1, 0, 1, 1, 0]  free 2",
    ],
    "radix_cache": [
        "B starts: 5 of 9 tokens cached, copies [(1, 3)]",
        "C starts: 11 of 14 tokens cached, copies [(4, 5)]",
        "    : what is  [5, 8) blocks [1] locks 0",
        "  block table of D: [2, 4, 7]",
    ],
    "scheduler_without_a_model": [
        "2    A decode [3, 4), B prompt [5, 10)               6       2",
        "7    A decode [8, 9)                                 1       3            B preempted",
        "12   B prompt [8, 15)                                7       2            B done",
    ],
    "one_attention_op": [
        "sequence 1: block table [4, 11], slots [16, 17, 18, 19, 44, 45, 46], the last 3 new",
        "reference against the plain softmax in fp64: largest difference ",
        "cpu       against the plain softmax in fp64: largest difference ",
    ],
    "one_layer_against_transformers": [
        "their 12 tensors become our 6: ",
        "reference against transformers: largest difference ",
        "cpu       against transformers: largest difference ",
    ],
    "hunt_a_divergence": [
        "before the fault: passes",
        "with the fault, greedy tokens are the same",
        "FAILED: the first point that differs is layers.0.input_layernorm, made by rms_norm",
        f"  {'rms_norm':<70} passes",
        f"  {'gated_linear':<70} breaks at layers.0.input_layernorm, made by rms_norm",
    ],
}


@pytest.fixture
def run(monkeypatch, capsys):
    """Run an example as a script in this process; returns the lines it prints. An error or an exit code fails."""

    def call(name, *arguments):
        path = str(EXAMPLES / f"{name}.py")
        monkeypatch.setattr(sys, "argv", [path, *arguments])
        runpy.run_path(path, run_name="__main__")
        return capsys.readouterr().out.splitlines()

    return call


@pytest.mark.parametrize("name", TELLING_LINES)
def test_an_example_prints_its_point(run, name):
    lines = run(name)
    for telling in TELLING_LINES[name]:
        assert sum(line.startswith(telling) for line in lines) == 1, telling


@pytest.mark.model
def test_generate_prints_its_point(run, default_model_dir):
    lines = run("generate", str(default_model_dir))
    assert lines[1].startswith("  'The capital of France is' → ' Paris.")
    assert "  seed 3 again, alone: the same tokens" in lines
    assert lines[-1].startswith("chat: 'Name three colours.' → ")


def test_every_example_is_run_here():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*TELLING_LINES, "generate"}
