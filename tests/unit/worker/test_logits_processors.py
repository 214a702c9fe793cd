"""Each row's logits become what transformers' processors make of that request alone, whoever else is in the batch."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
import transformers

from pico_vllm import SamplingParams
from pico_vllm.kernels.backend import CPU, REFERENCE
from pico_vllm.scheduler_output import NewRequestData
from pico_vllm.worker.logits_processors import LogitsProcessors

VOCAB_SIZE = 60
INF = float("inf")


@dataclass
class Live:
    """A request as its processors should see it."""

    params: SamplingParams
    prompt: tuple[int, ...] = (1, 2, 3)
    bad_words: tuple[tuple[int, ...], ...] = ()
    stop_ids: tuple[int, ...] = ()
    output: list[int] = field(default_factory=list)

    def new_request(self) -> NewRequestData:
        """As the scheduler makes it, also after a preemption."""
        needs_history = self.params.has_penalties or self.bad_words or self.params.logits_processors
        return NewRequestData(
            params=self.params,
            seed=0,
            num_prompt_tokens=len(self.prompt),
            stop_token_ids=self.stop_ids,
            bad_words_token_ids=self.bad_words,
            known_token_ids=(*self.prompt, *self.output) if needs_history else (),
        )

    def expected(self, logits: torch.Tensor) -> torch.Tensor:
        """[vocab_size]: transformers' processors one after the other; presence and frequency as OpenAI defines them."""
        params, scores = self.params, logits[None].clone()
        ids = torch.tensor([[*self.prompt, *self.output]])
        processors = []
        if params.logit_bias:
            bias = {(token_id,): value for token_id, value in params.logit_bias.items()}
            processors.append(transformers.SequenceBiasLogitsProcessor(bias))
        if params.allowed_token_ids is not None:
            suppressed = sorted(set(range(VOCAB_SIZE)) - set(params.allowed_token_ids))
            processors.append(transformers.SuppressTokensLogitsProcessor(suppressed))
        if self.bad_words:
            processors.append(transformers.NoBadWordsLogitsProcessor([list(word) for word in self.bad_words]))
        if params.min_tokens and self.stop_ids:
            minimum = (len(self.prompt), params.min_tokens, list(self.stop_ids))
            processors.append(transformers.MinNewTokensLengthLogitsProcessor(*minimum))
        if params.repetition_penalty != 1.0:
            processors.append(transformers.RepetitionPenaltyLogitsProcessor(float(params.repetition_penalty)))
        for processor in processors:
            scores = processor(ids, scores)
        counts = torch.tensor(self.output, dtype=torch.int64).bincount(minlength=VOCAB_SIZE)
        return scores[0] - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)


class Rows:
    """LogitsProcessors and who has which row."""

    def __init__(self, *live: Live, max_num_seqs: int = 6, backend=CPU) -> None:
        self.processors = LogitsProcessors(max_num_seqs, VOCAB_SIZE, torch.device("cpu"))
        self.backend = backend
        self.row_of: dict[int, int] = {}
        self.free = list(range(max_num_seqs))
        for request in live:
            self.add(request)

    def add(self, request: Live) -> None:
        row = self.row_of[id(request)] = self.free.pop()
        self.processors.add(row, request.new_request())

    def drop(self, request: Live) -> None:
        row = self.row_of.pop(id(request))
        self.processors.drop(row)
        self.free.insert(0, row)

    def rows(self, *requests: Live) -> np.ndarray:
        return np.array([self.row_of[id(request)] for request in requests], dtype=np.int64)

    def apply(self, logits: torch.Tensor, *requests: Live) -> torch.Tensor:
        """[len(requests), vocab_size]; the row of each in the order given."""
        logits = logits.clone()
        positions = np.array([len(request.output) for request in requests])
        self.processors.apply(logits, self.rows(*requests), positions, self.backend)
        return logits

    def say(self, requests: list[Live] | tuple[Live, ...], token_ids: list[int]) -> None:
        rows = self.rows(*requests)
        self.processors.record(rows, torch.tensor(token_ids, dtype=torch.int64))
        for index, output_token_ids in self.processors.custom_outputs(rows):
            output_token_ids.append(token_ids[index])
        for request, token_id in zip(requests, token_ids, strict=True):
            request.output.append(token_id)


