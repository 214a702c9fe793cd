"""The inputs of a captured decode step: worked out by hand, and Triton against the reference."""

import dataclasses

import pytest
import torch

from kernel_implementations import RUNS_TRITON, TRITON_DEVICE
from pico_vllm.kernels.decode_inputs import DecodeInputs, fill_decode_inputs_reference

FILLS = [pytest.param(fill_decode_inputs_reference, "cpu", id="reference")]
if RUNS_TRITON:
    from pico_vllm.kernels.decode_inputs_triton import fill_decode_inputs_triton

    FILLS.append(pytest.param(fill_decode_inputs_triton, TRITON_DEVICE, id="triton"))

POISON = -777
TENSORS = [field.name for field in dataclasses.fields(DecodeInputs) if field.name != "padding_has_tokens"]


def make(rows, seq_lens, new_block_ids, max_blocks, device):
    def int32(values):
        return torch.tensor(values, dtype=torch.int32, device=device)

    n = len(rows)
    sent = [int32(rows), int32(seq_lens), int32(new_block_ids)]
    written = [torch.full((n,), POISON, dtype=torch.int32, device=device) for _ in range(3)]
    tables = torch.full((n, max_blocks), POISON, dtype=torch.int32, device=device)
    return DecodeInputs(*sent, *written, tables)


@pytest.mark.parametrize("fill, device", FILLS)
def test_ids_positions_slots_and_tables_by_hand(fill, device):
    tables = torch.tensor([[7, 8, 0], [5, 0, 0], [3, 4, 6], [0, 0, 0]], dtype=torch.int32, device=device)
    last = torch.tensor([70, 50, 30, 99], dtype=torch.int32, device=device)
    # Blocks of 4. Row 2 at position 8 (block 2), row 0 at 8 with a new block 9, padding, row 1 at 3 (end of a block).
    inputs = make([2, 0, 3, 1], [9, 9, 0, 4], [-1, 9, -1, -1], 3, device)
    fill(inputs, tables, last, 4)
    assert inputs.input_ids.tolist() == [30, 70, 0, 50]
    assert inputs.positions.tolist() == [8, 8, 0, 3]
    assert inputs.slot_mapping.tolist() == [6 * 4, 9 * 4, -1, 5 * 4 + 3]
    assert inputs.block_tables.tolist() == [[3, 4, 6], [7, 8, 9], [POISON] * 3, [5, POISON, POISON]]
    assert tables.tolist() == [[7, 8, 9], [5, 0, 0], [3, 4, 6], [0, 0, 0]]


@pytest.mark.parametrize("fill, device", FILLS)
def test_padding_without_tokens_leaves_what_belongs_to_others(fill, device):
    tables = torch.tensor([[7, 8], [5, 0]], dtype=torch.int32, device=device)
    last = torch.tensor([70, 50], dtype=torch.int32, device=device)
    inputs = dataclasses.replace(make([1, 0, 0], [5, 0, 0], [6, 3, -1], 2, device), padding_has_tokens=False)
    fill(inputs, tables, last, 4)
    assert inputs.input_ids.tolist() == [50, POISON, POISON]
    assert inputs.positions.tolist() == [4, POISON, POISON]
    assert inputs.slot_mapping.tolist() == [24, POISON, POISON]
    assert inputs.block_tables.tolist() == [[5, 6], [POISON] * 2, [POISON] * 2]
    assert tables.tolist() == [[7, 8], [5, 6]], "a padded sequence begins no block"


@pytest.mark.parametrize("fill, device", FILLS)
@pytest.mark.parametrize("block_size", [1, 16])
def test_long_tables_and_every_place_in_a_block_agree_with_the_reference(fill, device, block_size):
    generator = torch.Generator().manual_seed(0)
    max_blocks, num_rows = 2100, 6
    tables = torch.randint(1, 1000, (num_rows, max_blocks), dtype=torch.int32, generator=generator)
    last = torch.arange(num_rows, dtype=torch.int32)
    lens = [1, block_size, block_size + 1, 1024 * block_size, 1024 * block_size + 1, 2100 * block_size]
    new = [5, -1, 6, -1, 7, -1]
    rows = [3, 1, 0, 2, 5, 4]
    expected, actual = (make(rows, lens, new, max_blocks, where) for where in ("cpu", device))
    expected_tables = tables.clone()
    fill_decode_inputs_reference(expected, expected_tables, last, block_size)
    actual_tables = tables.to(device)
    fill(actual, actual_tables, last.to(device), block_size)
    for name in TENSORS:
        assert torch.equal(getattr(actual, name).cpu(), getattr(expected, name)), name
    assert torch.equal(actual_tables.cpu(), expected_tables)
