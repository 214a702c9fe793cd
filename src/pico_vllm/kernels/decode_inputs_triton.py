"""The inputs of a captured decode step in one Triton kernel. Contract as ``decode_inputs``."""

# pyright: reportCallIssue=false
# (a launch takes num_warps and num_stages beside the parameters of the kernel)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pico_vllm.kernels.decode_inputs import DecodeInputs

#: Block ids that a program copies at a time: 16k tokens of context with blocks of 16.
_BLOCK = 1024


@triton.jit(do_not_specialize_on_alignment=["seq_lens_ptr", "new_block_ids_ptr"])
def _fill_decode_inputs_kernel(
    rows_ptr,
    seq_lens_ptr,
    new_block_ids_ptr,
    input_ids_ptr,
    positions_ptr,
    slot_mapping_ptr,
    block_tables_ptr,
    block_table_rows_ptr,
    last_token_ids_ptr,
    table_stride,
    row_stride,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PADDING_HAS_TOKENS: tl.constexpr,
):
    """Formulas in ``decode_inputs``. Grid: (n,); a program has one sequence and copies its block table.

    The new block's id goes to both tables from a register: what was stored here is not read again.
    """
    s = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + s).to(tl.int64)
    seq_len = tl.load(seq_lens_ptr + s)
    new_block_id = tl.load(new_block_ids_ptr + s)
    if seq_len == 0:
        if PADDING_HAS_TOKENS:
            tl.store(input_ids_ptr + s, 0)
            tl.store(positions_ptr + s, 0)
            tl.store(slot_mapping_ptr + s, -1)
        return
    position = seq_len - 1
    last_block = position // BLOCK_SIZE
    row_ptr = block_table_rows_ptr + row * row_stride
    last_block_id = tl.load(row_ptr + last_block)
    if new_block_id >= 0:
        last_block_id = new_block_id
        tl.store(row_ptr + last_block, new_block_id)
    tl.store(input_ids_ptr + s, tl.load(last_token_ids_ptr + row))
    tl.store(positions_ptr + s, position)
    tl.store(slot_mapping_ptr + s, last_block_id * BLOCK_SIZE + position % BLOCK_SIZE)
    for start in range(0, last_block + 1, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        ids = tl.load(row_ptr + columns, mask=columns < last_block, other=0)
        ids = tl.where(columns == last_block, last_block_id, ids)
        tl.store(block_tables_ptr + s * table_stride + columns, ids, mask=columns <= last_block)


def fill_decode_inputs_triton(
    inputs: DecodeInputs, block_table_rows: torch.Tensor, last_token_ids: torch.Tensor, block_size: int
) -> None:
    """``fill_decode_inputs_reference`` in one launch."""
    _fill_decode_inputs_kernel[(inputs.rows.shape[0],)](
        inputs.rows,
        inputs.seq_lens,
        inputs.new_block_ids,
        inputs.input_ids,
        inputs.positions,
        inputs.slot_mapping,
        inputs.block_tables,
        block_table_rows,
        last_token_ids,
        inputs.block_tables.stride(0),
        block_table_rows.stride(0),
        BLOCK_SIZE=block_size,
        BLOCK=_BLOCK,
        PADDING_HAS_TOKENS=inputs.padding_has_tokens,
        num_warps=4,
    )
