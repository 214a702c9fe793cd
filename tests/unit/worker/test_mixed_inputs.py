"""The vector of a captured mixed step, to the last number."""

import numpy as np
import pytest
import torch

from pico_vllm import SamplingParams
from pico_vllm.scheduler_output import NewRequestData, ScheduledRequest, SchedulerOutput
from pico_vllm.worker.input_builder import InputBuilder
from pico_vllm.worker.mixed_inputs import MixedInputs, MixedSize, pack_mixed, packed_length


def new(request_id, ids, blocks, samples=True):
    data = NewRequestData(SamplingParams(temperature=0.0), 0, len(ids))
    return ScheduledRequest(request_id, ids, 0, len(ids), blocks, samples, data)


def decode(request_id, computed, blocks=()):
    return ScheduledRequest(request_id, (), computed, 1, blocks, True)


@pytest.fixture
def builder():
    """Blocks of 4 tokens; a has 4 tokens and row 0, b has 2 and row 1."""
    builder = InputBuilder(8, max_blocks_per_seq=4, block_size=4, vocab_size=100, device=torch.device("cpu"))
    builder.build(SchedulerOutput((new("a", (11, 12, 13, 14), (7,)), new("b", (21, 22), (4,))), 0, 6))
    return builder


def packed(builder, scheduled, num_decodes, size, num_others):
    step = SchedulerOutput(scheduled, num_decodes, sum(request.num_new_tokens for request in scheduled))
    return pack_mixed(builder.lay_out_mixed(step, num_decodes), size, num_others, padding_row=8)


def test_decodes_and_prompts_stand_in_their_places(builder):
    scheduled = (
        decode("b", 2),
        decode("a", 4, (3,)),
        new("c", (31, 32, 33), (9,), samples=False),
        new("d", (41,), (2,)),
    )
    size = MixedSize(num_tokens=9, num_decodes=3)
    inputs = MixedInputs.views(packed(builder, scheduled, 2, size, 4), size, 4)
    # Ids of decodes are written on the device; that of the padded one isn't: its place is the first prompt's.
    assert inputs.input_ids.tolist() == [0, 0, 31, 32, 33, 41, 0, 0, 0]
    assert inputs.positions.tolist() == [2, 4, 0, 1, 2, 0, 0, 0, 0]
    assert inputs.slot_mapping.tolist() == [18, 12, 36, 37, 38, 8, -1, -1, -1]
    assert inputs.query_start_loc.tolist() == [0, 1, 2, 2, 5, 6, 6, 6]
    assert inputs.seq_lens.tolist() == [3, 5, 0, 3, 1, 0, 0]
    assert inputs.rows.tolist() == [1, 0, 0, 2, 3, 0, 0]
    assert inputs.new_block_ids.tolist() == [-1, 3, 0]
    assert inputs.decode_order.tolist() == [1, 0, 2]  # the longest first
    assert inputs.logits_indices.tolist() == [0, 1, 5, 0, 0, 0, 0]
    assert inputs.sampled_rows.tolist() == [1, 0, 3, 8, 8, 8, 8]


def test_prompts_alone_and_no_padding(builder):
    size = MixedSize(num_tokens=3, num_decodes=0)
    inputs = MixedInputs.views(packed(builder, (new("c", (31, 32), (9,)), new("d", (41,), (2,))), 0, size, 2), size, 2)
    assert inputs.input_ids.tolist() == [31, 32, 41]
    assert inputs.slot_mapping.tolist() == [36, 37, 8]
    assert inputs.query_start_loc.tolist() == [0, 2, 3]
    assert inputs.seq_lens.tolist() == [2, 1] and inputs.rows.tolist() == [2, 3]
    assert inputs.new_block_ids.tolist() == [] and inputs.logits_indices.tolist() == [1, 2]
    assert inputs.sampled_rows.tolist() == [2, 3]


def test_as_many_decodes_as_there_is_room_for(builder):
    size = MixedSize(num_tokens=4, num_decodes=2)
    scheduled = (decode("a", 4, (3,)), decode("b", 2), new("c", (31, 32), (9,)))
    inputs = MixedInputs.views(packed(builder, scheduled, 2, size, 1), size, 1)
    assert inputs.query_start_loc.tolist() == [0, 1, 2, 4]
    assert inputs.seq_lens.tolist() == [5, 3, 2] and inputs.logits_indices.tolist() == [0, 1, 3]


@pytest.mark.parametrize("size", [MixedSize(1, 0), MixedSize(7, 3), MixedSize(128, 64)])
def test_fields_are_disjoint_and_begin_at_whole_16_bytes(size):
    vector = np.arange(packed_length(size, 3), dtype=np.int32)
    inputs = MixedInputs.views(vector, size, 3)
    fields = [getattr(inputs, name) for name in MixedInputs.__dataclass_fields__]
    assert all(len(field) == 0 or field[0] % 4 == 0 for field in fields)
    numbers = np.concatenate(fields)
    assert len(set(numbers.tolist())) == len(numbers) == 3 * size.num_tokens + 7 * size.num_decodes + 5 * 3 + 1
