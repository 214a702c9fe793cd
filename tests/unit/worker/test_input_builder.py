"""One step's tensors, to the last number, from hand-written SchedulerOutputs. Blocks hold 4 tokens throughout."""

import dataclasses

import msgspec
import pytest
import torch

from pico_vllm import SamplingParams
from pico_vllm.kernels.backend import CPU
from pico_vllm.scheduler_output import NewRequestData, ScheduledRequest, SchedulerOutput
from pico_vllm.worker import input_builder
from pico_vllm.worker.input_builder import InputBuilder

BLOCK_SIZE = 4
VOCAB_SIZE = 2000
GREEDY = SamplingParams(temperature=0.0)


def make_builder(max_num_seqs=4):
    return InputBuilder(
        max_num_seqs, max_blocks_per_seq=5, block_size=BLOCK_SIZE, vocab_size=VOCAB_SIZE, device=torch.device("cpu")
    )


def new(
    request_id,
    ids,
    blocks,
    *,
    computed=0,
    prompt=None,
    samples=True,
    params=GREEDY,
    seed=0,
    sample_index=0,
    targets=(),
    targets_start=0,
):
    """A request that the worker has no row for."""
    data = NewRequestData(params, seed, len(ids) if prompt is None else prompt, sample_index)
    wanted = (targets, targets_start)
    return ScheduledRequest(request_id, tuple(ids), computed, len(ids), tuple(blocks), samples, data, *wanted)


def chunk(request_id, ids, computed, blocks=(), *, samples=True, targets=(), targets_start=0):
    wanted = (targets, targets_start)
    return ScheduledRequest(request_id, tuple(ids), computed, len(ids), tuple(blocks), samples, None, *wanted)


def decode(request_id, computed, blocks=()):
    return ScheduledRequest(request_id, (), computed, 1, tuple(blocks), True)


def step(*scheduled, dropped=(), decodes=0):
    return SchedulerOutput(scheduled, decodes, sum(request.num_new_tokens for request in scheduled), dropped)


def arrays(batch):
    """The batch as plain lists and numbers."""
    fields = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    return {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in fields.items()}


def record(builder, sampling, *token_ids):
    builder.record_sampled(sampling, torch.tensor(token_ids))


# -------------------------------------------------------------------------------------------------------- the arrays
def test_a_new_request_over_a_block_border():
    batch, sampling = make_builder().build(step(new("a", [11, 12, 13, 14, 15, 16], [7, 2])))
    assert arrays(batch) == {
        "input_ids": [11, 12, 13, 14, 15, 16],
        "positions": [0, 1, 2, 3, 4, 5],
        "slot_mapping": [28, 29, 30, 31, 8, 9],
        "block_tables": [[7, 2]],
        "query_start_loc": [0, 6],
        "seq_lens": [6],
        "logits_indices": [5],
        "num_decode_reqs": 0,
        "max_query_len": 6,
        "max_seq_len": 6,
        "prefill_seq_len": 6,
        "decodes_only": False,
        "decode_order": None,
    }
    assert sampling.rows.tolist() == [0]
    assert sampling.positions.tolist() == [0]
    assert (sampling.random, sampling.num_logprobs, sampling.prompt_logprobs) == (None, (), None)


@pytest.mark.parametrize(
    ("num_tokens", "blocks", "slots"),
    [(1, [3], [12]), (3, [3], [12, 13, 14]), (4, [3], [12, 13, 14, 15]), (5, [3, 1], [12, 13, 14, 15, 4])],
)
def test_slots_around_a_block_border(num_tokens, blocks, slots):
    batch, _ = make_builder().build(step(new("a", range(num_tokens), blocks)))
    assert batch.slot_mapping.tolist() == slots
    assert batch.block_tables.tolist() == [blocks]


