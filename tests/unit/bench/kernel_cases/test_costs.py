"""Bytes and operations of each op, by hand on shapes of a few elements. Elements take 2 bytes."""

import pytest

from pico_vllm.bench.ceilings import Ceilings
from pico_vllm.bench.kernel_cases import attention, linear, rotary_and_store, sampling, tokens
from pico_vllm.bench.kernel_cases.case import Cost

HEADS = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 4, "element_bytes": 2}


@pytest.mark.parametrize(
    "cost, by_hand",
    [
        # 3 ids * 4 B + 3 rows * 8 * 2 B; rows again
        (tokens.embedding_cost(3, 8, 2), Cost(60, 48, 0)),
        # (3 * 8 + 8 weights) * 2 B; 3 * 8 * 2 B; 4 * 24
        (tokens.rms_norm_cost(3, 8, 2), Cost(64, 48, 96)),
        # (2 * 3 * 8 + 8) * 2 B; 2 * 24 * 2 B; 5 * 24
        (tokens.add_rms_norm_cost(3, 8, 2), Cost(112, 96, 120)),
        # (3 * 8 + 8 * 16 + 16) * 2 B; 3 * 16 * 2 B; 2 * 3 * 8 * 16 + 3 * 16
        (linear.linear_cost(3, 8, 16, True, 2), Cost(336, 96, 816)),
        (linear.linear_cost(3, 8, 16, False, 2), Cost(304, 96, 768)),
        # (3 * 8 + 2 * 16 * 8) * 2 B; 3 * 16 * 2 B; 2 * 3 * 8 * 32 + 5 * 48
        (linear.gated_linear_cost(3, 8, 16, 2), Cost(560, 96, 1776)),
        # 3 tokens x (3 + 2 * 2 heads) x 4 = 84 numbers in and out, 12 of cos and sin, 3 slots; 60 are rotated.
        (rotary_and_store.rotary_and_store_cost(3, 3, 2, 4, 2), Cost(168 + 24 + 12, 168, 180)),
        # decode, 2 sequences of 5: q 2 * 6 * 4 * 2 B = 96, K and V 2 * 2 * 5 * 2 * 4 * 2 B = 320; 10 pairs * 4 * 24
        (attention.attention_cost(2, 1, 5, **HEADS), Cost(416, 96, 960)),
        # causal, 3 tokens: q 3 * 24 * 2 B = 144, K and V 2 * 3 * 8 * 2 B = 96; (1 + 2 + 3) pairs * 4 * 24
        (attention.attention_cost(1, 3, 3, **HEADS), Cost(240, 144, 576)),
        # 3 new on 5 cached: K and V 2 * 8 * 8 * 2 B = 256; (6 + 7 + 8) pairs * 4 * 24
        (attention.attention_cost(1, 3, 8, **HEADS), Cost(400, 144, 2016)),
        # 2 * 10 * 2 B; 2 ids * 8 B; 20 comparisons
        (sampling.greedy_cost(2, 10, 2), Cost(40, 16, 20)),
        # + temperature, top-p 4 B each, top-k, uniform 8 B each, a row; 3 * 20
        (sampling.sample_cost(2, 10, 2), Cost(88, 16, 60)),
        # + 8 B id a row; (1 + 3) * (4 + 8) B a row; 4 * 20
        (sampling.logprobs_cost(2, 10, 3, 2), Cost(56, 96, 80)),
        # 20 * (4 + 1 + 4) B + 2 * 3 * 4 B; 20 * 4 B; 5 * 20
        (sampling.apply_penalties_cost(2, 10), Cost(204, 80, 100)),
        # 2 * 40 * 4 B + 2 rows * 2 words * 4 B; 2 * 40 * 4 B
        (sampling.apply_bitmask_cost(2, 40), Cost(336, 320, 0)),
    ],
)
def test_cost_is_what_a_hand_counts(cost, by_hand):
    assert cost == by_hand


def test_the_floor_is_the_longer_of_moving_and_computing():
    ceilings = Ceilings(read_bytes_per_s=100.0, copy_bytes_per_s=50.0, matmul_flops_per_s=1000.0)
    assert Cost(95, 5, 0).floor_s(ceilings) == 1.0  # writes 5 %: the read ceiling
    assert Cost(60, 40, 0).floor_s(ceilings) == 2.0  # writes 40 %: the copy ceiling
    assert Cost(90, 10, 0).floor_s(ceilings) == 2.0  # a tenth is no longer "mostly reads"
    assert Cost(60, 40, 3000).floor_s(ceilings) == 3.0
