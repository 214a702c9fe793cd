import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from kernel_cases import Heads, Step, build_paged_case, random_tensor
from kernel_implementations import (
    IMPLEMENTATIONS,
    RUNS_TRITON,
    TOLERANCES,
    TRITON_DEVICE,
    TRITON_MODULES,
    AttentionOps,
    DecodeOps,
    all_tested_callables,
    assert_bitwise,
)
from pico_vllm.kernels import (
    attention,
    block_copy,
    embedding,
    linear,
    logits_processing,
    philox,
    rms_norm,
    rotary_decode_attention,
    rotary_embedding,
    rotary_embedding_and_store_kv,
    sampling,
    swiglu,
)
from pico_vllm.kernels.backend import CPU, REFERENCE, KernelBackend, recording

OPS = [field.name for field in dataclasses.fields(KernelBackend) if field.name != "name"]
BACKENDS = {"reference": REFERENCE, "cpu": CPU}
if RUNS_TRITON:
    from pico_vllm.kernels.triton_backend import TRITON

    BACKENDS["triton"] = TRITON
MODULES = (
    attention,
    block_copy,
    embedding,
    linear,
    logits_processing,
    philox,
    rms_norm,
    rotary_decode_attention,
    rotary_embedding,
    rotary_embedding_and_store_kv,
    sampling,
    swiglu,
    *TRITON_MODULES,
)
each_backend = pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS.keys())