def make_logits(num_rows: int, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))


def masked(row: torch.Tensor) -> set[int]:
    return set((row == -INF).nonzero().flatten().tolist())


def assert_as_alone(rows: Rows, requests: list[Live], seed: int = 0) -> torch.Tensor:
    logits = make_logits(len(requests), seed)
    got = rows.apply(logits, *requests)
    for index, request in enumerate(requests):
        # Bitwise, but for what is subtracted: three roundings of numbers below 512.
        rtol, atol = (0, 3 * 512 * 2.0**-24) if request.params.has_penalties else (0, 0)
        torch.testing.assert_close(got[index], request.expected(logits[index]), rtol=rtol, atol=atol)
    return got


# ------------------------------------------------------------------------------------------- many rows, many steps
LONGEST_WORD = 5


def kinds(rng: random.Random) -> list[Live]:
    """One of each kind; prompts and words are of few different tokens, so that they meet."""

    def prompt() -> tuple[int, ...]:
        # Not shorter than a word: old transformers overlook a word of n tokens after n - 1 (we don't, see below).
        return tuple(rng.choices(range(2, 8), k=rng.randint(LONGEST_WORD, 9)))

    def words(count: int, longest: int) -> tuple[tuple[int, ...], ...]:
        return tuple({tuple(rng.choices(range(2, 8), k=rng.randint(1, longest))) for _ in range(count)})

    return [
        Live(SamplingParams(), prompt()),
        Live(SamplingParams(repetition_penalty=rng.choice([0.7, 1.3, 2.0])), prompt()),
        Live(SamplingParams(presence_penalty=rng.uniform(-2, 2), frequency_penalty=rng.uniform(-2, 2)), prompt()),
        Live(SamplingParams(repetition_penalty=1.1, frequency_penalty=0.5, logit_bias={2: 3.5, 4: -1.5}), prompt()),
        Live(SamplingParams(), prompt(), bad_words=words(6, 2)),
        Live(SamplingParams(), prompt(), bad_words=words(20, 4)),
        Live(SamplingParams(repetition_penalty=1.5), prompt(), bad_words=words(9, 3), stop_ids=(5, 2)),
        Live(SamplingParams(max_tokens=99, min_tokens=rng.randint(1, 6)), prompt(), stop_ids=(3, 4)),
        Live(SamplingParams(max_tokens=99, min_tokens=0), prompt(), stop_ids=(3, 4)),
        Live(SamplingParams(allowed_token_ids=[*rng.sample(range(60), 20), 2, 3, 4]), prompt()),
        Live(SamplingParams(logit_bias={rng.randrange(60): rng.uniform(-100, 100) for _ in range(5)}), prompt()),
        Live(
            SamplingParams(
                repetition_penalty=1.2,
                presence_penalty=0.5,
                logit_bias={2: 1.0},
                allowed_token_ids=range(2, 30),
                max_tokens=99,
                min_tokens=3,
            ),
            prompt(),
            bad_words=words(5, 3),
            stop_ids=(6,),
        ),
    ]


@pytest.mark.parametrize("backend", [CPU, REFERENCE], ids=lambda backend: backend.name)
@pytest.mark.parametrize("seed", range(12))
def test_every_kind_is_transformers_processor_through_random_traffic(seed, backend):
    """Rows join, run in any order or sit out, end and are taken over, are preempted and come back in another row."""
    rng = random.Random(seed)
    waiting = [*kinds(rng), *kinds(rng)]
    rng.shuffle(waiting)
    rows, running, finished = Rows(backend=backend), [], 0
    for step in range(25 if backend is REFERENCE else 60):
        while waiting and rows.free:
            running.append(waiting.pop(0))
            rows.add(running[-1])
        batch = rng.sample(running, rng.randint(1, len(running)))
        got = assert_as_alone(rows, batch, seed=1000 * seed + step)
        # Mostly a token of those that the words and stops are made of.
        choices = [[t for t in range(2, 8) if row[t] > -INF] or [int(row.argmax())] for row in got]
        chosen = [rng.choice(of_row) for of_row in choices]
        rows.say(
            batch, [token if rng.random() < 0.9 else int(row.argmax()) for token, row in zip(chosen, got, strict=True)]
        )
        for request in list(running):
            fate = rng.random()
            if fate < 0.15:
                running.remove(request)
                rows.drop(request)
                if fate < 0.08:
                    waiting.insert(0, request)  # preempted: its output comes back as known tokens
                else:
                    finished += 1
                    waiting.append(rng.choice(kinds(rng)))
    assert finished > 0


