# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false
# (a launch takes num_warps and num_stages beside the parameters of the kernel; inside of one, types are Triton's)

"""Sampling in Triton without a sort and without the host: the filters are thresholds, and thresholds can be searched.

Three kernels, in the order of a launch:

1. ``_statistics_kernel`` reads all logits once, in parallel over chunks of the vocabulary: the largest logit of every
   tile of a few neighbours, and the probability mass of the chunk where a row needs it.
2. ``_draw_from_candidates_kernel``, a program a row. The k-th largest of the tile maxima bounds the k-th largest logit
   from below, so the few logits above it hold all that top-k can keep, and nearly always all that top-p and min-p keep.
   They fit into registers; both thresholds are found there by bisection, and the token is drawn.
3. ``_draw_from_row_kernel``, a program a row, for the rows left over: without a filter the chunk's masses lead to the
   token; with one that keeps thousands of tokens (a flat distribution) the bisection runs over the whole row.

Bisection runs over the numbers of the logits' own dtype, so it is exact: at most 16 steps for 16-bit logits, 32 for
fp32. Weights and their sums are fp64, and sums run in a fixed order that depends on the vocabulary alone: a token
depends on its row and on nothing else. A NaN counts as -inf. Contract and formulas are those of ``sampling``; a border
of the CDF may differ from the reference's by the rounding of fp64 sums in another order, about 1e-15.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

_CHUNK = 4096
_MIN_TILE = 16
#: Tile maxima of a row, and candidates: 16 a thread.
_MAX_TILES = 4096
_MAX_CANDIDATES = 4096
#: Without top-k the bound is this one of the tile maxima: top-p sets are seldom larger.
_UNLIMITED_RANK = tl.constexpr(512)
#: Logits that one step of the collection of candidates looks at.
_COLLECTED = 2048
_STATISTICS_WARPS = 4
_ROW_WARPS = 8

_TRITON_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


# --------------------------------------------------------------------------------------- an order of floats as integers
@triton.jit
def _key(number, DTYPE: tl.constexpr):
    """Position of a number among those of DTYPE: monotone, 0 for both zeros; int64."""
    if DTYPE == tl.float32:
        bits = number.to(tl.int32, bitcast=True).to(tl.int64)
        magnitude = bits & 0x7FFFFFFF
    else:
        bits = number.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int64)
        magnitude = bits & 0x7FFF
    return tl.where(bits < 0, -magnitude, magnitude)


@triton.jit
def _number(key, DTYPE: tl.constexpr):
    """The number of DTYPE at a position, as fp32."""
    magnitude = tl.abs(key)
    if DTYPE == tl.float32:
        number = magnitude.to(tl.int32).to(tl.float32, bitcast=True)
    else:
        number = magnitude.to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
    return tl.where(key < 0, -number, number)


@triton.jit
def _lowest_key(DTYPE: tl.constexpr):
    """Key of the lowest finite number; below it is only -inf, which no threshold keeps."""
    if DTYPE == tl.float32:
        key = 0x7F7FFFFF
    elif DTYPE == tl.bfloat16:
        key = 0x7F7F
    else:
        key = 0x7BFF
    return -tl.full((), key, tl.int64)


@triton.jit
def _threshold(values, amounts, target, low, high, DTYPE: tl.constexpr):
    """The largest of ``values`` such that the amounts of those not below it reach ``target``; the lowest if none does.

    ``low`` and ``high`` are keys: bounds of the search. A value below ``low`` is no answer.
    """
    while low < high:
        middle = low + ((high - low + 1) >> 1)
        amount = tl.sum(tl.where(values >= _number(middle, DTYPE), amounts, 0), axis=0)
        if amount >= target:
            low = middle
        else:
            high = middle - 1
        if amount == target:  # nothing between here and the answer
            high = low
    return tl.min(tl.where(values >= _number(low, DTYPE), values, float("inf")), axis=0)


# -------------------------------------------------------------------------------------------------------------- kernels
@triton.jit
def _statistics_kernel(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    tile_maxima_ptr,
    chunk_scores_ptr,
    chunk_masses_ptr,
    row_stride,
    vocab_size,
    num_chunks,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
):
    """tile_maxima = max logit of each tile; chunk_scores = m = max score; chunk_masses = sum exp(score - m).

    Grid: (num_rows * num_chunks,); a program has CHUNK logits as [CHUNK / TILE, TILE]. Past the vocabulary is -inf.
    Masses are fp64, and only computed for rows without top-k: others don't need them.
    """
    row = (tl.program_id(0) // num_chunks).to(tl.int64)
    chunk = tl.program_id(0) % num_chunks
    tile = tl.arange(0, CHUNK // TILE)
    ids = chunk * CHUNK + tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
    logits = tl.load(logits_ptr + row * row_stride + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
    logits = tl.where(logits == logits, logits, float("-inf"))
    maxima = tl.max(logits, axis=1)
    tl.store(tile_maxima_ptr + tl.program_id(0).to(tl.int64) * (CHUNK // TILE) + tile, maxima)

    temperature = tl.load(temperature_ptr + row).to(tl.float32)
    best = tl.div_rn(tl.max(maxima, axis=0), temperature)
    tl.store(chunk_scores_ptr + tl.program_id(0), best)
    top_k = tl.load(top_k_ptr + row).to(tl.int64)
    if (top_k <= 0) | (top_k >= vocab_size):
        scores = tl.div_rn(logits, temperature)
        weights = tl.exp(scores.to(tl.float64) - best.to(tl.float64))
        weights = tl.where(logits > float("-inf"), weights, 0.0)
        tl.store(chunk_masses_ptr + tl.program_id(0), tl.sum(tl.sum(weights, axis=1), axis=0))


@triton.jit
def _draw_from_candidates_kernel(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    uniform_ptr,
    tile_maxima_ptr,
    chunk_scores_ptr,
    chunk_masses_ptr,
    listed_tiles_ptr,
    candidate_logits_ptr,
    candidate_ids_ptr,
    token_ids_ptr,
    row_stride,
    vocab_size,
    num_tiles,
    num_chunks,
    HAS_MIN_P: tl.constexpr,
    DTYPE: tl.constexpr,
    TILE: tl.constexpr,
    TILES_BLOCK: tl.constexpr,
    CHUNKS_BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """token_ids[row] = the token, or -1 where nothing is filtered or tokens outside of the CANDIDATES may be kept.

    Grid: (num_rows,). The candidates are all logits not below a bound, in the order of their ids. Three buffers of the
    row are scratch, written and read by this program alone.
    """
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row).to(tl.float32)
    top_k = tl.load(top_k_ptr + row).to(tl.int64)
    top_p = tl.load(top_p_ptr + row).to(tl.float64)
    min_p = tl.full((), 0.0, tl.float64)
    if HAS_MIN_P:
        min_p = tl.load(min_p_ptr + row).to(tl.float64)
    has_top_k = (top_k > 0) & (top_k < vocab_size)
    token = -1
    if has_top_k | (top_p < 1.0) | (min_p > 0.0):
        # 1. The bound, and the tiles that reach it.
        tile = tl.arange(0, TILES_BLOCK)
        maxima = tl.load(tile_maxima_ptr + row * num_tiles + tile, mask=tile < num_tiles, other=float("-inf"))
        largest = tl.max(maxima, axis=0)
        largest_key = _key(largest, DTYPE)
        smallest = tl.min(tl.where(maxima > float("-inf"), maxima, largest), axis=0)
        rank = tl.where(has_top_k, top_k, _UNLIMITED_RANK)
        one_a_tile = tl.full((TILES_BLOCK,), 1, tl.int32)
        bound = _threshold(maxima, one_a_tile, rank, _key(smallest, DTYPE), largest_key, DTYPE)
        bound = tl.maximum(bound, _number(_lowest_key(DTYPE), DTYPE))
        is_listed = maxima >= bound
        num_listed = tl.sum(is_listed.to(tl.int32), axis=0)
        listed_ptr = listed_tiles_ptr + row * TILES_BLOCK
        tl.store(listed_ptr + tl.cumsum(is_listed.to(tl.int32), axis=0) - 1, tile, mask=is_listed)
        tl.debug_barrier()
        has_all = num_listed < rank  # every tile with a finite logit: then every finite logit is a candidate
        if has_all:
            bound = _number(_lowest_key(DTYPE), DTYPE)

        # 2. The candidates, in the order of ids; counting stops when they don't fit.
        row_ptr = logits_ptr + row * row_stride
        num_candidates = 0
        start = 0
        while (start < num_listed) & (num_candidates <= CANDIDATES):
            slot = start + tl.arange(0, GROUP)
            tiles = tl.load(listed_ptr + slot, mask=slot < num_listed, other=0)
            ids = tiles[:, None] * TILE + tl.arange(0, TILE)[None, :]
            is_id = (slot < num_listed)[:, None] & (ids < vocab_size)
            tile_logits = tl.load(row_ptr + ids, mask=is_id, other=float("-inf")).to(tl.float32)
            is_candidate = tile_logits >= bound
            counted = tl.cumsum(tl.reshape(is_candidate.to(tl.int32), (GROUP * TILE,)), axis=0)
            place = num_candidates + tl.reshape(counted, (GROUP, TILE)) - 1
            fits = is_candidate & (place < CANDIDATES)
            tl.store(candidate_logits_ptr + row * CANDIDATES + place, tile_logits, mask=fits)
            tl.store(candidate_ids_ptr + row * CANDIDATES + place, ids, mask=fits)
            num_candidates += tl.max(counted, axis=0)
            start += GROUP
        tl.debug_barrier()

        # 3. The filters. The result is complete when no token that they keep can be missing.
        if num_candidates <= CANDIDATES:
            position = tl.arange(0, CANDIDATES)
            is_candidate = position < num_candidates
            candidate_ptrs = candidate_logits_ptr + row * CANDIDATES + position
            logits = tl.load(candidate_ptrs, mask=is_candidate, other=float("-inf"))
            scores = tl.div_rn(logits, temperature)
            best = tl.div_rn(largest, temperature).to(tl.float64)
            weights = tl.where(is_candidate, tl.exp(scores.to(tl.float64) - best), 0.0)
            bound_key = _key(bound, DTYPE)
            is_complete = (has_top_k | has_all).to(tl.int32)
            if has_top_k & (top_k < num_candidates):
                one_a_candidate = tl.full((CANDIDATES,), 1, tl.int32)
                smallest = _threshold(logits, one_a_candidate, top_k, bound_key, largest_key, DTYPE)
                weights = tl.where(scores >= tl.div_rn(smallest, temperature), weights, 0.0)
            if top_p < 1.0:
                mass = tl.sum(weights, axis=0)
                target = top_p * mass
                if has_top_k == 0:
                    masses = _chunk_masses(chunk_scores_ptr, chunk_masses_ptr, row, num_chunks, best, CHUNKS_BLOCK)
                    target = top_p * tl.sum(masses, axis=0)
                if mass >= target:
                    smallest = _threshold(logits, weights, target, bound_key, largest_key, DTYPE)
                    weights = tl.where(scores >= tl.div_rn(smallest, temperature), weights, 0.0)
                    is_complete = 1
            if HAS_MIN_P:
                if tl.exp(tl.div_rn(bound, temperature).to(tl.float64) - best) < min_p:
                    is_complete = 1
                weights = tl.where(weights >= min_p, weights, 0.0)
            if is_complete == 1:
                cumulative = tl.cumsum(weights, axis=0)
                target = _point_of(tl.load(uniform_ptr + row), tl.max(cumulative, axis=0))
                drawn = _first_above(cumulative, weights, target, position, CANDIDATES)
                token = tl.load(candidate_ids_ptr + row * CANDIDATES + drawn, mask=num_candidates > 0, other=0)
    tl.store(token_ids_ptr + row, token.to(tl.int64))


@triton.jit
def _draw_from_row_kernel(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    uniform_ptr,
    chunk_scores_ptr,
    chunk_masses_ptr,
    token_ids_ptr,
    row_stride,
    vocab_size,
    num_chunks,
    HAS_MIN_P: tl.constexpr,
    DTYPE: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS_BLOCK: tl.constexpr,
):
    """token_ids[row], where it is -1: drawn from the whole row, chunk by chunk.

    Grid: (num_rows,). With a filter, the thresholds are bisected with a pass over the row a step, and the masses of the
    chunks are computed anew from what is kept.
    """
    row = tl.program_id(0).to(tl.int64)
    if tl.load(token_ids_ptr + row) < 0:
        temperature = tl.load(temperature_ptr + row).to(tl.float32)
        top_k = tl.load(top_k_ptr + row).to(tl.int64)
        top_p = tl.load(top_p_ptr + row).to(tl.float64)
        has_top_k = (top_k > 0) & (top_k < vocab_size)
        chunk = tl.arange(0, CHUNKS_BLOCK)
        is_chunk = chunk < num_chunks
        chunk_scores = tl.load(chunk_scores_ptr + row * num_chunks + chunk, mask=is_chunk, other=float("-inf"))
        best = tl.max(chunk_scores, axis=0).to(tl.float64)
        row_ptr = logits_ptr + row * row_stride

        least_score = tl.full((), float("-inf"), tl.float32)
        least_weight = tl.full((), 0.0, tl.float64)
        if HAS_MIN_P:
            least_weight = tl.load(min_p_ptr + row).to(tl.float64)
        if has_top_k:
            low, high = _lowest_key(DTYPE), -_lowest_key(DTYPE)
            while low < high:
                middle = low + ((high - low + 1) >> 1)
                if _count(row_ptr, vocab_size, _number(middle, DTYPE), CHUNK) >= top_k:
                    low = middle
                else:
                    high = middle - 1
            least_score = tl.div_rn(_number(low, DTYPE), temperature)
        if top_p < 1.0:
            low, high = _lowest_key(DTYPE), -_lowest_key(DTYPE)
            every = _number(low, DTYPE)
            target = top_p * _mass(row_ptr, vocab_size, every, temperature, best, least_score, CHUNK)
            while low < high:
                middle = low + ((high - low + 1) >> 1)
                mass = _mass(row_ptr, vocab_size, _number(middle, DTYPE), temperature, best, least_score, CHUNK)
                if mass >= target:
                    low = middle
                else:
                    high = middle - 1
            least_score = tl.maximum(least_score, tl.div_rn(_number(low, DTYPE), temperature))
        if (least_score > float("-inf")) | (least_weight > 0.0):
            for c in range(0, num_chunks):
                ids = c * CHUNK + tl.arange(0, CHUNK)
                _, weights = _kept_weights(row_ptr, ids, vocab_size, temperature, best, least_score, least_weight)
                tl.store(chunk_masses_ptr + row * num_chunks + c, tl.sum(weights, axis=0))
                tl.store(chunk_scores_ptr + row * num_chunks + c, best.to(tl.float32))
            tl.debug_barrier()

        masses = _chunk_masses(chunk_scores_ptr, chunk_masses_ptr, row, num_chunks, best, CHUNKS_BLOCK)
        cumulative = tl.cumsum(masses, axis=0)
        target = _point_of(tl.load(uniform_ptr + row), tl.max(cumulative, axis=0))
        drawn_chunk = _first_above(cumulative, masses, target, chunk, CHUNKS_BLOCK)
        before = tl.sum(tl.where(chunk < drawn_chunk, masses, 0.0), axis=0)
        position = tl.arange(0, CHUNK)
        ids = drawn_chunk * CHUNK + position
        _, weights = _kept_weights(row_ptr, ids, vocab_size, temperature, best, least_score, least_weight)
        drawn = _first_above(before + tl.cumsum(weights, axis=0), weights, target, position, CHUNK)
        tl.store(token_ids_ptr + row, (drawn_chunk * CHUNK + drawn).to(tl.int64))


# ------------------------------------------------------------------------------------------------ parts of the kernels
@triton.jit
def _chunk_masses(chunk_scores_ptr, chunk_masses_ptr, row, num_chunks, best, CHUNKS_BLOCK: tl.constexpr):
    """Masses of the row's chunks relative to its best score, [CHUNKS_BLOCK] fp64."""
    chunk = tl.arange(0, CHUNKS_BLOCK)
    scores = tl.load(chunk_scores_ptr + row * num_chunks + chunk, mask=chunk < num_chunks, other=float("-inf"))
    masses = tl.load(chunk_masses_ptr + row * num_chunks + chunk, mask=chunk < num_chunks, other=0.0)
    return tl.where(masses > 0.0, masses * tl.exp(scores.to(tl.float64) - best), 0.0)


