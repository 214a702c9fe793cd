"""Log-probabilities on their way to the host: tensors while the device computes them, entries when they are there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pico_vllm.outputs import TokenLogprobs

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch


@dataclass(frozen=True, slots=True)
class LogprobsTensors:
    """Of R rows, N best tokens each.

    Attributes:
        num_best: best tokens that each row reports, at most N; -1 = the row reports nothing.
        tensors: chosen ids [R] int64, their logprobs [R] fp32, their ranks [R] int64, best ids [R, N] int64 and their
            logprobs [R, N] fp32.
    """

    num_best: tuple[int, ...]
    tensors: tuple[torch.Tensor, ...]

    def entries_sync(self) -> Iterator[TokenLogprobs | None]:
        """One a row, None where nothing is reported; waits for tensors that are on a device."""
        columns = [tensor.tolist() for tensor in self.tensors]
        for n, i, c, r, ids, values in zip(self.num_best, *columns, strict=True):
            yield None if n < 0 else TokenLogprobs((i, *ids[:n]), (c, *values[:n]), r)


def entries_by_count(logprobs: LogprobsTensors | None, counts: Sequence[int]) -> tuple[tuple[TokenLogprobs, ...], ...]:
    """Entries of requests that have so many rows each, without the rows that report nothing; () if nobody asked."""
    if logprobs is None:
        return ()
    entries = logprobs.entries_sync()
    return tuple(tuple(e for e in (next(entries) for _ in range(count)) if e is not None) for count in counts)
