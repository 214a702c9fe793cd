"""Launch shapes of the products of few tokens: tiles, and into how many splits the inputs go.

Host arithmetic on shapes alone; knows nothing of Triton. A fixed choice for every number of tokens (one tile, one
split) would be made here.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from dataclasses import dataclass


class Product(enum.Enum):
    """What becomes of a product, as far as a launch shape depends on it."""

    WHOLE = enum.auto()
    PARTIAL = enum.auto()
    GATED = enum.auto()


@dataclass(frozen=True, slots=True)
class LinearConfig:
    """Shape of one launch.

    Attributes:
        block_m: tokens of a tile, 1 or a power of two from 8 on; 1 is for one token alone.
        block_n, block_k: outputs (of each half, if gated) and inputs of a tile.
        num_warps, num_stages: as Triton means them.
        max_splits: programs that share the inputs of one output at most.
        num_slices: tiles side by side along the inputs in one program, one a warp.
        on_hopper: of the kernel for Hopper (``linear_hopper``): 4 warps, block_k a multiple of 64.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int = 1
    max_splits: int = 1
    num_slices: int = 1
    on_hopper: bool = False

    def split(self, in_features: int) -> int:
        """Inputs of a program: a multiple of what it takes at a time."""
        at_once = self.block_k * self.num_slices
        tiles = -(-in_features // at_once)
        return -(-tiles // self.max_splits) * at_once

    def num_splits(self, in_features: int) -> int:
        """Programs that share the inputs of an output; none is empty."""
        return -(-in_features // self.split(in_features))


#: Tokens that a shape here is for at most.
MAX_ROWS = 256
#: Products with so many inputs have shapes of their own (down projections), and so have those with so many outputs
#: (lm_head).
_LONG, _WIDE = 4096, 32768

#: (kind, long or wide) → by growing block_m, 64 tokens at most; past the last, cuBLAS. Tuned one by one inside the
#: whole captured decode step of Qwen2.5-1.5B on an H200, 600 tokens of context (every candidate is in
#: benchmarks/results/h200_linear_tuning.json). The step takes, in µs, with these / with cuBLAS everywhere: 1,080 /
#: 1,570 at 1 token, 1,545 / 1,830 at 16, 1,685 / 1,820 at 32, 1,860 / 2,000 at 64.
_SHAPES: dict[tuple[Product, bool], tuple[LinearConfig, ...]] = {
    (Product.WHOLE, False): (
        LinearConfig(1, block_n=8, block_k=2048, num_warps=4),
        LinearConfig(8, block_n=16, block_k=128, num_warps=4, num_stages=2, num_slices=4),
        LinearConfig(16, block_n=16, block_k=128, num_warps=4, num_stages=2, num_slices=4),
        LinearConfig(32, block_n=32, block_k=256, num_warps=4, num_stages=3),
    ),
    (Product.WHOLE, True): (
        LinearConfig(1, block_n=4, block_k=512, num_warps=4),
        LinearConfig(16, block_n=128, block_k=64, num_warps=4, num_stages=4),
        LinearConfig(32, block_n=64, block_k=128, num_warps=4, num_stages=3),
    ),
    (Product.PARTIAL, False): (
        LinearConfig(1, block_n=4, block_k=2048, num_warps=2),
        LinearConfig(8, block_n=16, block_k=256, num_warps=4, num_stages=2, max_splits=2, num_slices=4),
        LinearConfig(16, block_n=64, block_k=256, num_warps=4, num_stages=3, max_splits=6),
        LinearConfig(32, block_n=64, block_k=128, num_warps=4, num_stages=3, max_splits=4),
        LinearConfig(64, block_n=64, block_k=128, num_warps=4, num_stages=3, max_splits=4),
    ),
    (Product.PARTIAL, True): (
        LinearConfig(1, block_n=4, block_k=2048, num_warps=4, max_splits=2),
        LinearConfig(8, block_n=16, block_k=256, num_warps=4, num_stages=3, max_splits=3, num_slices=4),
        LinearConfig(16, block_n=64, block_k=256, num_warps=4, num_stages=3, max_splits=5),
        LinearConfig(32, block_n=64, block_k=128, num_warps=8, num_stages=4, max_splits=5),
        LinearConfig(64, block_n=64, block_k=128, num_warps=4, num_stages=4, max_splits=5),
    ),
    (Product.GATED, False): (
        LinearConfig(1, block_n=4, block_k=512, num_warps=2),
        LinearConfig(16, block_n=64, block_k=64, num_warps=4, num_stages=4),
        LinearConfig(32, block_n=64, block_k=64, num_warps=4, num_stages=4),
        LinearConfig(64, block_n=64, block_k=64, num_warps=4, num_stages=3),
    ),
}


def _on_hopper(block_m: int, block_n: int, block_k: int, num_stages: int, max_splits: int = 1) -> LinearConfig:
    return LinearConfig(block_m, block_n, block_k, 4, num_stages, max_splits, on_hopper=True)


#: On Hopper, for what its kernel can take: up to so many tokens → shapes, of which the first that it takes counts.
#: Where there is none, that of ``_SHAPES`` or cuBLAS was as fast (of lm_head up to 16 tokens 5 µs of the step slower).
#: Found in the same way (benchmarks/results/h200_linear_hopper_tuning.txt, above 64 tokens
#: h200_gated_hopper_tuning.txt). The step takes, in µs, without / with the kernels for Hopper: 1,347 / 1,190 at 8,
#: 1,420 / 1,329 at 16, 1,638 / 1,460 at 32, 1,868 / 1,602 at 64, 2,378 / 2,211 at 96, 2,621 / 2,338 at 128, 3,115 /
#: 2,961 at 160, 3,514 / 3,174 at 192, 3,607 / 3,342 at 224, 3,734 / 3,635 at 256.
_HOPPER_SHAPES: dict[tuple[Product, bool], dict[int, tuple[LinearConfig, ...]]] = {
    (Product.WHOLE, False): {
        8: (
            _on_hopper(8, block_n=32, block_k=256, num_stages=6),
            _on_hopper(8, block_n=64, block_k=128, num_stages=6),
        ),
        16: (_on_hopper(16, block_n=16, block_k=256, num_stages=6),),
        32: (
            _on_hopper(32, block_n=32, block_k=256, num_stages=6),
            _on_hopper(32, block_n=64, block_k=128, num_stages=6),
        ),
        64: (_on_hopper(64, block_n=64, block_k=128, num_stages=6),),
        96: (),
        128: (
            _on_hopper(128, block_n=32, block_k=128, num_stages=4),
            _on_hopper(128, block_n=64, block_k=64, num_stages=6),
        ),
        256: (_on_hopper(64, block_n=64, block_k=128, num_stages=6),),
    },
    (Product.WHOLE, True): {
        16: (),
        32: (_on_hopper(32, block_n=64, block_k=128, num_stages=4),),
        64: (_on_hopper(64, block_n=128, block_k=64, num_stages=4),),
    },
    (Product.PARTIAL, False): {
        8: (_on_hopper(8, block_n=64, block_k=128, num_stages=4, max_splits=3),),
        16: (
            _on_hopper(16, block_n=32, block_k=256, num_stages=3, max_splits=2),
            _on_hopper(16, block_n=64, block_k=128, num_stages=4, max_splits=3),
        ),
        32: (_on_hopper(32, block_n=64, block_k=128, num_stages=4, max_splits=3),),
        64: (_on_hopper(64, block_n=64, block_k=128, num_stages=4, max_splits=3),),
        128: (_on_hopper(128, block_n=64, block_k=128, num_stages=4, max_splits=3),),
        224: (_on_hopper(128, block_n=64, block_k=128, num_stages=4, max_splits=2),),
    },
    (Product.PARTIAL, True): {
        8: (_on_hopper(8, block_n=128, block_k=128, num_stages=4, max_splits=10),),
        16: (),
        32: (_on_hopper(32, block_n=64, block_k=256, num_stages=3, max_splits=5),),
        64: (_on_hopper(64, block_n=64, block_k=128, num_stages=6, max_splits=5),),
        128: (_on_hopper(128, block_n=64, block_k=128, num_stages=3, max_splits=5),),
        160: (),
        256: (_on_hopper(128, block_n=128, block_k=64, num_stages=6, max_splits=5),),
    },
    (Product.GATED, False): {
        8: (_on_hopper(8, block_n=32, block_k=128, num_stages=4),),
        16: (_on_hopper(16, block_n=64, block_k=64, num_stages=6),),
        32: (),
        64: (_on_hopper(64, block_n=64, block_k=64, num_stages=4),),
    },
}

#: A tile of the kernel for Hopper that multiplies many tokens and gates: tokens, those of a wide one, outputs.
GATED_BLOCK_M, GATED_WIDE_BLOCK_M, GATED_BLOCK_N = 128, 192, 96


def shape_class(kind: Product, out_features: int, in_features: int) -> tuple[Product, bool]:
    """What shapes are tuned for: (kind, whether it is a long one, if partial, or a wide one, if whole)."""
    is_special = {
        Product.WHOLE: out_features >= _WIDE,
        Product.PARTIAL: in_features >= _LONG,
        Product.GATED: False,
    }
    return kind, is_special[kind]


@functools.cache
def choose_linear(
    kind: Product,
    num_rows: int,
    out_features: int,
    in_features: int,
    architecture: int,
    smallest_hopper_tile: int | None = None,
) -> LinearConfig | None:
    """The shape for so many tokens; None = cuBLAS is faster, or for a gated product ``takes_gated_tiles``.

    Args:
        kind: of the product.
        num_rows: tokens, at least 1.
        out_features: of the result: of a gated product half of the weight's rows.
        in_features: of the weight.
        architecture: of the device; 90 is sm_90.
        smallest_hopper_tile: rows of weights that a tile of the kernel for Hopper has at least; None = it can't take
            the operands.
    """
    product = shape_class(kind, out_features, in_features)
    config = next((shape for shape in _SHAPES[product] if num_rows <= shape.block_m), None)
    if smallest_hopper_tile is not None and architecture == 90 and num_rows > 1:
        min_block_n = smallest_hopper_tile // (2 if kind is Product.GATED else 1)
        shapes = next((shapes for most, shapes in _HOPPER_SHAPES[product].items() if num_rows <= most), ())
        config = next((shape for shape in shapes if shape.block_n >= min_block_n), config)
    if config is None:
        return None
    block_k = min(config.block_k, max(16, _next_power_of_2(in_features)))
    # Tuned for 227 KB of shared memory; others have 99.
    num_stages = config.num_stages if architecture == 90 else min(config.num_stages, 2)
    return dataclasses.replace(config, block_k=block_k, num_stages=num_stages)


@dataclass(frozen=True, slots=True)
class GatedTiles:
    """How the results of a gated product of many tokens are divided.

    Attributes:
        block_m: tokens of a tile.
        num_token_tiles, num_output_tiles: in each direction.
        num_whole: tiles that are computed whole, the first ones; at least one for each program.
        num_halves: of the others, as many halves; 0 where tiles are wide.
    """

    block_m: int
    num_token_tiles: int
    num_output_tiles: int
    num_whole: int
    num_halves: int


@functools.cache
def divide_gated(num_rows: int, out_features: int, num_sms: int) -> GatedTiles:
    """Wide tiles where one wave of them holds all. Otherwise the last tiles are halved where half of the SMs or more
    would have none of them.

    Args:
        num_rows: tokens.
        out_features: of the result.
        num_sms: of the device, which computes a tile on each at a time.
    """
    num_output_tiles = -(-out_features // GATED_BLOCK_N)
    if GATED_BLOCK_M < num_rows <= GATED_WIDE_BLOCK_M and num_output_tiles <= num_sms:
        return GatedTiles(GATED_WIDE_BLOCK_M, 1, num_output_tiles, num_output_tiles, 0)
    num_token_tiles = -(-num_rows // GATED_BLOCK_M)
    num_tiles = num_token_tiles * num_output_tiles
    num_last = num_tiles % num_sms
    is_halved = num_tiles > num_sms and 2 * num_last <= num_sms
    num_whole = num_tiles - num_last if is_halved else num_tiles
    return GatedTiles(GATED_BLOCK_M, num_token_tiles, num_output_tiles, num_whole, 2 * (num_tiles - num_whole))


def takes_gated_tiles(num_rows: int, out_features: int, num_sms: int) -> bool:
    """Whether a gated product is faster in the tiles of the kernel for many tokens than in two ops.

    Tiles are computed in waves, one on each SM at a time, and of the last one or its halves some SMs have none. One
    tile of tokens is bound by reading the weights; with more it takes two whole waves.

    Args:
        num_rows: tokens, more than ``choose_linear`` has a shape for.
        out_features: of the result.
        num_sms: of the device.
    """
    tiles = divide_gated(num_rows, out_features, num_sms)
    return tiles.num_token_tiles == 1 or tiles.num_whole >= 2 * num_sms


def _next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()
