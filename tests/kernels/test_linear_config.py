import dataclasses
import itertools

import pytest

from linear_shapes import MODELS, ProductShape
from pico_vllm.kernels import linear_config
from pico_vllm.kernels.linear_config import MAX_ROWS, LinearConfig, Product, choose_linear

ARCHITECTURES = (80, 90, 100, 120)
#: Bytes that a program can have: those of sm_90, and of sm_120, the smallest.
SHARED_BYTES = {90: 227 * 1024, 80: 99 * 1024, 100: 99 * 1024, 120: 99 * 1024}
EVERY_SHAPE = [pytest.param(shape, id=f"{model}-{shape.name}") for model in MODELS for shape in MODELS[model]]
QKV, O_PROJ, GATE_UP, DOWN, LM_HEAD = MODELS["Qwen2.5-1.5B"]


def choose(shape: ProductShape, num_rows: int, architecture: int = 90) -> LinearConfig | None:
    return choose_linear(shape.kind, num_rows, shape.out_features, shape.in_features, architecture)


@pytest.mark.parametrize(
    "block_k, max_splits, in_features, split, num_splits",
    [
        (2048, 1, 1536, 2048, 1),
        (2048, 2, 8960, 6144, 2),  # 5 tiles: 3 and 2
        (256, 5, 8960, 1792, 5),  # 35 tiles: 7 each
        (128, 5, 8960, 1792, 5),
        (256, 2, 1536, 768, 2),
        (128, 4, 1536, 384, 4),
        (128, 4, 1537, 512, 4),  # 13 tiles: 4 + 4 + 4 + 1
        (128, 4, 640, 256, 3),  # 5 tiles: 2 + 2 + 1, the fourth would be empty
        (128, 4, 128, 128, 1),
        (16, 5, 1, 16, 1),
    ],
)
def test_inputs_are_split_into_whole_tiles_by_hand(block_k, max_splits, in_features, split, num_splits):
    config = LinearConfig(16, block_n=64, block_k=block_k, num_warps=4, max_splits=max_splits)
    assert (config.split(in_features), config.num_splits(in_features)) == (split, num_splits)


@pytest.mark.parametrize("max_splits", [1, 2, 3, 5, 9])
@pytest.mark.parametrize("block_k", [16, 128, 2048])
@pytest.mark.parametrize("in_features", [1, 63, 128, 129, 1536, 8959, 8960, 8961])
def test_no_split_is_empty_and_together_they_are_all_inputs(in_features, block_k, max_splits):
    for num_slices in (1, 4):
        config = LinearConfig(16, 64, block_k, num_warps=4, max_splits=max_splits, num_slices=num_slices)
        split, num_splits = config.split(in_features), config.num_splits(in_features)
        assert split % (block_k * num_slices) == 0
        assert 1 <= num_splits <= max_splits
        assert (num_splits - 1) * split < in_features <= num_splits * split


@pytest.mark.parametrize(
    "shape, num_rows, block_m",
    [
        (QKV, 1, 1),
        (QKV, 2, 8),
        (QKV, 8, 8),
        (QKV, 9, 16),
        (QKV, 16, 16),
        (QKV, 17, 32),
        (QKV, 32, 32),
        (QKV, 33, None),
        (O_PROJ, 8, 8),
        (O_PROJ, 33, 64),
        (O_PROJ, 64, 64),
        (O_PROJ, 65, None),
        (GATE_UP, 2, 16),
        (GATE_UP, 64, 64),
        (GATE_UP, 65, None),
        (DOWN, 2, 8),
        (DOWN, 64, 64),
        (DOWN, 65, None),
        (LM_HEAD, 1, 1),
        (LM_HEAD, 32, 32),
        (LM_HEAD, 33, None),
    ],
)
def test_the_smallest_tile_that_holds_all_tokens_is_taken_then_cublas(shape, num_rows, block_m):
    config = choose(shape, num_rows)
    assert (None if config is None else config.block_m) == block_m


