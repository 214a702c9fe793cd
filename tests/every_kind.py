"""One request of every kind, and the comparison of all that a client sees: for settings that must change nothing."""

from __future__ import annotations

import random

import pytest

from engine_runs import greedy
from pico_vllm import SamplingParams

LOGPROB_TOLERANCE = 1e-5  # fp32: another composition of a batch may sum in another order


def make_prompts(count, seed=0):
    rng = random.Random(seed)
    lengths = (1, 2, 5, 7, 8, 9, 16, 30)
    return [[rng.randrange(2, 258) for _ in range(lengths[i % len(lengths)])] for i in range(count)]


def everything(tokenizer):
    """One request of every kind."""
    a = tokenizer.encode("a", add_special_tokens=False)[0]

    def end_at_the_third(output_ids, logits):
        return logits - float("inf") if len(output_ids) == 3 else logits

    def sampled(**kwargs):
        return SamplingParams(**({"temperature": 0.9, "max_tokens": 14, "seed": len(kwargs) + 5} | kwargs))

    return [
        greedy(14),
        greedy(1),
        greedy(2, logprobs=1),
        sampled(logit_bias={1: 4.0}),  # EOS at any moment
        sampled(logit_bias={1: 4.0}, min_tokens=5, n=3),
        sampled(logit_bias={1: 4.0}, ignore_eos=True),
        sampled(stop_token_ids=list(range(100, 140)), min_tokens=2),
        sampled(stop=["\x07", "e", "t"], top_p=0.9),
        sampled(top_p=0.7, top_k=40, logprobs=3, prompt_logprobs=2),
        sampled(min_p=0.05, temperature=1.4, n=2, logprobs=0),
        greedy(14, repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.3, logprobs=0),
        sampled(frequency_penalty=1.5, prompt_logprobs=0),
        sampled(bad_words=["ab", "e", "the"], allowed_token_ids=list(range(60, 130))),
        greedy(14, allowed_token_ids=[a], bad_words=["aa"]),  # nothing is left for the second token
        greedy(14, allowed_token_ids=[7], stop_token_ids=[7], min_tokens=2),  # nor for the first
        sampled(logits_processors=[lambda ids, logits: logits.roll(len(ids))], logprobs=1),
        greedy(14, logits_processors=[end_at_the_third]),
    ]


def result_of(output):
    """All that a client sees of a request, and its log-probabilities in a row."""
    numbers = []

    def shape(positions):
        for by_id in positions or ():
            numbers.extend(lp.logprob for lp in (by_id or {}).values())
        if positions is None:
            return None
        return [by_id and [(i, lp.rank, lp.decoded_token) for i, lp in by_id.items()] for by_id in positions]

    completions = [
        (c.index, c.text, c.token_ids, c.finish_reason, c.stop_reason, shape(c.logprobs)) for c in output.outputs
    ]
    return (output.prompt_token_ids, completions, shape(output.prompt_logprobs), output.finished), numbers


def assert_same(ours, theirs, tolerance=LOGPROB_TOLERANCE):
    for mine, other in zip(ours, theirs, strict=True):
        (result, numbers), (expected, expected_numbers) = result_of(mine), result_of(other)
        assert result == expected
        assert numbers == pytest.approx(expected_numbers, abs=tolerance)


def assert_idle(engine):
    core = engine.core
    assert not engine.has_unfinished_requests() and engine.num_unfinished_requests == 0
    assert core.kv_cache_manager.num_free_blocks == core.kv_cache_manager.num_blocks
    core.kv_cache_manager.check_invariants()
    core.step()  # takes in what may be in flight, and drops the last rows
    assert core._inflight is None and core.executor.runner.num_rows == 0
