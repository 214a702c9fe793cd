"""Where a step is cut in two, so that one part is summed over the ranks while the other is computed.

Arithmetic on shapes, for ``overlapped``. A product is computed in tiles of tokens and outputs, a wave of them at once,
one on each SM; two parts may need a wave more than all tokens at once, which costs more than it hides. So the cut comes
where the waves of both add up to the least, as near to the middle as that allows, or not at all.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

#: Tokens of a tile; cuts are multiples of it.
TILE_TOKENS = 128
#: Outputs of a tile of cuBLAS's products, and of gated ones, which have two weights each (``gated_linear_hopper``).
TILE_OUTPUTS, GATED_TILE_OUTPUTS = 256, 96
#: Seconds an SM needs for an output of a tile and one input: 128 tokens at an H200's 700 TFLOP/s, a 132nd of it each.
OUTPUT_S = 128 * 2 / (700e12 / 132)
#: A sum: bytes a second of a copy to a peer (h200x2_all_reduce.jsonl). What it takes beside, it takes in parts, too.
COPY_BYTES_PER_S = 364e9
#: What a slow host may need to launch a layer in two parts from Python: 28 layers took it 62 to 79 ms, and in one part
#: some 30 (h200x2_tensor_parallel_1.5b.jsonl). A shorter layer would wait for the host.
LAUNCH_S = 2.5e-3
#: Of a device whose time nobody has a model of, tokens from which on there are two halves.
MIN_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class Product:
    """What a layer multiplies by.

    Attributes:
        out_features, in_features: of this rank; of a gated product, those of its result.
        is_gated: two weights an output.
    """

    out_features: int
    in_features: int
    is_gated: bool = False

    def seconds(self, num_tokens: int, num_sms: int) -> float:
        """Of all waves."""
        outputs = GATED_TILE_OUTPUTS if self.is_gated else TILE_OUTPUTS
        num_tiles = -(-num_tokens // TILE_TOKENS) * -(-self.out_features // outputs)
        work = outputs * self.in_features * (2 if self.is_gated else 1)
        return math.ceil(num_tiles / num_sms) * work * OUTPUT_S


@functools.lru_cache(maxsize=1 << 15)
def choose_cut(
    num_tokens: int, products: tuple[Product, ...], row_bytes: int, num_sms: int | None, is_replayed: bool
) -> int | None:
    """Tokens of the first part; None = one part is faster.

    Args:
        num_tokens: of the step.
        products: of a layer, of which two are summed over the ranks.
        row_bytes: of a token's partial sums.
        num_sms: of the device; None = no model of it.
        is_replayed: the step, which costs the host nothing then.
    """
    if num_sms is None:
        return -(-num_tokens // (2 * TILE_TOKENS)) * TILE_TOKENS if num_tokens >= MIN_TOKENS else None

    def seconds(tokens: int) -> float:
        return sum(product.seconds(tokens, num_sms) for product in products)

    if not is_replayed and seconds(num_tokens) < LAUNCH_S:
        return None
    third = num_tokens // (3 * TILE_TOKENS) * TILE_TOKENS
    cuts = range(max(third, TILE_TOKENS), num_tokens - third, TILE_TOKENS)
    if not cuts:
        return None
    best = min(cuts, key=lambda cut: (seconds(cut) + seconds(num_tokens - cut), abs(2 * cut - num_tokens)))
    longer = seconds(best) + seconds(num_tokens - best) - seconds(num_tokens)
    hidden = 2 * num_tokens * row_bytes / COPY_BYTES_PER_S
    return best if hidden > longer else None
