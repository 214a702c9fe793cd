"""Every way of sampling through the real engine core, against transformers and in every setting.

Requests go straight to the core, as token ids. Greedy tokens are compared up to a near-tie, as ``engine_runs`` says.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import transformers

import tiny_models
from engine_runs import MAX_LOGPROB_ERROR, Oracle, Run, assert_same_tokens, make_llm
from pico_vllm import SamplingParams
from pico_vllm.kernels.backend import REFERENCE, recording
from pico_vllm.outputs import TokenLogprobs
from pico_vllm.request import FinishReason, Request

VOCAB_SIZE = tiny_models.VOCAB_SIZE
NUM_TOKENS = 24
INF = float("inf")


@dataclass(frozen=True)
class Ask:
    """One request."""

    prompt: list[int]
    params: SamplingParams
    sample_index: int = 0
    bad_words: tuple[tuple[int, ...], ...] = ()
    eos: tuple[int, ...] = ()


@dataclass
class Result:
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs_after_token: bool = False
    preempted_in_prompt: bool = False


def params(**overrides: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 0.0, "max_tokens": NUM_TOKENS} | overrides))


def add(core: Any, name: str, ask: Ask) -> Request:
    request = Request(
        name,
        ask.prompt,
        ask.params,
        seed=ask.params.seed or 0,
        eos_token_ids=ask.eos,
        sample_index=ask.sample_index,
        bad_words_token_ids=ask.bad_words,
    )
    core.add_request(request)
    return request


def run(llm: Any, asks: list[Ask], *, order: str = "together") -> list[Result]:
    core = llm.engine.core
    results = [Result() for _ in asks]
    arrivals = list(enumerate(asks))
    requests: list[tuple[Request, Result]] = []
    if order == "reversed":
        arrivals.reverse()
    while arrivals or core.has_unfinished_requests():
        for _ in range(1 if order == "staggered" else len(arrivals)):
            if arrivals:
                index, ask = arrivals.pop(0)
                requests.append((add(core, str(index), ask), results[index]))
        for output in core.step():
            result = results[int(output.request_id)]
            assert result.finish_reason is None, "nothing comes after the end"
            assert output.new_token_ids or output.prompt_logprobs or output.finish_reason
            if output.prompt_logprobs and result.token_ids:
                result.prompt_logprobs_after_token = True
            result.token_ids += output.new_token_ids
            result.logprobs += output.logprobs
            result.prompt_logprobs += output.prompt_logprobs
            result.finish_reason = output.finish_reason
        for request, result in requests:
            in_prompt = 0 < len(result.prompt_logprobs) < request.num_prompt_tokens - 1
            result.preempted_in_prompt |= request.num_preemptions > 0 and in_prompt
    manager = core.kv_cache_manager
    manager.check_invariants()
    assert manager.num_free_blocks == manager.num_blocks
    return results


def run_alone(llm: Any, ask: Ask) -> tuple[Result, torch.Tensor]:
    """The result, and the processed logits that each token was chosen from, [num_tokens, vocab_size]."""
    runner = llm.engine.core.executor.runner
    plain, seen = runner.backend, []
    runner.set_backend(recording(plain, lambda op, args, _: seen.append(args[0].clone()) if op == "greedy" else None))
    try:
        (result,) = run(llm, [ask])
    finally:
        runner.set_backend(plain)
    return result, torch.cat(seen)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("qwen2")
    tiny_models.save_tiny_model(tiny_models.MODELS["qwen2-gqa6-d64-tied"], directory)
    return directory


@pytest.fixture(scope="module")
def llm(checkpoint):
    return make_llm(checkpoint)


@pytest.fixture(scope="module")
def oracle(checkpoint):
    return Oracle(checkpoint)


@pytest.fixture(scope="module")
def hf_model(checkpoint):
    return transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def make_prompt(length: int, seed: int = 3) -> list[int]:
    rng = random.Random(1000 * seed + length)
    return [rng.randrange(2, VOCAB_SIZE) for _ in range(length)]


PROMPT = make_prompt(17)


@pytest.fixture(scope="module")
def greedy_tokens(llm):
    return run(llm, [Ask(PROMPT, params())])[0].token_ids


# ------------------------------------------------------------------------------------------------------- the settings
@dataclass(frozen=True)
class Setting:
    options: dict[str, Any] = field(default_factory=dict)
    order: str = "together"
    preempts: bool = False


SETTINGS = {
    "together": Setting(),
    "reversed": Setting(order="reversed"),
    "staggered": Setting(order="staggered"),
    "chunks-of-1": Setting({"max_num_batched_tokens": 1}),
    "chunks-of-7": Setting({"max_num_batched_tokens": 7}),
    "chunks-of-64": Setting({"max_num_batched_tokens": 64}),
    "two-at-a-time": Setting({"max_num_seqs": 2}),
    "tiny-pool": Setting({"num_gpu_blocks_override": 20, "block_size": 4}, preempts=True),
    "tiny-pool-tiny-chunks": Setting(
        {"num_gpu_blocks_override": 20, "block_size": 4, "max_num_batched_tokens": 3}, preempts=True
    ),
    "reference-backend": Setting({"backend": "reference"}),
}
each_setting = pytest.mark.parametrize("name", SETTINGS)


def run_setting(checkpoint: Any, name: str, asks: list[Ask]) -> list[Result]:
    setting = SETTINGS[name]
    llm = make_llm(checkpoint, **setting.options)
    results = run(llm, asks, order=setting.order)
    assert (llm.engine.core.scheduler.num_preemptions > 0) == setting.preempts
    return results


def prefer_even(output_ids: Any, logits: torch.Tensor) -> torch.Tensor:
    """A processor that depends on how much has been said."""
    logits[len(output_ids) % 2 :: 2] += 2.0
    return logits


def make_kinds(greedy_tokens: list[int]) -> dict[str, Ask]:
    """One request of each kind. Words and stops are made of what greedy decoding would say, so that they matter."""
    pairs = tuple(itertools.pairwise(greedy_tokens))
    triples = tuple(zip(greedy_tokens, greedy_tokens[1:], greedy_tokens[2:], strict=False))
    drawn = {"temperature": 0.9, "seed": 11}
    return {
        "greedy": Ask(PROMPT, params()),
        "greedy-logprobs": Ask(make_prompt(33), params(logprobs=5, prompt_logprobs=3)),
        "prompt-of-one-token": Ask([9], params(logprobs=0, prompt_logprobs=0)),
        "sampled": Ask(make_prompt(5), params(**drawn, logprobs=2)),
        "sampled-min-p": Ask(PROMPT, params(**drawn, min_p=0.1, top_k=50)),
        "sample-1": Ask(PROMPT, params(**drawn), sample_index=1),
        "sample-2": Ask(PROMPT, params(**drawn), sample_index=2),
        "repetition": Ask(PROMPT, params(repetition_penalty=1.8)),
        "presence-frequency": Ask(make_prompt(31), params(presence_penalty=1.5, frequency_penalty=0.7)),
        "sampled-penalties": Ask(
            make_prompt(48), params(**drawn, repetition_penalty=1.2, frequency_penalty=0.3, prompt_logprobs=0)
        ),
        "bias": Ask(PROMPT, params(logit_bias={greedy_tokens[0]: -3.0, 17: 2.0, 18: 1.5})),
        "allowed": Ask(PROMPT, params(**drawn, allowed_token_ids=range(20, 60))),
        "bad-words": Ask(PROMPT, params(), bad_words=pairs[::2]),
        "bad-words-of-three": Ask(PROMPT, params(repetition_penalty=0.9), bad_words=(*triples, (PROMPT[-1], 5))),
        "min-tokens": Ask(PROMPT, params(min_tokens=9), eos=(greedy_tokens[2], greedy_tokens[4])),
        "stops-early": Ask(PROMPT, params(), eos=(greedy_tokens[4],)),
        "custom": Ask(make_prompt(16), params(logits_processors=[prefer_even])),
        "custom-and-penalty": Ask(
            make_prompt(15), params(**drawn, logits_processors=[prefer_even], presence_penalty=2.0)
        ),
        "error": Ask(make_prompt(40), params(allowed_token_ids=[7], min_tokens=1), eos=(7,)),
    }


@pytest.fixture(scope="module")
def kinds(greedy_tokens):
    return make_kinds(greedy_tokens)


@pytest.fixture(scope="module")
def alone(llm, kinds):
    return {kind: run_alone(llm, ask) for kind, ask in kinds.items()}


@each_setting
def test_every_kind_gives_in_a_mixed_batch_what_it_gives_alone(checkpoint, kinds, alone, name):
    results = run_setting(checkpoint, name, list(kinds.values()))
    for kind, result in zip(kinds, results, strict=True):
        expected, logits = alone[kind]
        if result.token_ids == expected.token_ids:
            assert result.finish_reason == expected.finish_reason
            assert_same_entries(result.logprobs, expected.logprobs)
        else:
            assert kinds[kind].params.is_greedy, kind
            assert_same_tokens(result.token_ids, expected.token_ids, logits)
        assert_same_entries(result.prompt_logprobs, expected.prompt_logprobs)


def assert_same_entries(entries: list[TokenLogprobs], expected: list[TokenLogprobs]) -> None:
    """The chosen tokens and everything but the order of near-ties."""
    assert [e.token_ids[0] for e in entries] == [e.token_ids[0] for e in expected]
    for entry, other in zip(entries, expected, strict=True):
        assert entry.logprobs == pytest.approx(other.logprobs, abs=MAX_LOGPROB_ERROR)


def test_the_kinds_are_worth_comparing(kinds, alone, greedy_tokens):
    """Each differs from plain greedy decoding of its prompt, so that one that is ignored is seen."""
    results = {kind: result for kind, (result, _) in alone.items()}
    of_prompt = [kind for kind, ask in kinds.items() if ask.prompt is PROMPT and kind != "greedy"]
    assert results["greedy"].token_ids == greedy_tokens
    assert all(results[kind].token_ids != greedy_tokens for kind in of_prompt)
    texts = [tuple(results[kind].token_ids) for kind in of_prompt]
    assert len(set(texts)) == len(texts)
    reasons = {kind: result.finish_reason for kind, result in results.items()}
    assert reasons.pop("error") is FinishReason.ERROR and results["error"].token_ids == []
    assert reasons.pop("stops-early") is FinishReason.STOP and len(results["stops-early"].token_ids) <= 5
    reasons.pop("min-tokens")
    assert set(reasons.values()) == {FinishReason.LENGTH}


@pytest.mark.parametrize("name", ["together", "chunks-of-7", "tiny-pool"])
def test_each_kind_many_times_over_gives_what_it_gives_alone(checkpoint, kinds, alone, name):
    """A batch of one kind only: five requests of it, and one plain one between them."""
    for kind in ("repetition", "bad-words", "min-tokens", "sampled-penalties", "custom-and-penalty"):
        asks = [kinds[kind], kinds[kind], kinds["greedy"], kinds[kind], kinds[kind], kinds[kind]]
        results = run_setting(checkpoint, name, asks)
        for ask, result in zip(asks, results, strict=True):
            expected, logits = alone["greedy" if ask is kinds["greedy"] else kind]
            if not ask.params.is_greedy or len(result.token_ids) != len(expected.token_ids):
                assert result.token_ids == expected.token_ids
            assert_same_tokens(result.token_ids, expected.token_ids, logits)


# ------------------------------------------------------------------------------------------------- against transformers
def assert_entry(entry: TokenLogprobs, logits: torch.Tensor, token_id: int, num_best: int) -> None:
    """As transformers' logits [vocab_size] have it; which of two tokens comes first may be open if they nearly tie."""
    exact = logits.double().log_softmax(-1)
    best = exact.sort(descending=True).values
    assert entry.token_ids[0] == token_id and len(entry.token_ids) == len(entry.logprobs) == 1 + num_best
    assert entry.logprobs[0] == pytest.approx(exact[token_id].item(), abs=MAX_LOGPROB_ERROR)
    assert list(entry.logprobs[1:]) == pytest.approx(best[:num_best].tolist(), abs=MAX_LOGPROB_ERROR)
    own = [exact[i].item() for i in entry.token_ids]
    assert list(entry.logprobs) == pytest.approx(own, abs=MAX_LOGPROB_ERROR)
    assert len(set(entry.token_ids[1:])) == num_best
    low = 1 + int((exact > exact[token_id] + MAX_LOGPROB_ERROR).sum())
    high = int((exact > exact[token_id] - MAX_LOGPROB_ERROR).sum())
    assert low <= entry.rank <= high


