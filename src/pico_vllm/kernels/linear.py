"""Matrix products with a weight that a backend may keep in a layout of its own.

    y = x W^T + b

``partial_linear`` may leave the last sum to whoever adds the result anyway (``add_rms_norm``): it returns y, or
[num_splits, num_tokens, out_features] in fp32 whose sum over the splits is y before it is rounded.

Layers hold a ``LinearWeight`` and call ``backend.linear(x, weight)``; they never look inside. So a blocked layout, a
quantised one or a tuned tile shape fits in later without touching a model.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from pico_vllm.kernels.swiglu import swiglu_cpu, swiglu_reference


@dataclass(frozen=True, slots=True)
class LinearWeight:
    """One weight matrix, dense or packed.

    Attributes:
        in_features, out_features: K and N.
        dense: [out_features, in_features], or None when only ``packed`` is kept.
        packed: the backend's own layout of the same matrix, or None.
        bias: [out_features] or None.
        descriptors: what kernels for Hopper copy tiles of ``dense`` by, once they were launched.
    """

    in_features: int
    out_features: int
    dense: torch.Tensor | None
    packed: torch.Tensor | None
    bias: torch.Tensor | None
    descriptors: dict[tuple[int, ...], Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def to_dense(self) -> torch.Tensor:
        """The matrix as [out_features, in_features]; unpacks a copy where there is no dense one."""
        if self.dense is not None:
            return self.dense
        assert self.packed is not None
        return self.packed.to_dense()


def pack_linear_dense(weight: torch.Tensor, bias: torch.Tensor | None) -> LinearWeight:
    """Keep the matrix as it is: no copy, so a tied lm_head shares the embedding's storage."""
    return LinearWeight(weight.shape[1], weight.shape[0], weight, None, bias)


def linear_reference(x: torch.Tensor, weight: LinearWeight, out: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply by the transposed weight and add the bias.

    Args:
        x: [num_tokens, in_features].
        weight: of the same dtype.
        out: contiguous, where the result goes; None = into a new tensor.

    Returns:
        [num_tokens, out_features] in x's dtype; products are summed in fp32 or wider and rounded once.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    y = x.to(wide) @ weight.to_dense().to(wide).T
    if weight.bias is not None:
        y += weight.bias.to(wide)
    return y.to(x.dtype) if out is None else out.copy_(y)


def partial_linear_reference(x: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
    """A product whose last sum ``add_rms_norm`` takes: partial sums [num_splits, num_tokens, out_features] fp32.

    Or, as here, the sum: [num_tokens, out_features] in x's dtype.
    """
    return linear_reference(x, weight)


def gated_linear_reference(x: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
    """The gated half of a feed-forward layer: ``swiglu`` of a product whose first half is the gate.

    Args:
        x: [num_tokens, in_features].
        weight: [2 * intermediate_size, in_features], gate rows first.

    Returns:
        [num_tokens, intermediate_size] in x's dtype; the product is rounded to it before it is gated.
    """
    return swiglu_reference(linear_reference(x, weight))


def gated_linear_cpu(x: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
    """``gated_linear_reference``, product and gate one after the other."""
    return swiglu_cpu(linear_cpu(x, weight))


def pack_linear_cpu(weight: torch.Tensor, bias: torch.Tensor | None) -> LinearWeight:
    """Reorder the matrix into oneDNN's blocked layout, where that is faster; the dense one is then dropped.

    Reordering happens once here instead of in every product. All linears and the lm_head of SmolLM2-135M in bf16 on
    2 cores of an AMD EPYC with AVX512-BF16, dense against packed, in ms: 11.3 / 6.1 at 1 token, 16.4 / 8.2 at 8,
    24.4 / 14.8 at 32.
    """
    if not _can_pack(weight):
        return pack_linear_dense(weight, bias)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
    return LinearWeight(weight.shape[1], weight.shape[0], None, packed, bias)


def linear_cpu(x: torch.Tensor, weight: LinearWeight, out: torch.Tensor | None = None) -> torch.Tensor:
    """``linear_reference`` through oneDNN when the weight is packed, else through torch (any device)."""
    if weight.packed is None:
        if out is not None and weight.bias is None:
            return torch.mm(x, weight.to_dense().T, out=out)
        y = torch.nn.functional.linear(x, weight.to_dense(), weight.bias)
    else:
        y = torch.ops.mkldnn._linear_pointwise(x, weight.packed, weight.bias, "none", [], "")
    return y if out is None else out.copy_(y)


def partial_linear_cpu(x: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
    """``partial_linear_reference``: the sum."""
    return linear_cpu(x, weight)


def _can_pack(weight: torch.Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32
