"""Ops on logits: the choice of a token, log-probabilities, penalties, the grammar's mask.

Each row holds a few large logits, all different, above a normal bulk: the largest, the top-k set and the best tokens
are then the same for every correct implementation, whatever it does with ties.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from pico_vllm.bench.kernel_cases.case import Baseline, BoundCall, Cost, KernelCase, Tensors, generator, normal, spread
from pico_vllm.kernels.backend import REFERENCE

if TYPE_CHECKING:
    from pico_vllm.bench.kernel_cases.shapes import KernelShapes
    from pico_vllm.kernels.backend import KernelBackend

_INT64_BYTES = 8
_FP32_BYTES = 4
_INT32_BYTES = 4
_TOP_K = 50
_TOP_P = 0.9
_TEMPERATURE = 0.8
_NUM_BEST = 20  # the most that OpenAI's API gives
_NUM_LARGE = 64
_NUM_CHECKED_ROWS = 4
_NUM_CHECKED_COLUMNS = 96


def _name(num_rows: int, vocab_size: int) -> str:
    return f"{num_rows} x {vocab_size}"


def _checked(num_rows: int) -> list[int]:
    return spread(num_rows, _NUM_CHECKED_ROWS)


def _logits(
    g: torch.Generator, num_rows: int, vocab_size: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """(logits [num_rows, vocab_size], ids of the large ones [num_rows, up to 64], largest first).

    The large ones are 16, 15.875, 15.75, …, exact in every dtype; the bulk is clamped to 4.
    """
    logits = normal(g, num_rows, vocab_size, dtype=dtype).clamp_(-4, 4)
    num_large = min(_NUM_LARGE, vocab_size)
    ids = torch.rand(num_rows, vocab_size, generator=g, device=g.device).topk(num_large, dim=-1).indices
    values = 16 - torch.arange(num_large, device=g.device) / 8
    return logits.scatter_(1, ids, values.to(dtype).expand(num_rows, -1)), ids


# ----------------------------------------------------------------------------------------------------------- greedy
def greedy_cost(num_rows: int, vocab_size: int, element_bytes: int) -> Cost:
    """Logits in, an id a row out; a comparison a logit."""
    return Cost(num_rows * vocab_size * element_bytes, num_rows * _INT64_BYTES, num_rows * vocab_size)


def greedy_cases(shapes: KernelShapes, dtype: torch.dtype) -> Iterator[KernelCase]:
    """The largest logit."""
    for num_rows in shapes.num_rows:
        yield _greedy_case(num_rows, shapes.vocab_size, dtype)


def _greedy_case(num_rows: int, vocab_size: int, dtype: torch.dtype) -> KernelCase:
    def bind(backend: KernelBackend, t: Tensors) -> BoundCall:
        return lambda: (backend.greedy(t["logits"]),)

    return KernelCase(
        name=_name(num_rows, vocab_size),
        cost=greedy_cost(num_rows, vocab_size, dtype.itemsize),
        make=lambda device: {"logits": _logits(generator(device), num_rows, vocab_size, dtype)[0]},
        bind=bind,
        expected=lambda t: (REFERENCE.greedy(t["logits"]),),
        baselines=(Baseline("torch.argmax", lambda t: lambda: (t["logits"].argmax(dim=-1),)),),
        exact=True,
    )


# ----------------------------------------------------------------------------------------------------------- sample
def sample_cost(num_rows: int, vocab_size: int, element_bytes: int) -> Cost:
    """Logits in, an id a row out; a division, an exponential and a sum a logit. Parameters and random numbers: 24 B."""
    parameters = num_rows * (2 * _FP32_BYTES + 2 * _INT64_BYTES)
    logits = num_rows * vocab_size
    return Cost(logits * element_bytes + parameters, num_rows * _INT64_BYTES, 3 * logits)


def sample_cases(shapes: KernelShapes, dtype: torch.dtype) -> Iterator[KernelCase]:
    """Top-k 50 and top-p 0.9 in every row."""
    for num_rows in shapes.num_rows:
        yield _sample_case(num_rows, shapes.vocab_size, dtype)


def _sample_case(num_rows: int, vocab_size: int, dtype: torch.dtype) -> KernelCase:
    names = ("logits", "temperature", "top_k", "top_p", "uniform")
    top_k = min(_TOP_K, vocab_size)

    def make(device: torch.device) -> Tensors:
        g = generator(device)
        logits, _ = _logits(g, num_rows, vocab_size, dtype)
        return {
            "logits": logits,
            "temperature": torch.full((num_rows,), _TEMPERATURE, device=device),
            "top_k": torch.full((num_rows,), top_k, dtype=torch.int64, device=device),
            "top_p": torch.full((num_rows,), _TOP_P, device=device),
            "uniform": torch.rand(num_rows, generator=g, dtype=torch.float64, device=device),
        }

    def bind(backend: KernelBackend, t: Tensors) -> BoundCall:
        return lambda: (backend.sample(*(t[name] for name in names)),)

    def bind_torch(t: Tensors) -> BoundCall:
        def call() -> tuple[torch.Tensor, ...]:
            scores, ids = t["logits"].topk(top_k, dim=-1)  # top_k is known on the host: no wait
            probs = torch.softmax(scores.float() / t["temperature"][:, None], dim=-1)
            probs = probs.masked_fill(probs.cumsum(dim=-1) - probs >= t["top_p"][:, None], 0.0)
            ids, order = ids.sort(dim=-1)  # a token is drawn in the order of ids
            cumulative = probs.gather(1, order).double().cumsum(dim=-1)
            place = torch.searchsorted(cumulative, t["uniform"][:, None] * cumulative[:, -1:], right=True)
            return (ids.gather(1, place)[:, 0],)

        return call

    rows = _checked(num_rows)
    return KernelCase(
        name=f"{_name(num_rows, vocab_size)}, top-k {top_k}, top-p {_TOP_P}",
        cost=sample_cost(num_rows, vocab_size, dtype.itemsize),
        make=make,
        bind=bind,
        expected=lambda t: (REFERENCE.sample(*(t[name][rows] for name in names)),),
        compared=lambda outputs: (outputs[0][rows],),
        baselines=(Baseline("topk + softmax + cumsum", bind_torch),),
        exact=True,
    )


# --------------------------------------------------------------------------------------------------------- logprobs
def logprobs_cost(num_rows: int, vocab_size: int, num_best: int, element_bytes: int) -> Cost:
    """Logits and chosen ids in; out: logprob and rank of the chosen, ids and logprobs of the best.

    A subtraction, an exponential, a sum and a comparison a logit.
    """
    logits = num_rows * vocab_size
    bytes_written = num_rows * (1 + num_best) * (_FP32_BYTES + _INT64_BYTES)
    return Cost(logits * element_bytes + num_rows * _INT64_BYTES, bytes_written, 4 * logits)


def logprobs_cases(shapes: KernelShapes, dtype: torch.dtype) -> Iterator[KernelCase]:
    """The chosen token and the best 20."""
    for num_rows in shapes.num_rows:
        yield _logprobs_case(num_rows, shapes.vocab_size, dtype)


def _logprobs_case(num_rows: int, vocab_size: int, dtype: torch.dtype) -> KernelCase:
    num_best = min(_NUM_BEST, vocab_size)

    def make(device: torch.device) -> Tensors:
        logits, large = _logits(generator(device), num_rows, vocab_size, dtype)
        return {"logits": logits, "token_ids": large[:, large.shape[1] // 2].clone()}

    def bind(backend: KernelBackend, t: Tensors) -> BoundCall:
        return lambda: backend.logprobs(t["logits"], t["token_ids"], num_best)

    def bind_torch(t: Tensors) -> BoundCall:
        def call() -> tuple[torch.Tensor, ...]:
            logprobs = torch.log_softmax(t["logits"], dim=-1, dtype=torch.float32)
            chosen = logprobs.gather(1, t["token_ids"][:, None])
            best, best_ids = logprobs.topk(num_best, dim=-1)
            return chosen[:, 0], (logprobs > chosen).sum(dim=-1) + 1, best_ids, best

        return call

    rows = _checked(num_rows)
    return KernelCase(
        name=f"{_name(num_rows, vocab_size)}, best {num_best}",
        cost=logprobs_cost(num_rows, vocab_size, num_best, dtype.itemsize),
        make=make,
        bind=bind,
        expected=lambda t: REFERENCE.logprobs(t["logits"][rows], t["token_ids"][rows], num_best),
        compared=lambda outputs: tuple(output[rows] for output in outputs),
        baselines=(Baseline("log_softmax + topk", bind_torch),),
    )


# -------------------------------------------------------------------------------------------------------- penalties
def apply_penalties_cost(num_rows: int, vocab_size: int) -> Cost:
    """fp32 logits in and out, a bool and an int32 count a logit, three parameters a row.

    A product or division by the repetition penalty, two products and two subtractions a logit.
    """
    logits = num_rows * vocab_size
    bytes_read = logits * (_FP32_BYTES + 1 + _INT32_BYTES) + num_rows * 3 * _FP32_BYTES
    return Cost(bytes_read, logits * _FP32_BYTES, 5 * logits)


def apply_penalties_cases(shapes: KernelShapes, dtype: torch.dtype) -> Iterator[KernelCase]:
    """All three penalties in every row; logits are fp32 whatever the model's dtype."""
    for num_rows in shapes.num_rows:
        yield _apply_penalties_case(num_rows, shapes.vocab_size)


