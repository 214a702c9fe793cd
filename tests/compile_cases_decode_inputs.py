"""Compile cases of the captured decode's inputs."""

from __future__ import annotations

from compile_cases import CompileCase
from pico_vllm.kernels.decode_inputs_triton import _BLOCK, _fill_decode_inputs_kernel

_POINTERS = ("rows", "seq_lens", "new_block_ids", "input_ids", "positions", "slot_mapping", "block_tables")
_TABLES = ("block_table_rows", "last_token_ids")

CASES = [
    CompileCase(
        name=f"fill_decode_inputs{'' if padding_has_tokens else '_beside_chunks'}",
        kernel=_fill_decode_inputs_kernel,
        signature={f"{name}_ptr": "*i32" for name in (*_POINTERS, *_TABLES)}
        | {"table_stride": "i32", "row_stride": "i32"},
        constexprs={"BLOCK_SIZE": 16, "BLOCK": _BLOCK, "PADDING_HAS_TOKENS": padding_has_tokens},
        divisible=("table_stride", "row_stride"),
    )
    for padding_has_tokens in (True, False)
]
