"""All-reduce over symmetric memory: ranks that really meet, launch after launch, against the sum of all at once."""

import pytest
import torch

from kernel_cases import NAN, in_wider_rows, random_tensor
from kernel_implementations import (
    FLOATS,
    RUNS_TRITON,
    TRITON_DEVICE,
    assert_bitwise,
    assert_near_oracle,
    uninitialised_memory_is_nan,
)
from pico_vllm.kernels.all_reduce import all_reduce_add_rms_norm_reference, all_reduce_reference
from pico_vllm.kernels.rms_norm import rms_norm_reference
from pico_vllm.kernels.sampling import greedy_reference

if RUNS_TRITON:
    import all_reduce_programs as programs
    from all_reduce_ranks import MAX_ROWS, on_each_rank
    from pico_vllm.kernels.all_reduce_triton import (
        SymmetricRows,
        sum_add_rms_norm_triton,
        symmetric_blocks_bytes,
        symmetric_rows_bytes,
    )

needs_triton = pytest.mark.skipif(not RUNS_TRITON, reason="needs a GPU or TRITON_INTERPRET=1")
EPS = 1e-5


def test_ranks_are_added_in_fp32_and_rounded_once_by_hand():
    # 257.5 and 258.5 are 258 in bf16; 256 + 0.5 + 1 would be 256 if every sum were rounded.
    partials = [torch.tensor([[256.0, 256.0]]), torch.tensor([[0.5, 1.5]]), torch.tensor([[1.0, 1.0]])]
    summed = all_reduce_reference([partial.bfloat16() for partial in partials], torch.bfloat16)
    assert summed.tolist() == [[258.0, 258.0]]


def test_splits_are_rounded_before_ranks_are_added_by_hand():
    splits = torch.tensor([[[256.0]], [[0.75]]])  # 256.75 is 256 in bf16
    assert all_reduce_reference([splits, splits], torch.bfloat16).tolist() == [[512.0]]
    assert all_reduce_reference([splits, splits], torch.float32).tolist() == [[513.5]]


def test_reference_adds_and_normalises_by_hand():
    partials = [torch.tensor([[1.0, 2.0]]), torch.tensor([[0.5, 3.0]])]
    residual = torch.tensor([[1.5, -1.0]])
    y, summed = all_reduce_add_rms_norm_reference(partials, residual, torch.tensor([1.0, -2.0]), 0.0)
    assert summed.tolist() == [[3.0, 4.0]]
    expected = torch.tensor([[0.848528137423857, -2.262741699796952]], dtype=torch.float64)
    assert_near_oracle("rms_norm", y, expected)
    assert residual.tolist() == [[1.5, -1.0]]


def assert_ranks_agree_with_the_reference(results, launches, size, hidden, dtype):
    """Residuals and plain sums bitwise, norms within the tolerance, and all ranks bitwise equal to each other."""
    for i, launch in enumerate(launches):
        partials = [programs.partial(launch, rank, i, hidden, dtype) for rank in range(size)]
        y = results[0][2 * i]
        if launch.normalises:
            _, summed = all_reduce_add_rms_norm_reference(
                partials, programs.residual(launch, i, hidden, dtype), programs.weight(hidden, dtype), EPS
            )
            assert_bitwise(results[0][2 * i + 1], summed)
            oracle = rms_norm_reference(summed.double(), programs.weight(hidden, dtype).double(), EPS)
            assert_near_oracle("rms_norm", y, oracle)
        else:
            assert_bitwise(y, all_reduce_reference(partials, dtype))
        for result in results[1:]:
            assert_bitwise(result[2 * i], y)
            assert_bitwise(result[2 * i + 1], results[0][2 * i + 1])


@needs_triton
@pytest.mark.parametrize(
    "size, hidden, dtype",
    [
        (2, 3584, torch.bfloat16),
        (3, 1536, torch.float32),
        (3, 96, torch.bfloat16),
        (4, 32, torch.float16),
    ],
)
@pytest.mark.parametrize("in_blocks", [False, True], ids=["rows", "blocks"])
def test_all_ranks_have_the_sum_in_the_order_of_ranks_launch_after_launch(size, hidden, dtype, in_blocks):
    launches = programs.mixed_launches(in_blocks=in_blocks)
    results = on_each_rank(size, programs.run_launches, launches, hidden, dtype, hidden=hidden, dtype=dtype)
    assert_ranks_agree_with_the_reference(results, launches, size, hidden, dtype)


@needs_triton
@pytest.mark.parametrize(("hidden", "in_blocks"), [(32, False), (3584, True)], ids=["rows", "blocks"])
def test_ranks_that_are_late_by_turns_get_no_row_of_another_launch(hidden, in_blocks):
    """The other one has sent its next row before a late one looks at this one: it must lie in another slot."""
    launches = programs.mixed_launches(pauses=True, in_blocks=in_blocks)
    results = on_each_rank(
        2, programs.run_launches, launches, hidden, torch.float32, hidden=hidden, dtype=torch.float32
    )
    assert_ranks_agree_with_the_reference(results, launches, 2, hidden, torch.float32)


