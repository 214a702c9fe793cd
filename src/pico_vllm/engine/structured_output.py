"""StructuredOutputManager: keeps a request's output inside its JSON schema, regular expression, choice or grammar.

Lives beside the scheduler in the engine core and sees token ids only; llguidance turns a grammar and the model's
vocabulary into a matcher. The core calls ``compile`` and ``start`` when a request is added, ``masks`` in each step,
``update`` with what was sampled, and ``drop`` at an abort. It owns the matchers; nothing is kept of an ended request.

Where the time goes, on one core, with SmolLM2's 49,152 tokens / Qwen2.5's 152,000: reading the vocabulary 0.2 / 0.6 s,
once, at the first structured request (``warm_up`` does it earlier); compiling 1 ms for a typical schema and 0.25 s for
the largest accepted ones; a mask 3 … 15 us, so masks are filled in place: handing them to a thread costs more.
Compiling runs in a thread of its own and lets go of the GIL: a loop that must not wait calls ``prepare``, goes on, and
adds the request when the future is done.

When a request ends
    The grammar ends it ("stop", no EOS needed) with the token after which nothing could follow, whatever min_tokens and
    ignore_eos say. Where the text is complete but could go on, EOS and ``stop_token_ids`` are allowed; under ignore_eos
    EOS is not, unless nothing else is. max_tokens ("length"), stop strings, stop tokens that the grammar allows as text
    and aborts may cut a text short. If no token of the vocabulary can follow, or the other masks (allowed_token_ids,
    bad_words, min_tokens) forbid all that can, or a logits processor lets through what the grammar forbids, the request
    ends with "error".

A preempted request keeps its matcher: recomputed tokens were taken in when they were sampled.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import re
import reprlib
import textwrap
import threading
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pico_vllm.errors import ConfigError, RequestError
from pico_vllm.models.source import GgufSource
from pico_vllm.outputs import EngineCoreOutput
from pico_vllm.request import FinishReason
from pico_vllm.scheduler_output import GrammarMasks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from concurrent.futures import Future

    import llguidance

    from pico_vllm.config import EngineConfig
    from pico_vllm.models.source import ModelSource
    from pico_vllm.request import Request
    from pico_vllm.sampling_params import StructuredOutputsParams
    from pico_vllm.scheduler_output import SchedulerOutput

logger = logging.getLogger(__name__)

MAX_CACHED_GRAMMARS = 32
#: Between the tokens of JSON. A small model that may write white space without end does; this holds an indented line.
JSON_WHITESPACE = r"[ \n\t]{1,32}"
_MAX_ERROR_CHARS = 500


class StructuredOutputManager:
    """Compiled grammars, and a matcher a live structured request.

    Args:
        read_tokenizer_json: gives the text of the model's ``tokenizer.json``; called once, at the first need, in the
            compiling thread. A ConfigError or OSError of it refuses every structured request.
        vocab_size: rows of the model's logits; ids that the tokenizer lacks are never allowed.
        eos_token_ids: of the model; allowed where a text is complete.
    """

    def __init__(
        self, read_tokenizer_json: Callable[[], str], *, vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        self._read_tokenizer_json = read_tokenizer_json
        self._vocab_size = vocab_size
        self._eos_token_ids = [token_id for token_id in eos_token_ids if token_id < vocab_size]
        self._tokenizer: llguidance.LLTokenizer | RequestError | None = None  # touched by the one compiling thread only
        self._compiling_thread = ThreadPoolExecutor(1, thread_name_prefix="pico-vllm-grammar")
        self._lock = threading.Lock()
        #: Compiled or being compiled, errors too; the least recently used goes first. Guarded by ``_lock``.
        self._grammars: OrderedDict[StructuredOutputsParams, Future[llguidance.LLMatcher]] = OrderedDict()
        self._live: dict[str, _LiveMatcher] = {}

    @property
    def num_matchers(self) -> int:
        """Live structured requests."""
        return len(self._live)

    @property
    def num_cached_grammars(self) -> int:
        """Grammars that the next request of the same content need not compile."""
        return len(self._grammars)

    def warm_up(self) -> Future[object]:
        """Read the vocabulary now and not at the first structured request. It holds the GIL for all that time."""
        return self._compiling_thread.submit(self._get_tokenizer)

    def prepare(self, params: StructuredOutputsParams) -> Future[llguidance.LLMatcher]:
        """Begin to compile, unless that is done or under way; any thread may call this.

        Returns:
            A future. When it is done ``compile`` no longer waits, and raises what the future holds if it failed.
        """
        with self._lock:
            grammar = self._grammars.get(params)
            if grammar is None:
                grammar = self._grammars[params] = self._compiling_thread.submit(self._compile, params)
                if len(self._grammars) > MAX_CACHED_GRAMMARS:
                    self._grammars.popitem(last=False)
            else:
                self._grammars.move_to_end(params)
            return grammar

    def compile(self, request: Request) -> llguidance.LLMatcher | None:
        """Compile a request's grammar, or copy the compiled one; None for a request without.

        Raises:
            RequestError: it is not a schema, regular expression or grammar that can be compiled, or no text satisfies
                it; names what is wrong.
        """
        params = request.params.structured_outputs
        if params is None:
            return None
        try:
            return self.prepare(params).result().deep_copy()
        except RequestError as error:  # a new one: that of the cache would gather the traceback of each request
            raise RequestError(str(error)) from None

    def start(self, request: Request, matcher: llguidance.LLMatcher) -> None:
        """Follow a request that the scheduler has taken; ``matcher`` is its own from ``compile``."""
        eos = frozenset(self._eos_token_ids)
        extra_stops = sorted(i for i in request.stop_token_ids - eos if i < self._vocab_size)
        self._live[request.request_id] = _LiveMatcher(matcher, sorted(eos - request.stop_token_ids), extra_stops)

    def drop(self, request_id: str) -> None:
        """Forget a request, if it is known."""
        self._live.pop(request_id, None)

    def constrains(self, plan: SchedulerOutput) -> bool:
        """Whether a request of the step samples under a grammar."""
        return bool(self._live) and any(r.samples and r.request_id in self._live for r in plan.scheduled)

    def masks(self, plan: SchedulerOutput) -> GrammarMasks | None:
        """Which tokens may come next, for each request of a step that samples under a grammar; None if there is none.

        Needs all tokens before those of the step, and nothing else: so it is called while the device computes the step.
        A request that has ended meanwhile has no mask; what the step samples for it is discarded.
        """
        if not self._live:
            return None
        request_ids = tuple(r.request_id for r in plan.scheduled if r.samples and r.request_id in self._live)
        if not request_ids:
            return None
        bitmask = np.empty((len(request_ids), -(-self._vocab_size // 32)), dtype=np.int32)
        for request_id, row in zip(request_ids, bitmask, strict=True):
            if error := self._live[request_id].fill(row):
                logger.warning("request %s ends with an error: no token can follow (%s)", request_id, error)
        return GrammarMasks(request_ids, bitmask)

    def update(self, outputs: list[EngineCoreOutput]) -> tuple[list[EngineCoreOutput], list[str]]:
        """Take in the tokens of a step, and forget the requests that have ended.

        Returns:
            The outputs, with the ends that grammars have brought; and the ids of the requests that the grammar has
            ended while the scheduler thinks that they run.
        """
        ended: list[str] = []
        if not self._live:
            return outputs, ended
        outputs = list(outputs)
        for index, output in enumerate(outputs):
            live = self._live.get(output.request_id)
            if live is None:
                continue
            outputs[index] = updated = live.advance(output)
            if updated.finish_reason is None:
                continue
            del self._live[output.request_id]
            if output.finish_reason is None:
                ended.append(output.request_id)
        return outputs, ended

    # --------------------------------------------------------------------------------------------------- private
    def _compile(self, params: StructuredOutputsParams) -> llguidance.LLMatcher:
        """In the compiling thread: the matcher that each request of this grammar copies."""
        tokenizer = self._get_tokenizer()
        if isinstance(tokenizer, RequestError):
            raise tokenizer
        start = time.perf_counter()
        name, value = next(item for item in dataclasses.asdict(params).items() if item[1] is not None)
        try:
            matcher = _first_matcher(tokenizer, _grammar(name, value))
        except (ValueError, RecursionError) as error:  # what llguidance says; not JSON, too deep, half a surrogate pair
            problem = textwrap.shorten(str(error), _MAX_ERROR_CHARS)
            raise RequestError(f"structured_outputs.{name}={reprlib.repr(value)}: {problem}") from None
        logger.debug("structured_outputs.%s compiled in %.1f ms", name, 1e3 * (time.perf_counter() - start))
        return matcher

    def _get_tokenizer(self) -> llguidance.LLTokenizer | RequestError:
        """In the compiling thread: the vocabulary, or why there is none."""
        if self._tokenizer is None:
            import llguidance

            try:
                text = self._read_tokenizer_json()
                self._tokenizer = llguidance.LLTokenizer(text, self._vocab_size, self._eos_token_ids or None)
            except (ConfigError, OSError, ValueError) as error:
                self._tokenizer = RequestError(
                    f"structured_outputs needs the model's tokenizer.json, which can't be used here: {error}"
                )
        return self._tokenizer


class _LiveMatcher:
    """One request's place in its grammar.

    Args:
        matcher: its own.
        ignored_eos: EOS ids that would not end the request.
        extra_stops: stop tokens that llguidance takes for ordinary ones.
    """

    __slots__ = ("_extra_stops", "_ignored_eos", "_matcher")

    def __init__(self, matcher: llguidance.LLMatcher, ignored_eos: list[int], extra_stops: list[int]) -> None:
        self._matcher = matcher
        self._ignored_eos = ignored_eos
        self._extra_stops = extra_stops

    def fill(self, row: np.ndarray) -> str:
        """Write the mask of the next token; with an error (returned, else "") it allows nothing."""
        matcher = self._matcher
        matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if matcher.is_error():
            row.fill(0)
            return matcher.get_error()
        if (self._ignored_eos or self._extra_stops) and matcher.is_accepting():
            self._set_ends(row.view(np.uint32))
        return ""

    def _set_ends(self, words: np.ndarray) -> None:
        """Where the text is complete, EOS and stop tokens as the request means them."""
        with_eos = words.copy()
        _clear_bits(words, self._ignored_eos)
        _set_bits(words, self._extra_stops)
        if not words.any():
            words[:] = with_eos

    def advance(self, output: EngineCoreOutput) -> EngineCoreOutput:
        """Take in a step's tokens; the output, ended if the grammar ends with them or forbids them."""
        if output.finish_reason in (FinishReason.STOP, FinishReason.ERROR):  # the stop token is no part of the text
            return output
        for token_id in output.new_token_ids:
            if not self._matcher.consume_token(token_id):
                request_id = output.request_id
                logger.warning("request %s ends with an error: its grammar forbids token %d", request_id, token_id)
                return EngineCoreOutput(request_id, (), FinishReason.ERROR, prompt_logprobs=output.prompt_logprobs)
        if output.new_token_ids and self._matcher.is_stopped():
            return dataclasses.replace(output, finish_reason=FinishReason.STOP)
        return output


