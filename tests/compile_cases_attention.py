"""The attention kernels at the shapes that matter, for compiling without a GPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import triton

from compile_cases import CompileCase
from pico_vllm.kernels import (
    attention_decode,
    attention_merge,
    attention_prefill,
    attention_triton,
    rotary_decode_attention_triton,
)
from pico_vllm.kernels.attention_config import AttentionConfig, DecodeConfig, MergeConfig, PrefillConfig, select_config

_ELEMENT_SIZE = {"bf16": 2, "fp16": 2, "fp32": 4}
_POINTERS = dict.fromkeys(("block_tables", "query_start_loc", "seq_lens", "slot_mapping", "decode_order"), "*i32")
_FP32 = {"partial_out": "*fp32", "partial_lse": "*fp32", "qk_scale": "fp32"}
_TENSORS = ("query", "key", "value", "heads", "cos_sin", "kv_cache", "out")
#: Multiples of 16 for every model: strides of rows of head_dim numbers, and addresses of tensors of their own.
_DIVISIBLE = (
    *_TENSORS, "partial_out", "partial_lse", "query_token_stride", "query_head_stride", "key_token_stride",
    "key_head_stride", "value_token_stride", "value_head_stride", "block_stride", "value_offset", "kv_head_stride",
    "offset_stride", "token_stride", "head_stride", "cos_sin_stride",
)  # fmt: skip


def compile_cases(architecture: int) -> list[CompileCase]:
    """Every kernel in bf16 for Qwen2.5-1.5B (12 heads, 2 KV heads, 128) and SmolLM2 (9, 3, 64), and an odd head_dim."""
    cases = [_store_case(architecture, "bf16", head_dim=128)]
    for group, head_dim, block_size in ((6, 128, 16), (3, 64, 16), (4, 96, 32), (8, 128, 64)):
        block_d = triton.next_power_of_2(head_dim)
        cases += attention_cases(architecture, select_config(architecture, block_d, 2), group, head_dim, block_size)
    cases += attention_cases(architecture, select_config(architecture, 64, 4), 3, 64, 16, dtype="fp32")
    if architecture == 90 and attention_prefill.launch_hopper_prefill is not None:
        shapes = ((6, 128, 16, "bf16"), (3, 64, 16, "bf16"), (8, 128, 128, "fp16"), (1, 64, 32, "bf16"))
        cases += [hopper_prefill_case(*shape, is_split=is_split) for shape in shapes for is_split in (False, True)]
    config = select_config(architecture, 128, 2).decodes[0]
    return [*cases, decode_case(architecture, config, 6, 128, 16, query_len=8)]


def attention_cases(
    architecture: int, config: AttentionConfig, group: int, head_dim: int, block_size: int, dtype: str = "bf16"
) -> list[CompileCase]:
    """A model's decodes (whole, split, of one tile a program), merges and prefills."""
    shape = (group, head_dim, block_size, dtype)
    decodes = dict.fromkeys(
        dataclasses.replace(
            decode, programs_per_sm=1, max_splits=1, max_groups=None, rotates=False
        )  # of the host alone
        for decode in (*config.decodes, *config.short_decodes)
    )
    rotating = dict.fromkeys(
        dataclasses.replace(decode, programs_per_sm=1, max_splits=1, max_groups=None)
        for decode in (*config.decodes, *config.short_decodes)
        if decode.rotates and head_dim & (head_dim - 1) == 0
    )
    few_tiles = dict.fromkeys(dataclasses.replace(decode, num_stages=2) for decode in decodes)
    prefills = dict.fromkeys((config.prefill, config.short_prefill))
    return [
        *(
            decode_case(architecture, decode, *shape, is_split=is_split)
            for decode in decodes
            for is_split in (False, True)
        ),
        *(decode_case(architecture, decode, *shape) for decode in few_tiles if decode not in decodes),
        *(
            rotary_decode_case(architecture, decode, *shape, is_split=is_split)
            for decode in rotating
            for is_split in (False, True)
        ),
        *(
            merge_case(architecture, merge, 2 * group, head_dim, dtype)
            for merge in (*config.merges, config.many_rows_merge)
        ),
        *(
            prefill_case(architecture, prefill, *shape, is_split=is_split)
            for prefill in prefills
            for is_split in (False, True)
        ),
    ]


def decode_case(
    architecture: int,
    config: DecodeConfig,
    group: int,
    head_dim: int,
    block_size: int,
    dtype: str = "bf16",
    *,
    query_len: int = 1,
    is_split: bool = True,
) -> CompileCase:
    constexprs = {
        "GROUP": group,
        "QUERY_LEN": query_len,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": block_size,
        "BLOCK_M": max(16, triton.next_power_of_2(query_len * group)),
        "BLOCK_N": config.block_n,
        "BLOCK_D": triton.next_power_of_2(head_dim),
        "IS_SPLIT": is_split,
        "HAS_ORDER": not is_split,
        "PDL": architecture >= 90,
    }
    shape = f"N {config.block_n} w {config.num_warps} s {config.num_stages}"
    name = f"decode {dtype} {group}x{head_dim} {shape} query_len {query_len}{' split' * is_split}"
    return _case(name, attention_decode._decode_kernel, constexprs, dtype, config.num_warps, config.num_stages)


