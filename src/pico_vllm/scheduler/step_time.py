"""How long a step will take, and how many prompt tokens it may take beside its decodes.

    seconds of a step = decodes(n) + sum over its chunks of linear * c * (1 + k * (context + c / 2))

``decodes(n)`` is piecewise linear between a few measured steps; ``linear`` is what a token costs in matrix products and
k what one more position to look at adds to that: attention of long contexts costs as much as all products (of Qwen2.5-
1.5B at 8192 positions). A chunk's tokens look at c / 2 of their own on average. Pure arithmetic on numbers that were
measured once, at the start: the same requests are always planned the same way. Called by the scheduler.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pico_vllm.config import ModelConfig
    from pico_vllm.scheduler_output import MeasuredSteps

#: Prompt tokens that a step takes whatever the target says, so that prompts always advance.
MIN_CHUNK_TOKENS = 64
#: Attention runs at about half the rate of the matrix products (one H200, bf16, head_dim 128).
_ATTENTION_COST = 2.0


@dataclass(frozen=True, slots=True)
class StepTimeModel:
    """Predicts the time of a step.

    Attributes:
        decode_s: (sequences, seconds), ascending in both; at least one.
        seconds_per_token: of a prompt's token without attention.
        attention_ratio: attention to one position / ``seconds_per_token``.
    """

    decode_s: tuple[tuple[int, float], ...]
    seconds_per_token: float
    attention_ratio: float

    @classmethod
    def from_measured(cls, measured: MeasuredSteps, attention_ratio: float) -> StepTimeModel:
        """Take the attention out of what a prompt's token has cost, and let more sequences never cost less."""
        points: list[tuple[int, float]] = []
        for num_seqs, seconds in measured.decode_s:
            points.append((num_seqs, max(seconds, points[-1][1] if points else 0.0)))
        tokens = measured.prompt_tokens
        per_token = measured.prompt_s / (tokens * (1 + attention_ratio * tokens / 2))
        return cls(tuple(points), per_token, attention_ratio)

    def decodes(self, num_seqs: int) -> float:
        """Seconds of a step that gives each of so many sequences, one or more, a token."""
        points = self.decode_s
        if len(points) == 1 or num_seqs <= points[0][0]:
            return points[0][1]
        upper = next((i for i, (size, _) in enumerate(points) if size >= num_seqs), len(points) - 1)
        (n0, s0), (n1, s1) = points[upper - 1], points[upper]
        return s0 + (s1 - s0) * (num_seqs - n0) / (n1 - n0)  # past the last: as between the last two

    def chunk(self, num_tokens: int, context: int) -> float:
        """Seconds that a chunk adds to a step.

        Args:
            num_tokens: of the chunk.
            context: positions of the same sequence before it.
        """
        looked_at = context + num_tokens / 2
        return self.seconds_per_token * num_tokens * (1 + self.attention_ratio * looked_at)

    def chunk_tokens(self, seconds: float, context: int) -> int:
        """The largest chunk that adds at most so many seconds: the positive root of a c² + b c = seconds, rounded."""
        if seconds <= 0:
            return 0
        a = self.seconds_per_token * self.attention_ratio / 2
        b = self.seconds_per_token * (1 + self.attention_ratio * context)
        root = 2 * seconds / (b + math.sqrt(b * b + 4 * a * seconds))  # this form is exact for a = 0 too
        return int(root * (1 + 1e-9))  # a root that is whole but for rounding stays whole


@dataclass(frozen=True, slots=True)
class TargetITL:
    """How long a step with decodes may take.

    Attributes:
        seconds: in any case.
        num_decode_steps: or so many times what its decodes alone take, if that is longer: prompts in tiny chunks would
            have the weights read again and again.
        step_time: tells how long a step will take.
        step_sizes: tokens of steps that run without padding, ascending: where prompts are cut, a step ends there.
        min_chunk_tokens: that prompts get anyway.
        max_backlog: tokens that may wait; while more do, nothing is kept, since all who wait have their first token
            sooner when prompts come first. None = the target is always kept.
    """

    seconds: float
    step_time: StepTimeModel
    num_decode_steps: float = 0.0
    step_sizes: tuple[int, ...] = ()
    min_chunk_tokens: int = MIN_CHUNK_TOKENS
    max_backlog: int | None = None

    def allowance(self, num_decodes: int) -> PromptAllowance:
        """What the prompts of a step may add to its decodes."""
        decodes = self.step_time.decodes(num_decodes)
        seconds = max(self.seconds, self.num_decode_steps * decodes) - decodes
        return PromptAllowance(self.step_time, seconds, self.min_chunk_tokens)

    def without_padding(self, num_tokens: int, room: int) -> int:
        """How many of ``room`` prompt tokens to take beside ``num_tokens`` others, so that the step is not padded."""
        fitting = bisect_right(self.step_sizes, num_tokens + room)
        whole = self.step_sizes[fitting - 1] - num_tokens if fitting else 0
        return whole if whole >= min(self.min_chunk_tokens, room) else room


class PromptAllowance:
    """What is left for the prompts of one step: seconds, and tokens that they get in any case."""

    __slots__ = ("_min_tokens", "_seconds", "_step_time")

    def __init__(self, step_time: StepTimeModel, seconds: float, min_tokens: int) -> None:
        self._step_time, self._seconds, self._min_tokens = step_time, seconds, min_tokens

    def tokens(self, context: int) -> int:
        """Tokens that a prompt may still have after ``context`` positions of its own."""
        return max(self._min_tokens, self._step_time.chunk_tokens(self._seconds, context))

    def take(self, num_tokens: int, context: int) -> None:
        """Count a chunk."""
        self._seconds -= self._step_time.chunk(num_tokens, context)
        self._min_tokens = max(self._min_tokens - num_tokens, 0)


def attention_ratio(model: ModelConfig) -> float:
    """What attention to one position costs a token, in units of all its matrix products, the lm_head's aside."""
    heads = model.num_attention_heads * model.head_dim
    kv_heads = model.num_key_value_heads * model.head_dim
    hidden = model.hidden_size
    weights = hidden * (heads + 2 * kv_heads) + heads * hidden + 3 * hidden * model.intermediate_size  # of a layer
    return _ATTENTION_COST * 2 * heads / weights  # scores and values: 4 FLOPs a number of a head; products: 2 a weight
