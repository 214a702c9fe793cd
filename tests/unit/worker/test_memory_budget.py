"""What a GPU's memory is divided into, by hand, and how it is read off the device."""

import pytest
import torch

from pico_vllm.errors import ConfigError
from pico_vllm.worker.memory_budget import (
    MARGIN_BYTES,
    MIN_GRAPH_BYTES,
    CudaMemoryMeter,
    graph_bytes,
    plan_memory,
    table_bytes,
)

GIB, MIB = 1 << 30, 1 << 20


def plan(**changes):
    gib = {"total": 100, "in_use": 12, "weights": 10, "activations": 3, "graphs": 2, "tables": 1} | changes
    utilization = gib.pop("utilization", 0.9)
    return plan_memory(utilization=utilization, **{name: int(size * GIB) for name, size in gib.items()})


def test_the_kv_cache_gets_what_nothing_else_needs():
    budget = plan()
    assert MARGIN_BYTES == 256 * MIB
    assert budget.kv_cache == 90 * GIB - (12 + 3 + 2 + 1) * GIB - 256 * MIB
    assert (budget.weights, budget.other) == (10 * GIB, 2 * GIB)
    parts = (budget.weights, budget.other, budget.activations, budget.graphs, budget.tables, budget.margin)
    assert sum(parts) + budget.kv_cache == budget.usable == 90 * GIB


@pytest.mark.parametrize("name", ["in_use", "activations", "graphs", "tables"])
def test_whatever_needs_a_gib_more_costs_the_kv_cache_a_gib(name):
    usual = {"in_use": 12, "activations": 3, "graphs": 2, "tables": 1}[name]
    assert plan().kv_cache - plan(**{name: usual + 1}).kv_cache == GIB


def test_the_line_that_is_logged_names_every_part():
    assert str(plan()) == (
        "90.00 of 100.00 GiB: weights 10.00, other 2.00, activations 3.00, graphs 2.00, tables 1.00, margin 0.25, "
        "KV cache 71.75"
    )


@pytest.mark.parametrize("changes", [{"in_use": 85}, {"activations": 75}, {"utilization": 0.18}, {"in_use": 99}])
def test_nothing_left_is_refused_with_numbers_and_remedies(changes):
    with pytest.raises(ConfigError) as error:
        plan(**changes)
    message = str(error.value)
    remedies = ("max_num_batched_tokens", "max_num_seqs", "gpu_memory_utilization", "enforce_eager=True")
    assert all(remedy in message for remedy in remedies)
    assert "of 100.00 GiB" in message and "weights 10.00" in message and "KV cache 0.00" in message


def test_what_is_missing_is_named():
    with pytest.raises(ConfigError, match=r"left for the KV cache, 1\.25 GiB are missing"):
        plan(in_use=85)


def test_a_byte_is_enough_here_and_none_is_not():
    assert (
        plan_memory(
            total=MARGIN_BYTES + 8, utilization=1.0, in_use=3, weights=3, activations=2, graphs=1, tables=1
        ).kv_cache
        == 1
    )
    with pytest.raises(ConfigError):
        plan_memory(total=MARGIN_BYTES + 8, utilization=1.0, in_use=3, weights=3, activations=2, graphs=1, tables=2)


def test_tables_of_qwen2_5_and_256_rows():
    assert table_bytes(256, 151_936) == 350_060_544  # 9 bytes a row and token


def test_all_captures_take_the_pools_of_the_largest_and_nodes_of_their_own():
    # 100 MiB for the largest decode, 40 for the largest prompt, 3 for one more; 33 in all.
    used = [1000 * MIB, 1100 * MIB, 1140 * MIB, 1143 * MIB]
    assert graph_bytes(used, 33) == 140 * MIB + 31 * 3 * MIB
    assert graph_bytes(used, 3) == 143 * MIB


def test_captures_that_seem_to_take_nothing_are_counted_all_the_same():
    used = [1000 * MIB, 1100 * MIB, 1140 * MIB, 1140 * MIB]
    assert graph_bytes(used, 33) == 140 * MIB + 31 * MIN_GRAPH_BYTES
    assert graph_bytes([10 * MIB, 9 * MIB, 8 * MIB, 8 * MIB], 3) == MIN_GRAPH_BYTES  # another process gave some back


def test_the_meter_reads_the_whole_device_and_the_peak_of_this_process(monkeypatch):
    calls = []
    state = {"free": 60, "reserved": 25, "max_reserved": 35}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (state["free"], 100))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: state["reserved"])
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: state["max_reserved"])
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append("wait"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: calls.append("reset"))
    meter = CudaMemoryMeter(torch.device("cuda", 0))
    assert (meter.total, calls) == (100, [])
    assert (meter.used(), calls) == (40, ["wait", "empty"])
    calls.clear()
    meter.reset_peak()
    assert calls == ["empty", "reset"]
    calls.clear()
    assert (meter.peak(), calls) == (40 + 10, ["wait"])