def run_every_op(backend: KernelBackend) -> dict[str, torch.Tensor]:
    """One call of each op, in the order of a layer; returns what came out and what was written in place."""
    device = TRITON_DEVICE if "triton" in backend.name else "cpu"

    def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
        return random_tensor(*shape, dtype=torch.float32, device=device, seed=seed)

    def ints(*values: Any, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    heads = Heads(num_kv_heads=1, group=2, head_dim=8, block_size=4)
    case = build_paged_case(Step(((1, 5), (3, 3)), 1, num_padded_tokens=1), heads, dtype=torch.float32, device=device)
    cache = case.kv_cache.clone()
    out: dict[str, torch.Tensor] = {}
    table = numbers(11, 16)
    out["embedding"] = backend.embedding(ints(1, 10, 3, dtype=torch.int32), table)
    weight = numbers(16, seed=1)
    out["rms_norm"] = backend.rms_norm(out["embedding"], weight, 1e-5)
    packed = backend.pack_linear(numbers(6, 16, seed=2), None)
    out["linear"] = backend.linear(out["rms_norm"], packed)
    partial = backend.partial_linear(out["rms_norm"], packed)
    out["partial_linear"] = partial if partial.dim() == 2 else partial.sum(dim=0)
    out["gated_linear"] = backend.gated_linear(out["rms_norm"], packed)
    metadata = backend.prepare_attention(case.inputs, heads.cache_shape)
    qkv = case.projected.qkv.clone().view(5, 4, 8)
    backend.rotary_embedding_and_store_kv(qkv, numbers(5, 8, seed=3), cache, metadata, 2)
    out["rotated"], out["cache"] = qkv[:, :2], cache
    out["attended"] = backend.paged_attention(out["rotated"], cache, metadata, case.scale)
    decodes = build_paged_case(Step(((1, 5), (1, 3)), 2), heads, dtype=torch.float32, device=device)
    metadata = backend.prepare_attention(decodes.inputs, heads.cache_shape)
    new_heads, out["decode_cache"] = decodes.projected.qkv.view(2, 4, 8), decodes.kv_cache.clone()
    out["decoded"] = backend.rotary_decode_attention(
        new_heads, numbers(2, 8, seed=4), out["decode_cache"], metadata, 2, case.scale
    )
    out["normed"], out["residual"] = backend.add_rms_norm(out["rms_norm"], table[:3].clone(), weight, 1e-5)
    out["greedy"] = backend.greedy(out["linear"])
    seeds = ints(1, 2, -3)
    out["uniform"] = backend.uniform(seeds, torch.zeros_like(seeds), ints(0, 1, 2))
    ones = torch.ones(3, device=device)
    out["sampled"] = backend.sample(out["linear"], ones, ints(0, 2, 1), ones, out["uniform"])
    out["penalised"] = out["linear"].clone()
    counts = torch.arange(18, dtype=torch.int32, device=device).view(3, 6) % 3
    backend.apply_penalties(out["penalised"], counts == 2, counts, 2 * ones, ones, -ones)
    out["masked"] = out["linear"].clone()
    backend.apply_bitmask(out["masked"], ints([0b101101], [0b11], [-1], dtype=torch.int32))
    names = ("chosen", "rank", "best_ids", "best")
    out |= zip(names, backend.logprobs(out["linear"], out["greedy"], 2), strict=True)
    caches, ids = [cache.clone(), -cache], ints(5, 1)
    backend.copy_blocks(caches, ids[:1], ids[1:])
    out["blocks"] = backend.gather_blocks(caches, ids)
    backend.scatter_blocks(2 * out["blocks"], caches, ids.flip(0))
    out["scattered"] = torch.stack(caches)
    return out


CALLS_OF_EVERY_OP = [
    "embedding", "rms_norm", "pack_linear", "linear", "partial_linear", "gated_linear", "prepare_attention",
    "rotary_embedding_and_store_kv", "paged_attention", "prepare_attention", "rotary_decode_attention",
    "add_rms_norm", "greedy", "uniform", "sample",
    "apply_penalties", "apply_bitmask", "logprobs", "copy_blocks", "gather_blocks", "scatter_blocks",
]  # fmt: skip


@each_backend
def test_recording_sees_every_call_in_order(backend):
    names = []
    run_every_op(recording(backend, lambda name, args, result: names.append(name)))
    assert names == CALLS_OF_EVERY_OP
    assert sorted(set(names)) == sorted(OPS)


@each_backend
def test_recording_changes_no_bit(backend):
    expected = run_every_op(backend)
    got = run_every_op(recording(backend, lambda name, args, result: None))
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_bitwise(got[name], tensor)


def test_tap_gets_the_very_arguments_and_the_very_result():
    seen = []
    backend = recording(CPU, lambda *call: seen.append(call))
    x, weight = random_tensor(2, 4, dtype=torch.float32), torch.ones(4)
    y = backend.rms_norm(x, weight, 1e-5)
    ((name, args, result),) = seen
    assert name == "rms_norm"
    assert args[0] is x and args[1] is weight and args[2] == 1e-5 and len(args) == 3
    assert result is y


def test_tap_is_called_after_an_op_that_writes_in_place():
    seen = []
    backend = recording(CPU, lambda name, args, result: seen.append((args[0].clone(), result)))
    logits = torch.zeros(1, 3)
    backend.apply_bitmask(logits, torch.tensor([[0b101]], dtype=torch.int32))
    ((masked, result),) = seen
    assert masked.tolist() == [[0.0, float("-inf"), 0.0]]
    assert result is None


def test_recording_says_what_it_records_and_leaves_the_backend_alone():
    assert recording(CPU, lambda name, args, result: None).name == "recording(cpu)"
    assert CPU.name == "cpu" and CPU.rms_norm is rms_norm.rms_norm_cpu


def test_recordings_nest():
    inner, outer = [], []
    backend = recording(CPU, lambda name, args, result: inner.append(name))
    backend = recording(backend, lambda name, args, result: outer.append(name))
    run_every_op(backend)
    assert inner == outer == CALLS_OF_EVERY_OP


def test_replace_swaps_one_op_only():
    def doubled(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return 2 * rms_norm.rms_norm_reference(x, weight, eps)

    swapped = dataclasses.replace(CPU, rms_norm=doubled)
    changed = {op for op in OPS if getattr(swapped, op) is not getattr(CPU, op)}
    assert changed == {"rms_norm"}
    x, weight = random_tensor(2, 4, dtype=torch.float32), torch.ones(4)
    torch.testing.assert_close(swapped.rms_norm(x, weight, 1e-5), 2 * CPU.rms_norm(x, weight, 1e-5))


def test_backend_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        CPU.rms_norm = rms_norm.rms_norm_reference


@each_backend
def test_every_field_is_bound_to_a_function(backend):
    assert all(callable(getattr(backend, op)) for op in OPS)
    assert BACKENDS[backend.name] is backend


@pytest.mark.parametrize("op", OPS)
def test_all_backends_take_the_same_arguments(op):
    names = [list(inspect.signature(getattr(backend, op)).parameters) for backend in BACKENDS.values()]
    assert all(of_backend == names[0] for of_backend in names)


@each_backend
@pytest.mark.parametrize("op", OPS)
def test_what_a_backend_binds_is_tested_under_the_name_of_its_op(backend, op):
    assert getattr(backend, op) in all_tested_callables()[op]


def test_every_implementation_in_the_package_is_listed_for_the_tests():
    written = {
        name
        for module in MODULES
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if function.__module__ == module.__name__ and re.search(r"_(reference|cpu|dense|triton)$", name)
    }
    listed = {function.__name__ for functions in all_tested_callables().values() for function in functions}
    scalar = {"philox_reference", "uniform_reference"}  # expectations of test_philox
    assert written - scalar == listed


@pytest.mark.parametrize("op", IMPLEMENTATIONS)
def test_every_listed_op_has_a_test_file_that_runs_all_its_implementations(op):
    sources = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    assert re.search(rf"@each_implementation(_and_dtype)?\(\"{op}\"\)|IMPLEMENTATIONS\[\"{op}\"\]", sources)
    assert all(callable(impl.op) or isinstance(impl.op, AttentionOps | DecodeOps) for impl in IMPLEMENTATIONS[op])


def test_every_tolerance_has_a_reason_and_is_a_few_roundings_wide():
    for (op, dtype), tolerance in TOLERANCES.items():
        unit = torch.finfo(dtype).eps / 2
        assert len(tolerance.reason) > 20
        assert tolerance.rtol <= 8 * unit, (op, dtype)
        assert tolerance.atol <= 340 * unit, (op, dtype)
