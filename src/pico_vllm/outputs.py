"""What comes out: EngineCoreOutput (ids, from the core) and RequestOutput (text, for the client)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pico_vllm.request import FinishReason


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position, of the model's own distribution.

    Attributes:
        token_ids: the chosen (or prompt) token first, then the best ones in descending order; the chosen one may be
            among them again.
        logprobs: natural logarithms, one a token.
        rank: of the chosen token, 1 = the most likely.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    rank: int


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's log-probability as a client sees it; ``decoded_token`` is None without a tokenizer."""

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(frozen=True, slots=True)
class EngineCoreOutput:
    """The new tokens of one request after one step."""

    request_id: str
    new_token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    #: The stop token that ended the request, if one did and it was not the model's own EOS.
    stop_reason: int | None = None
    #: One for each new token, if the request asked for logprobs.
    logprobs: tuple[TokenLogprobs, ...] = ()
    #: Of the prompt positions that this step computed, in order; the first is position 1. Only if asked for.
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    #: Prompt tokens that had not to be computed, because their KV was in the prefix cache.
    num_cached_tokens: int = 0


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
        index: which of the request's ``n`` samples this is.
        text: detokenised output so far; never ends in half a character before the request is finished.
        token_ids: output ids so far, the stop token included.
        finish_reason: "stop", "length", "abort", or None while running.
        stop_reason: the id from ``stop_token_ids`` or the text from ``stop`` that ended the request; None for EOS and
            every other reason.
        logprobs: a mapping of token id to Logprob for each output token: the chosen one and the best ones.
        cumulative_logprob: sum over the chosen tokens; None without logprobs.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The state of one request: cumulative text and ids.

    ``prompt_logprobs`` has an entry a prompt token and starts with None: nothing predicts the first one.
    ``num_cached_tokens`` counts the prompt tokens whose KV was in the prefix cache, for the first sample: it is None
    until that one has its first token.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    metrics: RequestMetrics | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class RequestDelta:
    """What one step added to a request: the unit of streaming.

    Attributes:
        new_text: text that became final in this step; the deltas of a request join to its final text exactly.
        new_token_ids: ids of this step.
        final: the whole request, set in its last delta.
        index: which of the request's ``n`` samples advanced.
        new_logprobs: a mapping for each new token, if asked for.
        finish_reason, stop_reason: set in the last delta of a sample.
    """

    request_id: str
    new_text: str
    new_token_ids: tuple[int, ...]
    final: RequestOutput | None = None
    index: int = 0
    new_logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
