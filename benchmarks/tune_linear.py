"""Launch shapes of the products of few tokens, one product at a time inside a whole decode step.

    python benchmarks/tune_linear.py --out tuning.json       (one GPU; about a minute a number of tokens)

A product that is timed alone finds the device empty; in a step it starts while its predecessor ends. So every candidate
is timed as part of the captured decode step of a Qwen2.5-1.5B with random weights, 600 tokens of context a sequence:
first every candidate of a product, the others as they are, then the best five once more. A candidate is checked against
the reference first. The winners go into ``kernels/linear_config.py``; the run that the present ones came from is
benchmarks/results/h200_linear_tuning.json.

``--ablate`` adds what the step saves when an operation is left out. ``--device cpu`` tries all of this with a tiny
model in Triton's interpreter (TRITON_INTERPRET=1), where the times mean nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from pico_vllm.bench.decode_step import QWEN2_5_1_5B, TINY, DecodeStep
from pico_vllm.bench.kernels import MAX_RELATIVE_ERROR, relative_error
from pico_vllm.bench.timing import FULL_BUDGET, QUICK_BUDGET, Budget
from pico_vllm.environment import collect_environment
from pico_vllm.kernels import linear_triton
from pico_vllm.kernels.attention_config import device_of
from pico_vllm.kernels.linear import LinearWeight, linear_reference
from pico_vllm.kernels.linear_config import (
    GATED_BLOCK_M,
    GATED_BLOCK_N,
    LinearConfig,
    Product,
    choose_linear,
    shape_class,
    takes_gated_tiles,
)
from pico_vllm.kernels.parallel_compile import compiling_only
from pico_vllm.kernels.swiglu import swiglu_reference
from pico_vllm.kernels.triton_backend import TRITON

WHAT = (
    "Launch shapes of few-token products, by number of tokens. 'rows': a shape -> µs of the whole captured decode step "
    "with it, fastest first. A shape is tokens x outputs x inputs of a tile, into how many splits the inputs go, "
    "warps, stages; 'for Hopper': of the kernel that sm_90 has. 'final_us': the step with 'shapes'; 'cublas_us': with "
    "cuBLAS for every product; 'ablation_us': what the step saves when an operation is left out."
)
#: Positions of each sequence.
CONTEXT = 600

#: (kind, long or wide) → what to try. At one token a program keeps its tile in registers: no stages.
_Class = tuple[Product, bool]
Table = dict[_Class, LinearConfig | None]
_ONE_ROW: dict[_Class, dict[str, tuple[int, ...]]] = {
    (Product.WHOLE, False): {"block_n": (2, 4, 8, 16), "block_k": (512, 2048), "num_warps": (2, 4, 8)},
    (Product.WHOLE, True): {"block_n": (4, 8, 16), "block_k": (512, 2048), "num_warps": (4, 8)},
    (Product.PARTIAL, False): {"block_n": (2, 4, 8, 16), "block_k": (512, 2048), "num_warps": (2, 4, 8)}
    | {"max_splits": (1, 3)},
    (Product.PARTIAL, True): {"block_n": (4, 8, 16), "block_k": (512, 1024, 2048), "num_warps": (4, 8)}
    | {"max_splits": (2, 3, 5, 9)},
    (Product.GATED, False): {"block_n": (1, 2, 4, 8), "block_k": (512, 2048), "num_warps": (1, 2, 4, 8)},
}
_FEW_ROWS: dict[_Class, dict[str, tuple[int, ...]]] = {
    (Product.WHOLE, False): {"block_n": (16, 32, 64), "block_k": (128, 256, 512), "num_stages": (2, 3)},
    (Product.WHOLE, True): {"block_n": (64, 128), "block_k": (64, 128, 256), "num_stages": (3, 4)},
    (Product.PARTIAL, False): {"block_n": (32, 64), "block_k": (128, 256, 512), "num_stages": (3,)}
    | {"max_splits": (2, 3, 4, 6, 12)},
    (Product.PARTIAL, True): {"block_n": (32, 64), "block_k": (128, 256), "num_stages": (3, 4)}
    | {"max_splits": (4, 5, 7, 9, 12)},
    (Product.GATED, False): {"block_n": (16, 32, 64), "block_k": (64, 128, 256), "num_stages": (2, 3, 4)},
}
#: Of more than 64 tokens.
_MANY_ROWS: dict[_Class, dict[str, tuple[int, ...]]] = {
    (Product.WHOLE, False): {"block_m": (64, 128), "block_n": (32, 64, 128), "block_k": (64, 128)}
    | {"num_stages": (3, 4)},
    (Product.WHOLE, True): {"block_m": (128, 256), "block_n": (64, 128), "block_k": (64,), "num_stages": (3, 4)},
    (Product.PARTIAL, False): {"block_m": (64, 128), "block_n": (64, 128), "block_k": (64, 128)}
    | {"num_stages": (3, 4), "max_splits": (1, 2, 3, 4, 6)},
    (Product.PARTIAL, True): {"block_m": (128, 256), "block_n": (64, 128), "block_k": (64, 128)}
    | {"num_stages": (3, 4), "max_splits": (3, 4, 5, 7, 10)},
    (Product.GATED, False): {"block_m": (64, 128, 256), "block_n": (32, 64, 128), "block_k": (64, 128)}
    | {"num_stages": (3, 4)},
}
#: Of up to 32 tokens, with a slice of the inputs a warp.
_SLICED: dict[_Class, dict[str, tuple[int, ...]]] = {
    (Product.WHOLE, False): {"max_splits": (1,)},
    (Product.WHOLE, True): {"max_splits": (1,)},
    (Product.PARTIAL, False): {"max_splits": (1, 2, 3)},
    (Product.PARTIAL, True): {"max_splits": (3, 5, 9)},
    (Product.GATED, False): {"max_splits": (1,)},
}
_SLICED_TILES = {"block_n": (16, 32), "block_k": (64, 128, 256), "num_stages": (2, 3)}
#: Of 2 to 256 tokens on Hopper, for the kernel that it has.
_HOPPER: dict[_Class, dict[str, tuple[int, ...]]] = {
    (Product.WHOLE, False): {"block_n": (16, 32, 64), "block_k": (64, 128, 256), "num_stages": (4, 6, 8)},
    (Product.WHOLE, True): {"block_n": (64, 128), "block_k": (64, 128), "num_stages": (3, 4, 6)},
    (Product.PARTIAL, False): {"block_n": (32, 64), "block_k": (128, 256), "num_stages": (3, 4)}
    | {"max_splits": (2, 3, 4, 6)},
    (Product.PARTIAL, True): {"block_n": (64, 128), "block_k": (64, 128, 256), "num_stages": (3, 4, 6)}
    | {"max_splits": (5, 7, 10)},
    (Product.GATED, False): {"block_n": (32, 64), "block_k": (64, 128), "num_stages": (3, 4, 6)},
}
#: Stands for the kernel for gated products of many tokens there, which has one shape.
_GATED_TILES = LinearConfig(GATED_BLOCK_M, GATED_BLOCK_N, block_k=64, num_warps=4, num_stages=5, on_hopper=True)
_OPS: dict[Product, str] = {
    Product.WHOLE: "linear",
    Product.PARTIAL: "partial_linear",
    Product.GATED: "gated_linear",
}


def main() -> None:
    """Tune at each number of tokens, write the record, print the best three of each product."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 16, 32, 64, 128, 256])
    parser.add_argument("--max-candidates", type=int, help="of each product, at most; default: all")
    parser.add_argument("--ablate", action="store_true", help="also leave out one operation after the other")
    parser.add_argument("--device", default="cuda", help="cuda or cpu")
    args = parser.parse_args()
    on_gpu = args.device != "cpu"
    if on_gpu:
        step = DecodeStep(QWEN2_5_1_5B, torch.bfloat16, torch.device("cuda", 0))
    else:
        step = DecodeStep(TINY, torch.float16, torch.device("cpu"))
    record: dict[str, Any] = {"what": WHAT, "environment": dataclasses.asdict(collect_environment()), "tokens": {}}
    for num_tokens in args.tokens:
        found = tune(step, num_tokens, args.max_candidates, ablate=args.ablate)
        record["tokens"][num_tokens] = found
        args.out.write_text(json.dumps(record, indent=1, ensure_ascii=False, default=str) + "\n")
        print(f"{num_tokens} tokens: {found['final_us']:.1f} µs, with cuBLAS alone {found['cublas_us']:.1f}")
        for name, rows in found["rows"].items():
            print(f"  {name}:", *(f"{us:.1f} ({shape})" for shape, us in list(rows.items())[:3]))


