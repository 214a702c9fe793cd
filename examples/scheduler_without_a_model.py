"""Scheduler without a model: continuous batching as a table, one line a step.

The scheduler knows no tensors. It says which positions of which request to compute; whoever computes them hands the
sampled ids back. Here that is a fake model of one line, so the plan itself can be seen: a prompt cut into chunks,
decodes beside them, and, in a pool too small for everyone, a preemption. The preempted request comes back as a prompt
of all it knew, its own samples included, and nobody overtakes it meanwhile.

    python examples/scheduler_without_a_model.py
"""

from pico_vllm.kv_cache import KVCacheManager
from pico_vllm.request import Request, RequestStatus
from pico_vllm.sampling_params import SamplingParams
from pico_vllm.scheduler import Scheduler
from pico_vllm.scheduler_output import ModelRunnerOutput, ScheduledRequest, SchedulerOutput

TOKEN = 7


def fake_model(plan: SchedulerOutput) -> ModelRunnerOutput:
    """The same token for everyone whose known tokens are all computed; nothing in the middle of a prompt."""
    return ModelRunnerOutput(tuple((TOKEN,) if share.samples else () for share in plan.scheduled))


def describe(share: ScheduledRequest) -> str:
    """[start, end) of the positions that a request computes in this step."""
    start, end = share.num_computed_tokens, share.num_computed_tokens + share.num_new_tokens
    if not share.new_token_ids:
        return f"{share.request_id} decode [{start}, {end})"
    return f"{share.request_id} {'prompt' if share.samples else 'chunk'} [{start}, {end})"


def main() -> None:
    """Three requests on six blocks of four tokens, at most eight tokens a step."""
    manager = KVCacheManager(num_blocks=6, block_size=4)
    scheduler = Scheduler(kv_cache_manager=manager, max_num_seqs=3, max_num_batched_tokens=8, max_model_len=32)
    requests = {}
    for request_id, num_prompt_tokens, max_tokens in [("A", 3, 10), ("B", 10, 6), ("C", 2, 3)]:
        prompt = range(num_prompt_tokens)
        requests[request_id] = Request(request_id, prompt, SamplingParams(max_tokens=max_tokens))
        scheduler.add(requests[request_id])
        print(f"{request_id}: {num_prompt_tokens} prompt tokens, {max_tokens} to generate")

    print(f"\n{'step':<5}{'plan':<48}{'tokens':<8}{'free blocks':<13}left the running ones")
    step = 0
    while scheduler.has_unfinished_requests():
        step += 1
        plan = scheduler.schedule()
        num_free = manager.num_free_blocks
        preempted = [f"{r} preempted" for r in plan.dropped_request_ids if requests[r].status is RequestStatus.WAITING]
        outputs = scheduler.update_from_output(plan, fake_model(plan))
        finished = [f"{output.request_id} done" for output in outputs if output.finish_reason]
        manager.check_invariants()
        shares = ", ".join(map(describe, plan.scheduled))
        print(f"{step:<5}{shares:<48}{plan.num_tokens:<8}{num_free:<13}{', '.join(preempted + finished)}")

    assert all(request.status is RequestStatus.FINISHED for request in requests.values())
    print(f"\nall finished in {step} steps, {scheduler.num_preemptions} preemption(s), every block free again")


if __name__ == "__main__":
    main()