@pytest.mark.parametrize("num_best", [0, 1, 5, 100])
@pytest.mark.parametrize("drawn", [False, True], ids=["greedy", "sampled"])
def test_logprobs_are_those_of_transformers(llm, oracle, drawn, num_best):
    """Of the model's distribution, although temperature, bias and penalties choose the tokens."""
    choice = {"temperature": 1.5, "seed": 5, "repetition_penalty": 1.3, "logit_bias": {7: 9.0}} if drawn else {}
    (result,) = run(llm, [Ask(PROMPT, params(logprobs=num_best, **choice))])
    (logits,) = oracle.logits([PROMPT], [Run(result.token_ids, torch.empty(0))])
    assert len(result.logprobs) == NUM_TOKENS
    for entry, row, token_id in zip(result.logprobs, logits, result.token_ids, strict=True):
        assert_entry(entry, row, token_id, num_best)
    ranks = {entry.rank for entry in result.logprobs}
    assert len(ranks) > 5 if drawn else ranks == {1}


@each_setting
def test_prompt_logprobs_are_complete_in_order_and_those_of_transformers(checkpoint, oracle, name):
    """Prompts of every length around a chunk and a block, beside requests that want none."""
    lengths = (60, 48, 33, 17, 16, 15, 8, 7, 2, 1)
    asks = [Ask(make_prompt(n), params(prompt_logprobs=i % 4, max_tokens=12)) for i, n in enumerate(lengths)]
    plain = [Ask(make_prompt(n, seed=4), params()) for n in (3, 20, 9)]
    *results, second, third = run_setting(checkpoint, name, [plain[0], *asks, *plain[1:]])
    assert results[0].prompt_logprobs == second.prompt_logprobs == third.prompt_logprobs == []
    if name == "tiny-pool-tiny-chunks":
        assert any(result.preempted_in_prompt for result in results)
    wanted = [Run(ask.prompt[1:], torch.empty(0)) for ask in asks]
    exact = oracle.logits([ask.prompt[:1] for ask in asks], wanted)
    for ask, result, logits in zip(asks, results[1:], exact, strict=True):
        assert not result.prompt_logprobs_after_token
        assert [entry.token_ids[0] for entry in result.prompt_logprobs] == ask.prompt[1:]
        for entry, row, token_id in zip(result.prompt_logprobs, logits, ask.prompt[1:], strict=True):
            assert_entry(entry, row, token_id, ask.params.prompt_logprobs)


