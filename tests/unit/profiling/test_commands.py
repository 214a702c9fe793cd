"""``pico-vllm profile`` as a user meets it, on a tiny model and the CPU."""

import gzip
import json
import sys

import pytest

import profiles
import tiny_models
from pico_vllm import cli
from pico_vllm.profiling.profile import read_profile, write_profile


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("llama")
    tiny_models.save_tiny_model(tiny_models.MODELS["llama-gqa3-d64-tied"], directory)
    return directory


@pytest.fixture
def profile(monkeypatch, capsys):
    """``pico-vllm profile …`` → (exit code, stdout, stderr)."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["pico-vllm", "profile", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        captured = capsys.readouterr()
        return stop.value.code or 0, captured.out, captured.err

    return call


def small(checkpoint, out, *more):
    load = ["--input-len", 20, "--output-len", 4, "--concurrency", 3, "--no-ceilings", "--device", "cpu"]
    engine = ["--options", '{"num_gpu_blocks_override": 64}']
    return ["run", "--model", checkpoint, "--out", out, *load, *engine, *more]


def test_a_capture_has_a_trace_numbers_and_a_table(profile, checkpoint, tmp_path):
    code, out, err = profile(*small(checkpoint, tmp_path / "a"))
    assert code == 0, err
    events = json.loads(gzip.decompress((tmp_path / "a" / "trace.json.gz").read_bytes()))["traceEvents"]
    names = {event["name"] for event in events}
    assert {"pico.step", "pico.phase.schedule", "pico.layer.2", "pico.op.paged_attention"} <= names
    found = read_profile(tmp_path / "a")
    assert found.workload["concurrency"] == 3 and found.engine["backend"] == "cpu"
    assert found.environment["torch"] and found.ceilings is None and found.unprofiled_step_us is not None
    summary = found.summary
    assert summary.num_steps == 4 and not summary.on_gpu and len(summary.layers_us) == 3
    assert summary.busy_us + summary.gaps.total_us + summary.gaps.shorter_us == pytest.approx(summary.window_us)
    assert sum(phase.total_us for phase in summary.host.values()) == pytest.approx(summary.window_us)
    calls = {op.name: op.calls for op in summary.ops}
    assert (calls["paged_attention"], calls["linear 384 x 300"]) == (12, 4)
    assert next(op for op in summary.ops if op.name == "linear 384 x 300").num_bytes is not None
    assert all(word in out for word in ("steps", "busy", "gaps", "host, by phase", "schedule", "paged_attention"))
    assert "ui.perfetto.dev" in err

    assert profile("show", tmp_path / "a")[:2] == (0, out)
    code, out, err = profile("compare", tmp_path / "a", tmp_path / "a" / "profile.json")
    assert code == 0, err
    assert "step p50, µs" in out and "1.00" in out and "B has no ceilings" in out

    code, out, err = profile(*small(checkpoint, tmp_path / "a"))
    assert (code, out) == (1, "") and "profile.json exists: give an empty folder" in err


def test_some_steps_of_a_closed_loop(profile, checkpoint, tmp_path):
    code, _, err = profile(*small(checkpoint, tmp_path, "--steps", 6, "--skip", 2, "--warmup", 0, "--eager"))
    assert code == 0, err
    found = read_profile(tmp_path)
    assert found.summary.num_steps == 6 and found.unprofiled_step_us is None


@pytest.mark.parametrize(
    "more, message",
    [
        (["--nsys"], "--nsys is for GPUs, and the device is cpu: leave it out"),
        (["--nvtx"], "--nvtx is for GPUs, and the device is cpu: leave it out"),
        (["--options", "[]"], "--options='[]' must be a JSON object"),
        (["--options", "{"], "--options='{' is no JSON"),
        (["--options", '{"blocksize": 16}'], "unknown engine option 'blocksize'; did you mean 'block_size'?"),
        (["--options", '{"engine_core_process": true}'], "engine_core_process=true: the core is in another process"),
        (["--skip", 4, "--warmup", 0], "nothing was recorded: the requests have ended within --skip=4 steps"),
        (["--input-len", 400], "max_model_len"),
    ],
)
def test_what_can_not_be_done_is_one_line(profile, checkpoint, tmp_path, more, message):
    code, out, err = profile(*small(checkpoint, tmp_path / "out", *more))
    assert (code, out) == (1, "")
    assert message in err and err.splitlines()[-1].startswith("error: ")
    assert not (tmp_path / "out" / "profile.json").exists()


def test_a_folder_that_can_not_be_made_is_named(profile, checkpoint, tmp_path):
    (tmp_path / "file").write_text("")
    code, _, err = profile(*small(checkpoint, tmp_path / "file" / "out"))
    assert code == 1 and "can't make the folder" in err


def test_captures_that_are_not_there_or_of_another_version_are_named(profile, tmp_path):
    write_profile(profiles.profile(), tmp_path / "profile.json")
    code, _, err = profile("compare", tmp_path, tmp_path / "none")
    assert code == 1 and "can't read the capture" in err and "none" in err
    (tmp_path / "old.json").write_text('{"schema": "pico-vllm-profile", "version": 0}')
    code, _, err = profile("compare", tmp_path, tmp_path / "old.json")
    assert code == 1 and "version 0" in err and "reads version 1" in err


@pytest.mark.parametrize("is_terminal", [True, False])
@pytest.mark.parametrize("command", ["show", "compare"])
def test_numbers_are_whole_in_a_terminal_of_80_columns_and_in_a_pipe(
    profile, tmp_path, monkeypatch, command, is_terminal
):
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "dumb")  # 80 columns
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    write_profile(profiles.wide_profile(), tmp_path / "profile.json")
    code, out, _ = profile(command, *[tmp_path] * (1 if command == "show" else 2))
    lines = out[out.index("kernels") :].splitlines()
    numbers = ("9,876,543.21", "3.7%") if command == "show" else ("987,654,321", "1.00")
    assert code == 0
    assert all(number in line for number in ("65535 x 5 x 8", "80,001", "78.9%", *numbers) for line in lines[4:6])
    assert ("of FLOPs" if command == "show" else "B of ceiling") in lines[2]
    assert lines[4].startswith(" indexSelectSmallI… " if is_terminal else " indexSelectSmallIndex<c10::BFloat16, int")


def test_the_help_names_the_commands(profile):
    code, out, _ = profile("--help")
    assert code == 0 and all(name in out for name in ("run", "show", "compare"))
