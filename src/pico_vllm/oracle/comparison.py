"""How far the engine is from the oracle at each point, and how far it may be.

The truth is transformers in fp32. For a 16-bit engine the yardstick is transformers itself in the same dtype: at every
point our RMS error may be at most 1.5 x its RMS error. For fp32 there is no wider truth that transformers could compute
(its norms are fp32 in any case), so the bound is a few units in the last place of the point's own size.

An RMS over hundreds of positions would hide a fault in a few of them (one block border), so the worst position is
judged too: its RMS error relative to its own RMS value.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pico_vllm.oracle.points import Point

#: Ours may exceed transformers' own error in a 16-bit dtype by this factor.
MAX_ERROR_RATIO = 1.5
#: Where transformers' error is (nearly) zero, as at the embedding: so many units in the last place of the RMS value.
FLOOR_ULPS = 1.0
#: fp32: RMS error in units of the point's RMS value. Sums in another order over a few thousand terms give about 1e-6 a
#: layer; a wrong eps of 1e-6 instead of 1e-5 gives 1e-4 and more.
FP32_RELATIVE_BOUND = 2e-5
#: The worst position: 10 x the bound of the mean in fp32 (positions differ in size and so in error), 4 x the worst
#: position of transformers in 16 bits.
FP32_ROW_BOUND = 10 * FP32_RELATIVE_BOUND
MAX_ROW_RATIO = 4.0


@dataclass(frozen=True, slots=True)
class PointError:
    """The comparison at one point over all sequences.

    Attributes:
        point: where.
        num_rows: positions compared.
        rms: RMS error of the engine against fp32 transformers.
        largest: largest absolute error.
        bound: largest RMS error that passes.
        worst_row: largest RMS error of a position, relative to the RMS value of the position.
        row_bound: largest ``worst_row`` that passes.
        value_rms: RMS of the true values, for scale.
    """

    point: Point
    num_rows: int
    rms: float
    largest: float
    bound: float
    worst_row: float
    row_bound: float
    value_rms: float

    @property
    def passes(self) -> bool:
        """Within both bounds; NaN never is."""
        return self.rms <= self.bound and self.worst_row <= self.row_bound


class ErrorSum:
    """Sums of squares of one point, over sequences that are looked at one after the other."""

    def __init__(self, point: Point, dtype: torch.dtype) -> None:
        self._point = point
        self._dtype = dtype
        self._count = self._rows = 0
        self._ours = self._theirs = self._truth = self._largest = 0.0
        self._worst_row = self._their_worst_row = 0.0

    def add(self, ours: torch.Tensor, truth: torch.Tensor, theirs: torch.Tensor | None) -> None:
        """Add one sequence: engine, transformers in fp32, transformers in the engine's dtype (None for fp32)."""
        error = ours.double() - truth.double()
        self._rows += ours.shape[0]
        self._count += error.numel()
        self._ours += error.square().sum().item()
        self._truth += truth.double().square().sum().item()
        self._largest = _larger(self._largest, error.abs().max().item())
        self._worst_row = _larger(self._worst_row, _worst_row(error, truth))
        if theirs is not None:
            their_error = theirs.double() - truth.double()
            self._theirs += their_error.square().sum().item()
            self._their_worst_row = _larger(self._their_worst_row, _worst_row(their_error, truth))

    def result(self) -> PointError:
        """The comparison over everything added."""
        value_rms = math.sqrt(self._truth / self._count)
        if self._dtype == torch.float32:
            bound, row_bound = FP32_RELATIVE_BOUND * value_rms, FP32_ROW_BOUND
        else:
            floor = FLOOR_ULPS * torch.finfo(self._dtype).eps
            bound = max(MAX_ERROR_RATIO * math.sqrt(self._theirs / self._count), floor * value_rms)
            row_bound = MAX_ROW_RATIO * max(self._their_worst_row, floor)
        return PointError(
            point=self._point,
            num_rows=self._rows,
            rms=math.sqrt(self._ours / self._count),
            largest=self._largest,
            bound=bound,
            worst_row=self._worst_row,
            row_bound=row_bound,
            value_rms=value_rms,
        )


def _worst_row(error: torch.Tensor, truth: torch.Tensor) -> float:
    """Largest relative RMS error of a row: 0 for a row without an error, infinite for an error where the truth is 0."""
    squared = error.square().sum(-1)
    relative = squared / truth.double().square().sum(-1)
    return torch.where(squared == 0, 0.0, relative).sqrt().max().item()


def _larger(a: float, b: float) -> float:
    """The larger one; NaN if either is (``max`` would keep whichever comes first)."""
    return math.nan if math.isnan(a) or math.isnan(b) else max(a, b)


def first_failure(errors: Iterable[PointError]) -> PointError | None:
    """The first point, in the order of execution, that is out of bounds."""
    return next((error for error in errors if not error.passes), None)
