"""Starts, timed: what is run how often, what comes of it, and one real process."""

import json
import time
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

import tiny_models
from pico_vllm.bench import start
from pico_vllm.bench.commands import app
from pico_vllm.bench.results import higher_is_better, load_records, measure
from pico_vllm.bench.start import PHASES, StartRun, measure_starts, record_fields, start_once, start_table
from pico_vllm.errors import ConfigError

OPTIONS = {"device": "cpu", "num_gpu_blocks_override": 64}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("start")
    tiny_models.save_tiny_model(tiny_models.MODELS["qwen2-gqa6-d64-tied"], directory)
    return str(directory)


def answer(**seconds):
    return SimpleNamespace(returncode=0, stderr="", stdout=json.dumps({"seconds": seconds, "settings": {"a": 1}}))


def test_one_cold_start_and_then_warm_ones_on_what_it_has_compiled(monkeypatch):
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    caches, argvs = [], []

    def run(argv, *, env, **kwargs):
        assert "PYTHONDONTWRITEBYTECODE" not in env
        if argv[1] == "-c":
            assert not caches, "bytecode is made first"
            compile(argv[2], "imports", "exec")
            return None
        caches.append((env["TRITON_CACHE_DIR"], env["PYTHONPYCACHEPREFIX"]))
        argvs.append(argv)
        return answer(start_s=float(len(caches)))

    runs = list(measure_starts("dir", {"seed": 3}, num_warm=2, run=run))
    assert [(r.how, r.seconds["start_s"]) for r in runs] == [("cold", 1.0), ("warm", 2.0), ("warm", 3.0)]
    assert len(set(caches)) == 1
    assert all(argv[1:3] == ["-m", "pico_vllm.bench.start"] and argv[4:] == ["dir", '{"seed": 3}'] for argv in argvs)
    assert 0 <= time.monotonic() - float(argvs[0][3]) < 60


def test_an_engine_that_does_not_start_says_why():
    failed = SimpleNamespace(returncode=1, stderr="Traceback\nConfigError: block_size=3 must be …\n", stdout="")
    with pytest.raises(ConfigError, match=r"does not start \(exit code 1\): ConfigError: block_size=3"):
        list(measure_starts("dir", {}, num_warm=1, run=lambda *args, **kwargs: failed))
    killed = SimpleNamespace(returncode=-9, stderr="", stdout="")
    with pytest.raises(ConfigError, match=r"exit code -9\): it said nothing"):
        list(measure_starts("dir", {}, num_warm=1, run=lambda *args, **kwargs: killed))


def test_a_start_tells_every_phase_and_they_fit_into_the_whole(model):
    run = start_once(time.monotonic() - 5.0, model, OPTIONS)
    assert set(run.seconds) == set(PHASES)
    assert 5.0 <= run.seconds["import_s"] < run.seconds["start_s"]
    parts = sum(seconds for name, seconds in run.seconds.items() if name != "start_s")
    assert parts <= run.seconds["start_s"] + 0.01  # each is rounded
    assert (run.settings["backend"], run.settings["extra"]) == ("cpu", OPTIONS)


def make_run(how, seconds):
    return StartRun(how, dict.fromkeys(PHASES, seconds), {"backend": "cpu"})


def test_a_record_holds_every_start_of_its_kind():
    record = record_fields([make_run("warm", 2.0), make_run("warm", 3.0)])
    assert (record["point"], record["engine"], record["how"]) == ("start", "pico-vllm", "warm")
    whole = measure(record, "start_s")
    assert whole is not None and (whole.median, whole.low, whole.high) == (2.5, 2.0, 3.0)
    assert not any(higher_is_better(name) for name in PHASES)


def test_the_table_has_a_line_a_phase_and_a_column_a_start():
    lines = start_table([make_run("cold", 12.0), make_run("warm", 1.5)]).splitlines()
    assert lines[0].split() == ["seconds", "cold", "warm"]
    assert lines[1].split() == ["imports", "12.00", "1.50"]
    assert len(lines) == 1 + len(PHASES)


def test_the_command_writes_a_record_a_kind(model, tmp_path, monkeypatch):
    asked = []

    def measure_nothing(path, options, *, num_warm):
        asked.append((path, options, num_warm))
        return [make_run("cold", 2.0), make_run("warm", 1.0)]

    monkeypatch.setattr(start, "measure_starts", measure_nothing)
    out = tmp_path / "start.jsonl"
    arguments = ["start", "--model", model, "--device", "cpu", "--warm", "1", "--out", str(out)]
    result = CliRunner().invoke(app, [*arguments, "--options", '{"seed": 3}'], catch_exceptions=False)
    assert result.exit_code == 0 and "process to first token" in result.output
    assert asked == [(model, {"dtype": "float32", "device": "cpu", "seed": 3}, 1)]
    assert [record["how"] for record in load_records([out])] == ["cold", "warm"]


@pytest.mark.parametrize("text", ["[1]", "{", "3"])
def test_options_that_are_no_object_are_refused(model, text):
    with pytest.raises(ConfigError, match="must be a JSON object"):
        CliRunner().invoke(app, ["start", "--model", model, "--options", text], catch_exceptions=False)


@pytest.mark.multiprocess
def test_a_process_of_its_own_starts_and_answers(model):
    (cold, warm) = measure_starts(model, OPTIONS, num_warm=1)
    assert (cold.how, warm.how) == ("cold", "warm")
    assert all(0 < run.seconds["import_s"] < run.seconds["start_s"] for run in (cold, warm))
