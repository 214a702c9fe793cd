"""InputBuilder: keeps a row for each live request and turns a SchedulerOutput into a ForwardBatch.

The scheduler sends only what is new; what a request has accumulated (block table, sampling parameters, last sampled id)
stays in its row. Host arithmetic is vectorised numpy; one packed int32 copy a step reaches the device. Only this
class writes the rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from pico_vllm.forward_batch import ForwardBatch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pico_vllm.scheduler_output import ScheduledRequest, SchedulerOutput

_INT32 = np.int32


@dataclass(frozen=True, slots=True)
class RandomSampling:
    """Parameters of the rows of a step in which at least one is not greedy.

    Attributes:
        greedy: [L] bool.
        temperature, top_p: [L] fp32 (1 where greedy).
        top_k: [L] int64 (0 where greedy).
        seeds: [L] int64, the bits of an unsigned 64-bit seed.
        positions: [L] int64, index of the token in its request's output.
    """

    greedy: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    seeds: torch.Tensor
    positions: torch.Tensor


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """How to choose a token for each row of logits, in the order of ``ForwardBatch.logits_indices``.

    Attributes:
        rows: [L] int32, device row of each.
        random: None when every row is greedy.
    """

    rows: torch.Tensor
    random: RandomSampling | None


class InputBuilder:
    """Rows on host and device.

    Args:
        max_num_seqs: rows.
        max_blocks_per_seq: width of a block table.
        block_size: tokens a block.
        device: where batches are built for.
    """

    def __init__(self, max_num_seqs: int, max_blocks_per_seq: int, block_size: int, device: torch.device) -> None:
        self._block_size = block_size
        self._device = device
        self._row_of: dict[str, int] = {}
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._block_tables = np.zeros((max_num_seqs, max_blocks_per_seq), dtype=_INT32)
        self._num_blocks = np.zeros(max_num_seqs, dtype=_INT32)
        self._num_prompt_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self._greedy = np.ones(max_num_seqs, dtype=np.bool_)
        self._temperature = np.ones(max_num_seqs, dtype=np.float32)
        self._top_k = np.zeros(max_num_seqs, dtype=np.int64)
        self._top_p = np.ones(max_num_seqs, dtype=np.float32)
        self._seeds = np.zeros(max_num_seqs, dtype=np.int64)
        self._arange = np.arange(max_num_seqs + 1)
        #: The last sampled id of each row; written by ``record_sampled``, read by the next step without a host copy.
        self._last_token_ids = torch.zeros(max_num_seqs, dtype=torch.int32, device=device)

    @property
    def num_rows(self) -> int:
        """Requests that have a row."""
        return len(self._row_of)

    def build(self, step: SchedulerOutput) -> tuple[ForwardBatch, SamplingBatch]:
        """Apply what is new and lay out the step.

        Returns:
            The batch, and how to sample from its logits. Tensors are new each step.
        """
        self.drop(step.dropped_request_ids)
        num_seqs = len(step.scheduled)
        rows = np.array([self._update_row(request) for request in step.scheduled])
        starts = np.array([request.num_computed_tokens for request in step.scheduled])
        if step.num_tokens == num_seqs:  # one token each, as in every step of pure decoding
            max_query_len = 1
            query_start_loc, sequence_of = self._arange[: num_seqs + 1], self._arange[:num_seqs]
            positions, seq_lens = starts, starts + 1
        else:
            query_lens = np.array([request.num_new_tokens for request in step.scheduled])
            max_query_len = int(query_lens.max())
            query_start_loc = np.zeros(num_seqs + 1, dtype=np.int64)
            np.cumsum(query_lens, out=query_start_loc[1:])
            sequence_of = np.repeat(self._arange[:num_seqs], query_lens)
            positions = np.arange(step.num_tokens) + (starts - query_start_loc[:-1])[sequence_of]
            seq_lens = starts + query_lens
        max_seq_len = int(seq_lens.max())
        tables = self._block_tables[rows, : -(-max_seq_len // self._block_size)]
        blocks = tables[sequence_of, positions // self._block_size]
        slot_mapping = blocks.astype(np.int64) * self._block_size + positions % self._block_size
        sampled = np.array([s for s, request in enumerate(step.scheduled) if request.samples], dtype=np.int64)
        sampled_rows = rows[sampled]
        continued = [s for s, request in enumerate(step.scheduled) if not request.new_token_ids]
        sent = self._to_device(
            positions,
            slot_mapping,
            query_start_loc,
            seq_lens,
            query_start_loc[sampled + 1] - 1,
            tables.reshape(-1),
            sampled_rows,
            self._host_ids(step, len(continued)),
            rows[continued],
            query_start_loc[continued],
        )
        batch = ForwardBatch(
            input_ids=self._input_ids(*sent[7:]),
            positions=sent[0],
            slot_mapping=sent[1],
            query_start_loc=sent[2],
            seq_lens=sent[3],
            logits_indices=sent[4],
            block_tables=sent[5].view(num_seqs, -1),
            num_decode_reqs=step.num_decode_reqs,
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
        )
        return batch, self._sampling_batch(sent[6], sampled_rows, seq_lens[sampled])

    def drop(self, request_ids: Sequence[str]) -> None:
        """Free the rows of requests that have ended or were preempted."""
        for request_id in request_ids:
            self._free_rows.append(self._row_of.pop(request_id))

    def record_sampled(self, rows: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Keep sampled ids ([L] each) for the next step."""
        self._last_token_ids[rows] = token_ids.to(torch.int32)

    # --------------------------------------------------------------------------------------------------- private
    @staticmethod
    def _host_ids(step: SchedulerOutput, num_continued: int) -> np.ndarray:
        """Ids that the scheduler has sent, 0 where a row's last sampled id belongs; empty when they all do."""
        if num_continued == step.num_tokens:
            return np.empty(0, dtype=_INT32)
        return np.fromiter((i for r in step.scheduled for i in r.new_token_ids or (0,)), _INT32, step.num_tokens)

    def _input_ids(
        self, host_ids: torch.Tensor, continued_rows: torch.Tensor, continued_tokens: torch.Tensor
    ) -> torch.Tensor:
        """[num_tokens] int32: ids from the host, and the last sampled ids of the rows that continue."""
        last_ids = self._last_token_ids.index_select(0, continued_rows)
        if host_ids.shape[0] == 0:
            return last_ids
        return host_ids.index_copy_(0, continued_tokens.long(), last_ids)

    def _update_row(self, request: ScheduledRequest) -> int:
        row = self._row_of[request.request_id] if request.new_request is None else self._add(request)
        if request.new_block_ids:
            start = int(self._num_blocks[row])
            end = start + len(request.new_block_ids)
            self._block_tables[row, start:end] = request.new_block_ids
            self._num_blocks[row] = end
        return row

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
        self._greedy[row] = params.is_greedy
        self._temperature[row] = 1.0 if params.is_greedy else params.temperature
        self._top_k[row] = 0 if params.is_greedy else params.top_k
        self._top_p[row] = 1.0 if params.is_greedy else params.top_p
        self._seeds[row] = new.seed - 2**64 if new.seed >= 2**63 else new.seed
        return row

    def _sampling_batch(self, device_rows: torch.Tensor, rows: np.ndarray, seq_lens: np.ndarray) -> SamplingBatch:
        greedy = self._greedy[rows]
        if greedy.all():
            return SamplingBatch(device_rows, None)

        def send(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array).to(self._device, non_blocking=True)

        random = RandomSampling(
            greedy=send(greedy),
            temperature=send(self._temperature[rows]),
            top_k=send(self._top_k[rows]),
            top_p=send(self._top_p[rows]),
            seeds=send(self._seeds[rows]),
            positions=send(seq_lens - self._num_prompt_tokens[rows]),
        )
        return SamplingBatch(device_rows, random)

    def _to_device(self, *arrays: np.ndarray) -> list[torch.Tensor]:
        """One int32 copy for all arrays; the results are views of it."""
        packed = torch.from_numpy(np.concatenate(arrays, dtype=_INT32, casting="same_kind"))
        if self._device.type == "cuda":
            packed = packed.pin_memory().to(self._device, non_blocking=True)
        return list(packed.split_with_sizes([a.size for a in arrays]))
