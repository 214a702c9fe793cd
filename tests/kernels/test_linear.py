import itertools

import pytest
import torch

from kernel_cases import NAN, ODD_SIZES, in_wider_rows, random_tensor
from kernel_implementations import (
    FLOATS,
    IMPLEMENTATIONS,
    assert_bitwise,
    assert_near_oracle,
    each_implementation_and_dtype,
    uninitialised_memory_is_nan,
)
from pico_vllm.kernels.linear import LinearWeight, linear_reference, pack_linear_cpu, pack_linear_dense

# Every linear takes what every pack_linear of its device makes.
each_pair_and_dtype = pytest.mark.parametrize(
    "pack, impl, dtype",
    [
        pytest.param(pack, impl, dtype, id=f"{pack.name}_packed-{impl.name}-{str(dtype).removeprefix('torch.')}")
        for pack, impl in itertools.product(IMPLEMENTATIONS["pack_linear"], IMPLEMENTATIONS["linear"])
        for dtype in impl.dtypes
        if pack.device == impl.device and dtype in pack.dtypes
    ],
)


def random_weight(out_features: int, in_features: int, dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    """Near 1 / sqrt(K), so that sums of K products stay near 1."""
    return (random_tensor(out_features, in_features, dtype=torch.float32, seed=1) * in_features**-0.5).to(device, dtype)


def oracle(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return linear_reference(x.double(), pack_linear_dense(weight.double(), None if bias is None else bias.double()))


@each_pair_and_dtype
def test_linear_by_hand(pack, impl, dtype):
    weight = torch.tensor([[1.0, 2.0, 3.0], [-1.0, 0.5, 0.0]], dtype=dtype, device=impl.device)
    x = torch.tensor([[1.0, 1.0, 1.0], [2.0, 0.0, -4.0]], dtype=dtype, device=impl.device)
    bias = torch.tensor([0.25, 100.0], dtype=dtype, device=impl.device)
    assert impl.op(x, pack.op(weight, None)).tolist() == [[6.0, -0.5], [-10.0, -2.0]]
    assert impl.op(x, pack.op(weight, bias)).tolist() == [[6.25, 99.5], [-9.75, 98.0]]


def test_reference_computes_fp64_in_fp64():
    # 1 + 2^-40 is lost in fp32.
    weight = pack_linear_dense(torch.tensor([[1.0, 2.0**-40]], dtype=torch.float64), None)
    assert linear_reference(torch.ones(1, 2, dtype=torch.float64), weight).item() == 1.0 + 2.0**-40


@each_pair_and_dtype
def test_products_are_summed_wider_than_bf16_and_fp16(pack, impl, dtype):
    # 2048 + 1 is 2048 in both: an accumulator of that dtype would lose all 64 ones.
    x = torch.ones(1, 65, dtype=dtype, device=impl.device)
    weight = torch.ones(3, 65, dtype=dtype, device=impl.device)
    weight[:, 0] = 2048.0
    assert impl.op(x, pack.op(weight, None)).tolist() == [[2112.0] * 3]


@pytest.mark.parametrize("has_bias", [False, True], ids=["no_bias", "bias"])
@pytest.mark.parametrize("in_features, out_features", [(1, 1), (63, 100), (100, 63), (576, 960), (576, 1)])
@pytest.mark.parametrize("num_tokens", ODD_SIZES)
@each_pair_and_dtype
def test_linear_is_near_the_oracle(pack, impl, dtype, num_tokens, in_features, out_features, has_bias):
    x = random_tensor(num_tokens, in_features, dtype=dtype, device=impl.device)
    weight = random_weight(out_features, in_features, dtype, impl.device)
    bias = random_tensor(out_features, dtype=dtype, device=impl.device, seed=2) if has_bias else None
    expected = oracle(x, weight, bias)
    packed = pack.op(weight, bias)
    assert (packed.in_features, packed.out_features) == (in_features, out_features)
    with uninitialised_memory_is_nan():
        y = impl.op(x, packed)
    assert y.dtype == dtype
    assert_near_oracle("linear", y, expected)


@each_pair_and_dtype
def test_input_and_weight_may_be_strided_views(pack, impl, dtype):
    x = random_tensor(7, 100, dtype=dtype, device=impl.device)
    weight = random_weight(63, 100, dtype, impl.device)
    y = impl.op(in_wider_rows(x), pack.op(in_wider_rows(weight), None))
    assert_near_oracle("linear", y, oracle(x, weight))


@each_pair_and_dtype
def test_a_step_that_wants_no_logits_gets_none(pack, impl, dtype):
    x = torch.empty(0, 100, dtype=dtype, device=impl.device)
    assert impl.op(x, pack.op(random_weight(63, 100, dtype, impl.device), None)).shape == (0, 63)


@each_pair_and_dtype
def test_nan_in_a_padded_row_spoils_only_that_row(pack, impl, dtype):
    x = random_tensor(5, 100, dtype=dtype, device=impl.device)
    weight = random_weight(63, 100, dtype, impl.device)
    expected = oracle(x, weight)
    x[3] = NAN
    y = impl.op(x, pack.op(weight, None))
    others = [0, 1, 2, 4]
    assert y[3].isnan().all()
    assert_near_oracle("linear", y[others], expected[others])


@each_pair_and_dtype
def test_linear_leaves_its_arguments_alone(pack, impl, dtype):
    x = random_tensor(5, 100, dtype=dtype, device=impl.device)
    weight = random_weight(63, 100, dtype, impl.device)
    bias = random_tensor(63, dtype=dtype, device=impl.device)
    arguments = (x, weight, bias)
    before = [argument.clone() for argument in arguments]
    impl.op(x, pack.op(weight, bias)).fill_(7.0)
    for argument, copy in zip(arguments, before, strict=True):
        assert_bitwise(argument, copy)


@pytest.mark.parametrize("out_features, in_features", [(1, 1), (63, 100), (960, 576)])
@each_implementation_and_dtype("pack_linear")
def test_packing_and_unpacking_gives_the_same_matrix(impl, dtype, out_features, in_features):
    weight = random_weight(out_features, in_features, dtype, impl.device)
    assert_bitwise(impl.op(weight.clone(), None).to_dense(), weight)


@pytest.mark.parametrize("dtype", FLOATS)
def test_dense_packing_shares_storage_so_that_a_tied_head_costs_nothing(dtype):
    weight = random_weight(63, 100, dtype)
    assert pack_linear_dense(weight, None).to_dense().data_ptr() == weight.data_ptr()


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN to pack for")
def test_cpu_packing_keeps_one_matrix_only_and_does_not_read_the_old_one_again():
    weight = random_weight(63, 100, torch.float32)
    packed = pack_linear_cpu(weight, None)
    assert packed.dense is None
    expected = weight.clone()
    weight.fill_(NAN)
    assert_bitwise(packed.to_dense(), expected)


def test_a_weight_without_a_matrix_is_our_own_fault():
    with pytest.raises(AssertionError):
        LinearWeight(2, 3, None, None, None).to_dense()
