"""Bytes and FLOPs of calls, worked out by hand for small shapes."""

import pytest
import torch

from pico_vllm.bench.kernel_cases.case import Cost
from pico_vllm.bench.work import ModelWork
from pico_vllm.kernels.linear import pack_linear_dense
from pico_vllm.profiling.op_costs import op_cost, op_label, step_cost
from pico_vllm.scheduler_output import ScheduledRequest, SchedulerOutput

BF16 = torch.bfloat16
#: [num_blocks, 2, num_kv_heads, block_size, head_dim]
KV_CACHE = torch.zeros(5, 2, 2, 16, 8, dtype=BF16)


def share(num_computed, num_new, *, samples=True, targets=()):
    return ScheduledRequest(
        f"{num_computed}", (), num_computed, num_new, (), samples, prompt_targets=targets, prompt_targets_start=0
    )


def plan(*shares):
    return SchedulerOutput(tuple(shares), 0, sum(s.num_new_tokens for s in shares))


DECODES = plan(share(9, 1), share(19, 1))
MIXED = plan(share(9, 1), share(0, 3), share(4, 2, samples=False))


def weight(out_features, in_features, bias=False):
    tensor = torch.zeros(out_features, in_features, dtype=BF16)
    return pack_linear_dense(tensor, torch.zeros(out_features, dtype=BF16) if bias else None)


def zeros(*shape):
    return torch.zeros(*shape, dtype=BF16)


def test_products_are_told_apart_by_their_weights():
    assert op_label("linear", (zeros(3, 7), weight(5, 7))) == "linear 7 x 5"
    assert op_label("gated_linear", (zeros(3, 7), weight(10, 7))) == "gated_linear 7 x 2 x 5"
    assert op_label("greedy", (zeros(3, 7),)) == "greedy"


@pytest.mark.parametrize("name", ["linear", "partial_linear"])
def test_products(name):
    cost = op_cost(name, (zeros(3, 7), weight(5, 7, bias=True)), DECODES)
    assert cost == Cost((21 + 35 + 5) * 2, 15 * 2, 2 * 3 * 7 * 5 + 15)


def test_a_gated_product():
    assert op_cost("gated_linear", (zeros(3, 7), weight(10, 7)), DECODES) == Cost(
        (21 + 70) * 2, 15 * 2, 2 * 3 * 7 * 10 + 5 * 15
    )


def test_norms_and_embedding():
    ids = torch.zeros(3, dtype=torch.int32)
    assert op_cost("embedding", (ids, zeros(100, 8)), DECODES) == Cost(3 * 4 + 48, 48, 0)
    assert op_cost("rms_norm", (zeros(3, 8), zeros(8), 1e-5), DECODES) == Cost((24 + 8) * 2, 48, 96)
    heads = (zeros(3, 2, 8), zeros(8), 1e-5)
    assert op_cost("rms_norm", heads, DECODES) == Cost((48 + 8) * 2, 96, 192)
    partial_sums = torch.zeros(4, 3, 8)
    assert op_cost("add_rms_norm", (partial_sums, zeros(3, 8), zeros(8), 1e-5), DECODES) == Cost(56 * 2, 96, 120)


def test_attention_of_decodes_reads_each_context():
    """10 and 20 positions, 2 KV heads of 8 numbers, K and V; 4 query heads."""
    cost = op_cost("paged_attention", (zeros(2, 4, 8), KV_CACHE, None, 1.0), DECODES)
    assert cost == Cost((2 * 32 + 30 * 2 * 2 * 8) * 2, 2 * 32 * 2, 4 * 30 * 32)


def test_attention_of_a_mixed_step_counts_visible_pairs():
    """A decode at 10; 3 tokens of nothing see 1 + 2 + 3; 2 tokens behind 4 see 5 + 6."""
    cost = op_cost("paged_attention", (zeros(6, 4, 8), KV_CACHE, None, 1.0), MIXED)
    assert cost is not None and cost.flops == 4 * (10 + 6 + 11) * 32
    assert cost.bytes_read == (6 * 32 + (10 + 3 + 6) * 32) * 2


def test_attention_of_the_sampled_rows_alone():
    """The last layer of the mixed step: two requests sample, each one row that sees its whole context."""
    cost = op_cost("paged_attention", (zeros(2, 4, 8), KV_CACHE, None, 1.0), MIXED)
    assert cost is not None and cost.flops == 4 * (10 + 3) * 32


def test_attention_of_other_rows_is_unknown():
    assert op_cost("paged_attention", (zeros(5, 4, 8), KV_CACHE, None, 1.0), MIXED) is None
    asked = plan(share(0, 3, targets=(5,)), share(0, 4))
    assert op_cost("paged_attention", (zeros(2, 4, 8), KV_CACHE, None, 1.0), asked) is None


def test_decodes_that_rotate_store_and_attend_at_once():
    """Of 8 heads a token (4 + 2 + 2), its cos and sin, its slot and the 28 cached positions; 2 new K and V written."""
    args = (zeros(2, 8, 8), zeros(2, 8), KV_CACHE, None, 4, 1.0, None)
    cost = op_cost("rotary_decode_attention", args, DECODES)
    rotation = 3 * 2 * 6 * 8
    assert cost == Cost((128 + 16) * 2 + 2 * 4 + 28 * 32 * 2, (2 * 32 + 2 * 32) * 2, 4 * 30 * 32 + rotation)


def test_rotation_and_store():
    args = (zeros(2, 8, 8), zeros(2, 8), KV_CACHE, None, 4)
    assert op_cost("rotary_embedding_and_store_kv", args, DECODES) == Cost((128 + 16) * 2 + 8, 256, 3 * 96)


@pytest.mark.parametrize(
    "name, args, cost",
    [
        ("greedy", (zeros(3, 10),), Cost(60, 24, 30)),
        ("sample", (zeros(3, 10), None, None, None, None), Cost(60 + 3 * 24, 24, 90)),
        ("logprobs", (zeros(3, 10), None, 2), Cost(60 + 24, 3 * 3 * 12, 120)),
        ("apply_penalties", (torch.zeros(3, 10),), Cost(30 * 9 + 36, 120, 150)),
        ("apply_bitmask", (torch.zeros(3, 10),), Cost(120 + 12, 120, 0)),
    ],
)
def test_ops_on_logits(name, args, cost):
    assert op_cost(name, args, DECODES) == cost


def test_an_op_without_a_formula_is_unknown():
    assert op_cost("copy_blocks", (), DECODES) is None


def test_a_step_reads_its_weights_once_and_every_context():
    work = ModelWork(layer_weights=100, head_weights=50, attention_width=6, kv_width=4, element_bytes=2)
    cost = step_cost(work, MIXED)
    assert cost.bytes_read == 300 + (10 + 3 + 6) * 8
    assert cost.bytes_written == 6 * 8
    assert cost.flops == 2 * (6 * 100 + 2 * 50) + 4 * (10 + 6 + 11) * 6
