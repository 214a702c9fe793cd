"""Least bytes and FLOPs, counted by hand."""

import pytest

from pico_vllm.bench.random_model import SHAPES
from pico_vllm.bench.work import ModelWork, least_bytes, least_flops, model_work
from pico_vllm.bench.workloads import Workload, WorkloadRequest
from pico_vllm.config import ModelConfig

#: 100 weights in layers, 10 in the head, attention over 6 numbers, 4 numbers of K and V a token, 2 bytes each.
WORK = ModelWork(layer_weights=100, head_weights=10, attention_width=6, kv_width=4, element_bytes=2)


def workload(*requests, concurrency=1):
    return Workload(tuple(WorkloadRequest((1,) * n, out) for n, out in requests), concurrency)


def test_bytes_of_one_request():
    # 3 steps x 220 bytes of weights; tokens 2 and 3 read 5 + 1 and 5 + 2 cached tokens; 5 + 2 tokens are written.
    assert least_bytes(WORK, workload((5, 3))) == 3 * 220 + (6 + 7) * 8 + 7 * 8


def test_bytes_share_steps_between_requests_that_run_together():
    two = least_bytes(WORK, workload((5, 3), (5, 3), concurrency=2))
    one_by_one = least_bytes(WORK, workload((5, 3), (5, 3), concurrency=1))
    assert one_by_one - two == 3 * 220
    # 4 output tokens at concurrency 2, but the longest needs 3 steps of its own.
    uneven = least_bytes(WORK, workload((5, 3), (5, 1), concurrency=2))
    assert uneven == 3 * 220 + (6 + 7) * 8 + (7 + 5) * 8


def test_flops_of_one_request():
    # 7 tokens are computed (the last is not), the head runs for 3; 7 * 8 / 2 = 28 (query, key) pairs.
    assert least_flops(WORK, workload((5, 3))) == 2 * (7 * 100 + 3 * 10) + 4 * 28 * 6


def test_a_later_turn_reads_the_conversation():
    turns = Workload((WorkloadRequest((1,) * 5, 3), WorkloadRequest((1,) * 2, 1, follows=0)), 1)
    # The second turn's prompt is 5 + 3 + 2 = 10 tokens.
    assert least_flops(WORK, turns) - least_flops(WORK, workload((5, 3))) == 2 * (10 * 100 + 10) + 4 * 55 * 6


def test_qwen2_5_1_5b_reads_3_087_gb_a_token():
    shape = SHAPES["qwen2.5-1.5b"]
    work = model_work(
        ModelConfig.from_hf_config({"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", **shape}), 2
    )
    assert work.weight_bytes == pytest.approx(3.087e9, rel=1e-3)
    assert work.kv_bytes == 28 * 2 * 2 * 128 * 2
    assert work.attention_width == 28 * 1536