# ----------------------------------------------------------------------------------------------- one after the other
def test_presence_and_frequency_penalties_by_hand_over_many_steps():
    request = Live(SamplingParams(presence_penalty=0.5, frequency_penalty=0.25), prompt=(7, 7))
    rows = Rows(request)
    for step in range(1, 101):
        rows.say([request], [7 if step % 2 else 9])
    penalty = rows.apply(torch.zeros(1, VOCAB_SIZE), request)[0]
    assert penalty.nonzero().flatten().tolist() == [7, 9], "the prompt's tokens are not counted"
    assert penalty[[7, 9]].tolist() == [-0.25 * 50 - 0.5] * 2


def test_repetition_penalty_holds_for_prompt_and_output_once_however_often_they_say_it():
    request = Live(SamplingParams(repetition_penalty=2.0), prompt=(7, 7, 8))
    rows = Rows(request)
    for _ in range(5):
        rows.say([request], [9])
    logits = torch.ones(1, VOCAB_SIZE)
    logits[0, 8] = -1.0
    got = rows.apply(logits, request)[0]
    changed = {token_id: got[token_id].item() for token_id in (got != logits[0]).nonzero().flatten().tolist()}
    assert changed == {7: 0.5, 8: -2.0, 9: 0.5}


def test_bias_comes_before_penalties():
    """(1 + 3) / 2 - 1, and not 1 / 2 - 1 + 3."""
    params = SamplingParams(repetition_penalty=2.0, presence_penalty=1.0, logit_bias={5: 3.0})
    request = Live(params, prompt=(5,))
    rows = Rows(request)
    rows.say([request], [5])
    assert rows.apply(torch.ones(1, VOCAB_SIZE), request)[0, 5] == 1.0


def test_masks_survive_bias_and_penalties():
    params = SamplingParams(
        repetition_penalty=0.5,
        presence_penalty=-2.0,
        frequency_penalty=-2.0,
        logit_bias={5: 100.0, 6: 100.0, 7: 100.0, 8: 100.0},
        allowed_token_ids=[5, 6, 7, 9],
        max_tokens=99,
        min_tokens=9,
    )
    request = Live(params, prompt=(8, 5), bad_words=((5,), (9, 6)), stop_ids=(7,))
    rows = Rows(request)
    rows.say([request], [9])
    got = rows.apply(torch.ones(1, VOCAB_SIZE), request)[0]
    assert (got > -INF).nonzero().flatten().tolist() == [9]
    rows.say([request], [9])
    rows.say([request], [5])  # what has been said doesn't end in 9 any more
    assert (rows.apply(torch.ones(1, VOCAB_SIZE), request)[0] > -INF).nonzero().flatten().tolist() == [6, 9]


def test_bias_and_allowed_tokens_add_up():
    request = Live(SamplingParams(logit_bias={3: 2.5, 4: -1.0, 5: 7.0}, allowed_token_ids=[3, 4, 40, 40]))
    got = Rows(request).apply(torch.ones(1, VOCAB_SIZE), request)[0]
    assert {i: got[i].item() for i in (got > -INF).nonzero().flatten().tolist()} == {3: 3.5, 4: 0.0, 40: 1.0}


@pytest.mark.parametrize("min_tokens", [1, 2, 5])
def test_stop_tokens_are_masked_until_min_tokens_are_there(min_tokens):
    request = Live(SamplingParams(max_tokens=99, min_tokens=min_tokens), stop_ids=(8, 30))
    rows = Rows(request)
    for _ in range(min_tokens):
        assert masked(rows.apply(make_logits(1), request)[0]) == {8, 30}
        rows.say([request], [2])
    assert torch.equal(rows.apply(make_logits(1), request), make_logits(1))


