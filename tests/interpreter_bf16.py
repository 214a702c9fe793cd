"""Exact bf16 in Triton's interpreter, which computes on the raw 16-bit integers and truncates where it should round.

bf16 numbers stay uint16 arrays in memory, as in the interpreter. Every operation widens them to fp32, computes there,
and rounds to nearest even once, as a GPU does. Tests only: ``tests/conftest.py`` applies it where
TRITON_INTERPRET=1. Works with triton 3.6 and 3.9.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def round_to_bf16(values: np.ndarray) -> np.ndarray:
    """fp32 (or wider, rounded to fp32 first) → bits of the nearest bf16, ties to even; NaN stays NaN."""
    single = np.ascontiguousarray(values, dtype=np.float32)
    bits = single.view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    return np.where(np.isnan(single), np.uint32(0x7FC0), rounded).astype(np.uint16)


def widen_bf16(bits: np.ndarray) -> np.ndarray:
    """Bits of bf16 → the same numbers in fp32."""
    return (np.ascontiguousarray(bits).astype(np.uint32) << np.uint32(16)).view(np.float32)


def make_bf16_exact() -> None:
    """Patch the interpreter's builder; calling it twice does no harm."""
    if getattr(InterpreterBuilder, "bf16_is_exact", False):
        return
    for name in ("binary_op", "unary_op", "ternary_op", "create_rsqrt", "create_erf", "create_fma"):
        setattr(InterpreterBuilder, name, _through_fp32(getattr(InterpreterBuilder, name)))
    InterpreterBuilder.create_dot = _dot_through_fp32(InterpreterBuilder.create_dot)
    InterpreterBuilder.cast_impl = _cast(InterpreterBuilder.cast_impl)
    InterpreterBuilder.get_bf16 = lambda self, value: TensorHandle(round_to_bf16(np.array([value])), tl.bfloat16)
    InterpreterBuilder.bf16_is_exact = True


def _is_bf16(value: Any) -> bool:
    return isinstance(value, TensorHandle) and value.dtype.scalar == tl.bfloat16


def _widened(value: Any) -> Any:
    return TensorHandle(widen_bf16(value.data), tl.float32) if _is_bf16(value) else value


def _through_fp32(operation: Callable[..., TensorHandle]) -> Callable[..., TensorHandle]:
    """Of arithmetic and comparisons. ``where`` has a condition first and only moves bits: it is left as it is."""

    def exact(self: InterpreterBuilder, first: TensorHandle, *rest: Any) -> TensorHandle:
        if not _is_bf16(first):
            return operation(self, first, *rest)
        result = operation(self, _widened(first), *map(_widened, rest))
        if result.data.dtype == np.bool_:  # a comparison
            return TensorHandle(result.data, tl.int1)
        return TensorHandle(round_to_bf16(result.data), tl.bfloat16)

    return exact


def _dot_through_fp32(dot: Callable[..., TensorHandle]) -> Callable[..., TensorHandle]:
    """Products of bf16 are exact in fp32; the sum is rounded only if the accumulator is bf16."""

    def exact(self: InterpreterBuilder, a: TensorHandle, b: TensorHandle, d: TensorHandle, *rest: Any) -> TensorHandle:
        result = dot(self, _widened(a), _widened(b), _widened(d), *rest)
        return TensorHandle(round_to_bf16(result.data), tl.bfloat16) if _is_bf16(d) else result

    return exact


def _cast(cast_impl: Callable[..., TensorHandle]) -> Callable[..., TensorHandle]:
    def exact(self: InterpreterBuilder, source: TensorHandle, dst_type: Any) -> TensorHandle:
        if dst_type.scalar == tl.bfloat16:
            return TensorHandle(round_to_bf16(_widened(source).data), tl.bfloat16)
        return cast_impl(self, _widened(source), dst_type)

    return exact
