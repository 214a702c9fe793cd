"""Hunt a divergence: plant a fault that no reader of the output would see, let `verify` name it, bisect by swapping.

The fault is a classic: an RMSNorm that forgets its eps. Greedy tokens stay the same, so a test of tokens passes. The
oracle compares every sub-layer with transformers and names the first that differs and the op that made it. Swapping one
op at a time for its naive reference, in the running engine, then shows that this op alone is to blame.

    python examples/hunt_a_divergence.py
"""

import dataclasses
import tempfile
from pathlib import Path

import torch
import transformers
from rich.console import Console

from pico_vllm import LLM, SamplingParams
from pico_vllm.kernels.backend import REFERENCE, KernelBackend
from pico_vllm.oracle.report import render
from pico_vllm.oracle.verify import Verification, verify

#: What the others read was made by prepare_attention of the same backend: the four go together.
SWAPS = [
    ("embedding",),
    ("linear",),
    ("partial_linear",),
    ("gated_linear",),
    ("rms_norm",),
    ("add_rms_norm",),
    ("prepare_attention", "rotary_embedding_and_store_kv", "paged_attention", "rotary_decode_attention"),
]


def save_tiny_qwen2(directory: Path) -> None:
    """Two random layers, written by transformers."""
    config = transformers.Qwen2Config(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    torch.manual_seed(0)
    model = transformers.Qwen2ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape)
            parameter.copy_(1 + 0.2 * values if "norm" in name else 0.1 * values)
    model.save_pretrained(directory)


def rms_norm_without_eps(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The planted fault."""
    return weight * x * x.square().mean(-1, keepdim=True).rsqrt()


def verdict(result: Verification) -> str:
    """One line."""
    if result.failure is None:
        return "passes"
    return f"breaks at {result.failure.point.key}, made by {result.failure.point.op}"


def main() -> None:
    """Plant, look at the tokens, verify, bisect."""
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch) / "tiny-qwen2"
        save_tiny_qwen2(directory)
        # Without a prefix cache: a faulty engine must not go on from what a right one has computed.
        options = {"num_gpu_blocks_override": 64, "enable_prefix_caching": False}
        llm = LLM(str(directory), device="cpu", dtype="float32", skip_tokenizer_init=True, **options)
        runner = llm.engine.core.executor.runner
        right = runner.backend
        wrong = dataclasses.replace(right, rms_norm=rms_norm_without_eps)

        def check(backend: KernelBackend) -> Verification:
            runner.set_backend(backend)
            return verify(llm.engine, prompt_lengths=(1, 17, 40), num_new_tokens=8)

        def tokens(backend: KernelBackend) -> list[int]:
            runner.set_backend(backend)
            params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
            return llm.generate([3, 1, 4, 1, 5], params)[0].outputs[0].token_ids

        print(f"before the fault: {verdict(check(right))}")
        print(f"with the fault, greedy tokens are {'the same' if tokens(right) == tokens(wrong) else 'others'}\n")
        Console(width=100).print(render(check(wrong)))
        print("\nthe faulty engine with one op swapped for its reference:")
        for ops in SWAPS:
            swapped = dataclasses.replace(wrong, **{op: getattr(REFERENCE, op) for op in ops})
            print(f"  {' + '.join(ops):<70} {verdict(check(swapped))}")


if __name__ == "__main__":
    main()
