import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from kernel_cases import NAN, random_tensor
from kernel_implementations import (
    IMPLEMENTATIONS,
    Implementation,
    each_implementation,
    each_implementation_and_dtype,
)
from pico_vllm.kernels import sampling
from pico_vllm.kernels.philox import uniform_cpu

LARGEST_UNIFORM = 1.0 - 2.0**-53
INF = float("inf")


def draw(
    impl: Implementation,
    logits: torch.Tensor,
    uniform: list[float] | torch.Tensor,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float | None = None,
) -> list[int]:
    """One token for each uniform number, all from one row of logits, [vocab_size]."""
    uniform = torch.as_tensor(uniform, dtype=torch.float64)
    n = len(uniform)
    ids = impl.op(
        logits.to(impl.device).expand(n, -1),
        torch.full((n,), temperature, device=impl.device),
        torch.full((n,), top_k, dtype=torch.int64, device=impl.device),
        torch.full((n,), top_p, device=impl.device),
        uniform.to(impl.device),
        *([] if min_p is None else [torch.full((n,), min_p, device=impl.device)]),
    )
    assert ids.dtype == torch.int64 and ids.shape == (n,)
    return ids.tolist()


def drawn_ids(impl: Implementation, logits: torch.Tensor, **params: float) -> set[int]:
    """All ids with a probability above 1/1000, or above 1/24 of a slow implementation."""
    n = 24 if impl.is_slow else 1000
    return set(draw(impl, logits, (torch.arange(n) + 0.5) / n, **params))


def fewer(impl: Implementation, numbers: torch.Tensor, limit: int = 24) -> torch.Tensor:
    """Of a slow implementation: some of the numbers, the first and the last among them."""
    if not impl.is_slow or len(numbers) <= limit:
        return numbers
    return numbers[torch.linspace(0, len(numbers) - 1, limit).round().long()]


def log_of(*probabilities: float) -> torch.Tensor:
    return torch.tensor(probabilities, dtype=torch.float64).log().float()


# ---------------------------------------------------------------------------------------------------------- greedy
@each_implementation_and_dtype("greedy")
def test_greedy_is_the_largest_logit_by_hand(impl, dtype):
    logits = torch.tensor([[0.0, 3.0, -1.0], [5.0, 4.0, 4.5], [-3.0, -2.0, -1.0]], dtype=dtype, device=impl.device)
    ids = impl.op(logits)
    assert ids.dtype == torch.int64
    assert ids.tolist() == [1, 0, 2]


@pytest.mark.parametrize("vocab_size", [1, 63, 100, 49152, 151936])
@each_implementation_and_dtype("greedy")
def test_greedy_takes_the_smallest_id_of_a_tie(impl, dtype, vocab_size):
    generator = torch.Generator().manual_seed(vocab_size)
    logits = random_tensor(8, vocab_size, dtype=dtype, device=impl.device)
    expected = []
    for row in range(8):
        tied = torch.randint(0, vocab_size, (1 + row,), generator=generator)
        logits[row, tied] = 5.0
        expected.append(int(tied.min()))
    assert impl.op(logits).tolist() == expected


@each_implementation("greedy")
def test_greedy_finds_ties_that_bf16_rounding_makes(impl):
    # In bf16 8.02 and 8.01 are both 8.0, and the smaller id wins although its logit was the smaller one in fp32.
    logits = torch.full((1, 151936), -1.0)
    logits[0, 70001], logits[0, 140002] = 8.01, 8.02
    assert impl.op(logits.to(impl.device)).tolist() == [140002]
    assert impl.op(logits.to(impl.device, torch.bfloat16)).tolist() == [70001]


@each_implementation("greedy")
def test_greedy_of_a_constant_row_is_id_0(impl):
    for value in (0.0, -7.0, -INF):
        assert impl.op(torch.full((2, 49152), value, dtype=torch.bfloat16, device=impl.device)).tolist() == [0, 0]


@each_implementation("greedy")
def test_greedy_of_no_rows_is_no_ids(impl):
    assert impl.op(torch.empty(0, 100, device=impl.device)).shape == (0,)


