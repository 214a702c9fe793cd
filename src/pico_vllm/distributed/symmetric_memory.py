"""SymmetricMemory: memory of each rank that the others of one host write into, and the sums that go through it.

Few rows are sent by the kernel that adds and normalises them: data and flag in one word, so that nobody waits for a
second message. More are sent by such a kernel in blocks with a flag behind each, which takes half of the bytes. Many
are copied by the copy engines, which leaves the SMs to the products of other tokens, and are added up where they are
normalised (``kernels.all_reduce_triton``). Either way each rank receives what the others have and adds in the order of
ranks, so all have the same bits, those of NCCL's sum where there are two. The best token of all ranks goes the way of
few rows, too.

NVLink multicast is not used, and switched off before torch would set it up.
"""

from __future__ import annotations

import itertools
import math
import os
import socket
import uuid
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed

from pico_vllm.kernels.all_reduce_triton import (
    SymmetricBlocks,
    SymmetricRows,
    all_reduce_add_rms_norm_triton,
    all_reduce_triton,
    block_all_reduce_add_rms_norm_triton,
    block_all_reduce_triton,
    num_blocks,
    signal_triton,
    sum_add_rms_norm_triton,
    symmetric_blocks_bytes,
    symmetric_rows_bytes,
    wait_triton,
)
from pico_vllm.kernels.best_of_ranks_triton import greedy_of_ranks_triton

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch._C._distributed_c10d import Store

    from pico_vllm.distributed.sharding import Shard
    from pico_vllm.distributed.tensor_parallel import Pending

# The type stubs lack most of their classes and methods.
_c10d: Any = torch.distributed
_SymmetricMemory: Any = torch._C._distributed_c10d._SymmetricMemory  # type: ignore[attr-defined]

#: Rows that the kernel sends by itself, a program each: no more than an H200 has SMs, since they wait for each other.
MAX_FEW_ROWS = 128
#: Rows that go in blocks; more are copied.
MAX_ROWS_IN_BLOCKS = 2048
#: Rows of logits whose best tokens are exchanged: programs of one warp, of which every SM has room for 32.
MAX_CHOICES = 512
#: Copies under way: a rank may be two sums ahead of another that is two behind itself.
NUM_SLOTS = 4
_ALIGNMENT = 256  # of what lies in the memory one after the other
#: Tokens of a copy at most; steps of more are NCCL's.
MAX_TOKENS = 8192


def can_reach_peers(store: Store, shard: Shard, device: torch.device) -> bool:
    """Whether all ranks are on this host, and this device reads and writes the memory of theirs. Asks all of them."""
    here = f"{socket.gethostname()} {_boot_id()} {device.index}"
    store.set(f"place/{shard.rank}", here)
    places = [store.get(f"place/{rank}").decode() for rank in range(shard.size)]
    if len({place.rsplit(" ", 1)[0] for place in places}) > 1 or len(set(places)) < shard.size:
        return False
    others = [int(place.rsplit(" ", 1)[1]) for rank, place in enumerate(places) if rank != shard.rank]
    return all(
        other < torch.cuda.device_count() and torch.cuda.can_device_access_peer(device.index, other) for other in others
    )


