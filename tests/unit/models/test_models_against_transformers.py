"""Every architecture and shape computes what transformers computes, through the whole engine."""

import pytest
import torch

import tiny_models
from engine_runs import assert_close_logprobs, assert_same_tokens, greedy, make_llm, run_with_logits

PROMPT_LENGTHS = (1, 15, 16, 17, 63)
NUM_TOKENS = 12
NUM_BF16_TOKENS = 104  # x 5 prompts: at least 512 positions


@pytest.fixture(scope="module", params=tiny_models.MODELS)
def checkpoint(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp(request.param)
    tiny_models.save_tiny_model(tiny_models.MODELS[request.param], directory)
    return directory


def make_prompts(lengths=PROMPT_LENGTHS):
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(2, tiny_models.VOCAB_SIZE, (n,), generator=generator).tolist() for n in lengths]


@pytest.mark.parametrize("max_num_batched_tokens", [2048, 16])
def test_logits_and_greedy_tokens_equal_transformers(checkpoint, max_num_batched_tokens):
    llm = make_llm(checkpoint, max_num_batched_tokens=max_num_batched_tokens)
    prompts = make_prompts()
    for prompt, run in zip(prompts, run_with_logits(llm, prompts, greedy(NUM_TOKENS)), strict=True):
        # transformers sees our tokens, so one near-tie does not hide what follows it.
        theirs = tiny_models.hf_logits(checkpoint, prompt + run.token_ids)[len(prompt) - 1 : -1]
        assert_close_logprobs(run.logits, theirs)
        assert_same_tokens(run.token_ids, theirs.argmax(-1).tolist(), theirs)


def test_positions_beyond_the_trained_length_of_a_scaled_rope_equal_transformers(checkpoint):
    llm = make_llm(checkpoint)
    (prompt,) = make_prompts([200])
    (run,) = run_with_logits(llm, [prompt], greedy(4))
    theirs = tiny_models.hf_logits(checkpoint, prompt + run.token_ids)[len(prompt) - 1 : -1]
    assert_close_logprobs(run.logits, theirs)


def test_bf16_logits_are_as_near_to_fp32_as_those_of_transformers(checkpoint):
    """RMS error against transformers in fp32: ours at most 1.5 x that of transformers' own bf16 run."""
    llm = make_llm(checkpoint, dtype="bfloat16")
    prompts = make_prompts()
    our_error, their_error = [], []
    for prompt, run in zip(prompts, run_with_logits(llm, prompts, greedy(NUM_BF16_TOKENS)), strict=True):
        ids, start = prompt + run.token_ids, len(prompt) - 1
        exact = tiny_models.hf_logits(checkpoint, ids)[start:-1]
        theirs = tiny_models.hf_logits(checkpoint, ids, torch.bfloat16)[start:-1]
        our_error.append((run.logits.float() - exact).square().flatten())
        their_error.append((theirs.float() - exact).square().flatten())
    ours, theirs = (torch.cat(e).mean().sqrt().item() for e in (our_error, their_error))
    assert ours <= 1.5 * theirs


def test_the_reference_backend_equals_transformers(checkpoint):
    llm = make_llm(checkpoint, backend="reference")
    (prompt,) = make_prompts([17])
    (run,) = run_with_logits(llm, [prompt], greedy(3))
    theirs = tiny_models.hf_logits(checkpoint, prompt + run.token_ids)[len(prompt) - 1 : -1]
    assert_close_logprobs(run.logits, theirs)
