"""Every check of this project: `nox` runs what needs no GPU, `nox -s NAME` one session, `nox -l` lists them.

The sessions share one environment, `.nox/dev`, which the session `dev` installs once. On a machine with a GPU whose
Python already holds torch (or with PICO_NOX_CURRENT_PYTHON=1) they use that Python as it is: nothing is installed.

PICO_REQUIRE_GPU=1 and PICO_REQUIRE_MODEL=1 turn "skipped: no GPU, no model" into a failure.
PICO_NOX_CONSTRAINTS names another file of constraints for .nox/dev: ci/constraints-oldest.txt, or /dev/null for none.

.github/workflows/ calls these sessions and nothing else. ci.yml: lint, docs, the tests with the oldest and the newest
torch on every Python, compile, packaging, readme, coverage and the GPU sessions. nightly.yml: bench_gate, extended, the
tests with the newest releases, docs with links to other sites. By hand alone: mutation.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from pathlib import Path
from typing import NoReturn

import nox

ROOT = Path(__file__).parent
DEV_ENV = ROOT / ".nox" / "dev"
CONSTRAINTS = os.environ.get("PICO_NOX_CONSTRAINTS", "ci/constraints-cpu.txt")
BASELINES = ROOT / "benchmarks" / "baselines"

UNIT_TESTS = "not model and not tokenizer and not multiprocess and not slow"
MIN_COVERED_PERCENT = 90
OLDEST_TRITON = "3.6.0"
MUTMUT = "3.8.1"
MIN_KILLED_PERCENT = 85
SDIST_MUST_HAVE = (
    "LICENSE",
    "README.md",
    "README.zh.md",
    "pyproject.toml",
    "noxfile.py",
    "ci/constraints-cpu.txt",
    "ci/constraints-oldest.txt",
    "docs/ARCHITECTURE.md",
    "src/pico_vllm/__init__.py",
    "src/pico_vllm/cli.py",
    "tests/conftest.py",
)
SDIST_MUST_NOT_HAVE = (".git/", ".nox/", "__pycache__", ".gguf", ".safetensors")
MAX_ARCHIVE_BYTES = 5_000_000


def count_gpus() -> int:
    """Number of NVIDIA GPUs, known before torch is installed; CUDA_VISIBLE_DEVICES="" hides them all."""
    nvidia_smi = shutil.which("nvidia-smi")
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "" or nvidia_smi is None:
        return 0
    listing = subprocess.run([nvidia_smi, "-L"], capture_output=True, text=True, timeout=60)
    return sum(line.startswith("GPU ") for line in listing.stdout.splitlines())


NUM_GPUS = count_gpus()
USE_CURRENT_PYTHON = os.environ.get("PICO_NOX_CURRENT_PYTHON") == "1" or (
    NUM_GPUS > 0 and importlib.util.find_spec("torch") is not None
)
REQUIRES: list[str] = [] if USE_CURRENT_PYTHON else ["dev"]
GPU_REQUIRES = REQUIRES if NUM_GPUS else []  # nothing is installed in order to skip

nox.needs_version = ">=2025.2.9"
nox.options.sessions = ["env", "lint", "docs", "unit", "kernels", "compile", "multiprocess", "model", "packaging"]


# The shared environment


@nox.session(reuse_venv=True, default=False)
def dev(session: nox.Session) -> None:
    """Install the project and its tools into .nox/dev; nothing to do while pyproject and constraints stay the same."""
    inputs = (ROOT / "pyproject.toml").read_bytes() + (ROOT / CONSTRAINTS).read_bytes() + str(NUM_GPUS > 0).encode()
    fingerprint = hashlib.sha256(inputs).hexdigest()
    stamp = DEV_ENV / "pico-installed"
    if stamp.exists() and stamp.read_text() == fingerprint:
        session.log("up to date")
        return
    constraints = [] if NUM_GPUS else ["-c", CONSTRAINTS]
    session.install(*constraints, "-e", ".[dev]")
    stamp.write_text(fingerprint)


def dev_python() -> str:
    """The Python that all sessions use."""
    if USE_CURRENT_PYTHON:
        return sys.executable
    return str(DEV_ENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python"))


def run_python(session: nox.Session, *args: str, env: dict[str, str] | None = None) -> None:
    """Run the shared Python; without an installation it finds the package under src."""
    path = {}
    if USE_CURRENT_PYTHON:
        path["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    session.run(dev_python(), *args, env={**path, **(env or {})}, external=True)


def has_module(name: str) -> bool:
    """Whether the shared Python holds a module; in .nox/dev it does, a Python used as it is may not."""
    return not USE_CURRENT_PYTHON or importlib.util.find_spec(name) is not None


def run_pytest(
    session: nox.Session, folder: str, *args: str, num_workers: int = 0, env: dict[str, str] | None = None
) -> None:
    """Run the tests of a folder; workers get one thread each."""
    if not (ROOT / folder).is_dir():
        skip(session, f"{folder} doesn't exist yet")
    env = dict(env or {})
    if num_workers and has_module("xdist"):
        args = ("-n", str(num_workers), *args)
        env["OMP_NUM_THREADS"] = "1"
    run_python(session, "-m", "pytest", folder, *args, *session.posargs, env=env)


def require_gpus(session: nox.Session, needed: int) -> None:
    """Skip the session when the machine has fewer GPUs."""
    if needed > NUM_GPUS:
        skip(session, f"needs {needed} GPU{'s' if needed > 1 else ''}, this machine has {NUM_GPUS}")


def skip(session: nox.Session, reason: str) -> NoReturn:
    """Skip the session and say why; under PICO_REQUIRE_GPU=1 that is a failure."""
    if os.environ.get("PICO_REQUIRE_GPU") == "1":
        session.error(f"{reason}, and PICO_REQUIRE_GPU=1 allows no skip")
    session.skip(reason)


# What runs without a GPU


@nox.session(venv_backend="none", requires=REQUIRES)
def env(session: nox.Session) -> None:
    """What this machine is, and which of the tests below it can run."""
    run_python(session, "-m", "pico_vllm", "env")


@nox.session(venv_backend="none", requires=REQUIRES)
def lint(session: nox.Session) -> None:
    """Lint, format, types, import directions, GitHub's workflows (with actionlint too where that is on the PATH)."""
    for tool in ("ruff", "pyright", "importlinter"):
        if not has_module(tool):
            session.skip(f"{tool} isn't installed in the Python in use")
    run_python(session, "-m", "ruff", "check", ".")
    run_python(session, "-m", "ruff", "format", "--check", ".")
    run_python(session, "-m", "pyright", "--pythonpath", dev_python(), env={"PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"})
    run_python(session, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()", "--no-logo")
    if shutil.which("actionlint"):  # pip has forks of it only
        session.run("actionlint", external=True)
    zizmor = Path(dev_python()).with_name("zizmor")  # a program, no module
    session.run(str(zizmor), "--offline", "--quiet", ".github", external=True)


@nox.session(venv_backend="none")
def docs(session: nox.Session) -> None:
    """Links and file names in the documentation; links to other sites: nox -s docs -- --external."""
    session.run(sys.executable, "tests/check_docs.py", *session.posargs, external=True)


@nox.session(venv_backend="none", requires=REQUIRES)
def unit(session: nox.Session) -> None:
    """The tests that need neither a GPU nor a model nor processes of their own."""
    run_pytest(session, "tests/unit", "-m", UNIT_TESTS, num_workers=2)


@nox.session(venv_backend="none", requires=REQUIRES)
def kernels(session: nox.Session) -> None:
    """Every kernel against its reference: compiled when a GPU is here, else in Triton's interpreter."""
    if NUM_GPUS:
        run_pytest(session, "tests/kernels", "-m", "not slow")
    else:
        run_pytest(session, "tests/kernels", "-m", "not slow", num_workers=2, env={"TRITON_INTERPRET": "1"})


@nox.session(name="compile", venv_backend="none", requires=REQUIRES)
def compile_kernels(session: nox.Session) -> None:
    """Every kernel compiled for every architecture, no GPU needed: errors, shared memory, spilled registers."""
    if not has_module("triton"):
        session.skip("triton isn't installed in the Python in use")
    run_python(session, "tests/compile_kernels.py", *session.posargs, env={"TRITON_INTERPRET": "0"})


@nox.session(venv_backend="none", requires=REQUIRES, default=False)
def compile_oldest(session: nox.Session) -> None:
    """The session `compile` with the oldest triton that kernels are tested with on a GPU, in a folder of its own."""
    folder = ROOT / ".nox" / f"triton-{OLDEST_TRITON}"
    if not (folder / "triton").is_dir():
        package = f"triton=={OLDEST_TRITON}"
        run_python(session, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), package)
    path = os.pathsep.join((str(folder), str(ROOT / "src")))
    run_python(session, "tests/compile_kernels.py", *session.posargs, env={"TRITON_INTERPRET": "0", "PYTHONPATH": path})


