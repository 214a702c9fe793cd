"""What comes out: EngineCoreOutput (ids, from the core) and RequestOutput (text, for the client)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pico_vllm.request import FinishReason


@dataclass(frozen=True, slots=True)
class EngineCoreOutput:
    """The new tokens of one request after one step."""

    request_id: str
    new_token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    #: The stop token that ended the request, if one did and it was not the model's own EOS.
    stop_reason: int | None = None


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times of one request, ``time.perf_counter`` seconds."""

    arrival_s: float
    first_token_s: float | None = None
    last_token_s: float | None = None


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One completion of a prompt.

    Attributes:
        index: which of the request's samples this is (always 0 until ``n`` is implemented).
        text: detokenised output so far; never ends in half a character before the request is finished.
        token_ids: output ids so far, the stop token included.
        finish_reason: "stop", "length", "abort", or None while running.
        stop_reason: the id from ``stop_token_ids`` that ended the request; None for EOS and every other reason.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The state of one request: cumulative text and ids."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    metrics: RequestMetrics | None = None


@dataclass(frozen=True, slots=True)
class RequestDelta:
    """What one step added to a request: the unit of streaming.

    Attributes:
        new_text: text that became final in this step; the deltas of a request join to its final text exactly.
        new_token_ids: ids of this step.
        final: the whole request, set in its last delta.
    """

    request_id: str
    new_text: str
    new_token_ids: tuple[int, ...]
    final: RequestOutput | None = None