def hopper_candidates(product: _Class, num_tokens: int) -> list[LinearConfig]:
    """Shapes of the kernel for Hopper whose ring is in shared memory."""
    if product[0] is Product.GATED and num_tokens > 64:
        return [_GATED_TILES]
    if not 2 <= num_tokens <= 256:
        return []
    table = _HOPPER[product]
    tiles = (max(8, 1 << (num_tokens - 1).bit_length()),) if num_tokens <= 128 else (64, 128)
    configs = [
        LinearConfig(block_m, num_warps=4, on_hopper=True, **dict(zip(table, values, strict=True)))
        for block_m in tiles
        for values in itertools.product(*table.values())
    ]

    def fits(config: LinearConfig) -> bool:
        rows = config.block_n * (2 if product[0] is Product.GATED else 1)
        read_behind = max(0, 64 - rows)
        return 2 * config.block_k * (config.num_stages * (rows + config.block_m) + read_behind) <= 226 << 10

    return [config for config in configs if fits(config)]


def candidates(product: _Class, num_tokens: int) -> list[LinearConfig]:
    """Shapes that keep a thread's share of the weights in its registers and all stages in shared memory."""
    power = 1 << (num_tokens - 1).bit_length()
    tables: list[dict[str, tuple[int, ...]]] = []
    if num_tokens == 1:
        tables.append({"block_m": (1,), **_ONE_ROW[product]})
    elif num_tokens <= 64:
        tables.append({"block_m": (max(16, power),), **_FEW_ROWS[product]})
    else:
        tables.append(_MANY_ROWS[product])
    if 2 <= num_tokens <= 32:
        tables += [
            {"block_m": (max(8, power),), **_SLICED_TILES, **_SLICED[product], "num_warps": (n,), "num_slices": (n,)}
            for n in (4, 8)
        ]
    configs = [
        LinearConfig(**dict(zip(grid, values, strict=True)))
        for grid in ({"num_warps": (4, 8), **table} for table in tables)
        for values in itertools.product(*grid.values())
    ]
    halves = 2 if product[0] is Product.GATED else 1

    def fits(config: LinearConfig) -> bool:
        inputs = config.block_k * config.num_slices
        a_thread = halves * config.block_n * inputs // (32 * config.num_warps)
        sums = halves * config.block_n * config.block_m * config.num_slices // (32 * config.num_warps)
        tile_bytes = 2 * (halves * config.block_n + config.block_m) * inputs
        in_memory = config.block_m == 1 or tile_bytes * config.num_stages <= 200 << 10
        return 8 <= a_thread <= 128 and sums <= 128 and config.block_m <= max(power, 8) and in_memory

    return [config for config in configs if fits(config)]


