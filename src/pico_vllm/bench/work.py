"""The least work that a workload is, whatever engine runs it: bytes and FLOPs, for shares of the machine's ceilings.

Bytes: every step reads all weights once (of an untied embedding only rows, so not counted), and at least
``max(output tokens / concurrency, longest output)`` steps are needed. Every output token but a request's first reads
the keys and values of its context; every token writes its own. FLOPs: 2 a weight and token (the lm_head for output
tokens only), and 4 a (query, key) pair and head dimension.

Activations are left out: a share is a little below what the hardware saw.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pico_vllm.models.registry import model_class
from pico_vllm.models.weights import LinearSpec

if TYPE_CHECKING:
    from pico_vllm.bench.workloads import Workload
    from pico_vllm.config import ModelConfig


@dataclass(frozen=True, slots=True)
class ModelWork:
    """What one token costs.

    Attributes:
        layer_weights: weights of all layers' linears, each multiplied once a token.
        head_weights: of the lm_head.
        attention_width: num_layers x num_heads x head_dim.
        kv_width: num_layers x 2 x num_kv_heads x head_dim, numbers a cached token.
        element_bytes: of weights and cache.
    """

    layer_weights: int
    head_weights: int
    attention_width: int
    kv_width: int
    element_bytes: int

    @property
    def weight_bytes(self) -> int:
        """Read by every step."""
        return (self.layer_weights + self.head_weights) * self.element_bytes

    @property
    def kv_bytes(self) -> int:
        """Of a cached token."""
        return self.kv_width * self.element_bytes


def model_work(config: ModelConfig, element_bytes: int) -> ModelWork:
    """Count a model's weights by its parameter specs."""
    specs = model_class(config.architecture).parameter_specs(config)
    linears = {spec.name: sum(spec.out_features) * spec.in_features for spec in specs if isinstance(spec, LinearSpec)}
    linears.pop("lm_head", None)
    layers = config.num_hidden_layers
    return ModelWork(
        layer_weights=sum(linears.values()),
        head_weights=config.vocab_size * config.hidden_size,
        attention_width=layers * config.num_attention_heads * config.head_dim,
        kv_width=layers * 2 * config.num_key_value_heads * config.head_dim,
        element_bytes=element_bytes,
    )


def least_bytes(work: ModelWork, workload: Workload) -> int:
    """Bytes that must move."""
    outputs = [request.max_tokens for request in workload.requests]
    concurrency = workload.concurrency or len(outputs)
    steps = max(-(-sum(outputs) // concurrency), max(outputs))
    tokens_read = tokens_written = 0
    for prompt_len, num_out in zip(workload.prompt_lens(), outputs, strict=True):
        # Output token i (of 1 … n - 1) attends to prompt_len + i tokens; the first comes of the prompt's own pass.
        tokens_read += (num_out - 1) * prompt_len + num_out * (num_out - 1) // 2
        tokens_written += prompt_len + num_out - 1
    return steps * work.weight_bytes + (tokens_read + tokens_written) * work.kv_bytes


def least_flops(work: ModelWork, workload: Workload) -> int:
    """Floating-point operations that must be done, nothing being cached beforehand."""
    flops = 0
    for prompt_len, request in zip(workload.prompt_lens(), workload.requests, strict=True):
        tokens = prompt_len + request.max_tokens - 1
        pairs = tokens * (tokens + 1) // 2
        flops += 2 * (tokens * work.layer_weights + request.max_tokens * work.head_weights)
        flops += 4 * pairs * work.attention_width
    return flops