@each_implementation("greedy")
def test_greedy_keeps_the_ids_at_their_rows(impl):
    logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, 2.0, 1.0], [0.0, 0.0, 1.0]], device=impl.device)
    last_token_ids = torch.full((6,), -7, dtype=torch.int32, device=impl.device)
    rows = torch.tensor([4, 0, 2], dtype=torch.int32, device=impl.device)
    assert impl.op(logits, last_token_ids, rows).tolist() == [1, 0, 2]
    assert last_token_ids.tolist() == [0, -7, 2, -7, 1, -7]


@each_implementation("greedy")
def test_greedy_reads_strided_rows(impl):
    logits = torch.tensor([[0.0, 2.0, 1.0, 99.0], [3.0, 2.0, 1.0, 99.0]], device=impl.device)[:, :3]
    assert impl.op(logits).tolist() == [1, 0]


# ----------------------------------------------------------------------------------------------- inverse of the CDF
@each_implementation_and_dtype("sample")
def test_token_is_the_first_whose_cumulative_probability_exceeds_the_number(impl, dtype):
    # Four equal logits: the steps are at exactly 1/4, 1/2 and 3/4, and a step belongs to the next token.
    below = [x - 2.0**-53 for x in (0.25, 0.5, 0.75)]
    logits = torch.zeros(4, dtype=dtype)
    assert draw(impl, logits, [0.0, below[0], 0.25, below[1], 0.5, below[2], 0.75, LARGEST_UNIFORM]) == [
        0, 0, 1, 1, 2, 2, 3, 3,
    ]  # fmt: skip


@each_implementation("sample")
def test_order_is_that_of_ids_not_of_probabilities(impl):
    logits = log_of(0.1, 0.6, 0.1, 0.2)
    assert draw(impl, logits, [0.05, 0.15, 0.65, 0.75, 0.85, 0.95]) == [0, 1, 1, 2, 3, 3]


@pytest.mark.parametrize("vocab_size", [3, 1000])
@each_implementation("sample")
def test_impossible_tokens_are_never_drawn_even_at_the_ends(impl, vocab_size):
    logits = torch.full((vocab_size,), -INF)
    logits[1] = 0.5
    assert draw(impl, logits, [0.0, 0.5, LARGEST_UNIFORM]) == [1, 1, 1]
    assert draw(impl, logits, [0.0, 0.5, LARGEST_UNIFORM], top_k=2, top_p=0.5) == [1, 1, 1]


@each_implementation("sample")
def test_vocabulary_of_one_token(impl):
    assert draw(impl, torch.tensor([3.0]), [0.0, LARGEST_UNIFORM], top_k=1, top_p=0.1) == [0, 0]


@each_implementation_and_dtype("sample")
def test_large_logits_do_not_overflow(impl, dtype):
    logits = torch.tensor([3e4, 0.0, 3e4, -3e4], dtype=dtype)
    assert draw(impl, logits, [0.0, 0.4, 0.6, LARGEST_UNIFORM], temperature=0.01) == [0, 0, 2, 2]


# --------------------------------------------------------------------------------------------------- filters by hand
@each_implementation("sample")
def test_temperature_divides_the_logits_by_hand(impl):
    # At temperature 1/2 the probabilities 1/4 and 3/4 become 1/10 and 9/10; at 2 they become 0.366 and 0.634.
    logits = log_of(0.25, 0.75)
    assert draw(impl, logits, [0.24, 0.26]) == [0, 1]
    assert draw(impl, logits, [0.09, 0.11], temperature=0.5) == [0, 1]
    assert draw(impl, logits, [0.365, 0.367], temperature=2.0) == [0, 1]


@each_implementation("sample")
def test_top_k_keeps_the_k_largest_and_renormalises_by_hand(impl):
    logits = log_of(0.1, 0.5, 0.3, 0.1)
    assert drawn_ids(impl, logits, top_k=1) == {1}
    assert drawn_ids(impl, logits, top_k=2) == {1, 2}
    assert draw(impl, logits, [0.0, 0.624, 0.626], top_k=2) == [1, 1, 2]  # 5/8 and 3/8


@each_implementation("sample")
def test_top_k_keeps_all_that_tie_with_the_kth(impl):
    logits = torch.tensor([1.0, 2.0, 3.0, 2.0, 2.0, 0.0])
    assert drawn_ids(impl, logits, top_k=1) == {2}
    for k in (2, 3, 4):
        assert drawn_ids(impl, logits, top_k=k) == {1, 2, 3, 4}
    assert drawn_ids(impl, logits, top_k=5) == {0, 1, 2, 3, 4}


