"""Communicator: what ranks need of each other, and the libraries that do it: gloo on a CPU, NCCL on GPUs.

Each holds a process group of its own, made of a store that the ranks share; torch's global process group is left to the
application, and several engines in one process don't meet. A communicator knows no layers. Which one a device gets is
decided in ``connect`` alone.
"""

from __future__ import annotations

import importlib.util
import os
import threading
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed

from pico_vllm.config import MIN_COMPUTE_CAPABILITY
from pico_vllm.distributed.sharding import Shard
from pico_vllm.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch._C._distributed_c10d import Store

    from pico_vllm.distributed.symmetric_memory import SymmetricMemory

_c10d: Any = torch.distributed  # the type stubs lack most of its classes' methods

#: A rank that is late by this much is taken for lost: steps and captures take seconds, loading a model minutes.
TIMEOUT = timedelta(minutes=10)
#: For NCCL to end; it takes a fraction of that.
CLOSE_S = 5.0

#: What NCCL and torch around it would do by themselves: NVLink multicast; a monitor that ends the process when an abort
#: takes long, and looks for other ranks' complaints in the store; a watchdog that ends it after an error. A lost rank
#: is the executor's to notice.
NCCL_ENVIRONMENT = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
}


class RankLostError(Exception):
    """Another rank did not take part: it has died, or is stuck. What it says of itself is the executor's to find."""


class Communicator(Protocol):
    """Collective operations: every rank calls the same ones in the same order, with equal shapes and dtypes.

    Raises:
        RankLostError: from any of them, where the library notices that a rank is gone.
    """

    @property
    def shard(self) -> Shard:
        """Which rank this is, of how many."""
        ...

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Replace a contiguous tensor by its sum over the ranks, of the same bits on all of them."""
        ...

    #: What sums by our own kernels, after ``reserve``; None = there is none here.
    symmetric: SymmetricMemory | None

    def start_all_reduce(self, tensor: torch.Tensor) -> Callable[[], None]:
        """Begin an ``all_reduce``, which has ended when the returned function has: leave the tensor alone until then.

        Others may be begun meanwhile, by all ranks in the same order.
        """
        ...

    def reserve(self, num_tokens: int, hidden_size: int, dtype: torch.dtype) -> None:
        """Make room for sums of [num_tokens, hidden_size]; once, on all ranks."""
        ...

    def all_gather(self, tensor: torch.Tensor, out: torch.Tensor) -> None:
        """Every rank's tensor, in the order of ranks, into ``out`` [size, *tensor.shape]; both contiguous."""
        ...

    def largest(self, value: float) -> float:
        """The largest of the ranks' numbers; waits for all of them on the host."""
        ...

    def abort(self) -> None:
        """End every operation under way with an error, from any thread; none may follow. Safe to call twice."""
        ...

    def close(self) -> None:
        """Abort, and wait for what the libraries still do: their threads must not outlive the interpreter."""
        ...


class GlooCommunicator:
    """gloo over TCP, for tensors on a CPU.

    Args:
        store: that all ranks share.
        shard: this rank, of how many.
        addresses: names of interfaces' addresses to listen at; () = what gloo finds for this host's name.
    """

    def __init__(self, store: Store, shard: Shard, *, addresses: Sequence[str] = ()) -> None:
        self.shard = shard
        self.symmetric: SymmetricMemory | None = None
        options = _c10d.ProcessGroupGloo._Options()
        options._timeout = TIMEOUT
        make, default = _c10d.ProcessGroupGloo.create_device, _c10d.ProcessGroupGloo.create_default_device
        options._devices = [make(hostname=address) for address in addresses] or [default()]
        with _lost_if_it_fails():
            self._group = _c10d.ProcessGroupGloo(store, shard.rank, shard.size, options)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """The sum; of 16-bit tensors in fp32 and rounded once, since nothing here is short of bandwidth."""
        self.start_all_reduce(tensor)()

    def start_all_reduce(self, tensor: torch.Tensor) -> Callable[[], None]:
        """A thread of gloo's does it."""
        wide = tensor.float()  # itself, where it is fp32
        with _lost_if_it_fails():
            work = self._group.allreduce([wide])

        def wait() -> None:
            with _lost_if_it_fails():
                work.wait()
            if wide is not tensor:
                tensor.copy_(wide)

        return wait

    def reserve(self, num_tokens: int, hidden_size: int, dtype: torch.dtype) -> None:
        """gloo has room of its own."""

    def all_gather(self, tensor: torch.Tensor, out: torch.Tensor) -> None:
        """All of them."""
        with _lost_if_it_fails():
            self._group._allgather_base(out.view(-1), tensor.view(-1)).wait()

    def largest(self, value: float) -> float:
        """Gathered as fp64, in which numbers of blocks are exact."""
        values = torch.empty(self.shard.size, dtype=torch.float64)
        self.all_gather(torch.tensor([value], dtype=torch.float64), values)
        return values.max().item()

    def abort(self) -> None:
        """Close the connections; the others notice, too."""
        self._group.abort()

    def close(self) -> None:
        """Nothing goes on."""
        self.abort()