def read_tokenizer_json(config: EngineConfig, source: ModelSource) -> str:
    """Return the text of the ``tokenizer.json`` that the front end uses.

    Raises:
        ConfigError: the engine is to have no tokenizer.
        OSError: the model has no such file.
    """
    if config.skip_tokenizer_init:
        raise ConfigError("this engine has no tokenizer (skip_tokenizer_init=True)")
    if config.tokenizer is None and isinstance(source, GgufSource):
        return source.file.tokenizer_files()["tokenizer.json"]
    directory = source.path if config.tokenizer is None else Path(config.tokenizer)
    return (directory / "tokenizer.json").read_text(encoding="utf-8")


def _grammar(name: str, value: str | tuple[str, ...]) -> str:
    """What llguidance compiles; raises ValueError for what is not even JSON."""
    import llguidance

    matcher = llguidance.LLMatcher
    if not isinstance(value, str):
        return matcher.grammar_from_regex("|".join(_escaped(choice) for choice in value))
    if name == "regex":
        return matcher.grammar_from_regex(value)
    if name == "grammar":
        return matcher.grammar_from_lark(value)
    schema = json.loads(value)
    if not isinstance(schema, dict | bool):
        raise ValueError(f"a JSON schema is an object or a boolean, not {type(schema).__name__}")
    if isinstance(schema, bool):  # llguidance takes options for objects only
        value = "{}" if schema else '{"allOf": [false]}'
    return matcher.grammar_from_json_schema(value, defaults={"whitespace_pattern": JSON_WHITESPACE})


def _first_matcher(tokenizer: llguidance.LLTokenizer, grammar: str) -> llguidance.LLMatcher:
    """A matcher at its beginning; its first mask is computed, which warms it and shows whether anything can begin."""
    import llguidance

    limits = llguidance.LLParserLimits(verbose_errors=False)
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    if matcher.is_error():
        raise ValueError(matcher.get_error())
    matcher.compute_bitmask()
    if matcher.is_error():
        raise ValueError(f"no text of this model's vocabulary satisfies it ({matcher.get_error()})")
    return matcher


def _escaped(text: str) -> str:
    """A regular expression for exactly this text: an alternation compiles 5 x faster than a choice of Lark strings."""
    return re.sub(r"[^0-9A-Za-z_]", lambda match: rf"\x{{{ord(match[0]):x}}}", text)


def _set_bits(words: np.ndarray, token_ids: Iterable[int]) -> None:
    for token_id in token_ids:
        words[token_id // 32] |= np.uint32(1 << token_id % 32)


def _clear_bits(words: np.ndarray, token_ids: Iterable[int]) -> None:
    for token_id in token_ids:
        words[token_id // 32] &= ~np.uint32(1 << token_id % 32)
