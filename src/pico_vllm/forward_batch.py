"""ForwardBatch: the device tensors of one step. Built by the worker's InputBuilder, read by models and kernels.

Padding contract: a padded token has slot -1 and is never written; a padded sequence has seq_len 0, and no tokens or one
padded token. Decodes without a token come after all others: a decode's token has the decode's own index.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """One step over S sequences and T tokens; sequences with one new token come first.

    Attributes:
        input_ids: [T] int32.
        positions: [T] int32, position of each token in its sequence.
        slot_mapping: [T] int32, where each token's K and V go: block_id * block_size + offset; -1 = nowhere. Kernels
            widen it to int64 before they multiply.
        block_tables: [S, B] int32, block ids of each sequence; entries past its last block are 0: a valid id whose
            content is never used.
        query_start_loc: [S + 1] int32; tokens of sequence s are [query_start_loc[s], query_start_loc[s + 1]).
        seq_lens: [S] int32, tokens of each sequence after this step (cached context + new tokens).
        logits_indices: [L] int32, the tokens whose logits are wanted, in the order in which they are; None = all T.
        num_decode_reqs: the first sequences, each with exactly one new token; padding may be among them.
        max_query_len: bound of the new tokens of one sequence.
        max_seq_len: bound of ``seq_lens``.
        prefill_seq_len: the length of the sequences after the decodes that launches are shaped for, None = max_seq_len.
            No bound: longer ones take longer. These four are the only host values a kernel launch may depend on.
        decodes_only: every sequence has one token, and its older positions were stored by earlier steps: nobody in this
            step needs what another stores.
        decode_order: [num_decode_reqs] int32, in which order attention takes up the decodes: the longest first, so that
            none of them is left over when the short ones are done; None = as they are.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    block_tables: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    logits_indices: torch.Tensor | None
    num_decode_reqs: int
    max_query_len: int
    max_seq_len: int
    prefill_seq_len: int | None = None
    decodes_only: bool = False
    decode_order: torch.Tensor | None = None
