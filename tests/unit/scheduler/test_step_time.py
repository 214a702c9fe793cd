"""Predicted step times and the chunks that fit them, by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pico_vllm.config import ModelConfig
from pico_vllm.scheduler.step_time import MIN_CHUNK_TOKENS, StepTimeModel, TargetITL, attention_ratio
from pico_vllm.scheduler_output import MeasuredSteps

# 1 ms a token; 10 positions to look at cost as much as its products.
MODEL = StepTimeModel(((1, 2.0), (8, 9.0), (16, 13.0)), seconds_per_token=1.0, attention_ratio=0.1)
FREE_ATTENTION = StepTimeModel(((4, 2.0),), seconds_per_token=0.5, attention_ratio=0.0)


@pytest.mark.parametrize(
    ("num_seqs", "seconds"),
    [(1, 2.0), (2, 3.0), (7, 8.0), (8, 9.0), (9, 9.5), (15, 12.5), (16, 13.0), (17, 13.5), (32, 21.0)],
)
def test_decodes_lie_on_the_lines_between_what_was_measured_and_past_it(num_seqs, seconds):
    assert MODEL.decodes(num_seqs) == seconds


@pytest.mark.parametrize("num_seqs", [1, 4, 100])
def test_a_single_measured_size_stands_for_all(num_seqs):
    assert FREE_ATTENTION.decodes(num_seqs) == 2.0


@pytest.mark.parametrize(
    ("num_tokens", "context", "seconds"),
    [
        (10, 0, 10 * 1.5),  # looks at 5 positions on average
        (10, 10, 10 * 2.5),
        (1, 0, 1.05),
        (20, 90, 20 * 11.0),
    ],
)
def test_a_chunk_costs_its_products_and_what_it_looks_at(num_tokens, context, seconds):
    assert MODEL.chunk(num_tokens, context) == pytest.approx(seconds, rel=1e-12)
    assert MODEL.chunk_tokens(seconds, context) == num_tokens
    assert MODEL.chunk_tokens(seconds * 0.999, context) == num_tokens - 1


@pytest.mark.parametrize(("seconds", "num_tokens"), [(-1.0, 0), (0.0, 0), (0.4, 0), (0.5, 1), (7.4, 14), (50.0, 100)])
def test_without_attention_tokens_are_seconds_over_the_cost_of_one(seconds, num_tokens):
    assert FREE_ATTENTION.chunk_tokens(seconds, 12345) == num_tokens


@given(
    per_token=st.floats(1e-8, 1e-2),
    ratio=st.floats(0, 1e-2),
    seconds=st.floats(1e-4, 10),
    context=st.integers(0, 10**6),
)
def test_the_chunk_is_the_largest_that_keeps_within_the_seconds(per_token, ratio, seconds, context):
    model = StepTimeModel(((1, 0.0),), per_token, ratio)
    num_tokens = model.chunk_tokens(seconds, context)
    assert model.chunk(num_tokens, context) <= seconds * (1 + 1e-6)
    assert model.chunk(num_tokens + 1, context) > seconds * (1 - 1e-6)


def test_attention_is_taken_out_of_the_measured_prompt():
    measured = MeasuredSteps(decode_s=((1, 2.0), (8, 9.0)), prompt_tokens=20, prompt_s=40.0)
    model = StepTimeModel.from_measured(measured, attention_ratio=0.1)
    assert model.seconds_per_token == 1.0  # 20 tokens that looked at 10 positions each: twice their products
    assert model.chunk(20, 0) == 40.0


def test_noise_never_makes_more_sequences_cheaper():
    measured = MeasuredSteps(decode_s=((1, 2.0), (8, 1.5), (16, 3.0)), prompt_tokens=1, prompt_s=1.0)
    assert StepTimeModel.from_measured(measured, 0.0).decode_s == ((1, 2.0), (8, 2.0), (16, 3.0))


def test_a_step_of_milliseconds_stays_one():
    measured = MeasuredSteps(decode_s=((1, 0.002), (8, 0.003)), prompt_tokens=1, prompt_s=1.0)
    assert StepTimeModel.from_measured(measured, 0.0).decode_s == ((1, 0.002), (8, 0.003))


def test_prompts_share_the_seconds_that_decodes_leave():
    allowance = TargetITL(102.0, FREE_ATTENTION, min_chunk_tokens=3).allowance(4)
    assert allowance.tokens(0) == 200
    allowance.take(150, 0)
    assert allowance.tokens(0) == 50
    allowance.take(49, 0)
    assert allowance.tokens(0) == 1
    allowance.take(1, 0)
    assert allowance.tokens(0) == 0


def test_prompts_together_get_a_few_tokens_in_any_case():
    allowance = TargetITL(1.0, FREE_ATTENTION).allowance(4)  # the decodes alone take 2 s
    assert allowance.tokens(0) == allowance.tokens(10**6) == MIN_CHUNK_TOKENS == 64
    allowance.take(60, 0)
    assert allowance.tokens(0) == 4
    allowance.take(4, 0)
    assert allowance.tokens(0) == 0


def test_attention_to_8192_positions_costs_as_much_as_all_products_of_qwen2_5_1_5b():
    qwen = ModelConfig("Qwen2ForCausalLM", 151936, 1536, 8960, 28, 12, 2, 128, 32768)
    # A layer: 1536 * 2048 (qkv) + 1536 * 1536 (o) + 3 * 1536 * 8960 = 46,792,704 weights; 12 * 128 = 1536 numbers.
    assert attention_ratio(qwen) == 2 * 2 * 1536 / 46_792_704
    assert 8192 * attention_ratio(qwen) == pytest.approx(1.08, abs=0.01)


def test_a_target_may_grow_with_what_the_decodes_take():
    target = TargetITL(102.0, FREE_ATTENTION, num_decode_steps=3.0)  # 4 decodes take 2 s, a token half a second
    assert target.allowance(4).tokens(0) == 200
    assert TargetITL(5.0, FREE_ATTENTION, num_decode_steps=60.0, min_chunk_tokens=1).allowance(4).tokens(0) == 236


@pytest.mark.parametrize(
    "num_tokens, room, expected",
    [
        (8, 120, 120),  # 128 exactly
        (8, 119, 119),  # nothing fits below
        (8, 300, 248),  # 256
        (64, 560, 448),  # 512
        (64, 100, 64),  # 128 leaves the least chunk exactly
        (250, 260, 260),  # 256 would leave 6 tokens
        (300, 900, 900),  # no size is as large: 512 leaves 212
        (8, 5, 5),
    ],
)
def test_a_step_is_cut_where_it_is_not_padded(num_tokens, room, expected):
    sizes = (128, 256, 512) if num_tokens != 300 else (128, 256)
    assert TargetITL(1.0, FREE_ATTENTION, step_sizes=sizes).without_padding(num_tokens, room) == expected


def test_without_captures_nothing_is_cut_short():
    assert TargetITL(1.0, FREE_ATTENTION).without_padding(8, 300) == 300
