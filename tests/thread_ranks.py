"""Several ranks of one model as threads of the test's process: collectives of plain torch, no processes to start."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from pico_vllm.distributed.sharding import Shard

TIMEOUT_S = 30


class ThreadCommunicator:
    """Sums in the order of ranks, so of the same bits on all of them."""

    def __init__(self, shard: Shard, slots: list[Any], barrier: threading.Barrier) -> None:
        self.shard = shard
        self.symmetric = None
        self._slots, self._barrier = slots, barrier
        self.num_calls = self.num_under_way = self.most_under_way = 0

    def all_reduce(self, tensor: torch.Tensor) -> None:
        total = sum(self._exchange(tensor)[1:], start=self._slots[0].clone())
        self._barrier.wait()
        tensor.copy_(total)
        self._barrier.wait()

    def start_all_reduce(self, tensor: torch.Tensor) -> Callable[[], None]:
        """Nothing happens before the end, and until then the tensor is spoilt: nobody may look at it."""
        kept = tensor.clone()
        tensor.fill_(float("nan"))
        self.num_under_way += 1
        self.most_under_way = max(self.most_under_way, self.num_under_way)

        def wait() -> None:
            self.num_under_way -= 1
            tensor.copy_(kept)
            self.all_reduce(tensor)

        return wait

    def reserve(self, num_tokens: int, hidden_size: int, dtype: torch.dtype) -> None:
        pass

    def all_gather(self, tensor: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(torch.stack(self._exchange(tensor)))
        self._barrier.wait()

    def largest(self, value: float) -> float:
        largest = max(self._exchange(value))
        self._barrier.wait()
        return largest

    def abort(self) -> None:
        self._barrier.abort()

    def _exchange(self, value: Any) -> list[Any]:
        self.num_calls += 1
        self._slots[self.shard.rank] = value
        self._barrier.wait()
        return self._slots


def on_each_rank(size: int, run: Callable[[ThreadCommunicator], Any]) -> list[Any]:
    """What each rank's run returns; an exception in one ends all, and is raised here."""
    barrier, slots = threading.Barrier(size, timeout=TIMEOUT_S), [None] * size

    def one(rank: int) -> Any:
        communicator = ThreadCommunicator(Shard(rank, size), slots, barrier)
        try:
            with torch.inference_mode():  # of each thread its own
                return run(communicator)
        except threading.BrokenBarrierError:
            return None  # another rank says why
        except BaseException:
            communicator.abort()
            raise

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(one, range(size)))
