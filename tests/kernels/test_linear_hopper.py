"""The products of few tokens on Hopper: when and how they are launched (no GPU needed), what they are (on an sm_90)."""

import dataclasses
import importlib.util
import itertools
import sys
import weakref

import pytest
import torch

from kernel_cases import NAN
from kernel_implementations import assert_bitwise, assert_near_oracle, needs_hopper
from kernel_launches import Launches, fresh
from linear_cases import OPS, Case, added_up, before_nan, build, exact_sums
from linear_shapes import MODELS

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton isn't installed", allow_module_level=True)

from pico_vllm.kernels import linear_config, linear_hopper, linear_triton
from pico_vllm.kernels.attention_config import Device
from pico_vllm.kernels.linear import LinearWeight, pack_linear_dense
from pico_vllm.kernels.linear_config import Product
from pico_vllm.kernels.swiglu_triton import swiglu_triton

H200 = Device(architecture=90, num_sms=132)
FUNCTIONS = {
    Product.WHOLE: linear_triton.linear_triton,
    Product.PARTIAL: linear_triton.partial_linear_triton,
    Product.GATED: linear_triton.gated_linear_triton,
}
QWEN = {shape.name: shape for shape in MODELS["Qwen2.5-1.5B"]}
BF16 = torch.bfloat16


# ---------------------------------------------------------------------------------------- when and how it is launched
@pytest.fixture
def kernels(monkeypatch):
    """On a machine that looks like an H200: (launches of the kernel for Hopper, launches of the others)."""
    hopper, others = Launches(), Launches()
    monkeypatch.setattr(linear_hopper, "_hopper_linear_kernel", hopper)
    for name in ("_one_row_kernel", "_few_rows_kernel", "_sliced_kernel"):
        monkeypatch.setattr(linear_triton, name, others)
    monkeypatch.setattr(linear_triton, "device_of", lambda index: H200)
    monkeypatch.setattr(linear_hopper, "SMALLEST_TILE", 16)
    return hopper, others


def product(name: str, num_tokens: int) -> tuple[torch.Tensor, LinearWeight]:
    """Operands of a product of Qwen2.5-1.5B, in memory that nobody touches."""
    shape = QWEN[name]
    rows = shape.out_features * (2 if shape.kind is Product.GATED else 1)
    bias = torch.empty(rows, dtype=BF16) if shape.has_bias else None
    weight = pack_linear_dense(torch.empty(rows, shape.in_features, dtype=BF16), bias)
    return torch.empty(num_tokens, shape.in_features, dtype=BF16), weight


