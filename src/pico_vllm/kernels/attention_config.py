"""Launch shapes of the Triton attention: tiles by architecture, and into how many splits a decode's context goes.

All of it is host arithmetic on bounds that a captured CUDA graph keeps, so a replay may have any shorter lengths. Knows
nothing of Triton. A fixed choice for every batch (one entry, one split size) would be made here.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """Shape of the decode kernels.

    Attributes:
        block_n: KV positions of a tile.
        num_warps, num_stages: as Triton means them; programs of few tiles get fewer stages.
        programs_per_sm: contexts are split until there are about so many programs; no more than an SM holds at once.
        max_splits: and into so many splits at most.
        max_groups: for so many pairs of a sequence and a KV head at most; None = any number.
        rotates: decodes are rotated and stored by the kernel that attends, not by one of their own.
    """

    block_n: int
    num_warps: int
    num_stages: int
    programs_per_sm: int
    max_splits: int = 64
    max_groups: int | None = None
    rotates: bool = False


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """Shape of the prefill kernel.

    Attributes:
        block_m: rows of a query tile; a row is one query head of one token.
        block_n: KV positions of a tile.
        num_warps, num_stages: as Triton means them.
        packs_group: a tile holds all query heads of a KV head, of fewer tokens: one read of K and V serves the group,
            and less of the diagonal tiles is masked away. Else a tile holds one query head.
        separates_diagonal: full tiles have a loop of their own, without masks; short contexts do better with one loop.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    packs_group: bool = True
    separates_diagonal: bool = True


@dataclass(frozen=True, slots=True)
class MergeConfig:
    """Shape of the kernel that merges splits.

    Attributes:
        block_rows, block_splits, block_d: rows, splits of each and their elements that a program loads at once.
        num_warps: as Triton means it.
    """

    block_rows: int
    block_splits: int
    block_d: int
    num_warps: int


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """Shapes for one architecture, head_dim and element size.

    Attributes:
        decodes: by growing max_groups.
        short_decodes: the same, where no context is longer than ``SHORT_CONTEXT``.
        prefill: when it has a tile for every SM, or its contexts are long enough to be split.
        short_prefill: when it hasn't.
        merges: by growing block_splits; see ``choose_merge``.
        many_rows_merge: when every SM has that many rows to merge.
        hopper_prefill: the kernel for Hopper does what ``prefill`` is for, wherever it can.
    """

    decodes: tuple[DecodeConfig, ...]
    short_decodes: tuple[DecodeConfig, ...]
    prefill: PrefillConfig
    short_prefill: PrefillConfig
    merges: tuple[MergeConfig, ...] = (
        MergeConfig(block_rows=8, block_splits=4, block_d=128, num_warps=4),
        MergeConfig(block_rows=2, block_splits=16, block_d=128, num_warps=4),
        MergeConfig(block_rows=1, block_splits=64, block_d=32, num_warps=4),
    )
    many_rows_merge: MergeConfig = MergeConfig(block_rows=16, block_splits=2, block_d=128, num_warps=4)
    hopper_prefill: bool = False


@dataclass(frozen=True, slots=True)
class Device:
    """What the choice of a shape depends on; architecture 90 is sm_90."""

    architecture: int
    num_sms: int

    @property
    def launches_early(self) -> bool:
        """It has programmatic dependent launch."""
        return self.architecture >= 90


#: Triton's interpreter: few programs, but more than one split.
_INTERPRETER = Device(architecture=0, num_sms=4)

#: Of a prefill: 16 splits of a row are merged in one step; a split of fewer positions is mostly start and end.
_MAX_PREFILL_SPLITS, _MIN_SPLIT_POSITIONS = 16, 512

#: Decodes of contexts up to this bound have shapes of their own.
SHORT_CONTEXT = 1024
#: Prefills with contexts from this bound on are split rather than given small tiles: 512 new tokens on 8192 take 93 µs
#: in five splits of large tiles, 98 in eight of small ones, 133 unsplit (107 with the kernel for Hopper).
_LONG_CONTEXT = 4096

#: Rows of a query tile of the kernel for Hopper, and from how many on it is faster than small tiles.
HOPPER_BLOCK_M = 128
_HOPPER_MIN_ROWS = 48 * HOPPER_BLOCK_M

