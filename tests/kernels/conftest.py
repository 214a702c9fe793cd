"""Without the Gluon that our Hopper kernels are written in, their tests aren't collected, and the header says so."""

from __future__ import annotations

GLUON_TESTS = [
    "test_attention_prefill_hopper.py",
    "test_gated_linear_hopper.py",
    "test_gluon_compat.py",
    "test_linear_hopper.py",
]

try:
    from pico_vllm.kernels import gluon_compat  # noqa: F401
except ImportError as error:  # triton 3.5, of torch 2.9: the engine takes its other kernels there
    why_no_gluon = str(error)
    collect_ignore = GLUON_TESTS
else:
    why_no_gluon = ""


def pytest_report_header() -> list[str]:
    """What isn't tested."""
    return [f"{len(GLUON_TESTS)} files left out: {why_no_gluon}"] if why_no_gluon else []
