"""Ranks for the tests of the all-reduce kernels: processes that share buffers, or streams of one GPU.

Interpreted kernels run to their end before the next line, so ranks that wait for each other must be processes; their
buffers are one file that each of them maps, at addresses of its own. They are forked from a server that has imported
torch and triton. On a GPU launches don't wait, and ranks are streams.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import torch
from triton.runtime.interpreter import InterpreterBuilder

from kernel_implementations import IS_INTERPRETED, TRITON_DEVICE
from pico_vllm.kernels.all_reduce_triton import (
    SymmetricBlocks,
    SymmetricRows,
    num_blocks,
    symmetric_blocks_bytes,
    symmetric_rows_bytes,
)

TIMEOUT_S = 30
MAX_ROWS = 5
#: Where rows travel in blocks.
MAX_ROWS_IN_BLOCKS = 11
#: Beyond what rows need: flags of signals, [size] int32.
FLAGS_BYTES = 64
#: A rank's next launch sends, sleeps so long, and only then looks at what it got. Of a process; interpreted alone.
pause_before_poll_s = 0.0


@dataclass
class Rank:
    """What one rank's program has."""

    rank: int
    size: int
    buffers: list[torch.Tensor]  # bytes, of all ranks
    rows: SymmetricRows
    blocks: SymmetricBlocks

    @property
    def buffer(self) -> torch.Tensor:
        """This rank's own."""
        return self.buffers[self.rank]


def on_each_rank(
    size: int, program: Callable[..., Any], *arguments: Any, hidden: int, dtype: torch.dtype, first_epoch: int = 1
) -> list[Any]:
    """What ``program(rank, *arguments)`` returns on each rank, tensors on the CPU.

    Args:
        size: number of ranks.
        program: a generator function of a module; tensors that it yields are the result, and on a GPU the ranks' parts
            between two yields run side by side.
        arguments: for it.
        hidden, dtype: of rows.
        first_epoch: as if that many launches less one had been before.
    """
    num_bytes = _blocks_at(size, hidden, dtype) + FLAGS_BYTES
    num_bytes += symmetric_blocks_bytes(size, MAX_ROWS_IN_BLOCKS, hidden, dtype)
    if not IS_INTERPRETED:
        return _on_streams(size, num_bytes, hidden, dtype, first_epoch, program, arguments)
    context = _forks_of_a_server()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "buffers"
        torch.from_file(str(path), shared=True, size=size * num_bytes, dtype=torch.uint8).zero_()
        ends, processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            made = (rank, size, str(path), num_bytes, hidden, dtype, first_epoch)
            process = context.Process(target=_serve_rank, args=(theirs, made, program, arguments), daemon=True)
            process.start()
            theirs.close()
            ends.append(ours)
            processes.append(process)
        try:
            return [_received(end, rank) for rank, end in enumerate(ends)]
        finally:
            for process in processes:
                process.kill()
                process.join()


