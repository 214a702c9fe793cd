"""Gate, up and SwiGLU of many tokens in one kernel on Hopper (sm_90).

Computes y^T = silu(W_gate x^T) * (W_up x^T), a tile of 192 rows of weights and 128 or 192 tokens at a time. One warp,
the producer, copies both to a ring of stages in shared memory (TMA), 64 inputs a stage, and is ahead by as many stages
as there are, into the next tile too. Three warpgroups, the consumers, have 64 rows of weights each and multiply them
with the same tokens. Barriers say which stages are full, and which may be written again.

The copy of the weights puts gates and ups in turns, so that a thread finds both in what it has multiplied:

    rows of a consumer      gates 0-7 | ups 0-7 | gates 8-15 | ups 8-15 | ...
    rows of a thread        r, a gate, and r + 8, its up

With a triton that ``gluon_compat`` doesn't know, importing this module raises ImportError. ``linear_triton`` launches
it. On an H200 tiles of 128 x 256 were slower up to 1024 tokens, and so were consumers that take turns at SwiGLU
(benchmarks/results/h200_gated_hopper_tuning.txt).
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportAssignmentType=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# (a launch takes num_warps beside the parameters of the kernel; a constexpr takes a Python value; static_range loops)

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pico_vllm.kernels.attention_config import device_of
from pico_vllm.kernels.gluon_compat import async_load, async_store, reinterpret, thread_barrier
from pico_vllm.kernels.linear import LinearWeight
from pico_vllm.kernels.linear_config import GATED_BLOCK_M, GATED_BLOCK_N, GATED_WIDE_BLOCK_M, divide_gated

#: Tokens of a tile, and how many more a wide one has: products of their own, since sizes are powers of two.
_BLOCK_M = gl.constexpr(GATED_BLOCK_M)
_MORE_M = gl.constexpr(GATED_WIDE_BLOCK_M - GATED_BLOCK_M)
#: Tokens of a copy.
_BOX_M = gl.constexpr(64)
assert _MORE_M.value == _BOX_M.value and GATED_BLOCK_M == 2 * _BOX_M.value
#: Inputs of a stage; stages, and those for wide tiles.
_BLOCK_K = gl.constexpr(64)
_NUM_STAGES, _NUM_WIDE_STAGES = 5, 4
#: Consumers, and their rows of weights: half as many outputs.
_CONSUMERS = gl.constexpr(3)
_ROWS = gl.constexpr(64)
_OUTPUTS = gl.constexpr(32)
assert GATED_BLOCK_N == _CONSUMERS.value * _OUTPUTS.value
#: Tiles of tokens that are computed side by side, with the same weights.
_GROUP = gl.constexpr(16)
#: Shared memory has rows of 128 bytes, results of 64, which TMA and the tensor cores swizzle. Weights of a consumer are
#: copied as [groups of 8 outputs, gates and ups, 8, inputs].
_SWIZZLED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
_WEIGHTS = gl.constexpr(gl.NVMMASharedLayout(128, 16, 4))
_RESULTS = gl.constexpr(gl.NVMMASharedLayout(64, 16, 2))
#: Products of a consumer.
_OUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, GATED_BLOCK_M, 16]))
_MORE_OUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _MORE_M.value, 16]))
#: Registers a thread of the second and third consumer (the first has what is left) and of the producer.
_CONSUMER_REGISTERS = gl.constexpr(160)
_PRODUCER_REGISTERS = gl.constexpr(24)


@gluon.jit
def _find_tile(tile, num_token_tiles, num_output_tiles):
    """(tile of tokens, tile of outputs): 16 tiles of tokens with the same outputs follow on each other."""
    group_size = _GROUP * num_output_tiles
    first = tile // group_size * _GROUP
    in_group = gl.minimum(num_token_tiles - first, _GROUP)
    tile = tile % group_size
    return first + tile % in_group, tile // in_group


@gluon.jit
def _copy_weights(weight, w_boxes, full, stage, output_tile, step, NUM_TOKENS: gl.constexpr):
    """Ask for the weights of a step; its barrier now waits for all bytes of the step, those of the tokens too."""
    mbarrier.expect(full.index(stage), (_CONSUMERS * _ROWS + NUM_TOKENS) * _BLOCK_K * 2)
    for consumer in gl.static_range(_CONSUMERS):
        first_group = (output_tile * _CONSUMERS + consumer) * (_OUTPUTS // 8)
        box = w_boxes.index(stage * _CONSUMERS + consumer)
        async_load(weight, [first_group, 0, 0, step * _BLOCK_K], full.index(stage), box)


@gluon.jit
def _copy_tokens(x, x_boxes, more_tiles, full, stage, first_token, step, NUM_TOKENS: gl.constexpr):
    """Ask for the tokens of a step."""
    first_input = step * _BLOCK_K
    async_load(x, [first_token, first_input], full.index(stage), x_boxes.index(2 * stage))
    if NUM_TOKENS >= _BLOCK_M:
        async_load(x, [first_token + _BOX_M, first_input], full.index(stage), x_boxes.index(2 * stage + 1))
    if NUM_TOKENS > _BLOCK_M:
        async_load(x, [first_token + _BLOCK_M, first_input], full.index(stage), more_tiles.index(stage))


@gluon.jit
def _produce(
    weight, x, w_boxes, x_boxes, more_tiles, full, empty, tiles, STEPS: gl.constexpr, BLOCK_M: gl.constexpr
):  # fmt: skip
    """The producer: weights and tokens of all steps of all tiles of the program."""
    num_tiles, num_halves, num_token_tiles, num_output_tiles = tiles
    program, num_programs = gl.program_id(0), gl.num_programs(0)
    STAGES: gl.constexpr = full.shape[0]
    # Weights into every stage, wait, tokens into every stage.
    token_tile, output_tile = _find_tile(program, num_token_tiles, num_output_tiles)
    for first in gl.static_range(STAGES):
        _copy_weights(weight, w_boxes, full, first, output_tile, first, BLOCK_M)
    gdc_wait()
    for first in gl.static_range(STAGES):
        _copy_tokens(x, x_boxes, more_tiles, full, first, token_tile * BLOCK_M, first, BLOCK_M)
    # The i-th step of the program, once its stage is empty.
    num_steps = (num_tiles - program + num_programs - 1) // num_programs * STEPS
    for i in range(STAGES, num_steps):
        tile = program + i // STEPS * num_programs
        token_tile, output_tile = _find_tile(tile, num_token_tiles, num_output_tiles)
        step, stage = i % STEPS, i % STAGES
        mbarrier.wait(empty.index(stage), i // STAGES & 1 ^ 1)
        _copy_weights(weight, w_boxes, full, stage, output_tile, step, BLOCK_M)
        _copy_tokens(x, x_boxes, more_tiles, full, stage, token_tile * BLOCK_M, step, BLOCK_M)
    if BLOCK_M == _BLOCK_M:  # noqa: SIM102 (decided when the kernel is compiled: wide tiles have no halves)
        if program < num_halves:
            token_tile, output_tile = _find_tile(num_tiles + program // 2, num_token_tiles, num_output_tiles)
            first_token = token_tile * BLOCK_M + program % 2 * _BOX_M
            for step in range(0, STEPS):
                stage = (num_steps + step) % STAGES
                mbarrier.wait(empty.index(stage), (num_steps + step) // STAGES & 1 ^ 1)
                _copy_weights(weight, w_boxes, full, stage, output_tile, step, _BOX_M)
                _copy_tokens(x, x_boxes, more_tiles, full, stage, first_token, step, _BOX_M)


@gluon.jit
def _multiply(w_tiles, x_tiles, full, empty, i, STEPS: gl.constexpr, CONSUMER: gl.constexpr):
    """(products of a tile, the step behind it); the tokens of a stage are the first of its tiles of ``x_tiles``."""
    STAGES: gl.constexpr = full.shape[0]
    TOKENS: gl.constexpr = x_tiles.shape[1]
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    acc = gl.zeros([_ROWS, TOKENS], gl.float32, OUT)
    for step in range(0, STEPS):  # one behind the tensor cores; a stage is empty once its step has been multiplied
        stage = i % STAGES
        mbarrier.wait(full.index(stage), i // STAGES & 1)
        x_tile = x_tiles.index(stage * (x_tiles.shape[0] // STAGES)).permute((1, 0))
        acc = warpgroup_mma(w_tiles.index(stage * _CONSUMERS + CONSUMER), x_tile, acc, is_async=True)
        acc = warpgroup_mma_wait(1, [acc])
        mbarrier.arrive(empty.index((i + STAGES - 1) % STAGES), pred=step > 0)
        i += 1
    acc = warpgroup_mma_wait(0, [acc])
    mbarrier.arrive(empty.index((i + STAGES - 1) % STAGES))
    return acc, i


@gluon.jit
def _multiply_wide(w_tiles, x_tiles, more_tiles, full, empty, i, STEPS: gl.constexpr, CONSUMER: gl.constexpr):
    """The same of a wide tile: products with the first tokens and with the others."""
    STAGES: gl.constexpr = full.shape[0]
    acc = gl.zeros([_ROWS, _BLOCK_M], gl.float32, _OUT)
    more = gl.zeros([_ROWS, _MORE_M], gl.float32, _MORE_OUT)
    for step in range(0, STEPS):
        stage = i % STAGES
        mbarrier.wait(full.index(stage), i // STAGES & 1)
        w_tile = w_tiles.index(stage * _CONSUMERS + CONSUMER)
        acc = warpgroup_mma(w_tile, x_tiles.index(stage).permute((1, 0)), acc, is_async=True)
        more = warpgroup_mma(w_tile, more_tiles.index(stage).permute((1, 0)), more, is_async=True)
        acc, more = warpgroup_mma_wait(2, [acc, more])
        mbarrier.arrive(empty.index((i + STAGES - 1) % STAGES), pred=step > 0)
        i += 1
    acc, more = warpgroup_mma_wait(0, [acc, more])
    mbarrier.arrive(empty.index((i + STAGES - 1) % STAGES))
    return acc, more, i


@gluon.jit
def _gate(acc, bias, out_features, first_output, dtype: gl.constexpr, HAS_BIAS: gl.constexpr):
    """[32 outputs, tokens]: SwiGLU of a consumer's products, with the roundings of the unfused op."""
    TOKENS: gl.constexpr = acc.shape[1]
    if HAS_BIAS:
        rows = gl.arange(0, _ROWS, gl.SliceLayout(1, acc.type.layout))
        outputs = first_output + rows // 16 * 8 + rows % 8
        entries = bias + outputs + rows // 8 % 2 * out_features
        added = gl.load(entries, mask=outputs < out_features, other=0.0)
        acc = acc + gl.expand_dims(added.to(gl.float32), 1)
    pairs = gl.permute(gl.reshape(acc.to(dtype), [_OUTPUTS // 8, 2, 8, TOKENS]), (0, 2, 3, 1))
    gate, up = gl.split(pairs)
    gate = gate.to(gl.float32)
    silu = (gate / (1.0 + gl.exp(-gate))).to(dtype).to(gl.float32)
    return gl.reshape((silu * up.to(gl.float32)).to(dtype), [_OUTPUTS, TOKENS])


@gluon.jit
def _store(result, memory, boxes, y, first_output, first_token, CONSUMER: gl.constexpr):
    """Store by way of shared memory, which the copies of what was stored before have left by then."""
    NUM_BOXES: gl.constexpr = result.shape[1] // _BOX_M
    tma.store_wait(0)
    thread_barrier()
    memory.permute((1, 0)).store(result)
    fence_async_shared()
    thread_barrier()
    for box in gl.static_range(NUM_BOXES):
        async_store(y, [first_token + box * _BOX_M, first_output], boxes.index(2 * CONSUMER + box))


@gluon.jit
def _consume(
    y, bias, w_tiles, x_tiles, x_boxes, more_tiles, result_boxes, full, empty, out_features, tiles,
    STEPS: gl.constexpr, HAS_BIAS: gl.constexpr, BLOCK_M: gl.constexpr, CONSUMER: gl.constexpr,
):  # fmt: skip
    """A consumer: 32 gates and their ups of every tile of the program."""
    num_tiles, num_halves, num_token_tiles, num_output_tiles = tiles
    program, num_programs = gl.program_id(0), gl.num_programs(0)
    dtype: gl.constexpr = w_tiles.dtype
    results = reinterpret(result_boxes, dtype, [_CONSUMERS, _BLOCK_M, _OUTPUTS], _RESULTS)
    i = program * 0
    for tile in range(program, num_tiles, num_programs):
        token_tile, output_tile = _find_tile(tile, num_token_tiles, num_output_tiles)
        first_output, first_token = (output_tile * _CONSUMERS + CONSUMER) * _OUTPUTS, token_tile * BLOCK_M
        if BLOCK_M > _BLOCK_M:
            acc, more, i = _multiply_wide(w_tiles, x_tiles, more_tiles, full, empty, i, STEPS, CONSUMER)
            result = _gate(more, bias, out_features, first_output, dtype, HAS_BIAS)
            memory = result_boxes.index(2 * CONSUMER)
            _store(result, memory, result_boxes, y, first_output, first_token + _BLOCK_M, CONSUMER)
        else:
            acc, i = _multiply(w_tiles, x_tiles, full, empty, i, STEPS, CONSUMER)
        result = _gate(acc, bias, out_features, first_output, dtype, HAS_BIAS)
        _store(result, results.index(CONSUMER), result_boxes, y, first_output, first_token, CONSUMER)
    if BLOCK_M == _BLOCK_M:  # noqa: SIM102 (as in _produce)
        if program < num_halves:
            half, i = _multiply(w_tiles, x_boxes, full, empty, i, STEPS, CONSUMER)
            token_tile, output_tile = _find_tile(num_tiles + program // 2, num_token_tiles, num_output_tiles)
            first_output = (output_tile * _CONSUMERS + CONSUMER) * _OUTPUTS
            first_token = token_tile * BLOCK_M + program % 2 * _BOX_M
            result = _gate(half, bias, out_features, first_output, dtype, HAS_BIAS)
            memory = result_boxes.index(2 * CONSUMER)
            _store(result, memory, result_boxes, y, first_output, first_token, CONSUMER)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_tiles", "num_halves", "num_token_tiles", "num_output_tiles"])
def _hopper_gated_kernel(
    weight,
    x,
    bias,
    y,
    out_features,
    num_tiles,
    num_halves,
    num_token_tiles,
    num_output_tiles,
    STEPS: gl.constexpr,
    NUM_STAGES: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    BLOCK_M: gl.constexpr,
):
    """y = silu(x W_gate^T + b_gate) * (x W_up^T + b_up).

    Grid: at most one program an SM; tile t is program t % grid's. Behind the whole tiles come halves of tiles of
    128 tokens, one for each of the first programs. ``weight``, ``x`` and ``y`` are descriptors: what lies outside of
    the matrices arrives as 0, and is not stored.
    """
    gdc_launch_dependents()
    dtype: gl.constexpr = weight.dtype
    NUM_BOXES: gl.constexpr = NUM_STAGES * _CONSUMERS
    w_boxes = gl.allocate_shared_memory(dtype, [NUM_BOXES, _OUTPUTS // 8, 2, 8, _BLOCK_K], _WEIGHTS)
    x_boxes = gl.allocate_shared_memory(dtype, [NUM_STAGES * 2, _BOX_M, _BLOCK_K], _SWIZZLED)
    w_tiles = reinterpret(w_boxes, dtype, [NUM_BOXES, _ROWS, _BLOCK_K], _SWIZZLED)
    x_tiles = reinterpret(x_boxes, dtype, [NUM_STAGES, _BLOCK_M, _BLOCK_K], _SWIZZLED)
    more_tiles = x_boxes
    if BLOCK_M > _BLOCK_M:
        more_tiles = gl.allocate_shared_memory(dtype, [NUM_STAGES, _MORE_M, _BLOCK_K], _SWIZZLED)
    result_boxes = gl.allocate_shared_memory(dtype, [_CONSUMERS * 2, _BOX_M, _OUTPUTS], _RESULTS)
    full = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(NUM_STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=_CONSUMERS)
    fence_async_shared()
    thread_barrier()

    tiles = (num_tiles, num_halves, num_token_tiles, num_output_tiles)
    gl.warp_specialize(
        [
            (_consume, (
                y, bias, w_tiles, x_tiles, x_boxes, more_tiles, result_boxes, full, empty, out_features, tiles, STEPS,
                HAS_BIAS, BLOCK_M, 0,
            )),
            (_consume, (
                y, bias, w_tiles, x_tiles, x_boxes, more_tiles, result_boxes, full, empty, out_features, tiles, STEPS,
                HAS_BIAS, BLOCK_M, 1,
            )),
            (_consume, (
                y, bias, w_tiles, x_tiles, x_boxes, more_tiles, result_boxes, full, empty, out_features, tiles, STEPS,
                HAS_BIAS, BLOCK_M, 2,
            )),
            (_produce, (weight, x, w_boxes, x_boxes, more_tiles, full, empty, tiles, STEPS, BLOCK_M)),
        ],
        [4, 4, 1],
        [_CONSUMER_REGISTERS, _CONSUMER_REGISTERS, _PRODUCER_REGISTERS],
    )  # fmt: skip


def launch_hopper_gated(x: torch.Tensor, weight: LinearWeight, y: torch.Tensor) -> None:
    """Launch the kernel; writes ``y``.

    Args:
        x: [num_tokens, in_features], at least one token; TMA can copy it (``smallest_hopper_tile``).
        weight: as ``linear_triton`` says, in memory for good; half of its rows is a multiple of 8.
        y: [num_tokens, out_features / 2], contiguous.
    """
    in_features = x.shape[1]
    num_sms = device_of(x.device.index).num_sms
    tiles = divide_gated(x.shape[0], y.shape[1], num_sms)
    steps = in_features // _BLOCK_K.value
    # Of tokens and results made anew for every launch and passed by value: a captured graph has its own.
    tokens = TensorDescriptor(x, [*x.shape], [x.stride(0), 1], [_BOX_M.value, _BLOCK_K.value], _SWIZZLED.value)
    results = TensorDescriptor(y, [*y.shape], [y.shape[1], 1], [_BOX_M.value, _OUTPUTS.value], _RESULTS.value)
    _hopper_gated_kernel[(min(tiles.num_whole, num_sms),)](
        _weight_descriptor(weight),
        tokens,
        weight.to_dense() if weight.bias is None else weight.bias,
        results,
        y.shape[1],
        tiles.num_whole,
        tiles.num_halves,
        tiles.num_token_tiles,
        tiles.num_output_tiles,
        STEPS=steps,
        NUM_STAGES=min(_NUM_STAGES if tiles.block_m == GATED_BLOCK_M else _NUM_WIDE_STAGES, steps),
        HAS_BIAS=weight.bias is not None,
        BLOCK_M=tiles.block_m,
        num_warps=4,
        launch_pdl=True,
    )


def _weight_descriptor(weight: LinearWeight) -> TensorDescriptor:
    """[groups of 8 outputs, gates and ups, 8, inputs], of which a consumer's share is copied at once; made once."""
    box = (_OUTPUTS.value // 8, 2, 8, _BLOCK_K.value)
    descriptor = weight.descriptors.get(box)
    if descriptor is None:
        outputs, inputs = weight.out_features // 2, weight.in_features
        shape, strides = [outputs // 8, 2, 8, inputs], [8 * inputs, outputs * inputs, inputs, 1]
        descriptor = TensorDescriptor(weight.to_dense(), shape, strides, [*box], _WEIGHTS.value)
        weight.descriptors[box] = descriptor
    return descriptor
