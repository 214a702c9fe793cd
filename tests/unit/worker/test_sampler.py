"""A step's rows are sampled each by its own parameters, whatever the other rows are and in whatever order."""

import dataclasses

import numpy as np
import pytest
import torch

from pico_vllm import SamplingParams
from pico_vllm.kernels.backend import CPU, REFERENCE
from pico_vllm.outputs import TokenLogprobs
from pico_vllm.scheduler_output import NewRequestData
from pico_vllm.worker import sampler
from pico_vllm.worker.input_builder import PromptLogprobsBatch, RandomSampling, SamplingBatch
from pico_vllm.worker.logits_processors import LogitsProcessors
from pico_vllm.worker.logprobs import entries_by_count
from pico_vllm.worker.sampler import Sampler

VOCAB_SIZE = 50
NUM_ROWS = 12
MAX_ROWS = 200
NUM_WORDS = 2  # of a bitmask over the vocabulary
INF = float("inf")


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
        min_p=torch.where(greedy, 0.0, torch.linspace(0.0, 0.2, NUM_ROWS)),
        seeds=torch.arange(NUM_ROWS) * 7 - 20,
        sample_indices=torch.arange(NUM_ROWS) % 4,
        positions=torch.arange(NUM_ROWS) % 5,
    )


def take(random, rows):
    return RandomSampling(**{field.name: getattr(random, field.name)[rows] for field in dataclasses.fields(random)})


def make_batch(num_rows, random=None, **logprobs):
    rows = np.arange(num_rows)
    return SamplingBatch(rows, np.zeros_like(rows), random, **logprobs)


def make_processors(params=None):
    """State of rows of which some ask for something: row → SamplingParams."""
    processors = LogitsProcessors(MAX_ROWS, VOCAB_SIZE, torch.device("cpu"))
    for row, asked in (params or {}).items():
        processors.add(row, NewRequestData(asked, 0, 1, stop_token_ids=asked.stop_token_ids))
    return processors


@dataclasses.dataclass
class Sampled:
    """What the sampler gives, as it reaches the host."""

    token_ids: torch.Tensor
    logprobs: tuple
    prompt_logprobs: tuple


def run(backend, logits, random=None, *, processors=None, grammar=None, **logprobs):
    num_rows = logits.shape[0] - sum(logprobs["prompt_logprobs"].counts if "prompt_logprobs" in logprobs else ())
    batch = make_batch(num_rows, random, **logprobs)
    prompt = logits[num_rows:]
    output = Sampler(backend)(
        logits if len(prompt) == 0 else logits[:num_rows],
        batch,
        processors or make_processors(),
        grammar,
        lambda start, end: prompt[start:end],
    )
    assert output.input_ids.tolist() == output.token_ids.clamp(min=0).tolist()
    counts = logprobs["prompt_logprobs"].counts if "prompt_logprobs" in logprobs else ()
    return Sampled(
        output.token_ids,
        entries_by_count(output.logprobs, (1,) * num_rows),
        entries_by_count(output.prompt_logprobs, counts),
    )


def sample(backend, logits, random, **options):
    return run(backend, logits, random, **options).token_ids.tolist()


# ------------------------------------------------------------------------------------------------- greedy and random
def test_without_random_rows_every_row_takes_its_argmax(backend):
    logits = make_logits()
    output = run(backend, logits)
    assert output.token_ids.tolist() == logits.argmax(-1).tolist() and output.token_ids.dtype == torch.int64
    assert (output.logprobs, output.prompt_logprobs) == ((), ())


def test_an_all_greedy_step_draws_no_random_numbers(backend):
    def forbidden(*args):
        raise AssertionError("drawn for nothing")

    watched = dataclasses.replace(backend, uniform=forbidden, sample=forbidden)
    assert sample(watched, make_logits(), None) == make_logits().argmax(-1).tolist()


