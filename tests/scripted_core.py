"""An engine core whose steps a test has written down."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from pico_vllm.engine.stats import StepTimes
from pico_vllm.outputs import EngineCoreOutput
from pico_vllm.request import Request


class ScriptedCore:
    """Stands in for an EngineCore: hands out the steps it was given, and notes what it is told.

    A step that is an exception is raised.
    """

    def __init__(self, steps: Iterable[list[EngineCoreOutput] | Exception] = ()) -> None:
        self.steps = deque(steps)
        self.added: list[Request] = []
        self.aborted: list[str] = []
        self.last_times = StepTimes()
        self.is_shut_down = False

    def add_request(self, request: Request) -> None:
        self.added.append(request)

    def abort(self, request_id: str) -> bool:
        self.aborted.append(request_id)
        return True

    def has_unfinished_requests(self) -> bool:
        return bool(self.steps)

    def step(self) -> list[EngineCoreOutput]:
        step = self.steps.popleft()
        if isinstance(step, Exception):
            raise step
        return step

    def shutdown(self) -> None:
        self.is_shut_down = True
