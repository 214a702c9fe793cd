import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor

from kernel_cases import ODD_SIZES, in_wider_rows, random_tensor
from kernel_implementations import assert_bitwise, each_implementation, each_implementation_and_dtype
from pico_vllm.kernels import logits_processing

INF = float("inf")


# -------------------------------------------------------------------------------------------------------- penalties
def penalise(impl, logits, in_prompt, counts, repetition=1.0, presence=0.0, frequency=0.0):
    """A new tensor; scalars are those of every row."""
    rows = logits.shape[0]
    columns = [torch.as_tensor(x, dtype=torch.float32).expand(rows).clone() for x in (repetition, presence, frequency)]
    logits = logits.to(impl.device, copy=True)
    assert impl.op(logits, *(tensor.to(impl.device) for tensor in (in_prompt, counts, *columns))) is None
    return logits.cpu()


def history(num_rows, vocab_size, seed=0):
    """in_prompt and output_counts in which every combination of the two occurs."""
    generator = torch.Generator().manual_seed(seed)
    in_prompt = torch.rand(num_rows, vocab_size, generator=generator) < 0.4
    counts = torch.randint(-2, 5, (num_rows, vocab_size), generator=generator).clamp(min=0)
    return in_prompt, counts.int()


@each_implementation("apply_penalties")
def test_penalties_by_hand(impl):
    # Token:                       neither  prompt  output  both  negative  zero
    logits = torch.tensor([[8.0, 8.0, 8.0, 8.0, -8.0, 0.0]])
    in_prompt = torch.tensor([[False, True, False, True, True, True]])
    counts = torch.tensor([[0, 0, 1, 3, 2, 1]], dtype=torch.int32)
    assert penalise(impl, logits, in_prompt, counts, repetition=2.0).tolist() == [[8.0, 4.0, 4.0, 4.0, -16.0, 0.0]]
    assert penalise(impl, logits, in_prompt, counts, presence=0.5).tolist() == [[8.0, 8.0, 7.5, 7.5, -8.5, -0.5]]
    assert penalise(impl, logits, in_prompt, counts, frequency=0.5).tolist() == [[8.0, 8.0, 7.5, 6.5, -9.0, -0.5]]
    # All three: the repetition penalty first.
    assert penalise(impl, logits, in_prompt, counts, 2.0, 1.0, 0.25).tolist() == [[8.0, 4.0, 2.75, 2.25, -17.5, -1.25]]
    # Rewards: below 1, below 0.
    assert penalise(impl, logits, in_prompt, counts, 0.5, -1.0, -0.25).tolist() == [
        [8.0, 16.0, 17.25, 17.75, -2.5, 1.25]
    ]


@each_implementation("apply_penalties")
def test_each_row_has_its_own_penalties_and_those_of_1_0_0_change_no_bit(impl):
    logits = random_tensor(4, 100, dtype=torch.float32)
    in_prompt, counts = history(4, 100)
    repetition, presence, frequency = [1.0, 1.3, 1.0, 0.7], [0.0, 0.0, 1.5, -2.0], [0.0, 0.6, 0.0, 2.0]
    got = penalise(impl, logits, in_prompt, counts, repetition, presence, frequency)
    assert_bitwise(got[0], logits[0])
    for row in range(1, 4):
        one = slice(row, row + 1)
        values = (repetition[row], presence[row], frequency[row])
        assert_bitwise(got[one], penalise(impl, logits[one], in_prompt[one], counts[one], *values))
        assert not torch.equal(got[one], logits[one])


@each_implementation("apply_penalties")
def test_masked_logits_stay_masked_under_every_penalty(impl):
    logits = torch.full((3, 63), -INF)
    logits[:, 5] = 1.0
    in_prompt, counts = history(3, 63)
    for values in ((0.001, -2.0, -2.0), (1000.0, 2.0, 2.0), (1.0, -2.0, 0.0)):
        got = penalise(impl, logits, in_prompt, counts, *values)
        assert (got == -INF).sum(dim=1).tolist() == [62] * 3
        assert got[:, 5].isfinite().all()


@pytest.mark.parametrize("vocab_size", ODD_SIZES)
@each_implementation("apply_penalties")
def test_penalties_equal_the_reference(impl, vocab_size):
    logits = random_tensor(5, vocab_size, dtype=torch.float32, seed=vocab_size)
    arguments = (
        *history(5, vocab_size),
        torch.linspace(0.5, 2.0, 5),
        torch.linspace(-2, 2, 5),
        torch.linspace(2, -2, 5),
    )
    expected = logits.clone()
    logits_processing.apply_penalties_reference(expected, *arguments)
    got = penalise(impl, logits, *arguments)
    # The largest number on the way is 8 + 2 * 4 + 2; one rounding there at most, for a fused multiply and subtract.
    torch.testing.assert_close(got, expected, rtol=0, atol=18 * 2.0**-23)


