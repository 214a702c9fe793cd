"""The published models, by the numbers of their config.json: read, named and computed as transformers does.

Names and shapes are compared at full size, on transformers' models without memory. Logits are compared on two layers of
random weights with the real hidden size, heads, head_dim, rotary embedding and ties; only the vocabulary and the
feed-forward are smaller. A new model adds a row.
"""

import json
import tempfile
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file

import tiny_models
from engine_runs import assert_close_logprobs, assert_same_tokens, greedy, make_llm, run_with_logits
from pico_vllm.config import ModelConfig
from pico_vllm.layers.rotary_embedding import inverse_frequencies
from pico_vllm.models.registry import model_class
from pico_vllm.models.weights import TensorSpec

QWEN2_5 = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "model_type": "qwen2",
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
LLAMA_3_2 = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 128256,
}
SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "initializer_range": 0.041666666666666664,
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "model_type": "llama",
    "pad_token_id": 2,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 49152,
}


def size(hidden, ffn, layers, heads, kv_heads):
    return {
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }


#: config.json of each model (the instruction-tuned ones where there are two), and its number of parameters.
MODELS = {
    "qwen2.5-0.5b": (QWEN2_5 | size(896, 4864, 24, 14, 2), 494_032_768),
    "qwen2.5-1.5b": (QWEN2_5 | size(1536, 8960, 28, 12, 2), 1_543_714_304),
    "qwen2.5-7b": (
        QWEN2_5 | size(3584, 18944, 28, 28, 4) | {"tie_word_embeddings": False, "vocab_size": 152064},
        7_615_616_512,
    ),
    "qwen3-0.6b": (QWEN3 | size(1024, 3072, 28, 16, 8), 596_049_920),
    "qwen3-1.7b": (QWEN3 | size(2048, 6144, 28, 16, 8), 1_720_574_976),
    "qwen3-8b": (
        QWEN3 | size(4096, 12288, 36, 32, 8) | {"tie_word_embeddings": False, "max_window_layers": 36},
        8_190_735_360,
    ),
    "llama-3.2-1b": (LLAMA_3_2 | size(2048, 8192, 16, 32, 8) | {"head_dim": 64}, 1_235_814_400),
    "llama-3.2-3b": (LLAMA_3_2 | size(3072, 8192, 28, 24, 8) | {"head_dim": 128}, 3_212_749_824),
    "smollm2-135m": (SMOLLM2 | size(576, 1536, 30, 9, 3), 134_515_008),
    "smollm2-360m": (SMOLLM2 | size(960, 2560, 32, 15, 5), 361_821_120),
    "smollm2-1.7b": (SMOLLM2 | size(2048, 8192, 24, 32, 32) | {"rope_theta": 130000}, 1_711_376_384),
}
SMALL_VOCAB, SMALL_FFN, SMALL_NUM_LAYERS = 509, 188, 2
PROMPT_LENGTH, NUM_DECODE_STEPS = 20, 4


@pytest.fixture(params=MODELS)
def config(request):
    return MODELS[request.param][0]


def transformers_config(config):
    return transformers.AutoConfig.for_model(**config)


def transformers_model_on_meta(config):
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(transformers_config(config))


def checkpoint_shapes(config):
    """Name and shape of every tensor that the engine wants of a checkpoint."""
    shapes = {}
    for spec in model_class(config.architecture).parameter_specs(config):
        if isinstance(spec, TensorSpec):
            shapes[spec.source] = spec.shape
        elif spec.tied_to is None:
            for source, rows in zip(spec.sources, spec.out_features, strict=True):
                shapes[f"{source}.weight"] = (rows, spec.in_features)
                if spec.bias:
                    shapes[f"{source}.bias"] = (rows,)
    return shapes


