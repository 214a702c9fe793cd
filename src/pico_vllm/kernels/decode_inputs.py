"""What a captured decode step makes of the few numbers that the host sends: the model's inputs, on the device.

For sequence s of the step, in device row r = rows[s], with its new token at position p = seq_lens[s] - 1:

    block_table_rows[r, p // block_size] = new_block_ids[s]            if that is not -1
    input_ids[s]    = last_token_ids[r]
    positions[s]    = p
    slot_mapping[s] = block_table_rows[r, p // block_size] * block_size + p % block_size
    block_tables[s] = block_table_rows[r]                              as far as the sequence goes

A padded sequence has seq_len 0: it gets id 0, position 0, slot -1, and its block table is left as it was. Where padding
has no tokens, what stands in its place belongs to others and is left as it was too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """Tensors of one captured size n; the first three are sent by the host, the others written on the device.

    Attributes:
        rows, seq_lens, new_block_ids: [n] int32.
        input_ids, positions, slot_mapping: [n] int32.
        block_tables: [n, max_blocks] int32.
        padding_has_tokens: each padded sequence has a padded token.
    """

    rows: torch.Tensor
    seq_lens: torch.Tensor
    new_block_ids: torch.Tensor
    input_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    block_tables: torch.Tensor
    padding_has_tokens: bool = True


def fill_decode_inputs_reference(
    inputs: DecodeInputs, block_table_rows: torch.Tensor, last_token_ids: torch.Tensor, block_size: int
) -> None:
    """Write all of ``inputs`` that the host doesn't send, and the new blocks into ``block_table_rows``.

    Args:
        inputs: of the step.
        block_table_rows: [num_rows, max_blocks] int32, written in place.
        last_token_ids: [num_rows] int32, the last sampled id of each row.
        block_size: tokens a block.
    """
    sent = zip(inputs.rows.tolist(), inputs.seq_lens.tolist(), inputs.new_block_ids.tolist(), strict=True)
    for s, (row, seq_len, new_block_id) in enumerate(sent):
        if seq_len == 0:
            if inputs.padding_has_tokens:
                inputs.input_ids[s], inputs.positions[s], inputs.slot_mapping[s] = 0, 0, -1
            continue
        block, offset = divmod(seq_len - 1, block_size)
        if new_block_id >= 0:
            block_table_rows[row, block] = new_block_id
        inputs.input_ids[s] = last_token_ids[row]
        inputs.positions[s] = seq_len - 1
        inputs.slot_mapping[s] = block_table_rows[row, block] * block_size + offset
        inputs.block_tables[s, : block + 1] = block_table_rows[row, : block + 1]
