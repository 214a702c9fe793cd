"""``pico-vllm bench kernels``: every op of a backend beside its floor and beside torch.

For each case of ``kernel_cases``: compare the op with the oracle on the very inputs that are timed; a wrong one gets no
time. Then time it, then torch's way to the same result. Knows neither sizes nor formulas (``kernel_cases``) nor how to
time (``timing``). The CLI is its caller.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from pico_vllm.bench.ceilings import Ceilings, ceilings_from, measure_ceilings, statistic_of
from pico_vllm.bench.cuda_timing import time_on_cuda
from pico_vllm.bench.kernel_cases import OPS
from pico_vllm.bench.kernel_rows import KernelRow
from pico_vllm.bench.timing import (
    FULL_BUDGET,
    QUICK_BUDGET,
    Budget,
    Rotation,
    Timing,
    cache_bytes,
    num_sets,
    time_on_host,
)
from pico_vllm.errors import ConfigError

if TYPE_CHECKING:
    from pico_vllm.bench.kernel_cases.case import BoundCall, KernelCase, KernelOp, Tensors
    from pico_vllm.bench.kernel_cases.shapes import KernelShapes
    from pico_vllm.kernels.backend import KernelBackend

logger = logging.getLogger(__name__)

#: |actual - oracle| / |oracle|, by the dtype of the output: a few roundings, and fp32 sums of some thousand products.
#: Matrix products in TF32 (5e-4) are wrong by this bound.
MAX_RELATIVE_ERROR = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1e-2}
_CPU_MEMORY_BYTES = 1 << 30
#: Of what is free; the rest is for outputs, the baseline's own layouts and the oracle.
_GPU_MEMORY_SHARE = 0.25


def bench_kernels(
    backend: KernelBackend,
    device: torch.device,
    dtype: torch.dtype,
    shapes: KernelShapes,
    only: Collection[str] | None = None,
    quick: bool = False,
    *,
    ceilings: Ceilings | None = None,
    ops: Sequence[KernelOp] = OPS,
    on_row: Callable[[KernelRow], None] | None = None,
) -> list[KernelRow]:
    """Check and time every op at every size.

    Args:
        backend: whose ops. A naive one loops over rows and tokens in Python: give it ``quick`` or a small model.
        device: where the tensors are.
        dtype: of the model; logits that are changed in place are fp32 all the same.
        shapes: the model's dimensions and the sizes.
        only: names of ops; None = all.
        quick: the first size of each list, and little time a case: a smoke test.
        ceilings: of the device in this dtype; measured first if not given.
        ops: what can be timed.
        on_row: called with each row when it is there.

    Returns:
        A row a case; one row for an op that the backend lacks.

    Raises:
        ConfigError: ``only`` names an op that doesn't exist.
    """
    chosen = _choose(ops, only)
    if ceilings is None:
        ceilings = ceilings_from(measure_ceilings(device, quick=quick), dtype, statistic_of(device))
    bench = _KernelBench(backend, device, dtype, shapes.smallest() if quick else shapes, ceilings, quick)
    rows: list[KernelRow] = []
    with torch.inference_mode(), _quiet_sdpa():
        for op in chosen:
            for row in bench.rows(op):
                rows.append(row)
                if on_row is not None:
                    on_row(row)
    return rows


def relative_error(actual: torch.Tensor, oracle: torch.Tensor) -> float:
    """|actual - oracle| / |oracle| over all elements; infinite where actual isn't finite."""
    wide, truth = actual.to(oracle.device).double(), oracle.double()
    if not bool(wide.isfinite().all()):
        return float("inf")
    distance, size = float((wide - truth).norm()), float(truth.norm())
    if size == 0.0:
        return 0.0 if distance == 0.0 else float("inf")
    return distance / size


def mismatch(
    case: KernelCase, bind: Callable[[Tensors], BoundCall], inputs: Tensors, oracle: tuple[torch.Tensor, ...]
) -> str | None:
    """How a call on a copy of the inputs differs from the oracle; None if it doesn't."""
    call = bind(case.another(inputs, 0))
    if any(tensor.is_cuda for tensor in inputs.values()):
        torch.cuda.synchronize()  # a kernel that is launched early may read weights at once
    outputs = case.compared(call())
    for number, (actual, truth) in enumerate(zip(outputs, oracle, strict=True)):
        where = f"output {number}: " if len(oracle) > 1 else ""
        if actual.shape != truth.shape:
            return f"{where}shape {tuple(actual.shape)}, not {tuple(truth.shape)}"
        if case.exact or not actual.is_floating_point():
            different = int((actual.to(truth) != truth).sum())
            if different:
                return f"{where}{different} of {truth.numel()} elements differ"
        elif (error := relative_error(actual, truth)) > (bound := MAX_RELATIVE_ERROR[actual.dtype]):
            return f"{where}relative error {error:.2g} > {bound:.2g}"
    return None


