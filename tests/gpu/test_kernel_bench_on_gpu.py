"""The kernel bench, the ceilings and the calibration where they are meant to run. Times are never looked at."""

import dataclasses

import pytest
import torch

from pico_vllm.bench.calibration import calibrate
from pico_vllm.bench.ceilings import measure_ceilings
from pico_vllm.bench.cuda_timing import time_on_cuda
from pico_vllm.bench.kernel_cases.shapes import QWEN2_5_1_5B, SMOLLM2_135M
from pico_vllm.bench.kernels import bench_kernels
from pico_vllm.bench.timing import QUICK_BUDGET, Rotation
from pico_vllm.kernels.backend import CPU

DEVICE = torch.device("cuda", 0)
SMALL = dataclasses.replace(SMOLLM2_135M, linear_tokens=(1, 32), num_tokens=(1, 32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_op_is_right_and_has_a_baseline(dtype):
    for row in bench_kernels(CPU, DEVICE, dtype, SMALL, quick=True):
        assert (row.error, row.missing) == (None, None), row
        assert row.timing is not None and row.baseline_name is not None
        assert row.timing.mode == ("eager" if row.op == "sample" else "graph"), row.op  # sampling asks the host


def test_attention_has_the_gpus_own_kernels_as_baseline():
    shapes = dataclasses.replace(QWEN2_5_1_5B, decodes=((4, 300),), prefills=((128, 0),))
    only = ["paged_attention_decode", "paged_attention_prefill"]
    for row in bench_kernels(CPU, DEVICE, torch.bfloat16, shapes, only, True):
        assert row.baseline_name in {f"SDPA {name}, contiguous K/V" for name in ("cuDNN", "flash", "efficient")}


def test_a_call_that_waits_for_the_device_is_timed_eagerly_and_harms_no_later_one():
    x = torch.zeros(1000, device=DEVICE)
    assert time_on_cuda(Rotation([lambda: x.sum().item()]), DEVICE, QUICK_BUDGET).mode == "eager"
    assert time_on_cuda(Rotation([lambda: x.add_(1)]), DEVICE, QUICK_BUDGET).mode == "graph"


def test_a_call_that_a_graph_refuses_is_timed_eagerly_and_harms_no_later_one():
    x = torch.zeros(1000, device=DEVICE)

    def refused():
        torch.cuda.synchronize()  # not seen by torch's debug mode
        return x.add_(1)

    assert time_on_cuda(Rotation([refused]), DEVICE, QUICK_BUDGET).mode == "eager"
    torch.cuda.empty_cache()  # fails while the allocator believes in a capture
    assert time_on_cuda(Rotation([lambda: x.add_(1)]), DEVICE, QUICK_BUDGET).mode == "graph"


def test_inputs_are_restored_between_replays():
    x = torch.ones(1000, device=DEVICE)
    original = x.clone()
    time_on_cuda(Rotation([lambda: x.mul_(1e3)], lambda: x.copy_(original)), DEVICE, QUICK_BUDGET)
    torch.cuda.synchronize()
    assert not x.isnan().any()


def test_a_gpu_has_every_ceiling_and_gives_its_memory_back():
    before = torch.cuda.memory_allocated(DEVICE)
    measured = measure_ceilings(DEVICE, quick=True)
    assert list(measured) == ["copy_TBps", "read_TBps", "read_torch_sum_TBps", "matmul_4096_bf16_TFLOPs"]
    assert all(0 < metric["median"] <= metric["best"] for metric in measured.values())
    assert measured["read_TBps"]["what"].startswith("Triton sum over 1 GiB; ")
    assert torch.cuda.memory_allocated(DEVICE) - before < 1 << 20


def test_calibration_launches_on_the_gpu():
    measured = calibrate(DEVICE)
    assert all(value > 0 for values in measured.values() for value in values)
