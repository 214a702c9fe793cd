import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from kernel_cases import NAN, ODD_SIZES, in_wider_rows, random_tensor
from kernel_implementations import (
    assert_bitwise,
    assert_near_oracle,
    each_implementation,
    each_implementation_and_dtype,
    uninitialised_memory_is_nan,
)
from pico_vllm.kernels.swiglu import swiglu_reference


def oracle(gate_up: torch.Tensor) -> torch.Tensor:
    return swiglu_reference(gate_up.double())


@each_implementation("swiglu")
def test_swiglu_by_hand(impl):
    # silu(ln 3) = 3/4 ln 3, silu(-ln 3) = -1/4 ln 3, silu(0) = 0, silu(±40) = 40 or nearly 0.
    ln3 = math.log(3.0)
    gate, up = [ln3, -ln3, 0.0, 40.0], [2.0, 4.0, 5.0, -0.5]
    y = impl.op(torch.tensor([gate + up], device=impl.device))
    assert y[0].tolist() == pytest.approx([1.5 * ln3, -ln3, 0.0, -20.0], rel=1e-6)


@each_implementation_and_dtype("swiglu")
def test_extreme_gates_saturate_and_never_become_nan(impl, dtype):
    gate_up = torch.tensor([[-200.0, 200.0, -6e4, 6e4, 1.0, 1.0, 1.0, 1.0]], dtype=dtype, device=impl.device)
    y = impl.op(gate_up)
    assert y.tolist() == [[0.0, 200.0, 0.0, gate_up[0, 3].item()]]


def test_reference_computes_fp64_in_fp64():
    gate_up = random_tensor(3, 14, dtype=torch.float64) + 1e-12  # digits that fp32 hasn't
    for row, got in zip(gate_up.tolist(), swiglu_reference(gate_up).tolist(), strict=True):
        expected = [g / (1 + math.exp(-g)) * u for g, u in zip(row[:7], row[7:], strict=True)]
        assert got == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("intermediate_size", [1, 63, 100, 1536])
@pytest.mark.parametrize("num_tokens", ODD_SIZES)
@each_implementation_and_dtype("swiglu")
def test_swiglu_is_near_the_oracle(impl, dtype, num_tokens, intermediate_size):
    gate_up = random_tensor(num_tokens, 2 * intermediate_size, dtype=dtype, device=impl.device)
    with uninitialised_memory_is_nan():
        y = impl.op(gate_up)
    assert y.dtype == dtype
    assert_near_oracle("swiglu", y, oracle(gate_up))


@each_implementation_and_dtype("swiglu")
def test_swiglu_of_a_strided_view_is_near_the_oracle(impl, dtype):
    gate_up = random_tensor(63, 2 * 100, dtype=dtype, device=impl.device)
    assert_near_oracle("swiglu", impl.op(in_wider_rows(gate_up)), oracle(gate_up))


@each_implementation_and_dtype("swiglu")
def test_swiglu_leaves_its_argument_alone(impl, dtype):
    gate_up = random_tensor(7, 200, dtype=dtype, device=impl.device)
    before = gate_up.clone()
    impl.op(gate_up).fill_(7.0)
    assert_bitwise(gate_up, before)


@each_implementation_and_dtype("swiglu")
def test_nan_in_a_padded_row_spoils_only_that_row(impl, dtype):
    gate_up = random_tensor(5, 200, dtype=dtype, device=impl.device)
    clean = impl.op(gate_up)
    gate_up[3] = NAN
    y = impl.op(gate_up)
    others = [0, 1, 2, 4]
    assert_bitwise(y[others], clean[others])


@pytest.mark.parametrize("num_tokens", [1, 7, 20])
@each_implementation_and_dtype("swiglu", equal_to_hf=True)
def test_swiglu_equals_transformers_bitwise(impl, dtype, num_tokens):
    # Sizes for which torch takes its vectorised exp for every element on both sides: rows of a multiple of 64, fewer
    # than 32768 elements (above that threads split them anywhere). Its scalar exp rounds otherwise in the last bit.
    config = LlamaConfig(hidden_size=32, intermediate_size=1536)
    mlp = LlamaMLP(config).to(dtype)
    seen = {}
    mlp.down_proj.register_forward_pre_hook(lambda _, args: seen.update(y=args[0]))
    x = random_tensor(num_tokens, 32, dtype=dtype, device=impl.device)
    with torch.inference_mode():
        mlp(x)
        gate_up = torch.cat((mlp.gate_proj(x), mlp.up_proj(x)), dim=-1)
        assert_bitwise(impl.op(gate_up), seen["y"])
