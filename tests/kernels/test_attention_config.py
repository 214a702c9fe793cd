import dataclasses

import pytest
import torch

from pico_vllm.kernels import attention_config
from pico_vllm.kernels.attention_config import (
    AttentionConfig,
    DecodeConfig,
    Device,
    MergeConfig,
    PrefillConfig,
    choose_decode,
    choose_merge,
    choose_prefill,
    device_of,
    num_kv_splits,
    num_prefill_splits,
    select_config,
    takes_hopper_prefill,
)

FOUR_AN_SM = DecodeConfig(block_n=64, num_warps=4, num_stages=3, programs_per_sm=4, max_splits=264)
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
        (100, 1025, 2),
        (60, 1024, 4),
        (256, 1024, 1),  # enough groups by themselves
        (256, 32768, 1),
        (64, 1, 1),
    ],
)
def test_contexts_are_split_until_the_device_is_full_by_hand(num_seqs, max_seq_len, expected):
    assert num_kv_splits(FOUR_AN_SM, 2 * num_seqs, max_seq_len, 132) == expected


@pytest.mark.parametrize("num_groups", [1, 3, 63, 100, 528, 529])
@pytest.mark.parametrize("max_seq_len", [1, 63, 64, 65, 8191, 131072])
def test_no_split_is_without_a_tile_and_splitting_makes_no_more_programs_than_wanted(num_groups, max_seq_len):
    splits = num_kv_splits(FOUR_AN_SM, num_groups, max_seq_len, 132)
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
    for decode in (*config.decodes, *config.short_decodes):
        assert 2 * decode.block_n * decode.num_stages * row_bytes <= SHARED_BYTES_OF_SM120


def all_configs() -> list[AttentionConfig]:
    fallbacks = [select_config(0, block_d, element_size) for block_d in (16, 64, 128, 256) for element_size in (2, 4)]
    return [*attention_config._CONFIGS.values(), *fallbacks]


@pytest.mark.parametrize("config", all_configs())
def test_tiles_are_powers_of_two_that_a_matrix_product_takes(config):
    for shape in (*config.decodes, *config.short_decodes, config.prefill, config.short_prefill):
        sizes = [value for name, value in dataclasses.asdict(shape).items() if name.startswith("block_")]
        assert sizes and all(size >= 16 and size & (size - 1) == 0 for size in sizes)
        assert shape.num_warps in (1, 2, 4, 8) and shape.num_stages >= 2


def test_large_prefill_tiles_wait_until_every_sm_has_one():
    large, small = PrefillConfig(128, 64, 8, 3), PrefillConfig(64, 64, 4, 3)
    config = dataclasses.replace(select_config(90, 128, 2), prefill=large, short_prefill=small)
    # 12 heads: 512 tokens are 48 tiles of 128 rows, 2048 tokens 192.
    assert choose_prefill(config, 12 * 512, 512, num_sms=132) is small
    assert choose_prefill(config, 12 * 2048, 2048, num_sms=132) is large
    assert choose_prefill(config, 128 * 132, 512, num_sms=132) is large
    assert choose_prefill(config, 128 * 132 - 1, 512, num_sms=132) is small
    assert choose_prefill(config, 12 * 512, 8192 + 512, num_sms=132) is large  # splits make up for it


@pytest.mark.parametrize("config", all_configs())
def test_decode_shapes_are_listed_by_growing_number_of_groups_and_the_last_takes_any(config):
    for shapes in (config.decodes, config.short_decodes):
        bounds = [shape.max_groups for shape in shapes]
        assert bounds[-1] is None
        assert bounds[:-1] == sorted(set(bounds[:-1]))


def test_a_shape_is_for_its_number_of_groups_and_bound():
    few, many, short = (dataclasses.replace(FOUR_AN_SM, max_groups=n) for n in (8, None, 9))
    config = dataclasses.replace(select_config(90, 128, 2), decodes=(few, many), short_decodes=(short, many))
    assert choose_decode(config, 1, 8192) is few
    assert choose_decode(config, 8, 1025) is few
    assert choose_decode(config, 9, 1025) is many
    assert choose_decode(config, 9, 1024) is short
    assert choose_decode(config, 10, 1024) is many


def test_there_are_no_more_splits_than_a_shape_allows():
    assert num_kv_splits(dataclasses.replace(FOUR_AN_SM, max_splits=5), 2, 1024, 132) == 5
    assert num_kv_splits(dataclasses.replace(FOUR_AN_SM, max_splits=1), 2, 32768, 132) == 1