@pytest.mark.parametrize("top_k", [0, -1, 4, 5, 2**31])
@each_implementation("sample")
def test_top_k_of_none_or_of_the_whole_vocabulary_keeps_all(impl, top_k):
    logits = log_of(0.1, 0.5, 0.3, 0.1)
    assert draw(impl, logits, [0.05, 0.15, 0.65, 0.95], top_k=top_k) == [0, 1, 2, 3]
    assert drawn_ids(impl, logits, top_k=top_k) == {0, 1, 2, 3}


@each_implementation("sample")
def test_top_p_keeps_the_smallest_set_that_reaches_p_by_hand(impl):
    logits = log_of(0.05, 0.5, 0.15, 0.3)
    assert drawn_ids(impl, logits, top_p=0.4) == {1}
    assert drawn_ids(impl, logits, top_p=0.6) == {1, 3}
    assert drawn_ids(impl, logits, top_p=0.79) == {1, 3}
    assert drawn_ids(impl, logits, top_p=0.81) == {1, 2, 3}
    assert drawn_ids(impl, logits, top_p=0.96) == {0, 1, 2, 3}
    assert draw(impl, logits, [0.0, 0.624, 0.626], top_p=0.6) == [1, 1, 3]  # 5/8 and 3/8


@each_implementation("sample")
def test_top_p_keeps_all_that_tie_with_the_last(impl):
    logits = log_of(0.125, 0.5, 0.125, 0.25)
    assert drawn_ids(impl, logits, top_p=0.8) == {0, 1, 2, 3}
    equal = torch.zeros(5)
    assert drawn_ids(impl, equal, top_p=0.01) == {0, 1, 2, 3, 4}


@each_implementation("sample")
def test_top_p_counts_the_probability_that_top_k_has_left(impl):
    # Of 0.4, 0.3, 0.2, 0.1 two are left: 4/7 = 0.571 and 3/7. Without top-k 0.5 needs both.
    logits = log_of(0.4, 0.3, 0.2, 0.1)
    assert drawn_ids(impl, logits, top_p=0.5) == {0, 1}
    assert drawn_ids(impl, logits, top_k=2, top_p=0.5) == {0}
    assert drawn_ids(impl, logits, top_k=2, top_p=0.6) == {0, 1}


@each_implementation("sample")
def test_temperature_comes_before_top_p(impl):
    # At temperature 1/2: 0.533, 0.3, 0.133, 0.033.
    logits = log_of(0.4, 0.3, 0.2, 0.1)
    assert drawn_ids(impl, logits, temperature=0.5, top_p=0.5) == {0}
    assert drawn_ids(impl, logits, temperature=0.5, top_p=0.8) == {0, 1}
    assert drawn_ids(impl, logits, temperature=1.0, top_p=0.8) == {0, 1, 2}


@each_implementation("sample")
def test_min_p_keeps_what_is_so_likely_relative_to_the_best_by_hand(impl):
    logits = log_of(0.1, 0.4, 0.2, 0.3)
    assert drawn_ids(impl, logits, min_p=0.2) == {0, 1, 2, 3}
    assert drawn_ids(impl, logits, min_p=0.3) == {1, 2, 3}
    assert drawn_ids(impl, logits, min_p=0.6) == {1, 3}
    assert drawn_ids(impl, logits, min_p=0.8) == {1}
    assert draw(impl, logits, [0.0, 0.571, 0.572], min_p=0.6) == [1, 1, 3]  # 4/7 and 3/7


@each_implementation("sample")
def test_min_p_of_0_keeps_all_and_of_1_the_best_and_its_ties(impl):
    logits = torch.tensor([-1.0, 2.0, -20.0, 2.0, 2.0 - 1e-6])
    numbers = fewer(impl, torch.linspace(0, LARGEST_UNIFORM, 500, dtype=torch.float64))
    assert draw(impl, logits, numbers, min_p=0.0) == draw(impl, logits, numbers)
    assert draw(impl, logits, [0.99999999999], min_p=0.0) == [4]
    assert drawn_ids(impl, logits, min_p=1.0) == {1, 3}
    impossible = torch.tensor([-INF, 0.0, -INF])
    assert draw(impl, impossible, [0.0, LARGEST_UNIFORM], min_p=0.0) == [1, 1]
    assert draw(impl, impossible, [0.0, LARGEST_UNIFORM], min_p=1.0) == [1, 1]


