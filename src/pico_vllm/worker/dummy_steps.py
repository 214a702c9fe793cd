"""Made-up steps: batches of a given size that no request has asked for, to see what a step costs.

By the padding contract nothing is written: every slot is -1. Block tables name blocks of the cache in turn, so that the
kernels read as much memory as for real sequences (or what little there is, again and again); what they read there is
arbitrary. Used by ``start_probe`` before the first request comes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from pico_vllm.forward_batch import ForwardBatch


@dataclass(frozen=True, slots=True)
class DummySteps:
    """Steps on one device and one KV cache.

    Attributes:
        max_model_len: positions a sequence may have; also the bound of lengths that launches depend on.
        num_blocks, block_size: of the cache.
        device: of the tensors.
    """

    max_model_len: int
    num_blocks: int
    block_size: int
    device: torch.device

    def decodes(self, num_seqs: int, context: int) -> ForwardBatch:
        """One token each for ``num_seqs`` sequences of ``context`` positions with it."""
        ones = np.ones(num_seqs, dtype=np.int32)
        return self._batch(ones, ones * context, num_decode_reqs=num_seqs, num_logits=num_seqs)

    def prompt(self, num_tokens: int) -> ForwardBatch:
        """One whole prompt; needs num_tokens <= max_model_len."""
        lens = np.array([num_tokens], dtype=np.int32)
        return self._batch(lens, lens, num_decode_reqs=0, num_logits=1)

    def fullest(self, num_tokens: int, num_seqs: int, *, num_logits: int, context: int) -> ForwardBatch:
        """What takes the most memory: a decode for all sequences but one, and prompts for the rest of the tokens.

        Args:
            num_tokens: of the step.
            num_seqs: sequences that may run.
            num_logits: wanted rows; some tokens are wanted more than once where there are fewer.
            context: positions of each sequence.
        """
        num_decodes = min(num_seqs, num_tokens) - 1
        chunk = min(context, num_tokens - num_decodes)
        num_chunks, rest = divmod(num_tokens - num_decodes, chunk)
        query_lens = [1] * num_decodes + [chunk] * num_chunks + ([rest] if rest else [])
        lens = np.array(query_lens, dtype=np.int32)
        return self._batch(lens, np.full_like(lens, context), num_decode_reqs=num_decodes, num_logits=num_logits)

    def block_tables(self, num_seqs: int, context: int) -> torch.Tensor:
        """[num_seqs, blocks of ``context`` positions] int32: the blocks of the cache in turn."""
        width = -(-context // self.block_size)
        blocks = np.arange(num_seqs * width, dtype=np.int64) % self.num_blocks
        return self._send(blocks).view(num_seqs, width)

    def _batch(
        self, query_lens: np.ndarray, seq_lens: np.ndarray, *, num_decode_reqs: int, num_logits: int
    ) -> ForwardBatch:
        num_seqs, num_tokens = len(query_lens), int(query_lens.sum())
        starts = np.zeros(num_seqs + 1, dtype=np.int64)
        np.cumsum(query_lens, out=starts[1:])
        positions = np.arange(num_tokens) + np.repeat(seq_lens - query_lens - starts[:-1], query_lens)
        return ForwardBatch(
            input_ids=torch.zeros(num_tokens, dtype=torch.int32, device=self.device),
            positions=self._send(positions),
            slot_mapping=torch.full((num_tokens,), -1, dtype=torch.int32, device=self.device),
            block_tables=self.block_tables(num_seqs, int(seq_lens.max())),
            query_start_loc=self._send(starts),
            seq_lens=self._send(seq_lens),
            logits_indices=self._send(np.arange(num_logits) % num_tokens),
            num_decode_reqs=num_decode_reqs,
            max_query_len=int(query_lens.max()),
            max_seq_len=self.max_model_len,
        )

    def _send(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array.astype(np.int32)).to(self.device)