@nox.session(venv_backend="none", requires=REQUIRES)
def multiprocess(session: nox.Session) -> None:
    """The tests that start processes of their own."""
    run_pytest(session, "tests/unit", "-m", "multiprocess and not slow", env={"PICO_ALLOW_NO_TESTS": "1"})


@nox.session(venv_backend="none", requires=REQUIRES)
def model(session: nox.Session) -> None:
    """The real default model against transformers; fetches it on the first run."""
    run_pytest(session, "tests/unit", "-m", "(model or tokenizer) and not slow")


@nox.session(venv_backend="none", requires=REQUIRES)
def packaging(session: nox.Session) -> None:
    """Build the sdist and from it the wheel, look inside, install the wheel in an empty environment and use it.

    nox -s packaging -- --with-dependencies also installs each with its dependencies, as a user does, and generates.
    """
    if not (has_module("build") and has_module("hatchling")):
        session.skip("build or hatchling isn't installed in the Python in use")
    with tempfile.TemporaryDirectory(prefix="pico-vllm-packaging-") as work:
        archives = build_and_install(session, Path(work))
        if "--with-dependencies" in session.posargs:
            for archive in archives:
                install_with_dependencies(session, archive, Path(work))


def build_and_install(session: nox.Session, work: Path) -> tuple[Path, Path]:
    """The steps of `packaging`, in a folder that is removed afterwards; returns the wheel and the sdist."""
    run_python(session, "-m", "build", "--no-isolation", "--outdir", str(work / "dist"), str(ROOT))
    (sdist,) = (work / "dist").glob("*.tar.gz")
    (wheel,) = (work / "dist").glob("*.whl")
    check_sdist(session, sdist)
    check_wheel(session, wheel)

    # The new environment sees the dependencies of .nox/dev through a path file, but not its editable pico_vllm:
    # path files inside a folder that a path file adds aren't read.
    run_python(session, "-m", "venv", "--without-pip", str(work / "venv"))
    run_python(session, "-m", "pip", "--python", str(work / "venv"), "install", "--no-deps", "--quiet", str(wheel))
    (site_packages,) = (work / "venv").glob("lib/python3.*/site-packages")
    locate = (
        f"import sysconfig; open({str(site_packages / 'dependencies.pth')!r}, 'w').write(sysconfig.get_path('purelib'))"
    )
    run_python(session, "-c", locate)
    bin_dir = work / "venv" / "bin"
    is_the_wheel = "import sys, pico_vllm; assert pico_vllm.__file__.startswith(sys.prefix), pico_vllm.__file__"
    session.run(str(bin_dir / "python"), "-I", "-c", is_the_wheel, external=True)
    session.run(str(bin_dir / "pico-vllm"), "--version", external=True)
    session.run(str(bin_dir / "pico-vllm"), "env", external=True)
    return wheel, sdist