@contextmanager
def choosing(table: Table, num_tokens: int) -> Iterator[None]:
    """Inside, products of up to ``num_tokens`` take their shapes from ``table``, which may change; None is cuBLAS."""

    def choose(kind: Product, num_rows: int, out_features: int, in_features: int, *_: Any) -> Any:
        config = table[shape_class(kind, out_features, in_features)]
        return None if config == _GATED_TILES else config

    with (
        patch.object(linear_triton, "choose_linear", choose),
        patch.object(linear_triton, "takes_gated_tiles", lambda *_: table[Product.GATED, False] == _GATED_TILES),
        patch.object(linear_triton, "MAX_ROWS", num_tokens),
    ):
        yield


def tune(step: DecodeStep, num_tokens: int, max_candidates: int | None, *, ablate: bool) -> dict[str, Any]:
    """The best shape of each product, what the step takes with all of them, and every row on the way."""
    table: Table = {}
    rows: dict[str, dict[str, float]] = {}
    with choosing(table, num_tokens):
        table.update(dict.fromkeys(map(class_of, step.weights.values())))
        cublas_s = step.seconds(contexts(num_tokens))
        for kind, weight in step.weights.values():  # as they are now
            shape = class_of((kind, weight))
            table[shape] = present(kind, weight, step.tokens(num_tokens, weight.in_features))
        searches = [candidates]
        if device_of(step.device.index).architecture == 90 and linear_triton.launch_hopper_linear is not None:
            searches.append(hopper_candidates)
        tried = {
            name: [config for search in searches for config in search(class_of(product), num_tokens)[:max_candidates]]
            for name, product in step.weights.items()
        }
        compile_all(step, tried, table, num_tokens)
        for budget in (QUICK_BUDGET, FULL_BUDGET):
            for name, product in step.weights.items():
                timed = time_each(step, name, product, tried[name], table, num_tokens, budget)
                table[class_of(product)] = timed[0][1]
                tried[name] = [config for _, config in timed if config is not None][:5]
                rows.setdefault(name, {shape_name(config): round(1e6 * seconds, 1) for seconds, config in timed})
        found: dict[str, Any] = {"cublas_us": round(1e6 * cublas_s, 1)}
        found["final_us"] = round(1e6 * step.seconds(contexts(num_tokens)), 1)
        found["shapes"] = {name: shape_name(table[class_of(product)]) for name, product in step.weights.items()}
        if ablate:
            found["ablation_us"] = ablation(step, num_tokens)
    return {**found, "rows": rows}


def compile_all(step: DecodeStep, tried: dict[str, list[LinearConfig]], table: Table, num_tokens: int) -> None:
    """Compile every candidate on all cores; one that doesn't compile says so when it is tried."""
    if step.device.type == "cpu":
        return
    before = dict(table)
    with suppress(Exception), compiling_only(step.device):
        for name, (kind, weight) in step.weights.items():
            x = step.tokens(num_tokens, weight.in_features)
            for config in tried[name]:
                table[class_of((kind, weight))] = config
                getattr(TRITON, _OPS[kind])(x, weight)
    table.update(before)