@pytest.mark.parametrize("penalty", [0.001, 0.5, 1.0, 1.1, 1.7, 1000.0])
@each_implementation("apply_penalties", equal_to_hf=True)
def test_repetition_penalty_is_bitwise_that_of_transformers(impl, penalty):
    logits = random_tensor(1, 151, dtype=torch.float32)
    logits[0, :3] = torch.tensor([0.0, -0.0, -INF])
    prompt, output = [0, 1, 2, 3, 50, 50, 150], [4, 50, 4, 90]
    in_prompt, counts = torch.zeros(1, 151, dtype=torch.bool), torch.zeros(1, 151, dtype=torch.int32)
    in_prompt[0, prompt] = True
    for token in output:
        counts[0, token] += 1
    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([prompt + output]), logits)
    assert_bitwise(penalise(impl, logits, in_prompt, counts, repetition=penalty), expected)


# ---------------------------------------------------------------------------------------------------------- bitmask
def mask(impl, logits, words):
    logits = logits.to(impl.device, copy=True)
    bitmask = torch.tensor(words, dtype=torch.int64).to(torch.int32)  # 2**31 and above as the int32 of the same bits
    assert impl.op(logits, bitmask.to(impl.device)) is None
    return logits.cpu()


def kept(masked):
    return [row.isfinite().nonzero().flatten().tolist() for row in masked]