def test_a_second_chunk_goes_on_where_the_first_ended():
    builder = make_builder()
    batch, sampling = builder.build(step(new("a", [11, 12, 13], [5], prompt=8, samples=False)))
    assert batch.logits_indices.tolist() == [] and sampling.rows.tolist() == []
    batch, _ = builder.build(step(chunk("a", [14, 15, 16, 17, 18], 3, [9])))
    assert arrays(batch) == {
        "input_ids": [14, 15, 16, 17, 18],
        "positions": [3, 4, 5, 6, 7],
        "slot_mapping": [23, 36, 37, 38, 39],
        "block_tables": [[5, 9]],
        "query_start_loc": [0, 5],
        "seq_lens": [8],
        "logits_indices": [4],
        "num_decode_reqs": 0,
        "max_query_len": 5,
        "max_seq_len": 8,
        "prefill_seq_len": 8,
        "decodes_only": False,
        "decode_order": None,
    }


def test_a_new_request_may_start_behind_cached_tokens():
    batch, _ = make_builder().build(step(new("a", [16, 17], [5, 9], computed=5, prompt=7)))
    assert batch.positions.tolist() == [5, 6]
    assert batch.slot_mapping.tolist() == [37, 38]
    assert batch.seq_lens.tolist() == [7]


@pytest.mark.parametrize(("slots_start", "slots"), [(0, [37, 38]), (6, [-1, 38]), (7, [-1, -1]), (9, [-1, -1])])
def test_positions_whose_kv_is_cached_are_stored_nowhere(slots_start, slots):
    cached = msgspec.structs.replace(new("a", [16, 17], [5, 9], computed=5, prompt=7), slots_start=slots_start)
    batch, _ = make_builder().build(step(new("b", [1, 2, 3], [2]), cached, new("c", [4], [3])))
    assert batch.slot_mapping.tolist() == [8, 9, 10, *slots, 12]
    assert batch.positions.tolist() == [0, 1, 2, 5, 6, 0]


def test_a_recomputed_last_token_rides_with_the_decodes_and_is_stored_nowhere():
    cached = msgspec.structs.replace(new("a", [16], [5, 9], computed=7, prompt=8), slots_start=8)
    builder = make_builder()
    batch, sampling = builder.build(step(cached, decodes=1))
    assert (batch.slot_mapping.tolist(), batch.seq_lens.tolist()) == ([-1], [8])
    record(builder, sampling, 40)
    batch, _ = builder.build(step(decode("a", 8, [6]), decodes=1))
    assert (batch.input_ids.tolist(), batch.slot_mapping.tolist()) == ([40], [24])


def test_a_decode_takes_the_last_sampled_id_from_the_device():
    builder = make_builder()
    _, sampling = builder.build(step(new("a", [11, 12, 13, 14], [6]), new("b", [21], [3])))
    record(builder, sampling, 77, 88)
    batch, sampling = builder.build(step(decode("b", 1), decode("a", 4, [1]), decodes=2))
    assert arrays(batch) == {
        "input_ids": [88, 77],
        "positions": [1, 4],
        "slot_mapping": [13, 4],
        "block_tables": [[3, 0], [6, 1]],
        "query_start_loc": [0, 1, 2],
        "seq_lens": [2, 5],
        "logits_indices": None,
        "num_decode_reqs": 2,
        "max_query_len": 1,
        "max_seq_len": 5,
        "prefill_seq_len": None,
        "decodes_only": True,
        "decode_order": None,
    }
    record(builder, sampling, 99, 66)  # in the order of this step: b, a
    batch, _ = builder.build(step(decode("a", 5), decode("b", 2), decodes=2))
    assert batch.input_ids.tolist() == [66, 99]


def test_a_request_that_did_not_run_keeps_its_last_id():
    builder = make_builder()
    _, sampling = builder.build(step(new("a", [11], [0]), new("b", [21], [1])))
    record(builder, sampling, 77, 88)
    _, sampling = builder.build(step(decode("a", 1), decodes=1))
    record(builder, sampling, 78)
    batch, _ = builder.build(step(decode("a", 2), decode("b", 1), decodes=2))
    assert batch.input_ids.tolist() == [78, 88]


