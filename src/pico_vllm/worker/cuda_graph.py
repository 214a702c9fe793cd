"""CudaGraphRunner: forward passes captured once a size, and replayed with the inputs of a step.

A decode step of one sequence launches some 250 kernels that run for a microsecond or five each; from Python a launch
costs more than that. A captured pass is one launch, from the ids of a step to the ids of the next one: it ends with the
logits of the wanted rows, the largest of each, and keeps that for the next step. Where somebody wants another choice
(temperature, penalties, masks), the sampler starts from those logits, and what it chooses counts.

Two kinds:

- decode: one new token for each of up to n sequences, whose ids, positions, slots and block tables are made on the
  device of three numbers a sequence (``decode_inputs``). Captured twice: shaped for short contexts, and for any;
- mixed: up to d such decodes, and a few sequences with ids from the host (prompts and chunks of them) after them, n
  tokens in all. A prompt pass is one with d = 0.

A step runs on the smallest size that holds it; the rest is padding, which by contract writes nothing. The size is the
only host value that a capture depends on: kernels read lengths on the device. What fits no size runs eagerly.
"""

from __future__ import annotations

import functools
import gc
import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from pico_vllm.forward_batch import ForwardBatch
from pico_vllm.kernels.attention_config import SHORT_CONTEXT
from pico_vllm.kernels.decode_inputs import DecodeInputs
from pico_vllm.worker.mixed_inputs import MixedInputs, MixedSize, longest_first, pack_mixed, packed_length

if TYPE_CHECKING:
    from pico_vllm.models.overlapped import OverlappedModel
    from pico_vllm.models.qwen2 import Qwen2ForCausalLM
    from pico_vllm.scheduler_output import SchedulerOutput
    from pico_vllm.worker.host_ring import HostRing
    from pico_vllm.worker.input_builder import HostBatch

logger = logging.getLogger(__name__)

#: Sequences of the decode captures, as far as max_num_seqs goes. Products cost the same up to 16, 32 and 64 rows, and
#: hardly more up to 128; a padded sequence costs attention nothing.
DECODE_SIZES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 160, 192, 224, 256)
#: What a decode is shaped for: contexts up to here while all are that short. So many sequences or more keep an H200
#: busy without splits of their contexts (2 KV heads), so one shape serves all lengths.
SHORT_DECODES = SHORT_CONTEXT
MANY_DECODES = 144
#: Captures of more decodes than this take up the longest first: as many as an H200 has SMs for at once need no order.
MAX_UNORDERED_DECODES = 64
#: Tokens of the prompt captures, as far as max_num_batched_tokens goes. Above the last one the GPU is busy for longer
#: than Python needs to launch.
PROMPT_SIZES = (16, 32, 64, 128, 192, 256, 384, 512, 640, 768, 896, 1024, 1280, 1536, 2048)
#: Tokens of the captures with decodes (from 128 on whole tiles of matrix products), and decodes among them: these are
#: far apart, since room for more of them costs no tokens, only splits of long contexts.
MIXED_SIZES = (128, 256, 512, 640, 768, 896, 1024, 1280, 1536, 2048)
MIXED_DECODES = (8, 64, 256)
#: Prompts and chunks of a mixed or prompt capture, and positions of their contexts.
PROMPT_MAX_SEQS = 8
PROMPT_MAX_SEQ_LEN = 4095
#: Contexts that their attention is shaped for: of few tokens so long that they are split, since a long context would
#: take long; from so many tokens on as long as themselves, since a merge costs a whole prompt more than it gains.
PROMPT_TYPICAL_SEQ_LEN = 2048
WHOLE_PROMPT_TOKENS = 512

#: What a pass gives.
Tensors = tuple[torch.Tensor, ...]
#: Makes a pass repeatable: runs it once and returns (its results, what repeats it into the same tensors). The second
#: argument is a short pass that launches every kernel of the first.
Recorder = Callable[[Callable[[], Tensors], Callable[[], Tensors]], tuple[Tensors, Callable[[], None]]]
#: Fills the inputs of a decode on the device (see ``kernels.decode_inputs``).
FillDecodeInputs = Callable[[DecodeInputs, torch.Tensor, torch.Tensor, int], None]


