"""The run over ops and cases: gate, missing ops, rotation. Times are never looked at."""

import dataclasses

import pytest
import torch

from pico_vllm.bench import kernels
from pico_vllm.bench.ceilings import Ceilings
from pico_vllm.bench.kernel_cases import OPS
from pico_vllm.bench.kernel_cases.case import KernelOp
from pico_vllm.bench.kernel_cases.shapes import KernelShapes
from pico_vllm.bench.kernels import bench_kernels, relative_error
from pico_vllm.errors import ConfigError
from pico_vllm.kernels.backend import CPU

DEVICE = torch.device("cpu")
CEILINGS = Ceilings(read_bytes_per_s=1e10, copy_bytes_per_s=1e10, matmul_flops_per_s=1e11)
SHAPES = KernelShapes(
    name="tiny",
    hidden_size=16,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=24,
    vocab_size=100,
    qkv_bias=False,
    num_tokens=(17,),
    linear_tokens=(5,),
    decodes=((3, 33),),
    prefills=((5, 18),),
    num_rows=(5,),
)


def run(backend=CPU, only=None, **options):
    return bench_kernels(backend, DEVICE, torch.float32, SHAPES, only, True, ceilings=CEILINGS, **options)


def test_every_op_has_a_time_and_a_baseline():
    seen = []
    rows = run(on_row=seen.append)
    assert seen == rows
    assert len(rows) == len(OPS) + 2  # linear and partial_linear have two products each
    for row in rows:
        assert (row.error, row.missing) == (None, None)
        assert row.timing is not None and row.timing.mode == "host"
        assert row.baseline_name is not None and row.baseline_s is not None
        assert row.fraction == row.floor_s / row.timing.median_s
        assert row.speedup == row.baseline_s / row.timing.median_s
        assert (row.shapes, row.backend, row.dtype, row.device) == ("tiny", "cpu", "float32", "cpu")


def test_ceilings_are_measured_if_they_are_not_given(monkeypatch):
    asked = []

    def measure(device, *, quick):
        asked.append((device, quick))
        return {key: {"median": 1.0, "best": 2.0} for key in ("read_TBps", "copy_TBps", "matmul_512_fp32_TFLOPs")}

    monkeypatch.setattr(kernels, "measure_ceilings", measure)
    (row,) = bench_kernels(CPU, DEVICE, torch.float32, SHAPES, ["add_rms_norm"], True)
    assert asked == [(DEVICE, True)]
    assert row.floor_s == row.num_bytes / 2e12  # the best: other processes use a CPU too


def test_only_the_named_ops_run():
    assert {row.op for row in run(only=["gated_linear", "greedy"])} == {"gated_linear", "greedy"}


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="no such op: softmax; there are add_rms_norm, "):
        run(only=["softmax", "greedy"])


@pytest.mark.parametrize(
    "wrong, error",
    [
        (lambda x, weight: CPU.gated_linear(x, weight) * 1.01, "relative error 0.01 > 0.0001"),
        (lambda x, weight: CPU.gated_linear(x, weight) * float("nan"), "relative error inf > 0.0001"),
        (lambda x, weight: CPU.gated_linear(x, weight)[:, :-1], "shape (5, 23), not (5, 24)"),
    ],
)
def test_a_wrong_op_gets_no_time_and_costs_no_other_its_row(wrong, error):
    rows = run(dataclasses.replace(CPU, gated_linear=wrong), only=["gated_linear", "rms_norm"])
    by_op = {row.op: row for row in rows}
    assert by_op["gated_linear"].error == error
    assert (by_op["gated_linear"].timing, by_op["gated_linear"].fraction, by_op["gated_linear"].speedup) == (
        None,
        None,
        None,
    )
    assert by_op["gated_linear"].num_bytes == (5 * 16 + 48 * 16 + 5 * 24) * 4
    assert by_op["rms_norm"].error is None


def test_a_store_that_forgets_the_last_token_is_wrong():
    def forgetful(heads, cos_sin, kv_cache, metadata, num_heads):
        before = kv_cache.clone()
        CPU.rotary_embedding_and_store_kv(heads, cos_sin, kv_cache, metadata, num_heads)
        last = int(metadata.slot_mapping[-1])
        kv_cache[last // 16, :, :, last % 16] = before[last // 16, :, :, last % 16]

    op = "rotary_embedding_and_store_kv"
    (row,) = run(dataclasses.replace(CPU, **{op: forgetful}), only=[op])
    assert row.error is not None and row.error.startswith("output 1: relative error")


def test_a_rank_that_is_off_by_one_is_wrong():
    def logprobs(*args):
        chosen, rank, best_ids, best = CPU.logprobs(*args)
        return chosen, rank + 1, best_ids, best

    (row,) = run(dataclasses.replace(CPU, logprobs=logprobs), only=["logprobs"])
    assert row.error == "output 1: 4 of 4 elements differ"


def test_an_op_that_raises_is_an_error_row():
    def greedy(logits):
        raise ValueError("not on this device\nand more")

    (row,) = run(dataclasses.replace(CPU, greedy=greedy), only=["greedy"])
    assert (row.error, row.timing) == ("ValueError: not on this device", None)


def test_an_op_that_the_backend_lacks_is_one_row_with_the_reason():
    new_op = KernelOp("fused", ("rms_norm", "norm_linear"), OPS[0].cases)
    without = dataclasses.replace(CPU, greedy=None)
    (greedy,) = run(without, only=["greedy"])
    (fused,) = run(ops=[new_op])
    assert (greedy.case, greedy.missing) == ("all", "backend cpu has no greedy")
    assert (fused.missing, fused.error) == ("backend cpu has no norm_linear", None)


def test_calls_rotate_over_more_memory_than_the_cache_holds(monkeypatch):
    monkeypatch.setattr(kernels, "cache_bytes", lambda device: 30 << 20)
    shapes = dataclasses.replace(SHAPES, num_tokens=(128,), hidden_size=8192)
    addresses = []

    def add_rms_norm(x, residual, weight, eps):
        addresses.append(x.data_ptr())
        return CPU.add_rms_norm(x, residual, weight, eps)

    backend = dataclasses.replace(CPU, add_rms_norm=add_rms_norm)
    (row,) = bench_kernels(backend, DEVICE, torch.bfloat16, shapes, ["add_rms_norm"], ceilings=CEILINGS)
    assert row.num_bytes == 128 * 8192 * 4 * 2 + 8192 * 2  # 8 MiB and a weight
    timed = addresses[1:]  # the first is the check
    num_sets = 12  # * 8 MiB = 3 * 30 MiB and more
    assert len(set(timed)) == min(num_sets, len(timed))
    assert all(timed[i] == timed[i - num_sets] for i in range(num_sets, len(timed)))  # always in the same turn
    assert row.rotated


def test_small_inputs_are_marked_as_cached():
    (row,) = run(only=["gated_linear"])
    assert not row.rotated


@pytest.mark.parametrize(
    "actual, oracle, error",
    [
        ([3.0, 4.0], [3.0, 4.0], 0.0),
        ([3.0, 4.5], [3.0, 4.0], 0.1),  # 0.5 / 5
        ([0.0], [0.0], 0.0),
        ([1.0], [0.0], float("inf")),
        ([float("nan"), 4.0], [3.0, 4.0], float("inf")),
        ([float("inf"), 4.0], [3.0, 4.0], float("inf")),
    ],
)
def test_relative_error_by_hand(actual, oracle, error):
    assert relative_error(torch.tensor(actual), torch.tensor(oracle)) == pytest.approx(error)