def time_each(
    step: DecodeStep,
    name: str,
    product: tuple[Product, LinearWeight],
    configs: list[LinearConfig],
    table: Table,
    num_tokens: int,
    budget: Budget,
) -> list[tuple[float, LinearConfig | None]]:
    """(seconds of the step, shape) of each candidate that works, of the present shape and of cuBLAS; fastest first."""
    timed: list[tuple[float, LinearConfig | None]] = []
    for config in dict.fromkeys([table[class_of(product)], None, *configs]):
        table[class_of(product)] = config
        try:
            check(step, *product, num_tokens)
            timed.append((step.seconds(contexts(num_tokens), budget=budget), config))
        except Exception as error:  # too much shared memory, a shape that Triton doesn't take
            print(f"  {name}, {shape_name(config)}: {type(error).__name__}: {str(error).strip()[:80]}")
    return sorted(timed, key=lambda row: row[0])


def check(step: DecodeStep, kind: Product, weight: LinearWeight, num_tokens: int) -> None:
    """Raise unless the op gives what the reference gives, as near as ``bench kernels`` wants it."""
    x = step.tokens(num_tokens, weight.in_features)
    y = getattr(TRITON, _OPS[kind])(x, weight)
    actual = y if y.dim() == 2 else y.sum(dim=0)
    truth = linear_reference(x.float(), weight)
    error = relative_error(actual, swiglu_reference(truth) if kind is Product.GATED else truth)
    if error > MAX_RELATIVE_ERROR[actual.dtype]:
        raise ArithmeticError(f"relative error {error:.2g}")


def ablation(step: DecodeStep, num_tokens: int) -> dict[str, float]:
    """µs that the step saves without an operation: it gives what it gave the first time it was called with a weight."""
    whole = step.seconds(contexts(num_tokens))
    kept: dict[Any, Any] = {}

    def once(op: Callable[..., Any], is_left_out: Callable[..., bool]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if not is_left_out(*args):
                return op(*args)
            key = (op, id(args[1]))
            if key not in kept:
                kept[key] = op(*args)
            return kept[key]

        return call

    def without(*ops: str, is_left_out: Callable[..., bool] = lambda *args: True) -> float:
        left_out = {name: once(getattr(TRITON, name), is_left_out) for name in ops}
        return 1e6 * (whole - step.seconds(contexts(num_tokens), dataclasses.replace(TRITON, **left_out)))

    saved = {}
    for name, (kind, weight) in step.weights.items():
        shape = (weight.out_features, weight.in_features)
        saved[name] = without(
            _OPS[kind], is_left_out=lambda x, w, shape=shape: (w.out_features, w.in_features) == shape
        )
    for name in ("rotary_decode_attention", "add_rms_norm"):
        saved[name] = without(name)
    return {name: round(us, 1) for name, us in saved.items()}


def contexts(num_tokens: int) -> list[int]:
    """One sequence a token."""
    return [CONTEXT] * num_tokens


def shape_name(config: LinearConfig | None) -> str:
    """As a row shows it."""
    if config is None:
        return "cuBLAS"
    tile = f"{config.block_m}x{config.block_n}x{config.block_k}"
    slices = f", slices {config.num_slices}" if config.num_slices > 1 else ""
    on_hopper = ", for Hopper" if config.on_hopper else ""
    return (
        f"{tile}, splits {config.max_splits}, warps {config.num_warps}, stages {config.num_stages}{slices}{on_hopper}"
    )


def present(kind: Product, weight: LinearWeight, x: torch.Tensor) -> LinearConfig | None:
    """The shape that the product has today."""
    takes, device = linear_triton.smallest_hopper_tile, device_of(x.device.index)
    smallest_tile = takes(x, weight) if takes is not None else None
    config = choose_linear(kind, len(x), results(kind, weight), weight.in_features, device.architecture, smallest_tile)
    is_gated = config is None and kind is Product.GATED and smallest_tile is not None and device.architecture == 90
    if is_gated and takes_gated_tiles(len(x), results(kind, weight), device.num_sms):
        return _GATED_TILES
    return config


def class_of(product: tuple[Product, LinearWeight]) -> _Class:
    """What its launch shape is chosen by."""
    kind, weight = product
    return shape_class(kind, results(kind, weight), weight.in_features)


def results(kind: Product, weight: LinearWeight) -> int:
    """Outputs of a product."""
    return weight.out_features // (2 if kind is Product.GATED else 1)


if __name__ == "__main__":
    main()
