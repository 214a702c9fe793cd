"""Processes that compile Triton kernels into the cache on disk, where the process that asked finds them.

Threads share one Python: of a kernel's compilation about a sixth holds its lock, so that sixteen threads are no more
than six. A worker is a process without a GPU that imports the kernels once and then compiles what it is told. Nothing
depends on it: who asks compiles the kernel again, which takes no time if the worker has put it into the cache, and as
long as ever if it has not.

    parent                                     worker (this module, run with -m)
      one line: a job, as Python literals ─▶  import, compile, write into the cache
      one byte: compiled or not           ◀─
"""

from __future__ import annotations

import ast
import os
import queue
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

import triton
from triton.backends.compiler import GPUTarget

#: Below so many cores threads have them all at work.
_MIN_CORES = 8
_MAX_WORKERS = 8


def num_workers(num_cores: int | None = None) -> int:
    """How many workers are worth their start on this machine; 0 = none."""
    cores = num_cores or os.cpu_count() or 1
    return min(_MAX_WORKERS, cores // 2) if cores >= _MIN_CORES else 0


class CompileWorkers:
    """Workers that are started one by one, as far as there is work for them; may be used by many threads.

    Args:
        count: at most so many; may be 0.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._idle: queue.Queue[subprocess.Popen[bytes] | None] = queue.Queue()
        self._started: list[subprocess.Popen[bytes]] = []
        for _ in range(count):
            self._idle.put(None)  # not started yet

    def compile(self, compile_kernel: Callable[[], Any]) -> bool:
        """Have what ``compile_kernel`` would compile compiled by a worker; waits for one, and for the end.

        Whoever comes for a worker that isn't there yet only starts it: it takes seconds to import everything.

        Args:
            compile_kernel: what Triton hands to an executor of its ``AsyncCompileMode``.

        Returns:
            Whether a worker has compiled it. False is no error: compile it here.
        """
        job = _job(compile_kernel) if self._count > 0 else None
        if job is None:
            return False
        worker = self._idle.get()
        try:
            if worker is None:
                worker = self._start()
                return False
            assert worker.stdin is not None and worker.stdout is not None
            worker.stdin.write(job + b"\n")
            worker.stdin.flush()
            return worker.stdout.read(1) == b"1"
        except (OSError, ValueError):  # it has died, or was closed
            return False
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        """End all workers, those at work too."""
        for worker in self._started:
            worker.kill()
            worker.communicate()

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "pico_vllm.kernels.compile_workers"]
        env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        worker = subprocess.Popen(
            command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        self._started.append(worker)
        return worker


def _job(compile_kernel: Callable[[], Any]) -> bytes | None:
    """What a worker must know; None if it can't be told, as of a kernel that isn't an attribute of its module."""
    names, cells = compile_kernel.__code__.co_freevars, compile_kernel.__closure__ or ()
    found = {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}
    try:
        source, target, options = found["src"], found["target"], found["options"]
        kernel = source.fn
        if getattr(sys.modules[kernel.__module__], kernel.__name__) is not kernel:
            return None
        what = (kernel.__module__, kernel.__name__, source.signature, source.constants, source.attrs)
        job = (*what, (target.backend, target.arch, target.warp_size), dict(options.__dict__))
        return repr(job).encode() if ast.literal_eval(repr(job)) == job else None
    except (AttributeError, KeyError, SyntaxError, ValueError):
        return None


def _compile(job: str) -> None:
    module, name, signature, constants, attrs, target, options = ast.literal_eval(job)
    kernel = getattr(import_module(module), name)
    source_class: Any = triton.compiler.ASTSource
    if getattr(kernel, "is_gluon", lambda: False)():
        from triton.experimental.gluon._runtime import GluonASTSource

        source_class = GluonASTSource
    triton.compile(source_class(kernel, signature, constants, attrs), target=GPUTarget(*target), options=options)


def main() -> None:
    """Compile until the parent closes the pipe."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what others print is no answer
    for job in sys.stdin:
        try:
            _compile(job)
            answers.write(b"1")
        except Exception:  # whoever asked will see it
            answers.write(b"0")
        answers.flush()


if __name__ == "__main__":
    main()
