"""Generate: the offline API. Several prompts as one batch, greedy and sampled, and what a seed promises.

Without an argument it runs SmolLM2-135M-Instruct, fetched once.

    python examples/generate.py [MODEL_DIRECTORY]
"""

import sys

from pico_vllm import LLM, SamplingParams

PROMPTS = ["The capital of France is", "Water boils at", "Once upon a time, a small robot"]


def main() -> None:
    """Greedy, then seeded sampling in a batch and alone, then a chat."""
    llm = LLM(sys.argv[1] if len(sys.argv) > 1 else None, dtype="float32")

    print("greedy: the likeliest token, every time")
    for output in llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=12)):
        completion = output.outputs[0]
        print(f"  {output.prompt!r} → {completion.text!r} ({completion.finish_reason})")

    print("sampled: one SamplingParams a prompt, each with its seed")
    sampled = [SamplingParams(temperature=0.8, top_p=0.95, max_tokens=12, seed=seed) for seed in (1, 2, 3)]
    batch = llm.generate(PROMPTS, sampled)
    for output, params in zip(batch, sampled, strict=True):
        print(f"  seed {params.seed}: {output.prompt!r} → {output.outputs[0].text!r}")

    # A sample is drawn from a counter keyed by seed and position, not from a generator with a state: nobody's draws
    # depend on who else is in the batch. The logits could, by rounding: a product over another number of rows may sum
    # in another order. In 16 bit that is enough to change a token now and then, hence float32 above.
    (alone,) = llm.generate(PROMPTS[2], sampled[2])
    is_same = alone.outputs[0].token_ids == batch[2].outputs[0].token_ids
    print(f"  seed 3 again, alone: {'the same' if is_same else 'other'} tokens")

    messages = [{"role": "user", "content": "Name three colours."}]
    tokenizer = llm.engine.tokenizer
    assert tokenizer is not None
    prompt_ids = tokenizer.encode(tokenizer.apply_chat_template(messages), add_special_tokens=False)
    (answer,) = llm.generate(prompt_ids, SamplingParams(temperature=0, max_tokens=32))
    print(f"chat: {messages[0]['content']!r} → {answer.outputs[0].text!r} ({answer.outputs[0].finish_reason})")


if __name__ == "__main__":
    main()
