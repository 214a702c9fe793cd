"""Any setting, same result. One table: setting x model x dtype; a later feature adds a row, not a file.

Each cell runs every prompt twice in the same engine, once greedy and once sampled with a seed of its own. In float32
the tokens are those of each request alone, in one chunk, with room to spare (greedy ones up to a near-tie), and the
logits are transformers'. In bfloat16 a setting may change how a product is rounded: see ``engine_runs`` for what is
equal then.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

import tiny_models
from engine_runs import (
    MIN_TOP2_GAP,
    Oracle,
    assert_bf16_error_is_bounded,
    assert_close_logprobs,
    assert_same_tokens,
    assert_tokens_follow_from_logits,
    greedy,
    make_llm,
    run_with_logits,
)
from pico_vllm import SamplingParams

MODELS = ("qwen2-gqa6-d64-tied", "llama-mha-d128-untied", "qwen3-gqa2-d128-untied")
DTYPES = ("float32", "bfloat16")
NUM_TOKENS = 33  # 16 requests: more than the 512 positions that an RMS needs
LENGTHS = (1, 5, 15, 16, 17, 31, 33, 48)


@dataclass(frozen=True)
class Setting:
    """Engine options, and how the requests arrive."""

    options: dict[str, Any] = field(default_factory=dict)
    order: str = "together"  # together, reversed, staggered
    preempts: bool = False
    min_chunk_tokens: int | None = None  # with a target: what prompts get beside decodes, whatever it says


SETTINGS = {
    "one-batch": Setting(),
    "reversed": Setting(order="reversed"),
    "staggered": Setting(order="staggered"),
    "chunks-of-1": Setting({"max_num_batched_tokens": 1}),
    "chunks-of-7": Setting({"max_num_batched_tokens": 7}),
    "chunks-of-16": Setting({"max_num_batched_tokens": 16}),
    "whole-prompts": Setting({"enable_chunked_prefill": False, "max_num_batched_tokens": 256}),
    "tight-target": Setting({"target_itl_ms": 1e-6}, order="staggered", min_chunk_tokens=3),
    "loose-target": Setting({"target_itl_ms": 1_000_000}, order="staggered"),
    "tight-target-tiny-pool": Setting(
        {"target_itl_ms": 1e-6, "num_gpu_blocks_override": 7}, order="staggered", preempts=True, min_chunk_tokens=5
    ),
    "two-at-a-time": Setting({"max_num_seqs": 2}),
    "block-size-1": Setting({"block_size": 1, "num_gpu_blocks_override": 1024}),
    "block-size-32": Setting({"block_size": 32}),
    "block-size-256": Setting({"block_size": 256, "num_gpu_blocks_override": 16}),
    "tiny-pool": Setting({"num_gpu_blocks_override": 6}, preempts=True),
    "tiny-pool-tiny-chunks": Setting({"num_gpu_blocks_override": 6, "max_num_batched_tokens": 5}, preempts=True),
    "tiny-pool-staggered": Setting({"num_gpu_blocks_override": 7}, order="staggered", preempts=True),
    "reference-backend": Setting({"backend": "reference"}),
    "prefix-cache": Setting({"enable_prefix_caching": True}),
    "prefix-cache-chunks-of-7": Setting(
        {"enable_prefix_caching": True, "max_num_batched_tokens": 7}, order="staggered"
    ),
    "prefix-cache-tiny-pool": Setting({"enable_prefix_caching": True, "num_gpu_blocks_override": 6}, preempts=True),
    "overlap": Setting({"async_scheduling": True}),
    "overlap-chunks-of-7": Setting({"async_scheduling": True, "max_num_batched_tokens": 7}, order="staggered"),
    "overlap-tiny-pool": Setting({"async_scheduling": True, "num_gpu_blocks_override": 6}, preempts=True),
}


@pytest.fixture(scope="module", params=MODELS)
def checkpoint(request, tmp_path_factory):
    """Saved in bfloat16: both dtypes compute with the same numbers, and rounded weights excuse no error."""
    directory = tmp_path_factory.mktemp(request.param)
    tiny_models.save_tiny_model(tiny_models.MODELS[request.param], directory, dtype=torch.bfloat16)
    return directory


@pytest.fixture(scope="module")
def exact_oracle(checkpoint):
    return Oracle(checkpoint)


@pytest.fixture(scope="module")
def bf16_oracle(checkpoint):
    return Oracle(checkpoint, torch.bfloat16)


def sampled(index: int) -> SamplingParams:
    """Every request samples in its own way."""
    choices = [{}, {"top_k": 20}, {"top_p": 0.8}, {"top_k": 50, "top_p": 0.9}]
    return SamplingParams(
        temperature=0.7, seed=100 + index, max_tokens=NUM_TOKENS, ignore_eos=True, **choices[index % 4]
    )


def make_prompts() -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(2, tiny_models.VOCAB_SIZE) for _ in range(n)] for n in LENGTHS]


# Greedy and sampled requests alternate, so that every batch mixes them.
PROMPTS = [prompt for prompt in make_prompts() for _ in range(2)]
PARAMS = [params for i in range(len(LENGTHS)) for params in (greedy(NUM_TOKENS), sampled(i))]


@pytest.fixture(scope="module")
def baseline(checkpoint):
    """Each request alone, in float32."""
    llm = make_llm(checkpoint)
    return [run_with_logits(llm, [prompt], params)[0] for prompt, params in zip(PROMPTS, PARAMS, strict=True)]


def run_setting(checkpoint, name, dtype):
    setting = SETTINGS[name]
    llm = make_llm(checkpoint, dtype=dtype, **setting.options)
    if setting.min_chunk_tokens is not None:
        scheduler = llm.engine.core.scheduler
        scheduler._target_itl = replace(scheduler._target_itl, min_chunk_tokens=setting.min_chunk_tokens)
    runs = run_with_logits(llm, PROMPTS, PARAMS, order=setting.order)
    assert (llm.engine.core.scheduler.num_preemptions > 0) == setting.preempts
    return runs


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SETTINGS)
def test_results_do_not_depend_on_the_setting(checkpoint, exact_oracle, bf16_oracle, baseline, name, dtype):
    runs = run_setting(checkpoint, name, dtype)
    exact = exact_oracle.logits(PROMPTS, runs)
    if dtype == "bfloat16":
        assert all(run.logits.dtype == torch.bfloat16 for run in runs)
        assert_bf16_error_is_bounded(runs, exact, bf16_oracle.logits(PROMPTS, runs))
        for run, params in zip(runs, PARAMS, strict=True):
            assert_tokens_follow_from_logits(run, params)
        return
    for run, alone, params, theirs in zip(runs, baseline, PARAMS, exact, strict=True):
        assert_close_logprobs(run.logits, theirs)
        if params.is_greedy:
            assert_same_tokens(run.token_ids, alone.token_ids, alone.logits)
        else:
            assert run.token_ids == alone.token_ids


def test_the_baseline_is_worth_comparing_with(baseline):
    """Greedy tokens vary, samples differ from them, and near-ties do not hide whole runs."""
    greedy_runs, sampled_runs = baseline[0::2], baseline[1::2]
    assert all(len(set(run.token_ids)) > 1 for run in greedy_runs)
    assert all(run.token_ids != other.token_ids for run, other in zip(greedy_runs, sampled_runs, strict=True))
    gaps = torch.cat([run.logits.topk(2).values.diff(dim=-1).abs().flatten() for run in greedy_runs])
    assert (gaps > MIN_TOP2_GAP).float().mean() > 0.9