class SymmetricMemory:
    """One rank's part. Every rank calls the same methods in the same order.

    Args:
        store: that all ranks share.
        shard: this rank, of how many.
        device: of this rank.
        max_tokens: of a sum.
        hidden_size, dtype: of a row.
        barrier: returns when all ranks have called it.
    """

    def __init__(
        self,
        store: Store,
        shard: Shard,
        device: torch.device,
        *,
        max_tokens: int,
        hidden_size: int,
        dtype: torch.dtype,
        barrier: Callable[[], object],
    ) -> None:
        self.shard = shard
        #: Of a sum: more are somebody else's.
        self.max_tokens = min(max_tokens, MAX_TOKENS)
        self._dtype = dtype
        max_in_blocks = min(self.max_tokens, MAX_ROWS_IN_BLOCKS)
        parts = (
            symmetric_rows_bytes(shard.size, MAX_FEW_ROWS, hidden_size, dtype),
            symmetric_rows_bytes(shard.size, MAX_CHOICES, 2, torch.float32),
            symmetric_blocks_bytes(shard.size, max_in_blocks, hidden_size, dtype),
            NUM_SLOTS * shard.size * 4,
        )
        ends = itertools.accumulate(-(-num_bytes // _ALIGNMENT) * _ALIGNMENT for num_bytes in parts)
        choices_at, blocks_at, flags_at, copies_at = ends
        shape = (NUM_SLOTS, shard.size, self.max_tokens, hidden_size)
        num_bytes = copies_at + math.prod(shape) * dtype.itemsize
        os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
        memory = _SymmetricMemory.empty_strided_p2p((num_bytes,), (1,), torch.uint8, device)
        memory[:copies_at].zero_()
        #: Under which torch knows these ranks.
        self.group_name, self._registered = _register(store, shard)
        self._handle = handle = _SymmetricMemory.rendezvous(memory, self.group_name)
        torch.cuda.synchronize(device)
        barrier()  # nobody writes before everybody's flags are zero
        self._peers = torch.tensor(handle.buffer_ptrs, dtype=torch.int64, device=device)
        #: Anything but 0 ends all waits; in the host's memory, so that a thread can set it while the device waits.
        self._abort = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        peers = self._peers

        def counts(num: int) -> torch.Tensor:
            return torch.zeros(num, dtype=torch.int32, device=device)

        self._rows = SymmetricRows(
            peers, counts(MAX_FEW_ROWS), self._abort, shard.rank, MAX_FEW_ROWS, hidden_size, dtype
        )
        self._choices = SymmetricRows(
            peers + choices_at, counts(MAX_CHOICES), self._abort, shard.rank, MAX_CHOICES, 2, torch.float32
        )
        self._blocks = SymmetricBlocks(
            peers=peers + blocks_at,
            epochs=counts(num_blocks(max_in_blocks, hidden_size)),
            tickets=counts(2),
            abort=self._abort,
            rank=shard.rank,
            max_rows=max_in_blocks,
            hidden_size=hidden_size,
            dtype=dtype,
        )
        self._flags_at = flags_at
        self._flags = memory[flags_at:copies_at].view(torch.int32)[: NUM_SLOTS * shard.size].view(NUM_SLOTS, -1)
        #: Of each slot: how often it was signalled, and how often waited for.
        self._signals, self._waits = torch.zeros(2, NUM_SLOTS, 1, dtype=torch.int32, device=device)
        copies = [handle.get_buffer(rank, shape, dtype, copies_at // dtype.itemsize) for rank in range(shard.size)]
        self._received = copies[shard.rank]  # [slot, sender, token, hidden_size]
        self._sent = [copy[:, shard.rank] for rank, copy in enumerate(copies) if rank != shard.rank]
        self._stream = torch.cuda.Stream(device)
        self._next_slot = 0

    def takes(self, num_tokens: int) -> bool:
        """Whether there is room for a sum of so many."""
        return num_tokens <= self.max_tokens

    def begins_with(self, num_tokens: int) -> bool:
        """Whether the first sum of a step may be made here: it must not be copies (see ``_send``)."""
        return num_tokens <= max(MAX_FEW_ROWS, self._blocks.max_rows)

    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        """The sum, in a new tensor."""
        if len(partial) <= MAX_FEW_ROWS:
            return all_reduce_triton(partial, self._rows)
        if len(partial) <= self._blocks.max_rows:
            return block_all_reduce_triton(partial, self._blocks)
        return self._sum(self._send(partial), partial)

    def start_all_reduce(self, partial: torch.Tensor) -> Callable[[], torch.Tensor]:
        """The same in two parts, with copies on a stream of their own, few rows or not."""
        slot, wait = self._send_aside(partial)

        def finish() -> torch.Tensor:
            wait()
            return self._sum(slot, partial)

        return finish

    def reduce_add_rms_norm(
        self, partial: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As of ``TensorParallelGroup``, with Triton's kernels; others may call ``all_reduce`` for it meanwhile."""
        if len(residual) <= MAX_FEW_ROWS:
            return all_reduce_add_rms_norm_triton(partial, residual, weight, eps, self._rows)
        if partial.dim() == 3:
            partial = partial.sum(dim=0).to(self._dtype)
        if len(residual) <= self._blocks.max_rows:
            return block_all_reduce_add_rms_norm_triton(partial, residual, weight, eps, self._blocks)
        return self._sum_add_rms_norm(self._send(partial), partial, residual, weight, eps)

    def start_reduce_add_rms_norm(
        self, partial: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> Pending:
        """As of ``TensorParallelGroup``; others may call ``start_all_reduce`` for it meanwhile."""
        slot, wait = self._send_aside(partial)

        def finish() -> tuple[torch.Tensor, torch.Tensor]:
            wait()
            return self._sum_add_rms_norm(slot, partial, residual, weight, eps)

        return finish

    def chooses(self, num_rows: int) -> bool:
        """Whether there is room for the best tokens of so many rows."""
        return num_rows <= MAX_CHOICES

    def greedy(self, logits: torch.Tensor, last_token_ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """As of ``TensorParallelGroup``."""
        return greedy_of_ranks_triton(logits, last_token_ids, rows, self._choices)

    def abort(self) -> None:
        """End all waits of the device, from any thread; what it computes from now on is nothing."""
        self._abort.fill_(1)

    def _send(self, partial: torch.Tensor) -> int:
        """Copy to all others, and say so.

        The slot is free again: within a step they follow each other, and a rank begins sum k when it has added up
        k - 2, for which it had to receive that of all others, who had added up k - 4 by then. From step to step they
        don't (a captured one has its own); but each begins with a sum that is no copy, the vectors of its tokens, and
        whoever takes part in that has added up all that was before.
        """
        slot = self._next_slot
        self._next_slot = (slot + 1) % NUM_SLOTS
        for copy in self._sent:
            copy[slot, : len(partial)].copy_(partial, non_blocking=True)
        signal_triton(self._peers, self._flags_at + slot * 4 * self.shard.size, self._signals[slot], self.shard.rank)
        return slot

    def _send_aside(self, partial: torch.Tensor) -> tuple[int, Callable[[], None]]:
        """Send beside what this stream does next: the slot, and what makes the stream wait for the copies' end."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            slot = self._send(partial)
            sent = self._stream.record_event()
        # The memory of the partial sums is the allocator's again after a wait: whoever waits holds them until then.
        return slot, lambda: current.wait_event(sent)

    def _wait(self, slot: int) -> torch.Tensor:
        """[size, max_tokens, hidden_size], all that was sent to this rank."""
        wait_triton(self._flags[slot], self._waits[slot], self._abort, self.shard.rank)
        return self._received[slot]

    def _sum(self, slot: int, partial: torch.Tensor) -> torch.Tensor:
        received = self._wait(slot)[:, : len(partial)]
        parts = [partial if rank == self.shard.rank else received[rank] for rank in range(self.shard.size)]
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part
        return total.to(self._dtype)

    def _sum_add_rms_norm(
        self, slot: int, partial: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return sum_add_rms_norm_triton(partial, self._wait(slot), residual, weight, eps, self.shard.rank)


def _register(store: Store, shard: Shard) -> tuple[str, object]:
    """A name, the same on all ranks, under which torch finds them: its global process group is the application's."""
    if shard.rank == 0:
        store.set("symmetric/name", f"pico-vllm-{uuid.uuid4()}")
    name = store.get("symmetric/name").decode()
    store = RenumberedStore(_c10d.PrefixStore("symmetric", store))
    group = _c10d.ProcessGroup(store, shard.rank, shard.size)
    group._set_group_name(name)
    _c10d.distributed_c10d._register_process_group(name, group)
    _SymmetricMemory.set_group_info(name, shard.rank, shard.size, store)
    return name, (group, store)  # torch refers to both and keeps neither alive


class RenumberedStore(_c10d.Store):
    """A store for torch's symmetric memory, whose exchanges have keys PREFIX/NUMBER/RANK.

    Torch counts exchanges by process. Rank 0's process may have had other engines, and the others' have not: here the
    first number that is seen is 0, and so on.
    """

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store: Any = store
        self._numbers: dict[str, int] = {}

    def set(self, key: str, value: bytes) -> None:
        """As of a store."""
        self._store.set(self._renumbered(key), value)

    def get(self, key: str) -> bytes:
        """As of a store; waits."""
        return self._store.get(self._renumbered(key))

    def wait(self, keys: list[str], *timeout: Any) -> None:
        """As of a store."""
        self._store.wait([self._renumbered(key) for key in keys], *timeout)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """As of a store."""
        return [self.get(key) for key in keys]

    def _renumbered(self, key: str) -> str:
        exchange, _, rank = key.rpartition("/")
        prefix, _, _ = exchange.rpartition("/")
        return f"{prefix}/{self._numbers.setdefault(exchange, len(self._numbers))}/{rank}"


def _boot_id() -> str:
    """Tells hosts of one name apart."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""
