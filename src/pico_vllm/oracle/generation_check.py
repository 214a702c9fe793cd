"""Are an engine's greedy tokens and log-probabilities right? A check from outside: it needs ids, no taps.

``verify`` looks into our engine with a recording backend; a captured graph or another engine can't be looked into. So
here transformers reads the prompt and what the engine made of it (in fp32, the truth, and in the engine's dtype, the
yardstick), and judges

- each token: how far its true logit is below the best one. In 16 bits a gap may be 1.5 x the largest gap of
  transformers' own choices, or 6 RMS logit errors of transformers, whichever is more, and tokens that are not the best
  one may be about as many as transformers' own;
- the log-probabilities, if the engine gives them: their RMS error may be 1.5 x that of transformers at the same tokens.

Every engine of a benchmark passes this on the very instance that is timed, or is not timed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from pico_vllm.oracle.comparison import MAX_ERROR_RATIO
from pico_vllm.oracle.verify import FP32_TIE

#: fp32: RMS error of log-probabilities (DESIGN: 1e-4 each).
FP32_LOGPROB_BOUND = 1e-4
#: 16 bit: the gap that rounding explains, in RMS logit errors of transformers. Two logits part by sqrt(2) of them, so
#: over thousands of tokens 4 standard deviations are nearly 6.
GAP_IN_RMS_ERRORS = 6.0


@dataclass(frozen=True, slots=True)
class Generation:
    """What an engine made of a prompt, greedily.

    Attributes:
        prompt_token_ids, token_ids: in and out.
        logprobs: {token id: log-probability} of each output position, or None.
    """

    prompt_token_ids: Sequence[int]
    token_ids: Sequence[int]
    logprobs: Sequence[Mapping[int, float]] | None = None


@dataclass(frozen=True, slots=True)
class GenerationCheck:
    """The verdict over all generations of an engine.

    Attributes:
        num_tokens: judged.
        num_not_best: tokens whose true logit isn't the largest.
        allowed_not_best: as many may be.
        worst_gap: largest true logit gap between the best token and ours.
        allowed_gap: the largest one that passes.
        num_logprobs: log-probabilities compared; 0 = the engine gives none.
        logprob_rms, allowed_logprob_rms: their RMS error, and the largest one that passes.
    """

    num_tokens: int
    num_not_best: int
    allowed_not_best: int
    worst_gap: float
    allowed_gap: float
    num_logprobs: int
    logprob_rms: float
    allowed_logprob_rms: float

    @property
    def problem(self) -> str | None:
        """What is wrong, in a sentence; None when everything is within its bound."""
        if not self.worst_gap <= self.allowed_gap:
            return f"a token's true logit is {self.worst_gap:.4g} below the best one, {self.allowed_gap:.4g} is allowed"
        if self.num_not_best > self.allowed_not_best:
            return (
                f"{self.num_not_best} of {self.num_tokens} tokens are not the best one, "
                f"{self.allowed_not_best} are allowed"
            )
        if not self.logprob_rms <= self.allowed_logprob_rms:
            return f"RMS error of logprobs is {self.logprob_rms:.3g}, {self.allowed_logprob_rms:.3g} is allowed"
        return None

    @property
    def passes(self) -> bool:
        """Whether the engine may be timed."""
        return self.problem is None


class GenerationOracle:
    """transformers in fp32, and in the engine's dtype if that has 16 bits; eager attention, the plain formula.

    Args:
        model_dir: checkpoint.
        dtype: of the engines to judge.
        device: where to run.
    """

    def __init__(self, model_dir: Path, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        self._truth = self._load(model_dir, torch.float32)
        self._yardstick = None if dtype == torch.float32 else self._load(model_dir, dtype)

    @torch.inference_mode()
    def check(self, generations: Sequence[Generation]) -> GenerationCheck:
        """Judge one engine's generations."""
        allow_tf32 = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = False
        try:
            sums = _Sums()
            for generation in generations:
                self._add(sums, generation)
        finally:
            torch.backends.cuda.matmul.allow_tf32 = allow_tf32
        return sums.verdict(is_fp32=self._yardstick is None)

    # --------------------------------------------------------------------------------------------------- private
    def _load(self, model_dir: Path, dtype: torch.dtype) -> Any:
        transformers.utils.logging.disable_progress_bar()
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=dtype, attn_implementation="eager", local_files_only=True
        )
        return model.to(self._device).eval()

    def _logits(self, model: Any, generation: Generation) -> torch.Tensor:
        """[num_output_tokens, vocab_size] fp32: what predicts each output token."""
        num_new = len(generation.token_ids)
        ids = [*generation.prompt_token_ids, *generation.token_ids[:-1]]
        batch = torch.tensor([ids], device=self._device)
        logits: torch.Tensor = model(batch, use_cache=False, logits_to_keep=num_new).logits[0]
        return logits.float()

    def _add(self, sums: _Sums, generation: Generation) -> None:
        truth = self._logits(self._truth, generation)
        best = truth.amax(-1)
        chosen = torch.tensor(list(generation.token_ids), device=self._device)
        gaps = best - truth.gather(1, chosen[:, None])[:, 0]
        sums.num_tokens += gaps.numel()
        sums.num_not_best += int((gaps > 0).sum())
        sums.worst_gap = _worse(sums.worst_gap, gaps.max().item())
        theirs = None
        if self._yardstick is not None:
            theirs = self._logits(self._yardstick, generation)
            their_gaps = best - truth.gather(1, theirs.argmax(-1, keepdim=True))[:, 0]
            sums.their_not_best += int((their_gaps > 0).sum())
            sums.their_worst_gap = max(sums.their_worst_gap, their_gaps.max().item())
            sums.their_squares += (theirs - truth).double().square().sum().item()
            sums.num_logits += truth.numel()
        if generation.logprobs is not None:
            self._add_logprobs(sums, generation.logprobs, truth, theirs)

    def _add_logprobs(
        self, sums: _Sums, logprobs: Sequence[Mapping[int, float]], truth: torch.Tensor, theirs: torch.Tensor | None
    ) -> None:
        rows = [row for row, at in enumerate(logprobs) for _ in at]
        ids = [token_id for at in logprobs for token_id in at]
        ours = torch.tensor([value for at in logprobs for value in at.values()], dtype=torch.float64)
        true = truth.log_softmax(-1)[rows, ids].double().cpu()
        sums.num_logprobs += len(ids)
        sums.logprob_squares += (ours - true).square().sum().item()
        if theirs is not None:
            sums.their_logprob_squares += (
                (theirs.log_softmax(-1)[rows, ids].double().cpu() - true).square().sum().item()
            )