def test_prompt_logprobs_of_one_token_to_say(llm, oracle):
    """The request ends in the step that brings the last of them."""
    ask = Ask(PROMPT, params(prompt_logprobs=2, logprobs=1, max_tokens=1))
    (result,) = run(llm, [ask])
    assert (len(result.prompt_logprobs), len(result.logprobs)) == (len(PROMPT) - 1, 1)
    (logits,) = oracle.logits([PROMPT[:1]], [Run(PROMPT[1:] + result.token_ids, torch.empty(0))])
    for entry, row, token_id in zip(result.prompt_logprobs, logits[:-1], PROMPT[1:], strict=True):
        assert_entry(entry, row, token_id, 2)
    assert_entry(result.logprobs[0], logits[-1], result.token_ids[0], 1)


def hf_generate(hf_model: Any, prompt: list[int], **options: Any) -> list[int]:
    with torch.inference_mode():
        ids = hf_model.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=NUM_TOKENS, pad_token_id=0, **options
        )
    return ids[0, len(prompt) :].tolist()


@pytest.mark.parametrize("penalty", [0.8, 1.05, 1.3, 2.5])
@pytest.mark.parametrize("length", [1, 17, 40])
def test_greedy_with_a_repetition_penalty_is_transformers_generate(llm, hf_model, length, penalty):
    prompt = make_prompt(length)
    result, logits = run_alone(llm, Ask(prompt, params(repetition_penalty=penalty)))
    theirs = hf_generate(hf_model, prompt, repetition_penalty=penalty, eos_token_id=None)
    assert_same_tokens(result.token_ids, theirs, logits)
    assert result.token_ids != run(llm, [Ask(prompt, params())])[0].token_ids or penalty < 1.1


