"""TensorParallelGroup: the seam where the results of several ranks become one.

Everything that is split over ranks goes through one of three methods, and only the classes here know how many ranks
there are, so models contain no ``if tp``. ``SingleRank`` does nothing: its methods *are* the backend's ops.
``MultiRank`` adds what a communicator does. Both are made anew when the ops are swapped; the communicator stays.

Source: Shoeybi et al. 2019 (Megatron-LM) for the split of a transformer block: one all-reduce after attention and one
after the feed-forward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from pico_vllm.distributed.sharding import Shard

if TYPE_CHECKING:
    import torch

    from pico_vllm.distributed.communicator import Communicator
    from pico_vllm.kernels.backend import KernelBackend
    from pico_vllm.kernels.linear import LinearWeight


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

    #: (hidden [num_rows, hidden_size], weight of [vocab_size / size, hidden_size], out) → [num_rows, vocab_size] of
    #: this rank's tokens and all others; into ``out``, if it is there.
    logits: Callable[[torch.Tensor, LinearWeight, torch.Tensor | None], torch.Tensor]

    def largest(self, value: float) -> float:
        """The largest of the ranks' numbers: what all go by when each has measured its own."""
        ...


class SingleRank:
    """The group of a model that one device has all of: the backend's ops, with nothing around them."""

    def __init__(self, backend: KernelBackend) -> None:
        self.shard = Shard()
        self.embed: Callable[..., Any] = backend.embedding
        self.reduce_add_rms_norm: Callable[..., Any] = backend.add_rms_norm
        self.logits: Callable[..., Any] = backend.linear

    def largest(self, value: float) -> float:
        """The number itself."""
        return value


class MultiRank:
    """One of several ranks.

    Results that every rank needs whole (vectors of tokens, residual stream, logits) are made of the same bits on all of
    them, so what is computed from these alone (norms, samples) is too.
    """

    def __init__(self, backend: KernelBackend, *, communicator: Communicator) -> None:
        self.shard = communicator.shard
        self._backend = backend
        self._communicator = communicator

    def embed(self, input_ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Look up this rank's tokens, 0 for the others', and sum over the ranks: of one term each, so it is exact."""
        num_rows = weight.shape[0]
        rows = input_ids - self.shard.rank * num_rows
        is_elsewhere = (rows < 0) | (rows >= num_rows)
        vectors = self._backend.embedding(rows.clamp(0, num_rows - 1), weight)
        vectors.masked_fill_(is_elsewhere[:, None], 0)
        self._communicator.all_reduce(vectors)
        return vectors

    def reduce_add_rms_norm(
        self, partial: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All-reduce, then the fused add and norm. Partial sums of splits are summed before, and rounded once."""
        if partial.dim() == 3:
            partial = partial.sum(dim=0).to(residual.dtype)
        self._communicator.all_reduce(partial)
        normalised, summed = self._backend.add_rms_norm(partial, residual, weight, eps)
        return normalised, summed

    def logits(self, hidden: torch.Tensor, weight: LinearWeight, out: torch.Tensor | None = None) -> torch.Tensor:
        """Logits of this rank's tokens, then an all-gather: every rank has all of them, and samples by itself."""
        own = self._backend.linear(hidden, weight)  # [num_rows, vocab_size / size]
        num_rows, num_own = own.shape
        size = self.shard.size
        logits = own.new_empty(num_rows, size * num_own) if out is None else out
        if num_rows > 0:
            gathered = own.new_empty(size, num_rows, num_own)
            self._communicator.all_gather(own, gathered)
            logits.view(num_rows, size, num_own).copy_(gathered.transpose(0, 1))
        return logits

    def largest(self, value: float) -> float:
        """Ask the others."""
        return self._communicator.largest(value)
