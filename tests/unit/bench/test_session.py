"""A whole session on a tiny model: engines, gate, machine, points, records; and the commands around it."""

import json
import sys

import pytest
import torch

import tiny_models
from pico_vllm import cli
from pico_vllm.bench import calibration, ceilings, session
from pico_vllm.bench.engines.loading import parse_engine_spec
from pico_vllm.bench.points import PointOptions, make_points
from pico_vllm.errors import ConfigError


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("session")
    tiny_models.save_tiny_model(tiny_models.MODELS["qwen2-gqa6-d64-tied"], directory, dtype=torch.bfloat16)
    return directory


@pytest.fixture
def quick_machine(monkeypatch):
    """The machine's own measurements are tested elsewhere."""
    monkeypatch.setattr(session, "calibrate", lambda device: {"python_loop_ns": [20.0]})
    measured = {name: {"median": 0.01, "best": 0.01, "what": ""} for name in ("copy_TBps", "read_TBps")}
    measured["matmul_512_bf16_TFLOPs"] = {"median": 0.1, "best": 0.1, "what": ""}
    monkeypatch.setattr(session, "measure_ceilings", lambda device: measured)
    assert ceilings.ceilings_from(measured).read_bytes_per_s == 1e10
    assert calibration.calibrate is not session.calibrate


def options():
    return PointOptions(
        tiny_models.VOCAB_SIZE, inputs=(8,), outputs=(4,), concurrencies=(2,), input_len=8, output_len=3
    )


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_session_writes_the_machine_the_points_and_the_gate(model_dir, tmp_path, quick_machine):
    specs = [parse_engine_spec(name) for name in ("pico-vllm", "transformers", "vllm")]
    said = []
    out = tmp_path / "deep" / "r.jsonl"
    with session.open_model(str(model_dir), name="tiny", dtype="auto", device="cpu") as model:
        assert model.dtype == "bfloat16"
        points = make_points(["c1", "sweep"], options())
        result = session.run_session(specs, model, points, out=out, num_runs=2, say=said.append)
    records = read(out)
    assert records == result.records
    assert [(r["engine"], r["point"]) for r in records] == [
        ("calib", "calib"),
        ("ceilings", "ceilings"),
        ("pico-vllm", "c1"),
        ("transformers", "c1"),
        ("pico-vllm", "sweep"),
        ("calib", "calib"),
    ]
    assert "vllm isn't installed" in result.unavailable["vllm"]
    ours, theirs = records[2], records[3]
    assert ours["workload_sha256"] == theirs["workload_sha256"]
    assert ours["gate"]["num_tokens"] > 512 and ours["model"] == "tiny" and ours["dtype"] == "bfloat16"
    assert {"start_s", "mode", "settings", "version", "load_memory_gib"} <= set(ours)
    assert 0 < ours["metrics"]["host_share"]["median"] < 1 and "host_share" not in theirs["metrics"]
    assert ours["metrics"]["bandwidth_share"]["median"] > 0
    assert any("transformers: left out of sweep" in line for line in said)


def test_wrong_outputs_are_never_timed(model_dir, tmp_path, quick_machine, monkeypatch):
    from pico_vllm.bench.engines import pico_engine

    class Wrong(pico_engine.PicoEngine):
        def step(self):
            return [(i, [(t + 1) % 300 for t in ids], ended) for i, ids, ended in super().step()]

    monkeypatch.setattr(pico_engine, "PicoEngine", Wrong)
    said = []
    with session.open_model(str(model_dir), name=None, dtype="float32", device="cpu") as model:
        points = make_points(["c1"], options())
        specs = [parse_engine_spec("pico-vllm"), parse_engine_spec("transformers")]
        result = session.run_session(specs, model, points, out=tmp_path / "r.jsonl", num_runs=1, say=said.append)
    assert "below the best one" in result.failed_gate["pico-vllm"]
    assert [r["engine"] for r in result.records if r["point"] == "c1"] == ["transformers"]
    assert any("pico-vllm: NOT timed, its outputs are wrong" in line for line in said)


def test_every_engine_is_closed_even_if_one_fails_to(model_dir, tmp_path, monkeypatch):
    from pico_vllm.bench.engines import pico_engine

    closed = []

    class Stubborn(pico_engine.PicoEngine):
        def close(self):
            closed.append(self)
            raise RuntimeError("stuck")

    monkeypatch.setattr(pico_engine, "PicoEngine", Stubborn)
    specs = [parse_engine_spec("pico-vllm@a"), parse_engine_spec("pico-vllm@b")]
    with (
        session.open_model(str(model_dir), name=None, dtype="auto", device="cpu") as model,
        pytest.raises(RuntimeError, match="stuck"),
    ):
        session.run_session(specs, model, [], out=tmp_path / "r.jsonl", measure_machine=False, say=lambda line: None)
    assert len(closed) == 2


