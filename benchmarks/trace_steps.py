"""What the steps of a run take, by what is in them: where a throughput comes from.

    python benchmarks/trace_steps.py --model random:qwen2.5-1.5b --out steps.jsonl      (one GPU; about 20 seconds)

256 requests of 100 to 1024 tokens in and out, all at once (as ``pico-vllm bench run --points throughput``), and then
the same again. Each step of the second time is a line of the output: decodes, tokens of prompts, positions that its
decodes look at, and its seconds: the time between its results and those of the step before. The next step is launched
meanwhile, so that a GPU is never idle, and that is how long it was at the step.

The table adds them up by kind and number of decodes, and shows beside decode steps what the engine had measured at its
start (contexts of 512): a step that takes longer among others than alone would be seen there.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pico_vllm import LLM, SamplingParams
from pico_vllm.bench.session import open_model
from pico_vllm.bench.workloads import WorkloadRequest, uniform_lengths
from pico_vllm.engine.engine_core import EngineCore
from pico_vllm.environment import collect_environment
from pico_vllm.scheduler.step_time import StepTimeModel, attention_ratio

if TYPE_CHECKING:
    from pico_vllm.scheduler_output import ModelRunnerOutput
    from pico_vllm.worker.executor import Executor
    from pico_vllm.worker.pending_step import PendingStep

#: Decodes of a row of the table.
BUCKET = 32


@dataclass(frozen=True, slots=True)
class Step:
    """One step.

    Attributes:
        num_decodes, num_prompt_tokens: what is in it.
        num_positions: that its decodes look at, all together.
        seconds: between its results and those of the step before.
    """

    num_decodes: int
    num_prompt_tokens: int
    num_positions: int
    seconds: float


def main() -> None:
    """Run twice, write the steps of the second time, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="random:qwen2.5-1.5b", help="as of pico-vllm bench run")
    parser.add_argument("--out", type=Path, required=True, help="JSONL file to write")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--lengths", type=int, nargs=2, default=(100, 1024), help="of prompts and of outputs")
    args = parser.parse_args()
    lengths = tuple(args.lengths)
    with open_model(args.model, name=None, dtype="auto", device="auto") as model:
        llm = LLM(str(model.directory), skip_tokenizer_init=True, enable_prefix_caching=False, async_scheduling=True)
        draw = uniform_lengths(args.requests, lengths, lengths, model.config.vocab_size)
        for seed in (1, 2):
            steps = trace(llm, draw(random.Random(seed)))
        with args.out.open("w") as out:
            out.write(json.dumps({"environment": dataclasses.asdict(collect_environment())}, default=str) + "\n")
            out.writelines(json.dumps(dataclasses.asdict(step)) + "\n" for step in steps)
        print(*table(steps, alone(llm)), sep="\n")


def trace(llm: LLM, requests: Sequence[WorkloadRequest]) -> list[Step]:
    """Run all requests at once; their steps but the first, which has none before it."""
    engine, executor, steps, last = llm.engine, executor_of(llm), [], 0.0
    finish = executor.finish

    def timed_finish(pending: PendingStep) -> ModelRunnerOutput:
        nonlocal last
        result, plan = finish(pending), pending.step
        now = time.perf_counter()
        if plan.scheduled:
            decodes = plan.scheduled[: plan.num_decode_reqs]
            positions = sum(request.num_computed_tokens + 1 for request in decodes)
            steps.append(Step(len(decodes), plan.num_tokens - len(decodes), positions, now - last))
        last = now
        return result

    executor.finish = timed_finish
    try:
        for index, request in enumerate(requests):
            params = SamplingParams(temperature=0.0, max_tokens=request.max_tokens, ignore_eos=True)
            engine.add_request(str(index), request.prompt_token_ids, params)
        while engine.has_unfinished_requests():
            engine.step()
    finally:
        executor.finish = finish
    return steps[1:]


def executor_of(llm: LLM) -> Executor:
    """Of a core in this process."""
    core = llm.engine.core
    assert isinstance(core, EngineCore)
    return core.executor


def alone(llm: LLM) -> StepTimeModel | None:
    """What steps took at the start; None where none was timed."""
    measured = executor_of(llm).measured_steps
    return None if measured is None else StepTimeModel.from_measured(measured, attention_ratio(llm.engine.model_config))


def table(steps: Sequence[Step], alone: StepTimeModel | None) -> list[str]:
    """Lines: of each kind and bucket of decodes the number of steps, means, and the share of all seconds."""
    groups: defaultdict[tuple[bool, int], list[Step]] = defaultdict(list)
    for step in steps:
        groups[step.num_prompt_tokens > 0, -(-step.num_decodes // BUCKET) * BUCKET].append(step)
    total = sum(step.seconds for step in steps)
    lines = [
        f"{len(steps)} steps, {total:.3f} s",
        " decodes  steps  prompt tokens  positions a decode      ms   alone  share",
    ]
    for (has_prompts, most), group in sorted(groups.items()):
        count, seconds = len(group), sum(step.seconds for step in group)
        decodes = sum(step.num_decodes for step in group)
        positions = sum(step.num_positions for step in group) / max(1, decodes)
        predicted = "      –"
        if alone is not None and not has_prompts:
            predicted = f"{1e3 * sum(alone.decodes(step.num_decodes) for step in group) / count:7.3f}"
        tokens = sum(step.num_prompt_tokens for step in group) / count
        lines.append(
            f"{'≤' + str(most):>8}{count:7}{tokens:15.0f}{positions:20.0f}{1e3 * seconds / count:8.3f} {predicted}"
            f"{seconds / total:7.1%}"
        )
    return lines


if __name__ == "__main__":
    main()