@triton.jit
def _point_of(uniform, total):
    """uniform * total, but below total where the product rounds up to it: total - total / 2^53 is the number before."""
    return tl.minimum(uniform * total, total - total * (1.0 / 9007199254740992.0))


@triton.jit
def _first_above(cumulative, weights, target, position, SIZE: tl.constexpr):
    """First position with a weight whose cumulative sum exceeds target; the last with a weight if rounding hides it."""
    first = tl.min(tl.where((cumulative > target) & (weights > 0.0), position, SIZE), axis=0)
    last = tl.max(tl.where(weights > 0.0, position, 0), axis=0)
    return tl.minimum(first, last)


@triton.jit
def _kept_weights(row_ptr, ids, vocab_size, temperature, best, least_score, least_weight):
    """Logits of the ids (-inf past the vocabulary) and their weights, 0 where they aren't kept."""
    logits = tl.load(row_ptr + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
    scores = tl.div_rn(logits, temperature)
    weights = tl.exp(scores.to(tl.float64) - best)
    is_kept = (logits > float("-inf")) & (scores >= least_score) & (weights >= least_weight)
    return logits, tl.where(is_kept, weights, 0.0)


@triton.jit
def _count(row_ptr, vocab_size, least_logit, CHUNK: tl.constexpr):
    """How many logits of a row are not below least_logit."""
    counts = tl.zeros((CHUNK,), tl.int32)
    for start in range(0, vocab_size, CHUNK):
        ids = start + tl.arange(0, CHUNK)
        logits = tl.load(row_ptr + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
        counts += (logits >= least_logit).to(tl.int32)
    return tl.sum(counts, axis=0)


@triton.jit
def _mass(row_ptr, vocab_size, least_logit, temperature, best, least_score, CHUNK: tl.constexpr):
    """Mass of the logits of a row that are not below least_logit and whose scores are not below least_score."""
    masses = tl.zeros((CHUNK,), tl.float64)
    for start in range(0, vocab_size, CHUNK):
        ids = start + tl.arange(0, CHUNK)
        logits, weights = _kept_weights(row_ptr, ids, vocab_size, temperature, best, least_score, 0.0)
        masses += tl.where(logits >= least_logit, weights, 0.0)
    return tl.sum(masses, axis=0)


# --------------------------------------------------------------------------------------------------------------- launch
class _Shape(NamedTuple):
    """How a vocabulary is cut."""

    chunk: int
    num_chunks: int
    tile: int
    num_tiles: int
    candidates: int


def _shape(vocab_size: int) -> _Shape:
    padded = max(triton.next_power_of_2(vocab_size), _MIN_TILE)
    chunk = min(_CHUNK, padded)
    tile = min(max(triton.next_power_of_2(triton.cdiv(vocab_size, _MAX_TILES)), _MIN_TILE), chunk)
    num_chunks = triton.cdiv(vocab_size, chunk)
    return _Shape(chunk, num_chunks, tile, num_chunks * (chunk // tile), min(_MAX_CANDIDATES, padded))


def sample_triton(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    uniform: torch.Tensor,
    min_p: torch.Tensor | None = None,
) -> torch.Tensor:
    """``sample_reference`` in three kernels; never waits for the device. Rows are contiguous, their stride is free."""
    num_rows, vocab_size = logits.shape
    device = logits.device
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=device)
    if num_rows == 0:
        return token_ids
    shape, dtype = _shape(vocab_size), _TRITON_DTYPES[logits.dtype]
    tiles_block, chunks_block = triton.next_power_of_2(shape.num_tiles), triton.next_power_of_2(shape.num_chunks)
    tile_maxima = torch.empty((num_rows, shape.num_tiles), dtype=torch.float32, device=device)
    chunk_scores = torch.empty((num_rows, shape.num_chunks), dtype=torch.float32, device=device)
    chunk_masses = torch.empty((num_rows, shape.num_chunks), dtype=torch.float64, device=device)
    _statistics_kernel[(num_rows * shape.num_chunks,)](
        logits,
        temperature,
        top_k,
        tile_maxima,
        chunk_scores,
        chunk_masses,
        logits.stride(0),
        vocab_size,
        shape.num_chunks,
        CHUNK=shape.chunk,
        TILE=shape.tile,
        num_warps=_STATISTICS_WARPS,
    )
    parameters = (temperature, top_k, top_p, top_p if min_p is None else min_p, uniform)
    _draw_from_candidates_kernel[(num_rows,)](
        logits,
        *parameters,
        tile_maxima,
        chunk_scores,
        chunk_masses,
        torch.empty((num_rows, tiles_block), dtype=torch.int32, device=device),
        torch.empty((num_rows, shape.candidates), dtype=torch.float32, device=device),
        torch.empty((num_rows, shape.candidates), dtype=torch.int32, device=device),
        token_ids,
        logits.stride(0),
        vocab_size,
        shape.num_tiles,
        shape.num_chunks,
        HAS_MIN_P=min_p is not None,
        DTYPE=dtype,
        TILE=shape.tile,
        TILES_BLOCK=tiles_block,
        CHUNKS_BLOCK=chunks_block,
        GROUP=max(min(_COLLECTED // shape.tile, tiles_block), 1),
        CANDIDATES=shape.candidates,
        num_warps=_ROW_WARPS,
    )
    _draw_from_row_kernel[(num_rows,)](
        logits,
        *parameters,
        chunk_scores,
        chunk_masses,
        token_ids,
        logits.stride(0),
        vocab_size,
        shape.num_chunks,
        HAS_MIN_P=min_p is not None,
        DTYPE=dtype,
        CHUNK=shape.chunk,
        CHUNKS_BLOCK=chunks_block,
        num_warps=_ROW_WARPS,
    )
    return token_ids
