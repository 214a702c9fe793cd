"""What ``nox -s compile`` refuses, on numbers by hand; the compiling itself is that session's."""

import os

import pytest

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("kernels that are interpreted can't be compiled", allow_module_level=True)

import compile_kernels
from compile_kernels import ALLOWED_SPILLS, OTHERS, SHARED_MEMORY, Resources, all_cases, compile_and_judge, complaint


@pytest.mark.parametrize(("capability", "kib"), [(80, 163), (90, 227), (100, 227), (120, 99)])
def test_shared_memory_of_an_architecture_is_the_limit(capability, kib):
    fits = Resources(shared=kib * 1024, registers=255, stack=0)
    assert complaint(fits, capability, 0) is None
    too_much = Resources(shared=kib * 1024 + 1, registers=32, stack=0)
    assert f"sm_{capability} has {kib * 1024}" in complaint(too_much, capability, 0)


def test_spills_are_refused_beyond_what_is_allowed():
    spills = Resources(shared=0, registers=255, stack=24)
    assert complaint(spills, 90, 24) is None
    assert complaint(spills, 90, 23) == f"spills 24 bytes a thread, 23 are allowed in {ALLOWED_SPILLS.name}"


def test_every_allowance_is_of_a_case_and_an_architecture_that_exist():
    import json

    for name, allowed in json.loads(ALLOWED_SPILLS.read_text()).items():
        assert name == OTHERS or any(name in all_cases(capability) for capability in SHARED_MEMORY)
        assert set(allowed) <= {f"sm_{capability}" for capability in SHARED_MEMORY}
        assert all(stack > 0 for stack in allowed.values())


def test_a_kernel_that_compiles_tells_what_it_needs():
    name, capability, resources, why = compile_and_judge("apply_bitmask", 90)
    assert (name, capability, why) == ("apply_bitmask", 90, None)
    assert resources is not None and 0 < resources.registers <= 255


def test_a_kernel_that_does_not_compile_is_a_complaint(monkeypatch):
    def fails(case, capability):
        raise ValueError("arange's range must be a power of 2")

    monkeypatch.setattr(compile_kernels, "compile_case", fails)
    assert compile_and_judge("apply_bitmask", 80)[2:] == (None, "ValueError: arange's range must be a power of 2")