def test_kernels_that_are_cut_short_keep_their_rows(tmp_path, monkeypatch):
    from pico_vllm.bench import kernel_session
    from pico_vllm.bench.kernel_rows import KernelRow

    def cut_short(*args, on_row, **more):
        on_row(KernelRow("smollm2-135m", "gated_linear", "1 token", "cpu", "bfloat16", "cpu", missing="not today"))
        raise KeyboardInterrupt

    monkeypatch.setattr(kernel_session, "bench_kernels", cut_short)
    with pytest.raises(KeyboardInterrupt):
        kernel_session.run_kernels(None, torch.device("cpu"), out=tmp_path / "k.jsonl", say=lambda line: None)
    assert [r["op"] for r in read(tmp_path / "k.jsonl")] == ["gated_linear"]


def test_two_engines_of_one_name_need_labels(model_dir, tmp_path):
    with session.open_model(str(model_dir), name=None, dtype="auto", device="cpu") as model:
        specs = [parse_engine_spec("pico-vllm"), parse_engine_spec("pico-vllm")]
        with pytest.raises(ConfigError, match="different names"):
            session.run_session(specs, model, [], out=tmp_path / "r.jsonl")


def test_a_random_model_is_made_once_and_loads_everywhere(tmp_path, monkeypatch):
    from pico_vllm.bench import random_model

    monkeypatch.setenv("PICO_VLLM_CACHE", str(tmp_path))
    small = random_model._QWEN | {
        "hidden_size": 128, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "vocab_size": 300, "max_position_embeddings": 256, "bos_token_id": 0,
        "eos_token_id": 1,
    }  # fmt: skip
    monkeypatch.setitem(random_model.SHAPES, "small", small)
    with session.open_model("random:small", name=None, dtype="auto", device="cpu") as model:
        assert model.name == "small shape, random weights"
        assert (model.dtype, model.config.hidden_size) == ("bfloat16", 128)
        written = (model.directory / "model.safetensors").stat().st_mtime_ns
    from safetensors.torch import load_file

    tensors = load_file(model.directory / "model.safetensors")
    biases = [t for name, t in tensors.items() if name.endswith("bias")]
    assert len(biases) == 6 and all(t.float().std() > 0.01 for t in biases)
    norms = [t.float() for name, t in tensors.items() if "norm" in name]
    assert all(0.9 < t.mean() < 1.1 and t.std() > 0.05 for t in norms)
    with session.open_model("random:small", name="x", dtype="auto", device="cpu") as model:
        assert (model.directory / "model.safetensors").stat().st_mtime_ns == written
    with (
        pytest.raises(ConfigError, match=r"unknown shape 'tiny'.*qwen2\.5-1\.5b"),
        session.open_model("random:tiny", name=None, dtype="auto", device="cpu"),
    ):
        pass


# ---------------------------------------------------------------------------------------------------------- commands
def command(monkeypatch, *args):
    monkeypatch.setattr(sys, "argv", ["pico-vllm", "bench", *map(str, args)])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    return caught.value.code or 0


def test_run_and_compare(model_dir, tmp_path, quick_machine, monkeypatch, capsys):
    out = tmp_path / "a.jsonl"
    small = ("--inputs", "8", "--outputs", "4", "--runs", "1", "--device", "cpu")
    assert command(monkeypatch, "run", "--model", model_dir, "--out", out, *small, "--tag", "x") == 0
    assert [r["tag"] for r in read(out)] == ["x"] * 4
    capsys.readouterr()
    assert command(monkeypatch, "compare", out, out, "--out", tmp_path / "report") == 0
    assert {"compare.md", "report.md", "report.csv"} <= {path.name for path in (tmp_path / "report").iterdir()}
    assert "c1" in capsys.readouterr().out


def test_a_workload_is_written_and_run(model_dir, tmp_path, quick_machine, monkeypatch, capsys):
    path = tmp_path / "w.jsonl"
    arguments = ("--kind", "shared-prefix", "--num", 3, "--prefix-len", 20, "--input-len", 4, "--output-len", 2)
    assert command(monkeypatch, "workload", "--out", path, *arguments, "--runs", 2, "--model", model_dir) == 0
    assert "2 runs of 3 requests" in capsys.readouterr().out
    out = tmp_path / "r.jsonl"
    run = ("--model", model_dir, "--points", "", "--workload", path, "--out", out, "--device", "cpu")
    assert command(monkeypatch, "run", *run) == 0
    (record,) = [r for r in read(out) if r["point"] == "file"]
    assert (record["workload"], record["requests"], record["input_len"]) == ("w", 3, 24)
    assert len(record["runs"]) == 1


