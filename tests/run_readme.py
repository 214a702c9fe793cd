"""Run the README's commands as a reader would: in a fresh environment, in a copy of the checkout.

    python tests/run_readme.py

Runs the blocks that begin with three backticks and ``bash run``. What would begin the whole test suite again is only
looked for: see ``INSTEAD``. Needs what the commands need: a package index, or pip's cache.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
RUN_BLOCK = re.compile(r"^```bash run\n(.*?)^```$", re.MULTILINE | re.DOTALL)
#: Commands that aren't run as they stand → what shows that they would start. `nox` calls this script's session.
INSTEAD = {"nox": "nox --list"}
NOT_COPIED = (".git", ".nox", "__pycache__", ".venv", "venv", "build", "dist", ".pico-cache", ".*_cache", ".hypothesis")


def commands_of(markdown: str) -> list[str]:
    """The commands of all blocks that are to be run, one for each line that isn't a comment."""
    lines = [line for block in RUN_BLOCK.findall(markdown) for line in block.splitlines()]
    return [line for line in lines if line.strip() and not line.startswith("#")]


def runnable(command: str) -> str:
    """A command with the parts replaced that may not run here."""
    parts = [part.strip() for part in command.split("&&")]
    return " && ".join(INSTEAD.get(part, part) for part in parts)


def run_in_fresh_environment(commands: list[str], work: Path) -> None:
    """Run commands with bash in ``work/checkout``, with the Python and the programs of a new ``work/venv``.

    Raises:
        subprocess.CalledProcessError: a command failed; the later ones weren't run.
    """
    checkout = work / "checkout"
    shutil.copytree(ROOT, checkout, ignore=shutil.ignore_patterns(*NOT_COPIED))
    venv.create(work / "venv", with_pip=True)
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    env["VIRTUAL_ENV"] = str(work / "venv")
    env["PATH"] = os.pathsep.join((str(work / "venv" / "bin"), env["PATH"]))
    for command in commands:
        print(f"$ {command}", flush=True)
        start = time.monotonic()
        subprocess.run(["bash", "-euo", "pipefail", "-c", runnable(command)], cwd=checkout, env=env, check=True)
        print(f"({time.monotonic() - start:.0f} s)", flush=True)


def main() -> int:
    """Run what README.md says, which README.zh.md must say too."""
    commands = commands_of((ROOT / "README.md").read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory(prefix="pico-vllm-readme-") as work:
        run_in_fresh_environment(commands, Path(work))
    print(f"{len(commands)} commands ran")
    return 0


if __name__ == "__main__":
    sys.exit(main())
