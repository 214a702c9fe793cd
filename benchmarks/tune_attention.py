"""Launch shapes of the Triton attention side by side: which is fastest at which size.

    python benchmarks/tune_attention.py --out tuning.jsonl      (one GPU; about 3 minutes, most of it compiling)

Every candidate is checked against the oracle and timed as `pico-vllm bench kernels` does, in CUDA graphs over inputs
larger than the cache. The winners go into ``kernels/attention_config.py``; the run that the present ones came from is
benchmarks/results/h200_attention_tuning.json.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from pico_vllm.bench.ceilings import ceilings_from, measure_ceilings
from pico_vllm.bench.kernel_cases import OPS
from pico_vllm.bench.kernel_cases.case import KernelOp
from pico_vllm.bench.kernel_cases.shapes import QWEN2_5_1_5B, KernelShapes
from pico_vllm.bench.kernels import bench_kernels
from pico_vllm.bench.records import RecordWriter
from pico_vllm.kernels.attention_config import AttentionConfig, DecodeConfig, PrefillConfig, select_config
from pico_vllm.kernels.backend import KernelBackend
from pico_vllm.kernels.triton_backend import TRITON

DECODES = [
    DecodeConfig(block_n, num_warps, num_stages, programs_per_sm)
    for block_n, num_warps in ((32, 2), (32, 4), (64, 2), (64, 4), (128, 8))
    for num_stages in (2, 3, 4)
    for programs_per_sm in (1, 2, 4)
    if block_n * num_stages <= 384  # shared memory
]
PREFILLS = [
    PrefillConfig(block_m, block_n, num_warps, num_stages, separates_diagonal=separates_diagonal)
    for block_m, block_n, num_warps in ((64, 64, 4), (128, 64, 8), (128, 128, 8))
    for num_stages in (2, 3, 4)
    for separates_diagonal in (True, False)
    if block_n * num_stages <= 384
]


def main() -> None:
    """Time every candidate on every size, print the best three of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSONL file to append to")
    args = parser.parse_args()
    device = torch.device("cuda", 0)
    writer = None
    if args.out is not None:
        writer = RecordWriter(args.out, model=f"{QWEN2_5_1_5B.name} shape", dtype="bfloat16", device=device)
    found: dict[tuple[str, str], list[tuple[float, str]]] = {}
    for row, shape in time_candidates(device, torch.bfloat16, QWEN2_5_1_5B):
        if writer is not None:
            writer.write(**{k: v for k, v in row.to_dict().items() if k not in ("device", "dtype")}, shape=shape)
        seconds = float("inf") if row.timing is None else row.timing.median_s
        found.setdefault((row.op, row.case), []).append((seconds, shape))
    for (op, case), timed in found.items():
        print(f"{op}, {case}")
        for seconds, shape in sorted(timed)[:3]:
            print(f"  {seconds * 1e6:8.2f} us  {shape}")


def time_candidates(device: torch.device, dtype: torch.dtype, shapes: KernelShapes) -> Iterator[tuple[Any, str]]:
    """(row, shape) of every candidate at every size; torch isn't timed beside each of them."""
    architecture = 10 * torch.cuda.get_device_capability(device)[0] + torch.cuda.get_device_capability(device)[1]
    tuned = select_config(architecture, shapes.head_dim, dtype.itemsize)
    ceilings = ceilings_from(measure_ceilings(device), dtype)
    for op_name, configs in (
        ("paged_attention_decode", [with_decode(tuned, decode) for decode in DECODES]),
        ("paged_attention_prefill", [with_prefill(tuned, prefill) for prefill in PREFILLS]),
    ):
        (op,) = (without_baselines(op) for op in OPS if op.name == op_name)
        for config in configs:
            backend = with_config(config)
            for row in bench_kernels(backend, device, dtype, shapes, quick=False, ceilings=ceilings, ops=[op]):
                yield row, str(config.decodes[0] if op_name == "paged_attention_decode" else config.prefill)


def with_decode(config: AttentionConfig, decode: DecodeConfig) -> AttentionConfig:
    """One decode shape for every batch."""
    return dataclasses.replace(config, decodes=(decode,), short_decodes=(decode,))


def with_prefill(config: AttentionConfig, prefill: PrefillConfig) -> AttentionConfig:
    """One prefill shape for every step."""
    return dataclasses.replace(config, prefill=prefill, short_prefill=prefill, hopper_prefill=False)


def with_config(config: AttentionConfig) -> KernelBackend:
    """The Triton backend with launch shapes of one's own."""

    def prepare(*args: Any) -> Any:
        return dataclasses.replace(TRITON.prepare_attention(*args), config=config)

    return dataclasses.replace(TRITON, prepare_attention=prepare)


def without_baselines(op: KernelOp) -> KernelOp:
    """The same cases, and torch not timed."""

    def cases(shapes: KernelShapes, dtype: torch.dtype) -> Iterator[Any]:
        return (dataclasses.replace(case, baselines=()) for case in op.cases(shapes, dtype))

    return dataclasses.replace(op, cases=cases)


if __name__ == "__main__":
    main()
