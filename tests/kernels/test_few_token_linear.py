"""The products of few tokens: ``linear``, ``partial_linear`` and ``gated_linear`` at every border of their tiles.

``test_linear.py`` has what holds for a product of any size, and how weights are packed; ``test_linear_hopper.py`` the
kernel for Hopper, which takes over here wherever inputs are a multiple of 64.
"""

import dataclasses
import itertools

import pytest
import torch

from kernel_cases import NAN, in_wider_rows, random_tensor
from kernel_implementations import (
    IMPLEMENTATIONS,
    RUNS_TRITON,
    TRITON_DEVICE,
    assert_bitwise,
    assert_near_oracle,
    each_implementation,
    each_implementation_and_dtype,
)
from linear_cases import OPS, Case, added_up, before_nan, build, exact_sums
from pico_vllm.kernels import linear_config
from pico_vllm.kernels.linear import linear_cpu, linear_reference, pack_linear_dense
from pico_vllm.kernels.linear_config import Product
from pico_vllm.kernels.rms_norm import add_rms_norm_cpu
from pico_vllm.kernels.swiglu import swiglu_cpu, swiglu_reference

#: Both sides of every border between two tiles, and of that to cuBLAS.
NUM_TOKENS = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65)
HALVES = (torch.bfloat16, torch.float16)
SWIGLUS = {"reference": swiglu_reference, "cpu": swiglu_cpu}
if RUNS_TRITON:
    from pico_vllm.kernels import linear_triton
    from pico_vllm.kernels.swiglu_triton import swiglu_triton

    SWIGLUS["triton"] = swiglu_triton

needs_triton = pytest.mark.skipif(not RUNS_TRITON, reason="needs a GPU or TRITON_INTERPRET=1")
each_op = pytest.mark.parametrize("op", OPS.values())
each_op_and_implementation = pytest.mark.parametrize(
    "op, impl",
    [pytest.param(op, impl, id=f"{op}-{impl.name}") for op in OPS.values() for impl in IMPLEMENTATIONS[op]],
)


@pytest.fixture(autouse=True)
def cublas_adds_in_fp32():
    """What it does otherwise is not what this compares."""
    with exact_sums():
        yield


# ------------------------------------------------------------------------------------------------ near the oracle
@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
@pytest.mark.parametrize("in_features, out_features, has_bias", [(131, 70, True), (576, 34, False)])
@each_implementation_and_dtype("linear")
def test_linear_is_near_the_oracle(impl, dtype, num_tokens, in_features, out_features, has_bias):
    case = build(num_tokens, in_features, out_features, dtype=dtype, device=impl.device, has_bias=has_bias)
    y = case.run(impl.op)
    assert y.dtype == dtype and y.is_contiguous()
    assert_near_oracle("linear", y, case.expected("linear"))


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 16, 65])
@each_implementation_and_dtype("linear")
def test_a_product_goes_where_it_is_told(impl, dtype, num_tokens, has_bias):
    case = build(num_tokens, 131, 70, dtype=dtype, device=impl.device, has_bias=has_bias)
    memory = torch.full((num_tokens + 2, 70), NAN, dtype=dtype, device=impl.device)
    out = memory[1:-1]
    y = case.run(lambda x, weight: impl.op(x, weight, out))
    assert y.data_ptr() == out.data_ptr()
    assert_near_oracle("linear", out, case.expected("linear"))
    assert memory[[0, -1]].isnan().all()


@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
@pytest.mark.parametrize("in_features, out_features, has_bias", [(1, 3, True), (1531, 33, True), (4161, 66, False)])
@each_implementation_and_dtype("partial_linear")
def test_partial_sums_add_up_to_the_oracle(impl, dtype, num_tokens, in_features, out_features, has_bias):
    """4161 inputs take the shapes of long products. Partial sums aren't rounded: fp32 is what they are held against."""
    case = build(num_tokens, in_features, out_features, dtype=dtype, device=impl.device, has_bias=has_bias)
    y = case.run(impl.op)
    assert y.is_contiguous() and y.dtype == (dtype if y.dim() == 2 else torch.float32)
    if y.is_cuda and y.dim() == 2 and in_features % 8:  # cuBLAS's, which adds such rows in 16 bits whatever it is told
        assert_bitwise(y, case.run(linear_cpu))
        return
    assert_near_oracle("linear", added_up(y), case.expected("linear"))


@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
@pytest.mark.parametrize("in_features, intermediate_size, has_bias", [(131, 35, True), (576, 66, False), (1, 1, False)])
@each_implementation_and_dtype("gated_linear")
def test_gated_linear_is_near_the_oracle(impl, dtype, num_tokens, in_features, intermediate_size, has_bias):
    case = build(num_tokens, in_features, 2 * intermediate_size, dtype=dtype, device=impl.device, has_bias=has_bias)
    y = case.run(impl.op)
    assert y.shape == (num_tokens, intermediate_size) and y.dtype == dtype
    assert_near_oracle("gated_linear", y, case.expected("gated_linear"))


