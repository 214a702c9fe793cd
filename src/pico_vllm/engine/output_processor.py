"""OutputProcessor: turns the core's token ids into text, log-probabilities and outputs.

The only writer of detokenizer and stop-string state. A client's request has ``n`` samples, each a request of its own to
the core; here they come together again. Called once a step; a token of a plain request costs about a microsecond.

What the text of a sample is
    The detokenised tokens up to the first stop string. The text of a stop token (EOS or one of ``stop_token_ids``) is
    left out unless ``include_stop_str_in_output``, and then ``skip_special_tokens`` decides as for any other token: to
    see an EOS that is a special token one must ask for both. ``token_ids`` and ``logprobs`` always go up to and include
    the stop token, or the token that completed the stop string. Text that was held back because it might have become a
    stop string is given out when the sample ends otherwise. The first ``min_tokens`` tokens complete no stop string;
    one that begins in their text and is completed by a later token counts.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from pico_vllm.engine.detokenizer import IncrementalDetokenizer
from pico_vllm.engine.stop_strings import StopStrings, StopStringScanner
from pico_vllm.outputs import CompletionOutput, Logprob, RequestDelta, RequestMetrics, RequestOutput
from pico_vllm.request import FinishReason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pico_vllm.engine.tokenizer import Tokenizer
    from pico_vllm.outputs import EngineCoreOutput, TokenLogprobs
    from pico_vllm.request import Request


class OutputProcessor:
    """A state a live request and one a live sample; nothing is kept of a finished one."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._token_texts = None if tokenizer is None else _TokenTexts(tokenizer)
        self._requests: dict[str, _RequestState] = {}
        self._samples: dict[str, _SampleState] = {}  # by the core's request id

    @property
    def num_requests(self) -> int:
        """Live requests, each counted once whatever its ``n``."""
        return len(self._requests)

    def is_live(self, request_id: str) -> bool:
        """Whether a client's request, or a sample in the core, has this id and has not ended."""
        return request_id in self._requests or request_id in self._samples

    def add(self, request_id: str, requests: Sequence[Request], prompt: str | None) -> None:
        """Start following a client's request, given as its samples in the order of their index."""
        state = _RequestState(request_id, requests[0], prompt, self._token_texts)
        state.samples = [_SampleState(request, state, self._tokenizer) for request in requests]
        state.num_unfinished = len(requests)
        self._requests[request_id] = state
        for sample in state.samples:
            self._samples[sample.core_id] = sample

    def process(self, outputs: Sequence[EngineCoreOutput]) -> tuple[list[RequestDelta], list[str]]:
        """Take in one step's tokens; ends the states of finished samples and requests.

        Returns:
            What clients get, and the core's ids of requests that a stop string has ended: to be aborted there. What
            the core still sends for those, or for any id that is not live, is discarded.
        """
        now = time.perf_counter()
        deltas: list[RequestDelta] = []
        stopped_core_ids: list[str] = []
        samples = self._samples
        for output in outputs:
            sample = samples.get(output.request_id)
            if sample is None:  # ended while its step ran
                continue
            request = sample.request
            if output.prompt_logprobs:
                request.add_prompt_logprobs(output.prompt_logprobs)
            token_ids = output.new_token_ids
            if token_ids:
                request.last_token_s = now
                if request.first_token_s is None:
                    request.first_token_s = now
                if sample.index == 0 and not sample.token_ids:
                    request.num_cached_tokens = output.num_cached_tokens
            elif output.finish_reason is None:
                continue
            if sample.is_plain and output.finish_reason is None:
                text = sample.append(token_ids)
                deltas.append(RequestDelta(request.request_id, text, token_ids, None, sample.index))
                continue
            num_before = len(sample.token_ids)
            if sample.advance(output):
                stopped_core_ids.append(output.request_id)
            deltas.append(self._delta(sample, output, len(sample.token_ids) - num_before, now))
        return deltas, stopped_core_ids

    def abort(self, request_id: str) -> tuple[list[RequestDelta], list[str]]:
        """End a client's request; returns a last delta for each live sample, and their ids in the core."""
        request = self._requests.get(request_id)
        if request is None:
            return [], []
        now = time.perf_counter()
        live = [sample for sample in request.samples if sample.finish_reason is None]
        deltas = []
        for sample in live:
            text = sample.end(FinishReason.ABORT, None)
            final = self._finish(sample, now)
            ended = (sample.finish_reason, sample.stop_reason)
            deltas.append(RequestDelta(request_id, text, (), final, sample.index, None, *ended))
        return deltas, [sample.core_id for sample in live]

    def _delta(self, sample: _SampleState, output: EngineCoreOutput, num_new: int, now: float) -> RequestDelta:
        """What ``sample.advance(output)`` has added, ``num_new`` tokens among it."""
        new_logprobs = None
        if sample.logprobs is not None:
            assert len(output.logprobs) == len(output.new_token_ids), f"{output}: a token without its logprobs"
            texts = sample.request.token_texts
            new_logprobs = [_logprob_entry(logprobs, texts) for logprobs in output.logprobs[:num_new]]
            sample.logprobs += new_logprobs
            sample.cumulative_logprob += sum(logprobs.logprobs[0] for logprobs in output.logprobs[:num_new])
        final = None if sample.finish_reason is None else self._finish(sample, now)
        return RequestDelta(
            sample.request.request_id,
            sample.new_text,
            output.new_token_ids[:num_new],
            final,
            sample.index,
            new_logprobs,
            sample.finish_reason,
            sample.stop_reason,
        )

    def _finish(self, sample: _SampleState, now: float) -> RequestOutput | None:
        """Drop an ended sample; the whole output if it was its request's last."""
        del self._samples[sample.core_id]
        request = sample.request
        request.num_unfinished -= 1
        if request.num_unfinished:
            return None
        del self._requests[request.request_id]
        return request.output(now)