def test_a_shape_is_found_up_to_the_bound_and_for_no_token_beyond_it():
    assert max(config.block_m for shapes in linear_config._SHAPES.values() for config in shapes) == 64
    assert max(max(shapes) for shapes in linear_config._HOPPER_SHAPES.values()) == MAX_ROWS


def test_long_and_wide_products_have_shapes_of_their_own():
    tuned = linear_config._SHAPES
    assert choose(DOWN, 16) == tuned[Product.PARTIAL, True][2]
    assert choose(O_PROJ, 16) == tuned[Product.PARTIAL, False][2]
    assert choose(LM_HEAD, 16) == tuned[Product.WHOLE, True][1]
    assert choose(QKV, 16) == tuned[Product.WHOLE, False][2]
    assert choose_linear(Product.PARTIAL, 16, 1536, 4095, 90) == tuned[Product.PARTIAL, False][2]
    assert choose_linear(Product.PARTIAL, 16, 1536, 4096, 90) == tuned[Product.PARTIAL, True][2]


def test_few_inputs_take_a_tile_no_longer_than_they_need():
    assert choose_linear(Product.PARTIAL, 1, 576, 576, 90).block_k == 1024
    assert choose_linear(Product.PARTIAL, 1, 7, 3, 90).block_k == 16
    assert choose_linear(Product.PARTIAL, 1, 7, 1, 90).block_k == 16
    assert choose_linear(Product.PARTIAL, 1, 1536, 1536, 90).block_k == 2048


def test_stages_are_fewer_where_there_is_less_shared_memory():
    on_h200, elsewhere = choose(DOWN, 32, 90), choose(DOWN, 32, 120)
    assert (on_h200.num_stages, elsewhere.num_stages) == (4, 2)
    assert dataclasses.replace(elsewhere, num_stages=4) == on_h200


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("num_rows", [1, 2, 8, 9, 16, 17, 32, 33, 64])
@pytest.mark.parametrize("shape", EVERY_SHAPE)
def test_tiles_of_real_models_fit_and_no_split_is_empty(shape, num_rows, architecture):
    config = choose(shape, num_rows, architecture)
    if config is None:
        assert shape.kind is Product.WHOLE and num_rows > 32
        return
    assert num_rows <= config.block_m
    num_splits = config.num_splits(shape.in_features)
    assert num_splits == 1 or shape.kind is Product.PARTIAL  # nobody would add them up
    assert (num_splits - 1) * config.split(shape.in_features) < shape.in_features
    weights = config.block_n * (2 if shape.kind is Product.GATED else 1)
    if config.block_m == 1:  # in registers, fp32 products beside them
        assert weights * config.block_k <= 128 * 32 * config.num_warps
    else:
        tile_bytes = 2 * (weights + config.block_m) * config.block_k * config.num_slices
        assert tile_bytes * config.num_stages <= SHARED_BYTES[architecture]


HOPPER_CONFIGS = [
    (kind, config)
    for (kind, _), table in linear_config._HOPPER_SHAPES.items()
    for shapes in table.values()
    for config in shapes
]


