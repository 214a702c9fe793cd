"""The attention kernels at the shapes that matter, for compiling without a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton

from pico_vllm.kernels import attention_decode, attention_prefill, attention_triton
from pico_vllm.kernels.attention_config import AttentionConfig, DecodeConfig, PrefillConfig, select_config

_ELEMENT_SIZE = {"bf16": 2, "fp16": 2, "fp32": 4}
_POINTERS = {"block_tables": "*i32", "query_start_loc": "*i32", "seq_lens": "*i32", "slot_mapping": "*i32"}
_FP32 = {"partial_out": "*fp32", "partial_lse": "*fp32", "qk_scale": "fp32"}
_TENSORS = ("query", "key", "value", "kv_cache", "out")
#: Multiples of 16 for every model: strides of rows of head_dim numbers, and addresses of tensors of their own.
_DIVISIBLE = (
    *_TENSORS, "partial_out", "partial_lse", "query_token_stride", "query_head_stride", "key_token_stride",
    "key_head_stride", "value_token_stride", "value_head_stride", "block_stride", "value_offset", "kv_head_stride",
    "offset_stride",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class CompileCase:
    """One specialisation of a kernel, as ``triton.compile`` takes it.

    Attributes:
        name: what it is.
        kernel: the jitted function.
        signature: argument → type; "constexpr" for those of ``constexprs``.
        constexprs: argument → value.
        divisible_by_16: arguments known to be multiples of 16.
        num_warps, num_stages: as Triton means them.
    """

    name: str
    kernel: Any
    signature: dict[str, str]
    constexprs: dict[str, Any]
    divisible_by_16: tuple[str, ...]
    num_warps: int
    num_stages: int


def compile_cases(architecture: int) -> list[CompileCase]:
    """Every kernel in bf16 for Qwen2.5-1.5B (12 heads, 2 KV heads, 128) and SmolLM2 (9, 3, 64), and an odd head_dim."""
    cases = [_store_case("bf16", head_dim=128)]
    for group, head_dim, block_size in ((6, 128, 16), (3, 64, 16), (4, 96, 32), (8, 128, 64)):
        block_d = triton.next_power_of_2(head_dim)
        cases += attention_cases(select_config(architecture, block_d, 2), group, head_dim, block_size)
    cases += attention_cases(select_config(architecture, 64, 4), 3, 64, 16, dtype="fp32")
    config = select_config(architecture, 128, 2).decode
    return [*cases, decode_case(config, 6, 128, 16, query_len=8)]


def attention_cases(
    config: AttentionConfig, group: int, head_dim: int, block_size: int, dtype: str = "bf16"
) -> list[CompileCase]:
    """Decode whole and split, the merge, and both prefills of a model's shape."""
    prefills = dict.fromkeys((config.prefill, config.short_prefill))
    return [
        decode_case(config.decode, group, head_dim, block_size, dtype, is_split=False),
        decode_case(config.decode, group, head_dim, block_size, dtype, is_split=True),
        combine_case(config.decode, group, head_dim, dtype),
        *(prefill_case(prefill, group, head_dim, block_size, dtype) for prefill in prefills),
    ]


def decode_case(
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
        "NUM_ROWS": query_len * group,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": block_size,
        "BLOCK_M": max(16, triton.next_power_of_2(query_len * group)),
        "BLOCK_N": config.block_n,
        "BLOCK_D": triton.next_power_of_2(head_dim),
        "IS_SPLIT": is_split,
    }
    name = f"decode {dtype} {group}x{head_dim} query_len {query_len}{' split' * is_split}"
    return _case(name, attention_decode._decode_kernel, constexprs, dtype, config.num_warps, config.num_stages)


def combine_case(config: DecodeConfig, group: int, head_dim: int, dtype: str = "bf16") -> CompileCase:
    constexprs = {
        "GROUP": group,
        "NUM_ROWS": group,
        "HEAD_DIM": head_dim,
        "BLOCK_N": config.block_n,
        "BLOCK_S": attention_decode._COMBINE_BLOCK,
        "BLOCK_D": triton.next_power_of_2(head_dim),
    }
    return _case(f"combine {dtype} {group}x{head_dim}", attention_decode._combine_kernel, constexprs, dtype, 4, 3)


def prefill_case(config: PrefillConfig, group: int, head_dim: int, block_size: int, dtype: str = "bf16") -> CompileCase:
    constexprs = {
        "GROUP": group,
        "HEADS": group if config.packs_group else 1,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": block_size,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_D": triton.next_power_of_2(head_dim),
        "BLOCK_S": attention_prefill._SEARCH_BLOCK,
    }
    name = f"prefill {dtype} {group}x{head_dim} tile {config.block_m}x{config.block_n}"
    return _case(name, attention_prefill._prefill_kernel, constexprs, dtype, config.num_warps, config.num_stages)


def _store_case(dtype: str, head_dim: int) -> CompileCase:
    constexprs = {"NUM_KV_HEADS": 2, "HEAD_DIM": head_dim, "BLOCK_SIZE": 16, "BLOCK_H": 2, "BLOCK_D": head_dim}
    return _case(f"store {dtype}", attention_triton._store_kv_kernel, constexprs, dtype, 1, 3)


def _case(
    name: str, kernel: Any, constexprs: dict[str, Any], dtype: str, num_warps: int, num_stages: int
) -> CompileCase:
    types = {**_POINTERS, **_FP32, **dict.fromkeys(_TENSORS, f"*{dtype}"), **dict.fromkeys(constexprs, "constexpr")}
    signature = {argument: types.get(argument, "i32") for argument in kernel.arg_names}
    divisible = tuple(argument for argument in kernel.arg_names if argument in _DIVISIBLE)
    return CompileCase(name, kernel, signature, constexprs, divisible, num_warps, num_stages)
