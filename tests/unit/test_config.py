"""Configuration: what a checkpoint says is understood or refused by name, user options are checked to the bound."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
import transformers

from pico_vllm.config import (
    BLOCK_SIZES,
    SUPPORTED_ARCHITECTURES,
    EngineConfig,
    LaunchedRank,
    ModelConfig,
    RopeConfig,
    SchedulerConfig,
    cache_dir,
    launched_rank,
    triton_is_interpreted,
)
from pico_vllm.errors import ConfigError

# As published: the fields of config.json that say how the model computes.
LLAMA_3_2_1B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
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
QWEN2_5_1_5B = {
    "architectures": ["Qwen2ForCausalLM"],
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "model_type": "qwen2",
    "num_attention_heads": 12,
    "num_hidden_layers": 28,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_0_6B = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def refusal(config, generation=None):
    with pytest.raises(ConfigError) as error:
        ModelConfig.from_hf_config(config, generation)
    return str(error.value)


# ------------------------------------------------------------------------------------------------------ the model
def test_llama_3_2_is_read_as_published():
    assert ModelConfig.from_hf_config(LLAMA_3_2_1B) == ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope=RopeConfig(500000.0, "llama3", 32.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0),
        tie_word_embeddings=True,
        dtype="bfloat16",
        bos_token_id=128000,
        eos_token_ids=(128001, 128008, 128009),
    )


def test_qwen2_5_is_read_as_published():
    assert ModelConfig.from_hf_config(QWEN2_5_1_5B) == ModelConfig(
        architecture="Qwen2ForCausalLM",
        vocab_size=151936,
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        head_dim=128,
        max_position_embeddings=32768,
        rms_norm_eps=1e-6,
        rope=RopeConfig(theta=1000000.0),
        tie_word_embeddings=True,
        qkv_bias=True,
        dtype="bfloat16",
        bos_token_id=151643,
        eos_token_ids=(151645,),
    )


def test_qwen3_is_read_as_published_with_a_head_dim_of_its_own():
    assert ModelConfig.from_hf_config(QWEN3_0_6B) == ModelConfig(
        architecture="Qwen3ForCausalLM",
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,  # not 1024 / 16
        max_position_embeddings=40960,
        rms_norm_eps=1e-6,
        rope=RopeConfig(theta=1000000.0),
        tie_word_embeddings=True,
        dtype="bfloat16",
        bos_token_id=151643,
        eos_token_ids=(151645,),
    )


@pytest.mark.parametrize(
    ("hf_class", "config"),
    [("LlamaConfig", LLAMA_3_2_1B), ("Qwen2Config", QWEN2_5_1_5B), ("Qwen3Config", QWEN3_0_6B)],
    ids=["llama", "qwen2", "qwen3"],
)
def test_the_old_spelling_and_what_transformers_writes_of_it_are_the_same(hf_class, config):
    hf_config = getattr(transformers, hf_class)(**config)
    for written in (hf_config.to_dict(), json.loads(hf_config.to_json_string())):
        assert "rope_parameters" in written and "rope_theta" not in written, "nothing new is tested"
        assert ModelConfig.from_hf_config(written) == ModelConfig.from_hf_config(config)


@pytest.mark.parametrize(
    ("hf_class", "architecture"), [("LlamaConfig", "Llama"), ("Qwen2Config", "Qwen2"), ("Qwen3Config", "Qwen3")]
)
def test_the_defaults_are_those_of_transformers(hf_class, architecture):
    """A field that an old exporter left out means what transformers takes it for."""
    hf_config = getattr(transformers, hf_class)()
    full = hf_config.to_dict() | {"architectures": [f"{architecture}ForCausalLM"]}
    optional = {"num_key_value_heads", "head_dim", "rms_norm_eps", "rope_parameters", "tie_word_embeddings"}
    optional |= {"attention_bias", "mlp_bias", "hidden_act", "use_sliding_window"}
    short = {name: value for name, value in full.items() if name not in optional}
    assert ModelConfig.from_hf_config(short) == ModelConfig.from_hf_config(full)


@pytest.mark.parametrize(
    ("config", "qkv", "output", "mlp"),
    [(LLAMA_3_2_1B, True, True, True), (QWEN2_5_1_5B, True, False, False), (QWEN3_0_6B, True, True, False)],
    ids=["llama", "qwen2", "qwen3"],
)
def test_biases_are_where_transformers_has_them(config, qkv, output, mlp):
    """Llama asks both fields, Qwen3 one of them, and Qwen2 none: its q, k and v have biases and nothing else has."""
    found = ModelConfig.from_hf_config(config | {"attention_bias": True, "mlp_bias": True})
    assert (found.qkv_bias, found.attention_output_bias, found.mlp_bias) == (qkv, output, mlp)


@pytest.mark.parametrize(("in_config", "ids"), [(None, ()), (7, (7,)), ([7], (7,)), ([7, 0, 9], (7, 0, 9)), ([], ())])
def test_eos_ids_are_none_one_or_several(in_config, ids):
    assert ModelConfig.from_hf_config(QWEN2_5_1_5B | {"eos_token_id": in_config}).eos_token_ids == ids


@pytest.mark.parametrize(
    ("generation", "ids"),
    [
        ({"eos_token_id": [151645, 151643]}, (151645, 151643)),
        ({"eos_token_id": 0}, (0,)),
        ({"eos_token_id": None}, (151645,)),
        ({}, (151645,)),
        (None, (151645,)),
    ],
)
def test_the_eos_ids_of_generation_config_win(generation, ids):
    assert ModelConfig.from_hf_config(QWEN2_5_1_5B, generation).eos_token_ids == ids


@pytest.mark.parametrize("eos", ["</s>", [2, "</s>"], True, 2.0, {"id": 2}])
def test_eos_ids_of_another_type_are_refused(eos):
    assert "eos_token_id" in refusal(LLAMA_3_2_1B | {"eos_token_id": eos})


def test_sampling_defaults_are_taken_only_where_sampling_is_asked_for():
    asked = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}
    assert ModelConfig.from_hf_config(QWEN2_5_1_5B, asked).default_sampling == {
        "temperature": 0.7,
        "top_k": 20,
        "top_p": 0.8,
        "repetition_penalty": 1.05,
    }
    assert ModelConfig.from_hf_config(QWEN2_5_1_5B, asked | {"top_p": None}).default_sampling.keys() == {
        "temperature",
        "top_k",
        "repetition_penalty",
    }
    assert ModelConfig.from_hf_config(QWEN2_5_1_5B, asked | {"do_sample": False}).default_sampling == {}


@pytest.mark.parametrize(
    ("fields", "dtype"),
    [
        ({"dtype": "float16"}, "float16"),
        ({"torch_dtype": "torch.float16"}, "float16"),
        ({"dtype": "float32", "torch_dtype": "bfloat16"}, "float32"),
        ({}, "float32"),
    ],
)
def test_the_checkpoint_dtype_is_found_under_both_names(fields, dtype):
    config = {name: value for name, value in LLAMA_3_2_1B.items() if name != "torch_dtype"}
    assert ModelConfig.from_hf_config(config | fields).dtype == dtype


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, ["MixtralForCausalLM", ", ".join(SUPPORTED_ARCHITECTURES)]),
        ({"architectures": None, "model_type": "gpt2"}, ["gpt2", "LlamaForCausalLM"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "'gelu'", "silu"]),
        ({"quantization_config": {"quant_method": "awq"}}, ["quantised", "'awq'", "bf16, fp16 or fp32"]),
        ({"quantization_config": {"bits": 4}}, ["quantised", "'unknown'"]),
        ({"use_sliding_window": True}, ["sliding-window", "use_sliding_window"]),
        ({"torch_dtype": "float8_e4m3fn"}, ["float8_e4m3fn", "bfloat16, float16, float32"]),
        ({"num_key_value_heads": 5}, ["num_attention_heads=32", "num_key_value_heads=5"]),
        ({"num_key_value_heads": 64}, ["num_attention_heads=32", "num_key_value_heads=64"]),
        ({"head_dim": 63}, ["head_dim=63", "even"]),
        ({"head_dim": None, "hidden_size": 32 * 63}, ["head_dim=63", "even"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor"]),
    ],
)
def test_what_is_not_implemented_is_refused_with_the_value_and_what_is(fields, words):
    message = refusal(LLAMA_3_2_1B | fields)
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    "key",
    [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
    ],
)
@pytest.mark.parametrize("value", [0, -1, 2.0, "8", True, [8]])
def test_a_size_that_is_no_positive_integer_is_refused_by_name(key, value):
    assert f"{key}={value!r}" in refusal(LLAMA_3_2_1B | {key: value})


@pytest.mark.parametrize(
    "key", ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "max_position_embeddings"]
)
def test_a_missing_size_is_refused_by_name(key):
    assert f"{key}=None" in refusal({name: value for name, value in LLAMA_3_2_1B.items() if name != key})


# ----------------------------------------------------------------------------------------------------- rope scaling
def rope(scaling, **fields):
    return ModelConfig.from_hf_config(QWEN2_5_1_5B | {"rope_scaling": scaling} | fields).rope


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        (None, RopeConfig(1000000.0)),
        ({"type": "default"}, RopeConfig(1000000.0)),
        ({"rope_type": "default"}, RopeConfig(1000000.0)),
        ({"rope_type": "default", "partial_rotary_factor": 1.0}, RopeConfig(1000000.0)),
        ({"type": "linear", "factor": 2.0}, RopeConfig(1000000.0, "linear", 2.0, 32768)),
        ({"rope_type": "linear", "type": "linear", "factor": 2}, RopeConfig(1000000.0, "linear", 2, 32768)),
        (
            {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
            RopeConfig(1000000.0, "yarn", 4.0, 32768),
        ),
        ({"type": "yarn", "factor": 4.0}, RopeConfig(1000000.0, "yarn", 4.0, 32768)),
        (
            {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.25, "beta_fast": 16, "beta_slow": 2},
            RopeConfig(1000000.0, "yarn", 4.0, 32768, beta_fast=16, beta_slow=2, attention_factor=1.25),
        ),
        (
            {"rope_type": "yarn", "factor": 4.0, "attention_factor": None, "beta_fast": None, "mscale": None},
            RopeConfig(1000000.0, "yarn", 4.0, 32768),
        ),
    ],
)
def test_rope_scaling_is_read_in_every_spelling(scaling, expected):
    assert rope(scaling) == expected


def test_rope_parameters_carry_theta_and_win_over_the_old_fields():
    new = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 3.0}
    assert rope({"type": "yarn", "factor": 8.0}, rope_parameters=new) == RopeConfig(5000.0, "linear", 3.0, 32768)


def test_theta_is_10000_where_nothing_says_otherwise():
    config = {name: value for name, value in LLAMA_3_2_1B.items() if not name.startswith("rope")}
    assert ModelConfig.from_hf_config(config).rope == RopeConfig(theta=10000.0)


@pytest.mark.parametrize(
    ("scaling", "words"),
    [
        ({"rope_type": "longrope", "factor": 4.0}, ["'longrope'", "default, linear, llama3, yarn"]),
        ({"type": "dynamic", "factor": 4.0}, ["'dynamic'", "default, linear, llama3, yarn"]),
        ({"type": "mrope", "mrope_section": [16, 24, 24]}, ["'mrope'"]),
        ({"type": "yarn", "factor": 4.0, "mscale": 0.7}, ["mscale"]),
        ({"type": "yarn", "factor": 4.0, "truncate": False}, ["truncate"]),
        ({"rope_type": "default", "mrope_section": [16, 24, 24]}, ["mrope_section"]),
        ({"type": "linear"}, ["'linear'", "factor >= 1", "None"]),
        ({"type": "linear", "factor": 0.5}, ["'linear'", "factor >= 1", "0.5"]),
        ({"type": "linear", "factor": math.nan}, ["'linear'", "factor >= 1", "nan"]),
        ({"rope_type": "default", "partial_rotary_factor": 0.25}, ["partial_rotary_factor"]),
    ],
)
def test_rope_scaling_that_is_not_implemented_is_refused_by_name(scaling, words):
    message = refusal(QWEN2_5_1_5B | {"rope_scaling": scaling})
    assert all(word in message for word in words), message


# -------------------------------------------------------------------------------------------------------- the files
def write(directory, name, content):
    (directory / name).write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")


def test_a_directory_is_read_with_its_generation_config(tmp_path):
    write(tmp_path, "config.json", QWEN2_5_1_5B)
    assert ModelConfig.from_directory(tmp_path) == ModelConfig.from_hf_config(QWEN2_5_1_5B)
    generation = {"eos_token_id": [1, 2], "do_sample": True, "temperature": 0.5}
    write(tmp_path, "generation_config.json", generation)
    assert ModelConfig.from_directory(tmp_path) == ModelConfig.from_hf_config(QWEN2_5_1_5B, generation)


def test_a_missing_config_is_refused_by_path_and_says_what_belongs_there(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json does not exist.*safetensors"):
        ModelConfig.from_directory(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "is not valid JSON"),
        ('{"vocab_size": 32', "is not valid JSON"),
        ("[1, 2]", "holds a list, not a JSON object"),
        ("null", "holds a NoneType, not a JSON object"),
        ("\udcff", "is not valid JSON"),
    ],
)
def test_a_corrupt_file_is_refused_by_path(tmp_path, name, content, words):
    write(tmp_path, "config.json", QWEN2_5_1_5B)
    (tmp_path / name).write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError) as error:
        ModelConfig.from_directory(tmp_path)
    assert str(tmp_path / name) in str(error.value) and words in str(error.value)


@pytest.mark.parametrize(
    "fields",
    [
        {"rms_norm_eps": "small"},
        {"rms_norm_eps": None},
        {"rope_theta": "big"},
        {"rope_scaling": "yarn"},
        {"rope_scaling": {"type": "linear", "factor": "2"}},
        {"quantization_config": "awq"},
        {"architectures": 3},
        {"architectures": "Qwen2ForCausalLM"},
        {"rms_norm_eps": float("nan")},
        {"rms_norm_eps": -1.0},
        {"rope_theta": 0},
        {"rope_theta": -5.0},
        {"tie_word_embeddings": "false"},
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0}},
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
    ],
)
def test_a_value_of_the_wrong_type_is_a_config_error_that_names_the_file(tmp_path, fields):
    write(tmp_path, "config.json", QWEN2_5_1_5B | fields)
    with pytest.raises(ConfigError) as error:
        ModelConfig.from_directory(tmp_path)
    assert str(tmp_path / "config.json") in str(error.value)


# ------------------------------------------------------------------------------------------------------- the engine
def test_flat_options_land_in_their_groups():
    config = EngineConfig.from_options(
        model=Path("some/dir"),
        tokenizer="other",
        dtype="float16",
        seed=7,
        block_size=32,
        num_gpu_blocks_override=5,
        max_num_seqs=3,
        max_model_len=100,
        enable_chunked_prefill=False,
        tensor_parallel_size=1,
    )
    assert (config.model, config.tokenizer, config.dtype, config.seed) == (str(Path("some/dir")), "other", "float16", 7)
    assert (config.cache.block_size, config.cache.num_gpu_blocks_override) == (32, 5)
    assert (config.scheduler.max_num_seqs, config.scheduler.max_model_len) == (3, 100)
    assert config.scheduler.enable_chunked_prefill is False


def test_no_options_are_the_defaults():
    assert EngineConfig.from_options() == EngineConfig()
    assert EngineConfig().model is None


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("blok_size", ["'blok_size'", "did you mean 'block_size'?"]),
        ("max_num_seq", ["'max_num_seq'", "did you mean 'max_num_seqs'?"]),
        ("max_model_length", ["did you mean 'max_model_len'?"]),
        ("Dtype", ["did you mean 'dtype'?"]),
        ("xyzzy", ["'xyzzy'", "known: ", "block_size", "max_num_batched_tokens", "tensor_parallel_size"]),
        ("cache", ["'cache'"]),  # a group is no option
    ],
)
def test_an_unknown_option_is_refused_and_the_nearest_named(option, words):
    with pytest.raises(ConfigError) as error:
        EngineConfig.from_options(**{option: 1})
    assert all(word in str(error.value) for word in words), error.value


BAD_OPTIONS = {
    "block_size": [0, 3, -16, 512, 16.0, True, "16", None, [16]],
    "num_gpu_blocks_override": [0, -1, 1.0, True, "1"],
    "kv_cache_memory_bytes": [0, -1, 1e9, True],
    "gpu_memory_utilization": [0, -0.1, 1.01, math.nan, math.inf, "0.9", None, True],
    "enable_prefix_caching": [1, "no", None],
    "max_num_seqs": [0, -1, 1.0, None, True],
    "max_num_batched_tokens": [0, -1, 1.0, True],
    "target_itl_ms": [-1, -0.001, math.nan, math.inf, -math.inf, 1_000_001, 10**400, "5", True, [5]],
    "max_model_len": [0, -1, 1, 2.0, True, "2", 2**31],
    "enable_chunked_prefill": [1, "no", None],
    "async_scheduling": [1, 0, "no"],
    "async_tensor_parallel": [1, 0, "yes"],
    "tensor_parallel_size": [0, -1, 1.0, True, "1", None, 1025],
    "skip_tokenizer_init": [1, "no", None],
    "engine_core_process": [1, "no", None],
    "enforce_eager": [1, "no", None],
    "dtype": ["float64", "", None, 16],
    "load_format": ["pickle", "", None],
    "backend": ["cuda", "", None],
    "device": ["gpu", "", "cuda:", "cuda:x", "cuda:-1", "cpu:0", "cpu:", "auto:0", "cuda:0 ", "cuda:²", None, 0],
    "seed": [-1, 2**63, 1.0, True, None, "1"],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in BAD_OPTIONS.items() for value in values], ids=str
)
def test_an_option_out_of_range_is_refused_with_its_name_and_value(name, value):
    with pytest.raises(ConfigError) as error:
        EngineConfig.from_options(**{name: value})
    assert f"{name}={value!r}" in str(error.value)


GOOD_OPTIONS = {
    "block_size": BLOCK_SIZES,
    "num_gpu_blocks_override": [None, 1],
    "kv_cache_memory_bytes": [None, 1],
    "gpu_memory_utilization": [1e-9, 1.0, 1],
    "max_num_seqs": [1],
    "max_num_batched_tokens": [None, 1],
    "target_itl_ms": [None, 0, 0.0, 1e-9, 5, 7.5, 1_000_000],
    "max_model_len": [None, 2, 2**31 - 1],
    "async_scheduling": [None, True, False],
    "async_tensor_parallel": [None, True, False],
    "dtype": ["auto", "bfloat16", "float16", "float32"],
    "load_format": ["auto", "dummy"],
    "backend": ["auto", "cpu", "reference"],
    "device": ["auto", "cpu", "cuda", "cuda:0", "cuda:15"],
    "seed": [0, 2**63 - 1],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in GOOD_OPTIONS.items() for value in values], ids=str
)
def test_an_option_at_its_bound_is_kept(name, value):
    config = EngineConfig.from_options(**{name: value})
    holder = next(part for part in (config, config.cache, config.scheduler, config.parallel) if hasattr(part, name))
    assert getattr(holder, name) == value


def test_every_option_has_its_bounds_in_these_tables():
    config = EngineConfig()
    names = {
        f.name for part in (config, config.cache, config.scheduler, config.parallel) for f in dataclasses.fields(part)
    }
    assert names - {"cache", "scheduler", "parallel", "model", "revision", "tokenizer"} == set(BAD_OPTIONS)


@pytest.mark.parametrize("part", ["cache", "scheduler", "parallel", None])
def test_nothing_is_written_after_construction(part):
    config = EngineConfig() if part is None else getattr(EngineConfig(), part)
    for field in dataclasses.fields(config):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(config, field.name, getattr(config, field.name))


# -------------------------------------------------------------------------------------------------- the environment
@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"PICO_VLLM_CACHE": "/a/b", "XDG_CACHE_HOME": "/x"}, "/a/b"),
        ({"PICO_VLLM_CACHE": "~/models"}, "/home/somebody/models"),
        ({"PICO_VLLM_CACHE": "", "XDG_CACHE_HOME": "/x"}, "/x/pico-vllm"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/pico-vllm"),
        ({"XDG_CACHE_HOME": "~/x"}, "/home/somebody/x/pico-vllm"),
        ({"XDG_CACHE_HOME": ""}, "/home/somebody/.cache/pico-vllm"),
        ({}, "/home/somebody/.cache/pico-vllm"),
    ],
)
def test_the_cache_directory_is_ours_then_xdgs_then_dot_cache(monkeypatch, environment, expected):
    for name in ("PICO_VLLM_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/somebody")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cache_dir() == Path(expected)


TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "node-0", "MASTER_PORT": "29500"}


def test_what_torchrun_says_is_read(monkeypatch):
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert launched_rank() == LaunchedRank(rank=3, size=8, local_rank=1, leader_host="node-0")
    monkeypatch.delenv("LOCAL_RANK")
    assert launched_rank() == LaunchedRank(rank=3, size=8, local_rank=3, leader_host="node-0")
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(ConfigError, match="'first'"):
        launched_rank()


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_without_torchrun_a_process_is_on_its_own(monkeypatch, missing):
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(missing)
    assert launched_rank() is None


def test_a_tokenizer_that_would_not_be_loaded_is_refused():
    with pytest.raises(ConfigError, match="would be ignored"):
        EngineConfig.from_options(tokenizer="somewhere", skip_tokenizer_init=True)


@pytest.mark.parametrize(
    ("value", "is_interpreted"), [(None, False), ("", False), ("0", False), ("1", True), ("true", True)]
)
def test_triton_is_interpreted_where_the_environment_says_so(monkeypatch, value, is_interpreted):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    if value is not None:
        monkeypatch.setenv("TRITON_INTERPRET", value)
    assert triton_is_interpreted() is is_interpreted


@pytest.mark.parametrize(
    ("option", "value"),
    [("max_num_seqs", 10**9), ("num_gpu_blocks_override", 2**70), ("max_num_batched_tokens", 2**31),
     ("device", "cuda:99999999999999999999")],
)  # fmt: skip
def test_an_absurd_size_is_refused_before_anything_is_allocated(option, value):
    with pytest.raises(ConfigError, match=option):
        EngineConfig.from_options(**{option: value})


def test_sampling_defaults_that_the_engine_lacks_are_named_and_wrong_ones_refused():
    generation = {"do_sample": True, "temperature": 0.7, "repetition_penalty": 1.1, "typical_p": 0.9, "eta_cutoff": 0.0}
    config = ModelConfig.from_hf_config(QWEN2_5_1_5B, generation)
    assert config.default_sampling == {"temperature": 0.7, "repetition_penalty": 1.1}
    assert config.ignored_sampling == ("typical_p=0.9",)
    with pytest.raises(ConfigError, match=r"generation_config\.json: temperature='hot'"):
        ModelConfig.from_hf_config(QWEN2_5_1_5B, {"do_sample": True, "temperature": "hot"})


def test_a_target_that_is_kept_by_cutting_prompts_is_refused_where_they_may_not_be_cut():
    with pytest.raises(ConfigError, match=r"target_itl_ms=5 .* enable_chunked_prefill=False .* leave one of them out"):
        SchedulerConfig(target_itl_ms=5, enable_chunked_prefill=False)
    assert SchedulerConfig(target_itl_ms=0, enable_chunked_prefill=False).target_itl_ms == 0


@pytest.mark.parametrize(
    ("options", "max_model_len", "fast_prompts", "expected"),
    [
        ({}, 32768, True, 16384),
        ({}, 32768, False, 2048),
        ({"max_num_batched_tokens": 100}, 32768, True, 100),
        ({"max_num_batched_tokens": 100_000}, 32768, False, 100_000),
        ({"max_num_seqs": 4}, 1000, True, 4000),  # four sequences of 1000 tokens are all there can be
        ({"max_num_seqs": 1}, 1000, False, 1000),
        ({"max_num_seqs": 4, "max_num_batched_tokens": 5000}, 1000, True, 4000),
        ({"max_num_seqs": 3000}, 1000, False, 3000),  # a decode of each
        ({"enable_chunked_prefill": False}, 8192, False, 8192),
        ({"enable_chunked_prefill": False}, 32768, True, 32768),
        ({"enable_chunked_prefill": False}, 128, True, 16384),
    ],
)
def test_the_bound_of_a_step_has_a_default_for_the_device(options, max_model_len, fast_prompts, expected):
    assert SchedulerConfig(**options).token_bound(max_model_len, fast_prompts=fast_prompts) == expected


@pytest.mark.parametrize(
    ("options", "on_gpu", "on_cpu"),
    [
        ({}, True, False),
        ({"target_itl_ms": 8}, True, True),
        ({"target_itl_ms": 0}, False, False),
        ({"enable_chunked_prefill": False}, False, False),
    ],
)
def test_who_has_a_target(options, on_gpu, on_cpu):
    config = SchedulerConfig(**options)
    assert (config.wants_step_times(on_gpu=True), config.wants_step_times(on_gpu=False)) == (on_gpu, on_cpu)


def test_the_default_target_grows_with_a_slow_model_and_a_chosen_one_does_not():
    assert SchedulerConfig().target_itl() == (0.005, 3.25)
    assert SchedulerConfig(target_itl_ms=8).target_itl() == (0.008, 0.0)