def test_a_step_that_asks_for_nothing_calls_nothing_and_copies_nothing(backend):
    def forbidden(*args):
        raise AssertionError("called for nothing")

    names = ("uniform", "sample", "apply_penalties", "apply_bitmask", "logprobs")
    seen = []
    watched = dataclasses.replace(backend, greedy=lambda x: seen.append(x) or backend.greedy(x))
    watched = dataclasses.replace(watched, **dict.fromkeys(names, forbidden))
    logits = make_logits()
    sample(watched, logits, None)
    assert len(seen) == 1 and seen[0] is logits


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


def test_seed_sample_index_and_position_decide_and_nothing_else(backend):
    """One row 200 times: equal keys give equal tokens, another seed, sample or position another draw."""
    logits = make_logits()[:1].expand(200, -1)
    everything = torch.full((200,), 11)
    base = dataclasses.replace(take(make_random(torch.zeros(NUM_ROWS, dtype=torch.bool)), everything), min_p=None)
    assert len(set(sample(backend, logits, base))) == 1
    for varied in ("seeds", "sample_indices", "positions"):
        random = dataclasses.replace(base, **{varied: torch.arange(200)})
        assert len(set(sample(backend, logits, random))) > 5, varied


def test_min_p_is_of_its_own_row(backend):
    logits, random = make_logits(), make_random(torch.zeros(NUM_ROWS, dtype=torch.bool))
    only_best = dataclasses.replace(random, min_p=torch.where(torch.arange(NUM_ROWS) % 2 == 0, 1.0, 0.0))
    chosen, free = sample(backend, logits, only_best), sample(backend, logits, dataclasses.replace(random, min_p=None))
    assert chosen[0::2] == logits.argmax(-1)[0::2].tolist()
    assert chosen[1::2] == free[1::2] and chosen[0::2] != free[0::2]


def test_both_backends_choose_the_same_tokens():
    logits, random = make_logits(), make_random()
    assert sample(CPU, logits, random) == sample(REFERENCE, logits, random)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_logits_of_any_dtype_are_taken(backend, dtype):
    logits, random = make_logits().to(dtype), make_random()
    assert sample(backend, logits, random) == sample(backend, logits.float(), random)


def test_no_rows_give_no_tokens(backend):
    """A chunk that ends inside its prompt, of a request that wants prompt logprobs."""
    prompt = PromptLogprobsBatch(torch.tensor([3, 4]), (2,), (0,))
    output = run(backend, make_logits()[:2], prompt_logprobs=prompt)
    assert output.token_ids.tolist() == [] and output.logprobs == ()
    assert [len(entries) for entries in output.prompt_logprobs] == [2]


# ------------------------------------------------------------------------------------------- masks, bias, processors
def test_a_row_that_asks_for_something_changes_nothing_for_the_others(backend):
    logits, random = make_logits(), make_random()
    plain = sample(backend, logits, random)
    before = logits.clone()
    forced = make_processors({2: SamplingParams(allowed_token_ids=[7]), 6: SamplingParams(logit_bias={9: 100.0})})
    assert sample(backend, logits, random, processors=forced) == [*plain[:2], 7, *plain[3:6], 9, *plain[7:]]
    assert torch.equal(logits, before), "logprobs are of the model's own logits"


def test_processors_of_rows_outside_the_step_do_nothing(backend):
    logits = make_logits()[:3]
    elsewhere = make_processors({5: SamplingParams(allowed_token_ids=[7])})
    assert sample(backend, logits, None, processors=elsewhere) == logits.argmax(-1).tolist()


