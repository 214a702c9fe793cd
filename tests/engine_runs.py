"""Running the engine in tests: runs with the logits of every step, and the comparisons that "equal" means.

Equal, for fp32 on a CPU: log-probabilities within 1e-4, and tokens equal up to the first position where the two best
logits lie closer than 1e-3 (rounding may then decide); the comparison says where that was.

Equal, for bf16: a setting changes the shape of a batch and so the rounding of its products, after which tokens may
part. So transformers is shown the run's own tokens, and the RMS error of each run's logits against transformers in fp32
may be at most 1.5 x that of transformers' own bf16 run; and every token is the one that the logits it was chosen from,
its seed and its position give.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pico_vllm import LLM, SamplingParams
from pico_vllm.kernels.backend import REFERENCE, recording
from pico_vllm.kernels.decode_inputs import fill_decode_inputs_reference
from pico_vllm.worker.cuda_graph import CudaGraphRunner, FillDecodeInputs, ForwardOutput, rerun
from pico_vllm.worker.mixed_inputs import MixedSize

MAX_LOGPROB_ERROR = 1e-4  # fp32: sums in another order over a few hundred terms, through a few layers
MIN_TOP2_GAP = 1e-3
MAX_BF16_ERROR_RATIO = 1.5
MIN_BF16_POSITIONS = 512


@dataclass
class Run:
    """One request's result."""

    token_ids: list[int]
    logits: torch.Tensor  # [len(token_ids), vocab_size], of the position each token was chosen at


def greedy(max_tokens: int, **overrides: Any) -> SamplingParams:
    """Greedy parameters that always give ``max_tokens`` tokens."""
    return SamplingParams(**({"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True} | overrides))


def make_llm(directory: Any, **options: Any) -> LLM:
    """A small engine on the CPU; the pool is small so that tests are quick.

    Every request computes all of its tokens: tests of the prefix cache say so.
    """
    defaults = {"device": "cpu", "dtype": "float32", "num_gpu_blocks_override": 256, "max_num_seqs": 16}
    defaults["enable_prefix_caching"] = False
    return LLM(str(directory), **(defaults | options))


def run_with_logits(
    llm: LLM,
    prompts: Sequence[list[int]],
    params: SamplingParams | Sequence[SamplingParams],
    *,
    order: str = "together",
) -> list[Run]:
    """Run prompts and collect, through a recording backend, the logits each token was chosen from.

    Args:
        params: of all prompts, or of each.
        order: in which the requests arrive: "together", "reversed", or "staggered" (one a step).
    """
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    arrivals = [(str(i), prompt, param) for i, (prompt, param) in enumerate(zip(prompts, each, strict=True))]
    rows: dict[str, dict[int, torch.Tensor]] = {request_id: {} for request_id, _, _ in arrivals}
    tokens: dict[str, list[int]] = {request_id: [] for request_id, _, _ in arrivals}
    if order == "reversed":
        arrivals.reverse()

    runner = llm.engine.core.executor.runner
    plain = runner.backend
    steps: list[torch.Tensor] = []

    def keep_rows(plan: Any) -> None:
        """A position that is computed again (preemption) counts as it was computed last."""
        sampling = [request for request in plan.scheduled if request.samples]
        for request, row in zip(sampling, steps.pop() if sampling else (), strict=True):
            rows[request.request_id][request.num_computed_tokens + request.num_new_tokens] = row

    runner.set_backend(recording(plain, lambda op, args, _: steps.append(args[0].clone()) if op == "greedy" else None))
    runner.step_observer = keep_rows
    try:
        while arrivals or llm.engine.has_unfinished_requests():
            for _ in range(1 if order == "staggered" else len(arrivals)):
                if arrivals:
                    llm.engine.add_request(*arrivals.pop(0))
            for delta in llm.engine.step():
                tokens[delta.request_id].extend(delta.new_token_ids)
    finally:
        runner.step_observer = None
        runner.set_backend(plain)
    return [Run(tokens[key], torch.stack([rows[key][end] for end in sorted(rows[key])])) for key in rows]


def with_graphs(llm: LLM, fill: FillDecodeInputs = fill_decode_inputs_reference) -> list[tuple[Any, ...]]:
    """Give an engine that has none its captures, with `rerun` in the place of CUDA's.

    Returns:
        What each step runs on, filled as they run: ("decode", n), ("prompt", tokens), ("mixed", tokens, decodes) or
        ("eager", tokens).
    """
    runner = llm.engine.core.executor.runner
    with torch.inference_mode():
        runner._graphs = graphs = CudaGraphRunner(
            runner._model,
            runner.kv_caches,
            block_table_rows=runner._rows.block_table_rows,
            last_token_ids=runner._rows.last_token_ids,
            max_num_seqs=llm.engine.config.scheduler.max_num_seqs,
            max_num_batched_tokens=runner.max_num_batched_tokens,
            max_model_len=llm.engine.core.limits.max_model_len,
            block_size=llm.engine.config.cache.block_size,
            fill_decode_inputs=fill,
            ring=runner._ring,
            record=rerun,
        )
    used: list[tuple[Any, ...]] = []
    decode, mixed, build = graphs.decode, graphs.mixed, runner._rows.build

    def run_mixed(size: MixedSize, *args: Any) -> ForwardOutput:
        used.append(("mixed", *size) if size.num_decodes else ("prompt", size.num_tokens))
        return mixed(size, *args)

    def run_decode(rows: np.ndarray, seq_lens: np.ndarray, *args: Any) -> ForwardOutput:
        used.append(("decode", graphs.decode_size(len(rows), int(seq_lens.max())).num_seqs))
        return decode(rows, seq_lens, *args)

    graphs.decode = run_decode
    graphs.mixed = run_mixed
    runner._rows.build = lambda step: used.append(("eager", step.num_tokens)) or build(step)
    return used


class Oracle:
    """transformers on a checkpoint, asked again and again: what it computes for the tokens that the engine chose."""

    def __init__(self, directory: Any, dtype: torch.dtype = torch.float32) -> None:
        import transformers

        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            directory, dtype=dtype, attn_implementation="eager"
        ).eval()

    def logits(self, prompts: Sequence[list[int]], runs: Sequence[Run]) -> list[torch.Tensor]:
        """[len(run.token_ids), vocab_size] of each run, at the positions its tokens were chosen at.

        One forward pass; what is shorter is padded at its end, which no position before it can see.
        """
        sequences = [prompt + run.token_ids for prompt, run in zip(prompts, runs, strict=True)]
        input_ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(s) for s in sequences], batch_first=True)
        with torch.inference_mode():
            logits = self._model(input_ids).logits
        pairs = zip(logits, prompts, sequences, strict=True)
        return [rows[len(prompt) - 1 : len(sequence) - 1] for rows, prompt, sequence in pairs]


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


