import math

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from kernel_cases import NAN, ODD_SIZES, in_wider_rows, random_tensor
from kernel_implementations import (
    assert_bitwise,
    assert_near_oracle,
    each_implementation,
    each_implementation_and_dtype,
    uninitialised_memory_is_nan,
)
from pico_vllm.kernels.rms_norm import add_rms_norm_reference, rms_norm_reference

EPS = 1e-5
HIDDEN_SIZES = (1, 63, 100, 576, 960, 1536)


def oracle(x: torch.Tensor, weight: torch.Tensor, eps: float = EPS) -> torch.Tensor:
    return rms_norm_reference(x.double(), weight.double(), eps)


def hf_norm(weight: torch.Tensor, eps: float = EPS) -> LlamaRMSNorm:
    norm = LlamaRMSNorm(weight.shape[0], eps).to(weight.dtype)
    norm.weight.data.copy_(weight)
    return norm


@each_implementation_and_dtype("rms_norm")
def test_rms_norm_of_3_and_4_is_by_hand(impl, dtype):
    # mean square 12.5, so 3 and 4 become 0.8485 and 1.1314; eps 37.5 makes the root 50 ** 0.5 = 7.0711.
    x = torch.tensor([[3.0, 4.0], [0.0, 0.0]], dtype=dtype, device=impl.device)
    weight = torch.tensor([1.0, -2.0], dtype=dtype, device=impl.device)
    expected = torch.tensor([[0.848528137423857, -2.262741699796952], [0.0, 0.0]], dtype=torch.float64)
    assert_near_oracle("rms_norm", impl.op(x, weight, 0.0)[:1], expected[:1])
    assert_near_oracle("rms_norm", impl.op(x, weight, 1e-9), expected)
    expected = torch.tensor([[0.424264068711929, -1.131370849898476], [0.0, 0.0]], dtype=torch.float64)
    assert_near_oracle("rms_norm", impl.op(x, weight, 37.5), expected)


def test_reference_computes_fp64_in_fp64():
    x, weight = random_tensor(3, 7, dtype=torch.float64), random_tensor(7, dtype=torch.float64, seed=1)
    x += 1e-12 * random_tensor(3, 7, dtype=torch.float64, seed=2)  # digits that fp32 hasn't
    for row, got in zip(x.tolist(), rms_norm_reference(x, weight, EPS).tolist(), strict=True):
        root = math.sqrt(math.fsum(v * v for v in row) / len(row) + EPS)
        assert got == pytest.approx([v / root * w for v, w in zip(row, weight.tolist(), strict=True)], rel=1e-15)


@pytest.mark.parametrize("hidden_size", HIDDEN_SIZES)
@pytest.mark.parametrize("num_tokens", ODD_SIZES)
@each_implementation_and_dtype("rms_norm")
def test_rms_norm_is_near_the_oracle(impl, dtype, num_tokens, hidden_size):
    x = random_tensor(num_tokens, hidden_size, dtype=dtype, device=impl.device)
    weight = random_tensor(hidden_size, dtype=dtype, device=impl.device, seed=1)
    with uninitialised_memory_is_nan():
        y = impl.op(x, weight, EPS)
    assert y.dtype == dtype
    assert_near_oracle("rms_norm", y, oracle(x, weight))


@pytest.mark.parametrize("magnitude", [1e-4, 100.0])
@each_implementation_and_dtype("rms_norm")
def test_rms_norm_is_near_the_oracle_for_small_and_large_rows(impl, dtype, magnitude):
    # Squares near 1e-8 and 1e4: the first vanish beside eps and in fp16, a sum of the second overflows fp16.
    x = random_tensor(5, 576, dtype=torch.float32, device=impl.device).mul_(magnitude).to(dtype)
    weight = random_tensor(576, dtype=dtype, device=impl.device, seed=1)
    assert_near_oracle("rms_norm", impl.op(x, weight, EPS), oracle(x, weight))


@each_implementation_and_dtype("rms_norm")
def test_rms_norm_of_a_strided_view_equals_that_of_its_copy(impl, dtype):
    x = random_tensor(63, 100, dtype=dtype, device=impl.device)
    weight = random_tensor(100, dtype=dtype, device=impl.device, seed=1)
    view = in_wider_rows(x)
    assert_near_oracle("rms_norm", impl.op(view, weight, EPS), oracle(x, weight))
    assert_bitwise(view, x)