def test_an_eos_that_the_model_has_no_logit_for_is_left_out():
    """Checkpoints name such ids: tokens that were added to the tokenizer and not to the model."""
    request = Live(SamplingParams(max_tokens=9, min_tokens=2), stop_ids=(8, VOCAB_SIZE, VOCAB_SIZE + 7))
    assert masked(Rows(request).apply(make_logits(1), request)[0]) == {8}
    outside = Live(SamplingParams(max_tokens=9, min_tokens=2), stop_ids=(VOCAB_SIZE,))
    assert not Rows(outside).processors.any_active(np.arange(6))


# ---------------------------------------------------------------------------------------------------------- bad words
@pytest.mark.parametrize(
    ("prompt", "output", "words", "expected"),
    [
        pytest.param((1,), [], [(9,)], {9}, id="one-token"),
        pytest.param((1, 2), [], [(2, 9)], {9}, id="the-prompt-ends-in-its-beginning"),
        pytest.param((1, 2), [3], [(2, 3, 9)], {9}, id="begins-in-the-prompt-and-goes-on-in-the-output"),
        pytest.param((1, 2), [3, 4, 5], [(4, 5, 9)], {9}, id="in-the-output"),
        pytest.param((1, 2), [3, 4], [(3, 9), (2, 4, 9), (4, 3, 9)], set(), id="not-at-the-end"),
        pytest.param((2,), [], [(1, 2, 9)], set(), id="longer-than-all-that-was-said"),
        pytest.param((1, 2), [], [(1, 2, 9)], {9}, id="all-that-was-said"),
        pytest.param((1, 2), [], [(1, 2, 9), (2, 10), (2, 2, 11), (12,)], {9, 10, 12}, id="of-different-lengths"),
        pytest.param((2,), [2, 2, 2], [(2, 2)], {2}, id="a-word-that-repeats"),
        pytest.param((5, 1, 2), [], [(1, 2, 2), (2, 2)], {2}, id="two-words-with-one-last-token"),
        pytest.param((0,), [0], [(0, 0, 0), (0, 0)], {0}, id="token-0"),
    ],
)
def test_the_token_that_would_complete_a_bad_word_is_masked(prompt, output, words, expected):
    told = Live(SamplingParams(), prompt, tuple(words), output=list(output))  # as after a preemption
    sampled = Live(SamplingParams(), prompt, tuple(words))
    rows = Rows(told, sampled)
    for token_id in output:
        rows.say([sampled], [token_id])
    logits = make_logits(2)
    for row in rows.apply(logits, told, sampled):
        assert masked(row) == expected
    assert torch.equal(rows.apply(logits, told, sampled)[:, 20:], logits[:, 20:])


def test_longer_words_of_a_later_request_leave_the_memory_of_the_others():
    """The window of recent tokens grows while ``first`` is in the middle of its word, and it sits out a step."""
    first = Live(SamplingParams(), (1, 2), ((2, 3, 9),))
    rows = Rows(first)
    rows.say([first], [3])
    second = Live(SamplingParams(), (1, 2, 3, 4), ((1, 2, 3, 4, 5, 10), (4, 5, 11)))
    rows.add(second)
    rows.say([second], [5])
    got = rows.apply(make_logits(2), second, first)
    assert [masked(row) for row in got] == [{10, 11}, {9}]
    rows.drop(second)
    third = Live(SamplingParams(), (5,), ((5, 12),))
    rows.add(third)  # in a row with a longer memory than it needs; nothing of second is in it
    assert [masked(row) for row in rows.apply(make_logits(2), first, third)] == [{9}, {12}]


def test_what_the_last_request_of_a_row_has_said_completes_no_word_of_the_next_one():
    first = Live(SamplingParams(), (7, 1, 5), ((7, 1, 9),))
    rows = Rows(first, max_num_seqs=1)
    rows.drop(first)
    second = Live(SamplingParams(), (2,), ((1, 2, 9),))
    rows.add(second)
    assert masked(rows.apply(make_logits(1), second)[0]) == set()