@needs_triton
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    "kind, config",
    [(kind, config) for (kind, _), configs in linear_config._SHAPES.items() for config in configs],
    ids=lambda value: value.name if isinstance(value, Product) else f"{value.block_m}x{value.block_n}x{value.block_k}",
)
def test_every_tuned_shape_is_near_the_oracle(kind, config, dtype, monkeypatch):
    """Those of wide products too, at sizes that an interpreter can bear: four tiles and a bit each way."""
    op = OPS[kind]
    in_features, out_features = 4 * config.block_k * config.num_slices + 35, min(2 * config.block_n, 64) + 3
    num_tokens = max(1, config.block_m - 1)
    case = build(num_tokens, in_features, out_features * (2 if kind is Product.GATED else 1), dtype=dtype)
    case = dataclasses.replace(case, x=case.x.to(TRITON_DEVICE), weight=case.weight.to(TRITON_DEVICE))
    monkeypatch.setattr(linear_triton, "choose_linear", lambda *args: config)
    y = case.run(IMPLEMENTATIONS[op][-1].op)
    assert kind is not Product.PARTIAL or y.shape[0] == config.num_splits(in_features)
    assert_near_oracle("gated_linear" if kind is Product.GATED else "linear", added_up(y), case.expected(op))


# -------------------------------------------------------------------------------------------------- partial sums
@needs_triton
def test_partial_sums_are_one_a_split_by_hand(monkeypatch):
    """32 inputs in tiles of 16, two splits: the second starts at input 16, and the first alone has the bias."""
    config = linear_config.LinearConfig(16, block_n=16, block_k=16, num_warps=1, max_splits=2)
    monkeypatch.setattr(linear_triton, "choose_linear", lambda *args: config)
    x = torch.ones(2, 32, dtype=torch.bfloat16, device=TRITON_DEVICE)
    x[1] = 2.0
    weight = torch.full((3, 32), 0.5, dtype=torch.bfloat16, device=TRITON_DEVICE)
    weight[:, 16:] = 0.25
    bias = torch.tensor([10.0, 20.0, 30.0], dtype=torch.bfloat16, device=TRITON_DEVICE)
    y = Case(x, weight, bias).run(linear_triton.partial_linear_triton)
    assert y.tolist() == [[[18.0, 28.0, 38.0], [26.0, 36.0, 46.0]], [[4.0] * 3, [8.0] * 3]]


@needs_triton
@pytest.mark.parametrize("num_tokens, num_splits", [(1, 2), (2, 3), (9, 5), (64, 5)])
def test_long_products_come_in_the_splits_of_their_shape(num_tokens, num_splits):
    case = build(num_tokens, 4161, 3, dtype=torch.bfloat16, device=TRITON_DEVICE)
    y = case.run(linear_triton.partial_linear_triton)
    assert (y.shape, y.dtype) == ((num_splits, num_tokens, 3), torch.float32)


@each_op
@pytest.mark.parametrize("num_tokens", [65, 100, 0])
@needs_triton
def test_many_tokens_and_none_are_left_to_cublas(op, num_tokens, monkeypatch):
    def launched(*args):
        raise AssertionError("a Triton product was launched")

    monkeypatch.setattr(linear_triton, "_launch", launched)
    case = build(num_tokens, 100, 34, dtype=torch.bfloat16, device=TRITON_DEVICE)
    y = case.run(IMPLEMENTATIONS[op][-1].op)
    assert (y.shape, y.dtype) == ((num_tokens, 17 if op == "gated_linear" else 34), torch.bfloat16)


@each_implementation("partial_linear")
def test_add_rms_norm_takes_what_partial_linear_returns(impl):
    """Whole or in splits: the norm that adds it up gets the same stream as with the product of another backend."""
    case = build(3, 4161, 63, dtype=torch.bfloat16, device=impl.device)
    residual = random_tensor(3, 63, dtype=torch.bfloat16, device=impl.device, seed=3)
    norm = random_tensor(63, dtype=torch.bfloat16, device=impl.device, seed=4)
    y, stream = add_rms_norm_cpu(case.run(impl.op), residual.clone(), norm, 1e-5)
    whole = linear_reference(case.x, pack_linear_dense(case.weight, None))
    expected, expected_stream = add_rms_norm_cpu(whole, residual.clone(), norm, 1e-5)
    # An fp32 sum next to the middle of two bf16 numbers may be rounded to either.
    assert ((stream - expected_stream).abs() <= 2.0**-7 * expected_stream.abs()).all()
    torch.testing.assert_close(y, expected, rtol=0.02, atol=0.02)


