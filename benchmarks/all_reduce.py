"""What a sum over the ranks takes, with the residual add and the norm behind it, in a CUDA graph.

    python benchmarks/all_reduce.py --out all_reduce.jsonl      (two or more GPUs of one host; about 30 seconds)

µs a sum, each of a graph of 50 with as many distinct inputs as fit, median of 10 replays, the slowest rank. "nccl": the
sum alone; "nccl_norm": and our kernel for add and norm; "torch_one_shot": torch's kernel over symmetric memory, alone;
"ours": all of it, the way that is chosen for so many rows; "lines, N warps", "blocks" and "copies" are the three ways
where they can be taken, chosen or not. --block-numbers tries other blocks (rows x powers of 2, warps).
"most_apart": the largest difference between a number of ours and of nccl_norm.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("NCCL_NVLS_ENABLE", "0")

import torch
from torch.multiprocessing.spawn import spawn

from pico_vllm.distributed.communicator import NcclCommunicator, connect
from pico_vllm.distributed.rendezvous import LOOPBACK, file_store
from pico_vllm.distributed.sharding import Shard
from pico_vllm.distributed.symmetric_memory import MAX_FEW_ROWS, MAX_ROWS_IN_BLOCKS, _SymmetricMemory
from pico_vllm.environment import collect_environment
from pico_vllm.kernels import all_reduce_triton
from pico_vllm.kernels.all_reduce_triton import all_reduce_add_rms_norm_triton, block_all_reduce_add_rms_norm_triton
from pico_vllm.kernels.triton_backend import TRITON

REPEATS, REPLAYS = 50, 10
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 576, 1024, 2048, 4096, 8192)
#: From so many rows on, blocks and copies are tried.
MIN_ROWS_IN_BLOCKS, MIN_COPIED_ROWS = 32, 256
EPS = 1e-6


def main() -> None:
    """Measure on all GPUs, write a line a size, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSONL file to write")
    parser.add_argument("--hidden-size", type=int, default=3584)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--block-numbers", type=int, nargs=2, help="of a block of rows, and of a warp of it")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        rest = args.ranks, directory, args.hidden_size, args.out, tuple(args.rows), args.block_numbers
        spawn(measure, rest, nprocs=args.ranks)


def measure(
    rank: int,
    size: int,
    directory: str,
    hidden_size: int,
    out: Path,
    num_rows_each: tuple[int, ...],
    block_numbers: tuple[int, int] | None,
) -> None:
    """One rank's part."""
    if block_numbers is not None:
        all_reduce_triton._BLOCK_NUMBERS, all_reduce_triton._NUMBERS_A_WARP = block_numbers
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    communicator = connect(file_store(f"{directory}/store", size), Shard(rank, size), device, addresses=(LOOPBACK,))
    assert isinstance(communicator, NcclCommunicator)
    communicator.reserve(max(max(num_rows_each), MAX_ROWS_IN_BLOCKS), hidden_size, torch.bfloat16)
    symmetric = communicator.symmetric
    assert symmetric is not None, "the ranks don't reach each other's memory"
    generator = torch.Generator(device).manual_seed(rank)
    weight = torch.ones(hidden_size, dtype=torch.bfloat16, device=device)
    rows: list[dict[str, Any]] = []
    with torch.inference_mode():
        for num_rows in num_rows_each:
            count = max(1, min(REPEATS, (256 << 20) // (num_rows * hidden_size * 2)))
            shape = (count, num_rows, hidden_size)
            partials = torch.randn(shape, generator=generator, device=device).to(torch.bfloat16)
            residual = torch.zeros(shape[1:], dtype=torch.bfloat16, device=device)

            def nccl(i: int, partials: torch.Tensor = partials) -> None:
                communicator.all_reduce(partials[i])

            def nccl_norm(i: int, partials: torch.Tensor = partials, residual: torch.Tensor = residual) -> torch.Tensor:
                communicator.all_reduce(partials[i])
                return TRITON.add_rms_norm(partials[i], residual, weight, EPS)[0]

            def ours(i: int, partials: torch.Tensor = partials, residual: torch.Tensor = residual) -> torch.Tensor:
                return symmetric.reduce_add_rms_norm(partials[i], residual, weight, EPS)[0]

            got = ours(0).clone()
            residual.zero_()
            kept = partials[0].clone()
            wanted = nccl_norm(0)
            partials[0] = kept
            residual.zero_()
            ways: dict[str, Callable[[int], Any]] = {"nccl": nccl, "nccl_norm": nccl_norm, "ours": ours}
            if num_rows <= MAX_FEW_ROWS:
                for num_warps in (4, 8, 16, 32):
                    ways[f"lines, {num_warps} warps"] = lambda i, w=num_warps, p=partials, r=residual: (
                        all_reduce_add_rms_norm_triton(p[i], r, weight, EPS, symmetric._rows, num_warps=w)
                    )
            if MIN_ROWS_IN_BLOCKS <= num_rows <= MAX_ROWS_IN_BLOCKS:
                ways["blocks"] = lambda i, p=partials, r=residual: block_all_reduce_add_rms_norm_triton(
                    p[i], r, weight, EPS, symmetric._blocks
                )
            if num_rows >= MIN_COPIED_ROWS:
                ways["copies"] = lambda i, p=partials, r=residual: symmetric._sum_add_rms_norm(
                    symmetric._send(p[i]), p[i], r, weight, EPS
                )
            row: dict[str, Any] = {"rows": num_rows, "most_apart": (got.float() - wanted.float()).abs().max().item()}
            for name, run in ways.items():
                row[name] = round(communicator.largest(seconds(run, count, communicator)) * 1e6, 2)
            rows.append(row)
            del partials
        if block_numbers is None:
            one_shot(rows, communicator, hidden_size, device)
    if rank == 0:
        environment = dataclasses.asdict(collect_environment())
        about = {"environment": environment, "ranks": size, "hidden_size": hidden_size, "block_numbers": block_numbers}
        lines = [about, *rows]
        out.write_text("".join(json.dumps(line, default=str) + "\n" for line in lines))
        for row in rows:
            print(row)
    communicator.largest(0.0)
    communicator.close()


def seconds(run: Callable[[int], Any], count: int, communicator: NcclCommunicator) -> float:
    """Of one call, the median of graphs of many."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        for i in range(3):
            run(i % count)
    torch.cuda.synchronize()
    communicator.largest(0.0)
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for i in range(REPEATS):
            run(i % count)
    times = []
    for _ in range(REPLAYS + 2):
        communicator.largest(0.0)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / REPEATS)
    return statistics.median(times[2:])


def one_shot(
    rows: list[dict[str, Any]], communicator: NcclCommunicator, hidden_size: int, device: torch.device
) -> None:
    """Torch's kernel, for the sizes that it is meant for."""
    symmetric: Any = communicator.symmetric
    name = symmetric.group_name
    for row in rows:
        if row["rows"] > 256:
            break
        try:
            shape = (row["rows"] * hidden_size,)
            x: Any = _SymmetricMemory.empty_strided_p2p(shape, (1,), torch.bfloat16, device)
            _SymmetricMemory.rendezvous(x, name)
            x.fill_(1.0)
            torch.cuda.synchronize()
            communicator.largest(0.0)

            def run(_: int, x: torch.Tensor = x) -> torch.Tensor:
                return torch.ops.symm_mem.one_shot_all_reduce(x, "sum", name)

            row["torch_one_shot"] = round(communicator.largest(seconds(run, 1, communicator)) * 1e6, 2)
        except RuntimeError as error:
            row["torch_one_shot"] = str(error).splitlines()[0]


if __name__ == "__main__":
    main()