def _apply_penalties_case(num_rows: int, vocab_size: int) -> KernelCase:
    names = ("logits", "in_prompt", "output_counts", "repetition", "presence", "frequency")
    rows, columns = _checked(num_rows), spread(vocab_size, _NUM_CHECKED_COLUMNS)

    def make(device: torch.device) -> Tensors:
        g = generator(device)
        in_prompt = torch.rand(num_rows, vocab_size, generator=g, device=device) < 0.01
        output_counts = (torch.rand(num_rows, vocab_size, generator=g, device=device) < 0.005).int()
        in_prompt[:, columns[::2]] = True  # of the columns that are checked, every kind is there
        output_counts[:, columns[::3]] = 2
        parameters = {"repetition": 1.1, "presence": 0.5, "frequency": 0.25}
        return {
            "logits": normal(g, num_rows, vocab_size, dtype=torch.float32, scale=2.0),
            "in_prompt": in_prompt,
            "output_counts": output_counts,
            **{name: torch.full((num_rows,), value, device=device) for name, value in parameters.items()},
        }

    def bind(backend: KernelBackend, t: Tensors) -> BoundCall:
        def call() -> tuple[torch.Tensor, ...]:
            backend.apply_penalties(*(t[name] for name in names))
            return (t["logits"],)

        return call

    def expected(t: Tensors) -> tuple[torch.Tensor, ...]:
        logits, *tables = (t[name][rows][:, columns].cpu() for name in names[:3])
        logits = logits.double()
        REFERENCE.apply_penalties(logits, *tables, *(t[name][rows].cpu() for name in names[3:]))
        return (logits,)

    def bind_torch(t: Tensors) -> BoundCall:
        logits, repetition = t["logits"], t["repetition"][:, None]

        def call() -> tuple[torch.Tensor, ...]:
            in_output = t["output_counts"] > 0
            penalised = torch.where(logits > 0, logits / repetition, logits * repetition)
            penalised = torch.where(t["in_prompt"] | in_output, penalised, logits)
            penalised -= t["frequency"][:, None] * t["output_counts"] + t["presence"][:, None] * in_output
            return (logits.copy_(penalised),)

        return call

    return KernelCase(
        name=_name(num_rows, vocab_size),
        cost=apply_penalties_cost(num_rows, vocab_size),
        make=make,
        bind=bind,
        expected=expected,
        compared=lambda outputs: (outputs[0][rows][:, columns],),
        baselines=(Baseline("torch.where", bind_torch),),
        changed=("logits",),
    )


