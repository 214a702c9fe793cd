"""GGUF files written on the spot: every type's values, names, row order, configuration, tokenizer, refusals."""

import json
import struct

import gguf
import numpy as np
import pytest
import tokenizers
import torch
from gguf import GGMLQuantizationType as Q
from safetensors.torch import load_file

from pico_vllm.errors import ConfigError, WeightLoadError
from pico_vllm.models import gguf as pico_gguf
from pico_vllm.models.checkpoint_directory import CHECKPOINT_FILES
from pico_vllm.models.gguf import GgufFile, convert_gguf, gguf_config, gguf_tokenizer_files, iter_gguf_tensors
from tiny_gguf import HEADS, KV_HEADS, VOCAB, byte_level_vocab, random_tensors, tokenizer_metadata

# ---- values of every type: blocks of random bytes against ggml's scalar code, written out here ----


def half(data):
    return struct.unpack("<e", bytes(data))[0]


def q8_0(b):
    return [half(b[:2]) * np.int8(q) for q in b[2:].view(np.int8)]


def q4_0(b):
    return [half(b[:2]) * (int(q) - 8) for q in [*(b[2:] & 15), *(b[2:] >> 4)]]


def q4_1(b):
    return [half(b[:2]) * int(q) + half(b[2:4]) for q in [*(b[4:] & 15), *(b[4:] >> 4)]]


def scale_min(j, s):
    s = [int(x) for x in s]
    if j < 4:
        return s[j] & 63, s[j + 4] & 63
    return (s[j + 4] & 15) | ((s[j - 4] >> 6) << 4), (s[j + 4] >> 4) | ((s[j] >> 6) << 4)