def test_a_mixed_step_has_decodes_first_and_logits_only_where_something_is_sampled():
    builder = make_builder()
    first = [new("a", [11, 12, 13], [7]), new("b", [21, 22], [4], prompt=6, samples=False)]
    _, sampling = builder.build(step(*first))
    assert sampling.rows.tolist() == [0]
    record(builder, sampling, 55)
    batch, sampling = builder.build(
        step(
            decode("a", 3),
            chunk("b", [23, 24, 25], 2, [0], samples=False),
            new("c", [31, 32], [9]),
            new("d", [41, 42, 43, 44, 45], [8, 1], prompt=9, samples=False),
            decodes=1,
        )
    )
    assert arrays(batch) == {
        "input_ids": [55, 23, 24, 25, 31, 32, 41, 42, 43, 44, 45],
        "positions": [3, 2, 3, 4, 0, 1, 0, 1, 2, 3, 4],
        "slot_mapping": [31, 18, 19, 0, 36, 37, 32, 33, 34, 35, 4],
        "block_tables": [[7, 0], [4, 0], [9, 0], [8, 1]],
        "query_start_loc": [0, 1, 4, 6, 11],
        "seq_lens": [4, 5, 2, 5],
        "logits_indices": [0, 5],
        "num_decode_reqs": 1,
        "max_query_len": 5,
        "max_seq_len": 5,
        "prefill_seq_len": 5,
        "decodes_only": False,
        "decode_order": None,
    }
    assert sampling.rows.tolist() == [0, 2]


def test_prefills_have_a_length_bound_of_their_own_beside_long_decodes():
    builder = make_builder()
    _, sampling = builder.build(step(new("a", range(2, 19), [0, 1, 2, 3, 4])))
    record(builder, sampling, 9)
    batch, _ = builder.build(step(decode("a", 17), new("b", [21, 22, 23], [5]), decodes=1))
    assert (batch.max_seq_len, batch.prefill_seq_len) == (18, 3)


# ------------------------------------------------------------------------------------------------ a captured mixed step
def test_decodes_of_a_mixed_step_bring_their_new_blocks_and_prompts_find_theirs_on_the_device():
    builder = make_builder()
    builder.lay_out_mixed(step(new("a", [11, 12, 13, 14], [7]), new("b", [21, 22], [4])), 0)
    mixed = step(decode("b", 2), decode("a", 4, [3]), new("c", [31, 32, 33, 34, 35], [9, 8]), decodes=2)
    host = builder.lay_out_mixed(mixed, 2)
    assert host.rows.tolist() == [1, 0, 2] and host.new_block_ids.tolist() == [-1, 3]
    assert host.slot_mapping.tolist() == [18, 12, 36, 37, 38, 39, 32]
    assert host.host_ids.tolist() == [0, 0, 31, 32, 33, 34, 35]
    # What the step begins on the device, 3, isn't there yet; all else is.
    assert builder.block_table_rows[:3, :2].tolist() == [[7, 0], [4, 0], [9, 8]]
    # A step that the host lays out knows it.
    batch, _ = builder.build(step(decode("a", 5), decodes=1))
    assert batch.block_tables.tolist() == [[7, 3]]


@pytest.mark.parametrize("few_rows", [0, 1])
def test_rows_that_are_brought_up_to_date_leave_all_others_as_they_are(few_rows, monkeypatch):
    """By a copy each, and all at once."""
    monkeypatch.setattr(input_builder, "_FEW_ROWS", few_rows)
    builder = make_builder()
    builder.build(step(new("a", range(2, 19), [0, 1, 2, 3, 4]), new("b", [21], [9])))
    builder.lay_out_mixed(step(new("c", [31, 32], [8])), 0)
    builder.block_table_rows.fill_(-7)
    builder.lay_out_mixed(step(chunk("c", [33, 34, 35], 2, [5])), 0)
    assert builder.block_table_rows[2, :2].tolist() == [8, 5]
    builder.block_table_rows[2, :2] = -7
    assert (builder.block_table_rows == -7).all()


def test_a_stale_row_of_a_mixed_steps_decode_is_brought_up_to_date_with_its_new_block():
    builder = make_builder()
    builder.build(step(new("a", [11, 12, 13, 14], [7])))
    builder.lay_out_mixed(step(decode("a", 4, [3]), new("b", [21, 22], [4]), decodes=1), 1)
    assert builder.block_table_rows[:2, :2].tolist() == [[7, 3], [4, 0]]


