"""Output token ids to text as they arrive, a whole character at a time.

Owns the bytes or tokens that are not text yet. Knows nothing of stop strings: the output processor decides what of the
text a client may see. Called once a step for every running request, so a token costs about a microsecond.

What the text of an output is
    The output owns every character that at least one of its bytes belongs to. So the joined pieces are
    ``tokenizer.decode(output_ids)``, exactly, with two exceptions in which the prompt has a say:

    - The prompt ends inside a character that the output goes on with: that character belongs to the output, whole.
      (If the output does not go on with it, the half is the prompt's own U+FFFD and the output knows nothing of it.)
      No character is completed across a special token of the prompt.
    - The tokenizer is not byte-level and decodes a token differently at the start of a text (SentencePiece drops its
      leading space): the output is decoded as what it is, a continuation of the prompt.

    Bytes that can never become a character, and those still incomplete at ``finish``, are U+FFFD, one for each maximal
    subpart as Unicode (and ``decode``) has it. Ids without a token give no text.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from pico_vllm.engine.tokenizer import Tokenizer

_MAX_INCOMPLETE_BYTES = 3  # of a UTF-8 character of four
_NUM_CONTEXT_TOKENS = 8  # of the prompt, for tokenizers whose tokens depend on what stands before them
_NewUtf8Decoder = codecs.getincrementaldecoder("utf-8")


class IncrementalDetokenizer:
    """Text of one request's output so far.

    Args:
        tokenizer: shared; its id → bytes table is used where there is one.
        prompt_token_ids: only the end of it is looked at.
        skip_special_tokens: leave special tokens out of the text.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skip_special_tokens: bool = True) -> None:
        stream_type = _ByteLevelStream if tokenizer.is_byte_level else _WindowStream
        self._stream: _Stream = stream_type(tokenizer, prompt_token_ids, skip_special_tokens)
        self._pieces: list[str] = []
        self._is_finished = False

    def append(self, token_ids: Sequence[int]) -> str:
        """Take new output tokens and return the text that is certain now and was not before, maybe "".

        O(1) amortised a token: under 1 µs for a byte-level tokenizer.
        """
        assert not self._is_finished, "append after finish"
        piece = self._stream.append(token_ids)
        if piece:
            self._pieces.append(piece)
        return piece

    def finish(self) -> str:
        """Return what was held back, incomplete bytes as U+FFFD. Once; later calls return ""."""
        if self._is_finished:
            return ""
        self._is_finished = True
        piece = self._stream.finish()
        if piece:
            self._pieces.append(piece)
        return piece

    @property
    def text(self) -> str:
        """All pieces joined. Costs O(length) after each append: use the pieces on the step path."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""


class _Stream(Protocol):
    def append(self, token_ids: Sequence[int]) -> str: ...

    def finish(self) -> str: ...


class _ByteLevelStream:
    """Tokens are bytes: an incremental UTF-8 decoder does the rest."""

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._bytes_of = tokenizer.byte_table(skip_special_tokens)
        self._decoder = _NewUtf8Decoder("replace")
        self._prompt_tail = _incomplete_tail(prompt_token_ids, tokenizer)

    def append(self, token_ids: Sequence[int]) -> str:
        bytes_of = self._bytes_of
        data = bytes_of[token_ids[0]] if len(token_ids) == 1 else b"".join([bytes_of[i] for i in token_ids])
        if self._prompt_tail and data:
            if _may_continue(self._prompt_tail, data):
                data = self._prompt_tail + data
            self._prompt_tail = b""
        return self._decoder.decode(data)

    def finish(self) -> str:
        return self._decoder.decode(b"", True)


class _WindowStream:
    """Any other tokenizer: decode the new tokens after a few old ones and take what the old ones did not give.

    A window is closed, and its text handed out, when later tokens cannot change it: never behind a token that stands
    for a single byte (a run of those is decoded as a whole) nor behind a U+FFFD that may become a character.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skipped = frozenset(tokenizer.all_special_ids) if skip_special_tokens else frozenset()
        tail = list(prompt_token_ids[-_NUM_CONTEXT_TOKENS:])
        run_start = self._byte_run_start(tail)
        self._context = self._visible(tail[:run_start])
        self._prompt_run = tail[run_start:]
        self._pending: list[int] = []
        self._has_begun = False

    def append(self, token_ids: Sequence[int]) -> str:
        self._pending += self._visible(token_ids)
        if self._pending and not self._has_begun:
            self._begin()
        if not self._pending or self._tokenizer.is_byte_fallback(self._pending[-1]):
            return ""
        text = self._window_text()
        if not text or text.endswith("\ufffd"):
            return ""
        self._context, self._pending = self._pending, []
        return text

    def finish(self) -> str:
        return self._window_text() if self._pending else ""

    def _visible(self, token_ids: Sequence[int]) -> list[int]:
        """The tokens that decode to something: it drops the others before anything else, and so do we."""
        tokens = self._tokenizer.convert_ids_to_tokens(token_ids)
        return [
            token_id
            for token_id, token in zip(token_ids, tokens, strict=True)
            if token is not None and token_id not in self._skipped
        ]

    def _window_text(self) -> str:
        # What is skipped has been dropped already, so nothing is here.
        before = self._tokenizer.decode(self._context, skip_special_tokens=False)
        return self._tokenizer.decode(self._context + self._pending, skip_special_tokens=False)[len(before) :]

    def _byte_run_start(self, token_ids: Sequence[int]) -> int:
        """Where the run of byte tokens begins that ends a list."""
        start = len(token_ids)
        while start > 0 and self._tokenizer.is_byte_fallback(token_ids[start - 1]):
            start -= 1
        return start

    def _begin(self) -> None:
        """Cut between prompt and output, now that the output's first token says where a character may begin."""
        self._has_begun = True
        first = self._pending[0]
        if not self._tokenizer.is_byte_fallback(first):
            self._context += self._prompt_run
            return
        # A run of byte tokens has no prefix that is certain: what of it is the prompt's must not stand before ours.
        self._context = self._context[: self._byte_run_start(self._context)]
        bytes_of = self._tokenizer.token_bytes
        incomplete = _incomplete_suffix(b"".join(map(bytes_of, self._prompt_run)))
        if incomplete and _may_continue(incomplete, bytes_of(first)):
            self._pending = self._prompt_run[-len(incomplete) :] + self._pending


def _incomplete_tail(prompt_token_ids: Sequence[int], tokenizer: Tokenizer) -> bytes:
    """The bytes at the end of a prompt that begin a character and do not end it."""
    bytes_of = tokenizer.byte_table(False)
    tail = b""
    for token_id in reversed(prompt_token_ids):
        tail = bytes_of[token_id] + tail
        if len(tail) >= _MAX_INCOMPLETE_BYTES:
            break
    return _incomplete_suffix(tail)


def _incomplete_suffix(data: bytes) -> bytes:
    last = data[-_MAX_INCOMPLETE_BYTES:]  # starting inside a character does no harm: UTF-8 finds its feet again
    _, num_decoded = codecs.utf_8_decode(last, "replace", False)
    return last[num_decoded:]


def _may_continue(incomplete: bytes, data: bytes) -> bool:
    """Whether the first byte of data belongs to the same character (or maximal subpart of one) as incomplete."""
    both = incomplete + data[:1]
    try:
        both.decode()
    except UnicodeDecodeError as error:
        return error.end == len(both)
    return True
