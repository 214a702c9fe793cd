"""bf16 in Triton's interpreter equals torch's bit by bit; on a GPU the same kernels run compiled."""

import pytest
import torch

from kernel_implementations import RUNS_TRITON, TRITON_DEVICE, assert_bitwise

if not RUNS_TRITON:
    pytest.skip("needs a GPU or TRITON_INTERPRET=1", allow_module_level=True)

import triton
import triton.language as tl

SIZE = 1 << 12
BF16 = torch.bfloat16


def numbers(seed: int = 0, size: int = SIZE) -> torch.Tensor:
    """Bit patterns of every kind: normal, subnormal, zero, infinite and NaN ones."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**15), 2**15, (size,), generator=generator).to(torch.int16)
    bits[:6] = torch.tensor([0, -(2**15), 0x7F80, 0x7F80 - 2**15, 0x7FC0, 1])
    return bits.view(BF16).to(TRITON_DEVICE)


def moderate_numbers(*shape: int, seed: int = 0, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(TRITON_DEVICE, dtype)


@triton.jit
def _binary_kernel(x_ptr, y_ptr, out_ptr, OP: tl.constexpr, SIZE: tl.constexpr):
    index = tl.arange(0, SIZE)
    x, y = tl.load(x_ptr + index), tl.load(y_ptr + index)
    if OP == "add":
        out = x + y
    elif OP == "sub":
        out = x - y
    elif OP == "mul":
        out = x * y
    elif OP == "less":
        out = x < y
    elif OP == "where":
        out = tl.where(x < y, x, y)
    elif OP == "negate":
        out = -x
    else:
        out = x * 1.1  # the constant becomes bf16
    tl.store(out_ptr + index, out)


BINARY = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "less": torch.less,
    "where": lambda x, y: torch.where(x < y, x, y),
    "negate": lambda x, y: -x,
    "constant": lambda x, y: x * torch.tensor(1.1, dtype=BF16, device=x.device),
}


@pytest.mark.parametrize("op", BINARY)
def test_operations_on_bf16_round_once_to_nearest_even(op):
    x, y = numbers(0), numbers(1)
    expected = BINARY[op](x, y)
    out = torch.empty_like(expected)
    _binary_kernel[(1,)](x, y, out, op, SIZE)
    assert_bitwise(out, expected)


@triton.jit
def _cast_kernel(x_ptr, out_ptr, SIZE: tl.constexpr):
    index = tl.arange(0, SIZE)
    tl.store(out_ptr + index, tl.load(x_ptr + index).to(out_ptr.dtype.element_ty))


@pytest.mark.parametrize("source", [torch.float32, torch.float16, torch.int32])
def test_casts_to_bf16_round_to_nearest_even(source):
    x = (moderate_numbers(SIZE, dtype=torch.float32) * 1000).to(source)
    if source == torch.float32:  # halfway between two bf16, to the even one below and the even one above; overflow
        bits = [0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x00008000]
        x[:4] = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    out = torch.empty(SIZE, dtype=BF16, device=TRITON_DEVICE)
    _cast_kernel[(1,)](x, out, SIZE)
    assert_bitwise(out, x.to(BF16))


@pytest.mark.parametrize("target", [torch.float32, torch.float16, torch.float64])
def test_casts_from_bf16_are_torchs(target):
    x = numbers()
    out = torch.empty(SIZE, dtype=target, device=TRITON_DEVICE)
    _cast_kernel[(1,)](x, out, SIZE)
    assert_bitwise(out, x.to(target))


def test_a_stored_bf16_is_the_loaded_one():
    x = numbers()
    out = torch.zeros(SIZE, dtype=BF16, device=TRITON_DEVICE)
    _cast_kernel[(1,)](x, out, SIZE)
    assert torch.equal(out.view(torch.int16), x.view(torch.int16))


@triton.jit
def _dot_kernel(a_ptr, b_ptr, out_ptr, N: tl.constexpr):
    index = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(out_ptr + index, tl.dot(tl.load(a_ptr + index), tl.load(b_ptr + index)).to(out_ptr.dtype.element_ty))


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_dot_of_bf16_sums_in_fp32_and_rounds_at_the_store(dtype):
    # Quarters below 2: sums of products are exact in fp32, in any order.
    a, b = (moderate_numbers(32, 32, seed=seed).mul(4).round().clamp(-8, 8).div(4) for seed in (0, 1))
    out = torch.empty(32, 32, dtype=dtype, device=TRITON_DEVICE)
    _dot_kernel[(1,)](a, b, out, 32)
    assert_bitwise(out, (a.cpu().double() @ b.cpu().double()).to(dtype))


@triton.jit
def _reduce_kernel(x_ptr, out_ptr, SIZE: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, SIZE))
    tl.store(out_ptr, tl.max(x, axis=0).to(tl.bfloat16))
    tl.store(out_ptr + 1, tl.sum(tl.abs(x).to(tl.float32), axis=0).to(tl.bfloat16))
    tl.store(out_ptr + 2, tl.full((), 0.1, tl.bfloat16))


def test_reductions_and_constants():
    x = moderate_numbers(SIZE).mul(4).round().clamp(-8, 8).div(4)
    out = torch.empty(3, dtype=BF16, device=TRITON_DEVICE)
    _reduce_kernel[(1,)](x, out, SIZE)
    assert_bitwise(out, torch.stack((x.max(), x.abs().float().sum().to(BF16), torch.tensor(0.1).to(x))))
