"""A profile with numbers to reckon with."""

from __future__ import annotations

import dataclasses
from typing import Any

from pico_vllm.profiling.profile import Gaps, HostPhase, Profile, StepTimes, Summary, WorkRow


def row(name: str, calls: int, total_us: float, **fields: Any) -> WorkRow:
    """An op or kernel; ``fields`` as of WorkRow."""
    return WorkRow(**({"name": name, "op": None, "calls": calls, "total_us": total_us, "time_share": 0.5} | fields))


def profile(**changes: Any) -> Profile:
    """Ten steps of 100 us on a GPU; ``changes`` are fields of the profile or of its summary."""
    summary = Summary(
        on_gpu=True,
        window_us=1000.0,
        num_steps=10,
        step=StepTimes(90.0, 100.0, 110.0, 120.0),
        busy_us=800.0,
        busy_share=0.8,
        gaps=Gaps(1.0, 1, 150.0, 150.0, "schedule", 20, 50.0),
        host={"forward": HostPhase(10, 600.0, 0.6, 0, 50.0), "schedule": HostPhase(10, 400.0, 0.4, 1, 150.0)},
        layers_us=[30.0, 40.0],
        ops=[row("linear 8 x 16", 20, 400.0, num_bytes=100, flops=10, bandwidth_share=0.5, flops_share=0.1)],
        kernels=[row("mm", 20, 400.0, op="linear 8 x 16"), row("graph[kernel]", 10, 400.0)],
        whole=row("all kernels", 30, 800.0, num_bytes=1000, flops=100, bandwidth_share=0.25, flops_share=0.05),
    )
    of_summary = {name: changes.pop(name) for name in list(changes) if hasattr(summary, name)}
    whole = Profile(
        environment={"gpu": "GPU A", "torch": "2.9", "commit": "abc"},
        model="M",
        dtype="bfloat16",
        engine={"backend": "triton", "cuda_graphs": True},
        workload={"input_len": 512, "output_len": 32, "concurrency": 8},
        ceilings={"read_bytes_per_s": 1e12, "copy_bytes_per_s": 1e12, "matmul_flops_per_s": 1e14},
        unprofiled_step_us=80.0,
        summary=dataclasses.replace(summary, **of_summary),
    )
    return dataclasses.replace(whole, **changes)


def wide_profile() -> Profile:
    """Long names, numbers of many digits, every column in use."""
    namespace = "void at::native::(anonymous namespace)::"
    kernel = f"{namespace}indexSelectSmallIndex<c10::BFloat16, int, unsigned int, 2, 2, -2>(long)"
    numbers = {"bandwidth_share": 0.789, "flops_share": 0.037, "grid": "65535 x 5 x 8"}
    rows = [
        row(kernel, 123456, 9876543210.0, op="gated_linear 1536 x 2 x 8960", **numbers),
        row("_hopper_linear_kernel", 123456, 9876543210.0, **numbers),
    ]
    return profile(ops=rows, kernels=rows)
