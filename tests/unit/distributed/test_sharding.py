"""Who has which units, rows and heads; which sizes are refused."""

import dataclasses

import pytest

from pico_vllm.config import ModelConfig
from pico_vllm.distributed.sharding import Shard
from pico_vllm.errors import ConfigError

SMOLLM2 = ModelConfig("LlamaForCausalLM", 49152, 576, 1536, 30, 9, 3, 64, 8192, tie_word_embeddings=True)
QWEN2_5_1_5B = ModelConfig("Qwen2ForCausalLM", 151936, 1536, 8960, 28, 12, 2, 128, 32768)
QWEN2_5_7B = ModelConfig("Qwen2ForCausalLM", 152064, 3584, 18944, 28, 28, 4, 128, 32768)


@pytest.mark.parametrize(
    ("size", "num_units", "expected"),
    [
        (1, 9, [(0, 9)]),
        (3, 9, [(0, 3), (3, 6), (6, 9)]),
        (2, 2, [(0, 1), (1, 2)]),
        (4, 2, [(0, 1), (0, 1), (1, 2), (1, 2)]),  # two neighbours share a unit
        (6, 2, [(0, 1)] * 3 + [(1, 2)] * 3),
        (4, 1, [(0, 1)] * 4),
    ],
)
def test_units_are_split_evenly_or_shared_by_neighbours(size, num_units, expected):
    assert [Shard(rank, size).units(num_units) for rank in range(size)] == expected


def test_rows_are_the_units_rows():
    assert [Shard(rank, 3).rows(192, 3) for rank in range(3)] == [(0, 64), (64, 128), (128, 192)]
    assert [Shard(rank, 4).rows(128, 2) for rank in range(4)] == [(0, 64), (0, 64), (64, 128), (64, 128)]
    assert Shard().rows(128, 2) == (0, 128)


@pytest.mark.parametrize("size", [1, 2, 4, 6, 12])
def test_every_query_head_finds_its_own_kv_head_on_its_rank(size):
    """12 query heads, 2 KV heads: head h attends to KV head h // 6."""
    whole = dataclasses.replace(QWEN2_5_1_5B, vocab_size=12, intermediate_size=12)
    for rank in range(size):
        shard = Shard(rank, size)
        config = shard.model_config(whole)
        (first, end), (first_kv, end_kv) = shard.units(12), shard.units(2)
        assert (end - first, end_kv - first_kv) == (config.num_attention_heads, config.num_key_value_heads)
        group = config.num_attention_heads // config.num_key_value_heads
        assert [first_kv + h // group for h in range(end - first)] == [h // 6 for h in range(first, end)]


@pytest.mark.parametrize(
    ("config", "size", "expected"),
    [
        (SMOLLM2, 1, (9, 3, 1536)),
        (SMOLLM2, 3, (3, 1, 512)),
        (QWEN2_5_1_5B, 2, (6, 1, 4480)),
        (QWEN2_5_1_5B, 4, (3, 1, 2240)),
        (QWEN2_5_7B, 2, (14, 2, 9472)),
        (QWEN2_5_7B, 4, (7, 1, 4736)),
    ],
)
def test_the_configuration_of_a_rank(config, size, expected):
    of_rank = Shard(0, size).model_config(config)
    assert (of_rank.num_attention_heads, of_rank.num_key_value_heads, of_rank.intermediate_size) == expected
    assert of_rank == dataclasses.replace(
        config, num_attention_heads=expected[0], num_key_value_heads=expected[1], intermediate_size=expected[2]
    )


@pytest.mark.parametrize(
    ("config", "size", "reason", "legal"),
    [
        (SMOLLM2, 2, "num_attention_heads=9", "1, 3"),  # not 9: 1536 features
        (SMOLLM2, 9, "intermediate_size=1536", "1, 3"),
        (QWEN2_5_1_5B, 3, "intermediate_size=8960", "1, 2, 4"),
        (dataclasses.replace(SMOLLM2, vocab_size=49153), 3, "vocab_size=49153", "1"),
        (QWEN2_5_1_5B, 8, "num_attention_heads=12", "1, 2, 4"),
        (QWEN2_5_7B, 28, "intermediate_size=18944", "1, 2, 4"),
        (dataclasses.replace(SMOLLM2, num_attention_heads=12, num_key_value_heads=4), 6, "num_key_value_heads=4",
         "1, 2, 4, 12"),
        (SMOLLM2, 10**9, "num_attention_heads=9", "1, 3"),
    ],
)  # fmt: skip
def test_a_size_that_does_not_divide_is_refused_with_the_reason_and_the_sizes_that_do(config, size, reason, legal):
    with pytest.raises(ConfigError) as error:
        Shard(0, size).model_config(config)
    assert f"tensor_parallel_size={size} does not split this model: {reason} is n" in str(error.value)
    assert str(error.value).endswith(f"sizes that do: {legal}")