def test_a_request_with_bad_words_that_sits_out_masks_nothing_for_the_others():
    first, second = Live(SamplingParams(), (1,), ((1, 9),)), Live(SamplingParams(), (1,), ((1, 10),))
    rows = Rows(first, second)
    assert masked(rows.apply(make_logits(1), second)[0]) == {10}
    assert masked(rows.apply(make_logits(1), first)[0]) == {9}


# ------------------------------------------------------------------------------------------------- custom processors
def test_custom_processors_get_the_output_so_far_and_the_processed_logits():
    seen = []

    def remember(output_ids, logits):
        seen.append((list(output_ids), logits.clone()))
        return logits

    request = Live(SamplingParams(logits_processors=[remember], logit_bias={5: 2.0}), prompt=(1, 2))
    rows = Rows(request)
    for token_id in (7, 8, 9):
        rows.apply(torch.ones(1, VOCAB_SIZE), request)
        rows.say([request], [token_id])
    assert [ids for ids, _ in seen] == [[], [7], [7, 8]]
    assert all(logits.shape == (VOCAB_SIZE,) and logits[5] == 3.0 for _, logits in seen)
    rows.drop(request)
    rows.add(request)  # preempted and resumed
    rows.apply(torch.ones(1, VOCAB_SIZE), request)
    assert seen[-1][0] == [7, 8, 9]


def test_custom_processors_run_in_their_order_each_on_its_own_row():
    def add_one(output_ids, logits):
        return logits + 1

    def double_in_place(output_ids, logits):
        logits *= 2
        return logits

    first = Live(SamplingParams(logits_processors=[add_one, double_in_place]))
    second = Live(SamplingParams(logits_processors=[double_in_place, add_one]))
    plain = Live(SamplingParams())
    got = Rows(first, second, plain).apply(torch.ones(3, VOCAB_SIZE), second, plain, first)
    assert got[:, 0].tolist() == [3.0, 1.0, 4.0] and (got == got[:, :1]).all()


def test_custom_processors_run_last():
    request = Live(SamplingParams(logits_processors=[lambda ids, logits: logits.clamp(min=-1.0)]), bad_words=((9,),))
    got = Rows(request).apply(torch.ones(1, VOCAB_SIZE), request)[0]
    assert got[9] == -1.0, "the last word is the client's"


@pytest.mark.parametrize("broken", [lambda ids, logits: None, lambda ids, logits: logits[:5], lambda: 1, "raise"])
def test_a_custom_processor_that_fails_masks_its_own_row_and_says_why(caplog, broken):
    def fail(output_ids, logits):
        raise KeyError("it is broken")

    request = Live(SamplingParams(logits_processors=[fail if broken == "raise" else broken]))
    other = Live(SamplingParams(logit_bias={3: 1.0}))
    logits = make_logits(2)
    got = Rows(request, other).apply(logits, request, other)
    assert (got[0] == -INF).all()
    assert torch.equal(got[1], other.expected(logits[1]))
    assert "logits processor has failed" in caplog.text and caplog.records[0].exc_info is not None


# ------------------------------------------------------------------------------------------------- rows and tables
EACH_KIND = {
    "logit_bias": Live(SamplingParams(logit_bias={3: 1.0})),
    "allowed_token_ids": Live(SamplingParams(allowed_token_ids=[3])),
    "bad-word-of-one-token": Live(SamplingParams(), bad_words=((3,),)),
    "bad-word-of-two-tokens": Live(SamplingParams(), bad_words=((3, 4),)),
    "min_tokens": Live(SamplingParams(min_tokens=3), stop_ids=(3,)),
    "repetition_penalty": Live(SamplingParams(repetition_penalty=1.5)),
    "presence_penalty": Live(SamplingParams(presence_penalty=1.5)),
    "frequency_penalty": Live(SamplingParams(frequency_penalty=1.5)),
    "logits_processors": Live(SamplingParams(logits_processors=[lambda ids, logits: logits - 1])),
}


def one_of(kind: str, prompt: tuple[int, ...] = (1, 2, 3)) -> Live:
    return replace(EACH_KIND[kind], prompt=prompt, output=[])