@each_implementation("sample")
def test_temperature_comes_before_min_p(impl):
    # Relative to the best: 1, 1/2, 1/4; at temperature 1/2 they are 1, 1/4, 1/16, at 2 they are 1, 0.707, 0.5.
    logits = log_of(4 / 7, 2 / 7, 1 / 7)
    assert drawn_ids(impl, logits, min_p=0.3) == {0, 1}
    assert drawn_ids(impl, logits, temperature=0.5, min_p=0.3) == {0}
    assert drawn_ids(impl, logits, temperature=2.0, min_p=0.3) == {0, 1, 2}


@each_implementation("sample")
def test_min_p_comes_after_top_p(impl):
    # Top-p 0.8 needs 0.4, 0.3 and 0.2. Had min_p left 0.4 and 0.3 of 0.7 first, 0.55 would be reached by the first.
    logits = log_of(0.4, 0.3, 0.2, 0.1)
    assert drawn_ids(impl, logits, top_p=0.8, min_p=0.6) == {0, 1}
    assert drawn_ids(impl, logits, top_p=0.55, min_p=0.6) == {0, 1}
    assert drawn_ids(impl, logits, top_p=0.3, min_p=0.6) == {0}
    assert drawn_ids(impl, logits, top_p=0.8, min_p=0.4) == {0, 1, 2}


@each_implementation("sample")
def test_each_row_has_its_own_min_p(impl):
    logits = log_of(0.1, 0.4, 0.2, 0.3).expand(4, -1)
    ones, number = torch.ones(4), torch.full((4,), LARGEST_UNIFORM, dtype=torch.float64)
    last_kept = impl.op(
        *(tensor.to(impl.device) for tensor in (logits[:, [1, 3, 2, 0]], ones, torch.zeros(4).long(), ones, number)),
        torch.tensor([0.0, 0.3, 0.6, 1.0], device=impl.device),
    )
    assert last_kept.tolist() == [3, 2, 1, 0]


@pytest.mark.parametrize("vocab_size", [40, 1500])
@each_implementation("sample")
def test_masked_tokens_at_both_ends_and_between_are_never_drawn(impl, vocab_size):
    """However close to 0 and to 1 the number is, and whatever the sum of many small weights is rounded to."""
    logits = random_tensor(vocab_size, dtype=torch.float32, seed=5)
    allowed = torch.arange(7, vocab_size - 9, 3)
    masked = torch.full_like(logits, -INF)
    masked[allowed] = logits[allowed]
    numbers = torch.cat(
        (torch.linspace(0, LARGEST_UNIFORM, 200, dtype=torch.float64), 2.0 ** -torch.arange(40.0).double())
    )
    numbers = torch.cat((numbers.clamp(max=LARGEST_UNIFORM), 1 - 2.0 ** -torch.arange(1.0, 54.0).double()))
    numbers = fewer(impl, numbers.sort().values)
    for params in ({}, {"temperature": 0.05}, {"top_p": 0.9999}, {"top_k": vocab_size - 1}, {"min_p": 0.01}):
        drawn = draw(impl, masked, numbers, **params)
        assert set(drawn) <= set(allowed.tolist()), params
    assert draw(impl, masked, [0.0, LARGEST_UNIFORM]) == [int(allowed[0]), int(allowed[-1])]


@pytest.mark.parametrize("num_masked", [0, 1, 5])
def test_pick_never_returns_a_token_without_weight(num_masked):
    """u * total rounds up to total for some u below 1; the last tokens have no weight."""
    generator = torch.Generator().manual_seed(1)
    weights = torch.rand(3000, 8, dtype=torch.float64, generator=generator) * 10.0 ** torch.randint(
        -17, 1, (3000, 8), generator=generator
    )
    weights[:, 8 - num_masked :] = 0.0
    weights[:, 0] = 0.0
    for number in (
        LARGEST_UNIFORM,
        torch.nextafter(torch.tensor(1.0).double(), torch.tensor(2.0).double()).item(),
        0.0,
    ):
        picked = sampling._pick(weights, torch.full((3000,), number, dtype=torch.float64))
        assert (weights.gather(1, picked[:, None]) > 0).all()


