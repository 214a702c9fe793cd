"""Running the engine in tests: greedy runs with the logits of every step, and the comparison that "equal" means.

Equal, for fp32 on a CPU: log-probabilities within 1e-4, and tokens equal up to the first position where the two best
logits lie closer than 1e-3 (rounding may then decide); the comparison says where that was.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from pico_vllm import LLM, SamplingParams
from pico_vllm.kernels.backend import recording

MAX_LOGPROB_ERROR = 1e-4  # fp32: sums in another order over a few hundred terms, through a few layers
MIN_TOP2_GAP = 1e-3


@dataclass
class Run:
    """One request's result."""

    token_ids: list[int]
    logits: torch.Tensor  # [len(token_ids), vocab_size], of the position each token was chosen at


def greedy(max_tokens: int, **overrides: Any) -> SamplingParams:
    """Greedy parameters that always give ``max_tokens`` tokens."""
    return SamplingParams(**({"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True} | overrides))


def make_llm(directory: Any, **options: Any) -> LLM:
    """A small engine on the CPU; the pool is small so that tests are quick."""
    defaults = {"device": "cpu", "dtype": "float32", "num_gpu_blocks_override": 256, "max_num_seqs": 16}
    return LLM(str(directory), **(defaults | options))


def run_with_logits(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[Run]:
    """Run prompts together and collect, through a recording backend, the logits each token was chosen from."""
    runner = llm.engine.core.executor.runner
    plain = runner.backend
    steps: list[torch.Tensor] = []
    runner.set_backend(recording(plain, lambda op, args, _: steps.append(args[0].clone()) if op == "greedy" else None))
    rows: dict[str, list[torch.Tensor]] = {str(i): [] for i in range(len(prompts))}
    tokens: dict[str, list[int]] = {str(i): [] for i in range(len(prompts))}
    plans: list[Any] = []
    runner.step_observer = plans.append
    try:
        for i, prompt in enumerate(prompts):
            llm.engine.add_request(str(i), prompt, params)
        while llm.engine.has_unfinished_requests():
            steps.clear()
            plans.clear()
            for delta in llm.engine.step():
                tokens[delta.request_id].extend(delta.new_token_ids)
            sampling = [request.request_id for request in plans[0].scheduled if request.samples]
            for row, request_id in enumerate(sampling):
                rows[request_id].append(steps[0][row])
    finally:
        runner.step_observer = None
        runner.set_backend(plain)
    return [Run(tokens[key], torch.stack(rows[key])) for key in rows]


def assert_same_tokens(tokens: list[int], expected: list[int], expected_logits: torch.Tensor) -> None:
    """Equal, up to the first near-tie in ``expected_logits`` [len(expected), vocab_size]."""
    assert len(tokens) == len(expected)
    for position, (ours, theirs) in enumerate(zip(tokens, expected, strict=True)):
        if ours == theirs:
            continue
        best, second = expected_logits[position].float().topk(2).values.tolist()
        assert best - second < MIN_TOP2_GAP, f"position {position}: {ours} != {theirs}, top-2 gap {best - second:.2e}"
        print(f"near-tie at position {position} (gap {best - second:.1e}): not compared from there on")
        return


def assert_close_logprobs(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """|Δ logprob| <= 1e-4 everywhere."""
    error = (ours.float().log_softmax(-1) - theirs.float().log_softmax(-1)).abs().max().item()
    assert error <= MAX_LOGPROB_ERROR, f"largest logprob error {error:.2e}"
