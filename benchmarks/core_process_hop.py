"""What it costs to have the engine core in a process of its own, a step.

    python benchmarks/core_process_hop.py

A model so small that a step is mostly overhead (2 layers, hidden size 64, dummy weights, fp32, CPU), token ids in and
out, 1 and 8 concurrent requests of 200 tokens, greedy. In process and in its own process alternate in every round.

- step: wall time a token step, front end included. The difference is what the core itself spends on messages, plus
  what two processes take from each other on a machine with few cores.
- one token: from ``add_request`` to the output of a request of one token on an idle engine. The difference is two hops.
- messages: encoding and decoding one step's outputs, on one thread.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from pico_vllm import EngineConfig, SamplingParams
from pico_vllm.engine.core_messages import StepOutputs, decode_from_core, encode, output_of, step_of
from pico_vllm.engine.llm_engine import LLMEngine
from pico_vllm.engine.stats import StepTimes
from pico_vllm.kv_cache import CacheStats
from pico_vllm.outputs import EngineCoreOutput

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "dtype": "float32",
}
NUM_TOKENS = 200
CONCURRENCIES = (1, 8)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="timed rounds after one warm-up round")
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(MODEL))
        engines = {name: make_engine(directory, name == "process") for name in ("in process", "process")}
        print(
            f"{os.cpu_count()} cores, torch {torch.__version__}, {torch.get_num_threads()} threads; us, p50 [p20, p80]"
        )
        for n in CONCURRENCIES:
            report(f"step, {n} requests", engines, lambda engine, n=n: step_us(engine, n), rounds)
        report("one token", engines, one_token_us, rounds)
        for n in CONCURRENCIES:
            print(f"messages, {n} requests: {message_us(n):.1f}")
        for engine in engines.values():
            engine.core.shutdown()


def make_engine(directory: str, process: bool) -> LLMEngine:
    """An engine with dummy weights."""
    options = {"load_format": "dummy", "device": "cpu", "skip_tokenizer_init": True, "num_gpu_blocks_override": 256}
    config = EngineConfig.from_options(
        model=directory,
        engine_core_process=process,
        enable_prefix_caching=False,  # each round has the same prompts
        **options,
    )
    return LLMEngine(config)


def report(what: str, engines: dict[str, LLMEngine], measure: Callable[[LLMEngine], float], rounds: int) -> None:
    """Time every engine in every round and print a line each."""
    runs: dict[str, list[float]] = {name: [] for name in engines}
    for number in range(rounds + 1):
        for name in engines if number % 2 else reversed(engines):
            value = measure(engines[name])
            if number:
                runs[name].append(value)
    for name, values in runs.items():
        p20, _, _, p80 = statistics.quantiles(values, n=5)
        print(f"{what}, {name}: {statistics.median(values):.0f} [{p20:.0f}, {p80:.0f}]")


def step_us(engine: LLMEngine, num_requests: int) -> float:
    """Wall time a token step of a batch."""
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    start = time.perf_counter()
    for i in range(num_requests):
        engine.add_request(str(i), [3 + i, 4, 5], params)
    while engine.has_unfinished_requests():
        engine.step()
    return (time.perf_counter() - start) / NUM_TOKENS * 1e6


def one_token_us(engine: LLMEngine) -> float:
    """Wall time of a request of one token, the median of 50."""
    params = SamplingParams(temperature=0, max_tokens=1)
    times = []
    for _ in range(50):
        start = time.perf_counter()
        engine.add_request("r", [3, 4, 5], params)
        while engine.has_unfinished_requests():
            engine.step()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def message_us(num_requests: int) -> float:
    """Encoding and decoding one step of so many requests."""
    outputs = [EngineCoreOutput(str(i), (300 + i,)) for i in range(num_requests)]
    times = StepTimes(num_tokens=num_requests, num_seqs=num_requests, launch_s=1e-3)
    repeats = 5000
    start = time.perf_counter()
    for _ in range(repeats):
        data = encode(StepOutputs(tuple([step_of(i, output) for i, output in enumerate(outputs)]), times, CacheStats()))
        for step in decode_from_core(data).steps:  # type: ignore[union-attr]
            output_of("r", step)
    return (time.perf_counter() - start) / repeats * 1e6


if __name__ == "__main__":
    main()
