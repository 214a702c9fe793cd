"""Any setting, same result. One table: setting x model; a later feature adds a row, not a file.

The baseline is each prompt alone, in one chunk, with room to spare. Greedy tokens and seeded samples must be equal
under every setting, up to a near-tie of the baseline's logits (see ``engine_runs``).
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import tiny_models
from engine_runs import assert_same_tokens, greedy, make_llm, run_with_logits
from pico_vllm import SamplingParams

MODELS = ("qwen2-gqa6-d64-tied", "llama-mha-d128-untied")
NUM_TOKENS = 40
LENGTHS = (1, 5, 15, 16, 17, 31, 33, 48)


@dataclass(frozen=True)
class Setting:
    """Engine options, and how the requests arrive."""

    options: dict[str, Any] = field(default_factory=dict)
    order: str = "together"  # together, reversed, staggered
    preempts: bool = False


SETTINGS = {
    "one-batch": Setting(),
    "reversed": Setting(order="reversed"),
    "staggered": Setting(order="staggered"),
    "chunks-of-1": Setting({"max_num_batched_tokens": 1}),
    "chunks-of-7": Setting({"max_num_batched_tokens": 7}),
    "chunks-of-16": Setting({"max_num_batched_tokens": 16}),
    "whole-prompts": Setting({"enable_chunked_prefill": False, "max_num_batched_tokens": 256}),
    "two-at-a-time": Setting({"max_num_seqs": 2}),
    "block-size-1": Setting({"block_size": 1, "num_gpu_blocks_override": 1024}),
    "block-size-32": Setting({"block_size": 32}),
    "block-size-256": Setting({"block_size": 256, "num_gpu_blocks_override": 16}),
    "tiny-pool": Setting({"num_gpu_blocks_override": 6}, preempts=True),
    "tiny-pool-tiny-chunks": Setting({"num_gpu_blocks_override": 6, "max_num_batched_tokens": 5}, preempts=True),
    "tiny-pool-staggered": Setting({"num_gpu_blocks_override": 7}, order="staggered", preempts=True),
    "reference-backend": Setting({"backend": "reference"}),
}


@pytest.fixture(scope="module", params=MODELS)
def checkpoint(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp(request.param)
    tiny_models.save_tiny_model(tiny_models.MODELS[request.param], directory)
    return directory


@pytest.fixture(scope="module")
def prompts():
    rng = random.Random(3)
    return [[rng.randrange(2, tiny_models.VOCAB_SIZE) for _ in range(n)] for n in LENGTHS]


def sampled(index: int) -> SamplingParams:
    """Every request samples in its own way."""
    choices = [{}, {"top_k": 20}, {"top_p": 0.8}, {"top_k": 50, "top_p": 0.9}]
    return SamplingParams(
        temperature=0.7, seed=100 + index, max_tokens=NUM_TOKENS, ignore_eos=True, **choices[index % 4]
    )


@pytest.fixture(scope="module")
def baseline(checkpoint, prompts):
    """Each prompt alone: greedy runs with logits, and sampled tokens."""
    llm = make_llm(checkpoint)
    runs = [run_with_logits(llm, [prompt], greedy(NUM_TOKENS))[0] for prompt in prompts]
    samples = [llm.generate([p], sampled(i))[0].outputs[0].token_ids for i, p in enumerate(prompts)]
    return runs, samples


def drive(llm, prompts, params, order):
    """Tokens of each prompt when the requests arrive in the given order."""
    tokens = {str(i): [] for i in range(len(prompts))}
    arrivals = list(enumerate(zip(prompts, params, strict=True)))
    if order == "reversed":
        arrivals.reverse()
    while arrivals or llm.engine.has_unfinished_requests():
        for _ in range(1 if order == "staggered" else len(arrivals)):
            if arrivals:
                i, (prompt, param) = arrivals.pop(0)
                llm.engine.add_request(str(i), prompt, param)
        for delta in llm.engine.step():
            tokens[delta.request_id].extend(delta.new_token_ids)
    return list(tokens.values())


@pytest.mark.parametrize("name", SETTINGS)
def test_greedy_tokens_do_not_depend_on_the_setting(checkpoint, prompts, baseline, name):
    setting = SETTINGS[name]
    llm = make_llm(checkpoint, **setting.options)
    tokens = drive(llm, prompts, [greedy(NUM_TOKENS)] * len(prompts), setting.order)
    for ours, expected in zip(tokens, baseline[0], strict=True):
        assert_same_tokens(ours, expected.token_ids, expected.logits)
    assert (llm.engine.core.scheduler.num_preemptions > 0) == setting.preempts


@pytest.mark.parametrize("name", SETTINGS)
def test_seeded_samples_do_not_depend_on_the_setting(checkpoint, prompts, baseline, name):
    setting = SETTINGS[name]
    llm = make_llm(checkpoint, **setting.options)
    tokens = drive(llm, prompts, [sampled(i) for i in range(len(prompts))], setting.order)
    assert tokens == baseline[1]


def test_the_baseline_is_worth_comparing_with(baseline):
    """Greedy tokens vary, samples differ from them, and near-ties do not hide whole runs."""
    runs, samples = baseline
    assert all(len(set(run.token_ids)) > 1 for run in runs)
    assert all(run.token_ids != ids for run, ids in zip(runs, samples, strict=True))
    gaps = torch.cat([run.logits.topk(2).values.diff(dim=-1).abs().flatten() for run in runs])
    assert (gaps > 1e-3).float().mean() > 0.9


def test_logits_of_a_preempted_request_equal_those_of_an_undisturbed_one(checkpoint, prompts, baseline):
    llm = make_llm(checkpoint, num_gpu_blocks_override=6)
    runs = run_with_logits(llm, prompts, greedy(NUM_TOKENS))
    assert llm.engine.core.scheduler.num_preemptions > 0
    for run, expected in zip(runs, baseline[0], strict=True):
        assert_same_tokens(run.token_ids, expected.token_ids, expected.logits)
        if run.token_ids == expected.token_ids:
            assert (run.logits.log_softmax(-1) - expected.logits.log_softmax(-1)).abs().max() <= 1e-4
