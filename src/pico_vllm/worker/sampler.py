"""Sampler: from logits to token ids, all rows of a step at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from pico_vllm.kernels.backend import KernelBackend
    from pico_vllm.worker.input_builder import SamplingBatch


class Sampler:
    """Greedy and temperature / top-k / top-p sampling with the stateless generator."""

    def __init__(self, backend: KernelBackend) -> None:
        self._backend = backend

    def __call__(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        """Choose a token a row.

        Args:
            logits: [L, vocab_size], any float dtype.
            batch: parameters of each row.

        Returns:
            [L] int64.
        """
        greedy: torch.Tensor = self._backend.greedy(logits)
        if batch.random is None:
            return greedy
        params = batch.random
        uniform = self._backend.uniform(params.seeds, torch.zeros_like(params.positions), params.positions)
        sampled = self._backend.sample(logits, params.temperature, params.top_k, params.top_p, uniform)
        return torch.where(params.greedy, greedy, sampled)
