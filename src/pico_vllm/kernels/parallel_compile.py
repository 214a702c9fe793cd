"""Compile and load many Triton kernels at once, before any of them runs.

A kernel is compiled where it is launched first, one after the other: with an empty cache on disk that is half a second
each, for the kernel and for the C code that launches it. So launches are noted instead, and compiled by threads and,
where there are cores enough, by processes (``compile_workers``). A caller runs its code twice: once inside
``compiling_only``, where launches compile and nothing runs, and then for real.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
import triton
from triton.runtime import _async_compile
from triton.runtime.cache import get_cache_manager
from triton.runtime.jit import JITFunction

from pico_vllm.kernels.compile_workers import CompileWorkers, num_workers


@contextmanager
def compiling_only(device: torch.device, max_workers: int | None = None) -> Iterator[None]:
    """Inside, a launch compiles its kernel elsewhere and doesn't run it: outputs stay as they were.

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
            with _CompileMode(threads):
                yield
        finally:
            JITFunction.run = launch
            _async_compile.active_mode.set(None)  # Triton 3.6 leaves the mode on after an error
            threads.workers.close()


class _CompileMode(triton.AsyncCompileMode):
    """Tells its executor the key of what it submits: whether that is in the cache on disk depends on it."""

    executor: _Compilers

    # Tritons differ in what comes after the key.
    def submit(self, key: Any, *args: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Compile in a thread, unless the same is being compiled."""
        self.executor.next_key = key
        return super().submit(key, *args)


class _Compilers(ThreadPoolExecutor):
    """Threads that load what they, or workers for them, have compiled."""

    def __init__(self, device: torch.device, max_workers: int) -> None:
        super().__init__(max_workers, "triton-compile", torch.cuda.set_device, (device,))
        self.next_key = ""
        self.workers = CompileWorkers(num_workers(max_workers))

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Compile in a thread."""
        return super().submit(self._loaded, self.next_key, fn)

    def _loaded(self, key: str, compile_kernel: Callable[[], Any]) -> Any:
        if not is_cached(key):
            self.workers.compile(compile_kernel)
        kernel = compile_kernel()
        _ = kernel.run  # the first look at it makes the launcher and loads the kernel
        return kernel


def is_cached(key: str) -> bool:
    """Whether a kernel with this cache key of Triton's is on disk."""
    directory = getattr(get_cache_manager(hashlib.sha256(key.encode()).hexdigest()), "cache_dir", None)
    if directory is None or not os.path.isdir(directory):
        return False
    return any(name.endswith(".json") for name in os.listdir(directory))