@pytest.mark.parametrize(
    "shape, num_rows, tile",
    [
        (QKV, 1, None),
        (QKV, 2, (8, 32)),
        (QKV, 8, (8, 32)),
        (QKV, 9, (16, 16)),
        (QKV, 17, (32, 32)),
        (QKV, 33, (64, 64)),
        (QKV, 64, (64, 64)),
        (QKV, 65, None),
        (QKV, 96, None),
        (QKV, 97, (128, 32)),
        (QKV, 128, (128, 32)),
        (QKV, 129, (64, 64)),
        (QKV, 256, (64, 64)),
        (QKV, 257, None),
        (O_PROJ, 8, (8, 64)),
        (O_PROJ, 16, (16, 32)),
        (O_PROJ, 32, (32, 64)),
        (O_PROJ, 64, (64, 64)),
        (O_PROJ, 65, (128, 64)),
        (O_PROJ, 128, (128, 64)),
        (O_PROJ, 129, (128, 64)),
        (O_PROJ, 224, (128, 64)),
        (O_PROJ, 225, None),
        (GATE_UP, 8, (8, 32)),
        (GATE_UP, 16, (16, 64)),
        (GATE_UP, 17, None),
        (GATE_UP, 32, None),
        (GATE_UP, 33, (64, 64)),
        (GATE_UP, 65, None),
        (DOWN, 8, (8, 128)),
        (DOWN, 9, None),
        (DOWN, 16, None),
        (DOWN, 17, (32, 64)),
        (DOWN, 64, (64, 64)),
        (DOWN, 65, (128, 64)),
        (DOWN, 128, (128, 64)),
        (DOWN, 129, None),
        (DOWN, 160, None),
        (DOWN, 161, (128, 128)),
        (DOWN, 256, (128, 128)),
        (DOWN, 257, None),
        (LM_HEAD, 8, None),
        (LM_HEAD, 16, None),
        (LM_HEAD, 17, (32, 64)),
        (LM_HEAD, 64, (64, 128)),
        (LM_HEAD, 65, None),
    ],
)
def test_the_kernel_for_hopper_takes_some_numbers_of_tokens_and_the_rest_is_as_without_it(shape, num_rows, tile):
    def choose_on(architecture: int, smallest_tile: int | None) -> LinearConfig | None:
        return choose_linear(shape.kind, num_rows, shape.out_features, shape.in_features, architecture, smallest_tile)

    config = choose_on(90, 16)
    if tile is None:
        assert config == choose(shape, num_rows)
    else:
        assert config.on_hopper and (config.block_m, config.block_n) == tile
    assert choose_on(90, None) == choose(shape, num_rows)
    for architecture in (80, 100, 120):
        assert choose_on(architecture, 16) == choose(shape, num_rows, architecture)


def test_where_a_tile_must_have_64_rows_only_those_shapes_are_taken():
    def tile(shape: ProductShape, num_rows: int) -> tuple[bool, int]:
        config = choose_linear(shape.kind, num_rows, shape.out_features, shape.in_features, 90, 64)
        return config.on_hopper, config.block_n

    assert [tile(QKV, n) for n in (8, 16, 32, 64, 128)] == [
        (True, 64), (False, 16), (True, 64), (True, 64), (True, 64),
    ]  # fmt: skip
    assert tile(O_PROJ, 16) == (True, 64)
    assert tile(GATE_UP, 8) == (True, 32)  # 32 gates and 32 ups


def test_few_inputs_take_a_step_of_hopper_no_longer_than_they_need():
    steps = [choose_linear(Product.WHOLE, 8, 96, inputs, 90, 16).block_k for inputs in (64, 128, 192, 576)]
    assert steps == [64, 128, 256, 256]


@pytest.mark.parametrize("kind, config", HOPPER_CONFIGS)
def test_shapes_of_hopper_are_what_its_instructions_and_copies_take_and_fit(kind, config):
    rows = config.block_n * (2 if kind is Product.GATED else 1)
    assert config.on_hopper and (config.num_warps, config.num_slices) == (4, 1)
    assert config.block_m in (8, 16, 32, 64, 128) and rows in (16, 32, 64, 128)
    assert config.block_k % 64 == 0 and config.block_k // 64 in (1, 2, 4)
    assert kind is Product.PARTIAL or config.max_splits == 1
    behind = max(0, 64 - rows) * 2 * config.block_k  # what an instruction reads beyond the last tile, in whole stages
    shared = config.num_stages * 2 * config.block_k * (rows + config.block_m) + behind + 1024
    assert shared <= SHARED_BYTES[90]