@pytest.mark.parametrize("num_heads, head_dim", [(1, 64), (3, 128), (16, 20)])
@each_implementation_and_dtype("rms_norm")
def test_heads_of_a_fused_projection_are_normalised_each_over_its_own_dimension(impl, dtype, num_heads, head_dim):
    heads = random_tensor(63, num_heads + 4, head_dim, dtype=dtype, device=impl.device)
    weight = random_tensor(head_dim, dtype=dtype, device=impl.device, seed=1)
    before, key = heads.clone(), heads[:, 2 : 2 + num_heads]
    with uninitialised_memory_is_nan():
        y = impl.op(key, weight, EPS)
    assert y.shape == key.shape and y.is_contiguous()
    assert_near_oracle("rms_norm", y, oracle(key, weight))
    assert_bitwise(heads, before)


@each_implementation("rms_norm")
def test_no_tokens_give_none(impl):
    assert impl.op(torch.empty(0, 100, device=impl.device), torch.ones(100, device=impl.device), EPS).shape == (0, 100)


@each_implementation_and_dtype("rms_norm")
def test_rms_norm_returns_a_new_tensor_and_leaves_its_arguments_alone(impl, dtype):
    x = random_tensor(7, 576, dtype=dtype, device=impl.device)
    weight = random_tensor(576, dtype=dtype, device=impl.device, seed=1)
    x_before, weight_before = x.clone(), weight.clone()
    y = impl.op(x, weight, EPS)
    y.fill_(7.0)
    assert_bitwise(x, x_before)
    assert_bitwise(weight, weight_before)


@each_implementation_and_dtype("rms_norm")
def test_nan_in_a_padded_row_spoils_only_that_row(impl, dtype):
    x = random_tensor(5, 100, dtype=dtype, device=impl.device)
    weight = random_tensor(100, dtype=dtype, device=impl.device, seed=1)
    clean = impl.op(x, weight, EPS)
    x[3, 50] = NAN
    y = impl.op(x, weight, EPS)
    assert y[3].isnan().all()
    others = [0, 1, 2, 4]
    assert_bitwise(y[others], clean[others])


@pytest.mark.parametrize("eps", [1e-5, 1e-6])
@pytest.mark.parametrize("num_tokens", ODD_SIZES)
@each_implementation_and_dtype("rms_norm", equal_to_hf=True)
def test_rms_norm_equals_transformers_bitwise(impl, dtype, num_tokens, eps):
    x = random_tensor(num_tokens, 576, dtype=dtype, device=impl.device)
    weight = random_tensor(576, dtype=dtype, device=impl.device, seed=1)
    with torch.inference_mode():
        assert_bitwise(impl.op(x, weight, eps), hf_norm(weight, eps)(x))


@pytest.mark.parametrize("hidden_size", HIDDEN_SIZES)
@pytest.mark.parametrize("num_tokens", ODD_SIZES)
@each_implementation_and_dtype("add_rms_norm")
def test_add_rms_norm_adds_in_the_dtype_and_normalises_the_rounded_sum(impl, dtype, num_tokens, hidden_size):
    x = random_tensor(num_tokens, hidden_size, dtype=dtype, device=impl.device)
    residual = random_tensor(num_tokens, hidden_size, dtype=dtype, device=impl.device, seed=1)
    weight = random_tensor(hidden_size, dtype=dtype, device=impl.device, seed=2)
    summed = x + residual
    x_before = x.clone()
    with uninitialised_memory_is_nan():
        y, new_residual = impl.op(x, residual.clone(), weight, EPS)
    assert_bitwise(new_residual, summed)
    assert_near_oracle("rms_norm", y, oracle(summed, weight))
    assert_bitwise(x, x_before)


@pytest.mark.parametrize("num_splits", [1, 2, 5])
@pytest.mark.parametrize("num_tokens, hidden_size", [(1, 1536), (5, 1), (63, 100), (65, 576), (0, 100)])
@each_implementation_and_dtype("add_rms_norm")
def test_partial_sums_are_added_up_and_rounded_once(impl, dtype, num_tokens, hidden_size, num_splits):
    """Multiples of 1/1024, whose sum is exact in any order: it is the same to give the op their rounded sum."""
    generator = torch.Generator().manual_seed(num_splits)
    shape = (num_splits, num_tokens, hidden_size)
    partial = torch.randint(-4096, 4097, shape, generator=generator).div(1024).to(impl.device)
    residual = random_tensor(num_tokens, hidden_size, dtype=dtype, device=impl.device, seed=1)
    weight = random_tensor(hidden_size, dtype=dtype, device=impl.device, seed=2)
    before = partial.clone()
    with uninitialised_memory_is_nan():
        y, new_residual = impl.op(partial, residual.clone(), weight, EPS)
    expected, expected_residual = impl.op(partial.sum(dim=0).to(dtype), residual.clone(), weight, EPS)
    assert y.dtype == new_residual.dtype == dtype
    assert_bitwise(new_residual, expected_residual)
    assert_bitwise(y, expected)
    assert_bitwise(partial, before)


