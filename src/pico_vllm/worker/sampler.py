"""Sampler: from logits to token ids and their log-probabilities, all rows of a step at once.

Order: grammar mask, ``LogitsProcessors`` (bias and fixed masks, bad words, min_tokens, penalties, custom), then the
choice. Log-probabilities are of the model's own logits, before any of it. Those of prompts are computed a few rows at a
time: a prompt of 16384 tokens would need 10 GB for its fp32 logits alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pico_vllm.worker.logprobs import LogprobsTensors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pico_vllm.kernels.backend import KernelBackend
    from pico_vllm.worker.input_builder import PromptLogprobsBatch, RandomSampling, SamplingBatch
    from pico_vllm.worker.logits_processors import LogitsProcessors

#: Prompt positions whose logits exist at the same time; as many rows as sampling has with the default max_num_seqs.
PROMPT_LOGPROBS_ROWS = 256


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """Tokens of a step, all on the device: nothing here has waited for it.

    Attributes:
        token_ids: [S] int64; -1 where every token is masked, or a custom processor has made a NaN.
        input_ids: [S] int64, what the next step computes with: the same, but 0 for -1. That step may have been launched
            before the host sees that the request has ended.
        logprobs: of the S rows; None if nobody asked.
        prompt_logprobs: of the P rows of prompt positions likewise.
    """

    token_ids: torch.Tensor
    input_ids: torch.Tensor
    logprobs: LogprobsTensors | None = None
    prompt_logprobs: LogprobsTensors | None = None


class Sampler:
    """Chooses tokens with the ops of one backend; holds no state."""

    def __init__(self, backend: KernelBackend) -> None:
        self._backend = backend

    def __call__(
        self,
        logits: torch.Tensor,
        batch: SamplingBatch,
        processors: LogitsProcessors,
        grammar: tuple[torch.Tensor, torch.Tensor] | None = None,
        prompt_logits: Callable[[int, int], torch.Tensor] | None = None,
    ) -> SamplerOutput:
        """Choose a token a row.

        Args:
            logits: [S, vocab_size], any float dtype.
            batch: parameters of each row.
            processors: state of each row.
            grammar: (indices [G] of the masked rows among S, bitmask [G, ceil(vocab_size / 32)] int32).
            prompt_logits: of the wanted prompt positions [start, end); needed where ``batch.prompt_logprobs`` is.
        """
        raw, prompt_logprobs = logits, None
        if batch.prompt_logprobs is not None:
            assert prompt_logits is not None
            prompt_logprobs = self._prompt_logprobs(prompt_logits, batch.prompt_logprobs)
        if grammar is None and not processors.any_active(batch.rows):
            token_ids = input_ids = self.choose(raw, batch.random)
        else:
            processed = raw.to(torch.float32, copy=True)
            if grammar is not None:
                self._mask(processed, *grammar)
            processors.apply(processed, batch.rows, batch.positions, self._backend)
            nothing_left = ~(processed.amax(dim=-1) > float("-inf"))  # or a NaN
            processed.masked_fill_(nothing_left[:, None], 0.0)  # no op has to cope with such a row
            token_ids = self.choose(processed, batch.random).masked_fill_(nothing_left, -1)
            input_ids = token_ids.clamp(min=0)
        logprobs = self._logprobs(raw, input_ids, batch.num_logprobs) if batch.num_logprobs else None
        return SamplerOutput(token_ids, input_ids, logprobs, prompt_logprobs)

    def choose(self, logits: torch.Tensor, params: RandomSampling | None) -> torch.Tensor:
        """[S, vocab_size] → [S] int64: the largest logit, or a draw for the rows that ``params`` says."""
        greedy: torch.Tensor = self._backend.greedy(logits)
        if params is None:
            return greedy
        uniform = self._backend.uniform(params.seeds, params.sample_indices, params.positions)
        arguments = (params.temperature, params.top_k, params.top_p, uniform, params.min_p)
        return torch.where(params.greedy, greedy, self._backend.sample(logits, *arguments))

    def _mask(self, logits: torch.Tensor, indices: torch.Tensor, bitmask: torch.Tensor) -> None:
        masked = logits[indices]
        self._backend.apply_bitmask(masked, bitmask)
        logits[indices] = masked

    def _prompt_logprobs(
        self, prompt_logits: Callable[[int, int], torch.Tensor], prompt: PromptLogprobsBatch
    ) -> LogprobsTensors:
        num_best = [n for n, count in zip(prompt.num_best, prompt.counts, strict=True) for _ in range(count)]
        width = max(num_best)
        parts = []
        for start in range(0, len(num_best), PROMPT_LOGPROBS_ROWS):
            end = min(start + PROMPT_LOGPROBS_ROWS, len(num_best))
            logits = prompt_logits(start, end)
            parts.append(self._logprobs_of(logits, prompt.targets[start:end], width))
            del logits  # before the next ones are made
        return LogprobsTensors(tuple(num_best), tuple(torch.cat(columns) for columns in zip(*parts, strict=True)))

    def _logprobs(self, logits: torch.Tensor, token_ids: torch.Tensor, num_best: Sequence[int]) -> LogprobsTensors:
        return LogprobsTensors(tuple(num_best), self._logprobs_of(logits, token_ids, max(num_best)))

    def _logprobs_of(self, logits: torch.Tensor, token_ids: torch.Tensor, width: int) -> tuple[torch.Tensor, ...]:
        """Columns of ``LogprobsTensors``, with so many best tokens a row, or all there are."""
        width = max(0, min(width, logits.shape[1]))
        return token_ids, *self._backend.logprobs(logits, token_ids, width)