#: More groups than an H200 has SMs. Of 128 / 160 / 224 sequences of 100 to 1500 positions a step takes 2,714 / 2,972 /
#: 3,431 µs with the rotation and 2,774 / 3,113 / 3,619 without; of 96 / 128 x 600 it takes 2,211 / 2,384 with it and
#: 2,195 / 2,366 without.
_MANY = (
    DecodeConfig(64, num_warps=4, num_stages=3, programs_per_sm=3, max_splits=1, max_groups=192),
    DecodeConfig(64, num_warps=4, num_stages=3, programs_per_sm=3, max_splits=1, max_groups=448, rotates=True),
    DecodeConfig(32, num_warps=2, num_stages=3, programs_per_sm=4, max_splits=1),
)

#: (architecture, head_dim up to the next power of two, bytes of an element).
_CONFIGS: dict[tuple[int, int, int], AttentionConfig] = {
    # Decodes: by whole captured steps of Qwen2.5-1.5B on an H200 (2 KV heads: two groups a sequence), with contexts of
    # 600 and of 100 to 1500 in one step (benchmarks/results/h200_decode_attention_tuning.txt). A split costs a merge,
    # an idle one 2 µs a layer still: few sequences get one for each tile, many get none, even where lengths differ.
    # Prefills, in µs (h200_attention_tuning.json has every candidate): of 512: 13.2 of short_prefill, 15.2 with a loop
    # of its own for full tiles; of 8192: 464 of prefill, 526 with tiles of 64; see also ``takes_hopper_prefill``.
    (90, 128, 2): AttentionConfig(
        decodes=(
            DecodeConfig(64, num_warps=4, num_stages=2, programs_per_sm=1, max_groups=8, rotates=True),
            DecodeConfig(64, num_warps=4, num_stages=3, programs_per_sm=2, max_groups=64, rotates=True),
            DecodeConfig(128, num_warps=8, num_stages=3, programs_per_sm=1, max_groups=132),
            *_MANY,
        ),
        short_decodes=(
            DecodeConfig(64, num_warps=4, num_stages=2, programs_per_sm=1, max_groups=8, rotates=True),
            DecodeConfig(128, num_warps=8, num_stages=2, programs_per_sm=1, max_splits=5, max_groups=16, rotates=True),
            DecodeConfig(128, num_warps=4, num_stages=2, programs_per_sm=2, max_splits=5, max_groups=32, rotates=True),
            DecodeConfig(128, num_warps=8, num_stages=3, programs_per_sm=1, max_splits=1, max_groups=64, rotates=True),
            DecodeConfig(128, num_warps=8, num_stages=3, programs_per_sm=1, max_splits=1, max_groups=132),
            *_MANY,
        ),
        prefill=PrefillConfig(block_m=128, block_n=64, num_warps=8, num_stages=3),
        short_prefill=PrefillConfig(64, block_n=64, num_warps=4, num_stages=4, separates_diagonal=False),
        hopper_prefill=True,
    ),
    (90, 64, 2): AttentionConfig(
        decodes=(
            DecodeConfig(block_n=128, num_warps=4, num_stages=3, programs_per_sm=2, max_groups=264),
            DecodeConfig(block_n=64, num_warps=4, num_stages=3, programs_per_sm=4),
        ),
        short_decodes=(
            DecodeConfig(block_n=64, num_warps=2, num_stages=3, programs_per_sm=1, max_groups=44),
            DecodeConfig(block_n=64, num_warps=2, num_stages=3, programs_per_sm=1, max_splits=1, max_groups=132),
            DecodeConfig(block_n=64, num_warps=4, num_stages=3, programs_per_sm=4),
        ),
        prefill=PrefillConfig(block_m=64, block_n=128, num_warps=4, num_stages=2),
        short_prefill=PrefillConfig(block_m=64, block_n=64, num_warps=4, num_stages=3),
        hopper_prefill=True,
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
    decode = DecodeConfig(block_n, num_warps=4, num_stages=3, programs_per_sm=4, rotates=True)
    return AttentionConfig((decode,), (decode,), prefill, prefill)


def choose_decode(config: AttentionConfig, num_groups: int, max_seq_len: int) -> DecodeConfig:
    """The first shape that is for so many groups.

    Args:
        config: of the device.
        num_groups: pairs of a sequence and a KV head.
        max_seq_len: bound of the lengths.
    """
    shapes = config.short_decodes if max_seq_len <= SHORT_CONTEXT else config.decodes
    return next(shape for shape in shapes if shape.max_groups is None or num_groups <= shape.max_groups)


def num_kv_splits(shape: DecodeConfig, num_groups: int, max_seq_len: int, num_sms: int) -> int:
    """Splits of each context, each of a tile or more, so that about ``programs_per_sm`` programs an SM decode.

    Programs that run at once share the bandwidth evenly: an SM with one less costs nothing, but a few programs more
    than run at once cost a second wave (64 x 4096 on an H200: 77.0 µs in 384 programs, 88.1 in 512).

    Args:
        shape: of the launch.
        num_groups: pairs of a sequence and a KV head.
        max_seq_len: bound of the lengths.
        num_sms: of the device.
    """
    max_tiles = -(-max_seq_len // shape.block_n)
    return max(1, min(max_tiles, shape.max_splits, shape.programs_per_sm * num_sms // num_groups))


def choose_merge(config: AttentionConfig, num_splits: int, num_rows: int, num_sms: int) -> MergeConfig:
    """The first shape that loads all splits at once, else the last; with one row a program while SMs are idle.

    With many rows on every SM (a prefill that was split) the loads of other rows hide each other's latency.

    Args:
        config: of the device.
        num_splits: of every row.
        num_rows: query heads x tokens.
        num_sms: of the device.
    """
    if num_rows >= num_sms * config.many_rows_merge.block_rows:
        return config.many_rows_merge
    merges = config.merges
    merge = next((merge for merge in merges if merge.block_splits >= num_splits), merges[-1])
    return merge if num_rows >= num_sms * merge.block_rows else dataclasses.replace(merge, block_rows=1)


def choose_prefill(config: AttentionConfig, num_rows: int, max_seq_len: int, num_sms: int) -> PrefillConfig:
    """The large tiles when there is one for every SM, or when splits of long contexts make up for it.

    Args:
        config: of the device.
        num_rows: query heads x tokens of the step.
        max_seq_len: bound of the lengths.
        num_sms: of the device.
    """
    has_work = num_rows >= num_sms * config.prefill.block_m or max_seq_len >= _LONG_CONTEXT
    return config.prefill if has_work else config.short_prefill


def takes_hopper_prefill(
    config: AttentionConfig, shape: PrefillConfig, num_rows: int, device: Device, kv_cache: torch.Tensor
) -> bool:
    """The kernel for Hopper (``attention_prefill_hopper``) takes this prefill: a large one, from a cache it can copy.

    In bf16 with 12 query and 2 KV heads of 128 an H200 takes 11.8 µs instead of 13.1 for 512 new tokens, 18 instead of
    22 for 1024, 31 instead of 44 for 2048, 328 instead of 463 for 8192, 79 instead of 96 for 8 x 1024, 72 instead of 95
    for 512 on 8192.

    Args:
        config, shape: what ``choose_prefill`` chose of what.
        num_rows: query heads x tokens of the step.
        device: it runs on; sm_100 and later don't have Hopper's instructions.
        kv_cache: [num_blocks, 2, num_kv_heads, block_size, head_dim].
    """
    block_size, head_dim = kv_cache.shape[3:]
    return (
        config.hopper_prefill
        and (shape is config.prefill or num_rows >= _HOPPER_MIN_ROWS)
        and device.architecture == 90
        and kv_cache.element_size() == 2
        and head_dim in (64, 128)
        and block_size in (16, 32, 64, 128)
        and kv_cache.is_contiguous()
    )


def num_prefill_splits(num_programs: int, max_seq_len: int, num_sms: int) -> int:
    """Splits of the positions that each query tile sees: the number that should end first.

    Unit of the costs: the time that an SM takes for a position of a tile, 20 ns for 128 rows on an H200 (14 with the
    kernel for Hopper, whose other costs are taken to be the same). A program takes its positions and as long as 256 to
    start and end; partial results, written and read, cost the device 2 a program; the merge as a further kernel costs
    256.

    Args:
        num_programs: query tiles x groups of heads.
        max_seq_len: bound of the lengths.
        num_sms: of the device.
    """

    def cost(num_splits: int) -> float:
        rounds = -(-num_programs * num_splits // num_sms)
        merge = 2 * num_programs * num_splits + 256 if num_splits > 1 else 0
        return rounds * (max_seq_len / num_splits + 256) + merge

    return min(range(1, max(1, min(_MAX_PREFILL_SPLITS, max_seq_len // _MIN_SPLIT_POSITIONS)) + 1), key=cost)
