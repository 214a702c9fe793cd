"""A checkpoint of a known shape with random weights: speed doesn't depend on what the weights say.

Every engine loads the same files, so their greedy tokens can be compared too, and the gate has something to check.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pico_vllm.errors import ConfigError

_QWEN = {
    "max_position_embeddings": 32768,
    "rope_theta": 1_000_000.0,
    "rms_norm_eps": 1e-6,
    "vocab_size": 151_936,
    "bos_token_id": 151_643,
    "eos_token_id": 151_643,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
#: Name → arguments of transformers' Qwen2Config.
SHAPES: dict[str, dict[str, Any]] = {
    "qwen2.5-0.5b": _QWEN
    | {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
    "qwen2.5-1.5b": _QWEN
    | {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
    "qwen2.5-3b": _QWEN
    | {"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16},
    "qwen2.5-7b": _QWEN
    | {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28}
    | {"num_key_value_heads": 4, "vocab_size": 152_064, "tie_word_embeddings": False},
}


def write_random_model(directory: Path, shape: str, *, seed: int = 0, device: str = "cpu") -> None:
    """Write config and bf16 safetensors of a shape.

    Matrices and biases are normal with standard deviation 0.02, norms 1 plus a tenth of a normal number: no weight is 0
    or 1 throughout, so a bias or a norm that an engine forgets shows.

    Args:
        directory: to write into; made if it isn't there.
        shape: of ``SHAPES``.
        seed: of the weights.
        device: that draws them; each device draws its own numbers.

    Raises:
        ConfigError: an unknown shape.
    """
    import torch
    import transformers

    if shape not in SHAPES:
        raise ConfigError(f"unknown shape {shape!r}; known: {', '.join(SHAPES)}")
    transformers.utils.logging.disable_progress_bar()
    config = transformers.Qwen2Config(**SHAPES[shape])
    config.architectures = ["Qwen2ForCausalLM"]
    with torch.device("meta"):
        model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model = model.to_empty(device=device)
    model.tie_weights()
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0.0, 0.02, generator=generator)
            if "norm" in name:
                parameter.mul_(5).add_(1)
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