def test_decodes_find_their_ids_in_their_own_rows_beside_prompts():
    builder = make_builder()
    _, sampling = builder.build(step(new("a", [11], [0]), new("b", [21], [1]), new("c", [31], [2])))
    record(builder, sampling, 51, 52, 53)
    batch, _ = builder.build(step(decode("c", 1), decode("a", 1), new("d", [41, 42], [3]), decodes=2))
    assert batch.input_ids.tolist() == [53, 51, 41, 42]
    assert batch.slot_mapping.tolist() == [9, 1, 12, 13]
    assert batch.query_start_loc.tolist() == [0, 1, 2, 4]


def test_a_chunk_of_one_known_token_rides_with_the_decodes():
    builder = make_builder()
    first = [new("a", [11], [0]), new("b", [21, 22], [1], prompt=3, samples=False)]
    _, sampling = builder.build(step(*first))
    record(builder, sampling, 51)
    batch, sampling = builder.build(step(chunk("b", [23], 2), decode("a", 1), decodes=2))
    assert batch.input_ids.tolist() == [23, 51]
    assert batch.positions.tolist() == [2, 1]
    assert batch.slot_mapping.tolist() == [6, 1]
    assert batch.seq_lens.tolist() == [3, 2]
    assert sampling.rows.tolist() == [1, 0]


def test_block_tables_grow_by_what_is_new_and_are_as_wide_as_the_longest_sequence():
    builder = make_builder()
    batch, _ = builder.build(step(new("a", [1] * 4, [9])))
    assert batch.block_tables.tolist() == [[9]]
    for computed, blocks, table in [
        (4, [2], [9, 2]),
        (5, [], [9, 2]),
        (6, [], [9, 2]),
        (7, [], [9, 2]),
        (8, [5], [9, 2, 5]),
    ]:
        batch, _ = builder.build(step(decode("a", computed, blocks), decodes=1))
        assert batch.block_tables.tolist() == [table]
        assert batch.slot_mapping.tolist() == [table[-1] * BLOCK_SIZE + computed % BLOCK_SIZE]
    batch, _ = builder.build(step(new("b", [1], [3])))
    assert batch.block_tables.tolist() == [[3]], "a is not in this step"


def test_blocks_given_ahead_of_their_tokens_are_kept():
    builder = make_builder()
    batch, _ = builder.build(step(new("a", [1, 1], [9, 2, 5], prompt=10, samples=False)))
    assert batch.block_tables.tolist() == [[9]]
    batch, _ = builder.build(step(chunk("a", [1] * 8, 2)))
    assert batch.block_tables.tolist() == [[9, 2, 5]]
    assert batch.slot_mapping.tolist() == [38, 39, 8, 9, 10, 11, 20, 21]


def test_the_tensors_have_the_dtypes_that_kernels_rely_on_and_are_contiguous():
    batch, _ = make_builder().build(step(new("a", [1] * 6, [7, 2]), new("b", [1], [0])))
    tensors = [value for name in batch.__slots__ if isinstance(value := getattr(batch, name), torch.Tensor)]
    assert len(tensors) == 7
    assert all(tensor.is_contiguous() for tensor in tensors)
    assert {tensor.dtype for tensor in tensors} == {torch.int32}


def test_a_built_batch_is_not_changed_by_the_next_one():
    builder = make_builder()
    batch, sampling = builder.build(step(new("a", [11, 12, 13], [7])))
    before = arrays(batch)
    record(builder, sampling, 5)
    builder.build(step(decode("a", 3), new("b", [9] * 6, [1, 2]), decodes=1))
    assert arrays(batch) == before


# -------------------------------------------------------------------------------------------------------------- rows
def test_a_request_dropped_and_added_again_in_one_step_starts_from_nothing():
    """Preempted and resumed at once: other blocks, and ids that it had sampled come back as known tokens."""
    builder = make_builder()
    _, sampling = builder.build(step(new("a", [11, 12, 13, 14, 15], [7, 2])))
    record(builder, sampling, 77)
    builder.build(step(decode("a", 5), decodes=1))
    batch, _ = builder.build(step(new("a", [11, 12, 13], [5], prompt=5, samples=False), dropped=("a",)))
    assert builder.num_rows == 1
    assert batch.block_tables.tolist() == [[5]]
    assert batch.slot_mapping.tolist() == [20, 21, 22]
    batch, _ = builder.build(step(chunk("a", [14, 15, 77], 3, [6])))
    assert batch.block_tables.tolist() == [[5, 6]]
    assert batch.input_ids.tolist() == [14, 15, 77]
    assert batch.slot_mapping.tolist() == [23, 24, 25]


