"""Llama-architecture models: Llama 2 and 3.x, SmolLM2.

A Llama block is the block of ``qwen2.py``: what differs is in the configuration (biases where the checkpoint has them,
llama3's stretched rotary frequencies), not in the computation. Source: Touvron et al. 2023; ``LlamaForCausalLM`` of
transformers 5.x.
"""

from __future__ import annotations

from pico_vllm.models.qwen2 import Qwen2ForCausalLM


class LlamaForCausalLM(Qwen2ForCausalLM):
    """Llama, computed as Qwen2 is."""