@pytest.mark.parametrize("kind", EACH_KIND)
def test_a_row_is_active_while_its_request_asks_for_something_and_leaves_nothing(kind):
    asks, plain = one_of(kind), Live(SamplingParams())
    rows = Rows(asks, plain, max_num_seqs=2)
    assert rows.processors.any_active(rows.rows(asks))
    assert rows.processors.any_active(rows.rows(plain, asks))
    assert not rows.processors.any_active(rows.rows(plain))
    rows.say([asks], [3])
    rows.drop(asks)
    successor = Live(SamplingParams(), prompt=(3,), stop_ids=(3,))
    rows.add(successor)
    assert not rows.processors.any_active(np.arange(2))
    assert rows.processors._num_active == 0, "a step doesn't even look at its rows"
    logits = make_logits(2)
    assert torch.equal(rows.apply(logits, successor, plain), logits)


@pytest.mark.parametrize("later", EACH_KIND)
@pytest.mark.parametrize("earlier", EACH_KIND)
def test_a_row_that_is_taken_over_keeps_nothing_of_its_last_request(earlier, later):
    first, second = one_of(earlier, (3, 3)), one_of(later, (5, 3))
    rows = Rows(first, max_num_seqs=1)
    rows.say([first], [3])
    rows.drop(first)
    rows.add(second)
    logits = make_logits(1)
    if second.params.logits_processors:
        assert torch.equal(rows.apply(logits, second), logits - 1)
    else:
        assert_as_alone(rows, [second])


def test_plain_requests_make_no_tables_and_rows_without_a_stop_token_are_plain():
    """Two tables of [max_num_seqs, vocab_size] are 300 MB for a real model."""
    plain = [
        Live(SamplingParams(temperature=0.5, top_k=3, top_p=0.5, min_p=0.1, seed=1, logprobs=3, prompt_logprobs=2)),
        Live(SamplingParams(max_tokens=9, min_tokens=5)),
        Live(SamplingParams(stop_token_ids=[5], ignore_eos=True), stop_ids=(5,)),
    ]
    rows = Rows(*plain)
    assert not rows.processors.any_active(rows.rows(*plain))
    rows.say(plain, [1, 2, 3])
    tables = [
        value for value in vars(rows.processors).values() if isinstance(value, torch.Tensor) and value.numel() > 1
    ]
    assert tables == []


def test_tables_are_made_for_what_needs_them():
    rows = Rows(Live(SamplingParams(logit_bias={1: 1.0})))
    assert rows.processors._bias is not None and rows.processors._output_counts is None
    rows = Rows(Live(SamplingParams(presence_penalty=1.0)))
    assert rows.processors._bias is None and rows.processors._output_counts is not None


def test_no_rows_are_processed_in_a_step_in_which_nobody_samples():
    rows = Rows(*map(one_of, EACH_KIND), max_num_seqs=len(EACH_KIND))
    nobody = np.empty(0, dtype=np.int64)
    assert not rows.processors.any_active(nobody)
    rows.processors.apply(torch.empty(0, VOCAB_SIZE), nobody, nobody, CPU)
    rows.processors.record(nobody, torch.empty(0, dtype=torch.int64))


def test_a_request_that_got_no_token_is_not_counted_against_others():
    """-1 = everything was masked; that request ends, and its row is dropped in the next step."""
    first, second = Live(SamplingParams(presence_penalty=1.0)), Live(SamplingParams(presence_penalty=1.0))
    rows = Rows(first, second)
    rows.say([first, second], [-1, 4])
    first.output.clear()
    assert_as_alone(rows, [second])
    rows.drop(first)
    third = Live(SamplingParams(presence_penalty=1.0))
    rows.add(third)
    assert_as_alone(rows, [third, second])


def test_a_word_is_completed_even_where_all_that_was_said_is_the_rest_of_it():
    request = Live(SamplingParams(), prompt=(7, 8), bad_words=((7, 8, 9), (6, 7, 8, 10)))
    masked = Rows(request).apply(torch.zeros(1, VOCAB_SIZE), request)[0]
    assert masked.isinf().nonzero().flatten().tolist() == [9]
