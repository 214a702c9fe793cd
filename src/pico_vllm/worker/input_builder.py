"""InputBuilder: keeps a row for each live request and turns a SchedulerOutput into a ForwardBatch.

The scheduler sends only what is new; what a request has accumulated (block table, sampling parameters, last sampled id)
stays in its row. Host arithmetic is vectorised numpy, and one packed int32 copy a step reaches the device. Only this
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
        scheduled = step.scheduled
        num_seqs, num_tokens = len(scheduled), step.num_tokens
        rows = np.empty(num_seqs, dtype=np.int64)
        starts = np.empty(num_seqs, dtype=np.int64)  # first position of each sequence
        query_lens = np.empty(num_seqs, dtype=np.int64)
        input_ids = np.empty(num_tokens, dtype=_INT32)
        from_device: list[int] = []  # sequences whose id is the last sampled one
        sampled: list[int] = []  # sequences whose logits are wanted
        token = 0
        for s, request in enumerate(scheduled):
            rows[s] = self._update_row(request)
            starts[s] = request.num_computed_tokens
            query_lens[s] = request.num_new_tokens
            if request.new_token_ids:
                input_ids[token : token + request.num_new_tokens] = request.new_token_ids
            else:
                from_device.append(s)
                input_ids[token] = 0
            if request.samples:
                sampled.append(s)
            token += request.num_new_tokens
        assert token == num_tokens

        query_start_loc = np.zeros(num_seqs + 1, dtype=np.int64)
        np.cumsum(query_lens, out=query_start_loc[1:])
        seq_lens = starts + query_lens
        sequence_of = np.repeat(np.arange(num_seqs), query_lens) if num_tokens > num_seqs else np.arange(num_seqs)
        positions = np.arange(num_tokens) + (starts - query_start_loc[:-1])[sequence_of]
        max_seq_len = int(seq_lens.max())
        tables = self._block_tables[rows, : -(-max_seq_len // self._block_size)]
        blocks = tables[sequence_of, positions // self._block_size].astype(np.int64)
        slot_mapping = blocks * self._block_size + positions % self._block_size
        sampled_seqs = np.array(sampled, dtype=np.int64)
        sampled_rows = rows[sampled_seqs]
        logits_indices = query_start_loc[1:][sampled_seqs] - 1
        device_seqs = np.array(from_device, dtype=np.int64)

        parts = self._to_device(
            input_ids,
            positions,
            slot_mapping,
            query_start_loc,
            seq_lens,
            logits_indices,
            tables.reshape(-1),
            sampled_rows,
            query_start_loc[device_seqs],
            rows[device_seqs],
        )
        if from_device:
            parts[0][parts[8]] = self._last_token_ids[parts[9]]
        batch = ForwardBatch(
            input_ids=parts[0],
            positions=parts[1],
            slot_mapping=parts[2],
            query_start_loc=parts[3],
            seq_lens=parts[4],
            logits_indices=parts[5],
            block_tables=parts[6].view(num_seqs, -1),
            num_decode_reqs=step.num_decode_reqs,
            max_query_len=int(query_lens.max()),
            max_seq_len=max_seq_len,
        )
        return batch, self._sampling_batch(parts[7], sampled_rows, seq_lens[sampled_seqs])

    def drop(self, request_ids: Sequence[str]) -> None:
        """Free the rows of requests that have ended or were preempted."""
        for request_id in request_ids:
            self._free_rows.append(self._row_of.pop(request_id))

    def record_sampled(self, rows: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Keep sampled ids ([L] each) for the next step."""
        self._last_token_ids[rows] = token_ids.to(torch.int32)

    # --------------------------------------------------------------------------------------------------- private
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
        pin = self._device.type == "cuda"
        packed = torch.empty(sum(a.size for a in arrays), dtype=torch.int32, pin_memory=pin)
        np.concatenate(arrays, out=packed.numpy(), casting="same_kind")
        return list(packed.to(self._device, non_blocking=True).split([a.size for a in arrays]))
