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


def test_copies_of_a_process_that_uses_the_gpu_compile_for_it(tmp_path, monkeypatch):
    compiled_here = []
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    monkeypatch.setattr(
        triton.knobs.compilation, "listener", lambda *, cache_hit, **_: compiled_here.append(not cache_hit)
    )
    x = torch.zeros(512, device="cuda")
    with compiling_only(torch.device("cuda", 0), max_workers=4):
        for block in (128, 256, 512):
            _fill_kernel[(1,)](x, 3.0, BLOCK=block)
    assert compiled_here == [False] * 3
    _fill_kernel[(1,)](x, 7.0, BLOCK=256)
    assert x.tolist() == [7.0] * 256 + [0.0] * 256
