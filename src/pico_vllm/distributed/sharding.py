"""Shard: which part of a model one rank holds. Pure arithmetic, no tensors.

What is split has *units* that stay whole: attention heads, KV heads, intermediate features, tokens of the vocabulary.
Every rank has the same number of units, so that all ranks run kernels of the same shapes and wait for nobody. Where
there are fewer units than ranks (KV heads), neighbours share one: each keeps a copy of it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from pico_vllm.config import ModelConfig
from pico_vllm.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Shard:
    """One of ``size`` equal parts; ``Shard()`` is the whole.

    Attributes:
        rank: whose part, 0 … size - 1.
        size: ranks in all.
    """

    rank: int = 0
    size: int = 1

    def units(self, num_units: int) -> tuple[int, int]:
        """The units [start, end) of this rank, among ``num_units`` that the size divides, or that divide the size."""
        if num_units >= self.size:
            count = num_units // self.size
            return self.rank * count, (self.rank + 1) * count
        unit = self.rank // (self.size // num_units)
        return unit, unit + 1

    def rows(self, num_rows: int, num_units: int) -> tuple[int, int]:
        """The rows [start, end) of this rank in a matrix whose rows are ``num_units`` units, one after the other."""
        start, end = self.units(num_units)
        rows_a_unit = num_rows // num_units
        return start * rows_a_unit, end * rows_a_unit

    def model_config(self, config: ModelConfig) -> ModelConfig:
        """The model as its layers see it on one rank: so many heads, KV heads and intermediate features.

        What is whole everywhere (hidden size, vocabulary, layers) stays as it is.

        Raises:
            ConfigError: the model does not split into so many parts; names the sizes into which it does.
        """
        if reason := _why_not(config, self.size):
            legal = [size for size in range(1, config.num_attention_heads + 1) if _why_not(config, size) is None]
            raise ConfigError(
                f"tensor_parallel_size={self.size} does not split this model: {reason}; sizes that do: "
                f"{', '.join(map(str, legal))}"
            )
        return dataclasses.replace(
            config,
            num_attention_heads=config.num_attention_heads // self.size,
            num_key_value_heads=max(1, config.num_key_value_heads // self.size),
            intermediate_size=config.intermediate_size // self.size,
        )


def _why_not(config: ModelConfig, size: int) -> str | None:
    """What does not split into so many parts, or None."""
    for name in ("num_attention_heads", "intermediate_size", "vocab_size"):
        if getattr(config, name) % size:
            return f"{name}={getattr(config, name)} is not a multiple of it"
    kv_heads = config.num_key_value_heads
    if kv_heads % size and size % kv_heads:
        return f"num_key_value_heads={kv_heads} is neither a multiple nor a divisor of it"
    return None