def test_rows_are_reused_after_drops_and_keep_nothing_of_their_last_request():
    builder = make_builder(max_num_seqs=2)
    random = SamplingParams(temperature=0.5, top_k=3, top_p=0.5, seed=1)
    _, sampling = builder.build(step(new("a", [1] * 10, [7, 8, 9], params=random), new("b", [2], [1])))
    rows = dict(zip("ab", sampling.rows.tolist(), strict=True))
    record(builder, sampling, 77, 88)
    batch, sampling = builder.build(step(new("c", [3], [4]), dropped=("a",)))
    assert sampling.rows.tolist() == [rows["a"]]
    assert sampling.random is None, "c is greedy, a was not"
    assert batch.block_tables.tolist() == [[4]]
    batch, sampling = builder.build(step(decode("c", 1), chunk("b", [2] * 8, 1, [5, 6]), decodes=1))
    assert batch.block_tables.tolist() == [[4, 0, 0], [1, 5, 6]], "nothing of a's [7, 8, 9]"
    record(builder, sampling, 66, 99)
    batch, _ = builder.build(step(decode("b", 9), decode("c", 2), decodes=2))
    assert batch.input_ids.tolist() == [99, 66]


def test_as_many_requests_as_there_are_rows_come_and_go_for_ever():
    builder = make_builder(max_num_seqs=3)
    live = []
    for i in range(50):
        dropped = (live.pop(0),) if len(live) == 3 else ()
        request_id = f"request-{i}"
        live.append(request_id)
        batch, sampling = builder.build(step(new(request_id, [i], [i]), dropped=dropped))
        record(builder, sampling, 1000 + i)
        assert builder.num_rows == len(live)
        assert batch.block_tables.tolist() == [[i]]
    batch, _ = builder.build(step(*(decode(request_id, 1) for request_id in live), decodes=3))
    assert batch.input_ids.tolist() == [1047, 1048, 1049]


def test_a_drop_alone_frees_the_row():
    builder = make_builder(max_num_seqs=1)
    builder.build(step(new("a", [1], [0])))
    builder.drop(("a",))
    assert builder.num_rows == 0
    builder.build(step(new("b", [1], [0])))


# ---------------------------------------------------------------------------------------------------------- sampling
def test_no_sampling_parameters_are_sent_when_every_row_is_greedy():
    _, sampling = make_builder().build(step(new("a", [1, 2], [0]), new("b", [3], [1])))
    assert sampling.rows.tolist() == [0, 1]
    assert sampling.random is None


def test_a_random_request_that_does_not_sample_in_this_step_sends_nothing_either():
    random = SamplingParams(temperature=0.7)
    chunked = new("a", [1, 2], [0], prompt=5, samples=False, params=random)
    _, sampling = make_builder().build(step(chunked, new("b", [3], [1])))
    assert sampling.rows.tolist() == [1] and sampling.random is None


def test_each_sampled_row_has_its_own_parameters():
    first = SamplingParams(temperature=0.5, top_k=7, top_p=0.25, min_p=0.125)
    second = SamplingParams(temperature=2.0, top_k=-1, top_p=0.75)
    ignored = SamplingParams(temperature=0.0, top_k=9, top_p=0.1, min_p=0.5)
    _, sampling = make_builder().build(
        step(
            new("a", [1, 2], [0], params=first, seed=11),
            new("b", [1], [1], prompt=3, params=second, seed=12, samples=False),
            new("c", [1], [2], params=ignored, seed=13),
            new("d", [1], [3], params=second, seed=14, sample_index=3),
        )
    )
    random = sampling.random
    assert sampling.rows.tolist() == [0, 2, 3]
    assert random.greedy.tolist() == [False, True, False]
    assert random.temperature.tolist() == [0.5, 1.0, 2.0]
    assert random.top_k.tolist() == [7, 0, -1]
    assert random.top_p.tolist() == [0.25, 1.0, 0.75]
    assert random.min_p.tolist() == [0.125, 0.0, 0.0]
    assert random.seeds[[0, 2]].tolist() == [11, 14]
    assert random.sample_indices[[0, 2]].tolist() == [0, 3]
    assert random.greedy.dtype == torch.bool
    assert (random.temperature.dtype, random.top_p.dtype, random.min_p.dtype) == (torch.float32,) * 3
    integers = (random.top_k, random.seeds, random.sample_indices, random.positions)
    assert {tensor.dtype for tensor in integers} == {torch.int64}


