"""The command that runs this program under nsys; nsys itself is on GPU machines."""

import stat
import sys

import pytest

from pico_vllm.errors import ConfigError
from pico_vllm.profiling.nsys import find_nsys, nsys_command, run_under_nsys


@pytest.fixture
def fake_nsys(tmp_path, monkeypatch):
    """A program of that name that does what the body of a shell script says."""

    def install(body):
        path = tmp_path / "bin" / "nsys"
        path.parent.mkdir()
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{path.parent}:/usr/bin:/bin")
        return path

    return install


def test_the_same_command_runs_with_nvtx_in_the_place_of_nsys(tmp_path):
    command = nsys_command("nsys", tmp_path, ["profile", "run", "--nsys", "--out", "x"])
    assert command[:2] == ["nsys", "profile"]
    assert command[-8:] == [sys.executable, "-m", "pico_vllm", "profile", "run", "--nvtx", "--out", "x"]
    assert {"--capture-range=cudaProfilerApi", "--cuda-graph-trace=node", f"--output={tmp_path / 'nsys'}"} <= set(
        command
    )


def test_without_nsys_the_remedy_is_named(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match="there is no nsys on the PATH; without --nsys"):
        find_nsys()


def test_the_report_is_where_nsys_was_told_to_write_it(fake_nsys, tmp_path):
    fake_nsys('for a; do case "$a" in --output=*) touch "${a#--output=}.nsys-rep";; esac; done')
    assert run_under_nsys(tmp_path, ["profile", "run"]) == tmp_path / "nsys.nsys-rep"


@pytest.mark.parametrize("body", ["exit 3", "exit 0"])
def test_a_run_without_a_report_has_failed(fake_nsys, tmp_path, body):
    fake_nsys(body)
    with pytest.raises(ConfigError, match=rf"ended with code {body[-1]} and left no .*nsys\.nsys-rep"):
        run_under_nsys(tmp_path, ["profile", "run"])
