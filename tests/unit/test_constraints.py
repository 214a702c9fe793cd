"""The two files of constraints: what is pinned, and that they say the same but for what the oldest one is about."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
OLDEST = {"torch", "triton", "transformers", "huggingface_hub"}  # transformers 5.17 asks for huggingface_hub below 2
OLDER = {"numpy"}  # triton 3.5's interpreter makes a number of an array of one, which 2.4 refuses


def pins(name: str) -> dict[str, str]:
    """Package → what is asked of its version."""
    lines = (ROOT / "ci" / name).read_text().splitlines()
    matches = (re.fullmatch(r"([\w.-]+)([=<>].+)", line) for line in lines)
    return {match[1]: match[2] for match in matches if match}


def lower_bounds() -> dict[str, str]:
    """Package → the lowest version that pyproject.toml allows to who runs the engine."""
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    return {match[1]: match[2] for text in dependencies if (match := re.match(r"([\w-]+)>=([\d.]+)", text))}


def test_the_oldest_versions_are_those_that_pyproject_allows():
    oldest, bounds = pins("constraints-oldest.txt"), lower_bounds()
    for package in OLDEST:
        assert re.fullmatch(rf"=={re.escape(bounds[package])}(\.0)*", oldest[package]), package


def test_everything_else_is_pinned_alike():
    newest, oldest = pins("constraints-cpu.txt"), pins("constraints-oldest.txt")
    assert {name for name in newest.keys() | oldest.keys() if newest.get(name) != oldest.get(name)} == OLDEST | OLDER
