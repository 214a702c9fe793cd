"""The products of few tokens at every shape of Qwen2.5-1.5B, SmolLM2-135M and Qwen3-0.6B.

On sm_90 those of the kernels for Hopper and, for what these don't take, of the others.
"""

from __future__ import annotations

from typing import Any

from compile_cases import CompileCase
from linear_shapes import MODELS, ProductShape
from pico_vllm.kernels import linear_triton
from pico_vllm.kernels.linear_config import LinearConfig, Product, choose_linear


def compile_cases(architecture: int) -> list[CompileCase]:
    """One case a number of tokens at which the launch shape changes, a product and a model; bf16."""
    few = [
        _hopper_case(f"hopper linear {model} {shape.name}", shape, config)
        if config.on_hopper
        else _case(f"linear {model} {shape.name}", shape, num_rows, config, architecture)
        for model, shapes in MODELS.items()
        for shape in shapes
        for num_rows in (1, 8, 16, 32, 64, 128, 160, 192, 256)
        for config in _configs(shape, num_rows, architecture)
    ]
    few = list({case.name: case for case in few}.values())  # some serve several numbers of tokens
    if architecture != 90 or linear_triton.launch_hopper_gated is None:
        return few
    gated = ((model, shape) for model, shapes in MODELS.items() for shape in shapes if shape.kind is Product.GATED)
    return few + [
        _hopper_gated_case(f"hopper many gated {model} {num_rows}", shape, num_rows)
        for model, shape in gated
        for num_rows in (128, 192)
    ]


def _configs(shape: ProductShape, num_rows: int, architecture: int) -> list[LinearConfig]:
    """What may be chosen, whatever the operands, with this triton."""
    smallest_tiles: list[int | None] = [None]
    if linear_triton.launch_hopper_linear is not None:
        from pico_vllm.kernels.linear_hopper import SMALLEST_TILE

        smallest_tiles += [rows for rows in (16, 64) if rows >= SMALLEST_TILE]
    configs = [
        choose_linear(shape.kind, num_rows, shape.out_features, shape.in_features, architecture, rows)
        for rows in smallest_tiles
    ]
    return [config for config in dict.fromkeys(configs) if config is not None]


def _case(name: str, shape: ProductShape, num_rows: int, config: LinearConfig, architecture: int) -> CompileCase:
    one_row = num_rows == 1
    kernel = linear_triton._one_row_kernel if one_row else linear_triton._few_rows_kernel
    if config.num_slices > 1:
        kernel = linear_triton._sliced_kernel
    constexprs: dict[str, Any] = {
        "IN_FEATURES": shape.in_features,
        "SPLIT": config.split(shape.in_features),
        "HAS_BIAS": shape.has_bias,
        "IS_PARTIAL": shape.kind is Product.PARTIAL,
        "IS_GATED": shape.kind is Product.GATED,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "PDL": architecture >= 90,
    }
    integers = {"out_features": "i32"}
    if not one_row:
        constexprs |= {"BLOCK_M": config.block_m, "NUM_STAGES": config.num_stages}
        integers |= {"num_rows": "i32", "x_stride": "i32"}
    if config.num_slices > 1:
        constexprs["NUM_SLICES"] = config.num_slices
    y = "*fp32" if shape.kind is Product.PARTIAL else "*bf16"
    return CompileCase(
        name=f"{name} {num_rows} tokens",
        kernel=kernel,
        signature={"x": "*bf16", "weight": "*bf16", "bias": "*bf16", "y": y} | integers,
        constexprs=constexprs,
        divisible=("out_features",) if one_row else ("out_features", "x_stride"),
        num_warps=config.num_warps,
    )


def _hopper_case(name: str, shape: ProductShape, config: LinearConfig) -> CompileCase:
    from pico_vllm.kernels import linear_hopper

    is_gated = shape.kind is Product.GATED
    steps, slices = config.split(shape.in_features) // config.block_k, config.block_k // 64
    weights, tokens = f"{slices}, {1 + is_gated}, {config.block_n}", f"{slices}, {config.block_m}"
    return CompileCase(
        name=f"{name} {config.block_m}x{config.block_n}x{config.block_k}"
        + (f" splits {config.max_splits}" if config.max_splits > 1 else ""),
        kernel=linear_hopper._hopper_linear_kernel,
        signature={
            "weight": f"tensordesc<bf16[{weights}, 64],{linear_hopper._WEIGHTS.value!r}>",
            "x": f"tensordesc<bf16[{tokens}, 64],{linear_hopper._TOKENS.value!r}>",
            "bias": "*bf16",
            "y": "*fp32" if shape.kind is Product.PARTIAL else "*bf16",
            **dict.fromkeys(("num_rows", "out_features", "num_tiles", "num_token_tiles"), "i32"),
        },
        constexprs={
            "STEPS": steps,
            "NUM_STAGES": min(config.num_stages, steps),
            "HAS_BIAS": shape.has_bias,
            "IS_PARTIAL": shape.kind is Product.PARTIAL,
            "IS_GATED": is_gated,
            "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n,
            "BLOCK_K": config.block_k,
        },
        divisible=("out_features",),
    )


def _hopper_gated_case(name: str, shape: ProductShape, block_m: int) -> CompileCase:
    from pico_vllm.kernels import gated_linear_hopper as gated

    steps = shape.in_features // gated._BLOCK_K.value
    num_stages = gated._NUM_STAGES if block_m == gated.GATED_BLOCK_M else gated._NUM_WIDE_STAGES
    return CompileCase(
        name=name,
        kernel=gated._hopper_gated_kernel,
        signature={
            "weight": f"tensordesc<bf16[4, 2, 8, 64],{gated._WEIGHTS.value!r}>",
            "x": f"tensordesc<bf16[64, 64],{gated._SWIZZLED.value!r}>",
            "bias": "*bf16",
            "y": f"tensordesc<bf16[64, 32],{gated._RESULTS.value!r}>",
            **dict.fromkeys(("out_features", "num_tiles", "num_halves", "num_token_tiles", "num_output_tiles"), "i32"),
        },
        constexprs={"STEPS": steps, "NUM_STAGES": num_stages, "HAS_BIAS": shape.has_bias, "BLOCK_M": block_m},
        divisible=("out_features",),
    )