# ------------------------------------------------------------------------------------------------------- the numbers
def test_the_configuration_is_what_transformers_reads(config):
    ours, theirs = ModelConfig.from_hf_config(config), transformers_config(config)
    for name in (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "max_position_embeddings",
        "rms_norm_eps",
        "tie_word_embeddings",
        "bos_token_id",
    ):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.architecture == theirs.architectures[0]
    assert list(ours.eos_token_ids) == (
        theirs.eos_token_id if isinstance(theirs.eos_token_id, list) else [theirs.eos_token_id]
    )
    assert f"torch.{ours.dtype}" == str(theirs.dtype)
    # Where the configuration names no head_dim, transformers' attention takes the quotient.
    assert ours.head_dim == getattr(theirs, "head_dim", theirs.hidden_size // theirs.num_attention_heads)
    for name, value in theirs.rope_parameters.items():
        assert getattr(ours.rope, {"rope_theta": "theta"}.get(name, name)) == value, name


def test_the_configuration_that_transformers_writes_reads_the_same(config):
    written = json.loads(transformers_config(config).to_json_string())
    assert ModelConfig.from_hf_config(written) == ModelConfig.from_hf_config(config)


def test_the_rotary_frequencies_are_those_of_the_model_in_transformers(config):
    ours = ModelConfig.from_hf_config(config)
    inv_freq, factor = inverse_frequencies(ours.rope, ours.head_dim)
    layer = type(transformers_model_on_meta(config).model.rotary_emb)(transformers_config(config))
    # Two powers in another order of roundings: a few units in the last place.
    torch.testing.assert_close(inv_freq, layer.inv_freq, rtol=1e-6, atol=0)
    assert factor == layer.attention_scaling == 1.0


@pytest.mark.parametrize("name", MODELS)
def test_weight_names_and_shapes_are_those_of_transformers_at_full_size(name):
    config, num_parameters = MODELS[name]
    model = transformers_model_on_meta(config)
    theirs = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if config["tie_word_embeddings"]:
        assert model.lm_head.weight is model.model.embed_tokens.weight
        del theirs["lm_head.weight"]  # the same matrix once more: not wanted, and not saved
    assert checkpoint_shapes(ModelConfig.from_hf_config(config)) == theirs
    assert sum(torch.Size(shape).numel() for shape in theirs.values()) == num_parameters, "the numbers above are wrong"


# -------------------------------------------------------------------------------------------------------- the logits
@pytest.fixture
def checkpoint(config):
    """Two layers in float32; removed at once, for eleven of them are a gigabyte."""
    small = config | {
        "vocab_size": SMALL_VOCAB,
        "intermediate_size": SMALL_FFN,
        "num_hidden_layers": SMALL_NUM_LAYERS,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 1,
        "torch_dtype": "float32",
    }
    with tempfile.TemporaryDirectory(prefix="pico-vllm-test-") as directory:
        save_random_checkpoint(small, Path(directory))
        yield Path(directory)


def save_random_checkpoint(config, directory):
    """Names and shapes are transformers'; no weight, bias or norm is near a value that would hide it."""
    shapes = {name: tensor.shape for name, tensor in transformers_model_on_meta(config).state_dict().items()}
    if config["tie_word_embeddings"]:
        del shapes["lm_head.weight"]
    generator = torch.Generator().manual_seed(5)
    tensors = {}
    for name, shape in shapes.items():
        values = torch.empty(shape).normal_(generator=generator)
        # A matrix multiplies the RMS of its input by 1.5: queries, keys and logits are neither flat nor saturated.
        tensors[name] = (
            values.mul_(0.2).add_(1)
            if "norm" in name
            else values.mul_(1.5 * shape[-1] ** -0.5 if values.ndim == 2 else 1)
        )
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config))


def test_logits_equal_transformers_in_prefill_and_decode(checkpoint):
    llm = make_llm(checkpoint, skip_tokenizer_init=True, max_model_len=64, num_gpu_blocks_override=4)
    generator = torch.Generator().manual_seed(11)
    prompt = torch.randint(2, SMALL_VOCAB, (PROMPT_LENGTH,), generator=generator).tolist()
    (run,) = run_with_logits(llm, [prompt], greedy(1 + NUM_DECODE_STEPS))
    del llm
    theirs = tiny_models.hf_logits(checkpoint, prompt + run.token_ids)[PROMPT_LENGTH - 1 : -1]
    assert_close_logprobs(run.logits, theirs)
    assert_same_tokens(run.token_ids, theirs.argmax(-1).tolist(), theirs)
