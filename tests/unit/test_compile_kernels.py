"""What ``nox -s compile`` refuses, on numbers by hand; the compiling itself is that session's."""

import os
import re

import pytest

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("kernels that are interpreted can't be compiled", allow_module_level=True)

import compile_kernels
from compile_kernels import (
    ALLOWED_SPILLS,
    OTHERS,
    SHARED_MEMORY,
    Resources,
    all_cases,
    compile_and_judge,
    compiled,
    complaint,
)


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


@pytest.mark.parametrize(
    ("name", "num_kinds_before"),
    [
        ("linear Qwen2.5-1.5B qkv 1 tokens", 1),
        ("linear Qwen2.5-1.5B qkv 16 tokens", 1),
        ("linear SmolLM2-135M gate_up 64 tokens", 1),
        ("linear Qwen2.5-1.5B down 32 tokens", 1),
        ("add_rms_norm-bf16-1536-5_splits", 1),
        ("rms_norm-bf16-1536", 0),
        ("swiglu-bf16", 0),
        ("greedy-bf16-4096", 0),
        ("greedy-chunks-bf16-8192", 0),
        ("rotary_embedding_and_store_kv-bf16-16x8x128-qk_norm", 0),
    ],
)
def test_a_kernel_that_is_launched_early_reads_nothing_but_weights_before_it_waits(name, num_kinds_before):
    """By the PTX: one kind of load at most before the wait, and no store. The products mark weights as evict_first."""
    before, wait, after = compiled(all_cases(90)[name], 90).asm["ptx"].partition("griddepcontrol.wait")
    assert wait and "griddepcontrol.launch_dependents" in before
    loads = set(re.findall(r"ld\.global[.\w:]*|cp\.async\.c\w*", before))
    assert len(loads) == num_kinds_before, loads
    if name.startswith("linear"):
        assert all("evict_first" in load for load in loads)
    assert "st.global" not in before and "st.global" in after


def hopper_ptx(name: str) -> str:
    """Of a case of ours in Gluon. Where this triton's Gluon isn't the one they are written in there is none at all."""
    cases = all_cases(90)
    if not any(case.startswith("hopper ") for case in cases):
        pytest.skip("this triton's Gluon is another")
    return compiled(cases[f"hopper {name}"], 90).asm["ptx"]


@pytest.mark.parametrize(
    ("name", "num_stages", "num_refills"),
    [
        ("o 8x64x128 splits 3", 4, 0),
        ("qkv 64x64x128", 6, 1),
        ("gate_up 16x64x64", 6, 1),
        ("down 32x64x256 splits 5", 3, 1),
        ("lm_head 64x128x64", 4, 1),
    ],
)
def test_a_product_on_hopper_fills_its_ring_with_weights_and_reads_nothing_else_before_it_waits(
    name, num_stages, num_refills
):
    """By the PTX: copies of weights have four dimensions, those of tokens three. All weights of the ring come first."""
    before, wait, after = hopper_ptx(f"linear Qwen2.5-1.5B {name}").partition("griddepcontrol.wait")
    assert wait and "griddepcontrol.launch_dependents" in before
    copies = [re.findall(r"cp\.async\.bulk\.tensor\.(\d)d", part) for part in (before, after)]
    assert copies == [["4"] * num_stages, ["3"] * num_stages + ["4", "3"] * num_refills]
    assert not re.search(r"ld\.global|st\.global|cp\.async\.c|cp\.reduce|\bred\.|\batom\.", before)
    assert "st.global" in after


@pytest.mark.parametrize("num_tokens, num_stages, num_boxes", [(128, 5, 2), (192, 4, 3)])
def test_gated_products_of_many_tokens_fill_their_ring_with_weights_and_read_nothing_else_before_they_wait(
    num_tokens, num_stages, num_boxes
):
    """By the PTX: weights have four dimensions, tokens and results two; three consumers, 64 tokens a copy."""
    ptx = hopper_ptx(f"many gated Qwen2.5-1.5B {num_tokens}")
    before, wait, after = ptx.partition("griddepcontrol.wait")
    assert wait and "griddepcontrol.launch_dependents" in ptx
    copies = [re.findall(r"cp\.async\.bulk\.tensor\.(\d)d\.shared", part) for part in (before, after)]
    tokens = ["2"] * num_boxes
    of_halves = ["4", "4", "4", "2"] if num_tokens == 128 else []
    assert copies == [["4"] * 3 * num_stages, tokens * num_stages + ["4"] * 3 + tokens + of_halves]
    assert "cp.async.bulk.tensor.2d.global" in ptx
    assert not re.search(r"ld\.global|st\.global|\bred\.|\batom\.", ptx)


@pytest.mark.parametrize(
    "name", ["gate_up 8x32x128", "gate_up 16x64x64", "gate_up 64x64x64", "lm_head 32x64x128", "qkv 32x64x128"]
)
def test_results_on_hopper_take_the_place_of_the_ring_when_all_warps_have_multiplied(name):
    """By the PTX: a wait for the tensor cores is one of each warp for itself."""
    after = hopper_ptx(f"linear Qwen2.5-1.5B {name}").rpartition("wgmma.wait_group.sync.aligned 0")[2]
    before_results, store, _ = re.split(r"(stmatrix|st\.shared)", after, maxsplit=1)
    assert store and "bar.sync" in before_results


@pytest.mark.parametrize(
    "name",
    [
        "decode bf16 6x128 N 64 w 4 s 3 query_len 1",
        "rotary decode bf16 6x128 N 64 w 4 s 2 split",
        "rotary decode bf16 6x128 N 64 w 4 s 3",
        "hopper prefill bf16 6x128 block 16",
    ],
)
def test_attention_that_is_launched_early_writes_nothing_before_it_waits(name):
    """What decodes read before it, lengths, block ids and older positions, can't be told apart in the PTX."""
    before, wait, after = compiled(all_cases(90)[name], 90).asm["ptx"].partition("griddepcontrol.wait")
    assert wait and "griddepcontrol.launch_dependents" in before
    assert "st.global" not in before and "st.global" in after
    reads_early = re.search(r"ld\.global|cp\.async\.c", before) is not None
    assert reads_early is ("decode" in name)


def test_a_kernel_is_not_launched_early_where_the_architecture_cannot():
    assert "griddepcontrol" not in compiled(all_cases(80)["rms_norm-bf16-1536"], 80).asm["ptx"]


def test_a_kernel_that_does_not_compile_is_a_complaint(monkeypatch):
    def fails(case, capability):
        raise ValueError("arange's range must be a power of 2")

    monkeypatch.setattr(compile_kernels, "compile_case", fails)
    assert compile_and_judge("apply_bitmask", 80)[2:] == (None, "ValueError: arange's range must be a power of 2")
