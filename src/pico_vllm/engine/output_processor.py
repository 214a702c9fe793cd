"""OutputProcessor: turns the core's token ids into text and outputs. The only writer of detokenizer state."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from pico_vllm.engine.detokenizer import IncrementalDetokenizer
from pico_vllm.outputs import CompletionOutput, RequestDelta, RequestMetrics, RequestOutput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pico_vllm.engine.tokenizer import Tokenizer
    from pico_vllm.outputs import EngineCoreOutput
    from pico_vllm.request import FinishReason, Request


class _RequestState:
    """What the front end remembers of one request."""

    __slots__ = (
        "arrival_s",
        "detokenizer",
        "first_token_s",
        "last_token_s",
        "prompt",
        "prompt_token_ids",
        "text",
        "token_ids",
    )

    def __init__(self, request: Request, prompt: str | None, tokenizer: Tokenizer | None) -> None:
        self.prompt = prompt
        self.prompt_token_ids = request.prompt_token_ids
        self.token_ids: list[int] = []
        self.text: list[str] = []
        self.arrival_s = time.perf_counter()
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self.detokenizer: IncrementalDetokenizer | None = None
        if tokenizer is not None and request.params.detokenize:
            self.detokenizer = IncrementalDetokenizer(
                tokenizer, request.prompt_token_ids, request.params.skip_special_tokens
            )


class OutputProcessor:
    """One state a live request; nothing is kept of a finished one."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._states: dict[str, _RequestState] = {}

    @property
    def num_requests(self) -> int:
        """Live requests."""
        return len(self._states)

    def is_live(self, request_id: str) -> bool:
        """Whether a request of this id has not ended."""
        return request_id in self._states

    def add(self, request: Request, prompt: str | None) -> None:
        """Start following a request."""
        self._states[request.request_id] = _RequestState(request, prompt, self._tokenizer)

    def process(self, outputs: Sequence[EngineCoreOutput]) -> list[RequestDelta]:
        """Detokenise one step's tokens; ends the states of finished requests."""
        now = time.perf_counter()
        deltas = []
        for output in outputs:
            state = self._states.get(output.request_id)
            if state is None:  # aborted while its step ran
                continue
            deltas.append(self._advance(output, state, now))
        return deltas

    def abort(self, request_id: str, reason: FinishReason) -> RequestDelta | None:
        """End a request without a token of its own; None when it is not live."""
        state = self._states.pop(request_id, None)
        if state is None:
            return None
        text = self._finish_text(state)
        return RequestDelta(request_id, text, (), _final_output(request_id, state, reason.value, None))

    def _advance(self, output: EngineCoreOutput, state: _RequestState, now: float) -> RequestDelta:
        text = ""
        if output.new_token_ids:
            if state.first_token_s is None:
                state.first_token_s = now
            state.last_token_s = now
            state.token_ids.extend(output.new_token_ids)
            if state.detokenizer is not None:
                text = state.detokenizer.append(output.new_token_ids)
                state.text.append(text)
        if output.finish_reason is None:
            return RequestDelta(output.request_id, text, output.new_token_ids, None)
        del self._states[output.request_id]
        text += self._finish_text(state)
        final = _final_output(output.request_id, state, output.finish_reason.value, output.stop_reason)
        return RequestDelta(output.request_id, text, output.new_token_ids, final)

    @staticmethod
    def _finish_text(state: _RequestState) -> str:
        if state.detokenizer is None:
            return ""
        text = state.detokenizer.finish()
        state.text.append(text)
        return text


def _final_output(request_id: str, state: _RequestState, finish_reason: str, stop_reason: int | None) -> RequestOutput:
    completion = CompletionOutput(
        index=0,
        text="".join(state.text),
        token_ids=state.token_ids,
        finish_reason=finish_reason,
        stop_reason=stop_reason,
    )
    return RequestOutput(
        request_id=request_id,
        prompt=state.prompt,
        prompt_token_ids=list(state.prompt_token_ids),
        outputs=[completion],
        finished=True,
        metrics=RequestMetrics(state.arrival_s, state.first_token_s, state.last_token_s),
    )
