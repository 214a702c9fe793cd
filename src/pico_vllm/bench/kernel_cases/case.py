"""The parts of a case: what a call must move and compute, how its inputs are made, what it is compared with.

Knows the backend's contract and nothing of any op; the files beside it fill it in, ``bench.kernels`` runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from pico_vllm.bench.ceilings import Ceilings
    from pico_vllm.bench.kernel_cases.shapes import KernelShapes
    from pico_vllm.kernels.backend import KernelBackend

#: The tensors of one set of inputs, by name.
Tensors = dict[str, torch.Tensor]
#: One call of an op; returns what it has computed, tensors that it has changed in place included.
BoundCall = Callable[[], tuple[torch.Tensor, ...]]

#: A call that writes less than this share of its bytes is held against the read ceiling, not the copy ceiling.
_MOSTLY_READS = 0.1


@dataclass(frozen=True, slots=True)
class Cost:
    """What one call can't do without: each input read once, each output written once, each operation done once.

    Indices, lengths and block tables of attention are left out: under 1 % of the keys and values that they point to.
    """

    bytes_read: int
    bytes_written: int
    flops: int

    @property
    def num_bytes(self) -> int:
        """Read and written."""
        return self.bytes_read + self.bytes_written

    def floor_s(self, ceilings: Ceilings) -> float:
        """Seconds below which the call can't come: the longer of moving and computing."""
        mostly_reads = self.bytes_written < _MOSTLY_READS * self.num_bytes
        bandwidth = ceilings.read_bytes_per_s if mostly_reads else ceilings.copy_bytes_per_s
        return max(self.num_bytes / bandwidth, self.flops / ceilings.matmul_flops_per_s)


@dataclass(frozen=True, slots=True)
class Baseline:
    """Torch's way to the same result.

    Attributes:
        bind: makes the call over one set of inputs; may keep copies in a layout of its own. Raises where this
            machine can't do it.
    """

    name: str
    bind: Callable[[Tensors], BoundCall]


def another_copy(tensors: Tensors, index: int) -> Tensors:
    """Set number ``index`` of a rotation: equal numbers in memory of their own."""
    return {name: tensor.clone() for name, tensor in tensors.items()}


def all_of_it(outputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Compare everything."""
    return outputs


@dataclass(frozen=True, slots=True)
class KernelCase:
    """One op at one size.

    Attributes:
        name: the size, as a table shows it.
        cost: of one call.
        make: seeded inputs on a device.
        bind: the backend's call over one set of inputs; what is done once a step or once a model (preparing, packing)
            happens here and isn't timed.
        expected: the oracle's outputs for these inputs, in fp32 or wider; leaves the inputs alone. May cover a part.
        compared: that part of a call's outputs.
        baselines: the fastest of those that agree with the oracle is reported.
        exact: the op moves numbers or marks them, so nothing may be rounded.
        changed: inputs that the call changes such that many calls would overflow; restored between samples.
        another: makes further sets out of the first.
    """

    name: str
    cost: Cost
    make: Callable[[torch.device], Tensors]
    bind: Callable[[KernelBackend, Tensors], BoundCall]
    expected: Callable[[Tensors], tuple[torch.Tensor, ...]]
    baselines: tuple[Baseline, ...]
    compared: Callable[[tuple[torch.Tensor, ...]], tuple[torch.Tensor, ...]] = all_of_it
    exact: bool = False
    changed: tuple[str, ...] = ()
    another: Callable[[Tensors, int], Tensors] = another_copy


@dataclass(frozen=True, slots=True)
class KernelOp:
    """An op and its cases.

    Attributes:
        name: in the table.
        needs: fields of ``KernelBackend`` that a case calls; a backend without one of them is left out.
        cases: at the sizes of a model, smallest first.
    """

    name: str
    needs: tuple[str, ...]
    cases: Callable[[KernelShapes, torch.dtype], Iterator[KernelCase]]


def generator(device: torch.device) -> torch.Generator:
    """Seeded anew for each case: the same inputs in every run on a device of the same kind."""
    return torch.Generator(device).manual_seed(0)


def normal(g: torch.Generator, *shape: int, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    """Normal numbers on the generator's device."""
    return torch.randn(shape, generator=g, device=g.device, dtype=dtype).mul_(scale)


def spread(count: int, num_picked: int = 16) -> list[int]:
    """Up to ``num_picked`` indices of [0, count), first and last among them: rows for an oracle too slow for all."""
    if count <= num_picked:
        return list(range(count))
    return [i * (count - 1) // (num_picked - 1) for i in range(num_picked)]
