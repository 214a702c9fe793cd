"""What a layer's products take by number of tokens, beside the waves that ``models/token_tiles.py`` counts.

    python benchmarks/token_cuts.py --out cuts.json      (one GPU; about 15 seconds)

For each cut of a step in two parts: how much longer the products of a layer take than those of all tokens at once, as
measured and as counted. Sizes follow each other, so the last ones are measured on a GPU at its power limit, and the
first ones on one that isn't there yet: "again" is 8,192 tokens measured twice.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from pathlib import Path

import torch

from pico_vllm.bench.random_model import SHAPES
from pico_vllm.environment import collect_environment
from pico_vllm.kernels.linear import LinearWeight, pack_linear_dense
from pico_vllm.kernels.triton_backend import TRITON
from pico_vllm.models.token_tiles import Product

NUM_TOKENS, STEP = 8192, 256
COPIES, REPETITIONS = 3, 9  # weights of a product, one after the other
OPS = {"qkv": TRITON.linear, "o": TRITON.partial_linear, "gate_up": TRITON.gated_linear, "down": TRITON.partial_linear}


def main() -> None:
    """Measure, print a line a cut, write everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--shape", default="qwen2.5-7b", choices=SHAPES)
    parser.add_argument("--ranks", type=int, default=2, help="that share the layer")
    args = parser.parse_args()
    products = products_of(args.shape, args.ranks)
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    sizes = [*range(NUM_TOKENS // 4, 3 * NUM_TOKENS // 4 + 1, STEP), NUM_TOKENS]
    with torch.inference_mode():
        times = {name: measured_us(name, product, [*sizes, NUM_TOKENS]) for name, product in products.items()}
    for name, us in times.items():
        print(f"{name}: {NUM_TOKENS} tokens in {us[-2]:.0f} µs, again {us[-1]:.0f}")
    for cut in (size for size in sizes if size <= NUM_TOKENS // 2):
        parts = [sizes.index(cut), sizes.index(NUM_TOKENS - cut)]
        longer = {name: sum(us[i] for i in parts) - us[sizes.index(NUM_TOKENS)] for name, us in times.items()}
        counted = sum(counted_s(product, cut, num_sms) for product in products.values()) * 1e6
        each = ", ".join(f"{name} {us:+.0f}" for name, us in longer.items())
        print(f"{cut} + {NUM_TOKENS - cut}: {sum(longer.values()):+.0f} µs a layer ({each}), counted {counted:+.0f}")
    us_by_size = {name: dict(zip([*sizes, "again"], map(float, us), strict=True)) for name, us in times.items()}
    record = {"environment": dataclasses.asdict(collect_environment()), "shape": args.shape, "ranks": args.ranks}
    args.out.write_text(json.dumps(record | {"us": us_by_size}, indent=1, default=str))


def products_of(shape: str, ranks: int) -> dict[str, Product]:
    """A layer's, on one of so many ranks."""
    sizes = SHAPES[shape]
    hidden, heads, features = sizes["hidden_size"], sizes["num_attention_heads"], sizes["intermediate_size"] // ranks
    queries = hidden // ranks
    keys = hidden // heads * max(sizes["num_key_value_heads"] // ranks, 1)
    return {
        "qkv": Product(queries + 2 * keys, hidden),
        "o": Product(hidden, queries),
        "gate_up": Product(features, hidden, is_gated=True),
        "down": Product(hidden, features),
    }


def counted_s(product: Product, cut: int, num_sms: int) -> float:
    """Seconds by which two parts take longer."""
    parts = product.seconds(cut, num_sms) + product.seconds(NUM_TOKENS - cut, num_sms)
    return parts - product.seconds(NUM_TOKENS, num_sms)


def measured_us(name: str, product: Product, sizes: list[int]) -> list[float]:
    """Of each number of tokens, the median."""
    rows = product.out_features * (2 if product.is_gated else 1)
    weights = [make_weight(rows, product.in_features) for _ in range(COPIES)]
    tokens = torch.randn(NUM_TOKENS, product.in_features, device="cuda", dtype=torch.bfloat16)
    op = OPS[name]
    medians = []
    for size in sizes:
        x = tokens[:size]
        op(x, weights[0])
        times = []
        for _ in range(REPETITIONS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for weight in weights:
                op(x, weight)
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3 / COPIES)
        medians.append(statistics.median(times))
    return medians


def make_weight(out_features: int, in_features: int) -> LinearWeight:
    """Random numbers of a trained model's size."""
    dense = torch.randn(out_features, in_features, device="cuda", dtype=torch.bfloat16) * 0.02
    return pack_linear_dense(dense, None)


if __name__ == "__main__":
    main()