class _RequestState:
    """What the front end remembers of one client's request."""

    __slots__ = (
        "arrival_s",
        "first_token_s",
        "last_token_s",
        "num_cached_tokens",
        "num_unfinished",
        "prompt",
        "prompt_logprobs",
        "prompt_token_ids",
        "request_id",
        "samples",
        "stops",
        "token_texts",
    )

    def __init__(self, request_id: str, first: Request, prompt: str | None, token_texts: _TokenTexts | None) -> None:
        params = first.params
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = first.prompt_token_ids
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        if params.prompt_logprobs is not None:
            self.prompt_logprobs = [None]
        self.stops = StopStrings(params.stop, params.include_stop_str_in_output) if params.stop else None
        assert self.stops is None or token_texts is not None, "the input processor refuses stop without a tokenizer"
        self.token_texts = token_texts if params.detokenize else None
        self.arrival_s = time.perf_counter()
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self.samples: list[_SampleState] = []
        self.num_unfinished = 0
        self.num_cached_tokens: int | None = None

    def add_prompt_logprobs(self, of_prompt: Sequence[TokenLogprobs]) -> None:
        assert self.prompt_logprobs is not None, f"{self.request_id}: prompt_logprobs that nobody asked for"
        self.prompt_logprobs += [_logprob_entry(logprobs, self.token_texts) for logprobs in of_prompt]
        assert len(self.prompt_logprobs) <= len(self.prompt_token_ids), "a prompt position came twice"

    def output(self, now: float) -> RequestOutput:
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=list(self.prompt_token_ids),
            outputs=[sample.completion() for sample in self.samples],
            finished=True,
            metrics=RequestMetrics(self.arrival_s, self.first_token_s, self.last_token_s),
            prompt_logprobs=self.prompt_logprobs,
            num_cached_tokens=self.num_cached_tokens,
        )