def mixed_sizes(max_num_tokens: int, max_num_seqs: int) -> list[MixedSize]:
    """Sizes of the prompt and mixed captures, the smallest first.

    Args:
        max_num_tokens, max_num_seqs: of any step; no size is larger.
    """
    sizes = {MixedSize(num_tokens, 0) for num_tokens in _sizes_up_to(PROMPT_SIZES, max_num_tokens)}
    if max_num_seqs > 1:  # somebody beside a decode, here and as tokens
        for num_tokens in _sizes_up_to(MIXED_SIZES, max_num_tokens):
            decodes = _sizes_up_to(MIXED_DECODES, max_num_seqs - 1)
            # Beside many tokens of prompts a few decodes may as well be unsplit.
            for num_decodes in decodes[1:] if num_tokens >= 1024 and len(decodes) > 1 else decodes:
                sizes.add(MixedSize(num_tokens, min(num_decodes, num_tokens - 1)))
    return sorted(sizes)


def typical_seq_len(num_tokens: int) -> int:
    """What attention of prompts is shaped for in a capture of so many tokens."""
    return num_tokens if num_tokens >= WHOLE_PROMPT_TOKENS else PROMPT_TYPICAL_SEQ_LEN


def _sizes_up_to(sizes: Sequence[int], most: int) -> list[int]:
    """Those below ``most``, and ``most`` itself or the last one."""
    last = min(most, sizes[-1])
    return [size for size in sizes if size < last] + [last]


class DecodeSize(NamedTuple):
    """What a decode has room for; sizes of fewer sequences come first, then those of shorter ones."""

    num_seqs: int
    seq_len: int


@dataclass(frozen=True, slots=True)
class ForwardOutput:
    """What a forward pass gives of its wanted rows; that of a captured one is valid until the next pass.

    Attributes:
        hidden: [L, hidden_size], normalised.
        logits: [S, vocab_size / ranks] of the sampled rows, which come first, and of this rank's tokens; None = not
            computed yet.
        greedy_ids: [S] int64, their largest logits, kept for the next step already; None = not chosen yet.
    """

    hidden: torch.Tensor
    logits: torch.Tensor | None = None
    greedy_ids: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class _Captured:
    hidden: torch.Tensor  # [num_wanted, hidden_size]
    greedy_ids: torch.Tensor  # [num_wanted] int64
    replay: Callable[[], None]


