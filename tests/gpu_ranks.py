"""Ranks of a test, each a process with a GPU and a communicator of its own."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing

from pico_vllm.distributed.communicator import Communicator, connect
from pico_vllm.distributed.rendezvous import LOOPBACK, file_store
from pico_vllm.distributed.sharding import Shard

TIMEOUT_S = 120


def on_each_gpu(size: int, directory: Any, run: Callable[..., Any], *args: Any) -> list[Any]:
    """What ``run(communicator, *args)`` returns on each rank; an error of one is raised here."""
    context = torch.multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    processes = [
        context.Process(target=_one, args=(queue, rank, size, str(directory), run, args), daemon=True)
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(TIMEOUT_S)
    still_running = [process for process in processes if process.is_alive()]
    for process in still_running:
        process.kill()
    results = {}
    while not queue.empty():
        rank, result, error = queue.get()
        assert error is None, f"rank {rank}:\n{error}"
        results[rank] = result
    assert not still_running, f"{len(still_running)} ranks hang"
    assert len(results) == size, f"only ranks {sorted(results)} have answered"
    return [results[rank] for rank in range(size)]


def _one(queue: Any, rank: int, size: int, directory: str, run: Callable[..., Any], args: tuple[Any, ...]) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    communicator: Communicator | None = None
    try:
        store = file_store(f"{directory}/store", size)
        communicator = connect(store, Shard(rank, size), device, addresses=(LOOPBACK,))
        with torch.inference_mode():
            result = run(communicator, *args)
        torch.cuda.synchronize()
        queue.put((rank, result, None))
    except BaseException:
        queue.put((rank, None, traceback.format_exc()))
        raise
