"""The real SmolLM2-135M-Instruct: our engine says what transformers says, alone, in a batch and after a restart."""

import pytest
import torch

import tiny_models
from engine_runs import assert_close_logprobs, assert_same_tokens, greedy, run_with_logits
from pico_vllm import LLM, SamplingParams
from pico_vllm.config import cache_dir
from pico_vllm.models import default_model

pytestmark = pytest.mark.model

PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Water boils at a temperature of",
    "Ein Satz auf Deutsch, 日本語 and 😀:",
]
NUM_TOKENS = 32
OPTIONS = {"device": "cpu", "num_gpu_blocks_override": 64, "max_model_len": 512}


@pytest.fixture(scope="module")
def llm(default_model_dir):
    """The default model in float32, found as a user finds it: without a name."""
    return LLM(dtype="float32", **OPTIONS)


@pytest.fixture(scope="module")
def bf16_llm(default_model_dir):
    return LLM(**OPTIONS)


@pytest.fixture(scope="module")
def runs(llm):
    """Token ids, and the engine's run, of every prompt: four in one batch."""
    ids = [llm.engine.tokenizer.encode(prompt) for prompt in PROMPTS]
    return list(zip(ids, run_with_logits(llm, ids, greedy(NUM_TOKENS)), strict=True))


@pytest.mark.parametrize("index", range(len(PROMPTS)))
def test_greedy_tokens_and_logits_equal_transformers(default_model_dir, runs, index):
    prompt, run = runs[index]
    assert len(run.token_ids) == NUM_TOKENS
    # transformers sees our tokens, so one near-tie does not hide what follows it.
    theirs = tiny_models.hf_logits(default_model_dir, prompt + run.token_ids)[len(prompt) - 1 : -1]
    assert_close_logprobs(run.logits, theirs)
    assert_same_tokens(run.token_ids, theirs.argmax(-1).tolist(), theirs)


def test_three_ranks_say_what_one_says(default_model_dir, runs):
    """9 query heads and 3 KV heads: the default model splits into three, and into nothing else."""
    llm = LLM(dtype="float32", tensor_parallel_size=3, **OPTIONS)
    try:
        split = run_with_logits(llm, [prompt for prompt, _ in runs], greedy(8))
    finally:
        llm.engine.shutdown()
    for ours, (_, whole) in zip(split, runs, strict=True):
        assert_close_logprobs(ours.logits, whole.logits[:8])
        assert_same_tokens(ours.token_ids, whole.token_ids[:8], whole.logits[:8])


def test_the_whole_path_from_text_to_text_equals_transformers(default_model_dir, llm, runs):
    """Their tokenizer, their generate and their decoding, against ours."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(default_model_dir)
    model = transformers.AutoModelForCausalLM.from_pretrained(default_model_dir, dtype=torch.float32)
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS))
    for prompt, (ids, run), output in zip(PROMPTS, runs, outputs, strict=True):
        encoded = tokenizer(prompt, return_tensors="pt")
        assert encoded["input_ids"][0].tolist() == ids
        generated = model.generate(**encoded, do_sample=False, max_new_tokens=NUM_TOKENS)[0, len(ids) :].tolist()
        token_ids = output.outputs[0].token_ids
        assert_same_tokens(token_ids, generated, run.logits[: len(generated)])
        assert output.outputs[0].text == tokenizer.decode(token_ids, skip_special_tokens=True)


def test_the_capital_of_france_is_paris(bf16_llm):
    (output,) = bf16_llm.generate("The capital of France is", SamplingParams(temperature=0.0, max_tokens=12))
    assert bf16_llm.engine.core.executor.runner.dtype == torch.bfloat16
    assert "Paris" in output.outputs[0].text


def test_a_batch_of_8_gives_what_each_prompt_gets_alone(llm, runs):
    """In float32: the matrices of a batch of 8 are summed in another order than those of one."""
    prompts = [ids[: len(ids) - cut] for cut in (0, 1) for ids, _ in runs]
    together = run_with_logits(llm, prompts, greedy(NUM_TOKENS))
    for prompt, run in zip(prompts, together, strict=True):
        (alone,) = run_with_logits(llm, [prompt], greedy(NUM_TOKENS))
        assert_same_tokens(run.token_ids, alone.token_ids, alone.logits)


def test_an_instruction_is_answered_and_ends_at_the_models_own_end(llm):
    prompt = "<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n"
    (output,) = llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=100))
    assert "4" in output.outputs[0].text
    assert output.outputs[0].finish_reason == "stop"
    assert "<|im_end|>" not in output.outputs[0].text
    assert output.outputs[0].token_ids[-1] in llm.engine.model_config.eos_token_ids


def test_a_second_start_neither_fetches_nor_converts(default_model_dir, monkeypatch):
    def forbidden(*args, **kwargs):
        raise AssertionError("made again")

    before = {path.name: path.stat().st_mtime_ns for path in default_model_dir.iterdir()}
    monkeypatch.setattr(default_model, "fetch_default_gguf", forbidden)
    monkeypatch.setattr("pico_vllm.models.gguf.convert_gguf", forbidden)
    phases = []
    llm = LLM(**OPTIONS, progress=lambda what, done, total: phases.append(what))
    assert llm.engine.source.path == default_model_dir
    assert default_model_dir.is_relative_to(cache_dir())
    assert set(phases) == {"load"}
    assert {path.name: path.stat().st_mtime_ns for path in default_model_dir.iterdir()} == before