@each_implementation("add_rms_norm")
def test_partial_sums_by_hand(impl):
    partial = torch.tensor([[[0.5, 2.0]], [[1.0, -1.0]], [[-0.5, 4.0]]], device=impl.device)
    residual = torch.tensor([[2.0, -1.0]], device=impl.device)
    _, new_residual = impl.op(partial, residual, torch.ones(2, device=impl.device), 0.0)
    assert new_residual.tolist() == [[3.0, 4.0]]


@pytest.mark.parametrize("num_splits", [2, 5])
@each_implementation("add_rms_norm")
def test_partial_sums_are_added_in_fp32(impl, num_splits):
    """256 + 0.5 + ... is 256 in bf16 after every addition but the last."""
    partial = torch.full((num_splits, 1, 8), 0.5, device=impl.device)
    partial[0] = 256.0 + 0.5
    residual = torch.zeros(1, 8, dtype=torch.bfloat16, device=impl.device)
    _, new_residual = impl.op(partial, residual, torch.ones(8, dtype=torch.bfloat16, device=impl.device), EPS)
    assert new_residual.tolist() == [[{2: 256.0, 5: 258.0}[num_splits]] * 8]  # 257 is a tie, to even; 258.5 is not


@each_implementation_and_dtype("add_rms_norm")
def test_nan_in_a_padded_row_of_partial_sums_spoils_only_that_row(impl, dtype):
    partial = random_tensor(2, 5, 100, dtype=torch.float32, device=impl.device)
    residual = random_tensor(5, 100, dtype=dtype, device=impl.device, seed=1)
    weight = random_tensor(100, dtype=dtype, device=impl.device, seed=2)
    clean, _ = impl.op(partial, residual.clone(), weight, EPS)
    partial[1, 3] = NAN
    y, _ = impl.op(partial, residual.clone(), weight, EPS)
    assert y[3].isnan().all()
    others = [0, 1, 2, 4]
    assert_bitwise(y[others], clean[others])


@each_implementation("add_rms_norm")
def test_add_rms_norm_by_hand(impl):
    x = torch.tensor([[1.0, 5.0]], device=impl.device)
    residual = torch.tensor([[2.0, -1.0]], device=impl.device)
    y, new_residual = impl.op(x, residual, torch.tensor([1.0, -2.0], device=impl.device), 0.0)
    assert new_residual.tolist() == [[3.0, 4.0]]
    expected = torch.tensor([[0.848528137423857, -2.262741699796952]], dtype=torch.float64)
    assert_near_oracle("rms_norm", y, expected)


@each_implementation("add_rms_norm")
def test_add_rms_norm_results_do_not_share_memory(impl):
    x, residual = (random_tensor(3, 8, dtype=torch.float32, device=impl.device, seed=seed) for seed in (0, 1))
    y, new_residual = impl.op(x, residual, torch.ones(8, device=impl.device), EPS)
    summed = new_residual.clone()
    y.fill_(7.0)
    assert_bitwise(new_residual, summed)


def test_reference_leaves_the_residual_alone():
    x, residual = (random_tensor(3, 8, dtype=torch.float32, seed=seed) for seed in (0, 1))
    before = residual.clone()
    add_rms_norm_reference(x, residual, torch.ones(8), EPS)
    assert_bitwise(residual, before)


@each_implementation_and_dtype("add_rms_norm", equal_to_hf=True)
def test_add_rms_norm_equals_a_residual_add_and_a_norm_of_transformers_bitwise(impl, dtype):
    x = random_tensor(63, 576, dtype=dtype, device=impl.device)
    residual = random_tensor(63, 576, dtype=dtype, device=impl.device, seed=1)
    weight = random_tensor(576, dtype=dtype, device=impl.device, seed=2)
    with torch.inference_mode():
        summed = residual + x
        y, _ = impl.op(x, residual, weight, EPS)
        assert_bitwise(y, hf_norm(weight)(summed))