def test_everything_that_transformers_has_at_once_is_transformers_generate(llm, hf_model, greedy_tokens):
    """Bias, bad words (also one that the prompt begins), suppressed tokens, min_new_tokens and the penalty."""
    first, second, third = greedy_tokens[:3]
    bad_words = ((first, second), (PROMPT[-1], first), (third,), (PROMPT[-2], PROMPT[-1], 40))
    bias = {40: 2.5, 41: -2.5, second: 1.0}
    suppressed = list(range(100, 140))
    allowed = [i for i in range(VOCAB_SIZE) if i not in suppressed]
    asked = params(repetition_penalty=1.4, logit_bias=bias, allowed_token_ids=allowed, min_tokens=6)
    eos = (greedy_tokens[5], 50, 60, 70, 80, 90)
    result, logits = run_alone(llm, Ask(PROMPT, asked, bad_words=bad_words, eos=eos))
    theirs = hf_generate(
        hf_model,
        PROMPT,
        repetition_penalty=1.4,
        bad_words_ids=[list(word) for word in bad_words],
        sequence_bias={(token_id,): value for token_id, value in bias.items()},
        suppress_tokens=suppressed,
        min_new_tokens=6,
        eos_token_id=list(eos),
    )
    assert_same_tokens(result.token_ids, theirs, logits)