def q45_k(b, high):
    d, dmin, scales, qs = half(b[:2]), half(b[2:4]), b[4:16], b[-128:]
    out = []
    for j in range(8):
        scale, minimum = scale_min(j, scales)
        low = (qs[32 * (j // 2) :][:32] >> (4 * (j % 2))) & 15
        for i in range(32):
            q = int(low[i]) + (16 if high is not None and (high[i] >> j) & 1 else 0)
            out.append(d * scale * q - dmin * minimum)
    return out


def q4_k(b):
    return q45_k(b, None)


def q5_k(b):
    return q45_k(b, b[16:48])


def q6_k(b):
    scales, d = b[192:208].view(np.int8), half(b[208:])
    out = []
    for n in range(2):
        ql, qh, sc = b[64 * n :][:64], b[128 + 32 * n :][:32], scales[8 * n :][:8]
        for quarter in range(4):
            for i in range(32):
                low = (ql[i + 32 * (quarter % 2)] >> (4 * (quarter // 2))) & 15
                q = (int(low) | (((int(qh[i]) >> (2 * quarter)) & 3) << 4)) - 32
                out.append(d * int(sc[2 * quarter + i // 16]) * q)
    return out


@pytest.mark.parametrize(
    ("kind", "scalar_code", "half_offsets"),
    [
        (Q.Q8_0, q8_0, [0]),
        (Q.Q4_0, q4_0, [0]),
        (Q.Q4_1, q4_1, [0, 2]),
        (Q.Q4_K, q4_k, [0, 2]),
        (Q.Q5_K, q5_k, [0, 2]),
        (Q.Q6_K, q6_k, [208]),
    ],
    ids=lambda value: getattr(value, "name", None) or "",
)
def test_quantised_blocks_have_the_values_of_ggmls_scalar_code(make_gguf, kind, scalar_code, half_offsets):
    num_rows, num_blocks = 3, 2
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(1)
    blocks = rng.integers(0, 256, (num_rows, num_blocks, block_bytes), dtype=np.uint8)
    for offset in half_offsets:  # random bits could be inf or NaN
        scale = rng.uniform(0.01, 0.1, (num_rows, num_blocks, 1)).astype(np.float16)
        blocks[:, :, offset : offset + 2] = scale.view(np.uint8)
    data = blocks.reshape(num_rows, num_blocks * block_bytes)

    [(name, tensor)] = iter_gguf_tensors(make_gguf("qwen2", tensors={"token_embd.weight": (data, kind)}))

    assert name == "model.embed_tokens.weight"
    assert tensor.shape == (num_rows, num_blocks * block_size)
    expected = [[value for block in row for value in scalar_code(block)] for row in blocks]
    torch.testing.assert_close(tensor, torch.tensor(expected, dtype=torch.float32), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("kind", "dtype"), [(Q.F32, None), (Q.F16, torch.float16), (Q.BF16, torch.bfloat16)])
def test_float_tensors_are_exact(make_gguf, kind, dtype):
    values = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    if dtype is not None:
        values = values.to(dtype).float()
    data = gguf.quants.quantize(values.numpy(), kind)

    [(_, tensor)] = iter_gguf_tensors(make_gguf("qwen2", tensors={"token_embd.weight": (data, kind)}))

    assert tensor.dtype == torch.float32 and torch.equal(tensor, values)


@pytest.mark.parametrize("kind", [Q.Q2_K, Q.Q3_K, Q.Q5_0, Q.IQ4_XS])
def test_another_type_is_refused_with_the_tensors_and_the_types_name(make_gguf, kind):
    data = np.zeros((2, gguf.GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
    path = make_gguf("qwen2", tensors={"token_embd.weight": (data, kind)})
    with pytest.raises(WeightLoadError, match=rf"'token_embd.weight' has type {kind.name}.*Q4_K"):
        list(iter_gguf_tensors(path))


# ---- names and row order ----


def hf_permute(weight, num_heads):
    """What llama.cpp's convert_hf_to_gguf.py does to q and k of a Llama model."""
    shape = weight.shape
    return weight.reshape(num_heads, 2, shape[0] // num_heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


@pytest.mark.parametrize("bias", [False, True])
def test_llamas_row_permutation_is_undone_for_q_and_k_weights_and_biases(make_gguf, bias):
    hf = random_tensors("llama", bias=bias)
    stored = dict(hf)
    for name in hf:
        if "attn_q." in name:
            stored[name] = hf_permute(hf[name], HEADS)
        if "attn_k." in name:
            stored[name] = hf_permute(hf[name], KV_HEADS)
    assert not np.array_equal(stored["blk.0.attn_q.weight"], hf["blk.0.attn_q.weight"])

    loaded = dict(iter_gguf_tensors(make_gguf("llama", tensors=stored)))

    for part in ("q", "k", "v"):
        for suffix in ("weight", "bias") if bias else ("weight",):
            expected = torch.from_numpy(hf[f"blk.1.attn_{part}.{suffix}"])
            assert torch.equal(loaded[f"model.layers.1.self_attn.{part}_proj.{suffix}"], expected)


@pytest.mark.parametrize("arch", ["qwen2", "qwen3"])
def test_other_architectures_keep_their_row_order(make_gguf, arch):
    hf = random_tensors(arch, bias=arch == "qwen2")
    loaded = dict(iter_gguf_tensors(make_gguf(arch, tensors=hf)))
    assert torch.equal(loaded["model.layers.0.self_attn.q_proj.weight"], torch.from_numpy(hf["blk.0.attn_q.weight"]))


@pytest.mark.parametrize(
    ("arch", "options"),
    [("llama", {"tied": False}), ("llama", {"bias": True}), ("qwen2", {"bias": True}), ("qwen3", {"tied": False})],
)
def test_names_and_shapes_are_exactly_those_of_the_transformers_model(make_gguf, arch, options):
    transformers = pytest.importorskip("transformers")
    path = make_gguf(arch, **options)
    config_dict = gguf_config(path)
    config = transformers.AutoConfig.for_model(config_dict.pop("model_type"), **config_dict)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    expected = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}

    assert {name: tuple(tensor.shape) for name, tensor in iter_gguf_tensors(path)} == expected
    assert GgufFile(path).tensor_shapes() == expected


def test_an_unknown_tensor_is_refused_by_name(make_gguf):
    tensors = random_tensors("llama") | {"blk.0.ffn_gate_exps.weight": np.zeros((2, 2), np.float32)}
    with pytest.raises(WeightLoadError, match=r"blk\.0\.ffn_gate_exps\.weight"):
        list(iter_gguf_tensors(make_gguf(tensors=tensors)))


# ---- configuration ----


def test_config_says_what_the_metadata_says(make_gguf):
    assert gguf_config(make_gguf("llama")) == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": 12,
        "intermediate_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 4,
        "hidden_act": "silu",
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "attention_bias": False,
        "mlp_bias": False,
    }


def test_an_output_matrix_means_an_untied_head(make_gguf):
    assert gguf_config(make_gguf(tied=False))["tie_word_embeddings"] is False


def test_head_dim_may_differ_from_hidden_size_over_heads(make_gguf):
    lengths = {"qwen3.attention.key_length": 8, "qwen3.attention.value_length": 8}
    assert gguf_config(make_gguf("qwen3", metadata=lengths))["head_dim"] == 8


def test_several_ids_that_end_a_turn_are_all_eos(make_gguf):
    source = GgufFile(make_gguf(metadata={"tokenizer.ggml.eot_token_id": 0, "tokenizer.ggml.eom_token_id": 2}))
    assert source.generation_config() == {"bos_token_id": 1, "eos_token_id": [2, 0], "pad_token_id": 2}


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        ({"type": "none"}, None),
        ({"type": "linear", "factor": 2.5}, {"rope_type": "linear", "factor": 2.5}),
        (
            {"type": "yarn", "factor": 4.0, "original_context_length": 32},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        ),
    ],
)
def test_rope_scaling_of_the_metadata(make_gguf, scaling, expected):
    metadata = {f"llama.rope.scaling.{key}": value for key, value in scaling.items()}
    assert gguf_config(make_gguf(metadata=metadata))["rope_scaling"] == expected


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_recovered_from_its_frequency_factors(make_gguf, factor):
    transformers = pytest.importorskip("transformers")
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = transformers.LlamaConfig(
        head_dim=64, max_position_embeddings=131072, rope_parameters=scaling | {"rope_theta": 500000.0}
    )
    scaled, _ = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 500000.0 ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    factors = (plain / scaled.double()).float().numpy()
    metadata = {
        "llama.attention.key_length": 64,
        "llama.attention.value_length": 64,
        "llama.rope.dimension_count": 64,
        "llama.rope.freq_base": 500000.0,
    }

    path = make_gguf(metadata=metadata, tensors=random_tensors("llama") | {"rope_freqs.weight": factors})
    assert gguf_config(path)["rope_scaling"] == scaling
    assert "rope_freqs.weight" not in GgufFile(path).tensor_shapes()

    factors[20] *= 1.01
    path = make_gguf(metadata=metadata, tensors=random_tensors("llama") | {"rope_freqs.weight": factors})
    with pytest.raises(ConfigError, match=r"rope_freqs\.weight"):
        gguf_config(path)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama.rope.scaling.type": "longrope"}, "'longrope' is not supported.*linear, yarn, llama3"),
        ({"llama.rope.scaling.type": "linear"}, "has no 'llama.rope.scaling.factor'"),
        ({"llama.rope.dimension_count": 2}, "llama.rope.dimension_count = 2"),
        ({"llama.expert_count": 8}, "llama.expert_count = 8"),
        ({"llama.attention.layer_norm_rms_epsilon": None}, "has no 'llama.attention.layer_norm_rms_epsilon'"),
        ({"llama.attention.head_count_kv": [1, 3]}, "differs between layers"),
    ],
)
def test_what_the_engine_does_not_compute_is_refused_by_key(make_gguf, metadata, message):
    with pytest.raises(ConfigError, match=message):
        gguf_config(make_gguf(metadata=metadata))


def test_another_architecture_is_refused_with_the_supported_ones(make_gguf):
    with pytest.raises(ConfigError, match=r"'gemma2' is not supported.*llama, qwen2, qwen3"):
        gguf_config(make_gguf("gemma2"))


def test_a_file_that_is_no_gguf_or_is_cut_short_or_missing_is_refused(tmp_path, make_gguf):
    noise = tmp_path / "noise.gguf"
    noise.write_bytes(b"this is not a GGUF file at all")
    empty = tmp_path / "empty.gguf"
    empty.write_bytes(b"")
    whole = make_gguf().read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in (20, len(whole) // 8, len(whole) // 2, len(whole) - 200):
        cut.write_bytes(whole[:size])
        with pytest.raises(WeightLoadError, match=r"cut\.gguf: not a readable GGUF"):
            GgufFile(cut)
    for path in (noise, empty):
        with pytest.raises(WeightLoadError, match="not a readable GGUF"):
            GgufFile(path)
    with pytest.raises(WeightLoadError, match="no such file"):
        GgufFile(tmp_path / "absent.gguf")


def test_a_file_in_parts_is_refused(make_gguf):
    with pytest.raises(WeightLoadError, match="merge"):
        GgufFile(make_gguf(metadata={"split.count": 3}))


# ---- tokenizer ----


def load_tokenizer(path):
    return tokenizers.Tokenizer.from_str(gguf_tokenizer_files(path)["tokenizer.json"])


def test_tokenizer_splits_digits_merges_bytes_and_matches_control_tokens_whole(make_gguf):
    tokenizer = load_tokenizer(make_gguf())
    assert tokenizer.encode("ab ab12<|im_end|>é<tool>").tokens == [
        *["ab", "Ġab", "1", "2", "<|im_end|>", "Ã", "©", "<tool>"]
    ]
    ids = tokenizer.encode("ab<|im_end|>é<tool>").ids
    assert tokenizer.decode(ids) == "abé<tool>", "control tokens are skipped, user-defined ones are not"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "ab<|im_end|>é<tool>"


def test_rows_that_only_fill_up_the_embedding_are_no_tokens(make_gguf):
    tokenizer = load_tokenizer(make_gguf())
    assert tokenizer.get_vocab_size() == 264
    assert tokenizer.id_to_token(263) == "<tool>" and tokenizer.id_to_token(264) is None


def test_tokenizer_config_carries_template_and_special_tokens(make_gguf):
    config = json.loads(gguf_tokenizer_files(make_gguf())["tokenizer_config.json"])
    assert config == {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "pad_token": "<|im_end|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 128,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": "{{ messages[0].content }}",
    }


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["12", "Ġ", "1", "ab"]),
        ("smollm", ["1", "2", "Ġ", "1", "ab"]),
        ("qwen2", ["1", "2", "Ġ", "1", "ab"]),
        ("llama-bpe", ["<|im_start|>", "12", "Ġ", "1", "ab"]),
    ],
)
def test_each_pre_tokenizer_cuts_words_in_its_own_way(make_gguf, pre, expected):
    assert load_tokenizer(make_gguf(pre=pre)).encode("12 1ab").tokens == expected


def test_qwen2_normalises_to_nfc(make_gguf):
    decomposed = "e\u0301"
    assert load_tokenizer(make_gguf(pre="qwen2")).encode(decomposed).tokens == ["Ã", "©"]
    assert load_tokenizer(make_gguf(pre="gpt-2")).encode(decomposed).tokens == ["e", "Ì", "ģ"]


def test_llama3_takes_a_word_of_the_vocabulary_whole_without_a_merge(make_gguf):
    metadata = tokenizer_metadata() | {"tokenizer.ggml.merges": ["a b"], "tokenizer.ggml.add_bos_token": False}
    assert load_tokenizer(make_gguf(pre="smollm", metadata=metadata)).encode(" ab").tokens == ["Ġ", "ab"]
    metadata |= {"tokenizer.ggml.pre": "llama-bpe"}
    assert load_tokenizer(make_gguf(metadata=metadata)).encode(" ab").tokens == ["Ġab"]


def test_bos_and_eos_are_added_where_the_file_asks_for_them(make_gguf):
    both = {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    tokenizer = load_tokenizer(make_gguf(metadata=both))
    assert tokenizer.encode("ab").tokens == ["<|im_start|>", "ab", "<|im_end|>"]
    assert tokenizer.encode("ab", add_special_tokens=False).tokens == ["ab"]


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"tokenizer.ggml.model": "llama"}, "tokenizer model 'llama' is not supported.*'gpt2'"),
        ({"tokenizer.ggml.pre": "tekken"}, "pre-tokenizer 'tekken' is not supported.*smollm, qwen2, llama-bpe"),
        ({"tokenizer.ggml.pre": None}, "pre-tokenizer None is not supported"),
        ({"tokenizer.ggml.merges": ["a nowhere"]}, "do not fit together"),
    ],
)
def test_a_tokenizer_we_cannot_rebuild_is_refused_by_name(make_gguf, metadata, message):
    with pytest.raises(ConfigError, match=message):
        gguf_tokenizer_files(make_gguf(metadata=metadata))


def test_a_token_that_is_there_twice_is_refused(make_gguf):
    tokens = byte_level_vocab()
    tokens[-2] = "ab"
    metadata = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [1] * len(tokens)}
    with pytest.raises(ConfigError, match="'ab' is in the vocabulary twice"):
        gguf_tokenizer_files(make_gguf(metadata=metadata))


