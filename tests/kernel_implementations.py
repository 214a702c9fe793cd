"""Which implementations of each op the kernel tests run, and how far each may be from the oracle.

A new implementation joins every test of its op by one entry in ``IMPLEMENTATIONS``. The oracle is the op's reference,
run in fp64 on the very numbers (rounded to the tested dtype) that the implementation got.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from types import ModuleType
from typing import Any

import pytest
import torch

from pico_vllm.kernels import (
    attention,
    block_copy,
    embedding,
    linear,
    logits_processing,
    philox,
    rms_norm,
    rotary_decode_attention,
    rotary_embedding,
    rotary_embedding_and_store_kv,
    sampling,
    swiglu,
)

FLOATS = (torch.float32, torch.bfloat16, torch.float16)

#: Triton kernels run interpreted (on CPU tensors) or compiled (on a GPU); without either they aren't listed.
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
TRITON_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RUNS_TRITON = IS_INTERPRETED or TRITON_DEVICE == "cuda"

#: Kernels in Gluon are for Hopper's tensor cores and copies; they run compiled there, and nowhere else.
needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs an sm_90"
)


@dataclass(frozen=True, slots=True)
class Implementation:
    """One way to compute an op.

    Attributes:
        name: part of the test's id.
        op: the callable, ``AttentionOps`` or ``DecodeOps``.
        device: where its tensors must be.
        dtypes: the ones it is tested in.
        equals_hf_bitwise: it makes the roundings of transformers' CPU code, all of them.
        is_slow: milliseconds a row (interpreted): tests that draw a thousand tokens draw fewer.
    """

    name: str
    op: Any
    device: str = "cpu"
    dtypes: tuple[torch.dtype, ...] = FLOATS
    equals_hf_bitwise: bool = False
    is_slow: bool = False


@dataclass(frozen=True, slots=True)
class AttentionOps:
    """Ops that share their metadata, so they are swapped together."""

    prepare_attention: Callable[..., Any]
    store_kv: Callable[..., None]
    paged_attention: Callable[..., torch.Tensor]


@dataclass(frozen=True, slots=True)
class DecodeOps:
    """What decodes take as one op, with its metadata."""

    prepare_attention: Callable[..., Any]
    rotary_decode_attention: Callable[..., torch.Tensor]


REFERENCE_ATTENTION = AttentionOps(
    attention.prepare_attention_reference, attention.store_kv_reference, attention.paged_attention_reference
)
CPU_ATTENTION = AttentionOps(attention.prepare_attention_cpu, attention.store_kv_cpu, attention.paged_attention_cpu)

REFERENCE_DECODE = DecodeOps(
    attention.prepare_attention_reference, rotary_decode_attention.rotary_decode_attention_reference
)
CPU_DECODE = DecodeOps(attention.prepare_attention_cpu, rotary_decode_attention.rotary_decode_attention_cpu)

IMPLEMENTATIONS: dict[str, tuple[Implementation, ...]] = {
    "embedding": (
        Implementation("reference", embedding.embedding_reference),
        Implementation("cpu", embedding.embedding_cpu),
    ),
    "pack_linear": (
        Implementation("dense", linear.pack_linear_dense),
        Implementation("cpu", linear.pack_linear_cpu),
    ),
    "linear": (
        Implementation("reference", linear.linear_reference),
        Implementation("cpu", linear.linear_cpu),
    ),
    "partial_linear": (
        Implementation("reference", linear.partial_linear_reference),
        Implementation("cpu", linear.partial_linear_cpu),
    ),
    "gated_linear": (
        Implementation("reference", linear.gated_linear_reference),
        Implementation("cpu", linear.gated_linear_cpu),
    ),
    "rms_norm": (
        Implementation("reference", rms_norm.rms_norm_reference),
        Implementation("cpu", rms_norm.rms_norm_cpu, equals_hf_bitwise=True),
    ),
    "add_rms_norm": (
        Implementation("reference", rms_norm.add_rms_norm_reference),
        Implementation("cpu", rms_norm.add_rms_norm_cpu, equals_hf_bitwise=True),
    ),
    "rotary_embedding": (
        Implementation("reference", rotary_embedding.rotary_embedding_reference, equals_hf_bitwise=True),
        Implementation("cpu", rotary_embedding.rotary_embedding_cpu, equals_hf_bitwise=True),
    ),
    "rotary_embedding_and_store_kv": (
        Implementation("reference", rotary_embedding_and_store_kv.rotary_embedding_and_store_kv_reference),
        Implementation("cpu", rotary_embedding_and_store_kv.rotary_embedding_and_store_kv_cpu),
    ),
    "attention": (
        Implementation("reference", REFERENCE_ATTENTION),
        Implementation("cpu", CPU_ATTENTION),
    ),
    "rotary_decode_attention": (
        Implementation("reference", REFERENCE_DECODE),
        Implementation("cpu", CPU_DECODE),
    ),
    "swiglu": (
        Implementation("reference", swiglu.swiglu_reference),
        Implementation("cpu", swiglu.swiglu_cpu, equals_hf_bitwise=True),
    ),
    "greedy": (
        Implementation("reference", sampling.greedy_reference),
        Implementation("cpu", sampling.greedy_cpu),
    ),
    "sample": (
        Implementation("reference", sampling.sample_reference),
        Implementation("cpu", sampling.sample_cpu),
    ),
    "apply_penalties": (
        Implementation("reference", logits_processing.apply_penalties_reference, equals_hf_bitwise=True),
        Implementation("cpu", logits_processing.apply_penalties_cpu, equals_hf_bitwise=True),
    ),
    "apply_bitmask": (
        Implementation("reference", logits_processing.apply_bitmask_reference),
        Implementation("cpu", logits_processing.apply_bitmask_cpu),
    ),
    "logprobs": (
        Implementation("reference", logits_processing.logprobs_reference),
        Implementation("cpu", logits_processing.logprobs_cpu),
    ),
    "uniform": (Implementation("cpu", philox.uniform_cpu),),  # uniform_reference is scalar: it is the expectation
    "copy_blocks": (
        Implementation("reference", block_copy.copy_blocks_reference),
        Implementation("cpu", block_copy.copy_blocks_cpu),
    ),
    "gather_blocks": (
        Implementation("reference", block_copy.gather_blocks_reference),
        Implementation("cpu", block_copy.gather_blocks_cpu),
    ),
    "scatter_blocks": (
        Implementation("reference", block_copy.scatter_blocks_reference),
        Implementation("cpu", block_copy.scatter_blocks_cpu),
    ),
}
#: Modules whose implementations must all be listed above (tests/kernels/test_backend.py).
TRITON_MODULES: list[ModuleType] = []

if RUNS_TRITON:
    from pico_vllm.kernels import (
        attention_triton,
        block_copy_triton,
        greedy_triton,
        linear_triton,
        logits_processing_triton,
        philox_triton,
        rms_norm_triton,
        rotary_decode_attention_triton,
        rotary_embedding_and_store_kv_triton,
        sampling_triton,
        swiglu_triton,
    )

    TRITON_ATTENTION = AttentionOps(
        attention_triton.prepare_attention_triton,
        attention_triton.store_kv_triton,
        attention_triton.paged_attention_triton,
    )
    TRITON_DECODE = DecodeOps(
        attention_triton.prepare_attention_triton, rotary_decode_attention_triton.rotary_decode_attention_triton
    )
    IMPLEMENTATIONS["attention"] += (Implementation("triton", TRITON_ATTENTION, TRITON_DEVICE),)
    IMPLEMENTATIONS["rotary_decode_attention"] += (Implementation("triton", TRITON_DECODE, TRITON_DEVICE),)
    TRITON_MODULES += [attention_triton, rotary_decode_attention_triton]
    TRITON_MODULES += [block_copy_triton, greedy_triton, linear_triton, logits_processing_triton, philox_triton]
    TRITON_MODULES += [rms_norm_triton, rotary_embedding_and_store_kv_triton, sampling_triton, swiglu_triton]
    for name, function in {
        "linear": linear_triton.linear_triton,
        "partial_linear": linear_triton.partial_linear_triton,
        "gated_linear": linear_triton.gated_linear_triton,
        "rms_norm": rms_norm_triton.rms_norm_triton,
        "add_rms_norm": rms_norm_triton.add_rms_norm_triton,
        "rotary_embedding_and_store_kv": rotary_embedding_and_store_kv_triton.rotary_embedding_and_store_kv_triton,
        "swiglu": swiglu_triton.swiglu_triton,
        "greedy": greedy_triton.greedy_triton,
        "sample": sampling_triton.sample_triton,
        "uniform": philox_triton.uniform_triton,
        "apply_penalties": logits_processing_triton.apply_penalties_triton,
        "apply_bitmask": logits_processing_triton.apply_bitmask_triton,
        "copy_blocks": block_copy_triton.copy_blocks_triton,
        "gather_blocks": block_copy_triton.gather_blocks_triton,
        "scatter_blocks": block_copy_triton.scatter_blocks_triton,
    }.items():
        equals_hf = name == "apply_penalties"
        IMPLEMENTATIONS[name] += (
            Implementation("triton", function, TRITON_DEVICE, equals_hf_bitwise=equals_hf, is_slow=IS_INTERPRETED),
        )


def each_implementation(op: str, *, equal_to_hf: bool = False) -> pytest.MarkDecorator:
    """Parametrise ``impl``."""
    chosen = [impl for impl in IMPLEMENTATIONS[op] if impl.equals_hf_bitwise or not equal_to_hf]
    return pytest.mark.parametrize("impl", chosen, ids=[impl.name for impl in chosen])


def each_implementation_and_dtype(
    op: str, *, equal_to_hf: bool = False, dtypes: tuple[torch.dtype, ...] = FLOATS
) -> pytest.MarkDecorator:
    """Parametrise ``impl, dtype`` with those of ``dtypes`` that the implementation is tested in."""
    chosen = [
        pytest.param(impl, dtype, id=f"{impl.name}-{str(dtype).removeprefix('torch.')}")
        for impl in IMPLEMENTATIONS[op]
        for dtype in impl.dtypes
        if dtype in dtypes
        if impl.equals_hf_bitwise or not equal_to_hf
    ]
    return pytest.mark.parametrize("impl, dtype", chosen)


def all_tested_callables() -> dict[str, set[Callable[..., Any]]]:
    """Op of ``KernelBackend`` → what is tested under its name."""
    tested: dict[str, set[Callable[..., Any]]] = {op: set() for op in IMPLEMENTATIONS if op != "attention"}
    for op, implementations in IMPLEMENTATIONS.items():
        for impl in implementations:
            if isinstance(impl.op, AttentionOps | DecodeOps):
                for field in fields(impl.op):
                    tested.setdefault(field.name, set()).add(getattr(impl.op, field.name))
            else:
                tested[op].add(impl.op)
    return tested


# ------------------------------------------------------------------------------------------------------ tolerances
@dataclass(frozen=True, slots=True)
class Tolerance:
    """|actual - oracle| <= atol + rtol * |oracle|."""

    rtol: float
    atol: float
    reason: str


#: Half the distance from 1 to the next number: what one rounding may change, relatively.
U32, U16, UB16 = 2.0**-24, 2.0**-11, 2.0**-8

_NORM = "normalised value and product are each rounded: 2 u (first order), and the sum of squares in fp32 adds little"
_NORM32 = "root, inverse and two products: 4 u; half of what a blockwise sum of 1536 squares loses: 4 u"
_ROPE = "two products and their sum are rounded: u (|a cos| + |b sin|) + u |out| <= 2 u sqrt(2) 4, with |a|, |b| <= 4"
_NORM_ROPE = "head norm 2 u, products and sum of the rotation 2 u, of numbers up to sqrt(2) 7: 40 u"
_SWIGLU = "silu and product are each rounded: 2 u; atol is the smallest normal number, below which u grows"
_SWIGLU32 = "2 u, exp and division of the sigmoid 4 u more"
_LINEAR = "one rounding at the end: u; atol is fp32 summation of K <= 576 products near 1/24, times 2 of slack"
_LINEAR32 = "no rounding but the summation's: sqrt(K) u sum |x w| <= 24 * 6e-8 * 15"
_GATED = (
    "u each of up, silu and result; that of the gate shows up to 3 u in silu of -4; atol: that of linear, times |up|"
)
_ATTEND = (
    "weights and output are each rounded: u sum(w |v|) + u |out|, |v| <= 4, and the weights' sum isn't renormalised"
)
_ATTEND32 = "scores near 10 lose about 2.5 * 10 u, which is what exp makes of it relatively, times |v| <= 4"

TOLERANCES: dict[tuple[str, torch.dtype], Tolerance] = {
    ("rms_norm", torch.float32): Tolerance(8 * U32, 0.0, _NORM32),
    ("rms_norm", torch.bfloat16): Tolerance(2.02 * UB16, 0.0, _NORM),
    ("rms_norm", torch.float16): Tolerance(2.02 * U16, 2.0**-24, _NORM + "; atol is fp16's subnormal step"),
    ("rotary_embedding", torch.float32): Tolerance(0.0, 12 * U32, _ROPE),
    ("rotary_embedding", torch.bfloat16): Tolerance(0.0, 12 * UB16, _ROPE),
    ("rotary_embedding", torch.float16): Tolerance(0.0, 12 * U16, _ROPE),
    ("rotary_embedding_of_normalised", torch.float32): Tolerance(0.0, 48 * U32, _NORM_ROPE),
    ("rotary_embedding_of_normalised", torch.bfloat16): Tolerance(0.0, 48 * UB16, _NORM_ROPE),
    ("rotary_embedding_of_normalised", torch.float16): Tolerance(0.0, 48 * U16, _NORM_ROPE),
    ("swiglu", torch.float32): Tolerance(6 * U32, 2.0**-126, _SWIGLU32),
    ("swiglu", torch.bfloat16): Tolerance(2.02 * UB16, 2.0**-126, _SWIGLU),
    ("swiglu", torch.float16): Tolerance(2.02 * U16, 2.0**-14 * U16 * 4, _SWIGLU),
    ("linear", torch.float32): Tolerance(0.0, 2e-5, _LINEAR32),
    ("linear", torch.bfloat16): Tolerance(1.01 * UB16, 4e-5, _LINEAR),
    ("linear", torch.float16): Tolerance(1.01 * U16, 4e-5, _LINEAR),
    ("gated_linear", torch.float32): Tolerance(6 * U32, 2e-5, _GATED),
    ("gated_linear", torch.bfloat16): Tolerance(6.06 * UB16, 1.6e-4, _GATED),
    ("gated_linear", torch.float16): Tolerance(6.06 * U16, 1.6e-4, _GATED),
    ("attention", torch.float32): Tolerance(0.0, 25 * 4 * U32, _ATTEND32),
    ("attention", torch.bfloat16): Tolerance(UB16, 4 * UB16, _ATTEND),
    ("attention", torch.float16): Tolerance(U16, 4 * U16, _ATTEND),
}


def assert_near_oracle(op: str, actual: torch.Tensor, oracle: torch.Tensor) -> None:
    """Compare with the fp64 oracle within the table's tolerance of actual's dtype; NaN is never equal."""
    assert oracle.dtype == torch.float64
    tolerance = TOLERANCES[op, actual.dtype]
    torch.testing.assert_close(actual.double().cpu(), oracle.cpu(), rtol=tolerance.rtol, atol=tolerance.atol)


def assert_bitwise(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Same dtype, shape and numbers; NaN equals NaN."""
    torch.testing.assert_close(actual.cpu(), expected.cpu(), rtol=0.0, atol=0.0, equal_nan=True)


@contextmanager
def uninitialised_memory_is_nan() -> Iterator[None]:
    """``torch.empty`` gives NaN (integers: the largest), so an element that nobody writes is seen."""
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = fill
