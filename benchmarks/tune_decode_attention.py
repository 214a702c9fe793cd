"""Launch shapes of decode attention, in a whole decode step, with equal contexts and with different ones.

    python benchmarks/tune_decode_attention.py --out tuning.jsonl       (one GPU; about 10 seconds a batch)

Every candidate is timed as part of the captured decode step of a Qwen2.5-1.5B with random weights (see
``bench.decode_step``): tiles, warps, stages, splits, and whether the kernel that attends also rotates. First each
candidate quickly, then the best five and the present shape once more. The winners go into
``kernels/attention_config.py``. A line of the output is a batch: the step in µs with the present shape ("now_us"), and
with each candidate, fastest first.

``--device cpu`` tries it with a tiny model in Triton's interpreter (TRITON_INTERPRET=1), where times mean nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from pico_vllm.bench.decode_step import QWEN2_5_1_5B, TINY, DecodeStep
from pico_vllm.bench.timing import FULL_BUDGET, QUICK_BUDGET
from pico_vllm.environment import collect_environment
from pico_vllm.kernels.attention_config import AttentionConfig, DecodeConfig, device_of, select_config
from pico_vllm.kernels.backend import KernelBackend
from pico_vllm.kernels.parallel_compile import compiling_only
from pico_vllm.kernels.triton_backend import TRITON

#: Bound of a capture for any context, and of one for short ones.
LONG, SHORT = 32768, 1024
#: (sequences, contexts, bound): a number for all of them, or a range.
BATCHES: list[tuple[int, int | tuple[int, int], int]] = [
    *((n, 600, SHORT) for n in (1, 2, 4, 8, 16, 32, 48, 64, 96, 128)),
    *((n, 600, LONG) for n in (1, 8, 16, 256)),
    (1, 8192, LONG),
    (8, 4096, LONG),
    *((n, (100, 1500), LONG) for n in (32, 64, 128, 160, 224, 256)),
]


def main() -> None:
    """Tune at each batch, write a line each, print the best three."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSONL file to write")
    parser.add_argument("--batches", type=int, nargs="+", help="which of the batches, from 0; default: all")
    parser.add_argument("--max-candidates", type=int, help="of each batch, at most; default: all")
    parser.add_argument("--device", default="cuda", help="cuda or cpu")
    args = parser.parse_args()
    if args.device == "cpu":
        step = DecodeStep(TINY, torch.float16, torch.device("cpu"))
        batches: list[tuple[int, int | tuple[int, int], int]] = [(2, (3, 40), 64)]
    else:
        step = DecodeStep(QWEN2_5_1_5B, torch.bfloat16, torch.device("cuda", 0))
        batches = BATCHES if args.batches is None else [BATCHES[i] for i in args.batches]
    with args.out.open("w") as out:
        out.write(json.dumps({"environment": dataclasses.asdict(collect_environment())}, default=str) + "\n")
        for num_seqs, lengths, bound in batches:
            found = tune(step, contexts(num_seqs, lengths), bound, args.max_candidates)
            row = {"num_seqs": num_seqs, "contexts": lengths, "max_seq_len": bound, **found}
            out.write(json.dumps(row, ensure_ascii=False) + "\n")
            out.flush()
            best = [f"{us} ({shape})" for shape, us in list(found["candidates_us"].items())[:3]]
            print(f"{num_seqs} x {lengths}, bound {bound}: now {found['now_us']} µs;", *best)


def contexts(num_seqs: int, lengths: int | tuple[int, int]) -> list[int]:
    """Positions of each sequence; the same every time."""
    if isinstance(lengths, int):
        return [lengths] * num_seqs
    rng = random.Random(num_seqs)
    return [rng.randint(*lengths) for _ in range(num_seqs)]


def candidates(num_seqs: int, num_sms: int) -> list[DecodeConfig]:
    """Every shape that is worth a try; a split has a program of its own for each group."""
    all_splits = (1, 2, 3, 4, 5, 6, 8, 10, 16, 32, 64)
    few_enough = [n for n in all_splits if n == 1 or n * num_seqs <= 5 * num_sms]
    return [
        DecodeConfig(block_n, num_warps, num_stages, programs_per_sm=10**6, max_splits=splits, rotates=rotates)
        for block_n, num_warps, num_stages, splits, rotates in itertools.product(
            (32, 64, 128), (2, 4, 8), (2, 3), few_enough, (False, True)
        )
        if 8 <= block_n // num_warps <= 32
    ]


def tune(step: DecodeStep, lens: list[int], bound: int, max_candidates: int | None) -> dict[str, Any]:
    """µs of the step with the present shape, and with each candidate that works, fastest first."""
    device = device_of(step.device.index)
    tried = candidates(len(lens), device.num_sms)[:max_candidates]
    if step.device.type == "cuda":
        with suppress(Exception), torch.inference_mode(), compiling_only(step.device):
            for config in tried:
                model, batch, kv_caches = step.prepare(lens, with_decode(step, config), bound)
                shallow, caches = model.outermost_layers(kv_caches)
                shallow.hidden_rows(batch, caches)
    quick: list[tuple[float, DecodeConfig]] = []
    for config in tried:
        try:
            quick.append(
                (step.seconds(lens, with_decode(step, config), max_seq_len=bound, budget=QUICK_BUDGET), config)
            )
        except Exception as error:  # too much shared memory
            print(f"  {shape_name(config)}: {type(error).__name__}: {str(error).strip()[:80]}")
    quick.sort(key=lambda row: row[0])
    final = {
        shape_name(config): step.seconds(lens, with_decode(step, config), max_seq_len=bound, budget=FULL_BUDGET)
        for _, config in quick[:5]
    }
    rest = {shape_name(config): seconds for seconds, config in quick[5:]}
    now = step.seconds(lens, max_seq_len=bound)
    ordered = {**dict(sorted(final.items(), key=lambda row: row[1])), **rest}
    return {
        "now_us": round(1e6 * now, 1),
        "candidates_us": {shape: round(1e6 * seconds, 1) for shape, seconds in ordered.items()},
    }


def with_decode(step: DecodeStep, decode: DecodeConfig) -> KernelBackend:
    """The Triton backend with one decode shape for every batch."""
    architecture = device_of(step.device.index).architecture
    tuned = select_config(architecture, step.config.head_dim, 2)
    config: AttentionConfig = dataclasses.replace(tuned, decodes=(decode,), short_decodes=(decode,))

    def prepare(*args: Any) -> Any:
        return dataclasses.replace(TRITON.prepare_attention(*args), config=config)

    return dataclasses.replace(TRITON, prepare_attention=prepare)


def shape_name(config: DecodeConfig) -> str:
    """As a row shows it."""
    shape = f"tiles of {config.block_n}, warps {config.num_warps}, stages {config.num_stages}"
    return f"{shape}, splits {config.max_splits}{', rotates' * config.rotates}"


if __name__ == "__main__":
    main()
