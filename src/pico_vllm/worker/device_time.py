"""DeviceTime: how long the device had something to do, and how long the host waited for it, on the host's clock.

Written by the model runner, read by the engine core. The host can't see when a GPU ends a step, only when it was told
of it: a step counts from its launch (the inputs are ready) to the moment when its results are there. While the next
step has been launched before that moment the GPU has work without a gap, but for the late steps.
"""

from __future__ import annotations

import time


class DeviceTime:
    """Sums since the engine started."""

    def __init__(self) -> None:
        #: The host did nothing but wait for results.
        self.wait_s = 0.0
        #: Steps launched when the one before had ended though its results had not been taken in: the GPU stood still in
        #: between, nobody knows how long.
        self.num_late_steps = 0
        self._busy_s = 0.0
        self._busy_since = 0.0
        self._num_running = 0

    @property
    def busy_s(self) -> float:
        """At least one step was on the device, up to now."""
        if self._num_running == 0:
            return self._busy_s
        return self._busy_s + time.perf_counter() - self._busy_since

    def begin(self) -> None:
        """A step, or its part, has been launched."""
        if self._num_running == 0:
            self._busy_since = time.perf_counter()
        self._num_running += 1

    def end(self) -> None:
        """The oldest step or part is over."""
        self._num_running -= 1
        assert self._num_running >= 0, "more steps have ended than were begun"
        if self._num_running == 0:
            self._busy_s += time.perf_counter() - self._busy_since

    def forget_running(self) -> None:
        """What runs is given up."""
        self._busy_s, self._num_running = self.busy_s, 0
