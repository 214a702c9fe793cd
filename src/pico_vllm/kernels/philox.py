"""Philox4x32-10: random numbers that depend on a key and a counter, and on nothing that happened before.

A sample is keyed by (seed, sample index, output position), so batching, preemption, graphs and overlap cannot change
it.
Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"; the known answers are in the tests.
"""

from __future__ import annotations

import torch

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def philox_reference(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Ten rounds on Python integers, 32 bits each."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (product1 >> 32) ^ c1 ^ k0, product1 & _MASK, (product0 >> 32) ^ c3 ^ k1, product0 & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def uniform_reference(seed: int, sample_index: int, position: int) -> float:
    """One number in [0, 1) with 53 random bits."""
    x0, x1, _, _ = philox_reference((position, sample_index, 0, 0), (seed & _MASK, seed >> 32 & _MASK))
    return (x0 << 21 | x1 >> 11) * 2.0**-53


def uniform_cpu(seeds: torch.Tensor, sample_indices: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """``uniform_reference`` over a batch.

    Args:
        seeds: [n] int64, the bits of an unsigned 64-bit seed.
        sample_indices: [n] int64, which of a request's parallel samples.
        positions: [n] int64, index of the token in the output.

    Returns:
        [n] fp64 in [0, 1).
    """
    c0, c1 = positions & _MASK, sample_indices & _MASK
    c2 = c3 = torch.zeros_like(c0)
    k0, k1 = seeds & _MASK, (seeds >> 32) & _MASK
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return ((c0 << 21) | (c1 >> 11)).double() * 2.0**-53


def _multiply(a: torch.Tensor, b: int) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low 32 bits of a 32 x 32 bit product, in int64 without overflow (b is split in 16-bit halves)."""
    upper = a * (b >> 16)  # < 2^48
    lower = a * (b & 0xFFFF)  # < 2^48
    total = (upper & 0xFFFF) * 65536 + lower  # < 2^49
    return (upper >> 16) + (total >> 32), total & _MASK


def derive_seed(engine_seed: int, request_number: int) -> int:
    """A 64-bit seed for a request that names none: another stream of the same generator (last counter word 1)."""
    key = (engine_seed & _MASK, engine_seed >> 32 & _MASK)
    x0, x1, _, _ = philox_reference((request_number & _MASK, request_number >> 32 & _MASK, 0, 1), key)
    return x0 << 32 | x1
