"""What a GPU's memory is for: everything that will be needed later is put aside, the rest is KV cache.

    KV cache = share * total - in use now - activations - graphs - tables - margin

In use now are the weights, the CUDA context and whatever other processes hold. ``start_probe`` measures activations and
graphs; here is the arithmetic, and how memory is read off the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from pico_vllm.errors import ConfigError

#: For what nobody has measured: fragments between tensors, kernels that the driver loads at their first launch.
MARGIN_BYTES = 256 << 20
#: A captured pass keeps at least so much on the device outside of torch's books: some 250 nodes with their arguments.
MIN_GRAPH_BYTES = 2 << 20
#: Bias fp32, prompt mask bool, output counts int32, for each row and token of the vocabulary. Made at first use.
_TABLE_BYTES = 4 + 1 + 4


class MemoryMeter(Protocol):
    """Reads a device's memory, in bytes."""

    total: int

    def used(self) -> int:
        """In use now, by anyone, once all that this process only keeps for later has been given back."""
        ...

    def reset_peak(self) -> None:
        """Let ``peak`` count from now."""
        ...

    def peak(self) -> int:
        """The most that was in use since ``reset_peak``, memory between tensors included."""
        ...


class CudaMemoryMeter:
    """The memory of one GPU. Every reading waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.total: int = torch.cuda.mem_get_info(device)[1]

    def used(self) -> int:
        """In use now, by anyone."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        return self._taken()

    def reset_peak(self) -> None:
        """Let ``peak`` count from now."""
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> int:
        """The most that was in use since ``reset_peak``."""
        torch.cuda.synchronize(self._device)
        given_back = torch.cuda.max_memory_reserved(self._device) - torch.cuda.memory_reserved(self._device)
        return self._taken() + given_back

    def _taken(self) -> int:
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Bytes of a device and what they are for.

    Attributes:
        total: of the device.
        usable: the share that ``gpu_memory_utilization`` allows.
        weights: parameters.
        other: the rest of what was in use: CUDA context, libraries, other processes.
        activations: peak of the fullest step.
        graphs: of all captured passes.
        tables: of logits processors, made at first use.
        margin: for what is not measured.
        kv_cache: what is left.
    """

    total: int
    usable: int
    weights: int
    other: int
    activations: int
    graphs: int
    tables: int
    margin: int
    kv_cache: int

    def __str__(self) -> str:
        parts = ("weights", "other", "activations", "graphs", "tables", "margin")
        spent = ", ".join(f"{name} {_gib(getattr(self, name))}" for name in parts)
        return f"{_gib(self.usable)} of {_gib(self.total)} GiB: {spent}, KV cache {_gib(self.kv_cache)}"


def plan_memory(
    *, total: int, utilization: float, in_use: int, weights: int, activations: int, graphs: int, tables: int
) -> MemoryBudget:
    """Divide a device's memory; all in bytes.

    Args:
        total: of the device.
        utilization: share of it that may be used, by everyone together.
        in_use: now, the weights included.
        weights, activations, graphs, tables: as in ``MemoryBudget``.

    Raises:
        ConfigError: nothing is left for the KV cache; says what takes how much, and what to change.
    """
    usable = int(total * utilization)
    kv_cache = usable - in_use - activations - graphs - tables - MARGIN_BYTES
    other = max(in_use - weights, 0)
    budget = MemoryBudget(
        total, usable, in_use - other, other, activations, graphs, tables, MARGIN_BYTES, max(kv_cache, 0)
    )
    if kv_cache <= 0:
        raise ConfigError(
            f"no memory is left for the KV cache, {_gib(1 - kv_cache)} GiB are missing: gpu_memory_utilization="
            f"{utilization} allows {budget}; lower max_num_batched_tokens (activations) or max_num_seqs (tables), "
            "raise gpu_memory_utilization, set enforce_eager=True (graphs), or free memory of other processes"
        )
    return budget


def table_bytes(max_num_seqs: int, vocab_size: int) -> int:
    """What ``LogitsProcessors`` allocates when requests with bias and penalties have come."""
    return _TABLE_BYTES * max_num_seqs * vocab_size


def graph_bytes(used: list[int], num_captures: int) -> int:
    """What all captures will take, from a few of them.

    Args:
        used: bytes in use before the first trial capture and after each. The first ones, the largest of their kinds,
            make the memory pool in which all others of the kind find room; the last one shows what is left of a
            capture then: its nodes.
        num_captures: in all.
    """
    each = max(used[-1] - used[-2], MIN_GRAPH_BYTES)
    num_measured = len(used) - 2  # but for the last, which stands for all the others
    return max(used[-2] - used[0], 0) + each * (num_captures - num_measured)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f}"
