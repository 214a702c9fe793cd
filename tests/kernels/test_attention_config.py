import dataclasses

import pytest

from pico_vllm.kernels import attention_config
from pico_vllm.kernels.attention_config import (
    AttentionConfig,
    Device,
    PrefillConfig,
    choose_prefill,
    device_of,
    num_kv_splits,
    select_config,
)

H200_PROGRAMS = 4 * 132
SHARED_BYTES_OF_SM120 = 99 * 1024


@pytest.mark.parametrize(
    "num_seqs, max_seq_len, expected",
    [
        # 2 KV heads, tiles of 64 positions.
        (1, 1, 1),
        (1, 64, 1),
        (1, 65, 2),
        (1, 512, 8),  # a tile each
        (1, 8192, 128),
        (1, 32768, 264),  # 528 programs; 2 tiles each
        (64, 4096, 4),  # 512 programs
        (100, 4096, 2),
        (256, 1024, 1),  # enough groups by themselves
        (256, 32768, 1),
        (64, 1, 1),
    ],
)
def test_contexts_are_split_until_the_device_is_full_by_hand(num_seqs, max_seq_len, expected):
    assert num_kv_splits(2 * num_seqs, max_seq_len, 64, H200_PROGRAMS) == expected


@pytest.mark.parametrize("num_groups", [1, 3, 63, 100, 528, 529])
@pytest.mark.parametrize("max_seq_len", [1, 63, 64, 65, 8191, 131072])
def test_no_split_is_without_a_tile_and_splitting_makes_no_more_programs_than_wanted(num_groups, max_seq_len):
    splits = num_kv_splits(num_groups, max_seq_len, 64, H200_PROGRAMS)
    assert 1 <= splits <= -(-max_seq_len // 64)
    assert splits == 1 or num_groups * splits <= H200_PROGRAMS


def test_tuned_shapes_are_for_their_architecture_head_dim_and_element_size_only():
    tuned = select_config(90, 128, 2)
    assert tuned is attention_config._CONFIGS[90, 128, 2]
    for key in ((80, 128, 2), (90, 256, 2), (90, 128, 4)):
        assert key not in attention_config._CONFIGS
        assert select_config(*key) != tuned


@pytest.mark.parametrize("block_d", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("element_size", [2, 4])
def test_fallback_fits_the_shared_memory_of_a_consumer_gpu(block_d, element_size):
    config = select_config(0, block_d, element_size)
    row_bytes = block_d * element_size
    for prefill in (config.prefill, config.short_prefill):
        in_flight = 2 * prefill.block_n * prefill.num_stages  # K and V
        assert (prefill.block_m + in_flight) * row_bytes <= SHARED_BYTES_OF_SM120
    assert 2 * config.decode.block_n * config.decode.num_stages * row_bytes <= SHARED_BYTES_OF_SM120


def all_configs() -> list[AttentionConfig]:
    fallbacks = [select_config(0, block_d, element_size) for block_d in (16, 64, 128, 256) for element_size in (2, 4)]
    return [*attention_config._CONFIGS.values(), *fallbacks]


@pytest.mark.parametrize("config", all_configs())
def test_tiles_are_powers_of_two_that_a_matrix_product_takes(config):
    for shape in (config.decode, config.prefill, config.short_prefill):
        sizes = [value for name, value in dataclasses.asdict(shape).items() if name.startswith("block_")]
        assert sizes and all(size >= 16 and size & (size - 1) == 0 for size in sizes)
        assert shape.num_warps in (1, 2, 4, 8) and shape.num_stages >= 2


def test_large_prefill_tiles_wait_until_every_sm_has_one():
    large, small = PrefillConfig(128, 64, 8, 3), PrefillConfig(64, 64, 4, 3)
    config = dataclasses.replace(select_config(90, 128, 2), prefill=large, short_prefill=small)
    # 12 heads: 512 tokens are 48 tiles of 128 rows, 2048 tokens 192.
    assert choose_prefill(config, 12 * 512, num_sms=132) is small
    assert choose_prefill(config, 12 * 2048, num_sms=132) is large
    assert choose_prefill(config, 128 * 132, num_sms=132) is large
    assert choose_prefill(config, 128 * 132 - 1, num_sms=132) is small


def test_tensors_on_the_cpu_are_the_interpreters():
    assert device_of(None) == Device(architecture=0, num_sms=4)
