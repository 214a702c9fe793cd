"""SwiGLU in Triton: elementwise, each element read and written once. Contract and formula are those of ``swiglu``."""

# pyright: reportCallIssue=false
# (a launch takes num_warps and num_stages beside the parameters of the kernel)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pico_vllm.kernels.attention_config import device_of
from pico_vllm.kernels.attention_tiles import start_after_predecessors

_BLOCK = 1024
_NUM_WARPS = 4  # 8 bf16 numbers a thread: one 16-byte load of each half


@triton.jit
def _swiglu_kernel(
    gate_up_ptr,
    y_ptr,
    row_stride,
    intermediate_size,
    blocks_a_row,
    COMPUTE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """y[t, i] = cast(silu(gate_up[t, i])) * gate_up[t, intermediate_size + i],   silu(z) = z / (1 + exp(-z)).

    Grid: (num_tokens * blocks_a_row,); a program has BLOCK columns of one token. Padded rows are computed like all
    others. silu is computed in COMPUTE.
    """
    start_after_predecessors(PDL)
    token = (tl.program_id(0) // blocks_a_row).to(tl.int64)
    columns = tl.program_id(0) % blocks_a_row * BLOCK + tl.arange(0, BLOCK)
    mask = columns < intermediate_size
    row_ptr = gate_up_ptr + token * row_stride
    gate = tl.load(row_ptr + columns, mask=mask, other=0.0)
    up = tl.load(row_ptr + intermediate_size + columns, mask=mask, other=0.0)
    wide = gate.to(COMPUTE)
    silu = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    y = (silu.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)
    tl.store(y_ptr + token * intermediate_size + columns, y, mask=mask)


def swiglu_triton(gate_up: torch.Tensor) -> torch.Tensor:
    """``swiglu_reference`` in one kernel; gate_up may be a view whose rows are contiguous."""
    num_tokens, intermediate_size = gate_up.shape[0], gate_up.shape[1] // 2
    y = torch.empty((num_tokens, intermediate_size), dtype=gate_up.dtype, device=gate_up.device)
    blocks_a_row = triton.cdiv(intermediate_size, _BLOCK)
    # The fp32 exp of a GPU is several units in the last place off.
    compute = tl.float64 if gate_up.dtype == torch.float32 else tl.float32
    launches_early = device_of(gate_up.device.index).launches_early
    if num_tokens:
        _swiglu_kernel[(num_tokens * blocks_a_row,)](
            gate_up,
            y,
            gate_up.stride(0),
            intermediate_size,
            blocks_a_row,
            COMPUTE=compute,
            BLOCK=_BLOCK,
            PDL=launches_early,
            num_warps=_NUM_WARPS,
            launch_pdl=launches_early,
        )
    return y
