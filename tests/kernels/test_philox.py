import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernel_implementations import each_implementation
from pico_vllm.kernels.philox import derive_seed, philox_reference, uniform_reference

WORD = st.integers(0, 2**32 - 1)
# The first words of Random123's known answers for counter and key 0, as 53 bits.
UNIFORM_OF_ZERO = (0x6627E8D5 << 21 | 0xE169C58D >> 11) * 2.0**-53


def as_int64(seed: int) -> int:
    return seed - 2**64 if seed >= 2**63 else seed


def call(impl, seeds: list[int], sample_indices: list[int], positions: list[int]) -> torch.Tensor:
    arguments = ([as_int64(seed) for seed in seeds], sample_indices, positions)
    return impl.op(*(torch.tensor(values, dtype=torch.int64, device=impl.device) for values in arguments)).cpu()


@pytest.mark.parametrize(
    "counter, key, expected",
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_philox_gives_the_known_answers_of_random123(counter, key, expected):
    assert philox_reference(counter, key) == expected


def test_scalar_uniform_takes_53_bits_of_the_first_two_words():
    assert uniform_reference(0, 0, 0) == UNIFORM_OF_ZERO
    x0, x1, _, _ = philox_reference((3, 2, 0, 0), (0x89ABCDEF, 0x01234567))
    assert uniform_reference(0x0123456789ABCDEF, 2, 3) == (x0 * 2**21 + x1 // 2**11) / 2**53


@each_implementation("uniform")
def test_uniform_of_zero_is_the_known_answer(impl):
    assert call(impl, [0], [0], [0]).tolist() == [UNIFORM_OF_ZERO]


@each_implementation("uniform")
def test_uniform_equals_the_scalar_one_for_large_seeds_and_counters(impl):
    seeds = [0, 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**63 + 1, 2**64 - 1, 0xDEADBEEFCAFEF00D]
    counters = [0, 1, 2**16, 2**31, 2**32 - 1]
    cases = [(seed, sample, position) for seed in seeds for sample in counters for position in counters]
    assert call(impl, *map(list, zip(*cases, strict=True))).tolist() == [uniform_reference(*case) for case in cases]


@each_implementation("uniform")
@given(rows=st.lists(st.tuples(st.integers(0, 2**64 - 1), WORD, WORD), min_size=1, max_size=40))
def test_uniform_equals_the_scalar_one_for_any_batch(impl, rows):
    assert call(impl, *map(list, zip(*rows, strict=True))).tolist() == [uniform_reference(*row) for row in rows]


@each_implementation("uniform")
def test_uniform_numbers_are_in_0_1_and_evenly_spread(impl):
    n = 200_000
    u = call(impl, [2**63 + 5] * n, [0] * n, list(range(n)))
    assert u.dtype == torch.float64
    assert u.min() >= 0.0 and u.max() < 1.0
    assert abs(u.mean().item() - 1 / 2) < 3 * (1 / 12 / n) ** 0.5
    assert abs(u.var().item() - 1 / 12) < 3 * (1 / 180 / n) ** 0.5
    counts = u.mul(100).long().bincount(minlength=100)
    chi_square = ((counts - n / 100) ** 2 / (n / 100)).sum().item()
    assert chi_square < 148.2  # 99 degrees of freedom: more in 1 of 1000 generators
    neighbours = torch.corrcoef(torch.stack((u[:-1], u[1:])))[0, 1].item()
    assert abs(neighbours) < 3 * n**-0.5


@pytest.mark.parametrize("vary", ["seed", "sample_index", "position"])
@each_implementation("uniform")
def test_each_part_of_the_key_makes_another_number(impl, vary):
    n = 10_000
    columns = {"seed": [7] * n, "sample_index": [1] * n, "position": [2] * n, vary: list(range(n))}
    assert len(set(call(impl, *columns.values()).tolist())) == n


@each_implementation("uniform")
def test_upper_half_of_the_seed_matters(impl):
    u = call(impl, [5, 5 + 2**32, 5 + 2**63], [0] * 3, [0] * 3)
    assert len(set(u.tolist())) == 3


@each_implementation("uniform")
def test_number_depends_on_nothing_else_in_the_batch(impl):
    seeds, samples, positions = [3, 2**63, 9], [0, 1, 0], [5, 5, 77]
    together = call(impl, seeds, samples, positions)
    alone = [call(impl, [s], [i], [p]).item() for s, i, p in zip(seeds, samples, positions, strict=True)]
    reverse = call(impl, seeds[::-1], samples[::-1], positions[::-1])
    assert together.tolist() == alone == reverse.tolist()[::-1]


def test_derived_seeds_are_distinct_64_bit_numbers():
    engine_seeds = [0, 1, 42, 2**32, 2**63, 2**64 - 1]
    request_numbers = [*range(3000), 2**32, 2**32 + 1, 2**40]
    seeds = [derive_seed(e, r) for e in engine_seeds for r in request_numbers]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert max(seeds) >= 2**63 and min(seeds) < 2**61  # all 64 bits are used


def test_derived_seed_is_another_stream_than_the_samples():
    x0, x1, _, _ = philox_reference((5, 0, 0, 1), (7, 0))
    assert derive_seed(7, 5) == x0 * 2**32 + x1
    assert (derive_seed(7, 5) >> 11) * 2.0**-53 != uniform_reference(7, 0, 5)
