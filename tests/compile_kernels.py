"""Compile every kernel for every architecture, without a GPU, and look at what it needs.

    python tests/compile_kernels.py [NAME_PART ...]

Fails on an error, on more shared memory than the architecture has, and on more bytes of stack a thread (registers that
were spilled) than ``ci/kernel_spills.json`` allows: {case: {architecture: bytes}}. Compiles in
two processes; TRITON_INTERPRET must not be set.
"""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from compile_cases import CompileCase

TESTS = Path(__file__).parent
ALLOWED_SPILLS = TESTS.parent / "ci" / "kernel_spills.json"
#: Compute capability → bytes of shared memory that a program can have (CUDA programming guide, compute capabilities).
SHARED_MEMORY = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
NUM_PROCESSES = 2
#: What is allowed to cases that have no allowance of their own: a pair of registers, which costs nothing.
OTHERS = "every other case"


@dataclass(frozen=True)
class Resources:
    """What one compiled kernel needs: bytes of shared memory a program, registers and bytes of stack a thread."""

    shared: int
    registers: int
    stack: int


def all_cases(capability: int) -> dict[str, CompileCase]:
    """Every case of an architecture, by name: of every module's ``CASES``, or ``compile_cases(capability)``."""
    cases: dict[str, CompileCase] = {}
    for path in sorted(TESTS.glob("compile_cases_*.py")):
        module = importlib.import_module(path.stem)
        for case in module.CASES if hasattr(module, "CASES") else module.compile_cases(capability):
            assert case.name not in cases, f"two cases are named {case.name}"
            cases[case.name] = case
    return cases


def compile_case(case: CompileCase, capability: int) -> Resources:
    """What a kernel needs on one architecture; raises what Triton raises."""
    kernel = compiled(case, capability)
    registers, stack = registers_and_stack(kernel.asm["cubin"])
    return Resources(kernel.metadata.shared, registers, stack)


def compiled(case: CompileCase, capability: int) -> Any:
    """The kernel for one architecture, with its ``asm`` and ``metadata``; raises what Triton raises."""
    arguments = case.kernel.arg_names
    unknown = set(case.signature) | set(case.constexprs) | set(case.divisible)
    assert unknown <= set(arguments), f"{case.name}: {unknown - set(arguments)} are no arguments"
    signature = {name: case.signature.get(name, "constexpr") for name in arguments}
    missing = [name for name, kind in signature.items() if kind == "constexpr" and name not in case.constexprs]
    assert not missing, f"{case.name}: nothing is said of {missing}"
    is_divisible = [name in case.divisible or kind.startswith("*") for name, kind in signature.items()]
    source_of = GluonASTSource if case.kernel.is_gluon() else ASTSource
    source = source_of(
        fn=case.kernel,
        signature=signature,
        constexprs={(arguments.index(name),): value for name, value in case.constexprs.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i, divisible in enumerate(is_divisible) if divisible},
    )
    options = {
        "num_warps": case.num_warps,
        "num_stages": case.num_stages,
        "enable_fp_fusion": case.enable_fp_fusion,
    }
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def registers_and_stack(cubin: bytes) -> tuple[int, int]:
    """What cuobjdump of the triton wheel says of the only function in a cubin."""
    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(cuobjdump), "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    return int(found[1]), int(found[2])


def complaint(resources: Resources, capability: int, allowed_stack: int) -> str | None:
    """Why this is a failure, or None."""
    if resources.shared > SHARED_MEMORY[capability]:
        return f"needs {resources.shared} bytes of shared memory, sm_{capability} has {SHARED_MEMORY[capability]}"
    if resources.stack > allowed_stack:
        return f"spills {resources.stack} bytes a thread, {allowed_stack} are allowed in {ALLOWED_SPILLS.name}"
    return None


def compile_and_judge(name: str, capability: int) -> tuple[str, int, Resources | None, str | None]:
    """The work of one process: (name, capability, resources, complaint)."""
    allowances = json.loads(ALLOWED_SPILLS.read_text())
    allowed = allowances.get(name, allowances[OTHERS]).get(f"sm_{capability}", 0)
    try:
        resources = compile_case(all_cases(capability)[name], capability)
    except Exception as error:
        return name, capability, None, f"{type(error).__name__}: {str(error).strip()[-300:]}"
    return name, capability, resources, complaint(resources, capability, allowed)


def _cell(found: dict[tuple[str, int], Resources | None], job: tuple[str, int]) -> str:
    """A case is not of every architecture: launch shapes differ."""
    if job not in found:
        return "–"
    resources = found[job]
    if resources is None:
        return "failed"
    return f"{resources.registers:3} {resources.shared / 1024:6.1f} {resources.stack:4}"


def main(name_parts: list[str]) -> int:
    """Compile all (or those whose names hold one of the parts), print a table, return the exit status."""
    jobs = [
        (name, capability)
        for capability in SHARED_MEMORY
        for name in all_cases(capability)
        if not name_parts or any(part in name for part in name_parts)
    ]
    with ProcessPoolExecutor(NUM_PROCESSES, mp_context=get_context("spawn")) as pool:
        results = list(pool.map(compile_and_judge, *zip(*jobs, strict=True))) if jobs else []
    found = {(name, capability): resources for name, capability, resources, _ in results}
    names = list(dict.fromkeys(name for name, _ in found))
    width = max(map(len, names), default=0)
    print(f"triton {triton.__version__}: registers a thread, shared memory in KiB, bytes of stack a thread")
    print(" " * width, *(f"{f'sm_{capability}':>17}" for capability in SHARED_MEMORY))
    for name in names:
        cells = (_cell(found, (name, capability)) for capability in SHARED_MEMORY)
        print(f"{name:<{width}}", *(f"{cell:>17}" for cell in cells))
    complaints = [f"{name} on sm_{capability}: {why}" for name, capability, _, why in results if why is not None]
    print(f"{len(results)} compiled, {len(complaints)} complaints", *complaints, sep="\n")
    return bool(complaints)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