@pytest.mark.parametrize(
    "name, num_tokens, grid, steps, stages, block_m, block_n, block_k",
    [
        ("qkv", 8, 64, 6, 6, 8, 32, 256),  # 2048 / 32 tiles, 1536 / 256 steps
        ("qkv", 16, 128, 6, 6, 16, 16, 256),
        ("qkv", 32, 64, 6, 6, 32, 32, 256),
        ("qkv", 64, 32, 12, 6, 64, 64, 128),
        ("qkv", 128, 64, 12, 4, 128, 32, 128),
        ("qkv", 192, 3 * 32, 12, 6, 64, 64, 128),  # three tiles of tokens
        ("qkv", 193, 4 * 32, 12, 6, 64, 64, 128),
        ("o", 8, 24 * 3, 4, 4, 8, 64, 128),  # 12 steps of 128 inputs in three splits
        ("o", 16, 48 * 2, 3, 3, 16, 32, 256),
        ("o", 32, 24 * 3, 4, 4, 32, 64, 128),
        ("o", 64, 24 * 3, 4, 4, 64, 64, 128),
        ("o", 65, 24 * 3, 4, 4, 128, 64, 128),
        ("o", 160, 2 * 24 * 2, 6, 4, 128, 64, 128),
        ("gate_up", 8, 280, 12, 4, 8, 32, 128),  # 8960 / 32 tiles of 32 gates and 32 ups
        ("gate_up", 16, 140, 24, 6, 16, 64, 64),
        ("gate_up", 64, 140, 24, 4, 64, 64, 64),
        ("down", 8, 12 * 10, 7, 4, 8, 128, 128),  # 70 steps of 128 inputs in ten splits
        ("down", 32, 24 * 5, 7, 3, 32, 64, 256),
        ("down", 64, 24 * 5, 14, 6, 64, 64, 128),
        ("down", 128, 24 * 5, 14, 3, 128, 64, 128),
        ("down", 256, 2 * 12 * 5, 28, 6, 128, 128, 64),
        ("lm_head", 32, 2374, 12, 4, 32, 64, 128),
        ("lm_head", 64, 1187, 24, 4, 64, 128, 64),
    ],
)
def test_each_product_is_launched_as_it_was_measured(
    kernels, name, num_tokens, grid, steps, stages, block_m, block_n, block_k
):
    hopper, others = kernels
    x, weight = product(name, num_tokens)
    kind, out_features = QWEN[name].kind, QWEN[name].out_features
    y = FUNCTIONS[kind](x, weight)
    ((seen_grid, (weights, tokens, bias, seen_y, *integers), params),) = hopper.seen
    assert not others.seen
    assert (seen_grid, seen_y.data_ptr()) == ((grid,), y.data_ptr())
    num_tiles, num_token_tiles = -(-out_features // block_n), -(-num_tokens // block_m)
    assert y.shape == ((grid // num_tiles // num_token_tiles,) if kind is Product.PARTIAL else ()) + (
        num_tokens,
        out_features,
    )
    assert integers == [num_tokens, out_features, num_tiles, num_token_tiles]
    assert params == {
        "STEPS": steps, "NUM_STAGES": stages, "HAS_BIAS": name == "qkv", "IS_PARTIAL": kind is Product.PARTIAL,
        "IS_GATED": kind is Product.GATED, "BLOCK_M": block_m, "BLOCK_N": block_n,
        "BLOCK_K": block_k, "num_warps": 4, "launch_pdl": True,
    }  # fmt: skip
    assert bias is (weight.bias if name == "qkv" else weight.dense)
    # The copies: slices of 64 inputs, halves, outputs of a half; slices, tokens.
    inputs, halves = weight.in_features, 2 if kind is Product.GATED else 1
    assert weights.base is weight.dense and tokens.base is x
    assert weights.shape == [inputs // 64, halves, out_features, 64]
    assert weights.strides == [64, out_features * inputs, inputs, 1]
    assert weights.block_shape == [block_k // 64, halves, block_n, 64]
    assert (tokens.shape, tokens.strides) == ([inputs // 64, num_tokens, 64], [64, inputs, 1])
    assert tokens.block_shape == [block_k // 64, block_m, 64]


@pytest.mark.parametrize("name, num_tokens", [("qkv", 1), ("down", 9), ("down", 16), ("gate_up", 32), ("lm_head", 16)])
def test_where_the_other_kernels_were_as_fast_they_are_launched(kernels, name, num_tokens):
    hopper, others = kernels
    FUNCTIONS[QWEN[name].kind](*product(name, num_tokens))
    assert not hopper.seen and len(others.seen) == 1


def refused(name: str, x: torch.Tensor, weight: LinearWeight) -> tuple[torch.Tensor, LinearWeight]:
    """``o`` of 8 tokens with one thing that TMA can't copy."""
    rows = weight.out_features
    if name == "inputs are no multiple of 64":
        return x[:, :1528].contiguous(), pack_linear_dense(torch.empty(rows, 1528, dtype=BF16), None)
    if name == "rows of tokens start at odd places":
        return torch.empty(8, 1540, dtype=BF16)[:, :1536], weight
    if name == "the same tokens in every row":
        return x[:1].expand(8, -1), weight
    if name == "tokens start at an odd place":
        return torch.empty(9, 1536, dtype=BF16).flatten()[4 : 4 + 8 * 1536].view(8, 1536), weight
    assert name == "weights start at an odd place"
    dense = torch.empty(rows + 1, 1536, dtype=BF16).flatten()[4 : 4 + rows * 1536].view(rows, 1536)
    return x, pack_linear_dense(dense, None)


@pytest.mark.parametrize(
    "what",
    [
        "inputs are no multiple of 64",
        "rows of tokens start at odd places",
        "the same tokens in every row",
        "tokens start at an odd place",
        "weights start at an odd place",
    ],
)
def test_what_tma_cannot_copy_has_the_kernel_and_shape_of_other_architectures(kernels, what):
    hopper, others = kernels
    y = linear_triton.partial_linear_triton(*refused(what, *product("o", 8)))
    ((grid, _, params),) = others.seen
    assert not hopper.seen
    assert grid == (1, 96, 2) and y.shape == (2, 8, 1536)
    assert (params["BLOCK_N"], params["BLOCK_K"], params["NUM_SLICES"]) == (16, 256, 4)


@pytest.mark.parametrize("what", ["fp32", "strided weights", "other dtype"])
def test_numbers_and_weights_that_no_kernel_here_takes_are_refused(what):
    x, weight = product("o", 8)
    assert linear_hopper.smallest_hopper_tile(x, weight) == linear_hopper.SMALLEST_TILE
    if what == "fp32":
        x, weight = x.float(), pack_linear_dense(torch.empty(1536, 1536), None)
    elif what == "other dtype":
        x = x.half()
    else:
        weight = pack_linear_dense(torch.empty(1536, 1600, dtype=BF16)[:, :1536], None)
    assert linear_hopper.smallest_hopper_tile(x, weight) is None


def test_other_architectures_have_the_other_kernels(kernels, monkeypatch):
    hopper, others = kernels
    monkeypatch.setattr(linear_triton, "device_of", lambda index: Device(architecture=100, num_sms=132))
    for name in QWEN:
        FUNCTIONS[QWEN[name].kind](*product(name, 8))
    assert not hopper.seen and len(others.seen) == 5


def test_where_it_cannot_be_imported_the_other_kernels_do_everything(monkeypatch, kernels):
    monkeypatch.setitem(sys.modules, linear_hopper.__name__, None)
    without = fresh(linear_triton)
    assert without.launch_hopper_linear is None and without.smallest_hopper_tile is None
    monkeypatch.setattr(linear_triton, "smallest_hopper_tile", None)
    linear_triton.partial_linear_triton(*product("o", 8))
    hopper, others = kernels
    assert not hopper.seen and len(others.seen) == 1


def test_a_triton_whose_instructions_may_not_read_beyond_a_tile_has_wider_tiles(kernels, monkeypatch):
    hopper, _ = kernels
    monkeypatch.setattr(linear_hopper, "SMALLEST_TILE", 64)
    for name, num_tokens in (("qkv", 8), ("o", 16), ("qkv", 32), ("gate_up", 8)):
        FUNCTIONS[QWEN[name].kind](*product(name, num_tokens))
    tiles = [(params["BLOCK_N"], params["BLOCK_K"], params["NUM_STAGES"]) for _, _, params in hopper.seen]
    assert tiles == [(64, 128, 6), (64, 128, 4), (64, 128, 6), (32, 128, 4)]  # the last: gates and ups are 64


def test_a_product_goes_into_rows_of_something_larger(kernels):
    hopper, _ = kernels
    x, weight = product("qkv", 3)
    memory = torch.empty(8, 2048, dtype=BF16)
    y = linear_triton.linear_triton(x, weight, memory[2:5])
    ((_, (_, _, _, out, *_), _),) = hopper.seen
    assert y.data_ptr() == out.data_ptr() == memory[2].data_ptr() and out.is_contiguous()


def test_a_weight_is_described_once_a_box_and_tokens_anew(kernels):
    hopper, _ = kernels
    x, weight = product("o", 8)
    for tokens in (x, x[:5], torch.empty(16, 1536, dtype=BF16), torch.empty_like(x)):
        linear_triton.partial_linear_triton(tokens, weight)
    weights, tokens = zip(*(args[:2] for _, args, _ in hopper.seen), strict=True)
    assert weights[0] is weights[1] is weights[3] and weights[2] is not weights[0]
    assert len({id(descriptor) for descriptor in tokens}) == 4
    assert [descriptor.base.shape[0] for descriptor in tokens] == [8, 5, 16, 8]


def test_weights_of_one_shape_and_place_have_descriptors_of_their_own(kernels):
    """Another matrix in the memory of a freed one, a copy of a ``LinearWeight`` with another matrix."""
    hopper, _ = kernels
    x, weight = product("o", 8)
    linear_triton.partial_linear_triton(x, weight)
    others = [
        dataclasses.replace(weight, dense=torch.empty_like(weight.to_dense())),
        pack_linear_dense(weight.to_dense(), None),
    ]
    for other in others:
        linear_triton.partial_linear_triton(x, other)
        assert hopper.seen[-1][1][0].base is other.dense
        assert hopper.seen[-1][1][0] is not hopper.seen[0][1][0]


def test_a_launch_keeps_neither_weight_nor_tokens_alive(kernels):
    hopper, _ = kernels
    x, weight = product("o", 8)
    linear_triton.partial_linear_triton(x, weight)
    hopper.seen.clear()
    assert len(weight.descriptors) == 1
    dense, tokens = weakref.ref(weight.to_dense()), weakref.ref(x)
    del x, weight
    assert dense() is None and tokens() is None


# -------------------------------------------------------------------------------------------------- what it computes
HALVES = (torch.bfloat16, torch.float16)
SHAPES = [
    pytest.param(kind, config, id=f"{kind.name}-{config.block_m}x{config.block_n}x{config.block_k}")
    for (kind, _), table in linear_config._HOPPER_SHAPES.items()
    for config in dict.fromkeys(config for configs in table.values() for config in configs)
    if config.block_n * (2 if kind is Product.GATED else 1) >= linear_hopper.SMALLEST_TILE
]
each_shape = pytest.mark.parametrize("kind, config", SHAPES)
each_kind = pytest.mark.parametrize("kind", Product)


@pytest.fixture
def hopper_only(monkeypatch):
    """The other kernels, and cuBLAS, would be an error."""
    for name in ("_one_row_kernel", "_few_rows_kernel", "_sliced_kernel", "linear_cpu"):
        monkeypatch.setattr(linear_triton, name, None)


@pytest.fixture
def always(hopper_only, monkeypatch):
    """Makes every product take one shape."""
    return lambda config: monkeypatch.setattr(linear_triton, "choose_linear", lambda *args: config)


def build_on_gpu(kind, num_tokens, in_features, out_features, dtype=BF16, has_bias=False) -> Case:
    rows = out_features * (2 if kind is Product.GATED else 1)
    return build(num_tokens, in_features, rows, dtype=dtype, device="cuda", has_bias=has_bias)


def assert_right(kind: Product, y: torch.Tensor, case: Case) -> None:
    op = OPS[kind]
    assert_near_oracle("gated_linear" if kind is Product.GATED else "linear", added_up(y), case.expected(op))


@needs_hopper
@pytest.mark.parametrize("dtype", HALVES)
@each_shape
def test_every_shape_is_near_the_oracle(always, kind, config, dtype):
    """Two tiles and a bit of outputs; inputs: one step, the ring once, a step more, and much more in uneven splits."""
    always(config)
    refills = config.block_k * (config.num_stages + 2) * config.max_splits + 64
    out_features = 2 * config.block_n + 3
    for in_features, num_tokens, has_bias in itertools.product(
        (64, config.block_k * config.num_stages, config.block_k * (config.num_stages + 1), refills),
        {2, config.block_m // 2, config.block_m // 2 + 1, config.block_m - 1, config.block_m, 2 * config.block_m - 1},
        (False, True),
    ):
        case = build_on_gpu(kind, num_tokens, in_features, out_features, dtype, has_bias)
        y = case.run(FUNCTIONS[kind])
        assert kind is not Product.PARTIAL or y.shape[0] == config.num_splits(in_features)
        assert_right(kind, y, case)


@needs_hopper
@pytest.mark.parametrize(
    "num_tokens",
    [1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 96, 97, 128, 129, 160, 161, 192, 193, 224, 225, 256, 257],
)
@pytest.mark.parametrize("name", ["qkv", "o", "gate_up", "down"])
def test_products_of_a_model_are_near_the_oracle_at_every_border(name, num_tokens):
    """By the shapes that are chosen, with the kernels that they are for."""
    shape = QWEN[name]
    case = build_on_gpu(shape.kind, num_tokens, shape.in_features, shape.out_features, has_bias=shape.has_bias)
    with exact_sums():
        assert_right(shape.kind, case.run(FUNCTIONS[shape.kind]), case)


@needs_hopper
@pytest.mark.parametrize("out_features", [1, 8, 63, 65, 1000, 1003])
@each_shape
def test_any_number_of_outputs_is_near_the_oracle(always, kind, config, out_features):
    always(config)
    case = build_on_gpu(kind, config.block_m - 1, 1344, out_features, has_bias=True)
    assert_right(kind, case.run(FUNCTIONS[kind]), case)


@needs_hopper
def test_partial_sums_are_one_a_split_by_hand(always):
    """192 inputs in steps of 64, two splits: two steps and one, and the first split alone has the bias."""
    always(linear_config.LinearConfig(8, 64, 64, num_warps=4, num_stages=2, max_splits=2, on_hopper=True))
    x = torch.ones(2, 192, dtype=BF16, device="cuda")
    x[1] = 2.0
    weight = torch.full((3, 192), 0.5, dtype=BF16, device="cuda")
    weight[:, 128:] = 0.25
    bias = torch.tensor([10.0, 20.0, 30.0], dtype=BF16, device="cuda")
    y = Case(x, weight, bias).run(linear_triton.partial_linear_triton)
    assert y.tolist() == [[[74.0, 84.0, 94.0], [138.0, 148.0, 158.0]], [[16.0] * 3, [32.0] * 3]]


@needs_hopper
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("num_tokens", [5, 16, 60])
def test_gating_has_the_roundings_of_product_then_swiglu(hopper_only, dtype, num_tokens):
    """Multiples of 1/1024, whose sums are exact in any order: what is left to differ are the roundings."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randint(-30, 31, (num_tokens, 192), generator=generator).to("cuda", dtype)
    weight = torch.randint(-20, 21, (2 * 37, 192), generator=generator).div(1024).to("cuda", dtype)
    case = Case(x, weight, None)
    assert_bitwise(case.run(linear_triton.gated_linear_triton), swiglu_triton(case.expected("linear").to(dtype)))


@needs_hopper
@each_shape
def test_a_row_does_not_depend_on_the_others_and_runs_are_bitwise_equal(always, kind, config):
    always(config)
    case = build_on_gpu(kind, config.block_m + 3, 1600, 70)
    whole = case.run(FUNCTIONS[kind])
    assert_bitwise(case.run(FUNCTIONS[kind]), whole)
    for num_tokens in (2, config.block_m // 2 + 1, config.block_m - 1, config.block_m + 1):
        fewer = dataclasses.replace(case, x=case.x[:num_tokens])
        assert_bitwise(fewer.run(FUNCTIONS[kind]), whole[..., :num_tokens, :])
    spoilt = case.x.clone()
    spoilt[1] = NAN
    y = dataclasses.replace(case, x=spoilt).run(FUNCTIONS[kind])
    assert y[..., 1, :].isnan().all()
    y[..., 1, :] = whole[..., 1, :]
    assert_bitwise(y, whole)


@needs_hopper
@each_shape
def test_what_lies_beside_and_behind_tokens_weights_and_bias_is_never_read(always, kind, config):
    always(config)
    case = build_on_gpu(kind, config.block_m - 1, 1344, 70, has_bias=True)
    wide = torch.full((config.block_m + 50, 1344 + 64), NAN, dtype=BF16, device="cuda")
    x = wide[: config.block_m - 1, 8 : 8 + 1344]
    x.copy_(case.x)
    assert case.bias is not None
    surrounded = Case(x, before_nan(case.weight), before_nan(case.bias))
    assert_bitwise(surrounded.run(FUNCTIONS[kind]), case.run(FUNCTIONS[kind]))


@needs_hopper
@pytest.mark.parametrize("out_features", [70, 2048])
@pytest.mark.parametrize("num_tokens", [3, 16, 30, 50])
def test_a_product_goes_where_it_is_told(hopper_only, num_tokens, out_features):
    """70 outputs: rows that start at odd places."""
    case = build_on_gpu(Product.WHOLE, num_tokens, 1536, out_features, has_bias=True)
    memory = torch.full((num_tokens + 2, out_features), NAN, dtype=BF16, device="cuda")
    y = case.run(lambda x, weight: linear_triton.linear_triton(x, weight, memory[1:-1]))
    assert y.data_ptr() == memory[1].data_ptr()
    assert_right(Product.WHOLE, memory[1:-1], case)
    assert memory[[0, -1]].isnan().all()


@needs_hopper
@each_kind
@pytest.mark.parametrize("num_tokens", [8, 64, 192])
def test_a_captured_launch_multiplies_the_tokens_of_each_replay(hopper_only, kind, num_tokens):
    """The descriptor that a graph has is its own: the one of the launch, and even x itself, may be gone."""
    case = build_on_gpu(kind, num_tokens, 1536, 304)
    weight = pack_linear_dense(case.weight, None)
    x = torch.empty_like(case.x)
    FUNCTIONS[kind](x, weight)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = FUNCTIONS[kind](x[:], weight)
    weight.descriptors.clear()
    for factor in (1.0, -0.5, 2.0):
        x.copy_(factor * case.x)
        y.fill_(NAN)
        graph.replay()
        assert_right(kind, y, dataclasses.replace(case, x=x))


@needs_hopper
def test_a_product_waits_for_the_kernel_that_writes_its_tokens(hopper_only):
    """A chain of early launches, o after o: each reads what the one before has just written."""
    case = build_on_gpu(Product.WHOLE, 8, 1536, 1536)
    weight = pack_linear_dense(case.weight, None)
    torch.cuda.synchronize()
    x = expected = case.x
    for _ in range(20):
        x = linear_triton.linear_triton(x, weight)
    for _ in range(20):
        expected = dataclasses.replace(case, x=expected).expected("linear").to(BF16)
    error = (x.double() - expected.double()).norm() / expected.double().norm()
    assert error < 0.05
