"""Every case of every op: inputs, oracle, in-place drift, and that torch's baseline computes the same thing."""

import dataclasses

import pytest
import torch

from pico_vllm.bench.kernel_cases import OPS
from pico_vllm.bench.kernel_cases.case import another_copy, spread
from pico_vllm.bench.kernel_cases.shapes import QWEN2_5_1_5B, SHAPES, KernelShapes
from pico_vllm.bench.kernels import relative_error
from pico_vllm.bench.timing import MAX_CALLS_BETWEEN_RESTORES
from pico_vllm.kernels.backend import CPU, REFERENCE

DEVICE = torch.device("cpu")
TINY = KernelShapes(
    name="tiny",
    hidden_size=16,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=24,
    vocab_size=100,
    qkv_bias=True,
    num_tokens=(1, 17),
    linear_tokens=(1, 5),
    decodes=((1, 20), (3, 33)),
    prefills=((19, 0), (5, 18)),
    num_rows=(1, 5),
)
CASES = [
    pytest.param(case, id=f"{op.name}-{case.name}-{str(dtype).removeprefix('torch.')}")
    for op in OPS
    for dtype in (torch.float32, torch.bfloat16)
    for case in op.cases(TINY, dtype)
]


def assert_near(case, outputs, oracle):
    outputs = case.compared(outputs)
    assert len(outputs) == len(oracle)
    for actual, truth in zip(outputs, oracle, strict=True):
        assert actual.shape == truth.shape
        if case.exact or not actual.is_floating_point():
            assert torch.equal(actual.to(truth.dtype), truth)
        else:
            assert relative_error(actual, truth) < (1e-5 if actual.dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("case", CASES)
def test_both_backends_and_torch_agree_with_the_oracle(case):
    inputs = case.make(DEVICE)
    untouched = another_copy(inputs, 0)
    oracle = case.expected(inputs)
    for name, tensor in inputs.items():
        assert torch.equal(tensor, untouched[name]), "the oracle has changed its inputs"
    for backend in (CPU, REFERENCE):
        assert_near(case, case.bind(backend, another_copy(inputs, 0))(), oracle)
    on_cpu = [baseline for baseline in case.baselines if "SDPA " not in baseline.name]  # others: a GPU's kernels
    assert len(on_cpu) == 1
    assert_near(case, on_cpu[0].bind(another_copy(inputs, 0))(), oracle)


@pytest.mark.parametrize("num_rows", [1, 17])
def test_partial_sums_are_compared_added_up(num_rows):
    (op,) = (op for op in OPS if op.name == "partial_linear")
    case = next(op.cases(dataclasses.replace(TINY, linear_tokens=(num_rows,)), torch.bfloat16))

    def in_splits(x, weight):
        w = weight.to_dense()
        return torch.stack([x[:, i::3].float() @ w[:, i::3].float().T for i in range(3)])

    inputs = case.make(DEVICE)
    backend = dataclasses.replace(REFERENCE, partial_linear=in_splits)
    (actual,), (truth,) = case.compared(case.bind(backend, inputs)()), case.expected(inputs)
    assert actual.shape == (min(num_rows, 16), 16)
    assert relative_error(actual, truth) < 1e-5  # nothing was rounded to bf16
    without_last = dataclasses.replace(REFERENCE, partial_linear=lambda x, weight: in_splits(x, weight)[:2])
    (wrong,) = case.compared(case.bind(without_last, inputs)())
    assert relative_error(wrong, truth) > 0.1


@pytest.mark.parametrize("case", CASES)
def test_inputs_are_the_same_in_every_run(case):
    first, second = case.make(DEVICE), case.make(DEVICE)
    assert first.keys() == second.keys()
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


@pytest.mark.parametrize("case", CASES)
def test_many_calls_on_one_set_leave_numbers(case):
    tensors = case.make(DEVICE)
    call = case.bind(CPU, tensors)
    for _ in range(MAX_CALLS_BETWEEN_RESTORES if case.changed else 300):
        outputs = call()
    for output in outputs:
        assert not output.isnan().any()
        assert not (output == float("inf")).any()  # -inf is what the bitmask writes


@pytest.mark.parametrize("case", CASES)
def test_what_adds_up_is_restored_and_nothing_else(case):
    """An input that a second call changes further is listed as ``changed``."""
    tensors = case.make(DEVICE)
    call = case.bind(CPU, tensors)
    call()
    once = another_copy(tensors, 0)
    call()
    drifting = {name for name, tensor in tensors.items() if not torch.equal(tensor, once[name])}
    # A rotation keeps the length of what it turns, and the cache gets what was turned.
    assert drifting - {"heads", "kv_cache"} == set(case.changed)


def test_blocks_are_shuffled_and_belong_to_one_sequence():
    (op,) = (op for op in OPS if op.name == "paged_attention_decode")
    *_, case = op.cases(QWEN2_5_1_5B.smallest(), torch.bfloat16)
    tables = case.make(DEVICE)["block_tables"].flatten().tolist()
    assert len(tables) == 512 // 16
    assert sorted(tables) == list(range(1, 33))  # each once, block 0 is nobody's
    assert tables != sorted(tables)


def test_further_sets_look_up_other_rows_of_the_same_table():
    (op,) = (op for op in OPS if op.name == "embedding")
    *_, case = op.cases(TINY, torch.float32)
    first = case.make(DEVICE)
    second = case.another(first, 1)
    assert second["weight"] is first["weight"]
    assert not torch.equal(second["ids"], first["ids"])
    assert 0 <= int(second["ids"].min()) <= int(second["ids"].max()) < 100


def test_the_rows_with_targets_are_there():
    names = {op.name: [case.name for case in op.cases(QWEN2_5_1_5B, torch.bfloat16)] for op in OPS}
    assert {"64 x 4096 context", "256 x 1024 context", "1 x 512 context", "1 x 8192 context", "1 x 32768 context"} == (
        set(names["paged_attention_decode"])
    )
    assert names["paged_attention_prefill"] == [
        "512 new, causal",
        "2048 new, causal",
        "8192 new, causal",
        "512 new on 8192 cached",
    ]
    for op in ("add_rms_norm", "rotary_embedding_and_store_kv"):
        assert names[op] == ["1 token", "256 tokens", "8192 tokens"]
    assert "256 x 151936" in names["greedy"]
    assert "256 x 151936, top-k 50, top-p 0.9" in names["sample"]
    rows = (1, 8, 16, 32, 64, 128, 256, 512, 2048, 8192)
    for op, products in {
        "linear": ("qkv 1536 x 2048", "lm_head 1536 x 151936"),
        "partial_linear": ("o 1536 x 1536", "down 8960 x 1536"),
        "gated_linear": ("gate_up 1536 x 2 x 8960",),
    }.items():
        assert names[op] == [f"{product}, M = {num_rows}" for product in products for num_rows in rows]


def test_quick_shapes_have_one_size_each():
    for shapes in SHAPES.values():
        smallest = shapes.smallest()
        assert (len(smallest.num_tokens), len(smallest.decodes), len(smallest.num_rows)) == (1, 1, 1)
        assert smallest.hidden_size == shapes.hidden_size


def test_spread_has_both_ends():
    assert spread(3) == [0, 1, 2]
    assert spread(100, 4) == [0, 33, 66, 99]
    assert spread(17, 16) == [*range(15), 16]  # 14 * 16 // 15 = 14
