"""A real model: SmolLM2-135M-Instruct answers on the GPU as on the CPU."""

import pytest

from pico_vllm import LLM, SamplingParams
from pico_vllm.config import cache_dir
from pico_vllm.errors import PicoVLLMError
from pico_vllm.models.default_model import ensure_default_model
from pico_vllm.oracle.verify import verify

#: fp32 sums in another order over 30 layers; two tokens closer than that may change places.
MAX_LOGPROB_DIFFERENCE = 1e-3
DEVICE = "cuda"
PROMPTS = ["The capital of France is", "Write a haiku about the sea.", "1, 2, 3, 4,", "def fibonacci(n):\n"]


@pytest.fixture(scope="module")
def model():
    try:
        return str(ensure_default_model(cache_dir()))
    except PicoVLLMError as error:
        pytest.skip(f"the default model is not to be had here: {error}")


pytestmark = pytest.mark.usefixtures("exact_fp32_products")


def test_greedy_answers_are_those_of_the_cpu(model):
    params = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True, logprobs=2)
    on_gpu, on_cpu = (
        LLM(model, device=device, dtype="float32", max_model_len=512).generate(PROMPTS, params, use_tqdm=False)
        for device in (DEVICE, "cpu")
    )
    num_equal = 0
    for ours, theirs in zip(on_gpu, on_cpu, strict=True):
        ours, theirs = ours.outputs[0], theirs.outputs[0]
        for i, (token_id, expected) in enumerate(zip(ours.token_ids, theirs.token_ids, strict=True)):
            best, second = sorted((entry.logprob for entry in theirs.logprobs[i].values()), reverse=True)[:2]
            if token_id != expected:
                assert best - second < MAX_LOGPROB_DIFFERENCE, f"token {i} differs and is no near-tie"
                break
            assert abs(ours.logprobs[i][token_id].logprob - best) < MAX_LOGPROB_DIFFERENCE
            num_equal += 1
    assert num_equal >= 32, "near-ties everywhere compare nothing"


def test_every_layer_is_within_its_bound_in_bf16(model):
    llm = LLM(model, device=DEVICE, dtype="bfloat16", max_model_len=512)
    assert verify(llm.engine, prompt_lengths=(1, 15, 17, 40, 200), num_new_tokens=8).passes
