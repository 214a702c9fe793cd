"""What this machine is, and what of Pico-vLLM can run on it: the answers behind ``pico-vllm env``.

``collect_environment`` gathers facts and never raises: a package that is missing or broken is a fact. What follows from
the facts (``backends``, ``tiers``) is computed apart, so a test can ask about a machine that it doesn't have. It
knows nothing of engines; the CLI is its only caller.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from pico_vllm import __version__
from pico_vllm.config import MIN_COMPUTE_CAPABILITY

PACKAGES = ("torch", "triton", "transformers", "tokenizers", "safetensors", "numpy")
_GIB = 1 << 30
_COMMAND_TIMEOUT_S = 20


@dataclass(frozen=True, slots=True)
class Package:
    """One dependency. ``problem`` says why it can't be imported, and is None when it can."""

    name: str
    version: str | None
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as torch sees it."""

    index: int
    name: str
    compute_capability: tuple[int, int]
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Environment:
    """The facts. ``gpus`` are those torch can use; ``driver_gpus`` are the names that the NVIDIA driver lists."""

    pico_vllm_version: str
    python_version: str
    platform: str
    cpu_model: str
    num_cpus: int
    memory_bytes: int
    packages: tuple[Package, ...]
    gpus: tuple[Gpu, ...]
    driver_gpus: tuple[str, ...]
    driver_version: str | None
    cuda_version: str | None
    c_compiler: str | None
    has_gloo: bool

    def package(self, name: str) -> Package:
        """The named dependency; one that wasn't looked for counts as missing."""
        missing = Package(name, None, f"{name} isn't installed")
        return next((package for package in self.packages if package.name == name), missing)


@dataclass(frozen=True, slots=True)
class Capability:
    """Something that can run here, or not: ``note`` says how, or why not."""

    name: str
    possible: bool
    note: str


def collect_environment() -> Environment:
    """Look at this machine. Imports torch, triton and transformers (about two seconds); never raises."""
    packages = tuple(_probe_package(name) for name in PACKAGES)
    cuda_version, gpus, has_gloo = _probe_torch()
    driver_version, driver_gpus = _probe_nvidia_driver()
    return Environment(
        pico_vllm_version=__version__,
        python_version=platform.python_version(),
        platform=platform.platform(),
        cpu_model=_cpu_model(),
        num_cpus=_num_cpus(),
        memory_bytes=_memory_bytes(),
        packages=packages,
        gpus=gpus,
        driver_gpus=driver_gpus,
        driver_version=driver_version,
        cuda_version=cuda_version,
        c_compiler=_c_compiler(),
        has_gloo=has_gloo,
    )


def backends(env: Environment) -> tuple[Capability, ...]:
    """Which kernel backends can run: reference (naive torch), cpu (vectorised torch), triton."""
    torch_problem = env.package("torch").problem
    return (
        _capability("reference", torch_problem, "naive torch: the oracle of the tests, slow"),
        _capability("cpu", torch_problem, "vectorised torch"),
        _capability("triton", _why_no_compiled_triton(env), f"compiled for {_describe_gpus(env)}"),
    )


def tiers(env: Environment) -> tuple[Capability, ...]:
    """Which groups of tests this machine can run, named as their nox sessions are."""
    torch_problem = env.package("torch").problem
    transformers_problem = env.package("transformers").problem
    no_gloo = None if env.has_gloo else "torch.distributed has no gloo here"
    return (
        _capability("unit", torch_problem, "nox -s unit"),
        _capability(
            "kernels (interpreter)",
            torch_problem or env.package("triton").problem,
            "TRITON_INTERPRET=1, what nox -s kernels does without a GPU",
        ),
        _capability("kernels (compiled)", _why_no_compiled_triton(env), "what nox -s kernels does with a GPU"),
        _capability(
            "model",
            torch_problem or transformers_problem,
            "nox -s model; the first run fetches the default model with pip",
        ),
        _capability("multiprocess", torch_problem or no_gloo, "nox -s multiprocess"),
        _capability("gpu", _why_no_compiled_triton(env), "nox -s gpu"),
        _capability(
            "multigpu",
            _why_no_compiled_triton(env) or _why_too_few_gpus(env, 2),
            f"nox -s multigpu, {len(env.gpus)} GPUs",
        ),
    )


def to_dict(env: Environment) -> dict[str, Any]:
    """The facts and what follows from them, in types that JSON knows."""
    return {
        **dataclasses.asdict(env),
        "backends": [dataclasses.asdict(capability) for capability in backends(env)],
        "test_tiers": [dataclasses.asdict(capability) for capability in tiers(env)],
    }


def render(env: Environment) -> RenderableType:
    """The same for a person's eyes: three tables."""
    machine = _table("This machine")
    for label, value in _machine_rows(env):
        machine.add_row(label, value)
    return Group(
        machine,
        _capability_table("Kernel backends that this machine can run", backends(env)),
        _capability_table("Tests that this machine can run", tiers(env)),
    )


# What follows from the facts


def _capability(name: str, why_not: str | None, note: str) -> Capability:
    return Capability(name, why_not is None, note if why_not is None else why_not)


