"""TensorParallelGroup: the seam where the results of several ranks become one.

Everything that is split over ranks goes through one of three methods, and only the classes here know how many ranks
there are, so models contain no ``if tp``. ``SingleRank`` does nothing: its methods *are* the backend's ops.
``MultiRank`` adds what a communicator does. Both are made anew when the ops are swapped; the communicator stays.

Source: Shoeybi et al. 2019 (Megatron-LM) for the split of a transformer block: one all-reduce after attention and one
after the feed-forward.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch

from pico_vllm.distributed.sharding import Shard

if TYPE_CHECKING:
    from pico_vllm.distributed.communicator import Communicator
    from pico_vllm.distributed.symmetric_memory import SymmetricMemory
    from pico_vllm.kernels.backend import KernelBackend
    from pico_vllm.kernels.linear import LinearWeight


#: A sum that is under way: gives (normalised, new residual) of ``reduce_add_rms_norm`` when it is called, once.
Pending = Callable[[], "tuple[torch.Tensor, torch.Tensor]"]


class TensorParallelGroup(Protocol):
    """One rank's view of its group. Every rank calls the same methods in the same order, with tensors of one shape."""

    @property
    def shard(self) -> Shard:
        """Which part of the model this rank has."""
        ...

    #: (input_ids [num_tokens] int32, weight [vocab_size / size, hidden_size]) → [num_tokens, hidden_size], the vectors
    #: of all tokens.
    embed: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

    #: (partial, residual, weight, eps) → (normalised, new residual), both [num_tokens, hidden_size]: sums ``partial``
    #: over the ranks, adds it to the residual stream, and normalises. ``partial`` is this rank's share of a
    #: row-parallel product, [num_tokens, hidden_size], or [num_splits, num_tokens, hidden_size] fp32
    #: (``partial_linear``). ``partial`` and ``residual`` may be overwritten.
    reduce_add_rms_norm: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]]

    #: The same in two parts: between this and the call of what it returns, other work runs while the ranks exchange
    #: their parts.
    start_reduce_add_rms_norm: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], Pending]

    #: (hidden [num_rows, hidden_size], weight of [vocab_size / size, hidden_size], out) → the logits of this rank's
    #: tokens, [num_rows, vocab_size / size]; into ``out``, if it is there.
    own_logits: Callable[[torch.Tensor, LinearWeight, torch.Tensor | None], torch.Tensor]

    #: (logits of this rank's tokens, last_token_ids, rows) → [num_rows] int64, the best tokens of all ranks, kept at
    #: ``rows``, as ``greedy_reference`` does of whole logits.
    greedy: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

    #: Whether sums of some tokens are to hide behind products of others.
    overlaps: bool

    def all_logits(self, own: torch.Tensor) -> torch.Tensor:
        """[num_rows, vocab_size / size] of this rank → [num_rows, vocab_size], those of all ranks."""
        ...

    def reserve(self, num_tokens: int, hidden_size: int, dtype: torch.dtype) -> None:
        """Make room for the sums of steps of so many tokens at most; once, before any of them, on all ranks."""
        ...

    def largest(self, value: float) -> float:
        """The largest of the ranks' numbers: what all go by when each has measured its own."""
        ...


class SingleRank:
    """The group of a model that one device has all of: the backend's ops, with nothing around them."""

    def __init__(self, backend: KernelBackend) -> None:
        self.shard = Shard()
        self.overlaps = False
        self.embed: Callable[..., Any] = backend.embedding
        self.reduce_add_rms_norm: Callable[..., Any] = backend.add_rms_norm
        self.own_logits: Callable[..., Any] = backend.linear
        self.greedy: Callable[..., Any] = backend.greedy

    def start_reduce_add_rms_norm(self, *args: Any) -> Pending:
        """Nothing is under way: all of it is done at the end."""
        return partial(self.reduce_add_rms_norm, *args)

    def all_logits(self, own: torch.Tensor) -> torch.Tensor:
        """These are all."""
        return own

    def reserve(self, num_tokens: int, hidden_size: int, dtype: torch.dtype) -> None:
        """No sums."""

    def largest(self, value: float) -> float:
        """The number itself."""
        return value


