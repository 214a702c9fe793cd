"""The engine on a CPU beside transformers, in one process and one run.

    python benchmarks/cpu_engine.py --out benchmarks/results/cpu_engine.jsonl

SmolLM2-135M-Instruct, bf16, greedy, EOS ignored, prompts of 32 tokens (token ids, seeded), 128 new tokens each. Points:
transformers ``generate`` at batch 1; ours at 1, 8 and 32 concurrent requests. Before anything is timed, our greedy
tokens of two prompts are compared with transformers'. Runs are interleaved and every second round runs backwards, so a
machine that drifts drifts for all points alike. One JSON record a point with every run's number; a table on stdout.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
import triton

import pico_vllm
from pico_vllm import LLM, SamplingParams
from pico_vllm.engine.stats import EngineStats
from pico_vllm.environment import collect_environment

PROMPT_LEN = 32
OUTPUT_LEN = 128
CONCURRENCIES = (1, 8, 32)
MUST = {"ours at 1 / transformers": 1.3, "ours at 8 / ours at 1": 3.0, "ours at 32 / ours at 1": 8.0}
MUST_OVERHEAD = 0.03


def main() -> None:
    """Check, measure, write, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6, help="timed rounds after one warm-up round")
    parser.add_argument("--out", type=Path, help="JSONL file to append to")
    args = parser.parse_args()

    llm = LLM(device="cpu", dtype="bfloat16", enable_prefix_caching=False)  # each round has the same prompts
    hf = transformers.AutoModelForCausalLM.from_pretrained(llm.engine.source.path, dtype=torch.bfloat16).eval()
    prompts = make_prompts(max(CONCURRENCIES))
    check_same_tokens(llm, hf, prompts[:2])

    points: dict[str, Callable[[], dict[str, float]]] = {"transformers 1": lambda: time_transformers(hf, prompts[0])}
    for n in CONCURRENCIES:
        points[f"pico-vllm {n}"] = lambda n=n: time_engine(llm, prompts[:n])
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in points}
    for round_number in range(args.rounds + 1):
        order = list(points) if round_number % 2 == 0 else list(reversed(points))
        for name in order:
            result = points[name]()
            if round_number > 0:
                runs[name].append(result)

    records = [record(name, results) for name, results in runs.items()]
    if args.out is not None:
        with args.out.open("a") as file:
            file.writelines(json.dumps(r) + "\n" for r in records)
    print(table(runs))


def make_prompts(count: int) -> list[list[int]]:
    """Seeded token ids; special tokens (below 17) are left out."""
    rng = random.Random(0)
    return [[rng.randrange(17, 49152) for _ in range(PROMPT_LEN)] for _ in range(count)]


def check_same_tokens(llm: LLM, hf: Any, prompts: list[list[int]]) -> None:
    """Our greedy tokens must be transformers' best, or within 0.25 of its largest bf16 logit."""
    for output in llm.generate(prompts, params(), use_tqdm=False):
        ids = output.prompt_token_ids + output.outputs[0].token_ids
        with torch.inference_mode():
            logits = hf(torch.tensor([ids])).logits[0, PROMPT_LEN - 1 : -1].float()
        chosen = logits.gather(1, torch.tensor(output.outputs[0].token_ids)[:, None])[:, 0]
        worst = (logits.amax(-1) - chosen).max().item()
        assert worst <= 0.25, f"our token is {worst:.3f} below the best logit of transformers: nothing is timed"


def params() -> SamplingParams:
    """Greedy, always OUTPUT_LEN tokens."""
    return SamplingParams(temperature=0.0, max_tokens=OUTPUT_LEN, ignore_eos=True, detokenize=True)


def time_transformers(hf: Any, prompt: list[int]) -> dict[str, float]:
    """One ``generate`` call at batch 1."""
    ids = torch.tensor([prompt])
    start = time.perf_counter()
    with torch.inference_mode():
        out = hf.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=OUTPUT_LEN,
            min_new_tokens=OUTPUT_LEN,
            do_sample=False,
        )
    seconds = time.perf_counter() - start
    assert out.shape[1] == PROMPT_LEN + OUTPUT_LEN
    return {"out_tok_s": OUTPUT_LEN / seconds}


def time_engine(llm: LLM, prompts: list[list[int]]) -> dict[str, float]:
    """All prompts at once; the overhead is that of the whole run, prefill step included."""
    llm.engine.stats = EngineStats()
    start = time.perf_counter()
    outputs = llm.generate(prompts, params(), use_tqdm=False)
    seconds = time.perf_counter() - start
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    assert num_tokens == len(prompts) * OUTPUT_LEN
    stats = llm.engine.stats
    return {
        "out_tok_s": num_tokens / seconds,
        "step_ms": stats.total_s / stats.num_steps * 1e3,
        "overhead": stats.overhead,
    } | {
        f"{phase}_us": getattr(stats, f"{phase}_s") / stats.num_steps * 1e6
        for phase in ("schedule", "build", "update", "output")
    }


def record(name: str, results: list[dict[str, float]]) -> dict[str, Any]:
    """One JSON record: medians, and every run."""
    engine, concurrency = name.split()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    dirty = bool(subprocess.run(["git", "status", "--porcelain", "-uno"], capture_output=True, text=True).stdout)
    environment = collect_environment()
    return {
        "engine": engine,
        "version": pico_vllm.__version__ if engine == "pico-vllm" else transformers.__version__,
        "commit": commit + ("+changes" if dirty else ""),
        "point": "cpu_engine",
        "model": "SmolLM2-135M-Instruct",
        "dtype": "bfloat16",
        "concurrency": int(concurrency),
        "input_len": PROMPT_LEN,
        "output_len": OUTPUT_LEN,
        "cpu": environment.cpu_model,
        "cpus": torch.get_num_threads(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "metrics": {k: {"median": round(statistics.median(r[k] for r in results), 4)} for k in results[0]},
        "runs": [{k: round(v, 4) for k, v in r.items()} for r in results],
    }


def table(runs: dict[str, list[dict[str, float]]]) -> str:
    """Markdown: the points, then the ratios (each within a round, then the median) against their targets."""
    lines = ["| point | tok/s median | min … max | step ms | outside the forward |", "|---|---|---|---|---|"]
    for name, results in runs.items():
        rates = [r["out_tok_s"] for r in results]
        step, overhead = (statistics.median(r.get(k, float("nan")) for r in results) for k in ("step_ms", "overhead"))
        extra = f"{step:.1f} | {overhead:.1%}" if name.startswith("pico") else "– | –"
        lines.append(f"| {name} | {statistics.median(rates):.1f} | {min(rates):.1f} … {max(rates):.1f} | {extra} |")
    lines += ["", "| ratio | median | must |", "|---|---|---|"]
    pairs = {
        "ours at 1 / transformers": ("pico-vllm 1", "transformers 1"),
        "ours at 8 / ours at 1": ("pico-vllm 8", "pico-vllm 1"),
        "ours at 32 / ours at 1": ("pico-vllm 32", "pico-vllm 1"),
    }
    for name, (over, under) in pairs.items():
        ratios = [a["out_tok_s"] / b["out_tok_s"] for a, b in zip(runs[over], runs[under], strict=True)]
        lines.append(f"| {name} | {statistics.median(ratios):.2f} | {MUST[name]} |")
    overhead = statistics.median(r["overhead"] for r in runs["pico-vllm 8"])
    lines.append(f"| outside the forward at 8 | {overhead:.2%} | {MUST_OVERHEAD:.0%} at most |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