def make_rotation(
    case: KernelCase, bind: Callable[[Tensors], BoundCall], inputs: Tensors, *, cache_bytes: int, memory_bytes: int
) -> Rotation:
    """A case bound to as many equal sets of inputs as overrun the cache and fit the memory (``num_sets``)."""
    set_bytes = sum(tensor.nbytes for tensor in inputs.values())
    count = num_sets(case.cost.num_bytes, set_bytes, cache_bytes=cache_bytes, memory_bytes=memory_bytes)
    pristine = {name: inputs[name].clone() for name in case.changed}
    calls: list[BoundCall] = []
    changed: list[tuple[torch.Tensor, torch.Tensor]] = []  # (of a set, what it was)
    for index in range(count):
        tensors = case.another(inputs, index)
        calls.append(bind(tensors))
        changed += [(tensors[name], pristine[name]) for name in case.changed]

    def restore() -> None:
        for tensor, original in changed:
            tensor.copy_(original)

    return Rotation(calls, restore if changed else None)


def _choose(ops: Sequence[KernelOp], only: Collection[str] | None) -> list[KernelOp]:
    names = {op.name for op in ops}
    if only is not None and (unknown := set(only) - names):
        raise ConfigError(f"no such op: {', '.join(sorted(unknown))}; there are {', '.join(sorted(names))}")
    return [op for op in ops if only is None or op.name in only]


@contextmanager
def _quiet_sdpa() -> Iterator[None]:
    """Torch warns of each attention kernel that it can't take; that one isn't there is an answer, not a problem."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\.|pico_vllm\.bench\.")
        yield


class _KernelBench:
    """What all cases of one run share."""

    def __init__(
        self,
        backend: KernelBackend,
        device: torch.device,
        dtype: torch.dtype,
        shapes: KernelShapes,
        ceilings: Ceilings,
        quick: bool,
    ) -> None:
        self._backend = backend
        self._device = device
        self._dtype = dtype
        self._shapes = shapes
        self._ceilings = ceilings
        self._budget: Budget = QUICK_BUDGET if quick else FULL_BUDGET
        self._cache_bytes = cache_bytes(device)

    def rows(self, op: KernelOp) -> Iterator[KernelRow]:
        """One row a case, or one that says what is missing."""
        lacking = [name for name in op.needs if getattr(self._backend, name, None) is None]
        if lacking:
            yield self._row(op, "all", missing=f"backend {self._backend.name} has no {', '.join(lacking)}")
            return
        for case in op.cases(self._shapes, self._dtype):
            yield self._bench(op, case)
            if self._device.type == "cuda":
                torch.cuda.empty_cache()  # the memory of graphs that are gone

    def _row(self, op: KernelOp, case: str, **values: object) -> KernelRow:
        return KernelRow(
            shapes=self._shapes.name,
            op=op.name,
            case=case,
            backend=self._backend.name,
            dtype=str(self._dtype).removeprefix("torch."),
            device=_device_name(self._device),
            **values,  # type: ignore[arg-type]
        )

    def _bench(self, op: KernelOp, case: KernelCase) -> KernelRow:
        floor_s = case.cost.floor_s(self._ceilings)
        cost: dict[str, object] = {"num_bytes": case.cost.num_bytes, "flops": case.cost.flops, "floor_s": floor_s}
        logger.debug("%s, %s", op.name, case.name)

        def bind(tensors: Tensors) -> BoundCall:
            return case.bind(self._backend, tensors)

        try:
            inputs = case.make(self._device)
            oracle = case.expected(inputs)
            if problem := mismatch(case, bind, inputs, oracle):
                return self._row(op, case.name, **cost, error=problem)
            timing, rotated = self._time(case, bind, inputs)
            baseline_name, baseline_s = self._time_baselines(case, inputs, oracle)
        except Exception as error:  # one op that fails, or doesn't fit, costs no other its row
            logger.debug("%s, %s failed", op.name, case.name, exc_info=True)
            return self._row(op, case.name, **cost, error=_first_line(error))
        baseline = {"baseline_name": baseline_name, "baseline_s": baseline_s}
        return self._row(op, case.name, **cost, timing=timing, rotated=rotated, **baseline)

    def _time(self, case: KernelCase, bind: Callable[[Tensors], BoundCall], inputs: Tensors) -> tuple[Timing, bool]:
        """(timing, whether the sets overran the cache)."""
        rotation = make_rotation(case, bind, inputs, cache_bytes=self._cache_bytes, memory_bytes=self._memory_bytes())
        if self._device.type == "cuda":
            timing = time_on_cuda(rotation, self._device, self._budget)
        else:
            timing = time_on_host(rotation, self._budget)
        return timing, len(rotation.calls) * case.cost.num_bytes > 2 * self._cache_bytes

    def _time_baselines(
        self, case: KernelCase, inputs: Tensors, oracle: tuple[torch.Tensor, ...]
    ) -> tuple[str | None, float | None]:
        """(name, median) of the fastest that gives the oracle's result here."""
        fastest: tuple[str | None, float | None] = (None, None)
        for baseline in case.baselines:
            try:
                if problem := mismatch(case, baseline.bind, inputs, oracle):
                    logger.debug("torch's %s is no baseline here: %s", baseline.name, problem)
                    continue
                timing, _ = self._time(case, baseline.bind, inputs)
            except Exception as error:  # a kernel that isn't built in, a shape that it doesn't take
                logger.debug("torch has no %s here: %s", baseline.name, _first_line(error))
                continue
            if fastest[1] is None or timing.median_s < fastest[1]:
                fastest = baseline.name, timing.median_s
        return fastest

    def _memory_bytes(self) -> int:
        if self._device.type != "cuda":
            return _CPU_MEMORY_BYTES
        free, _ = torch.cuda.mem_get_info(self._device)
        return int(free * _GPU_MEMORY_SHARE)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
