"""Tiny random checkpoints made on the spot by transformers, and what transformers computes with them.

``MODELS`` names every shape that the model tests and the metamorphic suite run over; a new architecture adds a row.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

VOCAB_SIZE = 300


@dataclass(frozen=True)
class TinyModel:
    """One checkpoint: an HF configuration class and what to put into it."""

    name: str
    config_class: str
    model_class: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    tied: bool
    extra: dict[str, Any] = field(default_factory=dict)


_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
_LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}

MODELS = {
    model.name: model
    for model in [
        TinyModel("qwen2-gqa6-d64-tied", "Qwen2Config", "Qwen2ForCausalLM", 6, 1, 64, True),
        TinyModel("qwen2-gqa3-d128-untied", "Qwen2Config", "Qwen2ForCausalLM", 3, 1, 128, False),
        TinyModel("qwen2-yarn", "Qwen2Config", "Qwen2ForCausalLM", 2, 2, 64, False, {"rope_parameters": _YARN_ROPE}),
        TinyModel("llama-gqa3-d64-tied", "LlamaConfig", "LlamaForCausalLM", 6, 2, 64, True),
        TinyModel("llama-mha-d128-untied", "LlamaConfig", "LlamaForCausalLM", 2, 2, 128, False),
        TinyModel(
            "llama-biases-llama3-rope",
            "LlamaConfig",
            "LlamaForCausalLM",
            4,
            2,
            64,
            False,
            {"attention_bias": True, "mlp_bias": True, "rope_parameters": _LLAMA3_ROPE},
        ),
        TinyModel("qwen3-gqa2-d128-untied", "Qwen3Config", "Qwen3ForCausalLM", 4, 2, 128, False),
        TinyModel("qwen3-gqa4-d64-tied", "Qwen3Config", "Qwen3ForCausalLM", 4, 1, 64, True),
        TinyModel(
            "llama-linear-rope", "LlamaConfig", "LlamaForCausalLM", 2, 1, 64, True, {"rope_parameters": _LINEAR_ROPE}
        ),
    ]
}


def hf_config(model: TinyModel) -> Any:
    """The transformers configuration of a tiny model."""
    import transformers

    return getattr(transformers, model.config_class)(
        vocab_size=VOCAB_SIZE,
        hidden_size=model.num_heads * model.head_dim,
        intermediate_size=160,
        num_hidden_layers=3,
        num_attention_heads=model.num_heads,
        num_key_value_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        max_position_embeddings=256,
        rms_norm_eps=1e-5,
        tie_word_embeddings=model.tied,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
        **model.extra,
    )


def save_tiny_model(model: TinyModel, directory: Any, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
    """Write config, safetensors and a byte-level tokenizer; every weight, bias and norm is away from its default."""
    import transformers

    hf_model = getattr(transformers, model.model_class)(hf_config(model))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in hf_model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * values if "norm" in name else 0.08 * values)
    hf_model.to(dtype).save_pretrained(directory)
    byte_tokenizer().save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text('{"eos_token": "<eos>", "bos_token": "<bos>"}')


def byte_tokenizer() -> Tokenizer:
    """One token a byte, after <bos> = 0 and <eos> = 1."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["<bos>", "<eos>", *alphabet])}
    tokenizer = Tokenizer(BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<bos>", "<eos>"])
    return tokenizer


def hf_logits(directory: Any, token_ids: list[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[len(token_ids), vocab_size] of transformers' own forward pass over the whole sequence."""
    import transformers

    hf_model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="eager")
    with torch.inference_mode():
        logits: torch.Tensor = hf_model.eval()(torch.tensor([token_ids])).logits[0]
    return logits
