"""Request: one generation as the scheduler sees it. No tensors, no blocks, no text.

Only the scheduler writes the mutable fields. The front end keeps its own record (prompt text, detokenizer).
"""

from __future__ import annotations

import enum
from array import array
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pico_vllm.sampling_params import SamplingParams


class RequestStatus(enum.Enum):
    """Where a request stands. WAITING covers new and preempted requests alike: both have KV to compute."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


class FinishReason(enum.StrEnum):
    """Why a request ended; the values are those of the OpenAI API where it has one."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    #: Masks (allowed ids, bad words, grammar, min_tokens) left no token to choose from, or the device no memory.
    ERROR = "error"


class Request:
    """One generation.

    Args:
        request_id: unique among the live requests of an engine.
        prompt_token_ids: at least one id.
        params: how to sample and when to stop; ``params.max_tokens`` has been resolved by the front end (never None).
        seed: the seed that keys this request's samples (``params.seed``, or one drawn by the front end).
        eos_token_ids: ids that end the request unless ``params.ignore_eos``.
        sample_index: which of a prompt's ``n`` samples this is; each is a request of its own.
        bad_words_token_ids: ``params.bad_words`` as the front end has tokenised them.
        cache_salt: only requests with the same one share KV; None is one too.
    """

    __slots__ = (
        "_packed_prompt",
        "bad_words_token_ids",
        "cache_salt",
        "max_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_inflight_samples",
        "num_inflight_tokens",
        "num_preemptions",
        "num_prefill_tokens",
        "num_prompt_logprobs",
        "num_prompt_tokens",
        "output_token_ids",
        "params",
        "prompt_token_ids",
        "request_id",
        "sample_index",
        "seed",
        "status",
        "stop_token_ids",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        seed: int = 0,
        eos_token_ids: Sequence[int] = (),
        sample_index: int = 0,
        bad_words_token_ids: tuple[tuple[int, ...], ...] = (),
        cache_salt: str | None = None,
    ) -> None:
        assert len(prompt_token_ids) > 0, "the front end refuses empty prompts"
        assert params.max_tokens is not None, "the front end resolves max_tokens=None"
        self.request_id = request_id
        self.prompt_token_ids = tuple(prompt_token_ids)
        self.num_prompt_tokens = len(self.prompt_token_ids)
        self.params = params
        #: Output tokens at most; the scheduler lowers it to what max_model_len leaves.
        self.max_tokens: int = params.max_tokens
        self.seed = seed
        self.sample_index = sample_index
        self.bad_words_token_ids = bad_words_token_ids
        self.cache_salt = cache_salt
        self._packed_prompt: bytes | None = None
        self.stop_token_ids = frozenset(params.stop_token_ids) | (
            frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        )
        self.status = RequestStatus.WAITING
        self.output_token_ids: list[int] = []
        #: Tokens whose KV is in the cache. A prefix hit, a finished chunk and KV from elsewhere all just raise it.
        self.num_computed_tokens = 0
        #: Tokens that are scheduled but not back yet; 0 between steps of the plain (not overlapped) loop.
        self.num_inflight_tokens = 0
        #: Steps in flight that will give the request a token; likewise.
        self.num_inflight_samples = 0
        #: Tokens known when the request was last admitted: the worker's row began with them and samples the later ones.
        self.num_prefill_tokens = 0
        self.num_preemptions = 0
        #: Prompt tokens that had not to be computed when it was first admitted.
        self.num_cached_tokens = 0
        #: Prompt tokens whose logprobs have been asked for, from position 1 on.
        self.num_prompt_logprobs = 0

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens known so far."""
        return self.num_prompt_tokens + len(self.output_token_ids)

    @property
    def num_tokens_with_inflight(self) -> int:
        """The same, with the tokens that steps in flight will give: their ids are known on the device only."""
        return self.num_tokens + self.num_inflight_samples

    @property
    def last_token_is_inflight(self) -> bool:
        """Whether no token is left to ask for, though the request still runs."""
        return len(self.output_token_ids) + self.num_inflight_samples >= self.max_tokens

    @property
    def needs_host_token(self) -> bool:
        """Whether a step must wait until the host knows the last token: a client's own functions are told of it."""
        return bool(self.params.logits_processors)

    @property
    def packed_prompt(self) -> bytes:
        """The prompt as 32-bit integers, which the radix tree compares; made once."""
        if self._packed_prompt is None:
            self._packed_prompt = array("I", self.prompt_token_ids).tobytes()  # unsigned: twice as fast
        return self._packed_prompt

    @property
    def num_skippable_tokens(self) -> int:
        """Leading known tokens that need not be computed where their KV is there: nobody wants their logits.

        (The last known token is computed in any case.)
        """
        if self.params.prompt_logprobs is None or self.num_prompt_logprobs >= self.num_prompt_tokens - 1:
            return self.num_tokens
        return self.num_prompt_logprobs

    def token_ids(self, start: int, end: int) -> tuple[int, ...]:
        """Ids of positions [start, end) over prompt and output."""
        split = self.num_prompt_tokens
        if end <= split:
            return self.prompt_token_ids[start:end]
        output = tuple(self.output_token_ids[max(start - split, 0) : end - split])
        return self.prompt_token_ids[start:split] + output if start < split else output

    @property
    def samples_from_history(self) -> bool:
        """Whether sampling needs to know the request's tokens."""
        params = self.params
        return params.has_penalties or bool(self.bad_words_token_ids) or bool(params.logits_processors)

    def take_prompt_targets(self, start: int, end: int) -> tuple[tuple[int, ...], int]:
        """Prompt tokens that positions [start, end) predict, each handed out once, and the position of the first.

        Recomputation after a preemption begins at 0 again; what has been delivered is not asked for again.
        """
        first = max(start, self.num_prompt_logprobs)
        targets = self.prompt_token_ids[first + 1 : end + 1]
        self.num_prompt_logprobs += len(targets)
        return targets, first

    def give_back_prompt_targets(self, targets: tuple[int, ...]) -> None:
        """Take back what ``take_prompt_targets`` has handed out last, for a step that will never come back."""
        self.num_prompt_logprobs -= len(targets)

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.name}, prompt={self.num_prompt_tokens}, "
            f"output={len(self.output_token_ids)}, computed={self.num_computed_tokens})"
        )