@functools.cache
def _forks_of_a_server() -> ForkServerContext:
    """The server is told of sys.path by its environment: Python before 3.13 doesn't."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["all_reduce_programs", "interpreter_bf16"])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    try:
        forkserver.ensure_running()
    finally:
        os.environ.pop("PYTHONPATH")
        if before is not None:
            os.environ["PYTHONPATH"] = before
    return context


def _yield_while_polling() -> None:
    """Ranks are more than cores: one that waits lets the next one run."""
    load = InterpreterBuilder.create_masked_load

    def yielding_load(self: Any, *arguments: Any) -> Any:
        global pause_before_poll_s
        if arguments[-1]:  # is_volatile
            time.sleep(pause_before_poll_s)
            pause_before_poll_s = 0.0
            os.sched_yield()
        return load(self, *arguments)

    InterpreterBuilder.create_masked_load = yielding_load


def _received(end: Connection, rank: int) -> list[torch.Tensor]:
    assert end.poll(TIMEOUT_S), f"rank {rank} says nothing for {TIMEOUT_S} s"
    what, value = end.recv()
    assert what == "tensors", f"rank {rank}: {value}"
    return [torch.frombuffer(bytearray(data), dtype=dtype).view(shape) for data, dtype, shape in value]


def _serve_rank(
    end: Connection, made: tuple[Any, ...], program: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    from interpreter_bf16 import make_bf16_exact

    make_bf16_exact()
    _yield_while_polling()
    torch.set_num_threads(1)
    rank, size, path, num_bytes, hidden, dtype, first_epoch = made
    buffers = torch.from_file(path, shared=True, size=size * num_bytes, dtype=torch.uint8).view(size, num_bytes)
    try:
        results = list(program(_make_rank(rank, list(buffers), hidden, dtype, first_epoch), *arguments))
        end.send(("tensors", [(r.contiguous().view(torch.uint8).numpy().tobytes(), r.dtype, r.shape) for r in results]))
    except BaseException as error:
        end.send(("error", repr(error)))
        raise


def _make_rank(rank: int, buffers: list[torch.Tensor], hidden: int, dtype: torch.dtype, first_epoch: int) -> Rank:
    device = buffers[0].device
    peers = torch.tensor([buffer.data_ptr() for buffer in buffers], dtype=torch.int64, device=device)
    epochs = torch.full((MAX_ROWS,), first_epoch - 1, dtype=torch.int32, device=device)
    abort = torch.zeros(1, dtype=torch.int32, device=device)
    rows = SymmetricRows(peers, epochs, abort, rank, MAX_ROWS, hidden, dtype)
    blocks = SymmetricBlocks(
        peers=peers + _blocks_at(len(buffers), hidden, dtype),
        epochs=epochs[:1].repeat(num_blocks(MAX_ROWS_IN_BLOCKS, hidden)),
        tickets=torch.zeros(2, dtype=torch.int32, device=device),
        abort=abort,
        rank=rank,
        max_rows=MAX_ROWS_IN_BLOCKS,
        hidden_size=hidden,
        dtype=dtype,
    )
    return Rank(rank, len(buffers), buffers, rows, blocks)


def _blocks_at(size: int, hidden: int, dtype: torch.dtype) -> int:
    """Where the blocks' part of a buffer begins: at a multiple of 16, like the buffer."""
    return symmetric_rows_bytes(size, MAX_ROWS, hidden, dtype)


def _on_streams(
    size: int,
    num_bytes: int,
    hidden: int,
    dtype: torch.dtype,
    first_epoch: int,
    program: Callable[..., Iterator[torch.Tensor]],
    arguments: tuple[Any, ...],
) -> list[Any]:
    """Twice: first with the word that ends waits set, since loading a kernel may wait for one that waits for it."""
    results: list[list[torch.Tensor]] = []
    for is_rehearsal in (True, False):
        buffers = [torch.zeros(num_bytes, dtype=torch.uint8, device=TRITON_DEVICE) for _ in range(size)]
        ranks = [_make_rank(rank, buffers, hidden, dtype, first_epoch) for rank in range(size)]
        for rank in ranks:
            rank.rows.abort.fill_(is_rehearsal)
        torch.cuda.synchronize()
        watchdog = threading.Timer(TIMEOUT_S, lambda ranks=ranks: [rank.rows.abort.fill_(1) for rank in ranks])
        watchdog.start()
        results = _in_rounds([program(rank, *arguments) for rank in ranks])
        torch.cuda.synchronize()
        watchdog.cancel()
    return [[tensor.cpu() for tensor in result] for result in results]


def _in_rounds(programs: list[Iterator[torch.Tensor]]) -> list[list[torch.Tensor]]:
    """What each yields; each has a stream, and goes on when all have come as far."""
    streams = [torch.cuda.Stream() for _ in programs]
    results: list[list[torch.Tensor]] = [[] for _ in programs]
    remaining = True
    while remaining:
        for program, stream, result in zip(programs, streams, results, strict=True):
            with torch.cuda.stream(stream):
                tensor = next(program, None)
            remaining = tensor is not None
            if tensor is not None:
                result.append(tensor)
    return results
