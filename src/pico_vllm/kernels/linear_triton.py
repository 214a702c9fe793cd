"""Matrix products in Triton, for few tokens above all: bound by how fast the weights are read.

A decode step of Qwen2.5-1.5B reads 3.1 GB of weights and multiplies them by a handful of rows. cuBLAS reads them at
half of an H200's bandwidth then. Here the first weights of each program are on their way *before* it waits for its
predecessor (programmatic dependent launch: weights depend on nobody), and the inputs of long products are split among
programs, so that every SM has something to read.

- ``linear_triton``: y = x W^T + b.
- ``partial_linear_triton``: the same as partial sums, [num_splits, num_tokens, out_features] fp32, for whoever adds
  them anyway: ``add_rms_norm``. No atomics: the same numbers every time.
- ``gated_linear_triton``: the gate and up products and SwiGLU of both in one kernel.

Where cuBLAS is faster (``linear_config``) it multiplies. On Hopper most products of two tokens and more have a kernel
of their own (``linear_hopper``), and gated ones of many tokens another (``gated_linear_hopper``). Contracts and
references are in ``linear``.

Weights must be in memory for good when a product is launched: between the last write to one and the product there is a
synchronisation, or a kernel that isn't launched early, as all of torch's are. So nothing but weights is read before the
wait; the bias comes after it.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# (a launch takes num_warps and num_stages beside the parameters of the kernel; a constexpr takes a Python value; the
# ranges of a kernel are Triton's)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pico_vllm.kernels.attention_config import device_of
from pico_vllm.kernels.linear import LinearWeight, linear_cpu
from pico_vllm.kernels.linear_config import MAX_ROWS, LinearConfig, Product, choose_linear, takes_gated_tiles
from pico_vllm.kernels.swiglu_triton import swiglu_triton

try:
    from pico_vllm.kernels.gated_linear_hopper import launch_hopper_gated
    from pico_vllm.kernels.linear_hopper import launch_hopper_linear, smallest_hopper_tile
except ImportError:  # a Triton without Gluon: the kernels below do everything
    launch_hopper_gated = launch_hopper_linear = smallest_hopper_tile = None


@triton.jit
def _one_row_kernel(
    x,
    weight,
    bias,
    y,
    out_features,
    IN_FEATURES: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_PARTIAL: tl.constexpr,
    IS_GATED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """y[n] = sum_k x[k] weight[n, k] + bias[n], one token.

    Grid: (ceil(out_features / BLOCK_N), num_splits). A program sums the inputs [split * SPLIT, (split + 1) * SPLIT) of
    BLOCK_N outputs. IS_PARTIAL: y is [num_splits, out_features] fp32, and split 0 adds the bias. IS_GATED: the weight
    has 2 * out_features rows, gates first, and y = silu(gate) * up. Products are summed in fp32.
    """
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(1)
    first = split * SPLIT
    last = tl.minimum(first + SPLIT, IN_FEATURES)
    is_output = outputs < out_features
    inputs = first + tl.arange(0, BLOCK_K)
    rows = weight + outputs.to(tl.int64) * IN_FEATURES
    up_rows = weight + (out_features + outputs).to(tl.int64) * IN_FEATURES
    w = _load_weights(rows, inputs, is_output, last)
    up_w = _load_weights(up_rows, inputs, is_output, last) if IS_GATED else w
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    x_block = tl.load(x + inputs, mask=inputs < last, other=0.0).to(tl.float32)
    products = w.to(tl.float32) * x_block[None, :]
    up_products = up_w.to(tl.float32) * x_block[None, :] if IS_GATED else products
    for _ in range(BLOCK_K, SPLIT, BLOCK_K):
        inputs += BLOCK_K
        x_block = tl.load(x + inputs, mask=inputs < last, other=0.0).to(tl.float32)
        products += _load_weights(rows, inputs, is_output, last).to(tl.float32) * x_block[None, :]
        if IS_GATED:
            up_products += _load_weights(up_rows, inputs, is_output, last).to(tl.float32) * x_block[None, :]
    result = tl.sum(products, axis=1)
    up = tl.sum(up_products, axis=1) if IS_GATED else result
    if HAS_BIAS:
        result += _load_bias(bias + outputs, is_output, split)
        if IS_GATED:
            up += _load_bias(bias + out_features + outputs, is_output, split)
    if IS_GATED:
        result = _swiglu(result, up, y.dtype.element_ty)
    if IS_PARTIAL:
        y += split.to(tl.int64) * out_features
    tl.store(y + outputs, result.to(y.dtype.element_ty), mask=is_output)


@triton.jit(do_not_specialize=["num_rows"])
def _few_rows_kernel(
    x,
    weight,
    bias,
    y,
    num_rows,
    out_features,
    x_stride,
    IN_FEATURES: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_PARTIAL: tl.constexpr,
    IS_GATED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """``_one_row_kernel`` for more tokens, on tensor cores: weights x tokens, [BLOCK_N, BLOCK_M].

    The weights are the left operand: its many rows fill the instruction, which few tokens would not. Rows past num_rows
    compute on zeros and aren't stored. Grid: (ceil(num_rows / BLOCK_M), ceil(out_features / BLOCK_N), num_splits):
    programs of the same weights are neighbours, so that one of them reads them for all.
    """
    outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(2)
    first = split * SPLIT
    last = tl.minimum(first + SPLIT, IN_FEATURES)
    is_output = outputs < out_features
    inputs = first + tl.arange(0, BLOCK_K)
    tokens = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    is_token = tokens < num_rows
    rows = weight + outputs.to(tl.int64) * IN_FEATURES
    up_rows = weight + (out_features + outputs).to(tl.int64) * IN_FEATURES
    x_columns = x + tokens * x_stride
    w = _load_weights(rows, inputs, is_output, last)
    up_w = _load_weights(up_rows, inputs, is_output, last) if IS_GATED else w
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    x_block = _load_tokens(x_columns, inputs, is_token, last)
    result = tl.dot(w, x_block, out_dtype=tl.float32)
    up = tl.dot(up_w, x_block, out_dtype=tl.float32) if IS_GATED else result
    for start in tl.range(BLOCK_K, SPLIT, BLOCK_K, num_stages=NUM_STAGES):
        inputs = first + start + tl.arange(0, BLOCK_K)
        x_block = _load_tokens(x_columns, inputs, is_token, last)
        result = tl.dot(_load_weights(rows, inputs, is_output, last), x_block, result)
        if IS_GATED:
            up = tl.dot(_load_weights(up_rows, inputs, is_output, last), x_block, up)
    _finish(
        result, up, bias, y, outputs, is_output, tokens, is_token, num_rows, out_features, split,
        HAS_BIAS, IS_PARTIAL, IS_GATED,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def _sliced_kernel(
    x,
    weight,
    bias,
    y,
    num_rows,
    out_features,
    x_stride,
    IN_FEATURES: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_PARTIAL: tl.constexpr,
    IS_GATED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_SLICES: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """``_few_rows_kernel`` with the inputs cut into NUM_SLICES slices, side by side in one program.

    A product of so few outputs and tokens that one warp holds it leaves the others idle; here each has a slice of
    BLOCK_K inputs, and their sums are added at the end. So a program reads NUM_SLICES * BLOCK_K inputs of few outputs
    at a time, and there are many programs without splits that somebody has to add.
    """
    outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(2)
    first = split * SPLIT
    last = tl.minimum(first + SPLIT, IN_FEATURES)
    is_output = outputs < out_features
    inputs = first + tl.arange(0, NUM_SLICES)[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    tokens = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    is_token = tokens < num_rows
    rows = weight + outputs.to(tl.int64) * IN_FEATURES
    up_rows = weight + (out_features + outputs).to(tl.int64) * IN_FEATURES
    x_columns = x + tokens * x_stride
    w = _load_weight_slices(rows, inputs, is_output, last)
    up_w = _load_weight_slices(up_rows, inputs, is_output, last) if IS_GATED else w
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    x_block = _load_token_slices(x_columns, inputs, is_token, last)
    results = tl.dot(w, x_block, out_dtype=tl.float32)  # [NUM_SLICES, BLOCK_N, BLOCK_M]
    ups = tl.dot(up_w, x_block, out_dtype=tl.float32) if IS_GATED else results
    for start in tl.range(NUM_SLICES * BLOCK_K, SPLIT, NUM_SLICES * BLOCK_K, num_stages=NUM_STAGES):
        x_block = _load_token_slices(x_columns, inputs + start, is_token, last)
        results = tl.dot(_load_weight_slices(rows, inputs + start, is_output, last), x_block, results)
        if IS_GATED:
            ups = tl.dot(_load_weight_slices(up_rows, inputs + start, is_output, last), x_block, ups)
    result = tl.sum(results, axis=0)
    up = tl.sum(ups, axis=0) if IS_GATED else result
    _finish(
        result, up, bias, y, outputs, is_output, tokens, is_token, num_rows, out_features, split,
        HAS_BIAS, IS_PARTIAL, IS_GATED,
    )  # fmt: skip


@triton.jit
def _finish(
    result,
    up,
    bias,
    y,
    outputs,
    is_output,
    tokens,
    is_token,
    num_rows,
    out_features,
    split,
    HAS_BIAS: tl.constexpr,
    IS_PARTIAL: tl.constexpr,
    IS_GATED: tl.constexpr,
):
    """Bias, SwiGLU, and the store of [BLOCK_N, BLOCK_M] results: y is [num_splits, num_rows, out_features] or whole."""
    if HAS_BIAS:
        result += _load_bias(bias + outputs, is_output, split)[:, None]
        if IS_GATED:
            up += _load_bias(bias + out_features + outputs, is_output, split)[:, None]
    if IS_GATED:
        result = _swiglu(result, up, y.dtype.element_ty)
    if IS_PARTIAL:
        y += split.to(tl.int64) * num_rows * out_features
    y_ptrs = y + tokens[None, :] * out_features + outputs[:, None]
    tl.store(y_ptrs, result.to(y.dtype.element_ty), mask=is_output[:, None] & is_token[None, :])


@triton.jit
def _load_weights(rows, inputs, is_output, last):
    """[BLOCK_N, BLOCK_K], 0 outside; read once, so the first to leave the cache."""
    mask = is_output[:, None] & (inputs < last)[None, :]
    return tl.load(rows[:, None] + inputs[None, :], mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def _load_tokens(x_columns, inputs, is_token, last):
    """[BLOCK_K, BLOCK_M], 0 outside."""
    mask = (inputs < last)[:, None] & is_token[None, :]
    return tl.load(x_columns[None, :] + inputs[:, None], mask=mask, other=0.0)


@triton.jit
def _load_weight_slices(rows, inputs, is_output, last):
    """[NUM_SLICES, BLOCK_N, BLOCK_K] of inputs [NUM_SLICES, BLOCK_K]."""
    mask = is_output[None, :, None] & (inputs < last)[:, None, :]
    return tl.load(rows[None, :, None] + inputs[:, None, :], mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def _load_token_slices(x_columns, inputs, is_token, last):
    """[NUM_SLICES, BLOCK_K, BLOCK_M]."""
    mask = (inputs < last)[:, :, None] & is_token[None, None, :]
    return tl.load(x_columns[None, None, :] + inputs[:, :, None], mask=mask, other=0.0)


@triton.jit
def _load_bias(bias, is_output, split):
    """Of the first split; 0 for the others."""
    return tl.where(split == 0, tl.load(bias, mask=is_output, other=0.0).to(tl.float32), 0.0)


@triton.jit
def _swiglu(gate, up, dtype: tl.constexpr):
    """silu(gate) * up with the roundings of the unfused op: both products, silu and the result."""
    gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    return silu * up


def linear_triton(x: torch.Tensor, weight: LinearWeight, out: torch.Tensor | None = None) -> torch.Tensor:
    """``linear_reference``."""
    config = _config(Product.WHOLE, x, weight, weight.out_features)
    if config is None:
        return linear_cpu(x, weight, out)
    y = torch.empty((x.shape[0], weight.out_features), dtype=x.dtype, device=x.device) if out is None else out
    _launch(Product.WHOLE, x, weight, y, config)
    return y


def partial_linear_triton(x: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
    """``partial_linear_reference``: partial sums; of many tokens the sum."""
    config = _config(Product.PARTIAL, x, weight, weight.out_features)
    if config is None:
        return linear_cpu(x, weight)
    shape = (config.num_splits(weight.in_features), x.shape[0], weight.out_features)
    y = torch.empty(shape, dtype=torch.float32, device=x.device)
    _launch(Product.PARTIAL, x, weight, y, config)
    return y


def gated_linear_triton(x: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
    """``gated_linear_reference``; in one kernel of few tokens, and on Hopper of many."""
    out_features = weight.out_features // 2
    config = _config(Product.GATED, x, weight, out_features)
    if config is None and not _takes_hopper_gated(x, weight):
        return swiglu_triton(linear_cpu(x, weight))
    y = torch.empty((x.shape[0], out_features), dtype=x.dtype, device=x.device)
    if config is not None:
        _launch(Product.GATED, x, weight, y, config)
    else:
        assert launch_hopper_gated is not None
        launch_hopper_gated(x, weight, y)
    return y


def _takes_hopper_gated(x: torch.Tensor, weight: LinearWeight) -> bool:
    """Whether the kernel for many tokens on Hopper can take them, and is faster."""
    device = device_of(x.device.index)
    if smallest_hopper_tile is None or device.architecture != 90 or x.shape[0] == 0 or weight.out_features % 16:
        return False
    takes = takes_gated_tiles(x.shape[0], weight.out_features // 2, device.num_sms)
    return takes and smallest_hopper_tile(x, weight) is not None


def _config(kind: Product, x: torch.Tensor, weight: LinearWeight, out_features: int) -> LinearConfig | None:
    """None = cuBLAS: many tokens, none at all, strided views, or fp32, whose exact products take no tensor cores."""
    num_rows = x.shape[0]
    if not 0 < num_rows <= MAX_ROWS or x.dtype.itemsize != 2:
        return None
    if x.stride(1) != 1 or (weight.dense is not None and not weight.dense.is_contiguous()):
        return None
    architecture = device_of(x.device.index).architecture
    smallest_tile = smallest_hopper_tile(x, weight) if smallest_hopper_tile is not None else None
    return choose_linear(kind, num_rows, out_features, weight.in_features, architecture, smallest_tile)


def _launch(kind: Product, x: torch.Tensor, weight: LinearWeight, y: torch.Tensor, config: LinearConfig) -> None:
    """Products of all rows of x; writes y."""
    if config.on_hopper:
        assert launch_hopper_linear is not None
        launch_hopper_linear(kind, x, weight, y, config)
        return
    dense = weight.to_dense()
    num_rows, out_features, in_features = x.shape[0], y.shape[-1], weight.in_features
    launches_early = device_of(x.device.index).launches_early
    num_tiles, num_splits = triton.cdiv(out_features, config.block_n), y.shape[0] if kind is Product.PARTIAL else 1
    shared = {
        "IN_FEATURES": in_features,
        "SPLIT": config.split(in_features),
        "HAS_BIAS": weight.bias is not None,
        "IS_PARTIAL": kind is Product.PARTIAL,
        "IS_GATED": kind is Product.GATED,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "PDL": launches_early,
        "num_warps": config.num_warps,
        "launch_pdl": launches_early,
    }
    bias = dense if weight.bias is None else weight.bias
    if config.block_m == 1:
        _one_row_kernel[(num_tiles, num_splits)](x, dense, bias, y, out_features, **shared)
        return
    kernel = _few_rows_kernel
    if config.num_slices > 1:
        kernel = _sliced_kernel
        shared["NUM_SLICES"] = config.num_slices
    kernel[(triton.cdiv(num_rows, config.block_m), num_tiles, num_splits)](
        x,
        dense,
        bias,
        y,
        num_rows,
        out_features,
        x.stride(0),
        BLOCK_M=config.block_m,
        NUM_STAGES=config.num_stages,
        **shared,
    )
