"""PICO_REQUIRE_GPU and PICO_REQUIRE_MODEL make a skip a failure. Runs pytest on a small project of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).parents[1] / "conftest.py"
PROJECT = {
    "pytest.ini": "[pytest]\nmarkers =\n  model: m\n  gpu: g\n  multigpu: g\n",
    "tests/unit/test_model.py": """
import pytest

@pytest.mark.model
def test_model():
    pytest.skip("no network")

@pytest.mark.model
@pytest.mark.xfail(reason="expected", strict=True)
def test_expected_failure():
    assert False

def test_unmarked():
    pytest.skip("an ordinary skip")
""",
    "tests/gpu/test_gpu.py": "def test_gpu(): pass",
    "tests/gpu/test_whole_file.py": "import pytest\npytest.importorskip('no_such_module')",
}
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture
def run_pytest(tmp_path):
    for name, text in PROJECT.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    shutil.copy(CONFTEST, tmp_path / "tests" / "conftest.py")
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("PICO_", "PYTEST_"))}

    def run(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *args]
        environment = {**clean, **NO_GPU, **env}
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)

    return run


def test_without_the_variables_a_skip_is_a_skip(run_pytest):
    result = run_pytest("tests")
    assert result.returncode == 0, result.stdout
    assert "4 skipped, 1 xfailed" in result.stdout


def test_a_required_model_test_fails_when_it_skips_itself(run_pytest):
    result = run_pytest("tests/unit", PICO_REQUIRE_MODEL="1")
    assert result.returncode == 1
    assert "PICO_REQUIRE_MODEL=1 allows no skip of a test marked model. Skipped: no network" in result.stdout
    assert "1 failed, 1 skipped, 1 xfailed" in result.stdout


def test_a_required_gpu_test_fails_when_there_is_no_gpu(run_pytest):
    result = run_pytest("tests/gpu/test_gpu.py", PICO_REQUIRE_GPU="1")
    assert result.returncode == 1
    assert "needs 1 CUDA GPU(s), torch sees 0" in result.stdout


def test_a_required_gpu_file_fails_when_it_skips_itself_on_import(run_pytest):
    result = run_pytest("tests/gpu/test_whole_file.py", PICO_REQUIRE_GPU="1")
    assert result.returncode != 0
    assert "no_such_module" in result.stdout


def test_an_empty_selection_fails_unless_it_is_allowed(run_pytest):
    assert run_pytest("tests/unit", "-k", "nothing").returncode == pytest.ExitCode.NO_TESTS_COLLECTED
    allowed = run_pytest("tests/unit", "-k", "nothing", PICO_ALLOW_NO_TESTS="1")
    assert allowed.returncode == 0
    assert "NO TESTS COLLECTED" in allowed.stdout