class _SampleState:
    """What the front end remembers of one sample."""

    __slots__ = (
        "_detokenizer",
        "_include_stop_token",
        "_min_tokens",
        "_pieces",
        "_scanner",
        "_stop_token_ids",
        "core_id",
        "cumulative_logprob",
        "finish_reason",
        "index",
        "is_plain",
        "logprobs",
        "new_text",
        "request",
        "stop_reason",
        "token_ids",
    )

    def __init__(self, core_request: Request, request: _RequestState, tokenizer: Tokenizer | None) -> None:
        params = core_request.params
        self.core_id = core_request.request_id
        self.index = core_request.sample_index
        self.request = request
        self.token_ids: list[int] = []
        self.new_text = ""
        self.logprobs: list[dict[int, Logprob]] | None = None if params.logprobs is None else []
        self.cumulative_logprob = 0.0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self._stop_token_ids = core_request.stop_token_ids
        self._include_stop_token = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._pieces: list[str] = []
        self._detokenizer: IncrementalDetokenizer | None = None
        if tokenizer is not None and params.detokenize:
            self._detokenizer = IncrementalDetokenizer(
                tokenizer, core_request.prompt_token_ids, params.skip_special_tokens
            )
        self._scanner = None if request.stops is None else StopStringScanner(request.stops)
        self.is_plain = self._scanner is None and self.logprobs is None
        """Whether a step that doesn't end the sample just appends."""

    def append(self, token_ids: Sequence[int]) -> str:
        """Append tokens where there are no stop strings; returns the text that is certain now."""
        self.token_ids += token_ids
        if self._detokenizer is None:
            return ""
        text = self._detokenizer.append(token_ids)
        if text:
            self._pieces.append(text)
        return text

    def advance(self, output: EngineCoreOutput) -> bool:
        """Take in one step; True when a stop string has ended what the core would go on with."""
        token_ids = output.new_token_ids
        hides_last = (
            output.finish_reason is FinishReason.STOP
            and not self._include_stop_token
            and token_ids
            and token_ids[-1] in self._stop_token_ids
        )
        visible = token_ids[:-1] if hides_last else token_ids
        if self._scanner is None:
            self.new_text = self.append(visible)
        else:
            self.new_text = self._append_and_scan(visible)
            if self._scanner.found is not None:
                self.finish_reason, self.stop_reason = FinishReason.STOP, self._scanner.found
                return output.finish_reason is None
        if hides_last:
            self.token_ids.append(token_ids[-1])
        if output.finish_reason is not None:
            self.new_text += self.end(output.finish_reason, output.stop_reason)
        return False

    def end(self, reason: FinishReason, stop_reason: int | None) -> str:
        """End the sample and return the last of its text: half a character, or what might have become a stop string.

        The U+FFFD that stands for half a character can complete a stop string, and then that is the reason (but for
        an abort).
        """
        self.finish_reason, self.stop_reason = reason, stop_reason
        if self._detokenizer is None:
            return ""
        text = self._detokenizer.finish()
        if self._scanner is not None:
            text = self._scanner.append(text, len(self.token_ids) > self._min_tokens)
            if self._scanner.found is None:
                text += self._scanner.finish()
            elif reason is not FinishReason.ABORT:
                self.finish_reason, self.stop_reason = FinishReason.STOP, self._scanner.found
        self._pieces.append(text)
        return text

    def completion(self) -> CompletionOutput:
        return CompletionOutput(
            index=self.index,
            text="".join(self._pieces),
            token_ids=self.token_ids,
            finish_reason=None if self.finish_reason is None else self.finish_reason.value,
            stop_reason=self.stop_reason,
            logprobs=self.logprobs,
            cumulative_logprob=None if self.logprobs is None else self.cumulative_logprob,
        )

    def _append_and_scan(self, token_ids: Sequence[int]) -> str:
        """``append`` where there are stop strings: token by token, as far as the one that completes one."""
        assert self._detokenizer is not None and self._scanner is not None
        text = ""
        for token_id in token_ids:
            self.token_ids.append(token_id)
            piece = self._detokenizer.append((token_id,))
            if piece:
                text += self._scanner.append(piece, len(self.token_ids) > self._min_tokens)
                if self._scanner.found is not None:
                    break
        self._pieces.append(text)
        return text


class _TokenTexts(dict[int, str]):
    """id → text of the token alone, special tokens spelled out; a part of a character is U+FFFD, as ``decode`` has it.

    Filled at the first look-up of each id, so at most a text for each token of the vocabulary.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, token_id: int) -> str:
        text = self._tokenizer.decode([token_id], skip_special_tokens=False)
        self[token_id] = text
        return text


def _logprob_entry(logprobs: TokenLogprobs, texts: _TokenTexts | None) -> dict[int, Logprob]:
    """The chosen token first, then the best in order; the k-th best has rank k, also if it is the chosen one."""
    entry: dict[int, Logprob] = {}
    for rank, (token_id, value) in enumerate(zip(logprobs.token_ids, logprobs.logprobs, strict=True)):
        entry[token_id] = Logprob(value, rank or logprobs.rank, None if texts is None else texts[token_id])
    return entry
