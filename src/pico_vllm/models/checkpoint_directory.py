"""Model directories that appear complete or not at all.

Owns the scratch directory beside the target, the rename that publishes it, and the rule for two processes that build
the same thing: the first to finish wins, the other takes its result. Knows nothing of what the files say.
Called by ``gguf`` and ``default_model``; imports no torch, so that finding a finished model costs nothing.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pico_vllm.errors import WeightLoadError

CHECKPOINT_FILES = (
    "model.safetensors",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
)

_SCRATCH_PREFIX = ".scratch-"
_SCRATCH_MAX_AGE_S = 3600.0


def is_complete_checkpoint(directory: Path) -> bool:
    """Whether a directory holds every file of a converted checkpoint; costs five ``stat`` calls."""
    try:
        return all((directory / name).stat().st_size > 0 for name in CHECKPOINT_FILES)
    except OSError:
        return False


def publish_checkpoint(finished: Path, target: Path) -> None:
    """Rename a finished model directory to its place; a complete one that got there first is kept instead.

    An incomplete directory in that place (somebody deleted a file) is replaced. Both must be on one file system.
    """
    while True:
        try:
            os.rename(finished, target)
            return
        except OSError as error:
            if is_complete_checkpoint(target):
                return
            # Not `target.is_dir()`: another process may have retired the directory since the rename failed.
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        retired = finished.with_name(f"{_SCRATCH_PREFIX}retired-{secrets.token_hex(4)}")
        try:
            os.rename(target, retired)
        except FileNotFoundError:
            continue  # another process has just retired it
        shutil.rmtree(retired, ignore_errors=True)


@contextmanager
def scratch_directory(parent: Path) -> Iterator[Path]:
    """A directory of this process's own in ``parent`` (created), removed at the end.

    Raises:
        WeightLoadError: ``parent`` cannot be written to.
    """
    scratch = parent / f"{_SCRATCH_PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
    try:
        scratch.mkdir(parents=True)
    except OSError as error:
        raise WeightLoadError(f"cannot write to {parent} ({error.strerror}): models are converted there") from error
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def remove_stale_scratch(parent: Path) -> None:
    """Remove what killed processes left behind: scratch directories in which nothing has changed for an hour."""
    for scratch in parent.glob(f"{_SCRATCH_PREFIX}*"):
        try:
            newest = max(path.stat().st_mtime for path in (scratch, *scratch.rglob("*")))
        except OSError:
            continue  # its owner is tidying up right now
        if time.time() - newest > _SCRATCH_MAX_AGE_S:
            shutil.rmtree(scratch, ignore_errors=True)