@needs_triton
def test_epochs_wrap_around():
    """From 2^31 - 3 over the sign, and from -3 over 0, which is what fresh memory holds.

    A block's flag is compared by its difference: fresh memory must be behind the first epoch.
    """
    for first_epoch, in_blocks in ((2**31 - 3, False), (-3, False), (2**31 - 3, True)):
        launches = programs.mixed_launches(in_blocks=in_blocks)[:8]
        results = on_each_rank(
            2, programs.run_launches, launches, 32, torch.bfloat16, hidden=32, dtype=torch.bfloat16,
            first_epoch=first_epoch,
        )  # fmt: skip
        assert_ranks_agree_with_the_reference(results, launches, 2, 32, torch.bfloat16)


@needs_triton
def test_signals_come_after_the_copies_before_them():
    for rank, result in enumerate(on_each_rank(3, programs.copy_and_signal, 6, hidden=32, dtype=torch.float32)):
        for i, got in enumerate(result[1::2]):
            assert got.tolist() == [100.0 * sender + i for sender in range(3) if sender != rank]


@needs_triton
def test_an_abort_ends_all_waits():
    """Rank 1 never comes."""
    finished, _ = on_each_rank(2, programs.wait_for_nobody, hidden=32, dtype=torch.float32)
    assert finished[0].tolist() == [1]


@needs_triton
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("num_rows, hidden, size", [(1, 3584, 2), (63, 96, 3), (5, 100, 4), (0, 96, 2)])
def test_sum_of_received_rows(num_rows, hidden, size, dtype):
    partials = [random_tensor(num_rows, hidden, dtype=dtype, device=TRITON_DEVICE, seed=r) for r in range(size)]
    residual = random_tensor(num_rows, hidden, dtype=dtype, device=TRITON_DEVICE, seed=10)
    weight = random_tensor(hidden, dtype=dtype, device=TRITON_DEVICE, seed=11)
    _, expected = all_reduce_add_rms_norm_reference(partials, residual, weight, EPS)
    for rank in range(size):
        received = torch.full((size, num_rows + 3, hidden), NAN, dtype=dtype, device=TRITON_DEVICE)
        for sender in range(size):
            if sender != rank:
                received[sender, :num_rows] = partials[sender]
        own = residual.clone()
        with uninitialised_memory_is_nan():
            y, summed = sum_add_rms_norm_triton(in_wider_rows(partials[rank]), received, own, weight, EPS, rank)
        assert summed is own
        assert_bitwise(summed, expected)
        assert_near_oracle("rms_norm", y, rms_norm_reference(expected.double(), weight.double(), EPS))


@needs_triton
@pytest.mark.parametrize(("size", "num_tokens", "dtype"), [(2, 76, torch.bfloat16), (3, 5000, torch.float32)])
def test_ranks_choose_the_best_token_of_all_ranks_and_keep_it(size, num_tokens, dtype):
    """Ties within a rank and between ranks, a best one on each rank, -inf and NaN everywhere but in one place."""
    logits = [
        random_tensor(num_rows, size * num_tokens, dtype=dtype, seed=num_rows).round() for num_rows in (1, 5, 2, 1, 4)
    ]
    for rank in range(size):
        logits[1][rank, rank * num_tokens + 3] = 100.0
    logits[2][:] = 7.0
    logits[2][1, num_tokens] = 8.0
    logits[4][:] = torch.tensor([float("-inf"), NAN, NAN, -3.0])[:, None]
    logits[4][2, -1] = -100.0
    kept_rows = [torch.randperm(10, generator=torch.Generator().manual_seed(i))[: len(x)] for i, x in enumerate(logits)]
    results = on_each_rank(
        size, programs.choose_tokens, logits, num_tokens, kept_rows, hidden=2, dtype=torch.float32
    )  # fmt: skip
    kept = torch.full((10,), -1, dtype=torch.int32)
    for i, (whole, rows) in enumerate(zip(logits, kept_rows, strict=True)):
        expected = greedy_reference(whole.nan_to_num(nan=float("-inf")), kept, rows)
        for result in results:
            assert result[2 * i].tolist() == expected.tolist()
            assert result[2 * i + 1].tolist() == kept.tolist()


@needs_triton
def test_a_buffer_of_blocks_has_flags_two_slots_and_every_sender():
    # 2 rows a block, so 3 flags a sender, in a whole 256 bytes; then 2 slots x 2 senders x 5 rows of 3584 bf16.
    assert symmetric_blocks_bytes(2, 5, 3584, torch.bfloat16) == 256 + 2 * 2 * 5 * 3584 * 2


@needs_triton
def test_the_buffer_has_16_bytes_for_8_two_slots_and_every_sender():
    # 3584 bf16 = 896 chunks; x 16 bytes x 64 rows x 2 senders x 2 slots.
    assert symmetric_rows_bytes(2, 64, 3584, torch.bfloat16) == 896 * 16 * 64 * 2 * 2
    assert symmetric_rows_bytes(3, 1, 2, torch.float32) == 16 * 3 * 2


@needs_triton
def test_rows_of_no_whole_chunks_are_refused():
    words = torch.zeros(MAX_ROWS, dtype=torch.int32)
    with pytest.raises(AssertionError):
        SymmetricRows(torch.zeros(2, dtype=torch.int64), words, words[:1], 0, MAX_ROWS, 30, torch.bfloat16)