# ---------------------------------------------------------------------------------------------------------- bitmask
def apply_bitmask_cost(num_rows: int, vocab_size: int) -> Cost:
    """fp32 logits in and out (a random mask touches every cache line), a bit a logit; no arithmetic."""
    words = -(-vocab_size // 32)
    logit_bytes = num_rows * vocab_size * _FP32_BYTES
    return Cost(logit_bytes + num_rows * words * _INT32_BYTES, logit_bytes, 0)


def apply_bitmask_cases(shapes: KernelShapes, dtype: torch.dtype) -> Iterator[KernelCase]:
    """A random half of all tokens is masked; logits are fp32 whatever the model's dtype."""
    for num_rows in shapes.num_rows:
        yield _apply_bitmask_case(num_rows, shapes.vocab_size)


def _apply_bitmask_case(num_rows: int, vocab_size: int) -> KernelCase:
    num_words = -(-vocab_size // 32)
    rows = _checked(num_rows)
    # The oracle looks at two words at either end of a row; a part that begins with a word is a row of its own.
    ends = ((0, min(2, num_words)), (max(num_words - 2, 0), num_words))

    def make(device: torch.device) -> Tensors:
        g = generator(device)
        words = torch.randint(-(1 << 31), 1 << 31, (num_rows, num_words), generator=g, device=device)
        return {"logits": normal(g, num_rows, vocab_size, dtype=torch.float32), "bitmask": words.int()}

    def bind(backend: KernelBackend, t: Tensors) -> BoundCall:
        def call() -> tuple[torch.Tensor, ...]:
            backend.apply_bitmask(t["logits"], t["bitmask"])
            return (t["logits"],)

        return call

    def compared(outputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return tuple(outputs[0][rows, 32 * first : 32 * last] for first, last in ends)

    def expected(t: Tensors) -> tuple[torch.Tensor, ...]:
        parts = tuple(part.cpu() for part in compared((t["logits"],)))
        for part, (first, last) in zip(parts, ends, strict=True):
            REFERENCE.apply_bitmask(part, t["bitmask"][rows, first:last].cpu())
        return parts

    def bind_torch(t: Tensors) -> BoundCall:
        bits = torch.arange(32, dtype=torch.int32, device=t["bitmask"].device)
        forbidden = ((t["bitmask"][:, :, None] >> bits) & 1 == 0).flatten(1)[:, :vocab_size].contiguous()
        return lambda: (t["logits"].masked_fill_(forbidden, float("-inf")),)

    return KernelCase(
        name=_name(num_rows, vocab_size),
        cost=apply_bitmask_cost(num_rows, vocab_size),
        make=make,
        bind=bind,
        expected=expected,
        compared=compared,
        baselines=(Baseline("masked_fill_, mask unpacked before", bind_torch),),
        exact=True,
    )