def install_with_dependencies(session: nox.Session, archive: Path, work: Path) -> None:
    """Install a wheel or an sdist into a fresh environment that sees no other, and generate outside of the checkout."""
    venv = work / f"clean-{archive.suffix.removeprefix('.')}"
    run_python(session, "-m", "venv", str(venv))
    pip = (str(venv / "bin" / "python"), "-m", "pip", "install", "--quiet")
    session.run(*pip, "-c", str(ROOT / CONSTRAINTS), str(archive), external=True)
    with session.chdir(work):
        command = str(venv / "bin" / "pico-vllm")
        session.run(command, "--version", external=True)
        session.run(command, "generate", "The capital of France is", "--max-tokens", "4", external=True)
    shutil.rmtree(venv)  # a gigabyte


def check_sdist(session: nox.Session, sdist: Path) -> None:
    """Fail on a file that a reader of the sources would miss, on weights and caches, and on size."""
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    missing = [name for name in SDIST_MUST_HAVE if name not in names]
    unwanted = [name for name in names if any(part in name for part in SDIST_MUST_NOT_HAVE)]
    if missing or unwanted:
        session.error(f"{sdist.name}: missing {missing}, unwanted {unwanted}")
    if sdist.stat().st_size > MAX_ARCHIVE_BYTES:
        session.error(f"{sdist.name} has {sdist.stat().st_size} bytes, the limit is {MAX_ARCHIVE_BYTES}")
    session.log(f"{sdist.name}: {len(names)} files, {sdist.stat().st_size} bytes")


