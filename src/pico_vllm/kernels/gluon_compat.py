"""What the Gluons of triton 3.6 to 3.9 call differently, under one name each, for the kernels that are written in it.

Gluon is the part of Triton in which layouts, shared memory and barriers are written out. It is experimental: with a
triton of another version, or one without it, importing this module raises ImportError.
"""

# pyright: reportAttributeAccessIssue=false
# (the names of other versions)

from __future__ import annotations

import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

_VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])
if not (3, 6) <= _VERSION <= (3, 9):
    raise ImportError(f"needs the Gluon of triton 3.6 to 3.9, this is triton {triton.__version__}")

#: ``reinterpret`` may give a view that reaches beyond the one it is given.
REINTERPRETS_BEYOND = _VERSION <= (3, 7)

# What 3.6 calls thread_barrier, async_copy_global_to_shared, async_copy_shared_to_global and _reinterpret.
thread_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
async_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
async_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
_memory = gl.shared_memory_descriptor
reinterpret = _memory.reinterpret if hasattr(_memory, "reinterpret") else _memory._reinterpret