def rotary_decode_case(
    architecture: int,
    config: DecodeConfig,
    group: int,
    head_dim: int,
    block_size: int,
    dtype: str = "bf16",
    *,
    is_split: bool = True,
) -> CompileCase:
    constexprs = {
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": block_size,
        "BLOCK_M": max(16, triton.next_power_of_2(group)),
        "BLOCK_N": config.block_n,
        "IS_SPLIT": is_split,
        "HAS_ORDER": not is_split,
        "PDL": architecture >= 90,
    }
    shape = f"N {config.block_n} w {config.num_warps} s {config.num_stages}"
    name = f"rotary decode {dtype} {group}x{head_dim} {shape}{' split' * is_split}"
    kernel = rotary_decode_attention_triton._rotary_decode_kernel
    return _case(name, kernel, constexprs, dtype, config.num_warps, config.num_stages)


def merge_case(
    architecture: int, config: MergeConfig, num_heads: int, head_dim: int, dtype: str = "bf16"
) -> CompileCase:
    constexprs = {
        "NUM_HEADS": num_heads,
        "HEAD_DIM": head_dim,
        "BEFORE_BOUNDARY": True,
        "BLOCK_R": config.block_rows,
        "BLOCK_S": config.block_splits,
        "BLOCK_D": min(config.block_d, triton.next_power_of_2(head_dim)),
        "PDL": architecture >= 90,
    }
    name = f"merge {dtype} {num_heads}x{head_dim} {config.block_rows} rows {config.block_splits} splits"
    return _case(name, attention_merge._merge_kernel, constexprs, dtype, config.num_warps, 3)


def prefill_case(
    architecture: int,
    config: PrefillConfig,
    group: int,
    head_dim: int,
    block_size: int,
    dtype: str = "bf16",
    *,
    is_split: bool = False,
) -> CompileCase:
    constexprs = {
        "GROUP": group,
        "HEADS": group if config.packs_group else 1,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": block_size,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_D": triton.next_power_of_2(head_dim),
        "BLOCK_S": attention_prefill.SEARCH_BLOCK,
        "SEPARATES_DIAGONAL": config.separates_diagonal,
        "IS_SPLIT": is_split,
        "PDL": architecture >= 90,
    }
    shape = f"{config.block_m}x{config.block_n} w {config.num_warps} s {config.num_stages}"
    name = f"prefill {dtype} {group}x{head_dim} tile {shape}{' split' * is_split}"
    name += " one loop" * (not config.separates_diagonal)
    return _case(name, attention_prefill._prefill_kernel, constexprs, dtype, config.num_warps, config.num_stages)


def hopper_prefill_case(group: int, head_dim: int, block_size: int, dtype: str, *, is_split: bool) -> CompileCase:
    from pico_vllm.kernels import attention_prefill_hopper

    constexprs = {"GROUP": group, "HEAD_DIM": head_dim, "BLOCK_SIZE": block_size, "IS_SPLIT": is_split, "PDL": True}
    name = f"hopper prefill {dtype} {group}x{head_dim} block {block_size}{' split' * is_split}"
    case = _case(name, attention_prefill_hopper._hopper_prefill_kernel, constexprs, dtype, 4, 1)
    descriptor = f"tensordesc<{dtype}[{block_size}, 64],{attention_prefill_hopper._SWIZZLED.value!r}>"
    return dataclasses.replace(case, signature={**case.signature, "kv_cache": descriptor})


def _store_case(architecture: int, dtype: str, head_dim: int) -> CompileCase:
    constexprs = {"NUM_KV_HEADS": 2, "HEAD_DIM": head_dim, "BLOCK_SIZE": 16, "BLOCK_H": 2, "BLOCK_D": head_dim}
    constexprs["PDL"] = architecture >= 90
    return _case(f"store {dtype}", attention_triton._store_kv_kernel, constexprs, dtype, 1, 3)


def _case(
    name: str, kernel: Any, constexprs: dict[str, Any], dtype: str, num_warps: int, num_stages: int
) -> CompileCase:
    types = {**_POINTERS, **_FP32, **dict.fromkeys(_TENSORS, f"*{dtype}")}
    signature = {argument: types.get(argument, "i32") for argument in kernel.arg_names if argument not in constexprs}
    divisible = tuple(argument for argument in signature if argument in _DIVISIBLE and signature[argument] == "i32")
    return CompileCase(
        name=name,
        kernel=kernel,
        signature=signature,
        constexprs=constexprs,
        divisible=divisible,
        num_warps=num_warps,
        num_stages=num_stages,
    )
