"""The matrix products of a layer and the output head, at a few numbers of rows M.

Torch's ``F.linear`` is cuBLAS on a GPU, oneDNN or MKL on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
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


def linear_cases(shapes: KernelShapes, dtype: torch.dtype) -> Iterator[KernelCase]:
    """qkv, o, gate_up, down and lm_head, each at all M."""
    q_size, kv_size = shapes.num_heads * shapes.head_dim, shapes.num_kv_heads * shapes.head_dim
    hidden, intermediate = shapes.hidden_size, shapes.intermediate_size
    layers = (  # (name, in_features, out_features, has bias)
        ("qkv", hidden, q_size + 2 * kv_size, shapes.qkv_bias),
        ("o", q_size, hidden, False),
        ("gate_up", hidden, 2 * intermediate, False),
        ("down", intermediate, hidden, False),
        ("lm_head", hidden, shapes.vocab_size, False),
    )
    for name, in_features, out_features, has_bias in layers:
        for num_rows in shapes.linear_tokens:
            yield _linear_case(name, num_rows, in_features, out_features, has_bias, dtype)


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
