"""The matrix products of a layer and the output head, at a few numbers of rows M.

Each under the op that the model calls for it: ``linear`` (qkv, lm_head), ``partial_linear`` (o, down), ``gated_linear``
(gate and up; of many tokens it is a product and SwiGLU, which is no op of its own). Torch's ``F.linear`` is cuBLAS on a
GPU, oneDNN or MKL on a CPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch.nn.functional as F

from pico_vllm.bench.kernel_cases.case import Baseline, BoundCall, Cost, KernelCase, Tensors, generator, normal, spread
from pico_vllm.bench.kernel_cases.tokens import rows_of
from pico_vllm.kernels.backend import REFERENCE

if TYPE_CHECKING:
    import torch

    from pico_vllm.bench.kernel_cases.shapes import KernelShapes
    from pico_vllm.kernels.backend import KernelBackend


def linear_cost(num_rows: int, in_features: int, out_features: int, has_bias: bool, element_bytes: int) -> Cost:
    """x, the matrix and the bias in, y out; a product and a sum an element of the matrix and row, a sum a bias."""
    bias = out_features if has_bias else 0
    elements_read = num_rows * in_features + in_features * out_features + bias
    flops = 2 * num_rows * in_features * out_features + num_rows * bias
    return Cost(elements_read * element_bytes, num_rows * out_features * element_bytes, flops)


def gated_linear_cost(num_rows: int, in_features: int, intermediate_size: int, element_bytes: int) -> Cost:
    """Both matrices in, y alone out; exp, sum, division and two products more an element of y."""
    product = linear_cost(num_rows, in_features, 2 * intermediate_size, False, element_bytes)
    y = num_rows * intermediate_size
    return Cost(product.bytes_read, y * element_bytes, product.flops + 5 * y)


def linear_cases(shapes: KernelShapes, dtype: torch.dtype) -> Iterator[KernelCase]:
    """qkv and lm_head, each at all M."""
    qkv_size = (shapes.num_heads + 2 * shapes.num_kv_heads) * shapes.head_dim
    for name, out_features, has_bias in (("qkv", qkv_size, shapes.qkv_bias), ("lm_head", shapes.vocab_size, False)):
        for num_rows in shapes.linear_tokens:
            yield _linear_case(name, num_rows, shapes.hidden_size, out_features, has_bias, dtype)


def partial_linear_cases(shapes: KernelShapes, dtype: torch.dtype) -> Iterator[KernelCase]:
    """o and down, each at all M.

    Partial sums are compared added up. Their cost is that of the sum: what they write beyond it, the op has chosen to.
    """
    for name, in_features in (("o", shapes.num_heads * shapes.head_dim), ("down", shapes.intermediate_size)):
        for num_rows in shapes.linear_tokens:
            case = _linear_case(name, num_rows, in_features, shapes.hidden_size, False, dtype)
            yield dataclasses.replace(case, bind=_bind_partial, compared=_added_up_rows_of(num_rows))


def gated_linear_cases(shapes: KernelShapes, dtype: torch.dtype) -> Iterator[KernelCase]:
    """gate and up, at all M."""
    for num_rows in shapes.linear_tokens:
        yield _gated_linear_case(num_rows, shapes.hidden_size, shapes.intermediate_size, dtype)


def _linear_case(
    name: str, num_rows: int, in_features: int, out_features: int, has_bias: bool, dtype: torch.dtype
) -> KernelCase:
    def make(device: torch.device) -> Tensors:
        g = generator(device)
        weight = normal(g, out_features, in_features, dtype=dtype, scale=in_features**-0.5)
        tensors = {"x": normal(g, num_rows, in_features, dtype=dtype), "weight": weight}
        return {**tensors, "bias": normal(g, out_features, dtype=dtype)} if has_bias else tensors

    def bind(backend: KernelBackend, t: Tensors) -> BoundCall:
        x, packed = t["x"], backend.pack_linear(t["weight"], t.get("bias"))
        return lambda: (backend.linear(x, packed),)

    def expected(t: Tensors) -> tuple[torch.Tensor, ...]:
        dense = REFERENCE.pack_linear(t["weight"], t.get("bias"))
        return (REFERENCE.linear(t["x"][spread(num_rows)].float(), dense),)

    return KernelCase(
        name=f"{name} {in_features} x {out_features}, M = {num_rows}",
        cost=linear_cost(num_rows, in_features, out_features, has_bias, dtype.itemsize),
        make=make,
        bind=bind,
        expected=expected,
        compared=rows_of(num_rows),
        baselines=(Baseline("F.linear", lambda t: lambda: (F.linear(t["x"], t["weight"], t.get("bias")),)),),
    )


def _bind_partial(backend: KernelBackend, t: Tensors) -> BoundCall:
    x, packed = t["x"], backend.pack_linear(t["weight"], None)
    return lambda: (backend.partial_linear(x, packed),)


def _added_up_rows_of(num_rows: int) -> Callable[[tuple[torch.Tensor, ...]], tuple[torch.Tensor, ...]]:
    picked = rows_of(num_rows)
    return lambda outputs: picked(tuple(y if y.dim() == 2 else y.sum(dim=0) for y in outputs))


def _gated_linear_case(num_rows: int, in_features: int, intermediate_size: int, dtype: torch.dtype) -> KernelCase:
    def make(device: torch.device) -> Tensors:
        g = generator(device)
        weight = normal(g, 2 * intermediate_size, in_features, dtype=dtype, scale=in_features**-0.5)
        return {"x": normal(g, num_rows, in_features, dtype=dtype), "weight": weight}

    def bind(backend: KernelBackend, t: Tensors) -> BoundCall:
        x, packed = t["x"], backend.pack_linear(t["weight"], None)
        return lambda: (backend.gated_linear(x, packed),)

    def expected(t: Tensors) -> tuple[torch.Tensor, ...]:
        return (REFERENCE.gated_linear(t["x"][spread(num_rows)].float(), REFERENCE.pack_linear(t["weight"], None)),)

    def bind_torch(t: Tensors) -> BoundCall:
        def call() -> tuple[torch.Tensor, ...]:
            gate, up = F.linear(t["x"], t["weight"]).chunk(2, dim=-1)
            return (F.silu(gate) * up,)

        return call

    return KernelCase(
        name=f"gate_up {in_features} x 2 x {intermediate_size}, M = {num_rows}",
        cost=gated_linear_cost(num_rows, in_features, intermediate_size, dtype.itemsize),
        make=make,
        bind=bind,
        expected=expected,
        compared=rows_of(num_rows),
        baselines=(Baseline("F.linear, F.silu * up", bind_torch),),
    )
