"""Gate, up and SwiGLU of many tokens on Hopper: when and how launched (no GPU needed), and what (on an sm_90)."""

import dataclasses
import importlib.util
import itertools
import sys

import pytest
import torch

from kernel_cases import NAN
from kernel_implementations import assert_bitwise, assert_near_oracle, needs_hopper
from kernel_launches import Launches, fresh
from linear_cases import Case, before_nan, build

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton isn't installed", allow_module_level=True)

from pico_vllm.kernels import gated_linear_hopper, linear_triton
from pico_vllm.kernels.attention_config import Device
from pico_vllm.kernels.gated_linear_hopper import launch_hopper_gated
from pico_vllm.kernels.linear import LinearWeight, pack_linear_dense
from pico_vllm.kernels.linear_config import GATED_BLOCK_M, GATED_BLOCK_N, GATED_WIDE_BLOCK_M, divide_gated
from pico_vllm.kernels.linear_triton import gated_linear_triton
from pico_vllm.kernels.rms_norm import rms_norm_reference
from pico_vllm.kernels.rms_norm_triton import rms_norm_triton
from pico_vllm.kernels.swiglu_triton import swiglu_triton

H200 = Device(architecture=90, num_sms=132)
BF16 = torch.bfloat16


# ---------------------------------------------------------------------------------------- when and how it is launched
@pytest.fixture
def launches(monkeypatch):
    """On a machine that looks like an H200: launches of the kernel, and calls of the two ops that do the same."""
    kernel, two_ops = Launches(), []

    def swiglu(x: torch.Tensor) -> torch.Tensor:
        two_ops.append(x)
        return x.new_empty(len(x), x.shape[1] // 2)

    monkeypatch.setattr(gated_linear_hopper, "_hopper_gated_kernel", kernel)
    monkeypatch.setattr(gated_linear_hopper, "device_of", lambda index: H200)
    monkeypatch.setattr(linear_triton, "device_of", lambda index: H200)
    monkeypatch.setattr(linear_triton, "linear_cpu", lambda x, weight: x.new_empty(len(x), weight.out_features))
    monkeypatch.setattr(linear_triton, "swiglu_triton", swiglu)
    return kernel, two_ops


def operands(num_tokens: int, out_features: int = 8960, in_features: int = 1536) -> tuple[torch.Tensor, LinearWeight]:
    """In memory that nobody touches."""
    weight = pack_linear_dense(torch.empty(2 * out_features, in_features, dtype=BF16), None)
    return torch.empty(num_tokens, in_features, dtype=BF16), weight


@pytest.mark.parametrize(
    "num_tokens, grid, tiles, block_m, num_stages",
    [
        (65, 94, (94, 0, 1, 94), 128, 5),
        (128, 94, (94, 0, 1, 94), 128, 5),
        (129, 94, (94, 0, 1, 94), 192, 4),
        (192, 94, (94, 0, 1, 94), 192, 4),
        (384, 132, (264, 36, 3, 94), 128, 5),  # 282 tiles, of which the last 18 are halved
        (512, 132, (376, 0, 4, 94), 128, 5),
        (2048, 132, (1452, 104, 16, 94), 128, 5),
    ],
)
def test_it_is_launched_as_it_was_measured(launches, num_tokens, grid, tiles, block_m, num_stages):
    kernel, two_ops = launches
    x, weight = operands(num_tokens)
    y = gated_linear_triton(x, weight)
    ((seen_grid, (weights, tokens, bias, results, *integers), params),) = kernel.seen
    assert not two_ops
    assert (y.shape, y.dtype, seen_grid) == ((num_tokens, 8960), BF16, (grid,))
    assert integers == [8960, *tiles]
    assert params == {
        "STEPS": 24, "NUM_STAGES": num_stages, "HAS_BIAS": False, "BLOCK_M": block_m, "num_warps": 4,
        "launch_pdl": True,
    }  # fmt: skip
    assert bias is weight.dense
    # Groups of 8 outputs, gates and ups, 8, inputs; tokens; results.
    assert weights.base is weight.dense
    assert weights.shape == [1120, 2, 8, 1536] and weights.strides == [8 * 1536, 8960 * 1536, 1536, 1]
    assert weights.block_shape == [4, 2, 8, 64]
    assert (tokens.base, tokens.shape, tokens.block_shape) == (x, [num_tokens, 1536], [64, 64])
    assert results.base is y and (results.shape, results.block_shape) == ([num_tokens, 8960], [64, 32])


def test_bias_stages_and_strides_are_those_of_the_operands(launches):
    kernel, _ = launches
    bias = torch.empty(192, dtype=BF16)
    weight = pack_linear_dense(torch.empty(192, 128, dtype=BF16), bias)
    gated_linear_triton(torch.empty(100, 192, dtype=BF16)[:, 64:], weight)
    ((grid, (_, tokens, seen_bias, *_), params),) = kernel.seen
    assert grid == (1,) and seen_bias is bias and tokens.strides == [192, 1]
    assert (params["STEPS"], params["NUM_STAGES"], params["HAS_BIAS"]) == (2, 2, True)


@pytest.mark.parametrize("num_tokens", [193, 256])
def test_where_its_tiles_fill_no_two_waves_two_ops_do_it(launches, num_tokens):
    kernel, two_ops = launches
    gated_linear_triton(*operands(num_tokens))
    assert not kernel.seen and len(two_ops) == 1


@pytest.mark.parametrize(
    "what", ["no tokens", "66 outputs", "fp32", "inputs", "odd rows of tokens", "strided weights", "another GPU"]
)
def test_what_it_cannot_take_two_ops_do(launches, monkeypatch, what):
    kernel, two_ops = launches
    x, weight = operands(512, 960, 1536)
    if what == "no tokens":
        x = x[:0]
    elif what == "66 outputs":
        weight = operands(512, 66)[1]
    elif what == "fp32":
        x, weight = x.float(), pack_linear_dense(torch.empty(1920, 1536), None)
    elif what == "inputs":
        x, weight = operands(512, 960, 1528)
    elif what == "odd rows of tokens":
        x = torch.empty(512, 1540, dtype=BF16)[:, :1536]
    elif what == "strided weights":
        weight = pack_linear_dense(torch.empty(1920, 1600, dtype=BF16)[:, :1536], None)
    else:
        monkeypatch.setattr(linear_triton, "device_of", lambda index: Device(architecture=100, num_sms=132))
    monkeypatch.setattr(linear_triton, "takes_gated_tiles", lambda *args: True)
    gated_linear_triton(x, weight)
    assert not kernel.seen and len(two_ops) == 1


def test_where_it_cannot_be_imported_two_ops_do_it(launches, monkeypatch):
    monkeypatch.setitem(sys.modules, gated_linear_hopper.__name__, None)
    without = fresh(linear_triton)
    assert without.launch_hopper_gated is without.launch_hopper_linear is without.smallest_hopper_tile is None
    monkeypatch.setattr(linear_triton, "smallest_hopper_tile", None)
    gated_linear_triton(*operands(512))
    kernel, two_ops = launches
    assert not kernel.seen and len(two_ops) == 1


def test_a_weight_is_described_once_and_tokens_and_results_anew(launches):
    kernel, _ = launches
    x, weight = operands(512)
    for _ in range(2):
        gated_linear_triton(x, weight)
    (first, tokens, _, results, *_), (second, tokens_again, _, results_again, *_) = (args for _, args, _ in kernel.seen)
    assert first is second and tokens is not tokens_again and results is not results_again


# -------------------------------------------------------------------------------------------------- what it computes
def build_on_gpu(num_tokens, in_features, out_features, dtype=BF16, has_bias=False) -> Case:
    return build(num_tokens, in_features, 2 * out_features, dtype=dtype, device="cuda", has_bias=has_bias)


def gated(x: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
    """By the kernel, whatever the number of tokens."""
    y = torch.full((len(x), weight.out_features // 2), NAN, dtype=x.dtype, device=x.device)
    launch_hopper_gated(x, weight, y)
    return y


@needs_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("out_features", [8, GATED_BLOCK_N - 8, GATED_BLOCK_N, GATED_BLOCK_N + 32, 1000])
def test_it_is_near_the_oracle(dtype, out_features):
    """Inputs: one step, the ring but one, the ring, a step more, and much more; both sides of a tile of tokens."""
    for in_features, num_tokens, has_bias in itertools.product(
        (64, 256, 320, 384, 1344),
        (1, 63, GATED_BLOCK_M, 129, GATED_WIDE_BLOCK_M - 1, GATED_WIDE_BLOCK_M, 300),
        (False, True),
    ):
        case = build_on_gpu(num_tokens, in_features, out_features, dtype, has_bias)
        assert_near_oracle("gated_linear", case.run(gated), case.expected("gated_linear"))


@needs_hopper
@pytest.mark.parametrize("num_tokens", [17 * GATED_BLOCK_M - 3, 33 * GATED_BLOCK_M + 1])
@pytest.mark.parametrize("in_features", [64, 448])
def test_a_program_computes_many_tiles_of_many_groups(num_tokens, in_features):
    """More tiles than SMs, and more tiles of tokens than are computed side by side."""
    case = build_on_gpu(num_tokens, in_features, 24 * GATED_BLOCK_N + 8)
    assert_near_oracle("gated_linear", case.run(gated), case.expected("gated_linear"))


@needs_hopper
@pytest.mark.parametrize("num_tokens", [65, 129, 150, 192, 193, 200, 256])
@pytest.mark.parametrize("num_tiles", [1.1, 1.2])
def test_the_last_tiles_may_be_halves(num_tokens, num_tiles):
    """So many tiles an SM, too many for one wave of wide ones; of the last 64 tokens some halves have a few or none."""
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    num_output_tiles = round(num_tiles * num_sms)
    if num_tokens > GATED_WIDE_BLOCK_M:
        num_output_tiles //= 2
    out_features = num_output_tiles * GATED_BLOCK_N
    assert divide_gated(num_tokens, out_features, num_sms).num_halves > 0
    case = build_on_gpu(num_tokens, 384, out_features, has_bias=True)
    assert_near_oracle("gated_linear", case.run(gated), case.expected("gated_linear"))


@needs_hopper
@pytest.mark.parametrize("num_tokens", [65, 100, 128, 129, 192, 257, 330, 384, 512, 640, 1024, 2048])
def test_products_of_a_model_are_near_the_oracle(monkeypatch, num_tokens):
    monkeypatch.setattr(linear_triton, "linear_cpu", None)
    case = build_on_gpu(num_tokens, 1536, 8960)
    assert_near_oracle("gated_linear", case.run(gated_linear_triton), case.expected("gated_linear"))


@needs_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_it_has_the_roundings_of_product_then_swiglu(dtype):
    """Multiples of 1/1024, whose sums are exact in any order: what is left to differ are the roundings."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randint(-30, 31, (200, 192), generator=generator).to("cuda", dtype)
    weight = torch.randint(-20, 21, (2 * 104, 192), generator=generator).div(1024).to("cuda", dtype)
    case = Case(x, weight, None)
    assert_bitwise(case.run(gated), swiglu_triton(case.expected("linear").to(dtype)))


@needs_hopper
def test_a_row_does_not_depend_on_the_others_and_runs_are_bitwise_equal():
    case = build_on_gpu(300, 1600, 200, has_bias=True)
    whole = case.run(gated)
    assert_bitwise(case.run(gated), whole)
    for num_tokens in (1, 65, 128, 129, 192, 299):
        assert_bitwise(dataclasses.replace(case, x=case.x[:num_tokens]).run(gated), whole[:num_tokens])
    spoilt = case.x.clone()
    spoilt[131] = NAN
    y = dataclasses.replace(case, x=spoilt).run(gated)
    assert y[131].isnan().all()
    y[131] = whole[131]
    assert_bitwise(y, whole)


@needs_hopper
def test_what_lies_beside_and_behind_tokens_weights_and_bias_is_never_read():
    case = build_on_gpu(190, 1344, 104, has_bias=True)
    wide = torch.full((300, 1344 + 64), NAN, dtype=BF16, device="cuda")
    x = wide[:190, 8 : 8 + 1344]
    x.copy_(case.x)
    assert case.bias is not None
    surrounded = Case(x, before_nan(case.weight), before_nan(case.bias))
    assert_bitwise(surrounded.run(gated), case.run(gated))


@needs_hopper
def test_it_writes_its_results_and_nothing_else():
    case = build_on_gpu(150, 320, 104)
    memory = torch.full((152, 104), NAN, dtype=BF16, device="cuda")
    case.run(lambda x, weight: launch_hopper_gated(x, weight, memory[1:-1]) or memory)
    assert_bitwise(memory[1:-1], case.run(gated))
    assert memory[[0, -1]].isnan().all()


@needs_hopper
def test_a_captured_launch_multiplies_the_tokens_of_each_replay():
    """The descriptors that a graph has are its own: those of the launch, and even x itself, may be gone."""
    case = build_on_gpu(512, 1536, 8960)
    weight = pack_linear_dense(case.weight, None)
    x = torch.empty_like(case.x)
    gated_linear_triton(x, weight)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = gated_linear_triton(x[:], weight)
    weight.descriptors.clear()
    for factor in (1.0, -0.5, 2.0):
        x.copy_(factor * case.x)
        y.fill_(NAN)
        graph.replay()
        assert_near_oracle("gated_linear", y, dataclasses.replace(case, x=x).expected("gated_linear"))


@needs_hopper
def test_it_waits_for_the_kernel_that_writes_its_tokens():
    """A chain of early launches: each reads what the one before has just written."""
    case = build_on_gpu(300, 960, 960)
    weight, ones = pack_linear_dense(case.weight, None), torch.ones(960, dtype=BF16, device="cuda")
    torch.cuda.synchronize()
    x = expected = case.x
    for _ in range(4):
        x = rms_norm_triton(gated(x, weight), ones, 1e-6)
    for _ in range(4):
        y = dataclasses.replace(case, x=expected).expected("gated_linear").to(BF16)
        expected = rms_norm_reference(y, ones, 1e-6)
    error = (x.double() - expected.double()).norm() / expected.double().norm()
    assert error < 0.1  # of what has nothing to do with it 1.4