def test_prompts_of_a_file_are_tokenised(model_dir, tmp_path, monkeypatch, capsys):
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "hello", "max_tokens": 3}\n{"prompt_token_ids": [7, 8, 9]}\n')
    path = tmp_path / "w.jsonl"
    arguments = ("--kind", "file", "--prompts", prompts, "--num", 2, "--runs", 1, "--output-len", 5, "--rate", 2)
    assert command(monkeypatch, "workload", "--out", path, *arguments, "--model", model_dir) == 0
    lines = sorted(read(path)[1:], key=lambda r: r["max_tokens"])
    assert [(len(r["prompt_token_ids"]), r["max_tokens"]) for r in lines] == [(5, 3), (3, 5)]
    assert read(path)[1]["arrival_s"] == 0.0


@pytest.mark.parametrize(
    "arguments, said",
    [
        (("run", "--points", "c2", "--out", "x"), "unknown point 'c2'"),
        (("run", "--engine", "vlm", "--out", "x"), "unknown engine 'vlm'"),
        (("run", "--inputs", "a,b", "--out", "x"), "must be numbers"),
        (("run", "--inputs", "0", "--out", "x"), "too small"),
        (("run", "--engine", "vllm", "--out", "x"), "nothing was measured: vllm: vllm isn't installed"),
        (
            ("suite", "--preset", "cpux", "--out", "x"),
            "unknown preset 'cpux'; known: cpu, cpu-gate, gpu-gate, seed, gpu",
        ),
        (("workload", "--out", "x", "--kind", "odd"), "unknown --kind 'odd'"),
        (("workload", "--out", "x", "--input-len", "9-3"), "LOW <= HIGH"),
        (("workload", "--out", "x", "--kind", "file"), "needs --prompts"),
        (("workload", "--out", "x", "--rate", "1", "--concurrency", "2"), "exclude each other"),
        (("compare", "missing.jsonl"), "missing.jsonl"),
        (("run", "--points", "c1,sweep,c1", "--out", "x"), "--points: c1 is there twice"),
        (("run", "--inputs", "8,9,8", "--out", "x"), "--inputs: 8 is there twice"),
        (("run", "--points", "", "--out", "x"), "there is nothing to measure"),
        (("run", "--concurrency", "4", "--out", "x"), "--concurrency is of sweep, burst, uniform, not of --points c1"),
        (("run", "--points", "poisson", "--rate", "inf", "--out", "x"), "--rate='inf': numbers must be finite"),
        (("run", "--dtype", "int8", "--out", "x"), "dtype='int8' must be one of auto, bfloat16"),
        (("run", "--device", "tpu", "--out", "x"), "device='tpu' must be auto, cpu, cuda or cuda:N"),
        (("run", "--device", "mps", "--out", "x"), "device='mps' must be auto, cpu, cuda or cuda:N"),
        (("run", "--memory-share", "0", "--device", "cpu", "--out", "x"), "memory_share=0.0 is of a GPU"),
        (("run", "--device", "cpu", "--out", "."), "can't write records to ."),
        (
            ("run", "--points", "sweep", "--input-len", "999", "--concurrency", "2", "--device", "cpu", "--out", "x"),
            "nothing was measured: pico-vllm: left out of sweep input_len=999 output_len=128 concurrency=2",
        ),
        (("suite", "--preset", "cpu", "--out", "{file}"), "can't make the folder"),
        (("compare", "{records}", "--out", "{file}"), "can't make the folder"),
        (("workload", "--out", "."), "can't write the workload"),
        (("workload", "--out", "x", "--turns", "3"), "--turns is of multi-turn, not of --kind fixed"),
        (("workload", "--out", "x", "--kind", "multi-turn", "--input-len", "3-5"), "takes one length, not a range"),
    ],
)
def test_what_a_user_gets_wrong_is_one_line(model_dir, tmp_path, quick_machine, monkeypatch, capsys, arguments, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "records").write_text('{"point": "c1"}')
    arguments = [argument.format(file="file", records="records") for argument in arguments]
    if arguments[0] in ("run", "workload"):
        arguments = (*arguments, "--model", model_dir)
    assert command(monkeypatch, *arguments) == 1
    assert said in capsys.readouterr().err