def check_wheel(session: nox.Session, wheel: Path) -> None:
    """Fail on a module that isn't in the wheel, and on anything in it outside the package."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    sources = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src" / "pico_vllm").rglob("*.py")}
    missing = sorted(sources - set(names))
    unwanted = [name for name in names if not name.startswith(("pico_vllm/", "pico_vllm-"))]
    if missing or unwanted:
        session.error(f"{wheel.name}: missing {missing}, unwanted {unwanted}")
    session.log(f"{wheel.name}: {len(names)} files")


# What is slower, or needs GPUs


@nox.session(venv_backend="none", default=False)
def readme(session: nox.Session) -> None:
    """The README's commands, as written there, in a fresh environment and a copy of the checkout."""
    session.run(sys.executable, "tests/run_readme.py", external=True)


@nox.session(venv_backend="none", requires=REQUIRES, default=False)
def extended(session: nox.Session) -> None:
    """Everything marked slow that this machine can run."""
    interpreter = {} if NUM_GPUS else {"TRITON_INTERPRET": "1"}
    run_pytest(session, "tests/unit", "-m", "slow", env={"PICO_ALLOW_NO_TESTS": "1"})
    run_pytest(session, "tests/kernels", "-m", "slow", env={"PICO_ALLOW_NO_TESTS": "1", **interpreter})


@nox.session(venv_backend="none", requires=REQUIRES, default=False)
def coverage(session: nox.Session) -> None:
    """The CPU tiers under coverage: enough lines of src must run, but for the GPU-only places in pyproject.toml."""
    if not has_module("pytest_cov"):
        session.skip("pytest-cov isn't installed in the Python in use")
    no_gpu = {"CUDA_VISIBLE_DEVICES": ""}  # the same lines on every machine
    measure = ("-m", "not slow", "--cov")
    run_pytest(session, "tests/unit", *measure, "--cov-report=", num_workers=2, env=no_gpu)
    run_pytest(
        session,
        "tests/kernels",
        *measure,
        "--cov-append",
        "--cov-report=term-missing:skip-covered",
        f"--cov-fail-under={MIN_COVERED_PERCENT}",
        num_workers=2,
        env={**no_gpu, "TRITON_INTERPRET": "1"},
    )


