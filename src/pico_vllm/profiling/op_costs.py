"""What a call of an op can't do without: bytes and FLOPs by the shapes of its arguments and the plan of the step.

The formulas are those of ``bench.kernel_cases``. Lengths of sequences come from the scheduler's plan: reading them on
the device would make the host wait. None = nobody has worked it out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pico_vllm.bench.kernel_cases.attention import attention_cost
from pico_vllm.bench.kernel_cases.case import Cost
from pico_vllm.bench.kernel_cases.linear import gated_linear_cost, linear_cost
from pico_vllm.bench.kernel_cases.rotary_and_store import rotary_and_store_cost
from pico_vllm.bench.kernel_cases.sampling import (
    apply_bitmask_cost,
    apply_penalties_cost,
    greedy_cost,
    logprobs_cost,
    sample_cost,
)
from pico_vllm.bench.kernel_cases.tokens import add_rms_norm_cost, embedding_cost, rms_norm_cost

if TYPE_CHECKING:
    import torch

    from pico_vllm.bench.work import ModelWork
    from pico_vllm.scheduler_output import SchedulerOutput

_Arguments = tuple[Any, ...]


def op_label(name: str, args: _Arguments) -> str:
    """What an op is called in tables: a product with the shape of its weight, since no two of them take as long.

    In ASCII: the profiler drops ranges of other names.
    """
    if name in ("linear", "partial_linear"):
        return f"{name} {args[1].in_features} x {args[1].out_features}"
    if name == "gated_linear":
        return f"{name} {args[1].in_features} x 2 x {args[1].out_features // 2}"
    return name


def op_cost(name: str, args: _Arguments, plan: SchedulerOutput) -> Cost | None:
    """Of one call.

    Args:
        name: field of ``KernelBackend``.
        args: of the call.
        plan: of the step that it belongs to.
    """
    formula = _FORMULAS.get(name)
    return None if formula is None else formula(args, plan)


def step_cost(work: ModelWork, plan: SchedulerOutput) -> Cost:
    """Of a whole step: all weights once, the keys and values of every context, those of new tokens written."""
    read = written = flops = 0
    for request in plan.scheduled:
        num_new, num_old = request.num_new_tokens, request.num_computed_tokens
        pairs = num_new * num_old + num_new * (num_new + 1) // 2
        read += num_old + num_new
        written += num_new
        flops += 2 * (num_new * work.layer_weights + request.samples * work.head_weights)
        flops += 4 * pairs * work.attention_width
    return Cost(work.weight_bytes + read * work.kv_bytes, written * work.kv_bytes, flops)


# ---------------------------------------------------------------------------------------------------------- private
def _linear(args: _Arguments, plan: SchedulerOutput) -> Cost:
    x, weight = args[:2]
    return linear_cost(x.shape[0], weight.in_features, weight.out_features, weight.bias is not None, x.itemsize)


def _gated_linear(args: _Arguments, plan: SchedulerOutput) -> Cost:
    x, weight = args[:2]
    return gated_linear_cost(x.shape[0], weight.in_features, weight.out_features // 2, x.itemsize)


def _embedding(args: _Arguments, plan: SchedulerOutput) -> Cost:
    ids, weight = args[:2]
    return embedding_cost(ids.shape[0], weight.shape[1], weight.itemsize)


def _rms_norm(args: _Arguments, plan: SchedulerOutput) -> Cost:
    x = args[0]
    return rms_norm_cost(x.numel() // x.shape[-1], x.shape[-1], x.itemsize)


def _add_rms_norm(args: _Arguments, plan: SchedulerOutput) -> Cost:
    residual = args[1]
    return add_rms_norm_cost(residual.shape[0], residual.shape[1], residual.itemsize)


def _rotary_and_store(args: _Arguments, plan: SchedulerOutput) -> Cost:
    heads, _, kv_cache, _, num_heads = args[:5]
    return rotary_and_store_cost(heads.shape[0], num_heads, kv_cache.shape[2], kv_cache.shape[4], heads.itemsize)


def _paged_attention(args: _Arguments, plan: SchedulerOutput) -> Cost | None:
    query, kv_cache = args[:2]
    return _attention(query.shape[0], query.shape[1], kv_cache, plan)


def _rotary_decode_attention(args: _Arguments, plan: SchedulerOutput) -> Cost | None:
    """Heads, cos and sin, slots and cached keys and values in; new keys and values and a vector a query head out."""
    heads, _, kv_cache, _, num_heads = args[:5]
    attention = _attention(heads.shape[0], num_heads, kv_cache, plan)
    if attention is None:
        return None
    num_tokens, _, head_dim = heads.shape
    rotary = _rotary_and_store(args, plan)
    queries = num_tokens * num_heads * head_dim * heads.itemsize
    new_keys_and_values = 2 * num_tokens * kv_cache.shape[2] * head_dim * heads.itemsize
    return Cost(
        rotary.bytes_read + attention.bytes_read - queries - new_keys_and_values,  # these are among the heads
        new_keys_and_values + attention.bytes_written,
        rotary.flops + attention.flops,
    )


def _attention(num_queries: int, num_heads: int, kv_cache: torch.Tensor, plan: SchedulerOutput) -> Cost | None:
    """Every token of the step attends, or in the last layer the sampled ones alone; None if it is something else."""
    if num_queries == plan.num_tokens:
        lens = [(r.num_new_tokens, r.num_computed_tokens + r.num_new_tokens) for r in plan.scheduled]
    else:
        lens = [(1, r.num_computed_tokens + r.num_new_tokens) for r in plan.scheduled if r.samples]
        if num_queries != len(lens) or any(r.prompt_targets for r in plan.scheduled):
            return None
    costs = [
        attention_cost(
            1,
            query_len,
            seq_len,
            num_heads=num_heads,
            num_kv_heads=kv_cache.shape[2],
            head_dim=kv_cache.shape[4],
            element_bytes=kv_cache.itemsize,
        )
        for query_len, seq_len in lens
    ]
    read, written = sum(cost.bytes_read for cost in costs), sum(cost.bytes_written for cost in costs)
    return Cost(read, written, sum(cost.flops for cost in costs))


def _of_logits(formula: Callable[[int, int, int], Cost]) -> Callable[[_Arguments, SchedulerOutput], Cost]:
    def cost(args: _Arguments, plan: SchedulerOutput) -> Cost:
        return formula(args[0].shape[0], args[0].shape[1], args[0].itemsize)

    return cost


_FORMULAS: dict[str, Callable[[_Arguments, SchedulerOutput], Cost | None]] = {
    "embedding": _embedding,
    "linear": _linear,
    "partial_linear": _linear,
    "gated_linear": _gated_linear,
    "rms_norm": _rms_norm,
    "add_rms_norm": _add_rms_norm,
    "rotary_embedding_and_store_kv": _rotary_and_store,
    "paged_attention": _paged_attention,
    "rotary_decode_attention": _rotary_decode_attention,
    "greedy": _of_logits(greedy_cost),
    "sample": _of_logits(sample_cost),
    "logprobs": lambda args, plan: logprobs_cost(args[0].shape[0], args[0].shape[1], args[2], args[0].itemsize),
    "apply_penalties": lambda args, plan: apply_penalties_cost(*args[0].shape),
    "apply_bitmask": lambda args, plan: apply_bitmask_cost(*args[0].shape),
}
