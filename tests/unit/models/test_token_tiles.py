"""Where a step is cut: hand-counted waves."""

import pytest

from pico_vllm.models import token_tiles
from pico_vllm.models.token_tiles import MIN_TOKENS, Product

#: A layer of Qwen2.5-7B on one of two ranks: qkv, o, down, gate and up.
PRODUCTS = (Product(2304, 3584), Product(3584, 1792), Product(3584, 9472), Product(9472, 3584, is_gated=True))
ROW_BYTES = 3584 * 2
NUM_SMS = 132


def choose_cut(num_tokens, products, row_bytes, num_sms, is_replayed=True):
    return token_tiles.choose_cut(num_tokens, products, row_bytes, num_sms, is_replayed)


@pytest.mark.parametrize(
    ("product", "num_tokens", "num_waves"),
    [
        (Product(3584, 9472), 8192, 7),  # 64 x 14 tiles, 6.8 waves
        (Product(3584, 9472), 4096, 4),  # 3.4
        (Product(3584, 9472), 3584, 3),  # 2.97
        (Product(3584, 9472), 1, 1),
        (Product(9472, 3584, is_gated=True), 4096, 24),  # 32 x 99 tiles
        (Product(9472, 3584, is_gated=True), 4097, 25),
    ],
)
def test_a_product_takes_whole_waves(product, num_tokens, num_waves):
    one_wave = product.seconds(1, NUM_SMS)
    assert product.seconds(num_tokens, NUM_SMS) == pytest.approx(num_waves * one_wave)


def test_a_wave_takes_what_the_device_can_multiply():
    """132 tiles of 128 tokens and 256 outputs, 9,472 inputs each, at 700 TFLOP/s."""
    flops = 132 * 128 * 256 * 9472 * 2
    assert Product(3584, 9472).seconds(128, NUM_SMS) == pytest.approx(flops / 700e12)


def test_halves_that_need_a_wave_more_are_not_taken():
    """4,096 tokens twice are 4 + 4 waves of down, 3,584 and 4,608 no more than 8,192 at once."""
    assert choose_cut(8192, PRODUCTS, ROW_BYTES, NUM_SMS) == 3584
    assert choose_cut(2048, PRODUCTS, ROW_BYTES, NUM_SMS) == 1024


def test_what_costs_more_than_it_hides_is_not_cut():
    """1,024 tokens are one wave of o and of down; two halves are two."""
    assert choose_cut(1024, PRODUCTS, ROW_BYTES, NUM_SMS) is None
    assert choose_cut(1024, PRODUCTS, 100 * ROW_BYTES, NUM_SMS) == 512  # sums that take longer
    assert all(choose_cut(n, PRODUCTS, ROW_BYTES, NUM_SMS) is None for n in (0, 1, 127, 128))


def test_a_step_that_the_host_launches_is_cut_only_if_its_layers_take_longer_than_that():
    """Of Qwen2.5-7B 8,192 tokens take 2.8 ms a layer and 4,096 1.5; of Qwen2.5-1.5B 8,192 take 0.6."""
    small = (Product(1024, 1536), Product(1536, 768), Product(1536, 4480), Product(4480, 1536, is_gated=True))
    assert choose_cut(8192, PRODUCTS, ROW_BYTES, NUM_SMS, is_replayed=False) == 3584
    assert choose_cut(4096, PRODUCTS, ROW_BYTES, NUM_SMS, is_replayed=False) is None
    assert choose_cut(4096, PRODUCTS, ROW_BYTES, NUM_SMS, is_replayed=True) == 1792
    assert choose_cut(2048, PRODUCTS, ROW_BYTES, NUM_SMS, is_replayed=False) is None
    assert choose_cut(8192, small, 3072, NUM_SMS, is_replayed=False) is None
    assert choose_cut(8192, small, 3072, NUM_SMS, is_replayed=True) is not None


@pytest.mark.parametrize("num_tokens", [129, 1000, 2047, 5000, 8192, 16384])
def test_a_cut_leaves_each_part_a_third_or_more_in_whole_tiles(num_tokens):
    cut = choose_cut(num_tokens, PRODUCTS, 10**9, NUM_SMS)
    assert cut is not None and cut % 128 == 0
    assert num_tokens // 3 - 128 < cut < num_tokens - num_tokens // 3 + 128 and 0 < cut < num_tokens


def test_without_a_model_of_the_device_many_tokens_are_halved():
    assert choose_cut(MIN_TOKENS - 1, PRODUCTS, ROW_BYTES, None) is None
    assert choose_cut(1191, PRODUCTS, ROW_BYTES, None) == 640