def test_min_p_is_not_sent_when_no_row_has_one():
    greedy, plain = SamplingParams(temperature=0.0, min_p=0.5), SamplingParams(temperature=1.0)
    _, sampling = make_builder().build(step(new("a", [1], [0], params=greedy), new("b", [1], [1], params=plain)))
    assert sampling.random is not None and sampling.random.min_p is None


def test_a_temperature_too_large_for_a_float32_is_the_largest_one():
    """Infinity would make NaN of masked logits."""
    params = SamplingParams(temperature=1e300)
    _, sampling = make_builder().build(step(new("a", [1], [0], params=params)))
    assert sampling.random.temperature.tolist() == [torch.finfo(torch.float32).max]


@pytest.mark.parametrize(
    ("seed", "bits"),
    [(0, 0), (2**63 - 1, 2**63 - 1), (2**63, -(2**63)), (2**63 + 5, -(2**63) + 5), (2**64 - 1, -1)],
)
def test_a_seed_keeps_all_of_its_64_bits(seed, bits):
    params = SamplingParams(temperature=1.0, seed=seed)
    _, sampling = make_builder().build(step(new("a", [1], [0], params=params, seed=seed)))
    assert sampling.random.seeds.tolist() == [bits]
    assert sampling.random.seeds.item() & (2**64 - 1) == seed


def test_the_position_is_the_index_in_the_output_however_the_request_got_there():
    params = SamplingParams(temperature=1.0)
    builder = make_builder()
    _, sampling = builder.build(step(new("a", [1, 2, 3], [0], params=params)))
    assert sampling.random.positions.tolist() == sampling.positions.tolist() == [0]
    record(builder, sampling, 9)
    for index in (1, 2):
        _, sampling = builder.build(step(decode("a", 2 + index, [index]), decodes=1))
        assert sampling.random.positions.tolist() == sampling.positions.tolist() == [index]
        record(builder, sampling, 9)
    # Preempted after three tokens and recomputed in two chunks: the next one is still number 3.
    resumed = new("a", [1, 2, 3, 9], [4], prompt=3, params=params, samples=False)
    builder.build(step(resumed, dropped=("a",)))
    _, sampling = builder.build(step(chunk("a", [9, 9], 4, [5])))
    assert sampling.random.positions.tolist() == sampling.positions.tolist() == [3]


# ---------------------------------------------------------------------------------------------------------- logprobs
def test_nobody_asks_for_logprobs_and_nothing_is_said_of_them():
    _, sampling = make_builder().build(step(new("a", [1, 2], [0]), new("b", [3], [1])))
    assert (sampling.num_logprobs, sampling.prompt_logprobs) == ((), None)


def test_each_sampled_row_says_how_many_logprobs_it_wants():
    def asks(num_logprobs):
        return SamplingParams(temperature=0.0, logprobs=num_logprobs)

    scheduled = [
        new("a", [1], [0], params=asks(0)),
        new("b", [2], [1]),
        new("c", [3], [2], prompt=2, samples=False, params=asks(9)),
        new("d", [4], [3], params=asks(5)),
    ]
    builder = make_builder()
    _, sampling = builder.build(step(*scheduled))
    assert sampling.num_logprobs == (0, -1, 5), "c does not sample"
    _, sampling = builder.build(step(decode("b", 1), new("e", [5], [4]), dropped=("a",)))
    assert sampling.num_logprobs == (), "e has a's row and nothing of a's"
    builder.drop(("c", "d"))
    assert builder._rows_with_logprobs == set(), "a step doesn't even look at its rows"


