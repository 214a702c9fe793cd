"""The all-reduce kernels at the shapes of Qwen2.5-7B (3584), Qwen2.5-1.5B (1536) and Llama-70B (8192)."""

from __future__ import annotations

import triton

from compile_cases import CompileCase
from pico_vllm.kernels import all_reduce_triton, best_of_ranks_triton
from pico_vllm.kernels.rms_norm_triton import _tile

_MAX_ROWS = 64
_ELEMENT_SIZE = {"bf16": 2, "fp16": 2, "fp32": 4}


def compile_cases(architecture: int) -> list[CompileCase]:
    """Every kernel, on 2 ranks and more."""
    early = architecture >= 90
    return [
        all_reduce_case("bf16", 3584, early, num_warps=32),
        all_reduce_case("bf16", 3584, early, num_warps=16, rank=1),
        all_reduce_case("bf16", 3584, early, num_warps=8, num_splits=3),
        all_reduce_case("bf16", 3584, early, num_warps=32, normalises=False),
        all_reduce_case("fp16", 1536, early, num_warps=16, size=4, rank=2),
        all_reduce_case("bf16", 8192, early, num_warps=16, size=4, rank=3),
        all_reduce_case("fp32", 96, early, num_warps=2, size=3, rank=1),
        _block_case(3584, early),
        _block_case(3584, early, normalises=False),
        _block_case(1536, early, rank=1),
        _block_case(8192, early, size=4, rank=3),
        _best_of_ranks_case(early),
        _best_of_ranks_case(early, size=4, rank=2),
        _sum_case(3584, early, size=2, rank=0),
        _sum_case(8192, early, size=4, rank=3),
        *_SIGNALS,
    ]


def all_reduce_case(
    dtype: str,
    hidden: int,
    early: bool,
    *,
    num_warps: int,
    size: int = 2,
    rank: int = 0,
    num_splits: int = 1,
    normalises: bool = True,
) -> CompileCase:
    chunk = 8 // _ELEMENT_SIZE[dtype]
    block = triton.next_power_of_2(hidden // chunk)
    signature = _signature(dtype)
    if num_splits > 1:
        signature["partial_ptr"] = "*fp32"
    constexprs = {"RANK": rank, "SIZE": size, "MAX_ROWS": _MAX_ROWS, "NUM_SPLITS": num_splits, "HIDDEN": hidden}
    constexprs |= {"CHUNK": chunk, "BLOCK": block, "ADDS_AND_NORMALISES": normalises, "PDL": early}
    constexprs |= {"IS_COMPILED": True, "PACK": max(block // (32 * num_warps), 1)}
    shape = f"{dtype}-{hidden}-{rank}_of_{size}-{num_warps}_warps"
    return CompileCase(
        name=f"all_reduce{'_add_rms_norm' * normalises}-{shape}{f'-{num_splits}_splits' * (num_splits > 1)}",
        kernel=all_reduce_triton._all_reduce_kernel,
        signature=signature,
        constexprs=constexprs,
        divisible=("partial_stride", "residual_stride"),
        num_warps=num_warps,
    )


def _signature(dtype: str) -> dict[str, str]:
    """What rows and blocks have in common."""
    signature = dict.fromkeys(("partial_ptr", "residual_ptr", "weight_ptr", "y_ptr"), f"*{dtype}")
    signature |= {"peers_ptr": "*i64", "epochs_ptr": "*i32", "abort_ptr": "*i32", "eps": "fp32"}
    return signature | dict.fromkeys(("partial_stride", "residual_stride", "num_rows"), "i32")


def _block_case(hidden: int, early: bool, *, size: int = 2, rank: int = 0, normalises: bool = True) -> CompileCase:
    rows = all_reduce_triton.rows_of_block(hidden)
    constexprs = {"RANK": rank, "SIZE": size, "MAX_ROWS": 2048, "MAX_BLOCKS": 2048 // rows, "HIDDEN": hidden}
    constexprs |= {"FLAGS_NUMBERS": size * 2048 // rows * 2, "BLOCK": triton.next_power_of_2(hidden), "ROWS": rows}
    constexprs |= {"RANKS_BLOCK": size, "ADDS_AND_NORMALISES": normalises, "PDL": early}
    return CompileCase(
        name=f"block_all_reduce{'_add_rms_norm' * normalises}-bf16-{hidden}-{rank}_of_{size}",
        kernel=all_reduce_triton._block_all_reduce_kernel,
        signature=_signature("bf16") | {"tickets_ptr": "*i32"},
        constexprs=constexprs,
        divisible=("partial_stride", "residual_stride"),
        num_warps=all_reduce_triton.block_warps(hidden),
    )


def _best_of_ranks_case(early: bool, *, size: int = 2, rank: int = 1) -> CompileCase:
    signature = {"values_ptr": "*fp32", "ids_ptr": "*i32", "token_ids_ptr": "*i64", "last_token_ids_ptr": "*i32"}
    signature |= {"rows_ptr": "*i32", "peers_ptr": "*i64", "epochs_ptr": "*i32", "abort_ptr": "*i32"}
    constexprs = {"RANK": rank, "SIZE": size, "MAX_ROWS": 512, "CHUNKS_BLOCK": 32, "IS_COMPILED": True, "PDL": early}
    return CompileCase(
        name=f"best_of_ranks-{rank}_of_{size}",
        kernel=best_of_ranks_triton._best_of_ranks_kernel,
        signature=signature | {"num_chunks": "i32", "first_id": "i32"},
        constexprs=constexprs,
        divisible=("first_id",),
        num_warps=1,
    )


def _sum_case(hidden: int, early: bool, *, size: int, rank: int) -> CompileCase:
    block, rows, num_warps = _tile(hidden)
    pointers = ("partial_ptr", "received_ptr", "residual_ptr", "weight_ptr", "y_ptr")
    strides = ("partial_stride", "sender_stride", "received_stride", "residual_stride")
    return CompileCase(
        name=f"sum_add_rms_norm-bf16-{hidden}-{rank}_of_{size}",
        kernel=all_reduce_triton._sum_add_rms_norm_kernel,
        signature=dict.fromkeys(pointers, "*bf16") | dict.fromkeys(strides, "i32") | {"num_rows": "i32", "eps": "fp32"},
        constexprs={"RANK": rank, "SIZE": size, "HIDDEN": hidden, "BLOCK": block, "ROWS": rows, "PDL": early},
        divisible=strides,
        num_warps=num_warps,
    )


_SIGNALS = [
    CompileCase(
        name="signal",
        kernel=all_reduce_triton._signal_kernel,
        signature={"peers_ptr": "*i64", "counter_ptr": "*i32", "flags_offset": "i32"},
        constexprs={"RANK": 1, "SIZE": 4, "BLOCK": 4},
        divisible=("flags_offset",),
        num_warps=1,
    ),
    CompileCase(
        name="wait",
        kernel=all_reduce_triton._wait_kernel,
        signature={"flags_ptr": "*i32", "counter_ptr": "*i32", "abort_ptr": "*i32"},
        constexprs={"RANK": 1, "SIZE": 4, "BLOCK": 4},
        num_warps=1,
    ),
]
