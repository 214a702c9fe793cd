"""LogitsProcessors: everything that changes logits before a token is chosen, for all rows of a step at once.

Keeps what a row needs beside its block table: bias and masks that never change, counts of its tokens, the words it must
not say. Tables over the vocabulary are made when the first request needs them. A step whose rows ask for nothing costs
one look at a flag array. The order is that of ``docs/sampling.md``.

Nothing here waits for the device, so a step can be prepared and sampled beside the one before it. A client's own
functions want the ids so far on the host: the scheduler does not schedule their requests until it knows the last one,
and ``custom_outputs`` says where the runner adds it when it is there.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np
import torch

from pico_vllm.worker.host_ring import HostRing

if TYPE_CHECKING:
    from pico_vllm.kernels.backend import KernelBackend
    from pico_vllm.sampling_params import LogitsProcessor
    from pico_vllm.scheduler_output import NewRequestData

logger = logging.getLogger(__name__)

_NEG_INF = float("-inf")
_ANY = -1  # in a prefix: left of where the word begins
_NONE = -2  # in recent ids: before the first token


class LogitsProcessors:
    """State of the rows.

    Args:
        max_num_seqs: rows.
        vocab_size: of the logits.
        device: where the tables are.
        ring: what is sent there from; None = one of its own.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device, ring: HostRing | None = None) -> None:
        self._shape = (max_num_seqs, vocab_size)
        self._device = device
        self._ring = HostRing(device, max_num_seqs) if ring is None else ring
        self._active = np.zeros(max_num_seqs, dtype=np.bool_)  # any of the below
        self._num_active = 0
        self._has_bias = np.zeros(max_num_seqs, dtype=np.bool_)
        self._has_penalties = np.zeros(max_num_seqs, dtype=np.bool_)
        self._penalties = np.ones((3, max_num_seqs), dtype=np.float32)  # repetition, presence, frequency
        self._min_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self._stop_ids: dict[int, np.ndarray] = {}
        self._bad_words: dict[int, list[tuple[int, ...]]] = {}  # of two tokens or more
        self._custom: dict[int, tuple[tuple[LogitsProcessor, ...], list[int]]] = {}  # functions, output ids so far
        self._bias: torch.Tensor | None = None  # [max_num_seqs, vocab_size] fp32
        self._in_prompt: torch.Tensor | None = None  # [max_num_seqs, vocab_size] bool
        self._output_counts: torch.Tensor | None = None  # [max_num_seqs, vocab_size] int32
        self._recent_ids = torch.empty(max_num_seqs, 0, dtype=torch.int64, device=device)
        self._minus_infinity = torch.full((), _NEG_INF, dtype=torch.float32, device=device)
        self._packed_bad_words: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    def add(self, row: int, new: NewRequestData) -> None:
        """Take over what a new request asks for; ``drop`` has cleared the row."""
        params = new.params
        bias = dict(params.logit_bias or {})
        single = [word[0] for word in new.bad_words_token_ids if len(word) == 1]
        if bias or single or params.allowed_token_ids is not None:
            self._set_bias(row, bias, single, params.allowed_token_ids)
        if params.has_penalties:
            self._penalties[:, row] = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
            self._count_known(row, new.known_token_ids, new.num_prompt_tokens)
        # A checkpoint may name an EOS that the model has no logit for.
        if params.min_tokens and (stop_ids := [i for i in new.stop_token_ids if i < self._shape[1]]):
            self._min_tokens[row] = params.min_tokens
            self._stop_ids[row] = np.array(stop_ids, dtype=np.int64)
        if words := [word for word in new.bad_words_token_ids if len(word) > 1]:
            self._bad_words[row] = words
            self._remember_recent(row, new.known_token_ids, max(map(len, words)) - 1)
        if params.logits_processors:
            self._custom[row] = (params.logits_processors, list(new.known_token_ids[new.num_prompt_tokens :]))
        self._active[row] = bool(
            self._has_bias[row]
            or self._has_penalties[row]
            or row in self._stop_ids
            or row in self._bad_words
            or row in self._custom
        )
        self._num_active += int(self._active[row])

    def drop(self, row: int) -> None:
        """Forget a row."""
        if not self._active[row]:
            return
        self._num_active -= 1
        self._active[row] = self._has_bias[row] = self._has_penalties[row] = False
        self._min_tokens[row] = 0
        self._stop_ids.pop(row, None)
        self._custom.pop(row, None)
        if self._bad_words.pop(row, None) is not None:
            self._packed_bad_words = None

    def any_active(self, rows: np.ndarray) -> bool:
        """Whether logits of any of these rows would change."""
        return self._num_active > 0 and bool(self._active[rows].any())

    def apply(self, logits: torch.Tensor, rows: np.ndarray, positions: np.ndarray, backend: KernelBackend) -> None:
        """Change logits in place; grammar masks are applied by the sampler before this.

        Args:
            logits: [L, vocab_size] fp32.
            rows: [L] row of each.
            positions: [L] index of the token in its request's output.
            backend: its ops.
        """
        if (biased := self._has_bias[rows]).any():
            assert self._bias is not None
            indices, device_rows = self._ring.send(np.flatnonzero(biased), rows[biased])
            logits.index_add_(0, indices, self._bias.index_select(0, device_rows))
        if self._bad_words and len(rows):
            self._mask_bad_words(logits, rows)
        if self._stop_ids:
            self._mask_stop_ids(logits, rows, positions)
        if (penalised := self._has_penalties[rows]).any():
            self._penalise(logits, rows, np.flatnonzero(penalised), backend)
        for index, row in enumerate(rows.tolist()) if self._custom else ():
            if row in self._custom:
                self._call_custom(logits[index], *self._custom[row])

    def record(self, rows: np.ndarray, token_ids: torch.Tensor) -> None:
        """Count sampled ids ([L] int64) of these rows."""
        if not self.any_active(rows):
            return
        if self._output_counts is not None and (penalised := self._has_penalties[rows]).any():
            indices, device_rows = self._ring.send(np.flatnonzero(penalised), rows[penalised])
            ids = token_ids[indices]
            ones = torch.ones_like(ids, dtype=torch.int32)
            self._output_counts.index_put_((device_rows, ids), ones, accumulate=True)
        if self._bad_words:
            device_rows = self._to_device(rows)
            shifted = torch.cat((self._recent_ids[device_rows], token_ids[:, None]), dim=1)[:, 1:]
            self._recent_ids[device_rows] = shifted

    def custom_outputs(self, rows: np.ndarray) -> list[tuple[int, list[int]]]:
        """Among these sampled rows, the indices of those with custom functions, and the lists of their output ids.

        The caller appends the sampled id when it knows it; the row may have another owner by then, the list has not.
        """
        if not self._custom:
            return []
        return [(index, self._custom[row][1]) for index, row in enumerate(rows.tolist()) if row in self._custom]

    # --------------------------------------------------------------------------------------------------- private
    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return self._ring.send(array)[0]

    def _set_bias(self, row: int, bias: dict[int, float], banned: list[int], allowed: tuple[int, ...] | None) -> None:
        if self._bias is None:
            self._bias = torch.zeros(self._shape, dtype=torch.float32, device=self._device)
        table = self._bias[row]
        table.fill_(0.0 if allowed is None else _NEG_INF)
        if allowed is not None:
            table.index_fill_(0, self._to_device(np.array(allowed, dtype=np.int64)), 0.0)
        if bias:
            ids, values = np.array(list(bias), dtype=np.int64), np.array(list(bias.values()), dtype=np.float32)
            table.index_add_(0, *self._ring.send(ids, values))
        if banned:
            table.index_fill_(0, self._to_device(np.array(banned, dtype=np.int64)), _NEG_INF)
        self._has_bias[row] = True

    def _count_known(self, row: int, known: tuple[int, ...], num_prompt_tokens: int) -> None:
        if self._in_prompt is None or self._output_counts is None:
            self._in_prompt = torch.zeros(self._shape, dtype=torch.bool, device=self._device)
            self._output_counts = torch.zeros(self._shape, dtype=torch.int32, device=self._device)
        ids = self._to_device(np.array(known, dtype=np.int64))
        self._in_prompt[row].zero_().index_fill_(0, ids[:num_prompt_tokens], True)
        output = ids[num_prompt_tokens:]
        self._output_counts[row].zero_().index_put_(
            (output,), torch.ones_like(output, dtype=torch.int32), accumulate=True
        )
        self._has_penalties[row] = True

    def _penalise(self, logits: torch.Tensor, rows: np.ndarray, penalised: np.ndarray, backend: KernelBackend) -> None:
        assert self._in_prompt is not None and self._output_counts is not None
        indices, table_rows = self._to_device(penalised), self._to_device(rows[penalised])
        repetition, presence, frequency = self._to_device(self._penalties[:, rows[penalised]])
        changed = logits[indices]
        in_prompt, counts = self._in_prompt[table_rows], self._output_counts[table_rows]
        backend.apply_penalties(changed, in_prompt, counts, repetition, presence, frequency)
        logits[indices] = changed

    @staticmethod
    def _call_custom(logits: torch.Tensor, functions: tuple[LogitsProcessor, ...], output_ids: list[int]) -> None:
        """Let a client's functions change a row in place; one that raises ends its own request and no other."""
        try:
            for function in functions:
                logits.copy_(function(output_ids, logits))
        except Exception:
            logger.exception("a logits processor has failed; its request ends with finish_reason='error'")
            logits.fill_(_NEG_INF)

    def _mask_stop_ids(self, logits: torch.Tensor, rows: np.ndarray, positions: np.ndarray) -> None:
        """Before ``min_tokens`` nothing may end the request."""
        waiting = np.flatnonzero(positions < self._min_tokens[rows])
        if len(waiting) == 0:
            return
        ids = [self._stop_ids[row] for row in rows[waiting].tolist()]
        indices = np.repeat(waiting, [len(i) for i in ids])
        rows_and_ids = self._ring.send(indices, np.concatenate(ids))
        logits.index_put_(tuple(rows_and_ids), self._minus_infinity)  # a number of the host's would have to be sent

    def _remember_recent(self, row: int, known: tuple[int, ...], length: int) -> None:
        width = self._recent_ids.shape[1]
        if length > width:
            padding = torch.full((self._shape[0], length - width), _NONE, dtype=torch.int64, device=self._device)
            self._recent_ids = torch.cat((padding, self._recent_ids), dim=1)
            width = length
        tail = known[-width:]
        self._recent_ids[row] = _NONE
        if tail:
            self._recent_ids[row, width - len(tail) :] = self._to_device(np.array(tail, dtype=np.int64))
        self._packed_bad_words = None

    def _mask_bad_words(self, logits: torch.Tensor, rows: np.ndarray) -> None:
        """Mask the last token of every word whose other tokens have just been said."""
        if self._packed_bad_words is None:
            self._packed_bad_words = self._pack_bad_words()
        word_rows, prefixes, last_ids = self._packed_bad_words
        index_of_row = torch.full((self._shape[0],), -1, dtype=torch.int64, device=self._device)
        index_of_row[self._to_device(rows)] = torch.arange(len(rows), device=self._device)
        indices = index_of_row[word_rows]  # [num_words]; -1: the row isn't sampled in this step
        said = ((self._recent_ids[word_rows] == prefixes) | (prefixes == _ANY)).all(dim=1) & (indices >= 0)
        mask = torch.where(said, _NEG_INF, 0.0)  # added everywhere: to pick the words out, the host would have to wait
        logits.index_put_((indices.clamp(min=0), last_ids), mask, accumulate=True)

    def _pack_bad_words(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows [num_words], prefixes [num_words, width] padded on the left, last ids [num_words]."""
        width = self._recent_ids.shape[1]
        words = [(row, word) for row, of_row in self._bad_words.items() for word in of_row]
        prefixes = [[_ANY] * (width + 1 - len(word)) + list(word[:-1]) for _, word in words]
        columns = ([row for row, _ in words], prefixes, [word[-1] for _, word in words])
        rows, packed, last_ids = self._ring.send(*(np.array(column, dtype=np.int64) for column in columns))
        return rows, packed, last_ids