def test_a_sampled_token_follows_from_transformers_processed_logits_and_the_seed(llm, oracle):
    asked = params(
        temperature=0.8, seed=21, repetition_penalty=1.3, min_p=0.05, top_k=100, top_p=0.95, logit_bias={9: 2}
    )
    (result,) = run(llm, [Ask(PROMPT, asked, sample_index=3)])
    (logits,) = oracle.logits([PROMPT], [Run(result.token_ids, torch.empty(0))])
    processed = []
    for position, row in enumerate(logits):
        ids = torch.tensor([PROMPT + result.token_ids[:position]])
        row = transformers.SequenceBiasLogitsProcessor({(9,): 2.0})(ids, row[None])
        processed.append(transformers.RepetitionPenaltyLogitsProcessor(1.3)(ids, row)[0])
    positions = torch.arange(NUM_TOKENS)
    uniform = REFERENCE.uniform(torch.full_like(positions, 21), torch.full_like(positions, 3), positions)
    columns = [torch.full((NUM_TOKENS,), value) for value in (0.8, 100, 0.95, 0.05)]
    expected = REFERENCE.sample(torch.stack(processed), *columns[:3], uniform, columns[3])
    assert result.token_ids == expected.tolist()


# ------------------------------------------------------------------------------------------------------ what they mean
def test_samples_of_a_seed_differ_and_repeat_alone_in_a_batch_and_after_preemption(checkpoint, llm):
    asks = [Ask(make_prompt(30), params(temperature=1.0, seed=4), sample_index=i) for i in range(8)]
    expected = [run(llm, [ask])[0].token_ids for ask in asks]
    assert len({tuple(ids) for ids in expected}) == 8
    assert len({ids[0] for ids in expected}) > 3, "they differ from their first token on"
    for name in ("together", "reversed", "chunks-of-7", "tiny-pool"):
        assert [result.token_ids for result in run_setting(checkpoint, name, asks)] == expected, name
    other_seed = [replace(ask, params=replace(ask.params, seed=5)) for ask in asks]
    assert [result.token_ids for result in run(llm, other_seed)] != expected


@pytest.mark.parametrize("min_tokens", [1, 3, 10, NUM_TOKENS])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_before_min_tokens_nothing_ends_a_request_and_no_stop_token_is_said(llm, temperature, min_tokens):
    """200 of 300 tokens are stops: without the mask the request ends at once."""
    stops = tuple(range(100, VOCAB_SIZE))
    asked = params(temperature=temperature, seed=1, min_tokens=min_tokens, stop_token_ids=stops[:100])
    (result,) = run(llm, [Ask(PROMPT, asked, eos=stops[100:])])
    said = result.token_ids[:min_tokens]
    assert len(said) == min_tokens and not set(said) & set(stops)
    if result.finish_reason is FinishReason.STOP:
        assert len(result.token_ids) > min_tokens and result.token_ids[-1] in stops
    else:
        assert len(result.token_ids) == NUM_TOKENS
    unlimited = replace(asked, min_tokens=0)
    (short,) = run(llm, [Ask(PROMPT, unlimited, eos=stops[100:])])
    assert len(short.token_ids) <= 8


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bad_words_never_appear_not_even_across_the_end_of_the_prompt(llm, temperature):
    """Every token may be followed by half of the others only; and some pairs forbid a third token."""
    rng = random.Random(8)
    pairs = {(a, b) for a in range(VOCAB_SIZE) for b in rng.sample(range(VOCAB_SIZE), 10)}
    free = params(temperature=temperature, seed=2, allowed_token_ids=range(2, 30))
    without = run(llm, [Ask(PROMPT, free)])[0].token_ids
    said = [PROMPT[-1], *without]
    words = tuple(pairs | set(itertools.pairwise(said)))
    (result,) = run(llm, [Ask(PROMPT, free, bad_words=words)])
    said = [PROMPT[-1], *result.token_ids]
    assert len(result.token_ids) == NUM_TOKENS
    assert not set(itertools.pairwise(said)) & set(words)
    assert result.token_ids[0] != without[0]