def test_a_row_that_failed_is_why_nothing_was_measured(model_dir, tmp_path, quick_machine, monkeypatch, capsys):
    from pico_vllm.bench.engines import pico_engine

    class Failing(pico_engine.PicoEngine):
        def add(self, index, prompt_token_ids, max_tokens, temperature):
            if max_tokens == 5:  # the point's, not the gate's
                raise RuntimeError("out of luck")
            super().add(index, prompt_token_ids, max_tokens, temperature)

    monkeypatch.setattr(pico_engine, "PicoEngine", Failing)
    options = ("--inputs", "8", "--outputs", "5", "--device", "cpu", "--out", tmp_path / "r.jsonl")
    assert command(monkeypatch, "run", "--model", model_dir, *options) == 1
    assert "nothing was measured: pico-vllm, c1: RuntimeError: out of luck" in capsys.readouterr().err


def test_a_suite_writes_records_tables_and_plots(model_dir, tmp_path, quick_machine, monkeypatch, capsys):
    import dataclasses

    from pico_vllm.bench import kernel_session, suite
    from pico_vllm.bench.kernel_rows import KernelRow

    ours = dataclasses.replace(
        suite.PRESETS["cpu"],
        points=("c1", "sweep", "prefix", "poisson"),
        options=lambda vocab_size: PointOptions(
            vocab_size, inputs=(8, 16), outputs=(4,), concurrencies=(1, 2), input_len=8, output_len=3,
            prefix_len=20, own_len=4, rates=(50.0, 100.0), num_poisson=4,
        ),
        num_runs=1,
        with_prefix_caching=True,
    )  # fmt: skip
    monkeypatch.setitem(suite.PRESETS, "cpu", ours)
    row = KernelRow("tiny", "gated_linear", "1 token", "cpu", "bfloat16", "cpu", missing="not today")
    monkeypatch.setattr(kernel_session, "bench_kernels", lambda *args, on_row, **more: on_row(row) or [row])
    out = tmp_path / "suite"
    arguments = ("suite", "--preset", "cpu", "--out", out, "--model", model_dir, "--device", "cpu")
    assert command(monkeypatch, *arguments) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith((out / "report.md").read_text())
    records = read(out / "cpu.jsonl")
    assert {r["point"] for r in records} == {"calib", "ceilings", "c1", "sweep", "prefix", "poisson", "kernel"}
    settings = [r["settings"]["prefix_caching"] for r in records if r["point"] in ("c1", "sweep", "prefix", "poisson")]
    assert settings[-1] is True and not any(settings[:-1]), "off, but in the last measurement of all"
    assert [r["prefix_caching"] for r in records if r["point"] == "prefix"] == [False, False, True]
    assert (out / "report.csv").read_text().count("\n") > 100
    plots = {path.name for path in out.glob("*.png")}
    assert {"c1_decode.png", "c1_ttft.png", "sweep_latency.png", "goodput.png"} <= plots
    assert command(monkeypatch, *arguments) == 1
    assert "give an empty folder" in capsys.readouterr().err


def test_kernels_of_one_op(tmp_path, monkeypatch, capsys):
    from pico_vllm.bench import kernels

    measured = {name: {"median": 0.01, "best": 0.01, "what": ""} for name in ("copy_TBps", "read_TBps")}
    measured["matmul_512_bf16_TFLOPs"] = {"median": 0.1, "best": 0.1, "what": ""}
    monkeypatch.setattr(kernels, "measure_ceilings", lambda device, quick: measured)
    out = tmp_path / "k.jsonl"
    options = ("--only", "rms_norm", "--device", "cpu", "--out", out, "--tag", "x")
    assert command(monkeypatch, "kernels", *options) == 0
    rows = read(out)
    assert {(r["op"], r["backend"], r["tag"], r["device"]) for r in rows} == {("rms_norm", "cpu", "x", "cpu")}
    assert all(r["time_us"]["median"] > 0 and r["floor_us"] > 0 and r["error"] is None for r in rows)
    assert "rms_norm" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, said",
    [
        (("--shape", "gpt"), "unknown --shape 'gpt'"),
        (("--backend", "gpu"), "--backend='gpu' must be one of"),
        (("--dtype", "int8"), "--dtype='int8' must be one of"),
        (("--only", "swiggle"), "swiggle"),
    ],
)
def test_what_bench_kernels_refuses(monkeypatch, capsys, arguments, said):
    assert command(monkeypatch, "kernels", "--device", "cpu", *arguments) == 1
    assert said in capsys.readouterr().err
