"""Norms, SwiGLU, rotation + KV store and block copies at the shapes of Qwen2.5-1.5B, SmolLM2-135M and Qwen3-0.6B."""

from __future__ import annotations

import dataclasses

import triton.language as tl

from compile_cases import CompileCase
from pico_vllm.kernels import block_copy_triton, rms_norm_triton, rotary_embedding_and_store_kv_triton, swiglu_triton


def _rms_norm(name: str, dtype: str, hidden: int, block: int, rows: int, num_warps: int) -> CompileCase:
    return CompileCase(
        name=f"rms_norm-{name}",
        kernel=rms_norm_triton._rms_norm_kernel,
        signature={"x_ptr": dtype, "weight_ptr": dtype, "y_ptr": dtype, "token_stride": "i32", "head_stride": "i32"}
        | {"num_rows": "i32", "num_heads": "i32", "eps": "fp32"},
        constexprs={"HIDDEN": hidden, "BLOCK": block, "ROWS": rows},
        divisible=("token_stride", "head_stride"),
        num_warps=num_warps,
    )


def _add_rms_norm(
    name: str, dtype: str, hidden: int, block: int, rows: int, num_warps: int, num_splits: int = 1
) -> CompileCase:
    return CompileCase(
        name=f"add_rms_norm-{name}",
        kernel=rms_norm_triton._add_rms_norm_kernel,
        signature={"x_ptr": dtype, "residual_ptr": dtype, "weight_ptr": dtype, "y_ptr": dtype, "eps": "fp32"}
        | {"x_stride": "i32", "residual_stride": "i32", "num_rows": "i32"}
        | ({"x_ptr": "*fp32"} if num_splits > 1 else {}),
        constexprs={"NUM_SPLITS": num_splits, "HIDDEN": hidden, "BLOCK": block, "ROWS": rows},
        divisible=("x_stride", "residual_stride"),
        num_warps=num_warps,
    )


def _rotary(name: str, dtype: str, num_heads: int, num_kv_heads: int, head_dim: int, qk_norm: bool) -> CompileCase:
    block = 1 << (num_heads + 2 * num_kv_heads - 1).bit_length()
    strides = ("token_stride", "head_stride", "cos_sin_stride")
    strides += ("cache_block_stride", "cache_kv_stride", "cache_head_stride", "cache_slot_stride")
    pointers = ("heads_ptr", "cos_sin_ptr", "kv_cache_ptr", "q_weight_ptr", "k_weight_ptr")
    return CompileCase(
        name=f"rotary_embedding_and_store_kv-{name}",
        kernel=rotary_embedding_and_store_kv_triton._rotary_embedding_and_store_kv_kernel,
        signature=dict.fromkeys(pointers, dtype)
        | dict.fromkeys(strides, "i32")
        | {"slot_mapping_ptr": "*i32", "eps": "fp32"},
        constexprs={"NUM_HEADS": num_heads, "NUM_KV_HEADS": num_kv_heads, "HEADS_BLOCK": block, "HALF": head_dim // 2}
        | {"HALF_BLOCK": head_dim // 2, "CACHE_BLOCK_SIZE": 16, "HAS_QK_NORM": qk_norm},
        divisible=strides,
        num_warps=min(max(block * head_dim // 512, 1), 8),
        enable_fp_fusion=False,
    )


def _swiglu(name: str, dtype: str, compute: tl.dtype) -> CompileCase:
    return CompileCase(
        name=f"swiglu-{name}",
        kernel=swiglu_triton._swiglu_kernel,
        signature={"gate_up_ptr": dtype, "y_ptr": dtype, "row_stride": "i32", "intermediate_size": "i32"}
        | {"blocks_a_row": "i32"},
        constexprs={"COMPUTE": compute, "BLOCK": swiglu_triton._BLOCK},
        divisible=("row_stride", "intermediate_size"),
        num_warps=swiglu_triton._NUM_WARPS,
    )


_COPY = CompileCase(
    name="copy_blocks-bf16",
    kernel=block_copy_triton._copy_blocks_kernel,
    signature={"source_ptr": "*bf16", "destination_ptr": "*bf16", "block_elements": "i32", "tiles_a_block": "i32"}
    | {"source_layers_ptr": "*i64", "destination_layers_ptr": "*i64"}
    | {"source_ids_ptr": "*i32", "destination_ids_ptr": "*i32"},
    constexprs={"IS_ALIGNED": True, "TILE": block_copy_triton._TILE},
    divisible=("block_elements",),
    num_warps=block_copy_triton._NUM_WARPS,
)

_EARLY = (  # these kernels are launched early where an architecture can
    _rms_norm("bf16-1536", "*bf16", 1536, 2048, 1, 4),
    _rms_norm("bf16-heads-of-128", "*bf16", 128, 128, 8, 2),
    _rms_norm("fp32-576", "*fp32", 576, 1024, 1, 2),
    _add_rms_norm("bf16-1536", "*bf16", 1536, 2048, 1, 4),
    _add_rms_norm("bf16-576", "*bf16", 576, 1024, 1, 2),
    _add_rms_norm("bf16-8192", "*bf16", 8192, 8192, 1, 16),
    _add_rms_norm("bf16-1536-5_splits", "*bf16", 1536, 2048, 1, 4, num_splits=5),
    _add_rms_norm("bf16-576-2_splits", "*bf16", 576, 1024, 1, 2, num_splits=2),
    _rotary("bf16-12x2x128", "*bf16", 12, 2, 128, False),
    _rotary("bf16-9x3x64", "*bf16", 9, 3, 64, False),
    _rotary("bf16-16x8x128-qk_norm", "*bf16", 16, 8, 128, True),
    _rotary("fp32-12x2x128", "*fp32", 12, 2, 128, False),
    _swiglu("bf16", "*bf16", tl.float32),
    _swiglu("fp32", "*fp32", tl.float64),
)


def compile_cases(architecture: int) -> list[CompileCase]:
    """Every case for one architecture."""
    pdl = {"PDL": architecture >= 90}
    return [_COPY, *(dataclasses.replace(case, constexprs=case.constexprs | pdl) for case in _EARLY)]