@pytest.mark.parametrize(
    "num_rows, out_features, takes",
    [
        (65, 8960, True),  # one tile of tokens: 94 of 132 SMs have one
        (128, 8960, True),
        (129, 8960, True),  # a wide tile
        (192, 8960, True),
        (193, 8960, False),  # 188 tiles: 1.4 waves
        (256, 8960, False),
        (257, 8960, True),  # 282 tiles: 2.1
        (512, 8960, True),
        (8192, 8960, True),
        (128, 1536, True),
        (1024, 1536, False),  # 128 tiles
        (2048, 1536, False),  # 256 tiles
        (2049, 1536, True),
    ],
)
def test_tiles_of_many_gated_tokens_are_taken_where_they_fill_an_h200(num_rows, out_features, takes):
    assert linear_config.takes_gated_tiles(num_rows, out_features, 132) is takes


@pytest.mark.parametrize(
    "num_rows, out_features, num_sms, block_m, whole, halves",
    [
        (128, 8960, 132, 128, 94, 0),
        (129, 8960, 132, 192, 94, 0),
        (192, 132 * 96, 132, 192, 132, 0),
        (192, 133 * 96, 132, 128, 264, 4),  # no wave of wide tiles holds 133
        (192, 8960, 78, 128, 156, 64),
        (128, 133 * 96, 132, 128, 132, 2),
        (128, 198 * 96, 132, 128, 132, 132),  # half of the SMs would have none
        (128, 199 * 96, 132, 128, 199, 0),
        (256, 8960, 132, 128, 132, 112),
        (512, 8960, 132, 128, 376, 0),  # 2.85 waves
        (2048, 8960, 132, 128, 1452, 104),
    ],
)
def test_tiles_are_wide_in_one_wave_and_the_last_ones_halved_where_half_of_the_sms_would_have_none(
    num_rows, out_features, num_sms, block_m, whole, halves
):
    tiles = linear_config.divide_gated(num_rows, out_features, num_sms)
    assert (tiles.block_m, tiles.num_whole, tiles.num_halves) == (block_m, whole, halves)


def test_whole_tiles_and_halves_are_all_tiles_and_no_program_has_two_halves():
    for num_sms, num_rows, num_outputs in itertools.product(
        (78, 114, 132), (1, 65, 128, 129, 192, 193, 1000), range(1, 420)
    ):
        tiles = linear_config.divide_gated(num_rows, 96 * num_outputs - 8, num_sms)
        assert tiles.num_output_tiles == num_outputs and tiles.num_token_tiles * tiles.block_m >= num_rows
        assert tiles.num_whole + tiles.num_halves / 2 == tiles.num_token_tiles * num_outputs
        assert tiles.num_halves <= min(tiles.num_whole, num_sms)
        assert tiles.block_m == 128 or (tiles.num_halves == 0 and tiles.num_token_tiles == 1)


@pytest.mark.parametrize("config", [config for shapes in linear_config._SHAPES.values() for config in shapes])
def test_tiles_are_powers_of_two_that_a_matrix_product_takes(config):
    sizes = (config.block_m, config.block_n, config.block_k)
    assert all(size & (size - 1) == 0 for size in sizes)
    assert config.block_m == 1 or (config.block_m >= 8 and all(size >= 16 for size in sizes[1:]))
    assert config.num_slices in (1, config.num_warps)
    assert config.num_warps in (1, 2, 4, 8) and 1 <= config.num_stages <= 4


@pytest.mark.parametrize("table", linear_config._HOPPER_SHAPES.values())
def test_shapes_of_hopper_are_listed_by_growing_number_of_tokens(table):
    assert list(table) == sorted(table)
    for most, shapes in table.items():
        assert all(most <= shape.block_m or most > 128 for shape in shapes)


@pytest.mark.parametrize("shapes", linear_config._SHAPES.values())
def test_shapes_are_listed_by_growing_number_of_tokens(shapes):
    sizes = [config.block_m for config in shapes]
    assert sizes == sorted(set(sizes)) and sizes[0] == 1
