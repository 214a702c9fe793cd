"""Compiling for an sm_90 that need not be here; loading is somebody else's, tests/gpu."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

#: A process of its own: Triton's cache is where the environment of its import says, and its driver is replaced.
SCRIPT = """
import json, os, sys
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import _async_compile
from triton.runtime.driver import driver
from pico_vllm.kernels import parallel_compile
from pico_vllm.kernels.parallel_compile import compiling_only, preparing

FIRST = tl.constexpr(0)

@triton.jit
def fill_kernel(x, value, BLOCK: tl.constexpr):
    tl.store(x + tl.arange(FIRST, BLOCK), value)

class Driver:
    utils = type("Utils", (), {
        "get_device_properties": staticmethod(lambda device: {"max_shared_mem": 232448}),
        "load_binary": staticmethod(lambda *args: (object(), 1, 32, 0, 1024)),
    })
    launcher_cls = staticmethod(lambda src, metadata: lambda *args: None)
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
    get_current_device = get_current_stream = staticmethod(lambda *args: 0)

driver.set_active(Driver())
torch.cuda.set_device = lambda device: None
compiled_here = []
triton.knobs.compilation.listener = lambda *, cache_hit, **_: compiled_here.append(not cache_hit)
run_in_copies, copies = parallel_compile.run_in_copies, []

def noting(tasks, num_processes):
    copies.append((len(tasks), num_processes))
    return run_in_copies(tasks, num_processes)

parallel_compile.run_in_copies = noting
x = torch.zeros(256)

@triton.jit
def longer_kernel(x, BLOCK: tl.constexpr):
    # A longer source takes longer, as a rule.
    value = tl.load(x + tl.arange(0, BLOCK))
    value = tl.exp(value) + tl.log(value)
    tl.store(x + tl.arange(0, BLOCK), value)

def order():
    names = []
    def doing_nothing(tasks, num_processes):
        names.extend(task.args[0]().name for task in tasks)
        return iter([])
    parallel_compile.run_in_copies = doing_nothing
    with compiling_only(torch.device("cuda", 0), 4):
        fill_kernel[(1,)](x, 3.0, BLOCK=16)
        longer_kernel[(1,)](x, BLOCK=16)
    return names

def compile_all(*blocks, workers=4):
    compiled_here.clear()
    copies.clear()
    error = None
    try:
        with compiling_only(torch.device("cuda", 0), workers):
            for block in blocks:
                fill_kernel[(1,)](x, 3.0, BLOCK=block)
            if "fail" in sys.argv:
                raise KeyError
    except Exception as exception:
        error = type(exception).__name__
    kernels = next(iter(fill_kernel.device_caches.values()))[0].values()
    futures = sum(isinstance(kernel, _async_compile.FutureKernel) for kernel in kernels)
    return {"here": sum(compiled_here), "looked_up": len(compiled_here), "copies": copies[:], "error": error,
            "kernels": len(kernels), "futures": futures, "globals": len(fill_kernel.used_global_vals)}
