"""Products of few tokens on Hopper (sm_90): what ``linear_triton`` computes, with a ring of tiles that TMA fills.

All stages of the ring have been asked for weights, not one tile alone, when the program waits for its predecessors, and
a copy is one instruction of one thread. No producer: the four warps that ask for a stage also multiply it.

With a triton that ``gluon_compat`` doesn't know, importing this module raises ImportError. ``linear_triton`` launches
it, for shapes of ``linear_config`` that say so, and what it says there of weights holds here.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportAssignmentType=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# (a launch takes num_warps beside the parameters of the kernel; a constexpr takes a Python value; static_range loops)

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pico_vllm.kernels.gluon_compat import REINTERPRETS_BEYOND, async_load, reinterpret, thread_barrier
from pico_vllm.kernels.linear import LinearWeight
from pico_vllm.kernels.linear_config import LinearConfig, Product

#: Rows of weights; an instruction has 64 and reads beyond a smaller tile.
SMALLEST_TILE = 16 if REINTERPRETS_BEYOND else 64
#: Inputs of a slice: shared memory has rows of 128 bytes, which TMA and the tensor cores swizzle. A wider tile lies as
#: its slices, one after the other.
_SLICE = gl.constexpr(64)
_SWIZZLED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
#: The same of what one copy brings: [slices, 2 if gated, rows, 64] weights, [slices, tokens, 64] inputs.
_WEIGHTS = gl.constexpr(gl.NVMMASharedLayout(128, 16, 4))
_TOKENS = gl.constexpr(gl.NVMMASharedLayout(128, 16, 3))
_NUM_WARPS = gl.constexpr(4)


@gluon.jit
def _copy_weights(weight, w_boxes, full, step, first_slice, first_output, NUM_BYTES: gl.constexpr, is_step):
    """Ask for the weights of a step; its barrier now waits for all bytes of the step, those of the tokens too."""
    stage = step % full.shape[0]
    mbarrier.expect(full.index(stage), NUM_BYTES, pred=is_step)
    coordinates = [first_slice, 0, first_output, 0]
    async_load(weight, coordinates, full.index(stage), w_boxes.index(stage), pred=is_step)


@gluon.jit
def _copy_tokens(x, x_boxes, full, step, first_slice, first_token, is_step):
    """Ask for the tokens of a step."""
    stage = step % full.shape[0]
    async_load(x, [first_slice, first_token, 0], full.index(stage), x_boxes.index(stage), pred=is_step)


@gluon.jit(do_not_specialize=["num_rows", "num_tiles", "num_token_tiles"])
def _hopper_linear_kernel(
    weight,
    x,
    bias,
    y,
    num_rows,
    out_features,
    num_tiles,
    num_token_tiles,
    STEPS: gl.constexpr,
    NUM_STAGES: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    IS_PARTIAL: gl.constexpr,
    IS_GATED: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
):
    """y = x W^T + b as in ``_few_rows_kernel``, computed as W x^T, [BLOCK_N (gated: twice), BLOCK_M].

    Grid: (num_token_tiles * num_tiles * num_splits,), tiles of tokens fastest, then those of outputs. A program sums
    STEPS steps of BLOCK_K inputs. ``weight`` and ``x`` are descriptors; what lies outside of the matrices is copied as
    0. Stage step % NUM_STAGES of the ring has the weights and the tokens of a step, and a barrier that waits for both.
    The instruction has 64 rows of weights at least: of a smaller tile it multiplies what lies behind as well, and these
    results are thrown away.
    """
    # 1. The ring, and stages behind it as far as an instruction on the last one reads.
    gdc_launch_dependents()
    SLICES: gl.constexpr = BLOCK_K // _SLICE
    NUM_HALVES: gl.constexpr = 2 if IS_GATED else 1
    TILE: gl.constexpr = NUM_HALVES * BLOCK_N  # rows of weights; of a gated product first gates, then ups
    ROWS: gl.constexpr = TILE if TILE > 64 else 64
    BEHIND: gl.constexpr = (ROWS - TILE + TILE * SLICES - 1) // (TILE * SLICES)
    dtype: gl.constexpr = weight.dtype
    full = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    w_boxes = gl.allocate_shared_memory(dtype, [NUM_STAGES + BEHIND, SLICES, NUM_HALVES, BLOCK_N, _SLICE], _WEIGHTS)
    x_boxes = gl.allocate_shared_memory(dtype, [NUM_STAGES, SLICES, BLOCK_M, _SLICE], _TOKENS)
    w_slices = reinterpret(w_boxes, dtype, [(NUM_STAGES + BEHIND) * SLICES, TILE, _SLICE], _SWIZZLED)
    x_slices = reinterpret(x_boxes, dtype, [NUM_STAGES * SLICES, BLOCK_M, _SLICE], _SWIZZLED)
    for first in gl.static_range(NUM_STAGES):
        mbarrier.init(full.index(first), count=1)
    fence_async_shared()
    thread_barrier()

    # 2. The tile of this program: its outputs, and the steps [first_step, first_step + STEPS) of the inputs.
    first_token = gl.program_id(0) % num_token_tiles * BLOCK_M
    program = gl.program_id(0) // num_token_tiles
    split, tile = program * 0, program
    if IS_PARTIAL:
        split, tile = program // num_tiles, program % num_tiles
    first_output = tile * BLOCK_N
    first_step = split * STEPS

    # 3. Weights into every stage, wait, tokens into every stage.
    NUM_BYTES: gl.constexpr = (TILE + BLOCK_M) * BLOCK_K * 2
    for first in gl.static_range(NUM_STAGES):
        _copy_weights(weight, w_boxes, full, first, (first_step + first) * SLICES, first_output, NUM_BYTES, True)
    gdc_wait()
    for first in gl.static_range(NUM_STAGES):
        _copy_tokens(x, x_boxes, full, first, (first_step + first) * SLICES, first_token, True)

    # 4. Multiply, one step behind the tensor cores; a stage is filled again once its step has been multiplied.
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [_NUM_WARPS, 1], [16, BLOCK_M, 16])
    acc = gl.zeros([ROWS, BLOCK_M], gl.float32, OUT)
    for step in range(0, STEPS):
        stage = step % NUM_STAGES
        mbarrier.wait(full.index(stage), step // NUM_STAGES & 1)
        for i in gl.static_range(SLICES):
            w_slice = w_slices.index(stage * SLICES + i)
            if TILE < 64:
                w_slice = reinterpret(w_slice, dtype, [ROWS, _SLICE], _SWIZZLED)
            acc = warpgroup_mma(w_slice, x_slices.index(stage * SLICES + i).permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(SLICES, [acc])
        if STEPS > NUM_STAGES:  # the step before this one has been multiplied, by all warps
            thread_barrier()
            later = step + NUM_STAGES - 1
            is_step = (step > 0) & (later < STEPS)
            first_slice = (first_step + later) * SLICES
            _copy_weights(weight, w_boxes, full, later, first_slice, first_output, NUM_BYTES, is_step)
            _copy_tokens(x, x_boxes, full, later, first_slice, first_token, is_step)
    acc = warpgroup_mma_wait(0, [acc])

    # 5. Bias, of the first split.
    if HAS_BIAS:
        rows = gl.arange(0, ROWS, gl.SliceLayout(1, OUT))
        outputs = first_output + rows % BLOCK_N
        is_output = (outputs < out_features) & (rows < TILE)
        entries = bias + outputs + rows // BLOCK_N * out_features
        added = gl.load(entries, mask=is_output & (split == 0), other=0.0)
        acc = acc + gl.expand_dims(added.to(gl.float32), 1)

    # 6. SwiGLU, with the roundings of the unfused op. Gates and ups meet in shared memory.
    out_dtype: gl.constexpr = y.dtype.element_ty
    if IS_GATED:
        PER_THREAD: gl.constexpr = 8 if BLOCK_N * BLOCK_M >= 256 * _NUM_WARPS else 2
        LAYOUT: gl.constexpr = _rows_first(BLOCK_N, PER_THREAD)
        halves = gl.allocate_shared_memory(dtype, [ROWS, BLOCK_M], gl.SwizzledSharedLayout(8, 1, 4, [0, 1]))
        thread_barrier()  # ``halves`` lies where the ring was, of which other warps may still multiply
        halves.store(acc.to(dtype))
        thread_barrier()
        gate = halves.slice(0, BLOCK_N).load(LAYOUT).to(gl.float32)
        up = halves.slice(BLOCK_N, BLOCK_N).load(LAYOUT).to(gl.float32)
        silu = (gate / (1.0 + gl.exp(-gate))).to(dtype).to(gl.float32)
        result = (silu * up).to(dtype)
    elif not IS_PARTIAL and BLOCK_M >= 32:  # of few tokens what is written is little
        LAYOUT: gl.constexpr = _rows_first(ROWS, 8)
        thread_barrier()  # they change places where the ring was
        result = gl.convert_layout(acc.to(out_dtype), LAYOUT)
    else:
        LAYOUT: gl.constexpr = OUT
        result = acc.to(out_dtype)

    # 7. Store: y is [num_splits, num_rows, out_features] or whole.
    rows = gl.arange(0, result.shape[0], gl.SliceLayout(1, LAYOUT))
    outputs = first_output + rows
    tokens = first_token + gl.arange(0, BLOCK_M, gl.SliceLayout(0, LAYOUT))
    is_output = outputs < out_features
    if TILE < 64:
        is_output = is_output & (rows < TILE)
    y_rows = tokens.to(gl.int64)
    if IS_PARTIAL:
        y_rows = y_rows + split.to(gl.int64) * num_rows
    offsets = gl.expand_dims(y_rows * out_features, 0) + gl.expand_dims(outputs, 1)
    gl.store(y + offsets, result, mask=gl.expand_dims(is_output, 1) & gl.expand_dims(tokens < num_rows, 0))


@gluon.constexpr_function
def _rows_first(num_rows: int, per_thread: int) -> gl.BlockedLayout:
    """Neighbouring threads have neighbouring rows, which are neighbours in memory: outputs of a token."""
    along = min(num_rows // per_thread, 32)
    return gl.BlockedLayout([per_thread, 1], [along, 32 // along], [1, 4], [0, 1])


def smallest_hopper_tile(x: torch.Tensor, weight: LinearWeight) -> int | None:
    """Rows of weights that a tile has at least; None where TMA can't copy the operands.

    It takes 16-bit numbers, inputs in whole slices, and rows that start at multiples of 16 bytes.
    """
    dense, stride = weight.dense, x.stride(0)
    if dense is None or weight.in_features % _SLICE.value or x.dtype != dense.dtype or x.dtype.itemsize != 2:
        return None
    if not dense.is_contiguous() or x.stride(1) != 1 or stride % 8 or stride < weight.in_features:
        return None
    if x.data_ptr() % 16 or dense.data_ptr() % 16:
        return None
    return SMALLEST_TILE


def launch_hopper_linear(
    kind: Product, x: torch.Tensor, weight: LinearWeight, y: torch.Tensor, config: LinearConfig
) -> None:
    """Launch the kernel for what it takes; writes ``y``.

    Args:
        kind: of the product.
        x: [num_tokens, in_features].
        weight: as ``linear_triton`` says, in memory for good.
        y: contiguous, [num_splits, num_tokens, out_features] fp32 if partial, else [num_tokens, out_features].
        config: with ``on_hopper``.
    """
    num_rows, out_features, in_features = x.shape[0], y.shape[-1], weight.in_features
    assert config.on_hopper
    num_token_tiles = triton.cdiv(num_rows, config.block_m)
    num_tiles = triton.cdiv(out_features, config.block_n)
    steps = config.split(in_features) // config.block_k
    dense = weight.to_dense()
    _hopper_linear_kernel[(num_token_tiles * num_tiles * config.num_splits(in_features),)](
        _weight_descriptor(kind, weight, config),
        _token_descriptor(x, config),
        dense if weight.bias is None else weight.bias,
        y,
        num_rows,
        out_features,
        num_tiles,
        num_token_tiles,
        STEPS=steps,
        NUM_STAGES=min(config.num_stages, steps),
        HAS_BIAS=weight.bias is not None,
        IS_PARTIAL=kind is Product.PARTIAL,
        IS_GATED=kind is Product.GATED,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        num_warps=_NUM_WARPS.value,
        launch_pdl=True,
    )


def _weight_descriptor(kind: Product, weight: LinearWeight, config: LinearConfig) -> TensorDescriptor:
    """[slices, 2 if gated, rows, 64], of which a step of a tile is copied at once; made once, kept by the weight."""
    num_halves = 2 if kind is Product.GATED else 1
    num_slices = config.block_k // _SLICE.value
    box = (num_slices, num_halves, config.block_n)
    descriptor = weight.descriptors.get(box)
    if descriptor is None:
        dense = weight.to_dense()
        inputs, rows = weight.in_features, weight.out_features // num_halves
        shape = [inputs // _SLICE.value, num_halves, rows, _SLICE.value]
        strides = [_SLICE.value, rows * inputs, inputs, 1]
        descriptor = TensorDescriptor(dense, shape, strides, [*box, _SLICE.value], _WEIGHTS.value)
        weight.descriptors[box] = descriptor
    return descriptor


def _token_descriptor(x: torch.Tensor, config: LinearConfig) -> TensorDescriptor:
    """[slices, tokens, 64]; made anew for every launch (1.6 µs) and passed by value: a captured graph has its own."""
    num_tokens, inputs = x.shape
    shape = [inputs // _SLICE.value, num_tokens, _SLICE.value]
    box = [config.block_k // _SLICE.value, config.block_m, _SLICE.value]
    return TensorDescriptor(x, shape, [_SLICE.value, x.stride(0), 1], box, _TOKENS.value)