# --------------------------------------------------------------------------------------------------------- gating
@pytest.mark.parametrize("num_tokens", [1, 2, 33, 65])
@each_implementation_and_dtype("gated_linear")
def test_gating_has_the_roundings_of_product_then_swiglu(impl, dtype, num_tokens):
    """Multiples of 1/1024, whose sums are exact in any order: what is left to differ are the roundings."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randint(-30, 31, (num_tokens, 200), generator=generator).to(impl.device, dtype)
    weight = torch.randint(-20, 21, (2 * 37, 200), generator=generator).div(1024).to(impl.device, dtype)
    case = Case(x, weight, None)
    exact = case.expected("linear")
    assert (exact.to(dtype).double() != exact).any() == (dtype != torch.float32)  # the product's own rounding matters
    assert_bitwise(case.run(impl.op), SWIGLUS[impl.name](exact.to(dtype)))


@each_implementation_and_dtype("gated_linear")
def test_extreme_gates_saturate_and_never_become_nan(impl, dtype):
    x = torch.ones(1, 1, dtype=dtype, device=impl.device)
    weight = torch.tensor([-200.0, 200.0, -6e4, 6e4, 1.0, 1.0, 1.0, 1.0], dtype=dtype, device=impl.device)
    y = Case(x, weight[:, None], None).run(impl.op)
    assert y.tolist() == [[0.0, 200.0, 0.0, weight[3].item()]]


# ---------------------------------------------------------------------------------------- memory that isn't theirs
@pytest.mark.parametrize("num_tokens", [1, 5, 17, 40])
@each_op_and_implementation
def test_tokens_may_be_rows_of_something_wider(op, impl, num_tokens):
    case = build(num_tokens, 131, 70, dtype=torch.bfloat16, device=impl.device)
    strided = dataclasses.replace(case, x=in_wider_rows(case.x))
    assert_bitwise(strided.run(impl.op), case.run(impl.op))


@pytest.mark.parametrize("num_tokens", [1, 5, 17, 40])
@each_op_and_implementation
def test_what_lies_behind_tokens_weights_and_bias_is_never_read(op, impl, num_tokens):
    """NaN behind all of them, and 131 inputs: no tile ends where they end."""
    case = build(num_tokens, 131, 70, dtype=torch.bfloat16, device=impl.device, has_bias=True)
    surrounded = Case(before_nan(case.x), before_nan(case.weight), before_nan(case.bias))
    assert surrounded.weight.is_contiguous()
    assert_bitwise(surrounded.run(impl.op), case.run(impl.op))


@pytest.mark.parametrize("num_tokens", [2, 16, 33])
@each_op_and_implementation
def test_nan_in_one_row_spoils_only_that_row(op, impl, num_tokens):
    if impl.name == "cpu" and num_tokens == 33 and torch.__version__.startswith("2.11"):
        pytest.skip("torch's own product: 2.11 spreads it over 33 bf16 rows on some CPUs")
    case = build(num_tokens, 131, 70, dtype=torch.bfloat16, device=impl.device)
    clean = case.run(impl.op)
    spoilt = case.x.clone()
    spoilt[1] = NAN
    y = dataclasses.replace(case, x=spoilt).run(impl.op)
    assert y[..., 1, :].isnan().all()
    others = [row for row in range(num_tokens) if row != 1]
    assert_bitwise(y[..., others, :], clean[..., others, :])


@each_op_and_implementation
def test_weights_that_are_strided_views_are_multiplied_too(op, impl):
    case = build(3, 131, 70, dtype=torch.bfloat16, device=impl.device)
    strided = dataclasses.replace(case, weight=in_wider_rows(case.weight))
    assert not strided.weight.is_contiguous()
    name = "gated_linear" if op == "gated_linear" else "linear"
    assert_near_oracle(name, added_up(strided.run(impl.op)), case.expected(op))


@pytest.mark.parametrize("has_bias", [False, True], ids=["no_bias", "bias"])
@each_op_and_implementation
def test_arguments_are_left_alone(op, impl, has_bias):
    case = build(5, 131, 70, dtype=torch.bfloat16, device=impl.device, has_bias=has_bias)
    arguments = [argument for argument in (case.x, case.weight, case.bias) if argument is not None]
    before = [argument.clone() for argument in arguments]
    case.run(impl.op).fill_(7.0)
    for argument, copy in zip(arguments, before, strict=True):
        assert_bitwise(argument, copy)


# ------------------------------------------------------------------------------------------------------ the same
@pytest.mark.parametrize("num_tokens", [1, 16, 33])
@pytest.mark.parametrize("op, in_features", [("linear", 576), ("partial_linear", 4161), ("gated_linear", 576)])
def test_two_runs_are_bitwise_equal(op, in_features, num_tokens):
    for impl, dtype in itertools.product(IMPLEMENTATIONS[op], HALVES):
        case = build(num_tokens, in_features, 34, dtype=dtype, device=impl.device)
        assert_bitwise(case.run(impl.op), case.run(impl.op))


@needs_triton
@each_op
@pytest.mark.parametrize("num_tokens", [9, 12, 15])
def test_a_row_of_a_tile_does_not_depend_on_the_others(op, num_tokens):
    """A tile is computed whole: a row is the same with and without the tokens beside it."""
    function = IMPLEMENTATIONS[op][-1].op
    case = build(16, 1531, 34, dtype=torch.bfloat16, device=TRITON_DEVICE)
    fewer = dataclasses.replace(case, x=case.x[:num_tokens])
    assert_bitwise(fewer.run(function), case.run(function)[..., :num_tokens, :])
