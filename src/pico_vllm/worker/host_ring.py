"""HostRing: the pinned host memory of the steps in flight, one slot a step.

A GPU copies from and to pinned memory while the host goes on; what it has not copied yet must not be overwritten. So a
step takes all that it sends, and where its sampled ids arrive, from a slot of its own, and the slot is used again only
when that step has been finished. Pageable memory would do without slots, but the driver may wait for the stream then:
for the very step that the next one is prepared beside.

On a CPU it is the same with ordinary memory, so that tests see what is overwritten too early. The model runner begins
and finishes steps; input builder, logits processors and the graphs send.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Bytes: any dtype can be viewed there, and a Triton kernel isn't compiled anew because a pointer is less aligned.
_ALIGNMENT = 16
_FIRST_BYTES = 1 << 16


class HostRing:
    """Slots in turn.

    Args:
        device: of the copies.
        max_num_seqs: ids that a step samples at most.
        num_slots: steps that may be in flight at once.
    """

    def __init__(self, device: torch.device, max_num_seqs: int, num_slots: int = 2) -> None:
        self._device = device
        self._slots = [Slot(device, max_num_seqs) for _ in range(num_slots)]
        self._index = 0

    def begin_step(self) -> Slot:
        """Go on to the next slot, whose last step has been finished; everything is sent from it from now on."""
        self._index = (self._index + 1) % len(self._slots)
        slot = self._slots[self._index]
        assert not slot.is_inflight, f"{len(self._slots)} steps are in flight already"
        slot.begin()
        return slot

    def previous_step_has_ended(self) -> bool:
        """Whether the step before the one that was begun last is in flight and the GPU is through with it."""
        previous = self._slots[self._index - 1]
        return previous.is_inflight and previous.has_ended()

    def send(self, *arrays: np.ndarray) -> list[torch.Tensor]:
        """Copy arrays of any dtypes to the device at once.

        Returns:
            A tensor for each, of its shape and dtype; views of one new tensor.
        """
        starts, num_bytes = [], 0
        for array in arrays:
            starts.append(num_bytes)
            num_bytes += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        host, tensor = self._slots[self._index].take(num_bytes)
        for array, start in zip(arrays, starts, strict=True):
            host[start : start + array.nbytes].view(array.dtype)[:] = array.reshape(-1)
        sent = tensor.to(self._device, non_blocking=True, copy=True)
        return [
            sent[start : start + array.nbytes].view(_torch_dtype(array.dtype)).view(array.shape)
            for array, start in zip(arrays, starts, strict=True)
        ]

    def send_int32(self, *arrays: np.ndarray) -> list[torch.Tensor]:
        """Copy arrays of integers to the device at once, as flat int32 tensors: views of one new tensor."""
        sizes = [array.size for array in arrays]
        host, tensor = self._slots[self._index].take(4 * sum(sizes))
        np.concatenate(arrays, out=host.view(np.int32), casting="same_kind")
        sent = tensor.view(torch.int32).to(self._device, non_blocking=True, copy=True)
        return list(sent.split_with_sizes(sizes))

    def send_into(self, array: np.ndarray, target: torch.Tensor) -> None:
        """Copy an array into a tensor of the device, of the same size and dtype."""
        host, tensor = self._slots[self._index].take(array.nbytes)
        host.view(array.dtype)[:] = array
        target.copy_(tensor.view(target.dtype), non_blocking=True)

    def forget_inflight(self) -> None:
        """Wait until the device is through with everything, whatever has become of it; all slots are free then."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        for slot in self._slots:
            slot.is_inflight = False


class Slot:
    """What one step needs of the host's memory."""

    def __init__(self, device: torch.device, max_num_seqs: int) -> None:
        self._pins = device.type == "cuda"
        self._event = torch.cuda.Event() if self._pins else None
        self._ids = torch.empty(max_num_seqs, dtype=torch.int64, pin_memory=self._pins)
        self._num_used = self._num_needed = 0
        self._allocate(_FIRST_BYTES)
        #: From ``begin`` to ``wait``.
        self.is_inflight = False

    def begin(self) -> None:
        """A step takes the slot."""
        if self._num_needed > self._tensor.shape[0]:  # the last one has had to help itself
            self._allocate(1 << self._num_needed.bit_length())
        self._num_used = self._num_needed = 0
        self.is_inflight = True

    def take(self, num_bytes: int) -> tuple[np.ndarray, torch.Tensor]:
        """So many bytes of the slot, as array and as tensor; aligned for any dtype."""
        start = self._num_used
        self._num_needed += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        if start + num_bytes > self._tensor.shape[0]:
            tensor = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._pins)
            return tensor.numpy(), tensor
        self._num_used += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return self._array[start : start + num_bytes], self._tensor[start : start + num_bytes]

    def fetch_ids(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Start to copy the step's sampled ids ([S] int64) to the host; they are there after ``wait``."""
        ids = self._ids[: token_ids.shape[0]]
        ids.copy_(token_ids, non_blocking=self._pins)
        return ids

    def fetch(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Start to copy other results of the step to the host; they are there after ``wait``."""
        copies = [torch.empty(t.shape, dtype=t.dtype, pin_memory=self._pins) for t in tensors]
        for copy, tensor in zip(copies, tensors, strict=True):
            copy.copy_(tensor, non_blocking=self._pins)
        return copies

    def close(self) -> None:
        """Everything of the step has been launched."""
        if self._event is not None:
            self._event.record()

    def has_ended(self) -> bool:
        """Whether a GPU is through with the step; always False on a CPU, which nobody could keep busy meanwhile."""
        return self._event is not None and self._event.query()

    def wait(self) -> None:
        """Wait for the step; then the slot is free."""
        if self._event is not None:
            self._event.synchronize()
        self.is_inflight = False

    def _allocate(self, num_bytes: int) -> None:
        self._tensor = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._pins)
        self._array = self._tensor.numpy()


def _torch_dtype(dtype: np.dtype) -> torch.dtype:
    return _TORCH_DTYPES[dtype.type]


_TORCH_DTYPES = {
    np.bool_: torch.bool,
    np.int32: torch.int32,
    np.int64: torch.int64,
    np.float32: torch.float32,
}
