"""Which class implements which architecture."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from pico_vllm.config import SUPPORTED_ARCHITECTURES

if TYPE_CHECKING:
    from pico_vllm.models.qwen2 import Qwen2ForCausalLM


def model_class(architecture: str) -> type[Qwen2ForCausalLM]:
    """The class for an architecture that ``ModelConfig`` has accepted."""
    module = importlib.import_module(f"pico_vllm.models.{SUPPORTED_ARCHITECTURES[architecture]}")
    implementation: type[Qwen2ForCausalLM] = getattr(module, architecture)
    return implementation
