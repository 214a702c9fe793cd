"""One device against several that share the model, sums one after the other and beside products, in one run.

    python benchmarks/tensor_parallel.py --out tp.jsonl         (two GPUs of one host; about 90 seconds)

Weights are drawn on the device (``load_format="dummy"``), the same whatever the number of ranks: a 7B model need not be
written, read and held by transformers. So the gate is one rank itself: greedy tokens of several ranks are compared with
its tokens up to the first that differs, and log-probabilities up to there; what is more than rounding is not timed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from pico_vllm.bench.engines.engine import BenchEngine, EngineOptions
from pico_vllm.bench.engines.loading import EngineSpec, load_engine
from pico_vllm.bench.points import PointOptions, make_points
from pico_vllm.bench.random_model import SHAPES
from pico_vllm.bench.records import RecordWriter
from pico_vllm.bench.runner import Contestant, Measuring, run_points
from pico_vllm.bench.work import model_work
from pico_vllm.models.source import find_model

#: Of the prompts that are compared, and tokens each.
PROMPT_LENGTHS, NUM_NEW_TOKENS = (1, 7, 33, 64, 130, 500, 1100, 1500), 8
#: RMS difference of log-probabilities; two ranks of Qwen2.5-7B in bf16, which round other sums, have 0.06.
MAX_RMS = 0.1
#: Of a GPU's memory, for each of the three engines.
MEMORY_SHARE = 0.22


def main() -> None:
    """Build the engines, compare them, measure them in turn, write the records."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSONL file to append records to")
    parser.add_argument("--shape", default="qwen2.5-7b", choices=SHAPES)
    parser.add_argument("--model", type=Path, help="folder with a config.json, instead of a shape")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--inputs", type=int, nargs="+", default=[512, 8192], help="prompt lengths, one request at a time"
    )
    parser.add_argument("--outputs", type=int, default=128)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[64], help="of 512 tokens in")
    parser.add_argument("--runs", type=int, default=2)
    args = parser.parse_args()
    extras: dict[str, dict[str, Any]] = {
        "tp1": {},
        f"tp{args.ranks}": {"tensor_parallel_size": args.ranks, "async_tensor_parallel": True},
        f"tp{args.ranks}-sync": {"tensor_parallel_size": args.ranks, "async_tensor_parallel": False},
    }
    with tempfile.TemporaryDirectory() as directory:
        model = args.model or write_config(Path(directory), args.shape)
        config = find_model(str(model)).model_config()
        points = make_points(
            ["c1", "sweep"],
            PointOptions(
                vocab_size=config.vocab_size,
                inputs=tuple(args.inputs),
                outputs=(args.outputs,),
                concurrencies=tuple(args.concurrency),
                input_len=min(512, max(args.inputs)),
                output_len=args.outputs,
            ),
        )
        name = f"{args.shape if args.model is None else model.name} shape, dummy weights"
        writer = RecordWriter(args.out, model=name, dtype=config.dtype, device=torch.device(args.device))
        options = EngineOptions(str(model), config.dtype, args.device, MEMORY_SHARE)
        engines = {
            label: load_engine(EngineSpec("pico-vllm", label, {"load_format": "dummy"} | extra), options)
            for label, extra in extras.items()
        }
        contestants = compared(engines, config.vocab_size)
        work = model_work(config, torch.finfo(getattr(torch, config.dtype)).bits // 8)
        run_points(contestants, points, writer, Measuring(args.runs, torch.device(args.device), work, None, print))
        writer.close()
        for engine in engines.values():
            engine.close()


def write_config(directory: Path, shape: str) -> Path:
    """A folder with a configuration and nothing else."""
    config = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu"}
    (directory / "config.json").write_text(json.dumps(SHAPES[shape] | config | {"torch_dtype": "bfloat16"}))
    return directory


def compared(engines: dict[str, BenchEngine], vocab_size: int) -> list[Contestant]:
    """Those that compute what the first one does."""
    prompts = [[(13 * i + 7 * j) % (vocab_size - 10) + 5 for j in range(n)] for i, n in enumerate(PROMPT_LENGTHS)]
    scored = {label: engine.score(prompts, NUM_NEW_TOKENS) or [] for label, engine in engines.items()}
    first = next(iter(scored.values()))
    contestants = []
    for label, outputs in scored.items():
        differences: list[float] = []
        num_same = 0
        for ours, wanted in zip(outputs, first, strict=True):
            for i, (at, other) in enumerate(zip(ours.logprobs, wanted.logprobs, strict=True)):
                differences += [at[token_id] - other[token_id] for token_id in at.keys() & other.keys()]
                if ours.token_ids[i] != wanted.token_ids[i]:
                    break
                num_same += 1
        rms = torch.tensor(differences).square().mean().sqrt().item()
        gate = {"rms_logprob": round(rms, 5), "same_tokens": num_same, "of": len(prompts) * NUM_NEW_TOKENS}
        print(f"{label} against one rank: {gate}", flush=True)
        if rms <= MAX_RMS:
            fields = dataclasses.asdict(engines[label].info) | {"label": label, "gate": gate}
            contestants.append(Contestant(f"pico-vllm@{label}", engines[label], fields))
    return contestants


if __name__ == "__main__":
    main()
