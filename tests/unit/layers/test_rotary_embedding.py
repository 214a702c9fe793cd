"""Rotary angles: hand-made numbers at positions 0 and 1, and transformers' own frequencies for every scaling."""

import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from pico_vllm.config import RopeConfig
from pico_vllm.layers.rotary_embedding import RotaryEmbedding, inverse_frequencies

CPU = torch.device("cpu")
# Two powers in another order of roundings: a few units in the last place of fp32.
MAX_RELATIVE_ERROR = 1e-6

SCALINGS = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "default-large-theta": {"rope_type": "default", "rope_theta": 1000000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3.1": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "llama3-other-factors": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 32.0,
        "low_freq_factor": 2.0,
        "high_freq_factor": 16.0,
        "original_max_position_embeddings": 1024,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 1000000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32768,
    },
    "yarn-betas": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 16.0,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "original_max_position_embeddings": 2048,
    },
    "yarn-attention-factor": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 2.0,
        "attention_factor": 1.5,
        "original_max_position_embeddings": 4096,
    },
    "yarn-factor-1": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 1.0,
        "original_max_position_embeddings": 4096,
    },
    # So short a trained context that the ramp starts below dimension 0.
    "yarn-short": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64},
}


def hf_config(parameters, head_dim):
    return LlamaConfig(
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        head_dim=head_dim,
        max_position_embeddings=131072,
        rope_parameters=dict(parameters),
    )


def ours(parameters, head_dim):
    rope = RopeConfig.from_hf_config({"rope_parameters": parameters, "max_position_embeddings": 131072})
    return inverse_frequencies(rope, head_dim)


def theirs(parameters, head_dim):
    """The layer takes them from transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS."""
    layer = LlamaRotaryEmbedding(hf_config(parameters, head_dim))
    return layer.inv_freq, layer.attention_scaling


@pytest.mark.parametrize("head_dim", [8, 64, 96, 128])
@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_and_attention_factor_equal_those_of_transformers(name, head_dim):
    (inv_freq, factor), (expected, expected_factor) = ours(SCALINGS[name], head_dim), theirs(SCALINGS[name], head_dim)
    assert inv_freq.dtype == torch.float32 and inv_freq.shape == (head_dim // 2,)
    torch.testing.assert_close(inv_freq, expected, rtol=MAX_RELATIVE_ERROR, atol=0)
    assert factor == pytest.approx(expected_factor, rel=1e-12)


def test_every_scaling_differs_from_every_other():
    """Or a scaling could be ignored and no test would fail; only a yarn of factor 1 scales nothing."""
    tables = {
        name: torch.cat([ours(scaling, 64)[0], torch.tensor([ours(scaling, 64)[1]])])
        for name, scaling in SCALINGS.items()
    }
    del tables["yarn-factor-1"]
    names = list(tables)
    for i, name in enumerate(names):
        for other in names[:i]:
            assert not torch.allclose(tables[name], tables[other], rtol=1e-3), (name, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", SCALINGS)
def test_the_table_equals_the_rotary_layer_of_transformers(name, dtype):
    rope = RopeConfig.from_hf_config({"rope_parameters": SCALINGS[name], "max_position_embeddings": 131072})
    positions = torch.tensor([0, 1, 2, 63, 64, 1000, 4095], dtype=torch.int32)
    rows = RotaryEmbedding(rope, 64, 4096, dtype, CPU)(positions)
    layer = LlamaRotaryEmbedding(hf_config(SCALINGS[name], 64))
    cos, sin = layer(torch.empty(0, dtype=dtype), positions[None].long())  # [1, num_tokens, 64], halves repeated
    assert rows.dtype == dtype and rows.shape == (7, 64)
    # yarn's frequencies differ in their last bit, 6e-8, times position 4095: that may turn one rounding of a 1 … 2.
    tolerance = {torch.float32: 3e-4, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
    torch.testing.assert_close(rows[:, :32], cos[0, :, :32], rtol=0, atol=tolerance)
    torch.testing.assert_close(rows[:, 32:], sin[0, :, :32], rtol=0, atol=tolerance)


def test_positions_0_and_1_have_the_hand_made_angles():
    table = RotaryEmbedding(RopeConfig(theta=10000.0), 4, 2, torch.float32, CPU).cos_sin
    assert table[0].tolist() == [1.0, 1.0, 0.0, 0.0]
    # Frequencies 10000^0 = 1 and 10000^(-2/4) = 0.01.
    assert table[1].tolist() == pytest.approx([0.5403023, 0.9999500, 0.8414710, 0.0099998], abs=1e-7)


def test_linear_scaling_divides_every_frequency():
    assert ours({"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}, 4)[0].tolist() == pytest.approx(
        [0.25, 0.0025]
    )


def test_llama3_keeps_fast_blends_middle_and_stretches_slow_frequencies():
    """Frequencies 1, 0.01, 0.0001 turn 159.2, 1.592 and 0.0159 times in 1000 positions; bounds: 1 and 4 turns."""
    rope = RopeConfig(10000.0, "llama3", 8.0, 1000, low_freq_factor=1.0, high_freq_factor=4.0)
    frequencies = inverse_frequencies(rope, 4)[0].tolist()
    smooth = (10 / (2 * math.pi) - 1) / 3
    assert frequencies == pytest.approx([1.0, 0.01 * (smooth + (1 - smooth) / 8)], rel=1e-6)
    assert frequencies[1] == pytest.approx(0.00297535, rel=1e-5)
    slow = RopeConfig(10000.0**2, "llama3", 8.0, 1000, low_freq_factor=1.0, high_freq_factor=4.0)
    assert inverse_frequencies(slow, 4)[0].tolist() == pytest.approx([1.0, 0.0001 / 8])


def test_yarn_scales_cos_and_sin_by_its_attention_factor():
    yarn = RopeConfig(10000.0, "yarn", 4.0, 4096)
    assert inverse_frequencies(yarn, 64)[1] == pytest.approx(1.1386294361)  # 0.1 ln 4 + 1
    row = RotaryEmbedding(yarn, 64, 1, torch.float32, CPU).cos_sin[0]
    assert row.tolist() == pytest.approx([1.1386294] * 32 + [0.0] * 32)


def test_rows_come_in_the_order_of_the_positions_and_may_repeat():
    rotary = RotaryEmbedding(RopeConfig(), 8, 100, torch.float32, CPU)
    positions = torch.tensor([99, 0, 7, 7], dtype=torch.int32)
    assert torch.equal(rotary(positions), rotary.cos_sin[[99, 0, 7, 7]])
    assert rotary(positions[:0]).shape == (0, 8)
