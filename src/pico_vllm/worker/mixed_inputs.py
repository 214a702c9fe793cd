"""MixedInputs: what a captured pass of decodes and prompts reads, packed into one vector that the host sends.

A pass of size (T, D) with room for C others has sequences [0, D) for decodes whose ids are on the device, and
[D, D + C) for prompts and chunks of them, whose ids come from the host. Padded sequences stand last among their kind.
None of them has a token, so tokens have no gaps: T bounds those of a step, however many of its D decodes are padding.

    sequences  | decodes | padding | prompts | padding |      D | C
    tokens     | decodes | of prompts        | padding |      T
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import numpy as np
import torch

if TYPE_CHECKING:
    from pico_vllm.worker.input_builder import HostBatch

_Packed = TypeVar("_Packed", np.ndarray, torch.Tensor)


class MixedSize(NamedTuple):
    """What a pass has room for; sizes of fewer tokens come first."""

    num_tokens: int
    num_decodes: int


@dataclass(frozen=True, slots=True)
class MixedInputs(Generic[_Packed]):
    """Views of one int32 vector, on the host or on the device.

    Attributes:
        input_ids, positions, slot_mapping: [T]; those of the decodes are written on the device.
        query_start_loc: [D + C + 1].
        seq_lens, rows: [D + C], length and device row of each sequence.
        new_block_ids: [D], as in ``DecodeInputs``.
        decode_order: [D], as in ``ForwardBatch``.
        logits_indices: [D + C], the wanted tokens first.
        sampled_rows: [D + C], the row that each wanted token's next id is kept for; the sampled ones come first.
    """

    input_ids: _Packed
    positions: _Packed
    slot_mapping: _Packed
    query_start_loc: _Packed
    seq_lens: _Packed
    rows: _Packed
    new_block_ids: _Packed
    decode_order: _Packed
    logits_indices: _Packed
    sampled_rows: _Packed

    @classmethod
    def views(cls, packed: _Packed, size: MixedSize, num_others: int) -> MixedInputs[_Packed]:
        """The fields within a vector of ``packed_length`` numbers or more."""
        return cls(*[packed[place] for place in _places(size, num_others)])


def packed_length(size: MixedSize, num_others: int) -> int:
    """Numbers in the vector of a size with room for C = ``num_others``."""
    return _aligned(_places(size, num_others)[-1].stop)


def pack_mixed(step: HostBatch, size: MixedSize, num_others: int, padding_row: int) -> np.ndarray:
    """The vector of a step that fits; its first ``len(step.new_block_ids)`` sequences are the decodes.

    Args:
        step: from ``InputBuilder.lay_out_mixed``.
        size, num_others: T, D and C.
        padding_row: that nobody reads.

    Returns:
        [packed_length(size, num_others)] int32.
    """
    packed = np.zeros(packed_length(size, num_others), dtype=np.int32)  # padded: seq_len 0
    to = MixedInputs.views(packed, size, num_others)
    num_tokens, num_decodes = len(step.positions), len(step.new_block_ids)
    first = size.num_decodes  # of the others
    end = first + len(step.seq_lens) - num_decodes
    to.input_ids[:num_tokens], to.positions[:num_tokens] = step.host_ids, step.positions
    to.slot_mapping[:num_tokens], to.slot_mapping[num_tokens:] = step.slot_mapping, -1
    starts = to.query_start_loc
    starts[first : end + 1], starts[end + 1 :] = step.query_start_loc[num_decodes:], num_tokens
    to.seq_lens[first:end], to.rows[first:end] = step.seq_lens[num_decodes:], step.rows[num_decodes:]
    if first > 0:
        starts[:num_decodes], starts[num_decodes:first] = step.query_start_loc[:num_decodes], num_decodes
        to.seq_lens[:num_decodes], to.rows[:num_decodes] = step.seq_lens[:num_decodes], step.rows[:num_decodes]
        to.new_block_ids[:num_decodes] = step.new_block_ids
        to.decode_order[:] = longest_first(to.seq_lens[:first])
    to.logits_indices[: len(step.logits_indices)] = step.logits_indices
    num_sampled = len(step.sampled_rows)
    to.sampled_rows[:num_sampled], to.sampled_rows[num_sampled:] = step.sampled_rows, padding_row
    return packed


def longest_first(seq_lens: np.ndarray) -> np.ndarray:
    """Indices by falling length; padded sequences are the last."""
    return np.argsort(-seq_lens, kind="stable")


@cache
def _places(size: MixedSize, num_others: int) -> tuple[slice, ...]:
    """Of the fields within the vector."""
    num_decodes = size.num_decodes
    num_seqs = num_decodes + num_others
    lengths = *[size.num_tokens] * 3, num_seqs + 1, num_seqs, num_seqs, num_decodes, num_decodes, num_seqs, num_seqs
    starts = accumulate(map(_aligned, lengths), initial=0)
    return tuple(slice(start, start + length) for start, length in zip(starts, lengths, strict=False))


def _aligned(length: int) -> int:
    """In whole 16 bytes of int32: Triton compiles a kernel anew for pointers of another alignment."""
    return -(-length // 4) * 4