# ---- conversion ----


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_conversion_writes_a_model_directory(make_gguf, tmp_path, dtype):
    path, calls = make_gguf(), []
    out = convert_gguf(path, tmp_path / "out", dtype=dtype, progress=lambda *call: calls.append(call))

    assert sorted(file.name for file in out.iterdir()) == sorted(CHECKPOINT_FILES)
    weights = load_file(out / "model.safetensors")
    expected = {name: tensor.to(getattr(torch, dtype)) for name, tensor in iter_gguf_tensors(path)}
    assert weights.keys() == expected.keys()
    assert all(weights[name].dtype == expected[name].dtype for name in expected)
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert json.loads((out / "config.json").read_text())["dtype"] == dtype
    assert calls == [("convert", done, len(expected)) for done in range(1, len(expected) + 1)]


def test_a_failed_conversion_leaves_nothing(make_gguf, tmp_path):
    tensors = random_tensors("llama") | {"blk.0.surprise.weight": np.zeros((2, 2), np.float32)}
    path = make_gguf(tensors=tensors)
    with pytest.raises(WeightLoadError):
        convert_gguf(path, tmp_path / "models" / "out")
    assert list((tmp_path / "models").iterdir()) == []


def test_an_incomplete_directory_is_replaced_and_a_complete_one_is_kept(make_gguf, tmp_path):
    path, out = make_gguf(), tmp_path / "out"
    convert_gguf(path, out)
    (out / "config.json").unlink()
    convert_gguf(path, out)
    assert (out / "config.json").is_file()
    (out / "config.json").write_text("{}")
    convert_gguf(path, out)
    assert (out / "config.json").read_text() == "{}", "whoever published first wins"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["m.gguf", "out"]