@each_implementation("apply_bitmask")
def test_bit_t_modulo_32_of_word_t_div_32_allows_token_t(impl):
    words = [[1, 0, 0], [1 << 31, 0, 0], [0, 1, 0], [0, 0, 1 << 31], [0b1010, 0b11, 1 << 4], [0, 0, 0]]
    masked = mask(impl, torch.arange(96.0).expand(6, -1), words)
    assert kept(masked) == [[0], [31], [32], [95], [1, 3, 32, 33, 68], []]
    for row, ids in enumerate(kept(masked)):
        assert masked[row, ids].tolist() == ids, "what is allowed keeps its logit"
    assert (masked[5] == -INF).all()


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 63, 64, 65, 100])
@each_implementation("apply_bitmask")
def test_bits_beyond_the_vocabulary_mean_nothing(impl, vocab_size):
    num_words = -(-vocab_size // 32)
    logits = random_tensor(2, vocab_size, dtype=torch.float32)
    masked = mask(impl, logits, [[0xFFFFFFFF] * num_words, [0] * num_words])
    assert_bitwise(masked[0], logits[0])
    assert kept(masked)[1] == []
    last = [0] * num_words
    last[-1] = 1 << (vocab_size - 1) % 32
    assert kept(mask(impl, logits[:1], [last])) == [[vocab_size - 1]]


@each_implementation("apply_bitmask")
def test_what_was_masked_stays_masked(impl):
    assert kept(mask(impl, torch.tensor([[-INF, 1.0, -INF, 2.0]]), [[0b0011]])) == [[1]]


@each_implementation("apply_bitmask")
@given(rows=st.lists(st.sets(st.integers(0, 69)), min_size=1, max_size=5))
def test_a_packed_set_of_tokens_is_the_set_that_is_kept(impl, rows):
    words = [[sum(1 << t % 32 for t in tokens if t // 32 == w) for w in range(3)] for tokens in rows]
    assert kept(mask(impl, torch.zeros(len(rows), 70), words)) == [sorted(tokens) for tokens in rows]


@each_implementation("apply_bitmask")
def test_no_rows_are_masked_without_a_word(impl):
    logits = torch.empty(0, 40, device=impl.device)
    impl.op(logits, torch.empty(0, 2, dtype=torch.int32, device=impl.device))
    assert logits.shape == (0, 40)


# --------------------------------------------------------------------------------------------------------- logprobs
def logprobs_of(impl, logits, token_ids, num_best):
    ids = torch.tensor(token_ids, dtype=torch.int64, device=impl.device)
    chosen, rank, best_ids, best = impl.op(logits.to(impl.device), ids, num_best)
    assert (chosen.dtype, rank.dtype, best_ids.dtype, best.dtype) == (
        torch.float32, torch.int64, torch.int64, torch.float32,
    )  # fmt: skip
    assert best_ids.shape == best.shape == (logits.shape[0], min(num_best, logits.shape[1]))
    return chosen.cpu(), rank.tolist(), best_ids.tolist(), best.cpu()


@each_implementation("logprobs")
def test_logprobs_by_hand(impl):
    logits = torch.tensor([[0.5, 0.125, 0.25, 0.125], [0.125, 0.125, 0.25, 0.5]]).log() + 7
    chosen, rank, best_ids, best = logprobs_of(impl, logits, [2, 0], 2)
    assert chosen.exp().tolist() == pytest.approx([0.25, 0.125], rel=1e-6)
    assert rank == [2, 3]
    assert best_ids == [[0, 2], [3, 2]]
    assert best.exp().flatten().tolist() == pytest.approx([0.5, 0.25] * 2, rel=1e-6)


@pytest.mark.parametrize("scale", [1.0, 30.0])
@pytest.mark.parametrize("vocab_size", [*ODD_SIZES, 49152])
@each_implementation_and_dtype("logprobs")
def test_logprobs_are_log_softmax_in_fp64(impl, dtype, vocab_size, scale):
    logits = (random_tensor(6, vocab_size, dtype=torch.float32, seed=vocab_size) * scale).to(dtype)
    token_ids = [0, vocab_size - 1, vocab_size // 2, *logits[3:5].argmax(-1).tolist(), int(logits[5].argmin())]
    num_best = min(vocab_size, 20)
    chosen, rank, best_ids, best = logprobs_of(impl, in_wider_rows(logits), token_ids, num_best)
    exact = logits.double().log_softmax(dim=-1)
    # In fp32: the normaliser (<= 4 * 30 + 11) is rounded once, and its sum of 49152 terms loses little; the difference
    # (<= 251) once more.
    tolerance = {"rtol": 0.0, "atol": 3 * 256 * 2.0**-24 if scale > 1 else 3 * 16 * 2.0**-24}
    torch.testing.assert_close(chosen.double(), exact.gather(1, torch.tensor(token_ids)[:, None])[:, 0], **tolerance)
    torch.testing.assert_close(best.double(), exact.sort(descending=True).values[:, :num_best], **tolerance)
    torch.testing.assert_close(best.double(), exact.gather(1, torch.tensor(best_ids)), **tolerance)
    assert all(len(set(ids)) == num_best for ids in best_ids)
    for row, token, place in zip(logits.double().tolist(), token_ids, rank, strict=True):
        assert place == 1 + sum(x > row[token] for x in row)
    assert rank[3:5] == [1, 1]
    assert rank[5] > vocab_size - vocab_size // 4 - 1, "the last, or one of many that tie with it"


@each_implementation("logprobs")
def test_equal_logits_share_the_rank_of_the_first_of_them(impl):
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0, 2.0, -INF]]).expand(7, -1)
    _, rank, best_ids, best = logprobs_of(impl, logits, list(range(7)), 7)
    assert rank == [6, 1, 1, 4, 1, 4, 7]
    assert [set(best_ids[0][:3]), set(best_ids[0][3:5]), best_ids[0][5:]] == [{1, 2, 4}, {3, 5}, [0, 6]]
    assert best[0].tolist() == sorted(best[0].tolist(), reverse=True)


@each_implementation("logprobs")
def test_logits_that_differ_by_less_than_their_logprobs_can_show_have_different_ranks(impl):
    logits = torch.tensor([[100.0, 1e-20, 2e-20]]).expand(3, -1)
    _, rank, best_ids, _ = logprobs_of(impl, logits, [0, 1, 2], 3)
    assert rank == [1, 3, 2]
    assert best_ids == [[0, 2, 1]] * 3


@each_implementation("logprobs")
def test_no_best_are_reported_when_none_are_asked_for(impl):
    logits = random_tensor(3, 50, dtype=torch.float32)
    chosen, rank, best_ids, best = logprobs_of(impl, logits, [4, 5, 6], 0)
    assert best_ids == [[], [], []] and best.shape == (3, 0)
    assert rank == [int((row > row[token]).sum()) + 1 for row, token in zip(logits, (4, 5, 6), strict=True)]
    torch.testing.assert_close(chosen, logits.log_softmax(-1)[range(3), [4, 5, 6]])


@each_implementation("logprobs")
def test_all_of_the_vocabulary_is_reported_when_as_many_are_asked_for(impl):
    logits = random_tensor(2, 63, dtype=torch.float32)
    _, _, best_ids, best = logprobs_of(impl, logits, [0, 1], 63)
    assert [sorted(ids) for ids in best_ids] == [list(range(63))] * 2
    assert best.exp().sum(dim=-1).tolist() == pytest.approx([1.0, 1.0], abs=1e-5)


@each_implementation("logprobs")
def test_an_impossible_token_has_logprob_minus_infinity_and_the_last_rank(impl):
    logits = torch.tensor([[-INF, 0.0, -INF, 0.0], [-INF, -INF, 5.0, -INF]])
    chosen, rank, best_ids, best = logprobs_of(impl, logits, [2, 2], 2)
    assert chosen.tolist() == [-INF, 0.0]
    assert rank == [3, 1]
    assert set(best_ids[0]) == {1, 3} and best_ids[1][0] == 2
    assert best[0].exp().tolist() == pytest.approx([0.5, 0.5]) and best[1].tolist() == [0.0, -INF]


@each_implementation("logprobs")
def test_huge_logits_do_not_overflow(impl):
    chosen, _, _, best = logprobs_of(impl, torch.tensor([[3e4, 3e4, -3e4]]), [0], 3)
    assert chosen.tolist() == pytest.approx([-0.6931], abs=4e-3)  # 3e4 has a spacing of 2e-3 in fp32
    assert best[0, 2].item() == pytest.approx(-6e4 - 0.6931, abs=4e-3)


@each_implementation("logprobs")
def test_logits_are_left_alone_and_no_rows_give_none(impl):
    logits = random_tensor(2, 40, dtype=torch.float32)
    before = logits.clone()
    logprobs_of(impl, logits, [1, 2], 5)
    assert_bitwise(logits, before)
    chosen, rank, best_ids, best = logprobs_of(impl, torch.empty(0, 40), [], 5)
    assert (chosen.shape, rank, best_ids, best.shape) == ((0,), [], [], (0, 5))
