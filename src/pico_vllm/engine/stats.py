"""Where a step's time goes: a record a step, and sums over many.

Two views of the same host seconds. By phase: what the host did. And by the device: ``busy_s`` while a step was on it,
``idle_s`` while none was, so that the host kept it waiting. In the plain loop the device idles in every phase but the
launch and the wait; with overlapped scheduling only before the first step of a burst. "On the device" is what the host
knows: from the launch of a step to the moment when its results are taken in. (A CPU that computes in place is busy
while the calls that compute run.) A GPU that has ended its step early idles unseen; ``num_late_steps`` counts how
often.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Host seconds of one call of the core's ``step``.

    Records add up: a core in another process may have run several steps since it was last asked.

    Attributes:
        num_steps: steps launched; 0 when the call only took in what was in flight.
        num_tokens, num_seqs: computed in them.
        schedule_s: planning.
        launch_s: building inputs and launching (on a CPU: computing) forward pass and sampling, masks included.
        wait_s: waiting for results.
        update_s: taking results into the books.
        busy_s, idle_s: of the call's whole time, with and without a step on the device.
        num_late_steps: steps launched after the GPU had ended the one before.
        awaits_caller: nothing is on the device until ``step`` is called again; of the last record.
    """

    num_steps: int = 1
    num_tokens: int = 0
    num_seqs: int = 0
    schedule_s: float = 0.0
    launch_s: float = 0.0
    wait_s: float = 0.0
    update_s: float = 0.0
    busy_s: float = 0.0
    idle_s: float = 0.0
    num_late_steps: int = 0
    awaits_caller: bool = False

    def __add__(self, other: StepTimes) -> StepTimes:
        return StepTimes(
            self.num_steps + other.num_steps,
            self.num_tokens + other.num_tokens,
            self.num_seqs + other.num_seqs,
            self.schedule_s + other.schedule_s,
            self.launch_s + other.launch_s,
            self.wait_s + other.wait_s,
            self.update_s + other.update_s,
            self.busy_s + other.busy_s,
            self.idle_s + other.idle_s,
            self.num_late_steps + other.num_late_steps,
            other.awaits_caller,
        )


@dataclass(slots=True)
class EngineStats:
    """Sums since the engine started (or its ``stats`` were replaced). Written by the engine only.

    Attributes:
        num_steps, num_tokens, num_late_steps: steps run, tokens computed in them (prompt and decode), steps that came
            late.
        num_prompt_tokens, num_output_tokens: of requests added, and handed out.
        schedule_s … output_s: seconds by phase; ``output_s`` is the front end's.
        busy_s, idle_s: seconds with and without a step on the device.
        total_s: the whole of ``step``; a core in another process computes also while nobody waits for it.
    """

    num_steps: int = 0
    num_tokens: int = 0
    num_late_steps: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    schedule_s: float = 0.0
    launch_s: float = 0.0
    wait_s: float = 0.0
    update_s: float = 0.0
    output_s: float = 0.0
    busy_s: float = 0.0
    idle_s: float = 0.0
    total_s: float = 0.0

    def add_step(self, times: StepTimes, output_s: float, total_s: float) -> None:
        """Count one call of the engine's ``step``: one step, or all that a core in another process has run."""
        self.num_steps += times.num_steps
        self.num_tokens += times.num_tokens
        self.num_late_steps += times.num_late_steps
        self.schedule_s += times.schedule_s
        self.launch_s += times.launch_s
        self.wait_s += times.wait_s
        self.update_s += times.update_s
        self.output_s += output_s
        self.busy_s += times.busy_s
        self.idle_s += times.idle_s + (output_s if times.awaits_caller else 0.0)
        self.total_s += total_s

    @property
    def overhead(self) -> float:
        """Share of the steps' time in which the host kept the device waiting, 0 … 1."""
        known_s = self.busy_s + self.idle_s
        return self.idle_s / known_s if known_s else 0.0
