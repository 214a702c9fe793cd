"""Where a step's time goes: a record a step, and sums over many."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Host seconds of a step by phase. ``execute_s`` contains ``forward_s`` (the model and the sampler).

    Records add up: a core in another process may have run several steps since it was last asked.
    """

    num_steps: int = 1
    num_tokens: int = 0
    num_seqs: int = 0
    schedule_s: float = 0.0
    execute_s: float = 0.0
    forward_s: float = 0.0
    update_s: float = 0.0

    def __add__(self, other: StepTimes) -> StepTimes:
        return StepTimes(
            self.num_steps + other.num_steps,
            self.num_tokens + other.num_tokens,
            self.num_seqs + other.num_seqs,
            self.schedule_s + other.schedule_s,
            self.execute_s + other.execute_s,
            self.forward_s + other.forward_s,
            self.update_s + other.update_s,
        )


@dataclass(slots=True)
class EngineStats:
    """Sums since the engine started (or its ``stats`` were replaced). Written by the engine only.

    Attributes:
        num_steps, num_tokens: steps run, tokens computed in them (prompt and decode).
        num_prompt_tokens, num_output_tokens: of requests added, and handed out.
        schedule_s … output_s: seconds by phase; ``total_s`` is the whole of ``step``.
    """

    num_steps: int = 0
    num_tokens: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    schedule_s: float = 0.0
    build_s: float = 0.0
    forward_s: float = 0.0
    update_s: float = 0.0
    output_s: float = 0.0
    total_s: float = 0.0

    def add_step(self, times: StepTimes, output_s: float, total_s: float) -> None:
        """Count one call of the engine's ``step``: one step, or all that a core in another process has run."""
        self.num_steps += times.num_steps
        self.num_tokens += times.num_tokens
        self.schedule_s += times.schedule_s
        self.build_s += times.execute_s - times.forward_s
        self.forward_s += times.forward_s
        self.update_s += times.update_s
        self.output_s += output_s
        self.total_s += total_s

    @property
    def overhead(self) -> float:
        """Share of the steps' time spent outside the model's forward pass and the sampler, 0 … 1.

        A core in another process computes also while nobody waits for it: then what the engine waited can be less.
        """
        return max(0.0, 1.0 - self.forward_s / self.total_s) if self.total_s else 0.0
