"""Compile and load many Triton kernels at once, before any of them runs.

A kernel is compiled where it is launched first, one after the other: with an empty cache on disk that is half a second
each, for the kernel and for the C code that launches it. Most of that time is spent outside of Python's lock, so
threads help. A caller runs its code twice: once inside ``compiling_only``, where launches compile and nothing runs, and
then for real.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
import triton
from triton.runtime import _async_compile
from triton.runtime.jit import JITFunction


@contextmanager
def compiling_only(device: torch.device, max_workers: int | None = None) -> Iterator[None]:
    """Inside, a launch compiles its kernel in another thread and doesn't run it: outputs stay as they were.

    Everything else runs, so what is computed in there is meaningless, but must not fail on numbers that no kernel has
    written. When the block ends every kernel is compiled, in the cache on disk and loaded on the device; an error of
    the compiler is raised there. Interpreted kernels run as always. Not for two threads at once.

    Args:
        device: a GPU, the current one.
        max_workers: threads; None = one a core.
    """
    launch = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return launch(self, *args, grid=grid, warmup=True, **kwargs)

    with _Compilers(device, max_workers or os.cpu_count() or 1) as threads:
        JITFunction.run = compile_only
        try:
            with triton.AsyncCompileMode(threads):
                yield
        finally:
            JITFunction.run = launch
            _async_compile.active_mode.set(None)  # Triton 3.6 leaves the mode on after an error


class _Compilers(ThreadPoolExecutor):
    """Threads that load what they have compiled."""

    def __init__(self, device: torch.device, max_workers: int) -> None:
        super().__init__(max_workers, "triton-compile", torch.cuda.set_device, (device,))

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Compile in a thread."""
        return super().submit(_loaded, fn, *args, **kwargs)


def _loaded(compile_kernel: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    kernel = compile_kernel(*args, **kwargs)
    _ = kernel.run  # the first look at it makes the launcher and loads the kernel
    return kernel
