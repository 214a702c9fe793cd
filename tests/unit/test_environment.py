"""The environment report: facts about here, and what follows from facts about machines that aren't here."""

from __future__ import annotations

import dataclasses
import importlib
import io
import json
import sys

import pytest
from rich.console import Console

from pico_vllm import environment
from pico_vllm.environment import (
    Capability,
    Environment,
    Gpu,
    Package,
    backends,
    collect_environment,
    render,
    tiers,
    to_dict,
)

H200 = Gpu(index=0, name="NVIDIA H200", compute_capability=(9, 0), memory_bytes=150_000_000_000)
CPU_MACHINE = Environment(
    pico_vllm_version="0.1.0",
    python_version="3.11.7",
    platform="Linux",
    cpu_model="a CPU",
    num_cpus=2,
    memory_bytes=24 << 30,
    packages=tuple(Package(name, "1.0") for name in environment.PACKAGES),
    gpus=(),
    driver_gpus=(),
    driver_version=None,
    cuda_version=None,
    c_compiler="gcc",
    has_gloo=True,
)
GPU_MACHINE = dataclasses.replace(
    CPU_MACHINE, gpus=(H200,), driver_gpus=("NVIDIA H200",), driver_version="580.1", cuda_version="13.0"
)


def with_package(env: Environment, replacement: Package) -> Environment:
    packages = tuple(replacement if package.name == replacement.name else package for package in env.packages)
    return dataclasses.replace(env, packages=packages)


def possible(capabilities: tuple[Capability, ...]) -> set[str]:
    return {capability.name for capability in capabilities if capability.possible}


def note(capabilities: tuple[Capability, ...], name: str) -> str:
    return next(capability.note for capability in capabilities if capability.name == name)


def as_text(env: Environment, width: int = 200) -> str:
    console = Console(width=width, file=io.StringIO())
    console.print(render(env))
    return console.file.getvalue()


def test_this_machine_is_described_completely():
    env = collect_environment()
    assert env.num_cpus >= 1
    assert env.memory_bytes > 1 << 30
    assert env.package("torch").problem is None
    assert {"reference", "cpu"} <= possible(backends(env))
    assert "unit" in possible(tiers(env))
    assert env.package("torch").version in as_text(env)


def test_the_dictionary_survives_json():
    report = json.loads(json.dumps(to_dict(GPU_MACHINE)))
    assert report["gpus"][0]["compute_capability"] == [9, 0]
    assert [tier["name"] for tier in report["test_tiers"]] == [
        "unit",
        "kernels (interpreter)",
        "kernels (compiled)",
        "model",
        "multiprocess",
        "gpu",
        "multigpu",
    ]
    assert [backend["name"] for backend in report["backends"]] == ["reference", "cpu", "triton"]


def test_a_machine_without_a_gpu_runs_everything_but_compiled_kernels():
    assert possible(backends(CPU_MACHINE)) == {"reference", "cpu"}
    found = tiers(CPU_MACHINE)
    assert possible(found) == {"unit", "kernels (interpreter)", "model", "multiprocess"}
    assert note(found, "gpu") == "no NVIDIA GPU found"


def test_one_gpu_runs_everything_but_multigpu():
    found = tiers(GPU_MACHINE)
    assert {capability.name for capability in found} - possible(found) == {"multigpu"}
    assert note(found, "multigpu") == "needs 2 GPUs, torch sees 1"
    assert note(backends(GPU_MACHINE), "triton").startswith("compiled for sm_90")


def test_two_gpus_run_everything():
    env = dataclasses.replace(GPU_MACHINE, gpus=(H200, dataclasses.replace(H200, index=1)))
    assert all(capability.possible for capability in tiers(env))


def test_a_cpu_build_of_torch_beside_a_gpu_is_named_as_the_cause():
    env = dataclasses.replace(CPU_MACHINE, driver_gpus=("NVIDIA H200",), driver_version="580.1")
    assert "CPU build; install without the constraints file" in note(backends(env), "triton")


def test_a_driver_too_old_for_torch_is_named_as_the_cause():
    env = dataclasses.replace(GPU_MACHINE, gpus=())
    assert "driver 580.1 is new enough" in note(backends(env), "triton")


def test_an_old_gpu_is_refused_with_both_numbers():
    env = dataclasses.replace(GPU_MACHINE, gpus=(dataclasses.replace(H200, compute_capability=(7, 5)),))
    assert "7.5, at least 8.0" in note(backends(env), "triton")


def test_triton_without_a_c_compiler_is_refused():
    env = dataclasses.replace(GPU_MACHINE, c_compiler=None)
    assert "C compiler" in note(backends(env), "triton")


@pytest.mark.parametrize(
    ("name", "lost_tiers"),
    [
        ("triton", {"kernels (interpreter)", "kernels (compiled)", "gpu"}),
        ("transformers", {"model"}),
        ("torch", {"unit", "kernels (interpreter)", "kernels (compiled)", "model", "multiprocess", "gpu"}),
    ],
)
def test_a_broken_package_costs_the_tiers_that_need_it(name, lost_tiers):
    env = with_package(GPU_MACHINE, Package(name, "1.0", f"{name} is broken: OSError: no such library"))
    found = tiers(env)
    assert possible(tiers(GPU_MACHINE)) - possible(found) == lost_tiers
    assert all(f"{name} is broken" in note(found, tier) for tier in lost_tiers)
    assert "no such library" in as_text(env)


@pytest.mark.parametrize("name", ["triton", "transformers", "torch"])
def test_a_missing_package_is_a_fact_and_no_crash(monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)  # makes `import name` raise ModuleNotFoundError
    env = collect_environment()
    assert env.package(name).problem == f"{name} isn't installed"
    assert name in as_text(env)


@pytest.mark.parametrize(
    "error", [OSError("libcudart.so.13: cannot open\nmore"), RuntimeError("operator exists"), ValueError()]
)
def test_a_package_that_raises_on_import_is_a_fact_and_no_crash(monkeypatch, error):
    real_import = importlib.import_module

    def broken_import(name):
        if name == "transformers":
            raise error
        return real_import(name)

    monkeypatch.setattr(importlib, "import_module", broken_import)
    problem = collect_environment().package("transformers").problem
    assert problem.startswith(f"transformers is broken: {type(error).__name__}")
    assert "\n" not in problem


def test_a_hanging_or_failing_nvidia_smi_means_no_driver(monkeypatch, tmp_path):
    fake = tmp_path / "nvidia-smi"
    fake.write_text("#!/bin/sh\nexit 9\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert environment._probe_nvidia_driver() == (None, ())


def test_nvidia_smi_answers_are_read(monkeypatch, tmp_path):
    fake = tmp_path / "nvidia-smi"
    fake.write_text("#!/bin/sh\necho '580.65.06, NVIDIA H200'\necho '580.65.06, NVIDIA H200'\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert environment._probe_nvidia_driver() == ("580.65.06", ("NVIDIA H200", "NVIDIA H200"))


def test_the_report_fits_a_narrow_terminal():
    assert max(len(line) for line in as_text(GPU_MACHINE, width=60).splitlines()) <= 60