class CudaGraphRunner:
    """All captures of a model; owns their input tensors.

    Args:
        model: whose passes are captured; its parameters and ``kv_caches`` must stay where they are.
        kv_caches: of all layers.
        block_table_rows: [num_rows, max_blocks] int32, the block table of each device row. Row 0 is used while
            capturing, with block 0.
        last_token_ids: [num_rows + 1] int32, the last sampled id of each row, and one that padding writes.
        max_num_seqs, max_num_batched_tokens, max_model_len, block_size: of the engine.
        fill_decode_inputs: the op for this device.
        record: how a pass is captured; tests without a GPU pass ``rerun``.
        ring: what inputs are sent from.
        trial: capture only the largest pass of each kind and then one more, to see what all will take.
    """

    def __init__(
        self,
        model: Qwen2ForCausalLM | OverlappedModel,
        kv_caches: Sequence[torch.Tensor],
        *,
        block_table_rows: torch.Tensor,
        last_token_ids: torch.Tensor,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        block_size: int,
        fill_decode_inputs: FillDecodeInputs,
        ring: HostRing,
        record: Recorder | None = None,
        trial: bool = False,
    ) -> None:
        start = time.perf_counter()
        device = block_table_rows.device
        self._block_table_rows, self._last_token_ids = block_table_rows, last_token_ids
        self._padding_row = len(block_table_rows)
        self._decode_seq_lens = tuple(sorted({min(SHORT_DECODES, max_model_len), max_model_len}))
        self._block_size, self._max_model_len = block_size, max_model_len
        self._fill = fill_decode_inputs
        self._ring = ring
        self._decode_sizes = sizes = _sizes_up_to(DECODE_SIZES, max_num_seqs)
        #: Sequences of the largest captured decode.
        self.max_decodes = sizes[-1]
        self._mixed_sizes = mixed_sizes(min(max_num_batched_tokens, max_num_seqs * max_model_len), max_num_seqs)
        #: Tokens of the captured steps with decodes and prompts, ascending.
        self.step_sizes = tuple(sorted({size.num_tokens for size in self._mixed_sizes if size.num_decodes > 0}))
        self._num_others = min(PROMPT_MAX_SEQS, max_num_seqs)
        self._prompt_seq_len = min(PROMPT_MAX_SEQ_LEN, max_model_len)
        self._sent = torch.zeros(4 * sizes[-1], dtype=torch.int32, device=device)
        self._written = torch.zeros(3, sizes[-1], dtype=torch.int32, device=device)
        self._arange = torch.arange(sizes[-1] + 1, dtype=torch.int32, device=device)
        longest = max(packed_length(size, self._num_others) for size in self._mixed_sizes)
        self._mixed_sent = torch.zeros(longest, dtype=torch.int32, device=device)
        max_seqs = max(sizes[-1], max(size.num_decodes for size in self._mixed_sizes) + self._num_others)
        self._block_tables = torch.zeros(max_seqs, block_table_rows.shape[1], dtype=torch.int32, device=device)
        # Shared by all captures: tensors of their own would take 2 GB.
        lm_head = model.lm_head
        dtype = kv_caches[0].dtype
        self._logits = torch.empty(max_seqs, lm_head.weight.out_features, dtype=dtype, device=device)
        record = Capturing() if record is None else record
        shallow, shallow_caches = model.outermost_layers(kv_caches)

        def choose(hidden: torch.Tensor, sampled_rows: torch.Tensor) -> Tensors:
            logits = lm_head.own(hidden, self._logits[: len(hidden)])
            return hidden, lm_head.greedy(logits, last_token_ids, sampled_rows)

        def capture(make_batch: Callable[[], ForwardBatch], sampled_rows: torch.Tensor) -> _Captured:
            (hidden, greedy_ids), replay = record(
                lambda: choose(model.hidden_rows(make_batch(), kv_caches), sampled_rows),
                lambda: choose(shallow.hidden_rows(make_batch(), shallow_caches), sampled_rows),
            )
            return _Captured(hidden, greedy_ids, replay)

        # The largest first: the smaller ones then fit into memory that it has left in the graphs' pool.
        to_mix = self._mixed_sizes[::-1]
        to_decode = [DecodeSize(n, seq_len) for n in sizes[::-1] for seq_len in self._lengths_of(n)]
        #: Of a runner that is no trial.
        self.num_captures = len(to_mix) + len(to_decode)
        if trial:
            to_mix, to_decode = [to_mix[0], to_mix[-1]], to_decode[:1]
        self._decodes = {
            size: capture(lambda size=size: self._decode_batch(size), self._decode_sent(size.num_seqs)[0])
            for size in to_decode
        }
        self._mixed = {n: capture(lambda n=n: self._mixed_batch(n), self._mixed_views(n).sampled_rows) for n in to_mix}
        logger.info(
            "%d decode and %d prompt and mixed passes captured in %.2f s",
            len(self._decodes), len(self._mixed), time.perf_counter() - start,
        )  # fmt: skip

    def decode_size(self, num_seqs: int, max_seq_len: int) -> DecodeSize:
        """The smallest captured decode that holds so many sequences, at most ``max_decodes``, of such lengths."""
        size = self._decode_sizes[bisect_left(self._decode_sizes, num_seqs)]
        return DecodeSize(size, next(n for n in self._lengths_of(size) if n >= max_seq_len))

    def mixed_size(self, step: SchedulerOutput, num_decodes: int) -> MixedSize | None:
        """The smallest captured prompt or mixed pass that holds a step; None if there is none.

        Args:
            step: whose first ``num_decodes`` shares are those that continue with an id on the device.
        """
        others = step.scheduled[num_decodes:]
        if len(others) > self._num_others:
            return None
        num_wanted = num_decodes
        for request in others:
            seq_len = request.num_computed_tokens + request.num_new_tokens
            if not request.new_token_ids or seq_len > self._prompt_seq_len:
                return None
            num_wanted += request.samples + len(request.prompt_targets)
        # Wanted rows have room for one a sequence: prompt logprobs may want more.
        room = max(num_decodes, num_wanted - self._num_others)
        first = bisect_left(self._mixed_sizes, MixedSize(step.num_tokens, 0))
        return next((size for size in self._mixed_sizes[first:] if size.num_decodes >= room), None)

    def decode(self, rows: np.ndarray, seq_lens: np.ndarray, new_block_ids: np.ndarray) -> ForwardOutput:
        """Run a decode step.

        Args:
            rows, seq_lens: [S], device row of each sequence, and its length with the new token.
            new_block_ids: [S], the block that begins with the new token, -1 = none.

        Returns:
            Of all S.
        """
        num_seqs = len(rows)  # at most max_decodes
        size = self.decode_size(num_seqs, int(seq_lens.max()))
        host = np.zeros((4, size.num_seqs), dtype=np.int32)  # padded: seq_len 0
        host[0, :num_seqs], host[0, num_seqs:], host[1, :num_seqs] = rows, self._padding_row, seq_lens
        host[2, :num_seqs], host[2, num_seqs:] = new_block_ids, -1
        if size.num_seqs > MAX_UNORDERED_DECODES:
            host[3] = longest_first(host[1])
        self._ring.send_into(host.reshape(-1), self._sent[: 4 * size.num_seqs])
        return self._replay(self._decodes[size], num_seqs, num_seqs)

    def mixed(self, size: MixedSize, step: HostBatch) -> ForwardOutput:
        """Run a step of decodes and prompts, or of prompts alone.

        Args:
            size: from ``mixed_size``.
            step: from ``lay_out_mixed``.

        Returns:
            Of the wanted rows.
        """
        host = pack_mixed(step, size, self._num_others, self._padding_row)
        self._ring.send_into(host, self._mixed_sent[: len(host)])
        return self._replay(self._mixed[size], len(step.logits_indices), len(step.sampled_rows))

    def prompt_size(self, max_tokens: int) -> int | None:
        """Tokens of the largest captured prompt pass with at most so many; None if there is none."""
        sizes = (size.num_tokens for size in self._mixed if size.num_decodes == 0)
        return max((num_tokens for num_tokens in sizes if num_tokens <= max_tokens), default=None)

    def made_up_prompt(self, batch: ForwardBatch) -> Callable[[], None] | None:
        """What runs a pass of prompts that nobody has asked for, to time it; None if no capture is of just that size.

        Writes the block tables of the first rows.
        """
        num_tokens, num_seqs = len(batch.input_ids), len(batch.seq_lens)
        size = MixedSize(num_tokens, 0)
        if size not in self._mixed or num_seqs > self._num_others:
            return None
        to = self._mixed_views(size)
        for field, values in (
            (to.input_ids, batch.input_ids),
            (to.positions, batch.positions),
            (to.slot_mapping, batch.slot_mapping),
            (to.query_start_loc[: num_seqs + 1], batch.query_start_loc),
            (to.seq_lens[:num_seqs], batch.seq_lens),
            (to.rows[:num_seqs], self._arange[:num_seqs]),
            (self._block_table_rows[:num_seqs, : batch.block_tables.shape[1]], batch.block_tables),
        ):
            field.copy_(values)
        to.query_start_loc[num_seqs + 1 :] = num_tokens
        to.sampled_rows.fill_(self._padding_row)
        return self._mixed[size].replay

    # --------------------------------------------------------------------------------------------------- private
    def _replay(self, captured: _Captured, num_wanted: int, num_sampled: int) -> ForwardOutput:
        captured.replay()
        return ForwardOutput(
            captured.hidden[:num_wanted], self._logits[:num_sampled], captured.greedy_ids[:num_sampled]
        )

    def _lengths_of(self, num_seqs: int) -> tuple[int, ...]:
        """What a decode of so many sequences is captured for: many are shaped alike for any length."""
        return self._decode_seq_lens if num_seqs < MANY_DECODES else self._decode_seq_lens[-1:]

    def _decode_sent(self, num_seqs: int) -> torch.Tensor:
        """rows, seq_lens, new_block_ids, order: [4, num_seqs]."""
        return self._sent[: 4 * num_seqs].view(4, num_seqs)

    def _mixed_views(self, size: MixedSize) -> MixedInputs[torch.Tensor]:
        return MixedInputs.views(self._mixed_sent, size, self._num_others)

    def _decode_batch(self, size: DecodeSize) -> ForwardBatch:
        num_seqs = size.num_seqs
        rows, seq_lens, new_block_ids, order = self._decode_sent(num_seqs)
        input_ids, positions, slot_mapping = self._written[:, :num_seqs]
        block_tables = self._block_tables[:num_seqs]
        inputs = DecodeInputs(rows, seq_lens, new_block_ids, input_ids, positions, slot_mapping, block_tables)
        self._fill(inputs, self._block_table_rows, self._last_token_ids, self._block_size)
        return ForwardBatch(
            input_ids=input_ids,
            positions=positions,
            slot_mapping=slot_mapping,
            block_tables=block_tables,
            query_start_loc=self._arange[: num_seqs + 1],
            seq_lens=seq_lens,
            logits_indices=None,
            num_decode_reqs=num_seqs,
            max_query_len=1,
            max_seq_len=size.seq_len,
            decodes_only=True,
            decode_order=order if num_seqs > MAX_UNORDERED_DECODES else None,
        )

    def _mixed_batch(self, size: MixedSize) -> ForwardBatch:
        sent = self._mixed_views(size)
        num_decodes = size.num_decodes
        block_tables = self._block_tables[: num_decodes + self._num_others]
        if num_decodes > 0:
            inputs = DecodeInputs(
                rows=sent.rows[:num_decodes],
                seq_lens=sent.seq_lens[:num_decodes],
                new_block_ids=sent.new_block_ids,
                input_ids=sent.input_ids[:num_decodes],
                positions=sent.positions[:num_decodes],
                slot_mapping=sent.slot_mapping[:num_decodes],
                block_tables=block_tables[:num_decodes],
                padding_has_tokens=False,
            )
            self._fill(inputs, self._block_table_rows, self._last_token_ids, self._block_size)
        torch.index_select(self._block_table_rows, 0, sent.rows[num_decodes:], out=block_tables[num_decodes:])
        return ForwardBatch(
            input_ids=sent.input_ids,
            positions=sent.positions,
            slot_mapping=sent.slot_mapping,
            block_tables=block_tables,
            query_start_loc=sent.query_start_loc,
            seq_lens=sent.seq_lens,
            logits_indices=sent.logits_indices,
            num_decode_reqs=num_decodes,
            max_query_len=size.num_tokens,
            max_seq_len=self._max_model_len,
            prefill_seq_len=min(typical_seq_len(size.num_tokens), self._prompt_seq_len),
            decode_order=sent.decode_order if num_decodes > MAX_UNORDERED_DECODES else None,
        )