def assert_bf16_error_is_bounded(
    runs: Sequence[Run], exact: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]
) -> None:
    """RMS logit error of each run, and so of all, <= 1.5 x that of transformers in bf16 on the same tokens.

    Each one: among sixteen runs, one token of one run that is rotated by the wrong angle raises the RMS of all by a
    quarter only, and its own to the triple. (Sound runs stay below 1.1 x.)

    Args:
        exact, theirs: logits of transformers in fp32 and in bf16 for the tokens of each run.
    """
    num_positions = sum(len(run.token_ids) for run in runs)
    assert num_positions >= MIN_BF16_POSITIONS, f"{num_positions} positions are too few for an RMS"
    for index, (run, truth, other) in enumerate(zip(runs, exact, theirs, strict=True)):
        ours_rms, theirs_rms = ((logits - truth).square().mean().sqrt().item() for logits in (run.logits, other))
        assert theirs_rms > 0, "nothing is compared: transformers in bf16 made no error"
        assert ours_rms <= MAX_BF16_ERROR_RATIO * theirs_rms, (
            f"run {index}: RMS logit error {ours_rms:.2e}, that of transformers in bf16 is {theirs_rms:.2e}"
        )


def assert_tokens_follow_from_logits(run: Run, params: SamplingParams) -> None:
    """Every token is what its own logits, seed and position give: no row was taken for another."""
    num_tokens = len(run.token_ids)
    if params.temperature == 0.0:
        expected = REFERENCE.greedy(run.logits)
    else:

        def rows(value: float, dtype: torch.dtype) -> torch.Tensor:
            return torch.full((num_tokens,), value, dtype=dtype)

        seeds, positions = rows(params.seed or 0, torch.int64), torch.arange(num_tokens)
        expected = REFERENCE.sample(
            run.logits,
            rows(params.temperature, torch.float32),
            rows(params.top_k, torch.int64),
            rows(params.top_p, torch.float32),
            REFERENCE.uniform(seeds, torch.zeros_like(positions), positions),
        )
    wrong = [i for i, (ours, theirs) in enumerate(zip(run.token_ids, expected.tolist(), strict=True)) if ours != theirs]
    assert not wrong, f"positions {wrong}: {[run.token_ids[i] for i in wrong]} do not follow from the logits there"
