"""Which commands `nox -s readme` finds, and how it runs them. No network."""

from __future__ import annotations

import subprocess

import pytest

import run_readme
from run_readme import ROOT, commands_of, run_in_fresh_environment, runnable

THE_TWO = [
    'pip install -c ci/constraints-cpu.txt . && pico-vllm generate "The capital of France is"',
    "pip install nox && nox",
]


@pytest.mark.parametrize("name", ["README.md", "README.zh.md"])
def test_the_two_commands_are_run_in_both_languages(name):
    assert commands_of((ROOT / name).read_text(encoding="utf-8")) == THE_TWO


def test_only_marked_blocks_are_run():
    markdown = "```bash\nnever\n```\n\n```bash run\n# a comment\none && two\n\nthree\n```\n\n```python\nno\n```\n"
    assert commands_of(markdown) == ["one && two", "three"]


def test_nox_is_looked_for_and_not_run():
    assert runnable("pip install nox && nox") == "pip install nox && nox --list"


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """A repository of one file, and a function that runs commands in a copy of it."""
    source = tmp_path / "source"
    (source / ".git").mkdir(parents=True)
    (source / "file.txt").write_text("from the checkout\n")
    monkeypatch.setattr(run_readme, "ROOT", source)
    monkeypatch.setattr(run_readme.venv, "create", lambda path, with_pip: (path / "bin").mkdir(parents=True))
    return lambda *commands: run_in_fresh_environment(list(commands), tmp_path / "work")


def test_commands_run_in_a_copy_with_the_new_environment_first(fresh, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    out = tmp_path / "out"
    fresh(
        f'cat file.txt > {out} && ls -A >> {out} && echo "${{PATH%%:*}} ${{PYTHONPATH-none}}" >> {out}', "rm file.txt"
    )
    work = tmp_path / "work"
    assert out.read_text() == f"from the checkout\nfile.txt\n{work}/venv/bin none\n"
    assert (tmp_path / "source" / "file.txt").exists()


def test_a_command_that_fails_ends_the_run(fresh, tmp_path):
    with pytest.raises(subprocess.CalledProcessError):
        fresh("false | true", f"touch {tmp_path}/later")
    assert not (tmp_path / "later").exists()
