"""Ops that treat each token by itself: embedding and norms.

Operations are counted as the formula is written (a root, an exponential and a division are one each); none of these ops
comes near the ceiling of arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from pico_vllm.bench.kernel_cases.case import (
    Baseline,
    BoundCall,
    Cost,
    KernelCase,
    Tensors,
    generator,
    normal,
    spread,
)
from pico_vllm.kernels.backend import REFERENCE

if TYPE_CHECKING:
    from pico_vllm.bench.kernel_cases.shapes import KernelShapes
    from pico_vllm.kernels.backend import KernelBackend

_EPS = 1e-6
_ID_BYTES = 4  # int32
_ROPE_THETA = 10000.0


def rows_of(count: int) -> Callable[[tuple[torch.Tensor, ...]], tuple[torch.Tensor, ...]]:
    """Picks the rows that an oracle looks at, of outputs with ``count`` rows each."""
    return lambda outputs: tuple(output[spread(count)] for output in outputs)


# -------------------------------------------------------------------------------------------------------- embedding
def embedding_cost(num_tokens: int, hidden_size: int, element_bytes: int) -> Cost:
    """Ids and their rows in (all different), rows out."""
    rows = num_tokens * hidden_size * element_bytes
    return Cost(num_tokens * _ID_BYTES + rows, rows, 0)


def embedding_cases(shapes: KernelShapes, dtype: torch.dtype) -> Iterator[KernelCase]:
    """A row of the table a token."""
    for num_tokens in shapes.num_tokens:
        yield _embedding_case(num_tokens, shapes.vocab_size, shapes.hidden_size, dtype)


def _embedding_case(num_tokens: int, vocab_size: int, hidden_size: int, dtype: torch.dtype) -> KernelCase:
    def make(device: torch.device) -> Tensors:
        g = generator(device)
        ids = torch.randperm(vocab_size, generator=g, device=device)[:num_tokens].int()
        return {"ids": ids, "weight": normal(g, vocab_size, hidden_size, dtype=dtype)}

    def another(tensors: Tensors, index: int) -> Tensors:
        # Other rows of the same table: copies of the whole table would be many times what a call reads.
        ids = (tensors["ids"].long() + index * num_tokens) % vocab_size
        return {"ids": ids.int(), "weight": tensors["weight"]}

    def bind(backend: KernelBackend, t: Tensors) -> BoundCall:
        return lambda: (backend.embedding(t["ids"], t["weight"]),)

    return KernelCase(
        name=tokens_name(num_tokens),
        cost=embedding_cost(num_tokens, hidden_size, dtype.itemsize),
        make=make,
        bind=bind,
        expected=lambda t: (REFERENCE.embedding(t["ids"], t["weight"]).float(),),
        baselines=(Baseline("F.embedding", lambda t: lambda: (F.embedding(t["ids"], t["weight"]),)),),
        exact=True,
        another=another,
    )


# ------------------------------------------------------------------------------------------------------------ norms
def rms_norm_cost(num_tokens: int, hidden_size: int, element_bytes: int) -> Cost:
    """x and the weight in, y out; an element is squared, summed, scaled and weighted."""
    x = num_tokens * hidden_size
    return Cost((x + hidden_size) * element_bytes, x * element_bytes, 4 * x)


def rms_norm_cases(shapes: KernelShapes, dtype: torch.dtype) -> Iterator[KernelCase]:
    """Over the hidden size."""
    for num_tokens in shapes.num_tokens:
        yield _rms_norm_case(num_tokens, shapes.hidden_size, dtype)


def _rms_norm_case(num_tokens: int, hidden_size: int, dtype: torch.dtype) -> KernelCase:
    def make(device: torch.device) -> Tensors:
        g = generator(device)
        return {"x": normal(g, num_tokens, hidden_size, dtype=dtype), "weight": normal(g, hidden_size, dtype=dtype)}

    def bind(backend: KernelBackend, t: Tensors) -> BoundCall:
        return lambda: (backend.rms_norm(t["x"], t["weight"], _EPS),)

    def expected(t: Tensors) -> tuple[torch.Tensor, ...]:
        return (REFERENCE.rms_norm(t["x"][spread(num_tokens)].double(), t["weight"].double(), _EPS),)

    return KernelCase(
        name=tokens_name(num_tokens),
        cost=rms_norm_cost(num_tokens, hidden_size, dtype.itemsize),
        make=make,
        bind=bind,
        expected=expected,
        compared=rows_of(num_tokens),
        baselines=(Baseline("F.rms_norm", lambda t: lambda: (F.rms_norm(t["x"], (hidden_size,), t["weight"], _EPS),)),),
    )


def add_rms_norm_cost(num_tokens: int, hidden_size: int, element_bytes: int) -> Cost:
    """x, the residual and the weight in, y and the new residual out; one addition more than ``rms_norm``."""
    x = num_tokens * hidden_size
    return Cost((2 * x + hidden_size) * element_bytes, 2 * x * element_bytes, 5 * x)


def add_rms_norm_cases(shapes: KernelShapes, dtype: torch.dtype) -> Iterator[KernelCase]:
    """Over the hidden size."""
    for num_tokens in shapes.num_tokens:
        yield _add_rms_norm_case(num_tokens, shapes.hidden_size, dtype)


def _add_rms_norm_case(num_tokens: int, hidden_size: int, dtype: torch.dtype) -> KernelCase:
    def make(device: torch.device) -> Tensors:
        g = generator(device)
        x, residual = (normal(g, num_tokens, hidden_size, dtype=dtype) for _ in range(2))
        return {"x": x, "residual": residual, "weight": normal(g, hidden_size, dtype=dtype)}

    def bind(backend: KernelBackend, t: Tensors) -> BoundCall:
        return lambda: backend.add_rms_norm(t["x"], t["residual"], t["weight"], _EPS)

    def expected(t: Tensors) -> tuple[torch.Tensor, ...]:
        x, residual = (t[name][spread(num_tokens)].double() for name in ("x", "residual"))
        return REFERENCE.add_rms_norm(x, residual, t["weight"].double(), _EPS)

    def bind_torch(t: Tensors) -> BoundCall:
        def call() -> tuple[torch.Tensor, ...]:
            t["residual"].add_(t["x"])
            return F.rms_norm(t["residual"], (hidden_size,), t["weight"], _EPS), t["residual"]

        return call

    return KernelCase(
        name=tokens_name(num_tokens),
        cost=add_rms_norm_cost(num_tokens, hidden_size, dtype.itemsize),
        make=make,
        bind=bind,
        expected=expected,
        compared=rows_of(num_tokens),
        baselines=(Baseline("add_ + F.rms_norm", bind_torch),),
        changed=("residual",),
    )


def tokens_name(num_tokens: int) -> str:
    """The size as a table shows it."""
    return "1 token" if num_tokens == 1 else f"{num_tokens} tokens"


def cos_sin_rows(num_tokens: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[num_tokens, head_dim], cos | sin at positions [0, num_tokens)."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    positions = torch.arange(num_tokens, dtype=torch.float32, device=device)
    angles = torch.outer(positions, _ROPE_THETA**-exponents)
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(dtype)