@functools.cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Where all engines of this process capture: libraries keep memory for every stream that they have seen."""
    return torch.cuda.Stream(device)


class Capturing:
    """A Recorder that captures CUDA graphs, all in one memory pool.

    Args:
        stream: to capture on; the libraries keep a workspace of 32 MB for each stream that they have seen.
    """

    def __init__(self, stream: torch.cuda.Stream | None = None) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream() if stream is None else stream

    def __call__(
        self, run: Callable[[], Tensors], run_shallow: Callable[[], Tensors]
    ) -> tuple[Tensors, Callable[[], None]]:
        """Run a short pass that launches every kernel, then capture the pass."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            # A kernel can't be compiled or loaded while a stream is captured, nor a library allocate its workspace. Any
            # size may need a new one (Triton looks at which numbers are divisible by 16), so none goes without.
            run_shallow()
        torch.cuda.current_stream().wait_stream(self._stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Not `torch.cuda.graph`, which empties the allocator's cache before each capture.
        with no_garbage_collection(), torch.cuda.stream(self._stream):
            # Another thread's calls (NCCL's watchdog looks at events) are none of the capture's business.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                results = run()
            finally:
                graph.capture_end()
        return results, graph.replay


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """A collection may free CUDA objects of somebody else's, which would spoil a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def launch_shallow(
    run: Callable[[], Tensors], run_shallow: Callable[[], Tensors]
) -> tuple[Tensors, Callable[[], None]]:
    """A Recorder that captures nothing: every kernel is launched once."""
    return run_shallow(), lambda: None


def rerun(run: Callable[[], Tensors], run_shallow: Callable[[], Tensors]) -> tuple[Tensors, Callable[[], None]]:
    """A Recorder without a GPU: repeats by running again, into the first results' memory."""
    run_shallow()
    results = tuple(tensor.clone() for tensor in run())

    def replay() -> None:
        for result, again in zip(results, run(), strict=True):
            result.copy_(again)

    return results, replay
