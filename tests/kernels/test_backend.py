import dataclasses
import inspect
import re
from pathlib import Path

import pytest
import torch

from kernel_cases import Heads, Step, build_paged_case, random_tensor
from kernel_implementations import (
    IMPLEMENTATIONS,
    TOLERANCES,
    TRITON_MODULES,
    AttentionOps,
    all_tested_callables,
    assert_bitwise,
)
from pico_vllm.kernels import (
    attention,
    embedding,
    linear,
    logits_processing,
    philox,
    rms_norm,
    rotary_embedding,
    sampling,
    swiglu,
)
from pico_vllm.kernels.backend import CPU, REFERENCE, KernelBackend, recording

OPS = [field.name for field in dataclasses.fields(KernelBackend) if field.name != "name"]
BACKENDS = {"reference": REFERENCE, "cpu": CPU}
MODULES = (
    attention, embedding, linear, logits_processing, philox, rms_norm, rotary_embedding, sampling, swiglu,
    *TRITON_MODULES,
)  # fmt: skip
each_backend = pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS.keys())


def run_every_op(backend: KernelBackend) -> dict[str, torch.Tensor]:
    """One call of each op, in the order of a layer; returns what came out and what was written in place."""
    heads = Heads(num_kv_heads=1, group=2, head_dim=8, block_size=4)
    case = build_paged_case(Step(((1, 5), (3, 3)), 1, num_padded_tokens=1), heads, dtype=torch.float32)
    qkv, cache = case.projected, case.kv_cache.clone()
    out: dict[str, torch.Tensor] = {}
    table = random_tensor(11, 16, dtype=torch.float32)
    out["embedding"] = backend.embedding(torch.tensor([1, 10, 3], dtype=torch.int32), table)
    weight = random_tensor(16, dtype=torch.float32, seed=1)
    out["rms_norm"] = backend.rms_norm(out["embedding"], weight, 1e-5)
    packed = backend.pack_linear(random_tensor(6, 16, dtype=torch.float32, seed=2), None)
    out["linear"] = backend.linear(out["rms_norm"], packed)
    out["rotated"] = qkv.query.clone()
    backend.rotary_embedding(out["rotated"], random_tensor(5, 8, dtype=torch.float32, seed=3))
    metadata = backend.prepare_attention(case.inputs, heads.cache_shape)
    backend.store_kv(qkv.key, qkv.value, cache, metadata)
    out["cache"] = cache
    out["attended"] = backend.paged_attention(qkv.query, cache, metadata, case.scale)
    out["normed"], out["residual"] = backend.add_rms_norm(out["rms_norm"], table[:3].clone(), weight, 1e-5)
    out["swiglu"] = backend.swiglu(out["linear"])
    out["greedy"] = backend.greedy(out["linear"])
    seeds = torch.tensor([1, 2, -3])
    out["uniform"] = backend.uniform(seeds, torch.zeros_like(seeds), torch.tensor([0, 1, 2]))
    ones = torch.ones(3)
    out["sampled"] = backend.sample(out["linear"], ones, torch.tensor([0, 2, 1]), ones, out["uniform"])
    out["penalised"] = out["linear"].clone()
    counts = torch.arange(18, dtype=torch.int32).view(3, 6) % 3
    backend.apply_penalties(out["penalised"], counts == 2, counts, 2 * ones, ones, -ones)
    out["masked"] = out["linear"].clone()
    backend.apply_bitmask(out["masked"], torch.tensor([[0b101101], [0b11], [-1]], dtype=torch.int32))
    names = ("chosen", "rank", "best_ids", "best")
    out |= zip(names, backend.logprobs(out["linear"], out["greedy"], 2), strict=True)
    return out


CALLS_OF_EVERY_OP = [
    "embedding", "rms_norm", "pack_linear", "linear", "rotary_embedding", "prepare_attention", "store_kv",
    "paged_attention", "add_rms_norm", "swiglu", "greedy", "uniform", "sample", "apply_penalties", "apply_bitmask",
    "logprobs",
]  # fmt: skip


@each_backend
def test_recording_sees_every_op_once_and_in_order(backend):
    names = []
    run_every_op(recording(backend, lambda name, args, result: names.append(name)))
    assert names == CALLS_OF_EVERY_OP
    assert sorted(names) == sorted(OPS)


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
    heads = torch.tensor([[[1.0, 2.0]]])
    backend.rotary_embedding(heads, torch.tensor([[0.0, 1.0]]))
    ((rotated, result),) = seen
    assert rotated.tolist() == [[[-2.0, 1.0]]]
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
    assert {"reference": REFERENCE, "cpu": CPU}[backend.name] is backend


@pytest.mark.parametrize("op", OPS)
def test_reference_and_cpu_take_the_same_arguments(op):
    names = [list(inspect.signature(getattr(backend, op)).parameters) for backend in (REFERENCE, CPU)]
    assert names[0] == names[1]


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
    assert all(callable(impl.op) or isinstance(impl.op, AttentionOps) for impl in IMPLEMENTATIONS[op])


def test_every_tolerance_has_a_reason_and_is_a_few_roundings_wide():
    for (op, dtype), tolerance in TOLERANCES.items():
        unit = torch.finfo(dtype).eps / 2
        assert len(tolerance.reason) > 20
        assert tolerance.rtol <= 8 * unit, (op, dtype)
        assert tolerance.atol <= 340 * unit, (op, dtype)