@nox.session(venv_backend="none", requires=REQUIRES, default=False)
def mutation(session: nox.Session) -> None:
    """Break kv_cache/ and scheduler/ in many small ways, which their unit tests must notice.

    nox -s mutation -- NAME ... takes some of them only. A NAME may hold *: '*.radix_tree.*' are one file's, '*[147]' a
    sample of three in ten. What survives is explained in ci/mutation-survivors.md. What was done is kept in
    .nox/mutation: a second run goes on, and repeats what changed.
    """
    tool = ROOT / ".nox" / f"mutmut-{MUTMUT}"
    if not (tool / "mutmut").is_dir():
        run_python(session, "-m", "pip", "install", "--quiet", "--target", str(tool), f"mutmut=={MUTMUT}")
    work = ROOT / ".nox" / "mutation"
    for folder in ("src", "tests"):
        shutil.rmtree(work / folder, ignore_errors=True)
        shutil.copytree(ROOT / folder, work / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", work)
    env = {"PYTHONPATH": str(tool)}
    with session.chdir(work):
        run_python(session, "-m", "mutmut", "run", "--max-children", "2", *session.posargs, env=env)
        run_python(session, "-m", "mutmut", "export-cicd-stats", env=env)
        run_python(session, "-m", "mutmut", "results", env=env)
    stats = json.loads((work / "mutants" / "mutmut-cicd-stats.json").read_text())
    killed = stats["killed"] + stats["timeout"]
    tried = killed + stats["survived"] + stats["suspicious"] + stats["no_tests"]
    session.log(f"{killed} of {tried} killed: {100 * killed / tried:.1f} %, at least {MIN_KILLED_PERCENT} % must be")
    if 100 * killed < MIN_KILLED_PERCENT * tried:
        session.error("too many survived")


@nox.session(venv_backend="none", requires=GPU_REQUIRES, default=False)
def gpu(session: nox.Session) -> None:
    """tests/gpu: one GPU."""
    require_gpus(session, 1)
    run_pytest(session, "tests/gpu")


@nox.session(venv_backend="none", requires=GPU_REQUIRES, default=False)
def multigpu(session: nox.Session) -> None:
    """tests/multigpu: two or more GPUs of one machine."""
    require_gpus(session, 2)
    run_pytest(session, "tests/multigpu")


@nox.session(venv_backend="none", requires=GPU_REQUIRES, default=False)
def bench(session: nox.Session) -> None:
    """Every point of the committed GPU records, into a folder that must not exist yet: nox -s bench -- FOLDER."""
    require_gpus(session, 1)
    folder = session.posargs[0] if session.posargs else "bench-results"
    run_python(session, "-m", "pico_vllm", "bench", "suite", "--preset", "gpu", "--out", folder)


@nox.session(venv_backend="none", requires=REQUIRES if "cpu" in sys.argv else GPU_REQUIRES, default=False)
def bench_gate(session: nox.Session) -> None:
    """A preset's points and the kernels against this hardware's baseline: -- [--preset gpu | cpu] [--out FOLDER]."""
    parser = argparse.ArgumentParser(prog="nox -s bench_gate --")
    parser.add_argument("--preset", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--out", type=Path, default=ROOT / ".nox" / "bench-gate" / time.strftime("%Y%m%d-%H%M%S"))
    options = parser.parse_args(session.posargs)
    if options.preset == "gpu":
        require_gpus(session, 1)
        gate_run(session, measure_for_gate(session, "gpu-gate", options.out / "run"), BASELINES)
        return
    # No two hosts of CI are alike, so the baseline is made here, of the same code: what fails is a false alarm.
    runs = [measure_for_gate(session, "cpu-gate", options.out / name) for name in ("first", "second", "third")]
    baseline = options.out / "baseline.json"
    files = [str(path) for run in runs[:2] for path in run]
    run_python(session, "-m", "pico_vllm", "bench", "baseline", *files, "--out", str(baseline))
    gate_run(session, runs[2], baseline)


def measure_for_gate(session: nox.Session, preset: str, folder: Path) -> tuple[Path, Path]:
    """One run: records of the preset and of the kernels, on a CPU with one thread: two wait for each other."""
    on_gpu = preset.startswith("gpu")
    env = {} if on_gpu else {"CUDA_VISIBLE_DEVICES": ""}
    one_thread = {} if on_gpu else {"OMP_NUM_THREADS": "1"}
    kernels = folder / "kernels.json"
    run_python(session, "-m", "pico_vllm", "bench", "suite", "--preset", preset, "--out", str(folder), env=env)
    pytest = ("-m", "pytest", "benchmarks/kernels", "-q", "--benchmark-json", str(kernels))
    run_python(session, *pytest, env={**env, **one_thread})
    return folder / f"{preset}.jsonl", kernels


def gate_run(session: nox.Session, run: tuple[Path, Path], baseline: Path) -> None:
    """Fail with a table where something is slower."""
    files = [str(path) for path in run]
    run_python(session, "-m", "pico_vllm", "bench", "gate", *files, "--baseline", str(baseline))
