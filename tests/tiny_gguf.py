"""Tiny GGUF files written on the spot."""

import gguf
import numpy as np
import tokenizers

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB, LAYERS = 12, 3, 1, 4, 8, 268, 2


def byte_level_vocab():
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    return ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *alphabet, "ab", "Ġa", "Ġab", "12", "<tool>"]


def arch_metadata(arch):
    return {
        f"{arch}.block_count": LAYERS,
        f"{arch}.context_length": 128,
        f"{arch}.embedding_length": HIDDEN,
        f"{arch}.feed_forward_length": FFN,
        f"{arch}.attention.head_count": HEADS,
        f"{arch}.attention.head_count_kv": KV_HEADS,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{arch}.rope.freq_base": 100000.0,
    }


def tokenizer_metadata(pre="smollm"):
    tokens = byte_level_vocab()
    types = [3] * 3 + [1] * 260 + [4]
    num_unused = VOCAB - len(tokens)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens + [f"[PAD{i}]" for i in range(num_unused)],
        "tokenizer.ggml.token_type": types + [5] * num_unused,
        "tokenizer.ggml.merges": ["a b", "Ġ a", "Ġ ab", "1 2"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.chat_template": "{{ messages[0].content }}",
    }


def random_tensors(arch, *, tied=True, bias=False):
    rng = np.random.default_rng(0)

    def normal(*shape):
        return rng.standard_normal(shape, dtype=np.float32)

    tensors = {"token_embd.weight": normal(VOCAB, HIDDEN), "output_norm.weight": normal(HIDDEN)}
    if not tied:
        tensors["output.weight"] = normal(VOCAB, HIDDEN)
    for layer in range(LAYERS):
        sizes = {"attn_q": HEADS * HEAD_DIM, "attn_k": KV_HEADS * HEAD_DIM, "attn_v": KV_HEADS * HEAD_DIM}
        for name, size in sizes.items():
            tensors[f"blk.{layer}.{name}.weight"] = normal(size, HIDDEN)
            if bias:
                tensors[f"blk.{layer}.{name}.bias"] = normal(size)
        tensors[f"blk.{layer}.attn_output.weight"] = normal(HIDDEN, HEADS * HEAD_DIM)
        if bias and arch == "llama":
            tensors[f"blk.{layer}.attn_output.bias"] = normal(HIDDEN)
        if arch == "qwen3":
            tensors[f"blk.{layer}.attn_q_norm.weight"] = normal(HEAD_DIM)
            tensors[f"blk.{layer}.attn_k_norm.weight"] = normal(HEAD_DIM)
        tensors[f"blk.{layer}.attn_norm.weight"] = normal(HIDDEN)
        tensors[f"blk.{layer}.ffn_norm.weight"] = normal(HIDDEN)
        tensors[f"blk.{layer}.ffn_gate.weight"] = normal(FFN, HIDDEN)
        tensors[f"blk.{layer}.ffn_up.weight"] = normal(FFN, HIDDEN)
        tensors[f"blk.{layer}.ffn_down.weight"] = normal(HIDDEN, FFN)
    return tensors


def write_gguf(path, arch, metadata, tensors):
    """tensors: name -> float32 array, or (uint8 rows, quantisation type)."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in metadata.items():
        if value is None:
            continue
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, value in tensors.items():
        if isinstance(value, tuple):
            writer.add_tensor(name, value[0], raw_dtype=value[1])
        else:
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
