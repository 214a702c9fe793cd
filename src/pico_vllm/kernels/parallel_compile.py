"""Compile many Triton kernels at once, before any of them runs.

A kernel is compiled where it is launched first, one after the other: with an empty cache on disk that is half a second
each. Most of that time is spent outside of Python's lock, so threads help. A caller runs its code twice: once inside
``compiling_only``, where launches compile and nothing runs, and then for real.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import triton
from triton.runtime.jit import JITFunction


@contextmanager
def compiling_only(max_workers: int | None = None) -> Iterator[None]:
    """Inside, a launch compiles its kernel in another thread and doesn't run it: outputs stay as they were.

    Everything else runs, so what is computed in there is meaningless, but must not fail on numbers that no kernel has
    written. When the block ends every kernel is compiled and in the cache on disk; an error of the compiler is raised
    there. Interpreted kernels run as always. Not for two threads at once.

    Args:
        max_workers: threads; None = one a core.
    """
    launch = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return launch(self, *args, grid=grid, warmup=True, **kwargs)

    with ThreadPoolExecutor(max_workers or os.cpu_count(), thread_name_prefix="triton-compile") as threads:
        JITFunction.run = compile_only
        try:
            with triton.AsyncCompileMode(threads):
                yield
        finally:
            JITFunction.run = launch
