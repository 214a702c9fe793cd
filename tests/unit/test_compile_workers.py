"""Compiling in other processes, for an sm_90 that need not be here."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="triton isn't installed")

from pico_vllm.kernels import compile_workers
from pico_vllm.kernels.compile_workers import CompileWorkers, num_workers

#: A process of its own: Triton's cache is where the environment of its import says.
SCRIPT = """
import json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource, get_cache_key, make_backend
from pico_vllm.kernels.compile_workers import CompileWorkers
from pico_vllm.kernels.greedy_triton import _best_chunk_kernel
from pico_vllm.kernels.parallel_compile import is_cached

def compile_fn(chunks_block, kernel=_best_chunk_kernel):
    types = {"values_ptr": "*fp32", "ids_ptr": "*i32", "token_ids_ptr": "*i64", "last_token_ids_ptr": "*i32"}
    constants = {"CHUNKS_BLOCK": chunks_block, "KEEPS": True, "PDL": True}
    signature = types | {"rows_ptr": "*i32", "num_chunks": "i32"} | dict.fromkeys(constants, "constexpr")
    src = ASTSource(kernel, signature, {(kernel.arg_names.index(name),): value for name, value in constants.items()})
    target = GPUTarget("cuda", 90, 32)
    backend = make_backend(target)
    options = backend.parse_options({"num_warps": 1})
    key = get_cache_key(src, backend, options, triton._C.libtriton.get_cache_invalidating_env_vars())

    def async_compile():
        return triton.compile(src, target=target, options=options.__dict__)

    return key, async_compile

hits = []
triton.knobs.compilation.listener = lambda **what: hits.append(what["cache_hit"])
workers = CompileWorkers(1)
key, first = compile_fn(32)
told = {"starts": workers.compile(first), "cached_before": is_cached(key)}
told["by_worker"] = workers.compile(first)
told["cached_after"] = is_cached(key)
first()
told["hits"] = hits
told["broken"] = workers.compile(compile_fn(33)[1])  # no power of two
told["after_it"] = workers.compile(compile_fn(64)[1])
workers.close()
told["after_the_end"] = workers.compile(compile_fn(128)[1])
print(json.dumps(told))
"""


def test_a_worker_compiles_into_the_cache_of_its_parent(tmp_path):
    env = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "starts": False,
        "cached_before": False,
        "by_worker": True,
        "cached_after": True,
        "hits": [True],
        "broken": False,
        "after_it": True,
        "after_the_end": False,
    }


def test_what_a_worker_cannot_be_told_is_for_the_parent(monkeypatch):
    def nothing_known():
        raise AssertionError("not called")

    monkeypatch.setattr(CompileWorkers, "_start", lambda self: pytest.fail("a worker for nothing"))
    assert CompileWorkers(1).compile(nothing_known) is False


def test_without_workers_nobody_waits_for_one():
    src = target = options = None

    def compile_kernel():
        return src, target, options

    assert CompileWorkers(0).compile(compile_kernel) is False


@pytest.mark.parametrize("cores, expected", [(1, 0), (7, 0), (8, 4), (16, 8), (128, 8)])
def test_workers_are_for_machines_with_cores_enough(cores, expected):
    assert num_workers(cores) == expected
    assert compile_workers._MAX_WORKERS == 8
