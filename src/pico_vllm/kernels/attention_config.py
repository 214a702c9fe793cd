"""Launch shapes of the Triton attention: tiles by architecture, and into how many splits a decode's context goes.

All of it is host arithmetic on bounds that a captured CUDA graph keeps, so a replay may have any shorter lengths. Knows
nothing of Triton. A fixed choice for every batch (one entry, one split size) would be made here.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """Shape of the decode kernel.

    Attributes:
        block_n: KV positions of a tile.
        num_warps, num_stages: as Triton means them.
        programs_per_sm: contexts are split until there are about so many programs.
    """

    block_n: int
    num_warps: int
    num_stages: int
    programs_per_sm: int


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """Shape of the prefill kernel.

    Attributes:
        block_m: rows of a query tile; a row is one query head of one token.
        block_n: KV positions of a tile.
        num_warps, num_stages: as Triton means them.
        packs_group: a tile holds all query heads of a KV head, of fewer tokens: one read of K and V serves the group,
            and less of the diagonal tiles is masked away. Else a tile holds one query head.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    packs_group: bool = True


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """Shapes for one architecture, head_dim and element size; ``short_prefill`` when ``prefill`` leaves SMs idle."""

    decode: DecodeConfig
    prefill: PrefillConfig
    short_prefill: PrefillConfig


@dataclass(frozen=True, slots=True)
class Device:
    """What the choice of a shape depends on; architecture 90 is sm_90."""

    architecture: int
    num_sms: int


#: Triton's interpreter: few programs, but more than one split.
_INTERPRETER = Device(architecture=0, num_sms=4)

#: (architecture, head_dim up to the next power of two, bytes of an element).
_CONFIGS: dict[tuple[int, int, int], AttentionConfig] = {
    (90, 128, 2): AttentionConfig(
        decode=DecodeConfig(block_n=64, num_warps=4, num_stages=3, programs_per_sm=3),
        prefill=PrefillConfig(block_m=128, block_n=64, num_warps=8, num_stages=3),
        short_prefill=PrefillConfig(block_m=64, block_n=64, num_warps=4, num_stages=3),
    ),
    (90, 64, 2): AttentionConfig(
        decode=DecodeConfig(block_n=128, num_warps=4, num_stages=3, programs_per_sm=3),
        prefill=PrefillConfig(block_m=128, block_n=64, num_warps=8, num_stages=3),
        short_prefill=PrefillConfig(block_m=64, block_n=64, num_warps=4, num_stages=3),
    ),
}


@functools.cache
def device_of(index: int | None) -> Device:
    """The CUDA device with this index; None = tensors on the CPU, so the interpreter."""
    if index is None:
        return _INTERPRETER
    properties = torch.cuda.get_device_properties(index)
    return Device(10 * properties.major + properties.minor, properties.multi_processor_count)


@functools.cache
def select_config(architecture: int, block_d: int, element_size: int) -> AttentionConfig:
    """The tuned shapes, or ones that fit 99 KB of shared memory (sm_120; every newer data-centre GPU has more)."""
    tuned = _CONFIGS.get((architecture, block_d, element_size))
    if tuned is not None:
        return tuned
    row_bytes = block_d * element_size
    block_n = max(16, min(64, 8192 // row_bytes))
    block_m = min(64, 16384 // row_bytes) if element_size == 2 else 16  # exact fp32 products take many registers
    prefill = PrefillConfig(block_m, block_n, num_warps=4, num_stages=3 if element_size == 2 else 2)
    return AttentionConfig(DecodeConfig(block_n, num_warps=4, num_stages=3, programs_per_sm=4), prefill, prefill)


def num_kv_splits(num_groups: int, max_seq_len: int, block_n: int, num_programs: int) -> int:
    """Splits of each context so that about ``num_programs`` programs decode, each with a tile or more.

    Args:
        num_groups: pairs of a sequence and a KV head.
        max_seq_len: bound of the lengths.
        block_n: positions of a tile.
        num_programs: wanted; enough groups by themselves aren't split.
    """
    max_tiles = -(-max_seq_len // block_n)
    return max(1, min(max_tiles, num_programs // num_groups))


def choose_prefill(config: AttentionConfig, num_rows: int, num_sms: int) -> PrefillConfig:
    """The large tiles when there is one for every SM.

    Args:
        config: of the device.
        num_rows: query heads x tokens of the step.
        num_sms: of the device.
    """
    return config.prefill if num_rows >= num_sms * config.prefill.block_m else config.short_prefill