class MultiRank:
    """One of several ranks.

    Results that every rank needs whole (vectors of tokens, residual stream, logits) are made of the same bits on all of
    them, so what is computed from these alone (norms, samples) is too.

    Args:
        backend: the ops of this rank.
        communicator: of all ranks.
        overlaps: as of the group.
        watched: makes a call that waits for the other ranks, and gives up when one is gone.
    """

    def __init__(
        self,
        backend: KernelBackend,
        *,
        communicator: Communicator,
        overlaps: bool,
        watched: Callable[[Callable[[], None]], None] = lambda call: call(),
    ) -> None:
        self.shard = communicator.shard
        self._watched = watched
        self._backend = backend
        self._communicator = communicator
        self.overlaps = overlaps
        self.own_logits: Callable[..., Any] = backend.linear
        self._has_triton = backend.name == "triton"

    def embed(self, input_ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Look up this rank's tokens, 0 for the others', and sum over the ranks: of one term each, so it is exact."""
        num_rows = weight.shape[0]
        rows = input_ids - self.shard.rank * num_rows
        is_elsewhere = (rows < 0) | (rows >= num_rows)
        vectors = self._backend.embedding(rows.clamp(0, num_rows - 1), weight)
        vectors.masked_fill_(is_elsewhere[:, None], 0)
        symmetric = self._communicator.symmetric
        if symmetric is not None and symmetric.begins_with(len(vectors)):
            return symmetric.all_reduce(vectors)
        self._communicator.all_reduce(vectors)
        return vectors

    def reduce_add_rms_norm(
        self, partial: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All-reduce, then the fused add and norm, or all in one kernel.

        Partial sums of splits are summed before, and rounded once.
        """
        symmetric = self._symmetric_for(residual)
        if symmetric is not None and self._has_triton:
            return symmetric.reduce_add_rms_norm(partial, residual, weight, eps)
        partial = _whole(partial, residual.dtype)
        if symmetric is None:
            self._communicator.all_reduce(partial)
        else:
            partial = symmetric.all_reduce(partial)
        normalised, summed = self._backend.add_rms_norm(partial, residual, weight, eps)
        return normalised, summed

    def start_reduce_add_rms_norm(
        self, partial: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> Pending:
        """Begin to exchange; add and norm come with the last of it."""
        partial = _whole(partial, residual.dtype)
        symmetric = self._symmetric_for(residual)
        if symmetric is not None and self._has_triton:
            return symmetric.start_reduce_add_rms_norm(partial, residual, weight, eps)
        start = self._start_all_reduce if symmetric is None else symmetric.start_all_reduce
        finish_sum = start(partial)

        def finish() -> tuple[torch.Tensor, torch.Tensor]:
            normalised, summed = self._backend.add_rms_norm(finish_sum(), residual, weight, eps)
            return normalised, summed

        return finish

    def reserve(self, num_tokens: int, hidden_size: int, dtype: torch.dtype) -> None:
        """Symmetric memory, where the communicator has any."""
        self._watched(partial(self._communicator.reserve, num_tokens, hidden_size, dtype))

    def all_logits(self, own: torch.Tensor) -> torch.Tensor:
        """An all-gather: every rank has all of them, and samples by itself.

        Only where tokens are drawn from them, or their log-probabilities are wanted.
        """
        num_rows, num_own = own.shape
        size = self.shard.size
        gathered = own.new_empty(size, num_rows, num_own)
        if num_rows > 0:
            self._communicator.all_gather(own, gathered)
        return gathered.transpose(0, 1).reshape(num_rows, size * num_own)

    def greedy(self, logits: torch.Tensor, last_token_ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """The best of this rank, then of those of all."""
        symmetric = self._communicator.symmetric
        num_rows, num_own = logits.shape
        if symmetric is not None and self._has_triton and symmetric.chooses(num_rows):
            return symmetric.greedy(logits, last_token_ids, rows)
        ids: torch.Tensor = self._backend.greedy(logits)
        best = torch.stack([logits.gather(1, ids[:, None])[:, 0].double(), ids.double() + self.shard.rank * num_own], 1)
        of_all = best.new_empty(self.shard.size, num_rows, 2)
        if num_rows > 0:
            self._communicator.all_gather(best, of_all)
        values, all_ids = of_all.permute(2, 1, 0).contiguous()  # [num_rows, size] each
        winner: torch.Tensor = self._backend.greedy(values.float())
        chosen = all_ids.gather(1, winner[:, None])[:, 0].long()
        last_token_ids[rows] = chosen.to(last_token_ids.dtype)
        return chosen

    def largest(self, value: float) -> float:
        """Ask the others."""
        return self._communicator.largest(value)

    def _symmetric_for(self, residual: torch.Tensor) -> SymmetricMemory | None:
        """What sums so many tokens; the same on all ranks, whatever a rank's ops are (one may record them)."""
        symmetric = self._communicator.symmetric
        return symmetric if symmetric is not None and symmetric.takes(len(residual)) else None

    def _start_all_reduce(self, partial: torch.Tensor) -> Callable[[], torch.Tensor]:
        wait = self._communicator.start_all_reduce(partial)

        def finish() -> torch.Tensor:
            wait()
            return partial

        return finish


def _whole(partial: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return partial if partial.dim() == 2 else partial.sum(dim=0).to(dtype)