"""


def told(tmp_path, calls, *argv):
    path = tmp_path / "script.py"
    path.write_text(f"{SCRIPT}\nprint(json.dumps([{calls}]))\n")
    packages = os.pathsep.join(filter(None, sys.path))
    env = os.environ | {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "TRITON_INTERPRET": "0", "PYTHONPATH": packages}
    done = subprocess.run([sys.executable, path, *argv], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def outcome(here, looked_up, copies=(), kernels=0, error=None):
    copies = [list(call) for call in copies]
    return dict(here=here, looked_up=looked_up, copies=copies, error=error, kernels=kernels, futures=0, globals=0)


def test_copies_compile_what_is_not_on_disk_and_threads_load_it(tmp_path):
    first, again = told(tmp_path, "compile_all(16, 32, 16), compile_all(16, 32, 64, 128)")
    assert first == outcome(here=0, looked_up=2, copies=[(2, 4)], kernels=2)
    assert again == outcome(here=0, looked_up=2, copies=[(2, 4)], kernels=4)  # two are loaded already
    assert told(tmp_path, "compile_all(16, 32, 64, 128)") == [outcome(here=0, looked_up=4, kernels=4)]


def test_threads_compile_on_one_core_and_a_single_kernel(tmp_path):
    one_core, single = told(tmp_path, "compile_all(16, 32, workers=1), compile_all(64)")
    assert one_core == outcome(here=2, looked_up=2, kernels=2)
    assert single == outcome(here=1, looked_up=1, kernels=3)


def test_threads_compile_what_copies_have_not(tmp_path):
    SCRIPT_WITHOUT = "parallel_compile.run_in_copies = lambda tasks, num_processes: iter([])"
    [result] = told(tmp_path, f"exec({SCRIPT_WITHOUT!r}) or compile_all(16, 32)")
    assert result == outcome(here=2, looked_up=2, kernels=2)


def test_copies_begin_with_the_longest_sources(tmp_path):
    assert told(tmp_path, "order()") == [["longer_kernel", "fill_kernel"]]


def test_copies_compile_after_threads_have(tmp_path):
    _, copies = told(tmp_path, "compile_all(16, workers=1), compile_all(32, 64)")
    assert copies == outcome(here=0, looked_up=2, copies=[(2, 4)], kernels=3)


def test_an_error_of_the_compiler_is_raised_and_the_next_start_does_not_see_it(tmp_path):
    broken, whole = told(tmp_path, "compile_all(16, 48), compile_all(16, 32)")
    assert broken["error"] == "CompilationError" and broken["futures"] == 0
    assert (whole["error"], whole["futures"], whole["kernels"]) == (None, 0, 2)


def test_an_error_of_the_caller_leaves_nothing_that_waits_for_a_kernel(tmp_path):
    assert told(tmp_path, "compile_all(16, 32)", "fail") == [outcome(here=0, looked_up=0, error="KeyError")]


PREPARED = """
def prepared():
    from triton.backends.nvidia.compiler import get_ptxas_version
    from triton.runtime.cache import triton_key
    get_ptxas_version.cache_clear()
    with preparing(torch.device("cuda", 0)):
        pass
    return [cached.cache_info().currsize for cached in (get_ptxas_version, triton_key)]

def without_driver():
    Driver.get_current_target = None
    return prepared()[0]
"""


def test_what_triton_finds_out_once_a_process_is_known_after_preparing_and_its_errors_are_left_for_later(tmp_path):
    assert told(tmp_path, f"exec({PREPARED!r}) or prepared(), without_driver()") == [[1, 1], 0]


SAME_KERNEL = """
from pico_vllm.kernels.attention_merge import _merge_kernel
from pico_vllm.kernels.decode_inputs_triton import _fill_decode_inputs_kernel

def what_counts(kernel, *names):
    flags = {parameter.name: parameter for parameter in kernel.params}
    return [not (flags[name].do_not_specialize or flags[name].do_not_specialize_on_alignment) for name in names]
"""


def test_numbers_of_rows_and_places_in_a_packed_tensor_make_no_kernels_of_their_own(tmp_path):
    calls = "what_counts(_merge_kernel, 'num_rows'), "
    calls += "what_counts(_fill_decode_inputs_kernel, 'seq_lens_ptr', 'new_block_ids_ptr', 'rows_ptr')"
    assert told(tmp_path, f"*[exec({SAME_KERNEL!r})][:0], {calls}") == [[False], [False, False, True]]


INTERRUPTED = """
def interrupt(tasks, num_processes):
    yield 0
    raise OSError

parallel_compile.run_in_copies = interrupt
"""


def test_an_error_while_copies_compile_ends_the_start_too(tmp_path):
    [result] = told(tmp_path, f"exec({INTERRUPTED!r}) or compile_all(16, 32)")
    assert (result["error"], result["futures"]) == ("OSError", 0)