def _why_no_gpu(env: Environment) -> str | None:
    if env.gpus:
        return None
    if not env.driver_gpus:
        return "no NVIDIA GPU found"
    torch = env.package("torch")
    found = f"the driver lists {len(env.driver_gpus)} GPU(s), but torch {torch.version} sees none"
    if torch.problem is None and env.cuda_version is None:
        return f"{found}: it is a CPU build; install without the constraints file"
    return f"{found}: check CUDA_VISIBLE_DEVICES, and that driver {env.driver_version} is new enough for its CUDA"


def _why_no_compiled_triton(env: Environment) -> str | None:
    why_not = env.package("torch").problem or env.package("triton").problem or _why_no_gpu(env)
    if why_not is not None:
        return why_not
    best = max(gpu.compute_capability for gpu in env.gpus)
    if best < MIN_COMPUTE_CAPABILITY:
        return f"the GPU has compute capability {_dotted(best)}, at least {_dotted(MIN_COMPUTE_CAPABILITY)} is needed"
    if env.c_compiler is None:
        return "Triton needs a C compiler to build its launcher: install gcc or clang, or set CC"
    return None


def _why_too_few_gpus(env: Environment, needed: int) -> str | None:
    return None if len(env.gpus) >= needed else f"needs {needed} GPUs, torch sees {len(env.gpus)}"


def _describe_gpus(env: Environment) -> str:
    return ", ".join(sorted({f"sm_{major}{minor}" for major, minor in (gpu.compute_capability for gpu in env.gpus)}))


# Looking


def _probe_package(name: str) -> Package:
    """Import a package for real: an installed one may still be broken (a wrong ABI, a missing library)."""
    version = None
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        version = importlib.metadata.version(name)
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        why = f"{name} isn't installed" if error.name == name else f"{name} is broken: {_first_line(error)}"
        return Package(name, version, why)
    except Exception as error:
        return Package(name, version, f"{name} is broken: {_first_line(error)}")
    return Package(name, getattr(module, "__version__", None) or version)


def _probe_torch() -> tuple[str | None, tuple[Gpu, ...], bool]:
    """Returns: the CUDA version torch is built for, the GPUs it can use, whether gloo is there."""
    try:
        import torch

        cuda_version = torch.version.cuda
        has_gloo = torch.distributed.is_available() and torch.distributed.is_gloo_available()
    except Exception:  # _probe_package has said why
        return None, (), False
    try:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        gpus = tuple(_gpu(index, torch.cuda.get_device_properties(index)) for index in range(count))
    except Exception:  # a driver that answers half: _why_no_gpu tells what to check
        gpus = ()
    return cuda_version, gpus, has_gloo


def _gpu(index: int, properties: Any) -> Gpu:
    return Gpu(index, properties.name, (properties.major, properties.minor), properties.total_memory)


def _probe_nvidia_driver() -> tuple[str | None, tuple[str, ...]]:
    """Returns: the driver's version and the GPUs that it lists; (None, ()) without nvidia-smi."""
    nvidia_smi = shutil.which("nvidia-smi")
    if nvidia_smi is None:
        return None, ()
    command = [nvidia_smi, "--query-gpu=driver_version,name", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None, ()
    rows = [line.partition(", ") for line in answer.stdout.splitlines() if ", " in line]
    return (rows[0][0] if rows else None), tuple(name for _, _, name in rows)


def _c_compiler() -> str | None:
    """The compiler that Triton would take: $CC, else gcc, else clang."""
    candidates = (os.environ.get("CC"), "gcc", "clang")
    return next((found for found in (shutil.which(name) for name in candidates if name) if found), None)


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _num_cpus() -> int:
    """CPUs this process may use, which a container or taskset can make fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _memory_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return 0


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


# Showing


def _machine_rows(env: Environment) -> list[tuple[str, str]]:
    rows = [
        ("pico-vllm", env.pico_vllm_version),
        ("Python", env.python_version),
        ("platform", env.platform),
        ("CPU", f"{env.cpu_model}, {env.num_cpus} usable"),
        ("memory", _gib(env.memory_bytes)),
    ]
    rows += [(package.name, package.problem or package.version or "unknown version") for package in env.packages]
    for gpu in env.gpus:
        capability = _dotted(gpu.compute_capability)
        rows.append((f"GPU {gpu.index}", f"{gpu.name}, compute capability {capability}, {_gib(gpu.memory_bytes)}"))
    if not env.gpus:
        rows.append(("GPU", _why_no_gpu(env) or ""))
    rows.append(("NVIDIA driver", env.driver_version or "none"))
    rows.append(("CUDA of torch", env.cuda_version or "none (CPU build)"))
    rows.append(("C compiler", env.c_compiler or "none"))
    return rows


def _table(title: str) -> Table:
    table = Table(title=title, title_justify="left", show_header=False, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    return table


def _capability_table(title: str, capabilities: tuple[Capability, ...]) -> Table:
    table = _table(f"\n{title}")
    table.add_column(overflow="fold")
    for capability in capabilities:
        table.add_row(capability.name, "[green]yes[/]" if capability.possible else "[red]no[/]", capability.note)
    return table


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.1f} GiB" if num_bytes else "unknown"


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
