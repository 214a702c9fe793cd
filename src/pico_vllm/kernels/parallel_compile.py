"""Compile and load many Triton kernels at once, before any of them runs.

A kernel is compiled where it is launched first, one after the other: with an empty cache on disk that is a quarter to
half a second each. A caller runs its code twice: once inside ``compiling_only``, where launches only say what they
need, and then for real. What is in the cache on disk is loaded by threads while the caller goes on. The rest is
compiled when it is done: by copies of the process (``forked_tasks``), since threads share one Python (a fifth of the
work holds its lock, and each waits for it again and again), or by threads where that can't be.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from functools import partial
from threading import Thread
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.compiler.compiler import get_cache_key, make_backend
from triton.runtime import _async_compile, driver
from triton.runtime.cache import get_cache_manager
from triton.runtime.jit import JITFunction

from pico_vllm.kernels.forked_tasks import run_in_copies

#: Copies of 80 MB each.
_MAX_COPIES = 24


@contextmanager
def preparing(device: torch.device) -> Iterator[None]:
    """Meanwhile, in a thread, find out what Triton does once a process before it looks for a kernel on disk.

    It hashes its own library (415 MB: 0.2 to 0.5 s), asks ptxas for its version and loads (if need be compiles) the C
    part of its driver. What fails here will fail again where it is needed.

    Args:
        device: a GPU, the current one.
    """

    def prepare() -> None:
        with suppress(Exception):
            torch.cuda.set_device(device)
            target: Any = driver.active.get_current_target()
            backend = make_backend(target)
            get_cache_key(SimpleNamespace(hash=str), backend, backend.parse_options({}), {})

    thread = Thread(target=prepare, name="triton-prepare", daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join()


@contextmanager
def compiling_only(device: torch.device, max_workers: int | None = None) -> Iterator[None]:
    """Inside, a launch has its kernel compiled and doesn't run it: outputs stay as they were.

    Everything else runs, so what is computed in there is meaningless, but must not fail on numbers that no kernel has
    written. When the block ends every kernel is compiled, in the cache on disk and loaded on the device; an error of
    the compiler is raised there. Interpreted kernels run as always. Not for two threads at once.

    Args:
        device: a GPU, the current one.
        max_workers: threads, and processes; None = one a core.
    """
    launch = JITFunction.run
    launched: set[Any] = set()

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        launched.add(self)
        compilers.next_size = len(self.src)
        return launch(self, *args, grid=grid, warmup=True, **kwargs)

    with _Compilers(device, max_workers or os.cpu_count() or 1) as compilers:
        JITFunction.run = compile_only
        try:
            with _CompileMode(compilers):
                try:
                    yield
                    compilers.compile_missing()
                except BaseException:
                    compilers.forget_missing()
                    raise
        finally:
            JITFunction.run = launch
            _async_compile.active_mode.set(None)  # Triton 3.6 leaves the mode on after an error
            _tidy(launched)


class _CompileMode(triton.AsyncCompileMode):
    """Tells its executor the cache key of what it submits, and launches that follow that it has been submitted."""

    executor: _Compilers

    def submit(  # pyright: ignore[reportIncompatibleMethodOverride] (Triton 3.6 gives no cleanup function)
        self, key: str, compile_fn: Any, finalize_fn: Any, *cleanup_fn: Any
    ) -> Any:
        """Compile, unless the same is being compiled."""
        self.executor.next_key = key
        kernel = super().submit(key, compile_fn, finalize_fn, *cleanup_fn)
        finalize_fn(kernel)  # as Triton 3.9 does: making the key once more takes longer than a launch
        return kernel


class _Compilers(ThreadPoolExecutor):
    """Threads that load kernels, once these are in the cache on disk or all are known that are not."""

    def __init__(self, device: torch.device, max_workers: int) -> None:
        super().__init__(max_workers, "triton-compile", torch.cuda.set_device, (device,))
        self.next_key, self.next_size = "", 0
        self._num_workers = max_workers
        self._loading: list[Future[Any]] = []
        self._missing: list[tuple[int, Callable[[], Any], Future[Any]]] = []

    # Triton passes no arguments along.
    def submit(self, fn: Callable[[], Any], /) -> Future[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Load in a thread, now or when it has been compiled."""
        if is_cached(self.next_key):
            self._loading.append(super().submit(_loaded, fn))
            return self._loading[-1]
        future: Future[Any] = Future()
        self._missing.append((self.next_size, fn, future))
        return future

    def compile_missing(self) -> None:
        """Compile what isn't in the cache, and load it.

        The longest sources come first: what takes long must not be what all wait for in the end.
        """
        jobs = [(fn, future) for _, fn, future in sorted(self._missing, key=lambda job: -job[0])]
        missing = dict(enumerate(jobs))
        if self._num_workers > 1 and len(missing) > 1:
            wait(self._loading)  # what a thread holds when a copy is made, the copy waits for in vain
            tasks = [partial(_compiled, fn) for fn, _ in jobs]
            for index in run_in_copies(tasks, min(self._num_workers, _MAX_COPIES)):
                super().submit(_load_for, *missing.pop(index))
        for fn, future in missing.values():
            super().submit(_load_for, fn, future)

    def forget_missing(self) -> None:
        """Nobody is going to ask for them."""
        for *_, future in self._missing:
            with suppress(InvalidStateError):  # somebody has compiled it
                future.set_result(None)


def is_cached(key: str) -> bool:
    """Whether the kernel with this cache key of Triton's is on disk; where no directory is, a cache elsewhere may."""
    directory = getattr(get_cache_manager(hashlib.sha256(key.encode()).hexdigest()), "cache_dir", None)
    return directory is None or any(name.startswith("__grp__") for name in os.listdir(directory))


def _compiled(compile_kernel: Callable[[], Any]) -> Any:
    """What a kernel has in the cache on disk: the kernel itself and the library that launches it."""
    kernel = compile_kernel()
    active: Any = driver.active
    active.launcher_cls(kernel.src, kernel.metadata)
    return kernel


def _loaded(compile_kernel: Callable[[], Any]) -> Any:
    kernel = compile_kernel()
    _ = kernel.run  # the first look at it makes the launcher and loads the kernel
    return kernel


def _load_for(compile_kernel: Callable[[], Any], future: Future[Any]) -> None:
    try:
        future.set_result(_loaded(compile_kernel))
    except BaseException as error:
        future.set_exception(error)


def _tidy(kernels: set[Any]) -> None:
    """Leave in Triton's tables only what is compiled: whoever launches another would wait, or see an old error.

    Nor is anything left to compare at each launch: nobody changes the global constants of a kernel, and to look whether
    somebody has is a twentieth of the Python of a capture.
    """
    for kernel in kernels:
        kernel.used_global_vals.clear()
        for compiled, *_ in kernel.device_caches.values():
            for key, value in list(compiled.items()):
                if isinstance(value, _async_compile.FutureKernel):
                    value = value.kernel
                if value is None:
                    del compiled[key]
                else:
                    compiled[key] = value
