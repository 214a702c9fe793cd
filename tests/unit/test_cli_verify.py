"""``pico-vllm verify``: options, output, exit code."""

import dataclasses
import json
import sys

import pytest
import torch

import tiny_models
from pico_vllm import cli
from pico_vllm.worker.model_runner import ModelRunner


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("qwen2")
    tiny_models.save_tiny_model(tiny_models.MODELS["qwen2-gqa3-d128-untied"], directory)
    return directory


@pytest.fixture
def run(checkpoint, monkeypatch, capsys):
    """``pico-vllm verify --model <tiny> …`` → (exit code, stdout, stderr)."""

    def verify(*arguments):
        monkeypatch.setattr(
            sys, "argv", ["pico-vllm", "verify", "--model", str(checkpoint), "--device", "cpu", *arguments]
        )
        with pytest.raises(SystemExit) as stop:
            cli.main()
        captured = capsys.readouterr()
        return stop.value.code or 0, captured.out, captured.err

    return verify


@pytest.mark.parametrize("arguments", [(), ("--dtype", "float32"), ("--backend", "reference", "--block-size", "32")])
def test_a_right_engine_passes_with_exit_code_0(run, arguments):
    code, out, _ = run(*arguments)
    assert code == 0
    assert "PASSED: all 42 points" in out
    assert "layers.2." in out


@pytest.mark.multiprocess
def test_several_ranks_pass_with_what_one_rank_can_show(run, tmp_path, monkeypatch):
    """14 points a layer and 3 more, but for the two products that give partial sums."""
    tiny_models.save_tiny_model(tiny_models.MODELS["qwen3-gqa2-d128-untied"], tmp_path)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    code, out, _ = run("--model", str(tmp_path), "--dtype", "float32", "--tp", "2", "--json")
    result = json.loads(out)
    assert code == 0
    assert result["settings"]["tensor_parallel_size"] == 2
    assert len(result["points"]) == 42 - 2 * 3
    assert result["tokens"]["num_tokens"] == 8 * 64


def test_json_is_json_and_nothing_else(run):
    code, out, _ = run("--json", "--dtype", "float32", "--max-num-batched-tokens", "7")
    result = json.loads(out)
    assert code == 0
    assert result["passes"] is True
    assert len(result["points"]) == 42
    assert (result["settings"]["dtype"], result["settings"]["max_num_batched_tokens"]) == ("float32", 7)


def test_all_points_shows_every_point(run):
    _, out, _ = run("--all-points")
    assert sum(line.strip().startswith("layers.") for line in out.splitlines()) == 39


def test_a_wrong_engine_fails_with_exit_code_2_and_names_the_op(run, monkeypatch):
    load = ModelRunner._load_parameters

    def drops_a_bias(self, *args):
        parameters = load(self, *args)
        parameters["layers.1.qkv_proj"] = dataclasses.replace(parameters["layers.1.qkv_proj"], bias=None)
        return parameters

    monkeypatch.setattr(ModelRunner, "_load_parameters", drops_a_bias)
    code, out, _ = run("--dtype", "float32")
    assert code == 2
    assert "FAILED: the first point that differs is layers.1.qkv_proj, made by linear" in out
    code, out, _ = run("--dtype", "float32", "--json")
    assert code == 2
    assert json.loads(out)["first_failure"] == {"point": "layers.1.qkv_proj", "op": "linear"}


def test_a_nan_is_valid_json(run, monkeypatch):
    load = ModelRunner._load_parameters

    def poisons(self, *args):
        parameters = load(self, *args)
        parameters["norm"] = parameters["norm"] * float("nan")
        return parameters

    monkeypatch.setattr(ModelRunner, "_load_parameters", poisons)
    code, out, _ = run("--dtype", "float32", "--json")

    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    result = json.loads(out, parse_constant=refuse)
    assert code == 2
    assert result["first_failure"]["point"] == "norm"
    assert next(p["rms"] for p in result["points"] if p["point"] == "norm") == "nan"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--tp", "2"), "tensor_parallel_size=2 does not split this model: num_attention_heads=3"),
        (("--backend", "triton"), "a CUDA GPU, and this engine runs on cpu"),
        (("--dtype", "int8"), "int8"),
        (("--backend", "x"), "reference"),
    ],
)
def test_what_cannot_be_verified_is_one_line(run, monkeypatch, arguments, words):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    code, out, err = run(*arguments)
    assert (code, out) == (1, "")
    assert err.startswith("error: ") and err.count("\n") == 1
    assert words in err