MERGES = (MergeConfig(8, 4, 128, 4), MergeConfig(2, 16, 128, 4), MergeConfig(1, 64, 32, 4))
MANY = MergeConfig(16, 2, 128, 4)
MERGING = dataclasses.replace(select_config(90, 128, 2), merges=MERGES, many_rows_merge=MANY)


@pytest.mark.parametrize(
    "num_splits, num_rows, expected",
    [
        (2, 8 * 132, MERGES[0]),
        (4, 8 * 132 - 1, MergeConfig(1, 4, 128, 4)),  # SMs would be idle
        (5, 2 * 132, MERGES[1]),
        (5, 16 * 132, MANY),
        (5, 6144, MANY),
        (17, 12, MERGES[2]),
        (65, 12, MERGES[2]),  # in several steps
    ],
)
def test_merge_loads_all_splits_at_once_if_it_can(num_splits, num_rows, expected):
    assert choose_merge(MERGING, num_splits, num_rows, num_sms=132) == expected


@pytest.mark.parametrize(
    "num_programs, max_seq_len, expected",
    [
        # 132 SMs; the rounds of programs that the busiest SM runs x the part of the context that each takes.
        (48, 512, 1),  # a split would be mostly start and end
        (768, 8192, 1),  # 6 rounds as it is
        (192, 2048, 1),
        (132, 8192, 1),  # one full round
        (140, 8192, 4),  # 2 rounds; 560 programs are 5 rounds of a quarter
        (48, 8704, 5),  # 1 round of all; 240 programs are 2 rounds of a fifth
        (96, 8704, 4),  # 384 programs are 3 rounds of a quarter
        (6, 8704, 16),
    ],
)
def test_prefill_is_split_where_that_ends_sooner_by_hand(num_programs, max_seq_len, expected):
    assert num_prefill_splits(num_programs, max_seq_len, num_sms=132) == expected


@pytest.mark.parametrize("num_programs", [1, 7, 131, 133, 5000])
@pytest.mark.parametrize("max_seq_len", [1, 511, 512, 1023, 1024, 131072])
def test_prefill_splits_are_bounded_and_long_enough(num_programs, max_seq_len):
    splits = num_prefill_splits(num_programs, max_seq_len, num_sms=132)
    assert 1 <= splits <= 16
    assert splits == 1 or max_seq_len // splits >= 512


CACHE = torch.empty(3, 2, 2, 16, 128, dtype=torch.bfloat16)
ON_H200 = select_config(90, 128, 2)


@pytest.mark.parametrize(
    "kv_cache, takes",
    [
        (CACHE, True),
        (CACHE.half(), True),
        (CACHE.float(), False),
        (CACHE[..., :64].contiguous(), True),
        (CACHE[..., :64], False),  # not contiguous
        (CACHE[:, :, :1], False),  # nor this
        (CACHE[1:], True),
        (CACHE[..., :96].contiguous(), False),
        (torch.empty(3, 2, 2, 8, 128, dtype=torch.bfloat16), False),
        (torch.empty(3, 2, 2, 48, 128, dtype=torch.bfloat16), False),
        (torch.empty(3, 2, 2, 128, 128, dtype=torch.bfloat16), True),
        (torch.empty(3, 2, 2, 256, 128, dtype=torch.bfloat16), False),
    ],
)
def test_the_kernel_for_hopper_takes_caches_it_can_copy_blocks_of(kv_cache, takes):
    assert takes_hopper_prefill(ON_H200, ON_H200.prefill, 1, Device(90, 132), kv_cache) is takes


def test_the_kernel_for_hopper_takes_large_prefills_of_its_architecture():
    h200 = Device(90, 132)
    assert takes_hopper_prefill(ON_H200, ON_H200.prefill, 1, h200, CACHE)
    assert not takes_hopper_prefill(ON_H200, ON_H200.short_prefill, 12 * 511, h200, CACHE)
    assert takes_hopper_prefill(ON_H200, ON_H200.short_prefill, 12 * 512, h200, CACHE)  # 48 tiles
    for architecture in (0, 80, 89, 100, 120):
        assert not takes_hopper_prefill(ON_H200, ON_H200.prefill, 1, Device(architecture, 132), CACHE)
    without = dataclasses.replace(ON_H200, hopper_prefill=False)
    assert not takes_hopper_prefill(without, without.prefill, 10**6, h200, CACHE)


def test_only_hopper_and_later_launch_early():
    assert [Device(architecture, 1).launches_early for architecture in (0, 80, 89, 90, 100, 120)] == [False] * 3 + [
        True
    ] * 3


def test_tensors_on_the_cpu_are_the_interpreters():
    assert device_of(None) == Device(architecture=0, num_sms=4)