@dataclass(slots=True)
class _Sums:
    num_tokens: int = 0
    num_not_best: int = 0
    worst_gap: float = 0.0
    their_not_best: int = 0
    their_worst_gap: float = 0.0
    num_logits: int = 0
    their_squares: float = 0.0
    num_logprobs: int = 0
    logprob_squares: float = 0.0
    their_logprob_squares: float = 0.0

    def verdict(self, *, is_fp32: bool) -> GenerationCheck:
        if is_fp32:
            allowed_gap, allowed_not_best, allowed_rms = FP32_TIE, self.num_tokens, FP32_LOGPROB_BOUND
        else:
            rms = math.sqrt(self.their_squares / self.num_logits)
            allowed_gap = max(MAX_ERROR_RATIO * self.their_worst_gap, GAP_IN_RMS_ERRORS * rms)
            # A count scatters by its square root: 5 of them, and 5 for counts near 0.
            allowed_not_best = math.floor(
                MAX_ERROR_RATIO * self.their_not_best + 5 * math.sqrt(self.their_not_best) + 5
            )
            allowed_rms = MAX_ERROR_RATIO * math.sqrt(self.their_logprob_squares / max(1, self.num_logprobs))
        return GenerationCheck(
            num_tokens=self.num_tokens,
            num_not_best=self.num_not_best,
            allowed_not_best=allowed_not_best,
            worst_gap=self.worst_gap,
            allowed_gap=allowed_gap,
            num_logprobs=self.num_logprobs,
            logprob_rms=math.sqrt(self.logprob_squares / max(1, self.num_logprobs)),
            allowed_logprob_rms=allowed_rms,
        )


def _worse(a: float, b: float) -> float:
    return math.nan if math.isnan(a) or math.isnan(b) else max(a, b)
