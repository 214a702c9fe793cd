"""A step's rows are sampled each by its own parameters, whatever the other rows are and in whatever order."""

import dataclasses

import pytest
import torch

from pico_vllm.kernels.backend import CPU, REFERENCE
from pico_vllm.worker.input_builder import RandomSampling, SamplingBatch
from pico_vllm.worker.sampler import Sampler

VOCAB_SIZE = 50
NUM_ROWS = 12


@pytest.fixture(params=[CPU, REFERENCE], ids=lambda backend: backend.name)
def backend(request):
    return request.param


def make_logits():
    return 3 * torch.randn(NUM_ROWS, VOCAB_SIZE, generator=torch.Generator().manual_seed(1))


def make_random(greedy=None):
    """Every row in its own way; greedy rows hold what the input builder gives them."""
    greedy = torch.arange(NUM_ROWS) % 3 == 0 if greedy is None else greedy
    return RandomSampling(
        greedy=greedy,
        temperature=torch.where(greedy, 1.0, torch.linspace(0.5, 2.0, NUM_ROWS)),
        top_k=torch.where(greedy, 0, torch.arange(NUM_ROWS) * 3),
        top_p=torch.where(greedy, 1.0, torch.linspace(0.6, 1.0, NUM_ROWS)),
        seeds=torch.arange(NUM_ROWS) * 7 - 20,
        positions=torch.arange(NUM_ROWS) % 5,
    )


def take(random, rows):
    return RandomSampling(**{field.name: getattr(random, field.name)[rows] for field in dataclasses.fields(random)})


def sample(backend, logits, random):
    rows = torch.arange(logits.shape[0], dtype=torch.int32)
    return Sampler(backend)(logits, SamplingBatch(rows, random)).tolist()


def test_without_random_rows_every_row_takes_its_argmax(backend):
    logits = make_logits()
    assert sample(backend, logits, None) == logits.argmax(-1).tolist()


def test_an_all_greedy_step_draws_no_random_numbers(backend):
    def forbidden(*args):
        raise AssertionError("drawn for nothing")

    watched = dataclasses.replace(backend, uniform=forbidden, sample=forbidden)
    assert sample(watched, make_logits(), None) == make_logits().argmax(-1).tolist()


def test_greedy_rows_among_random_ones_take_their_argmax_and_the_others_do_not_all(backend):
    logits, random = make_logits(), make_random()
    chosen, best = sample(backend, logits, random), logits.argmax(-1).tolist()
    differs = [mine != argmax for mine, argmax in zip(chosen, best, strict=True)]
    assert not any(different for different, greedy in zip(differs, random.greedy, strict=True) if greedy)
    assert sum(differs) >= 3


def test_a_row_gets_the_same_token_alone_and_in_any_order(backend):
    logits, random = make_logits(), make_random()
    together = sample(backend, logits, random)
    for seed in range(5):
        order = torch.randperm(NUM_ROWS, generator=torch.Generator().manual_seed(seed))
        assert sample(backend, logits[order], take(random, order)) == [together[i] for i in order]
    alone = [sample(backend, logits[i : i + 1], take(random, slice(i, i + 1)))[0] for i in range(NUM_ROWS)]
    assert alone == together


def test_seed_and_position_decide_and_nothing_else(backend):
    """One row 200 times: equal keys give equal tokens, another seed or position another draw."""
    logits = make_logits()[:1].expand(200, -1)
    base = take(make_random(torch.zeros(NUM_ROWS, dtype=torch.bool)), torch.full((200,), 11))
    assert len(set(sample(backend, logits, base))) == 1
    for varied in ("seeds", "positions"):
        random = dataclasses.replace(base, **{varied: torch.arange(200)})
        assert len(set(sample(backend, logits, random))) > 5, varied


def test_both_backends_choose_the_same_tokens():
    logits, random = make_logits(), make_random()
    assert sample(CPU, logits, random) == sample(REFERENCE, logits, random)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_logits_of_any_dtype_are_taken(backend, dtype):
    logits, random = make_logits().to(dtype), make_random()
    assert sample(backend, logits, random) == sample(backend, logits.float(), random)