# ------------------------------------------------------------------------------------------------------- properties
@pytest.mark.parametrize("params", [{"top_k": 1}, {"top_p": 1e-6}], ids=["top_k_1", "tiny_top_p"])
@pytest.mark.parametrize("vocab_size", [63, 49152])
@each_implementation("sample")
def test_keeping_one_token_is_greedy_for_every_number(impl, vocab_size, params):
    for seed in range(3):
        logits = random_tensor(vocab_size, dtype=torch.float64, seed=seed)
        logits = torch.argsort(torch.argsort(logits)).float() * 1e-3  # no ties
        best = int(logits.argmax())
        assert draw(impl, logits, [0.0, 0.3, 0.999, LARGEST_UNIFORM], **params) == [best] * 4


@each_implementation("sample")
def test_each_id_is_drawn_in_proportion_to_its_probability(impl):
    # Evenly spaced numbers hit each interval of the CDF as often as its length says, to within one hit at each end.
    logits, n = random_tensor(37, dtype=torch.float32), 200 if impl.is_slow else 5000
    ids = draw(impl, logits, (torch.arange(n) + 0.5) / n, temperature=0.7)
    counts = torch.tensor(ids).bincount(minlength=37)
    expected = n * (logits.double() / 0.7).softmax(dim=0)
    assert (counts - expected).abs().max() <= 1.0


@each_implementation("sample")
def test_frequencies_of_philox_numbers_match_the_softmax(impl):
    logits, n = random_tensor(8, dtype=torch.float32, seed=3), 200 if impl.is_slow else 5000
    uniform = uniform_cpu(torch.full((n,), 11), torch.zeros(n, dtype=torch.int64), torch.arange(n))
    counts = torch.tensor(draw(impl, logits, uniform)).bincount(minlength=8)
    expected = n * logits.double().softmax(dim=0)
    chi_square = ((counts - expected) ** 2 / expected).sum().item()
    assert chi_square < 24.3  # 7 degrees of freedom: more in 1 of 1000 samples


