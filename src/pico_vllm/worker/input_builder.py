"""InputBuilder: keeps a row for each live request and turns a SchedulerOutput into a ForwardBatch.

The scheduler sends only what is new; what a request has accumulated (block table, sampling parameters, last sampled id)
stays in its row. Host arithmetic is vectorised numpy; of an eager step one packed int32 copy reaches the device (a
captured one has its own, see ``cuda_graph``, and one of each new block table), and two of sampling parameters where
rows are not greedy. A step is built while the one before it runs, and nothing here waits for that one. Only this class
writes the rows.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from pico_vllm.forward_batch import ForwardBatch
from pico_vllm.worker.host_ring import HostRing
from pico_vllm.worker.logits_processors import LogitsProcessors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pico_vllm.scheduler_output import ScheduledRequest, SchedulerOutput

_INT32 = np.int32
_NO_ID = bytes(4)
#: Block tables that are copied one by one. Mostly there is one, that of a new prompt; after eager steps there are many.
_FEW_ROWS = 3
_MAX_FLOAT32 = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True)
class RandomSampling:
    """Parameters of the rows of a step in which at least one is not greedy.

    Attributes:
        greedy: [S] bool.
        temperature, top_p: [S] fp32 (1 where greedy).
        min_p: [S] fp32, or None when it is 0 for all.
        top_k: [S] int64 (0 where greedy).
        seeds: [S] int64, the bits of an unsigned 64-bit seed.
        sample_indices: [S] int64, which of a prompt's parallel samples.
        positions: [S] int64, index of the token in its request's output.
    """

    greedy: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor | None
    seeds: torch.Tensor
    sample_indices: torch.Tensor
    positions: torch.Tensor


@dataclass(frozen=True, slots=True)
class PromptLogprobsBatch:
    """Prompt positions whose logprobs are wanted: the logits rows after the sampled ones.

    Attributes:
        targets: [P] int64, the token that follows each position.
        counts: positions of each scheduled request, in its order; sums to P.
        num_best: best tokens of each request.
    """

    targets: torch.Tensor
    counts: tuple[int, ...]
    num_best: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """How to choose a token for each of the first S rows of logits (``ForwardBatch.logits_indices``).

    Attributes:
        rows, positions: [S] on the host, device row of each, and the index of the token in its request's output.
        random: None when every row is greedy.
        num_logprobs: best tokens to report of each row, -1 = no logprobs; () when nobody asked.
        prompt_logprobs: None when nobody asked.
    """

    rows: np.ndarray
    positions: np.ndarray
    random: RandomSampling | None
    num_logprobs: tuple[int, ...] = ()
    prompt_logprobs: PromptLogprobsBatch | None = None

    @property
    def is_greedy(self) -> bool:
        """Whether all that is wanted are the ids of the largest logits."""
        return self.random is None and not self.num_logprobs and self.prompt_logprobs is None


@dataclass(frozen=True, slots=True)
class HostBatch:
    """A step laid out on the host: what becomes a ``ForwardBatch``, as numpy arrays, and what sampling needs.

    Attributes:
        host_ids: [T], 0 where the last sampled id of a row belongs; empty when they all do.
        positions, slot_mapping, query_start_loc, seq_lens, logits_indices: as in ``ForwardBatch``.
        rows: [S], device row of each sequence.
        new_block_ids: [D], the block that begins with this step's token, -1 = none, of the first sequences: those whose
            blocks reach ``block_table_rows`` on the device. D = 0 but in ``lay_out_mixed``.
        continued: the sequences that continue with their last sampled id.
        sampled_rows, sampled_lens: [S], device row of each sampled sequence, and its length.
        prompt_logprobs: None when nobody asked.
    """

    host_ids: np.ndarray
    positions: np.ndarray
    slot_mapping: np.ndarray
    query_start_loc: np.ndarray
    seq_lens: np.ndarray
    logits_indices: np.ndarray
    rows: np.ndarray
    new_block_ids: np.ndarray
    continued: list[int]
    sampled_rows: np.ndarray
    sampled_lens: np.ndarray
    prompt_logprobs: PromptLogprobsBatch | None


class InputBuilder:
    """Rows on host and device.

    Args:
        max_num_seqs: rows.
        max_blocks_per_seq: width of a block table.
        block_size: tokens a block.
        vocab_size: of the logits.
        device: where batches are built for.
        ring: what they are sent from; None = one of its own.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_blocks_per_seq: int,
        block_size: int,
        vocab_size: int,
        device: torch.device,
        ring: HostRing | None = None,
    ) -> None:
        self._ring = HostRing(device, max_num_seqs) if ring is None else ring
        #: What changes the logits of each row.
        self.logits_processors = LogitsProcessors(max_num_seqs, vocab_size, device, self._ring)
        self._block_size = block_size
        self._row_of: dict[str, int] = {}
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._block_tables = np.zeros((max_num_seqs, max_blocks_per_seq), dtype=_INT32)
        self._num_blocks = np.zeros(max_num_seqs, dtype=_INT32)
        self._num_prompt_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self._greedy = np.ones(max_num_seqs, dtype=np.bool_)
        self._temperature = np.ones(max_num_seqs, dtype=np.float32)
        self._top_k = np.zeros(max_num_seqs, dtype=np.int64)
        self._top_p = np.ones(max_num_seqs, dtype=np.float32)
        self._min_p = np.zeros(max_num_seqs, dtype=np.float32)
        self._seeds = np.zeros(max_num_seqs, dtype=np.int64)
        self._sample_indices = np.zeros(max_num_seqs, dtype=np.int64)
        self._num_logprobs = np.full(max_num_seqs, -1, dtype=np.int64)
        self._num_prompt_logprobs = np.full(max_num_seqs, -1, dtype=np.int64)
        #: Rows that want any: while there are none, a step doesn't look at the two arrays.
        self._rows_with_logprobs: set[int] = set()
        self._rows_with_prompt_logprobs: set[int] = set()
        self._arange = np.arange(max_num_seqs + 1)
        #: The block tables on the device, for captured passes; ``_stale_rows`` differ from those of the host.
        self.block_table_rows = torch.zeros((max_num_seqs, max_blocks_per_seq), dtype=torch.int32, device=device)
        self._stale_rows: set[int] = set()
        #: The last sampled id of each row; written by ``record_sampled`` and by captured passes, read by the next step
        #: without a host copy. One more, which nobody reads: padding of a captured pass writes it.
        self.last_token_ids = torch.zeros(max_num_seqs + 1, dtype=torch.int32, device=device)

    @property
    def num_rows(self) -> int:
        """Requests that have a row."""
        return len(self._row_of)

    def build(self, step: SchedulerOutput) -> tuple[ForwardBatch, SamplingBatch]:
        """Apply what is new and lay out the step on the device.

        Returns:
            The batch, and how to sample from its logits. Tensors are new each step.
        """
        host = self.lay_out(step)
        batch = self.to_device(host, step.num_decode_reqs)
        return batch, self.sampling(host.sampled_rows, host.sampled_lens, host.prompt_logprobs)

    def to_device(self, host: HostBatch, num_decode_reqs: int) -> ForwardBatch:
        """A step that is laid out, on the device."""
        max_seq_len = int(host.seq_lens.max())
        prefill_lens = host.seq_lens[num_decode_reqs:]
        wants_all = host.prompt_logprobs is None and len(host.logits_indices) == len(host.positions)
        sent = self._ring.send_int32(
            host.positions,
            host.slot_mapping,
            host.query_start_loc,
            host.seq_lens,
            host.logits_indices,
            self._block_tables[host.rows, : -(-max_seq_len // self._block_size)].reshape(-1),
            host.host_ids,
            host.rows[host.continued],
            host.query_start_loc[host.continued],
        )
        return ForwardBatch(
            input_ids=self._input_ids(*sent[6:]),
            positions=sent[0],
            slot_mapping=sent[1],
            query_start_loc=sent[2],
            seq_lens=sent[3],
            logits_indices=None if wants_all else sent[4],
            block_tables=sent[5].view(len(host.seq_lens), -1),
            num_decode_reqs=num_decode_reqs,
            max_query_len=int(np.diff(host.query_start_loc).max()),
            max_seq_len=max_seq_len,
            prefill_seq_len=int(prefill_lens.max()) if len(prefill_lens) else None,
            decodes_only=len(host.continued) == len(host.rows) == len(host.positions),
        )

    def lay_out_mixed(self, step: SchedulerOutput, num_decodes: int) -> HostBatch:
        """``lay_out`` for a captured pass that finds the block tables in ``block_table_rows``.

        Brings those up to date, but for the blocks that the first ``num_decodes`` sequences begin: decodes with ids on
        the device, whose new blocks are in ``HostBatch.new_block_ids``.
        """
        host = self.lay_out(step, num_decodes)
        if self._stale_rows:
            self._refresh_block_table_rows()
        return host

    def lay_out(self, step: SchedulerOutput, num_device_decodes: int = 0) -> HostBatch:
        """Apply what is new and lay out the step on the host.

        The first ``num_device_decodes`` sequences bring a block that they begin to the device themselves.
        """
        self.drop(step.dropped_request_ids)
        num_seqs = len(step.scheduled)
        rows = np.array([self._update_row(r, s >= num_device_decodes) for s, r in enumerate(step.scheduled)])
        decodes = step.scheduled[:num_device_decodes]
        starts = np.array([request.num_computed_tokens for request in step.scheduled])
        first_blocks = rows * self._block_tables.shape[1]  # of the sequences, in all block tables one after the other
        if step.num_tokens == num_seqs:  # one token each, as in every step of pure decoding
            query_start_loc = self._arange[: num_seqs + 1]
            positions, seq_lens = starts, starts + 1
        else:
            query_lens = np.array([request.num_new_tokens for request in step.scheduled])
            query_start_loc = np.zeros(num_seqs + 1, dtype=np.int64)
            query_lens.cumsum(out=query_start_loc[1:])
            positions = np.arange(step.num_tokens) + (starts - query_start_loc[:-1]).repeat(query_lens)
            first_blocks = first_blocks.repeat(query_lens)
            seq_lens = starts + query_lens
        blocks = positions // self._block_size
        slot_mapping = (self._block_tables.take(first_blocks + blocks) - blocks) * self._block_size + positions
        for s, request in enumerate(step.scheduled):
            if request.slots_start > request.num_computed_tokens:
                stored = query_start_loc[s] + request.slots_start - request.num_computed_tokens
                slot_mapping[query_start_loc[s] : min(stored, query_start_loc[s + 1])] = -1
        sampled = np.array([s for s, request in enumerate(step.scheduled) if request.samples], dtype=np.int64)
        prompt = self._prompt_logprobs(step, rows, query_start_loc) if self._rows_with_prompt_logprobs else None
        logits_indices = query_start_loc[1:][sampled] - 1
        continued = [s for s, request in enumerate(step.scheduled) if not request.new_token_ids]
        return HostBatch(
            host_ids=self._host_ids(step, len(continued)),
            positions=positions,
            slot_mapping=slot_mapping,
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            logits_indices=logits_indices if prompt is None else np.concatenate((logits_indices, prompt[1])),
            rows=rows,
            new_block_ids=np.array([r.new_block_ids[0] if r.new_block_ids else -1 for r in decodes], dtype=np.int64),
            continued=continued,
            sampled_rows=rows[sampled],
            sampled_lens=seq_lens[sampled],
            prompt_logprobs=None if prompt is None else prompt[0],
        )

    def sampling(
        self, rows: np.ndarray, seq_lens: np.ndarray, prompt_logprobs: PromptLogprobsBatch | None = None
    ) -> SamplingBatch:
        """How to sample from the logits of a step. No forward pass needs it, so it can be made when that is launched.

        Args:
            rows, seq_lens: [S], device row and length of each sequence that gets a token.
            prompt_logprobs: from ``HostBatch``.
        """
        positions = seq_lens - self._num_prompt_tokens[rows]
        return SamplingBatch(
            rows=rows,
            positions=positions,
            random=self._random_sampling(rows, positions),
            num_logprobs=self._logprobs(rows) if self._rows_with_logprobs else (),
            prompt_logprobs=prompt_logprobs,
        )

    def lay_out_decode(self, step: SchedulerOutput) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Apply what is new of a step in which every request continues with its last sampled id.

        Brings ``block_table_rows`` up to date, but for the blocks that this step begins.

        Returns:
            Row, length with the new token, and the block that begins with it (-1 = none) of each sequence.
        """
        self.drop(step.dropped_request_ids)
        num_seqs = len(step.scheduled)
        rows = np.fromiter((self._row_of[r.request_id] for r in step.scheduled), np.int64, num_seqs)
        seq_lens = np.fromiter((r.num_computed_tokens for r in step.scheduled), np.int64, num_seqs) + 1
        new_block_ids = np.full(num_seqs, -1, dtype=np.int64)
        for s, request in enumerate(step.scheduled):
            if request.new_block_ids:
                (new_block_ids[s],) = request.new_block_ids
                self._append_blocks(int(rows[s]), request.new_block_ids)
        if self._stale_rows:
            self._refresh_block_table_rows()
        return rows, seq_lens, new_block_ids

    def adopt_device_rows(self, other: InputBuilder) -> None:
        """Go on with the device tensors of another one, which captured passes read; what is in them counts no more."""
        self.block_table_rows = other.block_table_rows
        self.last_token_ids = other.last_token_ids

    def drop(self, request_ids: Sequence[str]) -> None:
        """Free the rows of requests that have ended or were preempted."""
        for request_id in request_ids:
            row = self._row_of.pop(request_id)
            self._free_rows.append(row)
            self._stale_rows.discard(row)
            self._rows_with_logprobs.discard(row)
            self._rows_with_prompt_logprobs.discard(row)
            self.logits_processors.drop(row)

    def record_sampled(self, sampling: SamplingBatch, token_ids: torch.Tensor) -> None:
        """Keep sampled ids ([S] int64, all of the vocabulary: ``SamplerOutput.input_ids``) for the next step."""
        (rows,) = self._ring.send_int32(sampling.rows)
        self.last_token_ids[rows] = token_ids.to(torch.int32)
        self.logits_processors.record(sampling.rows, token_ids)

    # --------------------------------------------------------------------------------------------------- private
    @staticmethod
    def _host_ids(step: SchedulerOutput, num_continued: int) -> np.ndarray:
        """Ids that the scheduler has sent, 0 where a row's last sampled id belongs; empty when they all do."""
        if num_continued == step.num_tokens:
            return np.empty(0, dtype=_INT32)
        # Of all ways from Python's numbers to an array this is the fastest: 5 ns an id.
        ids = [array("I", request.new_token_ids) if request.new_token_ids else _NO_ID for request in step.scheduled]
        return np.frombuffer(b"".join(ids), _INT32)

    def _input_ids(
        self, host_ids: torch.Tensor, continued_rows: torch.Tensor, continued_tokens: torch.Tensor
    ) -> torch.Tensor:
        """[num_tokens] int32: ids from the host, and the last sampled ids of the rows that continue."""
        last_ids = self.last_token_ids.index_select(0, continued_rows)
        if host_ids.shape[0] == 0:
            return last_ids
        return host_ids.index_copy_(0, continued_tokens.long(), last_ids)

    def _update_row(self, request: ScheduledRequest, makes_stale: bool) -> int:
        row = self._row_of[request.request_id] if request.new_request is None else self._add(request)
        if request.new_block_ids:
            self._append_blocks(row, request.new_block_ids)
            if makes_stale:
                self._stale_rows.add(row)
        return row

    def _append_blocks(self, row: int, block_ids: tuple[int, ...]) -> None:
        start = int(self._num_blocks[row])
        end = start + len(block_ids)
        self._block_tables[row, start:end] = block_ids
        self._num_blocks[row] = end

    def _refresh_block_table_rows(self) -> None:
        """Copy to the device what has changed since rows were last read there."""
        if len(self._stale_rows) <= _FEW_ROWS:  # a copy each and no kernel
            for row in self._stale_rows:
                width = int(self._num_blocks[row])
                self._ring.send_into(self._block_tables[row, :width], self.block_table_rows[row, :width])
        else:
            stale = np.array(sorted(self._stale_rows))
            width = int(self._num_blocks[stale].max())
            rows, tables = self._ring.send_int32(stale, self._block_tables[stale, :width].reshape(-1))
            self.block_table_rows[:, :width].index_copy_(0, rows.long(), tables.view(len(stale), width))
        self._stale_rows.clear()

    def _add(self, request: ScheduledRequest) -> int:
        new = request.new_request
        assert new is not None
        assert request.request_id not in self._row_of, f"{request.request_id} has a row already"
        row = self._free_rows.pop()
        self._row_of[request.request_id] = row
        params = new.params
        self._block_tables[row] = 0
        self._num_blocks[row] = 0
        self._num_prompt_tokens[row] = new.num_prompt_tokens
        self._greedy[row] = is_greedy = params.is_greedy
        self._temperature[row] = 1.0 if is_greedy else min(params.temperature, _MAX_FLOAT32)
        self._top_k[row] = 0 if is_greedy else params.top_k
        self._top_p[row] = 1.0 if is_greedy else params.top_p
        self._min_p[row] = 0.0 if is_greedy else params.min_p
        self._seeds[row] = new.seed - 2**64 if new.seed >= 2**63 else new.seed
        self._sample_indices[row] = new.sample_index
        self._num_logprobs[row] = -1 if params.logprobs is None else params.logprobs
        self._num_prompt_logprobs[row] = -1 if params.prompt_logprobs is None else params.prompt_logprobs
        if params.logprobs is not None:
            self._rows_with_logprobs.add(row)
        if params.prompt_logprobs is not None:
            self._rows_with_prompt_logprobs.add(row)
        self.logits_processors.add(row, new)
        return row

    def _random_sampling(self, rows: np.ndarray, positions: np.ndarray) -> RandomSampling | None:
        greedy = self._greedy[rows]
        if greedy.all():
            return None

        min_p = self._min_p[rows]
        sent = self._ring.send(
            greedy,
            self._temperature[rows],
            self._top_k[rows],
            self._top_p[rows],
            self._seeds[rows],
            self._sample_indices[rows],
            positions,
            *((min_p,) if min_p.any() else ()),
        )
        return RandomSampling(
            greedy=sent[0],
            temperature=sent[1],
            top_k=sent[2],
            top_p=sent[3],
            min_p=sent[7] if len(sent) > 7 else None,
            seeds=sent[4],
            sample_indices=sent[5],
            positions=sent[6],
        )

    def _logprobs(self, rows: np.ndarray) -> tuple[int, ...]:
        num_logprobs = self._num_logprobs[rows]
        return tuple(num_logprobs.tolist()) if (num_logprobs >= 0).any() else ()

    def _prompt_logprobs(
        self, step: SchedulerOutput, rows: np.ndarray, query_start_loc: np.ndarray
    ) -> tuple[PromptLogprobsBatch, np.ndarray] | None:
        """The prompt positions of this step that some request wants logprobs of, and their tokens in the batch.

        None when there are none: all who asked are past their prompts.
        """
        targets: list[int] = []
        tokens: list[np.ndarray] = []
        counts = []
        for s, request in enumerate(step.scheduled):
            targets += request.prompt_targets
            start = query_start_loc[s] + request.prompt_targets_start - request.num_computed_tokens
            tokens.append(start + np.arange(len(request.prompt_targets)))
            counts.append(len(request.prompt_targets))
        if not targets:
            return None
        num_best = tuple(self._num_prompt_logprobs[rows].tolist())
        (packed,) = self._ring.send(np.array(targets, dtype=np.int64))
        return PromptLogprobsBatch(packed, tuple(counts), num_best), np.concatenate(tokens)