def test_an_unknown_dtype_is_refused(make_gguf, tmp_path):
    with pytest.raises(ConfigError, match=r"'int8'.*bfloat16, float16, float32"):
        convert_gguf(make_gguf(), tmp_path / "out", dtype="int8")


def test_tensors_are_dequantised_one_at_a_time(make_gguf, monkeypatch):
    dequantised = []
    real = pico_gguf._dequantize
    monkeypatch.setattr(pico_gguf, "_dequantize", lambda *args: dequantised.append(1) or real(*args))
    iterator = iter_gguf_tensors(make_gguf())
    assert dequantised == []
    next(iterator)
    assert len(dequantised) == 1


# ---- the real file ----


@pytest.mark.model
def test_the_default_model_equals_transformers_own_gguf_loader(default_model_dir, default_gguf):
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(default_model_dir))
    theirs = load_gguf_checkpoint(str(default_gguf), return_tensors=True, model_to_load=model)
    ours = load_file(default_model_dir / "model.safetensors")

    assert ours.keys() == theirs["tensors"].keys()
    for name, weight in ours.items():
        assert torch.equal(weight, theirs["tensors"][name].bfloat16()), name
    config = json.loads((default_model_dir / "config.json").read_text())
    for key, value in theirs["config"].items():
        if key in config:
            assert config[key] == pytest.approx(value), key
    assert (config["eos_token_id"], config["pad_token_id"], config["bos_token_id"]) == (2, 2, 1)

    tokenizer = AutoTokenizer.from_pretrained(default_gguf.parent, gguf_file=default_gguf.name)
    tokenizer.backend_tokenizer.pre_tokenizer = load_tokenizer(default_gguf).pre_tokenizer  # theirs has no digit split
    ours = load_tokenizer(default_gguf)
    for text in [
        "The capital of France",
        "  1234 5,6",
        "naïve 😀👩‍👩‍👧 日本語\r\n\t",
        "<|im_start|>user\nx<|im_end|>\n",
    ]:
        assert ours.encode(text).ids == tokenizer.encode(text), text