def test_prompt_positions_come_after_the_sampled_ones():
    asks = SamplingParams(temperature=0.0, prompt_logprobs=2)
    scheduled = [
        new("a", [11, 12, 13], [0]),
        new("b", [21, 22, 23, 24], [1], params=asks, targets=(22, 23, 24), targets_start=0),
        new("c", [31, 32], [2], prompt=5, samples=False, params=asks, targets=(32, 33), targets_start=0),
    ]
    batch, sampling = make_builder().build(step(*scheduled))
    assert batch.logits_indices.tolist() == [2, 6, 3, 4, 5, 7, 8]
    assert sampling.rows.tolist() == [0, 1]
    prompt = sampling.prompt_logprobs
    assert prompt.targets.tolist() == [22, 23, 24, 32, 33] and prompt.targets.dtype == torch.int64
    assert (prompt.counts, prompt.num_best) == ((0, 3, 2), (-1, 2, 2))


def test_prompt_positions_of_a_later_chunk_and_behind_what_was_delivered():
    asks = SamplingParams(temperature=0.0, prompt_logprobs=0)
    builder = make_builder()
    builder.build(step(new("a", [1, 2, 3], [0], prompt=8, samples=False, params=asks)))
    part = chunk("a", [4, 5, 6], 3, [1], samples=False, targets=(5, 6, 7), targets_start=3)
    batch, sampling = builder.build(step(new("b", [9, 9], [2]), part))
    assert batch.logits_indices.tolist() == [1, 2, 3, 4]
    assert sampling.prompt_logprobs.counts == (0, 3)
    # Preempted and computed anew: positions 0 … 5 are not asked again, 6 is.
    again = new("a", [1, 2, 3, 4, 5, 6, 7, 8], [3, 4], params=asks, targets=(8,), targets_start=6)
    batch, sampling = builder.build(step(again, dropped=("a",)))
    assert batch.logits_indices.tolist() == [7, 6]
    assert (sampling.prompt_logprobs.targets.tolist(), sampling.prompt_logprobs.counts) == ([8], (1,))


def test_past_the_prompt_nothing_is_said_of_prompt_logprobs():
    asks = SamplingParams(temperature=0.0, prompt_logprobs=3)
    builder = make_builder()
    _, sampling = builder.build(step(new("a", [1, 2], [0], params=asks, targets=(2,))))
    assert sampling.prompt_logprobs is not None
    record(builder, sampling, 5)
    batch, sampling = builder.build(step(decode("a", 2), decodes=1))
    assert sampling.prompt_logprobs is None and batch.logits_indices is None
    builder.drop(("a",))
    assert builder._rows_with_prompt_logprobs == set()


# ---------------------------------------------------------------------------------------------- logits processors
def test_rows_of_the_logits_processors_come_and_go_with_the_requests():
    builder = make_builder(max_num_seqs=2)
    biased = SamplingParams(temperature=0.0, logit_bias={3: 5.0})
    _, sampling = builder.build(step(new("a", [1], [0], params=biased), new("b", [2], [1])))
    active = [builder.logits_processors.any_active(sampling.rows[[i]]) for i in range(2)]
    assert active == [True, False]
    builder.build(step(new("c", [1], [0]), dropped=("a",)))
    assert not builder.logits_processors.any_active(sampling.rows)


def test_sampled_ids_are_counted_for_the_penalties():
    builder = make_builder()
    penalised = SamplingParams(temperature=0.0, presence_penalty=1.5)
    _, sampling = builder.build(step(new("a", [1], [0]), new("b", [2], [1], params=penalised)))
    record(builder, sampling, 7, 8)
    _, sampling = builder.build(step(decode("b", 1), decode("a", 1), decodes=2))
    logits = torch.zeros(2, VOCAB_SIZE)
    builder.logits_processors.apply(logits, sampling.rows, sampling.positions, CPU)
    assert logits.nonzero().tolist() == [[0, 8]] and logits[0, 8] == -1.5
