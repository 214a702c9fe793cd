"""What holds for every test: when a skip is a failure, one thread a worker, and the same hypothesis examples in CI.
Where Triton's kernels are interpreted, bf16 is made exact first.

PICO_REQUIRE_GPU=1 (set on GPU runners) and PICO_REQUIRE_MODEL=1 (set in CI) say: here these tests must run. A test
marked gpu, multigpu or model that skips itself then fails, with the reason it gave.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

# Before torch is imported: two workers with two threads each would fight for the same cores.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"

import hypothesis
import pytest

TESTS = Path(__file__).parent
NUM_GPUS_NEEDED = {"gpu": 1, "multigpu": 2}  # by marker, which is also the folder's name
REQUIRED_BY = {"gpu": "PICO_REQUIRE_GPU", "multigpu": "PICO_REQUIRE_GPU", "model": "PICO_REQUIRE_MODEL"}

# No deadline: the first example of a test may compile a kernel. In CI the examples are the same in every run.
hypothesis.settings.register_profile("pico", deadline=None, derandomize=bool(os.environ.get("CI")), print_blob=True)
hypothesis.settings.load_profile("pico")

# For `nox -s mutation`: a failure is enough, its smallest example isn't looked for.
hypothesis.settings.register_profile(
    "mutation",
    parent=hypothesis.settings.get_profile("pico"),
    derandomize=True,
    database=None,
    phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
)

if os.environ.get("TRITON_INTERPRET") == "1":
    from interpreter_bf16 import make_bf16_exact

    make_bf16_exact()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what lies under tests/gpu and tests/multigpu."""
    for item in items:
        marker = _folder_marker(item.path)
        if marker is not None:
            item.add_marker(marker)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a GPU test where torch sees too few GPUs."""
    needed = max((count for marker, count in NUM_GPUS_NEEDED.items() if item.get_closest_marker(marker)), default=0)
    if needed:
        import torch

        if torch.cuda.device_count() < needed:
            pytest.skip(f"needs {needed} CUDA GPU(s), torch sees {torch.cuda.device_count()}")


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Of torch's, here and so in each rank that a test starts: several ranks share two cores."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def exact_fp32_products() -> Iterator[None]:
    """TF32 would round fp32 inputs to 10 bits, and make tokens depend on the composition of a batch."""
    import torch

    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Turn the skip of a test that must run here into its failure."""
    report = yield
    is_expected_failure = hasattr(report, "wasxfail")
    if report.skipped and not is_expected_failure:
        _fail_if_required(report, [marker.name for marker in item.iter_markers()])
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    """The same for a GPU test file that skips itself while it is imported."""
    report = yield
    if report.skipped:
        marker = _folder_marker(collector.path)
        _fail_if_required(report, [marker] if marker else [])
    return report


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Under PICO_ALLOW_NO_TESTS=1 an empty selection is no failure, but it is said."""
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and os.environ.get("PICO_ALLOW_NO_TESTS") == "1":
        session.exitstatus = pytest.ExitCode.OK
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            reporter.write_line(
                "\nNO TESTS COLLECTED: nothing is tested by this selection yet (allowed here)", yellow=True
            )


def _folder_marker(path: Path) -> str | None:
    folder = path.relative_to(TESTS).parts[:1] if path.is_relative_to(TESTS) else ()
    return folder[0] if folder and folder[0] in NUM_GPUS_NEEDED else None


def _fail_if_required(report: pytest.TestReport | pytest.CollectReport, markers: list[str]) -> None:
    for marker in markers:
        variable = REQUIRED_BY.get(marker)
        if variable is not None and os.environ.get(variable) == "1":
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
            report.outcome = "failed"
            report.longrepr = f"{variable}=1 allows no skip of a test marked {marker}. {reason}"
            return
