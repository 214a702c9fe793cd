"""Compiling without running: needs a GPU, since interpreted kernels aren't compiled."""

import pytest
import torch
import triton
import triton.language as tl

from pico_vllm.kernels.parallel_compile import compiling_only


@triton.jit
def _fill_kernel(x, value, BLOCK: tl.constexpr):
    tl.store(x + tl.arange(0, BLOCK), value)


def test_launches_compile_and_run_nothing_until_the_block_ends():
    x = torch.zeros(64, device="cuda")
    with compiling_only(torch.device("cuda", 0), max_workers=4):
        for block in (16, 32, 64):
            _fill_kernel[(1,)](x, 3.0, BLOCK=block)
    torch.cuda.synchronize()
    assert x.tolist() == [0.0] * 64
    compiled = len(next(iter(_fill_kernel.device_caches.values()))[0])
    assert compiled == 3
    _fill_kernel[(1,)](x, 3.0, BLOCK=32)
    assert x.tolist() == [3.0] * 32 + [0.0] * 32
    assert len(next(iter(_fill_kernel.device_caches.values()))[0]) == compiled, "nothing was compiled again"


def test_what_does_not_compile_is_raised_where_the_block_ends():
    x = torch.zeros(64, device="cuda")
    with pytest.raises(Exception, match=r"arange|power of 2"), compiling_only(torch.device("cuda", 0)):
        _fill_kernel[(1,)](x, 3.0, BLOCK=48)
    _fill_kernel[(1,)](x, 5.0, BLOCK=64)
    assert x.tolist() == [5.0] * 64