class NcclCommunicator:
    """NCCL, for tensors on GPUs; capturable. What is decided on the host goes over gloo beside it.

    Where all GPUs are of one host and reach each other's memory, steps are summed by our own kernels (``symmetric``);
    NCCL has the rest.

    Args:
        store: that all ranks share.
        shard: this rank, of how many.
        device: of this rank; launches go to its current stream.
        host: for numbers of the host.
    """

    def __init__(self, store: Store, shard: Shard, device: torch.device, host: GlooCommunicator) -> None:
        self.shard = shard
        self.symmetric: SymmetricMemory | None = None
        self._store, self._device, self._host = store, device, host
        refuse_unlike(store, shard, torch.cuda.get_device_name(device))
        for name, value in NCCL_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        options = _c10d.ProcessGroupNCCL.Options()
        options._timeout = TIMEOUT
        self._group = _c10d.ProcessGroupNCCL(_c10d.PrefixStore("nccl", store), shard.rank, shard.size, options)
        self.all_reduce(torch.zeros(1, device=device))  # connects: nothing may be set up while a graph is captured
        torch.cuda.synchronize(device)
        self._ends = threading.Event()
        # Made now: at the interpreter's end no thread can be.
        self._aborter = threading.Thread(
            target=_abort_at, args=(self._ends, self._group), name="nccl-abort", daemon=True
        )
        self._aborter.start()

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """The sum, in the tensor's dtype; the stream waits for it, the host does not."""
        with _lost_if_it_fails():
            self._group.allreduce([tensor]).wait()

    def start_all_reduce(self, tensor: torch.Tensor) -> Callable[[], None]:
        """On NCCL's own stream, which waits for this one now; this one waits for it at the end."""
        with _lost_if_it_fails():
            return self._group.allreduce([tensor]).wait

    def reserve(self, num_tokens: int, hidden_size: int, dtype: torch.dtype) -> None:
        """Symmetric memory, if every rank can have it and such rows fit its words."""
        if hidden_size * dtype.itemsize % 8 != 0 or self._host.largest(0.0 if _has_triton(self._device) else 1.0) > 0:
            return
        from pico_vllm.distributed.symmetric_memory import SymmetricMemory, can_reach_peers

        if self._host.largest(0.0 if can_reach_peers(self._store, self.shard, self._device) else 1.0) > 0:
            return
        with torch.cuda.device(self._device):
            self.symmetric = SymmetricMemory(
                self._store,
                self.shard,
                self._device,
                max_tokens=num_tokens,
                hidden_size=hidden_size,
                dtype=dtype,
                barrier=lambda: self._host.largest(0.0),
            )

    def all_gather(self, tensor: torch.Tensor, out: torch.Tensor) -> None:
        """All of them; the stream waits for it, the host does not."""
        with _lost_if_it_fails():
            self._group._allgather_base(out.view(-1), tensor.view(-1)).wait()

    def largest(self, value: float) -> float:
        """Of the hosts."""
        return self._host.largest(value)

    def abort(self) -> None:
        """End the kernels that wait for a lost rank, then close the hosts' connections."""
        if self.symmetric is not None:
            self.symmetric.abort()
        self._ends.set()
        self._host.abort()

    def close(self) -> None:
        """Graphs that hold kernels of NCCL's must be gone: its end waits for them."""
        self.abort()
        if self._aborter is not threading.current_thread():
            self._aborter.join(CLOSE_S)


def refuse_unlike(store: Store, shard: Shard, device_name: str) -> None:
    """Ranks choose kernels, cuts of steps and captures by their device, each for itself: all must come to the same.

    Raises:
        ConfigError: the ranks' devices are not of one kind. On all ranks.
    """
    store.set(f"device/{shard.rank}", device_name)
    names = [store.get(f"device/{rank}").decode() for rank in range(shard.size)]
    if len(set(names)) > 1:
        listed = ", ".join(f"rank {rank}: {name}" for rank, name in enumerate(names))
        raise ConfigError(
            f"tensor_parallel_size={shard.size} needs GPUs of one kind, and they are {listed}: choose others with "
            "CUDA_VISIBLE_DEVICES"
        )


def _abort_at(ends: threading.Event, group: Any) -> None:
    """NCCL tells its kernels to end at once, and then waits for all graphs that hold some of them, while those live."""
    ends.wait()
    with suppress(RuntimeError):
        group.abort()


def _has_triton(device: torch.device) -> bool:
    has_module = importlib.util.find_spec("triton") is not None
    return has_module and torch.cuda.get_device_capability(device) >= MIN_COMPUTE_CAPABILITY


@contextmanager
def _lost_if_it_fails() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise RankLostError(str(error)) from error


def connect(store: Store, shard: Shard, device: torch.device, *, addresses: Sequence[str] = ()) -> Communicator:
    """Meet the other ranks, with what this device needs; returns when all are there.

    Args:
        store: that all ranks share.
        shard: this rank, of how many.
        device: of this rank's tensors.
        addresses: as of ``GlooCommunicator``.

    Raises:
        RankLostError: a rank has not come in time.
    """
    host = GlooCommunicator(_c10d.PrefixStore("gloo", store), shard, addresses=addresses)
    if device.type == "cpu":
        return host
    return NcclCommunicator(store, shard, device, host)
