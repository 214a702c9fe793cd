"""The gate: correctness of the very engine instance, before anything is timed. No pass, no row.

The engine generates greedily through the path that will be timed: alone, eight at once with lengths at the borders of
blocks, as many at once as the benchmark will, and one long prompt. ``oracle.generation_check`` judges it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pico_vllm.bench.workloads import Workload, WorkloadRequest, random_ids
from pico_vllm.errors import ConfigError
from pico_vllm.oracle.generation_check import Generation
from pico_vllm.oracle.verify import NUM_NEW_TOKENS, PROMPT_LENGTHS

if TYPE_CHECKING:
    from pico_vllm.bench.engines.engine import BenchEngine

#: The long prompt is no longer than this: transformers' eager attention needs length² numbers a head.
MAX_LONG_PROMPT = 2048
#: What the widest batch generates.
WIDE_PROMPT_LEN, WIDE_NEW_TOKENS = 24, 4
MAX_WIDTH = 256


def gate_generations(
    engine: BenchEngine, *, vocab_size: int, widest: int, longest: int, max_len: int, seed: int = 0
) -> list[Generation]:
    """Let an engine generate what the oracle will judge.

    Args:
        engine: idle.
        vocab_size: of the model.
        widest: requests at once of the benchmark.
        longest: prompt tokens of the benchmark.
        max_len: tokens of a request at most, by the model; what the engine itself has no room for is left out too.
        seed: of the prompts.

    Raises:
        ConfigError: the engine tells no token ids, or not as many as it was asked for.
    """
    rng = random.Random(f"gate/{seed}")
    prompts = [random_ids(rng, n, vocab_size) for n in PROMPT_LENGTHS if n + NUM_NEW_TOKENS <= max_len]
    prompts = [prompt for prompt in prompts if _fits(engine, prompt, NUM_NEW_TOKENS)]
    long_prompt = random_ids(rng, max(1, min(longest, MAX_LONG_PROMPT, max_len - WIDE_NEW_TOKENS)), vocab_size)
    while len(long_prompt) > 1 and not _fits(engine, long_prompt, WIDE_NEW_TOKENS):
        long_prompt = long_prompt[: len(long_prompt) // 2]
    wide = [random_ids(rng, WIDE_PROMPT_LEN, vocab_size) for _ in range(min(widest, MAX_WIDTH))]
    generations: list[Generation] = []
    for batch, new_tokens, concurrency in (
        (prompts[:2], NUM_NEW_TOKENS, 1),
        (prompts, NUM_NEW_TOKENS, len(prompts)),
        ([long_prompt], WIDE_NEW_TOKENS, 1),
        (wide, WIDE_NEW_TOKENS, len(wide)),
    ):
        if batch:
            generations += _generate(engine, batch, new_tokens, concurrency)
    scored = engine.score(prompts, NUM_NEW_TOKENS)
    if scored is not None:
        generations += [Generation(p, s.token_ids, s.logprobs) for p, s in zip(prompts, scored, strict=True)]
    return generations


def _fits(engine: BenchEngine, prompt: tuple[int, ...], new_tokens: int) -> bool:
    return engine.why_not(Workload((WorkloadRequest(prompt, new_tokens),), 1)) is None


def _generate(
    engine: BenchEngine, prompts: Sequence[tuple[int, ...]], new_tokens: int, concurrency: int
) -> list[Generation]:
    workload = Workload(tuple(WorkloadRequest(prompt, new_tokens) for prompt in prompts), concurrency)
    if concurrency > 1 and engine.why_not(workload) is not None:
        workload = Workload(workload.requests, 1)
    generations = []
    for prompt, trace in zip(prompts, engine.serve(workload), strict=True):
        if len(trace.token_ids) != new_tokens:
            raise ConfigError(
                f"{engine.info.engine} gave {trace.num_tokens} tokens and told {len(trace.token_ids)} ids where "
                f"{new_tokens} were asked for: its outputs can't be checked"
            )
        generations.append(Generation(prompt, trace.token_ids))
    return generations
