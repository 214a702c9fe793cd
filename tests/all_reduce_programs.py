"""What ranks run in the tests of the all-reduce kernels, and the numbers that they do it with."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton.language as tl

import all_reduce_ranks
from all_reduce_ranks import FLAGS_BYTES, Rank
from kernel_cases import NAN, random_tensor
from kernel_implementations import IS_INTERPRETED, TRITON_DEVICE, uninitialised_memory_is_nan
from pico_vllm.kernels import all_reduce_triton, best_of_ranks_triton

EPS = 1e-5


@dataclass(frozen=True)
class Launch:
    """One of the sequence that all ranks run.

    Attributes:
        num_rows, num_splits: of the partial; no splits = a partial in the dtype.
        normalises: and adds to the residual stream; else it is the plain sum.
        late_ranks: those that sleep between sending and looking.
        in_blocks: how rows travel.
    """

    num_rows: int
    num_splits: int
    normalises: bool
    late_ranks: tuple[int, ...] = ()
    in_blocks: bool = False


def mixed_launches(*, pauses: bool = False, in_blocks: bool = False) -> list[Launch]:
    """20 launches of 1 to 5 rows (often 1: the same row every time), of all kinds; of up to 11 in blocks."""
    chosen = random.Random(0)
    return [
        Launch(
            num_rows=chosen.choice((1, 1, 2, 5, 8, 11) if in_blocks else (1, 1, 1, 2, 3, 5)),
            num_splits=0 if in_blocks else chosen.choice((0, 0, 1, 3)),
            normalises=chosen.random() < 0.75,
            late_ranks=(i // 3 % 2,) if pauses else (),
            in_blocks=in_blocks,
        )
        for i in range(20)
    ]


def partial(launch: Launch, rank: int, i: int, hidden: int, dtype: torch.dtype) -> torch.Tensor:
    """Of growing size by rank, so that another order gives other bits."""
    seed, size = 100 * i + rank, 0.3 * 4**rank
    if launch.num_splits == 0:
        return (random_tensor(launch.num_rows, hidden, dtype=torch.float32, seed=seed) * size).to(dtype)
    # Multiples of 1/64: their sum is exact in any order.
    splits = random_tensor(launch.num_splits, launch.num_rows, hidden, dtype=torch.float32, seed=seed)
    return (splits * size * 64).round() / 64


def residual(launch: Launch, i: int, hidden: int, dtype: torch.dtype) -> torch.Tensor:
    return random_tensor(launch.num_rows, hidden, dtype=dtype, seed=100 * i + 50)


def weight(hidden: int, dtype: torch.dtype) -> torch.Tensor:
    return random_tensor(hidden, dtype=dtype, seed=7)


def run_launches(rank: Rank, launches: list[Launch], hidden: int, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Yields y and the new residual (or y again) of every launch. The residual lies in wider rows, in NaN."""
    of_norm = weight(hidden, dtype).to(TRITON_DEVICE)
    for i, launch in enumerate(launches):
        own = partial(launch, rank.rank, i, hidden, dtype).to(TRITON_DEVICE)
        wide = torch.full((launch.num_rows, hidden + 8), NAN, dtype=dtype, device=TRITON_DEVICE)
        wide[:, :hidden] = residual(launch, i, hidden, dtype)
        if rank.rank in launch.late_ranks:
            all_reduce_ranks.pause_before_poll_s = 0.02
        with uninitialised_memory_is_nan():
            if not launch.normalises and launch.in_blocks:
                y = summed = all_reduce_triton.block_all_reduce_triton(own, rank.blocks)
            elif not launch.normalises:
                y = summed = all_reduce_triton.all_reduce_triton(own, rank.rows)
            else:
                fused = all_reduce_triton.all_reduce_add_rms_norm_triton
                in_blocks = all_reduce_triton.block_all_reduce_add_rms_norm_triton
                sent = own, wide[:, :hidden], of_norm, EPS
                y, summed = in_blocks(*sent, rank.blocks) if launch.in_blocks else fused(*sent, rank.rows)
                assert summed.data_ptr() == wide.data_ptr()
        yield y
        yield summed
        assert wide[:, hidden:].isnan().all()


def copy_and_signal(rank: Rank, count: int) -> Iterator[torch.Tensor]:
    """Copies a number to every other rank, in two places by turns, signals, waits, and yields what it got."""
    device = rank.buffer.device
    flags_offset = rank.buffer.shape[0] - FLAGS_BYTES
    flags = rank.buffer[flags_offset:].view(torch.int32)[: rank.size]
    signals, waits = (torch.zeros(1, dtype=torch.int32, device=device) for _ in range(2))
    for i in range(count):
        for peer in range(rank.size):
            if peer != rank.rank:
                place = rank.buffers[peer][: 8 * rank.size].view(torch.float32)
                place[i % 2 * rank.size + rank.rank] = 100.0 * rank.rank + i
        all_reduce_triton.signal_triton(rank.rows.peers, flags_offset, signals, rank.rank)
        yield torch.zeros(1)
        all_reduce_triton.wait_triton(flags, waits, rank.rows.abort, rank.rank)
        own = rank.buffer[: 8 * rank.size].view(torch.float32)[i % 2 * rank.size :]
        yield torch.stack([own[sender] for sender in range(rank.size) if sender != rank.rank])


def wait_for_nobody(rank: Rank) -> Iterator[torch.Tensor]:
    """Rank 0 waits for rank 1, which does nothing, until a thread sets the word."""
    if IS_INTERPRETED:
        all_reduce_triton._POLLS_A_LOOK = tl.constexpr(16)
    if rank.rank == 0:
        timer = threading.Timer(0.2, lambda: rank.rows.abort.fill_(1))
        timer.start()
        partial = torch.ones(2, rank.rows.hidden_size, device=rank.buffer.device)
        all_reduce_triton.all_reduce_triton(partial, rank.rows)
        all_reduce_triton.block_all_reduce_triton(partial, rank.blocks)
        flags = torch.zeros(2, dtype=torch.int32, device=rank.buffer.device)
        all_reduce_triton.wait_triton(flags, torch.zeros_like(flags[:1]), rank.rows.abort, rank.rank)
        timer.join()
    yield torch.tensor([1])


def choose_tokens(
    rank: Rank, logits: list[torch.Tensor], num_tokens: int, kept_rows: list[torch.Tensor]
) -> Iterator[torch.Tensor]:
    """Of each logits, which are those of all ranks: yields the ids, and what is kept after each."""
    device = rank.buffer.device
    kept = torch.full((10,), -1, dtype=torch.int32, device=device)
    for whole, rows in zip(logits, kept_rows, strict=True):
        own = whole[:, rank.rank * num_tokens :][:, :num_tokens].to(device)
        with uninitialised_memory_is_nan():
            yield best_of_ranks_triton.greedy_of_ranks_triton(own, kept, rows.to(device), rank.rows)
        yield kept.clone()