def test_a_bias_of_100_forces_and_of_minus_100_forbids(llm, greedy_tokens):
    (forced,) = run(llm, [Ask(PROMPT, params(temperature=1.0, seed=0, logit_bias={33: 100.0}))])
    assert forced.token_ids == [33] * NUM_TOKENS
    forbidden = set(greedy_tokens)
    (result,) = run(llm, [Ask(PROMPT, params(logit_bias=dict.fromkeys(forbidden, -100.0)))])
    assert not set(result.token_ids) & forbidden and len(result.token_ids) == NUM_TOKENS


def test_only_allowed_tokens_are_sampled_however_hot(llm):
    allowed = {3, 50, 299}
    (result,) = run(llm, [Ask(PROMPT, params(temperature=1e300, seed=0, allowed_token_ids=allowed))])
    assert set(result.token_ids) == allowed and len(result.token_ids) == NUM_TOKENS


def test_presence_of_2_and_of_minus_2(llm):
    """A model that would repeat itself doesn't, and one that is rewarded for it does."""
    base = {"temperature": 0.0, "allowed_token_ids": range(30, 60)}
    penalised, free, rewarded = (
        len(set(run(llm, [Ask(PROMPT, params(**base, frequency_penalty=f, presence_penalty=f))])[0].token_ids))
        for f in (2.0, 0.0, -2.0)
    )
    assert rewarded < free < penalised


def test_tiny_temperatures_are_greedy_whatever_else_is_asked(llm, greedy_tokens):
    asks = [Ask(PROMPT, params(temperature=t, top_k=3, top_p=0.1, min_p=0.5, seed=9)) for t in (0.0, 1e-6, 9e-6)]
    assert [result.token_ids for result in run(llm, asks)] == [greedy_tokens] * 3


# ------------------------------------------------------------------------------------------------------------- failures
def fail_at_third_token(output_ids: Any, logits: torch.Tensor) -> torch.Tensor:
    if len(output_ids) == 2:
        raise RuntimeError("a client's mistake")
    return logits


def nan_at_once(output_ids: Any, logits: torch.Tensor) -> torch.Tensor:
    return logits * float("nan")


def test_a_request_with_nothing_left_to_choose_ends_alone(llm, greedy_tokens, caplog):
    asks = [
        Ask(PROMPT, params(allowed_token_ids=[5]), bad_words=((5, 5),)),
        Ask(PROMPT, params()),
        Ask(PROMPT, params(temperature=1.0, seed=3, logits_processors=[fail_at_third_token], logprobs=1)),
        Ask(PROMPT, params(logits_processors=[nan_at_once], prompt_logprobs=0)),
        Ask(PROMPT, params(temperature=1.0, seed=3)),
    ]
    alone = run(llm, asks[-1:])[0].token_ids
    results = run(llm, asks)
    assert [len(result.token_ids) for result in results] == [1, NUM_TOKENS, 2, 0, NUM_TOKENS]
    assert [result.finish_reason for result in results] == [FinishReason.ERROR, "length", "error", "error", "length"]
    assert results[0].token_ids == [5]
    assert results[1].token_ids == greedy_tokens
    assert results[4].token_ids == alone and results[2].token_ids == alone[:2]
    assert (len(results[2].logprobs), len(results[3].prompt_logprobs)) == (2, len(PROMPT) - 1)
    assert "a client's mistake" in caplog.text


def test_rows_left_by_requests_of_every_kind_serve_plain_ones(checkpoint, kinds, greedy_tokens):
    llm = make_llm(checkpoint, max_num_seqs=3)
    run(llm, list(kinds.values()))
    results = run(llm, [Ask(PROMPT, params())] * 3)
    assert [result.token_ids for result in results] == [greedy_tokens] * 3
    core = llm.engine.core
    for index, ask in enumerate(kinds.values()):
        add(core, f"aborted-{index}", ask)
    for index in range(len(kinds)):
        if index % 3 == 0:
            core.step()
        core.abort(f"aborted-{index}")
    assert not core.has_unfinished_requests()
    results = run(llm, [Ask(PROMPT, params())] * 3)
    assert [result.token_ids for result in results] == [greedy_tokens] * 3
