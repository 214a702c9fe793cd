"""CudaGraphRunner: forward passes captured once a size, and replayed with the inputs of a step.

A decode step of one sequence launches some 250 kernels that run for a microsecond or five each; from Python a launch
costs more than that. A captured pass is one launch. What is captured ends with the hidden rows that the lm_head wants:
those few last kernels are launched while the graph still runs.

Two kinds:

- decode: one new token for each of up to n sequences, whose ids, positions, slots and block tables are made on the
  device of three numbers a sequence (``decode_inputs``);
- prompt: up to n tokens of a few sequences, whatever they are (prompts, chunks, decodes beside them), laid out by the
  host as for an eager step.

A step runs on the smallest size that holds it; the rest is padding, which by contract writes nothing. The size is the
only host value that a capture depends on: kernels read lengths on the device. What fits no size runs eagerly.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch

from pico_vllm.forward_batch import ForwardBatch
from pico_vllm.kernels.decode_inputs import DecodeInputs

if TYPE_CHECKING:
    from pico_vllm.models.qwen2 import Qwen2ForCausalLM
    from pico_vllm.worker.input_builder import HostBatch

logger = logging.getLogger(__name__)

#: Sequences of the decode captures, as far as max_num_seqs goes: close together where a row more costs something.
DECODE_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240, 256)
#: Tokens of the prompt captures. Above the last one the GPU is busy for longer than Python needs to launch.
PROMPT_SIZES = (16, 32, 64, 96, 128, 192, 256, 384, 512)
#: Sequences of a prompt capture, and positions of their contexts.
PROMPT_MAX_SEQS = 8
PROMPT_MAX_SEQ_LEN = 2048

#: Makes a pass repeatable: runs it once and returns (its result, what repeats it into the same tensor).
Recorder = Callable[[Callable[[], torch.Tensor]], tuple[torch.Tensor, Callable[[], None]]]
#: Fills the inputs of a decode on the device (see ``kernels.decode_inputs``).
FillDecodeInputs = Callable[[DecodeInputs, torch.Tensor, torch.Tensor, int], None]


_Packed = TypeVar("_Packed", np.ndarray, torch.Tensor)


@dataclass(frozen=True, slots=True)
class _Captured:
    hidden: torch.Tensor  # [num_rows, hidden_size]
    replay: Callable[[], None]


class CudaGraphRunner:
    """All captures of a model; owns their input tensors.

    Args:
        model: whose passes are captured; its parameters and ``kv_caches`` must stay where they are.
        kv_caches: of all layers.
        block_table_rows: [num_rows, max_blocks] int32, the block table of each device row. Row 0 is used while
            capturing, with block 0.
        last_token_ids: [num_rows] int32, the last sampled id of each row.
        max_num_seqs, max_model_len, block_size: of the engine.
        fill_decode_inputs: the op for this device.
        record: how a pass is captured; tests without a GPU pass ``rerun``.
        trial: capture only the largest pass of each kind and then one more, to see what all will take.
    """

    def __init__(
        self,
        model: Qwen2ForCausalLM,
        kv_caches: Sequence[torch.Tensor],
        *,
        block_table_rows: torch.Tensor,
        last_token_ids: torch.Tensor,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        fill_decode_inputs: FillDecodeInputs,
        record: Recorder | None = None,
        trial: bool = False,
    ) -> None:
        start = time.perf_counter()
        device = block_table_rows.device
        self._model, self._kv_caches = model, kv_caches
        self._block_table_rows, self._last_token_ids = block_table_rows, last_token_ids
        self._block_size, self._max_model_len = block_size, max_model_len
        self._fill = fill_decode_inputs
        sizes = sorted({size for size in DECODE_SIZES if size < max_num_seqs} | {min(max_num_seqs, DECODE_SIZES[-1])})
        max_blocks = block_table_rows.shape[1]
        self._sent = torch.zeros(3 * sizes[-1], dtype=torch.int32, device=device)
        self._written = torch.zeros(3, sizes[-1], dtype=torch.int32, device=device)
        self._block_tables = torch.zeros(sizes[-1], max_blocks, dtype=torch.int32, device=device)
        self._arange = torch.arange(sizes[-1] + 1, dtype=torch.int32, device=device)
        self._prompt_seqs = min(PROMPT_MAX_SEQS, max_num_seqs)
        self._prompt_seq_len = min(PROMPT_MAX_SEQ_LEN, max_model_len)
        self._prompt_blocks = -(-self._prompt_seq_len // block_size)
        self._prompt_sent = torch.zeros(self._prompt_numbers(PROMPT_SIZES[-1]), dtype=torch.int32, device=device)
        record = Capturing() if record is None else record
        decode_sizes, prompt_sizes = sizes[::-1], PROMPT_SIZES[::-1]
        #: Of a runner that is no trial.
        self.num_captures = len(decode_sizes) + len(prompt_sizes)
        if trial:
            decode_sizes, prompt_sizes = decode_sizes[:1], (prompt_sizes[0], prompt_sizes[-1])
        # The largest first: the smaller ones then fit into memory that it has left in the graphs' pool.
        self._decodes: dict[int, _Captured] = {}
        for size in decode_sizes:
            self._decodes[size] = _Captured(*record(lambda size=size: self._decode_pass(size)))
        self._prompts: dict[int, _Captured] = {}
        for size in prompt_sizes:
            self._prompts[size] = _Captured(*record(lambda size=size: self._prompt_pass(size)))
        logger.info(
            "%d decode and %d prompt passes captured in %.2f s",
            len(self._decodes), len(self._prompts), time.perf_counter() - start,
        )  # fmt: skip

    def decode_size(self, num_seqs: int) -> int | None:
        """The smallest captured decode that holds so many sequences; None if there is none."""
        return _smallest(self._decodes, num_seqs)

    def prompt_size(self, step: HostBatch) -> int | None:
        """The smallest captured prompt pass that holds a step; None if there is none."""
        if max(len(step.seq_lens), len(step.logits_indices)) > self._prompt_seqs:
            return None
        return _smallest(self._prompts, len(step.positions)) if step.max_seq_len <= self._prompt_seq_len else None

    def decode(self, size: int, rows: np.ndarray, seq_lens: np.ndarray, new_block_ids: np.ndarray) -> torch.Tensor:
        """Run a decode step.

        Args:
            size: from ``decode_size``.
            rows, seq_lens: [S], device row of each sequence, and its length with the new token.
            new_block_ids: [S], the block that begins with the new token, -1 = none.

        Returns:
            [S, hidden_size], valid until the next call.
        """
        num_seqs = len(rows)
        host = np.zeros((3, size), dtype=np.int32)  # padded: seq_len 0
        host[0, :num_seqs], host[1, :num_seqs] = rows, seq_lens
        host[2, :num_seqs], host[2, num_seqs:] = new_block_ids, -1
        self._send(host.reshape(-1), self._sent[: 3 * size])
        captured = self._decodes[size]
        captured.replay()
        return captured.hidden[:num_seqs]

    def prompt(self, size: int, step: HostBatch) -> torch.Tensor:
        """Run a step of up to ``size`` tokens.

        Returns:
            [len(step.logits_indices), hidden_size], valid until the next call.
        """
        num_tokens, num_seqs = len(step.positions), len(step.seq_lens)
        host = np.zeros(self._prompt_numbers(size), dtype=np.int32)
        ids, where, slots, starts, lens, wanted, tables = self._prompt_parts(host, size)
        ids[: len(step.host_ids)], where[:num_tokens] = step.host_ids, step.positions
        slots[:num_tokens], slots[num_tokens:] = step.slot_mapping, -1
        starts[: num_seqs + 1], starts[num_seqs + 1 :] = step.query_start_loc, num_tokens
        lens[:num_seqs], wanted[: len(step.logits_indices)] = step.seq_lens, step.logits_indices
        tables.reshape(self._prompt_seqs, -1)[:num_seqs, : step.block_tables.shape[1]] = step.block_tables
        sent = self._prompt_sent[: len(host)]
        self._send(host, sent)
        if len(step.continued_rows):
            device_rows = torch.from_numpy(step.continued_rows).to(sent.device, non_blocking=True)
            device_tokens = torch.from_numpy(step.continued_tokens).to(sent.device, non_blocking=True)
            sent[:size].index_copy_(0, device_tokens, self._last_token_ids.index_select(0, device_rows))
        captured = self._prompts[size]
        captured.replay()
        return captured.hidden[: len(step.logits_indices)]

    # --------------------------------------------------------------------------------------------------- private
    @staticmethod
    def _send(host: np.ndarray, device: torch.Tensor) -> None:
        tensor = torch.from_numpy(host)
        device.copy_(tensor.pin_memory() if device.is_cuda else tensor, non_blocking=True)

    def _decode_pass(self, size: int) -> torch.Tensor:
        rows, seq_lens, new_block_ids = self._sent[: 3 * size].view(3, size)
        input_ids, positions, slot_mapping = self._written[:, :size]
        block_tables = self._block_tables[:size]
        inputs = DecodeInputs(rows, seq_lens, new_block_ids, input_ids, positions, slot_mapping, block_tables)
        self._fill(inputs, self._block_table_rows, self._last_token_ids, self._block_size)
        batch = ForwardBatch(
            input_ids=input_ids,
            positions=positions,
            slot_mapping=slot_mapping,
            block_tables=block_tables,
            query_start_loc=self._arange[: size + 1],
            seq_lens=seq_lens,
            logits_indices=self._arange[:size],
            num_decode_reqs=size,
            max_query_len=1,
            max_seq_len=self._max_model_len,
        )
        return self._model.hidden_rows(batch, self._kv_caches)

    def _prompt_pass(self, size: int) -> torch.Tensor:
        parts = self._prompt_parts(self._prompt_sent[: self._prompt_numbers(size)], size)
        input_ids, positions, slot_mapping, query_start_loc, seq_lens, logits_indices, block_tables = parts
        batch = ForwardBatch(
            input_ids=input_ids,
            positions=positions,
            slot_mapping=slot_mapping,
            block_tables=block_tables.reshape(self._prompt_seqs, self._prompt_blocks),
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            logits_indices=logits_indices,
            num_decode_reqs=0,
            max_query_len=size,
            max_seq_len=self._prompt_seq_len,
        )
        return self._model.hidden_rows(batch, self._kv_caches)

    def _prompt_numbers(self, size: int) -> int:
        return 3 * size + (3 + self._prompt_blocks) * self._prompt_seqs + 1

    def _prompt_parts(self, packed: _Packed, size: int) -> tuple[_Packed, ...]:
        """ids, positions, slots, starts, lens, wanted tokens, block tables: views of one vector."""
        seqs = self._prompt_seqs
        parts, start = [], 0
        for length in (size, size, size, seqs + 1, seqs, seqs, seqs * self._prompt_blocks):
            parts.append(packed[start : start + length])
            start += length
        return tuple(parts)


def _smallest(captured: Mapping[int, _Captured], needed: int) -> int | None:
    return min((size for size in captured if size >= needed), default=None)


class Capturing:
    """A Recorder that captures CUDA graphs, all in one memory pool.

    Args:
        stream: to capture on; the libraries keep a workspace of 32 MB for each stream that they have seen.
    """

    def __init__(self, stream: torch.cuda.Stream | None = None) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream() if stream is None else stream

    def __call__(self, run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
        """Run once, capture once."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            run()  # compiles what isn't compiled yet, and lets libraries allocate their workspaces
        torch.cuda.current_stream().wait_stream(self._stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        was_enabled = gc.isenabled()
        gc.disable()  # a tensor of somebody else that is freed meanwhile would break the capture
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                result = run()
        finally:
            if was_enabled:
                gc.enable()
        return result, graph.replay


def rerun(run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
    """A Recorder without a GPU: repeats by running again, into the first result's memory."""
    result = run().clone()

    def replay() -> None:
        result.copy_(run())

    return result, replay
