"""The number of KV blocks, by hand, and what is said when they cannot be had."""

import pytest
import torch

from pico_vllm.config import CacheConfig, ModelConfig
from pico_vllm.errors import ConfigError
from pico_vllm.worker import kv_cache_memory
from pico_vllm.worker.kv_cache_memory import allocate_kv_caches, block_bytes, resolve_num_blocks
from pico_vllm.worker.memory_budget import MemoryBudget

CPU = torch.device("cpu")
GIB = 1 << 30
# 3 layers, 2 KV heads of 8: a token costs 2 * 2 * 8 = 32 numbers a layer.
MODEL = ModelConfig("LlamaForCausalLM", 64, 32, 48, 3, 4, 2, 8, 128)
# Qwen2.5-1.5B: 28 layers, 2 KV heads of 128.
QWEN2_5_1_5B = ModelConfig("Qwen2ForCausalLM", 151936, 1536, 8960, 28, 12, 2, 128, 32768)


def resolve(max_useful_blocks=10**9, dtype=torch.float32, memory=None, **cache):
    return resolve_num_blocks(
        CacheConfig(**cache), MODEL, dtype=dtype, max_useful_blocks=max_useful_blocks, memory=memory
    )


@pytest.mark.parametrize(
    ("model", "block_size", "dtype", "expected"),
    [
        (MODEL, 16, torch.float32, 3 * 16 * 32 * 4),
        (MODEL, 1, torch.float32, 384),
        (MODEL, 16, torch.bfloat16, 3072),
        (QWEN2_5_1_5B, 16, torch.bfloat16, 458752),
        (QWEN2_5_1_5B, 16, torch.float16, 458752),
    ],
)
def test_bytes_of_a_block(model, block_size, dtype, expected):
    assert block_bytes(model, block_size, dtype) == expected


def test_the_tensors_take_the_bytes_that_were_counted():
    caches = allocate_kv_caches(MODEL, num_blocks=5, block_size=4, dtype=torch.bfloat16, device=CPU)
    assert [tuple(cache.shape) for cache in caches] == [(5, 2, 2, 4, 8)] * 3
    assert {cache.dtype for cache in caches} == {torch.bfloat16}
    assert sum(cache.nbytes for cache in caches) == 5 * block_bytes(MODEL, 4, torch.bfloat16)
    assert len({cache.data_ptr() for cache in caches}) == 3


@pytest.mark.parametrize(
    ("budget", "expected"), [(6144, 1), (12287, 1), (12288, 2), (61440, 10), (61440 + 6143, 10), (10 * GIB, 1747626)]
)
def test_a_budget_is_filled_with_whole_blocks(budget, expected):
    assert resolve(kv_cache_memory_bytes=budget) == expected


@pytest.mark.parametrize("budget", [1, 6143])
def test_a_budget_below_one_block_is_refused_with_both_numbers(budget):
    with pytest.raises(ConfigError) as error:
        resolve(kv_cache_memory_bytes=budget)
    message = str(error.value)
    assert f"{budget:,} bytes" in message and "6,144 bytes a block of 16 tokens" in message
    assert "kv_cache_memory_bytes" in message


def test_the_override_wins_over_every_budget_and_bound():
    assert resolve(num_gpu_blocks_override=7) == 7
    assert resolve(num_gpu_blocks_override=7, kv_cache_memory_bytes=1) == 7
    assert resolve(max_useful_blocks=3, num_gpu_blocks_override=7, kv_cache_memory_bytes=GIB) == 7


def test_no_more_blocks_than_can_ever_be_used():
    assert resolve(max_useful_blocks=9, kv_cache_memory_bytes=61440) == 9
    assert resolve(max_useful_blocks=10, kv_cache_memory_bytes=61440) == 10
    assert resolve(max_useful_blocks=11, kv_cache_memory_bytes=61440) == 10


@pytest.mark.parametrize(
    ("available", "budget"), [(4 * GIB, GIB), (8 * GIB, 2 * GIB), (16 * GIB, 4 * GIB), (1024 * GIB, 4 * GIB)]
)
def test_a_cpu_gives_a_quarter_of_its_free_memory_and_at_most_4_gib(monkeypatch, available, budget):
    monkeypatch.setattr(kv_cache_memory, "_available_memory_bytes", lambda: available)
    assert resolve() == budget // 6144


def test_a_machine_without_free_memory_is_refused(monkeypatch):
    monkeypatch.setattr(kv_cache_memory, "_available_memory_bytes", lambda: 6144 * 4 - 1)
    with pytest.raises(ConfigError, match="holds no block"):
        resolve()


def memory_of_a_gpu(kv_cache):
    nothing = dict.fromkeys(("weights", "other", "activations", "graphs", "tables", "margin"), 0)
    return MemoryBudget(total=100 * GIB, usable=90 * GIB, kv_cache=kv_cache, **nothing)


def test_a_gpu_gives_what_was_measured_to_be_left():
    assert resolve(memory=memory_of_a_gpu(10 * 6144 + 6143)) == 10
    assert resolve(memory=memory_of_a_gpu(10 * 6144), max_useful_blocks=3) == 3
    assert resolve(memory=memory_of_a_gpu(10 * 6144), num_gpu_blocks_override=70) == 70
    with pytest.raises(ConfigError, match="budget of 6,143 bytes holds no block"):
        resolve(memory=memory_of_a_gpu(6143))


@pytest.mark.parametrize(
    "error", [RuntimeError("DefaultCPUAllocator: can't allocate\nmore"), torch.OutOfMemoryError("CUDA out of memory")]
)
def test_an_allocation_that_fails_is_a_config_error_in_one_line(monkeypatch, error):
    def refuse(*args, **kwargs):
        raise error

    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(ConfigError) as caught:
        allocate_kv_caches(MODEL, num_blocks=1000, block_size=16, dtype=torch.float32, device=CPU)
    message = str(caught.value)
    assert "6,144,000 bytes for 1000 KV blocks on cpu" in message and str(error).splitlines()[0] in message
    assert "num_gpu_blocks_override" in message and "\n" not in message


def test_more_memory_than_there_is_address_space_for_is_a_config_error():
    with pytest.raises(ConfigError, match="cannot allocate"):
        allocate_kv_caches(MODEL, num_blocks=2**45, block_size=16, dtype=torch.float32, device=CPU)
