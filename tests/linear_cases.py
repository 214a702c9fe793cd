"""Products to test kernels on: tokens and a weight, and what the oracle makes of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from kernel_cases import NAN, random_tensor
from kernel_implementations import uninitialised_memory_is_nan
from pico_vllm.kernels.linear import LinearWeight, gated_linear_reference, linear_reference, pack_linear_dense
from pico_vllm.kernels.linear_config import Product

OPS = {Product.WHOLE: "linear", Product.PARTIAL: "partial_linear", Product.GATED: "gated_linear"}
REFERENCES = {"linear": linear_reference, "partial_linear": linear_reference, "gated_linear": gated_linear_reference}


@dataclass(frozen=True)
class Case:
    """Tokens and a weight, settled in memory, and what the oracle makes of them."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None

    def expected(self, op: str) -> torch.Tensor:
        wide = pack_linear_dense(self.weight.double(), None if self.bias is None else self.bias.double())
        return REFERENCES[op](self.x.double(), wide)

    def run(self, function: Callable[[torch.Tensor, LinearWeight], torch.Tensor]) -> torch.Tensor:
        if self.x.is_cuda:
            torch.cuda.synchronize()  # a weight must be in memory when a kernel is launched early
        with uninitialised_memory_is_nan():
            return function(self.x, pack_linear_dense(self.weight, self.bias))


def build(
    num_tokens: int,
    in_features: int,
    out_features: int,
    *,
    dtype: torch.dtype,
    device: str = "cpu",
    has_bias: bool = False,
) -> Case:
    """Weights near 1 / sqrt(K), so that sums of K products stay near 1."""
    weight = random_tensor(out_features, in_features, dtype=torch.float32, seed=1) * in_features**-0.5
    bias = random_tensor(out_features, dtype=dtype, device=device, seed=2) if has_bias else None
    x = random_tensor(num_tokens, in_features, dtype=dtype, device=device)
    return Case(x, weight.to(device, dtype), bias)


def before_nan(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers with NaN behind them in memory."""
    padded = torch.full((len(tensor) + 200, *tensor.shape[1:]), NAN, dtype=tensor.dtype, device=tensor.device)
    padded[: len(tensor)] = tensor
    return padded[: len(tensor)]


def added_up(y: torch.Tensor) -> torch.Tensor:
    """Of partial sums the sum."""
    return y if y.dim() == 2 else y.sum(dim=0)


@contextmanager
def exact_sums() -> Iterator[None]:
    """Inside, cuBLAS adds its partial sums in fp32; by default it may in 16 bits."""
    matmul = torch.backends.cuda.matmul
    names = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")
    before = {name: getattr(matmul, name) for name in names}
    for name in names:
        setattr(matmul, name, False)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(matmul, name, value)