def mixed_rows(num_rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """temperature, top_k, top_p and uniform number of each row."""
    generator = torch.Generator().manual_seed(seed)

    def choose(values: list[float]) -> torch.Tensor:
        return torch.tensor(values)[torch.randint(0, len(values), (num_rows,), generator=generator)]

    return (
        choose([0.2, 0.7, 1.0, 1.5, 3.0]),
        choose([0, -1, 1, 2, 5, 50, 600, 5000]).long(),
        choose([1e-4, 0.3, 0.8, 0.95, 0.999, 1.0]),
        torch.rand(num_rows, dtype=torch.float64, generator=generator),
    )


@pytest.mark.parametrize("scale", [0.05, 1.0, 3.0], ids=["flat", "medium", "peaked"])
@pytest.mark.parametrize("vocab_size", [1, 63, 100, 2000])
@each_implementation_and_dtype("sample")
def test_rows_of_different_parameters_in_one_batch_give_the_reference_tokens(impl, dtype, vocab_size, scale):
    # Low dtypes make many ties at the thresholds. Flat rows need more than 512 candidates for top-p.
    num_rows = 12 if impl.is_slow else 48
    logits = random_tensor(num_rows, vocab_size, dtype=torch.float32, seed=vocab_size).mul_(scale).to(dtype)
    params = mixed_rows(num_rows, seed=vocab_size)
    min_p = torch.tensor([0.0, 0.01, 0.2, 0.9, 1.0, 0.0]).repeat(num_rows // 6)
    for arguments in (params, (*params, min_p)):
        expected = sampling.sample_reference(logits, *arguments)
        got = impl.op(logits.to(impl.device), *(argument.to(impl.device) for argument in arguments))
        assert got.tolist() == expected.tolist()


@each_implementation("sample")
@given(
    rows=st.lists(
        st.tuples(
            st.lists(st.integers(-3, 3), min_size=7, max_size=7),
            st.sampled_from([0.5, 1.0, 2.0]),
            st.integers(-1, 9),
            st.sampled_from([1e-3, 0.25, 0.5, 0.75, 0.9, 1.0]),
            st.floats(0.0, LARGEST_UNIFORM),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_rows_full_of_ties_give_the_tokens_of_the_definition(impl, rows):
    columns = [torch.tensor(column) for column in zip(*rows, strict=True)]
    logits, temperature, top_k, top_p = columns[0].float(), columns[1].float(), columns[2], columns[3].float()
    uniform = torch.tensor([row[4] for row in rows], dtype=torch.float64)
    arguments = (logits, temperature, top_k, top_p, uniform)
    got = impl.op(*(argument.to(impl.device) for argument in arguments)).tolist()
    for token, (row, t, k, _, u), p in zip(got, rows, top_p.tolist(), strict=True):
        intervals = kept_intervals(row, t, k, p)
        assert token in intervals
        low, high = intervals[token]
        assert low - 1e-12 <= u < high + 1e-12


def kept_intervals(logits: list[int], temperature: float, k: int, p: float) -> dict[int, tuple[float, float]]:
    """The module's definition in plain Python: kept id → its part of [0, 1)."""
    scores = {i: logit / temperature for i, logit in enumerate(logits)}
    if 0 < k < len(scores):
        kth = sorted(scores.values(), reverse=True)[k - 1]
        scores = {i: score for i, score in scores.items() if score >= kth}
    total, reached = math.fsum(map(math.exp, scores.values())), 0.0
    for threshold in sorted(scores.values(), reverse=True):
        reached += math.exp(threshold) / total
        if reached >= p - 1e-12 and p < 1.0:
            scores = {i: score for i, score in scores.items() if score >= threshold}
            break
    total, low, intervals = math.fsum(map(math.exp, scores.values())), 0.0, {}
    for i, score in scores.items():
        intervals[i] = (low, low + math.exp(score) / total)
        low = intervals[i][1]
    return intervals


@each_implementation("sample")
@pytest.mark.parametrize("num_ties", [0, 20, 33, 400])
def test_small_top_k_in_every_row_gives_the_reference_tokens(impl, num_ties):
    """Few candidates are then looked at; ties at the k-th may be more than those."""
    n = 12 if impl.is_slow else 60
    logits = random_tensor(n, 3000, dtype=torch.float32, seed=5) * 3
    top_k = torch.arange(n) % 50 + 1
    for row in range(n):  # the k-th largest, many times
        logits[row, torch.randperm(3000, generator=torch.Generator().manual_seed(row))[:num_ties]] = (
            logits[row].sort(descending=True).values[top_k[row] - 1]
        )
    top_p = torch.tensor([1.0, 0.9, 0.3])[torch.arange(n) % 3]
    min_p = torch.tensor([0.0, 0.05])[torch.arange(n) % 2]
    uniform = (torch.arange(n, dtype=torch.float64) * 0.618).frac()
    arguments = (logits, torch.full((n,), 0.8), top_k, top_p, uniform, min_p)
    expected = sampling.sample_reference(*arguments)
    assert impl.op(*(argument.to(impl.device) for argument in arguments)).tolist() == expected.tolist()


@each_implementation("sample")
def test_row_without_top_p_keeps_all_beside_a_row_with_a_narrow_one(impl):
    # Row 0 has 2000 nearly equal tokens, more than are looked at first; row 1 needs one. 0.9003 is id 1800, and id 7.
    logits = torch.stack((torch.arange(2000).flip(0) * 1e-6, torch.zeros(2000)))
    logits[1, 7] = 20.0
    params = (torch.ones(2), torch.zeros(2, dtype=torch.int64), torch.tensor([1.0, 0.5]))
    uniform = torch.tensor([0.9003, 0.9003], dtype=torch.float64)
    assert impl.op(*(tensor.to(impl.device) for tensor in (logits, *params, uniform))).tolist() == [1800, 7]


@each_implementation("sample")
def test_arguments_are_left_alone(impl):
    logits = random_tensor(9, 100, dtype=torch.float32, device=impl.device)
    arguments = (logits, *(param.to(impl.device) for param in mixed_rows(9, seed=1)))
    before = [argument.clone() for argument in arguments]
    impl.op(*arguments)
    assert all(torch.equal(argument, copy) for argument, copy in zip(arguments, before, strict=True))


@each_implementation("sample")
def test_no_rows_give_no_tokens(impl):
    empty = torch.empty(0, device=impl.device)
    assert impl.op(torch.empty(0, 100, device=impl.device), empty, empty.long(), empty, empty.double()).shape == (0,)


def test_top_p_set_larger_than_the_first_look_is_found_by_a_full_sort():
    # 2000 nearly equal tokens, each a little less likely than the one before: 0.9 needs the first 1800.
    assert sampling._TOP_P_CANDIDATES < 1800
    n = 4000
    logits = torch.arange(2000).flip(0).float() * 1e-6
    grid = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    params = (torch.ones(n), torch.zeros(n, dtype=torch.int64), torch.full((n,), 0.9), grid)
    assert set(sampling.sample_cpu(logits.expand(n, -1), *params).tolist()) == set(range(1800))


# ------------------------------------------------------------------------------------------------- large vocabularies
def hard_rows() -> dict[str, tuple[torch.Tensor, dict[str, float]]]:
    """Where a fast way through a vocabulary of 49,152 can fail: (logits of one row, parameters)."""
    normal = random_tensor(49152, dtype=torch.float32, seed=7)
    few_allowed = torch.full((49152,), -INF)
    few_allowed[[3, 4, 9000, 49151]] = torch.tensor([1.0, 0.5, 2.0, 1.5])
    ties = (3 * normal).round()  # thousands of equal scores at every threshold
    return {
        "no_filter": (normal, {}),
        "flat_top_p": (0.01 * normal, {"top_p": 0.9}),
        "flat_top_p_of_top_k": (0.01 * normal, {"top_p": 0.5, "top_k": 30000}),
        "top_k_beyond_the_tiles": (normal, {"top_k": 6000}),
        "top_k_among_ties": (ties, {"top_k": 5000}),
        "top_p_among_ties": (ties, {"top_p": 0.6, "temperature": 2.0}),
        "all_equal": (torch.zeros(49152), {"top_k": 10, "top_p": 0.3}),
        "tiny_min_p": (normal, {"min_p": 1e-3}),
        "min_p_and_top_p": (2 * normal, {"min_p": 0.05, "top_p": 0.95}),
        "few_allowed": (few_allowed, {"top_k": 50, "top_p": 0.99}),
        "few_allowed_no_filter": (few_allowed, {}),
        "two_peaks_at_the_ends": (
            torch.cat((torch.ones(1), torch.full((49150,), -30.0), torch.ones(1))),
            {"top_p": 0.9},
        ),
        "negative": (normal - 1000.0, {"top_k": 40, "top_p": 0.9, "temperature": 0.7}),
        "sharp": (20 * normal, {"top_k": 20, "top_p": 0.8, "temperature": 0.7}),
    }


@pytest.mark.parametrize("case", hard_rows())
@each_implementation_and_dtype("sample")
def test_large_vocabularies_give_the_reference_tokens(impl, dtype, case):
    logits, params = hard_rows()[case]
    logits = logits.to(dtype)
    numbers = torch.tensor([0.0, 0.31, LARGEST_UNIFORM], dtype=torch.float64)
    reference = Implementation("reference", sampling.sample_reference)
    assert draw(impl, logits, numbers, **params) == draw(reference, logits, numbers, **params)


@pytest.mark.parametrize(
    "params", [{}, {"top_k": 50, "top_p": 0.9}, {"top_p": 0.9}, {"min_p": 0.01}], ids=lambda p: "-".join(p) or "none"
)
@each_implementation("sample")
def test_a_token_of_the_largest_vocabulary_holds_the_number_to_within_a_millionth(impl, params):
    """A token may be a neighbour of the reference's where fp64 sums in another order move a border of the CDF."""
    logits = random_tensor(151936, dtype=torch.bfloat16, seed=3).mul_(3)
    numbers = torch.rand(4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    temperature = torch.tensor(0.8)
    scores = (logits.float() / temperature).double()
    ordered = scores.sort(descending=True).values
    if "top_k" in params:
        ordered = ordered[ordered >= ordered[int(params["top_k"]) - 1]]
    if "top_p" in params:
        needed = int((ordered.softmax(0).cumsum(0) < torch.tensor(params["top_p"]).item()).sum())
        ordered = ordered[ordered >= ordered[needed]]
    weights = torch.where(scores >= ordered[-1], (scores - ordered[0]).exp(), 0.0)
    weights = torch.where(weights >= torch.tensor(params.get("min_p", 0.0)).double(), weights, 0.0)
    high = weights.cumsum(0) / weights.sum()
    for number, token in zip(numbers.tolist(), draw(impl, logits, numbers, temperature=0.8, **params), strict=True):
        assert weights[token] > 0
        assert high[token] - weights[token] / weights.sum() - 1e-6 <= number <= high[token] + 1e-6


@each_implementation("sample")
def test_a_row_gives_the_same_token_in_every_batch(impl):
    logits = random_tensor(9, 5000, dtype=torch.bfloat16).mul_(2)
    arguments = (logits, *mixed_rows(9, seed=5))
    together = impl.op(*(argument.to(impl.device) for argument in arguments)).tolist()
    alone = [impl.op(*(argument[i : i + 1].to(impl.device) for argument in arguments)).item() for i in range(9)]
    assert alone == together


@each_implementation("sample")
def test_strided_rows_are_read_where_they_are(impl):
    logits = random_tensor(5, 300, dtype=torch.float32, device=impl.device)
    params = [param.to(impl.device) for param in mixed_rows(5, seed=6)]
    assert impl.op(logits[:, 20:270], *params).tolist() == impl.op(logits[:, 20:270].clone(), *params).tolist()


@pytest.mark.parametrize("op", ["greedy", "sample"])
@pytest.mark.parametrize("value", [NAN, -INF, INF])
def test_rows_that_no_sampler_should_see_give_an_id_of_the_vocabulary(op, value):
    """The engine masks such rows; a kernel must not read or write outside of its memory whatever it gets."""
    for impl in IMPLEMENTATIONS[op]:
        if impl.name == "triton":
            logits = random_tensor(4, 300, dtype=torch.float32, device=impl.device)
            logits[0], logits[1, 7], logits[2, 1:] = value, value, value
            numbers = torch.full((4,), 0.7, dtype=torch.float64, device=impl.device)
            ones = torch.ones(4, device=impl.device)
            for k, p in ((0, 0.9), (0, 1.0), (5, 0.9), (5, 1.0)):
                params = () if op == "greedy" else (ones, k * ones.long(), p * ones, numbers)
                ids = impl.op(logits, *params)
                assert ((ids >= 0) & (ids < 300)).all()


# ----------------------------------------------------------------------------------------------------- transformers
@pytest.mark.parametrize("min_p", [None, 0.02, 0.3])
@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.99, 1.0])
@pytest.mark.parametrize("top_k", [1, 5, 40, 200, 1000])
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
@each_implementation("sample")
def test_kept_tokens_and_their_probabilities_are_those_of_transformers_warpers(impl, temperature, top_k, top_p, min_p):
    logits = random_tensor(200, dtype=torch.float32, seed=top_k)
    assert len(set(logits.tolist())) == 200  # tie-free
    scores = TemperatureLogitsWarper(temperature)(None, logits[None])
    scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1.0:
        mass = scores[0].double().softmax(dim=0).sort(descending=True).values.cumsum(dim=0)
        assert (mass - top_p).abs().min() > 1e-6  # no token is in or out by a rounding in fp32
        scores = TopPLogitsWarper(top_p)(None, scores)
    if min_p is not None:
        relative = (scores[0].double() - scores.double().max()).exp()
        assert (relative - min_p).abs().min() > 1e-6
        scores = MinPLogitsWarper(min_p)(None, scores)
    probabilities = scores[0].double().softmax(dim=0)
    (kept,) = probabilities.nonzero(as_tuple=True)
    high = probabilities.cumsum(dim=0)[kept]
    low = high - probabilities[kept]
    # Just inside both ends of a token's interval and in its middle: an id more or less would shift the ends.
    numbers = torch.cat((low + 1e-11, (low + high) / 2, high - 1e-11))
    expected = fewer(impl, kept.repeat(3), 5)
    got = draw(impl, logits, fewer(impl, numbers, 5), temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    assert got == expected.tolist()