def grammar_of(*rows, allowed):
    bitmask = torch.zeros(len(rows), NUM_WORDS, dtype=torch.int32)
    for index, ids in enumerate(allowed):
        for token_id in ids:
            bitmask[index, token_id // 32] |= 1 << token_id % 32
    return torch.tensor(rows), bitmask


def test_a_grammar_masks_its_own_rows(backend):
    logits, random = make_logits(), make_random()
    plain = sample(backend, logits, random)
    grammar = grammar_of(4, 0, allowed=([3, 40], [11]))
    chosen = sample(backend, logits, random, grammar=grammar)
    assert chosen[0] == 11 and chosen[4] in (3, 40)
    assert chosen[1:4] + chosen[5:] == plain[1:4] + plain[5:]
    best_of_two = run(backend, logits, grammar=grammar).token_ids.tolist()
    assert best_of_two[4] == (3 if logits[4, 3] > logits[4, 40] else 40)


def test_no_bias_brings_back_what_a_grammar_forbids(backend):
    forced = make_processors({1: SamplingParams(logit_bias={9: 100.0, 3: -100.0})})
    assert sample(backend, make_logits(), None, processors=forced)[1] == 9
    assert sample(backend, make_logits(), None, processors=forced, grammar=grammar_of(1, allowed=([3],)))[1] == 3


def test_a_row_with_nothing_left_gives_minus_1_and_the_others_their_tokens(backend):
    logits, random = make_logits(), make_random()
    plain = sample(backend, logits, random)
    nothing = make_processors({1: SamplingParams(allowed_token_ids=[5], stop_token_ids=[5], min_tokens=1)})
    expected = [*plain[:1], -1, *plain[2:]]
    assert sample(backend, logits, random, processors=nothing) == expected
    assert sample(backend, logits, None, processors=nothing)[1] == -1
    assert sample(backend, logits, random, grammar=grammar_of(1, allowed=([],))) == expected
    disjoint = make_processors({1: SamplingParams(allowed_token_ids=[5])})
    assert sample(backend, logits, random, processors=disjoint, grammar=grammar_of(1, allowed=([6],))) == expected


def test_a_processor_that_makes_nan_ends_its_own_row(backend):
    logits, random = make_logits(), make_random()
    plain = sample(backend, logits, random)
    broken = make_processors({1: SamplingParams(logits_processors=[lambda ids, logits: logits * float("nan")])})
    assert sample(backend, logits, random, processors=broken) == [*plain[:1], -1, *plain[2:]]


# ---------------------------------------------------------------------------------------------------------- logprobs
def expected_entry(logits, token_id, num_best):
    logprobs = logits.double().log_softmax(-1)
    best = logprobs.sort(descending=True)
    ids = (token_id, *best.indices[:num_best].tolist())
    return ids, [logprobs[i].item() for i in ids], 1 + int((logits > logits[token_id]).sum())


def assert_entry(entry, logits, token_id, num_best):
    ids, logprobs, rank = expected_entry(logits, token_id, num_best)
    assert (entry.token_ids, entry.rank) == (ids, rank)
    assert entry.logprobs == pytest.approx(logprobs, abs=1e-5)
    assert isinstance(entry, TokenLogprobs) and type(entry.rank) is int
    assert {type(i) for i in entry.token_ids} == {int} and {type(x) for x in entry.logprobs} == {float}


def test_each_row_reports_as_many_as_it_asked_for(backend):
    logits, random = make_logits(), make_random()
    wanted = (3, -1, 0, 50, -1, 1, 7, -1, 2, 100, -1, 0)
    output = run(backend, logits, random, num_logprobs=wanted)
    assert [len(entries) for entries in output.logprobs] == [int(n >= 0) for n in wanted]
    for row, (entries, num_best) in enumerate(zip(output.logprobs, wanted, strict=True)):
        for entry in entries:
            assert_entry(entry, logits[row], int(output.token_ids[row]), min(num_best, VOCAB_SIZE))
    assert output.token_ids.tolist() == sample(backend, logits, random)


def test_logprobs_of_nobody_but_0_best(backend):
    output = run(backend, make_logits()[:2], num_logprobs=(0, -1))
    assert [len(entries) for entries in output.logprobs] == [1, 0]
    assert output.logprobs[0][0].rank == 1 and len(output.logprobs[0][0].token_ids) == 1


def test_logprobs_are_of_the_models_own_distribution(backend):
    """Whatever masks, bias, penalties and temperature have made of it."""
    logits, random = make_logits(), make_random(torch.zeros(NUM_ROWS, dtype=torch.bool))
    worst = int(logits[2].argmin())
    forced = make_processors({2: SamplingParams(allowed_token_ids=[worst], logit_bias={worst: 50.0})})
    output = run(backend, logits, random, processors=forced, num_logprobs=(-1, -1, 4) + (-1,) * 9)
    assert output.token_ids[2] == worst
    (entry,) = output.logprobs[2]
    assert entry.rank == VOCAB_SIZE
    assert_entry(entry, logits[2], worst, 4)


def test_logprobs_beside_a_row_with_nothing_left(backend):
    nothing = make_processors({1: SamplingParams(allowed_token_ids=[5], stop_token_ids=[5], min_tokens=1)})
    output = run(backend, make_logits()[:3], processors=nothing, num_logprobs=(1, 1, 1))
    assert output.token_ids[1] == -1
    for row in (0, 2):
        assert_entry(output.logprobs[row][0], make_logits()[row], int(output.token_ids[row]), 1)


def test_prompt_positions_are_reported_by_request_and_sampled_rows_come_first(backend):
    logits = make_logits()
    targets = [4, 5, 6, 7, 8]
    prompt = PromptLogprobsBatch(torch.tensor(targets), (2, 0, 3), (1, -1, 0))
    output = run(backend, logits, None, prompt_logprobs=prompt, num_logprobs=(-1, 2) + (-1,) * 5)
    assert output.token_ids.tolist() == logits[:7].argmax(-1).tolist()
    assert_entry(output.logprobs[1][0], logits[1], int(output.token_ids[1]), 2)
    assert [len(entries) for entries in output.prompt_logprobs] == [2, 0, 3]
    entries = [entry for of_request in output.prompt_logprobs for entry in of_request]
    for row, (entry, target, num_best) in enumerate(zip(entries, targets, (1, 1, 0, 0, 0), strict=True), start=7):
        assert_entry(entry, logits[row], target, num_best)


def test_prompt_logprobs_are_untouched_by_what_is_done_to_the_sampled_rows(backend):
    logits = make_logits()
    prompt = PromptLogprobsBatch(torch.tensor([4] * 11), (11,), (2,))
    forced = make_processors({0: SamplingParams(allowed_token_ids=[7])})
    output = run(backend, logits, None, processors=forced, prompt_logprobs=prompt)
    assert output.token_ids.tolist() == [7]
    for row, entry in enumerate(output.prompt_logprobs[0], start=1):
        assert_entry(entry, logits[row], 4, 2)


@pytest.mark.parametrize("rows_at_a_time", [1, 3, 4, 100])
def test_prompt_logits_are_asked_for_a_few_rows_at_a_time(backend, monkeypatch, rows_at_a_time):
    logits, targets, num_best = make_logits(), [4, 5, 6, 7, 8, 9, 10], (1, -1, 0)
    prompt = PromptLogprobsBatch(torch.tensor(targets), (2, 0, 5), num_best)
    expected = run(backend, logits, None, prompt_logprobs=prompt).prompt_logprobs
    assert [len(entries) for entries in expected] == [2, 0, 5]
    monkeypatch.setattr(sampler, "PROMPT_LOGPROBS_ROWS", rows_at_a_time)
    asked = []

    def prompt_logits(start, end):
        asked.append((start, end))
        return logits[5 + start : 5 + end]

    batch = make_batch(5, prompt_logprobs=prompt)
    output = Sampler(backend)(logits[:5], batch, make_processors(), None, prompt_logits)
    assert asked == [(start, min(start + rows_at_a_time, 7)) for start in range(0, 7, rows_at_a_time)]
    for entries, expected_entries in zip(entries_by_count(output.prompt_logprobs, (2, 0, 5)), expected, strict=True):
        for entry, other in zip(entries, expected_entries, strict=True):
            assert (entry.token_ids, entry.rank) == (other.token_ids, other.rank)
            assert entry.logprobs == pytest.approx(other.logprobs, abs=1e-6)
